"""The loop on the host: steps, history, callbacks."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, PyTree

from .._common._checks import is_key
from .._common._identity import (
    as_numpy,
    checksum,
    described,
    described_by_field,
    described_by_leaf,
)
from .._solver import result_name, RESULT_NAMES, statistics
from .._training._solution import (
    COLUMNS,
    History,
    in_words,
    NO_GRADIENT,
    on_host,
    Solution,
)
from .._training._step import Carry, checked_outputs, StepSettings, why_it_failed
from ..callbacks import Callback, Run as AbstractRun
from ._checkpoint import Checkpoint
from ._history import Rows
from ._saver import Saver
from ._snapshot import CallbackState, check_fits, give_back, Snapshot, state_of, Unsound
from ._step import AnyArray, Compiled, join, split, step
from ._stream import ArrayStream, Batch, DataEnded, IterableStream
from ._validation import Validation


# A run has come to nothing, and says so, where the mean of its last so many losses is
# this many times the first one; or above it, and this part of all pairs with the first
# so many has risen. Of a run of so many steps at least.
_LOOKED_BACK = 10
_WORSE = 2.0
_RISEN = 0.9


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
    states: list[CallbackState]
    result: optx.RESULTS
    reason: str


# A step's row has neither number nor epoch.
_UPDATES = COLUMNS.index("num_feature_updates") - 2


class _Stopped(Exception):
    """Raised inside the loop, when the run is over before its time."""


class Run(AbstractRun):
    """One run, as its callbacks see it."""

    def __init__(
        self,
        setting: StepSettings,
        carry: Carry,
        stream: ArrayStream | IterableStream,
        epochs: int | None,
        steps: int | None,
        callbacks: list[Callback],
        validation: Validation | None,
        validate_every: int | None,
        checkpoint: Checkpoint | None,
        parts: list[str],
    ):
        """`parts`: columns of the loss's parts, in the order of a step's row."""
        self._setting = setting
        arrays, self._static = split(_as_handed_out(carry))
        self._now = _Now(0, 0, 0, [jnp.asarray(x) for x in arrays])
        self._stream = stream
        self._num_epochs = epochs
        self._num_steps = steps
        if epochs is not None and stream.num_batches is not None:
            self._num_steps = epochs * stream.num_batches
        self._callbacks = callbacks
        self._validation = validation
        self._validate_every = validate_every
        own = [*COLUMNS, *parts, *(validation.columns if validation else ())]
        self._rows = Rows(_checked_columns(own, callbacks))
        self._saver = None if checkpoint is None else Saver(checkpoint, self)
        self._advance: Compiled | None = None
        self._chosen: list[np.ndarray] | None = None
        self.result = optx.RESULTS.nonlinear_max_steps_reached
        self._reason = ""
        self.complaint = ""

    #
    # What callbacks may use
    #

    @property
    def step(self) -> int:
        return self._now.step

    @property
    def num_steps(self) -> int | None:
        return self._num_steps

    @property
    def epoch(self) -> int:
        return self._now.epoch

    @property
    def row(self) -> dict[str, float]:
        return self._rows.latest()

    @property
    def history(self) -> History:
        return self._rows.as_history()

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def model(self) -> PyTree:
        return self._with_frozen(self._carry().parameters)

    @property
    def model_state(self) -> PyTree:
        return self._carry().model_state

    @property
    def linearisation_point(self) -> PyTree:
        solver, carry = self._setting.solver, self._carry()
        point = solver.linearisation_point(carry.solver_state)
        return None if point is None else self._with_frozen(point)

    def record(self, figures: Mapping[str, float]) -> None:
        """Figures of the latest row."""
        if self._rows:
            self._rows.amend(figures)

    def stop(self, reason: str, *, failed: bool = False) -> None:
        """End the run after this event, if it has not ended for another reason."""
        if self._reason:
            return
        self.result = optx.RESULTS.nonfinite if failed else optx.RESULTS.successful
        self._reason = f"step {self.step}: {reason}"
        if failed:
            self.complaint = f"`gnlin.fit` stopped at step {self.step}: {reason}."

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
        return self._setting.network.frozen.with_parameters(parameters)

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
                self._train(first=self.step)
            self._look_back()
            self._save()
            self._validate_if_not_yet()
        except KeyboardInterrupt:
            self._rows.cut(self.step)
            self._save()
            self._reason = f"step {self.step}: interrupted"
            self.complaint = f"`gnlin.fit` was interrupted after step {self.step}."
        except BaseException:
            self._save()
            self._tell("on_end")
            raise
        self._tell("on_end")

    def _train(self, first: int) -> None:
        if self._reason:  # of a run that had ended before it was resumed
            raise _Stopped
        try:
            if self._now.index == self._stream.num_batches:
                self._end_epoch()  # which had not been told of when it was saved
            while not self._enough(self._now):
                if self._train_epoch():
                    self._end_epoch()
        except DataEnded as error:
            if self.step == first:
                raise
            self._reason = f"step {self.step}: the data ended"
            self.complaint = f"`gnlin.fit` stopped after step {self.step}. {error}"

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
            arrays, numbers = split(batch.arrays())[0], [batch.index, now.step]
            advance = self._advance or self._compile(batch)
            new, new_row = advance(now.arrays, arrays, [np.array(numbers, np.int32)])
            if row is not None:
                self._settle(now, row)
            now = _Now(now.step + 1, now.epoch, now.index + 1, new)
            row = new_row
            # Before another batch is asked for, which may take its time.
            if self._enough(now):
                whole = now.index == self._stream.num_batches
                break
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
        *figures, failed, converged, moved = map(float, np.asarray(row))
        if not moved:  # It had arrived before this step.
            self._now = self._now._replace(arrays=now.arrays)
            self.stop("converged")
            self._go_on()
        before = self.row["num_feature_updates"]
        self._rows.append([float(now.step), float(now.epoch), *figures])
        self._now = now
        if failed:
            self._fail()
        elif converged:
            self.stop("converged")
        self._tell("on_step")
        if figures[_UPDATES] != before:
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
        kept = self._callbacks if self._saver is not None else []
        states = [state_of(callback) for callback in kept]
        self.settled = _Settled(self._now, states, self.result, self._reason)

    def _go_on(self) -> None:
        self._all_told()
        if self._reason:
            raise _Stopped
        if self._saver is not None and self._saver.is_due(self.step):
            self._save()
            if self._reason:  # of a callback that was told of it
                raise _Stopped

    def _fail(self) -> None:
        carry, at_fault = self._carry(), ""
        self.result = carry.solver_state.result
        if self.result == optx.RESULTS.nonfinite:
            at_fault = self._stream.at_fault(self._check)
        why = why_it_failed(self._setting, carry)
        self._reason = in_words(result_name(self.result), self.step, why)
        self.complaint = (
            f"`gnlin.fit` stopped at step {self.step}: {why} {at_fault}".rstrip()
        )

    def _check(self, batch: tuple) -> None:
        carry = self._carry()
        checked_outputs(self._setting, carry.parameters, carry.model_state, batch)

    def _look_back(self) -> None:
        """All steps were made: has it come to anything?"""
        losses = self._rows.column("loss")
        if np.any(losses) and not np.any(self._rows.column("gradient_norm")):
            self.complaint = f"`gnlin.fit` made no step: {NO_GRADIENT}"
            return
        if self._reason or len(losses) < _LOOKED_BACK:
            return
        some = min(_LOOKED_BACK, len(losses) // 2)
        early, late = np.array(losses[:some]), np.array(losses[-some:])
        first, last = losses[0], np.mean(late)
        # Where losses only hover half of the pairs rise, whatever the noise.
        risen = last > first and np.mean(late > early[:, None]) > _RISEN
        if risen or last > _WORSE * first:
            self.complaint = (
                f"`gnlin.fit` made all {self.step} steps, but the loss rose from "
                f"{first:.3g} to {last:.3g}: use `gnlin.LevenbergMarquardt()`, more "
                "damping or a smaller learning rate."
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

    def as_solution(self) -> Solution:
        carry = self._carry()
        parameters, state = carry.parameters, carry.model_state
        loss = None if self._setting.streaming else on_host(carry.loss)
        if self._chosen is not None:
            own, static = split((parameters, state))
            chosen = map(like_array, self._chosen, own)
            (parameters, state), loss = join(list(chosen), static), None
        counts = on_host(statistics(carry.solver_state.counts))
        return Solution(
            model=self._with_frozen(parameters),
            state=state,
            loss=loss,
            result=self.result,
            reason=self._reason or in_words(result_name(self.result), self.step),
            history=self.history,
            stats={"num_steps": self.step, "num_epochs": self.epoch, **counts},
            linearisation_point=self.linearisation_point,
        )

    #
    # What a checkpoint carries
    #

    def snapshot(self, settings: dict[str, str]) -> Snapshot:
        now, states, result, reason = self.settled
        return Snapshot(
            settings,
            now.step,
            now.epoch,
            now.index,
            result_name(result),
            reason,
            [*map(as_numpy, now.arrays)],
            states,
            self._rows.as_array()[: now.step],
        )

    def settings(self) -> dict[str, str]:
        """What must be the same for a run to be continued. Asked for before the first
        step: the parameters are still those that were passed in."""
        setting, carry, arrays = self._setting, self._carry(), self._now.arrays
        validation = self._validation
        return {
            **described_by_field("solver", setting.solver),
            **described_by_field("loss", setting.loss),
            "augmentation": described(setting.augment),
            "curvature_batch_size": str(setting.curvature_batch_size),
            "key": str(as_numpy(setting.key).tolist()),
            "list of columns": str(self._rows.columns),
            **(validation.settings() if validation else {}),
            **{name: str(value) for name, value in self._stream.settings().items()},
            "number of arrays": str(len(arrays)),
            **{f"array {i}": f"{x.shape} {x.dtype}" for i, x in enumerate(arrays)},
            "axis_name": setting.network.axis_name,
            **described_by_leaf("network", setting.network.frozen.rest),
            "network's form": described(setting.network),
            "initial parameters' checksum": checksum(carry.parameters),
            "initial state's checksum": checksum(carry.model_state),
        }

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from there.

        **Raises:** `Unsound` if no run like this one has been there.
        """
        now, num_batches = self._now, self._stream.num_batches
        check_fits(snapshot, now.arrays, self._rows.columns, num_batches, RESULT_NAMES)
        own = list(map(like_array, snapshot.carry, now.arrays))
        self._now = _Now(*snapshot.position, own)
        self._rows.restore(snapshot.table)
        self._reason = snapshot.reason
        self.result = getattr(optx.RESULTS, snapshot.result)
        solver_result = self._carry().solver_state.result
        if not self._reason and solver_result != optx.RESULTS.successful:
            raise Unsound("goes on after its solver has failed")

    def restore_callbacks(self, states: list[CallbackState]) -> bool:
        """Whether they are these callbacks'."""
        own = give_back(states, self._callbacks, like_array)
        self._all_told()
        return own

    def num_bytes(self) -> int:
        """Of a checkpoint at the end, callbacks apart."""
        table = 8 * len(self._rows.columns) * (self.num_steps or 0)
        return sum(as_numpy(x).nbytes for x in self._now.arrays) + table


def _checked_columns(own: list[str], callbacks: list[Callback]) -> list[str]:
    columns = [*own, *(name for callback in callbacks for name in callback.columns)]
    for i, name in enumerate(columns):
        if name in columns[:i]:
            raise ValueError(
                f"The history would have two columns {name!r}: give a metric, or what a "
                "callback measures, another name."
            )
    return columns


def _as_handed_out(carry: Carry) -> Carry:
    """With the types that a step leaves: else the second step would be compiled once
    more. A weak type is left to the counters of the model's state alone: where a float
    is made of one, as in batch normalisation, it must not lift single precision to
    double."""

    def strong(x):
        if not isinstance(x, AnyArray) or is_key(x):
            return x
        return jax.lax.convert_element_type(jnp.asarray(x), x.dtype)

    def of_model(x):
        counts = isinstance(x, AnyArray) and jnp.issubdtype(x.dtype, jnp.integer)
        return x if counts else strong(x)

    typed = jax.tree.map(strong, carry._replace(model_state=None))
    return typed._replace(model_state=jax.tree.map(of_model, carry.model_state))


def like_array(x: np.ndarray, like: Any) -> Array:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
    weak = getattr(like, "weak_type", False) and like.ndim == 0
    array = jnp.asarray(x.item() if weak else x)
    on_one = len(like.devices()) == 1
    return array if on_one else jax.device_put(array, like.sharding)
