"""Iterative linearisation: K steps of descent on each linearised model."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import (
    as_scalar,
    check_finite_positive,
    check_momentum,
    check_period,
    check_tolerances,
)
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._spectrum import Filter, Spectrum
from .._subproblem import check_method, Method, prepare
from ..filters import GradientDescent, HeavyBall
from ._base import AbstractGaussNewton, Evaluate, step_if_finite, Update


# Up to this many multiplications the kernel and its eigenvalues take a millisecond.
_CHEAP_SPECTRUM = 10**8


class IterativeLinearisation(AbstractGaussNewton):
    r"""Train the linearised model for K steps of gradient descent, then linearise again.

    One outer step is one feature update and K inner steps. K = 1 is gradient descent on
    the model itself; K = infinity trains its linearisation at the starting point to
    convergence (the NTK regime), and is done after one outer step.

    On the spectrum of the kernel the K steps are one formula, and $K = 10^8$ costs what
    K = 1 costs. Steps that diverge, because $\eta$ times the largest eigenvalue is above
    2 (above $2(1+\mu)$ with momentum), end the run with
    `optx.RESULTS.nonlinear_divergence` before they are taken.

    **Arguments:**

    - `period`: K, a whole number of at least 1, or `math.inf`; a number or a traced
        scalar. (A Python number is static: another one compiles again.)
    - `learning_rate`: $\eta > 0$, a number or a traced scalar.
    - `momentum`: $\mu$ of heavy-ball momentum, at least 0 and less than 1. The velocity
        starts at zero after each linearisation.
    - `rtol`, `atol`: it has converged when an *outer* step changes each parameter `y` by
        less than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `method`: how the K steps are computed: on a spectrum (`"svd"`, `"eigh"`), literally
        (`"matrix-free"`), or by whichever is cheaper (`"auto"`).
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solver = gnlin.IterativeLinearisation(period=10**5, learning_rate=1e-5)
        solution = gnlin.solve(model, (x, y), solver, max_steps=40)
        ```

    ??? cite "Reference"

        A. Goldwaser and H. Ge, *Understanding Sparse Feature Updates in Deep Networks
        using Iterative Linearisation*, arXiv:2211.12345.
    """

    period: ScalarLike
    learning_rate: ScalarLike
    momentum: ScalarLike
    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    method: Method
    memory_budget: int

    def __init__(
        self,
        period: ScalarLike,
        learning_rate: ScalarLike,
        momentum: ScalarLike = 0.0,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        method: Method = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        check_period("period", period)
        check_finite_positive("learning_rate", learning_rate)
        check_momentum("momentum", momentum)
        check_method(method, damped=False)
        self.period = period
        self.learning_rate = as_scalar(learning_rate)
        self.momentum = momentum
        check_tolerances(rtol, atol)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.method = method
        self.memory_budget = memory_budget

    def filter(self, num_inner_steps: ScalarLike | None = None) -> Filter:
        """The spectral filter of a number of inner steps, `period` of them by default."""
        period = self.period if num_inner_steps is None else num_inner_steps
        if isinstance(self.momentum, float | int) and self.momentum == 0:
            return GradientDescent(period, self.learning_rate)
        return HeavyBall(period, self.learning_rate, self.momentum)

    def update(
        self,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree[Array],
        num_steps: Int[Array, ""],
    ) -> Update:
        endless = isinstance(self.period, float) and math.isinf(self.period)
        method = self.method
        if method == "auto" and self._literal_is_cheaper(lin):
            method = "matrix-free"
        subproblem = prepare(
            lin, method, self.memory_budget, damped=not endless, reuse=True
        )
        answer = subproblem.solve(self.filter())
        answer = eqx.tree_at(
            lambda a: a.num_inner_steps, answer, jnp.asarray(self.period, float)
        )
        update = step_if_finite(self, lin, evaluate, subproblem, answer)
        # Descent without an end is never linearised again: its point is the answer.
        solved = update.result == optx.RESULTS.successful
        finished = solved & jnp.isinf(jnp.asarray(self.period, float))
        return eqx.tree_at(lambda u: u.terminate, update, update.terminate | finished)

    def _literal_is_cheaper(self, lin: Linearisation) -> bool:
        """K known to be so small that its steps take fewer passes than the Jacobian,
        where its factorisation is more than the work of a moment."""
        m, p = lin.shape
        if not isinstance(self.period, int) or m * p * min(m, p) <= _CHEAP_SPECTRUM:
            return False
        return 2 * self.period - 1 <= sum(lin.num_row_passes())

    def trajectory(self, lin: Linearisation) -> "Trajectory":
        """The inner steps at one linearisation, to be looked at wherever one likes.

        !!! example

            ```python
            lin = gnlin.linearise(residuals, y, (inputs, targets))
            trajectory = solver.trajectory(lin)
            trajectory.parameters(jnp.array([1, 10, 100]))
            trajectory.outputs(jnp.array([1, 10, 100]))
            trajectory.outputs(jnp.array([1, 10, 100]), on=gnlin.linearise(f, y, test))
            ```
        """
        method = self.method if self.method in ("svd", "eigh") else None
        spectrum = lin.spectrum(method, memory_budget=self.memory_budget)
        return Trajectory(lin, spectrum, self)


class Trajectory(eqx.Module):
    """The path of the inner steps at one linearisation point, before, at and beyond the
    period. Made by [`gnlin.IterativeLinearisation.trajectory`][]."""

    linearisation: Linearisation
    spectrum: Spectrum
    solver: IterativeLinearisation

    def parameters(self, inner_steps: Int[Array, " n"]) -> PyTree[Array]:
        """The parameters after each number of inner steps, along a new leading axis.

        Each is a whole number of at least 1.
        """
        check_period("inner_steps", inner_steps)
        return jax.vmap(self._after)(jnp.asarray(inner_steps))

    def outputs(
        self, inner_steps: Int[Array, " n"], *, on: Linearisation | None = None
    ) -> PyTree[Array]:
        """The linearised model's outputs after each number of inner steps.

        **Arguments:**

        - `inner_steps`: whole numbers of at least 1.
        - `on`: a linearisation, at the same point, of the function whose outputs are
            wanted, such as the model on test inputs; by default the one trained on.
        """
        check_period("inner_steps", inner_steps)
        on = self.linearisation if on is None else on
        # A chunk at a time: all parameters at once may not fit in memory.
        return jax.lax.map(
            lambda k: on(self._after(k)), jnp.asarray(inner_steps), batch_size=32
        )

    def _after(self, num_inner_steps: Int[Array, ""]) -> PyTree[Array]:
        step = self.spectrum.step(self.solver.filter(num_inner_steps))
        return _tree.axpy(1, step, self.linearisation.point)
