"""What a loss gives: a value, a gradient, and a factor of its Hessian, of one example."""

import abc
from typing import ClassVar, get_args, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._sharding import is_here
from .._common._tree import ravel_pytree
from ._factors import AbstractFactor, DenseFactor, DiagonalFactor


Reduction = Literal["sum", "mean"]


class AbstractLoss(eqx.Module):
    r"""A loss of a model's outputs, of *one example*, convex in them.

    A loss of your own needs the function `value`, and the field `reduction`; gradient and
    Hessian come by automatic differentiation. Then a Hessian of c x c numbers is built
    and factorised for each example of c outputs: for a loss that is a sum over its
    outputs subclass [`gnlin.authoring.AbstractElementwiseLoss`][], or give `gradient` and
    `factor` in closed form. Where the loss is not convex its negative curvature counts as
    none.

    **Attributes:**

    - `reduction`: over the examples, `"sum"` or `"mean"` (with weights: the weighted
        mean); by default the mean in [`gnlin.fit`][], and the sum of least squares in
        [`gnlin.solve`][]. Damping and learning rate refer to the loss as reduced.

    !!! example

        ```python
        class Hinge(gnlin.authoring.AbstractLoss):
            "Crammer and Singer's, smoothed."
            reduction: str | None = None

            def value(self, outputs, target):
                margin = jnp.where(jnp.arange(outputs.size) == target, 0.0, 1.0)
                return jax.nn.logsumexp(outputs + margin) - outputs[target]
        ```
    """

    reduction: AbstractVar[Reduction | None]
    # Whether the second-order expansion is the loss itself.
    is_quadratic: ClassVar[bool] = False

    def __check_init__(self):
        if self.reduction not in (None, *get_args(Reduction)):
            raise ValueError(
                '`reduction` must be "sum" or "mean", or None for the default, but '
                f"{self.reduction!r} was given."
            )

    def reduced(self, default: Reduction) -> "AbstractLoss":
        """The same loss, with a `reduction` where it has none."""
        if self.reduction is not None:
            return self
        return eqx.tree_at(
            lambda loss: loss.reduction, self, default, is_leaf=lambda x: x is None
        )

    @abc.abstractmethod
    def value(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        """The loss of one example."""

    def gradient(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        """Its derivative by the outputs."""
        return jax.grad(self.value)(outputs, target)

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> AbstractFactor:
        r"""A factor $R$ of its second derivative by the outputs, $R^\top R$."""
        flat, unravel = ravel_pytree(outputs)
        hessian = jax.hessian(lambda o: self.value(unravel(o), target))(flat)
        return DenseFactor(hessian, jnp.abs(self.value(outputs, target)))

    def decrease(
        self, outputs: PyTree[Array], new_outputs: PyTree[Array], target: PyTree[Array]
    ) -> Scalar:
        """By how much the loss falls from one output to another; where both nearly agree
        a closed form may know it to more digits than the difference of the values."""
        return self.value(outputs, target) - self.value(new_outputs, target)

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        """Residuals, in the outputs' structure, of which half the sum of squares is the
        loss; `ValueError` if there are none."""
        raise ValueError(
            f"`gnlin.{type(self).__name__}` is no sum of squares, which is all that "
            "solvers other than gnlin's know: use one of gnlin's."
        )

    def target_weights(self, target: PyTree[Array]) -> Float[Array, "..."]:
        """What each target of one example counts in a mean: an example as one, unless it
        is a sequence."""
        return jnp.ones(())

    def check(
        self, outputs: PyTree[jax.ShapeDtypeStruct], targets: PyTree[Array]
    ) -> None:
        """Raise `ValueError` if these cannot be targets of a batch of such outputs."""


class AbstractElementwiseLoss(AbstractLoss):
    """A loss that is a sum over the outputs of a function of each and its target.

    A loss of your own needs that function, `elementwise`, and the field `reduction`.
    Targets have the outputs' structure and shapes.

    !!! example

        ```python
        class Quartic(gnlin.authoring.AbstractElementwiseLoss):
            reduction: str | None = None

            def elementwise(self, output, target):
                return (output - target) ** 4 / 4
        ```
    """

    @abc.abstractmethod
    def elementwise(self, output: Array, target: Array) -> Array:
        """The loss of each output."""

    def derivative(self, output: Array, target: Array) -> Array:
        """Its first derivative by the output."""
        return _derivative(lambda o: self.elementwise(o, target), output)

    def root(self, output: Array, target: Array) -> Array:
        """The square root of its second derivative."""
        curvature = _derivative(lambda o: self.derivative(o, target), output)
        return jnp.sqrt(jnp.maximum(curvature, 0))

    @property
    def unit(self) -> float:
        """What counts as one unit of the loss."""
        return 1.0

    def value(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        each = jax.tree.map(self.elementwise, outputs, as_outputs(target, outputs))
        return _tree.total(each, _tree.dtype(outputs))

    def gradient(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(self.derivative, outputs, as_outputs(target, outputs))

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> AbstractFactor:
        root = jax.tree.map(self.root, outputs, as_outputs(target, outputs))
        return DiagonalFactor(root, self.unit)

    def check(
        self, outputs: PyTree[jax.ShapeDtypeStruct], targets: PyTree[Array]
    ) -> None:
        expected = jax.tree.map(lambda f: f.shape, outputs)
        given = jax.tree.map(lambda t: t.shape, targets)
        if expected != given:
            raise ValueError(
                f"The targets must have the shape of the model's outputs, {expected}, "
                f"but have {given}; reshape them, or for labels use "
                "`gnlin.SoftmaxCrossEntropy()`."
            )


def as_outputs(target: PyTree[Array], outputs: PyTree[Array]) -> PyTree[Array]:
    """Whole counts of 64 bits would make everything double precision."""
    return jax.tree.map(lambda t, f: t.astype(f.dtype), target, outputs)


def check_loss(loss: object) -> None:
    if not isinstance(loss, AbstractLoss):
        raise ValueError(
            "`loss` must be one of gnlin's, such as `gnlin.SoftmaxCrossEntropy()`, or a "
            f"subclass of `gnlin.authoring.AbstractLoss`, but {loss!r} was given."
        )


def _derivative(fn, x: Array) -> Array:
    """Of a function that acts on each element by itself."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def check_between(
    name: str, values: PyTree, least: float | int, most: float | int
) -> None:
    """Traced values pass: they are not known yet. So do those of another process."""
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, Tracer) or not is_here(leaf):
            continue
        wrong = np.asarray(leaf)
        wrong = wrong[~((wrong >= least) & (wrong <= most))]
        if wrong.size > 0:
            raise ValueError(
                f"The {name} must lie between {least:g} and {most:g}, but one is "
                f"{wrong[0]:g}."
            )
