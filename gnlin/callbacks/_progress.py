"""A progress bar."""

import math
import time

from ._base import Callback, Run


_SECONDS_BETWEEN_DRAWINGS = 0.1


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
        loss = run.row["loss"]
        if run.reason or loss == loss:  # A batch in which no target counts has none.
            self._figures["loss"] = f"{loss:.4g}"
        self._bar.set_postfix(self._figures, refresh=False)
        self._bar.update(run.step - self._bar.n)
        self._drawn_at = time.monotonic()
