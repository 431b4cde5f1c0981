"""Losses for successes among trials, and for overdispersed counts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import xlogy
from jaxtyping import Array, Float, PyTree, Scalar

from .._common._checks import check_finite_positive, check_scalar
from .._common._sharding import is_here
from ._base import AbstractElementwiseLoss, check_between, Reduction, total_of_each


def _as_trials(given: Any) -> Array:
    """Check and convert `trials`; traced values are not checked."""
    if isinstance(given, Tracer):
        return given
    try:
        known = np.asarray(given, float)
    except (TypeError, ValueError):
        known = np.array(np.nan)
    if not np.all(np.isfinite(known) & (known >= 0)):
        raise ValueError(
            "`trials` must be a number, or an array of numbers, finite and not negative, "
            f"but {given!r} was given."
        )
    return jnp.asarray(known)


class BinomialNLL(AbstractElementwiseLoss):
    r"""The binomial negative log-likelihood of $y$ successes among $n$ trials, each with
    the probability $\sigma(f) = 1/(1 + e^{-f})$: the outputs $f$ are log-odds. Its
    smallest value for these successes is subtracted, so that a perfect fit has the loss
    zero (half the deviance). The curvature, $n\sigma(f)\sigma(-f)$, is both observed and
    expected.

    **Arguments:**

    - `trials`: $n$, a number or an array. An array has y's shape in
        [`gnlin.curve_fit`][], and the shape of one example's outputs elsewhere.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].

    !!! example

        ```python
        trials, deaths = jnp.array([60, 62, 63, 60, 62]), jnp.array([6, 13, 28, 52, 61])
        logit = lambda p, dose: p["slope"] * (dose - p["half"])
        start = {"slope": 1.0, "half": 0.5}
        loss = gnlin.losses.BinomialNLL(trials)
        fit = gnlin.curve_fit(logit, x, deaths, start, loss=loss)
        ```

    ??? cite "Reference"

        P. McCullagh and J. A. Nelder, *Generalized linear models* (1989), chapter 4.
    """

    trials: Float[Array, "..."] = eqx.field(converter=_as_trials)
    reduction: Reduction | None = None

    def elementwise(self, output: Array, target: Array) -> Array:
        return _value(output, target, self._of(output))

    def derivative(self, output: Array, target: Array) -> Array:
        return binomial_slope(output, target, self._of(output))

    def root(self, output: Array, target: Array) -> Array:
        return jnp.sqrt(self._of(output)) * binomial_root(output)

    def decrease(self, outputs, new_outputs, target) -> Scalar:
        each = lambda f, g, y: _decrease(f, g, y, self._of(f))
        return total_of_each(each, outputs, new_outputs, target)

    def _of(self, output: Array) -> Array:
        trials = jnp.asarray(self.trials)
        return jnp.broadcast_to(trials.astype(output.dtype), output.shape)

    def check(self, outputs, targets: PyTree[Array]) -> None:
        super().check(outputs, targets)
        check_between("successes", targets, 0.0, np.inf)
        for leaf in jax.tree.leaves(targets):
            is_traced = isinstance(leaf, Tracer) or isinstance(self.trials, Tracer)
            if is_traced or not is_here(leaf):
                continue
            shape = np.shape(self.trials)
            if shape and shape != leaf.shape[leaf.ndim - len(shape) :]:
                raise ValueError(
                    f"`trials` must be one number, or have the shape of the successes, "
                    f"{leaf.shape}, but has the shape {shape}."
                )
            successes = np.asarray(leaf)
            trials = np.broadcast_to(np.asarray(self.trials), successes.shape)
            wrong = np.flatnonzero(successes > trials)
            if wrong.size > 0:
                raise ValueError(
                    "There must be no more successes than trials, but one is "
                    f"{successes.ravel()[wrong[0]]:g} of {trials.ravel()[wrong[0]]:g}."
                )


class NegativeBinomialNLL(AbstractElementwiseLoss):
    r"""The negative binomial's negative log-likelihood of counts $y$ with the mean
    $\mu = e^f$ and the variance $\mu + \alpha\mu^2$, which is larger than Poisson's. Its
    smallest value for that count is subtracted (half the deviance). The curvature is the
    expected one, $\mu/(1 + \alpha\mu)$.

    **Arguments:**

    - `dispersion`: $\alpha > 0$, which must be known and is not fitted. To find it,
        compare fits: Pearson's `fit.reduced_chi_squared` should be near 1.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].

    !!! example

        ```python
        counts, line = jnp.array([3, 0, 9, 14, 6]), lambda p, x: p["a"] + p["b"] * x
        loss = gnlin.losses.NegativeBinomialNLL(0.5)
        fit = gnlin.curve_fit(line, x, counts, {"a": 0.0, "b": 1.0}, loss=loss)
        ```

    ??? cite "Reference"

        J. M. Hilbe, *Negative binomial regression* (2011), chapter 8.
    """

    dispersion: float
    reduction: Reduction | None = None

    def __check_init__(self):
        check_scalar("dispersion", self.dispersion)
        check_finite_positive("dispersion", self.dispersion)

    # The likelihood equals the binomial one of y successes among y + 1/alpha trials, with
    # the log-odds f + log(alpha).

    def elementwise(self, output: Array, target: Array) -> Array:
        return _value(self._odds(output), target, self._trials(target))

    def derivative(self, output: Array, target: Array) -> Array:
        return binomial_slope(self._odds(output), target, self._trials(target))

    def root(self, output: Array, target: Array) -> Array:
        return jnp.sqrt(jax.nn.sigmoid(self._odds(output)) / self.dispersion)

    def decrease(self, outputs, new_outputs, target) -> Scalar:
        def each(f, g, y):
            return _decrease(self._odds(f), self._odds(g), y, self._trials(y))

        return total_of_each(each, outputs, new_outputs, target)

    def _odds(self, output: Array) -> Array:
        return output + jnp.log(jnp.asarray(self.dispersion, output.dtype))

    def _trials(self, target: Array) -> Array:
        return target + jnp.asarray(1 / self.dispersion, target.dtype)

    def check(self, outputs, targets: PyTree[Array]) -> None:
        super().check(outputs, targets)
        check_between("counts", targets, 0.0, np.inf)


def _value(odds: Array, successes: Array, trials: Array) -> Array:
    r"""Return $-y\log p - (n - y)\log(1 - p)$ minus its value at $p = y/n$."""
    failures, safe = trials - successes, jnp.where(trials > 0, trials, 1)
    of_each = successes * jax.nn.softplus(-odds) + failures * jax.nn.softplus(odds)
    least = xlogy(successes, successes / safe) + xlogy(failures, failures / safe)
    return of_each + least


def binomial_slope(odds: Array, successes: Array, trials: Array | int) -> Array:
    """Return the derivative of `_value` with respect to the log-odds."""
    sigmoid = jax.nn.sigmoid
    return (trials - successes) * sigmoid(odds) - successes * sigmoid(-odds)


def binomial_root(odds: Array) -> Array:
    """Return sqrt(p (1 - p)) = 1 / (2 cosh(f / 2))."""
    x = jnp.abs(odds)
    return jnp.exp(-0.5 * x) / (1 + jnp.exp(-x))


def _decrease(odds: Array, new_odds: Array, successes: Array, trials: Array) -> Array:
    r"""Return $y d - n\log(1 + p(e^d - 1))$, the decrease if log-odds change by d."""
    change = new_odds - odds
    near = jnp.abs(change) < 1
    small = jnp.where(near, change, 0)
    closer = successes * small - trials * jnp.log1p(
        jax.nn.sigmoid(odds) * jnp.expm1(small)
    )
    values = _value(odds, successes, trials) - _value(new_odds, successes, trials)
    return jnp.where(near, closer, values)
