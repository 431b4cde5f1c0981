"""The end of a run whose figures on other data stop improving."""

from typing import Literal

import numpy as np
from jaxtyping import PyTree

from .._common._checks import check_flag, check_nonnegative, check_one_of, check_period
from .._common._history import COLUMNS
from .._common._warn import warn
from ._base import Callback, Run


class EarlyStop(Callback):
    """Ends the run when a validation figure stops improving, and returns the best model.

    **Arguments:**

    - `monitor`: a column of the history, such as `"validation_loss"`. Without validation
        data, which groups of residuals do not have, it is a column of
        [`gnlin.callbacks.Measure`][].
    - `patience`: the number of validations (or measurements) in a row without improvement
        that ends the run.
    - `mode`: `"min"` if smaller is better, `"max"` if larger is. Without it, names that
        end with `loss` or `error` (before `_linearised`) are `"min"`, those that end with
        `accuracy` are `"max"`, and others are an error.
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
        if mode is None:
            mode = _mode_of(monitor)
        check_one_of("mode", mode, ("min", "max"))
        self.monitor = monitor
        self.patience = patience
        self.sign = 1.0 if mode == "min" else -1.0
        self.min_change = min_change
        self.restore_best = restore_best

    def on_start(self, run: Run) -> None:
        columns = run.history.columns
        of_steps = self.monitor in COLUMNS or self.monitor.startswith("loss/")
        is_validated = "validation_loss" in columns
        # A measure is judged when its row has it, which may be after the validation.
        of_validation = of_steps or self.monitor.startswith("validation_")
        is_judged_there = is_validated and of_validation
        self.events = "validations" if is_judged_there else "measurements"
        missing = self.monitor not in columns and self.monitor.startswith("valid")
        if not is_validated and (of_steps or missing):
            raise ValueError(
                "`EarlyStop` needs validation data: pass `validation` to `gnlin.fit`, or "
                "monitor a column of `gnlin.callbacks.Measure`."
            )
        if self.monitor not in columns:
            raise ValueError(
                f"`EarlyStop` cannot monitor {self.monitor!r}: the history's columns are "
                f"{', '.join(columns)}."
            )
        self._is_judged = not np.isnan(run.row.get(self.monitor, np.nan))
        self.best, self.num_worse = np.array(np.inf), np.array(0)
        self.best_arrays = run.arrays() if self.restore_best else None

    def on_step(self, run: Run) -> None:
        self._is_judged = False
        self._judge_measured(run)

    def _judge_measured(self, run: Run) -> None:
        """Judge a measure in the first event in which its row has it."""
        if self.events == "measurements" and not self._is_judged:
            self._is_judged = not np.isnan(run.row[self.monitor])
            if self._is_judged:
                self._judge(run)

    on_feature_update = on_epoch = _judge_measured

    def on_validation(self, run: Run) -> None:
        if self.events == "validations":
            self._judge(run)
        self._judge_measured(run)

    def _judge(self, run: Run) -> None:
        value = self.sign * run.row[self.monitor]
        is_of_step = self.monitor in COLUMNS or self.monitor.startswith("loss/")
        if is_of_step and np.isnan(value):  # No target of the last batch counts.
            return
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
            why = f"{self.monitor} {what} in {self.patience} {self.events}"
            run.stop(why, failed=not finite)

    def on_end(self, run: Run) -> None:
        values = run.history[self.monitor]
        unmeasured = self.events == "measurements" and np.all(np.isnan(values))
        if unmeasured and len(values) > 0:
            warn(
                f"`EarlyStop` had nothing to judge: {self.monitor!r} is NaN in each row "
                "of the history."
            )
        if self.best_arrays is not None and np.isfinite(self.best):
            run.set_arrays(self.best_arrays)

    def state(self) -> PyTree:
        return self._settings(), self.best, self.num_worse, self.best_arrays

    def restore(self, state: PyTree) -> None:
        there, self.best, self.num_worse, self.best_arrays = state
        if there != self._settings():
            raise ValueError(
                f"The run that is resumed has `EarlyStop` with {there}, and here it has "
                f"{self._settings()}: pass the former, or another folder."
            )

    def _settings(self) -> str:
        mode = "min" if self.sign > 0 else "max"
        numbers = f"patience={self.patience}, min_change={self.min_change}"
        return f"monitor={self.monitor!r}, mode={mode!r}, {numbers}"


def _mode_of(monitor: str) -> Literal["min", "max"]:
    """Return whether smaller or larger is better, where the column's name says so."""
    name = monitor.removesuffix("_linearised")
    if name.endswith(("loss", "error")):
        return "min"
    if name.endswith("accuracy"):
        return "max"
    raise ValueError(
        f"The name {monitor!r} does not say whether smaller or larger is better: pass "
        '`mode="min"` or `mode="max"`.'
    )
