"""A damped problem whose kernel is of a lower rank, from random products."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_count, check_whole
from .._common._passes import Passes
from .._common._tree import matmul
from .._jacobian import AtHand, Cost, Rows
from .._linear_algebra import _nystrom
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractWithGradient, Answer
from ._cholesky import damping_of
from ._on_outputs import Solved, through_outputs


SINGULAR: optx.RESULTS = optx.RESULTS.singular  # type: ignore[assignment]


class NystromKernel(eqx.Module):
    r"""The kernel's largest eigenvalues, from random products, in the kernel's place.

    $$\delta = -\phi^\top(\hat K + \lambda I)^{-1} r, \qquad \hat K = K\Omega\,
    (\Omega^\top K\Omega)^{-1}\,(K\Omega)^\top, \qquad K = \phi\phi^\top,$$

    with m x $\ell$ Gaussian numbers $\Omega$. It takes $\ell$ products with $\phi$ and
    $\phi^\top$ in place of $m^2p$ multiplications, factorises m x $\ell$ in place of
    m x m, and holds as much. It pays for many outputs whose kernel has few eigenvalues
    above the damping. The step is not that of the kernel itself: of what $\hat K$ leaves
    out it is gradient descent's, with the rate $1/\lambda$. Where eigenvalues of more
    than $2\lambda$ are left out it may lead uphill, and a run of
    [`gnlin.DampedGaussNewton`][] diverge, or stand still with a search: use a higher
    rank, more damping, or [`gnlin.LevenbergMarquardt`][], which raises it. Rounding is
    divided by the damping, too: below full rank the step is off by some 40 roundings
    times $w_{\max}/\lambda$, relatively. For the exact step let
    [`gnlin.preconditioners.Nystrom`][] precondition conjugate gradients.

    **Arguments:**

    - `rank`: $\ell$, at least 1; a larger one than m serves as m, and then the step is
        exact.
    - `seed`: of the random numbers, the same at each linearisation.

    **Raises:** `ValueError` if `rank` is no whole number of at least 1.

    !!! example

        ```python
        method = gnlin.methods.NystromKernel(200)
        gnlin.DampedGaussNewton(1e-3, momentum=0.9, method=method)
        ```

    ??? cite "References"

        A. Guzmán-Cordero, F. Dangel, G. Goldshlager and M. Zeinhofer, *Improving energy
        natural gradient descent through Woodbury, momentum, and randomization*,
        arXiv:2505.12149 (2025).

        Z. Frangella, J. A. Tropp and M. Udell, *Randomized Nyström preconditioning*, SIAM
        J. Matrix Anal. Appl. 44 (2023).
    """

    rank: int = eqx.field(static=True)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        check_count("rank", self.rank)
        check_whole("seed", self.seed)


class OfLowRank(AbstractWithGradient):
    r"""$\hat K = UWU^\top$, and $(\hat K + \lambda I)^{-1} = U(W + \lambda I)^{-1}U^\top
    + \frac1\lambda(I - UU^\top)$."""

    method: ClassVar[str] = "NystromKernel"
    problem: Quadratic
    vectors: Float[Array, "m l"]  # U
    eigenvalues: Float[Array, " l"]  # W
    pushed: Float[Array, " m"] | None  # phi g_0

    def __init__(self, problem, vectors, eigenvalues, passes):
        super().__init__(problem, passes)
        self.vectors = vectors
        self.eigenvalues = eigenvalues
        self.pushed = None
        if problem.rest is not None:
            self.pushed = problem.jacobian.push_forward(problem.rest)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, Quadratic) and isinstance(filter, Tikhonov)

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        return math.inf  # only if asked for

    @classmethod
    def of(
        cls, problem: Quadratic, cost: Cost, approximation: NystromKernel
    ) -> "OfLowRank":
        problem = _by_rows(problem, cost)
        jacobian, (m, _) = problem.jacobian, problem.jacobian.shape
        rank = min(approximation.rank, m)

        def product(u: Float[Array, " m"]) -> Float[Array, " m"]:
            return jacobian.push_forward(jacobian.pull_back(u))

        def products(matrix: Float[Array, "m l"]) -> Float[Array, "m l"]:
            return jacobian.chunked(product, matrix.T).T

        dtype = jacobian.codomain.dtype
        vectors, eigenvalues = _nystrom.eigenpairs(
            products, m, rank, approximation.seed, dtype
        )
        passes = cost.rows if cost.fits else jacobian.a_product() * rank
        return cls(problem, vectors, eigenvalues, passes)

    def largest_curvature(self) -> Scalar:
        return jnp.max(self.eigenvalues).astype(self.gradient_norm.dtype)

    def with_residual(self, residual: PyTree[Array]) -> "OfLowRank":
        problem = self.problem.with_residual(residual)
        return OfLowRank(problem, self.vectors, self.eigenvalues, Passes())

    def solve(self, filter: Filter) -> Answer:
        jacobian, u = self.problem.jacobian, self.vectors
        damping = jnp.asarray(damping_of(filter), self.eigenvalues.dtype)
        # Without damping what is left out has no step at all.
        known = jnp.where(damping > 0, damping, 1)
        whether = optx.RESULTS.where(damping > 0, optx.RESULTS.successful, SINGULAR)

        def solve(vector: Float[Array, " m"]) -> Solved:
            vector = vector.astype(u.dtype)
            seen = matmul(u.T, vector)
            solved = matmul(u, seen / (self.eigenvalues + known))
            if u.shape[0] == u.shape[1]:
                return solved, 0, whether
            left = vector - matmul(u, seen)
            return solved + left / known, 0, whether

        answer = through_outputs(solve, self.problem, self.pushed, damping)
        pushed = jacobian.mv(answer.step)
        along = _tree.dot(answer.step, self._gradient)
        curved = _tree.dot(pushed, pushed).astype(along.dtype)
        return eqx.tree_at(
            lambda a: (a.decrease, a.passes),
            answer,
            (-along - 0.5 * curved, answer.passes + jacobian.a_product()),
            is_leaf=lambda x: x is None,
        )


def _by_rows(problem: Quadratic, cost: Cost) -> Quadratic:
    """With the Jacobian at hand, of layers by their rows, where they fit: these are fewer
    numbers to build a kernel of, and more to multiply by again and again."""
    if cost.reads or not (cost.fits and cost.rows_fit):
        return problem.at_hand_if_it_fits()
    rows = [Rows(block.rows()) for block in problem.jacobian.blocks()]
    return problem.with_jacobian(AtHand.of(problem.jacobian, rows))
