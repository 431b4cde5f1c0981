"""Negative log-likelihoods as losses of a fit, and what such a fit reports."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from .._training._curvature import is_flat
from ..losses import (
    AbstractElementwiseLoss,
    AbstractLoss,
    BinomialNLL,
    Isotropic,
    PoissonNLL,
    SoftmaxCrossEntropy,
    SquaredError,
    TobitNLL,
)
from ..losses._base import numbers_of, Reduction
from ..losses._robust import AbstractRobust
from ._curve import Curve, Data
from ._points import place_of


# Expected counts below this are taken as zero. Fits that end at the edge reach 1e-8.
_NO_RATE = 1e-5


class Likelihood(AbstractElementwiseLoss):
    """A loss whose sum over the flattened points is a negative log-likelihood.

    - `counted`: 0 for missing points, which are ignored.
    """

    loss: AbstractElementwiseLoss
    counted: Float[Array, " m"]
    reduction: Reduction | None = "sum"

    def elementwise(self, output: Array, target: Array) -> Array:
        return self._of(self.loss.elementwise, output, target)

    def derivative(self, output: Array, target: Array) -> Array:
        return self._of(self.loss.derivative, output, target)

    def root(self, output: Array, target: Array) -> Array:
        return self._of(self.loss.root, output, target)

    def decrease(self, outputs: Array, new_outputs: Array, target: Array) -> Array:
        return self.loss.decrease(*map(self._known, (outputs, new_outputs, target)))

    def saturated(self, target: Array) -> Array:
        return self._known(self.loss.saturated(self._known(target)), 0)

    def _of(self, function: Any, output: Array, target: Array) -> Array:
        return self._known(function(*map(self._known, (output, target))), 0)

    def _known(self, values: Array, otherwise: int = 1) -> Array:
        """Replace missing points, by default by 1, where every loss is finite."""
        return jnp.where(self.counted > 0, values, otherwise)


class PerPoint(AbstractElementwiseLoss):
    """A loss of one example, mapped over points of one number each."""

    loss: AbstractLoss
    reduction: Reduction | None = "sum"

    def elementwise(self, output: Array, target: Array) -> Array:
        return jax.vmap(self.loss.value)(output, target)

    def check(self, outputs: Any, targets: Any) -> None:
        of_points = jax.ShapeDtypeStruct(outputs.shape[1:], outputs.dtype)
        for points in targets:
            self.loss.check(of_points, points)


def as_loss(loss: Any, sigma: Any, sigma_x: Any) -> AbstractElementwiseLoss:
    """Return the loss of the flattened points, after a check that it suits the errors."""
    if not isinstance(loss, AbstractLoss):
        raise ValueError(
            "`loss` must be one of gnlin's, such as `gnlin.losses.PoissonNLL()` or "
            f"`gnlin.losses.Huber(2.0)`, or your own `gnlin.authoring.AbstractLoss`, but "
            f"{loss!r} was given."
        )
    if sigma_x is not None and not isinstance(loss, SquaredError):
        raise ValueError("`sigma_x` needs squared error: leave `loss` or `sigma_x` out.")
    if isinstance(loss, SoftmaxCrossEntropy | Isotropic):
        raise ValueError(
            "`gnlin.curve_fit` takes a loss of one number for each point, but "
            f"`{type(loss).__name__}` compares several: use `gnlin.solve`, and "
            "`gnlin.predict.covariance` for the errors of its parameters."
        )
    loss = loss.as_arguments()
    if isinstance(loss, SquaredError | AbstractRobust):
        return loss
    if isinstance(loss, TobitNLL) and sigma is None:
        raise ValueError(
            "Censored values need `sigma`, the standard deviation of y, which this fit "
            "does not estimate."
        )
    if sigma is not None and not isinstance(loss, TobitNLL):
        raise ValueError(
            f"`sigma` is for normal noise, and `{type(loss).__name__}` already implies "
            "the spread of y: leave `sigma` out. To leave out a point, make its y NaN, "
            "and pass `nan_policy='omit'`; to weight points, multiply the loss by an "
            "array in a loss of your own."
        )
    return loss if isinstance(loss, AbstractElementwiseLoss) else PerPoint(loss=loss)


def is_likelihood(loss: AbstractLoss) -> bool:
    """Whether a loss is a negative log-likelihood, for which a fit estimates no scale."""
    return not isinstance(loss, SquaredError | AbstractRobust)


def as_given(loss: AbstractLoss) -> AbstractLoss:
    """Return the loss that the user passed."""
    return loss.loss if isinstance(loss, PerPoint) else loss


def is_linear(loss: AbstractElementwiseLoss, y: Array | np.ndarray) -> bool:
    """Whether a loss is linear in pieces, so that it has neither curvature nor errors.

    - `y`: one data set or several, of which only the shape is read.
    """
    given, shape = as_given(loss), y.shape[-1:]
    example = jax.ShapeDtypeStruct((1, *shape) if given is loss else shape, y.dtype)
    return is_flat(given, example, example)


def in_one_row(loss: AbstractElementwiseLoss, of_y: PyTree) -> AbstractElementwiseLoss:
    """Flatten the loss's own arrays, such as numbers of trials, like the points."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(of_y)]
    is_like_y = lambda leaf: eqx.is_array(leaf) and [leaf.shape] == shapes
    return jax.tree.map(lambda leaf: leaf.ravel() if is_like_y(leaf) else leaf, loss)


def without_empty(
    loss: AbstractElementwiseLoss, data: Data
) -> tuple[AbstractElementwiseLoss, Data]:
    """Count points without trials as missing, because they tell nothing."""
    if not isinstance(loss, BinomialNLL):
        return loss, data
    told = loss.trials > 0
    if not isinstance(told, Tracer) and not np.any(told):
        raise ValueError("There is no data: all `trials` are 0.")
    loss = dataclasses.replace(loss, trials=jnp.where(told, loss.trials, 1))
    return loss, data._replace(counted=jnp.where(told, data.counted, 0))


def check_targets(loss: AbstractLoss, data: Data, axes: Any, y: PyTree) -> None:
    """Check that the data are possible under the likelihood."""
    rows = data.y if data.y.ndim == 2 else data.y[None]
    check_values(loss, y, rows)
    if data.sigma.ndim - (axes is not None and axes.sigma == 0) == 2:
        raise ValueError(
            "Censored values must be independent: pass standard deviations as `sigma`, "
            "not a covariance."
        )


def check_values(loss: AbstractLoss, y: PyTree, rows: Iterable[Any]) -> None:
    """Check that the values of y, flattened to these rows, are possible under the
    likelihood."""
    if any(np.iscomplexobj(leaf) for leaf in jax.tree.leaves(y)):
        raise ValueError("Complex values need squared error or a robust loss as `loss`.")
    for row in rows:
        name, shape = loss._of_each, np.shape(numbers_of(loss))
        if shape not in ((), row.shape):
            raise ValueError(
                f"`{name}` must be one number, or have the shape of y (of one data set, "
                f"if there are several), {row.shape}, but has the shape {shape}: fit "
                f"data sets with `{name}` of their own by `jax.vmap` over y and `{name}`."
            )
        # All points are one example, whose numbers these are.
        loss.check(jax.ShapeDtypeStruct((1, *row.shape), row.dtype), row[None])


def is_of_rates(loss: AbstractLoss | None) -> bool:
    """Whether a loss takes rates of counts, and not their logarithms."""
    return isinstance(loss, PoissonNLL) and not loss.log_input


def point_at_edge(
    rates: Float[Array, " m"], data: Data, spread: Float[Array, "m k"]
) -> Int[Array, ""]:
    """Return a point whose count is 0 and whose rate has fallen to 0, although the
    parameters could lower it further; -1 if there is none. The expected curvature there
    is infinite, and holds the parameters wherever they met this edge.

    - `spread`: a row for each point, whose norm is the standard deviation of the rate
        divided by the square root of the rate.
    """
    lowers = jnp.sum(spread**2, axis=1) > 0.5  # false in the tail of a peak
    is_at_edge = (data.counted > 0) & (data.y == 0) & (rates < _NO_RATE) & lowers
    return jnp.where(jnp.any(is_at_edge), jnp.argmax(is_at_edge), -1)


def check_rates(loss: AbstractLoss, curve: Curve, free: PyTree, x: PyTree) -> None:
    """Check that the rates of a Poisson loss with `log_input=False`, which are
    `f(start, x)`, are positive."""
    if not is_of_rates(loss):
        return
    known = curve(free, x)
    if isinstance(known, Tracer):
        return
    wrong = np.flatnonzero(~(np.asarray(known) > 0))
    if wrong.size > 0:
        place, *_ = place_of(int(wrong[0]), curve.shapes(free, x))
        raise ValueError(
            "`f` is the rate of the counts, which must be positive, but `f(start, x)` is "
            f"{float(known[wrong[0]]):.4g} {place}: start elsewhere, leave the "
            "point out if its rate is 0 for all parameters, or let `f` return the "
            "logarithm of the rate, and use `gnlin.losses.PoissonNLL()`."
        )


def is_known(loss: AbstractElementwiseLoss) -> bool:
    """Whether the distribution of y is known."""
    return type(loss).cdf is not AbstractElementwiseLoss.cdf
