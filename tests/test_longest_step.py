"""The longest step whose loss decreases as predicted, compared with a literal loop in
NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import (
    as_jax,
    damped_step,
    example,
    half_squares,
    least_squares,
    sines,
    sines_numpy,
)

import gnlin
from gnlin.damping import LongestStep


SUCCESS = optx.RESULTS.successful


def wavy(size, seed, shape=(12, 5)):
    generator = np.random.default_rng(seed)
    a = generator.normal(size=shape)
    return size * generator.normal(size=shape[1]), (a, generator.normal(size=shape[0]))


def literal(y, args, num_steps, ratio=0.25, most=10, acceleration=False):
    """Return (y, dampings, rejected) of `num_steps` steps with a literal search."""
    damping, last, dampings, num_rejected = None, None, [], 0
    scale = np.zeros_like(y)
    for _ in range(num_steps):
        r, jacobian = sines_numpy(y, args)
        norms = np.linalg.norm(jacobian, axis=0)
        scale = np.maximum(np.sqrt(norms / norms.max()), 0.97 * scale)
        gradient = jacobian.T @ r
        attainable = half_squares(r) - half_squares(
            r + jacobian @ np.linalg.lstsq(jacobian, -r, rcond=None)[0]
        )
        if damping is None:
            scaled = gradient / scale
            pushed = (jacobian / scale) @ scaled
            damping = 1e-3 * (pushed @ pushed) / (scaled @ scaled)
        low, high, move, found = 0.0, np.inf, 3.0, None
        for number in range(1, 61):
            step = damped_step(r, jacobian, damping, scale)
            length = np.linalg.norm(scale * step)
            last = length if last is None else last
            predicted = 0.5 * (damping * length**2 - step @ gradient)
            gentle = True
            if acceleration:
                ahead = sines_numpy(y + 0.1 * step, args)[0]
                second = 20 * ((ahead - r) / 0.1 - jacobian @ step)
                bend = damped_step(second, jacobian, damping, scale)
                gentle = np.linalg.norm(scale * bend) <= 0.75 * length
                step = step + 0.5 * bend
            kept = half_squares(r) - half_squares(sines_numpy(y + step, args)[0])
            kept = min(kept / predicted, 1)
            longest = max(3 * last, 1e-3 * np.linalg.norm(scale * y))
            least = 0.3 * ratio if predicted > 0.99 * attainable else ratio
            good = gentle and kept >= least and length <= longest
            undamped = good and predicted >= (1 - 1e-6) * attainable
            saturated = bool(good and found and length * (1 - 1e-6) <= found[2])
            undamped |= saturated
            longest_yet = good and 1.5 * length >= longest
            if good:
                free = saturated or predicted >= (1 - 1e-6) * attainable
                high, found = damping, (y + step, None if free else kept, length)
            else:
                low = damping
            if found and (number >= most or high <= 1.5 * low or undamped):
                break
            if longest_yet:
                break
            if low > 0 and found:
                damping = np.sqrt(low * high)
            else:
                damping *= 1 / move if good else max(move, 1.5**0.5 * length / longest)
            move = move**2 if number > 1 else move
        y, kept, last = found
        dampings.append(high)
        num_rejected += number - 1
        if kept is not None:
            factor = 0.1 if kept >= 0.98 else max(1 / 3, 1 - (2 * kept - 1) ** 3)
        damping = high * (1 if kept is None else factor)
    return y, dampings, num_rejected


CASES = {
    "far": (3, 4),
    "near": (1, 0),
    "wide": (2, 1, (4, 9)),
    "very far": (10, 2),
    "as long as it may be": (1, 3, (6, 2)),
}


@pytest.mark.parametrize(
    ("name", "acceleration"),
    [
        ("far", True),
        ("near", True),
        ("very far", True),
        ("wide", False),
        ("as long as it may be", False),
        pytest.param("far", False, marks=pytest.mark.exhaustive),
        pytest.param("wide", True, marks=pytest.mark.exhaustive),
        pytest.param("as long as it may be", True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_search_step_by_step(name, acceleration):
    y, args = wavy(*CASES[name])
    expected, dampings, rejected = literal(y, args, 5, acceleration=acceleration)
    solver = gnlin.LevenbergMarquardt(acceleration=acceleration)
    solution = least_squares(
        sines, solver, *as_jax((y, args)), max_steps=5, options={"history": 5}
    )
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6)
    np.testing.assert_allclose(solution.stats["history"]["damping"], dampings, rtol=1e-5)
    assert int(solution.stats["num_rejected_steps"]) == rejected


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "most"), [(0.075, 24), (0.25, 1)])
def test_the_ratio_and_the_number_of_trials(ratio, most):
    y, args = wavy(3, 7)
    expected, *_ = literal(y, args, 4, ratio, most)
    rule = LongestStep(ratio, num_trials=most)
    solver = gnlin.LevenbergMarquardt(damping=rule, acceleration=False)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=4)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6)


@pytest.mark.slow
def test_under_vmap_each_has_its_own_search():
    problems = [wavy(3, seed) for seed in range(4)]
    stacked = as_jax(jax.tree.map(lambda *x: np.stack(x), *problems))
    solver = gnlin.LevenbergMarquardt(acceleration=False)

    def fit(y, args):
        return least_squares(sines, solver, y, args, max_steps=4).value

    together = jax.vmap(fit)(*stacked)
    for one, problem in zip(together, problems, strict=True):
        np.testing.assert_allclose(one, literal(*problem, 4)[0], rtol=1e-6)


@pytest.mark.exhaustive
def test_a_network_is_trained_further_than_by_one_damping_a_linearisation():
    """Compare medians of four runs, because a single run may be lucky."""
    x = jnp.linspace(-1, 1, 64)[:, None]
    keys = jax.random.split(jax.random.key(0), 4)

    def loss_after(damping):
        def trained(key, x):
            model = eqx.nn.MLP(1, 1, 12, 2, jnp.tanh, dtype=float, key=key)
            solver = gnlin.LevenbergMarquardt(damping=damping)
            settings = {"max_steps": 40, "divergence": None, "history": False}
            return gnlin.solve(model, (x, jnp.sin(6 * x)), solver, **settings).loss

        losses = jax.jit(jax.vmap(trained, (0, None)))(keys, x)
        return float(jnp.median(losses))

    assert loss_after(None) < 1e-3 * loss_after(1e-3)


def test_a_first_step_that_is_not_a_number_only_raises_the_damping():
    """Neither its length nor the units of the next one decide what is accepted."""
    rule, x64 = LongestStep(), jnp.dtype(float)
    number = lambda x: jnp.asarray(x, float)
    no = jnp.array(False)

    def after(state, damping, length, accepted):
        zero = number(0)
        numbers = number(damping), number(1), jnp.array(accepted), number(length)
        trial = gnlin.damping.Trial(*numbers, number(1), zero, no, zero, no)
        good = trial.accepted & rule.accepts(state, trial)
        trial = eqx.tree_at(lambda t: t.accepted, trial, good)
        return bool(good), rule.after(state, trial)

    for unit in (1e-8, 1e8):
        _, state = after(rule.init(x64), 1e-3, np.nan, accepted=False)
        assert float(state.damping) == pytest.approx(3e-3)
        accepted, state = after(state, 3e-3, unit, accepted=True)
        assert accepted
        assert float(state.length) == pytest.approx(unit)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1])
def test_a_ratio_is_between_zero_and_one(bad, unchecked):
    with pytest.raises(ValueError, match="`ratio`"):
        LongestStep(bad)
    with pytest.raises(ValueError, match="`num_trials`"):
        LongestStep(num_trials=0)


@pytest.mark.slow
def test_a_step_within_rounding_is_computed_once():
    matrix = jax.random.normal(jax.random.key(0), (60, 20))
    target = jax.random.normal(jax.random.key(1), (60,))
    residuals = gnlin.Residuals(lambda y, _: matrix @ y - target)
    solver = gnlin.LevenbergMarquardt(method="matrix-free")
    solution = gnlin.solve(jnp.zeros(20), residuals, solver)
    expected = np.linalg.lstsq(np.asarray(matrix), np.asarray(target))[0]
    np.testing.assert_allclose(solution.model, expected, atol=1e-9)
    assert solution.stats["num_rejected_steps"] == 0
    # The step after the last one shows that the run has converged.
    iterations = solution.history.num_inner_steps
    last = solution.stats["num_inner_steps"] - np.sum(iterations)
    assert last < 1.5 * iterations[-1]


@pytest.mark.parametrize(("where", "fewest", "most"), [("near", 12, 10), ("far", 10, 15)])
def test_a_system_of_equations_in_very_different_units_is_solved(where, fewest, most):
    """With damped steps the run ends in a narrow valley: only the undamped step, or a
    part of it, lowers all equations whatever their units."""
    script = example("reactors")

    def solved(start):
        solver = gnlin.LevenbergMarquardt()
        solution = least_squares(
            lambda u, _: script.reactors(u), solver, start, max_steps=50
        )
        is_right = script.is_root(solution.value) == (solution.result == SUCCESS)
        return solution.value, solution.stats["num_steps"], is_right

    found, num_steps, are_right = jax.vmap(solved)(script.random_starts(where, 12))
    assert are_right.all()
    are_solved = jax.vmap(script.is_root)(found)
    assert are_solved.sum() >= fewest
    assert num_steps[are_solved].max() <= most
    np.testing.assert_allclose(found["recycle"][are_solved], 3 / 7, rtol=1e-9)


@pytest.mark.parametrize("seed", [1, 5, 7, 13])
def test_the_undamped_step_is_halved_until_it_keeps_its_promise(seed):
    y0, args = wavy(4.0, seed, (5, 5))
    y, num_rejected, shortest = y0, 0, 1.0
    for _ in range(4):
        r, jacobian = sines_numpy(y, args)
        step, part = np.linalg.solve(jacobian, -r), 1.0
        while True:
            kept = half_squares(r) - half_squares(sines_numpy(y + part * step, args)[0])
            promised = part * (2 - part) * half_squares(r)
            if kept >= 0.075 * promised:
                break
            part /= 2
            num_rejected += 1
        y, shortest = y + part * step, min(shortest, part)
    assert shortest < 0.5
    assert num_rejected < 24
    solver = gnlin.LevenbergMarquardt(acceleration=False)
    end = least_squares(sines, solver, y0, as_jax(args), max_steps=4)
    np.testing.assert_allclose(end.value, y, rtol=1e-6)
    assert end.stats["num_rejected_steps"] == num_rejected


@pytest.mark.parametrize(("curvature", "most"), [(1.2, 7), (1.7, 12), (1.9, 24)])
def test_undamped_steps_that_go_past_a_minimum_are_shortened(curvature, most):
    # The residuals (x + 1, a x^2 + x - 1), with a minimum of loss 1 at x = 0, are example
    # 3.4 of K. Madsen, H. B. Nielsen and O. Tingleff, Methods for non-linear least
    # squares problems (2004). There the loss has 1 - a times the curvature of the
    # linearised problem.
    a = 1 - curvature

    def residuals(x, args):
        return jnp.stack([x + 1, a * x**2 + x - 1])

    x, by_undamped_steps = 0.1, 0
    while abs(x) > 1e-9:
        slope = np.array([1, 2 * a * x + 1])
        x -= slope @ np.asarray(residuals(x, None)) / (slope @ slope)
        by_undamped_steps += 1
    solver = gnlin.LevenbergMarquardt(rtol=1e-9, atol=1e-9)
    solution = optx.least_squares(residuals, solver, jnp.array(0.1), max_steps=100)
    assert abs(solution.value) < 1e-8
    assert solution.stats["num_steps"] <= most < 0.6 * by_undamped_steps


def test_three_points_that_no_exponential_meets():
    """A longer first step ends at a straight line, with infinite parameters."""
    f = lambda p, x: p[0] * jnp.exp(-p[1] * x) + p[2]
    y, start = jnp.array([3.0, 1.5, 3.5]), jnp.array([1.0, 1.0, 0.0])
    with pytest.warns(UserWarning, match="do not determine"):
        fit = gnlin.curve_fit(f, jnp.arange(3.0), y, start)
    np.testing.assert_allclose(fit.chi_squared, 2.0, rtol=1e-6)
    assert fit.num_steps < 50


@pytest.mark.parametrize("start", [[0.3, -0.2], [3e4, 1e-3], [0.0, 0.0]])
def test_a_linear_system_takes_one_step_before_its_rounding(start):
    matrix = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    root = jnp.zeros(2) if start[0] else jnp.array([1e3, -2e5])
    residuals = lambda y, _: matrix @ (y - root)
    end = least_squares(residuals, gnlin.LevenbergMarquardt(), jnp.array(start))
    np.testing.assert_allclose(end.value, root, rtol=1e-12, atol=1e-10)
    assert end.stats["num_steps"] <= 3
    assert end.stats["num_rejected_steps"] == 0


def test_a_run_without_a_root_goes_on_with_damped_steps():
    """Here halves of the undamped step lead to a point where the Jacobian is singular."""

    def fn(y, args):  # Freudenstein and Roth's problem, with its local minimum
        a, b = y
        first = -13 + a + ((5 - b) * b - 2) * b
        return jnp.stack([first, -29 + a + ((b + 1) * b - 14) * b])

    start = jnp.array([0.5, -2.0])
    by_parts = gnlin.GaussNewton(search=optx.BacktrackingArmijo())
    stuck = least_squares(fn, by_parts, start, max_steps=200)
    assert half_squares(fn(stuck.value, None)) > 25
    end = least_squares(fn, gnlin.LevenbergMarquardt(), start, max_steps=200)
    np.testing.assert_allclose(2 * half_squares(fn(end.value, None)), 48.98425, rtol=1e-6)


@pytest.mark.parametrize("bad", [-1.0, jnp.zeros(())])
def test_the_first_damping_is_a_known_zero_or_positive(bad, unchecked):
    with pytest.raises(ValueError, match="`initial`"):
        LongestStep(initial=bad)
