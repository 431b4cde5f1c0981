"""Groups of residuals: functions of a model and one example each, of different kinds."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Key, PyTree, ScalarLike

from .._common._canonical import canonical, of_one_example
from .._common._checks import (
    as_scalar,
    check_callable,
    check_count,
    check_finite_nonnegative,
    is_own,
)
from .._jacobian import AtOnce, PerGroup, Selected, Sparsity
from .._linearisation._objective import GroupLosses, objective_of
from .._linearisation._recognised import AbstractRecognised, Posed
from ..losses import AbstractElementwiseLoss, AbstractLoss, SquaredError
from ..losses._base import check_loss
from ._data import a_kind_of, as_arrays, rows_not_finite
from ._model import Frozen, partition


class Residuals(AbstractRecognised):
    r"""A group of residuals: a function of the model and of one example, and examples.

    What is minimised is the sum over groups of `weight` times the `loss` of the residuals
    of all its examples; with squared error

    $$\sum_g w_g\,\tfrac12 \sum_n \lVert f_g(\theta, x_n)\rVert^2.$$

    It is also a function that `optimistix.least_squares` takes, as are several in
    [`gnlin.Groups`][]. The solvers of gnlin then know its examples and its loss; any
    other is given residuals of which half the sum of squares is the objective.

    **Arguments:**

    - `fn`: `fn(model, example)`, the residuals of one example: an array, or a pytree of
        arrays. It may differentiate the model by its input.
    - `data`: the examples, a pytree of arrays with a leading axis over them; or, in
        [`gnlin.fit`][], a function `points(key)` that returns such, drawn anew for each
        step. Left out, `fn` is of everything at once: `fn(y, args)` with optimistix's
        `args`; elsewhere these are `None`, and it is a function of the model alone, such
        as a penalty.
    - `weight`: of the group, finite and not negative; such as a volume over the number of
        its points.
    - `loss`: of the residuals, [`gnlin.SquaredError`][] by default; a robust one, such as
        [`gnlin.losses.Huber`][], or one on `targets`, such as
        [`gnlin.SoftmaxCrossEntropy`][].
    - `select`: where each example depends on few of the parameters: `select(example)` is,
        in the model's structure, for each of its arrays the rows (whole numbers, of any
        shape; none by an empty array) that the example reads, and `fn` is called with
        these rows alone. The Jacobian then is sparse, and products with it cost what is
        not zero.
    - `sparsity`: of a group without data, a [`gnlin.Sparsity`][]: which parameters each
        residual reads, where nobody says it by `select`.
    - `targets`: what the loss compares with, zeros by default; arrays with a leading axis
        over the examples.

    **Raises:** `ValueError` if there are no examples, or the weight cannot be meant; and
    from a solver other than gnlin's for a loss that is neither squared nor robust.

    !!! example

        ```python
        robust = gnlin.Residuals(residuals, loss=gnlin.losses.Huber(0.1))
        solution = optx.least_squares(robust, gnlin.LevenbergMarquardt(), y0, args)
        ```

        ```python
        x = jnp.linspace(0, 1, 20)
        net = eqx.nn.MLP("scalar", "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        interior = gnlin.Residuals(lambda net, x: jax.grad(net)(x) + net(x), x)
        start = gnlin.Residuals(lambda net, x: net(x) - 1, jnp.zeros(1), weight=10.0)
        solution = gnlin.solve(net, {"interior": interior, "start": start})
        solution.history["loss/start"]
        ```
    """

    fn: Callable[[Any, Any], PyTree[Array]]
    data: Any = None
    weight: ScalarLike = eqx.field(default=1.0, converter=as_scalar, kw_only=True)
    loss: AbstractLoss = eqx.field(default=SquaredError(), kw_only=True)
    targets: PyTree[ArrayLike] = eqx.field(default=None, kw_only=True)
    select: Callable[[Any], PyTree[Array]] | None = eqx.field(default=None, kw_only=True)
    sparsity: Sparsity | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        check_callable(
            "fn", self.fn, "a function of a model and one example", "lambda m, x: m(x)"
        )
        if self.select is not None:
            check_callable(
                "select", self.select, "a function of one example", "lambda x: x"
            )
            if self.data is None:
                raise ValueError(
                    "`select` is of one example, and without `data` there is none: pass "
                    "`data`, or leave `select` out."
                )
        if self.sparsity is not None:
            _check_sparsity(self.sparsity, self.data, self.loss)
        check_finite_nonnegative("weight", self.weight)
        check_loss(self.loss)

    def posed(self, y: PyTree[Array], args: Any) -> Posed:
        return Groups(self).posed(y, args)


def _check_sparsity(sparsity: Any, data: Any, loss: AbstractLoss) -> None:
    if not isinstance(sparsity, Sparsity):
        raise ValueError(
            "`sparsity` must be a `gnlin.Sparsity`, such as "
            f"`gnlin.Sparsity(fn, y, args)`, but {a_kind_of(sparsity)} was given."
        )
    if data is not None:
        raise ValueError(
            "`sparsity` is of a function of everything at once: leave `data` out, or say "
            "by `select` what an example reads."
        )
    if not isinstance(loss, SquaredError | AbstractElementwiseLoss):
        raise ValueError(
            "With `sparsity` the loss must be of each residual by itself, squared or a "
            f"robust one, but {type(loss).__name__} was given."
        )


class Groups(AbstractRecognised):
    """Groups of residuals as one function, for `optimistix.least_squares`.

    The solvers of gnlin know each group's examples and its loss; any other is given
    residuals of which half the sum of squares is the objective.

    **Arguments:**

    - `groups`: [`gnlin.Residuals`][] in a dictionary or a list, as [`gnlin.solve`][]
        has them. Those without data are called with optimistix's `args`.

    **Raises:** `ValueError` if these are no groups; and from a solver other than gnlin's
    for a loss that is neither squared nor robust.

    !!! example

        ```python
        penalty = gnlin.Residuals(lambda y, _: y, weight=1e-3)
        groups = gnlin.Groups([gnlin.Residuals(residuals), penalty])
        solution = optx.least_squares(groups, gnlin.LevenbergMarquardt(), y0, args)
        ```
    """

    groups: Any

    def __check_init__(self):
        if as_groups(self.groups) is None:
            raise ValueError(
                "`groups` must be `gnlin.Residuals` in a dictionary or a list, but "
                f"{a_kind_of(self.groups)} was given."
            )

    def posed(self, y: PyTree[Array], args: Any) -> Posed:
        groups: GroupsByName = as_groups(self.groups)  # type: ignore[assignment]
        refuse_samplers(groups)
        if args is not None and all(group.data is not None for group in groups.values()):
            raise ValueError("The residuals have their data: leave `args` out.")
        every = lambda _: True
        _, network, (inputs, targets, _), losses = of_groups(y, groups, every)
        inputs = {k: args if groups[k].data is None else x for k, x in inputs.items()}
        outputs = eqx.filter_eval_shape(network.outputs, y, inputs)
        losses.check(outputs, targets)
        objective = objective_of(losses, outputs, (inputs, targets, None))
        return network.function(), inputs, objective


GroupsByName = Mapping[str, Residuals]


def as_groups(data: Any) -> GroupsByName | None:
    """Of a dictionary or a list of groups, or a single one; `None` of anything else."""
    if isinstance(data, Groups):
        data = data.groups
    if isinstance(data, Residuals):
        return _checked({"residuals": data})
    pairs: list = []
    if isinstance(data, Mapping):
        pairs = list(data.items())
    elif isinstance(data, list | tuple):
        pairs = [(str(k), group) for k, group in enumerate(data)]
    if not any(isinstance(group, Residuals) for _, group in pairs):
        return None
    for name, group in pairs:
        if not isinstance(name, str) or not isinstance(group, Residuals):
            raise ValueError(
                f"A group of residuals must be a `gnlin.Residuals` under its name, but "
                f"{a_kind_of(group)} was given under {name!r}."
            )
    return _checked(dict(pairs))


def _checked(groups: GroupsByName) -> GroupsByName:
    """With its arrays as JAX's."""
    return {name: _with_arrays(name, group) for name, group in groups.items()}


def _with_arrays(name: str, group: Residuals) -> Residuals:
    if callable(group.data):
        return _sampled(name, group)
    trees = {"data": group.data, "targets": group.targets}
    trees = as_arrays(f"data of the group {name!r}", trees)
    if group.data is None:  # one example, of everything
        targets = jax.tree.map(lambda x: x[None], trees["targets"])
        return _with(group, None, targets)
    leaves = jax.tree.leaves(trees)
    if not jax.tree.leaves(trees["data"]):
        raise ValueError(f"The group {name!r} has no data: pass arrays.")
    lengths = {leaf.shape[0] if leaf.ndim > 0 else None for leaf in leaves}
    if None in lengths or len(lengths) > 1:
        found = " and ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"All arrays of the group {name!r} must have a leading axis over the same "
            f"number of examples, but have the shapes {found}."
        )
    if 0 in lengths:
        raise ValueError(f"The group {name!r} holds 0 examples: leave it out.")
    return _with(group, trees["data"], trees["targets"])


def _with(group: Residuals, data: PyTree, targets: PyTree) -> Residuals:
    places, none = lambda g: (g.data, g.targets), lambda x: x is None
    return eqx.tree_at(places, group, (data, targets), is_leaf=none)


def _sampled(name: str, group: Residuals) -> Residuals:
    """Checked, as far as one draw says."""
    if group.targets is not None:
        raise ValueError(
            f"The group {name!r} draws its data: leave its `targets` out, and let `fn` "
            "compare."
        )
    try:
        drawn = jax.eval_shape(group.data, jax.random.key(0))
    except TypeError as error:
        raise ValueError(
            f"The data of the group {name!r} is a function: it is called with a key, and "
            f"must return arrays, but failed: {str(error).splitlines()[0]}."
        ) from error
    sizes = {x.shape[0] if x.ndim > 0 else None for x in jax.tree.leaves(drawn)}
    if len(sizes) != 1 or sizes & {None, 0}:
        found = ", ".join(str(x.shape) for x in jax.tree.leaves(drawn))
        raise ValueError(
            f"What the group {name!r} draws must be arrays with a leading axis over its "
            f"examples, the same and at least one, but has the shapes {found or 'none'}."
        )
    return group


class GroupNetwork(eqx.Module):
    """What `Network` is of a model and its inputs, of a model and groups."""

    frozen: Frozen
    fns: Mapping[str, Callable[[Any, Any], PyTree[Array]]]
    takes_key: bool = eqx.field(static=True, default=False)
    has_state: bool = eqx.field(static=True, default=False)
    axis_name: str = eqx.field(static=True, default="batch")
    at_once: frozenset[str] = eqx.field(static=True, default=frozenset())
    samplers: Mapping[str, Callable[[Array], PyTree[Array]] | None] = eqx.field(
        default_factory=dict
    )
    batch_sizes: Mapping[str, int | None] = eqx.field(static=True, default_factory=dict)
    selections: Mapping[str, Callable[[Any], PyTree[Array]] | None] = eqx.field(
        default_factory=dict
    )
    sparsities: Mapping[str, Sparsity | None] = eqx.field(default_factory=dict)
    part_size: int | None = eqx.field(static=True, default=None)

    @property
    def draws(self) -> bool:
        """Whether each step has examples of its own."""
        chosen = (*self.samplers.values(), *self.batch_sizes.values())
        return any(x is not None for x in chosen)

    def drawn(self, data: tuple, key: Key[Array, ""]) -> tuple:
        """(inputs, targets, None) of a step: sampled, or some of them."""
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
        """The first targets, as many as a step has."""
        sizes = {name: self.batch_sizes.get(name) for name in targets}
        return {
            name: jax.tree.map(lambda x, k=size: x[:k], targets[name])
            for name, size in sizes.items()
        }

    def function(self) -> Callable[[PyTree, Any], Any]:
        def of_one(name: str) -> Callable:
            at_once = name in self.at_once
            fn = eqx.Partial(_residuals, name, at_once, self.frozen, self.fns[name])
            if at_once:
                return AtOnce(fn, self.sparsities.get(name))
            select = self.selections.get(name)
            return fn if select is None else Selected(fn, select)

        return PerGroup({name: of_one(name) for name in self.fns}, self.part_size)

    def canonical(self, parameters: PyTree, inputs: PyTree) -> "GroupNetwork":
        """The same, its groups known by what they compute of examples such as these: not
        where a group reads some rows of the parameters only, as its function says."""
        if any(select is not None for select in self.selections.values()):
            return self
        found = {}
        for name, fn in self.fns.items():
            at_once, example = name in self.at_once, inputs[name]
            if not at_once:
                example = of_one_example(example)
            of_one = eqx.Partial(_residuals, name, at_once, self.frozen, fn)
            found[name] = canonical(of_one, parameters, example)
        rest = jax.tree.map(lambda _: None, parameters)
        frozen = Frozen(rest, self.frozen.dtypes, None)
        return dataclasses.replace(self, frozen=frozen, fns=found)

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
        residuals = fn(frozen.in_training(parameters), example)
    except (IndexError, TypeError, ValueError) as error:
        if is_own(error):
            raise
        what = f"The function of the group {name!r} is called with the model and "
        what += "`args`, as the group has no `data`" if at_once else "one example"
        raise _failed(what, error, at_once) from error
    leaves = jax.tree.leaves(residuals)
    if not leaves or not all(map(eqx.is_array_like, leaves)):
        raise ValueError(
            f"The function of the group {name!r} must return arrays, but returned "
            f"{residuals!r}."
        )
    return residuals


def _failed(what: str, error: Exception, at_once: bool = False) -> ValueError:
    """Of a function of one example, or of everything."""
    said = str(error).strip().partition("\n")[0].rstrip(".")
    how = "" if at_once else ", without the data's leading axis"
    return ValueError(f"{what}{how}, and failed: {said}.")


def of_groups(
    model: PyTree,
    groups: GroupsByName,
    filter_spec: PyTree | Callable[[Any], bool],
    batch_size: Mapping[str, int | None] | int | None = None,
    part_size: int | None = None,
) -> tuple[PyTree, GroupNetwork, tuple, GroupLosses]:
    """(parameters, their function, its data, the losses)."""
    parameters, frozen = partition(model, filter_spec, called=False)
    sampled = {name: callable(group.data) for name, group in groups.items()}
    for name, group in groups.items():
        if group.select is not None:
            _check_selection(name, group, parameters)
    network = GroupNetwork(
        frozen,
        {name: group.fn for name, group in groups.items()},
        at_once=frozenset(k for k, g in groups.items() if g.data is None),
        samplers={k: g.data if sampled[k] else None for k, g in groups.items()},
        batch_sizes=_batch_sizes(groups, batch_size),
        selections={name: group.select for name, group in groups.items()},
        sparsities={name: group.sparsity for name, group in groups.items()},
        part_size=part_size,
    )
    inputs = {k: None if sampled[k] else g.data for k, g in groups.items()}
    targets = {name: group.targets for name, group in groups.items()}
    losses = GroupLosses(
        {name: group.loss for name, group in groups.items()},
        {name: group.weight for name, group in groups.items()},
        # Examples that are chosen from data, by a batch size, may be noisy.
        is_drawn=any(sampled.values())
        and all(size is None for size in network.batch_sizes.values()),
    )
    return parameters, network, (inputs, targets, None), losses


def _check_selection(name: str, group: Residuals, parameters: PyTree[Array]) -> None:
    """Rows that are there, of each array; as far as they are known here."""
    select: Callable = group.select  # type: ignore[assignment]
    data = group.data
    if callable(data):
        data = jax.eval_shape(data, jax.random.key(0))
    known = not any(
        isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in jax.tree.leaves(data)
    )
    every = jax.vmap(select)
    try:
        rows = jax.eval_shape(every, data)
        if known:
            with jax.ensure_compile_time_eval():  # within a program, too
                rows = every(data)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        what = f"`select` of the group {name!r} is called with one example"
        raise _failed(what, error) from error
    structure = jax.tree.structure(parameters)
    if jax.tree.structure(rows) != structure:
        raise ValueError(
            f"What `select` of the group {name!r} returns must have the structure of the "
            f"model's trained arrays, {structure}, but has {jax.tree.structure(rows)}."
        )
    for chosen, array in zip(
        jax.tree.leaves(rows), jax.tree.leaves(parameters), strict=True
    ):
        if not jnp.issubdtype(chosen.dtype, jnp.integer) or array.ndim == 0:
            raise ValueError(
                f"What `select` of the group {name!r} returns must be whole numbers, the "
                f"rows of each array, but for one of the shape {array.shape} it returned "
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
                f"an array that has {array.shape[0]}."
            )


def _batch_sizes(
    groups: GroupsByName, batch_size: Mapping[str, int | None] | int | None
) -> dict[str, int | None]:
    """Of each group; a number is for all that have as many examples."""
    if not isinstance(batch_size, Mapping):
        arrays = lambda g: g.data is not None and not callable(g.data)
        every = {name: batch_size for name, g in groups.items() if arrays(g)}
    else:
        every = dict(batch_size)
        if unknown := sorted(set(every) - set(groups)):
            raise ValueError(
                f"`batch_size` names {', '.join(map(repr, unknown))}, but the groups are "
                f"{', '.join(map(repr, groups))}."
            )
    for name, size in every.items():
        if size is None:
            continue
        check_count(f"batch_size[{name!r}]", size)
        if callable(groups[name].data):
            raise ValueError(
                f"The group {name!r} draws its data, as many as it likes: leave its "
                "`batch_size` out."
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
    return every


def refuse_samplers(groups: GroupsByName) -> None:
    for name, group in groups.items():
        if callable(group.data):
            raise ValueError(
                f"The group {name!r} draws its data anew for each step, as only "
                "`gnlin.fit` can: use that, or pass arrays."
            )


def refuse_for_groups(**options: Any) -> None:
    """What is of one model on one batch."""
    defaults = {"loss": SquaredError(), "state": None, "key": None}
    for name, value in options.items():
        if not eqx.tree_equal(value, defaults.get(name)):
            hint = "each group has its own" if name == "loss" else "groups have none"
            raise ValueError(f"`{name}` is not for groups of residuals: {hint}.")


def where_not_finite(groups: GroupsByName) -> str:
    """Which example of which group is not finite, in a sentence; or ""."""
    for name, group in groups.items():
        for bad in rows_not_finite(eqx.filter(group.data, eqx.is_array)):
            return f"Example {bad[0]} of the group {name!r} is not finite."
    return ""
