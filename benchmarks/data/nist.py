"""NIST's certified nonlinear regressions (StRD): models, starts, and certified values.

The files in `tests/nist` are NIST's own; the README there states their provenance.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from .._options import Refusal


FOLDER = Path(__file__).resolve().parents[2] / "tests" / "nist"

MAX_LRE = 11.0
"""The certified values have 11 digits, so that no larger LRE can be measured."""

SOLVED_LRE = 4.0
"""A problem counts as solved if its LRE is larger, as in Ceres Solver's NIST program."""


def _misra1a(b, x):
    return b[0] * (1 - jnp.exp(-b[1] * x))


def _chwirut(b, x):
    return jnp.exp(-b[0] * x) / (b[1] + b[2] * x)


def _lanczos(b, x):
    return (
        b[0] * jnp.exp(-b[1] * x) + b[2] * jnp.exp(-b[3] * x) + b[4] * jnp.exp(-b[5] * x)
    )


def _gauss(b, x):
    return (
        b[0] * jnp.exp(-b[1] * x)
        + b[2] * jnp.exp(-((x - b[3]) ** 2) / b[4] ** 2)
        + b[5] * jnp.exp(-((x - b[6]) ** 2) / b[7] ** 2)
    )


def _danwood(b, x):
    return b[0] * x ** b[1]


def _misra1b(b, x):
    return b[0] * (1 - (1 + b[1] * x / 2) ** (-2))


def _misra1c(b, x):
    return b[0] * (1 - (1 + 2 * b[1] * x) ** (-0.5))


def _misra1d(b, x):
    return b[0] * b[1] * x / (1 + b[1] * x)


def _kirby2(b, x):
    return (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2)


def _hahn1(b, x):
    numerator = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return numerator / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _nelson(b, x):  # the response is log(y)
    return b[0] - b[1] * x[:, 0] * jnp.exp(-b[2] * x[:, 1])


def _mgh17(b, x):
    return b[0] + b[1] * jnp.exp(-x * b[3]) + b[2] * jnp.exp(-x * b[4])


def _roszman1(b, x):
    return b[0] - b[1] * x - jnp.arctan(b[2] / (x - b[3])) / math.pi


def _enso(b, x):
    def wave(period, cosine, sine):
        angle = 2 * math.pi * x / period
        return cosine * jnp.cos(angle) + sine * jnp.sin(angle)

    return b[0] + wave(12, b[1], b[2]) + wave(b[3], b[4], b[5]) + wave(b[6], b[7], b[8])


def _mgh09(b, x):
    return b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3])


def _rat42(b, x):
    return b[0] / (1 + jnp.exp(b[1] - b[2] * x))


def _rat43(b, x):
    return b[0] / (1 + jnp.exp(b[1] - b[2] * x)) ** (1 / b[3])


def _mgh10(b, x):
    return b[0] * jnp.exp(b[1] / (x + b[2]))


def _eckerle4(b, x):
    return b[0] / b[1] * jnp.exp(-0.5 * ((x - b[2]) / b[1]) ** 2)


def _bennett5(b, x):
    return b[0] * (b[1] + x) ** (-1 / b[2])


# In NIST's order: lower, average, higher difficulty.
MODELS: dict[str, Callable] = {
    "Misra1a": _misra1a,
    "Chwirut2": _chwirut,
    "Chwirut1": _chwirut,
    "Lanczos3": _lanczos,
    "Gauss1": _gauss,
    "Gauss2": _gauss,
    "DanWood": _danwood,
    "Misra1b": _misra1b,
    "Kirby2": _kirby2,
    "Hahn1": _hahn1,
    "Nelson": _nelson,
    "MGH17": _mgh17,
    "Lanczos1": _lanczos,
    "Lanczos2": _lanczos,
    "Gauss3": _gauss,
    "Misra1c": _misra1c,
    "Misra1d": _misra1d,
    "Roszman1": _roszman1,
    "ENSO": _enso,
    "MGH09": _mgh09,
    "Thurber": _hahn1,
    "BoxBOD": _misra1a,
    "Rat42": _rat42,
    "MGH10": _mgh10,
    "Eckerle4": _eckerle4,
    "Rat43": _rat43,
    "Bennett5": _bennett5,
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One data set. The residuals are `model(b, x) - y`."""

    name: str
    model: Callable
    x: np.ndarray
    y: np.ndarray
    starts: np.ndarray
    """The two starting points, (2, p)."""
    certified: np.ndarray
    """The certified parameters, (p,), to 11 digits."""
    standard_errors: np.ndarray
    """The standard errors of the certified parameters, (p,), to 11 digits."""
    sum_of_squares: float
    """The certified residual sum of squares."""

    def residuals(self, b, args):
        x, y = args
        return self.model(b, x) - y

    def lre(self, b) -> float:
        """Return the log relative error of the worst parameter, between 0 and 11."""
        b = np.asarray(b, dtype=np.float64)
        if not np.all(np.isfinite(b)):
            return 0.0
        error = np.max(np.abs(b - self.certified) / np.abs(self.certified))
        return float(np.clip(-np.log10(max(error, 1e-300)), 0.0, MAX_LRE))


def require(names: Sequence[str] = tuple(MODELS)) -> None:
    """Raise `Refusal` if files are missing, before any work is done."""
    missing = [name for name in names if not (FOLDER / f"{name}.dat").exists()]
    if missing:
        raise Refusal(
            f"'{FOLDER}' has no file '{missing[0]}.dat' of NIST's regressions; run this "
            "in a complete copy of the repository."
        )


@functools.cache
def load(name: str) -> Problem:
    """Read one of NIST's files. Raise `KeyError` if there is no such problem."""
    model = MODELS[name]
    lines = (FOLDER / f"{name}.dat").read_text().splitlines()

    def lines_of(label: str) -> tuple[int, int]:
        for line in lines[:10]:
            match = re.search(label + r"\s+\(lines\s+(\d+)\s+to\s+(\d+)\)", line)
            if match:
                return int(match[1]) - 1, int(match[2])
        raise ValueError(f"{name}.dat does not say where its {label} are.")

    first, last = lines_of("Starting Values")
    table = np.array(
        [[float(v) for v in line.split("=")[1].split()] for line in lines[first:last]]
    )
    first, last = lines_of("Data")
    data = np.array([[float(v) for v in line.split()] for line in lines[first:last]])
    (sum_of_squares,) = (
        float(line.split(":")[1]) for line in lines if "Residual Sum of Squares" in line
    )
    y, x = data[:, 0], data[:, 1:]
    return Problem(
        name=name,
        model=model,
        x=x[:, 0] if x.shape[1] == 1 else x,
        y=np.log(y) if name == "Nelson" else y,
        starts=table[:, :2].T,
        certified=table[:, 2],
        standard_errors=table[:, 3],
        sum_of_squares=sum_of_squares,
    )
