"""How a run ends: whether it has converged, stands still, or diverges."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_finite_positive
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic


# Eight random probes know a column's norm to a quarter, and take a tenth of it for all of
# it once in ten million times.
_NUM_PROBES = 8
# A cosine of this multiple of the third root of eps is none: the probes and the rounding
# of the gradient allow no less.
_FLAT = 1.25
# A change of the residual by this part of it cannot be seen; in single precision no more,
# because a saturated unit may yet come back.
_UNSEEN = 1e-11
# A cosine above this is never rounding, in any precision: that of single precision.
_STEEP = 5e-3
# The outputs are known to this many roundings of what the parameters make of them.
_ROUNDINGS = 10
# optimistix's result for a run whose steps are next to nothing while its gradient is not.
STANDS_STILL: optx.RESULTS = optx.RESULTS.stagnation  # type: ignore[assignment]
# A run diverges when its loss is far above its start for this many steps in a row.
_MOST_FAR = 5


def has_arrived(
    quadratic: Quadratic,
    point: PyTree[Array],
    left: PyTree[Array],
    rtol: ScalarLike,
    atol: ScalarLike,
    loss: Scalar,
    first_loss: Scalar,
    searched: bool = False,
) -> Bool[Array, ""]:
    r"""Whether there is next to nothing to gain: by moving any parameter by itself, and
    by the step that is left.

    Moved to its best, parameter j changes the residual by $|g_j| / |\phi_j|$, with g the
    gradient and $\phi_j$ its column of the Jacobian; over the residual's norm that is the
    cosine between the two (MINPACK's gtol), which has no units. In a valley along no axis
    these are small, and the step that is left is not: its predicted decrease is compared
    in the same way, as half the square of a change of the residual. Both must be at most
    `atol + max(rtol, 1.25 eps^(1/3)) |r|`, or below the rounding of the outputs. That
    rounding excuses no run whose loss has risen.

    **Arguments:**

    - `left`: the step that is left: what the solver would take next.
    - `rtol`, `atol`: the solver's; `atol` is in the residual's units.
    - `loss`, `first_loss`: here, and at the start of the run.
    - `searched`: whether the solver has looked for the longest step that lowers the loss.
        A parameter that could be as large again with next to no difference to the
        residual and to the loss is then left to that search: at a minimum where its
        column vanishes the linearisation promises what no step keeps.

    ??? cite "Reference"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978),
        section 8. The columns' norms by probes: C. Bekas, E. Kokiopoulou and Y. Saad, *An
        estimator for the diagonal of a matrix*, Appl. Numer. Math. 57 (2007).
    """
    dtype = first_loss.dtype
    eps = _tree.eps((point, quadratic.residual))
    gradient, norms = _gradient_and_norms(quadratic, point)
    step = _tree.cast_like(left, point)
    along = _tree.dot(_tree.joined(step), gradient).astype(dtype)

    # One program for both products.
    both = jax.tree.map(lambda d, y: jnp.stack([d, _alternating(y)]), step, point)
    size_of = lambda v: _tree.norm(quadratic.jacobian.mv(v)).astype(dtype)
    change, size = jax.vmap(size_of)(both)
    predicted = jnp.maximum(-along - 0.5 * change**2, 0)

    # For squared error this is the residual's norm.
    residual = jnp.sqrt(2 * jnp.abs(loss))
    most = jnp.asarray(atol, dtype)
    most += jnp.maximum(rtol, _FLAT * eps ** (1 / 3)).astype(dtype) * residual
    # A gain of this size cannot be told from the rounding of the loss.
    lost = jnp.sqrt(2 * _rounding(loss, eps * size))
    most = jnp.maximum(most, jnp.minimum(lost, _STEEP * residual))
    rounding = _ROUNDINGS * eps * size
    has_fallen = loss <= first_loss
    known = has_fallen | (rounding <= most)
    most += jnp.where(has_fallen, rounding, 0)

    def is_flat(g, norm, y):
        # Where a column is zero, so must be the gradient.
        each = jnp.abs(g) <= most.astype(g.dtype) * norm
        if searched:
            by_residual = norm * jnp.abs(y) <= (_UNSEEN * residual).astype(norm.dtype)
            by_loss = jnp.abs(g * y) <= (_UNSEEN * residual**2).astype(g.dtype)
            each |= by_residual & by_loss & (y != 0)
        return jnp.all(each)

    flat = jax.tree.map(is_flat, gradient, norms, _tree.joined(point))
    flat = jax.tree.reduce(jnp.logical_and, flat)
    return known & flat & (jnp.sqrt(2 * predicted) <= most)


def _gradient_and_norms(
    quadratic: Quadratic, point: PyTree[Array]
) -> tuple[list[Array], list[Array]]:
    """The gradient, and the norms of the Jacobian's columns, as `_tree.joined`: by the
    matrix where it is in memory, else the norms are estimated by probes. One program
    serves for the gradient and for all of the probes."""
    jacobian = quadratic.jacobian
    joined = lambda tree: _tree.joined(_tree.cast_like(tree, point))
    if jacobian.is_at_hand:
        norms = jax.tree.map(jnp.sqrt, jacobian.squared_columns())
        return joined(quadratic.gradient()), joined(norms)
    residual = quadratic.flat_residual()

    def add(carry, number):
        norms, _ = carry
        probe = _probe(number, residual.size).astype(residual.dtype)
        is_last = number == _NUM_PROBES
        pulled = joined(jacobian.pull_back(jnp.where(is_last, residual, probe)))
        # By `hypot`: the squares may be smaller than any floating-point number.
        new = jax.tree.map(jnp.hypot, norms, pulled)
        return (_tree.where(is_last, norms, new), pulled), None

    zeros = jax.tree.map(jnp.zeros_like, _tree.joined(point))
    numbers = jnp.arange(_NUM_PROBES + 1, dtype=jnp.uint32)
    (norms, gradient), _ = jax.lax.scan(add, (zeros, zeros), numbers)
    if quadratic.rest is not None:
        gradient = jax.tree.map(jnp.add, gradient, joined(quadratic.rest))
    return gradient, _tree.scale(_NUM_PROBES**-0.5, norms)


def _probe(number: Array, size: int) -> Float[Array, " size"]:
    """Numbers of variance 1, uniform between two bounds, the same for ever. No sum of
    such is nearer to zero much more often than a Gaussian one (K. Ball, *Cube slicing in
    R^n*, 1986). By a hash (C. Wellons' `lowbias32`): JAX's own generator and the inverse
    of a Gaussian take long to compile."""
    x = jnp.arange(size, dtype=jnp.uint32) + number * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return 3**0.5 * (x.astype(jnp.float32) * 2.0**-31 - 1)


def _alternating(x: Array) -> Array:
    """The same numbers with alternating signs, so that equal ones do not cancel."""
    signs = 1 - 2 * (jnp.arange(x.size, dtype=jnp.int32) % 2)
    return x * signs.reshape(x.shape).astype(x.dtype)


def rounding_of_outputs(quadratic: Quadratic, point: PyTree[Array]) -> Scalar:
    """The norm of the whitened outputs' rounding, as the parameters' makes it."""
    pushed = quadratic.jacobian.mv(jax.tree.map(_alternating, point))
    dtype = _tree.dtype((point, quadratic.residual))
    return _tree.eps((point, quadratic.residual)) * _tree.norm(pushed).astype(dtype)


def rounding_of_loss(
    loss: Scalar, quadratic: Quadratic | None, point: PyTree[Array]
) -> Scalar:
    """The largest change of the loss that says nothing: some roundings of it, and what
    the outputs' rounding makes of it.

    - `quadratic`: the linearised problem, if its Jacobian is in memory. If not, a product
        would take a pass, and the outputs' rounding is left out.
    """
    if quadratic is None:
        return _rounding(loss, jnp.zeros_like(loss))
    return _rounding(loss, rounding_of_outputs(quadratic, point).astype(loss.dtype))


def _rounding(loss: Scalar, error: Scalar) -> Scalar:
    """`error`: the norm of the outputs' rounding."""
    loss = jnp.abs(loss)
    own = _ROUNDINGS * float(jnp.finfo(loss.dtype).eps) * loss
    return own + error * (jnp.sqrt(2 * loss) + error)


class Watch(eqx.Module):
    """Over a run that nothing else checks: the best point so far, and for how many steps
    in a row the loss has been far above where it started."""

    first: Float[Array, ""]
    best: Float[Array, ""]
    y: PyTree[Array]  # of the best
    num_far: Int[Array, ""]

    def __init__(self, first, best, y, num_far):
        self.first, self.best, self.y, self.num_far = first, best, y, num_far

    @staticmethod
    def start(
        objective: AbstractObjective, y: PyTree[Array], outputs: PyTree, loss: Scalar
    ) -> "Watch":
        """From the first point and its loss. What is next to no loss is measured by that
        of `outputs` (arrays, or their shapes) that are zero."""
        zeros = jax.tree.map(lambda f: jnp.zeros(f.shape, f.dtype), outputs)
        unit = objective.value(zeros).astype(loss.dtype)
        floor = jnp.finfo(loss.dtype).eps ** 0.5 * unit
        return Watch(jnp.maximum(loss, floor), loss, y, jnp.array(0))

    def look(self, y: PyTree[Array], loss: Scalar, factor: float) -> "Watch":
        """At a point and its loss, which may be no number."""
        better = loss < self.best
        far = ~(loss <= factor * self.first)
        return Watch(
            self.first,
            jnp.where(better, loss, self.best),
            _tree.where(better, y, self.y),
            jnp.where(far, self.num_far + 1, 0),
        )

    @property
    def diverges(self) -> Bool[Array, ""]:
        return self.num_far >= _MOST_FAR


#
# In words
#

LAST_FINITE = "the model is the last finite one"
RESULT_NAMES = (
    "successful",
    "nonlinear_max_steps_reached",
    "nonfinite",
    "nonlinear_divergence",
    "stagnation",
)


def result_name(result: optx.RESULTS) -> str:
    """As it is called in `optimistix.RESULTS`, whose own words for a success are none."""
    for name in RESULT_NAMES:
        if bool(result == getattr(optx.RESULTS, name)):
            return name
    return "failed"


def why_it_ended(result: optx.RESULTS, factor: float | None = None) -> str:
    """What went wrong, which model is handed back, and what to do.

    - `factor`: if the loss has been so many times its start.
    """
    last = LAST_FINITE
    name = result_name(result)
    if name == "nonfinite":
        return f"numbers are nonfinite (inf or nan); {last}."
    if name == "stagnation":
        return (
            "it stands still: steps are within `rtol` and `atol`, or none that is finite "
            f"lowers the loss, where the gradient is not next to zero; {last}. Use a "
            "smooth activation, double precision or another start; or, where they are "
            "fixed, another damping or learning rate."
        )
    if name == "nonlinear_divergence" and factor is not None:
        return (
            f"it diverged: the loss has stayed above {factor:g} times its start; the "
            "model is the best so far. Use `gnlin.LevenbergMarquardt()`, more damping, "
            "a smaller learning rate, or a `search`."
        )
    if name == "nonlinear_divergence":
        return (
            f"it diverged: the next step is too long; {last}. Use "
            "`gnlin.LevenbergMarquardt()`, more damping, a smaller learning rate, or a "
            "`search`."
        )
    said = " ".join(optx.RESULTS[result].split()).split(". ")[0]
    advice = " Use more damping, or another `method`." if name == "failed" else ""
    return f"{said}; {last}.{advice}"


def check_divergence(divergence: object) -> None:
    if divergence is None:
        return
    check_finite_positive("divergence", divergence)
    if divergence <= 1:  # type: ignore[operator]
        raise ValueError(
            "`divergence` is how many times its start the loss may be, and must be more "
            f"than 1, or `None`, but {divergence} was given."
        )
