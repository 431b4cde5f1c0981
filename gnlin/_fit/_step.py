"""The compiled parts of a run: a step, and the evaluation of validation data."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import PyTree

from .._common import _tree
from .._common._canonical import AnyArray, join, split, Static
from .._common._checks import is_key
from .._common._identity import checksum, program
from .._common._quickly import few_passes
from .._common._sharding import everywhere, keep
from .._linearisation._group_loss import any_counts
from .._linearisation._objective import BatchLoss
from .._training._step import advanced, Carry, checked_outputs, StepSettings
from ..losses import AbstractLoss
from ._stream import ArrayStream, gather


def step(setting: StepSettings, carry: Carry, batch: tuple):
    """Make one step; return the carry and a row of the history. After a failed step the
    carry does not change any more.

    - `batch`: from `Batch.arrays`.
    """
    arrays, static = split(carry)

    @jax.jit  # traced once for both uses
    def advance(arrays):
        new, row = _next(setting, join(arrays, static), batch)
        return split(new)[0], row

    def stay(arrays):
        row = jax.eval_shape(advance, arrays)[1]
        return arrays, jnp.ones(row.shape, row.dtype)

    over = carry.solver_state.result != optx.RESULTS.successful
    arrays, row = jax.lax.cond(over, stay, advance, arrays)
    return join(arrays, static), row


def _next(setting: StepSettings, carry: Carry, batch: tuple):
    """Make one step, as `step` does, of a run that has not ended."""
    size = setting.batch_size or 0
    wider = setting.curvature_batch_size or size
    data, order, (index, number) = batch
    data = gather(data, order, index, size, wider)
    data = setting.drawn(keep(data, setting.places.batch), number)
    outputs = checked_outputs(setting, carry.parameters, carry.model_state, data)
    args = setting.args(data[0], number, carry.model_state)
    leading, counts = size if wider > size else None, None
    objective = setting.objective(
        outputs, data, num_leading=leading, is_sample=setting.streaming
    )
    if setting.streaming:
        counts = any_counts(setting.loss, data, leading)
    new, row, moved = advanced(setting, objective, args, carry, number, counts)
    new = keep(new, setting.places.carry)
    state = new.solver_state
    ended = state.result != optx.RESULTS.successful, state.terminate
    row = jnp.stack([jnp.asarray(x, float) for x in [*row.values(), *ended, moved]])
    return new, everywhere(row, setting.places.mesh)


def evaluate(
    setting: StepSettings, metrics: tuple, with_linearised: bool, carry, state, data
):
    """Return sums over some validation examples: the targets' weights in a mean, the
    number of targets with a weight, the losses, and each metric; and again the losses and
    metrics of the linearised model, if one is trained.

    - `state`: that of the model at its present parameters. `carry` has that of the
        linearised model.
    """
    inputs, targets, weights = data
    loss = setting.loss
    assert isinstance(loss, AbstractLoss)  # groups have no validation
    num_examples = jax.tree.leaves(inputs)[0].shape[0]
    weights = jnp.ones(num_examples) if weights is None else weights
    counts = jax.vmap(loss.target_weights)(targets).astype(weights.dtype)
    total = _tree.matmul(weights, jnp.sum(counts, axis=tuple(range(1, counts.ndim))))
    number = jnp.sum(counts != 0, dtype=float)

    def predict(y, state):
        return setting.outputs(y, setting.network.args(inputs, None, state))

    def figures(outputs):
        shapes = jax.eval_shape(lambda: outputs)
        loss.check(shapes, targets)
        objective = BatchLoss(loss, shapes, targets)
        losses = jax.vmap(loss.value)(outputs, objective.targets)
        means = [metric(outputs, targets) for metric in metrics]
        sums = [jnp.where(number > 0, number * jnp.asarray(x, float), 0) for x in means]
        return [_tree.dot(weights, losses), *sums]

    found = figures(predict(carry.parameters, state))
    if with_linearised:
        point = setting.solver.linearisation_point(carry.solver_state)
        delta = jax.tree.map(jnp.subtract, carry.parameters, point)
        of_point = lambda y: predict(y, carry.model_state)
        outputs, change = jax.jvp(of_point, (point,), (delta,))
        found += figures(_tree.axpy(1, change, outputs))
    sums = jnp.stack([jnp.asarray(x, float) for x in [total, number, *found]])
    return (everywhere(sums, setting.places.mesh),)


def with_shared_network(
    setting: StepSettings, parameters: PyTree, stream: Any
) -> StepSettings:
    """Return the settings with the network compared by what it computes, so that a model
    or groups whose functions are defined again are not compiled again. The network stays
    as it is for a loader, whose batches may have different shapes, and for arrays on
    several devices."""
    network, is_here = setting.network, setting.places.mesh is None
    if not (isinstance(stream, ArrayStream) and is_here):
        return setting
    network = network.canonical(parameters, stream.example[0], setting.key)
    return setting._replace(network=network)


def as_handed_out(carry: Carry) -> Carry:
    """Give the carry the types that a step returns, so that the second step is not
    compiled again: all become strong, except for integers of the model's state. A strong
    integer would promote single precision to double where a float is computed from it, as
    in batch normalisation."""

    def strong(x):
        if not isinstance(x, AnyArray) or is_key(x):
            return x
        return jax.lax.convert_element_type(jnp.asarray(x), x.dtype)

    def is_integer(x):
        return isinstance(x, AnyArray) and jnp.issubdtype(x.dtype, jnp.integer)

    own = carry.model_state, carry.before
    integers, others = eqx.partition(own, is_integer)
    typed = jax.tree.map(strong, carry._replace(model_state=others[0], before=others[1]))
    model_state, before = eqx.combine(integers, (typed.model_state, typed.before))
    return typed._replace(model_state=model_state, before=before)


class Compiled:
    """A compiled function `fn(*fixed, *changing)` that is called with the arrays of each
    changing argument as a flat list, which is fast to dispatch. Runs that differ only in
    the values of arrays share one compilation."""

    def __init__(self, fn: Callable, fixed: tuple, *changing: PyTree):
        arrays, static = split(fixed)
        self._fixed = [jnp.asarray(x) for x in arrays]
        self._jitted = _jitted(fn, static, tuple(split(part)[1] for part in changing))

    def program(self, *changing: PyTree) -> str:
        """Return a digest of the program, and a checksum of its fixed arrays."""
        arrays = (split(part)[0] for part in changing)
        digest = program(self._jitted, self._fixed, *arrays)
        return f"program {digest} with numbers {checksum(self._fixed)}"

    def __call__(self, *changing: Sequence[Any]):
        return self._jitted(self._fixed, *changing)


@functools.lru_cache(maxsize=128)
def _jitted(fn: Callable, fixed_static: Static, changing_static: tuple) -> Callable:
    @functools.partial(jax.jit, compiler_options=few_passes())
    def call(fixed, *changing):
        parts = [
            join(arrays, static)
            for arrays, static in zip(changing, changing_static, strict=True)
        ]
        carry, *rest = fn(*join(fixed, fixed_static), *parts)
        return split(carry)[0], *rest

    return call
