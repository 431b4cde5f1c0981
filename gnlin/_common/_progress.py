"""Progress bars on the terminal."""

import sys
import time
from typing import Any

from jaxtyping import Array


# Run time after which a bar is shown.
_SECONDS = 1.0


def on_a_terminal() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Bar:
    """A bar of tqdm on the standard error, with the number of steps and the loss, or
    another note."""

    def __init__(self, num_steps: int, is_wanted: bool, unit: str = "step"):
        self.num_steps = num_steps
        self.unit = unit
        self.is_wanted = is_wanted and on_a_terminal()
        self.begun = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> "Bar":
        return self

    def show(self, step: Array | int, loss: Array | float) -> None:
        if self.is_wanted:
            self.note(step, f"loss={float(loss):.4g}")

    def note(self, step: Array | int, text: str) -> None:
        if not self.is_wanted or time.monotonic() - self.begun < _SECONDS:
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.num_steps, unit=self.unit, dynamic_ncols=True)
            self.bar.start_t -= time.monotonic() - self.begun
        self.bar.set_postfix_str(text, refresh=False)
        if not self.bar.update(int(step) - self.bar.n):
            self.bar.refresh()

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
