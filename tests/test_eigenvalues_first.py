"""Undamped steps with `method="auto"`: by eigenvalues if these resolve the problem."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin


def problem(shape, smallest, rank, dtype, seed=0):
    """Build a problem with singular values from 1 to `smallest`, followed by zeros."""
    rng, k = np.random.default_rng(seed), min(shape)
    left, _ = np.linalg.qr(rng.normal(size=(shape[0], k)))
    right, _ = np.linalg.qr(rng.normal(size=(shape[1], k)))
    s = np.zeros(k)
    s[:rank] = np.geomspace(1, smallest, rank)
    a, b = left * s @ right.T, rng.normal(size=shape[0])
    step = -right[:, :rank] @ (left[:, :rank].T @ b / s[:rank])
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), step


def prepared(a, b, method="eigh-first"):
    y = jnp.zeros(a.shape[1], a.dtype)
    lin = gnlin.linearise(lambda y, ab: ab[0] @ y + ab[1], y, (a, b))
    quadratic = gnlin.authoring.SumOfSquares().expand(lin)
    return gnlin.authoring.choose(quadratic, gnlin.filters.PseudoInverse(), method=method)


@jax.jit
def step(a, b):
    way = prepared(a, b)
    answer = way.solve(gnlin.filters.PseudoInverse())
    return answer.step, way.resolved, way.gradient_norm


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
@pytest.mark.parametrize(
    ("smallest", "rank", "dtype", "resolved", "rtol"),
    [
        (0.1, 60, jnp.float64, True, 1e-12),
        (1e-2, 40, jnp.float64, True, 1e-10),
        (1e-4, 60, jnp.float64, False, 1e-10),
        (1e-8, 40, jnp.float64, False, 1e-7),
        (0.1, 40, jnp.float32, True, 1e-4),
        (1e-3, 60, jnp.float32, False, 1e-3),
    ],
)
def test_a_step(shape, smallest, rank, dtype, resolved, rtol):
    a, b, expected = problem(shape, smallest, rank, dtype)
    found, was_resolved, _ = step(a, b)
    assert bool(was_resolved) == resolved
    error = np.linalg.norm(np.asarray(found) - expected)
    assert error <= rtol * np.linalg.norm(expected)


def test_auto_takes_eigenvalues_when_an_svd_is_expensive():
    for size, expected in (((300, 500), "eigh-first"), ((5, 6), "svd")):
        shapes = (jax.ShapeDtypeStruct(s, float) for s in (size, size[:1]))
        # Tracing chooses the method, so nothing need be compiled.
        way = eqx.filter_eval_shape(prepared, *shapes, "auto")
        assert way.method == expected


def test_a_value_just_above_zero_is_seen():
    """One singular value of sixty is a thousand times above rounding."""
    a, b, _ = problem((60, 90), 0.1, 60, jnp.float64)
    u, s, vt = np.linalg.svd(np.asarray(a), full_matrices=False)
    for least, resolved in ((1e-9, False), (0.0, True)):
        s[-1] = least
        _, was_resolved, _ = step(jnp.asarray(u * s @ vt), b)
        assert bool(was_resolved) == resolved


def test_nonfinite_input_gives_nonfinite_output():
    a, b, _ = problem((60, 90), 0.1, 60, jnp.float64)
    found, _, gradient_norm = step(a.at[3, 4].set(jnp.nan), b)
    assert not np.isfinite(gradient_norm)
    assert np.isnan(found).all()


@pytest.mark.exhaustive
def test_a_network_with_cross_entropy():
    """The curvature of each example has a direction in which it is zero."""
    net = eqx.nn.MLP(6, 4, 8, 1, jnp.tanh, key=jax.random.key(0))
    net = jax.tree.map(lambda x: x.astype(float) if eqx.is_inexact_array(x) else x, net)
    x = jax.random.normal(jax.random.key(1), (8, 6))
    labels = jnp.arange(8) % 4
    losses = [
        gnlin.solve(
            net,
            (x, labels),
            gnlin.GaussNewton(method=method, search=None),
            loss=gnlin.SoftmaxCrossEntropy(),
            max_steps=2,
        ).history.loss
        for method in ("svd", "eigh-first")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
