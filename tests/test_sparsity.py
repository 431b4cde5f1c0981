"""Jacobians by colouring: equal to forward mode's, and used in whole runs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.sparse
from jax.flatten_util import ravel_pytree

import gnlin
from gnlin._jacobian import _coloured, Rows
from gnlin._jacobian._change_of_variables import Retracted
from gnlin._linearisation._quadratic import Quadratic
from gnlin._linearisation._retraction import Retraction
from gnlin._subproblem import choose
from gnlin._subproblem._sparse import SparseLU
from gnlin.filters import Tikhonov


def graph(poses, edges):
    """A chain with loops, in the plane."""
    a, b = poses[edges[:, 0]], poses[edges[:, 1]]
    cos, sin = jnp.cos(a[:, 2]), jnp.sin(a[:, 2])
    dx, dy, turn = (b - a).T
    moved = jnp.stack([cos * dx + sin * dy, cos * dy - sin * dx, turn], axis=1)
    return moved - jnp.asarray([0.3, 0.1, 0.05], poses.dtype)[None], 10 * poses[0]


def loops(n):
    steps = [(k, k + 1) for k in range(n - 1)]
    return jnp.asarray(steps + [(k, k + n // 2) for k in range(0, n // 2, 6)])


def field(u, _):
    """A grid with two numbers at each place; a residual reads few entries of a row."""
    v = u["of"]
    inner = v[1:-1, 1:-1] * 4 - v[2:, 1:-1] - v[:-2, 1:-1] - v[1:-1, 2:] - v[1:-1, :-2]
    return {"inside": inner + jnp.exp(v[1:-1, 1:-1]), "edge": v[0] - u["level"]}


def summed(y, _):
    """One residual reads all, and each other one: fewer colours by rows than by
    columns."""
    return jnp.append(jnp.sin(y), jnp.sum(y**2)), y[2] * y[3]


CASES = {
    "graph": (graph, lambda rng: rng.normal(size=(9, 3)), loops(9), 14),
    "field": (
        field,
        lambda rng: {"of": rng.normal(size=(5, 30)), "level": rng.normal()},
        None,
        12,
    ),
    "summed": (summed, lambda rng: rng.normal(size=20), None, 3),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("graph", jnp.float64, marks=pytest.mark.slow),
        ("graph", jnp.float32),
        ("field", jnp.float64),
        ("summed", jnp.float64),
    ],
)
def test_the_jacobian_is_the_dense_one(name, dtype):
    fn, start, args, most = CASES[name]
    y = jax.tree.map(lambda x: jnp.asarray(x, dtype), start(np.random.default_rng(0)))
    flat, unravel = ravel_pytree(y)
    group = gnlin.Residuals(fn, sparsity=gnlin.Sparsity(fn, y, args))
    assert group.sparsity.num_colors <= most
    function, inputs, _ = group.posed(y, args)

    @jax.jit
    def both():
        of = lambda v: ravel_pytree(fn(unravel(v), args))[0]
        jacobian = gnlin.linearise(function, y, inputs).jacobian
        u = jnp.cos(jnp.arange(jacobian.shape[0], dtype=dtype))
        found = (
            jacobian.as_matrix(),
            jacobian.push_forward(y),
            ravel_pytree(jacobian.pull_back(u))[0],
            ravel_pytree(jacobian.squared_columns())[0],
            jacobian.curvature(),
        )
        dense = jax.jacfwd(of)(flat)
        precise = jax.lax.Precision.HIGHEST
        curvature = jnp.matmul(dense.T, dense, precision=precise)
        columns = jnp.diagonal(curvature)
        grams = [
            block.row_grams() for block in jacobian.blocks() if block.rows().ndim > 1
        ]
        return found, (dense, dense @ flat, u @ dense, columns, curvature), grams

    found, known, grams = both()
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-11
    for a, b in zip(found, known, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    # The last array's rows, whether they are held whole or by entries
    k, d, _ = grams[-1].shape
    last = np.asarray(known[-1])[-k * d :, -k * d :].reshape(k, d, k, d)
    for row in range(k):
        np.testing.assert_allclose(
            grams[-1][row], last[row, :, row], rtol=tolerance, atol=tolerance
        )


def test_colours_do_not_grow_with_the_graph():
    num = [
        gnlin.Sparsity(graph, jnp.zeros((n, 3)), loops(n)).num_colors for n in (50, 200)
    ]
    assert num[0] == num[1] <= 14


@pytest.mark.slow
def test_numbers_of_entries_beyond_32_bits():
    y = {"a": jnp.zeros(2), "b": jnp.linspace(0, 1, 70_000)}

    def fn(y, _):
        return jnp.tile(y["a"], 10_000), jnp.sin(y["b"][1:28_001])

    sparsity = gnlin.Sparsity(fn, y)
    group = gnlin.Residuals(fn, sparsity=sparsity)
    jacobian = gnlin.features.linearise_model(y, group).jacobian.at_hand()
    squares, b = jacobian.squared_columns(), np.asarray(y["b"])
    np.testing.assert_allclose(squares["a"], 10_000)
    expected = np.zeros_like(b)
    expected[1:28_001] = np.cos(b[1:28_001]) ** 2
    np.testing.assert_allclose(squares["b"], expected)


@pytest.mark.exhaustive
def test_runs_are_those_of_the_dense_jacobian():
    """Compare through optimistix, and by `solve` with a robust loss among groups."""
    edges = loops(12)
    start = jnp.asarray(0.3 * np.random.default_rng(0).normal(size=(12, 3)))
    sparsity = gnlin.Sparsity(graph, start, edges)
    solver = gnlin.LevenbergMarquardt()
    ours, known = (
        optx.least_squares(fn, solver, start, edges)
        for fn in (gnlin.Residuals(graph, sparsity=sparsity), graph)
    )
    np.testing.assert_allclose(ours.value, known.value, atol=1e-8)

    closed = lambda y, _: graph(y, edges)
    penalty = gnlin.Residuals(lambda y, _: 0.1 * y, weight=0.5)
    ours, known = (
        gnlin.solve(
            start,
            [
                gnlin.Residuals(closed, loss=gnlin.losses.PseudoHuber(0.2), **more),
                penalty,
            ],
            gnlin.DampedGaussNewton(0.1, method="curvature"),
            max_steps=3,
        )
        for more in ({"sparsity": sparsity}, {})
    )
    np.testing.assert_allclose(ours.model, known.model, rtol=1e-7, atol=1e-9)


@pytest.mark.exhaustive
def test_points_are_eliminated_without_being_named():
    """Arrays are read by rows, and each residual reads one of the points."""
    rng = np.random.default_rng(0)
    camera, point = rng.integers(0, 3, 40), rng.integers(0, 8, 40)

    def misfit(y, _):
        at = y["point"][point] - y["camera"][camera]
        return at[:, :2] / (10 + at[:, 2:])

    y = {"camera": rng.normal(size=(3, 3)), "point": rng.normal(size=(8, 3))}
    y = jax.tree.map(jnp.asarray, y)
    group = gnlin.Residuals(misfit, sparsity=gnlin.Sparsity(misfit, y))
    ours, known = (
        gnlin.solve(y, group, gnlin.DampedGaussNewton(0.1, method=method), max_steps=2)
        for method in ("schur", "curvature")
    )
    np.testing.assert_allclose(ours.model["point"], known.model["point"], atol=1e-9)


def test_a_known_pattern():
    fn = lambda y, _: y[1:] ** 2 - y[:-1]
    y = jnp.linspace(0.1, 1.0, 6)
    dense = np.eye(5, 6) + np.eye(5, 6, 1)
    for pattern in (dense, scipy.sparse.csr_array(dense), jnp.asarray(dense) > 0):
        found = gnlin.Sparsity(fn, y, pattern=pattern)
        assert found.num_colors == 2
    group = gnlin.Residuals(fn, sparsity=found)

    @jax.jit
    def both(y):
        function, inputs, _ = group.posed(y, None)
        return gnlin.linearise(function, y, inputs).matrix(), jax.jacfwd(fn)(y, None)

    np.testing.assert_allclose(*both(y))
    with pytest.raises(ValueError, match=r"the Jacobian's shape, \(5, 6\), but \(6, 5\)"):
        gnlin.Sparsity(fn, y, pattern=dense.T)


def test_errors_of_unsupported_uses(monkeypatch):
    fn = lambda y, _: y[1:] ** 2 - y[:-1]
    y = jnp.ones(6)
    found = gnlin.Sparsity(fn, y)
    of_others = gnlin.Residuals(fn, sparsity=found)
    with pytest.raises(ValueError, match="was made for 5 residuals"):
        gnlin.solve(jnp.ones(7), of_others)
    with pytest.raises(ValueError, match="leave `data` out"):
        gnlin.Residuals(fn, jnp.ones(3), sparsity=found)
    with pytest.raises(ValueError, match="must be a sum over residuals"):
        gnlin.Residuals(fn, loss=gnlin.SoftmaxCrossEntropy(), sparsity=found)
    monkeypatch.setitem(sys.modules, "asdex", None)
    with pytest.raises(ImportError, match=r"run `pip install gnlin\[sparse\]`"):
        gnlin.Sparsity(fn, y)


@pytest.mark.usefixtures("unchecked")
def test_sparsity_is_no_data():
    fn = lambda y, _: y
    with pytest.raises(ValueError, match="as the data: pass it as `sparsity=`"):
        gnlin.Residuals(fn, gnlin.Sparsity(fn, jnp.ones(3)))


def test_sparsity_must_be_one():
    with pytest.raises(ValueError, match=r"must be a `gnlin.Sparsity`, such as"):
        gnlin.Residuals(lambda y, _: y, sparsity=np.eye(3))  # pyright: ignore[reportArgumentType]


def chain_of(order):
    """Each entry reads its neighbours; the order is permuted."""

    def fn(y, _):
        z = jnp.pad(y[order], 1)
        return z[1:-1] ** 3 + 2 * z[1:-1] - z[:-2] - z[2:]

    return fn


@pytest.mark.parametrize("shuffled", [False, True])
def test_cost_of_a_factorisation(shuffled):
    """A chain's curvature has two entries beside the diagonal, if the order is good."""
    n = 300
    order = np.random.default_rng(0).permutation(n) if shuffled else np.arange(n)
    found = gnlin.Sparsity(chain_of(order), jnp.zeros(n))
    assert 4 * (n - 2) <= found.factor_operations < 6 * n


def test_a_row_that_reads_all_leaves_a_dense_factor():
    y = jnp.zeros(20)
    assert gnlin.Sparsity(summed, y).factor_operations == sum(k**2 for k in range(20))


@pytest.mark.parametrize("size", [8, 1_000])
def test_factor_operations_are_infinite_beyond_a_limit(size, monkeypatch):
    monkeypatch.setattr(_coloured, "_MOST_ENTRIES", 1e3)
    found = gnlin.Sparsity(chain_of(np.arange(size)), jnp.zeros(size))
    assert np.isfinite(found.factor_operations) == (size == 8)


def test_auto_factorises_a_long_chain():
    """The condition number is that of second differences, for which products take too
    long."""
    n = 2_000
    fn = chain_of(np.arange(n))
    y = jnp.linspace(-1, 1, n)
    group = gnlin.Residuals(fn, sparsity=gnlin.Sparsity(fn, y))
    ways = []

    def run(y):
        lin = gnlin.features.linearise_model(y, group)
        ways.append(choose(Quadratic(lin.jacobian, lin.outputs), Tikhonov(1.0)))
        return y

    jax.eval_shape(run, y)
    assert isinstance(ways[0], SparseLU)
    solver = gnlin.LevenbergMarquardt(acceleration=False)
    solution = optx.least_squares(group, solver, y)
    assert float(solution.stats["num_inner_steps"]) == 0


@pytest.mark.slow
def test_a_retraction_moves_rows_of_which_single_entries_are_read():
    """Each residual reads one entry of the pose, or three of a row of the other array."""
    rng = np.random.default_rng(0)
    y = {"pose": rng.normal(size=3), "of": rng.normal(size=(4, 30)), "z": np.ones(2)}
    y = jax.tree.map(jnp.asarray, y)

    def turned(row, step):
        length = jnp.linalg.norm(row) / jnp.linalg.norm(row + step)
        return length * (row + step)

    retraction = Retraction.of({"pose": turned, "of": turned, "z": None}, y)

    def fn(y, _):
        entries = jnp.sin(y["of"][:, :6]) + y["of"][:, 6:12] ** 2 - y["of"][:, 12:18]
        return y["pose"] ** 2, entries * y["z"][0], y["pose"][1:] * y["z"]

    sparsity = gnlin.Sparsity(fn, y)

    @jax.jit
    def run(y):
        unravel = ravel_pytree(y)[1]
        ahead = lambda step: fn(retraction.moved(y, unravel(step)), None)
        matrix = jax.jacfwd(lambda step: ravel_pytree(ahead(step))[0])(jnp.zeros(125))
        passes = gnlin.linearise(fn, y).jacobian
        jacobian = Retracted.of(sparsity.jacobian(passes), retraction.tangents(y))
        grams = [block.row_grams() for block in jacobian.blocks()]
        rows = [Rows(block.rows()).row_grams() for block in jacobian.blocks()]
        problem, kind = Quadratic(jacobian, fn(y, None)), Tikhonov(0.1)
        steps = [
            ravel_pytree(choose(problem, kind, method=m).solve(kind).step)
            for m in ("sparse", "matrix-free", "curvature")
        ]
        found = jacobian.as_matrix(), [step for step, _ in steps]
        return matrix, ravel_pytree(fn(y, None))[0], found, (grams, rows)

    matrix, residual, (found, steps), (grams, rows) = run(y)
    matrix, residual = np.asarray(matrix), np.asarray(residual)
    np.testing.assert_allclose(found, matrix, atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grams, rows)
    curvature = matrix.T @ matrix + 0.1 * np.eye(125)
    for step in steps:
        expected = -np.linalg.solve(curvature, matrix.T @ residual)
        np.testing.assert_allclose(step, expected, atol=1e-8)
