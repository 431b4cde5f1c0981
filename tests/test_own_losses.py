"""Losses of one's own whose curvature is zero, losses of groups whose points are drawn,
and losses of several outputs."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import Linear, Scores

import gnlin
from gnlin._training._curvature import without_curvature


RNG = np.random.default_rng(0)
MODEL = eqx.nn.MLP(2, 3, 6, 1, jnp.tanh, key=jax.random.key(0))
X = RNG.normal(size=(30, 2))
Y = np.tanh(X @ RNG.normal(size=(2, 3)))
LEVENBERG = gnlin.LevenbergMarquardt()


class Absolute(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None

    def elementwise(self, output, target):
        return jnp.abs(output - target)


class Pinball(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        error = target - outputs
        return jnp.sum(jnp.maximum(0.9 * error, -0.1 * error))


class Hinge(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        return jnp.sum(jax.nn.relu(1 - outputs * target))


class Rounded(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        return jnp.sum(jax.nn.softplus(-outputs * target))


class Far(gnlin.authoring.AbstractElementwiseLoss):
    """Huber's loss, which has curvature near the targets only."""

    reduction: str | None = None

    def elementwise(self, output, target):
        error = jnp.abs(output - target)
        return jnp.where(error < 1e-6, 0.5 * error**2, 1e-6 * (error - 0.5e-6))


class Partly(gnlin.authoring.AbstractLoss):
    """Linear in one output, and not in the others."""

    reduction: str | None = None

    def value(self, outputs, target):
        return 0.5 * jnp.sum(outputs[:2] ** 2) - outputs[2]


def messages(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in told if "curvature" in str(each.message)]


class Judged(Exception):
    """Ends a run when its loss has been judged, before its program is compiled."""


def sentence(call):
    """Return the warning of a run, or "", without the run."""

    def judge(*args):
        raise Judged(without_curvature(*args))

    with pytest.MonkeyPatch.context() as patch:
        for driver in ("gnlin._solve", "gnlin._fit._fit"):
            patch.setattr(f"{driver}.without_curvature", judge)
        with pytest.raises(Judged) as ended:
            call()
    return str(ended.value)


LOSSES = [
    (Linear(), True),
    (Absolute(), True),
    (Pinball(), True),
    (Hinge(), True),
    (Rounded(), False),
    (Far(), False),
    (Partly(), False),
    (Scores(), False),
]
OF_LOSSES = [(*each, "solve") for each in LOSSES]
OF_DRIVERS = [(*LOSSES[i], driver) for i in (0, 4) for driver in ("fit", "group")]


@pytest.mark.parametrize(
    ("loss", "is_told", "driver"),
    OF_LOSSES + OF_DRIVERS,
    ids=[f"{type(x).__name__}-{driver}" for x, _, driver in OF_LOSSES + OF_DRIVERS],
)
def test_a_loss_without_curvature_is_told(loss, is_told, driver):
    if driver == "solve":
        call = lambda: gnlin.solve(MODEL, (X, Y), loss=loss, max_steps=1)
    elif driver == "fit":
        call = lambda: gnlin.fit(MODEL, (X, Y), loss=loss, steps=1, batch_size=10)
    else:
        group = gnlin.Residuals(lambda m, x: m(x), X, loss=loss, targets=Y)
        call = lambda: gnlin.solve(MODEL, group, max_steps=1)
    told = sentence(call)
    assert bool(told) == is_told
    if is_told:
        assert f"`{type(loss).__name__}`" in told
        assert f"`gnlin.{'fit' if driver == 'fit' else 'solve'}`" in told
        # The dense Hessian at an output
        of_outputs = jax.jit(jax.hessian(loss.value))
        assert not np.any(of_outputs(jnp.asarray(Y[1]), jnp.asarray(Y[0])))


def test_the_sentence_is_a_warning():
    told = messages(lambda: gnlin.solve(MODEL, (X, Y), loss=Linear(), max_steps=1))
    assert len(told) == 1
    told += messages(
        lambda: gnlin.fit(MODEL, (X, Y), loss=Linear(), steps=1, batch_size=10)
    )
    assert [words.startswith("The loss `Linear` has no") for words in told] == [True] * 2


@pytest.mark.parametrize(
    "solver",
    [
        optax.adam(1e-3),
        gnlin.IterativeLinearisation(10, 1e-3),
        gnlin.DampedGaussNewton(1.0, form="prox-linear"),
    ],
    ids=["adam", "iterative", "prox-linear"],
)
def test_solvers_that_use_no_curvature_of_the_loss_are_silent(solver):
    run = lambda: gnlin.solve(MODEL, (X, Y), solver, loss=Linear(), max_steps=1)
    assert not sentence(run)


def test_one_group_with_curvature_is_enough():
    groups = {
        "flat": gnlin.Residuals(lambda m, x: m(x), X, loss=Linear()),
        "other": gnlin.Residuals(lambda m, x: m(x), X),
    }
    assert not sentence(lambda: gnlin.solve(MODEL, groups, max_steps=1))


class Flow(eqx.Module):
    """z = (x - shift) * exp(scale), and the logarithm of its derivative."""

    shift: jax.Array
    scale: jax.Array

    def __call__(self, x):
        return {"z": (x - self.shift) * jnp.exp(self.scale), "log_det": self.scale}


class OfFlow(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        z, log_det = outputs["z"], outputs["log_det"]
        return jnp.sum(0.5 * z**2 + 0.5 * jnp.log(2 * jnp.pi) - log_det)


def test_the_remedy_finds_the_maximum_of_the_likelihood():
    x = 3 + 0.2 * RNG.normal(size=(50, 2))
    flow = Flow(jnp.zeros(2), jnp.zeros(2))
    run = lambda: gnlin.solve(flow, (x, x), loss=OfFlow(), max_steps=100)
    assert not messages(run)
    found = run()
    np.testing.assert_allclose(found.model.shift, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.model.scale, -np.log(x.std(0)), rtol=1e-6)
    entropy = 0.5 * np.log(2 * np.pi * np.e * x.var(0)).sum()
    np.testing.assert_allclose(float(found.loss) / 50, entropy, rtol=1e-8)


#
# Groups
#


def drawn(key):
    return jax.random.normal(key, (64, 2))


def label(x):
    return (x[..., 0] * x[..., 1] > 0).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, jnp.zeros(64, int)])
def test_drawn_points_with_labels(targets):
    model = eqx.nn.MLP(2, 2, 16, 1, jnp.tanh, key=jax.random.key(0))
    loss = gnlin.SoftmaxCrossEntropy()
    call = lambda m, x: m(x)
    group = gnlin.Residuals(call, drawn, loss=loss, targets=targets)
    with pytest.raises(ValueError, match=r"in a generator, `gnlin.fit\(model, batches"):
        gnlin.fit(model, group, steps=5)
    if targets is None:
        return

    def batches():
        for number in range(1000):
            x = drawn(jax.random.key(number))
            yield x, label(x)

    found = gnlin.fit(model, batches(), loss=loss, steps=60)
    x = drawn(jax.random.key(5000))
    assert np.mean(np.asarray(jax.vmap(found.model)(x)).argmax(1) == label(x)) > 0.9


def test_drawn_points_of_squared_error_have_no_targets():
    group = gnlin.Residuals(lambda m, x: m(x), drawn, targets=jnp.zeros((64, 2)))
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="leave its `targets` out, and subtract"):
        gnlin.fit(model, group, steps=1)


def test_classes_of_points_at_hand_are_needed():
    with pytest.raises(ValueError, match="compared with classes: pass `targets`"):
        gnlin.Residuals(lambda m, x: m(x), X, loss=gnlin.SoftmaxCrossEntropy())


def test_a_contrastive_loss_is_a_group_without_data():
    a = RNG.normal(size=(20, 4))
    b = a + 0.05 * RNG.normal(size=a.shape)
    model = eqx.nn.MLP(4, 3, 8, 1, jnp.tanh, key=jax.random.key(0))

    def logits(model, _):
        units = [jax.vmap(model)(x) for x in (a, b)]
        units = [u / jnp.linalg.norm(u, axis=1, keepdims=True) for u in units]
        return units[0] @ units[1].T / 0.2

    loss = gnlin.SoftmaxCrossEntropy()
    group = gnlin.Residuals(logits, loss=loss, targets=np.arange(20))
    found = gnlin.solve(model, group, max_steps=40)

    def info_nce(model):
        s = np.asarray(logits(model, None))
        return np.sum(np.log(np.exp(s).sum(1)) - np.diag(s))

    np.testing.assert_allclose(float(found.loss), info_nce(found.model), rtol=1e-8)
    assert found.loss < 0.5 * info_nce(model)


class Heads(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self):
        first, last = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(2, 8, key=first)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.last = eqx.nn.Linear(8, 3, key=last)

    def __call__(self, x, state):
        x, state = self.norm(jnp.tanh(self.first(x)), state)
        outputs = self.last(x)
        return {"height": outputs[0], "kind": outputs[1:]}, state


class OfBoth(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        squares = 0.5 * (outputs["height"] - target["height"]) ** 2
        return squares - jax.nn.log_softmax(outputs["kind"])[target["kind"]]


@pytest.mark.slow
def test_heads_with_losses_of_their_own_and_a_state():
    model, state = eqx.nn.make_with_state(Heads)()
    targets = {"height": X[:, 0], "kind": np.asarray(label(X))}
    data = X, targets
    found = gnlin.solve(model, data, loss=OfBoth(), state=state, max_steps=20)
    inference = eqx.nn.inference_mode(found.model)
    outputs = jax.vmap(lambda x: inference(x, found.state)[0])(X)
    squares = 0.5 * np.sum((outputs["height"] - X[:, 0]) ** 2)
    logits = np.asarray(outputs["kind"])
    right = logits[np.arange(30), targets["kind"]]
    classes = np.sum(np.log(np.exp(logits).sum(1)) - right)
    np.testing.assert_allclose(float(found.loss), squares + classes, rtol=1e-6)
    assert found.loss < 0.5 * 30 * np.log(2)
