"""How long `import gnlin` takes, against the import of what it stands on."""

import subprocess
import sys
from collections.abc import Iterator

import jax.numpy as jnp

from .report import Comparison, Figure, Row, timed_row
from .timing import alternate, Case


def comparisons(quick: bool) -> Iterator[Comparison]:
    rows = against_dependencies(3 if quick else 9)
    figure = Figure("import gnlin over its dependencies", "<= 1.2", rows[1].ratio)
    yield Comparison("Import", rows, "the dependencies", figures=[figure])


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
