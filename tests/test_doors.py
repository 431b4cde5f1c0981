"""Invalid arguments are refused in one sentence, or end a traced run as not finite."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import optimistix as optx
import pytest
from problems import damped_step, literal_loop, updated

import gnlin


X = jnp.linspace(-1.0, 1.0, 6)[:, None]
T = jnp.sin(3 * X)
NETWORK = eqx.nn.MLP(1, 1, 3, 1, activation=jnp.tanh, key=jax.random.key(0))
KEY = jax.random.key(0)
LINE = eqx.nn.Linear(1, 1, key=KEY)
LIN = gnlin.linearise(lambda y, _: y, jnp.ones(2))

SOLVERS = {
    "gauss-newton": gnlin.GaussNewton,
    "filtered": lambda **kwargs: gnlin.methods.FilteredGaussNewton(
        gnlin.filters.Tikhonov(1.0), **kwargs
    ),
    "damped": lambda **kwargs: gnlin.DampedGaussNewton(1.0, **kwargs),
    "levenberg-marquardt": gnlin.LevenbergMarquardt,
    "truncated": lambda **kwargs: gnlin.TruncatedGaussNewton(0.1, **kwargs),
    "iterative linearisation": lambda **kwargs: gnlin.IterativeLinearisation(
        10, 0.1, **kwargs
    ),
}


#
# Hyperparameters
#


@pytest.mark.parametrize(
    ("solver", "name", "value"),
    [
        ("gauss-newton", "norm", "max"),
        ("filtered", "norm", 2),
        ("damped", "memory_budget", -1),
        ("levenberg-marquardt", "memory_budget", 0),
        ("truncated", "memory_budget", "1e9"),
        ("iterative linearisation", "memory_budget", True),
        ("gauss-newton", "rtol", True),
        ("damped", "atol", -1.0),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_of_all_solvers(solver, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        SOLVERS[solver](**{name: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("search", ["armijo", optx.BacktrackingArmijo, 1, True])
def test_errors_of_searches(search):
    for name in ("gauss-newton", "filtered", "damped", "truncated"):
        with pytest.raises(ValueError, match='`search` must be "auto"'):
            SOLVERS[name](search=search)
        SOLVERS[name](search=optx.BacktrackingArmijo())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "make",
    [
        lambda: gnlin.LevenbergMarquardt(acceleration="1"),
        lambda: gnlin.LevenbergMarquardt(damping=True),
        lambda: gnlin.IterativeLinearisation(10, 0.1, nesterov=1),
        lambda: gnlin.IterativeLinearisation(10, 0.1, restart=1),
        lambda: gnlin.DampedGaussNewton(True),
        lambda: gnlin.DampedGaussNewton([1.0, 0.1]),
        lambda: gnlin.TruncatedGaussNewton(0.1, damping="0.1"),
        lambda: gnlin.methods.EisenstatWalker(gamma=True),
        lambda: gnlin.filters.Tikhonov(True),
        lambda: gnlin.preconditioners.Nystrom(10, seed=0.5),
        lambda: gnlin.preconditioners.Nystrom(10, seed="0"),
    ],
)
def test_errors_of_numbers_and_flags(make):
    with pytest.raises(ValueError, match="` must be "):
        make()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [jnp.ones(2), "0.1", 1j, None])
def test_a_schedule_returns_one_number(value):
    solver = gnlin.DampedGaussNewton(lambda step: value)
    with pytest.raises(ValueError, match="A schedule must return one number"):
        gnlin.solve(NETWORK, (X, T), solver, max_steps=2)


# A solver with traced numbers, and sets of such numbers of which one is out of range.
OUT_OF_RANGE = {
    "damping": (gnlin.DampedGaussNewton, [(-1.0,), (math.inf,)]),
    "first damping": (lambda v: gnlin.LevenbergMarquardt(damping=v), [(0.0,)]),
    "rcond": (lambda v: gnlin.GaussNewton(rcond=v), [(-1.0,)]),
    "tolerance, damping": (
        lambda v, damping: gnlin.TruncatedGaussNewton(v, damping=damping),
        [(1.0, 0.0), (0.1, -1.0)],
    ),
    "period, learning rate, momentum, damping": (
        lambda period, rate, momentum, damping: gnlin.IterativeLinearisation(
            period, rate, momentum, damping=damping
        ),
        [
            (0.0, 0.01, 0.0, 0.0),
            (1.5, 0.01, 0.0, 0.0),
            (10.0, 0.0, 0.0, 0.0),
            (10.0, 0.01, 1.0, 0.0),
            (10.0, 0.01, 0.0, -1.0),
        ],
    ),
    "schedule of a damping": (
        lambda v: gnlin.DampedGaussNewton(lambda step: jnp.where(step > 1, v, 1.0)),
        [(-1.0,)],
    ),
}


SLOW = "rcond", "tolerance, damping", "damping", "schedule of a damping"


@pytest.mark.parametrize(
    ("make", "cases"),
    [
        pytest.param(
            *case,
            id=name,
            marks=pytest.mark.slow if name in SLOW else (),
        )
        for name, case in OUT_OF_RANGE.items()
    ],
)
def test_numbers_out_of_range_in_a_program_are_not_finite(make, cases):
    @jax.jit
    def run(numbers):
        solution = gnlin.solve(LINE, (X, T), make(*numbers), max_steps=4)
        leaves = jax.tree.leaves(solution.model)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
        return solution.result == optx.RESULTS.nonfinite, finite

    for numbers in cases:
        ended, finite = run(numbers)
        assert ended, numbers
        assert finite, numbers


def test_a_tolerance_out_of_range_has_no_solution():
    operator = lx.FunctionLinearOperator(
        lambda v: 2 * v,
        jax.ShapeDtypeStruct((3,), float),
        lx.positive_semidefinite_tag,
    )

    @jax.jit
    def solve(tolerance):
        solver = gnlin.methods.ConjugateGradients(tolerance)
        return lx.linear_solve(operator, jnp.ones(3), solver, throw=False).value

    np.testing.assert_allclose(solve(1e-6), 0.5 * np.ones(3))
    assert not np.any(np.isfinite(solve(-1.0)))
    assert not np.any(np.isfinite(solve(math.nan)))


#
# Models
#


def of_pair(parameters, x):
    return jnp.tanh(parameters["w"] @ x.astype(parameters["w"].dtype) + parameters["b"])


PARAMETERS = {"w": jnp.full((1, 1), 0.5), "b": jnp.zeros(1)}
DAMPED = gnlin.DampedGaussNewton(0.1)


def pair_in_numpy(y, args):
    """Return the residuals of `of_pair` and their Jacobian in (b, w)."""
    x, t = args
    f = np.tanh(y[0] + x @ y[1:])
    return f - t, (1 - f**2)[:, None] * np.insert(x, 0, 1.0, axis=1)


def test_a_function_with_its_parameters():
    solution = gnlin.solve((of_pair, PARAMETERS), (X, T), DAMPED, max_steps=3)
    fn, trained = solution.model
    assert fn is of_pair
    step = lambda r, jacobian, k: damped_step(r, jacobian, 0.1)
    args = np.asarray(X), np.asarray(T)[:, 0]
    b, w = literal_loop(step, np.array([0.0, 0.5]), args, 3, pair_in_numpy)
    np.testing.assert_allclose(trained["w"], [[w]], rtol=1e-9)
    np.testing.assert_allclose(trained["b"], [b], atol=1e-12)
    assert gnlin.features.parameter_distance(solution.model, (of_pair, PARAMETERS)) > 0
    result = gnlin.fit((of_pair, PARAMETERS), (X, T), DAMPED, steps=2, progress=False)
    assert result.model[0] is of_pair
    assert result.history["loss"][-1] < result.history["loss"][0]
    some = {"w": True, "b": False}
    solution = gnlin.solve(
        (of_pair, PARAMETERS), (X, T), DAMPED, max_steps=1, filter_spec=some
    )
    assert solution.model[1]["b"] == 0
    assert solution.model[1]["w"] != 0.5


def test_a_function_with_its_parameters_and_a_key():
    def noisy(parameters, x, key):
        return of_pair(parameters, x) + 0.01 * jax.random.normal(key)

    result = gnlin.fit((noisy, PARAMETERS), (X, T), DAMPED, steps=2, progress=False)
    assert result.history["loss"][-1] < result.history["loss"][0]


@pytest.mark.exhaustive
def test_parameters_in_half_precision_are_trained_in_single():
    dtype = jnp.bfloat16
    half = jax.tree.map(lambda x: x.astype(dtype), PARAMETERS)
    data = X.astype(dtype), T.astype(dtype)
    solution = gnlin.solve((of_pair, half), data, gnlin.LevenbergMarquardt())
    assert solution.result == optx.RESULTS.successful
    single = jax.tree.map(lambda x: x.astype(jnp.float32), (PARAMETERS, data))
    wanted = gnlin.solve(
        (of_pair, single[0]), single[1], gnlin.LevenbergMarquardt()
    ).model[1]
    for name, trained in solution.model[1].items():
        assert trained.dtype == dtype
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.float32(trained), wanted[name], rtol=4 * eps, atol=4 * eps
        )


class Dropped(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x, key=None):
        return self.dropout(self.linear(x), key=key)


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.linear = LINE
        self.norm = eqx.nn.BatchNorm(1, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


class Keyless(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x):
        return self.dropout(self.linear(x))


class BatchFirst(eqx.Module):
    weights: jax.Array

    def __call__(self, x):
        _, width = x.shape
        return x.reshape(-1, width) @ self.weights


MODELS = {
    "a function": (of_pair, "A plain function has no trainable array: pass it with its"),
    "a model in vmap": (jax.vmap(LINE), "pass the model itself, which is called on one"),
    "a string": ("mlp", "must be callable .*, or a pair .* but a str was given"),
    "parameters": (PARAMETERS, "must be callable .* but a dictionary of"),
    "a solution": (
        gnlin.Solution(
            model=LINE,
            state=None,
            loss=jnp.zeros(()),
            result=optx.RESULTS.successful,
            _reason="",
            history=gnlin.History({}),
            stats={},
        ),
        "must be callable .* was given: pass `solution.model`",
    ),
    "two functions": ((of_pair, of_pair), "but a tuple of 2 was given"),
    "state": (
        eqx.nn.make_with_state(Normalised)()[0],
        "has state.*pass `state` to .*`gnlin.solve` or `gnlin.TangentKernel`",
    ),
    "of batches": (BatchFirst(jnp.ones((1, 1))), r"of one example.*of shape \(1,\) it"),
    "of another width": (eqx.nn.Linear(2, 1, key=jax.random.key(0)), r"of shape \(1,\)"),
    "to a string": ((lambda p, x: "one", PARAMETERS), "must return an array, .* 'one'"),
    "dropout": (Keyless(LINE, eqx.nn.Dropout(0.5)), "has dropout but no argument `key`"),
    "to nothing": ((lambda p, x: None, PARAMETERS), "must return an array, .* None"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("model", "message"), MODELS.values(), ids=MODELS)
def test_errors_of_models(model, message):
    with pytest.raises(ValueError, match=message):
        gnlin.solve(model, (X, T), DAMPED)
    with pytest.raises(ValueError, match=message):
        gnlin.features.linearise_model(model, X)
    with pytest.raises(ValueError, match=message):
        gnlin.fit(model, (X, T), DAMPED, steps=1)


@pytest.mark.usefixtures("unchecked")
def test_dropout_has_no_place_among_features():
    model = Dropped(LINE, eqx.nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"needs a `key`.*inference_mode"):
        gnlin.features.linearise_model(model, X)
    lin = gnlin.features.linearise_model(eqx.nn.inference_mode(model), X)
    assert lin.shape == (6, 2)


def test_a_dictionary_of_functions_is_no_groups():
    with pytest.raises(ValueError, match=r"each group must be a `gnlin\.Residuals`"):
        gnlin.solve(LINE, {"a": lambda model, x: model(x)}, DAMPED)


def test_inputs_without_an_axis_over_features():
    with pytest.raises(ValueError, match=r"of shape \(\) \(.*`inputs\[:, None\]`"):
        gnlin.solve(LINE, (X[:, 0], T), DAMPED)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("spec", ["all", [True], 1])
def test_errors_of_filters(spec):
    with pytest.raises(ValueError, match="`filter_spec` "):
        gnlin.solve(LINE, (X, T), DAMPED, filter_spec=spec)


def test_a_model_with_state_as_it_is_in_inference():
    model, state = eqx.nn.make_with_state(Normalised)()
    pair = (lambda m, x: m(x, state)[0], eqx.nn.inference_mode(model))
    assert gnlin.TangentKernel(pair)(X).shape == (6, 1, 6, 1)


#
# Data
#


x, t = np.asarray(X), np.asarray(T)


def trained(data, **kwargs):
    solver = gnlin.DampedGaussNewton(0.1)
    result = gnlin.fit(LINE, data, solver, steps=2, progress=False, **kwargs)
    return np.asarray(result.history["loss"])


def test_a_list_of_arrays_is_a_pair():
    wanted = trained((x, t), validation=(x, t))
    np.testing.assert_array_equal(trained([x, t], validation=[x, t]), wanted)


def test_weights_may_be_none():
    np.testing.assert_array_equal(trained((x, t, None)), trained((x, t)))


DATA = {
    "a dictionary": ({"x": x, "y": t}, "but a dictionary of 'x', 'y' was given"),
    "a string": ("digits", "but a str was given"),
    "one array": ((x,), "but a tuple of 1 was given"),
    "strings": ((x, np.array(["a"] * 6)), "targets must be arrays .* dtype <U1"),
    "objects": ((np.array([None] * 6), t), "inputs must be arrays .* dtype object"),
    "complex weights": ((x, t, 1j * np.ones(6)), "weights must be real"),
    "weights of strings": ((x, t, "balanced"), "weights must be arrays .* 'balanced'"),
    "too few weights": ((x, t, np.ones(3)), "weights must be one for each of the 6"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("data", "message"), DATA.values(), ids=DATA)
def test_errors_of_data(data, message):
    with pytest.raises(ValueError, match=message):
        gnlin.solve(LINE, data, DAMPED)
    with pytest.raises(ValueError, match=message):
        gnlin.fit(LINE, data, DAMPED, steps=1)
    if isinstance(data, dict):
        with pytest.raises(ValueError, match="but it holds a dictionary of 'x'"):
            gnlin.fit(LINE, [data], DAMPED, steps=1)


def test_which_example_is_not_finite():
    broken = X.at[jnp.array([3, 5]), 0].set(jnp.nan)
    message = "The inputs of example 3 and of 1 more are not finite"
    with pytest.warns(UserWarning, match=message):
        gnlin.solve(LINE, (broken, T), DAMPED)
    with pytest.warns(UserWarning, match=message):
        gnlin.fit(LINE, (broken, T), DAMPED, steps=2, progress=False)
    with pytest.warns(UserWarning, match="The target of example 0 is not finite"):
        gnlin.solve(LINE, (X, T.at[0].set(jnp.inf)), DAMPED)


#
# Solvers, callbacks and printing
#


def test_a_class_in_place_of_an_optimiser():
    with pytest.raises(ValueError, match="must be one of optax's"):
        gnlin.IterativeLinearisation(3, optimiser=optax.MultiSteps)


def test_an_optimiser_of_optax_as_a_solver():
    optimiser = optax.adam(0.1)
    wanted = gnlin.IterativeLinearisation(1, optimiser=optimiser, restart=False)
    kwargs = {"steps": 4, "batch_size": 2, "progress": False}
    result = gnlin.fit(LINE, (X, T), optimiser, **kwargs)
    other = gnlin.fit(LINE, (X, T), wanted, **kwargs)
    np.testing.assert_array_equal(result.history["loss"], other.history["loss"])
    solution = gnlin.solve(LINE, (X, T), optimiser, max_steps=4)
    parameters = eqx.filter(LINE, eqx.is_array)
    state = optimiser.init(parameters)
    value = lambda line: 0.5 * jnp.sum((jax.vmap(line)(X) - T) ** 2)
    gradient = jax.jit(jax.grad(value))
    for _ in range(4):
        updates, state = updated(optimiser, gradient(parameters), state)
        parameters = optax.apply_updates(parameters, updates)
    np.testing.assert_allclose(solution.model.weight, parameters.weight, rtol=1e-10)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("solver", "given"),
    [
        (gnlin.GaussNewton, "`GaussNewton` was given .*: call it.$"),
        (optax.adam, "`adam` was given .*: call it.$"),
        (optx.LevenbergMarquardt(1e-3, 1e-3), "a LevenbergMarquardt was"),
        ("adam", "a str was"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_of_solvers(solver, given):
    for train in (gnlin.solve, gnlin.fit):
        with pytest.raises(ValueError, match=f"must be one of gnlin's.*but {given}"):
            train(LINE, (X, T), solver)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "make",
    [
        lambda: gnlin.callbacks.Measure([len]),
        lambda: gnlin.callbacks.Measure(3),
        lambda: gnlin.callbacks.Measure({3: len}),
        lambda: gnlin.callbacks.EarlyStop(3),
        lambda: gnlin.callbacks.EarlyStop(restore_best=1),
        lambda: gnlin.features.linearise_model(LINE, X, memory_budget=-1),
        lambda: gnlin.solve(LINE, (X, T), DAMPED, throw="no"),
        lambda: gnlin.fit(LINE, (X, T), DAMPED, steps=1, progress="no"),
        lambda: gnlin.fit(LINE, (X, T), DAMPED, steps=1, resume=1),
        lambda: gnlin.fit(LINE, (X, T), DAMPED, steps=1, axis_name=3),
        lambda: gnlin.fit(LINE, (X, T), DAMPED, steps=1, checkpoint=""),
        lambda: gnlin.Checkpoint(3),
        lambda: gnlin.features.kernel_drift(LIN, LIN, key=0),
        lambda: gnlin.features.kernel_drift(LIN, LIN, key=jax.random.split(KEY)),
    ],
)
def test_errors_of_other_arguments(make):
    with pytest.raises(ValueError, match="` must be "):
        make()


def test_a_run_is_what_callbacks_are_promised():
    seen = []

    class Look(gnlin.callbacks.Callback):
        def on_step(self, run):
            seen.extend(
                name
                for name, member in vars(gnlin.callbacks.Run).items()
                if not name.startswith("_") and member.__doc__ and hasattr(run, name)
            )

    gnlin.fit(LINE, (X, T), DAMPED, steps=1, progress=False, callbacks=Look())
    assert set(seen) == {
        name for name in vars(gnlin.callbacks.Run) if not name.startswith("_")
    }
    assert {"step", "num_steps", "history", "record", "stop"} <= set(seen)


@pytest.mark.exhaustive
def test_short_representations():
    lin = gnlin.linearise(lambda y, _: jnp.array([y[0], 2 * y[1], 0.0]), jnp.ones(3))
    spectrum = lin.spectrum()
    assert repr(spectrum) == "Spectrum(3 eigenvalues from 0 to 4, 1 of them zero)"
    several = jax.vmap(lambda s: lin.with_outputs(s * lin.outputs).spectrum())
    assert repr(several(jnp.ones(2))) == "Spectrum(eigenvalues=f64[2,3])"


@pytest.mark.slow
def test_a_model_may_have_attributes_named_as_those_of_results():
    class Named(eqx.Module):
        model: jax.Array
        history: jax.Array
        result: jax.Array
        standard_errors: None = None

        def __call__(self, x):
            return self.model * x + self.result

    x = jnp.linspace(0.0, 1.0, 5)
    model = Named(jnp.array(1.0), jnp.array(0.0), jnp.array(0.0))
    assert gnlin.solve(model, (x, 2 * x), max_steps=20).loss < 1e-10
