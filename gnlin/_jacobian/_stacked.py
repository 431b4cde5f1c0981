"""The Jacobian of several groups of residuals, stacked."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._common._passes import Passes
from .._common._tree import Structure
from ._base import AbstractJacobian, Of
from ._block import AbstractBlock, StackedBlock
from ._coloured import Sparsity
from ._cost import Cost, Reads
from ._of_examples import PerExample


class AtOnce(eqx.Module):
    """A function whose outputs depend on all of `args`, treated as one example."""

    fn: Callable[[Any, Any], PyTree[Array]]
    sparsity: Sparsity | None = None

    def __call__(self, y, args):
        return jax.tree.map(lambda x: jnp.asarray(x)[None], self.fn(y, args))


class PerGroup(eqx.Module):
    """A function of several groups of examples: for each name, a [`gnlin.PerExample`][]
    (or [`AtOnce`][]) that is called with `args[name]`."""

    fns: Mapping[str, Callable[[Any, Any], PyTree[Array]]]
    part_size: int | None = eqx.field(default=None, static=True)

    def each(self) -> dict[str, Callable[[Any, Any], PyTree[Array]]]:
        def lifted(fn):
            return fn if isinstance(fn, AtOnce) else PerExample(fn, self.part_size)

        return {name: lifted(fn) for name, fn in self.fns.items()}

    def __call__(self, y, args):
        return {name: fn(y, args[name]) for name, fn in self.each().items()}


class WithPrior(eqx.Module):
    """A function of data, and its parameters as the outputs of a second group, `"prior"`.
    With `has_aux` the function returns auxiliary data, too, and so does this one."""

    fn: Callable[[Any, Any], Any]
    has_aux: bool = eqx.field(static=True)

    def __call__(self, y, args):
        found = self.fn(y, args)
        outputs, aux = found if self.has_aux else (found, None)
        outputs = {"data": outputs, "prior": AtOnce(itself)(y, None)}
        return (outputs, aux) if self.has_aux else outputs


def itself(y, args):
    return y


class Stacked(AbstractJacobian):
    """Jacobians of named groups with the same parameters, stacked; kinds may differ."""

    parts: Mapping[str, AbstractJacobian]

    def __init__(self, parts: Mapping[str, AbstractJacobian]):
        # Sorted, as are the leaves of a dictionary of outputs
        self.parts = {name: parts[name] for name in sorted(parts)}
        first, *_ = self.parts.values()
        self.domain = first.domain
        self.codomain = Structure.of(
            {name: part.codomain.tree for name, part in self.parts.items()}
        )
        self.memory_budget = first.memory_budget

    def reads(self) -> tuple[Reads, ...]:
        each = [part.reads() for part in self.parts.values()]
        return sum(each, ()) if all(each) else ()

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return {name: part.mv(vector) for name, part in self.parts.items()}

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return _sum(part.rmv(vector[name]) for name, part in self.parts.items())

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return _sum(part.curvature_mv(vector) for part in self.parts.values())

    def a_product(self) -> Passes:
        return _most(part.a_product() for part in self.parts.values())

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        each = [part.blocks(wanted) for part in self.parts.values()]
        return [StackedBlock(blocks) for blocks in zip(*each, strict=True)]

    def block_bytes(self) -> list[int]:
        each = (part.block_bytes() for part in self.parts.values())
        return [sum(sizes) for sizes in zip(*each, strict=True)]

    def bytes_at_once(self) -> int:
        return sum(part.bytes_at_once() for part in self.parts.values())

    def in_turn(self, array: Array) -> tuple["Stacked", Array]:
        parts = {}
        for name, part in self.parts.items():
            parts[name], array = part.in_turn(array)
        return Stacked(parts), array

    def summed(self, of_blocks, part_bytes):
        return _sum(part.summed(of_blocks, part_bytes) for part in self.parts.values())

    def at_hand(self) -> "Stacked":
        return Stacked({name: part.at_hand() for name, part in self.parts.items()})

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "Stacked":
        trees = codomain.tree

        def of_group(name: str, part: AbstractJacobian) -> AbstractJacobian:
            if matrices[name] is None:
                return part
            return part.transformed(matrices[name], Structure.of(trees[name]))

        return Stacked({name: of_group(name, part) for name, part in self.parts.items()})

    def cost(self) -> Cost:
        costs = [part.cost() for part in self.parts.values()]
        rows = _most(cost.rows for cost in costs)
        return costs[0]._replace(
            shape=self.shape,
            rows=rows,
            gram=self._gram_passes(rows),
            one_pass=sum(cost.one_pass for cost in costs),
            # Products between two groups cost about the geometric mean of their own.
            gram_operations=sum(cost.gram_operations**0.5 for cost in costs) ** 2,
            num_bytes=sum(cost.num_bytes for cost in costs),
            in_parts=all(cost.in_parts for cost in costs),
            reads=self.reads(),
        )


def _sum(trees: Iterable[Of]) -> Of:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def _most(passes) -> Passes:
    """Return the passes of all groups if they share them."""
    counts = [(each.jvps, each.vjps) for each in passes]
    jvps, vjps = zip(*counts, strict=True)
    return Passes(max(jvps), max(vjps))
