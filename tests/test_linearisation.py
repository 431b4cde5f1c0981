"""Linearisations and spectra, compared with `jax.jacobian` and dense NumPy."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from jax.flatten_util import ravel_pytree
from problems import (
    as_jax,
    deficient,
    each_once,
    each_pair,
    linear,
    SHAPES,
    sines,
    sines_data,
    sines_numpy,
)

import gnlin
from gnlin import linearise, PerExample
from gnlin._jacobian import _of_examples, _program, ByPasses, ScaledColumns, Stacked
from gnlin._jacobian._at_hand import AtHand
from gnlin._subproblem import choose
from gnlin.authoring import Quadratic
from gnlin.filters import GradientDescent, PseudoInverse, Tikhonov


shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


# Parameters of mixed shapes, a scalar among them, and outputs likewise.
POINT = {
    "matrix": jnp.asarray([[0.3, -0.2], [0.5, 0.7]]),
    "scalar": jnp.asarray(0.4),
    "vector": (jnp.asarray([1.1, -0.6, 0.2]),),
}


def mixed(y, x):
    s, (v,) = y["scalar"], y["vector"]
    return {
        "scalar": s * jnp.sum(v**2),
        "vector": jnp.tanh(y["matrix"] @ x) * s,
        "matrix": jnp.outer(v[:2], x) + jnp.sin(y["matrix"]),
    }


X = jnp.asarray([0.8, -1.3])


def dense_jacobian(fn, y, args):
    flat, unravel = ravel_pytree(y)
    of_flat = lambda v: ravel_pytree(fn(unravel(v), args))[0]
    return np.asarray(jax.jit(jax.jacobian(of_flat))(flat))


@pytest.fixture(scope="module")
def mixed_case():
    return linearise(mixed, POINT, X), dense_jacobian(mixed, POINT, X)


def passes(taken):
    return taken.jvps, taken.vjps


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


#
# The linearisation itself
#


def test_outputs_and_point(mixed_case):
    lin, _ = mixed_case
    assert lin.shape == (7, 8)
    np.testing.assert_allclose(flat(lin.outputs), flat(mixed(POINT, X)), rtol=1e-15)
    np.testing.assert_array_equal(flat(lin.point), flat(POINT))
    assert jax.tree.structure(lin.outputs) == jax.tree.structure(mixed(POINT, X))


def test_products_and_dense_forms(mixed_case):
    lin, jacobian = mixed_case
    generator = np.random.default_rng(1)
    draw = lambda tree: jax.tree.map(lambda x: generator.normal(size=x.shape), tree)
    v, u = draw(POINT), draw(lin.outputs)

    @jax.jit
    def run(v, u):
        lin, tiny = (
            linearise(mixed, POINT, X),
            linearise(mixed, POINT, X, memory_budget=1),
        )
        operator, dense = lin.jacobian, lin.materialise()
        assert isinstance(operator, lx.AbstractLinearOperator)
        pulled = lin.vjp(u), operator.transpose().mv(u), dense.vjp(u)
        return {
            "matrices": (lin.matrix(), operator.as_matrix(), tiny.matrix()),
            "kernels": (lin.kernel(), tiny.kernel()),
            "pushed": (lin.jvp(v), operator.mv(v), dense.jvp(v)),
            "pulled": (*pulled, lin.pull_back(ravel_pytree(u)[0])),
            "rows": lin.rows(),
        }

    found = run(v, u)
    for matrix in found["matrices"]:
        np.testing.assert_allclose(matrix, jacobian, atol=1e-14)
    for kernel in found["kernels"]:
        np.testing.assert_allclose(kernel, jacobian @ jacobian.T, atol=1e-13)
    for pushed in found["pushed"]:
        np.testing.assert_allclose(flat(pushed), jacobian @ flat(v), rtol=1e-12)
    for pulled in found["pulled"]:
        np.testing.assert_allclose(flat(pulled), jacobian.T @ flat(u), rtol=1e-12)
    shapes = jax.tree.map(lambda r: r.shape[1:], found["rows"])
    assert shapes == jax.tree.map(lambda x: x.shape, POINT)


def test_call_is_the_linearised_function(mixed_case):
    lin, jacobian = mixed_case
    other = jax.tree.map(lambda x: 1.5 * x + 0.3, POINT)
    expected = flat(lin.outputs) + jacobian @ (flat(other) - flat(POINT))
    np.testing.assert_allclose(flat(lin(other)), expected, rtol=1e-12)
    np.testing.assert_array_equal(flat(lin(POINT)), flat(lin.outputs))


@shapes
def test_rows_in_forward_and_reverse_mode(shape):
    y, args = sines_data(shape)
    expected = sines_numpy(y, args)[1]
    lin = linearise(sines, *as_jax((y, args)))
    assert lin.shape == shape
    m, p = shape
    assert passes(lin.jacobian.cost().rows) == ((p, 0) if p < m else (0, m))
    np.testing.assert_allclose(lin.rows(), expected, rtol=1e-12)
    np.testing.assert_allclose(lin.matrix(), expected, rtol=1e-12)


def test_the_mode_is_the_one_with_fewer_passes(monkeypatch):
    taken = []
    for name in ("mv", "rmv"):
        original = getattr(ByPasses, name)

        def spy(self, v, name=name, original=original):
            taken.append(name)
            return original(self, v)

        monkeypatch.setattr(ByPasses, name, spy)
    for shape, mode in (((7, 3), "mv"), ((3, 7), "rmv"), ((4, 4), "rmv")):
        jax.eval_shape(lambda *at: linearise(sines, *at).rows(), *sines_data(shape))
        assert set(taken) == {mode}
        taken.clear()


def test_the_mode_per_example_is_the_one_with_fewer_passes(monkeypatch):
    taken = []
    reverse, forward, columns = "blocks", "_rows_forward", "of_columns"
    owners = (_program, reverse), (_of_examples, forward), (AtHand, columns)
    for owner, name in owners:
        original = getattr(owner, name)

        def spy(*args, name=name, original=original):
            taken.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, spy)
    cases = (2, None, reverse), (3, None, reverse), (4, None, columns), (4, 2, forward)
    for num_outputs, part_size, mode in cases:
        fn = gnlin.PerExample(
            lambda y, x, n=num_outputs: jnp.tanh(x * y.sum()) * jnp.ones(n), part_size
        )
        rows = lambda y, x, fn=fn: linearise(fn, y, x).rows()
        jax.eval_shape(rows, np.ones(3), np.arange(5.0))
        assert set(taken) == {mode}
        taken.clear()


def test_the_memory_budget_sets_the_chunk(monkeypatch):
    chunks = []
    original = jax.lax.map

    def spy(fn, xs, *, batch_size):
        chunks.append(batch_size)
        return original(fn, xs, batch_size=batch_size)

    monkeypatch.setattr(jax.lax, "map", spy)
    fn = lambda y, x: x * jnp.sum(y**2)
    num_bytes = 60 * 90 * 8

    def kernel(budget):
        within = lambda y, x: linearise(fn, y, x, memory_budget=budget).kernel()
        jax.eval_shape(within, np.ones(90), np.ones(60))

    kernel(2**31)
    assert not chunks
    kernel(1)
    assert chunks == [1]
    kernel(num_bytes - 1)
    assert 1 < chunks[-1] < 60


@pytest.mark.parametrize(
    ("shape", "memory_budget"), each_once(list(SHAPES.values()), [1, 150])
)
def test_a_tiny_memory_budget_changes_nothing(shape, memory_budget):
    y, args = sines_data(shape)
    jacobian = sines_numpy(y, args)[1]

    @jax.jit
    def run(y, args):
        lin = linearise(sines, y, args, memory_budget=memory_budget)
        return lin.rows(), lin.kernel(), lin.spectrum("eigh").eigenvalues

    rows, kernel, eigenvalues = run(*as_jax((y, args)))
    np.testing.assert_allclose(rows, jacobian, rtol=1e-12)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, atol=1e-13)
    # On the output side there are m eigenvalues; the surplus ones are exactly zero.
    w = np.sort(np.asarray(eigenvalues))[::-1][: min(shape)]
    s = np.linalg.svd(jacobian, compute_uv=False)
    np.testing.assert_allclose(w, s**2, rtol=1e-10)


def test_bytes_of_the_dense_jacobian(mixed_case):
    lin, _ = mixed_case
    assert lin.jacobian.cost().num_bytes == 7 * 8 * 8


def test_the_forward_pass_is_made_once():
    calls = []

    def counted(y, args):
        calls.append(0)
        return sines(y, args)

    @jax.jit
    def run(y, args):
        lin = linearise(counted, y, args)
        return lin.kernel(), lin.rows(), lin.spectrum(), lin.vjp(lin.outputs), lin(y)

    jax.eval_shape(run, *sines_data((7, 3)))
    assert len(calls) == 1


def test_a_linearisation_passes_through_jit_and_vmap():
    y, args = as_jax(sines_data((7, 3)))
    points = jnp.stack([y, 2 * y, -y])
    kernels = jax.jit(jax.vmap(lambda y, a: linearise(sines, y, a).kernel(), (0, None)))(
        points, args
    )
    for point, kernel in zip(points, kernels, strict=True):
        jacobian = sines_numpy(np.asarray(point), args)[1]
        np.testing.assert_allclose(kernel, jacobian @ jacobian.T, atol=1e-13)


#
# Independent examples
#


def scalar_output(w, example):
    x, t = example
    return jnp.tanh(w["v"] @ x + w["b"]) - t


def vector_output(w, example):
    x, t = example
    return jnp.tanh(jnp.outer(x, w["v"]) @ x) * w["b"] - t


def tree_output(w, example):
    return (scalar_output(w, example), {"other": vector_output(w, example)[:2, None]})


def many_outputs(w, example):
    x, t = example
    return jnp.sin(jnp.arange(1.0, 13.0) * (w["v"] @ x) + w["b"]) - t


@pytest.mark.parametrize(
    ("fn", "num_outputs"),
    [(scalar_output, 1), (vector_output, 3), (tree_output, 3), (many_outputs, 12)],
)
def test_per_example(fn, num_outputs):
    generator = np.random.default_rng(2)
    x = jnp.asarray(generator.normal(size=(5, 3)))
    t = jnp.asarray(generator.normal(size=5))
    w = {"b": jnp.asarray(0.3), "v": jnp.asarray(generator.normal(size=3))}

    lifted = PerExample(fn)

    @jax.jit
    def run(w, x, t):
        looped = [fn(w, (x[i], t[i])) for i in range(5)]
        stacked = jax.tree.map(lambda *o: jnp.stack(o), *looped)
        lin = linearise(lifted, w, (x, t))
        assert lin.shape == (5 * num_outputs, 4)
        fewest = (4, 0) if num_outputs > 4 else (0, num_outputs)
        assert passes(lin.jacobian.cost().rows) == fewest
        in_chunks = linearise(lifted, w, (x, t), memory_budget=1).kernel()
        matrices = lin.matrix(), lin.jacobian.as_matrix()
        return lifted(w, (x, t)), stacked, matrices, (lin.kernel(), in_chunks)

    outputs, looped, matrices, kernels = run(w, x, t)
    np.testing.assert_allclose(flat(outputs), flat(looped))
    expected = dense_jacobian(lifted, w, (x, t))
    for matrix in matrices:
        np.testing.assert_allclose(matrix, expected, atol=1e-13)
    for kernel in kernels:
        np.testing.assert_allclose(kernel, expected @ expected.T, atol=1e-13)


def test_one_example():
    w, x, t = jnp.asarray([0.5, 0.2]), jnp.asarray([[1.0, 2.0]]), jnp.asarray([0.1])
    lin = linearise(PerExample(lambda w, xt: w @ xt[0] - xt[1]), w, (x, t))
    np.testing.assert_array_equal(lin.matrix(), x)


#
# Spectra
#


SPECTRUM_CASES = {
    **{name: (sines, sines_data(shape)) for name, shape in SHAPES.items()},
    "rank 2 of 5 by 4": (linear, deficient((5, 4), 2)),
    "rank 2 of 4 by 6": (linear, deficient((4, 6), 2)),
    "rank 0": (linear, (np.ones(3), (np.zeros((4, 3)), np.ones(4)))),
}


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *each_once(list(SPECTRUM_CASES.values()), ["svd", "eigh"]),
        (SPECTRUM_CASES["tall"], "eigh"),
        (SPECTRUM_CASES["rank 2 of 5 by 4"], "svd"),
    ],
)
def test_spectrum(case, method):
    fn, (y, args) = case

    @jax.jit
    def run(y, args):
        lin = linearise(fn, y, args)
        spectrum = lin.spectrum(method)
        other = jnp.cos(jnp.arange(1.0, lin.shape[0] + 1))
        steps = [
            (one.step(Tikhonov(0.1)), one.step(PseudoInverse()))
            for one in (spectrum, spectrum.with_residual(other))
        ]
        told = spectrum.gradient(), spectrum.gradient_norm(), spectrum.finite()
        return (lin.matrix(), lin.outputs, other, spectrum.eigenvalues), steps, told

    arrays, steps, (found_gradient, norm, finite) = run(*as_jax((y, args)))
    jacobian, r, other, w = map(np.asarray, arrays)
    m, p = jacobian.shape
    s = np.linalg.svd(jacobian, compute_uv=False)
    rank = int(np.sum(s > 1e-10 * max(s[0], 1e-300)))
    assert w.shape == (min(m, p),)
    np.testing.assert_allclose(np.sort(w)[::-1], s**2, rtol=1e-10, atol=1e-12)
    assert np.sum(w == 0) == len(w) - rank, "numerical zeros are exact zeros"

    gradient = jacobian.T @ r
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(norm, np.linalg.norm(gradient), rtol=1e-10)
    for (damped, exact), residual in zip(steps, (r, other), strict=True):
        expected = -np.linalg.solve(
            jacobian.T @ jacobian + 0.1 * np.eye(p), jacobian.T @ residual
        )
        np.testing.assert_allclose(damped, expected, atol=1e-10)
        expected = -np.linalg.pinv(jacobian, rcond=1e-10) @ residual
        np.testing.assert_allclose(exact, expected, rtol=1e-8, atol=1e-10)
    assert bool(finite)


def test_coefficients_hold_the_part_of_the_residual_in_range():
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)
    u = np.linalg.svd(jacobian, full_matrices=False)[0]
    for method in ("svd", "eigh"):
        of = lambda y, args, method=method: linearise(sines, y, args).spectrum(method)
        c = jax.jit(lambda *at, of=of: of(*at).coefficients)(*as_jax((y, args)))
        np.testing.assert_allclose(np.linalg.norm(c), np.linalg.norm(u.T @ r), rtol=1e-10)


def test_svd_resolves_what_eigh_cannot():
    a = np.diag([1.0, 1e-6, 1e-11])

    @jax.jit
    def eigenvalues(y, args):
        lin = linearise(linear, y, args)
        spectra = lin.spectrum("svd"), lin.spectrum(), lin.spectrum("eigh")
        return [spectrum.eigenvalues for spectrum in spectra]

    w, by_default, squared = eigenvalues(np.zeros(3), (a, np.ones(3)))
    np.testing.assert_allclose(w, [1, 1e-12, 1e-22], rtol=1e-9)
    np.testing.assert_allclose(by_default, w)
    assert np.count_nonzero(squared) == 2


def test_one_spectrum_serves_many_filters(mixed_case):
    lin, jacobian = mixed_case
    dampings = np.logspace(-3, 3, 5)

    @jax.jit
    def run(dampings):
        spectrum = linearise(mixed, POINT, X).spectrum()
        return jax.vmap(lambda damping: spectrum.step(Tikhonov(damping)))(dampings)

    r, steps = flat(lin.outputs), run(dampings)
    for i, damping in enumerate(dampings):
        step = flat(jax.tree.map(lambda leaf, i=i: leaf[i], steps))
        kernel = jacobian @ jacobian.T + damping * np.eye(7)
        np.testing.assert_allclose(
            step, -jacobian.T @ np.linalg.solve(kernel, r), rtol=1e-9, atol=1e-12
        )


def test_spectrum_of_a_pytree_in_the_parameters_structure(mixed_case):
    lin, jacobian = mixed_case
    delta = np.zeros(8)
    for _ in range(3):
        delta -= 0.01 * jacobian.T @ (flat(lin.outputs) + jacobian @ delta)

    @jax.jit
    def steps():
        lin = linearise(mixed, POINT, X)
        descent = GradientDescent(3, 0.01)
        return [lin.spectrum(method).step(descent) for method in ("svd", "eigh")]

    for step in steps():
        assert jax.tree.structure(step) == jax.tree.structure(POINT)
        np.testing.assert_allclose(flat(step), delta, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "bad", "shape"),
    each_pair(["svd", "eigh"], [np.nan, np.inf], [(60, 40), (40, 60)]),
)
def test_a_nonfinite_jacobian_gives_nan(shape, bad, method):
    a = np.random.default_rng(4).normal(size=shape)
    a[3, 5] = bad
    spectrum_of = jax.jit(
        lambda y, args: linearise(linear, y, args).spectrum(method).eigenvalues
    )
    y, b = jnp.zeros(shape[1]), jnp.ones(shape[0])
    finite = spectrum_of(y, (jnp.ones(shape), b))
    assert np.all(np.isfinite(finite))
    w = spectrum_of(y, (jnp.asarray(a), b))
    assert np.all(np.isnan(w))


@pytest.mark.parametrize("with_a_nan", [False, True])
def test_a_tall_jacobian_of_graded_columns(with_a_nan):
    """QR is the first step, so small columns keep their relative accuracy."""
    generator = np.random.default_rng(0)
    scale = np.array([1e-4, 1.0, 1e-12, 1e-8])
    columns = generator.normal(size=(5000, 4))
    a = jnp.asarray(columns * scale)
    if with_a_nan:
        a = a.at[7, 2].set(jnp.nan)

    @jax.jit
    def run(a):
        fn = lambda y, a: a @ y - columns.sum(axis=1)
        spectrum = linearise(fn, jnp.zeros(4), a).spectrum("svd")
        return spectrum.eigenvalues, spectrum.step(PseudoInverse())

    eigenvalues, step = run(a)
    if with_a_nan:
        assert np.all(np.isnan(eigenvalues))
        assert np.all(np.isnan(step))
    else:
        np.testing.assert_allclose(step * scale, np.ones(4), rtol=1e-9)


def test_lapack_is_guarded(monkeypatch):
    """Inspect the input of LAPACK, because a result could be right by luck."""
    given = []

    def record(original):
        def wrapped(matrix, **kwargs):
            finite = jnp.all(jnp.isfinite(matrix))
            jax.debug.callback(lambda x: given.append(bool(x)), finite)
            return original(matrix, **kwargs)

        return wrapped

    monkeypatch.setattr(jnp.linalg, "eigh", record(jnp.linalg.eigh))
    monkeypatch.setattr(jnp.linalg, "svd", record(jnp.linalg.svd))
    a = jnp.ones((4, 3)).at[0, 0].set(jnp.nan)
    for method in ("svd", "eigh"):
        for matrix in (a, a.T):

            @jax.jit
            def run(y, a, method=method):
                spectrum = linearise(lambda y, a: a @ y, y, a).spectrum(method)
                return spectrum.eigenvalues, spectrum.finite(), spectrum.gradient_norm()

            eigenvalues, finite, norm = run(np.ones(matrix.shape[1]), matrix)
            assert np.all(np.isnan(eigenvalues))
            assert not bool(finite)
            assert np.isnan(norm)
    jax.effects_barrier()
    assert given == [True] * 4


@pytest.mark.parametrize("method", ["kernel", "curvature"])
def test_cholesky_is_guarded(monkeypatch, method):
    given = []
    original = jax.scipy.linalg.cho_factor

    def wrapped(matrix, **kwargs):
        finite = jnp.all(jnp.isfinite(matrix))
        jax.debug.callback(lambda x: given.append(bool(x)), finite)
        return original(matrix, **kwargs)

    monkeypatch.setattr(jax.scipy.linalg, "cho_factor", wrapped)
    a = np.ones((4, 3))
    a[0, 0] = np.nan

    @jax.jit
    def step(a):
        lin = linearise(lambda y, a: a @ y, jnp.ones(3), a)
        problem = Quadratic(lin.jacobian, lin.outputs)
        return choose(problem, Tikhonov(1.0), method=method).solve(Tikhonov(1.0)).step

    assert np.all(np.isnan(step(a)))
    jax.effects_barrier()
    assert given == [True]


#
# Single precision, and mistakes
#


@pytest.mark.parametrize("method", ["svd", "eigh"])
def test_single_precision(method):
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)

    @jax.jit
    def run(y, args):
        lin = linearise(sines, y, args)
        spectrum = lin.spectrum(method)
        step = spectrum.step(Tikhonov(0.1))
        return lin.matrix(), lin.kernel(), spectrum.eigenvalues, step

    *others, step = run(*as_jax((y, args), jnp.float32))
    for array in (*others, step):
        assert array.dtype == jnp.float32
    expected = -np.linalg.solve(jacobian.T @ jacobian + 0.1 * np.eye(3), jacobian.T @ r)
    np.testing.assert_allclose(step, expected, rtol=1e-4)


def test_mixed_precision_of_parameters_and_outputs():
    y = {"a": jnp.asarray([0.5, 0.1], jnp.float32), "b": jnp.asarray(2.0, jnp.float64)}
    x = jnp.asarray([1.0, 2.0, 3.0], jnp.float64)

    def fn(y, x):
        a = y["a"].astype(x.dtype)
        return jnp.sin(x * a[0]) + a[1] * y["b"] ** x

    @jax.jit
    def steps(y, x):
        lin = linearise(fn, y, x)
        return [lin.spectrum(method).step(Tikhonov(0.1)) for method in ("svd", "eigh")]

    for step in steps(y, x):
        assert step["a"].dtype == jnp.float32
        assert step["b"].dtype == jnp.float64
        assert np.all(np.isfinite(flat(step)))


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (jnp.arange(3), "dtype int64"),
        ([jnp.ones(2), jnp.tanh], "an Equinox model use `gnlin.features.linearise_mod"),
        (
            {"a": jnp.ones(2), "b": jnp.array(1j)},
            "complex128: keep its real and its .* two",
        ),
        (jnp.array([True]), "dtype bool"),
        ({"a": jnp.ones(2), "b": 3}, r"dtype int64: convert it with `astype\(float\)`.$"),
        ((), "no parameters"),
        (None, "no parameters"),
        (jnp.ones((0, 3)), "no parameters"),
    ],
)
def test_parameters_that_are_not_real_numbers(y, words):
    with pytest.raises(ValueError, match=words):
        linearise(lambda y, args: jnp.ones(3), y)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda y: jnp.arange(3), "dtype int64"),
        (lambda y: y.astype(complex), "dtype complex128"),
        (lambda y: (y, y > 0), "dtype bool"),
        (lambda y: {}, "no residuals"),
        (lambda y: y[:0], "no residuals"),
    ],
)
def test_outputs_that_are_not_real_numbers(outputs, words):
    with pytest.raises(ValueError, match=words):
        linearise(lambda y, args: outputs(y), jnp.ones(3))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [int, np.int32, np.uint8, bool])
@pytest.mark.parametrize("loss", [gnlin.SquaredError(), gnlin.losses.Huber(1.0)])
def test_residuals_of_whole_numbers_have_one_message(dtype, loss):
    y, steps = jnp.ones(2), (lambda y, x: (y * x > 1).astype(dtype))
    group = gnlin.Residuals(steps, jnp.linspace(0, 2, 5), loss=loss)
    solver = gnlin.LevenbergMarquardt()
    words = "Residuals must be real .* of dtype .*: whole numbers and booleans have no"
    for run in (
        lambda: gnlin.solve(y, group),
        lambda: gnlin.fit(y, group, batch_size=2, steps=2),
        lambda: optx.least_squares(group, solver, y),
        lambda: optx.least_squares(group, optx.Dogleg(1e-3, 1e-3), y),
        lambda: gnlin.predict.covariance(y, group),
    ):
        with pytest.raises(ValueError, match=words):
            run()


def test_norms_of_columns_keep_to_the_budget():
    """The Jacobian has 80 MB."""
    fn = lambda y, _: (y + 0.1 * jnp.sin(y), y[1:] - y[:-1])
    y = jnp.linspace(0, 1, 2236)
    squares = jax.jit(
        lambda y: linearise(fn, y, memory_budget=10**6).jacobian.squared_columns()
    )
    memory = squares.lower(y).compile().memory_analysis().temp_size_in_bytes
    assert memory < 10**7
    expected = (1 + 0.1 * np.cos(y)) ** 2 + 2
    expected[[0, -1]] -= 1
    np.testing.assert_allclose(squares(y), expected)


def test_a_function_of_one_argument_is_told_how_it_is_called():
    with pytest.raises(ValueError, match=r"called as `fn\(y, args\)`, but its .* \(y\)"):
        linearise(lambda y: y**2, jnp.ones(3))


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_method_is_named():
    lin = linearise(lambda y, args: y, jnp.ones(2))
    with pytest.raises(ValueError, match=r"`method` must be .* 'qr'"):
        lin.spectrum("qr")


def scaled(lin):
    scale = jax.tree.map(lambda x: jnp.full_like(x, 2), lin.point)
    return ScaledColumns.of(lin.jacobian, scale)


def inverses(lin):
    inverse = gnlin.preconditioners.BlockDiagonal(1).inverse(lin.jacobian, 1.0)
    return ravel_pytree(inverse.mv(jax.tree.map(jnp.ones_like, lin.point)))[0]


# By name: what is computed from linearisations of all residuals and of some of them, and
# the same from their Jacobians in NumPy.
WITHIN_BUDGET = {
    "kernel of two": (lambda lin, some: some.kernel(lin), lambda a, b: b @ a.T),
    "scaled kernel": (lambda lin, _: scaled(lin).gram(), lambda a, _: a @ a.T / 4),
    "stacked kernel": (
        lambda lin, _: Stacked({"one": lin.jacobian}).gram(),
        lambda a, _: a @ a.T,
    ),
    "norms of rows": (
        lambda lin, _: lin.jacobian.squared_rows(),
        lambda a, _: (a**2).sum(axis=1),
    ),
    "block diagonal": (
        lambda lin, _: inverses(lin),
        lambda a, _: 1 / (1 + (a**2).sum(axis=0)),
    ),
}


@pytest.mark.parametrize("name", list(WITHIN_BUDGET))
def test_jacobians_by_passes_stay_within_the_memory_budget(name):
    """Each of four arrays fits in the budget, but not two of them."""
    compute, expected = WITHIN_BUDGET[name]
    y = {k: jnp.linspace(0.1, 0.2, 500) + 0.1 * i for i, k in enumerate("abcd")}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 2)))
    rows = 300 * 2000 * 8

    def fn(y, x):
        inner = x[:, 0] * (y["a"] @ y["c"]) + x[:, 1] * jnp.sum(y["b"] * y["d"] ** 2)
        return jnp.tanh(inner / 100)

    def both(y, x, **budget):
        return [linearise(fn, y, part, **budget) for part in (x, x[:50])]

    run = jax.jit(lambda y, x: compute(*both(y, x, memory_budget=int(0.3 * rows))))
    compiled = run.lower(y, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.5 * rows
    dense = jax.jit(lambda y, x: [lin.matrix() for lin in both(y, x)])
    matrices = map(np.asarray, dense(y, x))
    np.testing.assert_allclose(compiled(y, x), expected(*matrices), rtol=1e-9)


def test_passes_of_a_scaled_kernel_beyond_the_memory_budget():
    y = {k: jnp.ones(100) for k in "ab"}
    lin = linearise(lambda y, _: jnp.sin(y["a"][:9] * y["b"][:9]), y, memory_budget=9000)
    assert scaled(lin).cost().gram == gnlin.authoring.Passes(9, 9)


@pytest.mark.slow
def test_arrays_like_the_outputs_have_their_shapes():
    """Transposed targets have as many numbers, in another order."""
    inputs = jnp.arange(5.0)
    lin = linearise(lambda y, x: jnp.outer(x, y) ** 2, jnp.arange(1.0, 3.0), inputs)
    targets = jnp.arange(10.0).reshape(5, 2)
    spectrum, pairs = lin.spectrum(), gnlin.spectra.leading(lin, 2)
    flat = spectrum.shares(targets.ravel())
    np.testing.assert_array_equal(spectrum.shares(targets), flat)
    np.testing.assert_array_equal(
        spectrum.project(targets), spectrum.project(targets.ravel())
    )
    of_spectrum = spectrum.shares, spectrum.project, spectrum.with_residual
    for take in (*of_spectrum, pairs.spectrum, lin.with_outputs):
        take(targets)
        for wrong in (targets.T, targets[:, 0], [targets, targets]):
            with pytest.raises(ValueError, match=r"outputs' shapes, \(5, 2\), but have"):
                take(wrong)


@pytest.mark.parametrize("size", [1e20, 1e-22])
def test_eigenvalues_out_of_range_are_not_finite(size):
    matrix = jnp.array([[3.0, 1.0], [1.0, 2.0]], jnp.float32) * jnp.float32(size)
    lin = linearise(lambda y, a: a @ y, jnp.ones(2, jnp.float32), matrix)
    eigenvalues = lin.spectrum(method="svd").eigenvalues
    assert not np.any(np.isfinite(eigenvalues))
