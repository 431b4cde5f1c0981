"""Each filter, compared with the steps that it replaces, made one by one in NumPy."""

import decimal
import math

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import each_once

import gnlin
from gnlin.filters import (
    AbstractFilter,
    Damped,
    equivalent_damping,
    equivalent_period,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    PseudoInverse,
    Tikhonov,
)


# With a learning rate of 1 these are eta * w: zero, tiny, around 1, up to 2.
STABLE = np.array(
    [0.0, 1e-300, 1e-12, 1e-9, 1e-5, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.001, 1.5, 1.9, 1.9999]
)


def literal_steps(w, period, learning_rate, momentum=0.0):
    """g after `period` steps, each g += v, v = mu v + eta (1 - w g)."""
    g, v = np.zeros_like(w), np.zeros_like(w)
    for _ in range(period):
        v = momentum * v + learning_rate * (1 - w * g)
        g = g + v
    return g


def descent_in_longdouble(w, period, learning_rate):
    w = np.asarray(w, np.longdouble)
    x = np.longdouble(learning_rate) * w
    safe = np.where(w == 0, 1, w)
    with np.errstate(divide="ignore"):
        log_growth = period * np.log1p(-np.minimum(x, 2 - x))
    sign = np.where((x > 1) & (period % 2 == 1), -1, 1)
    g = np.where(sign > 0, -np.expm1(log_growth), 1 + np.exp(log_growth)) / safe
    return np.where(w == 0, period * learning_rate, g)


def heavy_ball_in_decimals(w, period, learning_rate, momentum):
    """Compute the power of the affine recurrence in 60 digits, where nothing cancels."""

    def compose(a, b):
        return (
            a[0] * b[0] + a[1] * b[2],
            a[0] * b[1] + a[1] * b[3],
            a[2] * b[0] + a[3] * b[2],
            a[2] * b[1] + a[3] * b[3],
            a[0] * b[4] + a[1] * b[5] + a[4],
            a[2] * b[4] + a[3] * b[5] + a[5],
        )

    values = []
    with decimal.localcontext() as context:
        context.prec = 60
        eta = decimal.Decimal(float(learning_rate))
        mu = decimal.Decimal(float(momentum))
        zero, one = decimal.Decimal(0), decimal.Decimal(1)
        for eigenvalue in w:
            x = eta * decimal.Decimal(float(eigenvalue))
            power, done = (
                (1 - x, mu, -x, mu, eta, eta),
                (one, zero, zero, one, zero, zero),
            )
            remaining = period
            while remaining:
                if remaining % 2:
                    done = compose(power, done)
                power = compose(power, power)
                remaining //= 2
            values.append(float(done[4]))
    return np.array(values)


def evaluate(filter, w):
    """Append zeros, which no filter notices, so that all operations have one shape."""
    padded = np.zeros(16, np.asarray(w).dtype)
    padded[: len(w)] = w
    out = filter(jnp.asarray(padded))
    assert out.dtype == padded.dtype
    assert out.shape == padded.shape
    return np.asarray(out)[: len(w)]


#
# Gradient descent
#


@pytest.mark.parametrize(
    ("period", "learning_rate"),
    [*((k, 1.0) for k in (1, 2, 3, 10, 101, 1000, 10**5)), (2, 0.037), (101, 0.037)],
)
def test_gradient_descent_is_the_literal_loop(period, learning_rate):
    w = STABLE / learning_rate
    expected = literal_steps(w, period, learning_rate)
    actual = evaluate(GradientDescent(period, learning_rate), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("period", [10**8, 10**8 + 1, 2**53, 3 * 10**15])
def test_gradient_descent_at_periods_that_cannot_be_stepped(period):
    expected = descent_in_longdouble(STABLE, period, 1.0)
    actual = evaluate(GradientDescent(period, 1.0), STABLE)
    np.testing.assert_allclose(actual, expected.astype(float), rtol=1e-12, atol=0)


def test_gradient_descent_takes_a_period_beyond_all_integers_of_jax():
    np.testing.assert_allclose(
        evaluate(GradientDescent(10**25, 0.5), np.array([0.0, 1e-30, 0.5, 1.0])),
        [5e24, -math.expm1(-0.5e-5) / 1e-30, 2.0, 1.0],
        rtol=1e-12,
    )


@pytest.mark.parametrize("period", [1, 2, 7, 100])
def test_gradient_descent_above_two_diverges_as_the_steps_do(period):
    w = np.array([2.0, 2.0001, 2.5, 4.0, 50.0])
    expected = literal_steps(w, period, 1.0)
    actual = evaluate(GradientDescent(period, 1.0), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("period", "momentum"),
    [
        *((k, None) for k in (10**8, 10**8 + 1, math.inf)),
        (10**8, 0.0),
        (10**8 + 1, 0.9),
        (math.inf, 0.9),
    ],
)
def test_overflow_is_an_infinity_and_never_a_nan(period, momentum):
    w = np.array([0.0, 1e-300, 1.0, 1.9, 4.5, 1e10, 1e300])
    if momentum is None:
        actual = evaluate(GradientDescent(period, 1.0), w)
    else:
        actual = evaluate(HeavyBall(period, 1.0, momentum), w)
    assert not np.any(np.isnan(actual))
    assert np.all(np.isfinite(actual[:4]))
    assert np.all(np.isinf(actual[4:]))


def test_exactly_two_oscillates_for_ever():
    two = np.array([2.0])
    assert evaluate(GradientDescent(10**8, 1.0), two) == 0.0
    assert evaluate(GradientDescent(10**8 + 1, 1.0), two) == 1.0
    assert np.isinf(evaluate(GradientDescent(math.inf, 1.0), two))
    assert np.isinf(evaluate(HeavyBall(math.inf, 1.0, 0.5), np.array([3.0])))


def test_exactly_one_is_solved_by_one_step():
    for period in (1, 2, 10**8, math.inf):
        assert evaluate(GradientDescent(period, 0.25), np.array([4.0])) == 0.25


@pytest.mark.parametrize("learning_rate", [1.0, 1e-3])
def test_infinite_period_is_the_pseudo_inverse(learning_rate):
    w = np.array([0.0, 1e-300, 1e-10, 0.5, 1.0, 1.99]) / learning_rate
    expected = evaluate(PseudoInverse(), w)
    for filter in (
        GradientDescent(math.inf, learning_rate),
        GradientDescent(jnp.array(jnp.inf), learning_rate),
        HeavyBall(math.inf, learning_rate, 0.9),
        GradientFlow(math.inf),
    ):
        np.testing.assert_allclose(evaluate(filter, w), expected, rtol=1e-15)


def test_log_growth_is_that_of_each_component():
    w = np.array([0.0, 0.5, 1.5, 3.0])
    actual = GradientDescent(7, 1.0).log_growth(jnp.asarray(w))
    np.testing.assert_allclose(actual, 7 * np.log(np.abs(1 - w)), rtol=1e-14)


@pytest.mark.parametrize("dtype", [int, np.int32, np.int64, np.float32, float])
@pytest.mark.parametrize("period", [4, 5])
def test_parity_of_the_period_in_any_dtype(period, dtype):
    period_ = dtype(period) if dtype in (int, float) else jnp.asarray(period, dtype)
    w = np.array([1.5, 1.9])
    actual = evaluate(GradientDescent(period_, 1.0), w)
    np.testing.assert_allclose(actual, literal_steps(w, period, 1.0), rtol=1e-12)


#
# Heavy ball
#


@pytest.mark.parametrize(
    ("period", "momentum"),
    each_once([1, 2, 3, 10, 101, 1000], [0.0, 0.5, 0.9]),
)
def test_heavy_ball_is_the_literal_loop(period, momentum):
    w = np.append(STABLE, [2.5, 2.9]) if momentum >= 0.5 else STABLE
    expected = literal_steps(w, period, 1.0, momentum)
    actual = evaluate(HeavyBall(period, 1.0, momentum), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("period", [2, 7, 100])
def test_heavy_ball_diverges_as_the_steps_do(period):
    w = np.array([3.5, 4.0, 50.0])
    expected = literal_steps(w, period, 1.0, 0.5)
    actual = evaluate(HeavyBall(period, 1.0, 0.5), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("period", "momentum"),
    [(10**5, 0.0), (10**5, 0.99), (10**8, 0.5), (2**40 + 1, 0.99)],
)
def test_heavy_ball_at_periods_that_cannot_be_stepped(period, momentum):
    w = np.append(STABLE, 1e-8)
    expected = heavy_ball_in_decimals(w, period, 1.0, momentum)
    actual = evaluate(HeavyBall(period, 1.0, momentum), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize(("period", "traced"), [(1, False), (2, True), (5, False)])
def test_derivatives_of_gradient_descent_are_those_of_the_loop(period, traced):
    """Also at eta w = 1, where one step solves the problem and the logarithm of the
    factor is infinite."""
    w, eta = jnp.asarray([0.3, 1.0, 2.0, 3.0, 3.9]), 0.5

    def literal(w, eta):
        g = jnp.zeros_like(w)
        for _ in range(period):
            g = g + eta * (1 - w * g)
        return g

    steps = jnp.asarray(float(period)) if traced else period
    by_formula = lambda w, eta: GradientDescent(steps, eta)(w)
    for derivative in (jax.jacfwd, jax.jacrev, jax.hessian):
        expected, actual = (
            jax.jit(jax.vmap(derivative(fn, (0, 1)), (0, None)))(w, eta)
            for fn in (literal, by_formula)
        )
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    by_period = jax.vmap(jax.grad(lambda k, w: GradientDescent(k, eta)(w)), (None, 0))
    assert np.all(np.isfinite(by_period(float(period), w)))


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_derivatives_without_end_are_those_of_the_inverse(traced):
    """The exponential of minus infinity has no derivative of its own."""
    forever = jnp.asarray(math.inf) if traced else math.inf
    w = jnp.asarray([0.0, 0.5, 1.0, 2.0, 3.0])
    expected = jax.jit(jax.vmap(jax.grad(PseudoInverse())))(w)
    for filter in (GradientFlow(forever), GradientDescent(forever, 0.5)):
        found = jax.jit(jax.vmap(jax.grad(filter)))(w)
        np.testing.assert_allclose(found, expected)
    by_rate = jax.grad(lambda eta: jnp.sum(GradientDescent(forever, eta)(w)))
    assert by_rate(0.5) == 0


def test_momentum_has_no_reverse_mode():
    w = np.array([0.0, 0.5, 1.5])
    total = lambda eta: jnp.sum(HeavyBall(10, eta, 0.9)(jnp.asarray(w)))
    assert np.isfinite(jax.jit(jax.jacfwd(total))(0.05))
    with pytest.raises(RuntimeError, match=r"no reverse-mode derivative.*`jax.jvp`"):
        jax.grad(total)(0.05)


#
# Single precision
#

SINGLE = np.array([0.0, 1e-30, 1e-8, 1e-5, 1e-3, 0.3, 1.0, 1.7, 1.99], np.float32)


@pytest.mark.parametrize("period", [1, 3, 10**5, 10**8 + 1])
def test_gradient_descent_in_single_precision(period):
    expected = descent_in_longdouble(SINGLE, period, 1.0)
    actual = evaluate(GradientDescent(period, 1.0), SINGLE)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected.astype(float), rtol=1e-6)


@pytest.mark.parametrize("period", [1, 3, 10**5, 10**8 + 1])
def test_heavy_ball_in_single_precision(period):
    momentum = np.float32(0.9)
    expected = heavy_ball_in_decimals(SINGLE, period, 1.0, momentum)
    actual = evaluate(HeavyBall(period, 1.0, jnp.asarray(momentum)), SINGLE)
    assert actual.dtype == np.float32
    # Terms of order one cancel, so compare to their rounding.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "filter", [PseudoInverse(1e-3), Tikhonov(0.3), GradientFlow(7.0)], ids=str
)
def test_other_filters_in_single_precision(filter):
    expected = evaluate(filter, SINGLE.astype(float))
    np.testing.assert_allclose(evaluate(filter, SINGLE), expected, rtol=1e-6)


#
# The others
#


def test_pseudo_inverse_matches_numpy():
    generator = np.random.default_rng(0)
    u, _ = np.linalg.qr(generator.normal(size=(5, 5)))
    v, _ = np.linalg.qr(generator.normal(size=(4, 4)))
    s = np.array([3.0, 0.3, 0.02, 1e-9])
    jacobian = u[:, :4] * s @ v.T
    for rcond in (0.0, 1e-5, 0.01, 0.2):
        g = evaluate(PseudoInverse(rcond), s**2)
        np.testing.assert_allclose(
            v * (s * g) @ u[:, :4].T,
            np.linalg.pinv(jacobian, rcond=rcond),
            rtol=1e-6,
            atol=1e-12 / s[g > 0].min(),
        )


def test_pseudo_inverse_cutoff_is_of_singular_values_and_inclusive():
    w = np.array([0.0, 0.25, 0.2501, 1.0, 4.0])
    np.testing.assert_array_equal(
        evaluate(PseudoInverse(0.25), w) > 0, [False, False, True, True, True]
    )
    np.testing.assert_array_equal(evaluate(PseudoInverse(), w)[1:], 1 / w[1:])
    assert evaluate(PseudoInverse(), w)[0] == 0


def test_tikhonov():
    w = np.array([0.0, 1e-300, 1.0, 1e300])
    np.testing.assert_allclose(evaluate(Tikhonov(0.5), w), 1 / (w + 0.5), rtol=1e-15)
    np.testing.assert_array_equal(
        evaluate(Tikhonov(0.0), w), evaluate(PseudoInverse(), w)
    )


def test_gradient_flow_is_the_limit_of_gradient_descent():
    w, time = np.array([0.0, 1e-12, 1e-3, 0.5, 3.0, 40.0]), 2.5
    flow = evaluate(GradientFlow(time), w)
    np.testing.assert_allclose(flow[1:], -np.expm1(-w[1:] * time) / w[1:], rtol=1e-15)
    assert flow[0] == time
    for period in (10**6, 10**8, 10**10):
        descent = evaluate(GradientDescent(period, time / period), w)
        np.testing.assert_allclose(descent, flow, rtol=2000 / period + 1e-14)
    assert evaluate(GradientFlow(0.0), w).max() == 0


def test_a_custom_filter_is_a_callable_module():
    class Halved(AbstractFilter):
        def __call__(self, eigenvalues):
            return 0.5 * PseudoInverse()(eigenvalues)

    assert evaluate(Halved(), np.array([4.0])) == 0.125


@pytest.mark.parametrize(
    "grid",
    [
        lambda v: GradientDescent(v, 0.3),
        lambda v: HeavyBall(v, 0.3, 0.5),
        lambda v: GradientFlow(v),
        lambda v: Tikhonov(v),
    ],
)
def test_vmap_over_a_parameter(grid):
    w = np.array([0.0, 0.1, 1.0, 5.0])
    values = np.array([1.0, 2.0, 7.0, 100.0, np.inf])
    if isinstance(grid(1.0), Tikhonov):
        values = values[:-1]
    together = jax.jit(jax.vmap(lambda v: grid(v)(jnp.asarray(w))))(values)
    one_by_one = np.stack([evaluate(grid(float(v)), w) for v in values])
    np.testing.assert_allclose(together, one_by_one, rtol=1e-13)


def test_vmap_over_learning_rate_and_momentum():
    w, grid = np.array([0.0, 0.1, 1.0]), np.array([0.1, 0.5, 0.9])
    together = jax.jit(jax.vmap(lambda v: HeavyBall(9, v, v)(jnp.asarray(w))))(grid)
    one_by_one = np.stack([literal_steps(w, 9, v, v) for v in grid])
    np.testing.assert_allclose(together, one_by_one, rtol=1e-13)


def test_a_filter_is_a_pytree_of_its_parameters():
    leaves = jax.tree.leaves(HeavyBall(5, 0.1, 0.9))
    assert leaves == [5, 0.1, 0.9]


#
# Properties
#

eigenvalues = st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5).map(np.array)
periods = st.integers(1, 10**9)
momenta = st.floats(0.0, 0.99)


@hypothesis.given(eigenvalues, periods)
def test_stable_descent_solves_a_fraction_of_each_component(w, period):
    for scaled, ceiling in ((w, 1.0), (2 * w, 2.0)):
        solved = scaled * evaluate(GradientDescent(period, 1.0), scaled)
        assert np.all(solved >= -1e-15)
        assert np.all(solved <= ceiling + 1e-15)


@hypothesis.given(eigenvalues, periods, periods)
def test_more_steps_solve_more(w, fewer, more):
    fewer, more = sorted((fewer, more))
    first = evaluate(GradientDescent(fewer, 1.0), w)
    second = evaluate(GradientDescent(more, 1.0), w)
    assert np.all(second >= first * (1 - 1e-14))


@hypothesis.given(eigenvalues, st.integers(1, 10**5))
def test_heavy_ball_without_momentum_is_gradient_descent(w, period):
    np.testing.assert_allclose(
        evaluate(HeavyBall(period, 1.0, 0.0), 1.9 * w),
        evaluate(GradientDescent(period, 1.0), 1.9 * w),
        rtol=1e-10,
    )


@hypothesis.given(st.floats(1e-8, 1e8), st.floats(1e-8, 1e8), momenta)
def test_equivalent_damping_and_period_are_inverse(damping, learning_rate, momentum):
    period = equivalent_period(damping, learning_rate, momentum)
    there = (1 - momentum) / (learning_rate * damping)
    np.testing.assert_allclose(period, there, rtol=1e-14)
    whole = math.ceil(period)
    back = equivalent_damping(whole, learning_rate, momentum)
    again = equivalent_period(back, learning_rate, momentum)
    np.testing.assert_allclose(again, whole, rtol=1e-13)


@hypothesis.given(st.floats(-3.0, 3.0), st.floats(-6.0, 3.0))
def test_equivalent_filters_are_near(log_damping, log_w):
    """1 - (1 + x)^-1 and 1 - e^-x differ by less than 0.3 whatever x is."""
    damping, w = 10.0**log_damping, np.array([10.0**log_w])
    period = round(equivalent_period(damping, learning_rate=1e-7))
    descent = w * evaluate(GradientDescent(period, 1e-7), w)
    damped = w * evaluate(Tikhonov(damping), w)
    assert np.all(np.abs(descent - damped) < 0.3)


def test_equivalents_at_the_ends():
    assert equivalent_damping(math.inf, 0.1) == 0
    assert equivalent_period(0.0, 0.1) == math.inf
    assert equivalent_period(0, 0.1) == math.inf
    assert equivalent_period(jnp.array(0.0), 0.1) == math.inf
    assert equivalent_damping(10**5, 1e-5) == pytest.approx(1.0)
    assert equivalent_damping(10**5, 1e-5, 0.9) == pytest.approx(0.1)
    grid = jax.vmap(lambda k: equivalent_damping(k, 0.1))(jnp.array([1, 10]))
    np.testing.assert_allclose(grid, [10, 1])


#
# Mistakes
#


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: PseudoInverse(-1e-3), "rcond"),
        (lambda: PseudoInverse(math.nan), "rcond"),
        (lambda: Tikhonov(-1.0), "damping"),
        (lambda: Tikhonov(math.inf), "damping"),
        (lambda: Tikhonov(math.nan), "damping"),
        (lambda: Tikhonov(jnp.array(-1.0)), "damping"),
        (lambda: GradientDescent(0, 0.1), "period"),
        (lambda: GradientDescent(-1, 0.1), "period"),
        (lambda: GradientDescent(2.5, 0.1), "period"),
        (lambda: GradientDescent(math.nan, 0.1), "period"),
        (lambda: GradientDescent(-math.inf, 0.1), "period"),
        (lambda: GradientDescent(1, 0.0), "learning_rate"),
        (lambda: GradientDescent(1, -1.0), "learning_rate"),
        (lambda: GradientDescent(1, math.inf), "learning_rate"),
        (lambda: GradientDescent(1, math.nan), "learning_rate"),
        (lambda: GradientFlow(-1.0), "time"),
        (lambda: GradientFlow(math.nan), "time"),
        (lambda: HeavyBall(0, 0.1, 0.5), "period"),
        (lambda: HeavyBall(1, 0.0, 0.5), "learning_rate"),
        (lambda: HeavyBall(1, 0.1, 1.0), "momentum"),
        (lambda: HeavyBall(1, 0.1, -0.1), "momentum"),
        (lambda: HeavyBall(1, 0.1, math.nan), "momentum"),
        (lambda: equivalent_damping(0, 0.1), "period"),
        (lambda: equivalent_damping(1, 0.0), "learning_rate"),
        (lambda: equivalent_period(-1.0, 0.1), "damping"),
        (lambda: equivalent_period(1.0, 0.1, 1.0), "momentum"),
    ],
)
def test_a_bad_parameter_is_named_in_one_sentence(build, name):
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        build()
    message = str(caught.value)
    assert message.endswith(" was given.")
    assert "\n" not in message


@pytest.mark.usefixtures("unchecked")
def test_damped_needs_a_filter():
    with pytest.raises(ValueError, match="`filter` must be a function of the eigen"):
        Damped("a", 1.0)


@pytest.mark.parametrize("method", ["svd", "eigh"])
def test_the_derivative_without_damping_is_that_of_the_pseudo_inverse(method):
    """The Jacobian has rank 2 of 3 for every scale of its middle column, and the space
    that its rows span changes with the scale."""
    matrix = np.array([[1.0, 2, 3], [2, 4, 6], [0, 1, 1], [1, 3, 4]])
    r = np.array([1.0, -1, 2, 0.5])
    scaled = lambda scale, numpy: matrix * numpy.stack([1.0, scale, 1.0])[None]

    def step(scale, filter):
        rows = scaled(scale, jnp)
        lin = gnlin.linearise(lambda y, _: rows @ y - r, jnp.zeros(3))
        return lin.spectrum(method).step(filter)

    by_hand = lambda scale: np.linalg.pinv(scaled(scale, np)) @ r
    expected = (by_hand(1.2 + 1e-5) - by_hand(1.2 - 1e-5)) / 2e-5
    for filter in (Tikhonov(0.0), PseudoInverse()):
        found = jax.jit(jax.jacfwd(lambda scale, filter=filter: step(scale, filter)))(1.2)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_another_number_runs_the_same_program():
    lin, traces = gnlin.linearise(lambda y, _: jnp.sin(y), jnp.arange(3.0)), []

    @eqx.filter_jit
    def step(lin, filter):
        traces.append(filter)
        return lin.spectrum().step(filter)

    for number in (1e-3, 1e-2):
        step(lin, PseudoInverse(number))
        step(lin, HeavyBall(10, 0.1, 0.5 + number))
    assert len(traces) == 2


def test_what_is_wrong_with_a_nan():
    with pytest.raises(ValueError, match="`damping` must not be NaN"):
        Tikhonov(math.nan)
    with pytest.raises(ValueError, match="`damping` must not be negative"):
        Tikhonov(-1.0)
