r"""Spectral filters: how far the linearised problem is solved.

Write `w, U` for the eigenpairs of the kernel $\phi\phi^\top$ and `r` for the residual.
Every solver of a *quadratic* linearised problem takes the step

$$\delta = -\phi^\top U\, g(w)\, U^\top r$$

with a scalar function $g$ of the eigenvalues, its *filter*:

| filter | $g(w)$ |
|---|---|
| [`gnlin.filters.PseudoInverse`][] | $1/w$ on the numerical range, $0$ off it |
| [`gnlin.filters.Tikhonov`][] | $1/(w + \lambda)$ |
| [`gnlin.filters.GradientDescent`][] | $(1 - (1 - \eta w)^K)/w$ |
| [`gnlin.filters.GradientFlow`][] | $(1 - e^{-wT})/w$ |
| [`gnlin.filters.HeavyBall`][] | the $K$-th power of a $2 \times 2$ matrix |
| [`gnlin.filters.Nesterov`][] | the $K$-th power of another such matrix |
| [`gnlin.filters.Damped`][] | $g(w + \lambda)$ of another filter $g$ |

A filter is an elementwise function of eigenvalues, and a pytree whose leaves are its
parameters, so that `jax.vmap` over the parameters shares one factorisation.
"""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, ScalarLike

from ._common import _tree
from ._common._checks import (
    as_float,
    as_scalar,
    check_callable,
    check_finite_nonnegative,
    check_finite_positive,
    check_less_than_one,
    check_nonnegative,
    check_period,
    forwards_only,
    is_zero,
    unless_zero,
)


__all__ = [
    "AbstractFilter",
    "Damped",
    "GradientDescent",
    "GradientFlow",
    "HeavyBall",
    "Nesterov",
    "PseudoInverse",
    "Tikhonov",
    "equivalent_damping",
    "equivalent_period",
]


class AbstractFilter(eqx.Module):
    """A function of the kernel's eigenvalues. Subclass it to define your own."""

    def __repr__(self) -> str:
        return _tree.in_words(self)

    @abc.abstractmethod
    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        """Return the filter's value $g(w)$ at each (non-negative) eigenvalue `w`."""


class PseudoInverse(AbstractFilter):
    r"""Gauss-Newton: $g(w) = 1/w$ on the numerical range, $0$ off it.

    **Arguments:**

    - `rcond`: singular values of the Jacobian (square roots of `w`) at or below `rcond`
        times the largest count as zero, as in `numpy.linalg.pinv`. With `None`, only
        eigenvalues that are exactly zero do; a [`gnlin.Spectrum`][] has set those to zero
        that are indistinguishable from it at working precision.

    !!! example

        ```python
        gnlin.filters.PseudoInverse()(jnp.array([0.0, 0.5, 2.0]))  # [0.0, 2.0, 0.5]
        ```
    """

    rcond: ScalarLike | None = eqx.field(default=None, converter=as_scalar)

    def __check_init__(self):
        if self.rcond is not None:
            check_nonnegative("rcond", self.rcond)

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        w = eigenvalues
        rcond = 0.0 if self.rcond is None else self.rcond
        cutoff = jnp.asarray(rcond, w.dtype) ** 2 * jnp.max(w, initial=0)
        return _tree.quotient(1, w, w > cutoff)


class Tikhonov(AbstractFilter):
    r"""Damped Gauss-Newton: $g(w) = 1/(w + \lambda)$.

    With $\lambda = 0$ it is [`gnlin.filters.PseudoInverse`][], but methods that
    factorise, such as `"kernel"`, give NaN if their matrix is singular.

    **Arguments:**

    - `damping`: $\lambda \ge 0$, in units of the eigenvalues.
    """

    damping: ScalarLike = eqx.field(converter=unless_zero)

    def __check_init__(self):
        check_finite_nonnegative("damping", self.damping)

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        damped = eigenvalues + jnp.asarray(self.damping, eigenvalues.dtype)
        return _tree.quotient(1, damped)


class GradientDescent(AbstractFilter):
    r"""`period` steps of gradient descent: $g(w) = (1 - (1 - \eta w)^K)/w$.

    It is evaluated as `-expm1(K * log|1 - eta w|) / w`, so that $K = 10^8$ costs the same
    as $K = 1$. For $1 < \eta w < 2$ the descent converges with alternating sign. For
    $\eta w > 2$ it diverges, and the filter grows as the steps would; it is infinite
    where they overflow.

    **Arguments:**

    - `period`: the number of steps $K \ge 1$, or `math.inf` for descent to convergence.
    - `learning_rate`: $\eta > 0$, in units of 1 / eigenvalue.
    """

    period: ScalarLike
    learning_rate: ScalarLike = eqx.field(converter=as_scalar)

    def __check_init__(self):
        check_period("period", self.period)
        check_finite_positive("learning_rate", self.learning_rate)

    def largest_stable(self) -> ScalarLike:
        r"""Return the least $\eta w$ for which the steps do not converge."""
        return 2.0

    def log_growth(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        r"""Return $K \log|1 - \eta w|$, the log growth of each residual component."""
        x = jnp.asarray(self.learning_rate, eigenvalues.dtype) * eigenvalues
        log_factor = _log_factor(x)
        period = jnp.asarray(as_float(self.period), eigenvalues.dtype)
        # With an infinite period, |1 - x| = 1 means convergence at x = 0, and endless
        # oscillation at x = 2, which counts as divergence.
        forever = jnp.where(x == 0, 0, jnp.where(log_factor < 0, -jnp.inf, jnp.inf))
        finite = jnp.where(jnp.isinf(period), 0, period) * log_factor
        return jnp.where(jnp.isinf(period), forever, finite)

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        w = eigenvalues
        eta = jnp.asarray(self.learning_rate, w.dtype)
        period = jnp.asarray(as_float(self.period), w.dtype)
        log_growth = self.log_growth(w)
        shrunk = _shrunk(eta * w, period, _is_odd(self.period), log_growth)
        value = shrunk / jnp.where(w == 0, 1, w)
        value = jnp.where(jnp.isposinf(log_growth), jnp.inf, value)
        at_zero = jnp.where(jnp.isinf(period), 0, period) * eta
        return jnp.where(w == 0, at_zero, value)


class GradientFlow(AbstractFilter):
    r"""Gradient flow for a time: $g(w) = (1 - e^{-wT})/w$.

    It is the limit of [`gnlin.filters.GradientDescent`][] as $\eta \to 0$, $K\eta = T$.

    **Arguments:**

    - `time`: $T \ge 0$, in units of 1 / eigenvalue; `math.inf` for flow to convergence.
    """

    time: ScalarLike = eqx.field(converter=as_scalar)

    def __check_init__(self):
        check_nonnegative("time", self.time)

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        w = eigenvalues
        time = jnp.asarray(self.time, w.dtype)
        positive = w > 0
        safe = jnp.where(positive, w, 1)
        forever = jnp.isinf(time)
        finite = jnp.where(forever, 0, time)
        shrunk = jnp.where(forever, 1, -jnp.expm1(-safe * finite))
        return jnp.where(positive, shrunk / safe, finite)


class _AbstractMomentum(AbstractFilter):
    """Steps with momentum."""

    period: ScalarLike
    learning_rate: ScalarLike = eqx.field(converter=as_scalar)
    momentum: ScalarLike = eqx.field(converter=as_scalar)

    def __check_init__(self):
        check_period("period", self.period)
        check_finite_positive("learning_rate", self.learning_rate)
        check_less_than_one("momentum", self.momentum)

    @abc.abstractmethod
    def largest_stable(self) -> ScalarLike:
        r"""Return the least $\eta w$ for which the steps do not converge."""

    @abc.abstractmethod
    def _step(self, x: Array, mu: Array, eta: Array) -> tuple[tuple, tuple]:
        r"""Return the rows of $(E, d)$ for one step $z \leftarrow z + E z + d$ of
        $z = (g, v)$, with `x` $= \eta w$."""

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        w = eigenvalues
        eta = jnp.full(w.shape, self.learning_rate, w.dtype)
        mu = jnp.full(w.shape, self.momentum, w.dtype)
        period = jnp.asarray(as_float(self.period), w.dtype)
        step = jnp.array(self._step(eta * w, mu, eta))

        # A map is stored as (E, d). In I + E a small E would be lost to rounding.
        def compose(a, b):  # first b, then a
            return a + b + (a[:, :1] * b[:1] + a[:, 1:2] * b[1:])

        def body(carry):
            remaining, done, power = carry
            odd = jnp.mod(remaining, 2) == 1
            done = jnp.where(odd, compose(power, done), done)
            return jnp.floor(remaining / 2), done, compose(power, power)

        count = jnp.where(jnp.isinf(period), 0, period)
        start = count, jnp.zeros_like(step), step
        end = jax.lax.while_loop(lambda carry: carry[0] > 0, body, start)
        _, done, _ = forwards_only(end)
        value = jnp.where(jnp.isnan(done[0, 2]), jnp.inf, done[0, 2])  # it overflowed
        converges = eta * w < jnp.asarray(self.largest_stable(), w.dtype)
        limit = jnp.where(converges, _tree.quotient(1, w, w > 0), jnp.inf)
        return jnp.where(jnp.isinf(period), limit, value)


class HeavyBall(_AbstractMomentum):
    r"""`period` steps of gradient descent with heavy-ball momentum (Polyak, 1964).

    As in `optax.sgd(learning_rate, momentum)`, the velocity starts at zero, and
    $v \leftarrow \mu v - \eta\nabla$, $\theta \leftarrow \theta + v$. For each
    eigenvalue, $g$ and the velocity follow an affine recurrence in the plane; its $K$-th
    power is computed by repeated squaring, in $\log_2 K$ rounds, which have a derivative
    in forward mode only. The steps converge for $\eta w < 2(1 + \mu)$.

    **Arguments:**

    - `period`: the number of steps $K \ge 1$, or `math.inf`.
    - `learning_rate`: $\eta > 0$, in units of 1 / eigenvalue.
    - `momentum`: $\mu$, at least 0 and less than 1.
    """

    def largest_stable(self) -> ScalarLike:
        return 2 * (1 + self.momentum)

    def _step(self, x: Array, mu: Array, eta: Array) -> tuple[tuple, tuple]:
        # v' = mu v + eta (1 - w g), g' = g + v'
        return (-x, mu, eta), (-x, mu - 1, eta)


class Nesterov(_AbstractMomentum):
    r"""`period` steps of gradient descent with Nesterov's momentum (1983).

    As in `optax.sgd(learning_rate, momentum, nesterov=True)`, the velocity starts at
    zero, and $v \leftarrow \mu v - \eta\nabla$, $\theta \leftarrow \theta + \mu v -
    \eta\nabla$. The steps converge for $\eta w < 2(1 + \mu)/(1 + 2\mu)$.

    **Arguments:** as for [`gnlin.filters.HeavyBall`][].
    """

    def largest_stable(self) -> ScalarLike:
        return 2 * (1 + self.momentum) / (1 + 2 * self.momentum)

    def _step(self, x: Array, mu: Array, eta: Array) -> tuple[tuple, tuple]:
        # v' = mu v + eta (1 - w g), g' = g + mu v' + eta (1 - w g)
        return (-(1 + mu) * x, mu**2, (1 + mu) * eta), (-x, mu - 1, eta)


class Damped(AbstractFilter):
    r"""Any filter on the damped problem: $g(w + \lambda)$ in place of $g(w)$.

    An example is descent on the loss plus $\frac\lambda2\lVert\theta - \theta_s\rVert^2$.

    **Arguments:**

    - `filter`: the filter $g$.
    - `damping`: $\lambda \ge 0$, in units of the eigenvalues.
    """

    filter: AbstractFilter
    damping: ScalarLike = eqx.field(converter=as_scalar)

    def __check_init__(self):
        what, example = "a function of the eigenvalues", "gnlin.filters.Tikhonov(0.1)"
        check_callable("filter", self.filter, what, example)
        check_finite_nonnegative("damping", self.damping)

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        return self.filter(eigenvalues + jnp.asarray(self.damping, eigenvalues.dtype))


def equivalent_damping(
    period: ArrayLike, learning_rate: ArrayLike, momentum: ArrayLike = 0.0
) -> ArrayLike:
    r"""Return the damping whose filter is nearest to `period` steps,
    $\lambda = 1/(\eta K)$.

    With this damping, both filters are nearly the same: they invert eigenvalues far above
    it, and ignore those far below it. Momentum $\mu$ makes the steps $1/(1-\mu)$ times
    longer.

    **Arguments:** as for [`gnlin.filters.HeavyBall`][], or arrays of them; an infinite
    period gives 0.

    **Returns:** the damping, in units of the kernel's eigenvalues.

    !!! example

        ```python
        gnlin.filters.equivalent_damping(period=10**5, learning_rate=1e-5)  # 1.0
        ```
    """
    check_period("period", period)
    check_finite_positive("learning_rate", learning_rate)
    check_less_than_one("momentum", momentum)
    with jax.numpy_dtype_promotion("standard"):  # for arrays of integer periods
        return (1 - momentum) / (learning_rate * period)


def equivalent_period(
    damping: ArrayLike, learning_rate: ArrayLike, momentum: ArrayLike = 0.0
) -> ArrayLike:
    r"""Return the number of steps nearest to a damping, $K = 1/(\eta\lambda)$, as the
    inverse of [`gnlin.filters.equivalent_damping`][].

    **Returns:** the period as a real number, which a solver takes rounded; infinity for a
    damping of 0.
    """
    check_finite_nonnegative("damping", damping)
    check_finite_positive("learning_rate", learning_rate)
    check_less_than_one("momentum", momentum)
    if is_zero(damping):
        return math.inf
    with jax.numpy_dtype_promotion("standard"):
        return (1 - momentum) / (learning_rate * damping)


def _log_factor(x: Array) -> Array:
    return jnp.log1p(-jnp.minimum(x, 2 - x))  # log|1 - x|, exact near 0 and 2


@jax.custom_jvp
def _shrunk(x: Array, period: Array, odd: Array, log_growth: Array) -> Array:
    """Return 1 - (1 - x)^K. Its derivatives are those of the power, since the logarithm
    has none at x = 1, where one step solves the problem."""
    negative = odd & (x > 1)  # the sign of (1 - x)^K
    return jnp.where(negative, 1 + jnp.exp(log_growth), -jnp.expm1(log_growth))


@_shrunk.defjvp
def _shrunk_jvp(primals, tangents):
    x, period, odd, _ = primals
    _, tangent = jax.jvp(lambda x, k: _power_of(x, k, odd), (x, period), tangents[:2])
    return _shrunk(*primals), -tangent


@jax.custom_jvp
def _power_of(x: Array, period: Array, odd: Array) -> Array:
    """Return (1 - x)^K for a finite K, else 0."""
    finite = jnp.isfinite(period)
    size = jnp.exp(jnp.where(finite & (period != 0), period, 1) * _log_factor(x))
    size = jnp.where(period == 0, 1, jnp.where(finite, size, 0))
    return jnp.where(odd & (x > 1), -size, size)


@_power_of.defjvp
def _power_of_jvp(primals, tangents):
    x, period, odd = primals
    value = _power_of(x, period, odd)
    one_less = jnp.where(period == 0, 0, period - 1)
    factor = jnp.where(jnp.isfinite(period), -period, 0)
    by_x = factor * _power_of(x, one_less, ~odd)
    by_period = jnp.where(x == 1, 0, value * _log_factor(jnp.where(x == 1, 0, x)))
    return value, by_x * tangents[0] + by_period * tangents[1]


def _is_odd(period: ScalarLike) -> Array:
    # Test before rounding to single precision, in which every K > 2^24 is even.
    if isinstance(period, int):
        return jnp.asarray(period % 2 == 1)
    return jnp.mod(jnp.asarray(period), 2) == 1
