"""Training on batches: the loop on the host, its history and its checkpoints."""

from ._checkpoint import Checkpoint as Checkpoint, CheckpointError as CheckpointError
from ._fit import fit as fit
