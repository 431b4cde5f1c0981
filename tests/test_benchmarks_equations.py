"""Differential equations: exact and independent reference solutions leave no
residuals."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from benchmarks import equations
from benchmarks.equations import EQUATIONS, flow, InSlabs
from benchmarks.equations.burgers import LOW_VISCOSITY, VISCOSITY
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import equations as experiment


IN_CLOSED_FORM = [name for name in EQUATIONS if name not in ("kdv", "ks", "cavity")]


def exact(equation):
    """Return the exact solution as a function of one point."""
    return lambda x: jnp.asarray(equation.solution(x[None]))[0]


def solved(equation):
    """Return the exact solution as a model."""
    if equation.coefficient is None:
        return exact(equation)
    return {"u": exact(equation), "coefficient": equation.coefficient}


def groups_of(equation, number):
    """Return the residual groups, of the first slab if there are several."""
    if equation.slabs:
        return equation.groups(number, equation.slabs[1])
    return equation.groups(number)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CLOSED_FORM)
def test_the_exact_solution_leaves_no_residuals(name):
    equation = EQUATIONS[name]
    groups = groups_of(equation, 64)

    def residuals(data):
        model = solved(equation)
        of = lambda group: jax.vmap(lambda x: group.fn(model, x))
        return {kind: of(groups[kind])(x) for kind, x in data.items()}

    data = {kind: group.data for kind, group in groups.items()}
    for kind, each in jax.jit(residuals)(data).items():
        assert np.abs(each).max() < 1e-9, kind
    assert equation.error(solved(equation)) == 0
    assert equation.coefficient_error(solved(equation)) == 0


@pytest.mark.parametrize("name", EQUATIONS)
def test_points_are_where_they_belong(name):
    equation = EQUATIONS[name]
    groups = groups_of(equation, 64)
    low, high = np.array(equation.axes).T
    for group in groups.values():
        x = np.asarray(group.data["x"] if isinstance(group.data, dict) else group.data)
        assert np.all((low <= x) & (x <= high))
    assert len(groups["interior"].data) == 64
    if "boundary" in groups:
        x = np.asarray(groups["boundary"].data)
        assert np.all(np.any((x == low) | (x == high), axis=1))
    if "start" in groups:
        start = groups["start"].data
        start = np.asarray(start["x"] if isinstance(start, dict) else start)
        assert np.all(start[:, 0] == 0)
        ends = groups.get("ends", groups.get("walls"))
        if ends is not None:
            assert np.all(np.isin(np.asarray(ends.data)[:, 1], equation.axes[1]))


@pytest.mark.parametrize("name", IN_CLOSED_FORM)
def test_the_error_is_relative(name):
    equation = EQUATIONS[name]
    model = solved(equation)
    off = lambda x: 1.01 * exact(equation)(x)
    model = {**model, "u": off} if isinstance(model, dict) else off
    np.testing.assert_allclose(equation.error(model), 0.01, rtol=1e-9)


def test_derivatives_match_the_hessian():
    net = EQUATIONS["poisson-5d"].model((7, 6), jax.random.key(0))
    x = jnp.linspace(0.1, 0.9, 5)

    @jax.jit
    def run(x):
        mixed = equations.along(equations.along(net, 1), 3)(x)
        return jax.hessian(net)(x), equations.laplacian(net, x), mixed

    hessian, laplacian, mixed = run(x)
    np.testing.assert_allclose(laplacian, np.trace(hessian))
    np.testing.assert_allclose(mixed, hessian[1, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "linear", "speed", "num_modes", "end"),
    [
        ("burgers", lambda k: -VISCOSITY * k**2, 1.0, 128, 0.3),
        ("burgers-periodic", lambda k: -LOW_VISCOSITY * k**2, 1.0, 256, 0.3),
        ("kdv", lambda k: 1j * 0.022**2 * k**3, 1.0, 256, 0.2),
        ("ks", lambda k: 100 / 16**2 * k**2 - 100 / 16**4 * k**4, 100 / 16, 192, 0.06),
    ],
)
def test_evolutions_match_the_method_of_lines(name, linear, speed, num_modes, end):
    """Solve the first part of the time in Fourier modes, integrated by SciPy."""
    equation, n = EQUATIONS[name], num_modes
    low, high = equation.axes[1]
    wave = 2 * np.pi / (high - low) * np.arange(n // 2 + 1)
    x = low + (high - low) * np.arange(n) / n
    start = np.asarray(equation.solution(equations.grid(np.zeros(1), x)))

    def slope(t, u):
        square = np.fft.rfft(u**2) * (wave <= wave[-1] * 2 / 3)
        return np.fft.irfft(
            linear(wave) * np.fft.rfft(u) - 0.5j * speed * wave * square, n
        )

    times = np.array([end / 3, end])
    tight = {"rtol": 1e-9, "atol": 1e-11, "method": "DOP853"}
    found = solve_ivp(slope, (0, end), start, t_eval=times, **tight).y.T
    solution = np.asarray(equation.solution(equations.grid(times, x))).reshape(2, n)
    np.testing.assert_allclose(found, solution, atol=1e-6)


def test_the_flow_in_the_cavity_has_converged():
    """Compare away from the corners of the lid, where the velocity is not smooth."""
    points = np.random.default_rng(0).uniform(0.1, 0.7, (50, 2))
    coarse, fine = (flow.driven(points, number) for number in (18, 24))
    np.testing.assert_allclose(coarse, fine, atol=1e-4)
    lid = np.stack([np.linspace(0, 1, 9), np.ones(9)], axis=1)
    moving = 4 * lid[:, 0] * (1 - lid[:, 0])
    np.testing.assert_allclose(flow.driven(lid, 24)[:, 0], moving, atol=1e-12)


def test_the_cavity_conserves_mass():
    """As much flows up as down; this does not use the stream function."""
    x = np.linspace(0, 1, 201)
    velocity = flow.driven(np.stack([x, np.full_like(x, 0.5)], axis=1), 24)
    assert abs(np.trapezoid(velocity[:, 1], x)) < 1e-5
    assert np.abs(velocity[:, 1]).max() > 0.05


def test_the_pressure_does_not_count():
    cavity = dataclasses.replace(
        EQUATIONS["cavity"], solution=lambda points: flow.driven(points, 8)
    )
    at_rest = lambda pressure: lambda x: jnp.array([0.0, 0.0, pressure])
    assert cavity.error(at_rest(3.0)) == 1
    assert cavity.distance(at_rest(3.0), at_rest(1.0)) == 0
    moving = lambda x: jnp.array([0.1, 0.0, 0.0])
    one, two = (
        cavity.distance(moving, at_rest(1.0)),
        cavity.distance(at_rest(1.0), moving),
    )
    assert one == two > 0


def test_networks_of_slabs_follow_one_another():
    networks = tuple(lambda x, k=k: 10.0 * k + x[0] for k in range(3))
    whole = InSlabs(networks, (0.0, 0.5, 0.75))
    at = lambda t: float(whole(jnp.array([t, 0.3])))
    np.testing.assert_allclose([at(0.0), at(0.25), at(0.5)], [0.0, 0.25, 10.0])
    np.testing.assert_allclose([at(0.7), at(0.75), at(1.0)], [10.2, 20.0, 20.25])


def test_an_unknown_coefficient_is_a_part_of_the_model():
    equation = EQUATIONS["conductivity"]
    model = equation.model((3,), jax.random.key(0))
    assert eqx.is_inexact_array(model["coefficient"])
    np.testing.assert_allclose(equation.coefficient_error(model), 3.0)


#
# The experiment
#


@pytest.mark.slow
def test_a_run_continues_from_slab_to_slab():
    size = experiment.Size((4,), 32, 4)
    settings = dataclasses.replace(
        experiment.QUICK, seeds=1, sizes={"wave": size}, num_looks=2
    )
    point = {"equation": "wave"}
    runs = Runs(point, experiment.train(settings, point, Place()))
    assert runs["error"].shape == (1, 4)  # two looks at each of two slabs
    np.testing.assert_array_equal(runs["steps"], [[2, 4, 6, 8]])
    assert np.all(np.diff(runs["seconds"], axis=1) > 0)
    assert np.all((runs["final_error"] > 0) & (runs["final_error"] < 10))
    assert runs["u"].shape == (1, experiment.SIDE**2, 1)


@pytest.mark.slow
def test_errors_are_estimated_without_a_reference():
    size = experiment.Size((8, 8), 64, 12)
    settings = dataclasses.replace(
        experiment.QUICK, seeds=1, sizes={"heat": size}, num_looks=2
    )
    point = {"equation": "heat"}
    runs = Runs(point, experiment.train(settings, point, Place()))
    error, estimate = runs["final_error"], runs["estimated_error"]
    np.testing.assert_allclose(estimate, error, rtol=0.1)
    assert runs["corrected_error"] < 0.1 * error
    columns = {k: np.repeat(column, 2, axis=0) for k, column in runs.columns.items()}
    columns["estimated_error"] = error * np.array([0.1, 0.11])
    columns["corrected_error"] = error * np.array([0.1, 0.11])
    verdicts = experiment.judge_all(settings, [Runs(point, columns)])
    assert [v.outcome for v in verdicts[1:]] == ["refuted", "confirmed"]


def test_sizes_that_were_read_from_a_file():
    tiny = experiment.TINY["heat"]
    read = [list(tiny.hidden), *tiny[1:]]
    assert experiment._described("heat", read) == experiment._described("heat", tiny)


@pytest.mark.slow
def test_its_verdicts_and_figures(tmp_path):
    """On runs that are made up, of two seeds and with a look at each of two slabs."""
    sizes, point = {"wave": experiment.Size((4,), 32, 4)}, {"equation": "wave"}
    settings = dataclasses.replace(experiment.QUICK, sizes=sizes)
    two = np.array([1.0, 1.1])
    for outcome, end in {"confirmed": 1e-9, "refuted": 1e-2}.items():
        ends = {"estimated_error": end * two, "corrected_error": 0.1 * end * two}
        looks = {name: np.outer(two, [0.1, 0.2]) for name in ("seconds", "error")}
        u = np.cos(np.arange(2.0 * experiment.SIDE**2)).reshape(2, -1, 1)
        runs = Runs(point, {"final_error": end * two, "u": u, **ends, **looks})
        assert experiment.judge_all(settings, [runs])[0].outcome == outcome
    captions = experiment.draw(settings, [runs], tmp_path)
    assert ", 2 slabs)" in captions["equations"]
    for name in captions:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
