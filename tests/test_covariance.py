"""The covariance of parameters fitted to groups of residuals, compared with dense
formulas, and with the standard errors of a curve."""

import dataclasses
import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from fit_problems import Normalised

import gnlin
from gnlin._subproblem import _sparse
from gnlin.predict import _covariance, covariance


X = np.linspace(-3.0, 3.0, 40)
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(2, 40))


def peak(p, x, height):
    return height * jnp.exp(-((x / p["width"]) ** 2))


HEIGHTS, SIGMAS = np.array([2.0, 3.0]), np.array([0.05, 0.2])
PEAKS = HEIGHTS[:, None] * np.exp(-(X**2)) + SIGMAS[:, None] * NOISE


@functools.cache
def two_peaks(dtype=np.float64):
    """Return groups of two peaks that share a width, with different noise, and the
    solution."""
    groups = {
        f"peak {k}": gnlin.Residuals(
            lambda p, d, k=k: peak(p, d[0], p["heights"][k]) - d[1],
            (jnp.asarray(X, dtype), jnp.asarray(PEAKS[k], dtype)),
            weight=jnp.array(1 / SIGMAS[k] ** 2, dtype),
        )
        for k in range(2)
    }
    if dtype == np.float32:
        cast = lambda x: x.astype(dtype)
        return groups, jax.tree.map(cast, two_peaks()[1].model)
    start = {"heights": jnp.ones(2), "width": jnp.array(2.0)}
    return groups, gnlin.solve(start, groups)


def dense(model):
    """The inverse of the curvature, of the heights and the width, by NumPy."""
    heights, width = np.asarray(model["heights"], float), float(model["width"])
    shape = np.exp(-((X / width) ** 2))
    jacobian = np.zeros((2, 40, 3))
    for k in range(2):
        jacobian[k, :, k] = shape / SIGMAS[k]
        jacobian[k, :, 2] = heights[k] * shape * 2 * X**2 / width**3 / SIGMAS[k]
    misfit = (heights[:, None] * shape - PEAKS) / SIGMAS[:, None]
    jacobian = jacobian.reshape(80, 3)
    return np.linalg.inv(jacobian.T @ jacobian), np.sum(misfit**2)


@pytest.mark.parametrize(
    ("dtype", "absolute_sigma"),
    [
        pytest.param(np.float32, True, marks=pytest.mark.slow),
        (np.float64, True),
        (np.float64, False),
    ],
)
def test_shared_parameters_match_the_dense_formula(dtype, absolute_sigma):
    groups, solution = two_peaks(dtype)
    known = covariance(solution, groups, absolute_sigma=absolute_sigma)
    model = getattr(solution, "model", solution)
    expected, chi_squared = dense(model)
    if not absolute_sigma:
        expected = expected * chi_squared / (80 - 3)
    rtol = 1e-3 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(known.matrix(lambda p: p), expected, rtol, 1e-7)
    errors = known.standard_errors
    found = [*errors["heights"], errors["width"]]
    np.testing.assert_allclose(found, np.sqrt(np.diag(expected)), rtol)
    assert known.degrees_of_freedom == 77

    area, error = known.derived(lambda p: {"area": p["heights"] * p["width"]})
    heights, width = (np.asarray(model[k]) for k in ("heights", "width"))
    np.testing.assert_allclose(area["area"], heights * width, rtol)
    slopes = np.array([[width, 0, heights[0]], [0, width, heights[1]]], float)
    variances = np.diag(slopes @ expected @ slopes.T)
    np.testing.assert_allclose(error["area"], np.sqrt(variances), rtol)


def test_inputs_and_targets_match_scipys_curve_fit():
    curve = lambda p, x: p["a"] * jnp.exp(-p["rate"] * x)
    y, sigma = 2 * np.exp(-0.3 * X) + 0.05 * NOISE[0], 0.02 + 0.01 * (X + 3)
    counted = np.arange(40) != 7
    y, weights = np.where(counted, y, 50.0), counted / sigma**2
    solution = gnlin.solve((curve, {"a": 1.0, "rate": 0.5}), (X, y, weights))
    known = covariance(solution, (X, y, weights), absolute_sigma=False)
    (_, rate), expected = scipy.optimize.curve_fit(
        lambda x, a, rate: a * np.exp(-rate * x),
        *(X[counted], y[counted], [1.0, 0.5], sigma[counted]),
        ftol=1e-15,
        xtol=1e-15,
    )
    errors = np.sqrt(np.diagonal(expected))
    np.testing.assert_allclose(list(known.standard_errors.values()), errors, rtol=1e-5)
    found = known.derived(lambda p: 1 / p["rate"])
    np.testing.assert_allclose(found, [1 / rate, errors[1] / rate**2], rtol=1e-5)
    assert known.degrees_of_freedom == 37


@pytest.mark.slow
def test_a_likelihood_has_the_inverse_of_its_information():
    counts = jnp.asarray(RNG.poisson(np.exp(1 + 0.4 * X)), float)
    group = gnlin.Residuals(
        lambda b, x: b[0] + b[1] * x, X, targets=counts, loss=gnlin.losses.PoissonNLL()
    )
    solution = gnlin.solve(jnp.zeros(2), group)
    design = np.stack([np.ones(40), X], axis=1)
    rates = np.exp(design @ np.asarray(solution.model))
    expected = np.linalg.inv(design.T @ (rates[:, None] * design))
    found = covariance(solution, group).matrix(lambda b: b)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    with pytest.raises(ValueError, match="`absolute_sigma=False` is for squared error"):
        covariance(solution, group, absolute_sigma=False)


class Gaussian(gnlin.authoring.AbstractLoss):
    """The outputs are the mean and the logarithm of the standard deviation."""

    reduction: str | None = None

    def value(self, outputs, target):
        mean, log_sigma = outputs
        return 0.5 * ((target - mean) / jnp.exp(log_sigma)) ** 2 + log_sigma


def line_and_noise(p, x):
    return jnp.stack([p["a"] + p["b"] * x, p["s"] + p["t"] * x])


@pytest.mark.slow
def test_a_loss_that_is_not_convex_has_the_inverse_of_its_whole_hessian():
    loss, y = Gaussian(), 1 + 0.5 * X + np.exp(-1 + 0.2 * X) * NOISE[0]

    def whole(p):
        outputs = jax.vmap(
            lambda x: line_and_noise(dict(zip("abst", p, strict=True)), x)
        )(X)
        return jnp.sum(jax.vmap(loss.value)(outputs, y))

    slope, hessian = jax.jit(jax.grad(whole)), jax.jit(jax.hessian(whole))
    best = scipy.optimize.minimize(
        whole, np.zeros(4), jac=slope, hess=hessian, method="trust-exact"
    ).x
    expected = np.sqrt(np.diagonal(np.linalg.inv(hessian(best))))
    model = {name: jnp.array(value) for name, value in zip("abst", best, strict=True)}
    groups = gnlin.Residuals(line_and_noise, X, targets=y, loss=loss)
    for known in (
        covariance((line_and_noise, model), (X, y), loss=loss),
        covariance(model, groups),
    ):
        found = [known.standard_errors[name] for name in "abst"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_negative_curvature_that_is_too_large_is_told():
    class Wave(gnlin.authoring.AbstractElementwiseLoss):
        reduction: str | None = None

        def elementwise(self, output, target):
            return 1 - jnp.cos(output - target)

    x, targets = jnp.ones(3), jnp.array([0.0, 3.0, -3.0])
    with pytest.warns(UserWarning, match="too small, because they leave out the negati"):
        covariance((lambda p, x: p * x, 0.0), (x, targets), loss=Wave())


@pytest.mark.slow
@pytest.mark.parametrize("most", [_covariance._MANY, 0])
def test_differences_are_known_where_places_are_not(monkeypatch, most):
    monkeypatch.setattr(_covariance, "_MANY", most)
    ends = jnp.asarray(np.stack([np.arange(6), np.arange(1, 7)], axis=1))
    # A new function, for which no program is known with another limit
    group = gnlin.Residuals(
        lambda pair, e: (pair[1] - pair[0] - 1.0) / 0.1,
        {"ends": ends},
        select=lambda e: e["ends"],
    )
    places = jnp.arange(7.0)
    known = covariance(places, group)
    value, error = known.derived(lambda p: p[4] - p[1])
    np.testing.assert_allclose([value, error], [3.0, 0.1 * 3**0.5], rtol=1e-5)
    both = known.matrix(lambda p: jnp.stack([p[0], p[4] - p[1]]))
    np.testing.assert_allclose(both[1, 1], 0.03, rtol=1e-5)
    assert both[0, 0] == np.inf
    assert np.isnan(both[0, 1])
    assert np.all(known.standard_errors == np.inf)
    if most:
        return
    place = places[:1]
    start = gnlin.Residuals(lambda p, x: (p - x) / 0.5, place, select=lambda _: 0)
    held = covariance(places, {"edges": group, "start": start})
    found = held.matrix(lambda p: p[:3])
    steps = np.arange(3)
    expected = 0.25 + 0.01 * np.minimum.outer(steps, steps)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    everything = np.sqrt(0.25 + 0.01 * np.arange(7))
    np.testing.assert_allclose(held.standard_errors, everything, rtol=1e-5)


def smoothed(seen):
    """The covariances of the states of a particle of which noisy places were seen, by a
    Kalman filter and the smoother of Rauch, Tung and Striebel; and the same as groups."""
    moves = np.array([[1.0, 0.1], [0.0, 1.0]])
    noise = 0.5 * np.array([[0.1**3 / 3, 0.1**2 / 2], [0.1**2 / 2, 0.1]])
    mean, known = np.zeros(2), np.diag([1.0, 4.0])
    before, after = [], []
    for k, place in enumerate(seen):
        if k:
            mean, known = moves @ mean, moves @ known @ moves.T + noise
        before.append((mean, known))
        gain = known[:, :1] / (known[0, 0] + 0.09)
        mean, known = mean + gain[:, 0] * (place - mean[0]), known - gain @ known[:1]
        after.append((mean, known))
    found = after[-1:]
    for (mean, known), (ahead, spread) in zip(after[-2::-1], before[:0:-1], strict=True):
        back = known @ moves.T @ np.linalg.inv(spread)
        best, least = found[-1]
        found.append(
            (mean + back @ (best - ahead), known + back @ (least - spread) @ back.T)
        )
    means, covariances = map(np.stack, zip(*found[::-1], strict=True))

    n, root = len(seen), np.linalg.inv(np.linalg.cholesky(noise))
    rows = {"k": jnp.arange(n), "place": jnp.asarray(seen)}
    groups = {
        "prior": gnlin.Residuals(
            lambda x, _: x[0] / jnp.array([1.0, 2.0]),
            jnp.zeros((1, 1), int),
            select=lambda k: k,
        ),
        "moves": gnlin.Residuals(
            lambda x, _: root @ (x[1] - moves @ x[0]),
            jnp.arange(n - 1),
            select=lambda k: jnp.stack([k, k + 1]),
        ),
        "seen": gnlin.Residuals(
            lambda x, d: (d["place"] - x[0]) / 0.3, rows, select=lambda d: d["k"]
        ),
    }
    return means, covariances, groups


@pytest.mark.slow
@pytest.mark.parametrize("memory_budget", [2**31, 2**22])
def test_all_errors_of_many_states_are_those_of_a_smoother(memory_budget):
    """A matrix of the 3,000 parameters would take 72 MB."""
    seen = np.cumsum(np.random.default_rng(0).normal(size=1500)) / 10
    means, covariances, groups = smoothed(seen)
    known = covariance(jnp.asarray(means), groups, memory_budget=memory_budget)
    expected = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    np.testing.assert_allclose(known.standard_errors, expected, rtol=1e-9)
    block = known.matrix(lambda x: x[700])
    np.testing.assert_allclose(block, covariances[700], rtol=1e-9, atol=1e-14)
    error = known.derived(lambda x: x[700:703])[1]
    np.testing.assert_allclose(error, expected[700:703], rtol=1e-9)


@pytest.mark.parametrize(
    ("num_held", "klu"),
    [
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        (0, False),
    ],
)
def test_all_errors_by_solves_are_those_of_a_dense_inverse(monkeypatch, klu, num_held):
    """Poses on a ring with chords, one of which is not reached by any edge."""
    monkeypatch.setattr(_covariance, "_MANY", 0)
    monkeypatch.setattr(_sparse, "has_factorisation", lambda: klu)
    rng = np.random.default_rng(0)
    ends = np.concatenate(
        [np.arange(49)[:, None] + [0, 1], rng.integers(50, size=(20, 2))]
    )
    ends = ends[ends[:, 0] != ends[:, 1]]
    scale = np.array([1e4, 1.0, 1e-3])
    group = gnlin.Residuals(
        lambda pair, e: scale * (pair[1] - pair[0]),
        {"ends": jnp.asarray(ends)},
        select=lambda e: e["ends"],
    )
    groups = {"edges": group}
    if num_held:
        groups["held"] = gnlin.Residuals(
            lambda pose, k: 2.0 * scale * pose, jnp.array([0]), select=lambda k: k
        )
    known = covariance(jnp.zeros((51, 3)), groups)
    incidence = np.zeros((len(ends) + num_held, 50))
    incidence[np.arange(len(ends)), ends[:, 0]] = -1
    incidence[np.arange(len(ends)), ends[:, 1]] = 1
    incidence[len(ends) :, 0] = 2.0
    variances = np.full((51, 3), np.inf)
    if num_held:
        inverse = np.linalg.inv(incidence.T @ incidence)
        variances[:50] = np.diagonal(inverse)[:, None] / scale**2
    np.testing.assert_allclose(known.standard_errors, np.sqrt(variances), rtol=1e-7)


@pytest.mark.slow
def test_errors_along_a_retraction():
    """A direction on the sphere, in the two coordinates of its tangent plane."""

    def moved(row, step):
        basis = jnp.linalg.svd(row[None])[2][1:]
        there = row + step[:2] @ basis
        return there / jnp.linalg.norm(there)

    seen = np.array([[0.0, 0.6, 0.8]]) + 0.1 * NOISE[0, :30].reshape(10, 3)
    group = gnlin.Residuals(lambda u, d: (u[0] - d) / 0.1, jnp.asarray(seen))
    mean = np.mean(seen, axis=0, keepdims=True)
    best = jnp.asarray(mean / np.linalg.norm(mean))
    known = covariance(best, group, retraction=moved)
    np.testing.assert_allclose(known.standard_errors, [[0.001**0.5, 0.001**0.5, 0.0]])
    # The length of the direction is 1, and is known.
    np.testing.assert_allclose(known.derived(jnp.linalg.norm)[1], 0.0, atol=1e-12)
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    solution = gnlin.solve(best, group, solver)
    with pytest.raises(ValueError, match="was trained along a `retraction`: pass it to"):
        covariance(solution, group)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_small_part_of_what_is_not_determined(dtype):
    """The sum of two numbers was measured, and nothing else. So the variance of the sum
    plus a ten-thousandth of one of them is infinite; that of the sum is not."""
    seen = jnp.asarray(3 + 0.1 * NOISE[0, :20], dtype)
    group = gnlin.Residuals(lambda p, d: (jnp.sum(p) - d) / dtype(0.1), seen)
    half = jnp.mean(seen) / 2
    known = covariance(jnp.stack([half, half]), group)
    np.testing.assert_allclose(known.derived(jnp.sum)[1], 0.1 / 20**0.5, rtol=1e-4)
    assert np.isinf(known.derived(lambda p: jnp.sum(p) + 1e-4 * p[0])[1])


def test_an_exact_fit_and_one_without_degrees_of_freedom():
    line = lambda p, x: p["a"] + p["b"] * x
    for x, error in ((X, 0.0), (X[:2], np.inf)):
        model = line, {"a": jnp.array(3.0), "b": jnp.array(-2.0)}
        known = covariance(model, (x, 3 - 2 * x), absolute_sigma=False)
        errors = list(known.standard_errors.values())
        np.testing.assert_allclose(errors, [error] * 2, atol=1e-12)


def test_what_cannot_be_meant():
    groups, solution = two_peaks()
    start = {"heights": jnp.ones(2), "width": jnp.array(2.0)}
    with pytest.warns(UserWarning, match="standard deviations from the minimum"):
        covariance(start, groups)
    with pytest.raises(ValueError, match="`loss` is not for groups"):
        covariance(solution, groups, loss=gnlin.losses.Huber(1.0))
    known = covariance(solution, groups)
    with pytest.raises(ValueError, match="`fn` must be a function of the model"):
        known.derived(3)
    with pytest.raises(KeyError, match="depth"):
        known.derived(lambda p: p["depth"])
    with pytest.raises(ValueError, match="`fn` must return floating-point arrays"):
        known.derived(lambda p: 3)
    curve = lambda p, x: p["a"] * x
    data = X, 2 * X
    with_prior = gnlin.solve((curve, {"a": 1.0}), data, prior=1.0)
    with pytest.raises(ValueError, match="in units of the noise"):
        covariance(with_prior, data, absolute_sigma=False)
    with pytest.raises(ValueError, match="not finite"):
        covariance((curve, {"a": jnp.array(jnp.nan)}), data)


def test_the_prior_of_the_training_counts():
    curve, data = lambda p, x: p["a"] * x + p["b"], (X, 2 * X)
    solution = gnlin.solve((curve, {"a": 1.0, "b": 0.0}), data, prior=0.3)
    design = np.stack([X, np.ones(40)], axis=1)
    expected = np.linalg.inv(design.T @ design + np.eye(2) / 0.3**2)
    found = covariance(solution, data).matrix(lambda p: p)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_derivative_that_is_not_finite_has_no_error():
    groups, solution = two_peaks()
    known = covariance(solution, groups)
    root = lambda p: jnp.sqrt(p["width"] - jax.lax.stop_gradient(p["width"]))
    assert np.isnan(known.derived(root).standard_error)


def test_solves_do_not_depend_on_units_and_need_double_precision(monkeypatch):
    monkeypatch.setattr(_covariance, "_MANY", 0)
    units = jnp.array([1e-5, 1e3, 1.0])
    group = gnlin.Residuals(
        lambda row, k: row * units[k].astype(row.dtype), jnp.arange(3), select=lambda k: k
    )
    known = covariance(jnp.zeros(3), group)
    np.testing.assert_allclose(known.derived(lambda p: p)[1], 1 / units, rtol=1e-6)
    assert known.degrees_of_freedom == 0
    with pytest.raises(ValueError, match="Single precision does not resolve"):
        covariance(jnp.zeros(3, jnp.float32), group)


@pytest.mark.parametrize("part", [None, pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_curvature_of_a_robust_loss_is_its_second_derivative(part):
    """... whatever curvature steps have. A parameter of outliers only is not known."""
    y = np.where(np.arange(40) % 8 == 0, 30.0, 0.3 * NOISE[0])
    loss = gnlin.losses.Huber(1.0, reweighted=part)
    at = {"slope": jnp.array(0.1), "far": jnp.array(20.0)}
    groups = {
        "line": gnlin.Residuals(lambda p, d: p["slope"] * d[0] - d[1], (X, y), loss=loss),
        "far": gnlin.Residuals(lambda p, _: p["far"], loss=loss),
    }
    curved = np.sum(X[abs(0.1 * X - y) <= 1] ** 2)
    model = (lambda slope, x: slope * x, at["slope"])
    data, prior = (jnp.asarray(X), jnp.asarray(y)), 10.0
    posterior = gnlin.predict.posterior(model, data, loss=loss, prior=prior)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # this is no minimum
        errors = covariance(at, groups).standard_errors
        variance = posterior(jnp.ones(1)).variance
    np.testing.assert_allclose(errors["slope"], curved**-0.5, rtol=1e-10)
    assert np.isinf(errors["far"])
    np.testing.assert_allclose(variance, 1 / (curved + prior**-2), rtol=1e-10)


@pytest.mark.slow
def test_a_solution_with_batch_statistics():
    """They are fixed, as in the prediction."""
    x = np.random.default_rng(1).normal(size=(20, 3))
    y = np.stack([x[:, 0], x[:, 1] * x[:, 2]], axis=1)
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    found = gnlin.fit(model, (x, y), state=state, batch_size=20, steps=40, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run ends before the minimum
        known = covariance(found, (x, y), absolute_sigma=False)

        def fixed(parameters, x):
            return parameters(x, found.state)[0]

        pair = fixed, eqx.nn.inference_mode(found.model)
        expected = covariance(pair, (x, y), absolute_sigma=False)
    of = lambda model: model.last.bias
    np.testing.assert_allclose(known.derived(of)[1], expected.derived(of)[1], rtol=1e-6)


def spectra(num_times):
    """Return groups of nine decays at many times each, which share a rate, and a second
    parameter that changes nothing."""
    times = jnp.linspace(0.0, 2.0, num_times)

    def residuals(rows, data):
        rate, _ = rows["shared"]
        curve = rows["height"][0] * jnp.exp(-rate * times) + rows["height"][1]
        return (curve - data["y"]) / 0.1

    noise = np.random.default_rng(1).normal(size=(9, num_times))
    data = {"y": jnp.exp(-times)[None] + 0.1 * noise, "k": jnp.arange(9)}
    select = lambda data: {"shared": 0, "height": data["k"]}
    groups = {"decays": gnlin.Residuals(residuals, data, select=select)}
    start = {"shared": jnp.ones((1, 2)), "height": jnp.ones((9, 2))}
    return groups, gnlin.solve(start, groups)


@pytest.mark.slow
@pytest.mark.parametrize("num_times", [3, 30])
def test_many_outputs_of_examples_that_read_few_parameters(num_times):
    # With 30 outputs that read four parameters, the rows are replaced by triangles.
    groups, solution = spectra(num_times)
    group, model = groups["decays"], solution.model
    flat, unravel = jax.flatten_util.ravel_pytree(model)

    def outputs(flat):
        model = unravel(flat)
        each = jax.vmap(lambda k: jax.tree.map(lambda a, i: a[i], model, group.select(k)))
        return jax.vmap(group.fn)(each(group.data), group.data).ravel()

    jacobian = np.asarray(jax.jit(jax.jacfwd(outputs))(flat))
    matrix = np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-12)
    expected = np.diag(matrix) ** 0.5
    known = covariance(solution, groups)
    known_matrix = known.matrix(lambda m: (m["height"], m["shared"][0, 0]))
    np.testing.assert_allclose(known_matrix, matrix[:19, :19], rtol=1e-6, atol=1e-12)
    errors = known.standard_errors
    assert np.isinf(errors["shared"][0, 1])  # it changes nothing
    np.testing.assert_allclose(errors["height"].ravel(), expected[:18], rtol=1e-8)
    np.testing.assert_allclose(errors["shared"][0, 0], expected[18], rtol=1e-8)
    assert known.degrees_of_freedom == 9 * num_times - 19

    def error(scale):
        data = group.data | {"y": scale * group.data["y"]}
        scaled = {"decays": dataclasses.replace(group, data=data)}
        at = {"shared": model["shared"], "height": scale * model["height"]}
        return covariance(at, scaled).standard_errors["shared"][0, 0]

    # The error of the rate is inversely proportional to the heights.
    _, slope = jax.jit(lambda scale: jax.jvp(error, (scale,), (1.0,)))(1.0)
    np.testing.assert_allclose(slope, -expected[18], rtol=1e-6)
