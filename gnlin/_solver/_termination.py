"""Decide how a run ends: it has converged, or stands still."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from ._state import State, Update


if TYPE_CHECKING:
    from ._base import AbstractGaussNewton


# Random probes for the columns' norms. Eight give a norm to within a quarter, and less
# than a tenth of it once in ten million times.
_NUM_PROBES = 8
# A cosine below this multiple of eps^(1/3) counts as zero: the probes and the rounding of
# the gradient allow no smaller one.
_FLAT = 1.25
# A change of the residual by this part of its norm is negligible. The part is no larger
# in single precision, because a saturated unit may still recover.
_UNSEEN = 1e-11
# The largest cosine that may be rounding in any precision: single precision's eps^(1/3).
_STEEP = 5e-3
# Rounding error of the loss and of the outputs, in multiples of eps.
_ROUNDINGS = 10
# The result of a run whose steps are tiny although its gradient is not.
STANDS_STILL: optx.RESULTS = optx.RESULTS.stagnation  # type: ignore[assignment]
# A run ends after this many steps in a row whose total decrease of the loss is within its
# rounding.
_MOST_STILL = 10


def verdict(
    solver: "AbstractGaussNewton",
    objective: AbstractObjective,
    lin: Linearisation,
    here: PyTree[Array],
    on_detour: Bool[Array, ""],
    update: Update,
    gradient_norm: Scalar,
    step: PyTree[Array],
    state: State,
    loss: Scalar,
) -> tuple[Bool[Array, ""], State]:
    """Return whether a run has converged at a linearisation, and the state with what the
    next verdict needs. Convergence is tested after a small step, after many steps without
    progress, and if no step could be found.

    - `here`, `loss`: the outputs at the run's own point, and their loss.
    - `on_detour`: whether the linearisation is elsewhere. The run does not end there.
    """
    first_loss = state.first_loss
    zero_loss = jnp.abs(objective.value(_tree.zeros_like(here))).astype(first_loss.dtype)
    atol = solver.atol * _unit(zero_loss, first_loss)
    going = ~update.terminate & (update.result == optx.RESULTS.successful) & ~on_detour
    stands = update.stuck | (state.num_still >= _MOST_STILL)
    asks = going & (state.settled | stands)
    problem = update.problem
    if problem is None:
        problem = objective.expand(lin)
        # The solver has computed the same gradient, so XLA merges the two.
        problem = dataclasses.replace(problem, slope=problem.gradient())
    before, after = map(objective.residual, (here, update.outputs))

    def look():
        left = step if update.left is None else update.left
        highest = first_loss
        if objective.is_quadratic:  # The first loss may be the outputs' rounding alone.
            highest += (_ROUNDINGS * _tree.eps(before)) ** 2 * zero_loss
        return has_arrived(
            problem,
            _as_in(problem, lin.point),
            _as_in(problem, left),
            solver.rtol,
            atol,
            loss,
            highest,
            update.searched,
        )

    arrived = jax.lax.cond(asks, look, lambda: jnp.array(False))
    if objective.is_quadratic:  # If squares of the residuals underflow, all losses are 0.
        arrived &= (first_loss != 0) | ~_tree.any_nonzero(before)
    else:
        # A loss such as 1 - p has the rounding of what it subtracts. A run that fell
        # below it and stands still has nothing left to gain. From a bad start the first
        # loss exceeds what is subtracted; the loss of outputs that are zero does not.
        least = _tree.eps(loss) * jnp.fmin(jnp.abs(first_loss), zero_loss)
        lost = (jnp.abs(loss) <= least) & (loss < first_loss)
        # Squares of tiny probabilities of all wrong classes underflow.
        perfect = (loss <= _tree.eps(loss) ** 2 * first_loss) & (gradient_norm**2 == 0)
        arrived |= asks & (perfect | stands & lost)
    gained = objective.decrease(here, update.outputs).astype(loss.dtype)
    point = _as_in(update.problem, lin.point)
    rounding = rounding_of_loss(loss, update.problem, point)
    # Single steps may gain less than the rounding while their sum gains more.
    still_loss = jnp.where(state.num_still == 0, loss, state.still_loss)
    quiet = (jnp.abs(gained) <= rounding) & (still_loss - loss <= rounding)

    # A step is small if it is within the tolerances, or if rounding hides what it does.
    sizes = _size_of_step(solver, atol, update.y, step, before, after)
    small_change, small_step, moves = sizes
    hidden = jnp.array(False)
    if update.problem is not None:
        if objective.is_quadratic:
            # Residuals of an exact solution are rounding, which changes in each step.
            # Those before the step must be, too, because a step from larger ones may have
            # left some error.
            error = _ROUNDINGS * rounding_of_outputs(update.problem, point)
            largest = jnp.maximum(_tree.norm(before), _tree.norm(after))
            small_change |= largest <= error
        if update.attainable is not None:
            # Rounding hides all that could be gained, and the change of each output. In
            # single precision, poorly determined parameters of a fit move by more than
            # the tolerances for ever.
            hidden = quiet & (update.attainable <= rounding)
            hidden &= _are_alike(here, update.outputs)
    elif objective.is_quadratic and not update.searched:
        # The outputs' rounding hides the decrease. In single precision, a linear problem
        # whose residuals vanish then converges in three steps. Without this rule it makes
        # all that are allowed.
        zeros = objective.residual(_tree.zeros_like(here))
        outputs = jax.tree.map(jnp.subtract, before, zeros)
        size = _root_mean_square(_tree.norm(outputs), _tree.size(outputs))
        error = _tree.eps(outputs) * size.astype(loss.dtype)
        hidden = jnp.abs(gained) <= _rounding(loss, error)
    small = (small_change & small_step) | hidden
    # After a search whose step moves nothing, the next linearisation would be this one.
    more = jnp.where(moves, 1, _MOST_STILL) if update.searched else 1
    more = jnp.where(on_detour, 0, more)
    return arrived, dataclasses.replace(
        state,
        # A detour that is lost takes no step.
        settled=small & ~on_detour,
        num_still=jnp.where(quiet, state.num_still + more, 0),
        still_loss=still_loss,
        result=optx.RESULTS.where(asks & stands & ~arrived, STANDS_STILL, update.result),
    )


def _unit(zero_loss: Scalar, first_loss: Scalar) -> Scalar:
    """Return the unit of `atol`: the norm of the first residual or of the targets,
    whichever is smaller, if that is below 1.

    - `zero_loss`: the absolute loss of outputs that are zero.
    """
    least = jnp.minimum(jnp.abs(first_loss), 0.5)
    least = jnp.where(zero_loss > 0, jnp.minimum(least, zero_loss), least)
    return jnp.sqrt(2 * least)


def _as_in(problem: Quadratic | None, parameters: PyTree[Array]) -> PyTree[Array]:
    """Return parameters in the structure of a problem, a tree or one array."""
    if problem is None:
        return parameters
    domain = problem.jacobian.domain
    is_tree = domain.treedef == jax.tree.structure(parameters)
    return parameters if is_tree else _tree.ravel_pytree(parameters)[0]


def _are_alike(outputs: PyTree[Array], others: PyTree[Array]) -> Bool[Array, ""]:
    """Whether each output differs from the other by its rounding at most."""

    def each(x, y):
        rounding = _ROUNDINGS * jnp.finfo(x.dtype).eps * jnp.abs(x)
        return jnp.all(jnp.abs(x - y) <= rounding)

    alike = jax.tree.map(each, outputs, others)
    return jax.tree.reduce(jnp.logical_and, alike)


def _size_of_step(
    solver: "AbstractGaussNewton",
    atol: Scalar,
    y: PyTree[Array],
    step: PyTree[Array],
    before: PyTree[Array],
    after: PyTree[Array],
) -> tuple[Bool[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
    """Whether a step to `y` was within the tolerances for the norm of the residuals, and
    for each parameter, and whether it has changed a parameter. The relative tolerance is
    at least 4 eps."""
    eps = _tree.eps((y, after))
    change = jax.tree.map(jnp.subtract, after, before)

    def norm(tree):
        return solver.norm(_tree.promoted(tree))

    def relative(x, size):
        rtol = jnp.maximum(solver.rtol, 4 * eps).astype(x.dtype)
        scale = jnp.asarray(atol, x.dtype) + rtol * size
        return jnp.where(x == 0, 0, jnp.abs(x) / jnp.where(scale == 0, 1e-30, scale))

    small_change = relative(norm(change), norm(after)) < 1
    of_y = _tree.cast_like(step, y)
    size = norm(jax.tree.map(lambda d, x: relative(d, jnp.abs(x)), of_y, y))
    # A finite step may lead to a point that is not finite.
    small_step = (size < 1) & _tree.all_finite(y)
    return small_change, small_step, size != 0


def has_arrived(
    quadratic: Quadratic,
    point: PyTree[Array],
    left: PyTree[Array],
    rtol: ScalarLike,
    atol: ScalarLike,
    loss: Scalar,
    highest: Scalar,
    searched: bool,
) -> Bool[Array, ""]:
    r"""Whether almost nothing can be gained, neither by changing any one parameter nor by
    the solver's next step.

    The best change of parameter j alone changes the residual by $|g_j| / |\phi_j|$, with
    g the gradient and $\phi_j$ its column of the Jacobian. Divided by the residual's norm
    this is the cosine between the two (MINPACK's gtol), which has no units. In a valley
    that follows no axis, all cosines are small although the next step is long. So the
    predicted decrease of the next step is tested in the same way: it is half the square
    of a change of the residual. Both changes must be at most
    `atol + max(rtol, 1.25 eps^(1/3)) |r|` or below the rounding of the outputs. The
    allowance for rounding holds only if the loss has not risen.

    **Arguments:**

    - `left`: the step that the solver would take next.
    - `rtol`, `atol`: the tolerances of the solver; `atol` is in units of the residual.
    - `loss`, `highest`: the loss here, and that at the start plus its rounding.
    - `searched`: whether the solver has searched for the longest step that lowers the
        loss. A parameter then passes if doubling it would hardly change the residual and
        the loss: at a minimum where its column vanishes, the linearisation predicts a
        decrease that no step reaches.

    ??? cite "Reference"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978),
        section 8. The columns' norms by probes: C. Bekas, E. Kokiopoulou and Y. Saad, *An
        estimator for the diagonal of a matrix*, Appl. Numer. Math. 57 (2007).
    """
    dtype = highest.dtype
    eps = _tree.eps((point, quadratic.residual))
    gradient = _tree.joined(_tree.cast_like(quadratic.gradient(), point))
    norms = _column_norms(quadratic, point)
    step = _tree.cast_like(left, point)
    along = _tree.dot(_tree.joined(step), gradient).astype(dtype)
    change = _tree.norm(quadratic.jacobian.mv(step)).astype(dtype)
    error = eps * _size(norms, _tree.joined(point)).astype(dtype)
    predicted = jnp.maximum(-along - 0.5 * change**2, 0)

    # For squared error this is the residual's norm.
    residual = jnp.sqrt(2 * jnp.abs(loss))
    allowed = jnp.asarray(atol, dtype)
    allowed += jnp.maximum(rtol, _FLAT * eps ** (1 / 3)).astype(dtype) * residual
    # A smaller change of the residual is lost in the rounding of the loss.
    lost = jnp.sqrt(2 * _rounding(loss, error))
    allowed = jnp.maximum(allowed, jnp.minimum(lost, _STEEP * residual))
    rounding = _ROUNDINGS * error
    # A residual below its own rounding may rise by rounding.
    has_fallen = (loss <= highest) | (residual <= rounding)
    known = has_fallen | (rounding <= allowed)
    known &= (residual == 0) | ~_vanish(quadratic, norms, point)
    allowed += jnp.where(has_fallen, rounding, 0)

    def is_flat(g, norm, y):
        # If a column is zero, its gradient must be zero, too.
        each = (jnp.abs(g) <= allowed.astype(g.dtype) * norm) & jnp.isfinite(norm)
        if searched:
            by_residual = norm * jnp.abs(y) <= (_UNSEEN * residual).astype(norm.dtype)
            by_loss = jnp.abs(g * y) <= (_UNSEEN * residual**2).astype(g.dtype)
            each |= by_residual & by_loss & (y != 0)
        return jnp.all(each)

    flat = jax.tree.map(is_flat, gradient, norms, _tree.joined(point))
    flat = jax.tree.reduce(jnp.logical_and, flat)
    return known & flat & (jnp.sqrt(2 * predicted) <= allowed)


def _vanish(
    quadratic: Quadratic, norms: list[Array], point: PyTree[Array]
) -> Bool[Array, ""]:
    """Whether the squares of all columns underflow, although the columns are not zero."""
    if not quadratic.jacobian.is_at_hand:
        return jnp.array(False)
    pushed = quadratic.jacobian.mv(jax.tree.map(jnp.ones_like, point))
    return _tree.any_nonzero(pushed) & ~_tree.any_nonzero(norms)


def _column_norms(quadratic: Quadratic, point: PyTree[Array]) -> list[Array]:
    """Return the norms of the Jacobian's columns, `_tree.joined`. They are estimated by
    probes if the matrix is not in memory."""
    jacobian = quadratic.jacobian
    joined = lambda tree: _tree.joined(_tree.cast_like(tree, point))
    if jacobian.is_at_hand:
        return joined(jax.tree.map(jnp.sqrt, jacobian.squared_columns()))
    residual = quadratic.flat_residual()

    def add(norms, number):
        probe = _probe(number, residual.size).astype(residual.dtype)
        pulled = joined(jacobian.pull_back(probe))
        # `hypot` avoids the underflow of squares.
        return jax.tree.map(jnp.hypot, norms, pulled), None

    zeros = jax.tree.map(jnp.zeros_like, _tree.joined(point))
    numbers = jnp.arange(_NUM_PROBES, dtype=jnp.uint32)
    norms, _ = jax.lax.scan(add, zeros, numbers)
    return _tree.scale(_NUM_PROBES**-0.5, norms)


def _probe(number: Array, size: int) -> Float[Array, " size"]:
    """Return fixed pseudorandom numbers, uniform between two bounds with variance 1. A
    weighted sum of them is hardly more often near zero than a Gaussian variable (K. Ball,
    *Cube slicing in R^n*, 1986). They are made by a hash (C. Wellons' `lowbias32`), which
    compiles faster than JAX's generator and the inverse of a Gaussian."""
    x = jnp.arange(size, dtype=jnp.uint32) + number * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = x ^ (x >> 16)
    return 3**0.5 * (x.astype(jnp.float32) * 2.0**-31 - 1)


def _size(norms: PyTree[Array], point: PyTree[Array]) -> Scalar:
    """Return the norm of the terms that the parameters contribute to the outputs."""
    return _tree.norm(jax.tree.map(jnp.multiply, norms, point))


def rounding_of_outputs(quadratic: Quadratic, point: PyTree[Array]) -> Scalar:
    """Return the norm of the whitened outputs' error that rounding the point causes."""
    size = _size(_column_norms(quadratic, point), _tree.joined(point))
    both = point, quadratic.residual
    return _tree.eps(both) * size.astype(_tree.dtype(both))


def rounding_of_loss(
    loss: Scalar, quadratic: Quadratic | None, point: PyTree[Array]
) -> Scalar:
    """Return the largest change of the loss that may be rounding, of the loss itself and
    of the outputs.

    - `quadratic`: the linearised problem, or `None` if its Jacobian is not in memory. A
        product would then take a pass, so the rounding of the outputs is left out.
    """
    if quadratic is None:
        return _rounding(loss, jnp.zeros_like(loss))
    error = rounding_of_outputs(quadratic, point).astype(loss.dtype)
    of_outputs = _rounding(loss, _root_mean_square(error, quadratic.jacobian.shape[0]))
    gradient = _tree.joined(_tree.cast_like(quadratic.gradient(), point))
    along = _tree.norm(jax.tree.map(jnp.multiply, gradient, _tree.joined(point)))
    of_point = _tree.eps((point, quadratic.residual)) * along.astype(loss.dtype)
    return of_outputs + of_point + error**2


def _root_mean_square(norm: Scalar, number: int) -> Scalar:
    """Return the root mean square of a number of outputs, given their norm. The loss sees
    that of their errors, which are independent. With the norm instead, a network in
    single precision stops at a loss of 0.32, which falls to 0.29."""
    return norm / number**0.5


def _rounding(loss: Scalar, error: Scalar) -> Scalar:
    """Return the rounding of a loss, with `error` the norm of the outputs' rounding."""
    loss = jnp.abs(loss)
    own = _ROUNDINGS * float(jnp.finfo(loss.dtype).eps) * loss
    return own + error * (jnp.sqrt(2 * loss) + error)
