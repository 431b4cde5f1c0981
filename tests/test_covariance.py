"""The covariance of parameters fitted to groups of residuals, compared with dense
formulas, and with the standard errors of a curve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin.predict import _covariance, covariance


X = jnp.linspace(-3.0, 3.0, 40)
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(2, 40))


def peak(p, x, height):
    return height * jnp.exp(-((x / p["width"]) ** 2))


def two_peaks(dtype=jnp.float64):
    """Two peaks that share a width, with different noise."""
    x, ones = X.astype(dtype), jnp.ones(40, dtype)
    heights, sigmas = (2.0, 3.0), (0.05, 0.2)
    groups = {
        f"peak {k}": gnlin.Residuals(
            lambda p, d, k=k: peak(p, d[0], p["heights"][k]) - d[1],
            (x, height * jnp.exp(-(x**2)) + sigma * NOISE[k].astype(dtype)),
            weight=jnp.array(1 / sigma**2, dtype),
        )
        for k, (height, sigma) in enumerate(zip(heights, sigmas, strict=True))
    }
    return {"heights": ones[:2], "width": 2 * ones[0]}, groups


def dense(model, groups):
    """The inverse of the curvature in `ravel_pytree` order, by NumPy."""
    flat, unravel = jax.flatten_util.ravel_pytree(model)

    def residuals(flat):
        rows = [
            jnp.sqrt(g.weight) * jax.vmap(lambda d, g=g: g.fn(unravel(flat), d))(g.data)
            for g in groups.values()
        ]
        return jnp.concatenate(rows)

    jacobian, misfit = jax.jacobian(residuals)(flat), residuals(flat)
    inverse = np.linalg.inv(np.asarray(jacobian).T @ np.asarray(jacobian))
    return inverse, float(misfit @ misfit)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("absolute_sigma", [True, False])
def test_shared_parameters_match_the_dense_formula(dtype, absolute_sigma):
    start, groups = two_peaks(dtype)
    solution = gnlin.solve(start, groups)
    known = covariance(solution, groups, absolute_sigma=absolute_sigma)
    expected, chi_squared = dense(solution.model, groups)
    if not absolute_sigma:
        expected = expected * chi_squared / (80 - 3)
    rtol = 1e-3 if dtype == jnp.float32 else 1e-9
    np.testing.assert_allclose(known.matrix(lambda p: p), expected, rtol, 1e-7)
    errors = known.standard_errors
    found = [*errors["heights"], errors["width"]]
    np.testing.assert_allclose(found, np.sqrt(np.diag(expected)), rtol)
    assert known.degrees_of_freedom == 77

    area, error = known.derived(lambda p: {"area": p["heights"] * p["width"]})
    heights, width = (np.asarray(solution.model[k]) for k in ("heights", "width"))
    np.testing.assert_allclose(area["area"], heights * width, rtol)
    slopes = np.array([[width, 0, heights[0]], [0, width, heights[1]]], float)
    variances = np.diag(slopes @ expected @ slopes.T)
    np.testing.assert_allclose(error["area"], np.sqrt(variances), rtol)


def test_inputs_and_targets_match_a_curve_fit():
    curve = lambda p, x: p["a"] * jnp.exp(-p["rate"] * x)
    y, sigma = 2 * jnp.exp(-0.3 * X) + 0.05 * NOISE[0], 0.02 + 0.01 * (X + 3)
    y, start = y.at[7].set(50.0), {"a": 1.0, "rate": 0.5}
    weights = (1 / sigma**2).at[7].set(0.0)
    solution = gnlin.solve((curve, start), (X, y, weights))
    known = covariance(solution, (X, y, weights), absolute_sigma=False)
    fit = gnlin.curve_fit(curve, X, y, start, sigma=sigma.at[7].set(jnp.inf))
    for found, expected in (
        (known.standard_errors, fit.standard_errors),
        (known.derived(lambda p: 1 / p["rate"]), fit.derived(lambda p: 1 / p["rate"])),
        (known.degrees_of_freedom, fit.degrees_of_freedom),
    ):
        found, expected = map(jax.tree.leaves, (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


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


@pytest.mark.parametrize("most", [_covariance._MANY, 0])
def test_differences_are_known_where_places_are_not(monkeypatch, most):
    monkeypatch.setattr(_covariance, "_MANY", most)
    jax.clear_caches()
    ends = jnp.stack([jnp.arange(6), jnp.arange(1, 7)], axis=1)
    group = gnlin.Residuals(
        lambda pair, e: (pair[1] - pair[0] - 1.0) / 0.1,
        {"ends": ends},
        select=lambda e: e["ends"],
    )
    solution = gnlin.solve(jnp.zeros(7), group)
    known = covariance(solution, group)
    value, error = known.derived(lambda p: p[4] - p[1])
    np.testing.assert_allclose([value, error], [3.0, 0.1 * 3**0.5], rtol=1e-5)
    both = known.matrix(lambda p: jnp.stack([p[0], p[4] - p[1]]))
    np.testing.assert_allclose(both[1, 1], 0.03, rtol=1e-5)
    assert both[0, 0] == np.inf
    assert np.isnan(both[0, 1])
    if most:
        assert np.all(known.standard_errors == np.inf)
        return
    with pytest.raises(ValueError, match="would take two solves for each"):
        known.standard_errors  # noqa: B018

    place = solution.model[:1]
    start = gnlin.Residuals(lambda p, x: (p - x) / 0.5, place, select=lambda _: 0)
    held = covariance(solution, {"edges": group, "start": start})
    found = held.matrix(lambda p: p[:3])
    steps = np.arange(3)
    expected = 0.25 + 0.01 * np.minimum.outer(steps, steps)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_errors_along_a_retraction():
    """A direction on the sphere, in the two coordinates of its tangent plane."""

    def moved(row, step):
        basis = jnp.linalg.svd(row[None])[2][1:]
        there = row + step[:2] @ basis
        return there / jnp.linalg.norm(there)

    seen = jnp.array([[0.0, 0.6, 0.8]]) + 0.1 * NOISE[0, :30].reshape(10, 3)
    group = gnlin.Residuals(lambda u, d: (u[0] - d) / 0.1, seen)
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    solution = gnlin.solve(jnp.array([[0.0, 1.0, 0.0]]), group, solver)
    known = covariance(solution, group, retraction=moved)
    np.testing.assert_allclose(known.standard_errors, [[0.001**0.5, 0.001**0.5, 0.0]])
    # The length of the direction is 1, and is known.
    np.testing.assert_allclose(known.derived(jnp.linalg.norm)[1], 0.0, atol=1e-12)


def test_an_exact_fit_and_one_without_degrees_of_freedom():
    line = lambda p, x: p["a"] + p["b"] * x
    for x, error in ((X, 0.0), (X[:2], np.inf)):
        solution = gnlin.solve((line, {"a": 1.0, "b": 0.5}), (x, 3 - 2 * x))
        known = covariance(solution, (x, 3 - 2 * x), absolute_sigma=False)
        errors = list(known.standard_errors.values())
        np.testing.assert_allclose(errors, [error] * 2, atol=1e-12)


def test_what_cannot_be_meant():
    start, groups = two_peaks()
    solution = gnlin.solve(start, groups)
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
    start, groups = two_peaks()
    known = covariance(gnlin.solve(start, groups), groups)
    root = lambda p: jnp.sqrt(p["width"] - jax.lax.stop_gradient(p["width"]))
    assert np.isnan(known.derived(root).standard_error)


def test_solves_do_not_depend_on_units_and_need_double_precision(monkeypatch):
    monkeypatch.setattr(_covariance, "_MANY", 0)
    jax.clear_caches()
    units = jnp.array([1e-5, 1e3, 1.0])
    group = gnlin.Residuals(
        lambda row, k: row * units[k].astype(row.dtype), jnp.arange(3), select=lambda k: k
    )
    known = covariance(jnp.zeros(3), group)
    np.testing.assert_allclose(known.derived(lambda p: p)[1], 1 / units, rtol=1e-6)
    assert known.degrees_of_freedom == 0
    with pytest.raises(ValueError, match="Single precision does not resolve"):
        covariance(jnp.zeros(3, jnp.float32), group)
