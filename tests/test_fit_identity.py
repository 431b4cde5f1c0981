"""A run can be resumed only by the call that began it."""

import dataclasses
import enum
import functools
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from fit_problems import BATCHES, fit, network, Normalised, T, X
from jax.flatten_util import ravel_pytree

import gnlin
from gnlin import CheckpointError
from gnlin._common._identity import described
from gnlin.callbacks import Callback


ROOT = Path(__file__).resolve().parents[1]


class AtOnce(Callback):
    """Ends a run before its first step, when the first checkpoint has been written:
    nothing is compiled."""

    def on_start(self, run):
        run.stop("to be gone on with")


def begin(folder, resume=False, **arguments):
    return fit(checkpoint=folder, resume=resume, callbacks=AtOnce(), **arguments)


#
# Two versions of each change: a function of the arguments, called twice with each
#


class Scaled:
    """A callable object."""

    def __init__(self, rate):
        self.rate = rate
        self.table = np.arange(20.0)

    def __call__(self, x, key):
        return self.rate * x

    def method(self, x, key):
        return self(x, key)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x, key):
        return self.rate * x


class Kind(enum.Enum):
    FIRST = 1.0
    SECOND = 2.0


RATE = 1.0
OF_A_MODULE = types.ModuleType("of_a_module")


def reads_a_global(x, key):
    return RATE * x


def reads_through_another(x, key):
    return reads_a_global(x, key)


def reads_a_module(x, key):
    return OF_A_MODULE.rate * x


def with_global(rate, function):
    """Make arguments that depend on a global variable when the run is made."""

    def arguments():
        globals()["RATE"] = OF_A_MODULE.rate = rate
        return {"augment": function}

    return arguments


def nested(rate):
    def outer(x, key):
        def inner(x):
            return rate * x

        return inner(x)

    return outer


def with_default(rate):
    def function(x, key, rate=rate):
        return rate * x

    return function


def with_keyword(rate):
    def function(x, key, *, rate=rate):
        return rate * x

    return function


def with_attribute(rate):
    def function(x, key):
        return x

    function.rate = rate
    return function


def scaled(x, key, rate):
    return rate * x


def scaling(rate):
    """A decorator."""

    def decorated(function):
        @functools.wraps(function)
        def wrapper(x, key):
            return rate * function(x, key)

        return wrapper

    return decorated


@jax.custom_jvp
def _twice(x):
    return 2 * x


@jax.custom_jvp
def _twice_with_another_rule(x):
    return 2 * x


_twice.defjvps(lambda t, out, x: 2 * t)
_twice_with_another_rule.defjvps(lambda t, out, x: 3 * t)


def loss_of(factor):
    if factor == 1:

        class Own(gnlin.SquaredError):
            def value(self, outputs, targets):
                return 0.5 * jnp.sum((outputs - targets) ** 2)

    else:

        class Own(gnlin.SquaredError):
            def value(self, outputs, targets):
                return 0.6 * jnp.sum((outputs - targets) ** 2)

    return Own()


def solver_of(factor):
    if factor == 1:

        class Own(gnlin.DampedGaussNewton):
            @property
            def factor(self):
                return 1.0

    else:

        class Own(gnlin.DampedGaussNewton):
            @property
            def factor(self):
                return 2.0

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


def opened(rate, **changes):
    return {"model": Open(linear(), jnp.ones(2), lambda x: rate * x), **changes}


def same_shapes(in_size):
    model = network()
    object.__setattr__(model, "in_size", in_size)
    return {"model": model}


def initial(offset):
    arrays, rest = eqx.partition(network(), eqx.is_array)
    return {"model": eqx.combine(jax.tree.map(lambda x: x + offset, arrays), rest)}


def state(offset):
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
    move = lambda x: x + offset if eqx.is_inexact_array(x) else x
    return {"model": model, "state": jax.tree.map(move, state)}


def metric(function):
    return {"validation": (X, T), "metrics": {"spread": function}}


def solver(**changes):
    return {"solver": gnlin.IterativeLinearisation(3, **changes)}


def descent(optimiser):
    return solver(optimiser=optimiser)


def damped(damping):
    return {"solver": gnlin.DampedGaussNewton(damping)}


def augmented(function):
    return {"augment": function}


def cosine(length):
    return optax.warmup_cosine_decay_schedule(0.1, 1.0, 3, length)


def trained(layer):
    layers = (lambda m: m.layer.weight, lambda m: m.layer.bias)
    model = Open(linear(), jnp.ones(2), jnp.tanh)
    spec = jax.tree.map(lambda _: False, model)
    return {"model": model, "filter_spec": eqx.tree_at(layers[layer], spec, True)}


PAIRS = {
    "activation": [lambda: mlp(), lambda: mlp(activation=jax.nn.softplus)],
    "final activation": [
        lambda: mlp(final_activation=lambda x: x),
        lambda: mlp(final_activation=lambda x: 2 * x),
    ],
    "in and out of jax.nn": [
        lambda: mlp(activation=jax.nn.relu),
        lambda: mlp(activation=jax.nn.relu6),
    ],
    "activation or its derivative": [
        lambda: mlp(activation=jnp.tanh),
        lambda: mlp(activation=jax.grad(jnp.tanh)),
    ],
    "derivative of an activation": [
        lambda: mlp(activation=jax.jit(jax.grad(jnp.tanh))),
        lambda: mlp(activation=jax.jit(jax.grad(jnp.sin))),
    ],
    "rule of a derivative": [
        lambda: mlp(activation=_twice),
        lambda: mlp(activation=_twice_with_another_rule),
    ],
    "width with equal shapes": [lambda: same_shapes(3), lambda: same_shapes(4)],
    "static field": [
        lambda: {"model": Marked(linear(), 1)},
        lambda: {"model": Marked(linear(), 2)},
    ],
    "closure in the model": [lambda: opened(1.0), lambda: opened(2.0)],
    "initial values": [lambda: initial(0.0), lambda: initial(1e-12)],
    "initial values, by the seed": [
        lambda: {"model": network(0)},
        lambda: {"model": network(1)},
    ],
    "initial state": [lambda: state(0.0), lambda: state(0.5)],
    "frozen values": [
        lambda: opened(1.0, filter_spec=lambda x: eqx.is_array(x) and x.ndim == 2),
        lambda: {
            **opened(1.0, filter_spec=lambda x: eqx.is_array(x) and x.ndim == 2),
            "model": Open(linear(), 2 * jnp.ones(2), opened(1.0)["model"].function),
        },
    ],
    "callable object": [
        lambda: augmented(Scaled(1.0)),
        lambda: augmented(Scaled(2.0)),
    ],
    "object with slots": [
        lambda: augmented(Slotted(1.0)),
        lambda: augmented(Slotted(2.0)),
    ],
    "bound method": [
        lambda: augmented(Scaled(1.0).method),
        lambda: augmented(Scaled(2.0).method),
    ],
    "jitted method": [
        lambda: augmented(jax.jit(Scaled(1.0).method)),
        lambda: augmented(jax.jit(Scaled(2.0).method)),
    ],
    "global": [with_global(1.0, reads_a_global), with_global(2.0, reads_a_global)],
    "global of a function that is called": [
        with_global(1.0, reads_through_another),
        with_global(2.0, reads_through_another),
    ],
    "number in a module": [
        with_global(1.0, reads_a_module),
        with_global(2.0, reads_a_module),
    ],
    "global under jit": [
        with_global(1.0, jax.jit(reads_a_global)),
        with_global(2.0, jax.jit(reads_a_global)),
    ],
    "nested function": [
        lambda: augmented(nested(1.0)),
        lambda: augmented(nested(2.0)),
    ],
    "default": [
        lambda: augmented(with_default(1.0)),
        lambda: augmented(with_default(2.0)),
    ],
    "keyword": [
        lambda: augmented(with_keyword(1.0)),
        lambda: augmented(with_keyword(2.0)),
    ],
    "attribute of a function": [
        lambda: augmented(with_attribute(1.0)),
        lambda: augmented(with_attribute(2.0)),
    ],
    "partial": [
        lambda: augmented(functools.partial(scaled, rate=1.0)),
        lambda: augmented(functools.partial(scaled, rate=2.0)),
    ],
    "partial of JAX": [
        lambda: augmented(jax.tree_util.Partial(scaled, rate=1.0)),
        lambda: augmented(jax.tree_util.Partial(scaled, rate=2.0)),
    ],
    "decorator": [
        lambda: augmented(scaling(1.0)(reads_a_global)),
        lambda: augmented(scaling(2.0)(reads_a_global)),
    ],
    "constant of a lambda": [
        lambda: augmented(lambda x, key: 1.0 * x),
        lambda: augmented(lambda x, key: 2.0 * x),
    ],
    "function of a package": [
        lambda: augmented(lambda x, key: jnp.sin(x)),
        lambda: augmented(lambda x, key: jnp.cos(x)),
    ],
    "operation": [
        lambda: augmented(lambda x, key: x + x),
        lambda: augmented(lambda x, key: x * x),
    ],
    "order of arguments": [
        lambda: augmented(functools.partial(lambda x, key, a, b: a - b, a=X[0], b=X[1])),
        lambda: augmented(functools.partial(lambda x, key, b, a: a - b, a=X[0], b=X[1])),
    ],
    "augmentation or none": [
        lambda: {},
        lambda: augmented(lambda x, key: x),
    ],
    "own loss's code": [
        lambda: {"loss": loss_of(1)},
        lambda: {"loss": loss_of(2)},
    ],
    "loss's reduction": [
        lambda: {"loss": gnlin.SquaredError(reduction="sum")},
        lambda: {"loss": gnlin.SquaredError(reduction="mean")},
    ],
    "own solver's code": [
        lambda: {"solver": solver_of(1)},
        lambda: {"solver": solver_of(2)},
    ],
    "own solver or the library's": [
        lambda: damped(0.3),
        lambda: {"solver": solver_of(1)},
    ],
    "search": [
        lambda: {"solver": gnlin.DampedGaussNewton(0.3, search=optx.LearningRate(0.5))},
        lambda: {"solver": gnlin.DampedGaussNewton(0.3, search=optx.LearningRate(0.6))},
    ],
    "schedule": [
        lambda: damped(optax.exponential_decay(1.0, 10, 0.5)),
        lambda: damped(optax.exponential_decay(1.0, 10, 0.6)),
    ],
    "joined schedule": [lambda: damped(cosine(10)), lambda: damped(cosine(11))],
    "own schedule": [
        lambda: damped(lambda step: 1.0 / (1 + step)),
        lambda: damped(lambda step: 1.0 / (2 + step)),
    ],
    "optimiser's rate": [
        lambda: descent(optax.adam(1e-3)),
        lambda: descent(optax.adam(2e-3)),
    ],
    "optimiser": [
        lambda: descent(optax.adam(1e-3)),
        lambda: descent(optax.adamax(1e-3)),
    ],
    "chained optimisers": [
        lambda: descent(optax.chain(optax.clip(1.0), optax.sgd(1e-3))),
        lambda: descent(optax.chain(optax.clip(2.0), optax.sgd(1e-3))),
    ],
    "optimiser's schedule": [
        lambda: descent(optax.sgd(cosine(10))),
        lambda: descent(optax.sgd(cosine(11))),
    ],
    "metric": [
        lambda: metric(lambda f, t: jnp.std(f)),
        lambda: metric(lambda f, t: jnp.mean(f)),
    ],
    "trained leaves": [lambda: trained(0), lambda: trained(1)],
    "curvature_batch_size": [
        lambda: {**damped(0.3), "curvature_batch_size": 6},
        lambda: {**damped(0.3), "curvature_batch_size": 7},
    ],
    "batch_size": [lambda: {"batch_size": 4}, lambda: {"batch_size": 3}],
    "key": [
        lambda: {"key": jax.random.key(0)},
        lambda: {"key": jax.random.key(1)},
    ],
    "data": [lambda: {"data": (X, T)}, lambda: {"data": (X, T + 1e-9)}],
    "dtype of the data": [
        lambda: {"data": (X, T)},
        lambda: {"data": (X, T.astype(jnp.float32))},
    ],
    "list of batches": [
        lambda: {"data": BATCHES},
        lambda: {"data": [*BATCHES[:2], (X[8:], T[8:] + 1e-9)]},
    ],
    "function of the epoch": [
        lambda: {"data": lambda epoch: BATCHES},
        lambda: {"data": lambda epoch: BATCHES[::-1]},
    ],
}


def sentence(folder, arguments):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        begin(folder, resume=True, **arguments)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    message = str(caught.value)
    assert message.startswith(
        f"{folder}{os.sep}step-000000000000.gnlin belongs to another run"
    )
    assert message.endswith("; pass the arguments of that run, or another folder.")
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("name", PAIRS)
def test_changed_is_refused_and_unchanged_is_not(name, tmp_path):
    first, second = PAIRS[name]
    begin(tmp_path, **first())
    sentence(tmp_path, second())
    begin(tmp_path, resume=True, **first())


def test_the_sentence_names_what_has_changed(tmp_path):
    begin(tmp_path, **mlp())
    words = sentence(tmp_path, mlp(activation=jax.nn.relu))
    assert "its network.activation is jax" in words
    assert "here it is jax._src.nn.functions.relu;" in words
    words = sentence(tmp_path, {"model": network(1)})
    assert "its initial parameters' checksum is" in words


#
# The same identity in every process
#


class Noisy:
    """A value that differs between any two processes."""

    def __init__(self):
        self.file = sys.stderr
        self.names = {"one", "two", "three", "four"}
        self.sentinel = object()
        self.itself = self
        self.path = ROOT


@dataclasses.dataclass
class Plain:
    kind: Kind
    pattern: re.Pattern


def _many():
    def recursive(n):
        return recursive(n - 1) if n in {"one", "two", "three"} else Noisy

    @jax.jit
    def uses_them(x):
        return recursive(x), Kind.FIRST, NOISY, os.environ, missing  # noqa: F821

    return [
        recursive,
        uses_them,
        Noisy(),
        Plain(Kind.FIRST, re.compile("a+")),
        Kind,
        {1: 2}.get,
        range(3),
        functools.lru_cache(reads_a_global),
        ravel_pytree({"a": X, "b": T})[1],
        jax.tree.structure(network()),
        jax.make_jaxpr(jnp.tanh)(1.0),
        jax.nn.gelu,
        np.exp,
        jnp.float32,
        optax.inject_hyperparams(optax.adam)(1e-3),
        optax.chain(optax.clip(1.0), optax.sgd(cosine(10))),
        eqx.filter_jit(reads_through_another),
        eqx.nn.make_with_state(Normalised)(jax.random.key(2)),
        gnlin.LevenbergMarquardt(),
        gnlin.DampedGaussNewton(lambda step: 0.1, search=optx.BacktrackingArmijo()),
        *(part for pair in PAIRS.values() for part in pair[0]().values()),
    ]


NOISY = Noisy()


def test_the_same_in_every_process():
    """The order of sets and the addresses of objects differ between processes."""
    script = (
        "import sys, os; ballast = [object() for _ in range(int(sys.argv[1]))];"
        "os.environ['OF_THIS_PROCESS'] = sys.argv[1];"
        "import test_fit_identity as t;"
        "print(*map(t.described, t._many()), sep='\\n')"
    )
    found = []
    for seed in ("1", "3333"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        }
        child = subprocess.run(
            [sys.executable, "-c", script, seed],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(child.stdout.splitlines())
    assert len(found[0]) > 60
    for left, right in zip(*found, strict=True):
        assert left == right
        assert not re.search("0x[0-9a-f]{6}", left)


def test_self_referencing_arguments():
    loop = []
    loop.append(loop)
    assert described(loop) == "list(...)"


def test_an_object_met_many_times_is_looked_at_once():
    tree = (1.0,)
    for _ in range(50):
        tree = (tree, tree)
    assert len(described(tree)) < 200


def test_a_variable_without_a_value():
    def function():
        return later

    if function is None:
        later = 1
    assert described(function).startswith("test_a_variable_without")


def test_a_check_of_arguments_changes_nothing():
    jaxtyping = pytest.importorskip("jaxtyping")
    beartype = pytest.importorskip("beartype")

    def function(x: jax.Array) -> jax.Array:
        return 2 * x

    checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)
    assert described(function) == described(checked)
    assert described(function) == described(beartype.beartype(function))
