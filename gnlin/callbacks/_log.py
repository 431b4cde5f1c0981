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
