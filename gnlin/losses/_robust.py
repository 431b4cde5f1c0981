"""Robust losses, which grow at most linearly and so limit the influence of outliers."""

import abc
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._common._checks import check_finite_positive
from ._base import AbstractElementwiseLoss, as_outputs, Reduction


class AbstractRobust(AbstractElementwiseLoss):
    """A loss that is half the square of residuals much smaller than `delta`, and less
    than half the square of larger ones."""

    delta: float = 1.0
    reduction: Reduction | None = None

    def __check_init__(self):
        if not isinstance(self.delta, float | int):
            raise ValueError(f"`delta` must be a number, but {self.delta!r} was given.")
        check_finite_positive("delta", self.delta)

    @abc.abstractmethod
    def _rho(self, r: Array) -> Array:
        """Return the loss of a residual."""

    @abc.abstractmethod
    def _slope(self, r: Array) -> Array:
        """Return its first derivative."""

    @abc.abstractmethod
    def _root(self, r: Array) -> Array:
        """Return the square root of its second derivative, or 0 if that is negative."""

    def elementwise(self, output: Array, target: Array) -> Array:
        return self._rho(output - target)

    def derivative(self, output: Array, target: Array) -> Array:
        return self._slope(output - target)

    def root(self, output: Array, target: Array) -> Array:
        return self._root(output - target)

    @property
    def unit(self) -> float:
        return float(self.delta) ** 2

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        each = functools.partial(_signed_root, self)
        return jax.tree.map(each, outputs, as_outputs(target, outputs))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _signed_root(loss: AbstractRobust, output: Array, target: Array) -> Array:
    r"""Return $z = \pm\sqrt{2\rho(r)}$ with the sign of the residual r, which is smooth
    in r, and close to r if r is small."""
    root = jnp.sqrt(2 * loss.elementwise(output, target))
    return jnp.where(output < target, -root, root)


@_signed_root.defjvp
def _(loss: AbstractRobust, primals, tangents):
    output, target = primals
    z = _signed_root(loss, output, target)
    # z dz = rho'(r) dr. If r^2 underflows, z is 0 and dz = dr.
    normal = z != 0
    slope = loss.derivative(output, target) / jnp.where(normal, z, 1)
    return z, jnp.where(normal, slope, 1) * (tangents[0] - tangents[1])


class Huber(AbstractRobust):
    r"""$\frac12 r^2$ up to $|r| = \delta$, and $\delta(|r| - \frac12\delta)$ beyond, with
    $r = f - y$. An outlier has the gradient $\delta$ but no curvature, so that undamped
    steps ignore it: use [`gnlin.LevenbergMarquardt`][].

    **Arguments:**

    - `delta`: $\delta > 0$, in the outputs' units.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].

    ??? cite "Reference"

        P. J. Huber, *Robust estimation of a location parameter*, Ann. Math. Statist. 35
        (1964).
    """

    def _rho(self, r: Array) -> Array:
        near = jnp.minimum(jnp.abs(r), self.delta)
        return near * (jnp.abs(r) - 0.5 * near)

    def _slope(self, r: Array) -> Array:
        return jnp.clip(r, -self.delta, self.delta)

    def _root(self, r: Array) -> Array:
        return (jnp.abs(r) <= self.delta).astype(r.dtype)


class PseudoHuber(AbstractRobust):
    r"""$\delta^2(\sqrt{1 + (r/\delta)^2} - 1)$ with $r = f - y$: a smooth version of
    Huber's loss. An outlier has almost no curvature, so that undamped steps overshoot:
    use [`gnlin.LevenbergMarquardt`][].

    The arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        P. Charbonnier et al., *Deterministic edge-preserving regularization in computed
        imaging*, IEEE Trans. Image Processing 6 (1997).
    """

    def _rho(self, r: Array) -> Array:
        return r**2 / (1 + self._scale(r))

    def _slope(self, r: Array) -> Array:
        return r / self._scale(r)

    def _root(self, r: Array) -> Array:
        return self._scale(r) ** -1.5

    def _scale(self, r: Array) -> Array:
        return jnp.hypot(1.0, r / self.delta).astype(r.dtype)


class LogCosh(AbstractRobust):
    r"""$\delta^2\log\cosh(r/\delta)$ with $r = f - y$. An outlier has almost no
    curvature, so that undamped steps overshoot: use [`gnlin.LevenbergMarquardt`][].

    The arguments are those of [`gnlin.losses.Huber`][].
    """

    def _rho(self, r: Array) -> Array:
        x = jnp.abs(r) / self.delta
        near = 0.5 * jnp.log1p(jnp.sinh(jnp.minimum(x, 1)) ** 2)
        far = x + jnp.log1p(jnp.exp(-2 * x)) - jnp.log(2).astype(x.dtype)
        return self.delta**2 * jnp.where(x < 1, near, far)

    def _slope(self, r: Array) -> Array:
        return self.delta * jnp.tanh(r / self.delta)

    def _root(self, r: Array) -> Array:
        x = jnp.abs(r) / self.delta
        return 2 * jnp.exp(-x) / (1 + jnp.exp(-2 * x))  # 1 / cosh


class Cauchy(AbstractRobust):
    r"""$\frac12\delta^2\log(1 + (r/\delta)^2)$ with $r = f - y$. The gradient of an
    outlier decreases with its distance. The loss is not convex, so that the solution
    depends on the start.

    The arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        P. W. Holland and R. E. Welsch, *Robust regression using iteratively reweighted
        least-squares*, Comm. Statist. 6 (1977).
    """

    def _rho(self, r: Array) -> Array:
        return 0.5 * self.delta**2 * jnp.log1p((r / self.delta) ** 2)

    def _slope(self, r: Array) -> Array:
        return r / (1 + (r / self.delta) ** 2)

    def _root(self, r: Array) -> Array:
        u2 = (r / self.delta) ** 2
        return jnp.sqrt(jnp.maximum(1 - u2, 0)) / (1 + u2)


class Tukey(AbstractRobust):
    r"""$\frac16\delta^2(1 - (1 - (r/\delta)^2)^3)$ up to $|r| = \delta$, and
    $\frac16\delta^2$ beyond, with $r = f - y$: Tukey's biweight. An outlier has no
    gradient, so start near the solution, for example from [`gnlin.losses.Huber`][]'s.

    The arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        A. E. Beaton and J. W. Tukey, *The fitting of power series, meaning polynomials,
        illustrated on band-spectroscopic data*, Technometrics 16 (1974).
    """

    def _rho(self, r: Array) -> Array:
        u2 = self._near(r)
        return self.delta**2 / 6 * u2 * (3 - 3 * u2 + u2**2)

    def _slope(self, r: Array) -> Array:
        return r * (1 - self._near(r)) ** 2

    def _root(self, r: Array) -> Array:
        u2 = self._near(r)
        return jnp.sqrt(jnp.maximum((1 - u2) * (1 - 5 * u2), 0))

    def _near(self, r: Array) -> Array:
        return jnp.minimum((r / self.delta) ** 2, 1)


class Arctan(AbstractRobust):
    r"""$\frac12\delta^2\arctan((r/\delta)^2)$ with $r = f - y$, as SciPy's `"arctan"`.
    The loss is bounded by $\frac\pi4\delta^2$, and not convex.

    The arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        B. Triggs et al., *Bundle adjustment: a modern synthesis* (2000), section 3.3.
    """

    def _rho(self, r: Array) -> Array:
        return 0.5 * self.delta**2 * jnp.arctan((r / self.delta) ** 2)

    def _slope(self, r: Array) -> Array:
        return r / (1 + (r / self.delta) ** 4)

    def _root(self, r: Array) -> Array:
        u4 = (r / self.delta) ** 4
        return jnp.sqrt(jnp.maximum(1 - 3 * u4, 0)) / (1 + u4)
