"""What a fit returns: parameters, how well they are known, and a report."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .. import _tree
from .._checks import check_fraction, is_traced
from .._linearisation import linearise
from .._losses import AbstractRobust, TobitNLL
from .._solution import History
from .._solver import result_name, why_it_ended
from .._uncertainty import Covariance
from ._curve import Curve, Data, unflattened
from ._given import as_x
from ._likelihood import Likelihood, runs_test
from ._posed import Setting
from ._profiles import profiles
from ._program import Fitted
from ._report import names_of, report


class Interval(NamedTuple):
    """Between two ends, in the parameters' structure."""

    low: PyTree
    high: PyTree


class Band(NamedTuple):
    """A curve, and the ends of its confidence interval at each point."""

    mean: Float[Array, " n"]
    low: Float[Array, " n"]
    high: Float[Array, " n"]


class CurveFit(eqx.Module):
    r"""What [`gnlin.curve_fit`][] returns; of several data sets each array has an axis
    over them in front. It prints as a report.

    **Attributes:**

    - `parameters`: in the structure of `start`.
    - `standard_errors`: likewise: 0 for those that are fixed, NaN for those at a bound
        (the others' are then at given values of these), infinite for those that the data
        do not determine; all are NaN where a derivative of `f` is not finite.
    - `covariance`, `correlation`: a block for each two of `start`'s leaves, as in
        `fit.covariance["a"]["rate"]`; of an array the matrix. 0 beside what is fixed, NaN
        beside what is at a bound.
    - `covariance_matrix`: of those that are free, in the order of `names`.
    - `chi_squared`: of the residuals in units of `sigma`, and of x in units of `sigma_x`;
        `reduced_chi_squared`, by degrees of freedom. With a likelihood Pearson's.
    - `deviance`: twice the loss; of gnlin's likelihoods the deviance, since their least
        loss is zero at each point.
    - `degrees_of_freedom`: points, less parameters that are free and at no bound.
    - `residuals`: y - f, in units of `sigma`, in one row; 0 for missing points. With a
        likelihood Pearson's, the loss's negative slope over the root of its curvature.
    - `x`: the true x's, as fitted, where `sigma_x` was given.
    - `scale`: what `sigma` is times, as estimated: the residuals' standard deviation in
        units of it, of a robust loss by their median absolute deviation; 1 if it is
        absolute.
    - `at_bound`: of each parameter -1 if it is held at its lower bound, 1 at its upper.
    - `multipliers`: the derivative of the objective by those, 0 for others.
    - `aic`, `bic`: Akaike's and the Bayesian information criterion, up to a constant of
        the data; with a likelihood by the deviance.
    - `losses`: of all `starts`, the best first.
    - `result`, `reason`, `history`, `num_steps`: as of [`gnlin.Solution`][]; of several
        data sets or starts there is no history, which would take longer than their steps,
        and of several data sets no reason.
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
    residuals: Array
    x: PyTree
    scale: Any
    at_bound: PyTree
    multipliers: PyTree
    aic: Any
    bic: Any
    losses: Array | None
    result: optx.RESULTS
    history: Any
    num_steps: Any
    _curve: Curve
    _setting: Setting
    _data: Data
    _end: Fitted

    def __repr__(self) -> str:
        if isinstance(self.chi_squared, Tracer):
            return "CurveFit(traced)"
        if self._setting.many:
            number = self.chi_squared.shape[0]
            well = int(np.sum(np.asarray(self.result == optx.RESULTS.successful)))
            poorly = int(np.sum(~self._are_determined()))
            others = f", {poorly} do not determine all parameters" if poorly else ""
            return f"CurveFit({number} data sets, {well} of them converged{others})"
        return report(self)

    @property
    def reason(self) -> str:
        """Why it ended, in words."""
        if self._setting.many or isinstance(self.chi_squared, Tracer):
            return ""
        name, steps = result_name(self.result), int(self.num_steps)
        if name == "successful":
            return f"converged in {steps} steps"
        if name == "nonlinear_max_steps_reached":
            return f"all {steps} steps were made: raise `max_steps`, or start nearer"
        if int(self._end.nonfinite.point) >= 0:
            return self._what_is_not_finite()
        if name == "nonfinite" and not np.isfinite(self._end.loss):
            if isinstance(self._setting.loss, Likelihood):
                return (
                    "the loss is not finite at `f(start, x)`: start elsewhere, or set "
                    "bounds"
                )
            return "`f` is not finite at the start: start elsewhere, or set bounds"
        if name == "stagnation" and self._setting.curve.has_loops:
            return (
                "it stands still: the steps are small and the gradient is not. `f` has "
                "loops, such as the solution of a differential equation: lower the "
                "tolerances at which they end"
            )
        return why_it_ended(self.result).rstrip(".")

    def _what_is_not_finite(self) -> str:
        where = self._end.nonfinite
        entry, number = int(where.point), int(where.number)
        place = self._place(entry)
        if number > 1:
            place += f" and at {number - 1} others"
        if not where.of_curve:
            return (
                f"the derivative of `f` by {self._by(entry)} is not finite {place}, "
                "where `f` itself is: leave this out, or write `f` so that no value on "
                "the way to it is infinite there, and no root or power is of 0"
            )
        if number == self._data.y.size:
            return "`f` is not finite at the start: start elsewhere, or set bounds"
        return (
            f"`f` is not finite at the start {place}: leave out what `f` is not defined "
            "for, or start elsewhere"
        )

    def _place(self, entry: int) -> str:
        """An entry of y, as a user counts them, and its x."""
        curve, fixed, x = self._setting.curve, self._setting.fixed, self._data.x
        like = curve.shapes(self._free, fixed, x)
        index: tuple[Any, ...] = ()
        shape, name = (), ""
        for path, leaf in jax.tree_util.tree_leaves_with_path(like):
            each = 2 if jnp.iscomplexobj(leaf) else 1
            if entry < each * leaf.size:
                index, shape = np.unravel_index(entry // each, leaf.shape), leaf.shape
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                break
            entry -= each * leaf.size
        place = f"at point {', '.join(map(str, index))}" if index else "there"
        place += f" of `{name}`" if name else ""
        values = []
        for path, value in jax.tree_util.tree_leaves_with_path(x):
            if shape and jnp.shape(value)[:1] == shape[:1]:
                of = jax.tree_util.keystr(path, simple=True, separator=".")
                values.append(f"{f'x.{of}' if of else 'x'} = {value[index[0]]}")
        return place + (f" ({', '.join(values)})" if values else "")

    def _by(self, entry: int) -> str:
        """The parameters by which the derivative of an entry of y is not finite, each
        asked by itself: a zero for one of the others may become a NaN, too."""
        curve, fixed, x = self._setting.curve, self._setting.fixed, self._data.x
        leaves, structure = jax.tree.flatten(self._free)
        found: list[np.ndarray] = []
        for k, leaf in enumerate(leaves):

            def value(leaf, k=k):
                free = structure.unflatten([*leaves[:k], leaf, *leaves[k + 1 :]])
                return curve(free, fixed, x)[entry]

            slope = np.asarray(jax.jacfwd(value)(leaf))
            found.append(~np.isfinite(slope).ravel())
        flags = np.concatenate(found)
        named = [
            f"`{name}`" for name, is_so in zip(self.names, flags, strict=True) if is_so
        ]
        return " and ".join(named) or "its parameters"

    def _are_determined(self) -> np.ndarray:
        """Whether all parameters are, of each data set."""
        return np.all(np.asarray(self._end.covariance.determined), axis=-1)

    def complaint(self) -> str:
        """What a user has to know, if anything."""
        if isinstance(self.chi_squared, Tracer):
            return ""
        if self._setting.many:
            failed = np.asarray(~(self.result == optx.RESULTS.successful))
            poorly = ~self._are_determined()
            said = []
            if failed.any():
                said.append("have not converged; `fit.result` says which")
            if poorly.any():
                said.append(
                    "do not determine all parameters; of these `fit.standard_errors` are "
                    "infinite"
                )
            counts = [x.sum() for x in (failed, poorly) if x.any()]
            each = (
                f"{count} of {failed.size} data sets {what}"
                for count, what in zip(counts, said, strict=True)
            )
            return f"`gnlin.curve_fit`: {', and '.join(each)}." if said else ""
        is_finite = int(self._end.nonfinite.point) < 0
        if result_name(self.result) != "successful" or not is_finite:
            return f"`gnlin.curve_fit` has not converged: {self.reason}."
        if np.all(np.asarray(self._end.covariance.determined)):
            if self.degrees_of_freedom > 0 or self._setting.absolute_sigma:
                return ""
            return (
                "`gnlin.curve_fit`: there are no more points than parameters, so that "
                "nothing says how large the errors are: pass `sigma` and "
                "`absolute_sigma=True`, or more points."
            )
        return (
            "`gnlin.curve_fit`: the data do not determine all parameters: to move "
            f"{'; or '.join(self.undetermined())} leaves the curve as it is there. Fix "
            "one of them, pass more points, or start elsewhere."
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters that are free, entry by entry."""
        return names_of(self._free)

    @property
    def _free(self) -> PyTree:
        return self._end.parameters

    def undetermined(self) -> list[str]:
        """Directions in which the parameters may move without a change of the curve."""
        found = []
        for direction in np.asarray(self._end.covariance.directions):
            size = direction[np.argmax(np.abs(direction))]
            if size == 0:
                continue
            parts = [
                f"{name} by {part:.3g}"
                for name, part in zip(self.names, direction / size, strict=True)
                if abs(part) > 1e-6
            ]
            found.append(" and ".join(parts))
        return found

    def band(self, x: PyTree, confidence: float = 0.95, *, sigma: Any = None) -> Band:
        """The curve at any x, with its confidence interval, by the curve's derivatives.

        **Arguments:**

        - `x`: as `f` takes it.
        - `confidence`: between 0 and 1, at each point by itself, by Student's
            distribution, or the normal one where `sigma` was absolute.
        - `sigma`: of a new measurement there, in units of those of the fit (1 is like
            the others, where it had none): then the interval is that of its result.

        **Returns:** `(mean, low, high)`, of the shapes that `f` returns; of complex
        numbers an interval of the real part and one of the imaginary part.
        """
        check_fraction("confidence", confidence)
        if self._setting.many:
            raise ValueError("A band is of one data set: fit it by itself.")
        x = as_x(x)
        fixed = self._setting.fixed
        curve = self._curve.on(self._free, fixed, x)
        mean, factor = _curve_and_errors(
            curve, self._free, fixed, x, self._end.covariance
        )
        variance = self._end.factor(self._setting) * factor
        loss = self._setting.loss
        if sigma is not None:
            if isinstance(loss, Likelihood) and not isinstance(loss.loss, TobitNLL):
                raise ValueError(
                    "`sigma` of a band is of normal noise: leave it out, and take the "
                    "spread of a new value from its distribution."
                )
            variance += (self.scale * jnp.asarray(sigma, mean.dtype)) ** 2
        width = self._quantile(confidence) * jnp.sqrt(variance)
        like = curve.shapes(self._free, fixed, x)
        ends = mean, mean - width, mean + width
        return Band(*(unflattened(end, like) for end in ends))

    def confidence_intervals(self, confidence: float = 0.95) -> Interval:
        r"""The profile likelihood's: each parameter is moved to where the best fit of the
        others is as much worse as the confidence allows, by refits in the fit's program.

        By an F-test with the fit's own variance, or, where `sigma` was absolute, by
        $\chi^2$ with one degree of freedom. Of a robust loss the rise is in units of the
        residuals' mean squared pull over the loss's mean second derivative. Infinite
        where no such point is found, or the bound if that is nearer; of what is fixed or
        at a bound NaN. Of data that are met to rounding, and of what cannot be
        told from it, the standard errors'.

        ??? cite "Reference"

            D. M. Bates and D. G. Watts, *Nonlinear regression analysis and its
            applications* (1988), section 6.1. Robust losses: R. M. Schrader and T. P.
            Hettmansperger, *Robust analysis of variance based upon a likelihood ratio
            criterion*, Biometrika 67 (1980).
        """
        check_fraction("confidence", confidence)
        if self._setting.many:
            raise ValueError("Profiles are of one data set: fit it by itself.")
        return Interval(*profiles(self, self._quantile(confidence)))

    def _quantile(self, confidence: float) -> float:
        from scipy.stats import norm, t  # dear to import

        both = 0.5 + 0.5 * confidence
        if self._setting.absolute_sigma:
            return float(norm.ppf(both))
        return float(t.ppf(both, np.asarray(self.degrees_of_freedom)))

    def outliers(self) -> np.ndarray:
        """Where a robust loss pulls less than a third as much as squared error would,
        and the residual is more than three of the noise's standard deviations: the
        points, and of several data sets rows of a data set and a point."""
        loss, residuals = self._setting.loss, np.asarray(self.residuals)
        if not isinstance(loss, AbstractRobust):
            return np.zeros(0, int)
        each = (lambda x: np.asarray(x)[:, None]) if self._setting.many else np.asarray
        unit = 1.0 if self._data.spread is None else each(self._data.spread)
        pull = unit * np.asarray(
            loss.derivative(jnp.asarray(residuals / unit), jnp.zeros(()))
        )
        far = np.abs(residuals) > _OUTLYING * each(self._end.noise)
        found = np.argwhere(far & (np.abs(pull) < np.abs(residuals) / 3))
        return found if self._setting.many else found[:, 0]

    def runs_test(self) -> float:
        """The p-value of Wald and Wolfowitz's test for the signs of the residuals.

        A small one says that neighbours deviate alike, and the curve misses something.
        The residuals are in the order of x where that is one row of numbers, else in the
        order of the points. NaN where all have one sign."""
        if self._setting.many:
            raise ValueError("A runs test is of one data set: fit it by itself.")
        residuals, leaves = np.asarray(self.residuals), jax.tree.leaves(self._data.x)
        if len(leaves) == 1 and leaves[0].shape == residuals.shape:
            residuals = residuals[np.argsort(np.asarray(leaves[0]), kind="stable")]
        return runs_test(np.sign(residuals))

    def plot(self, ax: Any = None, *, confidence: float = 0.95, num_points: int = 300):
        """Data with their errors, the curve, and its confidence band; needs matplotlib.

        It is drawn over x, or over the only one of a dictionary's arrays that has y's
        shape and is not the same at all points. With a likelihood it is in units of y; of
        trials as the share of successes.

        **Returns:** the axes.
        """
        from ._picture import plot

        return plot(self, ax, confidence, num_points)


def made(
    setting: Setting, curve: Curve, data: Data, end: Fitted, parts: dict[str, Any]
) -> CurveFit:
    """Of the end of a run, and what it is in the parameters' structure."""
    history = end.history
    if history is not None and not is_traced((end.num_steps, history)):
        steps = int(end.num_steps)
        history = History({name: np.asarray(x)[:steps] for name, x in history.items()})
    return CurveFit(
        **parts,
        chi_squared=end.chi_squared,
        residuals=end.residuals,
        x=end.x,
        losses=end.losses,
        result=end.result,
        history=history,
        num_steps=end.num_steps,
        _curve=curve,
        _setting=setting,
        _data=data,
        _end=end,
    )


# An outlier has a residual of so many standard deviations.
_OUTLYING = 3


@eqx.filter_jit
def _curve_and_errors(curve, free, fixed, x, errors: Covariance):
    """The curve, and its variance in units of the residuals'."""
    lin = linearise(lambda p, given: curve(p, *given), free, (fixed, x))
    pushed = _tree.matmul(lin.matrix(), errors.factor)
    return lin.outputs, jnp.sum(pushed**2, axis=1)
