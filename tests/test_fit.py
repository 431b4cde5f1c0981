"""Steps of `gnlin.fit`, compared with `gnlin.solve`, literal loops and dense steps."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from fit_problems import (
    BATCHES,
    batches_drawn,
    cross_entropy,
    dense,
    DESCENT,
    Dropped,
    fit,
    inner_steps,
    LABELLED,
    LABELS,
    network,
    Normalised,
    numbers,
    outer_steps,
    outputs,
    squared_error,
    START,
    T,
    X,
)
from jax.flatten_util import ravel_pytree
from problems import damped_step, equations, num_compiled, truncated_step, updated
from sklearn.datasets import load_digits

import gnlin
from gnlin._fit import _run
from gnlin._linearisation._group_loss import GroupLosses
from gnlin._linearisation._objective import SumOfSquares
from gnlin._training._divergence import Watch
from gnlin._training._ending import after_batches
from gnlin._training._step import StepSettings


def assert_close(left, right, rtol=1e-9):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=1e-12)


#
# The full batch
#


SOLVERS = {
    "damped": gnlin.DampedGaussNewton(lambda step: 1.0 / (1 + step)),
    "iterative linearisation": gnlin.IterativeLinearisation(200, 0.02, 0.5),
}


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(SOLVERS["damped"], id="damped", marks=pytest.mark.exhaustive),
        pytest.param(SOLVERS["iterative linearisation"], id="iterative linearisation"),
    ],
)
def test_the_full_batch_is_solve_step_for_step(solver):
    solution = gnlin.solve(network(), (X, T), solver, max_steps=4)
    result = fit(data=(X, T), solver=solver, batch_size=None, steps=4)
    history = result.history
    assert_close(numbers(result.model), numbers(solution.model))
    for name in solution.history:
        assert_close(history[name], solution.history[name])
        assert history[name].dtype == solution.history[name].dtype
    assert set(history) - set(solution.history) == {"epoch"}
    assert_close(result.loss, solution.loss)
    assert result.reason == solution.reason
    for name in set(solution.stats) - {"max_steps"}:
        assert result.stats[name] == float(solution.stats[name])
    assert result.result == solution.result
    np.testing.assert_array_equal(history["epoch"], [0, 1, 2, 3])
    assert result.linearisation_point is None


def test_convergence_ends_the_run():
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    data, validation = (X, X @ jnp.ones((3, 2))), (X, T)
    result = fit(
        linear,
        data,
        gnlin.GaussNewton(),
        batch_size=None,
        epochs=9,
        validation=validation,
    )
    assert result.result == optx.RESULTS.successful
    assert result.reason == "step 2: converged"
    assert result.stats["num_steps"] == len(result.history["loss"]) == 2
    assert_close(result.model.weight, np.ones((2, 3)))
    # The model that is handed back has been looked at.
    assert np.all(np.isfinite(result.history["validation_loss"]))


def test_epochs_and_steps():
    assert fit(epochs=2).stats["num_steps"] == 6
    result = fit(steps=4)
    np.testing.assert_array_equal(result.history["step"], [1, 2, 3, 4])
    np.testing.assert_array_equal(result.history["epoch"], [0, 0, 0, 1])
    assert (result.stats["num_steps"], result.stats["num_epochs"]) == (4, 1)
    assert fit(steps=6).stats["num_epochs"] == 2
    assert fit(data=BATCHES, steps=4).stats["num_epochs"] == 1
    assert fit(data=BATCHES, epochs=2).stats["num_steps"] == 6
    assert fit(data=(X, T), batch_size=12, epochs=2).stats["num_steps"] == 2
    for arguments in ({"steps": 6}, {"data": BATCHES, "steps": 6}):
        longer = {**arguments, "steps": 100}
        stop = StopAfter(6)
        same = fit(**longer, callbacks=stop)
        np.testing.assert_array_equal(
            numbers(fit(**arguments).model), numbers(same.model)
        )


class StopAfter(gnlin.callbacks.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step == self.step:
            run.stop("enough")


#
# The order of examples
#


def test_a_callback_with_a_misspelt_event():
    with pytest.raises(TypeError, match="on_epoch_end` is not the name of an event"):

        class Late(gnlin.callbacks.Callback):
            def on_epoch_end(self, run):
                raise AssertionError


def test_an_epoch_is_a_permutation_without_an_incomplete_batch():
    drawn = batches_drawn(11, 4, 6, jax.random.key(3))
    assert {len(batch) for batch in drawn} == {4}
    epochs = [sorted(drawn[i] + drawn[i + 1]) for i in (0, 2, 4)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(map(tuple, drawn[i : i + 2])) for i in (0, 2, 4)}) == 3
    assert batches_drawn(11, 4, 6, jax.random.key(3)) == drawn
    assert batches_drawn(11, 4, 6, jax.random.key(4)) != drawn
    seen = set().union(*batches_drawn(11, 4, 20, jax.random.key(3)))
    assert seen == set(range(11))


def test_arrays_are_the_batches_that_are_drawn_from_them():
    key = jax.random.key(5)
    drawn = [np.array(batch) for batch in batches_drawn(12, 4, 6, key)]
    by_hand = fit(data=[(X[i], T[i]) for i in drawn], steps=6)
    result = fit(steps=6, key=key)
    assert_close(numbers(result.model), numbers(by_hand.model))
    assert_close(result.history["loss"], by_hand.history["loss"])


#
# Gauss-Newton solvers: a batch is an outer step
#


@pytest.mark.parametrize(
    ("solver", "step"),
    [
        (
            gnlin.DampedGaussNewton(0.3, search=None),
            lambda r, j: damped_step(r, j, 0.3),
        ),
        (
            gnlin.TruncatedGaussNewton(0.2, damping=0.1, search=None),
            lambda r, j: truncated_step(r, j, 0.2, 0.1)[0],
        ),
    ],
    ids=["damped", "truncated"],
)
def test_a_gauss_newton_step_on_each_batch(solver, step):
    result = fit(data=BATCHES, solver=solver, epochs=2)
    expected, losses = outer_steps(step, BATCHES, 6)
    assert_close(numbers(result.model), expected, rtol=1e-8)
    assert_close(result.history["loss"], losses, rtol=1e-8)
    np.testing.assert_array_equal(result.history["num_feature_updates"], range(1, 7))


def test_a_schedule_counts_the_batches():
    solver = gnlin.DampedGaussNewton(lambda step: 1.0 + step)
    history = fit(data=BATCHES, solver=solver, steps=4).history
    assert_close(history["damping"], [1, 2, 3, 4])


def levenberg_marquardt(batches, num_steps, relative, dense=dense, flat=START):
    """Return (parameters, lengths of steps). The damping stays; a step has momentum, is
    halved on its own batch, and is judged by the next batch."""
    flat, damping, last, lengths = np.asarray(flat), None, np.zeros_like(flat), []
    part, balance, before, won = 0.25, 0.0, None, 0.0
    for k in range(num_steps):
        x, targets = batches[k % len(batches)]

        def loss_at(y, x=x, targets=targets):
            return squared_error(dense(y, x)[0], targets)[0]

        if won > 0:
            gain = loss_at(before) - loss_at(flat)
            back = gain < -won
            balance = 0.9 * balance + max(gain, -won)
            part *= 0.25 if back else 0.8 if balance < 0 else 1.04
            part = min(max(part, 0.1), 1.0)
            flat = before if back else flat
        f, jacobian = dense(flat, x)
        loss, r, _ = squared_error(f, targets)
        gradient = jacobian.T @ r
        if damping is None:
            along = jacobian @ gradient
            damping = relative * (along @ along) / (gradient @ gradient)
        pulled = 0.8 * len(x) / (len(x) + 2) * last
        last = pulled + damped_step(r + jacobian @ pulled, jacobian, damping)
        while loss_at(flat + last) > loss + 0.1 * last @ gradient:
            last = last / 2
        before, flat = flat, flat + part * last
        won = max(loss - loss_at(flat), 0.0)
        lengths.append(part * np.linalg.norm(last))
    return flat, np.array(lengths)


@pytest.mark.parametrize("relative", [1e-3, 1.0])
def test_levenberg_marquardt_on_each_batch(relative):
    solver = gnlin.LevenbergMarquardt(damping=relative)
    result = fit(data=BATCHES, solver=solver, epochs=4)
    expected, lengths = levenberg_marquardt(BATCHES, 12, relative)
    assert_close(result.history["step_norm"], lengths, rtol=1e-6)
    assert_close(numbers(result.model), expected, rtol=1e-6)


@pytest.mark.slow
def test_batches_of_few_examples():
    """The default trains on small batches. It does not kill units in the first steps, as
    steps that suit many examples would. Nor does it freeze, as it would if each example
    that lost a little raised the damping."""
    images, labels = load_digits(return_X_y=True)
    x, y = np.float32(images[:200] / 16), labels[:200]
    model = eqx.nn.MLP(64, 10, 32, 1, dtype=x.dtype, key=jax.random.key(0))
    result = gnlin.fit(
        model,
        (x, y),
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=1,
        epochs=4,
        progress=False,
    )
    correct = jnp.argmax(jax.vmap(result.model)(x), axis=-1) == y
    assert jnp.mean(correct) > 0.9


def test_no_run_across_batches_ends_as_diverged():
    """The damping is tiny, and no step reaches the targets."""
    solver = gnlin.LevenbergMarquardt(damping=1e-9)
    data = [(x, 1e3 * targets) for x, targets in BATCHES]
    result = fit(data=data, solver=solver, epochs=8)
    assert result.reason == "all 24 steps were made"
    losses = result.history["loss"]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.slow
def test_a_damping_too_small_for_the_precision_grows():
    """The kernel of one repeated example is singular without damping."""
    x = jnp.ones((8, 2), jnp.float32)
    model = eqx.nn.MLP(2, 1, 8, 1, jnp.tanh, dtype=x.dtype, key=jax.random.key(0))
    solver = gnlin.LevenbergMarquardt(damping=1e-12, method="kernel")
    data = [(x, 3 * x[:, :1])]
    result = gnlin.fit(model, data, solver, epochs=40, progress=False)
    assert result.reason == "all 40 steps were made"
    assert result.history["damping"][-1] > 10 * result.history["damping"][0]
    assert result.history["loss"][-1] < 1e-3 * result.history["loss"][0]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_losses_that_hover_are_no_reason_to_warn(noise):
    """Such losses occur in a run that begins where the last one ended, or at the
    solution."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 2))
    data = x, x @ np.ones((2, 1)) + noise * generator.normal(size=(200, 1))
    model = (lambda w, x: w @ x), jnp.ones((1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5 if noise else 1):
            key = jax.random.key(seed)
            gnlin.fit(model, data, batch_size=20, steps=20, key=key, progress=False)


#
# Iterative linearisation: theta_s stays for K batches
#


ADAM = optax.adam(0.02)
# Solver with a period, its optimiser, whether the optimiser restarts, and the damping
DESCENTS = {
    "momentum, damped": (
        lambda k: gnlin.IterativeLinearisation(k, 0.05, 0.9, damping=0.3),
        optax.sgd(0.05, 0.9),
        True,
        0.3,
    ),
    "nesterov": (
        lambda k: gnlin.IterativeLinearisation(k, 0.05, 0.9, nesterov=True),
        optax.sgd(0.05, 0.9, nesterov=True),
        True,
        0.0,
    ),
    "adam, kept, damped": (
        lambda k: gnlin.IterativeLinearisation(
            k, optimiser=ADAM, restart=False, damping=0.3
        ),
        ADAM,
        False,
        0.3,
    ),
}


@pytest.mark.parametrize("name", DESCENTS)
def test_inner_steps_across_batches(name):
    solver, optimiser, restart, damping = DESCENTS[name]
    for period in (1, 3, math.inf):
        result = fit(data=BATCHES, solver=solver(jnp.asarray(period)), steps=8)
        expected, point, losses = inner_steps(
            optimiser, period, BATCHES, 8, restart=restart, damping=damping
        )
        assert_close(numbers(result.model), expected)
        assert_close(numbers(result.linearisation_point), point)
        assert_close(result.history["loss"], losses)
        assert_close(result.history["damping"], damping)
        updates = [1 + step // period for step in range(8)]
        np.testing.assert_array_equal(result.history["num_feature_updates"], updates)
        assert result.stats["num_feature_updates"] == updates[-1]
        for count in ("num_inner_steps", "num_jvps", "num_vjps", "num_accepted_steps"):
            assert result.stats[count] == 8


def test_a_step_at_its_own_linearisation_takes_one_transposed_pass():
    solver = gnlin.IterativeLinearisation(1, optimiser=ADAM, damping=0.1)
    result = fit(data=BATCHES, solver=solver, steps=8)
    expected, _, losses = inner_steps(ADAM, 1, BATCHES, 8, damping=0.1)
    assert_close(numbers(result.model), expected)
    assert_close(result.history["loss"], losses)
    assert (result.stats["num_jvps"], result.stats["num_vjps"]) == (0, 8)


@pytest.mark.parametrize("form", ["prox-linear", "quadratic"])
def test_inner_steps_of_another_loss(form):
    solver = gnlin.IterativeLinearisation(3, 0.1, form=form)
    result = fit(
        data=LABELLED,
        solver=solver,
        loss=gnlin.SoftmaxCrossEntropy(reduction="sum"),
        steps=8,
    )
    quadratic = form == "quadratic"
    expected, _, losses = inner_steps(
        optax.sgd(0.1), 3, LABELLED, 8, loss=cross_entropy, quadratic=quadratic
    )
    assert_close(numbers(result.model), expected)
    assert_close(result.history["loss"], losses)


def test_a_period_of_one_without_restart_is_the_optimiser_itself():
    optimiser = optax.adamw(0.01, weight_decay=0.1)
    solver = gnlin.IterativeLinearisation(1, optimiser=optimiser, restart=False)
    result = fit(data=BATCHES, solver=solver, epochs=3)

    @jax.jit
    def step(flat, state, x, targets):
        loss = lambda flat: jnp.sum(optax.l2_loss(outputs(flat, x), targets))
        updates, state = updated(optimiser, jax.grad(loss)(flat), state, flat)
        return optax.apply_updates(flat, updates), state

    flat, state = START, optimiser.init(START)
    for x, targets in 3 * BATCHES:
        flat, state = step(flat, state, x, targets)
    assert_close(numbers(result.model), flat)


def test_norms_in_the_history():
    f, jacobian = dense(START, BATCHES[0][0])
    gradient = jacobian.T @ (f - np.ravel(BATCHES[0][1]))
    history = fit(data=BATCHES, steps=1).history
    assert_close(history["gradient_norm"], np.linalg.norm(gradient))
    assert_close(history["step_norm"], 0.05 * np.linalg.norm(gradient))


def test_validation_of_the_network_and_of_its_linearisation():
    def spread(outputs, targets):
        return jnp.mean(jnp.abs(outputs - targets))

    def by_hand(f):
        difference = np.reshape(f, T.shape) - T
        return 0.5 * np.mean(np.sum(difference**2, axis=1)), np.mean(abs(difference))

    result = fit(
        data=BATCHES,
        steps=8,
        validation=(X, T),
        validate_every=1,
        metrics={"spread": spread},
    )
    optimiser = optax.sgd(0.05)
    for k in range(8):
        flat, point, _ = inner_steps(optimiser, 3, BATCHES, k + 1)
        f, jacobian = dense(point, X)
        columns = [f"validation_{name}" for name in ("loss", "spread")]
        loss, metric = by_hand(dense(flat, X)[0])
        assert_close([result.history[name][k] for name in columns], [loss, metric])
        loss, metric = by_hand(f + jacobian @ (flat - point))
        of_linearised = [result.history[f"{name}_linearised"][k] for name in columns]
        assert_close(of_linearised, [loss, metric])
    gauss_newton = fit(
        data=BATCHES, solver=gnlin.DampedGaussNewton(0.3), steps=1, validation=(X, T)
    )
    assert "validation_loss_linearised" not in gauss_newton.history


def test_one_forward_one_tangent_and_one_transposed_pass_and_no_jacobian(monkeypatch):
    seen = []

    class Seen(_run.Compiled):
        def __call__(self, *changing):
            seen.append(self._jitted.trace(self._fixed, *changing))
            return super().__call__(*changing)

    monkeypatch.setattr(_run, "Compiled", Seen)
    n, inputs, width, classes = 128, 20, 64, 10
    model = eqx.nn.MLP(inputs, classes, width, 1, jnp.tanh, key=jax.random.key(0))
    data = np.random.default_rng(0).normal(size=(n, inputs)), np.arange(n) % classes
    solver = gnlin.IterativeLinearisation(3, optimiser=ADAM, restart=False)
    loss = gnlin.SoftmaxCrossEntropy()
    fit(model, [data], solver, loss=loss, steps=1)
    (traced,) = seen

    sizes, work = [], 0
    for equation in equations(traced.jaxpr.jaxpr):
        sizes += [out.aval.size for out in equation.outvars]
        if equation.primitive.name == "dot_general":
            left, right = (x.aval for x in equation.invars)
            (contracted, _), _ = equation.params["dimension_numbers"]
            product = equation.outvars[0].aval
            if (
                min(left.ndim, right.ndim) >= 2 and product.ndim > 0
            ):  # not an inner product
                work += product.size * math.prod(left.shape[i] for i in contracted)
    jacobian = n * classes * numbers(model).size
    assert max(sizes) < jacobian / 100
    memory = traced.lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < jacobian * 8 / 20
    # A forward pass makes one product a layer. A tangent or transposed pass makes two,
    # but one for the first layer, whose inputs are data.
    first, last = n * inputs * width, n * width * classes
    assert work == (first + last) + 2 * (first + 2 * last)


#
# A larger batch for the curvature
#


@pytest.mark.parametrize(
    ("reduction", "wider", "weighted", "classes"),
    [
        ("mean", 12, True, False),
        ("sum", 8, False, True),
    ],
)
def test_the_gradient_of_a_batch_and_the_curvature_of_more(
    reduction, wider, weighted, classes
):
    weights = jnp.arange(1.0, 13.0) if weighted else jnp.ones(12)
    targets = LABELS if classes else T
    loss = (gnlin.SoftmaxCrossEntropy if classes else gnlin.SquaredError)(
        reduction=reduction
    )
    derivatives = cross_entropy if classes else squared_error
    key = jax.random.key(7)
    result = fit(
        data=(X, targets, weights) if weighted else (X, targets),
        solver=gnlin.DampedGaussNewton(0.3, search=None),
        loss=loss,
        curvature_batch_size=wider,
        key=key,
        epochs=1,
    )
    drawn = batches_drawn(12, 4, 3, key)
    flat, losses = START, []
    for k in range(3):
        own = drawn[k]
        more = own + drawn[(k + 1) % 3] + (drawn[(k + 2) % 3] if wider == 12 else [])
        gradient, curvature, total = 0, 0, 0
        for i in more:
            f, jacobian = dense(flat, X[i : i + 1])
            value, slope, hessian = derivatives(f, targets[i : i + 1])
            w = float(weights[i])
            curvature += w * jacobian.T @ hessian @ jacobian
            if i in own:
                gradient += w * jacobian.T @ slope
                total += w * value
        share = sum(weights[i] for i in own)
        curvature *= share / sum(weights[i] for i in more)
        unit = share if reduction == "mean" else 1
        damped = curvature / unit + 0.3 * np.eye(len(flat))
        flat = flat - np.linalg.solve(damped, gradient / unit)
        losses.append(total / unit)
    assert_close(numbers(result.model), flat, rtol=1e-8)
    assert_close(result.history["loss"], losses, rtol=1e-8)


#
# Models with state, and with keys
#


NORMALISED, STATE = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
_FLAT, _UNRAVEL = ravel_pytree(eqx.filter(NORMALISED, eqx.is_inexact_array))


@jax.jit
def normalised(flat, x, state):
    model = eqx.combine(_UNRAVEL(flat), NORMALISED)
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(x, state)


_whole_jacobian = jax.jit(jax.jacobian(normalised, has_aux=True))


def dense_normalised(flat, x):
    """Return the Jacobian of all outputs together, because each depends on the whole
    batch."""
    rows, _ = _whole_jacobian(jnp.asarray(flat), x, STATE)
    f, _ = normalised(flat, x, STATE)
    return np.ravel(f), np.reshape(rows, (-1, len(flat)))


def states_along(points, batches):
    state = STATE
    for point, (x, _) in zip(points, batches, strict=False):
        _, state = normalised(point, x, state)
    return state


def assert_same_state(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert_close(a, b)


class Points(gnlin.callbacks.Callback):
    """A callback that stores the parameters after each step."""

    def __init__(self, model=None):
        self.points = [] if model is None else [numbers(model)]

    def on_step(self, run):
        self.points.append(numbers(run.model))


@pytest.mark.slow
def test_batch_normalisation_by_gauss_newton():
    solver = gnlin.DampedGaussNewton(0.3, search=None)
    points = Points(NORMALISED)
    validation = (X, T)
    result = fit(
        NORMALISED,
        lambda epoch: BATCHES,
        solver,
        state=STATE,
        validation=validation,
        callbacks=points,
    )
    flat = _FLAT
    for x, targets in 2 * BATCHES:
        f, jacobian = dense_normalised(flat, x)
        flat = flat + damped_step(f - np.ravel(targets), jacobian, 0.3)
    assert_close(numbers(result.model), flat, rtol=1e-7)
    assert_same_state(result.state, states_along(points.points, 2 * BATCHES))
    inference = eqx.nn.inference_mode(result.model)
    f = jax.vmap(lambda x: inference(x, result.state)[0])(X)
    loss = 0.5 * jnp.mean(jnp.sum((f - T) ** 2, axis=1))
    assert_close(result.history["validation_loss"][-1], loss)


@pytest.mark.slow
def test_batch_normalisation_in_single_precision_where_double_is_enabled(tmp_path):
    """Its statistics are divided by a function of a counter, which has a weak type."""
    as_single = lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x
    model, state = jax.tree.map(as_single, (NORMALISED, STATE))
    data = jax.tree.map(as_single, (X, T))
    for epochs in (1, 2):
        result = gnlin.fit(
            model,
            data,
            gnlin.DampedGaussNewton(0.3),
            batch_size=4,
            epochs=epochs,
            state=state,
            validation=data,
            checkpoint=tmp_path,
            resume=epochs == 2,
        )
    assert numbers(result.model).dtype == jnp.float32
    assert np.all(np.isfinite(result.history["validation_loss"][-1]))


@pytest.mark.exhaustive
def test_batch_normalisation_by_levenberg_marquardt():
    points = Points(NORMALISED)
    solver = gnlin.LevenbergMarquardt(damping=1.0)
    data = lambda epoch: BATCHES
    result = fit(NORMALISED, data, solver, state=STATE, callbacks=points)
    expected, lengths = levenberg_marquardt(BATCHES, 6, 1.0, dense_normalised, _FLAT)
    assert_close(result.history["step_norm"], lengths, rtol=1e-6)
    assert_close(numbers(result.model), expected, rtol=1e-6)
    assert_same_state(result.state, states_along(points.points, 2 * BATCHES))


def test_batch_normalisation_by_iterative_linearisation():
    solver = gnlin.IterativeLinearisation(2, 0.05, 0.9)
    points = Points(NORMALISED)
    result = fit(
        NORMALISED,
        lambda epoch: BATCHES,
        solver,
        state=STATE,
        callbacks=points,
        validation=(X, T),
        validate_every=5,
    )
    expected, _, losses = inner_steps(
        optax.sgd(0.05, 0.9), 2, BATCHES, 6, dense=dense_normalised, flat=_FLAT
    )
    assert_close(numbers(result.model), expected)
    assert_close(result.history["loss"], losses)
    # The statistics come from the network that is linearised.
    at = [points.points[k - k % 2] for k in range(6)]
    assert_same_state(result.state, states_along(at, 2 * BATCHES))
    inference = eqx.nn.inference_mode(NORMALISED)
    state = states_along(at[:5], 2 * BATCHES)

    def predict(flat):
        model = eqx.combine(_UNRAVEL(flat), inference)
        return jax.vmap(lambda x: model(x, state)[0])(X)

    point, delta = points.points[4], points.points[5] - points.points[4]
    f, change = jax.jvp(predict, (jnp.asarray(point),), (jnp.asarray(delta),))
    loss = 0.5 * jnp.mean(jnp.sum((f + change - T) ** 2, axis=1))
    assert_close(result.history["validation_loss_linearised"][4], loss)


@pytest.mark.slow
def test_the_full_batch_with_state():
    solver = gnlin.DampedGaussNewton(0.3)
    result = fit(NORMALISED, (X, T), solver, batch_size=None, steps=2, state=STATE)
    solution = gnlin.solve(NORMALISED, (X, T), solver, max_steps=2, state=STATE)
    flat = _FLAT
    for _ in range(2):
        f, jacobian = dense_normalised(flat, X)
        flat = flat + damped_step(f - np.ravel(T), jacobian, 0.3)
    # The statistics of the last parameters, as a literal loop leaves them
    state = STATE
    for _ in range(60):
        _, state = normalised(flat, X, state)
    (count, *statistics), structure = jax.tree.flatten(state)
    weight = 1 - 0.5**2  # of two steps, by which inference mode divides
    state = structure.unflatten([count - 58, *(weight * x for x in statistics)])
    for found in (result, solution):
        assert_close(numbers(found.model), flat, rtol=1e-7)
        assert_same_state(found.state, state)
    assert_close(result.history.loss, solution.history.loss)


def test_another_axis_than_the_models():
    with pytest.raises(
        ValueError, match=r"another axis than 'rows': pass its `axis_name`"
    ):
        fit(NORMALISED, state=STATE, axis_name="rows")
    with pytest.raises(ValueError, match=r"another axis than 'rows'"):
        gnlin.solve(NORMALISED, (X, T), state=STATE, axis_name="rows")


def test_an_optimisers_steps_may_be_endless_across_batches_only():
    solver = gnlin.IterativeLinearisation(math.inf, optimiser=ADAM)
    result = fit(data=BATCHES, solver=solver, steps=8)
    expected, *_ = inner_steps(ADAM, math.inf, BATCHES, 8, restart=True, damping=0.0)
    assert_close(numbers(result.model), expected)
    assert result.stats["num_feature_updates"] == 1
    with pytest.raises(ValueError, match="must be finite"):
        fit(data=(X, T), batch_size=None, solver=solver, steps=1)


def test_a_state_that_is_forgotten():
    with pytest.raises(ValueError, match=r"make_with_state\(Model\).*pass `state`"):
        fit(NORMALISED)


class Counting(eqx.Module):
    """A state that is a key, as of a layer that draws its own numbers."""

    weight: jax.Array
    key: eqx.nn.StateIndex

    def __init__(self):
        self.weight = jnp.ones(2)
        self.key = eqx.nn.StateIndex(jax.random.key(5))

    def __call__(self, x, state):
        key, now = jax.random.split(state.get(self.key))
        noise = jax.random.normal(now, (2,))
        return self.weight * x[:2] + noise, state.set(self.key, key)


def test_a_key_as_state():
    model, state = eqx.nn.make_with_state(Counting)()
    stop = gnlin.callbacks.EarlyStop()
    result = fit(model, BATCHES, state=state, steps=3, validation=(X, T), callbacks=stop)
    key = jax.random.key(5)
    for _ in range(3):
        key, _ = jax.random.split(key)
    assert result.state.get(model.key) == key


def loss_without_dropout(model):
    f = jax.vmap(lambda x: eqx.nn.inference_mode(model)(x, key=None))(X)
    return 0.5 * jnp.mean(jnp.sum((f - T) ** 2, axis=1))


def test_dropout():
    # Steps of length zero, so that losses differ only by dropout.
    solver = gnlin.IterativeLinearisation(3, 1e-30)
    model = Dropped(jax.random.key(0))

    def losses(key):
        result = fit(model, [(X, T)], solver, steps=5, key=jax.random.key(key))
        return result.history["loss"]

    assert len(set(losses(0))) == 5
    np.testing.assert_array_equal(losses(0), losses(0))
    assert not set(losses(0)) & set(losses(1))
    result = fit(model, [(X, T)], solver, steps=1, validation=(X, T))
    validation_loss = result.history["validation_loss"][0]
    assert_close(validation_loss, loss_without_dropout(model))


def test_dropout_differs_by_example():
    model = Dropped(jax.random.key(0))
    data = jnp.tile(X[:1], (12, 1)), jnp.tile(T[:1], (12, 1))
    alone = 12 * 0.5 * jnp.sum((model(X[0], key=jax.random.key(1)) - T[0]) ** 2)
    result = fit(model, [data], steps=1)
    kept = [np.array(k) for k in np.ndindex(2, 2, 2, 2)]
    hidden = np.tanh(model.first(X[0]))
    possible = []
    for units in kept:
        r = model.last(jnp.asarray(2 * units * hidden)) - T[0]
        possible.append(12 * 0.5 * float(r @ r))
    assert np.min(np.abs(np.array(possible) - float(alone))) < 1e-12
    assert np.min(np.abs(np.array(possible) - result.history["loss"][0])) > 1e-6


#
# Weights, augmentation, precision
#


def test_weights():
    weights = jnp.asarray([1.0, 0.0, 2.0, 0.5])
    batches = [(*batch, weights) for batch in BATCHES]
    result = fit(
        data=batches,
        solver=gnlin.DampedGaussNewton(0.3, search=None),
        steps=3,
        validation=(X, T, jnp.arange(12.0)),
    )
    root = np.sqrt(np.repeat(weights, 2))
    expected, _ = outer_steps(
        lambda r, j: damped_step(root * r, root[:, None] * j, 0.3), BATCHES, 3
    )
    assert_close(numbers(result.model), expected, rtol=1e-8)
    each = 0.5 * np.sum((np.asarray(outputs(expected, X)) - T) ** 2, axis=1)
    expected = np.average(each, weights=np.arange(12.0))
    assert_close(result.history["validation_loss"][-1], expected, rtol=1e-8)


def test_the_mean_of_a_loss():
    mean = gnlin.SquaredError(reduction="mean")
    by_mean = fit(data=BATCHES, loss=mean, solver=gnlin.IterativeLinearisation(3, 0.2))
    by_sum = fit(data=BATCHES, solver=DESCENT)
    assert_close(numbers(by_mean.model), numbers(by_sum.model))
    assert_close(4 * by_mean.history["loss"], by_sum.history["loss"])


def test_augmentation():
    seen = []

    def noisy(x, key):
        noise = jax.random.normal(key, x.shape)
        jax.debug.callback(lambda *pair: seen.append(pair), x, noise)
        return x + noise

    def drawn(key):
        seen.clear()
        result = fit(augment=noisy, steps=4, key=jax.random.key(key), validation=(X, T))
        jax.effects_barrier()
        validation_loss = result.history["validation_loss"][-1]
        each = 0.5 * np.sum((np.asarray(jax.vmap(result.model)(X)) - T) ** 2, axis=1)
        assert_close(validation_loss, np.mean(each))
        assert len(seen) == 16
        return result, sorted(tuple(noise.tolist()) for _, noise in seen)

    first, noises = drawn(0)
    assert len(set(noises)) == 16
    again, same = drawn(0)
    assert same == noises
    np.testing.assert_array_equal(numbers(again.model), numbers(first.model))
    _, others = drawn(1)
    assert not set(others) & set(noises)


def test_augmentation_that_crops():
    crop = lambda x, key: jax.lax.dynamic_slice(
        x, [jax.random.randint(key, (), 0, 2)], [2]
    )
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    result = fit(model, augment=crop, validation=(X[:, :2], T))
    assert np.all(np.isfinite(result.history["loss"]))


class Several(eqx.Module):
    """A model from a tree to a tree."""

    weight: jax.Array
    count: jax.Array

    def __call__(self, x):
        product = self.weight * x["in"] * self.count
        return {"product": product, "pair": (jnp.sum(product),)}


def test_trees_of_inputs_and_outputs():
    model = Several(jnp.ones(3), jnp.asarray(2))
    targets = {"product": 6 * X, "pair": (6 * jnp.sum(X, axis=1),)}
    data = {"in": X}, targets
    result = fit(
        model,
        data,
        gnlin.IterativeLinearisation(3, 0.003),
        epochs=20,
        validation=data,
        metrics={"pair": lambda f, t: jnp.mean(jnp.abs(f["pair"][0] - t["pair"][0]))},
        augment=lambda x, key: {"in": x["in"]},
    )
    column = result.history["validation_pair"]
    assert column[-1] < 0.2 * column[2]
    np.testing.assert_allclose(result.model.weight, 3.0, rtol=0.1)
    assert int(result.model.count) == 2


def test_only_the_chosen_leaves_change():
    model = network()
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1].weight, spec, True)
    result = fit(model, filter_spec=spec)
    last, trained = model.layers[-1], result.model.layers[-1]
    assert not np.array_equal(trained.weight, last.weight)
    np.testing.assert_array_equal(trained.bias, last.bias)
    np.testing.assert_array_equal(result.model.layers[0].weight, model.layers[0].weight)
    np.testing.assert_array_equal(
        result.linearisation_point.layers[0].weight, model.layers[0].weight
    )


def test_single_precision():
    model = jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, network()
    )
    solver = gnlin.IterativeLinearisation(3, optimiser=ADAM, restart=False)
    result = fit(model, (X.astype(jnp.float32), T), solver, epochs=3)
    leaves = jax.tree.leaves(eqx.filter(result.model, eqx.is_array))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    assert result.history["loss"][-3:].sum() < result.history["loss"][:3].sum()


SHORT = gnlin.IterativeLinearisation(2, 0.05, method="matrix-free")


class Images(eqx.Module):
    """A convolution, which does not mix dtypes, then batch normalisation."""

    convolution: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    dense: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.convolution = eqx.nn.Conv2d(1, 2, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.dense = eqx.nn.Linear(8, 2, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.convolution(x), state)
        return self.dense(jnp.tanh(x).ravel()), state


@pytest.mark.slow
def test_outputs_in_half_precision_have_a_loss_in_single():
    inputs = jnp.linspace(-1.0, 1.0, 100, dtype=jnp.float32)[:, None]
    targets = jnp.full((100, 1), 0.3, jnp.float32)
    weight = jnp.full((1, 1), 0.5, jnp.float32)
    fn = lambda weight, x: (weight @ x).astype(jnp.bfloat16)
    whole = gnlin.solve((fn, weight), (inputs, targets), max_steps=1)
    group = gnlin.Residuals(fn, inputs, targets=targets)
    of_group = gnlin.solve(weight, group, max_steps=1)
    for loss, end in ((whole.loss, whole.model[1]), (of_group.loss, of_group.model)):
        outputs = jax.vmap(fn, (None, 0))(end, inputs)
        exact = 0.5 * np.sum((np.asarray(outputs, float) - 0.3) ** 2)
        assert loss == pytest.approx(exact, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["fit", "solve"])
def test_half_precision_is_computed_with_in_single_precision(driver):
    """The result is that of the same numbers in single precision, rounded."""

    def cast(tree, dtype):
        change = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
        return jax.tree.map(change, tree)

    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1, 4, 4)))
    labels = np.arange(8) % 2
    given = (*eqx.nn.make_with_state(Images)(jax.random.key(1)), images)
    given = cast(given, jnp.bfloat16)
    spec = jax.tree.map(eqx.is_inexact_array, given[0])
    spec = eqx.tree_at(lambda m: m.convolution.weight, spec, False)

    def trained(dtype):
        model, state, images = cast(given, dtype)
        every = {"loss": gnlin.SoftmaxCrossEntropy(), "state": state, "filter_spec": spec}
        data = images, labels
        if driver == "solve":
            return gnlin.solve(model, data, SHORT, max_steps=3, **every)
        every |= {"batch_size": 4, "epochs": 2, "validation": data}
        return gnlin.fit(model, data, SHORT, **every)

    half, single = trained(jnp.bfloat16), trained(jnp.float32)
    np.testing.assert_array_equal(half.history.loss, single.history.loss)
    expected = cast((single.model, single.state), jnp.bfloat16)
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    both = arrays((half.model, half.state)), arrays(expected)
    for left, right in zip(*both, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left.astype(float), right.astype(float))


def test_images_of_whole_numbers_are_told_to_be_converted():
    model, state = eqx.nn.make_with_state(Images)(jax.random.key(1))
    images = np.zeros((8, 1, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="convert the inputs to the dtype of"):
        gnlin.fit(model, (images, np.zeros(8, int)), state=state, batch_size=4, epochs=1)


@pytest.mark.slow
def test_a_batch_of_a_loader_may_have_no_weight():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3))
    t = np.sum(x, axis=1, keepdims=True)
    model = eqx.nn.MLP(3, 1, 4, 1, jnp.tanh, key=jax.random.key(0))
    weights = np.ones(12)
    weights[4:8] = 0
    batches = [(x[k : k + 4], t[k : k + 4], weights[k : k + 4]) for k in (0, 4, 8)]
    result = gnlin.fit(model, batches, gnlin.GaussNewton(), epochs=2)
    assert len(result.history.loss) == 6
    assert np.isnan(result.history.loss[[1, 4]]).all()
    assert result.history.loss[3] < result.history.loss[0]
    with pytest.raises(ValueError, match="All weights are zero"):
        gnlin.fit(model, (x, t, 0 * weights), epochs=1)


def test_a_first_batch_without_a_loss_is_no_measure():
    """The loss of the others is infinitely many times its own."""
    x = np.linspace(-1, 1, 60)[:, None]
    model = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jax.random.key(0))
    last = lambda m: (m.layers[-1].weight, m.layers[-1].bias)
    model = eqx.tree_at(last, model, (jnp.zeros((1, 8)), jnp.zeros(1)))
    rest = [(x[k : k + 20], np.sin(3 * x[k : k + 20])) for k in (20, 40)]
    first = x[:20], np.zeros((20, 1))
    batches = lambda epoch: [first] if epoch == 0 else rest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = gnlin.fit(model, batches, optax.adam(3e-2), epochs=20, progress=False)
    assert result.reason == "all 39 steps were made"
    assert result.history.loss[-1] < 0.8 * result.history.loss[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "batch_size"), [(gnlin.SquaredError(), None), (gnlin.losses.LogCosh(), 8)]
)
def test_an_optimiser_that_adapts_to_the_loss(batch_size, loss):
    """Polyak's step is the loss over the square of the gradient."""
    x = np.linspace(-1, 1, 8)[:, None]
    model, targets = eqx.nn.Linear(1, 1, key=jax.random.key(0)), np.sin(3 * x)
    sizes = {"batch_size": batch_size, "epochs": 3, "progress": False}
    found = gnlin.fit(model, (x, targets), optax.polyak_sgd(), loss=loss, **sizes)

    @jax.value_and_grad
    def loss_at(model):
        return jnp.mean(jax.vmap(loss.value)(jax.vmap(model)(x), targets))

    for _ in range(3):
        value, g = loss_at(model)
        rate = min(1, value / sum(jnp.vdot(x, x) for x in jax.tree.leaves(g)))
        model = jax.tree.map(lambda x, g, rate=rate: x - rate * g, model, g)
    np.testing.assert_allclose(found.model.weight, model.weight, rtol=1e-5)


class Adam(eqx.Module):
    """As in docs/training.md."""

    rate: jax.Array

    def init(self, parameters):
        return optax.adam(self.rate).init(parameters)

    def update(self, gradient, state, parameters=None):
        return optax.adam(self.rate).update(gradient, state, parameters)


def test_another_rate_is_not_compiled_again():
    run = lambda optimiser: fit(solver=optimiser).history.loss
    np.testing.assert_allclose(run(Adam(jnp.array(0.1))), run(optax.adam(0.1)), rtol=1e-6)
    assert num_compiled(lambda: run(Adam(jnp.array(0.2)))) == 0
    assert num_compiled(lambda: run(optax.adam(0.2))) > 0


def test_an_optimiser_with_a_line_search():
    x = np.linspace(-1, 1, 8)[:, None]
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    words = "`optax.lbfgs` does .*: pass .* `optimistix.LBFGS.rtol, atol.`"
    with pytest.raises(ValueError, match=words):
        gnlin.fit(model, (x, x), optax.lbfgs(), steps=1, progress=False)


class Shifted(gnlin.authoring.AbstractElementwiseLoss):
    """Squared error less a constant, so that the loss is negative."""

    reduction: str | None = None

    def elementwise(self, output, target):
        return 0.5 * (output - target) ** 2 - 1000.0


class WithoutConstant(Shifted):
    """Squared error without the term of the target alone; an output of 0 has no loss."""

    def elementwise(self, output, target):
        return (0.5 * output - target) * output


def test_a_first_loss_of_zero_that_falls_converges():
    x = np.linspace(-1, 1, 8)[:, None]
    model = lambda b, x: b * x, jnp.zeros(1)
    solver = gnlin.DampedGaussNewton(1e-9)
    end = gnlin.solve(model, (x, 2 * x), solver, loss=WithoutConstant())
    assert end.result == optx.RESULTS.successful
    np.testing.assert_allclose(end.model[1], 2, rtol=1e-6)


def test_negative_losses_that_rise():
    x = np.linspace(-1, 1, 8)[:, None]
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    ascent = optax.sgd(-0.1)
    with pytest.warns(UserWarning, match="the loss rose from -999 to -962"):
        gnlin.fit(model, (x, x), ascent, loss=Shifted(), steps=30, divergence=None)


def test_a_loss_that_was_lower_in_between():
    x, model = jnp.linspace(1, 2, 8), (lambda p, x: p * x, jnp.array(0.0))
    slopes = [3] * 20 + [2, 4] * 10
    batches, solver = [(x, slope * x) for slope in slopes], gnlin.DampedGaussNewton(1.0)
    with pytest.warns(UserWarning, match="the loss rose from 0.00518 in between to 1.18"):
        gnlin.fit(model, batches, solver, steps=40)
    gnlin.fit(model, batches[:20], solver, steps=20)


def of_losses(losses, solver=None, *, is_drawn=True):
    ones = np.ones(len(losses))
    rows = {"loss": np.asarray(losses), "gradient_norm": ones, "step_norm": ones}
    solver = gnlin.LevenbergMarquardt() if solver is None else solver
    setting = StepSettings(
        solver, GroupLosses({}, {}, is_drawn), None, None, streaming=True
    )
    return after_batches(setting, rows, made_all=True)


@pytest.mark.parametrize("num_steps", [30, 200])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_a_continued_run_with_noisy_losses_has_not_risen(num_steps, outliers):
    rng, time = np.random.default_rng(0), np.linspace(0, 1, num_steps)
    told = {"falls": 0, "rises": 0}
    for _ in range(20):
        noise = np.exp(0.5 * rng.normal(size=num_steps))
        noise *= np.where(rng.uniform(size=num_steps) < outliers, 20, 1)
        told["falls"] += of_losses(1e-9 * 0.5**time * noise) != ""
        told["rises"] += of_losses(1e-9 * 8**time * noise) != ""
    assert told["falls"] == 0
    assert told["rises"] >= 18


def test_a_loss_that_fell_at_once_and_hovers_has_not_risen():
    assert of_losses([1.0, 1e-3, *[1e-5] * 8, *[3e-5] * 20]) == ""


def test_the_advice_for_a_loss_that_rose_suits_the_run():
    losses = np.linspace(1, 3, 40)
    said = of_losses(losses)
    assert said.endswith(
        "rose from 1.23 to 2.77: draw more points in each step, or use more damping."
    )
    said = of_losses(losses, gnlin.GaussNewton(), is_drawn=False)
    assert "larger batches" in said
    assert said.endswith(" or `gnlin.LevenbergMarquardt()` in place of this solver.")


@pytest.mark.slow
def test_negative_losses_that_fall():
    x = np.linspace(-1, 1, 8)[:, None]
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    end = gnlin.fit(model, (x, x), loss=Shifted(), steps=20, progress=False)
    np.testing.assert_allclose(end.history.loss[-1], -1000, rtol=1e-6)


def test_a_negative_loss_that_crosses_zero_does_not_diverge():
    y, outputs = jnp.zeros(1), jnp.zeros(2)
    for first, allowed in ((-0.5, 49.0), (0.5, 50.0)):
        start = Watch.start(SumOfSquares(), y, outputs, jnp.array(first))
        for loss, diverges in ((0.99 * allowed, False), (1.01 * allowed, True)):
            watch = start
            for _ in range(5):
                watch = watch.look(y, jnp.array(loss), 100.0)
            assert bool(watch.diverges) == diverges
    # A first loss of zero is no measure, and neither is NaN.
    watch = Watch.start(SumOfSquares(), y, outputs, jnp.array(0.0))
    for loss in (jnp.nan, 3.0, 3.0, 3.0, 3.0, 3.0):
        watch = watch.look(y, jnp.array(loss), 1.5)
    assert not watch.diverges


def test_an_optimiser_of_optax_has_no_columns_of_a_linearisation():
    given = {"batch_size": 4, "steps": 2, "validation": (X, T), "progress": False}
    plain = gnlin.fit(network(), (X, T), optax.sgd(0.01), **given)
    assert "validation_loss" in plain.history.columns
    assert not any(name.endswith("_linearised") for name in plain.history.columns)


def of_large_inputs(solver):
    """Train on inputs that are not scaled, where the classes of the first network are
    certain and wrong, so that the curvature is tiny."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=60)
    inputs = (5 + rng.normal(size=(60, 4))) * [1, 1, 1, 300]
    inputs[:, 0] += 3 * labels
    model = eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0))
    settings = {"loss": gnlin.SoftmaxCrossEntropy(), "batch_size": 20, "epochs": 10}
    return gnlin.fit(model, (inputs, labels), solver, **settings, progress=False)


@pytest.mark.slow
def test_the_default_finds_a_step_on_inputs_that_are_not_scaled():
    history = of_large_inputs(gnlin.LevenbergMarquardt()).history
    assert history.step_norm[0] == 0  # the first damping is far too small
    assert np.mean(history.loss[-3:]) < 0.1 * history.loss[0]


@pytest.mark.slow
def test_a_run_without_a_step_is_told():
    with pytest.warns(UserWarning, match="made no step: none lowered the loss of its"):
        of_large_inputs(gnlin.DampedGaussNewton(1e-9))


class Uncalled(Normalised):
    """A network that does not call its batch normalisation."""

    def __call__(self, x, state):
        return self.last(jnp.tanh(self.first(x))), state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "given"), [("fit", "the state of another model"), ("solve", "no state")]
)
def test_a_norm_without_its_state_does_not_end_a_run(driver, given):
    model = Uncalled(jax.random.key(0))
    _, state = eqx.nn.make_with_state(Uncalled)(jax.random.key(1))
    options = {"loss": gnlin.SoftmaxCrossEntropy(), "state": state}
    if given == "no state":
        model = lambda model, x: model(x, None)[0], model
        del options["state"]
    data = jax.random.normal(jax.random.key(1), (20, 3)), jnp.arange(20) % 2
    if driver == "fit":
        ended = gnlin.fit(model, data, SHORT, batch_size=10, steps=12, **options)
    else:
        ended = gnlin.solve(model, data, SHORT, max_steps=12, **options)
    assert ended.stats["num_steps"] == 12
