"""Groups of residuals as a function of the model's parameters, and a check of the rows of
parameters that an example reads."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from .._common import _tree
from .._common._canonical import are_read, canonical, of_one_example, read_by
from .._common._checks import check_count, first_line, is_own
from .._common._complex import in_real_parts
from .._common._precision import full_precision
from .._common._words import name_of
from .._jacobian import AtOnce, gathered, PerGroup, Selected, Sparsity
from .._linearisation._group_loss import GroupLosses
from ..losses._of_examples import beside_targets
from ._model import checked, Frozen, partition


if TYPE_CHECKING:
    from ._residuals import Residuals


class Group(eqx.Module):
    """A group of residuals without its data.

    - `fn`: the residuals of the model and one example; without examples, of all data.
    - `sampler`: a function of a key that draws the examples of each step.
    - `select`: the rows of the parameters that an example reads.
    - `at_once`: whether the group has no examples.
    - `batch_size`: the number of examples that are chosen for each step.
    """

    fn: Callable[[Any, Any], PyTree[Array]]
    sampler: Callable[[Array], PyTree[Array]] | None
    select: Callable[[Any], PyTree[Array]] | None
    sparsity: Sparsity | None
    at_once: bool = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)


class GroupNetwork(eqx.Module):
    """The counterpart of `Network` for a model and groups of residuals."""

    frozen: Frozen
    groups: Mapping[str, Group]
    part_size: int | None = eqx.field(static=True, default=None)

    takes_key: ClassVar[bool] = False
    has_state: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether examples are drawn or chosen for each step."""
        groups = self.groups.values()
        return any(group.sampler is not None or group.batch_size for group in groups)

    def drawn(self, data: tuple, key: Key[Array, ""]) -> tuple:
        """Return the data of a step, with examples drawn or chosen by `key`."""
        inputs, targets, weights = data
        inputs, targets = dict(inputs), dict(targets)
        for k, name in enumerate(sorted(self.groups)):
            group, own_key = self.groups[name], jax.random.fold_in(key, k)
            if group.sampler is not None:
                inputs[name] = group.sampler(own_key)
            elif group.batch_size is not None:
                n = jax.tree.leaves(inputs[name])[0].shape[0]
                chosen = jax.random.permutation(own_key, n)[: group.batch_size]
                both = inputs[name], targets[name]
                both = jax.tree.map(lambda x, c=chosen: x[c], both)
                inputs[name], targets[name] = both
        return inputs, targets, weights

    def function(self) -> PerGroup:
        def structured(name: str) -> Callable:
            fn, group = self._of(name), self.groups[name]
            if group.at_once:
                return AtOnce(fn, group.sparsity)
            return fn if group.select is None else Selected(fn, group.select)

        return PerGroup({name: structured(name) for name in self.groups}, self.part_size)

    def _of(self, name: str) -> Callable[[PyTree, Any], PyTree[Array]]:
        """Return a group's function of the parameters and one example."""
        group = self.groups[name]
        return eqx.Partial(_residuals, name, group.at_once, self.frozen, group.fn)

    def canonical(
        self, parameters: PyTree, inputs: PyTree, key: Array | None = None
    ) -> "GroupNetwork":
        """Return an equivalent network, compared by what the groups draw, and compute
        from inputs of these shapes. `None` is a key of JAX's default kind."""
        groups, key = {}, jax.random.key(0) if key is None else key
        for name, group in self.groups.items():
            given, select, read = inputs[name], group.select, parameters
            sampler = group.sampler
            if sampler is not None:
                sampler = canonical(sampler, key)
                given = jax.eval_shape(sampler, key)
            example = given if group.at_once else of_one_example(given)
            if select is not None:
                select = canonical(select, example)
                read = jax.eval_shape(gathered, read, jax.eval_shape(select, example))
            if group.at_once:
                fn = _canonical_at_once(self._of(name), read, example)
            else:
                fn = canonical(self._of(name), read, example)
            groups[name] = dataclasses.replace(
                group, fn=fn, sampler=sampler, select=select
            )
        rest = jax.tree.map(lambda _: None, parameters)
        frozen = Frozen(rest, self.frozen.dtypes, None)
        return dataclasses.replace(self, frozen=frozen, groups=groups)

    def args(self, inputs: PyTree, keys: Array | None, state: PyTree) -> PyTree:
        return inputs


def _canonical_at_once(fn: Callable, parameters: PyTree, args: Any) -> Callable:
    """Return the function of a group without data in canonical form. Its program takes
    the arrays among `args`; whatever else they hold, such as functions, is part of it."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    of_arrays = eqx.Partial(_with_rest, fn, rest)
    return eqx.Partial(_of_args, canonical(of_arrays, parameters, arrays))


def _with_rest(fn: Callable, rest: Any, parameters: PyTree, arrays: Any) -> Any:
    return fn(parameters, eqx.combine(arrays, rest))


def _of_args(fn: Callable, parameters: PyTree, args: Any) -> Any:
    return fn(parameters, eqx.filter(args, eqx.is_array))


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
        # A function that has no canonical form is called by this one twice.
        if is_own(error) or str(error).startswith(f"The function of the group {name!r}"):
            raise
        what = f"The function of the group {name!r} is called with the model and "
        what += "`args`, as the group has no `data`" if at_once else _ONE_EXAMPLE
        failed = _failed(what, error)
        if "'tuple' object is not callable" in str(error):
            failed = ValueError(f"{failed} {_NO_PAIR}")
        raise failed from error
    except RuntimeError as error:
        if "requires a key" not in str(error):
            raise
        raise ValueError(
            f"The function of the group {name!r} uses dropout, which needs a key, and "
            "groups have none: call `equinox.nn.inference_mode(model)` in it."
        ) from error
    must = f"The function of the group {name!r} must return arrays"
    return jax.tree.map(in_real_parts, checked(residuals, must))


_ONE_EXAMPLE = "one example, without the data's leading axis"
_NO_PAIR = (
    "With groups, pass the parameters instead of a pair `(fn, parameters)`, and call "
    "`fn` in the function of the group."
)


def _failed(what: str, error: Exception) -> ValueError:
    return ValueError(f"{what}, but failed: {first_line(error)}.")


def of_groups(
    model: PyTree,
    groups: "Mapping[str, Residuals]",
    filter_spec: PyTree | Callable[[Any], bool],
    batch_size: Mapping[str, int | None] | int | None = None,
    part_size: int | None = None,
    *,
    may_draw: bool = False,
) -> tuple[PyTree, GroupNetwork, tuple, GroupLosses]:
    """Return (parameters, network, data, losses).

    - `may_draw`: whether groups may draw their data for each step.
    """
    parameters, frozen = partition(model, filter_spec, called=False)
    sizes = _batch_sizes(groups, batch_size)
    inputs, targets, of_network = {}, {}, {}
    dtype = _tree.dtype(parameters)

    for name, group in groups.items():
        is_drawn = callable(group.data)
        if is_drawn and not may_draw:
            raise ValueError(
                f"The group {name!r} draws its data for each step: pass arrays, or train "
                "by `gnlin.fit`, which alone can draw."
            )
        if jnp.size(group.weight) != 1:
            raise ValueError(
                f"The `weight` of the group {name!r} must be one number, but has the "
                f"shape {jnp.shape(group.weight)}: for weights w of single residuals, "
                "multiply these by the square root of w inside the function, or multiply "
                "by w in a loss of your own."
            )
        if group.select is not None:
            _check_selection(name, group.select, group.data, parameters, model)
        if is_drawn and not _uses_key(group.data):
            warnings.warn(
                f"The `data` function of the group {name!r} does not use its key, so all "
                "steps have the same points: draw them from the key by `jax.random`, or "
                "pass an array.",
                stacklevel=3,
            )
        inputs[name] = None if is_drawn else _wide(dtype, group.data)
        targets[name] = jax.tree.map(in_real_parts, group.targets)
        if group.data is None:  # All residuals form one example.
            targets[name] = jax.tree.map(lambda x: x[None], targets[name])
        of_network[name] = Group(
            group.fn,
            sampler=eqx.Partial(_wide_draw, dtype, group.data) if is_drawn else None,
            select=group.select,
            sparsity=group.sparsity,
            at_once=group.data is None,
            batch_size=sizes.get(name),
        )
    read = read_by(jax.tree.leaves((frozen, of_network)))
    frozen = dataclasses.replace(frozen, read=read)
    network = GroupNetwork(frozen, of_network, part_size)
    losses = {}
    for name, group in groups.items():
        outputs = functools.partial(_outputs, network, name, parameters, inputs[name])
        at_hand = None if callable(group.data) else outputs
        losses[name], targets[name] = beside_targets(
            group.loss.as_arguments(), targets[name], at_hand
        )
    losses = GroupLosses(
        losses,
        {name: group.weight for name, group in groups.items()},
        # Examples that are chosen from data by a batch size may be noisy.
        is_drawn=network.draws and not any(sizes.values()),
    )
    return parameters, network, (inputs, targets, None), losses


def _outputs(network: GroupNetwork, name: str, parameters: PyTree, data: PyTree) -> Any:
    """Return the shapes of the outputs of a group."""
    alone = dataclasses.replace(network, groups={name: network.groups[name]})
    return eqx.filter_eval_shape(alone.function(), parameters, {name: data})[name]


def _uses_key(sampler: Callable[[Array], PyTree]) -> bool:
    """Whether the points that a sampler draws may depend on the key. A sampler that calls
    NumPy's generators draws only while it is compiled."""
    program = jax.make_jaxpr(sampler)(jax.random.key(0)).jaxpr
    calls_back = bool(program.effects) or "callback" in str(program)
    return calls_back or any(are_read(program))


def _wide(dtype: Any, data: PyTree) -> PyTree:
    """Convert points to at least the parameters' precision, for derivatives with respect
    to the points."""

    def each(x: Any) -> Any:
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_float and x.dtype.itemsize < dtype.itemsize else x

    return jax.tree.map(each, data)


def _wide_draw(dtype: Any, sampler: Callable[[Array], PyTree], key: Array) -> PyTree:
    return _wide(dtype, jax.tree.map(jnp.asarray, sampler(key)))


def _batch_sizes(
    groups: "Mapping[str, Residuals]", batch_size: Mapping[str, int | None] | int | None
) -> dict[str, int | None]:
    """Return the batch size of each group; a number is for all groups with arrays."""
    if not isinstance(batch_size, Mapping):
        arrays = lambda g: g.data is not None and not callable(g.data)
        sizes = {name: batch_size for name, g in groups.items() if arrays(g)}
    else:
        sizes = dict(batch_size)
        if unknown := sorted(set(sizes) - set(groups)):
            raise ValueError(
                f"`batch_size` names {', '.join(map(repr, unknown))}, but the groups are "
                f"{', '.join(map(repr, groups))}."
            )
    for name, size in sizes.items():
        if size is None:
            continue
        check_count(f"batch_size[{name!r}]", size)
        if callable(groups[name].data):
            raise ValueError(
                f"The group {name!r} draws its data and sets their number itself: leave "
                "its `batch_size` out."
            )
        if groups[name].data is None:
            raise ValueError(
                f"The group {name!r} has no examples: leave its `batch_size` out."
            )
        n = jax.tree.leaves(groups[name].data)[0].shape[0]
        if size > n:
            raise ValueError(
                f"The group {name!r} has {n} examples, but its `batch_size` is {size}."
            )
    return sizes


def _check_selection(
    name: str,
    select: Callable[[Any], Any],
    data: Any,
    parameters: PyTree[Array],
    model: PyTree,
) -> None:
    """Raise `ValueError` if the `select` of a group fails, or selects invalid rows of
    concrete data."""
    if callable(data):
        data = jax.eval_shape(data, jax.random.key(0))
    unknown = Tracer | jax.ShapeDtypeStruct
    known = not any(isinstance(x, unknown) for x in jax.tree.leaves(data))
    select_all = jax.vmap(select)
    try:
        rows = jax.eval_shape(select_all, data)
        if known:
            with jax.ensure_compile_time_eval():  # concrete even while tracing
                rows = select_all(data)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        what = f"`select` of the group {name!r} is called with {_ONE_EXAMPLE}"
        raise _failed(what, error) from error
    structure = jax.tree.structure(parameters)
    if jax.tree.structure(rows) != structure:
        numbers = jax.tree.leaves(parameters)
        if len(numbers) > 1 and all(x.ndim == 0 for x in numbers):
            raise ValueError(
                f"`select` of the group {name!r} chooses rows of arrays, but the model "
                f"holds {len(numbers)} single numbers: convert lists by `jnp.array`."
            )
        raise ValueError(
            f"`select` of the group {name!r} must return the structure of the model's "
            f"trained arrays, but {_mismatch(rows, parameters, model)}."
        )
    leaves = jax.tree.leaves(rows), jax.tree.leaves(parameters)
    for chosen, array in zip(*leaves, strict=True):
        if not jnp.issubdtype(chosen.dtype, jnp.integer) or array.ndim == 0:
            raise ValueError(
                f"`select` of the group {name!r} must return whole numbers, the rows of "
                f"each array, but for an array of the shape {array.shape} it returns "
                f"numbers of dtype {chosen.dtype}."
            )
        if not isinstance(chosen, Array) or isinstance(chosen, Tracer):
            continue
        chosen = np.asarray(chosen)
        bad = np.flatnonzero((chosen < 0) | (chosen >= array.shape[0]))
        if bad.size > 0:
            wrong, each = chosen.ravel()[bad[0]], max(1, chosen.size // len(chosen))
            raise ValueError(
                f"Example {bad[0] // each} of the group {name!r} selects row {wrong} of "
                f"an array that has {array.shape[0]} rows."
            )


def _mismatch(rows: PyTree, parameters: PyTree[Array], model: PyTree) -> str:
    """Return, in words, how selected rows differ in structure from the parameters."""

    def by_names(tree: PyTree) -> dict[str, Any]:
        pairs = jax.tree_util.tree_leaves_with_path(tree)
        return {name_of(path): leaf for path, leaf in pairs}

    selected, trained, held = map(by_names, (rows, parameters, model))
    for name in sorted(selected.keys() - trained.keys() - {""}):
        if any(other.startswith(f"{name}.") for other in trained):
            return f"{name!r} holds lists or several arrays: pass one array in its place"
        if name not in held:
            return f"the model has no {name!r}"
        if eqx.is_inexact_array(held[name]):
            return f"{name!r} is not trained: return `None` for it"
        what = "its entries are not floating-point: convert it by `.astype(float)`"
        return f"{name!r} is not trained, because {what}"
    missing = sorted(trained.keys() - selected.keys())
    if missing and not {""} & {*missing, *selected}:
        none = "return `jnp.zeros(0, int)` there if an example reads none of its rows"
        return f"returns nothing for {missing[0]!r}: {none}"
    structures = jax.tree.structure(parameters), jax.tree.structure(rows)
    return "returns {1} in place of {0}".format(*structures)
