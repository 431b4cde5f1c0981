"""Damped problems with a low-rank kernel, approximated from random products."""

import dataclasses
import functools
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Scalar

from .._common._checks import check_count, check_whole
from .._common._passes import Passes
from .._common._tree import matmul
from .._jacobian import AtHand, Cost, Rows
from .._linear_algebra import _nystrom
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import AbstractMethod, Answer
from ._cholesky import through_outputs


SINGULAR: optx.RESULTS = optx.RESULTS.singular  # type: ignore[assignment]


class NystromKernel(eqx.Module):
    r"""A randomised low-rank approximation of the kernel, in place of the kernel.

    $$\delta = -\phi^\top(\hat K + \lambda I)^{-1} r, \qquad \hat K = K\Omega\,
    (\Omega^\top K\Omega)^{-1}\,(K\Omega)^\top, \qquad K = \phi\phi^\top,$$

    where $\Omega$ is an m x $\ell$ Gaussian matrix. This takes $\ell$ products with
    $\phi$ and $\phi^\top$ in place of $m^2p$ multiplications, and holds and factorises an
    m x $\ell$ matrix in place of an m x m one. It pays for many outputs whose kernel has
    few eigenvalues above the damping.

    Along directions that $\hat K$ leaves out, the step is one of gradient descent with
    the rate $1/\lambda$. If eigenvalues above $2\lambda$ are left out, it may lead
    uphill; a run of [`gnlin.DampedGaussNewton`][] may then diverge, or stop making
    progress with a search. Use a higher rank, more damping, or
    [`gnlin.LevenbergMarquardt`][], which raises the damping. Below full rank, the step
    also has a relative rounding error of about 40 eps times $w_{\max}/\lambda$. For exact
    steps, use [`gnlin.preconditioners.Nystrom`][] with conjugate gradients.

    **Arguments:**

    - `rank`: $\ell$, at least 1. If it is m or more, m is used, and the step is exact.
    - `seed`: the seed of $\Omega$, which is the same at each linearisation.

    **Raises:** `ValueError` if `rank` is not a whole number of at least 1.

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


class OfLowRank(AbstractMethod):
    r"""The step by $\hat K = UWU^\top$, for which $(\hat K + \lambda I)^{-1} =
    U(W + \lambda I)^{-1}U^\top + \frac1\lambda(I - UU^\top)$."""

    method: ClassVar[str] = "NystromKernel"
    problem: Quadratic
    vectors: Float[Array, "m l"]  # U
    eigenvalues: Float[Array, " l"]  # W
    pushed: Float[Array, " m"] | None  # phi g_0

    def __init__(self, problem, vectors, eigenvalues, passes):
        self.vectors = vectors
        self.eigenvalues = eigenvalues
        self.pushed = None
        if problem.rest is not None:
            self.pushed = problem.jacobian.push_forward(problem.rest)
            passes += Passes(jvps=problem.jacobian.a_product().jvps)
        super().__init__(problem, passes)

    @classmethod
    def of(cls, problem, cost: Cost, approximation: NystromKernel) -> "OfLowRank":
        problem = _by_rows(problem, cost)
        jacobian, (m, _) = problem.jacobian, problem.jacobian.shape
        rank = min(approximation.rank, m)

        def product(u: Float[Array, " m"]) -> Float[Array, " m"]:
            return jacobian.push_forward(jacobian.pull_back(u))

        products = functools.partial(jacobian.chunked, product)
        dtype = jacobian.codomain.dtype
        vectors, eigenvalues = _nystrom.eigenpairs(
            products, m, rank, approximation.seed, dtype
        )
        passes = cost.rows if cost.fits else jacobian.a_product() * rank
        return cls(problem, vectors, eigenvalues, passes)

    def largest_curvature(self) -> Scalar:
        return jnp.max(self.eigenvalues).astype(self.gradient_norm.dtype)

    def with_problem(self, problem: Quadratic) -> "OfLowRank":
        return OfLowRank(problem, self.vectors, self.eigenvalues, Passes())

    def solve(self, filter: Filter) -> Answer:
        u = self.vectors
        damping = jnp.asarray(self.damping_of(filter), self.eigenvalues.dtype)
        # Without damping, the directions that are left out have no solution.
        known = jnp.where(damping > 0, damping, 1)
        whether = optx.RESULTS.where(damping > 0, optx.RESULTS.successful, SINGULAR)

        def solve(vector: Float[Array, " m"]):
            vector = vector.astype(u.dtype)
            seen = matmul(u.T, vector)
            solved = matmul(u, seen / (self.eigenvalues + known))
            if u.shape[0] == u.shape[1]:
                return solved, whether
            left = vector - matmul(u, seen)
            return solved + left / known, whether

        answer = through_outputs(solve, self.problem, self.pushed, damping)
        passes = answer.passes + self.problem.jacobian.a_product()
        decrease = self.problem.decrease(answer.step)
        return dataclasses.replace(answer, decrease=decrease, passes=passes)


def _by_rows(problem: Quadratic, cost: Cost) -> Quadratic:
    """Put the Jacobian in memory if it fits, with the layers as rows: many products with
    rows are faster than with the factors of a layer."""
    if cost.reads or not (cost.fits and cost.rows_fit):
        return problem.at_hand_if_it_fits()
    rows = [Rows(block.rows()) for block in problem.jacobian.blocks()]
    return problem.with_jacobian(AtHand.of(problem.jacobian, rows))
