"""Steps that leave a narrow curved valley, and come back further down."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin.damping import LongestStep


FAINT = 1e-5
WITH, WITHOUT = (
    gnlin.LevenbergMarquardt(damping=LongestStep(detours=detours))
    for detours in (True, False)
)


def valley(y, args):
    """The floor of the valley is the curve u = sin(2 v), and along it the loss falls by
    `FAINT`^2 only, to 0 at v = 1."""
    u, v = y
    return jnp.stack([u - jnp.sin(2 * v), FAINT * (v - 1)])


START = np.zeros(2)


def ran(solver, max_steps, fn=valley, args=None):
    return optx.least_squares(
        fn, solver, START, args, max_steps=max_steps, throw=False, options={"history": 60}
    )


def losses(run):
    loss = np.asarray(run.stats["history"]["loss"])
    return loss[: int(run.stats["num_steps"])]


def half_squares(y, fn=valley):
    return 0.5 * np.sum(np.asarray(fn(y, None)) ** 2)


def test_detours_shorten_the_way_along_a_faint_valley():
    fast, slow = ran(WITH, 60), ran(WITHOUT, 200)
    assert fast.result == optx.RESULTS.successful
    np.testing.assert_allclose(fast.value, [np.sin(2), 1], rtol=1e-6)
    assert 2 * fast.stats["num_steps"] < slow.stats["num_steps"]


def test_a_run_stays_at_its_best_point_during_a_detour():
    """A run that ends at any step returns the best point so far, and the history says
    the loss there; a detour is a step of length 0."""
    loss = losses(ran(WITH, 60))
    assert (np.diff(loss) <= 0).all()
    end = ran(WITH, 20).value
    np.testing.assert_allclose(half_squares(end), loss[20], rtol=1e-9, atol=1e-30)


def test_the_linearisation_after_a_slow_step_is_elsewhere():
    """The points are those of the linearisations: some have a far larger loss than any
    in the history."""
    points = []

    def told(y, args):
        jax.debug.callback(lambda y: points.append(np.array(y)), y)
        return valley(y, args)

    ran(WITH, 60, told)
    jax.effects_barrier()
    seen = np.array([half_squares(y) for y in points])
    assert (seen[len(seen) // 2 :] > 1e3 * losses(ran(WITH, 60))[0]).any()


@pytest.mark.slow
def test_a_detour_to_where_the_function_is_not_finite_is_forgotten():
    def fn(y, limit):
        # Far from the floor there is no value.
        far = abs(y[0] - jnp.sin(2 * y[1])) >= limit
        return jnp.where(far, jnp.nan, valley(y, None))

    for limit in (0.3, 0.6):
        run = ran(WITH, 60, fn, limit)
        assert np.isfinite(losses(run)).all()
        np.testing.assert_allclose(run.value, [np.sin(2), 1], rtol=1e-5)


def test_a_detour_with_a_derivative_that_is_not_finite_is_forgotten():
    @jax.custom_jvp
    def broken(u):
        return u

    @broken.defjvp
    def _(primals, tangents):
        (u,), (du,) = primals, tangents
        return u, jnp.where(abs(u) < 1e-4, 1, jnp.nan) * du

    def fn(y, args):
        off, along = valley(y, args)
        return jnp.stack([broken(off), along])

    run = ran(WITH, 200, fn)
    assert run.result != optx.RESULTS.nonfinite
    assert half_squares(run.value) < 0.1 * half_squares(START)


@pytest.mark.slow
def test_under_vmap_and_jit_each_run_has_its_own_detours():
    @jax.jit
    @jax.vmap
    def together(start):
        run = optx.least_squares(valley, WITH, start, max_steps=60, throw=False)
        return run.value, run.stats["num_steps"]

    starts = jnp.asarray([[0.0, 0.0], [1.0, 0.5], [np.sin(2), 1.0]])
    values, numbers = together(starts)
    for start, value, number in zip(starts, values, numbers, strict=True):
        alone = optx.least_squares(valley, WITH, start, max_steps=60, throw=False)
        np.testing.assert_allclose(value, alone.value, rtol=1e-9)
        assert number == alone.stats["num_steps"]


@pytest.mark.slow
def test_between_bounds():
    bounded = eqx.tree_at(
        lambda s: s.bounds, WITH, (-2.0, [2.0, 0.7]), is_leaf=lambda x: x is None
    )
    solution = optx.least_squares(
        lambda y, args: valley(jnp.stack(y), args),
        bounded,
        [jnp.array(0.0), jnp.array(0.0)],
        max_steps=100,
        throw=False,
    )
    np.testing.assert_allclose(solution.value, [np.sin(1.4), 0.7], rtol=1e-6)


class Wave(eqx.Module):
    """A network whose fit ends in a faint valley: few points, and many parameters."""

    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(1, 1, 6, 2, jnp.tanh, key=key)

    def __call__(self, x):
        return self.mlp(x)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["solve", "fit"])
def test_networks(train):
    """In the history of a training run, too, the loss is that of the returned model."""
    x = jnp.linspace(-1, 1, 40)[:, None]
    data = x, jnp.sin(4 * x) + x**2
    call = functools.partial(gnlin.solve, max_steps=60)
    if train == "fit":
        call = functools.partial(gnlin.fit, steps=60)
    run = call(Wave(jax.random.key(1)), data, WITH, progress=False)
    # The rounding of the outputs, which are about 1, times the residuals.
    rounding = 1e-15 * run.history.loss**0.5
    assert (np.diff(run.history.loss) <= rounding[:-1]).all()
    residual = jax.vmap(run.model)(x) - data[1]
    scale = 0.5 if train == "solve" else 0.5 / len(x)
    np.testing.assert_allclose(run.loss, scale * jnp.sum(residual**2), rtol=1e-6)


class Noisy(eqx.Module):
    """A model with outputs that differ from step to step, by very little."""

    wave: Wave

    def __call__(self, x, key):
        return self.wave(x) + 1e-14 * jax.random.normal(key, (1,))


@pytest.mark.slow
def test_a_loss_of_other_outputs_is_no_measure_of_a_detour():
    x = jnp.linspace(-1, 1, 40)[:, None]
    data, wave = (x, jnp.sin(4 * x) + x**2), Wave(jax.random.key(1))
    call = functools.partial(gnlin.solve, max_steps=60, progress=False)
    with_key = functools.partial(call, Noisy(wave), data, key=jax.random.key(2))
    without = call(wave, data, WITHOUT).loss
    assert call(wave, data, WITH).loss < 0.5 * without
    np.testing.assert_allclose(with_key(WITH).loss, without, rtol=0.5)


@pytest.mark.usefixtures("unchecked")
def test_mistakes():
    with pytest.raises(ValueError, match="`detours` must be `True` or `False`"):
        LongestStep(detours="always")
