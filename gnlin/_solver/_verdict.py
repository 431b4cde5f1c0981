"""How a run ends: whether it has converged, stands still, or diverges."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import check_finite_positive
from .._jacobian import AbstractJacobian
from .._linearisation import Linearisation
from .._objective import AbstractObjective


# Random probes of a column's norm: eight know it to a quarter, and take a tenth of it
# for all of it once in ten million times.
_NUM_PROBES = 8
# A cosine of this times the third root of a rounding is none: the probes and the
# gradient's own rounding allow no less.
_FLAT = 1.25
# In single precision no more: a saturated unit may yet come back.
_UNSEEN = 1e-11
# A loss falls that does by this part of what is predicted, by norms known to a quarter.
_SUFFICIENT = 0.1
# The outputs are known to so many roundings of what the parameters make of them.
_ROUNDINGS = 5
# What optimistix calls a run whose steps are next to nothing, and its gradient is not.
STANDS_STILL: optx.RESULTS = optx.RESULTS.stagnation  # type: ignore[assignment]
# So many steps in a row with a loss far above its start are no accident.
_MOST_FAR = 5


def is_stationary(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Callable[[PyTree[Array]], PyTree[Array]],
    rtol: float,
    atol: ScalarLike,
    first_loss: Scalar,
) -> Bool[Array, ""]:
    r"""Whether there is next to nothing to gain from moving any parameter by itself.

    Moved to its best, parameter j changes the residual by $|g_j| / |\phi_j|$, with g the
    gradient and $\phi_j$ its column of the Jacobian; over the residual's norm that is the
    cosine between the two (MINPACK's gtol). Whatever the parameters' units, it must be
    at most `atol + max(rtol, 1.25 eps^(1/3)) |r|`. Of a run that has come down from its
    `first_loss` no less than the outputs' rounding is asked; of any other, that rounding
    is less than that. A parameter that could be as large again with next to no difference
    to the residual is tried: at the rate of an exponential that has died out, or at a
    minimum where its column vanishes, the linearisation promises what no step keeps.

    ??? cite "Reference"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978),
        section 8. The columns' norms by probes: C. Bekas, E. Kokiopoulou and Y. Saad, *An
        estimator for the diagonal of a matrix*, Appl. Numer. Math. 57 (2007).
    """
    quadratic = objective.expand(lin)
    gradient = _tree.joined(_tree.cast_like(quadratic.gradient(), lin.point))
    norms = _column_norms(quadratic.jacobian)
    eps = _tree.eps((lin.point, lin.outputs))
    dtype = first_loss.dtype
    # The residual's norm, of squared error; else the length that has as much loss.
    loss = objective.value(lin.outputs).astype(dtype)
    size = jnp.sqrt(2 * jnp.abs(loss))
    terms = jax.tree.map(jnp.multiply, norms, _tree.joined(lin.point))
    rounding = _ROUNDINGS * eps * _tree.norm(terms).astype(dtype)
    most = jnp.asarray(atol, dtype)
    most += jnp.maximum(rtol, _FLAT * eps ** (1 / 3)).astype(dtype) * size
    # Of one that has risen, a gradient that rounding may have made says nothing.
    has_fallen = loss <= first_loss
    known = has_fallen | (rounding <= most)
    most += jnp.where(has_fallen, rounding, 0)

    def is_flat(g, norm):
        # Where a column is zero, so must be the gradient.
        return jnp.abs(g) <= most.astype(g.dtype) * norm

    def is_unseen(term):
        return (jnp.abs(term) <= (_UNSEEN * size).astype(term.dtype)) & (term != 0)

    steep = jax.tree.map(lambda g, norm: ~is_flat(g, norm), gradient, norms)
    unseen = jax.tree.map(is_unseen, terms)
    hidden = jax.tree.map(jnp.logical_and, steep, unseen)
    seen = jax.tree.map(lambda s, h: s & ~h, steep, hidden)
    gains = _is_gain(objective, lin, evaluate, gradient, norms, hidden)
    return known & ~_any(seen) & ~gains


def _is_gain(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Callable[[PyTree[Array]], PyTree[Array]],
    gradient: list[Array],
    norms: list[Array],
    chosen: list[Array],
) -> Bool[Array, ""]:
    """Whether some parameters lower the loss, moved as far as the linearisation says:
    each to its own best, by its share."""
    number = jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, chosen))

    def to_its_best(g, norm, is_chosen):
        share = jnp.maximum(number, 1).astype(g.dtype)
        safe = jnp.where(is_chosen, norm, 1)
        return jnp.where(is_chosen, -g / safe / safe / share, 0)

    step = jax.tree.map(to_its_best, gradient, norms, chosen)
    predicted = -0.5 * _tree.dot(step, gradient)
    new_y = lin.moved(_tree.parted(step, lin.point))
    actual = objective.decrease(lin.outputs, evaluate(new_y))
    return (number > 0) & (actual > (_SUFFICIENT * predicted).astype(actual.dtype))


def _any(tree: PyTree[Array]) -> Bool[Array, ""]:
    return jax.tree.reduce(jnp.logical_or, jax.tree.map(jnp.any, tree), jnp.array(False))


def _column_norms(jacobian: AbstractJacobian) -> list[Array]:
    """The norms of the Jacobian's columns, estimated, as `_tree.joined`."""
    (m, _), dtype = jacobian.shape, jacobian.codomain.dtype
    zeros = jacobian.domain.zeros()

    def add(norms, number):
        pulled = jacobian.pull_back(_probe(number, m).astype(dtype))
        pulled = _tree.joined(_tree.cast_like(pulled, zeros))
        # Whose squares may be smaller than any floating-point number.
        return jax.tree.map(jnp.hypot, norms, pulled), None

    numbers = jnp.arange(_NUM_PROBES, dtype=jnp.uint32)
    norms, _ = jax.lax.scan(add, _tree.joined(zeros), numbers)
    return _tree.scale(_NUM_PROBES**-0.5, norms)


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


@custom_vmap
def of_all_runs(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Of many runs under `jax.vmap`, whether it holds for all: one answer, so that what
    depends on it is still a branch. Of a single run, the flag itself."""
    return flag


@of_all_runs.def_vmap
def _(axis_size, in_batched, flags):
    return of_all_runs(jnp.all(flags)), False


@custom_vmap
def if_of_many(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Of one of many runs under `jax.vmap`, the flag; false of a single run, which has
    none to wait for: known to the compiler, which drops what would be done if it held."""
    return jnp.zeros_like(flag)


@if_of_many.def_vmap
def _(axis_size, in_batched, flags):
    return flags, True


@custom_vmap
def of_any_run(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Of many runs under `jax.vmap`, whether it holds for one of them."""
    return flag


@of_any_run.def_vmap
def _(axis_size, in_batched, flags):
    return of_any_run(jnp.any(flags)), False


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
