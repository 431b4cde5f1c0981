"""Objectives: losses as functions of all outputs, and their second-order expansions."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import nan_unless, nonnegative
from .._common._tree import Structure
from .._jacobian import multiplied
from ..losses import AbstractLoss
from ..losses._factors import AbstractFactor, IdentityFactor, whitened_by
from ._linearisation import Linearisation
from ._quadratic import Quadratic


class AbstractObjective(eqx.Module):
    """The function of the outputs of all examples that a solver minimises.

    - `is_sample`: whether each step sees a different sample of the examples.
    """

    is_sample: AbstractVar[bool]

    @property
    def is_drawn(self) -> bool:
        """Whether the examples of each step are drawn, as points for a differential
        equation are. Unlike measured data they carry no noise that differs."""
        return False

    @property
    @abc.abstractmethod
    def is_quadratic(self) -> bool:
        """Whether the objective equals its second-order expansion in the outputs."""

    @abc.abstractmethod
    def value(self, outputs: PyTree[Array]) -> Scalar:
        """Return the objective."""

    def values(self, outputs: PyTree[Array]) -> dict[str, Scalar]:
        """Return the value of each part by name."""
        return {}

    @abc.abstractmethod
    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        """Return the decrease of the objective, precise to rounding of the decrease."""

    @abc.abstractmethod
    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return the derivative with respect to the outputs."""

    @abc.abstractmethod
    def whitened(self, outputs: PyTree[Array]) -> tuple[Any, PyTree, PyTree | None]:
        """Return the factor R of the Hessian R^T R, or `None` for the identity; the
        whitened residual; and the gradient outside the Hessian's range, or `None`."""

    def root(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        """Return products with R."""
        factors, *_ = self.whitened(outputs)
        return lambda v: multiplied(factors, v)

    @abc.abstractmethod
    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        """Return products with the Hessian in the outputs."""

    def concave(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree] | None:
        """Return products with the part of the Hessian that `curvature` leaves out
        because it is negative, with its sign changed; `None` if it is zero or not
        known."""
        return None

    @abc.abstractmethod
    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return the quantity that must settle for a run to have converged."""

    def plain(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return residuals such that half their sum of squares is the objective."""
        raise NotImplementedError

    def num_examples(self) -> Float[Array, ""]:
        """Return the number of equally weighted examples whose mean has the same variance
        (L. Kish, *Survey sampling*, 1965)."""
        raise NotImplementedError

    def num_targets(self, outputs: PyTree[Array]) -> Scalar:
        """Return the number of targets of positive weight."""
        raise NotImplementedError

    def expand(self, lin: Linearisation) -> Quadratic:
        """Return the second-order expansion in the outputs at a linearisation."""
        factors, residual, rest = self.whitened(lin.outputs)
        jacobian = lin.jacobian
        if factors is not None:
            jacobian = jacobian.transformed(factors, Structure.of(residual))
        if rest is None:
            return Quadratic(jacobian, residual)
        slope = lin.vjp(self.gradient(lin.outputs))
        zero = lambda: _tree.zeros_like(lin.point)
        # Usually the rest is zero, and the pass is skipped.
        rest = jax.lax.cond(_tree.any_nonzero(rest), lambda: lin.vjp(rest), zero)
        return Quadratic(jacobian, residual, rest, slope)


class SumOfSquares(AbstractObjective):
    """Half the sum of squares of residuals; there are no targets."""

    is_sample: bool = eqx.field(static=True, default=False)

    @property
    def is_quadratic(self) -> bool:
        return True

    def value(self, outputs: PyTree[Array]) -> Scalar:
        return 0.5 * _tree.dot(outputs, outputs)

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        change = jax.tree.map(jnp.subtract, outputs, new_outputs)
        both = jax.tree.map(jnp.add, outputs, new_outputs)
        return 0.5 * _tree.dot(change, both)

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return lambda v: v

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs

    def whitened(self, outputs: PyTree[Array]) -> tuple[None, PyTree, None]:
        return None, outputs, None


class BatchLoss(AbstractObjective):
    """A loss on the targets of a batch, reduced over its examples.

    With `num_leading`, the loss is that of the first `num_leading` examples, and all
    examples together estimate its curvature.
    """

    loss: AbstractLoss
    targets: PyTree[Array]
    # Weights of the examples, including the reduction; None if all are one.
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
        factor: ScalarLike | None = None,
    ):
        """`outputs` gives shapes, and the dtypes in which the loss is computed. `factor`
        multiplies the reduced loss."""
        self.is_sample = is_sample
        dtype = _tree.dtype(outputs)
        self.loss = loss.reduced("sum")
        self.targets = jax.tree.map(
            lambda t: t.astype(dtype) if jnp.issubdtype(t.dtype, jnp.floating) else t,
            targets,
        )
        self.weights = self.curvature_weights = None
        plain = all(x is None for x in (weights, num_leading, factor))
        if plain and self.loss.reduction == "sum":
            return
        num_examples = jax.tree.leaves(outputs)[0].shape[0]
        given = jnp.ones(num_examples) if weights is None else weights
        every_weight = leading = given.astype(dtype)
        if num_leading is not None:
            leading = jnp.where(jnp.arange(num_examples) < num_leading, every_weight, 0)
        counts = counted(loss, self.targets).astype(dtype)
        total, total_of_all = (_tree.matmul(w, counts) for w in (leading, every_weight))
        unit = jnp.where(total > 0, total, 1) if self.loss.reduction == "mean" else 1
        if factor is not None:
            unit = unit / nan_unless(nonnegative(factor), factor).astype(dtype)
        self.weights = leading / unit
        share = total / jnp.where(total_of_all > 0, total_of_all, 1)
        self.curvature_weights = every_weight * share / unit

    @property
    def is_quadratic(self) -> bool:
        return self.loss.is_quadratic

    def value(self, outputs: PyTree[Array]) -> Scalar:
        return self._reduce(jax.vmap(self.loss.value)(outputs, self.targets))

    def num_examples(self) -> Float[Array, ""]:
        each = counted(self.loss, self.targets)
        if self.curvature_weights is not None:
            each = each.astype(self.curvature_weights.dtype) * self.curvature_weights
        each /= _tree.unit(each)
        return jnp.maximum(_tree.quotient(jnp.sum(each) ** 2, _tree.dot(each, each)), 1)

    def num_targets(self, outputs: PyTree[Array]) -> Scalar:
        size, weights = _tree.size(outputs), self.weights
        if weights is None:
            return jnp.array(size)
        return size // weights.size * jnp.sum(weights > 0)

    def left_out(self, outputs: PyTree[Array]) -> Scalar:
        """Return the constant that the value leaves out of a negative log-likelihood: the
        log-likelihood of the saturated model."""
        return self._reduce(jax.vmap(self.loss.left_out)(outputs, self.targets))

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        each = jax.vmap(self.loss.decrease)(outputs, new_outputs, self.targets)
        return self._reduce(each)

    def _reduce(self, each: Float[Array, " n"]) -> Scalar:
        return jnp.sum(each) if self.weights is None else _tree.matmul(self.weights, each)

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        each = jax.vmap(self.loss.gradient)(outputs, self.targets)
        return _by_example(self.weights, each)

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        factors = jax.vmap(self.loss.factor)(outputs, self.targets)

        def product(v):
            each = jax.vmap(lambda r, x: r.transpose_mv(r.mv(x)))(factors, v)
            return _by_example(self.curvature_weights, each)

        return product

    def concave(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree] | None:
        if not self.loss.has_observed_factor:
            return None
        positive = self.curvature(outputs)

        def product(v):
            _, whole = jax.jvp(self.gradient, (outputs,), (v,))
            return jax.tree.map(jnp.subtract, positive(v), whole)

        return product

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return self.gradient(outputs) if self.is_quadratic else outputs

    def plain(self, outputs: PyTree[Array]) -> PyTree[Array]:
        each = jax.vmap(self.loss.plain)(outputs, self.targets)
        return each if self.weights is None else _by_example(jnp.sqrt(self.weights), each)

    def whitened(self, outputs: PyTree[Array]) -> tuple[Any, PyTree, PyTree | None]:
        def whiten(outputs, target):
            factor = self.loss.factor(outputs, target)
            gradient = self.loss.gradient(outputs, target)
            whitened = whitened_by(factor, gradient, outputs, type(self.loss).__name__)
            return factor, *whitened

        factors, residual, rest = jax.vmap(whiten)(outputs, self.targets)
        if self.weights is not None:
            assert self.curvature_weights is not None  # both or none
            roots = jnp.sqrt(self.curvature_weights)
            factors = _Weighted(factors, roots)
            safe = jnp.where(roots > 0, roots, 1)
            residual = _by_example(self.weights / safe, residual)
            rest = None if rest is None else _by_example(self.weights, rest)
        if isinstance(factors, IdentityFactor):
            factors = None
        return factors, residual, rest


def counted(loss: AbstractLoss, targets: PyTree[Array]) -> Float[Array, " n"]:
    """Return the weight of each example in a mean."""
    return jax.vmap(lambda target: jnp.sum(loss.target_weights(target)))(targets)


class _Weighted(eqx.Module):
    """The factor of a weighted example: `root` times `factor`."""

    factor: AbstractFactor
    root: Array  # square root of the weight

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return _tree.scale(self.root, self.factor.mv(v))


def _by_example(weights: Float[Array, " n"] | None, tree: PyTree[Array]) -> PyTree[Array]:
    return tree if weights is None else jax.vmap(_tree.scale)(weights, tree)
