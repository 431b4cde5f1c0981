"""The training loop on the host: steps, history and callbacks."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, PyTree

from .._common._canonical import join, split
from .._common._history import COLUMNS, columns_of, History
from .._common._identity import as_numpy
from .._training._ending import after_batches, nothing_counts, why_it_failed
from .._training._messages import in_words, result_name, WELL
from .._training._model import Frozen
from .._training._solution import on_host, Solution
from .._training._step import Carry, StepSettings
from ..callbacks import Callback, Run as AbstractRun
from ._broken import explained, told
from ._checkpoint import Checkpoint, Fault
from ._history import Rows
from ._ready import ready, refreshed
from ._saver import described_run, Saver
from ._snapshot import CallbackState, give_back, like_array, Now, Snapshot, state_of
from ._step import as_handed_out, Compiled, step
from ._stream import ArrayStream, Batch, DataEnded, IterableStream
from ._validation import Validation
from ._verdict import data_at_fault, doubt_of_model


class _Stopped(Exception):
    """Raised inside the loop if the run ends early."""


class Run(AbstractRun):
    """A run of `fit`."""

    def __init__(
        self,
        setting: StepSettings,
        frozen: Frozen,
        carry: Carry,
        stream: ArrayStream | IterableStream,
        epochs: int | None,
        steps: int | None,
        callbacks: list[Callback],
        validation: Validation | None,
        validate_every: int | None,
        checkpoint: Checkpoint | None,
    ):
        self._setting, self._frozen = setting, frozen
        arrays, self._static = split(as_handed_out(carry))
        seen = None if checkpoint is None else stream.seen
        self._now = Now(0, 0, 0, [jnp.asarray(x) for x in arrays], seen)
        self._stream = stream
        self._num_epochs = epochs
        self._num_steps = steps
        if epochs is not None and stream.num_batches is not None:
            self._num_steps = epochs * stream.num_batches
        self._callbacks = callbacks
        # Callbacks that fill in columns come first, so that the others see their figures.
        self._told = sorted(callbacks, key=lambda each: not each.columns)
        self._validation = validation
        self._validate_every = validate_every
        parts = columns_of(setting.names).values()
        own = [*COLUMNS, *parts, *(validation.columns if validation else ())]
        self._rows = Rows([*own, *(n for each in callbacks for n in each.columns)])
        self._saver = None if checkpoint is None else Saver(checkpoint, self)
        self._advance: Compiled | None = None
        self._chosen: list[np.ndarray] | None = None
        self.result = optx.RESULTS.nonlinear_max_steps_reached
        self._reason = ""
        self.complaint = ""

    #
    # The interface to callbacks
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
    def row(self) -> Mapping[str, float]:
        return MappingProxyType(self._rows.latest())

    @property
    def history(self) -> History:
        return self._rows.as_history()

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def model(self) -> PyTree:
        return self._frozen.with_parameters(self._carry().parameters)

    @property
    def model_state(self) -> PyTree:
        return self._frozen.with_state(self._state_for_inference())

    def _state_for_inference(self) -> PyTree:
        carry, given = self._carry(), (self._setting, self._stream)
        return refreshed(*given, carry.parameters, carry.model_state, self.step)

    @property
    def linearisation_point(self) -> PyTree:
        solver, carry = self._setting.solver, self._carry()
        point = solver.linearisation_point(carry.solver_state)
        return None if point is None else self._frozen.with_parameters(point)

    def record(self, figures: Mapping[str, float]) -> None:
        if self._rows:
            self._rows.amend(figures)

    def stop(self, reason: str, *, failed: bool = False) -> None:
        if self._reason:
            return
        self.result = optx.RESULTS.nonfinite if failed else optx.RESULTS.successful
        self._reason = f"step {self.step}: {reason}"
        if failed:
            self.complaint = f"`gnlin.fit` stopped at step {self.step}: {reason}."

    def arrays(self) -> list[np.ndarray]:
        carry = self._carry()
        arrays, _ = split((carry.parameters, carry.model_state))
        return [as_numpy(x) for x in arrays]

    def set_arrays(self, arrays: list[np.ndarray]) -> None:
        self._chosen = arrays

    #
    # The loop
    #

    def _carry(self) -> Carry:
        return join(self._now.arrays, self._static)

    def _tell(self, event: str) -> None:
        for callback in self._told:
            with told(f"in `{type(callback).__qualname__}.{event}`"):
                getattr(callback, event)(self)

    def train(self, resume: bool, hand_over: Callable[[Solution], Solution]) -> None:
        """Make all steps. The solution, after `hand_over`, is added to errors."""
        saver = self._saver
        with nullcontext() if saver is None else saver.alone():
            if saver is not None:
                saver.start(resume)
            with explained(self, saver, hand_over):
                self._train_to_the_end()

    def _train_to_the_end(self) -> None:
        self._tell("on_start")
        self._settle()
        try:
            if self._saver is not None:
                self._saver.begin()
            try:
                with suppress(_Stopped):
                    self._train(first=self.step)
                self._judge()
                self._save()
                if self._validation is not None and np.isnan(self.row["validation_loss"]):
                    self._validate()
            except BaseException as error:
                self._rows.cut(self.step)
                self._save()
                self._reason = f"step {self.step}: {type(error).__name__}"
                if not isinstance(error, KeyboardInterrupt):
                    raise
                self._reason = f"step {self.step}: interrupted"
                self.complaint = f"`gnlin.fit` was interrupted after step {self.step}."
        finally:
            self._tell("on_end")

    def _train(self, first: int) -> None:
        if self._reason:  # The run had ended before it was resumed.
            raise _Stopped
        try:
            if self._now.index == self._stream.num_batches:
                self._end_epoch()  # It was saved between the last step and this event.
            while self.left(self._now) > 0:
                if self._train_epoch():
                    self._end_epoch()
        except DataEnded as error:
            if self.step == first:
                raise
            self._reason = f"step {self.step}: the data ended"
            self.complaint = f"`gnlin.fit` stopped after step {self.step}. {error}"

    def left(self, now: Now) -> int:
        """Return the steps that are left, or the epochs if the steps are not known."""
        if self.num_steps is not None:
            return self.num_steps - now.step
        assert self._num_epochs is not None
        return self._num_epochs - now.epoch

    def _train_epoch(self) -> bool:
        """Train on the rest of the epoch; return whether its end was reached.

        Each step is started before the previous one is recorded, so that host and device
        work at the same time.
        """
        now, row = self._now, None
        batches = self._stream.epoch(now.epoch, now.index, now.seen)
        # Stop before asking for another batch, which may take long.
        while self.left(now) > 0:
            try:
                with told(f"at batch {now.index} of epoch {now.epoch}"):
                    batch = next(batches, None)
                    started = None if batch is None else self._started(now, batch)
            except Exception:
                if row is not None:
                    self._record_step(now, row)
                raise
            if row is not None:
                self._record_step(now, row)
            if started is None:
                return True
            now, row = started
        assert row is not None
        self._record_step(now, row)
        return now.index == self._stream.num_batches

    def _started(self, now: Now, batch: Batch) -> tuple[Now, Array]:
        """Start a step; return the position after it, and its row of the history."""
        arrays, _ = split(batch.arrays(now.step))
        # Batches of an iterable may differ in structure.
        if self._advance is None or isinstance(self._stream, IterableStream):
            like = self._carry(), batch.arrays(0)
            self._advance = Compiled(step, (self._setting,), *like)
        new, row = self._advance(now.arrays, arrays)
        return Now(now.step + 1, now.epoch, now.index + 1, new, batch.seen), row

    def _record_step(self, now: Now, row: Array) -> None:
        """Record a step that was made, and tell the callbacks."""
        *figures, failed, converged, moved = map(float, np.asarray(row))
        if not moved:  # The run had converged before this step.
            self._now = self._now._replace(arrays=now.arrays)
            self.stop("converged")
            self._go_on()
        before = self.row["num_feature_updates"]
        self._rows.append([float(now.step), float(now.epoch), *figures])
        is_update = self.row["num_feature_updates"] != before
        self._now = now
        if failed:
            self._fail()
        elif converged:
            self.stop("converged")
        self._tell("on_step")
        if is_update:
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

    def _settle(self) -> None:
        """Keep the state for checkpoints, after all callbacks were told of all events."""
        kept = self._callbacks if self._saver is not None else []
        states = [state_of(callback) for callback in kept]
        self.settled = Snapshot(self._now, self.result, self._reason, states)

    def _go_on(self) -> None:
        self._settle()
        is_due = self._saver is not None and self._saver.is_due(self.step)
        if is_due and not self._reason:
            self._save()  # A callback may stop the run when told of the checkpoint.
        if self._reason:
            raise _Stopped

    def _fail(self) -> None:
        setting, carry, at_fault = self._setting, self._carry(), ""
        self.result = carry.solver_state.result
        if self.result == optx.RESULTS.nonfinite:
            given = setting, self._stream, carry, self.step, dict(self.row)
            at_fault = data_at_fault(*given)
        why = why_it_failed(setting, carry, self.step)
        self._reason = in_words(result_name(self.result), self.step, why)
        said = f"`gnlin.fit` stopped at step {self.step}: {why} {at_fault}"
        self.complaint = said.rstrip()

    def _judge(self) -> None:
        """Add doubts about the run to its complaint."""
        setting = self._setting
        if not (self._reason or setting.streaming):
            carry = self._carry().after_all_steps(setting.divergence)
            if carry.watch is not None and carry.watch.diverges:
                self._now = self._now._replace(arrays=split(carry)[0])
                self._fail()
        doubt = nothing_counts("fit", setting, self._stream.example, self.history)
        doubt = doubt or after_batches(setting, self.history, made_all=not self._reason)
        failed = result_name(self.result) in ("nonfinite", "nonlinear_divergence")
        if not (doubt or failed):
            given = self._stream, self._carry(), self.epoch, self.history
            self.complaint = f"{self.complaint} {doubt_of_model(setting, *given)}".strip()
        self.complaint = doubt or self.complaint

    def _validate(self) -> None:
        assert self._validation is not None
        if self._rows:
            state = self._state_for_inference()
            with told("in the validation"):
                own = self._validation.look(self._now.arrays, state, self.epoch)
            self._rows.amend(own)
            self._tell("on_validation")

    def _save(self) -> None:
        if self._saver is not None and self._saver.save():
            self._tell("on_checkpoint")

    def as_solution(self) -> Solution:
        """Return the result, and add doubts about the model's state to the complaint."""
        carry, chosen = self._carry(), None
        if self._chosen is not None:
            own, static = split((carry.parameters, carry.model_state))
            arrays = map(like_array, self._chosen, own)
            chosen = join(list(arrays), static)
        given = self._setting, self._stream, carry, chosen, self.step
        state, loss, doubt = ready(*given, self.history.loss)
        has_loss = chosen is None and not self._setting.streaming
        self.complaint = self.complaint or doubt
        parameters = carry.parameters if chosen is None else chosen[0]
        counts = on_host(carry.solver_state.counts.by_name())
        return Solution(
            model=self._frozen.with_parameters(parameters),
            state=self._frozen.with_state(state),
            loss=on_host(loss) if has_loss else None,
            result=self.result,
            _reason=self._reason,
            history=self.history,
            stats={"num_steps": self.step, "num_epochs": self.epoch, **counts},
            linearisation_point=self.linearisation_point,
            prior=None if self._setting.prior is None else self._setting.prior.deviation,
            _trained=(self._frozen.trained, self._frozen.fn is not None),
        )

    #
    # Checkpoints
    #

    def table(self) -> np.ndarray:
        """Return the history, without the last step if some callbacks were not told of
        it."""
        return self._rows.as_array()[: self.settled.now.step]

    def settings(self) -> dict[str, str]:
        """Describe the run. This is called before the first step, while the parameters
        are still the initial ones."""
        inputs = carry, _ = self._carry(), self._stream.first().arrays(0)
        of_run = self._stream, self._rows.columns, self.model, carry.model_state
        return described_run(self._setting, inputs, *of_run)

    def restore(self, snapshot: Snapshot, table: np.ndarray) -> None:
        """Resume from a snapshot; raise `Fault` if this run cannot have left it."""

        def kinds(arrays):
            return [(x.shape, x.dtype) for x in map(as_numpy, arrays)]

        now, own = snapshot.now, self._now.arrays
        fits = table.shape == (now.step, len(self._rows.columns))
        if not fits or kinds(now.arrays) != kinds(own):
            raise Fault("was not written by a run with these settings")
        self._now = now._replace(arrays=list(map(like_array, now.arrays, own)))
        self._rows.restore(table)
        self.result, self._reason = snapshot.result, snapshot.reason
        if result_name(self.result) not in WELL:
            self.complaint = f"`gnlin.fit` stopped at {self._reason}."

    def restore_callbacks(self, states: list[CallbackState]) -> bool:
        """Restore the callbacks' states; return whether they fit the callbacks."""
        own = give_back(states, self._callbacks)
        self._settle()
        return own

    def num_bytes(self) -> int:
        """Return the size of the last checkpoint, without the callbacks' states."""
        table = 8 * len(self._rows.columns) * (self.num_steps or 0)
        return sum(as_numpy(x).nbytes for x in self._now.arrays) + table
