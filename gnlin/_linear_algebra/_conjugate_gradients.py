"""Conjugate gradients with the stopping criterion of truncated Gauss-Newton."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import (
    check_count,
    check_nonnegative,
    is_traced,
    nan_unless,
    nonnegative,
)
from .._common._tree import Structure


# A curvature p^T A p below this multiple of eps |p| |A p| counts as zero.
_ROUNDINGS = 100


class _Iterate(eqx.Module):
    x: PyTree[Array]
    residual: PyTree[Array]
    direction: PyTree[Array]
    size: Scalar  # the residual's norm
    gamma: Scalar  # residual^T M residual, with the preconditioner M
    looks: Bool[Array, ""]  # whether the next product is A x, for the true residual
    seen: Scalar  # the norm of the last true residual
    num_steps: Int[Array, ""]
    num_products: Int[Array, ""]
    stalled: Bool[Array, ""]


def semidefinite(
    mv: Callable[[PyTree[Array]], PyTree[Array]],
    like: PyTree[Array | jax.ShapeDtypeStruct],
) -> lx.FunctionLinearOperator:
    """Make a positive semidefinite operator on trees of one structure."""
    structure = Structure.of(like).tree
    with jax.numpy_dtype_promotion("standard"):  # lineax promotes the leaves' dtypes
        return lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)


def conjugate_gradients(
    product: Callable[[PyTree[Array]], PyTree[Array]],
    vector: PyTree[Array],
    tolerance: ScalarLike,
    max_steps: ScalarLike | None = None,
    options: dict[str, Any] | None = None,
) -> lx.Solution:
    """Solve `A x = vector`, where `product` multiplies by a positive semidefinite `A`.
    The other arguments are those of `ConjugateGradients`."""
    operator = semidefinite(product, vector)
    solver = ConjugateGradients(tolerance, max_steps)
    return lx.linear_solve(operator, vector, solver, options=options, throw=False)


class ConjugateGradients(lx.AbstractLinearSolver[lx.AbstractLinearOperator]):
    r"""Conjugate gradients for a positive semidefinite `A x = b` (Hestenes and Stiefel,
    1952), as a [lineax](https://docs.kidger.site/lineax) solver.

    It stops at $\lVert b - A x\rVert_2 \le \beta\,\lVert b\rVert_2$, which it checks on
    the true residual; if the recurrence has drifted, it restarts from the true residual.
    (`lx.CG` stops on an elementwise criterion and on the step size, so that its `rtol` is
    not $\beta$.) The test for breakdown does not depend on the scale of `A` or `b`.

    **Arguments:**

    - `tolerance`: $\beta \ge 0$; may be traced.
    - `max_steps`: the most iterations; `None` for ten times the number of unknowns.

    The `options` of `lx.linear_solve` may contain `y0`, a warm start, and
    `preconditioner`, a positive definite operator near the inverse of `A`. The
    statistics are `num_steps` (iterations) and `num_products` (with `A`).

    !!! example

        ```python
        solution = lx.linear_solve(operator, b, gnlin.methods.ConjugateGradients(1e-3))
        solution.stats["num_steps"]
        ```
    """

    tolerance: ScalarLike
    max_steps: ScalarLike | None = None

    def __check_init__(self):
        check_nonnegative("tolerance", self.tolerance)
        if self.max_steps is not None and not is_traced(self.max_steps):
            check_count("max_steps", self.max_steps)

    def init(
        self, operator: lx.AbstractLinearOperator, options: dict[str, Any]
    ) -> lx.AbstractLinearOperator:
        del options
        # `!=` would also compare metadata of the tree's structure, which may raise.
        if not eqx.tree_equal(operator.in_structure(), operator.out_structure()):
            raise ValueError(
                "`ConjugateGradients` needs a square operator: wrap it in `lx.Normal`."
            )
        if not lx.is_positive_semidefinite(operator):
            raise ValueError(
                "`ConjugateGradients` needs a positive semidefinite operator: tag it "
                "with `lx.positive_semidefinite_tag`."
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
        limits = jnp.finfo(dtype)
        eps = limits.eps
        max_steps = 10 * _tree.size(vector) if self.max_steps is None else self.max_steps
        # Scale by a power of two, which is exact, so that squares do not overflow.
        unit = jax.lax.reduce_precision(_tree.unit(vector) / 2, limits.nexp, 0)
        unit = jnp.maximum(unit, limits.tiny)
        b = _tree.scale(1 / unit, vector)
        target = jnp.asarray(self.tolerance, dtype) * _tree.norm(b)

        # Each iteration takes one product: with the direction, for a step, or with x, for
        # the true residual at the end of the recurrence. The recurrence then restarts, as
        # long as each true residual is at most half the last.
        def iterate(it):
            product = operator.mv(_tree.where(it.looks, it.x, it.direction))
            curvature = _tree.dot(it.direction, product)  # p^T A p
            rounding = _ROUNDINGS * eps * _tree.norm(it.direction) * _tree.norm(product)
            sound = curvature > rounding
            alpha = _tree.quotient(it.gamma, curvature, sound)
            x = _tree.where(it.looks, it.x, _tree.axpy(alpha, it.direction, it.x))
            before = _tree.where(it.looks, b, it.residual)
            residual = _tree.axpy(-jnp.where(it.looks, 1, alpha), product, before)
            z = precondition(residual)
            gamma = _tree.dot(residual, z)
            conjugate = _tree.axpy(gamma / it.gamma, it.direction, z)
            direction = _tree.where(it.looks, z, conjugate)
            size = _tree.norm(residual)
            num_steps = it.num_steps + jnp.where(sound & ~it.looks, 1, 0)
            ends = ~sound | ~(size > target)
            halved = size <= it.seen / 2
            return _Iterate(
                x,
                residual,
                direction,
                size,
                gamma,
                ~it.looks & ends,
                jnp.where(it.looks, size, it.seen),
                num_steps,
                it.num_products + 1,
                jnp.where(it.looks, it.stalled | ~halved, ~sound),
            )

        def goes_on(it):
            far = (it.size > target) & (it.num_steps < max_steps)
            return it.looks | far & ~it.stalled

        zero, no = jnp.zeros((), int), jnp.array(False)
        x, z, norm = _tree.zeros_like(b), precondition(b), _tree.norm(b)
        gamma = _tree.dot(b, z)
        start = _Iterate(x, b, z, norm, gamma, no, norm, zero, zero, no)
        if "y0" in options:
            x = _tree.scale(1 / unit, options["y0"])
            far = jnp.full_like(norm, jnp.inf)
            start = _Iterate(x, b, z, norm, gamma, ~no, far, zero, zero, no)
        it = jax.lax.while_loop(goes_on, iterate, start)
        met = (it.size <= target) & jnp.isfinite(norm)
        result = lx.RESULTS.where(
            met,
            lx.RESULTS.successful,
            lx.RESULTS.where(
                it.num_steps < max_steps,
                lx.RESULTS.breakdown,
                lx.RESULTS.max_steps_reached,
            ),
        )
        stats = {"num_steps": it.num_steps, "num_products": it.num_products}
        # A negative or NaN tolerance gives a NaN solution.
        unit = nan_unless(nonnegative(self.tolerance), unit)
        return _tree.scale(unit, it.x), result, stats

    def transpose(self, state, options):
        return state, options

    def conj(self, state, options):
        return state, options

    def assume_full_rank(self):
        return False
