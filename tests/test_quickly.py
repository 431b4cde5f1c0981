"""Which options a program is compiled with. Results do not depend on them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin._common._canonical import program_of
from gnlin._curve_fit import _program
from gnlin._training import _full_batch


def decay(p, x):
    return p[0] * jnp.exp(-p[1] * x)


def summed(p, x):
    """Return the same by a loop."""
    total, _ = jax.lax.scan(lambda s, k: (s + k * decay(p, x), None), 0 * x, jnp.ones(1))
    return total


def test_the_number_of_values_that_a_program_computes():
    counted = lambda fn: program_of(fn, jnp.ones(2), jnp.ones(50)).traced.num_values
    # Two elements, each sliced and squeezed; a negation, two products, an exponential
    assert counted(decay) == pytest.approx(2 * 2 + 1 + 3 * 50, abs=60)
    assert counted(summed) == np.inf


@pytest.mark.parametrize(
    ("f", "num_points", "is_brief"),
    [
        (decay, 30, True),
        pytest.param(decay, 5000, False, marks=pytest.mark.slow),
        pytest.param(summed, 30, False, marks=pytest.mark.slow),
    ],
)
def test_brief_fits(f, num_points, is_brief, monkeypatch):
    x = np.linspace(0.0, 2.0, num_points)
    y, program, seen = 2 * np.exp(-1.5 * x), _program._program, []

    def spied(*kind):
        seen.append(kind)
        return program(*kind)

    monkeypatch.setattr(_program, "_program", spied)
    fit = gnlin.curve_fit(f, x, y, np.ones(2))
    # A function with loops has programs of its own.
    assert seen == ([] if f is summed else [(False, False, is_brief)])
    np.testing.assert_allclose(fit.parameters, [2.0, 1.5], rtol=1e-8)
    # Inside another program the options are those of that program.
    seen.clear()
    inside = jax.jit(lambda y: gnlin.curve_fit(f, x, y, np.ones(2)).parameters)(y)
    assert [kind[0] for kind in seen] == [True]
    np.testing.assert_allclose(inside, fit.parameters, rtol=1e-8)


@pytest.mark.slow
def test_many_fits_at_once_are_not_brief(monkeypatch):
    x, program, seen = np.linspace(0.0, 2.0, 30), _program._program, []

    def spied(*kind):
        seen.append(kind)
        return program(*kind)

    monkeypatch.setattr(_program, "_program", spied)
    y = 2 * np.exp(-1.5 * x)
    fits = gnlin.curve_fit(decay, x, [y, 2 * y], np.ones(2))
    assert seen == [(False, False, False)]
    np.testing.assert_allclose(fits.parameters, [[2.0, 1.5], [4.0, 1.5]], rtol=1e-8)


def with_a_loop(p, x):
    return summed(p, x[0])


@pytest.mark.parametrize(
    ("fn", "num_examples", "settings", "is_brief"),
    [
        (decay, 30, {}, True),
        pytest.param(decay, 30, {"max_steps": 10**5}, False, marks=pytest.mark.slow),
        pytest.param(decay, 10**4, {}, False, marks=pytest.mark.slow),
        (with_a_loop, 30, {}, False),
    ],
)
def test_brief_runs(fn, num_examples, settings, is_brief, monkeypatch):
    x = jnp.linspace(0.0, 2.0, num_examples)[:, None]
    y, seen = 2 * jnp.exp(-1.5 * x), []
    y = y[:, 0] if fn is with_a_loop else y
    briefly = _full_batch._steps_briefly

    def spied(*args):
        seen.append(args)
        return briefly(*args)

    monkeypatch.setattr(_full_batch, "_steps_briefly", spied)
    solution = gnlin.solve((fn, jnp.ones(2)), (x, y), **settings)
    assert bool(seen) == is_brief
    np.testing.assert_allclose(solution.model[1], [2.0, 1.5], rtol=1e-8)


@pytest.mark.slow
def test_a_run_whose_function_is_unknown_is_not_brief(monkeypatch):
    """A model with state has no program of one example."""
    monkeypatch.setattr(_full_batch, "_steps_briefly", None)
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="batch")
    x = jnp.arange(6.0)[:, None]
    gnlin.solve(norm, (x, 2 * x), state=state, max_steps=12)
