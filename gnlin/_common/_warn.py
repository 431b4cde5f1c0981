"""Warnings that name the user's line, from any depth."""

import sys
import warnings


# Packages whose frames are between the user's line and the warning.
_BETWEEN = {"gnlin", "optimistix", "equinox", "jax", "jaxtyping", "beartype"}


def warn(message: str) -> None:
    """Warn at the line outside of gnlin that led here."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _package_of(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(frame) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
