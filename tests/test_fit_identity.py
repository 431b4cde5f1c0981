"""A run can be resumed only by the call that began it."""

import functools
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix as optx
import pytest
from fit_problems import BATCHES, fit, network, Normalised, T, X

import gnlin
from gnlin import CheckpointError
from gnlin.callbacks import Callback


ROOT = Path(__file__).resolve().parents[1]


class AtOnce(Callback):
    """Ends a run before its first step, when the first checkpoint has been written: the
    step is not compiled."""

    def on_start(self, run):
        run.stop("to be gone on with")


def begin(folder, resume=False, **arguments):
    return fit(checkpoint=folder, resume=resume, callbacks=AtOnce(), **arguments)


#
# Two versions of each change: a function of the arguments, called twice with each
#


RATE = 1.0


def reads_a_global(x, key):
    return RATE * x


def with_global(rate):
    """Make arguments that depend on a global variable when the run is made."""
    globals()["RATE"] = rate
    return {"augment": lambda x, key: reads_a_global(x, key)}


def scaled(x, key, rate):
    return rate * x


@jax.custom_jvp
def _twice(x):
    return 2 * x


@jax.custom_jvp
def _twice_with_another_rule(x):
    return 2 * x


_twice.defjvps(lambda t, out, x: 2 * t)
_twice_with_another_rule.defjvps(lambda t, out, x: 3 * t)
_twice_with_another_rule.__qualname__ = _twice.__qualname__


def loss_of(factor):
    class Own(gnlin.SquaredError):
        def value(self, outputs, targets):
            return factor * jnp.sum((outputs - targets) ** 2)

    return Own()


def solver_of(factor):
    class Own(gnlin.DampedGaussNewton):
        def advance_stream(self, *args, **kwargs):
            y, *rest = super().advance_stream(*args, **kwargs)
            return jax.tree.map(lambda x: factor * x, y), *rest

    return Own(0.3)


class Marked(eqx.Module):
    """A model with a static field, which no array shows."""

    layer: eqx.nn.Linear
    power: int = eqx.field(static=True)

    def __call__(self, x):
        return self.layer(x) ** self.power


class Open(eqx.Module):
    """A model with a function that has closed over a value, and a second parameter."""

    layer: eqx.nn.Linear
    scale: jax.Array
    function: Callable

    def __call__(self, x):
        return self.function(self.scale * self.layer(x))


def mlp(**changes):
    settings = {"activation": jnp.tanh, "key": jax.random.key(0), **changes}
    return {"model": eqx.nn.MLP(3, 2, 3, 1, **settings)}


def linear():
    return eqx.nn.Linear(3, 2, key=jax.random.key(0))


def opened(rate, scale=1.0, **changes):
    return {"model": Open(linear(), scale * jnp.ones(2), lambda x: rate * x), **changes}


def initial(offset):
    arrays, rest = eqx.partition(network(), eqx.is_array)
    return {"model": eqx.combine(jax.tree.map(lambda x: x + offset, arrays), rest)}


def state(offset):
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
    move = lambda x: x + offset if eqx.is_inexact_array(x) else x
    return {"model": model, "state": jax.tree.map(move, state)}


def descent(optimiser):
    return {"solver": gnlin.IterativeLinearisation(3, optimiser=optimiser)}


def damped(damping, **changes):
    return {"solver": gnlin.DampedGaussNewton(damping, **changes)}


def augmented(function):
    return {"augment": function}


def trained(layer):
    layers = (lambda m: m.layer.weight, lambda m: m.layer.bias)
    model = Open(linear(), jnp.ones(2), jnp.tanh)
    spec = jax.tree.map(lambda _: False, model)
    return {"model": model, "filter_spec": eqx.tree_at(layers[layer], spec, True)}


# Each with a part of the sentence that says what differs.
PAIRS = {
    "activation": [
        lambda: mlp(),
        lambda: mlp(activation=jax.nn.relu),
        "its model.activation is tanh, and here it is relu;",
    ],
    "constant of a lambda": [
        lambda: mlp(final_activation=lambda x: x),
        lambda: mlp(final_activation=lambda x: 2 * x),
        "its steps compute something else",
    ],
    "rule of a derivative": [
        lambda: mlp(activation=_twice),
        lambda: mlp(activation=_twice_with_another_rule),
        "its steps compute something else",
    ],
    "static field": [
        lambda: {"model": Marked(linear(), 1)},
        lambda: {"model": Marked(linear(), 2)},
        "its steps compute something else",
    ],
    "array in a closure": [
        lambda: opened(jnp.arange(2.0)),
        lambda: opened(jnp.arange(2.0) + 1),
        "its steps compute something else",
    ],
    "initial values": [
        lambda: initial(0.0),
        lambda: initial(1e-12),
        "its model.layers[0].weight has the same shape, but other numbers, as with "
        "another seed;",
    ],
    "initial state": [lambda: state(0.0), lambda: state(0.5), "its state"],
    "frozen values": [
        lambda: opened(1.0, filter_spec=lambda x: eqx.is_array(x) and x.ndim == 2),
        lambda: opened(1.0, 2.0, filter_spec=lambda x: eqx.is_array(x) and x.ndim == 2),
        "its model.scale is [1.0, 1.0], and here it is [2.0, 2.0];",
    ],
    "trained leaves": [
        lambda: trained(0),
        lambda: trained(1),
        "its steps compute something else",
    ],
    "global of a function that is called": [
        lambda: with_global(1.0),
        lambda: with_global(2.0),
        "its steps compute something else",
    ],
    "partial": [
        lambda: augmented(functools.partial(scaled, rate=1.0)),
        lambda: augmented(functools.partial(scaled, rate=2.0)),
        "its steps compute something else",
    ],
    "augmentation or none": [
        lambda: {},
        lambda: augmented(lambda x, key: x + 1.0),
        "its augment is None, and here it is <lambda>",
    ],
    "own loss's code": [
        lambda: {"loss": loss_of(0.5)},
        lambda: {"loss": loss_of(0.6)},
        "its steps compute something else",
    ],
    "loss's reduction": [
        lambda: {"loss": gnlin.SquaredError(reduction="sum")},
        lambda: {"loss": gnlin.SquaredError(reduction="mean")},
        "its loss's reduction is 'sum', and here it is 'mean';",
    ],
    "own solver's code": [
        lambda: {"solver": solver_of(1.0)},
        lambda: {"solver": solver_of(2.0)},
        "its steps compute something else",
    ],
    "search": [
        lambda: damped(0.3, search=optx.LearningRate(0.5)),
        lambda: damped(0.3, search=optx.LearningRate(0.6)),
        "its solver's search is LearningRate(learning_rate=0.5), and here",
    ],
    "schedule": [
        lambda: damped(optax.exponential_decay(1.0, 10, 0.5)),
        lambda: damped(optax.exponential_decay(1.0, 10, 0.6)),
        "its steps compute something else",
    ],
    "optimiser": [
        lambda: descent(optax.chain(optax.clip(1.0), optax.sgd(1e-3))),
        lambda: descent(optax.chain(optax.clip(2.0), optax.sgd(1e-3))),
        "its steps compute something else",
    ],
    "curvature_batch_size": [
        lambda: {**damped(0.3), "curvature_batch_size": 6},
        lambda: {**damped(0.3), "curvature_batch_size": 7},
        "its curvature_batch_size is 6, and here it is 7;",
    ],
    "batch_size": [
        lambda: {"batch_size": 4},
        lambda: {"batch_size": 3},
        "its batch_size is 4, and here it is 3;",
    ],
    "divergence": [
        lambda: {"divergence": 100.0},
        lambda: {"divergence": 10.0},
        "its divergence is 100.0, and here it is 10.0;",
    ],
    "key": [
        lambda: {"key": jax.random.key(0)},
        lambda: {"key": jax.random.key(1)},
        "its key is another one;",
    ],
    "data": [
        lambda: {"data": (X, T)},
        lambda: {"data": (X, T + 1e-9)},
        "its data set has the same shape, but other numbers;",
    ],
    "dtype of the data": [
        lambda: {"data": (X, T)},
        lambda: {"data": (X, T.astype(jnp.float32))},
        "its data set has the same shape, but other numbers;",
    ],
    "list of batches": [
        lambda: {"data": BATCHES},
        lambda: {"data": [*BATCHES[:2], (X[8:], T[8:] + 1e-9)]},
        "its data set has the same shape, but other numbers;",
    ],
}


def sentence(folder, arguments):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        begin(folder, resume=True, **arguments)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    message = str(caught.value)
    assert message.startswith(
        f"{folder}{os.sep}step-000000000000.npz belongs to another run"
    )
    assert message.endswith("; pass the arguments of that run, or another folder.")
    assert "\n" not in message
    assert len(message) < 600
    return message


# Of these, others are found in the same way.
SLOW = "partial", "own solver's code", "schedule", "search", "curvature_batch_size"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PAIRS],
)
def test_changed_is_refused_and_unchanged_is_not(name, tmp_path):
    first, second, words = PAIRS[name]
    begin(tmp_path, **first())
    assert words in sentence(tmp_path, second())
    begin(tmp_path, resume=True, **first())


def renamed(x):
    return jnp.tanh(x)


ALIKE = {
    "names": [lambda: mlp(), lambda: mlp(activation=renamed)],
    "a memory budget": [
        lambda: damped(0.3),
        lambda: damped(0.3, memory_budget=10**8),
    ],
    "printing": [lambda: damped(0.3), lambda: damped(0.3, verbose=True)],
    "what no step uses": [
        lambda: augmented(lambda x, key: 2 * x),
        lambda: augmented(lambda x, key: (x**3, 2 * x)[1]),
    ],
}


def test_the_same_step_is_the_same_run(tmp_path):
    for name, (first, second) in ALIKE.items():
        begin(tmp_path / name, **first())
        begin(tmp_path / name, resume=True, **second())


#
# The same identity in every process
#


def identities():
    """Return the settings that identify some runs, a line for each."""
    lines = []

    class Tell(AtOnce):
        def on_start(self, run):
            super().on_start(run)
            lines.extend(f"{name} {value}" for name, value in run.settings().items())

    first = [
        PAIRS[name][0]()
        for name in ("optimiser", "initial state", "own loss's code", "partial")
    ]
    fit(callbacks=Tell(), **functools.reduce(operator.or_, first))
    gelu = mlp(activation=jax.nn.gelu)
    fit(callbacks=Tell(), **gelu, **PAIRS["search"][0](), data=lambda epoch: BATCHES)
    return "\n".join(lines).splitlines()


CHILD = """
ballast = [object() for _ in range(3333)]
import jax
jax.config.update("jax_enable_x64", True)
import test_fit_identity
print(*test_fit_identity.identities(), sep="\\n")
"""


@pytest.mark.slow
def test_the_same_in_every_process():
    """The order of sets and the addresses of objects differ between processes."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    here, there = identities(), child.stdout.splitlines()
    assert len(here) > 40
    for left, right in zip(here, there, strict=True):
        assert left == right
        assert not re.search("0x[0-9a-f]{6}", left)
