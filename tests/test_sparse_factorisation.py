"""Sparse factorisations give the steps of the dense system, solved by NumPy."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from test_schur import dense, flat, linearised, problem

import gnlin
from gnlin._jacobian import Cost, Reads
from gnlin._linearisation._quadratic import Quadratic
from gnlin._subproblem import _sparse, choose
from gnlin._subproblem._fallbacks import ProductsFirst
from gnlin._subproblem._sparse import SparseLU
from gnlin.filters import GradientDescent, Tikhonov


def chain(num_poses, closures=(), dtype=jnp.float64):
    """Headings of a robot; each is measured from the one before, and some again later."""
    pairs = [(k, k + 1) for k in range(num_poses - 1)] + list(closures)
    ends = np.asarray(pairs, int).reshape(-1, 2)
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.normal(size=(len(ends), 3))
    measured = 0.1 * (ends[:, 1:] - ends[:, :1]) + noise
    edges = {"ends": jnp.asarray(ends), "measured": jnp.asarray(measured, dtype)}

    def fn(pair, edge):
        return pair[1] - pair[0] + 0.1 * jnp.sin(pair[0]) - edge["measured"]

    held = gnlin.Residuals(
        lambda pose, _: 10 * pose, jnp.zeros(1, int), select=lambda k: k
    )
    seen = gnlin.Residuals(fn, edges, select=lambda edge: edge["ends"])
    start = 0.1 * jnp.arange(float(num_poses))[:, None] * jnp.ones((1, 3))
    groups = {"held": held, "seen": seen} if len(ends) else {"held": held}
    return start.astype(dtype) % 1.0, groups


@pytest.mark.parametrize(
    ("dtype", "with_rest"), [(jnp.float64, True), (jnp.float32, False)]
)
def test_steps_are_those_of_the_dense_system(dtype, with_rest):
    """There are three groups. Some examples read one row twice, and some do not read all
    arrays. One set-up serves all dampings."""
    model, data = problem(dtype=dtype)
    rest = jax.tree.map(jnp.cos, model) if with_rest else None

    @jax.jit
    def steps(model, data):
        lin = linearised(model, data)
        quadratic = Quadratic(lin.jacobian, lin.outputs, rest)
        ready = choose(quadratic, Tikhonov(1.0), 3, "sparse")
        assert isinstance(ready, SparseLU)
        found = [ready.solve(Tikhonov(d)).step for d in (1e-3, 1.0, 1e3)]
        again = ready.with_residual(jax.tree.map(jnp.sin, lin.outputs))
        largest = ready.largest_curvature()
        other = again.solve(Tikhonov(1.0)).step
        return lin.matrix(), lin.outputs, found, other, largest

    matrix, outputs, found, other, largest = steps(model, data)
    jacobian, gradient = dense(matrix, outputs, rest)
    curvature = jacobian.T @ jacobian
    tolerance = 1e-9 if dtype == jnp.float64 else 2e-4
    for damping, step in zip((1e-3, 1.0, 1e3), found, strict=True):
        system = curvature + damping * np.eye(len(gradient))
        expected = -np.linalg.solve(system, gradient)
        error = np.linalg.norm(flat(step) - expected) / np.linalg.norm(expected)
        assert error < tolerance
        assert {x.dtype for x in jax.tree.leaves(step)} == {np.dtype(dtype)}
    right = jacobian.T @ np.sin(flat(outputs))
    expected = -np.linalg.solve(curvature + np.eye(len(gradient)), right)
    np.testing.assert_allclose(flat(other), expected, rtol=0, atol=10 * tolerance)
    assert float(largest) == pytest.approx(np.max(np.diag(curvature)), rel=1e-5)


def test_nonfinite_input_gives_nan():
    model, data = problem()
    broken = model | {"camera": model["camera"].at[0].set(jnp.nan)}

    @jax.jit
    def step(model, data, more):
        lin = linearised(model, data)
        residual = jax.tree.map(lambda x: x.at[0].add(more), lin.outputs)
        ready = choose(Quadratic(lin.jacobian, residual), Tikhonov(1.0), 1, "sparse")
        return ready.solve(Tikhonov(1.0)).step

    for at, more in ((model, np.inf), (broken, 0.0)):
        assert np.all(np.isnan(flat(step(at, data, more))))


def test_a_singular_system_raises_no_error():
    """There is no damping. One chain has no fixed point, and has a row that no residual
    reads. The other has a Jacobian of zeros."""

    def run(start, groups):
        lin = gnlin.features.linearise_model(start, groups)
        quadratic = Quadratic(lin.jacobian, lin.outputs)
        ready = choose(quadratic, Tikhonov(0.0), 1, "sparse")
        return ready.solve(Tikhonov(0.0)).step, lin.matrix(), lin.outputs

    start, groups = chain(6)
    loose = {"seen": groups["seen"]}
    unread = jnp.concatenate([start, start[:1]])
    step, matrix, residual = jax.jit(lambda start: run(start, loose))(unread)
    matrix, residual = np.asarray(matrix), flat(residual)
    left = matrix.T @ (matrix @ flat(step) + residual)
    assert np.linalg.norm(left) < 1e-6 * np.linalg.norm(matrix.T @ residual)
    nothing = gnlin.Residuals(
        lambda pose, _: 0 * pose + 1.0, jnp.arange(6), select=lambda k: k
    )
    step, *_ = jax.jit(lambda start: run(start, nothing))(start)
    np.testing.assert_array_equal(step, np.zeros((6, 3)))


def ends_by(methods, start, groups):
    for method in methods:
        solver = gnlin.LevenbergMarquardt(method=method)
        yield gnlin.solve(start, groups, solver, max_steps=99)


@pytest.mark.slow
def test_levenberg_marquardt_of_one_pose():
    ours, known = ends_by(("sparse", "curvature"), *chain(1))
    assert "converged" in ours.reason
    np.testing.assert_allclose(ours.loss, known.loss, rtol=1e-9, atol=1e-18)


def test_levenberg_marquardt_ends_where_scipy_does():
    start, groups = chain(12, [(0, 6), (3, 9)])
    edges = jax.tree.map(np.asarray, groups["seen"].data)
    first, second = edges["ends"].T

    def residuals(flat):
        pose = flat.reshape(12, 3)
        seen = pose[second] - pose[first] + 0.1 * np.sin(pose[first])
        return np.append(10 * pose[0], seen - edges["measured"])

    tight = {"xtol": 1e-13, "ftol": 1e-13, "gtol": 1e-13}
    known = scipy.optimize.least_squares(residuals, flat(start), **tight)
    solver = gnlin.LevenbergMarquardt(method="sparse")
    end = gnlin.solve(start, groups, solver, max_steps=99)
    assert "converged" in end.reason
    np.testing.assert_allclose(end.loss, known.cost, rtol=1e-9)


@pytest.mark.slow
def test_levenberg_marquardt_between_bounds_ends_where_the_other_does():
    start, groups = chain(40, [(k, k + 20) for k in range(0, 20, 5)])
    bounded = gnlin.LevenbergMarquardt(method="sparse", bounds=(-0.5, 0.5))
    other = gnlin.LevenbergMarquardt(method="curvature", bounds=(-0.5, 0.5))
    start = jnp.clip(start, -0.5, 0.5)
    ours, theirs = (gnlin.solve(start, groups, s, max_steps=99) for s in (bounded, other))
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-8, atol=1e-18)


@pytest.mark.slow
def test_many_bounds_on_a_sparse_problem_need_no_dense_matrix():
    """Each of 301 parameters has a minimum of its own, most of them beyond the bounds."""
    wanted = jnp.linspace(-2.0, 2.0, 301)
    group = gnlin.Residuals(
        lambda x, d: x - d["wanted"] + 0.1 * (x**3 - d["wanted"] ** 3),
        {"k": jnp.arange(301), "wanted": wanted},
        select=lambda d: d["k"],
    )
    solver = gnlin.LevenbergMarquardt(method="sparse", bounds=(-0.5, 0.5))
    run = lambda y: gnlin.solve(y, group, solver, max_steps=30)
    end = run(jnp.zeros(301))
    np.testing.assert_allclose(end.model, jnp.clip(wanted, -0.5, 0.5), atol=1e-9)
    program = jax.make_jaxpr(lambda y: run(y).model)(jnp.zeros(301))
    assert "301,301]" not in str(program)


def test_auto_chooses_by_the_coupling():
    """`auto` decides by costs; `benchmarks speed graph` tests this in full."""
    reads = lambda edges: (Reads(edges, 3, ((1_000, 2, 3),)),)
    start, groups = chain(1_000, [(k, k + 200) for k in range(0, 800, 20)])
    costs: list[Cost] = []

    @jax.jit
    def run(start):
        lin = gnlin.features.linearise_model(start, groups)
        costs.append(lin.jacobian.cost())
        quadratic = Quadratic(lin.jacobian, lin.outputs)
        way = choose(quadratic, Tikhonov(1.0))
        assert isinstance(way, SparseLU)
        first = choose(quadratic, Tikhonov(1.0), method="products-first")
        assert isinstance(first, ProductsFirst)
        assert first.directly.func == SparseLU.of
        return first.solve(Tikhonov(1e-6)).step, way.solve(Tikhonov(1e-6)).step

    found, direct = run(start)
    np.testing.assert_allclose(found, direct, atol=1e-7)
    (cost,) = costs
    prices = [
        SparseLU.cost(cost._replace(reads=reads(edges)), Tikhonov(1.0), 1)
        for edges in (1_000, 1_500, 4_000)
    ]
    assert prices[0] < prices[1] < prices[2]


@pytest.mark.slow
def test_many_starts_at_once():
    start, groups = chain(12, [(0, 6)])
    solver = gnlin.DampedGaussNewton(1e-3, method="sparse", search=None)
    starts = jnp.stack([start, 0.9 * start])
    one = lambda s: gnlin.solve(s, groups, solver, max_steps=5, divergence=None).model
    both, alone = jax.jit(jax.vmap(one))(starts), jax.jit(one)(starts[1])
    np.testing.assert_allclose(both[1], alone, rtol=1e-9, atol=1e-12)
    assert np.any(both[0] != both[1])


@pytest.mark.slow
def test_jax_configuration_is_unchanged():
    """Import the package for the first time, in a separate process."""
    program = """
import jax
from gnlin._subproblem import _sparse
before = {name: jax.config.values[name] for name in _sparse._TURNED}
_sparse._factorisation()
assert before == {name: jax.config.values[name] for name in _sparse._TURNED}, before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_mistakes(monkeypatch):
    start, groups = chain(3)
    # Tracing finds the mistakes, so nothing need be compiled.
    jax.eval_shape(lambda start: mistakes(monkeypatch, start, groups), start)


def mistakes(monkeypatch, start, groups):
    lin = gnlin.features.linearise_model(start, groups)
    quadratic = Quadratic(lin.jacobian, lin.outputs)
    with pytest.raises(ValueError, match="cannot be used for `GradientDescent`"):
        choose(quadratic, GradientDescent(3, 0.1), method="sparse")
    whole = gnlin.linearise(lambda y, _: y**2, start)
    with pytest.raises(ValueError, match="is for examples that read few of the param"):
        choose(Quadratic(whole.jacobian, whole.outputs), Tikhonov(1.0), method="sparse")
    needs = pytest.raises(ValueError, match=r"needs klujax .* and double precision")
    with needs, jax.enable_x64(False):
        choose(quadratic, Tikhonov(1.0), method="sparse")
    monkeypatch.setattr(_sparse.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs klujax \(`pip install gnlin\[sparse\]`"):
        choose(quadratic, Tikhonov(1.0), method="sparse")
    assert not isinstance(choose(quadratic, Tikhonov(1.0)), SparseLU)
