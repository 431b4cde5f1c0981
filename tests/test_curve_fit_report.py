"""What a fit says of its parameters: digits, counts, many of them, those that the data do
not determine, and intervals of some of them."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from problems import num_compiled

import gnlin
from gnlin._common._words import abridged, rounded, with_error
from gnlin._curve_fit._undetermined import apart


QUICK = {"solver": gnlin.GaussNewton()}


def printed(text, name):
    """Return the value and the error in the line of a parameter."""
    line = re.search(rf"^{re.escape(name)} +(\S+) +± (\S+)", text, re.MULTILINE)
    assert line, text
    return line[1], line[2]


def transit():
    """A fit of an epoch in Julian days, which is known to a minute."""
    days = 2459000.5 + np.linspace(0, 3, 80)
    f = lambda p, t: 1 - 0.01 * jnp.exp(-0.5 * ((t - p["t0"]) / 0.1) ** 2)
    noise = 1e-4 * np.random.default_rng(0).normal(size=80)
    y = np.asarray(f({"t0": 2459002.01234}, days)) + noise
    return gnlin.curve_fit(f, days, y, {"t0": 2459001.95}, **QUICK)


def test_a_value_has_the_decimals_of_its_error():
    fit = transit()
    value, error = printed(str(fit), "t0")
    true = float(fit.parameters["t0"])
    assert abs(float(value) - true) <= 0.01 * float(error)
    assert value == f"{true:.6f}"
    assert "80 points, 1 free parameter\n" in str(fit)
    derived = fit.derived(
        lambda p: {"twice": 2 * p["t0"], "z": jax.lax.complex(p["t0"], 0 * p["t0"])}
    )
    value, error = printed(str(derived), "twice")
    assert abs(float(value) - 2 * true) <= 0.01 * float(error)
    assert f"z      ({true:.6f} ± 0.000635) + (0 ± 0)j" in str(derived)
    assert str(fit.derived(lambda p: p["t0"])) == f"{true:.6f} ± 0.000635"
    interval = fit.confidence_intervals()
    low, high = re.fullmatch(r"t0  (\S+) to (\S+)", str(interval)).groups()
    width = float(interval.high["t0"] - interval.low["t0"])
    for text, end in ((low, interval.low), (high, interval.high)):
        assert abs(float(text) - float(end["t0"])) <= 0.005 * width


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (2459002.0116759413, 0.000635, "2459002.011676"),
        (2459002.0, 0.000635, "2459002.000000"),
        (np.float32(1e8), 0.348, "100000000"),
        (np.float32(123456.79), 1e-9, "123456.789"),
        (1.234567890123e-5, 1e-14, "1.23456789012e-05"),
        (2.5621370, 0.0801, "2.562137"),
        (2.5, 0.0801, "2.5000"),
        (-1234.5, 20.0, "-1234.5"),
        (0.0, 1e-3, "0.00000"),
        (1.0, 1e-30, "1.0000000000000000"),
        (1 / 3, np.nan, "0.33333333"),
        (1 / 3, 0.0, "0.33333333"),
        (1 / 3, np.inf, "0.33333333"),
        (np.inf, 1.0, "inf"),
        (np.nan, 1.0, "nan"),
    ],
)
def test_digits(value, error, expected):
    assert rounded(value, error) == expected


def test_values_differ_from_what_is_printed_by_less_than_their_errors():
    rng = np.random.default_rng(0)
    for _ in range(500):
        value = rng.normal() * 10.0 ** rng.integers(-12, 12)
        error = abs(value) * 10.0 ** -rng.uniform(-3, 13)
        text = with_error(value, error).split(" ± ")[0]
        assert abs(float(text) - value) <= 0.006 * error


@pytest.mark.slow
def test_counts_of_one():
    x = np.arange(3.0)
    fit = gnlin.curve_fit(lambda p, x: p["a"] + p["b"] * x, x, x**2, {"a": 0.0, "b": 0.0})
    assert "(1 degree of freedom)" in str(fit)
    many = gnlin.curve_fit(lambda p, x: p * x, x, x[None], 1.0, **QUICK)
    assert repr(many).startswith("CurveFit(1 data set, 1 of them")


NUM_GROUPS = 60
GROUP = np.repeat(np.arange(NUM_GROUPS), 8)
RNG = np.random.default_rng(0)
COVARIATE = RNG.normal(size=GROUP.size)
PANEL = RNG.normal(size=NUM_GROUPS)[GROUP] + COVARIATE + 0.3 * RNG.normal(size=GROUP.size)


def panel(**options):
    f = lambda p, d: p["fe"][d["group"]] + p["slope"]["b"] * d["x"] + p["slope"]["c"]
    x = {"group": GROUP, "x": COVARIATE}
    start = {"fe": np.zeros(NUM_GROUPS), "slope": {"b": 0.0, "c": 0.0}}
    return gnlin.curve_fit(f, x, PANEL, start, **QUICK, **options)


def test_intervals_of_the_parameters_of_interest():
    fit = panel(fixed=["slope.c"])
    fit.confidence_intervals(names="fe[3]")
    for names in ("slope", "slope.b", ["slope.b", "slope"], ("slope.b",)):
        assert num_compiled(lambda n=names: fit.confidence_intervals(names=n)) == 0
        interval = fit.confidence_intervals(names=names)
        quantile = scipy.stats.t.ppf(0.975, GROUP.size - NUM_GROUPS - 1)
        reach = quantile * fit.standard_errors["slope"]["b"]
        for end, sign in ((interval.low, -1), (interval.high, 1)):
            expected = fit.parameters["slope"]["b"] + sign * reach
            np.testing.assert_allclose(end["slope"]["b"], expected, rtol=1e-4)
            assert np.isnan(end["fe"]).all()
            assert np.isnan(end["slope"]["c"])
    assert len(str(interval).splitlines()) == 1
    interval = fit.confidence_intervals(names=["fe[2]", "fe[7]"])
    assert np.flatnonzero(~np.isnan(interval.low["fe"])).tolist() == [2, 7]


def test_intervals_of_whole_arrays():
    x, y = np.linspace(0, 1, 30), np.cos(3 * np.linspace(0, 1, 30))
    f = lambda p, x: p[0, 0] + p[0, 1] * x + p[1, 0] * x**2 + p[1, 1] * x**3
    fit = gnlin.curve_fit(f, x, y, np.zeros((2, 2)), **QUICK)
    asked = lambda names: ~np.isnan(fit.confidence_intervals(names=names).low)
    assert asked("p").all()
    assert asked("p[1]").tolist() == [[False, False], [True, True]]
    assert asked("p[0][1]").tolist() == [[False, True], [False, False]]
    assert not asked([]).any()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("fe[333]", r"no parameter 'fe\[333\]' that is free: there are .*'fe\[33\]'"),
        (["slope.b", "slope.a"], "no parameter 'slope.a' that is free: .*'slope.b'"),
        ("slope.c", "no parameter 'slope.c' that is free"),  # fixed
        (3, "`names` must be a name, or a sequence of names"),
        ([3], "no parameter 3 that is free"),
        ([["slope"]], "no parameter .*'slope'.* that is free"),
    ],
)
def test_names_that_are_not_there(names, said, unchecked):
    fit = panel(fixed=["slope.c"])
    with pytest.raises(ValueError, match=said) as raised:
        fit.confidence_intervals(names=names)
    assert len(str(raised.value)) < 200


def test_a_report_of_many_parameters_is_short():
    text = str(panel(fixed=["slope.c"]))
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 40
    assert table[0].startswith("fe[0] ")
    assert table[37].startswith("fe[59] ")
    assert "slope.b" in table[38]
    more = [line for line in table if line.startswith("...")]
    assert more == ["... 23 more, in `fit.parameters` and `fit.standard_errors`"]


def test_abridged_tables():
    lines = [str(k) for k in range(100)]
    assert abridged(lines[:40], [40]) == lines[:40]
    whole = abridged(lines, [1] * 100)
    assert len(whole) == 40
    assert (whole[0], whole[20], whole[-1]) == ("0", "... 61 more", "99")
    two = abridged(lines, [5, 95])
    assert two[:5] == lines[:5]
    assert (len(two), two[-1]) == (40, "99")


def undetermined(f, x, start, y=PANEL):
    with pytest.warns(UserWarning, match="do not determine all parameters: moving"):
        fit = gnlin.curve_fit(f, x, y, start, **QUICK)
    (direction,) = fit.undetermined()
    assert f"not determined: {direction}" in str(fit)
    return direction


@pytest.mark.slow
def test_entries_that_move_alike_are_said_once():
    f = lambda p, g: p["c"] + p["fe"][g]
    start = {"c": 0.0, "fe": np.zeros(NUM_GROUPS)}
    assert undetermined(f, GROUP, start) == f"c by -1 and all {NUM_GROUPS} of fe by 1"
    # The groups 0, 1 and 2 do not have the constant.
    f = lambda p, g: jnp.where(g < 3, 0.0, p["c"]) + p["fe"][g]
    start = {"c": 0.0, "fe": np.zeros(NUM_GROUPS)}
    said = undetermined(f, GROUP, start)
    assert said == f"c by -1 and {NUM_GROUPS - 3} of {NUM_GROUPS} of fe by 1"


def test_others_are_counted():
    slopes = RNG.normal(size=(6, 6))
    f = lambda p, x: jnp.asarray(slopes[1:] @ np.eye(6)) @ p["a"]
    null = np.linalg.svd(slopes[1:])[2][-1]
    said = undetermined(f, np.arange(5.0), {"a": np.ones(6)}, slopes[:5, 0])
    assert said.endswith(" and 2 others")
    moves = {int(k): float(v) for k, v in re.findall(r"a\[(\d)\] by (\S+)", said)}
    assert set(moves) == set(np.argsort(-np.abs(null))[:4])
    largest = np.argmax(np.abs(null))
    for k, move in moves.items():
        np.testing.assert_allclose(move, null[k] / null[largest], rtol=6e-3)


@pytest.mark.slow
def test_each_array_of_a_direction_is_named():
    slopes = RNG.normal(size=(20, 21))
    f = lambda p, x: jnp.asarray(slopes) @ jnp.concatenate(jax.tree.leaves(p))
    start = {name: np.ones(3) for name in "abcdefg"}
    said = undetermined(f, np.arange(20.0), start, slopes[:, 0])
    assert all(f"{name}[" in said for name in "abcdefg")
    assert said.endswith(" and 12 others")  # nine are named


def coupled(upper, y_shift=0.0):
    """A fit in which `a` pulls `b` with it: only a + 0.8 b is well known."""
    x = np.linspace(0, 1, 40)
    f = lambda p, x: p["a"] * x + p["b"] * (0.8 * x + 0.2 * x**2)
    y = f({"a": 1.0, "b": 1.0 + y_shift}, x)
    y = y + 0.02 * np.random.default_rng(0).normal(size=40)
    bounds = {"a": (-20, 20), "b": (-20, upper)}
    start = {"a": 1.0, "b": 0.5}
    options = {"sigma": 0.02, "absolute_sigma": True, "bounds": bounds}
    return x, y, gnlin.curve_fit(f, x, y, start, **options)


@pytest.mark.slow
def test_an_end_at_the_bound_of_another_parameter_is_told():
    x, y, fit = coupled(upper=1.3)
    said = "lower end of a lies where b is at its upper bound. With wider bounds"
    with pytest.warns(UserWarning, match=said) as told:
        interval = fit.confidence_intervals()
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "upper end" not in str(told[0].message)  # b ends at its own bound
    # With b at 1.3, chi-squared is a parabola in a.
    rest = y - 1.3 * (0.8 * x + 0.2 * x**2)
    most = float(fit.chi_squared) + scipy.stats.chi2.ppf(0.95, 1)
    squares = [x @ x, -2 * x @ rest, rest @ rest - most * 0.02**2]
    np.testing.assert_allclose(interval.low["a"], min(np.roots(squares)), rtol=1e-4)
    assert interval.high["b"] == 1.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.confidence_intervals(names="b")
        coupled(upper=20)[2].confidence_intervals()


def test_a_bound_that_holds_at_the_minimum_is_no_news():
    *_, fit = coupled(upper=0.7, y_shift=1.0)
    assert fit.at_bound["b"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.confidence_intervals(names="a")


@pytest.mark.slow
def test_parameters_without_effect_are_not_mixed_with_each_other():
    """Two have columns of zero, two pairs have only a sum or a product, one is known."""
    x = np.linspace(1, 2, 30)

    def f(p, x):
        both = (p["a"] + 10 * p["b"]) * x + p["c"] * p["d"] * x**2
        return both + p["known"] + 0 * (p["idle"][0] + 1e-9 * p["idle"][2])

    start = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0, "known": 0.0, "idle": np.zeros(3)}
    with pytest.warns(UserWarning, match="do not determine all parameters: moving"):
        fit = gnlin.curve_fit(f, x, 1 + x + 2 * x**2, start, **QUICK)
    *idle, first, second = fit.undetermined()
    assert idle == ["idle[0] by 1", "idle[1] by 1", "idle[2] by 1"]
    assert re.sub(r"-?\d\S*", "#", first) == "a by # and b by #"
    assert re.sub(r"-?\d\S*", "#", second) == "c by # and d by #"
    a, b = map(float, re.findall(r"by (\S+)", first))
    np.testing.assert_allclose(a, -10 * b, rtol=1e-3)
    c, d = map(float, re.findall(r"by (\S+)", second))
    ratio = -fit.parameters["c"] / fit.parameters["d"]
    np.testing.assert_allclose(c / d, ratio, rtol=1e-2)


def test_directions_apart_span_the_null_space():
    slopes = RNG.normal(size=(3, 8)) * 10.0 ** np.arange(-4, 4)
    f = lambda p, x: jnp.asarray(slopes) @ p
    with pytest.warns(UserWarning, match="do not determine all parameters: moving"):
        fit = gnlin.curve_fit(f, np.arange(3.0), slopes[:, 0], np.ones(8), **QUICK)
    found = apart(fit._end.covariance)
    assert found.shape == (5, 8)
    norms = np.linalg.norm(slopes, axis=0)
    np.testing.assert_allclose((slopes / norms) @ (found * norms).T, 0, atol=1e-12)
    assert np.linalg.matrix_rank(found * norms) == 5
    assert (np.sum(found != 0, axis=1) <= 4).all()  # a pivot and the other three


def test_the_probability_of_chi_squared():
    """By SciPy's distribution; of several data sets, and without a known `sigma`."""
    x, line = np.linspace(0, 1, 30), lambda p, x: p["a"] + p["b"] * x
    ys = 1 + x + 0.1 * np.random.default_rng(0).normal(size=(2, 30))
    known = {"sigma": 0.09, "absolute_sigma": True}
    start = {"a": 0.0, "b": 0.0}
    expected = scipy.stats.chi2.sf(
        [np.sum((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2) / 0.09**2 for y in ys], 28
    )
    fit = gnlin.curve_fit(line, x, ys[0], start, **known)
    np.testing.assert_allclose(fit.chi_squared_test(), expected[0], rtol=1e-6)
    assert f"chi-squared test: p = {expected[0]:.2g}\n" in str(fit)
    fits = gnlin.curve_fit(line, x, ys, start, **known)
    np.testing.assert_allclose(fits.chi_squared_test(), expected, rtol=1e-6)
    exact = gnlin.curve_fit(line, x[:2], ys[0, :2], start, **known)
    assert np.isnan(exact.chi_squared_test())
    assert "test" not in str(exact)
    estimated = gnlin.curve_fit(line, x, ys[0], start, sigma=0.09)
    assert "test" not in str(estimated)
    with pytest.raises(ValueError, match="pass `sigma` and `absolute_sigma=True`"):
        estimated.chi_squared_test()
