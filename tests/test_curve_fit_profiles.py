"""Searches for confidence intervals that take long, compared with closed formulas and
SciPy."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
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


@pytest.mark.slow
def test_ctrl_c_returns_the_ends_found_so_far(monkeypatch):
    fit, number = line(), 0

    def interrupted(*args, **options):
        nonlocal number
        number += 1
        is_first = options["num_steps"] == _profiles._MOST_STEPS // _profiles._PART
        if is_first and number > ends_at:
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


def slowly(monkeypatch, is_slow):
    """Let refits of a line that hold `a` where `is_slow` be cut short above the target,
    and return the list of the steps that they were allowed."""
    of_fit, steps = _profiles.fitted, []

    def slow(setting, data, start, num_steps):
        end, found = of_fit(setting, data, start, num_steps=num_steps)
        if is_slow(float(data.held[1]["a"]), float(start["a"]), num_steps):
            end = end._replace(loss=end.loss + 1)
            found |= {"num_steps": num_steps}
            steps.append(num_steps)
        return end, found

    monkeypatch.setattr(_profiles, "fitted", slow)
    return steps


def test_an_end_of_too_many_steps_does_not_hold_up_the_others(monkeypatch):
    """The lower end of a is cut short; all others are found."""
    fit = line()
    steps = slowly(monkeypatch, lambda a, *_: a < BEST[0] - 0.5 * HALF[0])
    words = (
        r"interval of a was not found: .* all their 200 steps, and it lies below (.*)\."
    )
    with pytest.warns(UserWarning, match=words) as told:
        low, high = fit.confidence_intervals(names="a")
    assert steps[0] == 50
    assert sum(steps) <= 200
    assert np.isnan(low["a"])
    below = float(str(told[0].message).split("lies below ")[1][:-1])
    assert BEST[0] - HALF[0] < below < BEST[0] - 0.4 * HALF[0]
    np.testing.assert_allclose(high["a"], BEST[0] + HALF[0], rtol=1e-6)


def test_an_end_that_was_not_found_lies_between_the_best_fit_and_the_bound(monkeypatch):
    bounds = {"a": (BEST[0] - 10.0, 100.0)}
    model = lambda p, x: p["a"] + p["b"] * x
    fit = gnlin.curve_fit(model, X, Y, {"a": 0.5, "b": 0.0}, bounds=bounds)
    slowly(monkeypatch, lambda a, *_: a < BEST[0] - 0.01 * HALF[0])
    with pytest.warns(UserWarning, match="it lies between") as told:
        fit.confidence_intervals(names="a")
    low, high = map(float, re.findall(r"-?\d+\.\d+(?=\.$| and)", str(told[0].message)))
    np.testing.assert_allclose(low, BEST[0] - 10, rtol=1e-6)
    assert BEST[0] - 0.011 * HALF[0] < high < BEST[0] - 0.005 * HALF[0]


def test_refits_cut_short_beyond_an_end_do_not_lose_it(monkeypatch):
    """The first trial, at the end itself, is cut short. It is found by going there in
    smaller steps, from which refits take fewer."""
    fit = line()
    far = lambda a, start, most: a < BEST[0] - 0.7 * HALF[0] and most == 50
    steps = slowly(monkeypatch, far)
    low, _ = fit.confidence_intervals(names="a")
    assert steps == [50]
    np.testing.assert_allclose(low["a"], BEST[0] - HALF[0], rtol=1e-5)


def test_a_refit_cut_short_below_the_target_moves_the_bracket(monkeypatch):
    """Its loss is an upper bound of the profile."""
    fit, of_fit, cut = line(), _profiles.fitted, []

    def slow(setting, data, start, num_steps):
        end, found = of_fit(setting, data, start, num_steps=num_steps)
        part = (float(data.held[1]["b"]) - BEST[1]) / HALF[1]
        if part > 0 and num_steps == 50:  # the first refit, at the end itself
            end = end._replace(loss=end.loss + 1.0)
        if part > 0 and (num_steps == 50 or part < 0.8):
            found |= {"num_steps": num_steps}
            cut.append(part)
        return end, found

    monkeypatch.setattr(_profiles, "fitted", slow)
    _, high = fit.confidence_intervals(names="b")
    assert min(cut) < 0.8
    np.testing.assert_allclose(high["b"], BEST[1] + HALF[1], rtol=1e-5)


WEEKLY = np.fromstring(
    """39 111 242 431 1003 1998 4761 8145 10528 7549 9202 5824 5508 5397 4999 3694 4688
    5403 6124 5981 6896 7168 9130 8585 8353 8280""",
    sep=" ",
)


def log_reported(p, weeks):
    """Reported cases of an epidemic with three contact rates, by daily Runge-Kutta."""

    def step(y, day):
        rate = p["beta"][(day >= 56).astype(int) + (day >= 112).astype(int)]

        def change(y):
            infected = rate * y[0] * y[2]
            ill = 0.25 * y[1]
            return jnp.stack([-infected, infected - ill, ill - p["gam"] * y[2], ill])

        a = change(y)
        b = change(y + 0.5 * a)
        c = change(y + 0.5 * b)
        y = y + (a + 2 * b + 2 * c + change(y + c)) / 6
        return y, y[3]

    first = jnp.exp(p["log_first"]) / 1e6
    begin = jnp.stack([1 - 2 * first, first, first, 0 * first])
    _, ill = jax.lax.scan(step, begin, jnp.arange(7 * len(weeks)))
    new = jnp.diff(jnp.concatenate([jnp.zeros(1), ill[6::7]]))
    return jnp.log(p["rho"] * 1e6 * new + 1e-9)


@pytest.mark.slow
def test_an_end_far_before_a_bound_is_that_of_scipys_refits():
    """A refit at the lower bound of rho would take 800 steps, and one at the end 13."""
    weeks, dispersion = np.arange(1.0, 27), 0.02
    start = {"beta": np.array([0.4, 0.3, 0.3]), "gam": 0.25, "log_first": 3.0, "rho": 0.5}
    bounds = {"beta": (0.01, 3), "gam": (0.05, 1), "log_first": (0, 10), "rho": (0.01, 1)}
    loss = gnlin.losses.NegativeBinomialNLL(dispersion)
    fit = gnlin.curve_fit(log_reported, weeks, WEEKLY, start, loss=loss, bounds=bounds)
    low, high = fit.confidence_intervals(0.99, names="rho")
    assert float(high["rho"]) == 1

    @jax.jit
    @jax.value_and_grad
    def minus_log_likelihood(q, rho):
        p = {"beta": q[:3], "gam": q[3], "log_first": q[4], "rho": rho}
        mean = jnp.exp(log_reported(p, weeks))
        size = 1 / dispersion
        return -jnp.sum(
            WEEKLY * jnp.log(mean / (mean + size)) + size * jnp.log(size / (mean + size))
        )

    best = [*fit.parameters["beta"], fit.parameters["gam"], fit.parameters["log_first"]]

    def least(rho):
        box = [(0.01, 3)] * 3 + [(0.05, 1), (0, 10)]
        options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000, "maxfun": 20000}
        run = lambda q: scipy.optimize.minimize(
            minus_log_likelihood, q, rho, "L-BFGS-B", True, bounds=box, options=options
        )
        return run(run(best).x).fun

    rise = 2 * (least(float(low["rho"])) - least(float(fit.parameters["rho"])))
    np.testing.assert_allclose(rise, scipy.stats.chi2.ppf(0.99, 1), rtol=1e-3)


@pytest.mark.slow
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
    with pytest.warns(
        UserWarning, match="all their 2 steps, and it lies (between|above|below)"
    ):
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


def test_a_minimum_where_two_solutions_meet():
    """The square of a parameter close to 0. The ends of the interval have a closed form.
    The error of a parameter of 0 in a line is no such error."""
    x = np.linspace(0, 1, 30)
    noise = 0.01 * np.random.default_rng(0).normal(size=30)
    y = noise - (x @ noise / (x @ x) - 1e-10) * x  # The best b**2 is 1e-10.
    options = {"sigma": 0.01, "absolute_sigma": True}
    square = lambda p, x: p["b"] ** 2 * x
    said = "far from linear, .* of b by 0.0001, .* `fit.confidence_intervals"
    with pytest.warns(UserWarning, match=said):
        fit = gnlin.curve_fit(square, x, y, {"b": 1e-4}, **options)
    assert fit.standard_errors["b"] > 10
    interval = fit.confidence_intervals()
    end = np.sqrt(1e-10 + scipy.stats.norm.ppf(0.975) * 0.01 / np.linalg.norm(x))
    found = [float(interval.low["b"]), float(interval.high["b"])]
    np.testing.assert_allclose(found, [-end, end], rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gnlin.curve_fit(lambda p, x: p["b"] * x, x, y, {"b": 1.0}, **options)
        # Bounds leave no room for a step by an error.
        bounds = {"b": (0.0, 1.0)}
        gnlin.curve_fit(square, x, y + x, {"b": 0.5}, bounds=bounds, **options)
