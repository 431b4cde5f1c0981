"""The history for other writers, during the run."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .._common._checks import check_period
from ._base import Callback, Run


class Log(Callback):
    """Writes the history to TensorBoard, or any other writer, during the run.

    **Arguments:**

    - `write`: a function `write(name, value, step)`, such as a TensorBoard writer's
        `add_scalar`.
    - `every`: the number of steps between rows. Figures that are filled in after the
        step, as of a validation or at the end of an epoch, are always written.

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
        self._written: set[str] = set()

    def on_start(self, run: Run) -> None:
        self._written = set(_figures(run))

    def on_step(self, run: Run) -> None:
        self._written = {"step"} if run.step % self.every == 0 else set(_figures(run))
        self._write(run)

    def _write(self, run: Run) -> None:
        """Write the figures of the latest row that were not there before."""
        for name, value in _figures(run).items():
            if name not in self._written:
                self._written.add(name)
                self.write(name, value, run.step)

    on_feature_update = on_validation = on_epoch = _write


def _figures(run: Run) -> dict[str, float]:
    """Return the columns of the latest row that have been filled in."""
    return {name: float(x) for name, x in run.row.items() if not np.isnan(x)}
