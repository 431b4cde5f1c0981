"""Fits of data in parts, compared with fits of all data at once, and with SciPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
from problems import decay, decay_numpy as plain

import gnlin
from gnlin._curve_fit import _in_parts, _parts


N = 1000
RANDOM = np.random.default_rng(0)
X = np.sort(RANDOM.uniform(0, 4, N))
NOISE = 0.1 * RANDOM.normal(size=N)
SIGMA = 0.1 * (1 + X)
START = {"a": 1.0, "rate": 0.5, "c": 0.0}


Y = plain(X, 2.5, 0.5, 1.3) + NOISE


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Many parts of several blocks, the last of which is not full."""
    monkeypatch.setattr(_parts, "_PART_BYTES", 2**12)
    monkeypatch.setattr(_in_parts, "_BLOCK", 2**8)


def numbers(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


SAME = (
    "parameters",
    "standard_errors",
    "covariance",
    "correlation",
    "covariance_matrix",
    "chi_squared",
    "deviance",
    "reduced_chi_squared",
    "degrees_of_freedom",
    "at_bound",
    "multipliers",
    "aic",
    "bic",
)


def check_same(parts, whole, rtol=1e-7, but=()):
    for fit in (parts, whole):
        assert fit.reason.startswith("converged")
    for name in set(SAME) - set(but):
        one, other = (numbers(getattr(fit, name)) for fit in (parts, whole))
        scale = np.max(np.abs(other[np.isfinite(other)]), initial=0)
        np.testing.assert_allclose(one, other, rtol, rtol * scale, err_msg=name)


def two(p, x):
    return {"first": decay(p, x["t"]), "slopes": jnp.stack([p["a"] * x["t"]] * 2, 1)}


def wave(p, x):
    size, angle = p["a"] * jnp.exp(-p["rate"] * x), p["c"] * x
    return jax.lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


COUNTS = RANDOM.poisson(20 * plain(X, 2.5, 0.5, 1.3))
OUTLIERS = Y + np.where(RANDOM.uniform(size=N) < 0.05, 3, 0)
CASES = {
    "plain": (decay, X, Y, {}),
    "one sigma": (decay, X, Y, {"sigma": 0.1, "absolute_sigma": True}),
    "sigma": (decay, X, Y, {"sigma": SIGMA}),
    "absolute": (decay, X, Y, {"sigma": SIGMA, "absolute_sigma": True}),
    "bounds": (decay, X, Y, {"bounds": {"c": (0.0, 0.3), "rate": (0.0, None)}}),
    "fixed": (decay, X, Y, {"fixed": ["c"]}),
    "left out": (
        decay,
        X,
        np.where(X < 1, np.where(X < 0.5, np.nan, np.inf), Y),
        {"sigma": np.where(X < 1, np.inf, SIGMA)},
    ),
    "trees": (
        two,
        {"t": X},
        {"first": Y, "slopes": np.stack([2.5 * X + NOISE, 2.4 * X], 1)},
        {},
    ),
    "complex": (
        wave,
        X,
        2.5 * np.exp((-1.3 + 0.5j) * X) + NOISE + 1j * NOISE[::-1],
        {"sigma": SIGMA},
    ),
    "counts": (
        lambda p, x: jnp.log(20 * decay(p, x)),
        X,
        COUNTS,
        {"loss": gnlin.losses.PoissonNLL()},
    ),
    "outliers": (
        decay,
        X,
        OUTLIERS,
        {
            "sigma": 0.1,
            "loss": gnlin.losses.Huber(1.5),
            "bounds": {"c": (0.0, 0.3), "rate": (0.0, None)},
        },
    ),
}


MARKS = dict.fromkeys(CASES, pytest.mark.exhaustive) | {
    "sigma": (),
    "left out": (),
    "outliers": pytest.mark.slow,
    "counts": pytest.mark.slow,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS[n]) for n in CASES])
def test_parts_are_the_whole(name):
    f, x, y, options = CASES[name]
    start = START | {"c": 0.1}
    parts = gnlin.curve_fit(f, x, y, start, **options, in_parts=True)
    whole = gnlin.curve_fit(f, x, y, start, **options)
    check_same(parts, whole, rtol=1e-6)
    if name == "outliers":  # the mean of the blocks' medians
        np.testing.assert_allclose(parts.scale, whole.scale, rtol=0.05)
    else:
        np.testing.assert_allclose(parts.scale, whole.scale, rtol=1e-7)
    if not np.iscomplexobj(y) and name != "trees":
        for one, other in zip(parts.band(x[:9]), whole.band(x[:9]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert "1000 points" in repr(parts) or name in ("trees", "complex", "left out")


def test_values_and_covariance_are_scipys():
    fit = gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA, in_parts=True)
    start = [1, 0, 0.5]
    values, covariance = scipy.optimize.curve_fit(
        plain, X, Y, start, SIGMA, ftol=1e-15, xtol=1e-15, gtol=1e-15
    )
    np.testing.assert_allclose(numbers(fit.parameters), values, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-4)
    residuals = (Y - plain(X, *numbers(fit.parameters))) / SIGMA
    np.testing.assert_allclose(fit.chi_squared, residuals @ residuals, rtol=1e-12)


@pytest.fixture
def passed(monkeypatch):
    """The number of bytes of each part that reaches the compiled program."""
    sizes = []

    def added(sums, setting, free, part, *others):
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(part)))
        return original(sums, setting, free, part, *others)

    original = _in_parts.added
    monkeypatch.setattr(_in_parts, "added", added)
    return sizes


def test_a_memory_map_is_read_in_parts(tmp_path, passed):
    maps = []
    for name, values in (("x", X), ("y", Y), ("sigma", SIGMA)):
        np.save(tmp_path / f"{name}.npy", values)
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    x, y, sigma = maps
    lengths = []

    def recorded(p, x):
        lengths.append(len(x))
        return decay(p, x)

    fit = gnlin.curve_fit(recorded, x, y, START, sigma=sigma, in_parts=True)
    check_same(fit, gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA))
    one_block = 2**8 // 4 * 3 * 8
    assert max(passed) <= 2**12 + one_block + 8 < X.nbytes
    assert max(lengths) <= 2**8 // 4


def test_a_generator_is_called_for_each_pass(passed):
    calls = []

    def parts():
        calls.append(1)
        for rows in np.split(np.arange(N), [300, 310, 900]):
            yield X[rows], Y[rows], SIGMA[rows]

    fit = gnlin.curve_fit(decay, parts, None, START)
    check_same(fit, gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA))
    # One call is a look at the first part, and each accepted trial a linearisation.
    assert len(calls) <= fit.num_steps + 3
    assert max(passed) <= (300 + 2**8 // 4) * 3 * 8 + 8


def test_a_list_of_parts_one_of_them_empty_and_one_sigma():
    rows = np.split(np.arange(N), [0, 300, 300, 600])
    parts = [(X[k], Y[k]) for k in rows]
    fit = gnlin.curve_fit(decay, parts, None, START, sigma=0.1)
    check_same(fit, gnlin.curve_fit(decay, X, Y, START, sigma=0.1))


def test_a_short_first_part_does_not_shorten_the_others(passed):
    parts = [(X[:3], Y[:3], SIGMA[:3]), (X[3:], Y[3:], SIGMA[3:])]
    fit = gnlin.curve_fit(decay, parts, None, START)
    check_same(fit, gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA))
    in_a_pass = 1 + -(-(N - 3) // (2**8 // 4))
    assert len(passed) <= in_a_pass * (fit.num_steps + 3)


def test_what_pandas_holds():
    series = pd.Series(X, index=range(N, 0, -1)), pd.Series(Y)
    sigma = pd.Series(SIGMA)
    fit = gnlin.curve_fit(decay, *series, START, sigma=sigma, in_parts=True)
    check_same(fit, gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA))
    both = lambda p, x: jnp.stack([decay(p, x), decay(p, x)], axis=1)
    frame = pd.DataFrame({"one": Y, "two": Y})
    fit = gnlin.curve_fit(both, X, frame, START, in_parts=True)
    same, _ = scipy.optimize.curve_fit(plain, X, Y, [1, 0, 0.5], ftol=1e-14)
    np.testing.assert_allclose(numbers(fit.parameters), same, rtol=1e-6)


@pytest.mark.exhaustive
def test_x_and_a_start_of_single_precision():
    start = {name: np.float32(value) for name, value in START.items()}
    with jax.numpy_dtype_promotion("standard"):
        fit = gnlin.curve_fit(decay, np.float32(X), Y, start, in_parts=True)
    expected, _ = scipy.optimize.curve_fit(plain, X, Y, [1, 0, 0.5])
    np.testing.assert_allclose(numbers(fit.parameters), expected, rtol=1e-4)


def test_rates_by_the_length_of_x():
    """The check of the rates passes fewer points than a block has."""
    f = lambda p, x: p["a"] * jnp.exp(-x) + jnp.zeros(x.shape)
    loss, counts = gnlin.losses.PoissonNLL(log_input=False), np.round(9 * np.exp(-X))
    fit = gnlin.curve_fit(f, X, counts, {"a": 4.0}, loss=loss, in_parts=True)
    # The slope of the likelihood is zero.
    expected = counts.sum() / np.exp(-X).sum()
    np.testing.assert_allclose(fit.parameters["a"], expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_a_network_is_trained_on_parts():
    model = eqx.nn.MLP(1, 1, 4, 1, jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def f(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x)

    with pytest.warns(UserWarning, match="all 20 steps were made"):
        fit = gnlin.curve_fit(
            f, X[:, None], Y[:, None], arrays, in_parts=True, max_steps=20
        )
    assert fit.reduced_chi_squared < 0.011  # the variance of the noise is 0.01


@pytest.mark.parametrize("missing", ["x", "y"])
def test_missing_points(missing):
    x, y, rows = X.copy(), Y.copy(), [3, 700, 701]
    (x if missing == "x" else y)[rows] = np.nan
    with pytest.raises(ValueError, match=r"has 3 missing values.*first at point 3"):
        gnlin.curve_fit(decay, x, y, START, in_parts=True)
    options = {"sigma": SIGMA, "nan_policy": "omit"}
    fit = gnlin.curve_fit(decay, x, y, START, in_parts=True, **options)
    check_same(fit, gnlin.curve_fit(decay, x, y, START, **options))


@pytest.mark.slow
def test_missing_counts():
    f, x, y, options = CASES["counts"]
    y, start = np.where(X < 1, np.nan, y), START | {"c": 0.1}
    with pytest.raises(ValueError, match=r"has .* missing values .*first at point 0"):
        gnlin.curve_fit(f, x, y, start, **options, in_parts=True)
    options |= {"nan_policy": "omit"}
    fit = gnlin.curve_fit(f, x, y, start, **options, in_parts=True)
    check_same(fit, gnlin.curve_fit(f, x, y, start, **options), rtol=1e-6)


def test_a_fault_in_a_later_part_is_named():
    y, sigma = Y.copy(), SIGMA.copy()
    y[812] = np.inf
    with pytest.raises(ValueError, match=r"1 infinite value, first at point 812"):
        gnlin.curve_fit(decay, X, y, START, in_parts=True)
    sigma[[431, 950]] = 0
    with pytest.raises(ValueError, match="not at 2 points, first at point 431"):
        gnlin.curve_fit(decay, X, Y, START, sigma=sigma, in_parts=True)
    counts = COUNTS.copy()
    counts[900] = -1
    with pytest.raises(ValueError, match="counts"):
        gnlin.curve_fit(
            decay, X, counts, START, in_parts=True, loss=gnlin.losses.PoissonNLL()
        )
    x = X.copy()
    x[640] = -1.0
    root = lambda p, x: p["a"] * jnp.sqrt(x) + p["c"] + p["rate"] * x
    with pytest.warns(UserWarning, match=r"`f` is not finite at 1 point, .*point 640"):
        fit = gnlin.curve_fit(root, x, Y, START, in_parts=True)
    assert "nan" in repr(fit)


def test_what_the_data_do_not_determine_is_said():
    sums = lambda p, x: (p["a"] + p["c"]) * jnp.exp(-p["rate"] * x)
    with pytest.warns(UserWarning, match="do not determine all parameters"):
        parts = gnlin.curve_fit(sums, X, Y, START, in_parts=True)
    assert np.all(np.isinf(numbers(parts.standard_errors)[:2]))
    one = lambda x, size, rate: size * np.exp(-rate * x)
    _, covariance = scipy.optimize.curve_fit(one, X, Y, [1, 0.5], ftol=1e-14)
    error = np.sqrt(covariance[1, 1])
    np.testing.assert_allclose(parts.standard_errors["rate"], error, rtol=1e-6)


@pytest.mark.slow
def test_rounding_of_all_points_determines_nothing():
    """The two slopes differ by 45 roundings, and the sum of 1,000 points by more."""
    f = lambda p, x: p["a"] * x + p["c"] * (x * (1 + 1e-14 * jnp.cos(9 * x)))
    with pytest.warns(UserWarning, match="do not determine all parameters"):
        gnlin.curve_fit(f, X, Y, {"a": 1.0, "c": 0.0}, in_parts=True)


@pytest.mark.slow
def test_a_parameter_on_a_plateau_is_not_determined():
    x = np.linspace(-1, 1, 40)
    noise = np.cos(30 * x) - np.mean(np.cos(30 * x))  # even, so it has no slope
    f = lambda p, x: p["c"] + 1e-7 * jnp.tanh(p["b"]) * x
    with pytest.warns(UserWarning, match="moving b by 1 does not change the curve"):
        fit = gnlin.curve_fit(f, x, 3 + noise, {"b": 0.5, "c": 1.0}, in_parts=True)
    assert np.isinf(fit.standard_errors["b"])
    expected = np.std(noise, ddof=1) / np.sqrt(40)
    np.testing.assert_allclose(fit.standard_errors["c"], expected, rtol=1e-6)


def test_a_run_that_ends_early_says_so():
    with pytest.warns(UserWarning, match="all 2 steps were made"):
        fit = gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA, in_parts=True, max_steps=2)
    assert fit.num_steps == len(fit.history.loss) == 2
    assert fit.history.loss[0] > fit.history.loss[1] > fit.deviance / 2
    first = 0.5 * np.sum(((Y - 1.0 * np.exp(-0.5 * X)) / SIGMA) ** 2)
    np.testing.assert_allclose(fit.history.loss[0], first, rtol=1e-12)


@pytest.mark.parametrize("last", [2, 4])
def test_ctrl_c_keeps_the_steps_that_were_made(last):
    """The first pass is at the start, and a look at the data comes before it."""
    calls = []

    def parts():
        calls.append(1)
        if len(calls) > last:
            raise KeyboardInterrupt
        yield X, Y, SIGMA

    if last == 2:
        with pytest.raises(KeyboardInterrupt):
            gnlin.curve_fit(decay, parts, None, START)
        return
    with pytest.warns(UserWarning, match="not converged: interrupted after 2 steps"):
        fit = gnlin.curve_fit(decay, parts, None, START)
    with pytest.warns(UserWarning, match="all 2 steps were made"):
        whole = gnlin.curve_fit(
            decay, X, Y, START, sigma=SIGMA, in_parts=True, max_steps=2
        )
    np.testing.assert_allclose(numbers(fit.parameters), numbers(whole.parameters))
    np.testing.assert_allclose(fit.chi_squared, whole.chi_squared)


def test_where_no_step_can_be_made_the_start_is_returned():
    f = lambda p, x: jnp.where(p["a"] == 1, p["a"] * x, jnp.nan)
    with pytest.warns(UserWarning, match="it stands still"):
        fit = gnlin.curve_fit(f, X, Y, {"a": 1.0}, in_parts=True)
    assert fit.parameters["a"] == 1
    np.testing.assert_allclose(fit.chi_squared, np.sum((Y - X) ** 2), rtol=1e-12)


def test_a_function_is_compiled_once():
    traced = []

    def counted(p, x):
        traced.append(1)
        return decay(p, x)

    gnlin.curve_fit(counted, X, Y, START, sigma=SIGMA, in_parts=True)
    first = len(traced)
    assert first < 10
    some = X[:777], Y[:777]
    gnlin.curve_fit(counted, *some, START, sigma=SIGMA[:777], in_parts=True)
    assert len(traced) < 2 * first


def test_points_that_are_not_independent_are_refused():
    for f in (
        lambda p, x: decay(p, x - jnp.mean(x)),
        lambda p, x: decay(p, x - x[0]),
        lambda p, x: jnp.cumsum(decay(p, x)),
    ):
        with pytest.raises(ValueError, match="only if `f` computes each point"):
            gnlin.curve_fit(f, X, Y, START, in_parts=True)


@pytest.mark.usefixtures("unchecked")
def test_what_needs_all_data_is_refused():
    of = lambda *args, **options: gnlin.curve_fit(
        decay, *(args or (X, Y)), START, in_parts=True, **options
    )
    fit = of(sigma=SIGMA)
    assert fit.residuals is None
    for method in ("confidence_intervals", "runs_test", "plot"):
        with pytest.raises(ValueError, match=rf"`{method}` needs all data in memory"):
            getattr(fit, method)()
    with pytest.raises(ValueError, match="Complex values need squared error"):
        gnlin.curve_fit(
            wave, X, X + 1j, START, in_parts=True, loss=gnlin.losses.PoissonNLL()
        )
    with pytest.raises(ValueError, match="needs `sigma`, the scale"):
        of(loss=gnlin.losses.Huber(1.0))
    with pytest.raises(ValueError, match="has numbers of its own for each point"):
        of(loss=gnlin.losses.BinomialNLL(np.full(N, 3)))
    with pytest.raises(ValueError, match="LevenbergMarquardt"):
        of(solver=gnlin.GaussNewton())
    with pytest.raises(ValueError, match="neither `sigma_x` nor `starts`"):
        of(sigma_x=0.1)
    with pytest.raises(ValueError, match="`sigma` of data in parts must be one number"):
        of(sigma=np.eye(N))
    with pytest.raises(ValueError, match="one data set"):
        of(np.array([1.0, 2.0]), np.ones((2, 2)))
    with pytest.raises(ValueError, match="of one length"):
        of(X, Y[1:])
    for given in (([], None), ([(X[:0], Y[:0])], None), (X[:0], Y[:0])):
        with pytest.raises(ValueError, match="There is no data: `x` and `y` have no po"):
            of(*given)
    with pytest.raises(ValueError, match="cannot be inside"):
        jax.jit(lambda y: of(X, y).chi_squared)(jnp.asarray(Y))
    with pytest.raises(ValueError, match="cannot be inside"):
        jax.jit(lambda scale: scale * of(X, Y).chi_squared)(1.0)
    for x in (iter([(X, Y)]), 3.0):
        with pytest.raises(ValueError, match="iterable any number of times"):
            of(x, None)
    with pytest.raises(ValueError, match="must yield tuples"):
        of([X], None)

    lengths = iter([N, N] + [N - 1] * 9)

    def shrinking():
        size = next(lengths)
        yield X[:size], Y[:size]

    with pytest.raises(ValueError, match=r"yielded 1,000 points .* and 999"):
        of(shrinking, None)


def test_two_kinds_of_errors():
    x, y = np.linspace(0, 1, 8), np.ones(8)
    parts = [(x, y, np.full(8, 0.1))]
    with pytest.raises(ValueError, match="leave the argument `sigma` out"):
        gnlin.curve_fit(lambda p, x: p["a"] + x, parts, None, {"a": 1.0}, sigma=0.2)
