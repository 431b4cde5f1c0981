"""Losses for successes among trials, and for overdispersed counts."""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common._checks import check_finite_positive, check_scalar, one_array
from .._common._complex import check_real
from ._base import (
    AbstractElementwiseLoss,
    cdf_of_counts,
    known,
    Reduction,
    stirling_rest,
    total_of_each,
)


def _as_trials(given: Any) -> Array:
    """Check and convert `trials`; traced values are not checked."""
    if isinstance(given, Tracer):
        return given
    check_real("`trials`", given)
    trials = one_array("`trials`", given, float)
    wrong = trials[~(np.isfinite(trials) & (trials >= 0))]
    if wrong.size > 0:
        hint = ": where y is missing, any number will do" * bool(np.isnan(wrong[0]))
        raise ValueError(
            "`trials` must be a number, or an array of numbers, finite and not negative, "
            f"but one is {wrong[0]:g}{hint}."
        )
    return jnp.asarray(trials)


class _Binomial(AbstractElementwiseLoss):
    """The negative log-likelihood of successes among trials, minus its smallest value for
    these successes."""

    @abc.abstractmethod
    def _odds_and_failures(self, output: Array, target: Array) -> tuple[Array, Array]:
        """Return the log-odds of a success, and the number of failures."""

    def elementwise(self, output: Array, target: Array) -> Array:
        odds, failures = self._odds_and_failures(output, target)
        return _value(odds, target, failures)

    def derivative(self, output: Array, target: Array) -> Array:
        odds, failures = self._odds_and_failures(output, target)
        return binomial_slope(odds, target, failures)

    def decrease(self, outputs, new_outputs, target) -> Scalar:
        def each(f, g, y):
            odds, failures = self._odds_and_failures(f, y)
            return _decrease(odds, g - f, y, failures)

        return total_of_each(each, outputs, new_outputs, target)


class BinomialNLL(_Binomial):
    r"""The binomial negative log-likelihood of $y$ successes among $n$ trials, each with
    the probability $\sigma(f) = 1/(1 + e^{-f})$: the outputs $f$ are log-odds. Its
    smallest value for these successes is subtracted, so that a perfect fit has the loss
    zero (half the deviance). The curvature, $n\sigma(f)\sigma(-f)$, is both observed and
    expected.

    **Arguments:**

    - `trials`: $n$, a number or an array: one number for each value, in the shape of y
        in [`gnlin.curve_fit`][], and of the targets elsewhere. In the shape of one
        example's targets, they are those of each example.
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

    _targets: ClassVar = "successes", 0.0, math.inf
    _of_each: ClassVar = "trials"
    trials: Float[Array, "..."] = eqx.field(converter=_as_trials)
    reduction: Reduction | None = None

    def _trials_of(self, output: Array) -> Array:
        trials = jnp.asarray(self.trials).astype(output.dtype)
        return jnp.broadcast_to(trials, output.shape)

    def _odds_and_failures(self, output, target):
        return output, self._trials_of(output) - target

    def root(self, output: Array, target: Array) -> Array:
        return jnp.sqrt(self._trials_of(output)) * binomial_root(output)

    def mean(self, output: Array) -> Array:
        return jax.nn.sigmoid(output)

    def cdf(self, output, target):
        from scipy.stats import binom  # slow to import

        share = np.asarray(self.mean(jnp.asarray(output)))
        return cdf_of_counts(binom(np.asarray(self.trials), share), target)

    def saturated(self, target: Array) -> Array:
        trials = self._trials_of(target)
        of_each = stirling_rest(target) + stirling_rest(trials - target)
        return stirling_rest(trials) - of_each

    def check(self, outputs, targets: PyTree[Array]) -> None:
        super().check(outputs, targets)
        for successes in known(targets) if known(self.trials) else ():
            trials = np.broadcast_to(np.asarray(self.trials), successes.shape)
            is_share = np.all(successes <= 1) and np.any(successes % 1 != 0)
            if is_share and np.all(trials > 1):
                raise ValueError(
                    "The successes lie between 0 and 1, like fractions of the trials: "
                    "pass their number, `trials * fraction`."
                )
            wrong = np.flatnonzero(successes > trials)
            if wrong.size > 0:
                raise ValueError(
                    "There must be no more successes than trials, but one is "
                    f"{successes.ravel()[wrong[0]]:g} of {trials.ravel()[wrong[0]]:g}."
                )


class NegativeBinomialNLL(_Binomial):
    r"""The negative binomial's negative log-likelihood of counts $y$ with the mean
    $\mu = e^f$ and the variance $\mu + \alpha\mu^2$, which is larger than Poisson's. Its
    smallest value for that count is subtracted (half the deviance). The curvature is the
    expected one, $\mu/(1 + \alpha\mu)$.

    **Arguments:**

    - `dispersion`: $\alpha > 0$, which must be known. To find it, compare fits:
        `fit.aic` should be smallest, or Pearson's `fit.reduced_chi_squared` near 1. To
        fit it, see "[An unknown dispersion](../fits.md#an-unknown-dispersion)".
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

    _targets: ClassVar = "counts", 0.0, math.inf
    _numbers: ClassVar[tuple[str, ...]] = ("dispersion",)
    dispersion: ScalarLike
    reduction: Reduction | None = None

    def __check_init__(self):
        check_scalar("dispersion", self.dispersion)
        check_finite_positive("dispersion", self.dispersion)

    # The likelihood equals the binomial one of y successes and 1/alpha failures, with the
    # log-odds f + log(alpha).

    def _odds_and_failures(self, output, target):
        alpha = jnp.asarray(self.dispersion, output.dtype)
        return output + jnp.log(alpha), 1 / alpha

    def root(self, output: Array, target: Array) -> Array:
        odds, failures = self._odds_and_failures(output, target)
        return jnp.sqrt(jax.nn.sigmoid(odds) * failures)

    def mean(self, output: Array) -> Array:
        return jnp.exp(output)

    def cdf(self, output, target):
        from scipy.stats import nbinom  # slow to import

        alpha = np.asarray(self.dispersion).item()
        mean = np.asarray(self.mean(jnp.asarray(output)))
        return cdf_of_counts(nbinom(1 / alpha, 1 / (1 + alpha * mean)), target)

    def saturated(self, target: Array) -> Array:
        if not jnp.issubdtype(target.dtype, jnp.floating):  # as in a loss of your own
            target = target.astype(float)
        failures = 1 / jnp.asarray(self.dispersion, target.dtype)
        of_each = stirling_rest(target) + stirling_rest(failures)
        of_both = stirling_rest(target + failures)
        return of_both - of_each - jnp.log1p(target / failures)


def _value(odds: Array, successes: Array, failures: Array) -> Array:
    r"""Return $-y\log p - z\log(1 - p)$ minus its value at $p = y/(y + z)$, for y
    successes and z failures."""
    of_each = successes * jax.nn.softplus(-odds) + failures * jax.nn.softplus(odds)
    value = of_each - _least(successes, failures) - _least(failures, successes)
    # These terms cancel for large numbers close to the best odds, y / z.
    both = (successes > 0) & (failures > 0)
    best = jnp.log(jnp.where(both, successes, 1)) - jnp.log(jnp.where(both, failures, 1))
    near = both & (jnp.abs(best - odds) < 1)
    change = jnp.where(near, best - odds, 0)
    return jnp.where(near, _decrease_nearby(odds, change, successes, failures), value)


def _least(number: Array, others: Array) -> Array:
    """Return -a log(a / (a + b)), precise even if one is much larger than the other. The
    slope at a = 0 is taken as that of a log(a + b), as in `xlogx`."""
    some = number > 0
    near = jnp.log1p(others / jnp.where(some, number, 1))
    return number * jnp.where(some, near, jnp.log(jnp.where(others > 0, others, 1)))


def binomial_slope(odds: Array, successes: Array, failures: Array) -> Array:
    """Return the derivative of `_value` with respect to the log-odds."""
    return failures * jax.nn.sigmoid(odds) - successes * jax.nn.sigmoid(-odds)


def binomial_root(odds: Array) -> Array:
    """Return sqrt(p (1 - p)) = 1 / (2 cosh(f / 2))."""
    x = jnp.abs(odds)
    return jnp.exp(-0.5 * x) / (1 + jnp.exp(-x))


def _decrease_nearby(
    odds: Array, change: Array, successes: Array, failures: Array
) -> Array:
    """Return `_decrease` for a change that is not large."""
    likely = odds > 0  # the absolute value would have no derivative at odds of 1
    odds, change = (jnp.where(likely, -x, x) for x in (odds, change))
    rarer = jnp.where(likely, failures, successes)
    growth = jnp.log1p(jax.nn.sigmoid(odds) * jnp.expm1(change))
    return rarer * change - (successes + failures) * growth


def _decrease(odds: Array, change: Array, successes: Array, failures: Array) -> Array:
    r"""Return $y d - (y + z)\log(1 + p(e^d - 1))$, the decrease of `_value` if log-odds
    change by d. For positive log-odds, successes and failures change places."""
    near = jnp.abs(change) < 1
    small = jnp.where(near, change, 0)
    closer = _decrease_nearby(odds, small, successes, failures)
    values = _value(odds, successes, failures)
    values -= _value(odds + change, successes, failures)
    return jnp.where(near, closer, values)
