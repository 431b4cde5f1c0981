"""A run whose loss has fallen to the rounding of what the loss subtracts has converged,
and a run that stands still above it has not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin


class Generalised(gnlin.authoring.AbstractLoss):
    """Generalised cross-entropy, (1 - p^q) / q."""

    q: float = 0.7
    reduction: str | None = None

    def value(self, output, target):
        return (1 - jax.nn.softmax(output)[target] ** self.q) / self.q


class Brier(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, output, target):
        p = jax.nn.softmax(output)
        return 1 - 2 * p[target] + jnp.sum(p**2)


class LogCosh(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None

    def elementwise(self, output, target):
        return jnp.log(jnp.cosh(output - target))


class Quartic(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None

    def elementwise(self, output, target):
        return (output - target) ** 4 / 4


class Linear(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None

    def elementwise(self, output, target):
        return -output * target


def solved(loss, dtype, targets):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 2)).astype(dtype)
    labels = rng.integers(0, 3, 24)
    if targets == "values":
        labels = rng.normal(size=(24, 3)).astype(dtype)
    elif targets == "zeros":
        labels = np.zeros((24, 3), dtype)
    model = eqx.nn.MLP(2, 3, 16, 2, jnp.tanh, dtype=dtype, key=jax.random.key(0))
    solution = gnlin.solve(model, (x, labels), loss=loss, max_steps=200)
    outputs = np.asarray(jax.vmap(solution.model)(x), float)
    return solution, outputs, labels


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("loss", "dtype", "power"),
    [
        (Generalised(), float, 1),
        (Generalised(), np.float32, 1),
        (Brier(), float, 0.5),
    ],
)
def test_a_bounded_loss_of_classes_is_solved_to_rounding(loss, dtype, power):
    solution, outputs, labels = solved(loss, dtype, "labels")
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_steps"]) < 200
    odds = np.exp(outputs - outputs[np.arange(24), labels][:, None])
    wrong = np.sum(odds, axis=1) - 1
    assert np.max(wrong) < 20 * float(np.finfo(dtype).eps) ** power


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("targets", ["values", "zeros"])
def test_a_loss_of_values_is_solved_to_rounding(targets):
    solution, outputs, values = solved(LogCosh(), float, targets)
    assert solution.result == optx.RESULTS.successful
    error = np.max(np.abs(outputs - values))
    assert error < 10 * np.finfo(float).eps ** 0.5, "half its square is lost beside 1"


#
# Runs that stand still above that
#


def misled(x, edge):
    """Return x, with a derivative of the wrong sign within an edge of 1."""
    still = jax.lax.stop_gradient(x)
    return still + jnp.where(jnp.abs(still - 1) <= edge, -1, 1) * (x - still)


class Number(eqx.Module):
    x: jax.Array

    def __call__(self, edge):
        return misled(self.x, edge)[None]


def stopped(loss, start, edge, target=1.0, dtype=float):
    data = jnp.asarray([edge], dtype), jnp.asarray([[target]], dtype)
    model = Number(jnp.asarray(start, dtype))
    # The undamped step would jump over the edge at once.
    damping = gnlin.damping.LongestStep(detours=False)
    solver = gnlin.LevenbergMarquardt(damping=damping)
    return gnlin.solve(model, data, solver, loss=loss, max_steps=300)


@pytest.mark.filterwarnings("ignore:`gnlin.solve`")
@pytest.mark.parametrize(
    ("loss", "start", "edge", "dtype"),
    [
        pytest.param(Quartic(), 1e5, 2.0, float, id="bad start", marks=pytest.mark.slow),
        pytest.param(Quartic(), 2.0, 1e-2, float, id="small part of the first loss"),
        pytest.param(
            *(Quartic(), 2.0, 1e-1, np.float32),
            id="single precision",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            gnlin.losses.Cauchy(), 2.0, 1e-6, float, id="robust", marks=pytest.mark.slow
        ),
        pytest.param(gnlin.SquaredError(), 2.0, 1e-9, float, id="squared error"),
    ],
)
def test_a_run_that_stands_still_with_something_to_gain_has_not_converged(
    loss, start, edge, dtype
):
    solution = stopped(loss, start, edge, dtype=dtype)
    assert solution.result == optx.RESULTS.stagnation
    assert 0 < abs(float(solution.model.x) - 1) <= edge
    first = float(loss.value(jnp.asarray(start), jnp.asarray(1.0)))
    part = float(solution.loss) / first
    eps = float(np.finfo(dtype).eps)
    assert part < 1e-3
    quadratic, far = isinstance(loss, gnlin.SquaredError), start > 1e3
    assert (part < eps) == (quadratic or far)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gnlin.solve`")
@pytest.mark.filterwarnings("ignore:The loss `Linear` has no curvature")
def test_a_loss_that_starts_at_zero_and_falls_without_a_limit_has_not_converged():
    solution = stopped(Linear(), 0.0, 3.0)
    assert solution.result != optx.RESULTS.successful


def moved_by(pose, points):
    """Rotate by the pose's first three numbers (Rodrigues), and shift by the others."""
    angle = jnp.linalg.norm(pose[:3])
    axis = pose[:3] / angle

    def each(point):
        turned = jnp.cos(angle) * point + jnp.sin(angle) * jnp.cross(axis, point)
        return turned + (1 - jnp.cos(angle)) * (point @ axis) * axis + pose[3:]

    return jax.vmap(each)(points)


def planes(dtype):
    """Points on an ellipsoid, to be moved onto the planes that touch its image."""
    rng = np.random.default_rng(5)
    points = rng.normal(size=(500, 3))
    points *= np.array([1, 0.7, 0.4]) / np.linalg.norm(points, axis=1)[:, None]
    normals = points / np.array([1, 0.49, 0.16])
    normals /= np.linalg.norm(normals, axis=1)[:, None]
    pose = jnp.array([0.5, -0.3, 0.4, 0.9, -0.8, 0.7])
    image = moved_by(pose, jnp.asarray(points))
    normals = moved_by(pose, jnp.asarray(normals)) - pose[3:][None]
    points, image, normals = (jnp.asarray(x, dtype) for x in (points, image, normals))
    misfit = lambda y, _: jnp.sum((moved_by(y, points) - image) * normals, axis=1)
    return misfit, pose.astype(dtype)


AXES = (
    [gnlin.GaussNewton, gnlin.LevenbergMarquardt],
    [1.0, 1e6],
    [np.float32, np.float64],
)


@pytest.mark.parametrize(
    ("kind", "unit", "dtype"),
    [
        # Two of the cases, in which each value occurs
        pytest.param(
            *case, marks=() if odd in ((0, 1, 0), (1, 0, 1)) else pytest.mark.slow
        )
        for odd in np.ndindex(2, 2, 2)
        for case in [[axis[i] for axis, i in zip(AXES, odd, strict=True)]]
    ],
)
def test_runs_that_start_at_an_exact_solution_converge(kind, unit, dtype):
    misfit, pose = planes(dtype)
    in_units = lambda y, args: misfit(y * jnp.asarray(unit, dtype), args)
    y = (pose + 0.01) / jnp.asarray(unit, dtype)
    for k in range(4):
        found = optx.least_squares(in_units, kind(), y, throw=False, max_steps=50)
        assert found.result == optx.RESULTS.successful
        y = found.value
        # The exact pose is known.
        error = np.abs(np.asarray(y, float) * unit - np.asarray(pose, float))
        assert np.max(error) < 20 * np.finfo(dtype).eps
        assert k == 0 or found.stats["num_steps"] <= 3


def test_a_group_below_the_rounding_of_the_whole_loss_converges():
    """In single precision the loss of the large group hides what the small one gains."""
    x = jnp.linspace(0, 1, 50, dtype=jnp.float32)
    noise = np.random.default_rng(0).normal(size=50)
    groups = {
        "small": gnlin.Residuals(lambda p, x: jnp.exp(p["a"] * x) - jnp.exp(0.7 * x), x),
        "large": gnlin.Residuals(
            lambda p, y: p["b"] - y, jnp.asarray(1000 * noise, jnp.float32)
        ),
    }
    start = {"a": jnp.float32(0), "b": jnp.float32(0)}
    solution = gnlin.solve(start, groups)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.model["a"], 0.7, rtol=1e-5)
