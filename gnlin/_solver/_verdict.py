"""How a run ends: whether it has converged, stands still, or diverges."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import check_finite_positive
from .._linearisation import Linearisation
from .._objective import AbstractObjective


# A gradient whose cosine with the residual is this multiple of the third root of eps may
# be rounding: no smaller multiple is reached by all runs of single precision.
_FLAT = 1.25
# The outputs are known to this many roundings of what the parameters make of them.
_ROUNDINGS = 10
# optimistix's result for a run whose steps are next to nothing while its gradient is not.
STANDS_STILL: optx.RESULTS = optx.RESULTS.stagnation  # type: ignore[assignment]
# A run diverges when its loss is far above its start for this many steps in a row.
_MOST_FAR = 5


def has_arrived(
    objective: AbstractObjective,
    lin: Linearisation,
    left: PyTree[Array],
    rtol: ScalarLike,
    atol: ScalarLike,
    first_loss: Scalar,
) -> Bool[Array, ""]:
    r"""Whether the linearised problem has next to nothing left to gain.

    Along a step $\delta$, of any length, the linearised residual falls by at most
    $|\langle r, \phi\delta\rangle| / \lVert\phi\delta\rVert$. Relative to
    $\lVert r\rVert$ this is the cosine between the residual and $\phi\delta$: it has no
    units, and for a Gauss-Newton step it is the relative offset of Bates and Watts. The
    run has arrived if it is at most `max(rtol, 1.25 eps^(1/3))`, or if the gain is below
    the rounding of the outputs. That rounding excuses no run whose loss has risen.

    **Arguments:**

    - `left`: the step that is left: what the solver would take next, of any length.
    - `rtol`, `atol`: the solver's; `atol` is in the residual's units.
    - `first_loss`: at the start of the run.

    ??? cite "Reference"

        D. M. Bates and D. G. Watts, *A relative offset orthogonality convergence
        criterion for nonlinear least squares*, Technometrics 23 (1981).
    """
    dtype = first_loss.dtype
    eps = _tree.eps((lin.point, lin.outputs))
    root = objective.root(lin.outputs)

    def push(vector: PyTree[Array]) -> tuple[Scalar, Scalar]:
        pushed = lin.jvp(vector)
        slope = _tree.dot(objective.gradient(lin.outputs), pushed)
        return jnp.abs(slope).astype(dtype), _tree.norm(root(pushed)).astype(dtype)

    # One program for both products.
    both = jax.tree.map(
        lambda d, y: jnp.stack([d, _alternating(y)]),
        _tree.cast_like(left, lin.point),
        lin.point,
    )
    (slope, _), (length, size) = jax.vmap(push)(both)
    # A loss without curvature can fall by its slope.
    gain = jnp.where(length > 0, slope / jnp.where(length > 0, length, 1), slope**0.5)
    loss = objective.value(lin.outputs).astype(dtype)
    # For squared error this is the residual's norm.
    residual = jnp.sqrt(2 * jnp.abs(loss))
    most = jnp.asarray(atol, dtype)
    most += jnp.maximum(rtol, _FLAT * eps ** (1 / 3)).astype(dtype) * residual
    rounding = _ROUNDINGS * eps * size
    has_fallen = loss <= first_loss
    known = has_fallen | (rounding <= most)
    return known & (gain <= most + jnp.where(has_fallen, rounding, 0))


def _alternating(x: Array) -> Array:
    """The same numbers with alternating signs, so that equal ones do not cancel."""
    signs = 1 - 2 * (jnp.arange(x.size, dtype=jnp.int32) % 2)
    return x * signs.reshape(x.shape).astype(x.dtype)


def rounding_of_loss(objective: AbstractObjective, lin: Linearisation) -> Scalar:
    """The largest change of the loss that says nothing."""
    eps = _tree.eps((lin.point, lin.outputs))
    return _ROUNDINGS * eps * jnp.abs(objective.value(lin.outputs))


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
