"""Measures of features, compared with formulas written out in NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_problems import Normalised
from jax.flatten_util import ravel_pytree

import gnlin
from gnlin import features


N, C = 5, 2
X = jax.random.normal(jax.random.key(0), (N, 3))
LABELS = jnp.array([0, 1, 1, 0, 1])


def network(seed):
    return eqx.nn.MLP(3, C, 4, 1, activation=jnp.tanh, key=jax.random.key(seed))


ONE, OTHER = network(1), network(2)


@eqx.filter_jit
def dense_rows(model):
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)
    outputs = lambda p: jax.vmap(eqx.combine(unravel(p), static))(X)
    return jax.jacrev(outputs)(flat)


def dense_kernel(model):
    rows = np.asarray(dense_rows(model)).reshape(N * C, -1)
    return rows @ rows.T


def dense_centred(matrix):
    centring = np.kron(np.eye(N) - np.ones((N, N)) / N, np.eye(C))
    return centring @ matrix @ centring


def cosine(a, b):
    return float(np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_the_kernel_of_a_model():
    kernel = gnlin.TangentKernel(ONE)(X)
    assert kernel.shape == (N, C, N, C)
    np.testing.assert_allclose(
        np.reshape(kernel, (N * C, N * C)), dense_kernel(ONE), rtol=1e-10, atol=1e-12
    )

    @eqx.filter_jit
    def run(model):
        lin = features.linearise_model(model, X)
        return lin.outputs, jax.vmap(model)(X), lin.kernel()

    outputs, expected, kernel = run(ONE)
    np.testing.assert_allclose(outputs, expected, rtol=1e-12)
    np.testing.assert_allclose(kernel, dense_kernel(ONE), rtol=1e-10, atol=1e-12)


def test_a_part_of_the_parameters():
    spec = jax.tree.map(lambda _: False, ONE)
    spec = eqx.tree_at(lambda m: m.layers[1].bias, spec, True)
    kernel = gnlin.TangentKernel(ONE, filter_spec=spec)(X)
    expected = np.tile(np.eye(C), (N, N))
    np.testing.assert_allclose(np.reshape(kernel, (N * C, N * C)), expected)


def test_an_output_of_several_arrays_has_no_kernel_by_outputs():
    class Two(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w * x[0], x[1]

    with pytest.raises(ValueError, match="of one array of outputs"):
        gnlin.TangentKernel(Two(jnp.ones(())))(X)


def test_alignment_and_distance_of_kernels():
    a, b = gnlin.TangentKernel(ONE)(X), gnlin.TangentKernel(OTHER)(X)
    dense_a, dense_b = dense_kernel(ONE), dense_kernel(OTHER)
    expected = cosine(dense_centred(dense_a), dense_centred(dense_b))
    assert float(features.kernel_alignment(a, b)) == pytest.approx(expected, rel=1e-9)
    expected = 1 - cosine(dense_a, dense_b)
    assert float(features.kernel_distance(a, b)) == pytest.approx(expected, rel=1e-9)
    assert float(features.kernel_alignment(a, 3 * a)) == pytest.approx(1)
    assert float(features.kernel_distance(a, 3 * a)) == pytest.approx(0, abs=1e-12)


def test_alignment_with_targets():
    kernel = gnlin.TangentKernel(ONE)(X)
    y = np.eye(C)[np.asarray(LABELS)]
    expected = cosine(
        dense_centred(dense_kernel(ONE)), dense_centred(np.outer(y.ravel(), y.ravel()))
    )
    for targets in (LABELS, jnp.asarray(y)):
        found = float(features.target_alignment(kernel, targets))
        assert found == pytest.approx(expected, rel=1e-9)


def test_drift_is_the_relative_change_of_the_kernel():
    @eqx.filter_jit
    def drift(now, then, key, num_probes):
        lins = (features.linearise_model(model, X) for model in (now, then))
        return features.kernel_drift(*lins, key=key, num_probes=num_probes)

    a, b = dense_kernel(OTHER), dense_kernel(ONE)
    expected = np.linalg.norm(a - b) / np.linalg.norm(b)
    key = jax.random.key(3)
    estimate = drift(OTHER, ONE, key, 4000)
    assert float(estimate) == pytest.approx(expected, rel=0.1)
    assert float(drift(ONE, ONE, key, 1)) == 0
    # One probe gives the number computed by hand.
    u = jax.random.normal(jax.random.split(key, 1)[0], (N * C,))
    by_hand = np.linalg.norm((a - b) @ u) / np.linalg.norm(b @ u)
    found = float(drift(OTHER, ONE, key, 1))
    assert found == pytest.approx(by_hand, rel=1e-9)


def test_distance_of_models():
    flat = lambda model: ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0]
    expected = float(np.linalg.norm(flat(ONE) - flat(OTHER)))
    assert float(features.parameter_distance(ONE, OTHER)) == pytest.approx(expected)
    assert float(features.parameter_distance(ONE, ONE)) == 0


def test_which_layers_have_moved():
    moved = features.relative_distances(OTHER, ONE)
    assert jax.tree.structure(moved) == jax.tree.structure(
        eqx.filter(ONE, eqx.is_inexact_array)
    )
    for k in (0, 1):
        now, then = OTHER.layers[k].weight, ONE.layers[k].weight
        expected = np.linalg.norm(now - then) / np.linalg.norm(then)
        assert float(moved.layers[k].weight) == pytest.approx(expected)
    assert all(x == 0 for x in jax.tree.leaves(features.relative_distances(ONE, ONE)))


def test_movement_from_zero_is_infinite():
    zero, one = (jnp.zeros(3), jnp.zeros(2)), (jnp.ones(3), jnp.zeros(2))
    assert list(map(float, features.relative_distances(one, zero))) == [np.inf, 0]


def test_which_layers_move_while_the_last_is_trained():
    spec = jax.tree.map(lambda _: False, ONE)
    spec = eqx.tree_at(lambda m: m.layers[1].weight, spec, True)
    moved = lambda k: lambda now: features.relative_distances(now, ONE).layers[k].weight
    result = gnlin.fit(
        ONE,
        (X, jnp.ones((N, C))),
        gnlin.DampedGaussNewton(1.0),
        filter_spec=spec,
        steps=2,
        progress=False,
        callbacks=gnlin.callbacks.Measure({"first": moved(0), "last": moved(1)}, "step"),
    )
    assert np.all(result.history["first"] == 0)
    then, now = (model.layers[1].weight for model in (ONE, result.model))
    expected = np.linalg.norm(now - then) / np.linalg.norm(then)
    assert result.history["last"][-1] == pytest.approx(float(expected))


def kernel(c, n=9):
    return jnp.einsum("ij,cd->icjd", jnp.eye(n), jnp.eye(c))


@functools.cache
def solved():
    return gnlin.solve(ONE, (X, jnp.zeros((N, C))), max_steps=1)


MISTAKES = {
    "kernels of other outputs": (
        lambda: features.kernel_alignment(kernel(1), kernel(3)),
        r"\(9, 1, 9, 1\) and \(9, 3, 9, 3\)",
    ),
    "kernels of other examples": (
        lambda: features.kernel_distance(kernel(2, 1), kernel(2)),
        r"\(1, 2, 1, 2\) and \(9, 2, 9, 2\)",
    ),
    "part of a kernel": (
        lambda: features.kernel_distance(kernel(2)[:3], kernel(2)[:3]),
        r"\(3, 2, 9, 2\)",
    ),
    "a matrix": (
        lambda: features.kernel_alignment(jnp.eye(3), jnp.eye(3)),
        "`\\(n, c, n, c\\)`",
    ),
    "transposed targets": (
        lambda: features.target_alignment(kernel(3), jnp.ones((3, 9))),
        r"\(9, 3\).* float64 of the shape \(3, 9\)",
    ),
    "a label that is none": (
        lambda: features.target_alignment(kernel(3), jnp.full(9, 3)),
        "labels must lie between 0 and 2, but one is 3",
    ),
    "models of other shapes": (
        lambda: features.parameter_distance(jnp.ones((3, 1)), jnp.ones((1, 3))),
        "same structure and shapes",
    ),
    "layers of other shapes": (
        lambda: features.relative_distances(jnp.ones((3, 1)), jnp.ones((1, 3))),
        "same structure and shapes",
    ),
    "models of other structures": (
        lambda: features.parameter_distance(jnp.ones(3), (jnp.ones(3), jnp.ones(3))),
        "same structure and shapes",
    ),
    "a solution": (
        lambda: features.parameter_distance(solved(), ONE),
        "pass its `.model`",
    ),
    "two solutions": (
        lambda: features.relative_distances(solved(), solved()),
        "pass its `.model`",
    ),
    "other linearisations": (
        lambda: features.kernel_drift(
            features.linearise_model(ONE, X),
            features.linearise_model(ONE, X[:1]),
            key=jax.random.key(0),
        ),
        "outputs must have the same structure and shapes",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("run", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(run, words):
    with pytest.raises(ValueError, match=words) as caught:
        run()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message


def test_targets_of_one_output():
    points = jax.random.normal(jax.random.key(0), (9, 2))
    matrix = (points @ points.T)[:, None, :, None]
    targets = points[:, 0]
    column = features.target_alignment(matrix, targets[:, None])
    assert float(features.target_alignment(matrix, targets)) == float(column)


MEASURES = {"distance": lambda model: features.parameter_distance(model, ONE)}


def measured(every, **changes):
    arguments = {"batch_size": 2, "epochs": 2, "progress": False, **changes}
    result = gnlin.fit(
        ONE,
        (X[:4], jnp.ones((4, C))),
        gnlin.IterativeLinearisation(3, 0.05),
        callbacks=gnlin.callbacks.Measure(MEASURES, every),
        **arguments,
    )
    return result, result.history["distance"]


@pytest.mark.parametrize(
    ("every", "filled"),
    [
        ("step", [0, 1, 2, 3]),
        ("feature_update", [0, 3]),
        ("epoch", [1, 3]),
        (3, [2]),
    ],
)
def test_measures_are_columns_of_the_history(every, filled):
    result, column = measured(every)
    np.testing.assert_array_equal(np.nonzero(np.isfinite(column))[0], filled)
    if filled[-1] == 3:
        assert column[-1] == features.parameter_distance(result.model, ONE)


def test_measures_at_validations():
    data = X[:4], jnp.ones((4, C))
    _, column = measured("validation", validation=data, validate_every=2)
    np.testing.assert_array_equal(np.nonzero(np.isfinite(column))[0], [1, 3])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gnlin.callbacks.Measure({}), "must be functions of the model"),
        (lambda: gnlin.callbacks.Measure({"a": 1}), "must be functions of the model"),
        (lambda: gnlin.callbacks.Measure(MEASURES, "batch"), "`every` must be"),
        (lambda: gnlin.callbacks.Measure(MEASURES, 0), "`every` must be"),
        (lambda: gnlin.callbacks.KernelVelocity(X, "look"), "`every` must be"),
    ],
)
def test_a_bad_measure_is_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_column_that_is_there_already():
    with pytest.raises(ValueError, match="two columns 'loss'"):
        gnlin.fit(
            ONE,
            (X, jnp.ones((N, C))),
            gnlin.GaussNewton(),
            steps=1,
            callbacks=gnlin.callbacks.Measure({"loss": lambda model: 0.0}),
        )


class Models(gnlin.callbacks.Callback):
    """A callback that stores every model of a run."""

    def on_start(self, run):
        self.models = [run.model]

    def on_step(self, run):
        self.models.append(run.model)


def trained(seed=1, **arguments):
    models = Models()
    result = gnlin.fit(
        network(seed),
        (X[:4], jnp.ones((4, C))),
        gnlin.IterativeLinearisation(3, 0.05),
        batch_size=2,
        progress=False,
        callbacks=[models, *arguments.pop("callbacks", ())],
        **arguments,
    )
    return result, models.models


def test_the_kernels_velocity():
    velocity = gnlin.callbacks.KernelVelocity(X, every=2)
    result, models = trained(epochs=3, callbacks=[velocity])
    kernels = [dense_kernel(model) for model in models[::2]]
    expected = [
        (1 - cosine(a, b)) / 2 for a, b in zip(kernels[1:], kernels, strict=False)
    ]
    column = result.history["kernel_velocity"]
    np.testing.assert_allclose(column[1::2], expected, rtol=1e-6, atol=1e-12)
    assert np.all(np.isnan(column[::2]))
    assert min(expected) > 1e-9


def test_the_velocity_of_some_parameters_kernel():
    spec = jax.tree.map(lambda _: False, ONE)
    spec = eqx.tree_at(lambda m: m.layers[1].bias, spec, True)
    velocity = gnlin.callbacks.KernelVelocity(X, filter_spec=spec)
    result, _ = trained(epochs=1, callbacks=[velocity])
    # The kernel of the last layer's biases is the same for all models.
    assert result.history["kernel_velocity"][-1] == pytest.approx(0, abs=1e-12)


def test_the_velocity_of_a_run_that_was_resumed(tmp_path):
    velocity = lambda: [gnlin.callbacks.KernelVelocity(X, every=3)]
    whole, _ = trained(epochs=3, callbacks=velocity())
    trained(epochs=2, callbacks=velocity(), checkpoint=tmp_path)
    resumed, _ = trained(epochs=3, callbacks=velocity(), checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(
        resumed.history["kernel_velocity"], whole.history["kernel_velocity"]
    )


def test_the_distance_between_two_runs():
    other, _ = trained(seed=2, epochs=1)
    there = gnlin.TangentKernel(other.model)(X)
    apart = lambda now: features.kernel_distance(gnlin.TangentKernel(now)(X), there)
    between = gnlin.callbacks.Measure({"apart": apart})
    result, _ = trained(seed=1, epochs=1, callbacks=[between])
    expected = 1 - cosine(dense_kernel(result.model), dense_kernel(other.model))
    assert result.history["apart"][-1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_the_kernel_of_a_model_with_a_state_and_a_key():
    """In inference mode, dropout does nothing and the statistics are fixed."""

    class Both(eqx.Module):
        net: Normalised
        dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, state, *, key):
            out, state = self.net(x, state)
            return self.dropout(out, key=key), state

    net, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    expected = gnlin.TangentKernel(net, state=state)(X)
    np.testing.assert_allclose(gnlin.TangentKernel(Both(net), state=state)(X), expected)
    velocity = gnlin.callbacks.KernelVelocity(X, every=1)
    gnlin.fit(
        net,
        (X, LABELS),
        loss=gnlin.SoftmaxCrossEntropy(),
        state=state,
        batch_size=5,
        steps=2,
        callbacks=[velocity],
        progress=False,
    )
    assert np.all(np.isfinite(velocity.last))


@pytest.mark.parametrize("size", [1.0, 1e20, 1e-22])
def test_the_distance_of_kernels_that_are_nearly_the_same(size):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 60))
    moved = rows + 1e-4 * rng.normal(size=rows.shape)
    both = [
        (size * r @ r.T).astype(np.float32).reshape(20, 2, 20, 2) for r in (rows, moved)
    ]
    a, b = (k.astype(float) / np.linalg.norm(k.astype(float)) for k in both)
    expected = 0.5 * np.sum((a - b) ** 2)
    both = list(map(jnp.asarray, both))
    found = features.kernel_distance(*both)
    np.testing.assert_allclose(found, expected, rtol=0.2)
    assert features.kernel_distance(both[0], both[0]) == 0
    np.testing.assert_allclose(features.kernel_alignment(*both), 1, rtol=1e-5)
