"""The correction by a Gauss-Newton step, and the estimate of the error that it gives."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import gnlin


X = np.linspace(0.0, 1.0, 7)


@eqx.filter_jit
def on_x(net):
    return jax.vmap(net)(X)


def decay(net, x):
    """The residual of u' + u = 0."""
    return jax.grad(net)(x) + net(x)


@functools.cache
def groups(number, dtype=float):
    start = gnlin.Residuals(lambda net, x: net(x) - 1, jnp.zeros(1, dtype), weight=10.0)
    points = jnp.linspace(0.0, 1.0, number, dtype=dtype)
    return {"decay": gnlin.Residuals(decay, points), "start": start}


@functools.cache
def network(width=8, dtype=float):
    net = eqx.nn.MLP("scalar", "scalar", width, 1, jnp.tanh, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, net)


@functools.cache
def trained(steps):
    return gnlin.solve(network(), groups(20), max_steps=steps).model


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(5, "float64"), pytest.param(60, "float32", marks=pytest.mark.slow)],
)
def test_the_least_squares_step_of_numpy(number, dtype):
    net, given = network(dtype=dtype), groups(number, dtype)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)

    def residuals(flat):
        net = eqx.combine(unravel(flat), rest)
        parts = [
            jnp.sqrt(g.weight).astype(dtype)
            * jax.vmap(lambda x, g=g: g.fn(net, x))(g.data)
            for g in given.values()
        ]
        return jnp.concatenate(parts)

    x = X.astype(dtype)
    outputs = lambda flat: jax.vmap(eqx.combine(unravel(flat), rest))(x)
    run = jax.jit(
        lambda y: (residuals(y), *map(lambda f: jax.jacfwd(f)(y), (residuals, outputs)))
    )
    r, j, seen = (np.asarray(x, float) for x in run(flat))
    rcond = max(j.shape) * np.finfo(dtype).eps
    step = -np.linalg.pinv(j, rcond=rcond) @ r
    correction = gnlin.predict.correction(net, given)
    change = correction(x)
    assert change.dtype == dtype
    # Rounding decides on the directions with the least singular values.
    atol = 1e-5 if dtype == "float64" else 2e-3
    np.testing.assert_allclose(change, seen @ step, atol=atol)
    remaining = np.linalg.norm(r + j @ step) / np.linalg.norm(r)
    np.testing.assert_allclose(correction.remaining, remaining, atol=atol)


@pytest.mark.parametrize("steps", [2, 6])
def test_the_error_of_a_differential_equation(steps):
    net = trained(steps)
    error = np.asarray(on_x(net)) - np.exp(-X)
    change = gnlin.predict.correction(net, groups(50))(X)
    assert np.max(np.abs(error)) > 1e-5
    np.testing.assert_allclose(change, -error, atol=1e-4 * np.max(np.abs(error)))


@pytest.mark.slow
def test_an_error_between_the_points_of_the_training():
    steep = lambda net, x: jax.grad(net)(x) - 20 * jnp.cos(20 * x)
    start = gnlin.Residuals(lambda net, x: net(x), jnp.zeros(1))
    at = lambda n: {"a": gnlin.Residuals(steep, jnp.linspace(0, 1, n)), "b": start}
    solution = gnlin.solve(network(20), at(8), max_steps=100)
    error = np.asarray(on_x(solution.model)) - np.sin(20 * X)
    assert solution.loss < 1e-12
    assert np.max(np.abs(error)) > 0.1
    with pytest.warns(UserWarning, match="the network jumps between them"):
        change = gnlin.predict.correction(solution, at(100))(X)
    # The error is too large for a linear model to be exact.
    assert 0.5 < np.linalg.norm(change) / np.linalg.norm(error) < 2


@pytest.mark.slow
def test_an_unknown_coefficient_and_a_derivative():
    x = jnp.linspace(0.0, 1.0, 40)
    model = {"u": network(), "rate": jnp.array(1.0)}
    grown = lambda m, x: jax.grad(m["u"])(x) - m["rate"] * m["u"](x)
    seen = lambda m, x: m["u"](x) - jnp.exp(2 * x)
    both = [gnlin.Residuals(grown, x), gnlin.Residuals(seen, x)]
    model = gnlin.solve(model, both, max_steps=8).model
    correction = gnlin.predict.correction(model, both)
    wrong = model["rate"] - 2
    assert jnp.abs(wrong) > 1e-7
    np.testing.assert_allclose(correction.step["rate"], -wrong, rtol=0.1)
    slope = lambda m, x: jax.grad(m["u"])(x)
    slopes = eqx.filter_jit(lambda m: jax.vmap(lambda x: slope(m, x))(X))(model)
    before = np.asarray(slopes) - 2 * np.exp(2 * X)
    after = before + np.asarray(correction(X, slope))
    assert np.linalg.norm(after) < 0.1 * np.linalg.norm(before)
    with pytest.raises(ValueError, match="cannot be called on an input"):
        correction(X)


def test_the_corrected_solution_is_a_function():
    net = trained(4)
    u = gnlin.predict.correction(net, groups(50)).corrected
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(u)))(X)
    np.testing.assert_allclose(values, np.exp(-X), atol=1e-9)
    np.testing.assert_allclose(slopes, -np.exp(-X), atol=1e-7)
    model = gnlin.predict.correction({"u": net}, _of_u(50))
    of_u = lambda x: model.corrected(x, lambda m, x: m["u"](x))
    np.testing.assert_allclose(jax.jit(jax.vmap(of_u))(X), np.exp(-X), atol=1e-9)


def _of_u(number):
    fn = lambda of_net: lambda model, x: of_net(model["u"], x)
    return [
        gnlin.Residuals(fn(g.fn), g.data, weight=g.weight)
        for g in groups(number).values()
    ]


def test_any_start_of_a_linear_model():
    """A model that is linear in its parameters is solved by one correction."""
    basis = lambda a, x: a @ jnp.sin(jnp.arange(1.0, 6.0) * x)
    group = gnlin.Residuals(lambda a, x: basis(a, x) - x, jnp.linspace(0, 1, 30))
    at = jnp.array([0.3])
    found = [
        a @ np.sin(0.3 * np.arange(1, 6)) + gnlin.predict.correction(a, group)(at, basis)
        for a in np.random.default_rng(0).normal(size=(3, 5))
    ]
    np.testing.assert_allclose(found, 3 * [found[0]], rtol=1e-9)


@pytest.mark.slow
def test_a_robust_loss_and_some_parameters():
    loss = gnlin.losses.PseudoHuber(0.1, reweighted=1)
    robust = gnlin.Residuals(decay, X, loss=loss)
    last = lambda net: jax.tree.map(lambda x: x is net.layers[-1].weight, net)
    net = network()
    correction = gnlin.predict.correction(net, robust, filter_spec=last(net))
    solver = gnlin.GaussNewton(method="svd", search=None)
    moved = gnlin.solve(net, robust, solver, max_steps=1, filter_spec=last(net)).model
    step = moved.layers[-1].weight - net.layers[-1].weight
    np.testing.assert_allclose(correction.step.layers[-1].weight, step, rtol=1e-8)
    assert correction.step.layers[0].weight is None


@pytest.mark.slow
def test_a_network_that_is_too_small_is_told():
    wave = lambda net, x: net(x) - jnp.sin(20 * x)
    group = lambda n: gnlin.Residuals(wave, jnp.linspace(0, 1, n))
    net = gnlin.solve(network(2), group(50), max_steps=200).model
    with pytest.warns(UserWarning, match="estimate of the error is too small"):
        correction = gnlin.predict.correction(net, group(100))
    assert 0.7 < correction.remaining <= 1


def test_inside_a_compiled_program():
    net, given = network(), groups(20)
    compiled = eqx.filter_jit(lambda n, g: gnlin.predict.correction(n, g)(X))(net, given)
    expected = gnlin.predict.correction(net, given)(X)
    np.testing.assert_allclose(compiled, expected, atol=1e-9)


def test_it_describes_itself():
    correction = gnlin.predict.correction(network(), groups(20))
    assert repr(correction) == "Correction(of 25 parameters)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X, X), "must be `gnlin.Residuals`, or a dictionary or list of them"),
        (gnlin.Residuals(decay, lambda key: jax.random.uniform(key, 9)), "draws its"),
        (gnlin.Residuals(decay, jnp.array([0.1, jnp.nan])), "not finite"),
    ],
)
def test_groups_that_give_no_estimate(given, message):
    with pytest.raises(ValueError, match=message):
        gnlin.predict.correction(network(), given)


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="`method` must be one of"):
        gnlin.predict.correction(network(), groups(9), method="kernel")
    with pytest.raises(ValueError, match="memory budget"):
        gnlin.predict.correction(network(), groups(900), memory_budget=1000)
    correction = gnlin.predict.correction(network(), groups(30))
    with pytest.raises(ValueError, match="`outputs` must be a function"):
        correction(X, 3)


@pytest.mark.parametrize("name", ["__call__", "corrected"])
def test_inputs_and_outputs_that_do_not_suit_the_model(name):
    estimate = getattr(gnlin.predict.correction(network(), groups(30)), name)
    one = X if name == "__call__" else X[0]
    with pytest.raises(ValueError, match=r"The model is called on .* shape \(1,\), but"):
        estimate(one[..., None])
    swapped = r"`outputs\(model, x\)` is called on one input, .* shape \(\), but failed"
    with pytest.raises(ValueError, match=swapped):
        estimate(one, lambda x, net: net(x))


def test_a_converged_solution_has_a_tiny_correction():
    net = trained(256)
    with warnings.catch_warnings():  # what remains is rounding
        warnings.simplefilter("ignore", UserWarning)
        change = gnlin.predict.correction(net, groups(50))(X)
    assert np.max(np.abs(change)) < 1e-9
