"""Callbacks of training: progress, logging, early stopping; or your own.

Each event of a run calls a method of every callback with a [`gnlin.callbacks.Run`][].
"""

import abc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from . import features
from ._common._checks import check_flag, check_nonnegative, check_period
from ._tangent_kernel._tangent_kernel import TangentKernel


if TYPE_CHECKING:
    from ._training._solution import History


__all__ = [
    "Callback",
    "EarlyStop",
    "KernelVelocity",
    "Log",
    "Measure",
    "Progress",
    "Run",
]

_SECONDS_BETWEEN_DRAWINGS = 0.1
_EVENTS = "step", "feature_update", "validation", "epoch"


class Run(abc.ABC):
    """A run of [`gnlin.fit`][], as its callbacks see it."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """The number of steps made so far."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """The maximum number of steps, or `None` if the data do not tell it."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """The number of epochs made so far."""

    @property
    @abc.abstractmethod
    def row(self) -> dict[str, float]:
        """The latest row of the history, by column."""

    @property
    @abc.abstractmethod
    def history(self) -> "History":
        """The history so far."""

    @property
    @abc.abstractmethod
    def model(self) -> PyTree:
        """The model as trained so far."""

    @property
    @abc.abstractmethod
    def model_state(self) -> PyTree:
        """The model's state, or `None` if it has none."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Why the run ended, as in `result.reason`. It is empty during the run and if all
        steps were made."""

    @property
    @abc.abstractmethod
    def linearisation_point(self) -> PyTree:
        """The model at the linearisation point, if it stays across batches; or `None`."""

    @abc.abstractmethod
    def record(self, figures: Mapping[str, float]) -> None:
        """Put figures into the latest row of the history, in the callback's `columns`."""

    @abc.abstractmethod
    def stop(self, reason: str, *, failed: bool = False) -> None:
        """End the run after this event, unless it has already ended. With `failed` the
        run warns and does not count as successful."""

    @abc.abstractmethod
    def arrays(self) -> list[np.ndarray]:
        """Return copies of the model's parameters and state, for `set_arrays`."""

    @abc.abstractmethod
    def set_arrays(self, arrays: list[np.ndarray]) -> None:
        """Make the run return these parameters and state instead of the last."""


class Callback:
    """Base class of callbacks. Override the methods of the events that you need.

    !!! example

        ```python
        class PrintLoss(gnlin.callbacks.Callback):
            def on_epoch(self, run):
                print(run.epoch, run.row["loss"])
        ```

    **Attributes:**

    - `columns`: the columns of the history that the callback fills.
    """

    columns: tuple[str, ...] = ()

    def on_start(self, run: Run) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step(self, run: Run) -> None:
        """Called after each step."""

    def on_feature_update(self, run: Run) -> None:
        """Called after each step that linearised at a new point."""

    def on_validation(self, run: Run) -> None:
        """Called after each validation; `run.row` has its figures."""

    def on_epoch(self, run: Run) -> None:
        """Called after each epoch."""

    def on_checkpoint(self, run: Run) -> None:
        """Called after a checkpoint was written."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, whatever the reason."""

    def state(self) -> PyTree:
        """Return arrays, numbers and strings to keep in checkpoints. This is called after
        each step. Structure and shapes must always be the same, and arrays must be
        replaced rather than changed in place."""
        return None

    def restore(self, state: PyTree) -> None:
        """Restore what `state` returned, in a resumed run. It is not called if that was
        `None`."""


class EarlyStop(Callback):
    """Ends the run when a validation figure stops improving, and returns the best model.

    **Arguments:**

    - `monitor`: a column of the history, such as `"validation_loss"`.
    - `patience`: the number of validations in a row without improvement that ends the
        run.
    - `mode`: `"min"` if smaller is better, `"max"` if larger is. The default is `"min"`
        for names that end with `loss` or `error`, and `"max"` for others.
    - `min_change`: the change that an improvement must exceed.
    - `restore_best`: whether the run returns the best model rather than the last.

    !!! example

        ```python
        gnlin.callbacks.EarlyStop("validation_accuracy", patience=5)
        ```
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 10,
        mode: Literal["min", "max"] | None = None,
        min_change: float = 0.0,
        restore_best: bool = True,
    ):
        check_period("patience", patience)
        check_nonnegative("min_change", min_change)
        check_flag("restore_best", restore_best)
        if not isinstance(monitor, str):
            raise ValueError(
                "`monitor` must be a column of the history, such as "
                f'"validation_loss", but {monitor!r} was given.'
            )
        if mode not in (None, "min", "max"):
            raise ValueError(f'`mode` must be "min" or "max", but {mode!r} was given.')
        if mode is None:
            mode = "min" if monitor.endswith(("loss", "error")) else "max"
        self.monitor = monitor
        self.patience = patience
        self.sign = 1.0 if mode == "min" else -1.0
        self.min_change = min_change
        self.restore_best = restore_best

    def on_start(self, run: Run) -> None:
        if "validation_loss" not in run.history.columns:
            raise ValueError(
                "`EarlyStop` needs validation data: pass `validation` to `gnlin.fit`."
            )
        if self.monitor not in run.history.columns:
            raise ValueError(
                f"`EarlyStop` cannot monitor {self.monitor!r}: the history's columns are "
                f"{', '.join(run.history.columns)}."
            )
        self.best, self.num_worse = np.array(np.inf), np.array(0)
        self.best_arrays = run.arrays() if self.restore_best else None

    def on_validation(self, run: Run) -> None:
        value = self.sign * run.row[self.monitor]
        if value < self.best - self.min_change:
            self.best, self.num_worse = np.array(value), np.array(0)
            if self.restore_best:
                self.best_arrays = run.arrays()
            return
        self.num_worse = self.num_worse + 1
        if self.num_worse >= self.patience:
            finite = bool(np.isfinite(self.best))
            best = f"has not improved on {self.sign * float(self.best):.4g}"
            what = best if finite else "has not been finite"
            why = f"{self.monitor} {what} in {self.patience} validations"
            run.stop(why, failed=not finite)

    def on_end(self, run: Run) -> None:
        if self.best_arrays is not None and np.isfinite(self.best):
            run.set_arrays(self.best_arrays)

    def state(self) -> PyTree:
        return self.best, self.num_worse, self.best_arrays

    def restore(self, state: PyTree) -> None:
        self.best, self.num_worse, self.best_arrays = state


class Log(Callback):
    """Writes the history to TensorBoard, or any other writer, during the run.

    **Arguments:**

    - `write`: a function `write(name, value, step)`, such as a TensorBoard writer's
        `add_scalar`.
    - `every`: the number of steps between rows. Validation figures are always written.

    !!! example

        ```python
        gnlin.callbacks.Log(lambda name, value, step: print(step, name, value), every=100)
        ```
    """

    def __init__(self, write: Callable[[str, float, int], Any], every: int = 1):
        check_period("every", every)
        if not callable(write):
            raise ValueError(
                "`write` must be a function of (name, value, step), such as a "
                "TensorBoard writer's `add_scalar`."
            )
        self.write = write
        self.every = every

    def on_step(self, run: Run) -> None:
        if run.step % self.every == 0:
            self._write(run, lambda name: not name.startswith("validation_"))

    def on_validation(self, run: Run) -> None:
        self._write(run, lambda name: name.startswith("validation_"))

    def _write(self, run: Run, wanted: Callable[[str], bool]) -> None:
        for name, value in run.row.items():
            if name != "step" and wanted(name) and not np.isnan(value):
                self.write(name, float(value), run.step)


class _Looks(Callback):
    """A callback that calls `look` at one kind of event."""

    every: Literal["step", "feature_update", "validation", "epoch"] | int

    def look(self, run: Run) -> None:
        raise NotImplementedError

    def on_step(self, run: Run) -> None:
        if self.every == "step" or (
            not isinstance(self.every, str) and run.step % self.every == 0
        ):
            self.look(run)

    def on_feature_update(self, run: Run) -> None:
        if self.every == "feature_update":
            self.look(run)

    def on_validation(self, run: Run) -> None:
        if self.every == "validation":
            self.look(run)

    def on_epoch(self, run: Run) -> None:
        if self.every == "epoch":
            self.look(run)


def _check_every(every: object) -> None:
    if isinstance(every, str) and every not in _EVENTS:
        raise ValueError(
            f"`every` must be one of {', '.join(map(repr, _EVENTS))} or a number of "
            f"steps, but {every!r} was given."
        )
    if not isinstance(every, str):
        check_period("every", every)


class Measure(_Looks):
    """Adds figures of the model, such as measures of `gnlin.features`, to the history.

    **Arguments:**

    - `measures`: functions of the model, by name. Each name becomes a column.
    - `every`: the event to measure at: `"step"`, `"feature_update"`, `"validation"` or
        `"epoch"`; or a number of steps. In other rows the columns are NaN.

    !!! example

        ```python
        gnlin.callbacks.Measure(
            {"distance": lambda now: gnlin.features.parameter_distance(now, model)},
            every=10,
        )
        ```
    """

    def __init__(
        self,
        measures: Mapping[str, Callable[[PyTree], Any]],
        every: Literal["step", "feature_update", "validation", "epoch"] | int = "epoch",
    ):
        by_name = isinstance(measures, Mapping) and all(
            isinstance(name, str) and callable(f) for name, f in measures.items()
        )
        if not (measures and by_name):
            raise ValueError("`measures` must be functions of the model, by name.")
        _check_every(every)
        self.measures = dict(measures)
        self.every = every
        self.columns = tuple(measures)

    def look(self, run: Run) -> None:
        """Measure the model, and write the figures to the latest row."""
        model = run.model
        run.record({name: float(f(model)) for name, f in self.measures.items()})


class KernelVelocity(_Looks):
    r"""Adds a column `kernel_velocity` to the history: the speed at which the kernel
    changes. It is the [`gnlin.features.kernel_distance`][] from the previous kernel,
    divided by the number of steps. The first kernel belongs to the initial model.

    **Arguments:**

    - `inputs`: a batch of n inputs. Their kernel of `(n c)^2` numbers is kept until the
        next event, and in checkpoints.
    - `every`: the event to measure at, as in [`gnlin.callbacks.Measure`][].
    - `filter_spec`: the parameters of the kernel, as in [`gnlin.TangentKernel`][].

    !!! example

        ```python
        gnlin.callbacks.KernelVelocity(inputs, every=10)
        ```

    ??? cite "Reference"

        S. Fort et al., *Deep Learning versus Kernel Learning*, 2020.
    """

    columns = ("kernel_velocity",)

    def __init__(
        self,
        inputs: PyTree[Array],
        every: Literal["step", "feature_update", "validation", "epoch"] | int = "epoch",
        filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    ):
        _check_every(every)
        self.inputs = inputs
        self.every = every
        self.filter_spec = filter_spec

    def on_start(self, run: Run) -> None:
        self._keep(self._kernel(run), run)

    def look(self, run: Run) -> None:
        """Compare the kernel with the previous one, and write its velocity."""
        now, num_steps = self._kernel(run), run.step - int(self.last_step)
        if num_steps > 0:
            distance = float(features.kernel_distance(now, jnp.asarray(self.last)))
            run.record({"kernel_velocity": distance / num_steps})
            self._keep(now, run)

    def _kernel(self, run: Run) -> features.Kernel:
        return TangentKernel(run.model, filter_spec=self.filter_spec)(self.inputs)

    def _keep(self, kernel: features.Kernel, run: Run) -> None:
        self.last, self.last_step = np.asarray(kernel), np.array(run.step)

    def state(self) -> PyTree:
        return self.last, self.last_step

    def restore(self, state: PyTree) -> None:
        self.last, self.last_step = state


class Progress(Callback):
    """Draws a tqdm progress bar with the loss and the rate on the standard error."""

    def on_start(self, run: Run) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=run.num_steps,
            initial=run.step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
        )
        self._figures = {"loss": ""}
        self._drawn_at = -math.inf

    def on_step(self, run: Run) -> None:
        # Drawing is limited, because it takes longer than a fast step.
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw(run)

    def on_validation(self, run: Run) -> None:
        for name, value in run.row.items():
            if name.startswith("validation_"):
                self._figures[name.removeprefix("validation_")] = f"{value:.4g}"

    def on_end(self, run: Run) -> None:
        self._draw(run)
        if run.reason:
            self._bar.set_postfix_str(f"{self._bar.postfix}, {run.reason}")
        self._bar.close()

    def _draw(self, run: Run) -> None:
        self._figures["loss"] = f"{run.row['loss']:.4g}"
        self._bar.set_postfix(self._figures, refresh=False)
        self._bar.update(run.step - self._bar.n)
        self._drawn_at = time.monotonic()
