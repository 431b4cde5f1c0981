"""Whole fits of a small dense problem: gnlin, the other libraries, and a loop by hand.

Every fit is a function of its start and its data that can be compiled and mapped. It
stops when the parameters change by less than `tolerance`, absolute and relative, or by
the library's rule that comes nearest to this. Only gnlin's default uses its own
tolerances.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jaxtyping import Array, Float, PyTree

import gnlin

from .opponents import promoting


MAX_STEPS = 5000

LIMIT = "hand-written"
PLAIN = "no acceleration; as accurate as normal equations are"
SCIPY = "lm", "trf"

Residuals = Callable[[Float[Array, " p"], PyTree[Array]], Float[Array, " m"]]


class End(NamedTuple):
    """Where a fit ended, and after how many steps."""

    parameters: Array | np.ndarray
    num_steps: Array | np.ndarray


Fit = Callable[[Float[Array, " p"], PyTree[Array]], End]


@dataclasses.dataclass(frozen=True)
class Method:
    library: str
    variant: str
    make: Callable[[Residuals, float], Fit]
    """`make(residuals, tolerance)` returns a fit."""
    note: str = ""


def methods() -> list[Method]:
    """Return the methods in JAX. The first is the limit, and the second gnlin's
    default."""
    lm = gnlin.LevenbergMarquardt
    plain_lm = functools.partial(lm, method="curvature", acceleration=False)
    cholesky = lx.Normal(lx.Cholesky())
    damped_by_cholesky = functools.partial(
        optx.LevenbergMarquardt, linear_solver=cholesky
    )
    return [
        Method(LIMIT, "LM, Cholesky", _by_hand),
        Method("gnlin", "LM", _optimistix(lambda *_: lm()), "the default"),
        Method("gnlin", "LM, other tolerance", _optimistix(lm)),
        Method("gnlin", 'LM, "curvature", plain', _optimistix(plain_lm), PLAIN),
        Method("optimistix", "LM (QR)", _optimistix(optx.LevenbergMarquardt)),
        Method("optimistix", "LM, Normal(Cholesky)", _optimistix(damped_by_cholesky)),
        Method("optimistix", "Dogleg", _optimistix(optx.Dogleg)),
        Method("optimistix", "GaussNewton", _optimistix(optx.GaussNewton)),
        Method("jaxopt", "LM, Cholesky", _jaxopt("cholesky")),
        Method("jaxopt", "LM, QR", _jaxopt("qr")),
        Method("jaxopt", "GaussNewton (CG)", _jaxopt_gauss_newton),
    ]


def _by_hand(residuals: Residuals, tolerance: float) -> Fit:
    """Write Levenberg-Marquardt as in a textbook: normal equations, Marquardt's scaling,
    and factors of 10 up and down. Its only safeguard is that the loss must fall."""

    def fit(b, data):
        def step(carry):
            b, r, damping, _, n = carry
            jacobian = jax.jacfwd(residuals)(b, data)
            curvature = jacobian.T @ jacobian
            damped = curvature + damping * jnp.diag(jnp.diag(curvature))
            factor = jax.scipy.linalg.cho_factor(damped)
            change = -jax.scipy.linalg.cho_solve(factor, jacobian.T @ r)
            new = residuals(b + change, data)
            small = jnp.all(jnp.abs(change) <= tolerance * (1 + jnp.abs(b)))
            better = (new @ new < r @ r) | small
            return (
                jnp.where(better, b + change, b),
                jnp.where(better, new, r),
                damping * jnp.where(better, 0.1, 10),
                better & small,
                n + 1,
            )

        def unfinished(carry):
            *_, done, n = carry
            return ~done & (n < MAX_STEPS)

        start = b, residuals(b, data), jnp.array(1e-3), jnp.array(False), jnp.array(0)
        b, *_, n = jax.lax.while_loop(unfinished, step, start)
        return End(b, n)

    return fit


def _optimistix(solver: Callable[[float, float], Any]) -> Callable:
    def make(residuals: Residuals, tolerance: float) -> Fit:
        chosen = solver(tolerance, tolerance)

        def fit(b, data):
            solution = optx.least_squares(
                residuals, chosen, b, data, max_steps=MAX_STEPS, throw=False
            )
            return End(solution.value, solution.stats["num_steps"])

        return fit

    return make


def _jaxopt(linear_solver: str) -> Callable:
    def make(residuals: Residuals, tolerance: float) -> Fit:
        # The rule on the gradient is absolute. Disable it, so that the step decides.
        solver = _jaxopt_solvers().LevenbergMarquardt(
            residuals,
            maxiter=MAX_STEPS,
            stop_criterion="madsen-nielsen",
            xtol=tolerance,
            gtol=1e-15,
            solver=linear_solver,
            materialize_jac=True,
            implicit_diff=False,
            unroll=False,
        )
        return _run(lambda b: solver)

    return make


def _jaxopt_gauss_newton(residuals: Residuals, tolerance: float) -> Fit:
    """Return jaxopt's Gauss-Newton, which can only use conjugate gradients."""

    def solver(b):
        return _jaxopt_solvers().GaussNewton(
            residuals,
            maxiter=MAX_STEPS,
            tol=tolerance * jnp.linalg.norm(b),
            implicit_diff=False,
            unroll=False,
        )

    return _run(solver)


def _run(solver: Callable) -> Fit:
    @promoting
    def fit(b, data):
        end = solver(b).run(b, data)
        return End(end.params, end.state.iter_num)

    return fit


def _jaxopt_solvers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
    return jaxopt


def scipy(method: Any) -> Callable[[Residuals, float], Any]:
    """Return a fit by SciPy, with the residuals and their exact Jacobian compiled
    once."""
    from scipy.optimize import least_squares

    def make(residuals: Residuals, tolerance: float):
        value, jacobian = jax.jit(residuals), jax.jit(jax.jacfwd(residuals))

        def fit(b, data) -> End:
            exact: Any = lambda b: np.asarray(jacobian(b, data))
            result = least_squares(
                lambda b: np.asarray(value(b, data)),
                np.asarray(b),
                exact,
                method=method,
                x_scale="jac",
                ftol=1e-15,
                xtol=tolerance,
                gtol=1e-15,
                max_nfev=MAX_STEPS,
            )
            return End(result.x, result.nfev)

        return fit

    return make
