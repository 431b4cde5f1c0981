"""Mini-batches, history, callbacks, checkpoints: the loop on the host."""

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Key, PyTree

from .._losses import AbstractLoss, check_loss, SquaredError
from .._model import make_network
from .._solver import AbstractGaussNewton, IterativeLinearisation, statistics, Stream
from ..callbacks import Callback, Progress
from . import _checkpoint
from ._checkpoint import Checkpoint, CheckpointError
from ._history import COLUMNS, FitHistory, Rows
from ._step import (
    begin,
    Carry,
    checked_outputs,
    Compiled,
    evaluate,
    join,
    Setting,
    split,
    step,
)
from ._stream import ArrayStream, Batch, IterableStream, make_stream


# Validation examples that are looked at together, where there is no batch size to go by.
_VALIDATION_BATCH = 1000


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What [`gnlin.fit`][] returns.

    **Attributes:**

    - `model`: the trained model: the last finite one, or the best, if a callback has
        asked for it.
    - `state`: the model's state, `None` if it has none.
    - `history`: a [`gnlin.FitHistory`][].
    - `stats`: `num_steps`, `num_epochs`, `num_feature_updates`, `num_inner_steps`,
        `num_jvps`, `num_vjps`, `num_accepted_steps`, `num_rejected_steps`.
    - `result`: an `optimistix.RESULTS`: `successful` if it has converged or a callback
        has stopped it, `nonlinear_max_steps_reached` if all steps were made, `nonfinite`
        or `nonlinear_divergence` if the run ended early.
    - `reason`: why it ended, in words.
    - `linearisation_point`: the model at $\\theta_s$, where iterative linearisation has
        kept it across batches; else `None`.
    """

    model: PyTree
    state: PyTree
    history: FitHistory
    stats: dict[str, Any]
    result: optx.RESULTS
    reason: str
    linearisation_point: PyTree


def fit(
    model: PyTree,
    data: Any,
    solver: AbstractGaussNewton,
    *,
    loss: AbstractLoss = SquaredError(),
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    key: Key[Array, ""] | None = None,
    state: PyTree = None,
    validation: Any = None,
    validate_every: int | None = None,
    metrics: Mapping[str, Callable] | None = None,
    augment: Callable[..., PyTree[Array]] | None = None,
    curvature_batch_size: int | None = None,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    axis_name: str = "batch",
    callbacks: Iterable[Callback] | Callback = (),
    progress: bool = True,
    checkpoint: Checkpoint | str | Path | None = None,
    resume: bool = False,
) -> FitResult:
    r"""Train an Equinox model on batches of data by a solver of this library.

    One step of a Gauss-Newton solver is an outer step on the batch: it linearises there,
    solves as far as it does, and steps. One step of [`gnlin.IterativeLinearisation`][] is
    an inner step on the batch: $\theta_s$ stays for K of them, across batches, each of
    whose linearised outputs take one forward, one tangent and one transposed pass. On the
    full batch (`batch_size=None`) one step of any solver is an outer step.

    **Arguments:**

    - `model`: any callable pytree from one input to one output. A `key` argument, if it
        has one (for dropout), is given a key of its own for each example.
    - `data`: `(inputs, targets)` or `(inputs, targets, weights)`, a *tuple* of arrays
        with a leading axis over examples; or any iterable of such batches, such as a list
        or a loader of tf.data, grain or torch; or a function of the epoch (0, 1, ...)
        that returns an iterable.
    - `solver`: any solver of gnlin.
    - `loss`: of the outputs, on the targets.
    - `batch_size`: examples a step, drawn anew each epoch without replacement; what is
        left of an epoch, less than a batch, is left out. `None` for all of them.
    - `epochs`, `steps`: how long to train; one of the two.
    - `key`: of shuffling, augmentation and dropout; `jax.random.key(0)` by default.
    - `state`: the model's state (as from `equinox.nn.make_with_state`), if it has one.
        The linearisation includes the statistics of the batch.
    - `validation`: data to look at, likewise; in inference mode, on the network and,
        where one is trained across batches, on its linearisation.
    - `validate_every`: steps from one look to the next; by default once an epoch.
    - `metrics`: names and functions of `(outputs, targets)`, of many examples, such as
        [`gnlin.accuracy`][]; means over the validation data go to the history.
    - `augment`: `augment(inputs, key)` of one example.
    - `curvature_batch_size`: examples, more than the batch, from which the curvature is
        estimated, while the gradient is the batch's; quadratic form only.
    - `filter_spec`: which leaves to train, as for `equinox.partition`.
    - `axis_name`: of the batch, as the model's batch normalisation was given it.
    - `callbacks`: of `gnlin.callbacks`, or your own.
    - `progress`: whether to draw a bar, where there is a terminal. Without it and without
        callbacks nothing is printed or called.
    - `checkpoint`: a [`gnlin.Checkpoint`][], or a folder to write one to every ten
        minutes.
    - `resume`: whether to go on from the folder's latest checkpoint, if it has one. Then
        the history and the parameters become, bit for bit, what they had been without the
        interruption, if `data`, `solver` and the rest are what they were.

    **Returns:** a [`gnlin.FitResult`][]. Non-finite numbers and divergence end the run at
    the last finite point, with a warning; so does Ctrl-C.

    **Raises:** `ValueError` if an argument cannot be meant; [`gnlin.CheckpointError`][],
    before training, if a checkpoint cannot be written, is damaged, or is another run's.

    !!! example

        ```python
        result = gnlin.fit(
            model,
            (images, labels),
            gnlin.DampedGaussNewton(1.0),
            loss=gnlin.SoftmaxCrossEntropy(),
            batch_size=32,
            epochs=2,
            validation=(test_images, test_labels),
            metrics={"accuracy": gnlin.accuracy},
        )
        result.model, result.history["validation_accuracy"][-1]
        ```
    """
    _check_solver(solver)
    check_loss(loss)
    for name, value in (
        ("batch_size", batch_size),
        ("epochs", epochs),
        ("steps", steps),
        ("validate_every", validate_every),
        ("curvature_batch_size", curvature_batch_size),
    ):
        _check_count(name, value)
    if (epochs is None) == (steps is None):
        raise ValueError("Pass one of `epochs` and `steps`: how long to train.")
    if augment is not None and not callable(augment):
        raise ValueError("`augment` must be a function, `augment(inputs, key)`.")
    metrics = dict(metrics or {})
    if not all(callable(metric) for metric in metrics.values()):
        raise ValueError("`metrics` must be functions of `(outputs, targets)`, by name.")
    if (metrics or validate_every) and validation is None:
        raise ValueError(
            "`metrics` and `validate_every` are of validation data: pass `validation`."
        )
    if "loss" in metrics:
        raise ValueError(
            "The validation loss has a column of its own: call the metric other than "
            '"loss".'
        )
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    if not all(isinstance(callback, Callback) for callback in callbacks):
        raise ValueError("`callbacks` must be of `gnlin.callbacks.Callback`.")
    if resume and checkpoint is None:
        raise ValueError("`resume=True` needs `checkpoint`, the folder to resume from.")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)

    key = jax.random.key(0) if key is None else key
    data_key, step_key = jax.random.split(key)
    stream = make_stream(data, batch_size, data_key)
    streaming = batch_size is not None or isinstance(stream, IterableStream)
    _check_curvature_batch(curvature_batch_size, stream, solver)
    parameters, network = make_network(model, filter_spec, state, axis_name)
    setting = Setting(
        solver,
        loss,
        network,
        step_key,
        augment,
        batch_size,
        curvature_batch_size,
        streaming,
    )
    carry = begin(setting, parameters, state, stream.example())
    looks = None
    if validation is not None:
        linearised = isinstance(carry.solver_state.memory, Stream)
        looks = _Validation(setting, carry, validation, metrics, linearised)
    if progress and _on_a_terminal():
        callbacks.append(Progress())
    run = _Run(
        setting,
        carry,
        stream,
        epochs,
        steps,
        callbacks,
        looks,
        validate_every,
        checkpoint,
    )
    run.train(resume)
    if run.complaint:
        warnings.warn(run.complaint, stacklevel=2)
    return run.as_result()


def accuracy(outputs: Array, targets: Array) -> Array:
    """The part of the examples whose likeliest class is the target's: labels, or
    probabilities.

    !!! example

        ```python
        gnlin.accuracy(jnp.array([[0.1, 2.0], [3.0, 1.0]]), jnp.array([1, 1]))  # 0.5
        ```
    """
    labels = targets if targets.ndim < outputs.ndim else jnp.argmax(targets, axis=-1)
    return jnp.mean(jnp.argmax(outputs, axis=-1) == labels)


class _Now(NamedTuple):
    """Where the run stands."""

    step: int
    epoch: int
    index: int  # of the next batch in the epoch
    arrays: list[Array]  # of the carry


class _Settled(NamedTuple):
    """Where the run stood when all callbacks had been told of all events: what a
    checkpoint holds. Replaced as a whole, so that no interruption can tear it."""

    now: _Now
    states: list[PyTree]  # of the callbacks
    result: optx.RESULTS
    reason: str


class _Stopped(Exception):
    """Raised inside the loop, when the run is over before its time."""


class _Run:
    """One run, as its callbacks see it."""

    def __init__(
        self,
        setting: Setting,
        carry: Carry,
        stream: ArrayStream | IterableStream,
        epochs: int | None,
        steps: int | None,
        callbacks: list[Callback],
        validation: "_Validation | None",
        validate_every: int | None,
        checkpoint: Checkpoint | None,
    ):
        self._setting = setting
        arrays, self._static = split(carry)
        self._now = _Now(0, 0, 0, [jnp.asarray(x) for x in arrays])
        self._stream = stream
        self._num_epochs = epochs
        self.num_steps = steps
        if epochs is not None and stream.num_batches is not None:
            self.num_steps = epochs * stream.num_batches
        self._callbacks = callbacks
        self._validation = validation
        self._validate_every = validate_every
        self._rows = Rows([*COLUMNS, *(validation.columns if validation else ())])
        self._saver = None if checkpoint is None else _Saver(checkpoint, self)
        self._advance: Compiled | None = None
        self._chosen: list[np.ndarray] | None = None
        self.result = optx.RESULTS.nonlinear_max_steps_reached
        self.reason = ""
        self.complaint = ""

    #
    # What callbacks may use
    #

    @property
    def step(self) -> int:
        return self._now.step

    @property
    def epoch(self) -> int:
        return self._now.epoch

    @property
    def row(self) -> dict[str, float]:
        return self._rows.latest()

    @property
    def history(self) -> FitHistory:
        return self._rows.as_history()

    @property
    def model(self) -> PyTree:
        return self._with_frozen(self._carry().parameters)

    @property
    def model_state(self) -> PyTree:
        return self._carry().model_state

    def stop(self, reason: str) -> None:
        """End the run after this event, if it has not ended for another reason."""
        if not self.reason:
            self.result = optx.RESULTS.successful
            self.reason = f"step {self.step}: {reason}"

    def arrays(self) -> list[np.ndarray]:
        """The model's parameters and state, as arrays."""
        carry = self._carry()
        arrays, _ = split((carry.parameters, carry.model_state))
        return [as_numpy(x) for x in arrays]

    def set_arrays(self, arrays: list[np.ndarray]) -> None:
        """The parameters and state to hand back in place of the last."""
        self._chosen = arrays

    #
    # The loop
    #

    def _carry(self) -> Carry:
        return join(self._now.arrays, self._static)

    def _with_frozen(self, parameters: PyTree) -> PyTree:
        return eqx.combine(parameters, self._setting.network.frozen)

    def _tell(self, event: str) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self)

    def train(self, resume: bool) -> None:
        if self._saver is not None:
            self._saver.start(resume)
        self._tell("on_start")
        self._all_told()
        if self._saver is not None:
            self._saver.begin()
        try:
            with suppress(_Stopped):
                self._train()
            self._save()
            self._validate_if_not_yet()
        except KeyboardInterrupt:
            self._save()
            self.reason = f"step {self.step}: interrupted"
            self.complaint = f"`gnlin.fit` was interrupted after step {self.step}."
        except BaseException:
            self._save()
            self._tell("on_end")
            raise
        self._tell("on_end")

    def _train(self) -> None:
        if self.reason:  # of a run that had ended before it was resumed
            raise _Stopped
        while not self._enough(self._now):
            if self._train_epoch():
                self._end_epoch()

    def _enough(self, now: _Now) -> bool:
        if self.num_steps is not None:
            return now.step >= self.num_steps
        assert self._num_epochs is not None
        return now.epoch >= self._num_epochs

    def _train_epoch(self) -> bool:
        """The epoch's batches from here on; whether it was trained to its end.

        A step is started before the one before it is taken note of, so that the host's
        work is done while the device does its own.
        """
        now, row = self._now, None
        whole = True
        for batch in self._stream.epoch(now.epoch, now.index):
            if self._enough(now):
                whole = False
                break
            arrays, numbers = split(batch.arrays())[0], [batch.index, now.step]
            advance = self._advance or self._compile(batch)
            new, new_row = advance(now.arrays, arrays, [np.array(numbers, np.int32)])
            if row is not None:
                self._settle(now, row)
            now = _Now(now.step + 1, now.epoch, now.index + 1, new)
            row = new_row
        if row is not None:
            self._settle(now, row)
        return whole

    def _compile(self, batch: Batch) -> Compiled:
        numbers = [np.zeros(2, np.int32)]
        carry = self._carry()
        advance = Compiled(step, (self._setting,), carry, batch.arrays(), numbers)
        # Batches of an iterable may differ in what they hold.
        if isinstance(self._stream, ArrayStream):
            self._advance = advance
        return advance

    def _settle(self, now: _Now, row: Array) -> None:
        """Take note of a step that has been made."""
        *figures, failed, converged = map(float, np.asarray(row))
        before = self.row["num_feature_updates"]
        self._rows.append([float(now.step), float(now.epoch), *figures])
        self._now = now
        if failed:
            self._fail(loss=figures[0])
        elif converged:
            self.stop("converged")
        self._tell("on_step")
        if figures[-1] != before:
            self._tell("on_feature_update")
        if self._validate_every and now.step % self._validate_every == 0:
            self._validate()
        self._go_on()

    def _end_epoch(self) -> None:
        self._now = self._now._replace(epoch=self.epoch + 1, index=0)
        if self._validation is not None and self._validate_every is None:
            self._validate()
        self._tell("on_epoch")
        self._go_on()

    def _all_told(self) -> None:
        states = [callback.state() for callback in self._callbacks]
        self.settled = _Settled(self._now, states, self.result, self.reason)

    def _go_on(self) -> None:
        self._all_told()
        if self.reason:
            raise _Stopped
        if self._saver is not None and self._saver.is_due(self.step):
            self._save()

    def _fail(self, loss: float) -> None:
        self.result = self._carry().solver_state.result
        if self.result == optx.RESULTS.nonfinite:
            what = "the step" if np.isfinite(loss) else "the loss"
            why = f"{what} is not finite"
        else:
            why = optx.RESULTS[self.result].splitlines()[0]
        self.reason = f"step {self.step}: {why}"
        self.complaint = (
            f"`gnlin.fit` stopped at {self.reason}; the model is the last finite one."
        )

    def _validate(self) -> None:
        assert self._validation is not None
        if self._rows:
            self._rows.amend(self._validation.look(self._now.arrays, self.epoch))
            self._tell("on_validation")

    def _validate_if_not_yet(self) -> None:
        if self._validation is not None and np.isnan(self.row["validation_loss"]):
            self._validate()

    def _save(self) -> None:
        if self._saver is not None and self._saver.save():
            self._tell("on_checkpoint")

    def as_result(self) -> FitResult:
        carry = self._carry()
        parameters, state = carry.parameters, carry.model_state
        if self._chosen is not None:
            own, static = split((parameters, state))
            chosen = map(like_array, self._chosen, own)
            parameters, state = join(list(chosen), static)
        memory = carry.solver_state.memory
        point = None
        if isinstance(memory, Stream):
            point = self._with_frozen(memory.point)
        stats = {
            "num_steps": self.step,
            "num_epochs": self.epoch,
            **{
                name: np.asarray(count).item()
                for name, count in statistics(carry.solver_state.counts).items()
            },
        }
        return FitResult(
            self._with_frozen(parameters),
            state,
            self.history,
            stats,
            self.result,
            self.reason or f"all {self.step} steps were made",
            point,
        )

    #
    # What a checkpoint carries
    #

    def snapshot(self) -> tuple[list[np.ndarray], dict]:
        now, states, result, reason = self.settled
        of_callbacks, _ = split(states)
        table = self._rows.as_array()[: now.step]
        arrays = [*map(as_numpy, [*now.arrays, *of_callbacks]), table]
        meta = {
            "settings": self.settings(),
            "step": now.step,
            "epoch": now.epoch,
            "index": now.index,
            "reason": reason,
            "result": _RESULTS.index(_name_of(result)),
        }
        return arrays, meta

    def settings(self) -> dict[str, str]:
        """What must be the same for a run to be continued."""
        setting, arrays = self._setting, self._now.arrays
        return {
            "solver": type(setting.solver).__qualname__,
            "loss": type(setting.loss).__qualname__,
            "key": str(np.asarray(jax.random.key_data(setting.key)).tolist()),
            "list of columns": str(self._rows.columns),
            **{name: str(value) for name, value in self._stream.settings().items()},
            "number of arrays": str(len(arrays)),
            **{f"array {i}": f"{x.shape} {x.dtype}" for i, x in enumerate(arrays)},
        }

    def restore(self, arrays: list[Any], meta: dict) -> list[np.ndarray]:
        """Go on from there; returns what is the callbacks'."""
        *arrays, table = arrays
        num_own = len(self._now.arrays)
        own = [
            like_array(x, of)
            for x, of in zip(arrays[:num_own], self._now.arrays, strict=True)
        ]
        self._now = _Now(meta["step"], meta["epoch"], meta["index"], own)
        self._rows.restore(table)
        self.reason = meta["reason"]
        self.result = getattr(optx.RESULTS, _RESULTS[meta["result"]])
        return arrays[num_own:]

    def restore_callbacks(self, arrays: list[np.ndarray]) -> bool:
        """Whether they are these callbacks'."""
        own, static = split(self.settled.states)
        if [np.shape(x) for x in own] != [x.shape for x in arrays]:
            return False
        states = join(arrays, static)
        for callback, state in zip(self._callbacks, states, strict=True):
            callback.restore(state)
        self._all_told()
        return True

    def num_bytes(self) -> int:
        """Of a checkpoint at the end, callbacks apart."""
        table = 8 * len(self._rows.columns) * (self.num_steps or 0)
        return sum(as_numpy(x).nbytes for x in self._now.arrays) + table


_RESULTS = (
    "successful",
    "nonlinear_max_steps_reached",
    "nonfinite",
    "nonlinear_divergence",
)


def _name_of(result: optx.RESULTS) -> str:
    for name in _RESULTS:
        if bool(result == getattr(optx.RESULTS, name)):
            return name
    return "nonlinear_divergence"


def as_numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def like_array(x: np.ndarray, like: Any) -> Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
    return jnp.asarray(x)


class _Validation:
    """Data that are not trained on, and the figures that are asked of them."""

    def __init__(self, setting: Setting, carry: Carry, data, metrics, linearised: bool):
        self._setting = setting
        self._structure = carry
        self._linearised = linearised
        self._metrics = metrics
        names = ["loss", *metrics]
        self.columns = [f"validation_{name}" for name in names]
        if linearised:
            self.columns += [f"validation_{name}_linearised" for name in names]
        if isinstance(data, Iterator):
            raise ValueError(
                "`validation` is looked at again and again, but can be iterated only "
                "once: pass a list, a loader, or a function of the epoch that returns an "
                "iterable."
            )
        self._stream = make_stream(data, None, setting.key)
        example = self._stream.example()
        checked_outputs(
            setting._replace(network=setting.network.in_inference()),
            carry.parameters,
            carry.model_state,
            example,
        )
        self._chunks = None
        if isinstance(self._stream, ArrayStream):
            self._chunks = _chunks(example, setting.batch_size)

    def look(self, arrays: list[Array], epoch: int) -> dict[str, float]:
        """The means over all examples, of a carry."""
        batches = self._chunks
        if batches is None:
            batches = (batch.data for batch in self._stream.epoch(epoch, 0))
        fixed = (self._setting, tuple(self._metrics.values()), self._linearised)
        sums = []
        for batch in batches:
            look = Compiled(evaluate, fixed, self._structure, batch)
            ((sum_,),) = look(arrays, split(batch)[0])
            sums.append(sum_)
        weight, num_examples, *figures = np.sum([np.asarray(x) for x in sums], axis=0)
        per_look = 1 + len(self._metrics)
        totals = [
            weight if i % per_look == 0 else num_examples for i in range(len(figures))
        ]
        return {
            name: float(figure / total)
            for name, figure, total in zip(self.columns, figures, totals, strict=True)
        }


def _chunks(data, batch_size: int | None) -> list:
    num_examples = jax.tree.leaves(data[0])[0].shape[0]
    size = batch_size or _VALIDATION_BATCH
    size = max(size, min(_VALIDATION_BATCH, num_examples) // 4)
    return [
        jax.tree.map(lambda x, i=i: x[i : i + size], data)
        for i in range(0, num_examples, size)
    ]


class _Saver:
    """When a run is saved, and where."""

    def __init__(self, checkpoint: Checkpoint, run: _Run):
        self._checkpoint = checkpoint
        self._run = run
        self._folder = Path(checkpoint.folder)
        self._saved_step = -1
        self._saved_at = time.monotonic()
        # What is to be given back to the callbacks, once they have started
        self._resumed: tuple[Path, list[np.ndarray]] | None = None

    def start(self, resume: bool) -> None:
        """Go on from the latest, if asked to; else make sure that one can be written."""
        latest = _checkpoint.latest(self._folder)
        if latest is not None and not resume:
            raise CheckpointError(
                f"{self._folder} holds the checkpoints of a run, the latest "
                f"{latest.name}: pass `resume=True` to go on with it, or another folder."
            )
        num_bytes, keep = self._run.num_bytes(), self._checkpoint.keep
        _checkpoint.check_writable(self._folder, num_bytes, keep)
        if latest is not None:
            arrays, meta = _checkpoint.load(latest)
            self._check_same(latest, meta)
            self._resumed = latest, self._run.restore(arrays, meta)
            self._saved_step = self._run.step

    def begin(self) -> None:
        """The callbacks' part of the same."""
        if self._resumed is None:
            self._write()
        elif not self._run.restore_callbacks(self._resumed[1]):
            raise CheckpointError(
                f"{self._resumed[0]} is of a run with other callbacks: pass what that "
                "run was given, or another folder."
            )

    def _check_same(self, path: Path, meta: dict) -> None:
        there, here = meta.get("settings", {}), self._run.settings()
        for name, value in here.items():
            if there.get(name) != value:
                raise CheckpointError(
                    f"{path} is of another run: its {name} is {there.get(name)}, and "
                    f"here it is {value}; pass what that run was given, or another "
                    "folder."
                )

    def is_due(self, step: int) -> bool:
        every_steps = self._checkpoint.every_steps
        every_seconds = self._checkpoint.every_seconds
        if every_steps is not None and step % every_steps == 0:
            return True
        elapsed = time.monotonic() - self._saved_at
        return every_seconds is not None and elapsed >= every_seconds

    def save(self) -> bool:
        """Whether it was written. One that fails is no reason to lose the run."""
        settled = self._run.settled
        if settled.now.step == self._saved_step and not settled.reason:
            return False
        try:
            self._write()
        except CheckpointError as error:
            warnings.warn(f"{error} The run goes on without it.", stacklevel=5)
            self._saved_at = time.monotonic()
            return False
        return True

    def _write(self) -> None:
        arrays, meta = self._run.snapshot()
        step, keep = meta["step"], self._checkpoint.keep
        _checkpoint.save(self._folder, step, arrays, meta, keep)
        self._saved_step, self._saved_at = step, time.monotonic()


def _on_a_terminal() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _check_solver(solver: object) -> None:
    if not isinstance(solver, AbstractGaussNewton):
        raise ValueError(
            "`solver` must be one of gnlin's, such as `gnlin.DampedGaussNewton(1.0)`, "
            f"but a {type(solver).__name__} was given."
        )


def _check_count(name: str, value: Any) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if value is not None and not (whole and value >= 1):
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, but {value!r} was given."
        )


def _check_curvature_batch(size, stream, solver) -> None:
    if size is None:
        return
    if stream.batch_size is None or not stream.batch_size < size <= stream.num_examples:
        raise ValueError(
            f"`curvature_batch_size` is {size}, but must be more than `batch_size` and "
            "at most the number of examples, which must be arrays."
        )
    if isinstance(solver, IterativeLinearisation):
        raise ValueError(
            "Iterative linearisation takes its steps across batches, with each batch's "
            "own loss: leave `curvature_batch_size` out."
        )
    if getattr(solver, "form", "quadratic") != "quadratic":
        raise ValueError(
            "`curvature_batch_size` is of quadratic problems: pass a solver with "
            '`form="quadratic"`.'
        )
