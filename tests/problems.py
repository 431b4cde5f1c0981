"""Small problems in JAX and in NumPy with Jacobians by hand, and literal solver steps."""

import importlib.util
from pathlib import Path
from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx

import gnlin


EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SHAPES = {
    "tall": (7, 3),
    "wide": (3, 7),
    "square": (4, 4),
    "one residual": (1, 3),
    "one parameter": (5, 1),
}


class Linear(gnlin.authoring.AbstractElementwiseLoss):
    """A log-likelihood that the model returns, without curvature."""

    reduction: str | None = None

    def elementwise(self, output, target):
        return -output


class Scores(Linear):
    """Fisher's information, estimated by the outer products of the scores."""

    def root(self, output, target):
        return jnp.ones_like(output)


def decay(p, x):
    """A curve of the parameters `a`, `c` and `rate`."""
    return p["a"] * jnp.exp(-p["rate"] * x) + p["c"]


def decay_numpy(x, a, c, rate):
    return a * np.exp(-rate * x) + c


def equations(jaxpr):
    """Yield all equations of a program, including nested ones."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def each_once(*axes):
    """Return the fewest cases in which each value of each axis occurs. Use it in
    `parametrize` if the axes are independent."""
    number = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(number)]


def each_pair(first, second, *others):
    """Return all pairs of the first two axes, and cycle through the values of the others.
    Each pair of values of any two axes occurs if the first two axes are the longest."""
    return [
        (a, b, *(axis[(i + j) % len(axis)] for axis in others))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def sines(y, args):
    """sin(A y) - b: residuals with curvature, at any shape."""
    a, b = args
    return jnp.sin(a @ y.astype(a.dtype)) - b


def sines_numpy(y, args):
    """(residuals, Jacobian) of `sines`."""
    a, b = args
    return np.sin(a @ y) - b, np.cos(a @ y)[:, None] * a


def sines_data(shape, seed=0, size=0.5):
    """(y0, (A, b)) as NumPy arrays."""
    generator = np.random.default_rng(seed)
    m, p = shape
    a = size * generator.normal(size=(m, p))
    return generator.normal(size=p), (a, generator.normal(size=m))


def linear(y, args):
    a, b = args
    return a @ y - b


def deficient(shape, rank, seed=3):
    """A linear problem of the given rank, as (y0, (A, b))."""
    generator = np.random.default_rng(seed)
    m, p = shape
    a = generator.normal(size=(m, rank)) @ generator.normal(size=(rank, p))
    return generator.normal(size=p), (a, generator.normal(size=m))


def rosenbrock(y, args):
    return jnp.stack([10 * (y[1] - y[0] ** 2), 1 - y[0]])


def powell_singular(y, args):
    return jnp.stack(
        [
            y[0] + 10 * y[1],
            jnp.sqrt(5.0) * (y[2] - y[3]),
            (y[1] - 2 * y[2]) ** 2,
            jnp.sqrt(10.0) * (y[0] - y[3]) ** 2,
        ]
    )


def as_jax(tree, dtype=float):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


@eqx.filter_jit
def least_squares(fn, solver, y0, args=None, max_steps=256, **kwargs):
    """Call `optimistix.least_squares`; compile once per kind of solver and shape of
    data."""
    return optx.least_squares(
        fn, solver, y0, args, max_steps=max_steps, throw=False, **kwargs
    )


def numbers(tree):
    """Return the arrays of a tree as one vector, by NumPy, which compiles nothing."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def drawn(kind, *sizes, dtype=float, **options):
    """Return a model whose parameters are drawn by NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.uniform(-0.6, 0.6, x.shape), dtype)
    model = eqx.filter_eval_shape(
        lambda key: kind(*sizes, **options, key=key), jax.random.key(0)
    )
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: draw(x) if is_shape(x) else x, model)


def half_squares(r):
    return 0.5 * float(r @ r)


#
# Literal steps, from the residuals and the dense Jacobian
#


def gauss_newton_step(r, jacobian, rcond=1e-12):
    return -np.linalg.pinv(jacobian, rcond=rcond) @ r


def damped_step(r, jacobian, damping, scale=None):
    """Solve the augmented least-squares problem, which squares no condition number."""
    p = jacobian.shape[1]
    scale = np.ones(p) if scale is None else scale
    augmented = np.concatenate([jacobian, np.sqrt(damping) * np.diag(scale)])
    return -np.linalg.lstsq(augmented, np.concatenate([r, np.zeros(p)]), rcond=None)[0]


def descent_step(r, jacobian, period, learning_rate, momentum=0.0):
    """`period` literal steps of (heavy-ball) gradient descent on the linearised model."""
    delta = np.zeros(jacobian.shape[1])
    velocity = np.zeros_like(delta)
    for _ in range(period):
        gradient = jacobian.T @ (r + jacobian @ delta)
        velocity = momentum * velocity - learning_rate * gradient
        delta = delta + velocity
    return delta


def truncated_step(r, jacobian, tolerance, damping=0.0):
    """(step, number of iterations) of the textbook's conjugate gradients."""
    gradient = jacobian.T @ r
    delta = np.zeros_like(gradient)
    residual = direction = -gradient
    for k in range(100 * len(gradient) + 1):
        if np.linalg.norm(residual) <= tolerance * np.linalg.norm(gradient):
            return delta, k
        product = jacobian.T @ (jacobian @ direction) + damping * direction
        alpha = residual @ residual / (direction @ product)
        delta = delta + alpha * direction
        new = residual - alpha * product
        direction = new + (new @ new) / (residual @ residual) * direction
        residual = new
    raise AssertionError("The textbook's iteration has not ended.")


def literal_loop(step, y, args, num_steps, numpy_fn=sines_numpy):
    """Make `num_steps` updates by `step(r, J, k)`."""
    for k in range(num_steps):
        y = y + step(*numpy_fn(y, args), k)
    return y


def updated(optimiser, gradient, state, parameters=None):
    """Apply an optax update; optax's own arithmetic mixes its count with floats."""
    with jax.numpy_dtype_promotion("standard"):
        return optimiser.update(gradient, state, parameters)


def num_compiled(call):
    """Count the programs that a call compiles."""
    names = []

    def note(name, *_, **__):
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return sum("backend_compile" in name for name in names)


def interrupt_at_second_call(monkeypatch):
    """Press Ctrl-C when `gnlin.solve` shows its progress for the second time. Return the
    numbers of steps that are shown."""
    shown = []

    def show(bar, step, loss):
        shown.append(int(step))
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(gnlin._common._progress.Bar, "show", show)
    return shown


def example(name: str) -> ModuleType:
    """Return a script of `docs/examples` as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
