"""`gnlin.solve`: Equinox models on a full batch."""

import functools
import math
import pickle
import re
from contextlib import nullcontext

import equinox as eqx
import fit_problems
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from jax.flatten_util import ravel_pytree
from problems import each_once, interrupt_at_second_call, num_compiled, numbers

import gnlin
from gnlin._training._ending import explains_little
from gnlin._training._step import StepSettings


X = jnp.linspace(-1.0, 1.0, 8)[:, None]
T = jnp.sin(3 * X)

SOLVERS = {
    "damped": gnlin.DampedGaussNewton(0.1),
    "levenberg-marquardt": gnlin.LevenbergMarquardt(),
    "iterative linearisation": gnlin.IterativeLinearisation(200, 0.02),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def network(seed=0, width=4):
    return eqx.nn.MLP(1, 1, width, 1, activation=jnp.tanh, key=jax.random.key(seed))


def loss_of(model, x=X, targets=T):
    return 0.5 * float(jnp.sum((jax.vmap(model)(x) - targets) ** 2))


#
# Results
#


@every_solver
def test_training(solver):
    model = network()
    solution = gnlin.solve(model, (X, T), solver, max_steps=12)
    assert isinstance(solution, gnlin.Solution)
    assert isinstance(solution.history, gnlin.History)
    assert jax.tree.structure(solution.model) == jax.tree.structure(model)
    n = int(solution.stats["num_steps"])
    history = solution.history
    assert n <= 12
    for name in history:
        rows = getattr(history, name)
        np.testing.assert_array_equal(rows, history[name])
        assert rows.shape == (n,)
        assert np.all(np.isfinite(rows))
    np.testing.assert_allclose(history.loss[0], loss_of(model), rtol=1e-12)
    np.testing.assert_allclose(
        solution.loss, loss_of(solution.model), rtol=1e-10, atol=1e-18
    )
    assert solution.loss < 0.2 * history.loss[0]
    assert set(solution.stats) == {
        "num_steps",
        "max_steps",
        "num_feature_updates",
        "num_inner_steps",
        "num_jvps",
        "num_vjps",
        "num_accepted_steps",
        "num_rejected_steps",
    }
    assert solution.stats["max_steps"] == 12
    assert int(solution.stats["num_feature_updates"]) == n
    inner = float(solution.stats["num_inner_steps"])
    assert float(jnp.sum(history.num_inner_steps)) == inner


def test_history_in_detail():
    model = network()
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)

    def residuals(flat):
        return (jax.vmap(eqx.combine(unravel(flat), static))(X) - T)[:, 0]

    solver = gnlin.DampedGaussNewton(lambda step: 1.0 / (1 + step))
    history = gnlin.solve(model, (X, T), solver, max_steps=3).history
    np.testing.assert_allclose(history.damping, [1, 1 / 2, 1 / 3])
    jacobian = jax.jit(jax.jacobian(residuals))
    for k in range(3):
        r, phi = np.asarray(residuals(flat)), np.asarray(jacobian(flat))
        gradient = phi.T @ r
        step = -np.linalg.solve(phi.T @ phi + np.eye(flat.size) / (1 + k), gradient)
        np.testing.assert_allclose(history.loss[k], 0.5 * r @ r, rtol=1e-8)
        np.testing.assert_allclose(
            history.gradient_norm[k], np.linalg.norm(gradient), rtol=1e-7
        )
        np.testing.assert_allclose(history.step_norm[k], np.linalg.norm(step), rtol=1e-7)
        flat = flat + step


def test_convergence_ends_the_run_and_cuts_the_history():
    """Targets that are whole numbers are converted."""
    weights = eqx.nn.Linear(2, 1, key=jax.random.key(1))
    x = np.random.default_rng(0).integers(-9, 9, (9, 2))
    targets = x @ [[1], [2]] + 3
    solution = gnlin.solve(weights, (x.astype(float), targets), gnlin.GaussNewton())
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_steps"]) == len(solution.history.step_norm) == 2
    np.testing.assert_allclose(solution.model.weight, [[1.0, 2.0]], rtol=1e-12)
    np.testing.assert_allclose(solution.model.bias, [3], rtol=1e-12)


def test_the_ntk_regime():
    model = network()
    solver = gnlin.IterativeLinearisation(math.inf, 1e-3)
    # The linearised model has converged, but the network differs from it.
    with pytest.warns(UserWarning, match="to convergence, and the loss has risen from"):
        solution = gnlin.solve(model, (X, T), solver)
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_feature_updates"]) == 1
    assert solution.history.loss.shape == (1,)


def test_a_run_whose_loss_rises_warns():
    """Ten literal steps with too large a rate stay far below the bound for divergence."""
    solver = gnlin.IterativeLinearisation(1, 0.13)
    model = lambda p, x: p * x, jnp.ones(1)
    x = jnp.full((16, 1), 1.0)
    with pytest.warns(UserWarning, match="made 10 steps, and the loss has risen from"):
        gnlin.solve(model, (x, 2 * x), solver, max_steps=10)
    gnlin.solve(model, (x, 2 * x), solver, max_steps=9)
    far = gnlin.IterativeLinearisation(1, 0.5)
    with pytest.warns(UserWarning, match="the loss is more than 100 times its start"):
        gnlin.solve(model, (x, 2 * x), far, max_steps=3)


@pytest.mark.slow
def test_a_run_whose_loss_bounces_warns():
    """Undamped steps on the root of x^2 + 0.1 jump about near zero, where the residual
    has no root. With dropout, losses differ from step to step anyway."""
    model, x = (lambda p, x: p**2 * x, jnp.array([0.5])), jnp.ones((4, 1))
    undamped = gnlin.DampedGaussNewton(1e-9)
    with pytest.warns(UserWarning, match=r"the loss rose in \d+ of them, to .* at best"):
        gnlin.solve(model, (x, -0.1 * x), undamped, max_steps=40)
    dropout = eqx.nn.Sequential(
        [eqx.nn.Dropout(0.5), eqx.nn.Linear(1, 1, key=jax.random.key(0))]
    )
    gnlin.solve(dropout, (x, x), optax.sgd(1e-3), max_steps=40)


#
# Trained parameters
#


def test_only_the_chosen_leaves_change():
    model = network()
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1].weight, spec, True)
    solver = gnlin.DampedGaussNewton(0.1)
    solution = gnlin.solve(model, (X, T), solver, filter_spec=spec, max_steps=3)
    assert solution.loss < solution.history.loss[0]
    trained = solution.model
    assert not np.array_equal(trained.layers[-1].weight, model.layers[-1].weight)
    np.testing.assert_array_equal(trained.layers[-1].bias, model.layers[-1].bias)
    np.testing.assert_array_equal(trained.layers[0].weight, model.layers[0].weight)
    np.testing.assert_array_equal(trained.layers[0].bias, model.layers[0].bias)


class WithBuffers(eqx.Module):
    weight: jax.Array
    count: jax.Array
    name: str

    def __call__(self, x):
        return {"out": self.weight * x["in"] * self.count, "square": (x["in"] ** 2,)}


def test_pytrees_of_inputs_and_outputs_and_leaves_that_are_not_trained():
    model = WithBuffers(jnp.asarray([1.0, 1.0]), jnp.asarray(2), "kept")
    x = {"in": jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    targets = {"out": 6.0 * x["in"], "square": (x["in"] ** 2,)}
    solution = gnlin.solve(model, (x, targets), gnlin.GaussNewton())
    np.testing.assert_allclose(solution.model.weight, 3.0, rtol=1e-12)
    assert solution.model.count.dtype == model.count.dtype
    assert int(solution.model.count) == 2
    assert solution.model.name == "kept"


class Scalar(eqx.Module):
    slope: jax.Array

    def __call__(self, x):
        return self.slope * x


def test_scalar_inputs_outputs_and_parameters():
    x = jnp.asarray([1.0, 2.0, 3.0])
    solution = gnlin.solve(Scalar(jnp.asarray(0.0)), (x, 4 * x), gnlin.GaussNewton())
    np.testing.assert_allclose(solution.model.slope, 4.0, rtol=1e-12)


@pytest.mark.slow
def test_one_example():
    solution = gnlin.solve(network(), (X[:1], T[:1]), gnlin.LevenbergMarquardt())
    assert solution.result == optx.RESULTS.successful
    assert solution.loss < 1e-18


#
# Dropout, and batch normalisation
#

DATA = fit_problems.X, fit_problems.T
DROPPED = fit_problems.Dropped(jax.random.key(2))
NORMALISED, STATE = eqx.nn.make_with_state(fit_problems.Normalised)(jax.random.key(2))


@pytest.mark.slow
def test_it_is_fit_on_one_batch_of_all_examples():
    """Models with a state are compared in the tests of `gnlin.fit`."""
    options = {"key": jax.random.key(5)}
    solver = gnlin.DampedGaussNewton(0.3)
    ours = gnlin.solve(DROPPED, DATA, solver, max_steps=4, **options)
    other = fit_problems.fit(DROPPED, DATA, solver, batch_size=None, steps=4, **options)
    for name in ours.history:
        np.testing.assert_allclose(
            ours.history[name], other.history[name], rtol=1e-8, atol=1e-12
        )
    np.testing.assert_allclose(ours.loss, other.loss, rtol=1e-8)
    np.testing.assert_allclose(
        numbers(ours.model), numbers(other.model), rtol=1e-7, atol=1e-10
    )
    assert ours.reason == other.reason


def test_dropout_is_drawn_for_each_step():
    x, targets = DATA
    key = jax.random.key(5)
    damping = 0.3
    solution = gnlin.solve(
        DROPPED, DATA, gnlin.DampedGaussNewton(damping), key=key, max_steps=3
    )
    parameters, static = eqx.partition(DROPPED, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)

    @jax.jit
    def residuals(flat, keys):
        model = eqx.combine(unravel(flat), static)
        return jnp.ravel(jax.vmap(lambda x, key: model(x, key=key))(x, keys) - targets)

    both = jax.jit(lambda *at: (residuals(*at), jax.jacobian(residuals)(*at)))
    of_steps = jax.random.split(key)[1]
    for k in range(3):
        of_step, _ = jax.random.split(jax.random.fold_in(of_steps, k))
        keys = jax.random.split(of_step, len(x))
        r, jacobian = both(flat, keys)
        np.testing.assert_allclose(solution.history.loss[k], 0.5 * r @ r, rtol=1e-9)
        curvature = jacobian.T @ jacobian + damping * jnp.eye(flat.size)
        flat = flat - jnp.linalg.solve(curvature, jacobian.T @ r)
    np.testing.assert_allclose(numbers(solution.model), flat, rtol=1e-8)
    # The state after the last step, with the random numbers of that step.
    r = residuals(flat, keys)
    np.testing.assert_allclose(solution.loss, 0.5 * r @ r, rtol=1e-9)


def test_a_run_with_dropout_does_not_converge():
    nowhere = gnlin.DampedGaussNewton(1e30)
    solution = gnlin.solve(DROPPED, DATA, nowhere, max_steps=15)
    assert solution.result == optx.RESULTS.nonlinear_max_steps_reached
    assert len(np.unique(solution.history.loss)) == 15


@pytest.mark.slow
def test_keys_under_vmap_and_states_under_jit():
    solver = gnlin.DampedGaussNewton(0.3)

    def run(key):
        return gnlin.solve(DROPPED, DATA, solver, key=key, max_steps=3).history.loss

    keys = jax.random.split(jax.random.key(5), 2)
    together = eqx.filter_vmap(run)(keys)
    for i in range(2):
        np.testing.assert_allclose(together[i], run(keys[i]), rtol=1e-9)
    assert not np.allclose(together[0], together[1])

    within = eqx.filter_jit(gnlin.solve)(
        NORMALISED, DATA, solver, max_steps=3, state=STATE, throw=False
    )
    alone = gnlin.solve(NORMALISED, DATA, solver, max_steps=3, state=STATE)
    np.testing.assert_allclose(numbers(within.state), numbers(alone.state), rtol=1e-9)
    np.testing.assert_allclose(within.loss, alone.loss, rtol=1e-9)
    assert within.reason == alone.reason


def test_one_compilation_for_all_keys_and_states():
    traced = []

    class Noisy(eqx.Module):
        weight: jax.Array

        def __call__(self, x, key):
            traced.append(0)
            return self.weight * x + jax.random.normal(key, x.shape)

    for seed in range(3):
        before = len(traced)
        key = jax.random.key(seed)
        solver = gnlin.DampedGaussNewton(0.3)
        gnlin.solve(Noisy(jnp.ones(1)), (X, T), solver, key=key, max_steps=2)
    assert len(traced) == before > 0


@pytest.mark.slow
def test_a_state_in_single_precision_stays_there():
    single = lambda tree: jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, tree
    )
    data = tuple(part.astype(jnp.float32) for part in DATA)
    model, state = single((NORMALISED, STATE))
    solution = gnlin.solve(model, data, state=state, max_steps=3)
    assert solution.history.loss.dtype == np.float32
    leaves = zip(jax.tree.leaves(solution.state), jax.tree.leaves(state), strict=True)
    for left, right in leaves:
        assert left.dtype == right.dtype
        assert left.weak_type == right.weak_type
    outputs, _ = jax.vmap(
        eqx.nn.inference_mode(solution.model), in_axes=(0, None), out_axes=(0, None)
    )(data[0], solution.state)
    assert outputs.dtype == jnp.float32


#
# The history as a table
#


def test_the_table_of_a_run(tmp_path):
    history = gnlin.solve(network(), (X, T), max_steps=3).history
    assert history.columns == list(history) == list(history.to_pandas().columns)
    assert history.columns[:2] == ["step", "loss"]
    assert repr(history).startswith("History(3 steps: step, loss, gradient_norm")
    assert history.step.tolist() == [1, 2, 3]
    history.to_csv(tmp_path / "history.csv")
    read = np.genfromtxt(tmp_path / "history.csv", delimiter=",", names=True)
    for name in history:
        np.testing.assert_array_equal(read[name], history[name])
    with pytest.raises(AttributeError, match="no column 'epoch'; it has step, loss, "):
        _ = history.epoch
    with pytest.raises(AttributeError, match=r"history.to_pandas\(\).plot\("):
        _ = history.plot
    assert pickle.loads(pickle.dumps(history)).columns == history.columns


@pytest.mark.slow
def test_the_table_of_several_runs():
    solver, both = SOLVERS["damped"], np.stack([T, 2 * T])
    run = lambda t: gnlin.solve(network(), (X, t), solver, max_steps=3).history
    history = eqx.filter_vmap(run)(both)
    assert repr(history).startswith("History(2 x 3 steps: step, loss")
    with pytest.raises(ValueError, match="holds one run, but this history holds several"):
        history.to_pandas()
    second = jax.tree.map(lambda column: np.asarray(column)[1], history)
    alone = run(both[1])
    np.testing.assert_allclose(second.to_pandas()["loss"], alone.loss, rtol=1e-8)


def test_a_solution_in_one_line():
    solver = SOLVERS["damped"]
    solution = gnlin.solve(network(), (X, T), solver, max_steps=3)
    assert repr(solution) == (
        "Solution(MLP, nonlinear_max_steps_reached, 'all 3 steps were made', loss "
        f"{solution.history.loss[0]:.4g} -> {solution.loss:.4g})"
    )
    # Without a history the result is the same.
    short = gnlin.solve(network(), (X, T), solver, max_steps=3, history=False)
    np.testing.assert_array_equal(numbers(short.model), numbers(solution.model))
    assert f"loss {short.loss:.4g})" in repr(short)
    assert repr(short.history) == "History(not kept)"
    assert short.history.columns == []
    assert short.stats["num_steps"] == 3
    descent = gnlin.IterativeLinearisation(3, 0.02)
    batches = gnlin.fit(network(), (X, T), descent, batch_size=2, steps=3, progress=False)
    first, *_, last = batches.history.loss
    assert f"batch losses {first:.4g} -> {last:.4g}" in repr(batches)


#
# Transformations
#


def test_rows_of_steps_not_made_are_nan_inside_programs():
    model = Scalar(jnp.asarray(0.0))
    x = jnp.asarray([1.0, 2.0])

    @eqx.filter_jit
    def run(targets):
        found = gnlin.solve(model, (x, targets), gnlin.GaussNewton(), max_steps=5)
        assert found.reason == ""
        return found, dict(found.history)

    solution, rows = run(3 * x)
    for column in rows.values():
        np.testing.assert_array_equal(np.isnan(column), np.arange(5) >= 2)
    np.testing.assert_allclose(solution.model.slope, 3.0, rtol=1e-12)


@pytest.mark.parametrize(("start", "steps"), [(0.0, 9), (0.0, 1), (1e308, 9)])
def test_a_solution_of_a_program_answers_as_one_without(start, steps):
    data = jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 6.0])

    def run(slope):
        return gnlin.solve(Scalar(slope), data, gnlin.GaussNewton(), max_steps=steps)

    fails = pytest.warns(UserWarning, match="not finite") if start else nullcontext()
    with fails:
        alone = run(jnp.asarray(start))
    solution = eqx.filter_jit(run)(jnp.asarray(start))
    if start == 0.0:
        assert repr(solution) == repr(alone)
        assert solution.reason == alone.reason
    else:
        assert solution.reason == "step 1: a number is not finite (inf or NaN)"
    assert repr(solution.history) == repr(alone.history)
    for name, column in alone.history.items():
        np.testing.assert_allclose(solution.history[name], column, atol=1e-12)
        assert solution.history[name].dtype == column.dtype


def test_one_compilation_for_all_dampings_models_and_data():
    num_traces = []

    def activation(x):
        num_traces.append(0)
        return jnp.tanh(x)

    for i, damping in enumerate((0.1, 0.2, 3)):
        model = eqx.nn.MLP(1, 1, 3, 1, activation=activation, key=jax.random.key(i))
        before = len(num_traces)
        gnlin.solve(model, (X, i * T), gnlin.DampedGaussNewton(damping), max_steps=2)
        traced = len(num_traces) - before
        # The program is cached, also when it is asked for the shapes of the outputs.
        assert traced == (1 if i == 0 else 0)


class Settings(dict):
    """A dictionary whose entries are attributes, too."""

    def __getattr__(self, name):
        return self[name]


RATE, SETTINGS = 1.0, Settings(unit=1.0)


def rate_of_now():
    return RATE * SETTINGS.unit


def decay(p, t):
    return jnp.exp(-rate_of_now() * p * t)


def scaled(p, t):
    return RATE * p - t


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # `curve_fit` hands a traced number to `solve`
def test_functions_read_the_values_of_now(monkeypatch):
    t, one = jnp.linspace(0, 1, 8), jnp.array(1.0)
    data, pair = (t, jnp.exp(-2 * t)), (decay, one)
    groups, solver = (
        gnlin.Residuals(scaled, jnp.array([2.0])),
        gnlin.GaussNewton(search=None),
    )
    cell = 0.0

    def shifted(p, t):
        return p + cell * t

    for number in (1.0, 3.0):
        monkeypatch.setitem(globals(), "RATE", number)
        cell = number
        ends = (
            gnlin.solve(pair, data, solver).model[1],
            gnlin.fit(pair, data, solver, steps=9).model[1],
            gnlin.curve_fit(decay, *data, one, solver).parameters,
            gnlin.solve(one, groups, solver).model,
            one + gnlin.predict.correction(one, groups).step,
        )
        np.testing.assert_allclose(ends, 2 / number, rtol=1e-6)
        exact = gnlin.curve_fit(shifted, t, 1 + number * t, one, solver)
        np.testing.assert_allclose(exact.parameters, 1)
        kernel = gnlin.TangentKernel(pair)(t[-1:]).item()
        np.testing.assert_allclose(kernel, (number * np.exp(-number)) ** 2)
    monkeypatch.setitem(globals(), "rate_of_now", lambda: 5.0)
    end = gnlin.curve_fit(decay, *data, one, solver)
    np.testing.assert_allclose(end.parameters, 0.4, rtol=1e-6)


@pytest.mark.slow
def test_redefined_functions_are_not_compiled_again():
    model = network()

    def with_activation():
        anew = eqx.tree_at(lambda m: m.activation, model, lambda x: jnp.tanh(x))
        return gnlin.solve(anew, (X, T), SOLVERS["damped"], max_steps=2)

    def with_constant(c):
        pair = lambda w, x: w * jnp.exp(x) + c, jnp.ones(1)
        return gnlin.solve(pair, (X, T), gnlin.GaussNewton(), max_steps=2).model[1]

    ends = jnp.array([[0, 1], [1, 2]])

    def with_selection(c):
        chain = {
            "steps": gnlin.Residuals(
                lambda p, e: p[1] - p[0] - c, ends, select=lambda e: e
            ),
            "start": gnlin.Residuals(
                lambda p, k: p, jnp.zeros(1, int), select=lambda k: k
            ),
        }
        return gnlin.solve(jnp.zeros((3, 1)), chain, SOLVERS["damped"]).model

    first = with_activation().loss
    assert with_activation().loss == first
    one, two = with_constant(jnp.zeros(1)), with_constant(jnp.ones(1))
    # By the normal equations
    e, t = np.exp(np.asarray(X)), np.asarray(T)
    for w, c in (one, 0.0), (two, 1.0):
        np.testing.assert_allclose(w, np.sum(e * (t - c)) / np.sum(e * e))
    np.testing.assert_allclose(with_selection(jnp.ones(1))[:, 0], [0, 1, 2], atol=1e-6)
    other = jnp.asarray(np.full(1, 2.0))
    moved = []

    def again():
        with_activation()
        with_constant(other)
        moved.append(with_selection(other))

    assert num_compiled(again) == 0
    np.testing.assert_allclose(moved[0][:, 0], [0, 2, 4], atol=1e-6)


#
# Failures
#


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@every_solver
def test_data_that_are_not_finite_warn_and_leave_the_model(solver, bad):
    model = network()
    targets = T.at[2].set(bad)
    with pytest.warns(
        UserWarning, match=r"stopped at step 1 of at most 12.*loss is not finite"
    ):
        # The same number of steps as above reuses the compiled program.
        solution = gnlin.solve(model, (X, targets), solver, max_steps=12)
    assert solution.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(numbers(solution.model), numbers(model))
    with pytest.warns(UserWarning, match="stopped at step 1"):
        solution = gnlin.solve(model, (X.at[1].set(bad), T), solver, max_steps=12)
    assert solution.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(numbers(solution.model), numbers(model))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
@pytest.mark.parametrize("driver", [gnlin.solve, gnlin.fit])
def test_a_parameter_that_is_not_finite_at_the_start(driver, bad):
    """Even if the model does not read it."""
    length = {"steps": 2} if driver is gnlin.fit else {"max_steps": 2}
    model = lambda p, x: p["net"](x), {"net": network(), "rest": jnp.array([1.0, bad])}
    message = f"start of the parameter `rest` must be finite, but holds {bad}: start"
    with pytest.raises(ValueError, match=message):
        driver(model, (X, T), **length)
    spec = {"net": eqx.is_inexact_array, "rest": False}
    solution = driver(model, (X, T), SOLVERS["damped"], filter_spec=spec, **length)
    assert solution.loss < solution.history.loss[0]


def test_throw():
    model = network()
    targets = T.at[2].set(jnp.nan)
    solver = gnlin.DampedGaussNewton(0.1)
    words = "stopped at step 1 of at most 2: the loss .* The target of example 2 is not"
    with pytest.raises(RuntimeError, match=words):
        gnlin.solve(model, (X, targets), solver, max_steps=2, throw=True)
    solution = gnlin.solve(model, (X, T), solver, max_steps=2, throw=True)
    assert solution.result == optx.RESULTS.nonlinear_max_steps_reached


def root(m, x):
    return jnp.where(x > 0, jnp.sqrt(m["a"] * x), 0.0) - x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "solver"),
    each_once(
        ["solve", "fit", "drawn"], [gnlin.LevenbergMarquardt(), gnlin.GaussNewton()]
    ),
)
def test_a_derivative_that_is_not_finite_is_told_from_the_loss(solver, driver):
    start, x = {"a": jnp.array(2.0), "b": jnp.array(1.0)}, jnp.linspace(0, 1, 5)
    drawn = lambda key: jax.random.randint(key, (6,), 0, 2).astype(float)
    groups = {
        "line": gnlin.Residuals(lambda m, x: m["b"] - x, x),
        "root": gnlin.Residuals(root, drawn if driver == "drawn" else x),
    }
    words = (
        "stopped at step 1.*: the derivative is not finite, or its squares overflow, but "
        "the loss is finite; the model is still .* `jnp.where` does not stop .* of the "
        "group 'root' is not finite"
    )
    train = gnlin.solve if driver == "solve" else functools.partial(gnlin.fit, steps=3)
    with pytest.warns(UserWarning, match=words):
        solution = train(start, groups, solver)
    assert solution.result == optx.RESULTS.nonfinite
    assert solution.model["a"] == 2


def test_a_model_whose_derivative_is_not_finite_is_told():
    start, x = {"a": jnp.array(2.0)}, jnp.linspace(0, 1, 5)
    with pytest.warns(UserWarning, match="the derivative is not finite, or its squares"):
        gnlin.solve((root, start), (x, x))


@pytest.mark.slow
def test_throw_under_jit():
    solver = gnlin.DampedGaussNewton(0.1)

    @eqx.filter_jit
    def run(targets):
        solution = gnlin.solve(network(), (X, targets), solver, max_steps=2, throw=True)
        return solution.history.loss

    assert np.all(np.isfinite(run(T)))
    with pytest.raises(RuntimeError, match=r"[Nn]onfinite"):
        run(T.at[2].set(jnp.nan))


class Kink(eqx.Module):
    b: jax.Array

    def __call__(self, x):
        return 1 + jnp.abs(self.b - 1) * x


@pytest.mark.slow
def test_a_kink_is_where_it_stands_still_not_where_it_diverges():
    with pytest.warns(UserWarning, match="stands still.*smooth function"):
        solution = gnlin.solve(Kink(jnp.array(3.0)), (jnp.ones(3), jnp.zeros(3)))
    assert solution.result == optx.RESULTS.stagnation


MEAN = lambda p, _: p, jnp.array([1.0, 1.0])  # converges to the best constant
# One step of this solver reaches it, by a program that is quick to compile.
BRIEF = gnlin.GaussNewton(search=None)
WAVES = np.stack([np.sin(3 * X[:, 0]), np.cos(4 * X[:, 0])], axis=1)
LITTLE = (
    "explains less than 5 % of the total variance of the targets: standardise the inputs "
)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("weights", [None, np.arange(8.0)])
@pytest.mark.parametrize("driver", [gnlin.solve, gnlin.fit])
def test_a_model_no_better_than_a_constant_is_told(driver, weights, scaled):
    """The weighted mean of each output is the least that a model should reach."""
    targets, scale = (WAVES, "") if scaled else (2e5 + 1e4 * WAVES, None)
    best = np.average(targets, axis=0, weights=weights)
    if scale is None:
        first = np.average((targets - best) ** 2, axis=0, weights=weights)[0] ** 0.5
        scale = f" (mean {best[0]:.2g}, standard deviation {first:.2g})"
    length = {"max_steps": 9} if driver is gnlin.solve else {"steps": 9}
    message = f"{driver.__name__}` {LITTLE}and the targets{scale}, or start elsewhere"
    with pytest.warns(UserWarning, match=re.escape(message)):
        solution = driver(MEAN, (X, targets, weights), BRIEF, **length)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.model[1], best, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_batches_are_judged_after_ten_epochs():
    data = np.tile(X, (10, 1)), np.tile(WAVES, (10, 1))
    gnlin.fit(MEAN, data, BRIEF, batch_size=8, epochs=9)
    with pytest.warns(UserWarning, match=f"fit` {LITTLE}.*or train for longer"):
        gnlin.fit(MEAN, data, BRIEF, batch_size=8, epochs=10)
    gnlin.fit(network(), (data[0], data[1][:, :1]), batch_size=8, epochs=10)


@pytest.mark.slow
def test_where_a_constant_is_no_measure():
    """Without a warning."""

    def judged(loss, prior=None, targets=WAVES):
        setting = StepSettings(BRIEF, loss, None, None, prior=prior)
        return explains_little("solve", setting, (X, targets, None), 1e3, "wait")

    squares = gnlin.SquaredError("sum")
    assert judged(squares).startswith("The model of `gnlin.solve` explains less than")
    assert not judged(squares, targets=np.full((8, 2), 0.1))
    assert not judged(squares, prior=1.0)
    assert not judged(gnlin.losses.LogCosh(reduction="sum"))
    solve = functools.partial(gnlin.solve, solver=BRIEF)
    solve(MEAN, (X, WAVES), max_steps=1)
    jax.jit(lambda t: solve(MEAN, (X, t)).loss)(WAVES)
    group = gnlin.Residuals(*MEAN[:1], X, targets=WAVES)
    assert solve(MEAN[1], group).result == optx.RESULTS.successful


@pytest.mark.slow
def test_a_kink_where_little_is_explained():
    with pytest.warns(UserWarning, match=f"stands still.*{LITTLE}"):
        gnlin.solve(Kink(jnp.array(3.0)), (jnp.ones(3), jnp.arange(-1.0, 2.0)))


def test_divergence_warns_by_name_and_leaves_the_model():
    model = network()
    solver = gnlin.IterativeLinearisation(10**8, 10.0)
    with pytest.warns(UserWarning, match="diverged"):
        solution = gnlin.solve(model, (X, T), solver)
    assert solution.result == optx.RESULTS.nonlinear_divergence
    np.testing.assert_array_equal(numbers(solution.model), numbers(model))
    np.testing.assert_allclose(solution.loss, loss_of(model), rtol=1e-10)


@pytest.mark.slow
def test_a_loss_without_a_value_at_zero_outputs_does_not_diverge():
    """Poisson's loss of a rate is infinite or NaN at the rate 0, which is no measure of
    how large a loss may be."""
    x, counts = jnp.array([1.0, 4, 8, 3, 1]), jnp.array([23.0, 11, 26, 20, 15])
    rate = lambda p, x: p["height"] * x + p["background"]
    loss = gnlin.losses.PoissonNLL(log_input=False)
    start = {"height": 1.0, "background": 10.0}
    solution = gnlin.solve((rate, start), (x, counts), loss=loss)
    assert solution.result == optx.RESULTS.successful
    found = rate(solution.model[1], x)
    score = jnp.stack([jnp.sum(counts / found - 1), jnp.sum((counts / found - 1) * x)])
    np.testing.assert_allclose(score, 0, atol=1e-6)


@pytest.mark.slow
def test_no_warning_under_jit_or_vmap():
    """Warnings are errors in these tests, so there is none."""
    solver = gnlin.DampedGaussNewton(0.1)
    solution = eqx.filter_vmap(
        lambda t: gnlin.solve(network(), (X, t), solver, max_steps=2)
    )(jnp.stack([T, T.at[2].set(jnp.nan)]))
    assert np.all(np.asarray(solution.result == optx.RESULTS.nonfinite) == [False, True])


def call(**changes):
    arguments = {
        "model": network(),
        "data": (X, T),
        "solver": gnlin.DampedGaussNewton(0.1),
    }
    arguments |= changes
    return gnlin.solve(**arguments)


class Frozen(eqx.Module):
    size: int = 3

    def __call__(self, x):
        return x


class NotCallable(eqx.Module):
    weight: jax.Array


def select_all(model):
    return jax.tree.map(eqx.is_array, model)


MISTAKES = {
    "empty data": ({"data": (X[:0], T[:0])}, "no data"),
    "no inputs": ({"data": ((), T)}, "no data"),
    "no targets": ({"data": (X, None)}, "no data"),
    "scalar inputs": ({"data": (jnp.asarray(1.0), T)}, "leading axis"),
    "lengths": ({"data": (X, T[:-1])}, "same number of examples"),
    "lengths within a tree": ({"data": ((X, X[1:]), T)}, "same number of examples"),
    "(n,) for (n, 1)": ({"data": (X, T[:, 0])}, "shape of the model's outputs"),
    "(n, 1) for (n,)": (
        {"model": (lambda w, x: x[0] * w, jnp.ones(())), "data": (X, T)},
        r"but have \(8, 1\): pass `targets\[\.\.\., 0\]`",
    ),
    "(n, 2) for (n, 1)": ({"data": (X, jnp.tile(T, 2))}, "shape of the model's outputs"),
    "structure": ({"data": (X, {"t": T})}, "shape of the model's outputs"),
    "complex targets": ({"data": (X, T.astype(complex))}, "must be real"),
    "no trainable array": ({"model": Frozen(), "data": (X, X)}, "no trainable array"),
    "nothing selected": ({"filter_spec": lambda leaf: False}, "no trainable array"),
    "functions selected": ({"filter_spec": lambda leaf: True}, "not arrays"),
    "integers selected": (
        {
            "model": WithBuffers(jnp.ones(2), jnp.asarray(2), "name"),
            "data": ({"in": X}, {"out": X, "square": (X,)}),
            "filter_spec": eqx.is_array,
        },
        "dtype int64",
    ),
    "inside a transformation": (
        {"model": eqx.filter_vmap(network())},
        "such as `jax.vmap`: pass the model itself, which is called on one example",
    ),
    "not callable": ({"model": NotCallable(jnp.ones(3))}, "must be callable"),
    "state of none": ({"state": 3}, "has no state: leave `state` out"),
    "state forgotten": ({"model": NORMALISED, "data": DATA}, "pass `state`"),
    "key": ({"key": 0}, "`key` must be one key"),
    "axis": ({"axis_name": 3}, "`axis_name` must be the name"),
    "0 steps": ({"max_steps": 0}, "`max_steps`"),
    "-1 steps": ({"max_steps": -1}, "`max_steps`"),
    "2.5 steps": ({"max_steps": 2.5}, "`max_steps`"),
    "True steps": ({"max_steps": True}, "`max_steps`"),
    "another library's solver": (
        {"solver": optx.LevenbergMarquardt(1e-6, 1e-6)},
        "`solver` must be one of gnlin's",
    ),
    "a loss that is not called": (
        {"loss": gnlin.SoftmaxCrossEntropy},
        "the class `SoftmaxCrossEntropy` was given: call it",
    ),
    "inputs and targets one by one": (
        {"data": X, "solver": T},
        r"one tuple, `\(inputs, targets\)`",
    ),
    "a loss for each head": (
        {"loss": {"a": gnlin.SquaredError()}},
        r"must be one loss, .* pass a group `gnlin.Residuals\(fn, inputs, targets=t",
    ),
    "two heads": (
        {
            "model": (lambda w, x: {"a": w * x, "b": x}, jnp.ones(())),
            "loss": gnlin.SoftmaxCrossEntropy(),
        },
        r"over the classes; for several heads .* `gnlin.Residuals\(fn, inputs, targets=t",
    ),
    "not a solver": ({"solver": "lm"}, "`solver` must be one of gnlin's"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changes", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        call(**changes)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.slow
def test_more_steps_than_one_table_of_the_history_holds():
    """The rows are allocated as needed, but inside another program all at once."""
    model = (lambda theta, x: theta * x), jnp.array(1.0)
    data = jnp.ones(1), jnp.zeros(1)
    solver = gnlin.IterativeLinearisation(
        period=1, learning_rate=1e-4, rtol=0.0, atol=0.0
    )
    by_itself = gnlin.solve(model, data, solver, max_steps=5000)
    within = eqx.filter_jit(gnlin.solve)(model, data, solver, max_steps=5000, throw=False)
    for solution in (by_itself, within):
        assert int(solution.stats["num_steps"]) == 5000
        assert solution.history.step_norm.shape == (5000,)
        expected = 0.5 * (1 - 1e-4) ** (2 * np.arange(5001))
        np.testing.assert_allclose(solution.history.loss, expected[:-1], rtol=1e-10)
        np.testing.assert_allclose(solution.loss, expected[-1], rtol=1e-10)
        np.testing.assert_array_equal(solution.history["step"], np.arange(1, 5001))


class Scaled(eqx.Module):
    weight: jax.Array
    by: int | float

    def __call__(self, x):
        # A float times integers is promoted, and so makes a second program.
        with jax.numpy_dtype_promotion("standard"):
            return (x * self.by).astype(float) @ self.weight


@pytest.mark.slow
def test_a_whole_number_and_a_float_are_two_programs():
    data = np.full((4, 3), 100, np.uint8), np.ones((4, 2))
    solver = gnlin.IterativeLinearisation(1, 1e-7)
    losses = [
        gnlin.solve(Scaled(jnp.ones((3, 2)), by), data, solver, max_steps=1).history.loss[
            0
        ]
        for by in (3, 3.0)
    ]
    assert losses[0] != losses[1]  # the first of which overflows


@pytest.mark.parametrize("unit", [1e12, 1e-15])
def test_outputs_far_from_one_in_single_precision(unit):
    """With the kernel, the norm of the gradient takes squares of squares."""
    x = np.float32([[1, 2, 0], [0, 1, 1]])
    targets = np.float32([[unit], [-2 * unit]])
    model = (lambda w, x: w @ x), jnp.zeros((1, 3), jnp.float32)
    solver = gnlin.DampedGaussNewton(1.0, method="kernel")
    solution = gnlin.solve(model, (x, targets), solver, max_steps=1)
    expected = x.T @ np.linalg.solve(x @ x.T + np.eye(2), targets[:, 0])
    np.testing.assert_allclose(solution.model[1][0], expected, 1e-5, 1e-6 * unit)
    gradient = np.linalg.norm(x.T.astype(float) @ targets[:, 0])
    np.testing.assert_allclose(solution.history.gradient_norm[0], gradient, rtol=1e-5)


def long_run(model=None, **options):
    """A run of a network that is large enough for steps to be made a few at a time."""
    x = jnp.linspace(-1.0, 1.0, 700)[:, None]
    data, model = (x, jnp.sin(3 * x)), model or network(width=64)
    solver = gnlin.DampedGaussNewton(1e-3, rtol=0.0, atol=0.0)
    return data, gnlin.solve(model, data, solver, max_steps=30, **options)


@pytest.mark.slow
def test_a_run_in_several_parts_is_one_run(monkeypatch):
    _, parts = long_run()
    monkeypatch.setattr(gnlin._training._full_batch, "_SMALL", math.inf)
    _, whole = long_run()
    assert parts.stats == whole.stats
    assert len(parts.history["loss"]) == parts.stats["num_steps"] > 8
    for name in whole.history.columns:
        np.testing.assert_array_equal(parts.history[name], whole.history[name])
    np.testing.assert_array_equal(numbers(parts.model), numbers(whole.model))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "history"), [(1, True), (700, False)])
def test_as_a_part_of_a_program_that_closes_over_model_and_data(size, history):
    x = jnp.linspace(-1.0, 1.0, size)[:, None]
    model, data = network(width=64 if size > 1 else 4), (x, jnp.sin(3 * x))

    def run():
        solver = gnlin.IterativeLinearisation(1, 1e-6)
        solution = gnlin.solve(model, data, solver, max_steps=9, history=history)
        return solution.loss, dict(solution.history)

    (loss, rows), (expected, expected_rows) = jax.jit(run)(), run()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert all(len(rows[name]) == 9 for name in expected_rows)


@pytest.mark.slow
def test_another_max_steps_compiles_nothing():
    found = []

    def run(most):
        found.append(gnlin.solve(network(), (X, T), max_steps=most))
        assert len(found[-1].history.loss) == found[-1].stats["num_steps"] == most

    run(2)
    assert num_compiled(lambda: run(5)) == 0
    rows = [solution.history.loss for solution in found]
    np.testing.assert_array_equal(rows[0], rows[1][:2])


def test_ctrl_c_hands_back_the_best_model(monkeypatch):
    shown = interrupt_at_second_call(monkeypatch)
    with pytest.warns(UserWarning, match="was interrupted after step"):
        data, solution = long_run()
    assert solution.reason == f"step {shown[1]}: interrupted"
    assert len(solution.history["loss"]) == shown[1] < 30
    np.testing.assert_allclose(loss_of(solution.model, *data), solution.loss, rtol=1e-9)
    assert solution.loss <= np.min(solution.history["loss"])
    assert long_run(solution.model)[1].loss < solution.loss


def test_ctrl_c_before_any_step_is_ctrl_c(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    for steps in ("_steps_briefly", "_steps_quickly"):
        monkeypatch.setattr(gnlin._training._full_batch, steps, interrupt)
    with pytest.raises(KeyboardInterrupt):
        long_run()


def test_a_bar_is_drawn_of_a_long_run_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(gnlin._common._progress, "_SECONDS", 0)
    long_run()
    assert "loss=" not in capsys.readouterr().err
    monkeypatch.setattr(gnlin._common._progress, "on_a_terminal", lambda: True)
    long_run(progress=False)
    assert "loss=" not in capsys.readouterr().err
    _, solution = long_run()
    said = capsys.readouterr().err
    assert f"{solution.stats['num_steps']}/30" in said
    assert f"loss={solution.loss:.4g}" in said


def told_of(run, capfd):
    """Return the numbers that a run prints, a line for each step."""
    run()
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    return [[float(x) for x in re.findall(r": ([-+.e\d]+)", line)] for line in lines]


def test_verbose_prints_each_step(capfd):
    data, solver = (X, T), gnlin.DampedGaussNewton(0.1, verbose=True)
    names = "step", "loss", "gradient_norm", "step_norm", "damping"
    histories = []

    def by_solve():
        histories.append(gnlin.solve(network(), data, solver, max_steps=3).history)

    def by_fit():
        gnlin.fit(network(), data, solver, steps=3, loss=gnlin.SquaredError("sum"))

    def by_optimistix():
        y, static = eqx.partition(network(), eqx.is_inexact_array)
        fn = lambda y, x: jax.vmap(eqx.combine(y, static))(x) - T
        optx.least_squares(fn, solver, y, X, max_steps=3, throw=False)

    for run in (by_solve, by_fit, by_optimistix):
        told = told_of(run, capfd)
        expected = np.transpose([histories[0][name] for name in names])
        np.testing.assert_allclose(told, expected, 1e-5, err_msg=run)


def test_verbose_as_optimistix_calls_it():
    told = []
    verbose = lambda **said: told.append(said)
    for solver in (
        optx.LevenbergMarquardt(1e-3, 1e-3, verbose=verbose),
        gnlin.LevenbergMarquardt(verbose=verbose),
    ):
        optx.least_squares(lambda y, _: y - 1, solver, jnp.zeros(2), throw=False)
    theirs, ours = told[0], told[-1]
    assert all(isinstance(title, str) for title, _ in (theirs | ours).values())
    assert set(ours) == {"num_steps", "loss", "gradient_norm", "step_norm", "damping"}


@pytest.mark.usefixtures("unchecked")
def test_verbose_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="`verbose` must be `True`, `False` or a func"):
        gnlin.LevenbergMarquardt(verbose=1)
