"""Scale-invariant damping: lambda |D delta|^2 in place of lambda |delta|^2."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .. import _tree
from .._passes import Passes
from .._problem import Quadratic
from .._spectrum import Filter
from .._subproblem import AbstractSubproblem, choose, ProxLinear, Rescaled


# More's scales never fall. After one steep place they then damp a column for ever (on
# NIST's MGH10 until its direction is lost to rounding), so here they fade, by this
# factor an outer step.
_FADING = 0.8
# Where the damping adapts, only what is above the present norm, divided by this power of
# eps. Were all of it to fade, a thousand steps would not get through a valley with a
# large residual (Brown and Dennis's). NIST is solved for all ratios up to 1e4.
_LASTING_POWER = 1 / 4
# Nor does it where the damping holds the steps, relative to the scaled columns: with less
# of a scale more damping would be asked for, by which the others stop. NIST is solved for
# all values from 0.001 to 1.
_HOLDS = 0.1

Scaling = Literal["identity", "marquardt", "more"]


class Lasting(NamedTuple):
    """Of scales that last: the damping of the last step, and the point."""

    damping: Float[Array, ""]
    point: PyTree[Array]


def check_scaling(scaling: str, method: Any, form: str) -> None:
    if scaling not in ("identity", "marquardt", "more"):
        raise ValueError(
            '`scaling` must be "identity", "marquardt" or "more", but '
            f"{scaling!r} was given."
        )
    if scaling != "identity" and form == "prox-linear":
        raise ValueError(
            f'`scaling={scaling!r}` is for quadratic problems: with `form="prox-linear"` '
            'use `scaling="identity"`.'
        )
    if scaling != "identity" and method == "matrix-free":
        raise ValueError(
            f"`scaling={scaling!r}` needs the dense Jacobian, and the method "
            '"matrix-free" does without it: use `scaling="identity"`, or another method.'
        )


def first_scale(scaling: Scaling, y: PyTree[Array]) -> PyTree[Array] | None:
    """The memory of the scales: none for the identity, which needs no Jacobian."""
    return None if scaling == "identity" else _tree.zeros_like(y)


class Measured(NamedTuple):
    """A problem, and its parameters' scales.

    - `problem`: with the Jacobian at hand, if there are any.
    - `scale`: the diagonal of D, zero for a column that has always been; `None` for the
        identity.
    - `largest`: of the present columns' norms.
    - `passes`: that the Jacobian has taken.
    """

    problem: Quadratic | ProxLinear
    scale: PyTree[Array] | None = None
    largest: Float[Array, ""] | float = 1.0
    passes: Passes = Passes()

    @staticmethod
    def of(
        problem: Quadratic | ProxLinear,
        scaling: Scaling,
        before: PyTree[Array] | None,
        lasting: "Lasting | None" = None,
    ) -> "Measured":
        """`before`: the scales at the last linearisation, for More's."""
        if scaling == "identity" or isinstance(problem, ProxLinear):
            return Measured(problem)
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
        norms = jax.tree.map(jnp.sqrt, problem.jacobian.squared_columns())
        scale = _lasting(norms, before, lasting) if scaling == "more" else norms
        return Measured(problem, scale, _tree.unit(norms), cost.rows)

    def chosen(
        self,
        filter: Filter,
        num_trials: int,
        method: Any,
        point: PyTree[Array] | None = None,
        power: Scalar | None = None,
    ) -> AbstractSubproblem:
        """The problem made ready in the variables `D delta`, as by `choose`; the passes
        that it has taken so far are not among that one's.

        - `point`: where the scales last, for the least of them.
        - `power`: of the scales, relative to the largest: 0 is the identity in its units.
        """
        if self.scale is None or isinstance(self.problem, ProxLinear):
            return choose(self.problem, filter, num_trials, method)
        scale = without_zeros(self.scale)
        if point is not None:
            scale = jax.tree.map(jnp.maximum, scale, _least(self.problem, point))
        if power is not None:
            scale = jax.tree.map(lambda d: self._between(d, power), scale)
        ready = choose(self.problem.scaled(scale), filter, num_trials, method)
        return Rescaled(ready, scale)

    def of_another(self, problem: Quadratic | ProxLinear) -> "Measured":
        """The same scales, of another problem at this point."""
        if self.scale is not None:
            problem = problem.at_hand()
        return self._replace(problem=problem)

    def _between(self, scale: Array, power: Scalar) -> Array:
        power, largest = (jnp.asarray(x, scale.dtype) for x in (power, self.largest))
        return scale**power * largest ** (1 - power)


def _lasting(
    norms: PyTree[Array], before: PyTree[Array], lasting: "Lasting | None"
) -> PyTree[Array]:
    """More's scales (1978): the largest norms that the Jacobian's columns have had
    lately, so that a column that vanishes for a while stays damped; `lasting`: the
    largest ever, unless the present ones are next to nothing beside them while steps are
    free. Marquardt's (1963) are the present norms."""
    ratio = 1.0 if lasting is None else _tree.eps(norms) ** -_LASTING_POWER
    held = False if lasting is None else lasting.damping > _HOLDS

    def largest(norm, earlier):
        kept = jnp.maximum(ratio * norm, _FADING * earlier)
        kept = jnp.where(held, earlier, jnp.minimum(earlier, kept))
        return jnp.maximum(norm, kept)

    return jax.tree.map(largest, norms, before)


def _least(problem: Quadratic, point: PyTree[Array]) -> PyTree[Array]:
    """Of a parameter whose change by all of itself is lost in the residuals' rounding:
    the scale at which it is not."""
    size, eps = _tree.norm(problem.residual), _tree.eps((point, problem.residual))

    def each(y):
        lost = (eps * size).astype(y.dtype) / jnp.where(y == 0, 1, jnp.abs(y))
        return jnp.where((y == 0) | ~jnp.isfinite(lost), 0, lost)

    return jax.tree.map(each, point)


def without_zeros(scale: PyTree[Array] | None) -> PyTree[Array] | None:
    """The scale 1 for a column that has always been zero."""
    return jax.tree.map(lambda d: jnp.where(d == 0, 1, d), scale)
