"""The state that a run returns: its model predicts as well in inference mode as it was
trained."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin.callbacks import Callback, EarlyStop


RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Y = np.sin(X[:, :1]) + X[:, 1:2] * X[:, 2:]
BATCHES = [(X[i : i + 20], Y[i : i + 20]) for i in range(0, 60, 20)]


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, momentum=0.9, mode="batch"):
        first, last = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(3, 8, key=first)
        self.norm = eqx.nn.BatchNorm(8, "batch", momentum=momentum, mode=mode)
        self.last = eqx.nn.Linear(8, 1, key=last)

    def __call__(self, x, state):
        x, state = self.norm(jnp.tanh(self.first(x)), state)
        return self.last(x), state


class Spectral(eqx.Module):
    first: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        linear = eqx.nn.Linear(3, 8, key=keys[0])
        self.first = eqx.nn.SpectralNorm(linear, "weight", key=keys[1])
        self.last = eqx.nn.Linear(8, 1, key=keys[2])

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.last(jnp.tanh(x)), state


class Own(eqx.Module):
    """A normalisation that is not Equinox's, and a counter of its calls."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear
    mean: eqx.nn.StateIndex
    count: eqx.nn.StateIndex
    inference: bool

    def __init__(self):
        first, last = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(3, 8, key=first)
        self.last = eqx.nn.Linear(8, 1, key=last)
        self.mean = eqx.nn.StateIndex(jnp.zeros(8))
        self.count = eqx.nn.StateIndex(jnp.array(0))
        self.inference = False

    def __call__(self, x, state):
        x = jnp.tanh(self.first(x))
        if self.inference:
            return self.last(x - state.get(self.mean)), state
        mean = jax.lax.pmean(x, "batch")
        running = 0.9 * state.get(self.mean) + 0.1 * mean
        state = state.set(self.mean, running)
        return self.last(x - mean), state.set(self.count, state.get(self.count) + 1)


def made(make, *args):
    return eqx.nn.make_with_state(make)(*args)


def call(model, state, x=X):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(x, state)


def inference_loss(model, state, x=X, y=Y):
    outputs, _ = call(eqx.nn.inference_mode(model), state, x)
    return 0.5 * np.sum((np.asarray(outputs) - y) ** 2)


def literal(model, state, passes, batches=(X,)):
    """Return the state after passes in training mode over the batches."""
    step = eqx.filter_jit(lambda state, x: call(model, state, x)[1])
    for _ in range(passes):
        for x in batches:
            state = step(state, x)
    return state


def activations(model, x):
    w, b = np.asarray(model.first.weight), np.asarray(model.first.bias)
    return np.tanh(x @ w.T + b)


def statistics_for_inference(model, state):
    count = int(state.get(model.norm.batch_counter))
    weight = 1 - model.norm.momentum**count
    return [np.asarray(x) / weight for x in state.get(model.norm.batch_state_index)]


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("momentum", [slow(0.5), slow(0.9), 0.99])
@pytest.mark.parametrize("driver", ["solve", slow("fit")])
def test_a_full_batch_leaves_the_statistics_of_its_data(driver, momentum):
    model, state = made(Net, momentum)
    if driver == "solve":
        found = gnlin.solve(model, (X, Y), state=state, max_steps=12)
    else:
        found = gnlin.fit(model, (X, Y), state=state, steps=12)
    scale = 60 if driver == "fit" else 1  # its loss is the mean
    loss = inference_loss(found.model, found.state) / scale
    np.testing.assert_allclose(loss, float(found.loss), rtol=1e-8)
    # NumPy, and a literal loop
    hidden = activations(found.model, X)
    mean, variance = statistics_for_inference(found.model, found.state)
    np.testing.assert_allclose(mean, hidden.mean(0), rtol=1e-10)
    np.testing.assert_allclose(variance, hidden.var(0), rtol=1e-10)
    looped = literal(found.model, found.state, 3)
    for a, b in zip(
        statistics_for_inference(found.model, looped), (mean, variance), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    # The counter counts the steps, and not the pass at the end.
    assert 1 <= int(found.state.get(model.norm.batch_counter)) <= 12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*and the loss rose in")  # each step has its own
@pytest.mark.parametrize("mode", ["ema", "spectral"])
@pytest.mark.parametrize("max_steps", [1, 12, 200])
def test_the_loss_is_that_of_the_state_that_is_returned(mode, max_steps):
    """Normalisation by running statistics, whose outputs depend on earlier steps, and
    spectral normalisation."""
    model, state = made(Spectral) if mode == "spectral" else made(Net, 0.9, "ema")
    found = gnlin.solve(model, (X, Y), state=state, max_steps=max_steps)
    loss = inference_loss(found.model, found.state)
    np.testing.assert_allclose(loss, float(found.loss), rtol=1e-8)


@pytest.mark.slow
def test_a_run_inside_a_compiled_program():
    def loss_and_state(scale):
        model, state = made(Net)
        model = eqx.tree_at(
            lambda m: m.first.weight, model, replace_fn=lambda w: w * scale
        )
        found = gnlin.solve(model, (X, Y), state=state, max_steps=5)
        return found.loss, inference(found.model, found.state)

    def inference(model, state):
        outputs, _ = call(eqx.nn.inference_mode(model), state)
        return 0.5 * jnp.sum((outputs - Y) ** 2)

    losses, of_inference = jax.jit(jax.vmap(loss_and_state))(jnp.array([1.0, 0.5]))
    np.testing.assert_allclose(of_inference, losses, rtol=1e-8)


@pytest.mark.slow
def test_a_state_in_half_precision_keeps_its_dtype():
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    model, state = jax.tree.map(half, made(Net))
    data = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    found = gnlin.solve(model, data, state=state, max_steps=3)
    dtypes = {x.dtype for x in jax.tree.leaves(found.state) if x.ndim}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


def test_a_normalisation_of_ones_own_is_told():
    model, state = made(Own)
    with pytest.warns(UserWarning, match="call it in training mode on all data, again"):
        found = gnlin.solve(model, (X, Y), state=state, max_steps=12)
    assert int(found.state.get(model.count)) <= 12
    assert inference_loss(found.model, found.state) > 2 * float(found.loss)
    advised = literal(found.model, found.state, 400)
    loss = inference_loss(found.model, advised)
    np.testing.assert_allclose(loss, float(found.loss), rtol=1e-6)


class States(Callback):
    def __init__(self):
        self.seen = []

    def on_step(self, run):
        self.seen.append((run.model, run.model_state))


@pytest.mark.parametrize("kind", ["arrays", slow("list")])
def test_batches_leave_the_mean_of_their_statistics(kind):
    model, state = made(Net, 0.99)
    data = {"data": (X, Y), "batch_size": 60} if kind == "arrays" else {"data": BATCHES}
    states = States()
    found = gnlin.fit(
        model, state=state, epochs=3, validation=(X, Y), callbacks=states, **data
    )
    parts = [X] if kind == "arrays" else [x for x, _ in BATCHES]
    hidden = [activations(found.model, x) for x in parts]
    mean, variance = statistics_for_inference(found.model, found.state)
    np.testing.assert_allclose(mean, np.mean([h.mean(0) for h in hidden], 0), rtol=1e-10)
    expected = np.mean([h.var(0) for h in hidden], 0)
    np.testing.assert_allclose(variance, expected, rtol=1e-10)
    # A literal loop leaves their means, weighted by the momentum.
    looped = literal(found.model, found.state, 700, parts)
    loop = statistics_for_inference(found.model, looped)
    np.testing.assert_allclose(loop[0], mean, rtol=2e-2, atol=1e-3)
    # Validation and callbacks see the same.
    loss = inference_loss(found.model, found.state) / 60
    np.testing.assert_allclose(found.history["validation_loss"][-1], loss, rtol=1e-8)
    np.testing.assert_allclose(
        inference_loss(*states.seen[-1]), inference_loss(found.model, found.state)
    )
    assert int(found.state.get(model.norm.batch_counter)) == len(found.history.loss)


@pytest.mark.slow
def test_shuffled_batches_and_the_best_model_of_a_run():
    model, state = made(Net, 0.99)
    stop = EarlyStop("validation_loss", patience=2)
    found = gnlin.fit(
        model,
        (X, Y),
        gnlin.IterativeLinearisation(1, 0.3),
        state=state,
        batch_size=20,
        epochs=30,
        validation=(X[:30], Y[:30]),
        callbacks=stop,
    )
    loss = inference_loss(found.model, found.state, X[:30], Y[:30]) / 30
    best = np.nanmin(found.history["validation_loss"])
    np.testing.assert_allclose(loss, best, rtol=1e-8)


@pytest.mark.slow
def test_batches_of_a_generator_are_told_of_the_function():
    model, state = made(Net, 0.99)
    with pytest.warns(UserWarning, match=r"`state = gnlin.predict.batch_statistics\("):
        found = gnlin.fit(model, lambda epoch: iter(BATCHES), state=state, epochs=20)
    new = gnlin.predict.batch_statistics(found.model, found.state, X, batch_size=20)
    before = inference_loss(found.model, found.state)
    assert inference_loss(found.model, new) < 0.2 * before
    parts = [activations(found.model, x) for x, _ in BATCHES]
    mean, variance = statistics_for_inference(found.model, new)
    np.testing.assert_allclose(mean, np.mean([h.mean(0) for h in parts], 0), rtol=1e-10)
    expected = np.mean([h.var(0) for h in parts], 0)
    np.testing.assert_allclose(variance, expected, rtol=1e-10)
    counter = found.model.norm.batch_counter
    assert int(new.get(counter)) == int(found.state.get(counter))


def test_statistics_of_a_model_that_was_not_trained():
    model, state = made(Net)
    new = gnlin.predict.batch_statistics(model, state, X)
    mean, variance = new.get(model.norm.batch_state_index)
    hidden = activations(model, X)
    np.testing.assert_allclose(mean, hidden.mean(0), rtol=1e-10)
    np.testing.assert_allclose(variance, hidden.var(0), rtol=1e-10)
    outputs, _ = call(eqx.nn.inference_mode(model), new)
    np.testing.assert_allclose(outputs, call(model, state)[0], rtol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": None}, "pass `state`"),
        (
            {"inputs": jnp.asarray(X).at[3].set(jnp.nan)},
            "input of example 3 is not finite: leave",
        ),
        ({"inputs": X[:10], "batch_size": 20}, "at least 20 examples, but have"),
        ({"inputs": (X, X[:5])}, "one leading axis over at least 1 examples"),
        ({"inputs": 3.0}, "one leading axis"),
        ({"batch_size": 0}, "`batch_size` must"),
        ({"axis_name": "rows"}, "another axis than 'rows'"),
        ({"model": "inference"}, "pass the model as it was trained"),
    ],
)
def test_statistics_that_cannot_be_taken(arguments, message):
    model, state = made(Net)
    given = {"model": model, "state": state, "inputs": X} | arguments
    if given["model"] == "inference":
        given["model"] = eqx.nn.inference_mode(model)
    positional = [given.pop(name) for name in ("model", "state", "inputs")]
    with pytest.raises(ValueError, match=message):
        gnlin.predict.batch_statistics(*positional, **given)


@pytest.mark.parametrize("momentum", [0.0, 0.99, 0.9999])
def test_statistics_have_all_digits_with_any_momentum(momentum):
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    kind = {"mode": "batch", "momentum": momentum, "dtype": jnp.float32}
    norm, state = make(3, "batch", **kind)
    inputs = 5 + 2 * jax.random.normal(jax.random.key(0), (400, 3), jnp.float32)
    state = gnlin.predict.batch_statistics(norm, state, inputs)
    predicts = eqx.nn.inference_mode(norm)
    found, _ = jax.vmap(predicts, in_axes=(0, None), out_axes=(0, None))(inputs, state)
    np.testing.assert_allclose(np.mean(found, axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(np.var(found, axis=0), 1, rtol=1e-4)
