"""Training on batches: the loop on the host, its history, its checkpoints."""

from ._checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
)
from ._history import FitHistory as FitHistory
from ._loop import accuracy as accuracy, fit as fit, FitResult as FitResult
