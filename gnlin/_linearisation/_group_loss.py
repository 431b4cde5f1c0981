"""Losses of groups of residuals: an objective that is their sum."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._canonical import are_read
from ..losses import AbstractLoss
from ..losses._base import Reduction
from ._admitted import check_outputs
from ._objective import AbstractObjective, BatchLoss, counted


class GroupLosses(eqx.Module):
    """A loss for each group of residuals, and its weight.

    - `is_drawn`: whether the examples of each step are drawn, not taken from data.
    """

    losses: Mapping[str, AbstractLoss]
    weights: Mapping[str, ScalarLike]
    is_drawn: bool = eqx.field(static=True, default=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The groups' names, or nothing for a single group."""
        return tuple(sorted(self.losses)) if len(self.losses) > 1 else ()

    @property
    def is_quadratic(self) -> bool:
        return all(loss.is_quadratic for loss in self.losses.values())

    def reduced(self, default: Reduction) -> "GroupLosses":
        losses = {name: loss.reduced(default) for name, loss in self.losses.items()}
        return GroupLosses(losses, self.weights, self.is_drawn)

    def check(self, outputs: PyTree[jax.ShapeDtypeStruct], targets: PyTree) -> None:
        for name, loss in self.losses.items():
            try:
                loss.check(outputs[name], _or_zeros(targets[name], outputs[name]))
            except ValueError as error:
                raise ValueError(f"In the group {name!r}: {error}") from error


class GroupLoss(AbstractObjective):
    """The sum of the groups' losses, each on the outputs of its name."""

    parts: Mapping[str, BatchLoss]
    is_sample: bool = eqx.field(static=True)
    is_drawn: bool = eqx.field(static=True, default=False)

    def _each(self, of: Callable, *outputs: PyTree[Array]) -> dict[str, Any]:
        """Call a method of each part on the outputs of its name."""
        return {
            name: of(part, *(tree[name] for tree in outputs))
            for name, part in self.parts.items()
        }

    @property
    def is_quadratic(self) -> bool:
        return all(part.is_quadratic for part in self.parts.values())

    def values(self, outputs: PyTree[Array]) -> dict[str, Scalar]:
        return self._each(BatchLoss.value, outputs)

    def value(self, outputs: PyTree[Array]) -> Scalar:
        return _tree.summed(self.values(outputs).values())

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        decreases = self._each(BatchLoss.decrease, outputs, new_outputs)
        return _tree.summed(decreases.values())

    def num_examples(self) -> Float[Array, ""]:
        """Return the effective number of examples of the group that has most."""
        return jnp.max(jnp.stack([x.num_examples() for x in self.parts.values()]))

    def num_targets(self, outputs: PyTree[Array]) -> Scalar:
        return _tree.summed(self._each(BatchLoss.num_targets, outputs).values())

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return self._each(BatchLoss.gradient, outputs)

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        products = self._each(BatchLoss.curvature, outputs)
        return lambda v: {name: product(v[name]) for name, product in products.items()}

    def concave(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree] | None:
        products = self._each(BatchLoss.concave, outputs)
        if all(product is None for product in products.values()):
            return None
        none = _tree.zeros_like
        return lambda v: {k: (product or none)(v[k]) for k, product in products.items()}

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return self._each(BatchLoss.residual, outputs)

    def plain(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return self._each(BatchLoss.plain, outputs)

    def whitened(self, outputs: PyTree[Array]) -> tuple[Any, PyTree, PyTree | None]:
        each = self._each(BatchLoss.whitened, outputs)
        factors, residual, rest = ({k: x[i] for k, x in each.items()} for i in range(3))
        none_left = all(x is None for x in rest.values())
        rest = {k: _or_zeros(x, outputs[k]) for k, x in rest.items()}
        identity = all(x is None for x in factors.values())
        return None if identity else factors, residual, None if none_left else rest


def objective_of(
    loss: AbstractLoss | GroupLosses,
    outputs: PyTree[jax.ShapeDtypeStruct],
    data: tuple,
    *,
    num_leading: int | None = None,
    is_sample: bool = False,
) -> BatchLoss | GroupLoss:
    """Return the objective of a batch, given the shapes of its outputs."""
    _, targets, weights = data
    check_outputs(outputs)
    if isinstance(loss, AbstractLoss):
        return BatchLoss(loss, outputs, targets, weights, num_leading, is_sample)
    parts = {
        name: BatchLoss(
            of_group,
            outputs[name],
            _or_zeros(targets[name], outputs[name]),
            is_sample=is_sample,
            factor=loss.weights[name],
        )
        for name, of_group in loss.losses.items()
    }
    return GroupLoss(parts=parts, is_sample=is_sample, is_drawn=loss.is_drawn)


def any_counts(
    loss: AbstractLoss | GroupLosses, data: tuple, num_leading: int | None = None
) -> Bool[Array, ""] | None:
    """Return whether any target of a batch has a weight; `None` if each has one, whatever
    the data.

    - `num_leading`: the number of examples that have a loss, if it is not all of them.
    """
    _, targets, weights = data
    if isinstance(loss, GroupLosses):
        each = [any_counts(of, (None, targets[k], None)) for k, of in loss.losses.items()]
        known = [x for x in each if x is not None]
        return jnp.any(jnp.stack(known)) if len(known) == len(each) else None
    if weights is None and not _depends(loss, targets):
        return None
    counts = counted(loss, targets) != 0  # also if one is NaN, which is told
    if weights is not None:
        counts &= weights != 0
    return jnp.any(counts[:num_leading])


def _depends(loss: AbstractLoss, targets: PyTree[Array] | None) -> bool:
    """Whether the weights of targets depend on the targets, according to the jaxpr."""
    leaves = jax.tree.leaves(targets)
    if not leaves:
        return False
    program = jax.make_jaxpr(lambda targets: counted(loss, targets))(targets).jaxpr
    return any(are_read(program))


def _or_zeros(tree: PyTree, like: PyTree) -> PyTree:
    return _tree.zeros_like(like) if tree is None else tree
