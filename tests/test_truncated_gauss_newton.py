"""Truncated Gauss-Newton, compared with its definition and the textbook's iteration."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import (
    as_jax,
    deficient,
    each_pair,
    gauss_newton_step,
    least_squares,
    linear,
    literal_loop,
    sines,
    sines_data,
    sines_numpy,
    truncated_step,
)

import gnlin


TOLERANCES = [0.9, 0.5, 0.1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10]
SHAPES = {"tall": (30, 12), "wide": (12, 30)}
methods = pytest.mark.parametrize("method", ["dense", "matrix-free"])


@pytest.mark.parametrize(
    ("shape", "method", "damping"),
    each_pair(list(SHAPES.values()), ["dense", "matrix-free"], [0.0, 0.7]),
)
def test_the_definition_is_met_in_as_many_steps_as_the_textbooks(shape, damping, method):
    y, args = sines_data(shape)
    r, jacobian = sines_numpy(y, args)
    gradient = jacobian.T @ r
    for tolerance in TOLERANCES:
        solver = gnlin.TruncatedGaussNewton(tolerance, damping, method=method)
        solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
        step = np.asarray(solution.value) - y
        left = jacobian.T @ (jacobian @ step) + gradient + damping * step
        # The residual exceeds beta only by the rounding of `y + step - y`.
        bound = (tolerance + 1e-13) * np.linalg.norm(gradient)
        assert np.linalg.norm(left) <= bound
        expected, num_steps = truncated_step(r, jacobian, tolerance, damping)
        steps = int(solution.stats["num_inner_steps"])
        assert steps <= num_steps + 1
        if steps == num_steps:
            scale = np.linalg.norm(expected)
            np.testing.assert_allclose(step, expected, atol=1e-5 * scale)


def test_dense_and_matrix_free_agree_and_count_their_passes():
    y, args = as_jax(sines_data((12, 5)))
    dense, free, auto = (
        least_squares(
            sines, gnlin.TruncatedGaussNewton(0.05, method=method), y, args, max_steps=2
        )
        for method in ("dense", "matrix-free", "auto")
    )
    np.testing.assert_allclose(dense.value, free.value, rtol=1e-10)
    np.testing.assert_array_equal(dense.value, auto.value)
    inner = float(free.stats["num_inner_steps"])
    assert float(dense.stats["num_inner_steps"]) == inner
    # Each iteration takes one pass of either kind. Each of the two steps adds transposed
    # passes for the gradient and its rounding, and checks the true residual by one pass
    # of either kind.
    assert float(free.stats["num_vjps"]) == inner + 2 + 2 + 2
    assert float(free.stats["num_jvps"]) == inner + 2
    assert float(dense.stats["num_jvps"]) == 2 * 5
    assert float(dense.stats["num_vjps"]) == 0


def test_a_tolerance_below_rounding_is_met_as_far_as_it_goes():
    y, args = sines_data((7, 3))
    solver = gnlin.TruncatedGaussNewton(1e-300)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    expected = y + gauss_newton_step(*sines_numpy(y, args))
    np.testing.assert_allclose(solution.value, expected, rtol=1e-9)
    assert solution.result == optx.RESULTS.nonlinear_max_steps_reached


def test_single_precision_meets_loose_tolerances():
    y, args = sines_data((30, 12))
    single = as_jax((y, args), jnp.float32)
    r, jacobian = sines_numpy(*(np.asarray(y, np.float32), args))
    gradient = jacobian.T @ r
    for tolerance in (0.5, 1e-3):
        solver = gnlin.TruncatedGaussNewton(tolerance)
        solution = least_squares(sines, solver, *single, max_steps=1)
        step = np.asarray(solution.value, float) - np.asarray(single[0], float)
        left = jacobian.T @ (jacobian @ step) + gradient
        assert np.linalg.norm(left) <= (tolerance + 1e-4) * np.linalg.norm(gradient)


def test_max_inner_steps():
    y, args = sines_data((30, 12))
    r, jacobian = sines_numpy(y, args)
    solver = gnlin.TruncatedGaussNewton(1e-8, max_inner_steps=1)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    gradient = jacobian.T @ r
    pushed = jacobian @ gradient
    cauchy = -(gradient @ gradient) / (pushed @ pushed) * gradient
    np.testing.assert_allclose(solution.value, y + cauchy, rtol=1e-12)
    assert int(solution.stats["num_inner_steps"]) == 1


def test_schedules():
    y, args = sines_data((7, 3))
    solver = gnlin.TruncatedGaussNewton(
        lambda step: 0.5 * 0.1**step, damping=lambda step: 0.2 / (1 + step)
    )
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=4)
    num_inner = 0

    def step(r, jacobian, k):
        nonlocal num_inner
        delta, count = truncated_step(r, jacobian, 0.5 * 0.1**k, 0.2 / (1 + k))
        num_inner += count
        return delta

    np.testing.assert_allclose(solution.value, literal_loop(step, y, args, 4), rtol=1e-8)
    assert int(solution.stats["num_inner_steps"]) == num_inner


@pytest.mark.parametrize(
    ("shape", "method", "tolerance"),
    [
        ((6, 4), "dense", 0.1),
        ((4, 6), "dense", 1e-6),
        ((10, 4), "matrix-free", 1e-6),
    ],
)
def test_rank_deficient(shape, method, tolerance):
    """At the solution the gradient is only rounding, part of it where the curvature is
    zero. No step may follow that part."""
    for seed in range(3):
        y, args = deficient(shape, 2, seed)
        a, b = args
        solver = gnlin.TruncatedGaussNewton(tolerance, method=method)
        solution = least_squares(linear, solver, *as_jax((y, args)))
        assert solution.result == optx.RESULTS.successful
        expected = y - np.linalg.pinv(a, rcond=1e-10) @ (a @ y - b)
        np.testing.assert_allclose(solution.value, expected, atol=1e-8)


#
# Eisenstat and Walker's forcing sequence
#


def forcing(rule, tolerance, norm, previous):
    """Their choice 2, with its safeguard, in plain Python."""
    beta = rule.gamma * (norm / previous) ** rule.exponent
    safeguard = rule.gamma * tolerance**rule.exponent
    if safeguard > 0.1:
        beta = max(beta, safeguard)
    return min(max(beta, rule.minimum), rule.maximum)


@hypothesis.given(
    st.floats(1e-12, 0.99), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.booleans()
)
def test_forcing_sequence(tolerance, norm, previous, other):
    rule = gnlin.methods.EisenstatWalker()
    if other:
        rule = gnlin.methods.EisenstatWalker(0.3, 1.0, 1.618, 0.95, 1e-6)
    actual = rule.next_tolerance(*map(jnp.asarray, (tolerance, norm, previous)))
    np.testing.assert_allclose(
        actual, forcing(rule, tolerance, norm, previous), rtol=1e-12
    )


def test_forcing_sequence_in_the_solver():
    y, (a, _) = sines_data((30, 12), seed=5, size=0.3)
    args = (a, np.sin(a @ (y + 0.3 * np.cos(np.arange(12.0)))))  # has no residual
    rule = gnlin.methods.EisenstatWalker(initial=0.6)
    tolerance, previous = None, None
    tolerances = []

    def step(r, jacobian, k):
        nonlocal tolerance, previous
        norm = np.linalg.norm(jacobian.T @ r)
        tolerance = 0.6 if k == 0 else forcing(rule, tolerance, norm, previous)
        previous = norm
        tolerances.append(tolerance)
        return truncated_step(r, jacobian, tolerance)[0]

    expected = literal_loop(step, y, args, 5)
    solution = least_squares(
        sines, gnlin.TruncatedGaussNewton(rule), *as_jax((y, args)), max_steps=5
    )
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7)
    assert min(tolerances) < 1e-3 < max(tolerances), "the sequence has been at work"


def test_forcing_sequence_takes_fewer_inner_steps_than_a_tight_tolerance():
    y, args = as_jax(sines_data((30, 12), size=0.2))
    loose = least_squares(
        sines, gnlin.TruncatedGaussNewton(gnlin.methods.EisenstatWalker()), y, args
    )
    tight = least_squares(sines, gnlin.TruncatedGaussNewton(1e-10), y, args)
    for solution in (loose, tight):
        assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(loose.value, tight.value, rtol=1e-6)
    assert loose.stats["num_inner_steps"] < tight.stats["num_inner_steps"]
