"""Messages of a fit advise nothing that its arguments have done already."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import gnlin


X = np.linspace(0.0, 10.0, 40)
LINE = {"m": 0.0, "c": 0.0}
BOX = {"m": (-10.0, 10.0), "c": (-20.0, 20.0)}


def line(p, x):
    return p["m"] * x + p["c"]


def contaminated(number):
    """A line of slope 2 and intercept 1, and which of its points are no outliers."""
    rng = np.random.default_rng(0)
    y = 2 * X + 1 + 0.1 * rng.normal(size=X.size)
    where = rng.choice(X.size, number, replace=False)
    y[where] = rng.uniform(-20, 60, number)
    return y, np.delete(np.arange(X.size), where)


def told(f, x, y, start, **options):
    """Return a fit and its warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = gnlin.curve_fit(f, x, y, start, **options)
    (message,) = [str(warning.message) for warning in caught]
    return fit, message


@pytest.mark.slow
def test_many_outliers_at_the_best_of_many_starts():
    """The line is that of least squares through the good points. The message counts the
    starts that ended there, and advises no starts and no bounds."""
    y, good = contaminated(16)
    loss = gnlin.losses.Tukey(4.685)
    options = {"loss": loss, "sigma": 0.1, "bounds": {"m": (0.0, 4.0), "c": (-5.0, 5.0)}}
    start = {"m": 1.0, "c": 0.0}
    fit, message = told(line, X, y, start, **options, starts=16)
    expected = np.polyfit(X[good], y[good], 1)
    np.testing.assert_allclose([*fit.parameters.values()], expected[::-1], atol=0.05)
    losses = np.asarray(fit.losses)
    number = np.sum(losses <= losses[0] * 1.001)
    assert number > 1
    assert f"of 16 starts, and {number} of them ended there" in message
    assert "`f` may miss a part of the data" in message
    for followed in ("start closer", "set `bounds`", "pass `starts`"):
        assert followed not in message
    _, message = told(line, X, y, start, **options | {"bounds": BOX}, starts=64)
    assert "64 starts, and 1 of them ended there, so that there may be" in message
    assert message.endswith("pass more `starts`.")


@pytest.mark.slow
def test_many_outliers_without_starts():
    y, _ = contaminated(16)
    options = {"loss": gnlin.losses.Tukey(4.685), "sigma": 0.1}
    for bounds, words in (
        ({}, "start closer, or pass `starts` and finite `bounds`. If"),
        ({"bounds": BOX}, "start closer, or pass `starts`. If"),
        ({"bounds": {"m": (-10.0, 10.0)}}, "`starts` and finite `bounds`. If"),
    ):
        _, message = told(line, X, y, {"m": 2.0, "c": 1.0}, **options, **bounds)
        assert words in message


def sine(p, x):
    return jnp.sin(p["m"] * x + p["c"])


def root(p, x):
    return jnp.sqrt(p["m"] - x) + p["c"]


def sums(p, x):
    return (p["m"] + p["c"]) * x


WITH_BOUNDS, WITH_STARTS = {"bounds": BOX}, {"bounds": BOX, "starts": 4}


@pytest.mark.parametrize(
    ("f", "options", "said", "unsaid"),
    [
        (sine, {"max_steps": 1}, "`max_steps`, or start closer", "starts"),
        (sine, {"max_steps": 1, **WITH_STARTS}, r"raise `max_steps`\)", "closer"),
        (sums, {}, "fix one of them, pass more points, or start elsewhere", "starts"),
        (sums, WITH_STARTS, "fix one of them, or pass more points", "elsewhere"),
        (root, {}, "finite at the start .*start elsewhere, set `bounds`, or", "narrower"),
        (root, WITH_BOUNDS, "elsewhere, set narrower `bounds`, or let", "set `bounds`"),
    ],
)
def test_advice_that_was_followed(f, options, said, unsaid):
    with pytest.warns(UserWarning, match=said) as caught:
        gnlin.curve_fit(f, X, np.cos(X), {"m": 0.5, "c": 0.0}, **options)
    assert unsaid not in str(caught[0].message)


def test_a_curve_that_is_finite_at_no_start():
    """The square root of a negative number, wherever the fit starts."""
    f = lambda p, x: jnp.sqrt(-1 - p["m"] ** 2) * x
    _, message = told(f, X, X, {"m": 0.5}, bounds=(-2.0, 2.0), starts=4)
    assert "not finite at one of 4 starts: set narrower `bounds`, or let" in message
    assert "elsewhere" not in message


@pytest.mark.parametrize(
    ("sigma", "advice"),
    [
        (None, "pass `sigma` and `absolute_sigma=True`, or pass more points"),
        (
            0.5,
            "pass `absolute_sigma=True`, if `sigma` is in the units of y, or pass more",
        ),
    ],
)
def test_errors_of_as_many_points_as_parameters(sigma, advice):
    _, message = told(line, X[:2], X[:2] + 1, LINE, sigma=sigma)
    assert advice in message


def test_a_likelihood_without_maximum():
    """The logarithm of the rate of a group without counts falls without end. A bound of
    the other parameter is no bound of this one."""
    f = lambda p, x: jnp.where(x < 5, p["m"], p["c"])
    counts, options = np.where(X < 5, 0, 7), {"bounds": {"c": (-50.0, 50.0)}}
    fit, message = told(f, X, counts, LINE, loss=gnlin.losses.PoissonNLL(), **options)
    np.testing.assert_allclose(fit.parameters["c"], np.log(7), rtol=1e-6)
    assert "all censored: set `bounds`, or" in message
