"""`CurveFit`, the result of a fit: parameters, their errors, and a report."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import numpy as np
import optimistix as optx
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._common._checks import check_callable, check_fraction, is_traced
from .._common._words import how_many, names_of
from ..spectra import Estimate
from ._arrays import as_x
from ._curve import Curve, Data
from ._ending import are_determined, complaint, reason
from ._hidden import Hidden
from ._parameters import among
from ._problem import FitSettings
from ._profiles import Interval, profiles
from ._propagation import Band, band, derived
from ._report import report
from ._residuals import outliers, runs_test, signs_along_x
from ._statistics import Fitted
from ._undetermined import apart, described


class CurveFit(eqx.Module):
    r"""The result of [`gnlin.curve_fit`][], which prints as a report. With several data
    sets each array has a leading axis over them.

    **Attributes:**

    - `parameters`: the fitted parameters, in the structure of `start`.
    - `standard_errors`: in the same structure. They are 0 for fixed parameters, NaN for
        parameters at a bound (the other errors then hold for given values of these),
        infinite for parameters that the data do not determine, NaN for parameters whose
        derivative has squares that underflow or overflow, and all NaN if a derivative of
        `f` is not finite.
    - `covariance`, `correlation`: a block for each pair of leaves of `start`, as in
        `fit.covariance["a"]["rate"]`; the matrix if `start` is an array. Entries are 0
        for fixed parameters. For parameters at a bound covariances are 0, and
        correlations NaN.
    - `covariance_matrix`: the covariance of the free parameters, in the order of `names`.
    - `chi_squared`: the sum of squared residuals, in units of `sigma` and `sigma_x`; with
        a likelihood, Pearson's. `reduced_chi_squared` is divided by the degrees of
        freedom.
    - `deviance`: twice the `loss` at the minimum. For gnlin's likelihoods it is the
        deviance, since their least loss is zero at each point. Its derivative by a count
        of 0 is infinite, and is returned without the infinite term.
    - `degrees_of_freedom`: the number of real numbers in y minus the rank of the
        Jacobian, which is the number of free parameters that are determined and not at a
        bound, since the errors are for given values of those at a bound. A complex number
        counts as two.
    - `residuals`: y - f in units of `sigma`, flat; 0 for missing points. A complex number
        becomes its real and then its imaginary part. With a likelihood, Pearson's: the
        loss's negative slope over the root of its curvature.
        `None` if the data were read in parts.
    - `x`: the fitted true x, if `sigma_x` was given.
    - `scale`: the estimated factor on `sigma`: the standard deviation of the residuals
        in units of `sigma`, for a robust loss by their median absolute deviation. It is 1
        if `sigma` is absolute.
    - `at_bound`: -1 for parameters held at their lower bound, 1 at their upper, else 0.
    - `multipliers`: the derivative of the objective by parameters at a bound, else 0.
    - `aic`, `bic`: Akaike's and the Bayesian information criterion, which count
        parameters at a bound, too. For gnlin's losses of counts and successes they are
        those of the whole likelihood, so that fits with different losses can be compared.
        For other losses they leave out a constant of the data and the loss: they come
        from $n\log(\chi^2/n)$, or $\chi^2$ if `sigma` is absolute, or twice the loss.
        They are NaN for a robust loss without `sigma`, whose scale differs between
        models.
    - `losses`, `ends`: the losses of all `starts`, in ascending order, and the
        parameters where they ended, in the same order on a leading axis.
    - `result`, `reason`, `history`, `num_steps`: as in [`gnlin.Solution`][]. With several
        data sets or starts there is no history, because recording it would take longer
        than the steps. With several data sets there is no reason. If the scale of a
        robust loss is estimated, these count the steps of all rounds, and each loss in
        the history is in units of the scale of its round.
    """

    parameters: PyTree
    standard_errors: PyTree
    covariance: PyTree
    correlation: PyTree
    covariance_matrix: Float[Array, "*sets k k"]
    chi_squared: Any
    deviance: Any
    reduced_chi_squared: Any
    degrees_of_freedom: Any
    residuals: Array | None
    x: PyTree
    scale: Any
    at_bound: PyTree
    multipliers: PyTree
    aic: Any
    bic: Any
    losses: Array | None
    ends: PyTree
    result: optx.RESULTS
    history: Any
    num_steps: Any
    _curve: Curve
    _start: PyTree  # the first free parameters; those of the first of several data sets
    _setting: FitSettings
    _data: Data | None  # None if it was read in parts
    _end: Fitted
    _hidden: Hidden

    def __repr__(self) -> str:
        if isinstance(self.chi_squared, Tracer):
            return "CurveFit(traced)"
        if self._setting.many:
            number = self.chi_squared.shape[0]
            well = int(np.sum(self.converged))
            empty = np.asarray(self._end.is_empty)
            poorly = int(np.sum(~are_determined(self) & ~empty))
            others = f", {poorly} do not determine all parameters" if poorly else ""
            sets = how_many(number, "data set")
            return f"CurveFit({sets}, {well} of them converged{others})"
        return report(self)

    def __getstate__(self) -> dict[str, Any]:
        # A traced program cannot be pickled. It is traced again from `f`.
        return vars(self) | {"_setting": self._setting._replace(curve=None)}  # type: ignore

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        curve, setting, data = self._curve, self._setting, self._data
        if data is not None:
            curve = curve.on(self._start, data.x)
        vars(self)["_setting"] = setting._replace(curve=curve)

    @property
    def converged(self) -> Any:
        """Whether the run has converged. With several data sets this is an array, so that
        `fit.parameters["rate"][fit.converged]` are those that have."""
        flags = self.result == optx.RESULTS.successful
        return flags if is_traced(flags) else np.asarray(flags)

    @property
    def reason(self) -> str:
        """Why the run ended, in words."""
        return reason(self)

    def complaint(self) -> str:
        """Return the warning that the user should see, or an empty string."""
        return complaint(self)

    @property
    def loss(self) -> Any:
        """The loss at the minimum."""
        return self._end.loss

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the free parameters, one for each entry."""
        return names_of(self._end.parameters)

    def undetermined(self) -> list[str]:
        """Describe the directions in which the parameters do not change the curve: first
        the parameters that have no effect, and then the ways in which several move
        together, each with as few as possible."""
        self._check_is_one("undetermined")
        self._check_is_known("undetermined", self.chi_squared)
        directions = apart(self._end.covariance)
        seen = self._hidden.missing | self._hidden.vanishing  # These change the curve.
        directions = directions[~np.any(directions[:, seen], axis=1)]
        return described(directions, self._start, self._end.parameters)

    def band(self, x: PyTree, confidence: float = 0.95, *, sigma: Any = None) -> Band:
        """Return the curve at any x with its confidence interval, by linear propagation
        of the covariance.

        **Arguments:**

        - `x`: the points, in the form that `f` takes.
        - `confidence`: the probability, between 0 and 1, of each pointwise interval, by
            Student's distribution, or the normal one if the variance was known: with a
            likelihood, or absolute `sigma` and squared error.
        - `sigma`: the standard deviation of a new measurement, as one number or in the
            structure and shapes of the curve. It is in the units of the fit's `sigma` (if
            the fit had none, 1 stands for the noise of the data). If given, the interval
            is for the measurement instead of the curve.

        **Returns:** `(mean, low, high)`, of the shapes that `f` returns; complex numbers
        hold the intervals of the real and the imaginary part.
        """
        check_fraction("confidence", confidence)
        self._check_is_one("band")
        if self._setting.is_estimated:
            other = ", or pass `sigma` and `absolute_sigma=True` to `curve_fit`"
            other *= not self._setting.is_robust
            self._check_is_known("band", self.degrees_of_freedom, other)
        return band(self, as_x(x), self._quantile(confidence), sigma)

    def derived(self, fn: Callable[[PyTree], PyTree]) -> Estimate:
        """Return a function of the parameters with its standard error, by linear
        propagation of the covariance.

        If the function is far from linear within the errors, make it a parameter of the
        fit and take its profile interval ([`gnlin.CurveFit.confidence_intervals`][]).

        **Arguments:**

        - `fn`: a function of the parameters, in the structure of `start`, that returns a
            pytree of arrays, by JAX operations. The error of a complex number holds those
            of its real and its imaginary part.

        **Returns:** `(value, standard_error)`. An error is infinite if the data do not
        determine the value, and holds for given values of parameters at a bound.

        !!! example

            ```python
            decay = lambda p, x: p["a"] * jnp.exp(-p["rate"] * x)
            measured = 2 * jnp.exp(-x) + 0.01 * jnp.cos(100 * x)
            fit = gnlin.curve_fit(decay, x, measured, {"a": 1.0, "rate": 0.5})
            half_life, error = fit.derived(lambda p: jnp.log(2) / p["rate"])
            ```
        """
        check_callable("fn", fn, "a function of the parameters", "lambda p: p['a'] ** 2")
        self._check_is_one("derived")
        return derived(self, fn)

    def confidence_intervals(
        self, confidence: float = 0.95, *, names: str | Iterable[str] | None = None
    ) -> Interval:
        r"""Return the confidence intervals of the profile likelihood. The refits run the
        program of the fit.

        An interval ends where the best fit of the other parameters is worse than the
        confidence allows: by an F-test with the fit's own variance, or, if that is known
        (see `band`), by $\chi^2$ with one degree of freedom. For a robust loss the rise
        is in units of the residuals' mean squared pull over the loss's mean second
        derivative. An end is at the bound if that is nearer. So the interval of a
        parameter at a bound is an upper or lower limit, where the loss has risen as much
        as at the ends of the other intervals. An end is infinite if the loss never rises
        as much. It is NaN for parameters that are fixed or not determined, and, with a
        warning that says between which values it lies, if the search for it fails, takes
        more steps of its refits than 200 and ten times those of the fit, or ends where
        `f` is not finite. A refit far beyond an end may take hundreds of steps, so each
        has a part of these. If the variance is
        estimated and the fit is exact to rounding, the intervals come from the standard
        errors, and there are no limits.

        An end may lie where another parameter has come to a bound of its own, beyond
        which the interval might go on. A warning then names the end and the bound.

        In a terminal, a search of more than a second shows its progress. Ctrl-C ends it
        after the present refit, and returns the ends found so far, with NaN for the
        others and a warning.

        **Arguments:**

        - `confidence`: the probability, between 0 and 1, of each interval.
        - `names`: the parameters of interest, as one name or several: entries, such as
            `"heights[2]"` in `fit.names`, arrays, such as `"heights"`, or dictionaries
            that hold them, such as `"peak"`. By default all parameters. An interval
            takes some ten refits.

        **Returns:** `(low, high)`, in the structure of the parameters, with NaN for those
        that are not in `names`. It prints as a table.

        !!! example

            ```python
            decay = lambda p, x: p["a"] * jnp.exp(-p["rate"] * x)
            measured = 2 * jnp.exp(-x) + 0.01 * jnp.cos(100 * x)
            fit = gnlin.curve_fit(decay, x, measured, {"a": 1.0, "rate": 0.5})
            interval = fit.confidence_intervals(names="rate")
            interval.low["rate"], interval.high["rate"]
            ```

        ??? cite "Reference"

            D. M. Bates and D. G. Watts, *Nonlinear regression analysis and its
            applications* (1988), section 6.1. Robust losses: R. M. Schrader and T. P.
            Hettmansperger, *Robust analysis of variance based upon a likelihood ratio
            criterion*, Biometrika 67 (1980).
        """
        check_fraction("confidence", confidence)
        self._check_is_one("confidence_intervals")
        if self._setting.solver.retraction is not None:
            raise ValueError(
                "`confidence_intervals` holds one parameter at a value, which a "
                "`retraction` would move: take `standard_errors`, `derived` or `band`."
            )
        data = self._at_hand("confidence_intervals")
        asked = among(names, self.names)
        return profiles(self, data, self._quantile(confidence), asked)

    def _check_is_one(self, method: str) -> None:
        if self._setting.many:
            raise ValueError(f"`{method}` needs one data set: fit each separately.")

    def _check_is_known(self, method: str, number: Any, other: str = "") -> None:
        if is_traced(number):
            raise ValueError(
                f"`{method}` needs the numbers of the fit and cannot be traced: call it "
                f"outside `jax.jit`, `jax.vmap` and `jax.grad`{other}."
            )

    def _at_hand(self, method: str) -> Data:
        """Return the data, if they are in memory and the fit is not traced."""
        self._check_is_known(method, self.chi_squared)
        if self._data is None:
            raise ValueError(
                f"`{method}` needs all data in memory, and this fit read them in parts: "
                "leave `in_parts` out."
            )
        return self._data

    def _like_y(self) -> PyTree:
        """Return the shapes and types of y of one data set in memory."""
        assert self._data is not None
        return self._setting.curve.shapes(self._start, self._data.x)

    def _quantile(self, confidence: float) -> float:
        from scipy.stats import norm, t  # slow to import

        both = 0.5 + 0.5 * confidence
        if not self._setting.is_estimated:
            return float(norm.ppf(both))
        return float(t.ppf(both, np.asarray(self.degrees_of_freedom)))

    def outliers(self) -> PyTree:
        """Return the indices of outliers; with several data sets, rows `(set, point)`. At
        an outlier a robust loss pulls less than a third as much as squared error, and the
        residual exceeds three standard deviations of the noise.

        A point is a row of y; or each number of an image, a y of several axes where all
        arrays of x have its shape, unless `sigma` is a covariance. In both cases
        `y[fit.outliers()]` are the outliers: indices of rows, or a tuple of indices along
        each axis, as from `numpy.nonzero`. For outliers among the numbers of any other y,
        flatten it. A point of several numbers, such as a complex number, is an outlier if
        any of its numbers is. If y is a pytree of several arrays, so is the result, with
        the indices in each."""
        if not self._setting.is_robust:
            return np.zeros(0, int)
        self._at_hand("outliers")
        return outliers(self)

    def chi_squared_test(self) -> Any:
        """Return the probability of a larger `chi_squared` if the curve and its known
        noise are right, by the chi-squared distribution. A small value means that the
        curve misses something or `sigma` is too small, and a value close to 1 that
        `sigma` is too large. Without degrees of freedom it is NaN."""
        from scipy.special import chdtrc  # slow to import

        if not self._setting.knows_noise:
            raise ValueError(
                "`chi_squared_test` compares the residuals with known noise: pass "
                "`sigma` and `absolute_sigma=True` to `curve_fit`, with squared error."
            )
        self._check_is_known("chi_squared_test", self.chi_squared)
        dof = np.asarray(self.degrees_of_freedom)
        p = chdtrc(np.where(dof > 0, dof, np.nan), np.asarray(self.chi_squared))
        return p if self._setting.many else float(p)

    def runs_test(self) -> float:
        """Return the p-value of Wald and Wolfowitz's test of the residuals' signs.

        A small value means that neighbours deviate in the same direction: the curve
        misses a feature of the data. The residuals are sorted by x if x is one vector.
        Otherwise they stay in the order of the points, and a complex number counts as its
        two parts. The value is NaN if all residuals have one sign, or fewer than three
        are not zero.

        With a likelihood the residuals are randomised quantiles of y. Each is drawn (with
        a fixed seed) between the probability of a value below y and that of a value of at
        most y. A likelihood of your own defines these by `cdf`
        ([`gnlin.authoring.AbstractElementwiseLoss`][]).

        ??? cite "Reference"

            P. K. Dunn and G. K. Smyth, *Randomized quantile residuals*, J. Comput. Graph.
            Stat. 5 (1996).
        """
        self._check_is_one("runs_test")
        return runs_test(signs_along_x(self, self._at_hand("runs_test")))

    def plot(self, ax: Any = None, *, confidence: float = 0.95, num_points: int = 300):
        """Plot the data with their errors, the curve, and its confidence band.

        This needs matplotlib. The horizontal axis is x; if x has several arrays, it is
        the only one that has the shape of y and is not constant. With a likelihood the
        vertical axis is in units of y, and for trials the share of successes.

        **Returns:** the axes.
        """
        from ._picture import plot

        return plot(self, self._at_hand("plot"), ax, confidence, num_points)
