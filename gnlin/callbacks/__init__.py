"""Callbacks of training: progress, logging, early stopping; or your own.

Each event of a run calls a method of every callback with a [`gnlin.callbacks.Run`][].
"""

from ._base import Callback, Run
from ._early_stop import EarlyStop
from ._log import Log
from ._measure import KernelVelocity, Measure
from ._progress import Progress


__all__ = [
    "Callback",
    "EarlyStop",
    "KernelVelocity",
    "Log",
    "Measure",
    "Progress",
    "Run",
]
