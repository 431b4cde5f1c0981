"""How long `import gnlin` takes, against the import of what it stands on."""

import subprocess
import sys

import jax.numpy as jnp

from .report import Row, timed_row
from .timing import alternate, Case


def against_dependencies(num_rounds: int) -> list[Row]:
    """Each import in a fresh interpreter, whose own start counts for both."""
    cases = [
        _importing("equinox, lineax, optimistix"),
        _importing("gnlin"),
    ]
    timings = alternate(cases, num_rounds)
    return [timed_row("import", timing, timings[0]) for timing in timings]


def _importing(modules: str) -> Case:
    def run():
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        return jnp.zeros(())

    return Case("import", modules, run)
