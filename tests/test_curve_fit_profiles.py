"""Searches for confidence intervals that take long, compared with closed formulas."""

import numpy as np
import pytest
import scipy.stats
from problems import num_compiled

import gnlin
from gnlin._curve_fit import _profiles


X = np.linspace(0, 1, 20)
Y = 1 + 2 * X + 0.1 * np.random.default_rng(0).normal(size=20)
DESIGN = np.stack([np.ones(20), X], 1)
BEST, REST, *_ = np.linalg.lstsq(DESIGN, Y, rcond=None)
ERRORS = np.sqrt(np.diagonal(np.linalg.inv(DESIGN.T @ DESIGN)) * REST[0] / 18)
HALF = scipy.stats.t.ppf(0.975, 18) * ERRORS


def line():
    return gnlin.curve_fit(lambda p, x: p["a"] + p["b"] * x, X, Y, {"a": 0.0, "b": 0.0})


def test_ctrl_c_returns_the_ends_found_so_far(monkeypatch):
    fit, number = line(), 0

    def interrupted(*args, **options):
        nonlocal number
        number += 1
        if options["num_steps"] == _profiles._MOST_STEPS and number > ends_at:
            raise KeyboardInterrupt
        return of_fit(*args, **options)

    of_fit, ends_at = _profiles.fitted, 2  # a line's end takes one refit
    monkeypatch.setattr(_profiles, "fitted", interrupted)
    words = r"interrupted after 2 of 4 ends\. The others are NaN, from the lower end of b"
    with pytest.warns(UserWarning, match=words) as told:
        low, high = fit.confidence_intervals()
    assert told[0].filename == __file__
    np.testing.assert_allclose(low["a"], BEST[0] - HALF[0], rtol=1e-6)
    np.testing.assert_allclose(high["a"], BEST[0] + HALF[0], rtol=1e-6)
    assert np.isnan([low["b"], high["b"]]).all()


def test_an_end_of_too_many_steps_does_not_hold_up_the_others(monkeypatch):
    """The lower end of a is cut short; all others are found."""
    fit, of_fit, steps = line(), _profiles.fitted, []

    def slow(setting, data, start, num_steps):
        end, found = of_fit(setting, data, start, num_steps=num_steps)
        if data.held[1]["a"] < BEST[0] - 0.5 * HALF[0]:  # as if it never converged
            end = end._replace(loss=end.loss + 1)
            found |= {"num_steps": num_steps}
            steps.append(num_steps)
        return end, found

    monkeypatch.setattr(_profiles, "fitted", slow)
    words = "end of the confidence interval of a was not found: .* all their 200 steps"
    with pytest.warns(UserWarning, match=words):
        low, high = fit.confidence_intervals(names="a")
    assert steps == [200]
    assert np.isnan(low["a"])
    np.testing.assert_allclose(high["a"], BEST[0] + HALF[0], rtol=1e-6)


def test_the_limit_is_that_of_real_steps_by_the_same_program(monkeypatch):
    def f(p, x):
        return p["a"] + 10 * p["a"] ** 3 + 0 * x

    y = np.array([1.0, -1.0] * 5)
    fit = gnlin.curve_fit(f, X[:10], y, {"a": 0.5}, bounds={"a": (-2, 2)})
    fit.confidence_intervals()  # compiles what is small
    of_fit, steps = _profiles.fitted, []

    def counting(*args, **options):
        end, found = of_fit(*args, **options)
        steps.append(int(found["num_steps"]))
        return end, found

    monkeypatch.setattr(_profiles, "fitted", counting)
    monkeypatch.setattr(_profiles, "_MOST_STEPS", 2)
    monkeypatch.setattr(_profiles, "_MORE_STEPS", 0)
    with pytest.warns(UserWarning, match="all their 2 steps, and it lies between"):
        assert num_compiled(fit.confidence_intervals) == 0
    assert 2 <= sum(steps) <= 4  # two ends


def test_a_bar_is_shown_of_a_long_search(monkeypatch, capsys):
    fit = line()
    fit.confidence_intervals()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(gnlin._common._progress, "_SECONDS", 0)
    monkeypatch.setattr(gnlin._common._progress, "on_a_terminal", lambda: True)
    low, _ = fit.confidence_intervals()
    drawn = capsys.readouterr().err
    assert "/4 [" in drawn
    assert "b, refit 1" in drawn
    np.testing.assert_allclose(low["b"], BEST[1] - HALF[1], rtol=1e-6)
