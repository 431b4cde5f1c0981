"""Doubts about a run that ended well: it has not moved, or its loss has risen."""

from collections.abc import Mapping

import numpy as np

from ._solution import losses_by_group, NO_GRADIENT


# A run of fewer steps is not judged, unless it has converged.
_LOOKED_BACK = 10
# The loss has risen if it is more than this multiple of the first loss.
_WORSE = 2.0
# Across batches it has also risen if the mean of the last losses exceeds the first loss,
# and more than this part of all pairs of an early and a late loss rise.
_RISEN = 0.9


def after_full_batch(
    losses: np.ndarray,
    gradient_norms: np.ndarray,
    last: float,
    *,
    converged: bool,
) -> str:
    """Return what is to be doubted about a run of `gnlin.solve`, in a sentence; or "".

    - `last`: the loss at the end.
    """
    if _has_not_moved(losses, gradient_norms):
        return f"`gnlin.solve` made no step: {NO_GRADIENT}"
    num_steps = len(losses)
    judged = converged or num_steps >= _LOOKED_BACK
    if num_steps == 0 or not judged or not _is_worse(float(losses[0]), last):
        return ""
    return (
        f"`gnlin.solve` made {num_steps} steps, and the loss has risen from "
        f"{losses[0]:.4g} to {last:.4g}: use `gnlin.LevenbergMarquardt()`, more damping, "
        "a smaller learning rate or fewer inner steps."
    )


def not_fitted(rows: Mapping[str, np.ndarray]) -> str:
    """Return a sentence that names the first group whose loss is the same, to the last
    digit, in all rows of a history while the whole loss changes; or ""."""
    changes = lambda losses: len(losses) > 0 and np.ptp(losses) > 0
    for name, losses in losses_by_group(rows).items():
        if np.any(losses) and changes(rows["loss"]) and not changes(losses):
            return (
                f"`gnlin.solve` has not changed the loss of the group {name!r}: its "
                "residuals may not depend on the parameters that are trained, as second "
                "derivatives of a ReLU do not."
            )
    return ""


def after_batches(
    losses: np.ndarray, gradient_norms: np.ndarray, *, made_all: bool
) -> str:
    """Return what is to be doubted about a run of `gnlin.fit`, in a sentence; or ""."""
    if _has_not_moved(losses, gradient_norms):
        return f"`gnlin.fit` made no step: {NO_GRADIENT}"
    if not made_all or len(losses) < _LOOKED_BACK:
        return ""
    some = min(_LOOKED_BACK, len(losses) // 2)
    early, late = losses[:some], losses[-some:]
    # A loss of zero, as of a batch whose targets are met, is no measure.
    first = float(next((loss for loss in losses if loss != 0), 0.0))
    last = float(np.mean(late))
    # If the losses only fluctuate, about half of the pairs rise, whatever the noise.
    risen = last > first and np.mean(late > early[:, None]) > _RISEN
    if not (risen or _is_worse(first, last)):
        return ""
    return (
        f"`gnlin.fit` made all {len(losses)} steps, but the loss rose from {first:.3g} "
        f"to {last:.3g}: use `gnlin.LevenbergMarquardt()`, more damping or a smaller "
        "learning rate."
    )


def _is_worse(first: float, last: float) -> bool:
    """Whether a loss has risen far; it may be negative."""
    return last > first + (_WORSE - 1) * abs(first)


def _has_not_moved(losses: np.ndarray, gradient_norms: np.ndarray) -> bool:
    return bool(np.any(losses)) and not np.any(gradient_norms)
