"""Scale-invariant damping: lambda |D delta|^2 in place of lambda |delta|^2."""

from collections.abc import Callable
from typing import Any, get_args, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._passes import Passes
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from .._subproblem import AbstractSubproblem, choose, ProxLinear, Rescaled
from ..preconditioners import AbstractPreconditioner


# Moré's scales never fall, and after one steep place damp a column for ever. So here they
# fade, by this factor an outer step.
_FADING = 0.8

# A column of less than a millionth of the largest norm is damped as by Marquardt's:
# NIST's MGH10 is solved from afar with 10, 100 and 1,000, and not without.
_MOST = 1e3

Scaling = Literal["identity", "root", "marquardt", "more"]


def check_scaling(scaling: str, method: Any, form: str) -> None:
    if scaling not in get_args(Scaling):
        raise ValueError(
            '`scaling` must be "identity", "root", "marquardt" or "more", but '
            f"{scaling!r} was given."
        )
    if scaling != "identity" and form == "prox-linear":
        raise ValueError(
            f'`scaling={scaling!r}` is for quadratic problems: with `form="prox-linear"` '
            'use `scaling="identity"`.'
        )
    without_rows = method == "matrix-free" or isinstance(method, AbstractPreconditioner)
    if scaling != "identity" and without_rows:
        raise ValueError(
            f"`scaling={scaling!r}` needs the dense Jacobian, and the method {method!r} "
            'does without it: use `scaling="identity"`, or another method.'
        )


def first_scale(scaling: Scaling, y: PyTree[Array]) -> PyTree[Array] | None:
    """What the scales remember of earlier points: only Moré's do."""
    return _tree.zeros_like(y) if scaling == "more" else None


def _roots(norms: PyTree[Array]) -> PyTree[Array]:
    """The square roots of the norms, relative to the largest, but no more than a multiple
    of the norms themselves."""

    def each(norm):
        part = norm / largest.astype(norm.dtype)
        return jnp.minimum(jnp.sqrt(part), _MOST * part)

    largest = _tree.unit(norms)
    return jax.tree.map(each, norms)


class Measured(NamedTuple):
    """A problem, and its parameters' scales.

    - `problem`: with the Jacobian at hand, if there are any.
    - `scale`: the diagonal of D, zero for a column that has always been; `None` for the
        identity.
    - `passes`: that the Jacobian has taken.
    """

    problem: Quadratic | ProxLinear
    scale: PyTree[Array] | None = None
    passes: Passes = Passes()

    @staticmethod
    def of(
        problem: Quadratic | ProxLinear, scaling: Scaling, before: PyTree[Array] | None
    ) -> "Measured":
        """`before`: Moré's scales at the last linearisation."""
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
        match scaling:
            case "root":
                scale = _roots(norms)
            case "marquardt":
                scale = norms
            case "more":
                faded = _tree.scale(_FADING, before)
                scale = jax.tree.map(jnp.maximum, norms, faded)
        return Measured(problem, scale, cost.rows)

    def memory(self, scaling: Scaling) -> PyTree[Array] | None:
        """What the scales remember."""
        return self.scale if scaling == "more" else None

    def chosen(self, filter: Filter, num_trials: int, method: Any) -> AbstractSubproblem:
        """The problem made ready in the variables `D delta`, as by `choose`; its passes
        include those that the Jacobian has taken."""
        if self.scale is None or isinstance(self.problem, ProxLinear):
            return choose(self.problem, filter, num_trials, method)
        # The scale 1 for a column that is zero.
        scale = jax.tree.map(lambda d: jnp.where(d == 0, 1, d), self.scale)
        ready = choose(self.problem.scaled(scale), filter, num_trials, method)
        passes = self.passes + ready.passes
        return eqx.tree_at(lambda s: s.passes, Rescaled(ready, scale), passes)

    def inverse(self) -> Callable[[Scalar], Float[Array, "p p"]]:
        """Of the curvature with a damping, parameters in `ravel_pytree` order."""
        assert isinstance(self.problem, Quadratic)
        assert self.scale is not None
        scale = jax.tree.map(lambda d: jnp.where(d == 0, 1, d), self.scale)
        curvature = self.problem.scaled(scale).jacobian.curvature()
        flat = ravel_pytree(scale)[0]
        # A damping below is lost in the curvature's rounding.
        least = jnp.finfo(curvature.dtype).eps * jnp.trace(curvature)

        def damped(damping: Scalar) -> Float[Array, "p p"]:
            damping = jnp.maximum(damping.astype(curvature.dtype), least)
            damped = curvature + damping * jnp.eye(len(flat), dtype=curvature.dtype)
            return jnp.linalg.inv(damped) / jnp.outer(flat, flat)

        return damped

    def of_another(self, problem: Quadratic | ProxLinear) -> "Measured":
        """The same scales, of another problem at this point."""
        if self.scale is not None:
            problem = problem.at_hand()
        return self._replace(problem=problem)
