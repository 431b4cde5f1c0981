"""Undamped steps by a sparse factorisation, or a dense one where that is not enough, are
the minimum-norm steps of NumPy's pseudo-inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_covariance import smoothed
from test_schur import flat, linearised, problem
from test_sparse_factorisation import chain

import gnlin
from gnlin._linearisation._quadratic import Quadratic
from gnlin._subproblem import _fallbacks, choose
from gnlin._subproblem._choose import way_of
from gnlin._subproblem._fallbacks import FactorisedFirst
from gnlin._subproblem._schur import SchurComplement
from gnlin._subproblem._sparse import SparseLU
from gnlin.filters import PseudoInverse


def matrix_of(lin):
    return np.asarray(jax.jit(lambda lin: lin.matrix())(lin))


def compare(lin, outputs, rest=None, *, is_resolved=True, tolerance=1e-9):
    """Compare with the pseudo-inverse, and check which way was taken."""

    @jax.jit
    def step(lin):
        ready = choose(
            Quadratic(lin.jacobian, outputs, rest), PseudoInverse(), 1, "sparse"
        )
        assert isinstance(ready, FactorisedFirst)
        return ready.solve(PseudoInverse()).step, ready.attempt(PseudoInverse())[1]

    found, resolved = step(lin)
    assert bool(resolved) == is_resolved
    jacobian = matrix_of(lin)
    inverse = np.linalg.pinv(jacobian, rcond=1e-12)
    expected = -inverse @ flat(outputs)
    if rest is not None:
        expected -= inverse @ inverse.T @ flat(rest)
    error = np.linalg.norm(flat(found) - expected)
    assert error <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("way", "with_rest"),
    [(SchurComplement, True), pytest.param(SparseLU, False, marks=pytest.mark.slow)],
)
def test_steps_are_those_of_the_pseudo_inverse(monkeypatch, way, with_rest):
    monkeypatch.setattr(_fallbacks, "_factorising", lambda cost: way)
    model, data = problem()
    rest = jax.tree.map(jnp.cos, model) if with_rest else None
    lin = jax.jit(linearised)(model, data)
    is_resolved = np.linalg.matrix_rank(matrix_of(lin)) == len(flat(model))
    compare(lin, lin.outputs, rest, is_resolved=is_resolved, tolerance=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("is_held", "num_unread"), [(True, 0), (False, 2)])
def test_graphs_with_and_without_a_gauge(is_held, num_unread):
    """Nothing holds the second chain, so its place may be anywhere, and the step is the
    shortest. Poses that nothing reads have no step."""
    start, groups = chain(40, [(0, 20), (3, 30)])

    def fn(pair, edge):
        return pair[1] - pair[0] - edge["measured"]

    seen = gnlin.Residuals(fn, groups["seen"].data, select=lambda edge: edge["ends"])
    groups = {"seen": seen} | ({"held": groups["held"]} if is_held else {})
    start = jnp.concatenate([start, jnp.ones((num_unread, 3))])
    lin = gnlin.features.linearise_model(start, groups)
    compare(lin, lin.outputs, is_resolved=is_held)


@pytest.mark.slow
def test_directions_that_are_nearly_flat_are_solved_densely():
    """The damping would be felt in them."""
    start, groups = chain(40)
    held = gnlin.Residuals(
        lambda pose, _: 1e-7 * pose, jnp.zeros(1, int), select=lambda k: k
    )
    lin = gnlin.features.linearise_model(start, groups | {"held": held})
    compare(lin, lin.outputs, is_resolved=False, tolerance=1e-6)


@pytest.mark.slow
def test_zeros_and_numbers_that_are_not_finite():
    start, _ = chain(6)
    nothing = gnlin.Residuals(
        lambda pose, _: 0 * pose + 1.0, jnp.arange(6), select=lambda k: k
    )
    lin = gnlin.features.linearise_model(start, nothing)
    step = lambda r: choose(
        Quadratic(lin.jacobian, r), PseudoInverse(), 1, "sparse"
    ).solve(PseudoInverse())
    np.testing.assert_array_equal(step(lin.outputs).step, np.zeros((6, 3)))
    start, groups = chain(6)
    lin = gnlin.features.linearise_model(start, groups)
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), lin.outputs)
    assert np.all(np.isnan(step(broken).step))


def test_one_undamped_step_is_the_smoother():
    """3,000 parameters: densely, this takes minutes."""
    seen = np.cumsum(np.random.default_rng(1).normal(size=1500)) / 10
    means, _, groups = smoothed(seen)
    solution = gnlin.solve(jnp.zeros((1500, 2)), groups, gnlin.GaussNewton(), max_steps=1)
    np.testing.assert_allclose(solution.model, means, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_what_is_chosen():
    """A sparse factorisation where it is cheap; a dense way for small problems, for a
    threshold of singular values, and in single precision."""
    start, groups = chain(400)
    lin = gnlin.features.linearise_model(start, groups)
    sparse = Quadratic(lin.jacobian, lin.outputs)
    assert way_of(sparse, PseudoInverse(), 1, "auto") is FactorisedFirst
    assert way_of(sparse, PseudoInverse(1e-8), 1, "auto") is not FactorisedFirst
    # Where everything is coupled, KLU takes longer than a dense decomposition.
    pairs = np.random.default_rng(0).integers(400, size=(1600, 2))
    coupled = chain(400, [(a, b) for a, b in pairs if a != b])
    lin = gnlin.features.linearise_model(*coupled)
    full = Quadratic(lin.jacobian, lin.outputs)
    assert way_of(full, PseudoInverse(), 1, "auto") is not FactorisedFirst
    for given in (chain(5), chain(400, dtype=jnp.float32)):
        lin = gnlin.features.linearise_model(*given)
        other = Quadratic(lin.jacobian, lin.outputs)
        assert way_of(other, PseudoInverse(), 1, "auto") is not FactorisedFirst
