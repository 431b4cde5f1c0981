"""The state of a model at its final parameters: the running statistics of batch
normalisation, and how well the model predicts with them in inference mode."""

import math
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .._common import _tree
from .._common._checks import as_key, check_count
from .._common._quickly import quickly
from ._data import not_finite
from ._model import in_single, make_network, Network
from ._step import Carry, key_of_steps, StepSettings


# The loss in inference mode is far from that in training mode if it is more than this
# multiple of it, and more than these parts of the first loss: on a full batch, where
# both modes have the same statistics, and on one batch of many.
_WORSE, _OF_FULL_BATCH, _OF_BATCH = 2.0, 1e-6, 1e-2
# What to do after a full batch, whose statistics were taken at the end.
_REMEDY = (
    "before it predicts, call it in training mode on all data, again and again, until "
    'its state no longer changes; or use `equinox.nn.BatchNorm` with `mode="batch"`, one '
    "for each layer, whose statistics are taken at the end of the run"
)

Statistics = list[tuple[Array, Array]]  # means and variances of each normalisation


def norms_of(model: PyTree, state: PyTree) -> list[eqx.nn.BatchNorm]:
    """Return the batch normalisations in training mode that have running statistics in
    `state` and do not normalise by them (`mode="batch"`)."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    norms = filter(is_norm, jax.tree.leaves(model, is_leaf=is_norm))
    return [norm for norm in norms if not norm.inference and _is_in(state, norm)]


def _is_in(state: PyTree, norm: eqx.nn.BatchNorm) -> bool:
    if not isinstance(state, eqx.nn.State) or norm.batch_state_index is None:
        return False
    try:  # the state may be another model's, if the normalisation is not called
        return state.get(norm.batch_state_index) is not None
    except KeyError:
        return False


def _copy(state: Any) -> Any:
    """Return another object with the same entries: Equinox forbids the use of a state
    after one of its entries was set."""
    return jax.tree.map(lambda x: x, state)


def _with_zeros(norms: list[eqx.nn.BatchNorm], state: Any) -> Any:
    """Return the state with running statistics of zero, so that they are a multiple of
    those of a batch after a forward pass."""
    state = _copy(state)
    for norm in norms:
        zeros = _tree.zeros_like(state.get(norm.batch_state_index))
        state = state.set(norm.batch_state_index, zeros)
    return state


def _statistics(norms: list[eqx.nn.BatchNorm], before: Any, after: Any) -> Statistics:
    """Return the statistics of a batch from the state after its forward pass, which began
    with zeros. Keep those of `before` for a normalisation that was not called."""
    found = []
    for norm in norms:
        count, called = (s.get(norm.batch_counter) for s in (before, after))
        number = (called - count)[..., None]
        log = math.log(norm.momentum) if norm.momentum > 0 else -math.inf
        weight = jnp.where(number > 0, -jnp.expm1(number * log), 0)
        running = before.get(norm.batch_state_index)
        kept = [x / _scale(norm, before) for x in running]
        new = after.get(norm.batch_state_index)
        safe = jnp.where(weight > 0, weight, 1)
        pairs = zip(new, kept, strict=True)
        found.append(tuple(jnp.where(weight > 0, x / safe, k) for x, k in pairs))
    return found


def _scale(norm: eqx.nn.BatchNorm, state: Any) -> Array:
    """Return the number by which inference mode divides the running statistics."""
    count = state.get(norm.batch_counter)
    return jnp.where(count == 0, 1, 1 - norm.momentum**count)[..., None]


def _with_statistics(
    norms: list[eqx.nn.BatchNorm], state: Any, statistics: Statistics
) -> Any:
    """Return the state for which inference mode has these statistics."""
    state = _copy(state)
    for norm, pair in zip(norms, statistics, strict=True):
        like = state.get(norm.batch_state_index)
        scale = _scale(norm, state)
        scaled = tuple(
            (x * scale).astype(y.dtype) for x, y in zip(pair, like, strict=True)
        )
        state = state.set(norm.batch_state_index, scaled)
    return state


@quickly
def at_the_end(setting: StepSettings, carry: Carry, data: tuple) -> tuple[PyTree, Array]:
    """Return the state of the model at the final parameters of a run on a full batch, and
    their loss.

    The state is what the forward pass of this loss leaves, so that inference mode has the
    same loss if it uses the statistics of that pass. The last step left those of its
    linearisation point, for which the loss in inference mode may be far larger. All data
    are at hand, so the running statistics of batch normalisation become those of the
    data.
    """
    assert carry.before is not None
    (before, number), parameters = carry.before, carry.parameters
    norms = norms_of(setting.network.frozen.in_training(parameters), before)
    args = setting.args(data[0], number, _with_zeros(norms, before))
    found, after = setting.function()(parameters, args)
    after = _with_statistics(norms, after, _statistics(norms, before, after))
    loss = setting.objective(jax.eval_shape(lambda: found), data).value(found)
    last = carry.loss
    loss = jnp.where(jnp.isfinite(last), loss.astype(last.dtype), last)
    numbers = eqx.filter(after, eqx.is_inexact_array)
    if jax.tree.leaves(numbers):  # A failed run keeps a state that is finite.
        after = _tree.where(_tree.all_finite(numbers), after, carry.model_state)
    return after, loss


@eqx.filter_jit
def _loss_on(
    setting: StepSettings,
    parameters: PyTree,
    state: PyTree,
    data: tuple,
    is_training: bool,
) -> Array:
    args = setting.network.args(data[0], None, state)
    if is_training:
        args = setting.args(data[0], 0, state)
    outputs = setting.outputs(parameters, args)
    objective = setting.objective(jax.eval_shape(lambda: outputs), data)
    return objective.value(outputs)


@eqx.filter_jit
def _of_batch(
    network: Network, parameters: PyTree, state: PyTree, inputs: PyTree, keys: Any
) -> Statistics:
    norms = norms_of(network.frozen.in_training(parameters), state)
    args = network.args(inputs, keys, _with_zeros(norms, state))
    _, after = network.function()(parameters, args)
    return _statistics(norms, state, after)


def over_batches(
    network: Network, parameters: PyTree, state: PyTree, batches: Iterable[tuple]
) -> PyTree:
    """Return the state with running statistics that are means over batches, if these are
    finite.

    - `batches`: pairs of inputs and their keys.
    """
    norms = norms_of(network.frozen.in_training(parameters), state)
    if not norms:
        return state
    means = None
    for i, (inputs, keys) in enumerate(batches):
        of_batch = _of_batch(network, parameters, state, inputs, keys)
        if means is None:
            means = of_batch
        else:
            means = jax.tree.map(lambda m, x, n=i + 1: m + (x - m) / n, means, of_batch)
    if means is None or not _tree.all_finite(means):  # A batch may have bad numbers.
        return state
    return _with_statistics(norms, state, means)


def batch_statistics(
    model: PyTree,
    state: eqx.nn.State,
    inputs: PyTree,
    *,
    batch_size: int | None = None,
    axis_name: str = "batch",
    key: Key[Array, ""] | None = None,
) -> eqx.nn.State:
    """Return a model's state with the running statistics that batch normalisation has of
    these inputs.

    While a model is trained, its running statistics are those of earlier parameters. This
    function takes them at the parameters of `model`, from one forward pass over the
    inputs: they are means over the batches, as many passes in training mode would leave
    them. Use it before the model predicts in inference mode. All other entries of the
    state stay as they are, such as counters, the vectors of spectral normalisation, and
    the statistics of `equinox.nn.BatchNorm(mode="ema")`.

    [`gnlin.solve`][], and [`gnlin.fit`][] of data in arrays, do the same at their end.

    **Arguments:**

    - `model`, `state`: the model in training mode, and its state.
    - `inputs`: the inputs of the training data or of a sample of them, a pytree of arrays
        with a leading axis over examples.
    - `batch_size`: the number of examples in a batch, which should be that of training;
        by default all examples are one batch. Examples that do not fill a batch are left
        out.
    - `axis_name`: the `axis_name` of the model's batch normalisation.
    - `key`: the key for dropout; `jax.random.key(0)` by default.

    **Returns:** the new state.

    **Raises:** `ValueError` if the model has no batch normalisation in training mode with
    `mode="batch"`, if there are fewer inputs than `batch_size`, or if an input is not
    finite.

    !!! example

        ```python
        make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
        model, state = make(3, "batch", mode="batch")
        inputs = jax.random.normal(jax.random.key(0), (1000, 3))
        state = gnlin.predict.batch_statistics(model, state, inputs, batch_size=125)
        ```
    """
    if batch_size is not None:
        check_count("batch_size", batch_size)
    parameters, network = make_network(model, eqx.is_inexact_array, state, axis_name)
    if not norms_of(model, state):
        raise ValueError(
            'The model has no `equinox.nn.BatchNorm` with `mode="batch"` in training '
            "mode, so there are no running statistics to take: pass the model as it was "
            "trained, with its own state."
        )
    arrays = jax.tree.map(jnp.asarray, inputs)
    lengths = {len(x) if jnp.ndim(x) else 0 for x in jax.tree.leaves(arrays)}
    if len(lengths) != 1 or min(lengths) < (batch_size or 1):
        raise ValueError(
            "`inputs` must be arrays with one leading axis over at least "
            f"{batch_size or 1} examples, but have {sorted(lengths)}."
        )
    if fault := not_finite(arrays, None):
        raise ValueError(f"{fault.removesuffix('.')}: leave such examples out.")
    (num_examples,) = lengths
    size = batch_size or num_examples
    steps = key_of_steps(jax.random.key(0) if key is None else as_key(key))

    def batches():
        for number, first in enumerate(range(0, num_examples - size + 1, size)):
            part = jax.tree.map(lambda x, i=first: x[i : i + size], arrays)
            keys = jax.random.split(jax.random.fold_in(steps, number), size)
            yield part, keys if network.takes_key else None

    found = over_batches(network, parameters, in_single(state), batches())
    return network.frozen.with_state(found)


def doubt_of_inference(
    driver: str,
    setting: StepSettings,
    parameters: PyTree,
    state: PyTree,
    batches: list[tuple],
    losses: Any,
    remedy: str = _REMEDY,
    training: Any = None,
) -> str:
    """Return a sentence if the model is much worse in inference mode than in training
    mode, or if the model fails in inference mode, which training does not need, "".

    - `batches`: the data on which the modes are compared.
    - `losses`: those of the history.
    - `remedy`: what to do, the end of the sentence.
    - `training`: the loss in training mode, known on a full batch only.
    """
    first, is_full = losses[0] if len(losses) else 0.0, training is not None
    predicts = setting._replace(network=eqx.nn.inference_mode(setting.network))

    def mean(setting: StepSettings, is_training: bool) -> float:
        of_each = (_loss_on(setting, parameters, state, x, is_training) for x in batches)
        return float(sum(of_each)) / len(batches)

    try:
        trained = mean(setting, True) if training is None else float(training)
        inference = mean(predicts, False)
    except Exception:  # raised by the user's model, after a run that may have taken hours
        return ""
    rounding = (_OF_FULL_BATCH if is_full else _OF_BATCH) * abs(float(first))
    most = trained + (_WORSE - 1) * abs(trained) + rounding
    if inference <= most or not math.isfinite(most):
        return ""
    return (
        f"{'The' if is_full else 'On some batches, the'} model of `gnlin.{driver}` has a "
        f"loss of {trained:.4g}, but of {inference:.4g} in inference mode with the state "
        f"that is returned: {remedy}."
    )
