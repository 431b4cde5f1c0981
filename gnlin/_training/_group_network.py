"""Groups of residuals as a function of the model's parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from .._common._canonical import canonical, of_one_example
from .._common._checks import first_line, is_own
from .._common._precision import full_precision
from .._jacobian import AtOnce, gathered, PerGroup, Selected, Sparsity
from ._model import Frozen


class GroupNetwork(eqx.Module):
    """The counterpart of `Network` for a model and groups of residuals."""

    frozen: Frozen
    fns: Mapping[str, Callable[[Any, Any], PyTree[Array]]]
    at_once: frozenset[str] = eqx.field(static=True, default=frozenset())
    samplers: Mapping[str, Callable[[Array], PyTree[Array]]] = eqx.field(
        default_factory=dict
    )
    batch_sizes: Mapping[str, int | None] = eqx.field(static=True, default_factory=dict)
    selections: Mapping[str, Callable[[Any], PyTree[Array]]] = eqx.field(
        default_factory=dict
    )
    sparsities: Mapping[str, Sparsity] = eqx.field(default_factory=dict)
    part_size: int | None = eqx.field(static=True, default=None)

    takes_key: ClassVar[bool] = False
    has_state: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether examples are drawn or chosen for each step."""
        return bool(self.samplers) or any(self.batch_sizes.values())

    def drawn(self, data: tuple, key: Key[Array, ""]) -> tuple:
        """Return the data of a step, with examples drawn or chosen by `key`."""
        inputs, targets, weights = data
        found = {}
        for k, name in enumerate(sorted(self.fns)):
            found[name] = inputs[name], targets[name]
            own_key, size = jax.random.fold_in(key, k), self.batch_sizes.get(name)
            sampler = self.samplers.get(name)
            if sampler is not None:
                found[name] = sampler(own_key), targets[name]
            elif size is not None:
                n = jax.tree.leaves(inputs[name])[0].shape[0]
                chosen = jax.random.permutation(own_key, n)[:size]
                found[name] = jax.tree.map(lambda x, c=chosen: x[c], found[name])
        inputs, targets = ({k: x[i] for k, x in found.items()} for i in (0, 1))
        return inputs, targets, weights

    def as_many(self, targets: PyTree[Array]) -> PyTree[Array]:
        """Return the first targets, one for each example of a step."""
        sizes = {name: self.batch_sizes.get(name) for name in targets}
        return {
            name: jax.tree.map(lambda x, k=size: x[:k], targets[name])
            for name, size in sizes.items()
        }

    def function(self) -> Callable[[PyTree, Any], Any]:
        def structured(name: str) -> Callable:
            if name in self.at_once:
                return AtOnce(self._of(name), self.sparsities.get(name))
            select = self.selections.get(name)
            return self._of(name) if select is None else Selected(self._of(name), select)

        return PerGroup({name: structured(name) for name in self.fns}, self.part_size)

    def _of(self, name: str) -> Callable[[PyTree, Any], PyTree[Array]]:
        """Return a group's function of the parameters and one example."""
        at_once, fn = name in self.at_once, self.fns[name]
        return eqx.Partial(_residuals, name, at_once, self.frozen, fn)

    def canonical(self, parameters: PyTree, inputs: PyTree) -> "GroupNetwork":
        """Return an equivalent network, compared by what the groups compute from inputs
        of these shapes."""
        fns, selections = {}, {}
        for name in self.fns:
            given, read = inputs[name], parameters
            example = given if name in self.at_once else of_one_example(given)
            select = self.selections.get(name)
            if select is not None:
                selections[name] = canonical(select, example)
                read = jax.eval_shape(gathered, read, jax.eval_shape(select, example))
            fns[name] = canonical(self._of(name), read, example)
        rest = jax.tree.map(lambda _: None, parameters)
        frozen = Frozen(rest, self.frozen.dtypes, None)
        changes = {"frozen": frozen, "fns": fns, "selections": selections}
        return dataclasses.replace(self, **changes)

    def args(self, inputs: PyTree, keys: Array | None, state: PyTree) -> PyTree:
        return inputs

    def outputs(self, parameters: PyTree, args: PyTree) -> PyTree[Array]:
        return self.function()(parameters, args)

    def is_random(self, parameters: PyTree, args: PyTree) -> bool:
        return False

    def in_inference(self) -> "GroupNetwork":
        return self


def _residuals(
    name: str,
    at_once: bool,
    frozen: Frozen,
    fn: Callable,
    parameters: PyTree,
    example: Any,
):
    try:
        with full_precision():
            residuals = fn(frozen.in_training(parameters), example)
    except (IndexError, TypeError, ValueError) as error:
        if is_own(error):
            raise
        what = f"The function of the group {name!r} is called with the model and "
        what += "`args`, as the group has no `data`" if at_once else "one example"
        raise failed(what, error, at_once) from error
    leaves = jax.tree.leaves(residuals)
    if not leaves or not all(map(eqx.is_array_like, leaves)):
        raise ValueError(
            f"The function of the group {name!r} must return arrays, but returned "
            f"{residuals!r}."
        )
    return residuals


def failed(what: str, error: Exception, at_once: bool = False) -> ValueError:
    how = "" if at_once else ", without the data's leading axis"
    return ValueError(f"{what}{how}, but failed: {first_line(error)}.")
