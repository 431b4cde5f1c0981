"""The interface of losses: value, gradient and a factor of the Hessian."""

import abc
import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jax.core import Tracer
from jax.scipy.special import gammaln, xlogy
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_scalar, check_one_of
from .._common._complex import check_real
from .._common._sharding import is_here
from .._common._tree import ravel_pytree
from ._factors import AbstractFactor, DenseFactor, DiagonalFactor


Reduction = Literal["sum", "mean"]


class AbstractLoss(eqx.Module):
    """A convex loss of a model's outputs for *one example*, as a group without data is.

    A subclass must define the method `value` and the field `reduction`. By default,
    gradient and Hessian come from automatic differentiation, and a c x c Hessian is
    factorised for each example with c outputs. To avoid this, define `gradient` and
    `factor` in closed form, or subclass [`gnlin.authoring.AbstractElementwiseLoss`][] if
    the loss is a sum over outputs. If the loss is not convex, steps take negative
    curvature as zero. A piecewise linear loss has no curvature: round its kinks.

    **Attributes:**

    - `reduction`: the `"sum"` or the `"mean"` over examples (the weighted mean, if there
        are weights). By default the mean in [`gnlin.fit`][] and the sum in
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
    # Whether the loss equals its second-order expansion in the outputs
    is_quadratic: ClassVar[bool] = False
    # Names of numbers that a compiled program takes as arguments
    _numbers: ClassVar[tuple[str, ...]] = ()
    # The name of a field that may have a number for each target
    _of_each: ClassVar[str | None] = None

    def __check_init__(self):
        if self.reduction is not None:
            check_one_of("reduction", self.reduction, get_args(Reduction))

    def __repr__(self) -> str:
        return _tree.in_words(self)

    def as_arguments(self) -> "AbstractLoss":
        """Return the loss with its numbers as arrays, so that a program that takes it is
        not compiled again for other numbers."""
        if not self._numbers:
            return self
        numbers = lambda loss: [getattr(loss, name) for name in self._numbers]
        arrays = list(map(as_scalar, numbers(self)))
        return eqx.tree_at(numbers, self, arrays, is_leaf=lambda x: x is None)

    def reduced(self, default: Reduction) -> "AbstractLoss":
        """Return the loss with `default` as its reduction if it has none."""
        return with_reduction(self, default) if self.reduction is None else self

    @abc.abstractmethod
    def value(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        """Return the loss of one example."""

    def _number(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        value = self.value(outputs, target)
        if (got := jnp.shape(value)) != ():
            raise ValueError(
                f"`value` of {type(self).__name__} must return one number, the loss of "
                f"one example (a group without data is one), but returns the shape {got} "
                f"for outputs of the shape {_tree.listed_shapes(outputs)}: sum over all."
            )
        return value

    def gradient(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        """Return the derivative with respect to the outputs."""
        return jax.grad(self._number)(outputs, target)

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> AbstractFactor:
        r"""Return a factor $R$ of the Hessian in the outputs, $R^\top R$."""
        flat, unravel = ravel_pytree(outputs)
        hessian = jax.hessian(lambda o: self._number(unravel(o), target))(flat)
        return DenseFactor(hessian, jnp.abs(self.value(outputs, target)))

    def decrease(
        self, outputs: PyTree[Array], new_outputs: PyTree[Array], target: PyTree[Array]
    ) -> Scalar:
        """Return by how much the loss falls. For nearly equal outputs, a closed form can
        be more precise than the difference of the values."""
        return self.value(outputs, target) - self.value(new_outputs, target)

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        """Return residuals, with the outputs' structure, such that half their sum of
        squares is the loss; raise `ValueError` if there are none."""
        raise ValueError(
            f"`{type(self).__name__}` is not a sum of squares, which solvers of other "
            "libraries and optimistix's derivatives require: use one of gnlin's solvers, "
            "and for derivatives `adjoint=gnlin.methods.ImplicitAdjoint()`."
        )

    def target_weights(self, target: PyTree[Array]) -> Float[Array, "..."]:
        """Return the weight in a mean of each target of one example. By default, the
        example is one target of weight 1."""
        return jnp.ones(())

    def left_out(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        """Return the constant that the value of one example leaves out of a negative
        log-likelihood."""
        return jnp.zeros((), _tree.dtype(outputs))

    @property
    def has_observed_factor(self) -> bool:
        """Whether `factor` is that of the Hessian without its negative part, and not of
        an expected Hessian, which a loss may define."""
        return type(self).factor is AbstractLoss.factor

    def check(
        self, outputs: PyTree[jax.ShapeDtypeStruct], targets: PyTree[Array]
    ) -> None:
        """Raise `ValueError` if the targets do not suit outputs of these shapes, both of
        several examples."""


class AbstractElementwiseLoss(AbstractLoss):
    """A loss that is a sum over outputs: each output has its own target.

    A subclass must define the method `elementwise` and the field `reduction`. Targets
    have the outputs' structure and shapes.

    !!! example

        ```python
        class Quartic(gnlin.authoring.AbstractElementwiseLoss):
            reduction: str | None = None

            def elementwise(self, output, target):
                return (output - target) ** 4 / 4
        ```
    """

    # The name of the targets, and their smallest and largest valid value; or None
    _targets: ClassVar[tuple[str, float, float] | None] = None

    @abc.abstractmethod
    def elementwise(self, output: Array, target: Array) -> Array:
        """Return the loss of each output."""

    def _each(self, output: Array, target: Array) -> Array:
        each = self.elementwise(output, target)
        if jnp.shape(each) != output.shape or not jnp.issubdtype(
            jnp.result_type(each), jnp.floating
        ):
            raise ValueError(
                f"`elementwise` of {type(self).__name__} must return a floating-point "
                f"loss for each output, in their shape {output.shape}, but returns "
                f"{jnp.result_type(each)} of the shape {jnp.shape(each)}."
            )
        return each

    def derivative(self, output: Array, target: Array) -> Array:
        """Return the first derivative with respect to each output."""
        return _derivative(lambda o: self._each(o, target), output)

    def root(self, output: Array, target: Array) -> Array:
        """Return the square root of the second derivative."""
        curvature = _derivative(lambda o: self.derivative(o, target), output)
        convex = curvature > 0  # elsewhere the derivative of the root would be NaN
        return jnp.where(convex, jnp.sqrt(jnp.where(convex, curvature, 1)), 0)

    def saturated(self, target: Array) -> Array:
        """Return the term that the loss leaves out of a negative log-likelihood: for each
        target, the log-likelihood of the saturated model, whose outputs fit the targets
        best."""
        return jnp.zeros_like(target)

    def mean(self, output: Array) -> Array:
        """Return the expected target of each output. A plot of a fit has its units."""
        return output

    def cdf(
        self, output: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities of a value below each target, and of a value of at
        most the target; for a censored value, the bounds on the latter. Without this
        method a fit has no runs test."""
        raise NotImplementedError

    @property
    def unit(self) -> ScalarLike:
        """The scale of the loss, used to recognise steep outputs with tiny curvature."""
        return 1.0

    def value(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        each = jax.tree.map(self._each, outputs, as_outputs(target, outputs))
        return _tree.total(each, _tree.dtype(outputs))

    def gradient(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(self.derivative, outputs, as_outputs(target, outputs))

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> AbstractFactor:
        root = jax.tree.map(self.root, outputs, as_outputs(target, outputs))
        return DiagonalFactor(root, jnp.asarray(self.unit, _tree.dtype(root)))

    def left_out(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        each = jax.tree.map(self.saturated, as_outputs(target, outputs))
        return _tree.total(each, _tree.dtype(outputs))

    @property
    def has_observed_factor(self) -> bool:
        is_inherited = type(self).factor is AbstractElementwiseLoss.factor
        return is_inherited and has_observed_root(self)

    def check(self, outputs, targets) -> None:
        check_shapes(outputs, targets)
        check_numbers(self, targets)
        if self._targets is not None:
            name, least, most = self._targets
            check_between(name, targets, least, most)


def cdf_of_counts(counts: Any, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `cdf` of a distribution of SciPy over whole numbers."""
    return counts.cdf(np.ceil(target) - 1), counts.cdf(target)


def xlogx(x: Array) -> Array:
    """Return x log x. Its slope at zero is infinite, and would make other derivatives
    NaN. It is taken as 0 there, because it cancels between a loss and the term that the
    loss leaves out."""
    return xlogy(x, jnp.where(x > 0, x, 1))


def stirling_rest(number: Array) -> Array:
    """Return log n! minus Stirling's approximation n log n - n, without cancellation."""
    is_large = number > 10
    large, small = jnp.where(is_large, number, 10), jnp.where(is_large, 1, number)
    rest = 1 / (12 * large) - 1 / (360 * large**3) + 1 / (1260 * large**5)
    exact = gammaln(small + 1) - xlogx(small) + small
    return jnp.where(is_large, 0.5 * jnp.log(2 * jnp.pi * large) + rest, exact)


def has_observed_root(loss: AbstractElementwiseLoss) -> bool:
    """Whether `root` is the root of the observed curvature, and not of an expected
    one."""
    return type(loss).root is AbstractElementwiseLoss.root


def numbers_of(loss: AbstractLoss) -> Any:
    """Return the numbers that may be one for each target, or `None`."""
    return None if loss._of_each is None else getattr(loss, loss._of_each)


def with_numbers(loss: AbstractLoss, numbers: Array) -> AbstractLoss:
    return eqx.tree_at(numbers_of, loss, numbers)


def in_targets(loss: AbstractLoss) -> str:
    """Return, in words, what to do with numbers that are not those of one array."""
    return (
        "write a loss of your own, a `gnlin.authoring.AbstractLoss`, whose targets hold "
        f'them, such as `{{"y": y, "{loss._of_each}": {loss._of_each}}}`'
    )


def check_numbers(loss: AbstractLoss, targets: PyTree[Array]) -> None:
    """Raise `ValueError` unless the numbers of a loss have the shape of one example's
    targets, or of its last axes."""
    shape, name = np.shape(numbers_of(loss)), loss._of_each
    for of_all in (leaf.shape for leaf in jax.tree.leaves(targets) if shape):
        if shape == of_all[1:][-len(shape) :]:
            continue
        own = in_targets(loss)
        if shape == of_all:
            raise ValueError(
                f"`{name}` of the shape of all targets, {shape}, needs one array of "
                f"targets at hand, not batches that are drawn or read: {own}."
            )
        raise ValueError(
            f"`{name}` must be one number, or have the shape of the targets, {of_all}, "
            f"or of those of one example, {of_all[1:]}, but has the shape {shape}; if it "
            f"differs between batches or several arrays, {own}."
        )


def as_outputs(target: PyTree[Array], outputs: PyTree[Array]) -> PyTree[Array]:
    """Cast targets to the outputs' dtypes: 64-bit integers would promote to float64."""
    check_real("The targets", target)
    return jax.tree.map(lambda t, f: t.astype(f.dtype), target, outputs)


def total_of_each(
    fn: Callable[[Array, Array, Array], Array],
    outputs: PyTree[Array],
    new_outputs: PyTree[Array],
    target: PyTree[Array],
) -> Scalar:
    """Return the sum over all outputs of `fn(output, new_output, target)`."""
    each = jax.tree.map(fn, outputs, new_outputs, as_outputs(target, outputs))
    return _tree.total(each, _tree.dtype(outputs))


def with_reduction(loss: AbstractLoss, reduction: Reduction) -> AbstractLoss:
    """Return a loss with another reduction, even if it has its own `__init__` or a static
    field."""
    loss = copy.copy(loss)
    object.__setattr__(loss, "reduction", reduction)  # a module is frozen
    return loss


EACH_LOSS = (
    "for several heads with losses of their own, pass a group `gnlin.Residuals(fn, "
    "inputs, targets=targets, loss=loss)` for each instead of data"
)


def check_loss(loss: object) -> None:
    if isinstance(loss, Mapping | list | tuple):
        raise ValueError(f"`loss` must be one loss, but several were given; {EACH_LOSS}.")
    if isinstance(loss, type) and issubclass(loss, AbstractLoss):
        raise ValueError(
            f"`loss` must be an instance, but the class `{loss.__name__}` was given: "
            "call it."
        )
    if not isinstance(loss, AbstractLoss):
        raise ValueError(
            "`loss` must be one of gnlin's, such as `gnlin.SoftmaxCrossEntropy()`, or a "
            f"subclass of `gnlin.authoring.AbstractLoss`, but {loss!r} was given."
        )


def _derivative(fn, x: Array) -> Array:
    """Return the derivative of an elementwise function."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def check_shapes(outputs: PyTree[jax.ShapeDtypeStruct], targets: PyTree[Array]) -> None:
    """Raise `ValueError` unless the targets have the shapes of the outputs."""
    expected = jax.tree.map(lambda f: f.shape, outputs)
    given = jax.tree.map(lambda t: t.shape, targets)
    if expected != given:
        remedy = "; reshape them, or for labels use `gnlin.SoftmaxCrossEntropy()`"
        if isinstance(expected, tuple) and isinstance(given, tuple):
            if expected == (*given, 1):
                remedy = ": pass `targets[..., None]`"
            elif given == (*expected, 1):
                remedy = ": pass `targets[..., 0]`"
            elif given == (*expected, 2) or expected == (*given, 2):
                remedy += (
                    "; or make both complex or both real, since a complex number is "
                    "compared as its two parts"
                )
        raise ValueError(
            "The targets must have the shape of the model's outputs, "
            f"{_tree.shapes_in_words(outputs)}, but have {given}{remedy}."
        )


def known(values: PyTree) -> list[np.ndarray]:
    """Return the arrays whose values can be checked: those that are not traced, and that
    this process holds in full."""
    leaves = jax.tree.leaves(values)
    return [np.asarray(x) for x in leaves if not isinstance(x, Tracer) and is_here(x)]


def check_between(
    name: str, values: PyTree, least: float | int, most: float | int
) -> None:
    """Raise `ValueError` for known values out of range."""
    for array in known(values):
        wrong = array[~((array >= least) & (array <= most))]
        if wrong.size > 0:
            raise ValueError(
                f"The {name} must lie between {least:g} and {most:g}, but one is "
                f"{wrong[0]:g}."
            )
