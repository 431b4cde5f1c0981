"""Singular values of many small matrices at once, compared with LAPACK and with 80
bits."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin._linear_algebra import _lapack
from gnlin._linear_algebra._small_svd import by_rotations, svd


SHAPES = ((1, 1), (1, 5), (4, 4), (30, 2), (40, 6), (5, 17))
NUM_MATRICES = 10
pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="rotations are for the CPU"
)

of_many = jax.jit(jax.vmap(svd))


def sound(matrices, u, s, vt):
    """Check the factors' shapes and order, and that they reproduce the matrix to
    rounding."""
    eps = np.finfo(matrices.dtype).eps
    _, m, n = matrices.shape
    k = min(m, n)
    assert u.dtype == s.dtype == vt.dtype == matrices.dtype
    assert (u.shape[1:], s.shape[1:], vt.shape[1:]) == ((m, k), (k,), (k, n))
    assert np.all(s >= 0)
    assert np.all(s[:, 1:] <= s[:, :-1])
    largest = np.max(s, axis=1)[:, None, None]
    most = 20 * max(m, n) * eps
    assert np.all(np.abs((u * s[:, None]) @ vt - matrices) <= most * largest)
    expected = np.linalg.svd(matrices.astype(float), compute_uv=False)
    assert np.all(np.abs(s - expected) <= most * largest[:, :, 0])
    longer, shorter = (u, vt.mT) if m >= n else (vt.mT, u)
    np.testing.assert_allclose(
        shorter.mT @ shorter, np.tile(np.eye(k), (len(s), 1, 1)), atol=most
    )
    known = (s > 0).astype(s.dtype)
    products = known[:, :, None] * np.eye(k)
    np.testing.assert_allclose(longer.mT @ longer, products, atol=most)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([np.float32, np.float64]),
    rank=st.integers(0, 6),
    size=st.integers(-25, 25),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_a_singular_value_decomposition(shape, dtype, rank, size, seed):
    random = np.random.default_rng(seed)
    m, n = shape
    left = random.normal(size=(NUM_MATRICES, m, rank))
    matrices = left @ random.normal(size=(NUM_MATRICES, rank, n))
    matrices = (matrices * 10.0**size).astype(dtype)
    sound(matrices, *map(np.asarray, of_many(matrices)))


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    entries=st.lists(
        st.sampled_from([0.0, 1.0, -1.0, 1e-9, 3.0]), min_size=120, max_size=120
    )
)
def test_equal_zero_and_parallel_columns(entries):
    matrices = np.asarray(entries).reshape(10, 4, 3)
    sound(matrices, *map(np.asarray, of_many(matrices)))
    sound(matrices.mT.copy(), *map(np.asarray, of_many(matrices.mT)))


def by_more_digits(matrix):
    """Compute singular values by one-sided Jacobi, pair by pair, in 80 bits."""
    a = matrix.astype(np.longdouble)
    for _ in range(30):
        for i, j in zip(*np.triu_indices(a.shape[1], 1), strict=True):
            x, y = a[:, i].copy(), a[:, j].copy()
            if x @ y != 0:
                z = (y @ y - x @ x) / (2 * (x @ y))
                t = (1 if z >= 0 else -1) / (abs(z) + np.sqrt(1 + z * z))
                c = 1 / np.sqrt(1 + t * t)
                a[:, i], a[:, j] = c * x - c * t * y, c * t * x + c * y
    return np.sort(np.sqrt(np.sum(a * a, axis=0)))[::-1]


@pytest.mark.skipif(
    float(np.finfo(np.longdouble).eps) > 1e-18, reason="no more digits here"
)
@pytest.mark.parametrize("shape", [(6, 6), (24, 4)])
@pytest.mark.parametrize("order", [1, -1])
def test_small_columns_keep_their_digits_beside_large_ones(shape, order):
    """LAPACK is stable in the norm of all columns, and so loses the digits of the small
    ones."""
    m, n = shape
    matrices = np.random.default_rng(0).normal(size=(20, m, n))
    matrices *= 10.0 ** (-3 * np.arange(n))[::order]
    expected = np.stack([by_more_digits(matrix) for matrix in matrices]).astype(float)

    def error(s):
        return np.max(np.abs(s - expected) / expected, axis=1)

    here = error(of_many(matrices)[1])
    of_lapack = error(np.linalg.svd(matrices, compute_uv=False))
    assert np.all(here < 20 * np.finfo(float).eps)
    assert order == 1 or np.median(of_lapack) > 1e3 * np.median(here)


@pytest.mark.parametrize(
    ("bad", "shape"), [(np.nan, (3, 3)), (np.inf, (12, 3)), (-np.inf, (3, 12))]
)
def test_only_nonfinite_matrices_have_nan_factors(bad, shape):
    matrices = np.random.default_rng(1).normal(size=(12, *shape))
    clean = [np.asarray(x) for x in of_many(matrices)]
    matrices[5, 1, 2] = bad
    for factor, before in zip(of_many(matrices), clean, strict=True):
        assert np.all(np.isnan(factor[5]))
        np.testing.assert_array_equal(np.delete(factor, 5, 0), np.delete(before, 5, 0))


def test_lapack_where_there_is_one_matrix_or_few_or_they_are_large():
    def calls_lapack(fn, shape):
        return "gesdd" in jax.jit(fn).lower(jnp.ones(shape)).as_text()

    assert calls_lapack(svd, (9, 3))
    assert calls_lapack(jax.vmap(svd), (4, 9, 3))
    assert calls_lapack(jax.vmap(svd), (100, 9, 9))
    assert not calls_lapack(jax.vmap(svd), (100, 9, 3))
    assert not calls_lapack(jax.vmap(svd), (100, 3, 9))


@pytest.mark.slow
def test_mapped_twice_along_any_axes_and_in_a_loop():
    matrices = np.random.default_rng(2).normal(size=(3, 11, 12, 3))
    expected = np.linalg.svd(matrices, compute_uv=False)
    singular_values = lambda a: svd(a)[1]

    twice = jax.vmap(jax.vmap(singular_values))
    other = jax.vmap(jax.vmap(singular_values), in_axes=1, out_axes=1)
    for fn in (twice, jax.jit(other)):
        np.testing.assert_allclose(fn(matrices), expected, rtol=1e-12)

    def halved(a):
        shrink = lambda a: svd(0.5 * a)[1][0] * a / svd(a)[1][0]
        return jax.lax.while_loop(lambda a: jnp.max(jnp.abs(a)) > 1e-3, shrink, a)

    left = np.max(np.abs(jax.jit(jax.vmap(halved))(matrices[0])), axis=(1, 2))
    assert np.all((left > 0.5e-3) & (left <= 1e-3))


def test_more_matrices_than_go_at_once():
    matrices = np.random.default_rng(3).normal(size=(600, 9, 3))
    sound(matrices, *map(np.asarray, of_many(matrices)))


def test_derivatives_match_lapack():
    matrices = jnp.asarray(np.random.default_rng(4).normal(size=(10, 8, 3)))

    def of_projections(factorise, a):
        u, s, vt = factorise(a)
        return jnp.sum(jnp.log(s)) + (u * s[None]) @ vt[:, 0] @ (u @ vt[:, 1])

    @jax.jit
    @jax.vmap
    def derivatives(a):
        here, there = (functools.partial(of_projections, x) for x in (svd, _lapack.svd))
        return jax.jacfwd(here)(a), jax.jacrev(here)(a), jax.jacrev(there)(a)

    *found, expected = derivatives(matrices)
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-8)


@pytest.mark.slow
def test_fits_at_once_end_where_they_end_one_by_one():
    random = np.random.default_rng(5)
    t = np.linspace(0, 3, 15)
    truth = np.array([2.0, 1.0, 0.5]) + random.uniform(-0.3, 0.3, (12, 3))
    data = truth[:, :1] * np.exp(-truth[:, 1:2] * t) + truth[:, 2:]
    data = jnp.asarray(data + 0.02 * random.normal(size=data.shape))
    starts = jnp.asarray(np.tile([1.0, 2.0, 0.0], (12, 1)))

    def fit(y0, data):
        residuals = lambda y, data: y[0] * jnp.exp(-y[1] * t) + y[2] - data
        solver = gnlin.LevenbergMarquardt()
        return optx.least_squares(residuals, solver, y0, data, throw=False)

    at_once = jax.jit(jax.vmap(fit))(starts, data)
    assert np.all(at_once.result == optx.RESULTS.successful)
    one_by_one = [jax.jit(fit)(*each) for each in zip(starts, data, strict=True)]
    expected = np.stack([solution.value for solution in one_by_one])
    np.testing.assert_allclose(at_once.value, expected, rtol=1e-8)


def test_rotations_serve_one_matrix_too():
    matrix = np.random.default_rng(6).normal(size=(7, 4))
    u, s, vt = jax.jit(by_rotations)(matrix)
    sound(matrix[None], *(np.asarray(x)[None] for x in (u, s, vt)))
