"""JAX promotes neither dtypes nor ranks in these tests, as in the tests of optimistix."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from problems import each_once

import gnlin


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


descent = gnlin.IterativeLinearisation(10**6, 1e-2)
solvers = {
    "Gauss-Newton": gnlin.GaussNewton(),
    "filtered": gnlin.methods.FilteredGaussNewton(
        gnlin.filters.HeavyBall(100, 1e-2, 0.9)
    ),
    "damped": gnlin.DampedGaussNewton(0.1),
    "truncated": gnlin.TruncatedGaussNewton(0.1, 0.1),
    "Levenberg-Marquardt": gnlin.LevenbergMarquardt(),
    "iterative": descent,
}


@pytest.mark.parametrize(
    ("name", "dtype"), each_once(list(solvers), [jnp.float32, jnp.float64])
)
def test_least_squares(name, dtype):
    def fn(y, x):
        return y["a"] * jnp.exp(-y["rates"][0] * x) - jnp.cos(y["rates"][1] * x)

    y = {"a": jnp.ones((), dtype), "rates": jnp.ones(2, dtype)}
    x = jnp.linspace(0, 1, 5, dtype=dtype)
    # Tracing finds what does not fit, so nothing need be compiled.
    value = eqx.filter_eval_shape(
        lambda y: optx.least_squares(fn, solvers[name], y, args=x).value, y
    )
    assert jax.tree.map(lambda v: v.dtype, value) == {"a": dtype, "rates": dtype}


class OwnLoss(gnlin.authoring.AbstractLoss):
    reduction: str = "sum"

    def value(self, outputs, target):
        return jax.nn.logsumexp(outputs) - outputs[target]


class OwnElementwiseLoss(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str = "mean"

    def elementwise(self, output, target):
        return (output - target) ** 4 / 4


LABELS = jnp.array([0, 2, 1, 1, 0, 2], jnp.int32)
NUMBERS = jnp.linspace(0, 1, 18).reshape(6, 3)
EXACT = gnlin.DampedGaussNewton(0.1, method="matrix-free")

# Each loss with another way to solve: `(loss, targets, solver)`
problems = {
    "squared error": (
        gnlin.SquaredError("mean"),
        NUMBERS,
        gnlin.DampedGaussNewton(0.1, method="svd"),
    ),
    "softmax": (
        gnlin.SoftmaxCrossEntropy(label_smoothing=0.1, ignore_index=-1),
        LABELS,
        gnlin.LevenbergMarquardt(form="prox-linear", scaling="identity"),
    ),
    "weighted softmax": (
        gnlin.SoftmaxCrossEntropy(class_weights=np.array([1.0, 2.0, 3.0])),
        LABELS.astype(jnp.int64),
        gnlin.TruncatedGaussNewton(
            gnlin.methods.EisenstatWalker(),
            optax.cosine_decay_schedule(1.0, 10),
            search=optx.BacktrackingArmijo(),
            preconditioner=gnlin.preconditioners.BlockDiagonal(),
        ),
    ),
    "probabilities": (
        gnlin.SoftmaxCrossEntropy(),
        NUMBERS,
        gnlin.TruncatedGaussNewton(
            0.1, 0.1, preconditioner=gnlin.preconditioners.Nystrom(rank=3)
        ),
    ),
    "sigmoid": (
        gnlin.SigmoidCrossEntropy(),
        NUMBERS,
        gnlin.IterativeLinearisation(10, optimiser=optax.adam(1e-3)),
    ),
    "Poisson": (
        gnlin.losses.PoissonNLL(),
        jnp.arange(18).reshape(6, 3),
        gnlin.LevenbergMarquardt(),
    ),
    "Huber": (
        gnlin.losses.Huber(),
        NUMBERS,
        gnlin.TruncatedGaussNewton(0.1, 0.1, form="prox-linear"),
    ),
    "pseudo-Huber": (
        gnlin.losses.PseudoHuber(0.5),
        NUMBERS,
        gnlin.DampedGaussNewton(0.1, scaling="more"),
    ),
    "log-cosh": (
        gnlin.losses.LogCosh(),
        NUMBERS,
        gnlin.DampedGaussNewton(0.1),
    ),
    "Cauchy": (
        gnlin.losses.Cauchy(),
        NUMBERS,
        gnlin.DampedGaussNewton(0.1, method=gnlin.methods.NystromKernel(4)),
    ),
    "of one's own": (OwnLoss(), LABELS, EXACT),
    "of one's own, elementwise": (
        OwnElementwiseLoss(),
        NUMBERS,
        gnlin.IterativeLinearisation(math.inf, 1e-2, 0.9, nesterov=True, damping=0.1),
    ),
}


class Network(eqx.Module):
    hidden: jax.Array
    bias: jax.Array
    out: jax.Array

    def __init__(self, dtype, out_dtype=None):
        hidden, out = np.linspace(-1, 1, 8), np.linspace(1, -1, 12)
        self.hidden = jnp.asarray(hidden.reshape(4, 2), dtype)
        self.bias = jnp.zeros(4, dtype)
        self.out = jnp.asarray(out.reshape(3, 4), out_dtype or dtype)

    def __call__(self, x):
        h = jnp.tanh(self.hidden @ x.astype(self.hidden.dtype) + self.bias)
        return self.out @ h.astype(self.out.dtype)


def traced(model, data, solver, loss):
    """Return the model that `solve` would return, without running it."""
    solution = eqx.filter_eval_shape(gnlin.solve, model, data, solver, loss=loss)
    return solution.model


# Their losses and solvers are alike to those of others.
SLOW = "probabilities", "sigmoid", "Huber", "pseudo-Huber", "log-cosh", "Cauchy"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in problems],
)
def test_losses(name):
    # Models in single precision; data, hyperparameters and weights in double.
    loss, targets, solver = problems[name]
    model = Network(jnp.float32)
    inputs = jnp.linspace(-1, 1, 12).reshape(6, 2)
    found = traced(model, (inputs, targets, jnp.arange(6)), solver, loss)
    assert eqx.tree_equal(found, eqx.filter_eval_shape(lambda: model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(gnlin.LevenbergMarquardt(), id="Levenberg-Marquardt"),
        pytest.param(
            gnlin.DampedGaussNewton(jnp.array(0.1), method="kernel"), id="kernel"
        ),
        pytest.param(
            gnlin.TruncatedGaussNewton(
                jnp.array(0.1),
                jnp.array(0.1, jnp.float32),
                search=optx.BacktrackingArmijo(),
                method="matrix-free",
            ),
            id="truncated",
        ),
        pytest.param(
            gnlin.IterativeLinearisation(jnp.array(10), jnp.array(1e-2), jnp.array(0.9)),
            id="iterative",
        ),
        pytest.param(gnlin.DampedGaussNewton(0.1, form="prox-linear"), id="prox-linear"),
    ],
)
def test_parameters_of_both_precisions(solver):
    loss = gnlin.losses.PoissonNLL()

    class Both(eqx.Module):
        a: Network
        b: Network

        def __call__(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    model = Both(Network(jnp.float32), Network(jnp.float64, jnp.float32))
    inputs = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(6, 2)
    found = traced(model, (inputs, {"a": NUMBERS, "b": NUMBERS}), solver, loss)
    assert eqx.tree_equal(found, eqx.filter_eval_shape(lambda: model))


@pytest.mark.slow
def test_bounds_of_parameters_of_both_precisions():
    solver = gnlin.LevenbergMarquardt(bounds=(0.0, 2.5))
    start = {"a": jnp.ones((), jnp.float32), "rate": jnp.ones((), jnp.float64)}
    x = jnp.linspace(0.0, 1.0, 20)

    def misfit(y, _):
        return y["a"].astype(x.dtype) * jnp.exp(-y["rate"] * x) - 2 * jnp.exp(-3 * x)

    found = optx.least_squares(misfit, solver, start).value
    assert found["rate"] == 2.5
    curve = jnp.exp(-2.5 * x)
    expected = 2 * jnp.vdot(curve, jnp.exp(-3 * x)) / jnp.vdot(curve, curve)
    np.testing.assert_allclose(found["a"], expected, rtol=1e-6)


def test_a_solution_does_not_depend_on_promotion():
    model = Network(jnp.float64)
    data = jnp.linspace(-1, 1, 12).reshape(6, 2), NUMBERS

    def loss():
        solution = gnlin.solve(model, data, gnlin.GaussNewton(), max_steps=3)
        return solution.history.loss

    found = loss()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(found, loss())


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(gnlin.LevenbergMarquardt(), marks=pytest.mark.slow),
        gnlin.IterativeLinearisation(2, optimiser=optax.adam(1e-2)),
    ],
    ids=["Levenberg-Marquardt", "iterative"],
)
def test_fit(solver):
    inputs = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(6, 2)
    result = gnlin.fit(
        Network(jnp.float32),
        (inputs, LABELS),
        solver,
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=3,
        epochs=2,
        validation=(inputs, LABELS),
        metrics={"accuracy": gnlin.losses.accuracy},
        progress=False,
    )
    assert result.result == optx.RESULTS.nonlinear_max_steps_reached
    assert result.model.hidden.dtype == jnp.float32


def test_a_resumed_run(tmp_path):
    # Arrays from a file do not have JAX's weak types.
    data = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(6, 2), LABELS
    solver = gnlin.IterativeLinearisation(2, 1e-2)
    settings = {
        "loss": gnlin.SoftmaxCrossEntropy(),
        "batch_size": 3,
        "progress": False,
        "checkpoint": tmp_path,
    }
    gnlin.fit(Network(jnp.float32), data, solver, steps=2, **settings)
    result = gnlin.fit(
        Network(jnp.float32), data, solver, steps=4, resume=True, **settings
    )
    assert len(result.history["loss"]) == 4


def test_features():
    model, other = Network(jnp.float32), Network(jnp.float64)
    inputs = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(6, 2)

    def measured():
        a, b = (gnlin.TangentKernel(m)(inputs) for m in (model, other))
        return (
            gnlin.features.kernel_alignment(a, b),
            gnlin.features.target_alignment(a, LABELS),
            gnlin.features.parameter_distance(model, other),
        )

    assert all(0 <= float(x) <= 1 for x in measured())
