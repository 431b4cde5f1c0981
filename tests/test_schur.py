"""Eliminated parameters: the steps of the dense system, solved by NumPy."""

import dataclasses
import runpy
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin._jacobian import AtOnce, PerExample, PerGroup, Selected
from gnlin._linearisation._quadratic import Quadratic
from gnlin._solver import _levenberg_marquardt
from gnlin._subproblem import _schur, choose
from gnlin._subproblem._schur import SchurComplement
from gnlin.filters import GradientDescent, Tikhonov


NONE = jnp.zeros(0, int)
FIRST = jnp.zeros(1, int)


def sight(y, example):
    place, lens = y["point"] * y["lens"][0], y["lens"][0]
    found = jnp.sin(y["camera"][:2] + place) * jnp.cos(y["camera"][2] * lens)
    return {"all": found - example["at"], "far": jnp.sum(place**2)}


def near(y, _):
    return jnp.sin(y["camera"] * jnp.append(y["point"], 1.0)[None]).sum()


def known(y, _):
    return 0.3 * y["camera"] ** 2


GROUPS = {
    "sights": (
        sight,
        lambda x: {"camera": x["camera"], "lens": FIRST, "point": x["point"]},
    ),
    "pairs": (
        near,
        lambda x: {"camera": x["camera"], "lens": NONE, "point": x["point"]},
    ),
    "cameras": (known, lambda k: {"camera": k, "lens": NONE, "point": NONE}),
}


def problem(num_cameras=4, num_points=7, seen=23, dtype=jnp.float64):
    """Cameras observe points through one lens; some points are seen often and some never.
    Others link two cameras, which may be the same one. There are priors on cameras."""
    rng = np.random.default_rng(0)
    often = np.minimum(rng.geometric(0.3, seen) - 1, num_points - 1)
    model = {
        "camera": rng.normal(size=(num_cameras, 3)),
        "lens": rng.normal(size=(1, 2)),
        "point": rng.normal(size=(num_points, 2)),
    }
    data = {
        "sights": {
            "camera": rng.integers(0, num_cameras, seen),
            "point": often,
            "at": rng.normal(size=(seen, 2)).astype(dtype),
        },
        "pairs": {
            "camera": rng.integers(0, num_cameras, (5, 2)),
            "point": rng.integers(0, num_points, 5),
        },
        "cameras": np.arange(num_cameras),
    }
    model = jax.tree.map(lambda x: jnp.asarray(x, dtype), model)
    return model, jax.tree.map(jnp.asarray, data)


def linearised(model, data, names=tuple(GROUPS)):
    fns = {name: Selected(*GROUPS[name]) for name in names}
    each = {name: data[name] for name in names}
    return gnlin.linearise(PerGroup(fns), model, each)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def dense(matrix, outputs, rest=None):
    """(J, gradient) in double precision."""
    jacobian = np.asarray(matrix, float)
    gradient = jacobian.T @ flat(outputs)
    return jacobian, gradient if rest is None else gradient + flat(rest)


def test_the_oracle_itself():
    """The matrix is the Jacobian of the function of all parameters."""
    model, data = problem()
    point, unravel = jax.flatten_util.ravel_pytree(model)

    def everything(v):
        of_all = lambda name: jax.vmap(lambda e: Selected(*GROUPS[name])(unravel(v), e))
        found = {name: of_all(name)(data[name]) for name in GROUPS}
        return jax.flatten_util.ravel_pytree(found)[0]

    known = jax.jit(jax.jacfwd(everything))(point)
    found = jax.jit(lambda model, data: linearised(model, data).matrix())(model, data)
    np.testing.assert_allclose(found, known, atol=1e-12)


ALL = tuple(GROUPS)


@pytest.mark.parametrize(
    ("sizes", "names", "dtype", "with_rest", "window"),
    [
        ((4, 7, 23), ALL, jnp.float64, True, 3),
        # wide: most are not seen
        pytest.param(
            *((6, 30, 9), ("sights",), jnp.float32, True, 2**12), marks=pytest.mark.slow
        ),
        # one point
        pytest.param(
            *((2, 1, 1), ("pairs", "sights"), jnp.float64, False, 2**12),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_are_those_of_the_dense_system(
    sizes, names, dtype, with_rest, window, monkeypatch
):
    monkeypatch.setattr(_schur, "_PAIRS", window)
    model, data = problem(*sizes, dtype=dtype)
    rest = jax.tree.map(jnp.cos, model) if with_rest else None
    dampings = 1e-2, 1.0, 1e3

    @jax.jit
    def steps(model, data, rest):
        lin = linearised(model, data, names)
        quadratic = Quadratic(lin.jacobian, lin.outputs, rest)
        ready = choose(quadratic, Tikhonov(1.0), method="schur")
        assert isinstance(ready, SchurComplement)
        again = ready.with_residual(jax.tree.map(jnp.sin, lin.outputs))
        damped = lambda x: ready.solve(Tikhonov(x)).step
        each = jax.lax.map(damped, jnp.array(dampings, dtype))
        curvatures = ready.largest_curvature(), ready.curvature_along_gradient()
        answers = each, again.solve(Tikhonov(1.0)).step, ready.gradient(), curvatures
        return lin.matrix(), lin.outputs, answers

    tolerance = 2e-3 if dtype == jnp.float32 else 1e-10
    matrix, outputs, answers = steps(model, data, rest)
    each, of_another, found, (largest, along) = answers
    jacobian, gradient = dense(matrix, outputs, rest)
    damped = lambda x: jacobian.T @ jacobian + x * np.eye(len(gradient))
    np.testing.assert_allclose(flat(found), gradient, rtol=tolerance, atol=tolerance)
    assert each["point"].dtype == dtype
    for i, damping in enumerate(dampings):
        step = jax.tree.map(lambda x, i=i: x[i], each)
        expected = -np.linalg.solve(damped(damping), gradient)
        size = np.linalg.norm(expected)
        np.testing.assert_allclose(flat(step), expected, atol=tolerance * size)
    expected = -np.linalg.solve(damped(1.0), jacobian.T @ np.sin(flat(outputs)))
    size = np.linalg.norm(expected)
    np.testing.assert_allclose(flat(of_another), expected, atol=tolerance * size)
    np.testing.assert_allclose(largest, np.max((jacobian**2).sum(0)), rtol=tolerance)
    pushed = np.linalg.norm(jacobian @ gradient) / np.linalg.norm(gradient)
    np.testing.assert_allclose(along, pushed**2, rtol=tolerance)


def groups(data, **options):
    return {
        name: gnlin.Residuals(fn, data[name], select=select, **options)
        for name, (fn, select) in GROUPS.items()
    }


@pytest.mark.slow
def test_a_small_damping_in_single_precision():
    """A parameter of each row hardly matters: its curvature is 1e-5 of the other's."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(60, 3)).astype(np.float32)
    data = {"b": draws[:, :2], "y": draws[:, 2], "row": np.arange(60) % 8}
    scale = jnp.array([1.0, 0.003], jnp.float32)

    def fn(model, each):
        return model["shared"] + model["own"][0] @ (each["b"] * scale) - each["y"]

    select = lambda each: {"own": each["row"][None], "shared": jnp.array(0)}
    group = gnlin.Residuals(fn, data, select=select)
    model = {"own": jnp.zeros((8, 2), jnp.float32), "shared": jnp.zeros(1, jnp.float32)}

    solver = gnlin.DampedGaussNewton(1e-7, method="schur")
    loss = gnlin.solve(model, group, solver, max_steps=1).loss
    rows = np.concatenate([np.eye(8)[data["row"]]] * 2 + [np.ones((60, 1))], axis=1)
    rows[:, :16] *= np.repeat(draws[:, :2] * np.asarray(scale), 8, axis=1)
    step = np.linalg.solve(rows.T @ rows + 1e-7 * np.eye(17), rows.T @ draws[:, 2])
    expected = 0.5 * np.sum((rows @ step - draws[:, 2]) ** 2)
    np.testing.assert_allclose(loss, expected, rtol=1e-3)


@pytest.mark.exhaustive
def test_runs_are_those_by_the_whole_curvature():
    """Runs with acceleration and between bounds."""
    bounds = {"camera": -1.0, "point": None}, {"point": 0.5, "lens": 0.3}
    model, data = problem()
    model = jax.tree.map(lambda x: jnp.clip(x, -1.0, 0.3), model)
    ours, known = (
        gnlin.solve(
            model,
            groups(data),
            gnlin.LevenbergMarquardt(acceleration=True, bounds=bounds, method=method),
            max_steps=4,
        )
        for method in ("schur", "curvature")
    )
    for leaf in model:
        np.testing.assert_allclose(
            ours.model[leaf], known.model[leaf], rtol=1e-6, atol=1e-7
        )
    np.testing.assert_allclose(ours.history.loss, known.history.loss, rtol=1e-8)


def test_steps_are_accelerated_by_default(monkeypatch):
    """Without acceleration, bundle adjustment with outliers may not converge."""
    model, data = problem()
    made, trials = [], _levenberg_marquardt.Trials

    def spy(*args):
        made.append(trials(*args))
        return made[-1]

    monkeypatch.setattr(_levenberg_marquardt, "Trials", spy)
    solver = gnlin.LevenbergMarquardt(method="schur")
    run = lambda model: optx.least_squares(gnlin.Groups(groups(data)), solver, model)
    eqx.filter_eval_shape(run, model)
    assert made
    assert all(each.acceleration for each in made)


@pytest.mark.slow
def test_a_bundle_adjustment_with_outliers():
    """Without a least curvature of its outliers the run stands still at its second step,
    four times above the minimum."""
    path = Path(__file__).parents[1] / "docs" / "examples" / "bundle_adjustment.py"
    example = types.SimpleNamespace(**runpy.run_path(str(path)))
    true = example.scene(4, 20)
    seen = example.observed(true, 4, jax.random.key(1))
    off = np.random.default_rng(0).normal(size=(4, 2))
    seen["at"] = seen["at"].at[::20].add(0.2 * off)
    keys = dict(zip(true, jax.random.split(jax.random.key(2)), strict=True))
    start = {
        name: x + 0.15 * jax.random.normal(keys[name], x.shape)
        for name, x in true.items()
    }
    start["camera"] = start["camera"].at[:2].set(true["camera"][:2])

    def minimum(loss, start):
        sights = example.groups(seen, true["camera"])
        sights["sights"] = dataclasses.replace(sights["sights"], loss=loss)
        solver = gnlin.LevenbergMarquardt(method="schur")
        return gnlin.solve(start, sights, solver, max_steps=80)

    found = minimum(gnlin.losses.Huber(), start)
    assert found.result == optx.RESULTS.successful
    weighted = minimum(gnlin.losses.Huber(reweighted=1), found.model)
    np.testing.assert_allclose(found.loss, weighted.loss, rtol=1e-8)


@pytest.mark.exhaustive
def test_fixed_parameters_stay():
    model, data = problem()
    fixed = model["camera"]
    solver = gnlin.LevenbergMarquardt(
        method="schur", bounds=({"camera": fixed}, {"camera": fixed})
    )
    found = gnlin.solve(model, groups(data), solver, max_steps=5)
    np.testing.assert_array_equal(found.model["camera"], fixed)
    assert found.loss < found.history.loss[0]


@pytest.mark.exhaustive
def test_a_robust_loss():
    model, data = problem()
    robust = groups(data, loss=gnlin.losses.PseudoHuber(0.3))["sights"]
    ours, known = (
        gnlin.solve(model, robust, gnlin.DampedGaussNewton(0.1, method=m), max_steps=3)
        for m in ("schur", "curvature")
    )
    np.testing.assert_allclose(ours.model["point"], known.model["point"], atol=1e-8)


@pytest.mark.exhaustive
def test_in_a_program_whose_data_are_traced_and_many():
    model, data = problem()
    solver = gnlin.DampedGaussNewton(0.1, method="schur")

    def solved(at, camera):
        sights = {**data["sights"], "at": at, "camera": camera}
        every = groups({**data, "sights": sights})
        return gnlin.solve(model, every, solver, max_steps=2).model["point"]

    at, camera = data["sights"]["at"], data["sights"]["camera"]
    both = jnp.stack([at, 0 * at]), jnp.stack([camera, camera[::-1]])
    many = jax.jit(jax.vmap(solved))(*both)
    for k in range(2):
        np.testing.assert_allclose(many[k], solved(both[0][k], both[1][k]), atol=1e-11)


def scene(num_cameras, num_points, each, **budget):
    """A large scene, of which only the shapes matter."""
    n = each * num_points
    examples = {"camera": jnp.arange(n) % num_cameras, "point": jnp.arange(n) // each}
    fn = lambda y, _: y["camera"][:2] - y["point"][:2]
    model = {"camera": jnp.zeros((num_cameras, 6)), "point": jnp.zeros((num_points, 3))}
    select = lambda x: {"camera": x["camera"], "point": x["point"]}
    return gnlin.linearise(PerExample(Selected(fn, select)), model, examples, **budget)


def chosen(*sizes, **budget):
    """Return the chosen method for a scene that is never computed."""
    found = []

    def run():
        lin = scene(*sizes, **budget)
        ready = choose(Quadratic(lin.jacobian, lin.outputs), Tikhonov(1.0))
        found.append(type(ready))

    jax.eval_shape(run)
    return found[0]


def test_auto_chooses_it_when_it_is_cheapest():
    large = 50, 3_000, 4
    assert chosen(*large) is SchurComplement
    # The reduced system is counted: 4 x 300 x 300 numbers and more
    assert chosen(*large, memory_budget=4 * 300**2 * 8) is not SchurComplement
    assert chosen(2, 3, 2) is not SchurComplement


@pytest.mark.slow
def test_memory_holds_only_nonzero_blocks():
    lin = scene(50, 5_000, 5)

    def step(jacobian, outputs):
        ready = choose(Quadratic(jacobian, outputs), Tikhonov(1.0))
        assert isinstance(ready, SchurComplement)
        return ready.solve(Tikhonov(1.0)).step

    compiled = jax.jit(step).lower(lin.jacobian, lin.outputs).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    numbers = _schur.elimination(lin.jacobian.reads()).num_numbers
    assert memory.temp_size_in_bytes < 8 * numbers
    # W alone, if it were dense
    assert 8 * numbers < 300 * 15_000 * 8


def test_errors_without_parameters_to_eliminate():
    poses = jnp.zeros((4, 2))
    ends = jnp.asarray([[0, 1], [1, 2], [2, 3]])
    edges = gnlin.Residuals(lambda pair, e: pair[1] - pair[0], ends, select=lambda e: e)
    solver = gnlin.DampedGaussNewton(0.1, method="schur")
    with pytest.raises(ValueError, match=r"'schur' eliminates an array .* reads one row"):
        gnlin.solve(poses, edges, solver)
    with pytest.raises(ValueError, match=r"'schur' eliminates an array .* reads one row"):
        gnlin.solve(poses, gnlin.Residuals(lambda y, x: y[x[0]] - y[x[1]], ends), solver)
    with pytest.raises(ValueError, match="'schur' cannot be used for `GradientDescent`"):
        choose(
            Quadratic(scene(3, 3, 2).jacobian, jnp.zeros((6, 2))),
            GradientDescent(3, 0.1),
            method="schur",
        )


@pytest.mark.slow
def test_nonfinite_values_propagate():
    model, data = problem()
    model["point"] = model["point"].at[0].set(jnp.nan)

    @jax.jit
    def step(model, data):
        lin = linearised(model, data)
        quadratic = Quadratic(lin.jacobian, lin.outputs)
        ready = choose(quadratic, Tikhonov(1.0), method="schur")
        return ready.solve(Tikhonov(1.0)).step

    assert np.all(np.isnan(step(model, data)["camera"]))


@pytest.mark.slow
def test_groups_that_store_an_array_in_different_rows():
    """One group reads whole rows of the points, the other an entry of each."""
    model = {"camera": jnp.arange(1.0, 3.0)[:, None], "point": jnp.eye(6, 3) + 1}
    whole = lambda y, _: (y["point"] ** 2).sum(1) * y["camera"][jnp.arange(6) % 2, 0]
    single = lambda y, _: jnp.sin(y["point"][:, 1])
    fns = {"whole": whole, "single": single}
    groups = {k: AtOnce(fn, gnlin.Sparsity(fn, model)) for k, fn in fns.items()}
    lin = gnlin.linearise(PerGroup(groups), model, dict.fromkeys(groups))
    assert not SchurComplement.fits(Quadratic(lin.jacobian, lin.outputs), Tikhonov(0.1))
