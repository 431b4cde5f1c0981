"""Many small least-squares problems, hard ones among them, and a judge of stationary
points in NumPy and SciPy that does not use gnlin."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize

import gnlin


#
# The models: curves of five parameters, and a network of ten
#


def exponentials(xp, x, z):
    return z[0] * xp.exp(-z[1] * x) + z[2] * xp.exp(-z[3] * x) + z[4]


def powers(xp, x, z):
    log = xp.log(x)
    return z[0] * xp.exp(z[1] * log) + z[2] * xp.exp(z[3] * log) + z[4]


def rationals(xp, x, z):
    return (z[0] + z[1] * x + z[2] * x**2) / (1 + z[3] * x + z[4] * x**2)


def logistic(xp, x, z):
    return z[0] * xp.tanh(z[1] * x - z[2]) + z[3] + z[4] * x


def peak(xp, x, z):
    return z[0] * xp.exp(-z[1] * (x - z[2]) ** 2) + z[3] + z[4] * x


def saturation(xp, x, z):
    return z[0] * (1 - xp.exp(-z[1] * x)) / (1 + z[2] ** 2 * xp.exp(-z[3] * x)) + z[4]


def network(xp, x, z):
    hidden = [xp.tanh(z[i] * x + z[3 + i]) * z[6 + i] for i in range(3)]
    return hidden[0] + hidden[1] + hidden[2] + z[9]


class Family(NamedTuple):
    models: tuple[Callable, ...]
    num_parameters: int
    inputs: np.ndarray


FAMILIES = {
    "curves": Family(
        (exponentials, powers, rationals, logistic, peak, saturation),
        5,
        np.linspace(0.1, 2.0, 20),
    ),
    # More parameters than residuals
    "networks": Family((network,), 10, np.linspace(-2.0, 2.0, 8)),
}
PRECISIONS = {"double": np.float64, "single": np.float32}


#
# The problems
#


class Problem(eqx.Module):
    """Residuals f(z) - targets with z = offset + mix (y / units). With a leading axis it
    holds several problems."""

    model: Any
    mix: Any
    offset: Any
    units: Any
    targets: Any
    start: Any


MIXES = ("plain", "plain", "duplicate", "unused", "deficient")
SPREADS = (0.1, 1.0, 3.0)  # perturbation of the start from the truth
NOISES = (0.0, 1e-3, 0.3)


def problems(family: str, precision: str, count: int, seed: int = 0) -> Problem:
    """Draw `count` problems of each model of a family. A quarter have a different unit
    for each parameter, from 1e-12 to 1e12."""
    models, size, x = FAMILIES[family]
    generator = np.random.default_rng([seed, size, precision == "single"])
    made = []
    for model in range(len(models)):
        for i in range(count):
            truth = generator.normal(size=size)
            mix, offset = _mix(MIXES[i % len(MIXES)], truth, generator)
            free = generator.normal(size=size)
            # With a deficient mix only the offset can reach the truth.
            truth = offset + mix @ truth
            targets = models[model](np, x, truth)
            targets = targets + NOISES[i // 3 % 3] * generator.normal(size=x.size)
            nearest = np.linalg.pinv(mix) @ (truth - offset)
            start = nearest + SPREADS[i % 3] * free
            units = 10.0 ** generator.uniform(-12, 12, size)
            if i % 4 != 3:
                units = np.ones(size)
            made.append(Problem(model, mix, offset, units, targets, units * start))

    def stack(*leaves):
        stacked = np.stack(leaves)
        integer = stacked.dtype.kind == "i"
        return stacked if integer else stacked.astype(PRECISIONS[precision])

    return jax.tree.map(stack, *made)


def _mix(kind, truth, generator):
    size = truth.size
    mix, offset = np.eye(size), np.zeros(size)
    one, other = generator.choice(size, 2, replace=False)
    if kind == "duplicate":  # two parameters that enter only as their sum
        mix[one, other] = 1
        mix[other] = 0
        offset[other] = truth[other]
    elif kind == "unused":
        mix[one] = 0
        offset[one] = truth[one]
    elif kind == "deficient":  # of rank 3
        basis, _ = np.linalg.qr(generator.normal(size=(size, 3)))
        mix, offset = basis @ basis.T, truth
    return mix, offset


def ordinary(problem: Problem) -> np.ndarray:
    """Return which problems have parameters in ordinary units."""
    return np.all(problem.units == 1, axis=-1)


def residuals(family: str) -> Callable:
    """Return the residuals as a function `(y, problem)` in JAX."""
    models, _, x = FAMILIES[family]

    def fn(y, problem):
        z = problem.offset + problem.mix @ (y / problem.units)
        inputs = jnp.asarray(x, y.dtype)
        branches = [lambda z, f=f: f(jnp, inputs, z) for f in models]
        return jax.lax.switch(problem.model, branches, z) - problem.targets

    return fn


#
# The solvers
#

ARMIJO = optx.BacktrackingArmijo()
NYSTROM = gnlin.preconditioners.Nystrom(rank=3)
BLOCKS = gnlin.preconditioners.BlockDiagonal()
DESCENT = gnlin.IterativeLinearisation(1000, 1e-2)

SETTINGS = {
    "GN": gnlin.GaussNewton(),
    "GN eigh": gnlin.GaussNewton(method="eigh"),
    "GN matrix-free": gnlin.GaussNewton(method="matrix-free"),
    "GN search": gnlin.GaussNewton(search=ARMIJO),
    "damped 1e-8": gnlin.DampedGaussNewton(1e-8),
    "damped 1e-3": gnlin.DampedGaussNewton(1e-3),
    "damped 1": gnlin.DampedGaussNewton(1.0),
    "damped scaled": gnlin.DampedGaussNewton(1e-3, scaling="more"),
    "damped search": gnlin.DampedGaussNewton(1e-3, search=ARMIJO),
    "truncated 0.1": gnlin.TruncatedGaussNewton(0.1),
    "truncated 1e-3": gnlin.TruncatedGaussNewton(1e-3),
    "truncated search": gnlin.TruncatedGaussNewton(0.1, 1e-3, search=ARMIJO),
    "truncated Eisenstat-Walker": gnlin.TruncatedGaussNewton(
        gnlin.methods.EisenstatWalker()
    ),
    "truncated Nystrom": gnlin.TruncatedGaussNewton(0.1, preconditioner=NYSTROM),
    "truncated blocks": gnlin.TruncatedGaussNewton(0.1, preconditioner=BLOCKS),
    "LM": gnlin.LevenbergMarquardt(),
    "LM identity": gnlin.LevenbergMarquardt(scaling="identity"),
    "LM no acceleration": gnlin.LevenbergMarquardt(acceleration=False),
    "LM curvature": gnlin.LevenbergMarquardt(method="curvature"),
    "LM matrix-free": gnlin.LevenbergMarquardt(
        scaling="identity", method="matrix-free", acceleration=False
    ),
    "descent": DESCENT,
    "filtered": gnlin.methods.FilteredGaussNewton(gnlin.filters.GradientFlow(100.0)),
}


class Runs(NamedTuple):
    told: np.ndarray  # success
    y: np.ndarray
    num_steps: np.ndarray


def run(family: str, solver, problem: Problem, max_steps: int = 200) -> Runs:
    """Solve all problems in one program."""
    fn = residuals(family)

    def solve(problem):
        solution = optx.least_squares(
            fn, solver, problem.start, problem, max_steps=max_steps, throw=False
        )
        told = solution.result == optx.RESULTS.successful
        return told, solution.value, solution.stats["num_steps"]

    # Solve one after the other: together, all would wait for the slowest.
    runs = jax.jit(lambda many: jax.lax.map(solve, many))(
        jax.tree.map(jnp.asarray, problem)
    )
    return Runs(*map(np.asarray, runs))


#
# The judge
#


class Verdict(NamedTuple):
    cosine: float  # the largest cosine between the residual and a column of the Jacobian
    cost: float
    gain: float  # the part of the cost that SciPy still removes
    stationary: bool  # by the cosine, or because only rounding is left
    wrong: bool  # and something can be gained


# If a cosine is above these, SciPy decides. Smaller ones are rounding, or the last steps
# of a linear convergence.
COSINES = {np.dtype(np.float64): 1e-5, np.dtype(np.float32): 1e-2}
GAIN = 0.01
# Residuals below this multiple of the rounding of their inputs, or of the largest effect
# of one parameter, count as zero. So do those within the solvers' `atol`.
ROUNDINGS = 30
PARTIAL_ROUNDINGS = 6
ATOL = 1e-12


@functools.cache
def _own_jacobian(family: str) -> Callable:
    return jax.jit(jax.jacfwd(residuals(family)))


def judge(family: str, problem: Problem, y: np.ndarray) -> Verdict:
    """Judge whether a point is stationary: in double precision, in dimensionless
    parameters, with derivatives by complex steps."""
    models, _, x = FAMILIES[family]
    model, precision = models[int(problem.model)], y.dtype
    mix, offset, units, targets = (
        np.asarray(a, float)
        for a in (problem.mix, problem.offset, problem.units, problem.targets)
    )

    def residual(w):
        return model(np, x, offset + mix @ w) - targets

    def jacobian(w):
        z = offset + mix @ w
        steps = z + 1e-100j * np.eye(z.size)
        return np.stack([model(np, x, s).imag for s in steps], 1) @ mix * 1e100

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w = np.asarray(y, float) / units
        r, phi = residual(w), jacobian(w)
        cost = 0.5 * float(r @ r)
        if not (np.all(np.isfinite(w)) and math.isfinite(cost)):
            return Verdict(math.nan, cost, math.nan, False, True)
        eps = np.finfo(precision).eps
        # The effect of each parameter on the outputs, and of its rounding.
        shares = np.linalg.norm(phi, axis=0) * np.abs(w)
        rounding = eps * (np.linalg.norm(targets) + np.sum(shares))
        # Leave out columns that vanish, or nearly so, in the run's own precision.
        own = np.asarray(_own_jacobian(family)(y, problem))
        seen = np.any(own != 0, axis=0) & ((shares > eps * rounding) | (w == 0))
        seen = phi[:, seen] / np.linalg.norm(phi[:, seen], axis=0)
        cosine = float(np.max(np.abs(seen.T @ r) / np.linalg.norm(r), initial=0.0))
        length = math.sqrt(2 * cost)
        flat = cosine <= COSINES[precision] or cosine * length <= 2 * ATOL
        if length <= np.linalg.norm(targets):  # otherwise zero is the better fit
            flat |= length <= ROUNDINGS * rounding
            flat |= cosine * length <= PARTIAL_ROUNDINGS * rounding
        if flat:
            return Verdict(cosine, cost, 0.0, True, False)
        for method in ("lm", "trf"):
            if method == "lm" and r.size < w.size:
                continue
            try:
                better = scipy.optimize.least_squares(
                    residual, w, jacobian, method=method, x_scale="jac", max_nfev=500
                ).cost
            except (ValueError, np.linalg.LinAlgError):
                continue
            gain = (cost - better) / cost
            less = length - math.sqrt(2 * better)
            if gain > GAIN and less > ROUNDINGS * rounding:
                return Verdict(cosine, cost, gain, False, True)
        return Verdict(cosine, cost, 0.0, False, False)


def at(problem: Problem, i: int) -> Problem:
    return jax.tree.map(lambda x: x[i], problem)
