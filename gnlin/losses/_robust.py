"""Robust losses, which grow at most linearly and so limit the influence of outliers."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .._common._checks import (
    check_finite_positive,
    check_scalar,
    check_share,
    nan_unless,
    positive,
)
from ._base import AbstractElementwiseLoss, as_outputs, Reduction


# The part of the weights in the last steps, and across batches. Eight runs of a bundle
# adjustment with outliers take 337 steps in all, and as many with 0.02; 417 with 0.1, and
# three do not converge with 0.
_LEAST_PART = 0.05
# A solver begins with the part 1, and multiplies it by `_FADES` after each step that
# lowers the loss by less than `_FAST` of it. The eight runs take 492 steps with the least
# part throughout, and 360 if the first slow step leads to the least part.
_FAST, _FADES = 0.01, 0.5


class Rho(NamedTuple):
    r"""A robust loss $\delta^2\rho(u)$ of residuals $r = \delta u$."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]  # the first derivative
    root: Callable[[Array], Array]  # the root of the second, or 0 if that is negative


class AbstractRobust(AbstractElementwiseLoss):
    """A loss that is half the square of residuals much smaller than `delta`, and less
    than half the square of larger ones."""

    _rho: ClassVar[Rho]
    _numbers: ClassVar[tuple[str, ...]] = ("delta", "reweighted")
    delta: ScalarLike = 1.0
    reduction: Reduction | None = None
    reweighted: ScalarLike | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        check_scalar("delta", self.delta)
        check_finite_positive("delta", self.delta)
        if self.reweighted is not None:
            check_scalar("reweighted", self.reweighted)
            check_share("reweighted", self.reweighted)

    def _delta(self, like: Array) -> Array:
        delta = nan_unless(positive(self.delta), self.delta)
        return delta.astype(like.dtype)

    def elementwise(self, output: Array, target: Array) -> Array:
        delta = self._delta(output)
        return delta * (delta * self._rho.value((output - target) / delta))

    def derivative(self, output: Array, target: Array) -> Array:
        delta = self._delta(output)
        return delta * self._rho.slope((output - target) / delta)

    def root(self, output: Array, target: Array) -> Array:
        residual = output - target
        own = self._rho.root(residual / self._delta(output))
        part = _LEAST_PART if self.reweighted is None else self.reweighted
        of_weight = jnp.sqrt(part).astype(own.dtype) * self.root_of_weight(residual)
        return jnp.maximum(own, of_weight)

    def root_of_weight(self, residual: Array) -> Array:
        r"""Return the square root of $\rho'(r)/r$, the weight of iteratively reweighted
        least squares: the curvature of the parabola that touches the loss at r."""
        u = residual / self._delta(residual)
        normal = u != 0
        weight = self._rho.slope(u) / jnp.where(normal, u, 1)
        return jnp.sqrt(jnp.where(normal, weight, 1))

    @property
    def unit(self) -> ScalarLike:
        return self.delta**2

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        each = lambda output, target: _signed_root(output, target, self)
        return jax.tree.map(each, outputs, as_outputs(target, outputs))


def reweighted(tree: PyTree, part: ScalarLike, *, every: bool = False) -> PyTree:
    """Return a tree whose robust losses have this value of `reweighted`: those that leave
    it to the solver, or all of them."""

    def each(loss):
        is_meant = is_robust(loss) and (every or loss.reweighted is None)
        if not is_meant:
            return loss
        is_none = lambda x: x is None
        return eqx.tree_at(lambda own: own.reweighted, loss, part, is_leaf=is_none)

    is_robust = lambda x: isinstance(x, AbstractRobust)
    return jax.tree.map(each, tree, is_leaf=is_robust)


def faded(part: Scalar, loss: Scalar, new_loss: Scalar) -> Scalar:
    """Return the value of `reweighted` after a solver's step between two losses."""
    is_fast = loss - new_loss > _FAST * jnp.abs(loss)
    return jnp.where(is_fast, part, jnp.maximum(_FADES * part, _LEAST_PART))


@eqx.filter_custom_jvp
def _signed_root(output: Array, target: Array, loss: AbstractRobust) -> Array:
    r"""Return $z = \pm\sqrt{2\rho(r)}$ with the sign of the residual r, which is smooth
    in r, and close to r if r is small."""
    root = jnp.sqrt(2 * loss.elementwise(output, target))
    return jnp.where(output < target, -root, root)


@_signed_root.def_jvp
def _(primals, tangents):
    (output, target, loss), (d_output, d_target, d_loss) = primals, tangents
    z = _signed_root(output, target, loss)
    # z dz = rho'(r) dr. If r^2 underflows, z is 0 and dz = dr.
    normal = z != 0
    divisor = jnp.where(normal, z, 1)
    slope = jnp.where(normal, loss.derivative(output, target) / divisor, 1)
    zero = jnp.zeros_like(z)
    d_residual = (zero if d_output is None else d_output) - (
        zero if d_target is None else d_target
    )
    by_delta = eqx.filter_jvp(
        lambda loss: loss.elementwise(output, target), (loss,), (d_loss,)
    )[1]
    by_delta = zero if by_delta is None else by_delta
    return z, slope * d_residual + jnp.where(normal, by_delta / divisor, 0)


class Huber(AbstractRobust):
    r"""$\frac12 r^2$ up to $|r| = \delta$, and $\delta(|r| - \frac12\delta)$ beyond, with
    $r = f - y$.

    The curvature of a step is $\rho''(r)$, but at least a part of $\rho'(r)/r$, which is
    the weight of iteratively reweighted least squares: an outlier has no $\rho''$. In a
    run on a full batch the part is 1 at first, and falls to 0.05 when steps become slow.
    It is 0.05 across batches and in the prox-linear form. Undamped steps with a small
    part overshoot: use [`gnlin.LevenbergMarquardt`][].

    **Arguments:**

    - `delta`: $\delta > 0$, in the outputs' units.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].
    - `reweighted`: this part, between 0 and 1, if it is to be constant. With 1 no step
        raises the loss of a linear problem, but the last steps converge slowly.

    ??? cite "Reference"

        P. J. Huber, *Robust estimation of a location parameter*, Ann. Math. Statist. 35
        (1964).
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: jnp.minimum(abs(u), 1) * (abs(u) - 0.5 * jnp.minimum(abs(u), 1)),
        slope=lambda u: jnp.clip(u, -1, 1),
        root=lambda u: (abs(u) <= 1).astype(u.dtype),
    )


class PseudoHuber(AbstractRobust):
    r"""$\delta^2(\sqrt{1 + (r/\delta)^2} - 1)$ with $r = f - y$: a smooth version of
    Huber's loss.

    The curvature of steps and the arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        P. Charbonnier et al., *Deterministic edge-preserving regularization in computed
        imaging*, IEEE Trans. Image Processing 6 (1997).
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: u * (u / (1 + _one_beside(u))),
        slope=lambda u: u / _one_beside(u),
        root=lambda u: _one_beside(u) ** -1.5,
    )


def _one_beside(u: Array) -> Array:
    return jnp.hypot(jnp.ones_like(u), u)


class LogCosh(AbstractRobust):
    r"""$\delta^2\log\cosh(r/\delta)$ with $r = f - y$.

    The curvature of steps and the arguments are those of [`gnlin.losses.Huber`][].
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: jnp.where(
            abs(u) < 1,
            0.5 * jnp.log1p(jnp.sinh(jnp.clip(u, -1, 1)) ** 2),
            abs(u) + jnp.log1p(jnp.exp(-2 * abs(u))) - jnp.log(2).astype(u.dtype),
        ),
        slope=jnp.tanh,
        root=lambda u: 2 * jnp.exp(-abs(u)) / (1 + jnp.exp(-2 * abs(u))),  # 1 / cosh
    )


class Cauchy(AbstractRobust):
    r"""$\frac12\delta^2\log(1 + (r/\delta)^2)$ with $r = f - y$. The gradient of an
    outlier decreases with its distance. The loss is not convex, so that the solution
    depends on the start.

    The curvature of steps and the arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        P. W. Holland and R. E. Welsch, *Robust regression using iteratively reweighted
        least-squares*, Comm. Statist. 6 (1977).
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: jnp.where(
            abs(u) <= 1, 0.5 * jnp.log1p(u**2), jnp.log(_one_beside(u))
        ),
        slope=lambda u: u / (1 + u**2),
        root=lambda u: jnp.sqrt(jnp.maximum(1 - u**2, 0)) / (1 + u**2),
    )


class Tukey(AbstractRobust):
    r"""$\frac16\delta^2(1 - (1 - (r/\delta)^2)^3)$ up to $|r| = \delta$, and
    $\frac16\delta^2$ beyond, with $r = f - y$: Tukey's biweight. An outlier has no
    gradient, so start near the solution, for example from [`gnlin.losses.Huber`][]'s.

    The curvature of steps and the arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        A. E. Beaton and J. W. Tukey, *The fitting of power series, meaning polynomials,
        illustrated on band-spectroscopic data*, Technometrics 16 (1974).
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: _near(u) * (3 - 3 * _near(u) + _near(u) ** 2) / 6,
        slope=lambda u: u * (1 - _near(u)) ** 2,
        root=lambda u: jnp.sqrt(jnp.maximum((1 - _near(u)) * (1 - 5 * _near(u)), 0)),
    )


def _near(u: Array) -> Array:
    return jnp.minimum(u**2, 1)


class Arctan(AbstractRobust):
    r"""$\frac12\delta^2\arctan((r/\delta)^2)$ with $r = f - y$, as SciPy's `"arctan"`.
    The loss is bounded by $\frac\pi4\delta^2$, and not convex.

    The curvature of steps and the arguments are those of [`gnlin.losses.Huber`][].

    ??? cite "Reference"

        B. Triggs et al., *Bundle adjustment: a modern synthesis* (2000), section 3.3.
    """

    _rho: ClassVar[Rho] = Rho(
        value=lambda u: 0.5 * jnp.arctan(u**2),
        slope=lambda u: u / (1 + u**4),
        root=lambda u: jnp.sqrt(jnp.maximum(1 - 3 * u**4, 0)) / (1 + u**4),
    )
