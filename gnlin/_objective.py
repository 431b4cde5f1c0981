"""What is minimised, as a function of the outputs, and its second-order expansion."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Float, PyTree, Scalar

from . import _tree
from ._linearisation import Linearisation
from ._losses import AbstractFactor, AbstractLoss, IdentityFactor
from ._problem import Quadratic
from ._tree import Structure


class AbstractObjective(eqx.Module):
    """A function of the outputs of all examples together, as solvers see it.

    `is_sample`: whether they are some of the examples, and other steps see others.
    """

    is_sample: AbstractVar[bool]

    @property
    @abc.abstractmethod
    def is_quadratic(self) -> bool:
        """Whether the second-order expansion is the objective itself."""

    @abc.abstractmethod
    def value(self, outputs: PyTree[Array]) -> Scalar:
        """The objective."""

    @abc.abstractmethod
    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        """By how much it falls from one point to another."""

    @abc.abstractmethod
    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Its derivative by the outputs."""

    @abc.abstractmethod
    def root(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        """Products with a factor of its second derivative by the outputs."""

    @abc.abstractmethod
    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        """Products with its second derivative by the outputs."""

    @abc.abstractmethod
    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """What has to settle for a run to have converged."""

    @abc.abstractmethod
    def expand(self, lin: Linearisation) -> Quadratic:
        """The second-order expansion in the outputs of a linearisation."""


class SumOfSquares(AbstractObjective):
    """Half the sum of squares of residuals, which have no targets."""

    is_sample: bool = eqx.field(static=True, default=False)

    @property
    def is_quadratic(self) -> bool:
        return True

    def value(self, outputs: PyTree[Array]) -> Scalar:
        return 0.5 * _tree.dot(outputs, outputs)

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        change = jax.tree.map(jnp.subtract, outputs, new_outputs)
        both = jax.tree.map(jnp.add, outputs, new_outputs)
        return 0.5 * _tree.dot(change, both)  # to rounding of the change

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs

    def root(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return lambda v: v

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return lambda v: v

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs

    def expand(self, lin: Linearisation) -> Quadratic:
        return Quadratic(lin.jacobian, lin.outputs)


class BatchLoss(AbstractObjective):
    """A loss on the targets of a batch, reduced over its examples.

    With `num_leading` it is the loss of so many examples at the front, with a curvature
    that all of them estimate together.
    """

    loss: AbstractLoss
    targets: PyTree[Array]
    # With the reduction; None for ones.
    weights: Float[Array, " n"] | None
    curvature_weights: Float[Array, " n"] | None
    is_sample: bool = eqx.field(static=True)

    def __init__(
        self,
        loss: AbstractLoss,
        outputs: PyTree[jax.ShapeDtypeStruct],
        targets: PyTree[Array],
        weights: Array | None = None,
        num_leading: int | None = None,
        is_sample: bool = False,
    ):
        """`outputs`: their shapes, and the dtypes in which the loss is computed."""
        self.is_sample = is_sample
        dtype = _tree.dtype(outputs)
        self.loss = loss.reduced("sum")
        self.targets = jax.tree.map(
            lambda t: t.astype(dtype) if jnp.issubdtype(t.dtype, jnp.floating) else t,
            targets,
        )
        self.weights = self.curvature_weights = None
        if weights is None and self.loss.reduction == "sum" and num_leading is None:
            return
        num_examples = jax.tree.leaves(outputs)[0].shape[0]
        given = jnp.ones(num_examples) if weights is None else weights
        every = leading = given.astype(dtype)
        if num_leading is not None:
            leading = jnp.where(jnp.arange(num_examples) < num_leading, every, 0)
        counts = counted(loss, self.targets).astype(dtype)
        total, total_of_all = (_tree.matmul(w, counts) for w in (leading, every))
        unit = jnp.where(total > 0, total, 1) if self.loss.reduction == "mean" else 1
        self.weights = leading / unit
        share = total / jnp.where(total_of_all > 0, total_of_all, 1)
        self.curvature_weights = every * share / unit

    @property
    def is_quadratic(self) -> bool:
        return self.loss.is_quadratic

    def value(self, outputs: PyTree[Array]) -> Scalar:
        return self._reduce(jax.vmap(self.loss.value)(outputs, self.targets))

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        each = jax.vmap(self.loss.decrease)(outputs, new_outputs, self.targets)
        return self._reduce(each)

    def _reduce(self, each: Float[Array, " n"]) -> Scalar:
        return jnp.sum(each) if self.weights is None else _tree.matmul(self.weights, each)

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        each = jax.vmap(self.loss.gradient)(outputs, self.targets)
        return each if self.weights is None else _by_example(self.weights, each)

    def root(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        factors = jax.vmap(self.loss.factor)(outputs, self.targets)
        if self.curvature_weights is not None:
            factors = _Weighted(factors, jnp.sqrt(self.curvature_weights))
        return lambda v: jax.vmap(lambda r, x: r.mv(x))(factors, v)

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        factors = jax.vmap(self.loss.factor)(outputs, self.targets)

        def product(v):
            each = jax.vmap(lambda r, x: r.transpose_mv(r.mv(x)))(factors, v)
            weights = self.curvature_weights
            return each if weights is None else _by_example(weights, each)

        return product

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return self.gradient(outputs) if self.is_quadratic else outputs

    def expand(self, lin: Linearisation) -> Quadratic:
        def whiten(outputs, target):
            factor = self.loss.factor(outputs, target)
            return factor, *factor.whiten(self.loss.gradient(outputs, target))

        factors, residual, rest = jax.vmap(whiten)(lin.outputs, self.targets)
        if self.weights is not None and self.curvature_weights is not None:
            roots = jnp.sqrt(self.curvature_weights)
            factors = _Weighted(factors, roots)
            safe = jnp.where(roots > 0, roots, 1)
            residual = _by_example(self.weights / safe, residual)
            rest = None if rest is None else _by_example(self.weights, rest)
        jacobian = lin.jacobian
        if not isinstance(factors, IdentityFactor):
            jacobian = jacobian.transformed(factors, Structure.of(residual))
        rest = None if rest is None else _pulled_back_if_any(lin, rest)
        return Quadratic(jacobian, residual, rest)


def counted(loss: AbstractLoss, targets: PyTree[Array]) -> Float[Array, " n"]:
    """What each example counts in a mean."""
    return jax.vmap(lambda target: jnp.sum(loss.target_weights(target)))(targets)


class _Weighted(eqx.Module):
    """The factor of a weighted example."""

    factor: AbstractFactor
    root: Array  # of the weight

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return _tree.scale(self.root, self.factor.mv(v))


def _by_example(weights: Float[Array, " n"], tree: PyTree[Array]) -> PyTree[Array]:
    return jax.vmap(_tree.scale)(weights, tree)


def _pulled_back_if_any(lin: Linearisation, rest: PyTree[Array]) -> PyTree[Array]:
    """phi^T e. Mostly there is nothing left, and a pass to be saved."""
    return jax.lax.cond(
        _tree.any_nonzero(rest),
        lambda e: lin.vjp(e),
        lambda _: _tree.zeros_like(lin.point),
        rest,
    )
