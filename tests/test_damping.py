"""Each damping rule, compared with its definition and on problems with known ends."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from hypothesis import given, settings, strategies as st
from problems import least_squares, linear, rosenbrock

import gnlin
from gnlin.damping import Nielsen, Trial, TrustRegion


def trial(damping=1.0, ratio=1.0, *, accepted=True, length=1.0):
    numbers = (jnp.array(x, float) for x in (damping, ratio))
    length, zero = jnp.array(length, float), jnp.zeros(())
    no = jnp.array(False)
    return Trial(*numbers, jnp.array(accepted), length, zero, zero, no, zero, no)


@given(ratio=st.floats(0, 1), damping=st.floats(1e-10, 1e10))
@settings(deadline=None, max_examples=20)
def test_nielsens_rule(ratio, damping):
    rule = Nielsen()
    state = rule.after(rule.init(jnp.dtype(float)), trial(damping, ratio))
    expected = damping * max(1 / 3, 1 - (2 * ratio - 1) ** 3)
    if ratio >= 0.98:  # differs from Nielsen's
        expected = damping / 10
    assert float(state.damping) == pytest.approx(expected)


def test_nielsens_damping_doubles_its_growth():
    rule, factors = Nielsen(), []
    state = rule.init(jnp.dtype(float))
    for accepted in (False, False, False, True, False):
        state = rule.after(state, trial(ratio=0.95, accepted=accepted))
        factors.append(float(state.damping))
    assert factors == pytest.approx([2, 4, 8, 1 / 3, 2])


def test_an_exact_prediction_lowers_the_damping_at_once():
    rule = Nielsen()
    state = rule.init(jnp.dtype(float))
    lower = [rule.after(state, trial(ratio=r)).damping for r in (0.97, 0.98, 1.0)]
    np.testing.assert_allclose(lower, [1 / 3, 0.1, 0.1])


@pytest.mark.parametrize(
    ("ratio", "accepted", "radius"),
    [(0.9, True, 6.0), (0.5, True, 5.0), (0.1, True, 1.5), (0.9, False, 0.75)],
)
def test_the_radius(ratio, accepted, radius):
    state = eqx.tree_at(
        lambda s: s.radius, TrustRegion().init(jnp.dtype(float)), jnp.array(5.0)
    )
    after = TrustRegion().after(state, trial(2.0, ratio, accepted=accepted, length=3.0))
    assert float(after.radius) == pytest.approx(radius)
    assert float(after.damping) == 2


MATRICES = {
    "square": (6, 6, 6),
    "tall": (9, 4, 4),
    "wide": (4, 9, 4),
    "rank-deficient": (8, 6, 3),
    "one of each": (1, 1, 1),
}


def matrix(shape, seed=0):
    m, p, rank = shape
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(m, rank)), rng.normal(size=(rank, p))
    return left @ np.diag(2.0 ** -np.arange(rank)) @ right, rng.normal(size=m)


@pytest.mark.parametrize(
    ("method", "dtype", "shape"),
    [
        ("svd", jnp.float32, "square"),
        ("svd", jnp.float64, "tall"),
        ("eigh", jnp.float64, "wide"),
        ("kernel", jnp.float64, "rank-deficient"),
        ("matrix-free", jnp.float32, "rank-deficient"),
    ],
)
def test_the_step_is_as_long_as_the_radius(shape, method, dtype):
    a, b = matrix(MATRICES[shape])
    longest = np.linalg.norm(np.linalg.lstsq(a, b, rcond=None)[0])

    @jax.jit
    def length(radius, y):
        lin = gnlin.linearise(
            lambda y, _: jnp.asarray(a, dtype) @ y + jnp.asarray(b, dtype), y
        )
        problem = gnlin.authoring.SumOfSquares().expand(lin)
        subproblem = gnlin.authoring.choose(
            problem, gnlin.filters.Tikhonov(1.0), method=method
        )
        rule = TrustRegion(factor=radius)
        # |y| = 0: the radius itself
        damping = rule.damping(rule.init(jnp.dtype(dtype)), subproblem, y)
        return jnp.linalg.norm(subproblem.solve(gnlin.filters.Tikhonov(damping)).step)

    for part in (1e-3, 0.1, 0.7):
        radius = part * longest
        point = jnp.zeros(a.shape[1], dtype)
        step = float(length(jnp.asarray(radius, dtype), point))
        assert abs(step - radius) <= 0.11 * radius


def test_a_step_within_the_radius_is_undamped():
    a, b = matrix(MATRICES["tall"])
    rule = TrustRegion(factor=1e6)

    @jax.jit
    def damping(y):
        lin = gnlin.linearise(lambda y, _: jnp.asarray(a) @ y + jnp.asarray(b), y)
        subproblem = gnlin.authoring.choose(
            gnlin.authoring.SumOfSquares().expand(lin), gnlin.filters.PseudoInverse()
        )
        return rule.damping(rule.init(jnp.dtype(float)), subproblem, lin.point)

    assert float(damping(jnp.ones(4))) < 1e-20


@pytest.mark.parametrize(
    ("rule", "acceleration"),
    [
        (None, True),
        (Nielsen(1e-2), True),
        (TrustRegion(), False),
    ],
)
def test_on_a_curved_valley(rule, acceleration):
    solver = gnlin.LevenbergMarquardt(damping=rule, acceleration=acceleration)
    solution = least_squares(rosenbrock, solver, jnp.array([-1.2, 1.0]))
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, 1, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_a_radius_shrinks_if_a_factorisation_fails(factor):
    """A curvature of rank 3 has no Cholesky factor with a tiny damping."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 3)) @ rng.normal(size=(3, 8)), rng.normal(size=8)
    residual = lambda x, args: args[0] @ x + 0.1 * (args[0] @ x) ** 2 - args[1]
    args, start = (jnp.asarray(a), jnp.asarray(b)), jnp.ones(8)

    def loss(damping, method):
        solver = gnlin.LevenbergMarquardt(damping=damping, method=method)
        solution = least_squares(residual, solver, start, args)
        assert solution.result == optx.RESULTS.successful
        return jnp.sum(residual(solution.value, args) ** 2)

    expected = loss(TrustRegion(), "svd")
    found = loss(TrustRegion(factor), "curvature")
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_a_number_is_nielsens():
    y0 = jnp.array([-1.2, 1.0])
    number, rule = (
        least_squares(rosenbrock, gnlin.LevenbergMarquardt(damping=damping), y0)
        for damping in (0.1, Nielsen(0.1))
    )
    assert number.stats == rule.stats
    np.testing.assert_array_equal(number.value, rule.value)


class Halved(gnlin.damping.AbstractDamping):
    """A user-defined rule: half the damping after an accepted step, ten times after a
    rejected one."""

    def init(self, dtype):
        return jnp.ones((), dtype)

    def damping(self, state, subproblem, y):
        return state

    def after(self, state, trial):
        return state * jnp.where(trial.accepted, 0.5, 10.0)


def test_a_user_defined_rule():
    solver = gnlin.LevenbergMarquardt(damping=Halved())
    solution = least_squares(rosenbrock, solver, jnp.array([-1.2, 1.0]))
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, 1, atol=1e-8)


class Counted(Halved):
    """A rule that returns plain numbers, or a state of another type."""

    changes: bool = False

    def init(self, dtype):
        return 0

    def damping(self, state, subproblem, y):
        return 1e-3

    def after(self, state, trial):
        return state + (0.5 if self.changes else 1)


class Halving(Halved):
    def init(self, dtype):
        return jnp.array(1e-3, jnp.float64)

    def after(self, state, trial):
        return trial.damping / 2


@pytest.mark.slow
def test_a_rule_may_return_plain_numbers():
    a, b = matrix(MATRICES["tall"])
    args = jnp.asarray(a), jnp.asarray(b)
    solver = gnlin.LevenbergMarquardt(damping=Counted())
    solution = least_squares(linear, solver, jnp.ones(4), args)
    expected, *_ = np.linalg.lstsq(a, b)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6)
    # A state may have another precision than the numbers of a trial.
    solver = gnlin.LevenbergMarquardt(damping=Halving())
    single = jax.tree.map(lambda x: x.astype(jnp.float32), (jnp.ones(4), args))
    found = least_squares(linear, solver, *single)
    np.testing.assert_allclose(found.value, expected, rtol=1e-3)
    solver = gnlin.LevenbergMarquardt(damping=Counted(changes=True))
    with pytest.raises(ValueError, match=r"state that `after` of Counted .* `init`"):
        least_squares(linear, solver, jnp.ones(4), args)


@pytest.mark.slow
def test_one_program_for_all_numbers():
    compiled = []

    def residual(y, args):
        compiled.append(1)
        return rosenbrock(y, args)

    @eqx.filter_jit
    def end(rule):
        solver = gnlin.LevenbergMarquardt(damping=rule)
        return optx.least_squares(residual, solver, jnp.array([-1.2, 1.0])).value

    end(TrustRegion(1.0))
    traced = len(compiled)
    end(TrustRegion(10.0))
    assert len(compiled) == traced
    swept = jax.vmap(lambda factor: end(TrustRegion(factor)))(
        jnp.array([0.1, 1.0, 100.0])
    )
    np.testing.assert_allclose(swept, 1, atol=1e-6)


def test_a_linear_problem_is_one_step():
    solver = gnlin.LevenbergMarquardt(damping=TrustRegion(1e3))
    a, b = matrix(MATRICES["tall"])
    solution = least_squares(
        linear, solver, jnp.ones(4), (jnp.asarray(a), jnp.asarray(b))
    )
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_steps"]) <= 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrustRegion(0.0), "`factor` must be"),
        (lambda: TrustRegion(jnp.inf), "`factor` must be"),
        (lambda: Nielsen(-1.0), "`initial` must be"),
        (lambda: gnlin.LevenbergMarquardt(damping=0.0), "`damping` must be"),
        (lambda: gnlin.LevenbergMarquardt(damping="more"), "`damping` must be"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_traced_factor_that_cannot_be_meant_ends_the_run():
    end = jax.jit(
        lambda factor: (
            least_squares(
                rosenbrock,
                gnlin.LevenbergMarquardt(damping=TrustRegion(factor)),
                jnp.array([-1.2, 1.0]),
            ).result
        )
    )
    assert end(-1.0) == optx.RESULTS.nonfinite


def test_across_batches_only_a_number_serves():
    model = eqx.nn.MLP(1, 1, 4, 1, jnp.tanh, key=jax.random.key(0))
    x = jnp.linspace(-1, 1, 8)[:, None]
    solver = gnlin.LevenbergMarquardt(damping=TrustRegion())
    with pytest.raises(ValueError, match="cannot be used across batches"):
        gnlin.fit(model, (x, x), solver, steps=2, batch_size=4, progress=False)
