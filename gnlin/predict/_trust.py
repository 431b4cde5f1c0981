"""Warnings where a posterior is not to be trusted."""

import warnings
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Scalar

from .._common import _tree
from .._common._checks import is_traced


# A prediction warns if the model is farther than this from the minimum, in standard
# deviations of the posterior. No output is off by more than that many of its own.
# Measured on 150 points and 522 parameters: 1e-5 if trained with the prior, 0.2 after the
# prior was tuned, 3 to 40 if trained without it.
_AT_MINIMUM = 1.0


def warn_of_rounding(posterior: Any, stacklevel: int = 3) -> None:
    """Warn if rounding dominates the mean, unless the numbers are traced."""
    if not posterior._moves:
        return
    damping, least = posterior.damping, posterior._basis.least_damping
    if is_traced((damping, least)) or damping >= least:
        return
    precision = "double precision, " if jnp.finfo(damping.dtype).bits < 64 else ""
    smallest = float(posterior.prior * jnp.sqrt(least))
    warnings.warn(
        f"The noise, {float(posterior.noise):.2g}, is below {smallest:.2g}, where "
        f"rounding decides the mean: use {precision}more noise or a narrower prior.",
        stacklevel=stacklevel,
    )


def warn_of_data_counted_twice() -> None:
    """Warn that the prior is about parameters that were fitted to the data."""
    warnings.warn(
        "The model was trained without a prior, so that the prior is about the "
        "parameters that were fitted. This counts data twice on which the model was "
        "trained: pass `about`, the model before training, or train with `prior`; for "
        "other data pass `solution.model`.",
        stacklevel=3,
    )


def warn_of_slope(posterior: Any, stacklevel: int) -> None:
    """Warn if the model is not at the minimum, unless the numbers are traced."""
    if posterior._moves or is_traced(posterior):
        return
    distance = float(_distance(posterior))
    if not distance <= _AT_MINIMUM:
        warnings.warn(
            f"The model is {distance:.2g} standard deviations of the posterior from the "
            "minimum of loss plus prior, where Laplace's approximation holds: train it, "
            "or train it further, with "
            f"`prior={float(posterior.prior / posterior.noise):.3g}` in `gnlin.solve` or "
            "`gnlin.fit`.",
            stacklevel=stacklevel,
        )


@eqx.filter_jit
def _distance(posterior: Any) -> Scalar:
    r"""Return the length of a Newton step in standard deviations of the posterior,
    $\sqrt{g^\top H^{-1} g}$ with the gradient and curvature of loss plus prior. No output
    moves by more than this many of its own standard deviations."""
    damping = posterior.damping
    slope = _tree.axpy(damping, posterior._linearised.moved(), posterior._slope)
    return jnp.sqrt(posterior._basis.inverse_norm(slope, damping) / damping) / (
        posterior.noise
    )
