"""Levenberg-Marquardt's scalings, racing: against a literal loop in NumPy, and what they
are for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import as_jax, damped_step, half_squares, least_squares, sines, sines_numpy

import gnlin


POWERS = 1.0, 0.0, 0.5


def tried(r, jacobian, y, args, scale, state):
    """Nielsen's dampings until one lowers the loss: (new y, new state, rejected, what it
    was predicted to gain)."""
    damping, growth = state
    gradient = jacobian.T @ r
    if damping is None:
        scaled = gradient / scale
        pushed = (jacobian / scale) @ scaled
        damping = 1e-3 * (pushed @ pushed) / (scaled @ scaled)
    for rejected in range(60):
        step = damped_step(r, jacobian, damping, scale)
        predicted = 0.5 * (damping * np.sum((scale * step) ** 2) - step @ gradient)
        actual = half_squares(r) - half_squares(sines_numpy(y + step, args)[0])
        ratio = actual / predicted
        if ratio > 1e-4:
            factor = max(1 / 3, 1 - (2 * min(ratio, 1) - 1) ** 3)
            factor = 0.1 if ratio >= 0.98 else factor
            return y + step, (damping * factor, 2), rejected, predicted
        damping, growth = damping * growth, 2 * growth
    raise AssertionError("no step")


def literal(y, args, num_steps):
    """(y, leaders, rejected): the race, step by step; what More's gain counts twice."""
    states = [(None, 2)] * len(POWERS)
    leader, leaders, rejected, lasting, races = 0, [], 0, np.zeros_like(y), 0
    for k in range(num_steps):
        r, jacobian = sines_numpy(y, args)
        norms = np.linalg.norm(jacobian, axis=0)
        lasting = np.maximum(lasting, norms)
        undamped = np.linalg.lstsq(jacobian, -r, rcond=None)[0]
        attainable = half_squares(r) - half_squares(r + jacobian @ undamped)
        due, challenger = k in (0, 1, 3, 7, 15), (leader + 1 + races % 2) % 3
        races, contenders, ends = races + due, [leader], {}
        for i in contenders:
            scale = lasting ** POWERS[i] * norms.max() ** (1 - POWERS[i])
            new_y, states[i], failed, predicted = tried(
                r, jacobian, y, args, scale, states[i]
            )
            gain = half_squares(r) - half_squares(sines_numpy(new_y, args)[0])
            ends[i] = gain * (2 if i == 0 else 1), new_y
            rejected += failed
            if due and i == leader and predicted < 0.9 * attainable:
                contenders.append(challenger)
        rejected += len(ends) - 1
        leader = max(ends, key=lambda i: ends[i][0])
        y = ends[leader][1]
        leaders.append(leader)
    return y, leaders, rejected


# (the columns' units, the start's size, a seed)
RACES = {
    "all alike": (1.0, 3, 4),
    "More's stay": (1.0, 1, 0),
    "none in the end": ([0.5, 0.5, 0.5, 0.05, 0.005], 3, 8),
    "none, of other units": ([0.3, 0.3, 0.3, 0.3, 0.003], 1, 4),
    "none, of one large unit": ([1, 1, 1, 1, 30], 3, 17),
    "half": (1.0, 3, 19),
    "half, of other units": ([0.3, 0.3, 0.3, 0.3, 0.003], 3, 15),
}


def wavy(units, size, seed):
    generator = np.random.default_rng(seed)
    a = np.asarray(units) * generator.normal(size=(12, 5))
    return size * generator.normal(size=5), (a, generator.normal(size=12))


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_the_race_step_by_step(race):
    y, args = wavy(*race)
    expected, _, rejected = literal(y, args, 6)
    solver = gnlin.LevenbergMarquardt(acceleration=False, method="eigh")
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=6)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6)
    assert int(solution.stats["num_rejected_steps"]) == rejected
    assert int(solution.stats["num_accepted_steps"]) == 6


def test_the_races_of_this_file_are_won_by_each():
    leaders = [literal(*wavy(*race), 6)[1] for race in RACES.values()]
    assert set().union(*leaders) == {0, 1, 2}


@pytest.mark.parametrize("scaling", ["more", "marquardt", "identity"])
def test_a_scaling_that_is_asked_for_does_not_race(scaling):
    y, args = as_jax(wavy(*RACES["all alike"]))
    solver = gnlin.LevenbergMarquardt(scaling=scaling, acceleration=False)
    stats = least_squares(sines, solver, y, args, max_steps=6).stats
    # Rows by forward mode, and a look at the outputs' rounding.
    assert float(stats["num_jvps"]) == 6 * (5 + 1)


def test_products_are_counted_for_both():
    y, args = as_jax(wavy(*RACES["none in the end"]))
    solver = gnlin.LevenbergMarquardt(acceleration=False)
    stats = least_squares(sines, solver, y, args, max_steps=6).stats
    # As above, and the look again at step 3; the rows only once.
    assert float(stats["num_jvps"]) == 6 * (5 + 1) + 1


def test_next_to_the_undamped_step_there_is_no_race():
    """Of a tall Jacobian, where all scalings have the same."""
    y, args = as_jax(wavy(1.0, 0.01, 0))
    solver = gnlin.LevenbergMarquardt(1e-6, acceleration=False)
    stats = least_squares(sines, solver, y, args, max_steps=3).stats
    assert float(stats["num_jvps"]) == 3 * (5 + 1)
    wide = y, (args[0][:4], args[1][:4])
    stats = least_squares(sines, solver, *wide, max_steps=3).stats
    # Rows by reverse mode; and three looks, and two of those that race.
    assert float(stats["num_jvps"]) == 3 + 2


def test_under_vmap_each_has_its_own_race():
    problems = [wavy(*race) for race in RACES.values()]
    stacked = as_jax(jax.tree.map(lambda *x: np.stack(x), *problems))
    solver = gnlin.LevenbergMarquardt(acceleration=False, method="eigh")

    def fit(y, args):
        return least_squares(sines, solver, y, args, max_steps=6).value

    together = jax.vmap(fit)(*stacked)
    for one, problem in zip(together, problems, strict=True):
        np.testing.assert_allclose(one, literal(*problem, 6)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_network_is_not_held_by_columns_that_vanish(dtype):
    """In the median of eight: each by itself may have luck, either way."""
    x = jnp.linspace(-1, 1, 64, dtype=dtype)[:, None]
    keys = jax.random.split(jax.random.key(0), 8)

    def loss_after(**scaling):
        def trained(key, x):
            model = eqx.nn.MLP(1, 1, 20, 2, jnp.tanh, dtype=dtype, key=key)
            solver = gnlin.LevenbergMarquardt(**scaling)
            settings = {"max_steps": 25, "divergence": None, "history": False}
            return gnlin.solve(model, (x, jnp.sin(6 * x)), solver, **settings).loss

        losses = jax.jit(jax.vmap(trained, (0, None)))(keys, x)
        return float(jnp.median(losses))

    assert loss_after() < 0.1 * loss_after(scaling="more")


def test_bounds_hold_while_scalings_race():
    y, args = wavy(*RACES["half"])
    bounds = jnp.asarray(y - 0.2), jnp.asarray(y + 0.2)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    free = gnlin.LevenbergMarquardt(scaling="more", bounds=bounds)
    losses = []
    for each in (solver, free):
        solution = least_squares(sines, each, *as_jax((y, args)))
        assert bool(
            jnp.all((solution.value >= bounds[0]) & (solution.value <= bounds[1]))
        )
        losses.append(half_squares(np.asarray(sines(solution.value, as_jax(args)))))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
