"""Conjugate gradients that stop where truncated Gauss-Newton is defined to stop."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from . import _tree
from ._checks import check_nonnegative, nan_unless, nonnegative
from ._tree import Structure


# A curvature p^T A p below this many roundings of its factors may as well be zero.
_ROUNDINGS = 100


class _Iterate(eqx.Module):
    x: PyTree[Array]
    residual: PyTree[Array]
    direction: PyTree[Array]
    gamma: Scalar  # residual^T M residual, M the preconditioner
    num_steps: Scalar
    broken: Scalar


def semidefinite(
    mv: Callable[[PyTree[Array]], PyTree[Array]],
    like: PyTree[Array | jax.ShapeDtypeStruct],
) -> lx.FunctionLinearOperator:
    """A positive semidefinite operator on trees of one structure."""
    structure = Structure.of(like).tree
    with jax.numpy_dtype_promotion("standard"):  # lineax asks for one dtype of all leaves
        return lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)


class ConjugateGradients(lx.AbstractLinearSolver[lx.AbstractLinearOperator]):
    r"""Conjugate gradients for a positive semidefinite `A x = b` (Hestenes and Stiefel,
    1952), as a [lineax](https://docs.kidger.site/lineax) solver.

    It stops at $\lVert b - A x\rVert_2 \le \beta\,\lVert b\rVert_2$, and checks that
    inequality on the true residual before it says so; where the recurrence has drifted
    from it, it restarts from the true residual. (`lx.CG` stops on an elementwise
    criterion and on the step size, so that its `rtol` is not $\beta$.) The test for
    breakdown is free of scale.

    **Arguments:**

    - `tolerance`: $\beta \ge 0$; may be traced.
    - `max_steps`: the most iterations; `None` for ten times the number of unknowns.

    Supports the `options` of `lx.linear_solve`: `y0`, a warm start, and
    `preconditioner`, a positive definite operator near the inverse of `A`. The
    statistics are `num_steps` (iterations) and `num_products` (with `A`).

    !!! example

        ```python
        solution = lx.linear_solve(operator, b, gnlin.ConjugateGradients(1e-3))
        solution.stats["num_steps"]
        ```
    """

    tolerance: ScalarLike
    max_steps: int | None = None

    def __check_init__(self):
        check_nonnegative("tolerance", self.tolerance)

    def init(
        self, operator: lx.AbstractLinearOperator, options: dict[str, Any]
    ) -> lx.AbstractLinearOperator:
        del options
        # Not by `!=`: what a pytree's structure carries besides may not be comparable.
        if not eqx.tree_equal(operator.in_structure(), operator.out_structure()):
            raise ValueError("`ConjugateGradients` needs a square operator.")
        if not lx.is_positive_semidefinite(operator):
            raise ValueError(
                "`ConjugateGradients` needs an operator tagged as "
                "`lx.positive_semidefinite_tag`."
            )
        return operator

    def compute(
        self,
        state: lx.AbstractLinearOperator,
        vector: PyTree[Array],
        options: dict[str, Any],
    ) -> tuple[PyTree[Array], lx.RESULTS, dict[str, Any]]:
        operator = state
        precondition = options.get(
            "preconditioner", lx.IdentityLinearOperator(operator.in_structure())
        ).mv
        dtype = _tree.dtype(vector)
        eps = jnp.finfo(dtype).eps
        max_steps = 10 * _tree.size(vector) if self.max_steps is None else self.max_steps
        # Squares of very large or small numbers leave the floating-point range. By a
        # power of two no digit is lost.
        size = _tree.max_norm(vector)
        proper = (size > 0) & jnp.isfinite(size)
        _, exponent = jnp.frexp(jnp.where(proper, size, 1))
        unit = jnp.ldexp(jnp.ones((), dtype), exponent)
        b = _tree.scale(1 / unit, vector)
        target = jnp.asarray(self.tolerance, dtype) * _tree.norm(b)

        def restarted(x, residual, num_steps):
            z = precondition(residual)
            gamma = _tree.dot(residual, z)
            return _Iterate(x, residual, z, gamma, num_steps, jnp.array(False))

        def unfinished(it):
            far = _tree.norm(it.residual) > target
            return far & ~it.broken & (it.num_steps < max_steps)

        def iterate(it):
            ap = operator.mv(it.direction)
            curvature = _tree.dot(it.direction, ap)  # p^T A p
            rounding = _ROUNDINGS * eps * _tree.norm(it.direction) * _tree.norm(ap)
            sound = curvature > rounding
            alpha = jnp.where(sound, it.gamma / jnp.where(sound, curvature, 1), 0)
            x = _tree.axpy(alpha, it.direction, it.x)
            residual = _tree.axpy(-alpha, ap, it.residual)
            z = precondition(residual)
            gamma = _tree.dot(residual, z)
            direction = _tree.axpy(gamma / it.gamma, it.direction, z)
            num_steps = it.num_steps + jnp.where(sound, 1, 0)
            return _Iterate(x, residual, direction, gamma, num_steps, ~sound)

        def true_residual(x):
            return _tree.axpy(-1, operator.mv(x), b)

        # Each round runs the recurrence to the target and then looks at the residual
        # itself. A round that did not halve it has met the limits of the precision.
        def round_(carry):
            it, _, num_rounds = carry
            before = _tree.norm(it.residual)
            it = jax.lax.while_loop(unfinished, iterate, it)
            residual = true_residual(it.x)
            halved = _tree.norm(residual) <= before / 2
            stalled = it.broken | (~halved & (it.num_steps < max_steps))
            return restarted(it.x, residual, it.num_steps), stalled, num_rounds + 1

        def again(carry):
            it, stalled, _ = carry
            return unfinished(it) & ~stalled

        if "y0" in options:
            x = _tree.scale(1 / unit, options["y0"])
            start = restarted(x, true_residual(x), jnp.array(0))
        else:
            start = restarted(_tree.zeros_like(b), b, jnp.array(0))
        num_extra = 1 if "y0" in options else 0
        it, stalled, num_rounds = jax.lax.while_loop(
            again, round_, (start, jnp.array(False), jnp.array(num_extra))
        )
        met = (_tree.norm(it.residual) <= target) & jnp.isfinite(size)
        result = lx.RESULTS.where(
            met,
            lx.RESULTS.successful,
            lx.RESULTS.where(stalled, lx.RESULTS.breakdown, lx.RESULTS.max_steps_reached),
        )
        stats = {"num_steps": it.num_steps, "num_products": it.num_steps + num_rounds}
        # A tolerance that is none has no solution.
        unit = nan_unless(nonnegative(self.tolerance), unit)
        return _tree.scale(unit, it.x), result, stats

    def transpose(self, state, options):
        return state, options  # symmetric

    def conj(self, state, options):
        return state, options  # real

    def assume_full_rank(self):
        return False
