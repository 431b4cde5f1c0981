"""One truncated step where both sides are large: a convolutional network on digits."""

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree

import gnlin

from ..data import digits
from ..networks.cnn import ConvNet
from . import opponents
from .report import Comparison, Row, timed_row
from .timing import alternate, Case


DAMPING = 1.0
NUM_IMAGES = 2048
NUM_CLASSES = digits.NUM_CLASSES
TOLERANCES = 0.1, 1e-3
OPTIMISTIX_TOLERANCE = 10
"""Both tolerances of `lx.CG` at the full number of images, as a multiple of the tolerance
that is asked for, because its rule is another one. It needs an absolute tolerance:
entries of the step that stay zero, such as a dead unit's, would otherwise end it at
once."""
MARGIN = 1.1
"""A residual may exceed the tolerance by this factor, because of single precision."""

LIMIT = "hand-written"
LOOPED = "convolutions inside a compiled loop are many times slower on a CPU"


def comparisons(quick: bool) -> Iterator[Comparison]:
    problem = Problem(64, channels=(4,)) if quick else Problem(NUM_IMAGES)
    for tolerance in TOLERANCES[:1] if quick else TOLERANCES:
        title = f"One truncated step, to {tolerance:g} of the gradient; {problem.name}"
        with jax.enable_x64(False):  # optimistix mixes precisions otherwise
            rows = one_step(problem, tolerance, 1)
        yield Comparison(title, rows, bars=title)


class Problem:
    """Half the mean squared error over an image's ten outputs, summed over images. The
    network is `digits_cnn`, or the same with fewer channels."""

    def __init__(self, num_images: int, channels: tuple[int, ...] = (16, 16)):
        (images, labels), _ = digits.classification(flat=False)
        index = np.arange(num_images) % len(images)
        self.images = jnp.asarray(images[index], jnp.float32)
        self.one_hot = jnp.asarray(np.eye(NUM_CLASSES)[labels[index]], jnp.float32)
        model = ConvNet(
            jax.random.key(0),
            images.shape[1:],
            channels,
            kernel_sizes=(3, 3),
            padding="SAME",
            widths=(48, NUM_CLASSES),
        )
        arrays, static = eqx.partition(model, eqx.is_array)
        self.parameters = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
        self.flat, self.unravel = ravel_pytree(self.parameters)
        self.predict_one = lambda y, image: eqx.combine(y, static)(image)
        m = num_images * NUM_CLASSES
        self.name = f"CNN, p = {self.flat.size:,}, m = {m:,}, single precision"

    @property
    def args(self):
        return self.images, self.one_hot

    def residual(self, y, example):
        image, one_hot = example
        return (self.predict_one(y, image) - one_hot) / math.sqrt(NUM_CLASSES)

    def residuals(self, y, args):
        return jax.vmap(self.residual, in_axes=(None, 0))(y, args)

    def linear_residual(self, parameters) -> float:
        """Return the residual relative to the gradient, in double precision."""
        double = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
        norm = lambda tree: float(jnp.linalg.norm(ravel_pytree(tree)[0]))
        with jax.enable_x64(True):
            y, args = double(self.parameters), double(self.args)
            step = jax.tree.map(jnp.subtract, double(parameters), y)
            left, gradient = _linearised_gradient(self.residuals, y, args, step)
            return norm(left) / norm(gradient)


def _linearised_gradient(residuals: Callable, y, args, step):
    """Return the gradients of the damped linearised problem after a step, and before
    it."""

    @jax.jit
    def gradients(y, args, step):
        outputs, tangent = jax.jvp(lambda y: residuals(y, args), (y,), (step,))
        _, pull_back = jax.vjp(lambda y: residuals(y, args), y)
        (left,) = pull_back(outputs + tangent)
        left = jax.tree.map(lambda g, s: g + DAMPING * s, left, step)
        return left, pull_back(outputs)[0]

    return gradients(y, args, step)


@dataclasses.dataclass
class Contender:
    library: str
    variant: str
    run: Callable[[], Any]
    parameters: Callable[[Any], Any] | None
    """Extracts the new parameters from what `run` returns. `None` if the library takes
    another step."""
    products: Callable[[Any], int | None] = lambda output: None
    """Counts Jacobian-vector and vector-Jacobian products together; `None` if unknown."""
    note: str = ""


def one_step(problem: Problem, tolerance: float, num_rounds: int) -> list[Row]:
    """Time each contender in one compiled call, or in a call for each product. The first
    row is the limit."""
    contenders = [
        _called_by_hand(problem, tolerance),
        _looped_by_hand(problem, tolerance),
        *(_gnlin(problem, tolerance, method) for method in ("auto", "matrix-free")),
        _optimistix(problem, tolerance),
        _jaxopt(problem, tolerance),
        _scipy(problem, tolerance),
        *_somax(problem, tolerance),
    ]
    outputs: dict[int, Any] = {}

    def case(k: int, contender: Contender) -> Case:
        def run():
            outputs[k] = contender.run()
            return outputs[k]

        return Case(contender.library, contender.variant, run)

    timings = alternate([case(k, c) for k, c in enumerate(contenders)], num_rounds)
    rows = []
    for k, (timing, contender) in enumerate(zip(timings, contenders, strict=True)):
        row = timed_row(problem.name, timing, timings[0], tolerance=MARGIN * tolerance)
        if contender.parameters is not None:
            reached = problem.linear_residual(contender.parameters(outputs[k]))
            row = dataclasses.replace(row, linear_residual=reached)
        rows.append(_noted(row, contender, contender.products(outputs[k])))
    return _explained(rows) + _skipped(problem, rows)


def _noted(row: Row, contender: Contender, products: int | None) -> Row:
    said = [contender.note]
    if products is not None:
        said.append(f"{products} products")
    if contender.parameters is not None and not row.solved:
        said.append("not solved")
    return dataclasses.replace(row, note=", ".join(filter(None, said)))


def _explained(rows: Sequence[Row]) -> list[Row]:
    """Add a reason to the row of gnlin's default if it is not the fastest library."""
    default = next(row for row in rows if row.note.startswith("the default"))
    others = [
        row
        for row in rows
        if row.library not in ("gnlin", LIMIT)
        and (row.solved or row.linear_residual is None)
    ]
    first = all((row.ratio or np.inf) >= (default.ratio or np.inf) for row in others)
    why = f"{default.note}; {LOOPED}, so it forms the Jacobian"
    return [
        dataclasses.replace(row, note=why) if row is default and not first else row
        for row in rows
    ]


def _skipped(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    skipped = [
        ("jaxopt", "GaussNewton", "no damping, and a fixed tolerance"),
        ("optimistix", "LM, default (QR)", "a Jacobian in QR, minutes"),
    ]
    if not any(row.library == "somax" for row in rows):
        skipped.append(("somax", "sgn_mse (CG)", "python-somax is not installed"))
    return [
        Row(problem.name, library, variant, note=f"skipped: {reason}")
        for library, variant, reason in skipped
    ]


#
# The limit
#


def _conjugate_gradients(product, gradient, tolerance: float, loop: Callable):
    """Run textbook conjugate gradients on flat vectors, and return the solution and the
    number of iterations."""

    def unfinished(carry):
        _, _, _, square, _ = carry
        return square > (tolerance * start) ** 2

    def iterate(carry):
        x, r, direction, square, n = carry
        pushed = product(direction)
        alpha = square / (direction @ pushed)
        x, r = x + alpha * direction, r - alpha * pushed
        new = r @ r
        return x, r, r + new / square * direction, new, n + 1

    start = jnp.sqrt(gradient @ gradient)
    carry = jnp.zeros_like(gradient), -gradient, -gradient, gradient @ gradient, 0
    x, *_, n = loop(unfinished, iterate, carry)
    return x, n


def _python_loop(unfinished, iterate, carry):
    while unfinished(carry):
        carry = iterate(carry)
    return carry


def _flat_residuals(problem: Problem) -> Callable:
    return lambda v, args: problem.residuals(problem.unravel(v), args).ravel()


def _called_by_hand(problem: Problem, tolerance: float) -> Contender:
    """Call a program for each product, so that convolutions stay out of compiled
    loops."""
    residuals = _flat_residuals(problem)

    @jax.jit
    def linearise(v, args):
        r, jvp = jax.linearize(lambda v: residuals(v, args), v)
        return jvp, jax.linear_transpose(jvp, v)(r)[0]

    @jax.jit
    def product(jvp, u):
        return jax.linear_transpose(jvp, u)(jvp(u))[0] + DAMPING * u

    def run():
        jvp, gradient = linearise(problem.flat, problem.args)
        step, n = _conjugate_gradients(
            lambda u: product(jvp, u), gradient, tolerance, _python_loop
        )
        return problem.unravel(problem.flat + step), n

    return Contender(
        LIMIT, "CG, a call a product", run, lambda end: end[0], lambda end: 2 * end[1] + 1
    )


def _looped_by_hand(problem: Problem, tolerance: float) -> Contender:
    residuals = _flat_residuals(problem)

    @jax.jit
    def step(v, args):
        r, jvp = jax.linearize(lambda v: residuals(v, args), v)
        vjp = jax.linear_transpose(jvp, v)
        product = lambda u: vjp(jvp(u))[0] + DAMPING * u
        change, n = _conjugate_gradients(
            product, vjp(r)[0], tolerance, jax.lax.while_loop
        )
        return problem.unravel(v + change), n

    return Contender(
        LIMIT,
        "CG, a compiled loop",
        lambda: step(problem.flat, problem.args),
        lambda end: end[0],
        lambda end: 2 * int(end[1]) + 1,
    )


#
# The libraries
#


def _gnlin(problem: Problem, tolerance: float, method: Any) -> Contender:
    """Take the step by itself. Inside the loop of a whole solve, forming the Jacobian
    would be many times slower, too."""
    solver = gnlin.TruncatedGaussNewton(tolerance, DAMPING, search=None, method=method)
    residuals = gnlin.PerExample(problem.residual)

    @jax.jit
    def step(y, args):
        lin = gnlin.linearise(residuals, y, args)
        state = solver.start(y, jax.eval_shape(lambda: lin.outputs))
        evaluate = lambda y: residuals(y, args)
        return solver.advance(gnlin.authoring.SumOfSquares(), lin, evaluate, state)

    def products(end) -> int:
        counts = end[1].counts
        return int(counts.num_jvps + counts.num_vjps)

    return Contender(
        "gnlin",
        f'TruncatedGaussNewton "{method}"',
        lambda: step(problem.parameters, problem.args),
        lambda end: end[0],
        products,
        "the default" if method == "auto" else "",
    )


def _optimistix(problem: Problem, tolerance: float) -> Contender:
    own = OPTIMISTIX_TOLERANCE * tolerance * len(problem.images) / NUM_IMAGES
    linear_solver = lx.Normal(lx.CG(rtol=own, atol=own))
    solver = optx.LevenbergMarquardt(rtol=0.0, atol=0.0, linear_solver=linear_solver)
    program: Any = eqx.filter_jit(opponents.optimistix_once)
    return Contender(
        "optimistix",
        f"LM, Normal(CG({own:g}, {own:g}))",
        lambda: program(problem.residuals, solver, problem.parameters, problem.args),
        lambda y: y,
        note="its first step: damping 1; products not told",
    )


def _jaxopt(problem: Problem, tolerance: float) -> Contender:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jaxopt._src import levenberg_marquardt
        from jaxopt.linear_solve import solve_cg

    state_of: Any = levenberg_marquardt.LevenbergMarquardtState
    residuals = _flat_residuals(problem)
    solver = levenberg_marquardt.LevenbergMarquardt(
        residuals,
        solver=lambda *a, **kw: solve_cg(*a, **kw, tol=tolerance),
        damping_parameter=DAMPING,
    )

    @jax.jit
    @opponents.promoting
    def step(v, args):
        r, pull_back = jax.vjp(lambda v: residuals(v, args), v)
        (gradient,) = pull_back(r)
        state = state_of(
            iter_num=jnp.array(0),
            damping_factor=jnp.asarray(DAMPING, v.dtype),
            increase_factor=2,
            residual=r,
            value=0.5 * r @ r,
            delta=jnp.zeros_like(v),
            error=jnp.linalg.norm(gradient),
            gradient=gradient,
            jac=None,
            jt=None,
            jtj=None,
            hess_res=None,
            aux=None,
        )
        return solver.update(v, state, args)

    return Contender(
        "jaxopt",
        "LM, CG",
        lambda: step(problem.flat, problem.args),
        lambda end: problem.unravel(problem.flat + end.state.delta),
        note="its start, of p passes, put together by hand; products not told",
    )


def _scipy(problem: Problem, tolerance: float) -> Contender:
    """Call a program for each product. The trust region takes another step."""
    from scipy.optimize import least_squares
    from scipy.sparse import linalg

    operator: Any = linalg.LinearOperator
    residuals = _flat_residuals(problem)
    value = jax.jit(residuals)
    linearise = jax.jit(lambda v, args: jax.linearize(lambda v: residuals(v, args), v)[1])
    push = jax.jit(lambda jvp, u: jvp(u))
    pull = jax.jit(lambda jvp, u: jax.linear_transpose(jvp, problem.flat)(u)[0])
    shape = problem.one_hot.size, problem.flat.size
    single = lambda x: jnp.asarray(np.ravel(x), jnp.float32)
    double = lambda x: np.asarray(x, np.float64)

    def jacobian(v):
        jvp = linearise(single(v), problem.args)
        return operator(
            shape,
            matvec=lambda u: double(push(jvp, single(u))),
            rmatvec=lambda u: double(pull(jvp, single(u))),
            dtype=np.float64,
        )

    def run():
        return least_squares(
            lambda v: double(value(single(v), problem.args)),
            double(problem.flat),
            jacobian,  # pyright: ignore[reportArgumentType]
            method="trf",
            tr_solver="lsmr",
            tr_options={"atol": tolerance, "btol": tolerance},
            max_nfev=2,
        )

    return Contender(
        "SciPy", "trf, lsmr", run, None, note="a call a product; its own trust region"
    )


def _somax(problem: Problem, tolerance: float) -> list[Contender]:
    """Return somax's step if it is installed. Its loss is a mean over images of a sum
    over outputs, so that its damping is scaled accordingly."""
    try:
        somax: Any = importlib.import_module("somax")
    except ImportError:
        return []
    method = somax.sgn_mse(
        predict_fn=lambda y, x: jax.vmap(problem.predict_one, (None, 0))(y, x),
        lam0=DAMPING * NUM_CLASSES / len(problem.images),
        tol=tolerance,
        maxiter=problem.flat.size,
        stabilise_every=0,
        warm_start=False,
    )
    state = method.init(problem.parameters)
    batch = {"x": problem.images, "y": problem.one_hot}
    program = jax.jit(method.step)
    key = jax.random.key(0)

    def products(end) -> int | None:
        told = {k: v for k, v in end[2].items() if "iter" in k and "max" not in k}
        return 2 * int(next(iter(told.values()))) + 1 if told else None

    return [
        Contender(
            "somax",
            "sgn_mse (CG)",
            lambda: program(problem.parameters, batch, state, key),
            lambda end: end[0],
            products,
        )
    ]
