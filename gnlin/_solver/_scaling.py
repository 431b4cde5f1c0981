"""Scale-invariant damping: lambda |D delta|^2 instead of lambda |delta|^2."""

from collections.abc import Callable
from typing import Any, cast, get_args, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_one_of
from .._common._passes import Passes
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from .._subproblem import AbstractSubproblem, choose, ProxLinear, Rescaled
from ..preconditioners import AbstractPreconditioner


# The least factor by which a scale falls in an outer step. Without decay, Moré's scales
# would damp a column forever after one steep place. Root scales fall slowly: a column
# that vanishes at the minimum, such as that of a depth of zero, needs its damping there.
# Thirty earthquakes, one of them at the surface, are located in 42 steps; in 31 without
# decay, in 83 with 0.9, and not in 600 with the scales of the current point. NIST's
# MGH10, whose columns fall by many decades, takes 3,317 steps from its far start, 1,618
# with the scales of the current point, and over 20,000 without decay.
_DECAY = {"more": 0.8, "root": 0.97}

# Largest root scale, divided by the column's relative norm. It limits columns below a
# millionth of the largest norm. NIST's MGH10 is solved from its far start with 10, 100
# and 1,000, but not without a limit.
_MAX_ROOT = 1e3

Scaling = Literal["identity", "root", "marquardt", "more"]


def check_scaling(scaling: str, method: Any, form: str) -> None:
    check_one_of("scaling", scaling, get_args(Scaling))
    if scaling != "identity" and form == "prox-linear":
        raise ValueError(
            f'`scaling={scaling!r}` cannot be used with `form="prox-linear"`: use '
            '`scaling="identity"`.'
        )
    without_rows = method == "matrix-free" or isinstance(method, AbstractPreconditioner)
    if scaling != "identity" and without_rows:
        raise ValueError(
            f"`scaling={scaling!r}` needs the dense Jacobian, which `method={method!r}` "
            'does not form: use `scaling="identity"`, or another method.'
        )


def first_scale(scaling: Scaling, y: PyTree[Array]) -> Float[Array, " p"] | None:
    """Return the state of the scales before the first step, in `ravel_pytree` order."""
    return jnp.zeros_like(_tree.ravel_pytree(y)[0]) if scaling in _DECAY else None


def _roots(norms: PyTree[Array]) -> PyTree[Array]:
    """Return the square roots of the norms relative to the largest, with a limit."""

    def each(norm):
        part = norm / largest.astype(norm.dtype)
        return jnp.minimum(_tree.root(part), _MAX_ROOT * part)

    largest = _tree.unit(norms)
    return jax.tree.map(each, norms)


class Measured(NamedTuple):
    """A problem and the scales of its parameters.

    - `problem`: its Jacobian is in memory if there are scales.
    - `scale`: the diagonal of D, or `None` for the identity. It is zero for a column that
        has been zero at every point so far.
    - `memory`: the state of the scales for the next linearisation.
    - `passes`: the passes that forming the Jacobian took.
    """

    problem: Quadratic | ProxLinear
    scale: PyTree[Array] | None
    memory: Float[Array, " p"] | None
    passes: Passes

    @staticmethod
    def of(
        problem: Quadratic | ProxLinear,
        scaling: Scaling,
        before: Float[Array, " p"] | None,
        passes: Passes,
    ) -> "Measured":
        """Measure the columns. `before` is the state at the last linearisation, and
        `passes` are those that forming the Jacobian takes, or has taken."""
        if scaling == "identity" or isinstance(problem, ProxLinear):
            return Measured(problem, None, before, passes)
        cost = problem.jacobian.cost()
        if not cost.columns_fit:
            m, p = cost.shape
            raise ValueError(
                f"`scaling={scaling!r}` needs the dense Jacobian, and its "
                f"{m * p * cost.itemsize:,} bytes exceed the memory budget of "
                f'{cost.memory_budget:,}: use `scaling="identity"`, or raise '
                "`memory_budget`."
            )
        problem = problem.at_hand()
        norms = jax.tree.map(_tree.root, problem.jacobian.squared_columns())
        scale = _roots(norms) if scaling == "root" else norms
        if before is not None:
            flat, unravel = _tree.ravel_pytree(scale)
            # Forget a point whose derivative is not finite, such as that of a detour.
            flat = jnp.where(jnp.isfinite(flat), flat, 0)
            before = jnp.maximum(flat, _DECAY[scaling] * before)
            scale = unravel(before)
        return Measured(problem, scale, before, passes)

    @property
    def in_memory(self) -> Quadratic | None:
        """The problem, if there are scales."""
        return None if self.scale is None else cast(Quadratic, self.problem)

    def chosen(
        self,
        problem: Quadratic | ProxLinear,
        filter: Filter,
        num_trials: int,
        method: Any,
    ) -> AbstractSubproblem:
        """Set up a problem at this point in the variables `D delta`, as `choose` does.
        Its passes include those for the Jacobian."""
        if self.scale is None:
            return choose(problem, filter, num_trials, method)
        problem, scale = self._scaled(problem.at_hand())
        inner = choose(problem, filter, num_trials, method)
        return Rescaled(inner, scale, self.passes)

    def inverse(self) -> Callable[[Scalar], Float[Array, "p p"]]:
        """Return a function of the damping that inverts the damped curvature, with the
        parameters in `ravel_pytree` order."""
        problem, scale = self._scaled(self.problem)
        curvature = problem.jacobian.curvature()
        flat = _tree.ravel_pytree(scale)[0]
        # A smaller damping is lost in the rounding of the curvature.
        least = jnp.finfo(curvature.dtype).eps * jnp.trace(curvature)

        def damped(damping: Scalar) -> Float[Array, "p p"]:
            damping = jnp.maximum(damping.astype(curvature.dtype), least)
            damped = curvature + damping * jnp.eye(len(flat), dtype=curvature.dtype)
            return jnp.linalg.inv(damped) / jnp.outer(flat, flat)

        return damped

    def _scaled(self, problem: Quadratic | ProxLinear) -> tuple[Quadratic, PyTree[Array]]:
        """Return the scaled problem, and the scales. A zero column gets the scale 1."""
        assert isinstance(problem, Quadratic)
        scale = jax.tree.map(lambda d: jnp.where(d == 0, 1, d), self.scale)
        return problem.scaled(scale), scale
