"""The compiled parts of a run: one step, and a look at the validation data."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Key, PyTree

from .. import _tree
from .._losses import AbstractLoss
from .._model import Network
from .._objective import BatchLoss
from .._sharding import everywhere, keep, Places, spread
from .._solver import AbstractGaussNewton, linearised, State, Watch
from ._stream import gather


AnyArray = jax.Array | np.ndarray | np.generic


class Carry(NamedTuple):
    """What a step hands to the next."""

    parameters: PyTree[Array]
    solver_state: State
    model_state: PyTree
    watch: Watch | None


class Setting(NamedTuple):
    """What stays the same for the whole run."""

    solver: AbstractGaussNewton
    loss: AbstractLoss
    network: Network
    key: Key[Array, ""]
    augment: Callable[..., PyTree[Array]] | None
    batch_size: int | None
    curvature_batch_size: int | None
    # Whether it sees one batch after another, not the same examples every time
    streaming: bool
    # Of how many times the first loss, for some steps, a run diverges
    divergence: float | None = None
    places: Places = Places()


def begin(setting: Setting, parameters: PyTree, model_state: PyTree, example) -> Carry:
    """Before the first step; nothing is evaluated."""
    outputs = checked_outputs(
        setting, parameters, model_state, example, augment=setting.augment
    )
    solver = setting.solver
    start = solver.start_stream if setting.streaming else solver.start
    state, watch = start(parameters, outputs), None
    if setting.divergence is not None:
        zero = jnp.zeros((), state.report.loss.dtype)
        watch = Watch(zero, zero, parameters, jnp.zeros((), int))
    return Carry(parameters, state, model_state, watch)


def checked_outputs(
    setting: Setting, parameters: PyTree, model_state: PyTree, example, *, augment=None
) -> PyTree[jax.ShapeDtypeStruct]:
    """The outputs' shapes, which the targets fit."""
    inputs, targets, _ = example
    network = setting.network

    def forward(parameters, inputs):
        n = jax.tree.leaves(inputs)[0].shape[0]
        keys = jax.random.split(setting.key, n)
        if augment is not None:
            inputs = jax.vmap(augment)(inputs, keys)
        out = network.function()(parameters, network.args(inputs, keys, model_state))
        return out[0] if network.has_state else out

    outputs = eqx.filter_eval_shape(forward, parameters, inputs)
    setting.loss.check(outputs, targets)
    return outputs


def step(setting: Setting, carry: Carry, batch: tuple, numbers: list[Array]):
    """One step, `(carry, row)`: after one that has failed nothing changes.

    - `batch`: the data, and the order in which to take them.
    - `numbers`: an array of the batch's index in it, and the number of the step.
    """
    solver, network = setting.solver, setting.network
    size = setting.batch_size or 0
    wider = setting.curvature_batch_size or size
    (index, number), (data, order) = numbers[0], batch
    places = setting.places
    data = gather(data, order, index, size, wider)
    inputs, targets, weights = keep(data, places.batch)
    num_examples = jax.tree.leaves(inputs)[0].shape[0]
    key, augment_key = jax.random.split(jax.random.fold_in(setting.key, number))
    if setting.augment is not None:
        keys = jax.random.split(augment_key, num_examples)
        inputs = jax.vmap(setting.augment)(inputs, keys)
    keys = jax.random.split(key, num_examples)
    fn = network.function()
    args = network.args(inputs, keys, carry.model_state)
    has_aux = network.has_state
    outputs = jax.eval_shape(fn, carry.parameters, args)
    outputs = outputs[0] if has_aux else outputs
    setting.loss.check(outputs, targets)
    objective = BatchLoss(
        setting.loss,
        outputs,
        targets,
        weights,
        num_leading=size if wider > size else None,
        is_sample=setting.streaming,
    )

    if setting.streaming:
        with spread(places):
            y, state, loss, aux = solver.advance_stream(
                objective, fn, carry.parameters, args, carry.solver_state, has_aux=has_aux
            )
    else:
        lin, aux = linearised(fn, carry.parameters, args, has_aux)
        evaluate = lambda y: fn(y, args)[0] if has_aux else fn(y, args)
        with spread(places):
            y, state = solver.advance(objective, lin, evaluate, carry.solver_state)
            state = solver.judged(objective, evaluate, y, state)
        loss = objective.value(lin.outputs)
    watch = carry.watch
    if watch is not None:
        assert setting.divergence is not None
        # Where the loss is known: a step may have been taken back before this one.
        stride = state.stride
        parameters = carry.parameters if stride is None else stride.point
        now = loss.astype(watch.first.dtype)
        first = Watch.start(objective, parameters, outputs, now)
        watch = _tree.where(number == 0, first, watch)
        watch = watch.look(parameters, now, setting.divergence)
        y = _tree.where(watch.diverges, watch.y, y)
        result = optx.RESULTS.where(
            watch.diverges, optx.RESULTS.nonlinear_divergence, state.result
        )
        state = eqx.tree_at(lambda s: s.result, state, result)
    model_state = carry.model_state
    if has_aux:
        failed = state.result != optx.RESULTS.successful
        model_state = _tree.where(failed, model_state, aux)
    new = Carry(y, state, model_state, watch)
    over = carry.solver_state.result != optx.RESULTS.successful
    new = keep(_tree.where(over, carry, new), places.carry)
    report, counts = state.report, state.counts
    row = [
        loss,
        report.gradient_norm,
        report.step_norm,
        report.damping,
        report.num_inner_steps,
        counts.num_feature_updates,
        new.solver_state.result != optx.RESULTS.successful,
        state.terminate,
    ]
    row = jnp.stack([jnp.asarray(x, float) for x in row])
    return new, everywhere(row, places.mesh)


def evaluate(setting: Setting, metrics: tuple, with_linearised: bool, carry, data):
    """Sums over some validation examples: of what their targets count in a mean, of the
    number that count, of the losses and each metric; the latter again of the linearised
    model, where one is trained."""
    inputs, targets, weights = data
    network = setting.network.in_inference()
    fn = network.function()
    args = network.args(inputs, None, carry.model_state)
    num_examples = jax.tree.leaves(inputs)[0].shape[0]
    weights = jnp.ones(num_examples) if weights is None else weights
    counts = jax.vmap(setting.loss.target_weights)(targets).astype(weights.dtype)
    total = _tree.matmul(weights, jnp.sum(counts, axis=tuple(range(1, counts.ndim))))
    number = jnp.sum(counts != 0, dtype=float)

    def predict(y):
        return fn(y, args)[0] if network.has_state else fn(y, args)

    def figures(outputs):
        shapes = jax.eval_shape(lambda: outputs)
        setting.loss.check(shapes, targets)
        objective = BatchLoss(setting.loss, shapes, targets)
        losses = jax.vmap(setting.loss.value)(outputs, objective.targets)
        means = [metric(outputs, targets) for metric in metrics]
        sums = [jnp.where(number > 0, number * jnp.asarray(x, float), 0) for x in means]
        return [_tree.dot(weights, losses), *sums]

    found = figures(predict(carry.parameters))
    if with_linearised:
        point = carry.solver_state.memory.point
        delta = jax.tree.map(jnp.subtract, carry.parameters, point)
        outputs, change = jax.jvp(predict, (point,), (delta,))
        found += figures(_tree.axpy(1, change, outputs))
    sums = jnp.stack([jnp.asarray(x, float) for x in [total, number, *found]])
    return (everywhere(sums, setting.places.mesh),)


class Compiled:
    """A function of (fixed, changing...), called with the changing part as lists of
    arrays: what a call costs beside its computation is the dispatch of a flat list. It
    is compiled once for all runs that differ in numbers only."""

    def __init__(self, fn: Callable, fixed: tuple, *changing: PyTree):
        arrays, static = split(fixed)
        self._fixed = [jnp.asarray(x) for x in arrays]
        self._jitted = _jitted(fn, static, tuple(split(part)[1] for part in changing))

    def __call__(self, *changing: Sequence[Any]):
        return self._jitted(self._fixed, *changing)


@functools.lru_cache(maxsize=128)
def _jitted(fn: Callable, fixed_static: "Static", changing_static: tuple) -> Callable:
    @jax.jit
    def call(fixed, *changing):
        parts = [
            join(arrays, static)
            for arrays, static in zip(changing, changing_static, strict=True)
        ]
        carry, *rest = fn(*join(fixed, fixed_static), *parts)
        return split(carry)[0], *rest

    return call


class Static(NamedTuple):
    """A tree without its arrays; hashable."""

    structure: Any
    leaves: tuple
    types: tuple[type, ...]  # of the leaves: 3 and 3.0 are equal, and not the same


_AN_ARRAY = object()


def split(tree: PyTree) -> tuple[list[AnyArray], Static]:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    rest = tuple(_AN_ARRAY if _is_array(leaf) else leaf for leaf in leaves)
    return arrays, Static(structure, rest, tuple(map(type, rest)))


def join(arrays: Sequence[AnyArray], static: Static) -> PyTree:
    remaining = iter(arrays)
    leaves = [next(remaining) if x is _AN_ARRAY else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, AnyArray)
