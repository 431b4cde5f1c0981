"""The benchmarks' networks, and the handwritten digits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import drawn
from scipy.signal import correlate
from sklearn.datasets import load_digits

import gnlin
from benchmarks.data import digits
from benchmarks.data.teachers import TEACHERS
from benchmarks.networks.cnn import (
    digits_cnn,
    lenet,
    max_pool,
    smooth_digits_cnn,
    wide_filtered_digits_cnn,
)
from benchmarks.networks.resnet import Block, resnet18
from benchmarks.networks.transformer import patches, transformer


def sizes(layers):
    """Return the number of parameters of each layer."""
    arrays = (jax.tree.leaves(eqx.filter(layer, eqx.is_array)) for layer in layers)
    return [sum(array.size for array in of_layer) for of_layer in arrays]


def images(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape))


#
# Networks
#


def test_lenet_has_the_published_size():
    network = drawn(lenet)
    assert sizes(network.convolutions) == [3_800, 62_550]
    assert sizes(network.dense) == [150_120, 10_164, 850]
    assert sizes([network]) == [227_484]


def test_size_of_digits_cnn():
    network = drawn(digits_cnn)
    assert sizes(network.convolutions) == [160, 2_320]
    assert sizes(network.dense) == [3_120, 490]
    assert sizes([network]) == [6_090]


def test_wide_filtered_digits_cnn_is_digits_cnn_but_for_its_first_filters():
    network = drawn(wide_filtered_digits_cnn)
    assert network.convolutions[0].weight.shape == (16, 1, 5, 5)
    assert sizes([network]) == [6_090 + 16 * (25 - 9)]


def test_size_of_smooth_digits_cnn():
    network = drawn(smooth_digits_cnn)
    assert sizes(network.convolutions) == [160, 4_640]
    assert sizes(network.dense) == [1_290]
    assert sizes([network]) == [6_090]


@pytest.mark.parametrize(
    ("make", "image", "num_classes"),
    [
        (lenet, (3, 32, 32), 10),
        (lambda key: lenet(key, 4, (1, 28, 28), 7), (1, 28, 28), 7),
        (digits_cnn, (1, 8, 8), 10),
        (wide_filtered_digits_cnn, (1, 8, 8), 10),
        (smooth_digits_cnn, (1, 8, 8), 10),
        (lambda key: smooth_digits_cnn(key, 5), (1, 8, 8), 5),
    ],
)
def test_networks_take_one_example(make, image, num_classes):
    both = lambda net, x: (jax.vmap(net)(x), net(x[1]))
    many, one = eqx.filter_eval_shape(both, drawn(make), images(2, *image))
    assert many.shape == (2, num_classes)
    assert one.shape == (num_classes,)


def relu(x):
    return np.maximum(x, 0)


def literal(network, image, same_size, activation):
    """Compute the network by SciPy's correlations and a loop over windows."""
    for layer in network.convolutions:
        padding = layer.weight.shape[-1] // 2 if same_size else 0
        image = np.pad(image, [(0, 0), (padding, padding), (padding, padding)])
        image = np.concatenate([correlate(image, w, "valid") for w in layer.weight])
        image = activation(image + layer.bias)
        side = image.shape[1] // 2
        windows = [
            [image[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for j in range(side)]
            for i in range(side)
        ]
        image = np.moveaxis(np.max(windows, axis=(3, 4)), 2, 0)
    x = image.ravel()
    for layer in network.dense:
        activated, x = x, layer.weight @ x + layer.bias
        x = activation(x)
    return network.dense[-1].weight @ activated + network.dense[-1].bias


@pytest.mark.parametrize(
    ("make", "image", "same_size", "activation"),
    [
        (lambda key: lenet(key, 2, (3, 16, 16), 4), (3, 16, 16), False, relu),
        (digits_cnn, (1, 8, 8), True, relu),
        (wide_filtered_digits_cnn, (1, 8, 8), True, relu),
        (smooth_digits_cnn, (1, 8, 8), True, np.tanh),
    ],
)
def test_networks_against_a_literal_loop(make, image, same_size, activation):
    network, image = drawn(make), images(*image)
    expected = literal(network, np.asarray(image), same_size, activation)
    found = eqx.filter_jit(network)(image)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("window", [2, 3])
def test_pooling_agrees_with_reduce_window(window):
    reference = eqx.nn.MaxPool2d(window, stride=window)

    @jax.jit
    def run(x):
        found = []
        for pool in (lambda x: max_pool(x, window), reference):
            pooled, pull_back = jax.vjp(pool, x)
            found.append((pooled, pull_back(jnp.cos(pooled))[0]))
        return found

    for ours, theirs in zip(*run(images(2, 6, 12)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_pooling_refuses_a_remainder():
    with pytest.raises(
        ValueError, match="windows of 2 x 2 do not tile an image of 4 x 5"
    ):
        max_pool(jnp.zeros((1, 4, 5)))
    with pytest.raises(ValueError, match="do not tile an image of 9 x 9"):
        lenet(jax.random.key(0), 2, (1, 30, 30))


#
# Digits
#


def test_a_draw_splits_all_and_evenly():
    labels = np.random.default_rng(0).integers(0, 10, 1797)
    parts = digits.drawn(labels, None, 5)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1797))
    assert [len(part) for part in parts] == [1197, 150, 450]
    share = np.bincount(labels) / 1797
    for part in (*parts, parts.train[:100]):
        assert np.abs(np.bincount(labels[part]) - share * len(part)).max() < 2
    few = digits.drawn(labels, 30, 5)
    np.testing.assert_array_equal(few.train, parts.train[:30])
    assert not np.array_equal(digits.drawn(labels, None, 6).test, parts.test)


@pytest.mark.parametrize("name", list(TEACHERS))
def test_classes_of_teachers(name):
    teacher = TEACHERS[name]
    (x, y), (held_out, _), (test_x, test_y) = teacher.draw(40, 1)
    assert x.shape == (40, 30)
    assert (len(held_out), len(test_y)) == (500, 2000)
    a, b, c = x[:, :3].T
    if name == "parity":
        expected = a * b * c
    elif name == "staircase":
        # The teacher has degree 2, so the sign needs no terms of degree 3.
        expected = a + a * b - a * c
        np.testing.assert_array_equal(np.sign(expected), np.sign(a + a * b + a * b * c))
    else:
        expected = np.polynomial.hermite_e.hermeval(a, [0, 0, 0, 1])
    np.testing.assert_array_equal(y, expected > 0)
    # A smaller training set does not change the test set.
    np.testing.assert_array_equal(teacher.draw(7, 1)[2][0], test_x)
    assert teacher.num_functions == {2: 435, 3: 4060}[teacher.degree]


def test_a_stratified_split_is_spread_through_the_file():
    labels = np.tile([1, 0], 8)
    train, test = digits.stratified_split(labels, num_test=4)
    assert list(test) == [0, 1, 8, 9]
    assert sorted([*train, *test]) == list(range(16))


def partition(flat):
    """Return all images and labels, those for training first."""
    (x, labels), (test_x, test_labels) = digits.classification(flat)
    return np.concatenate([x, test_x]), np.concatenate([labels, test_labels])


@pytest.mark.parametrize(("flat", "image"), [(True, (64,)), (False, (1, 8, 8))])
def test_digits_are_classified(flat, image):
    (x, labels), (test_x, test_labels) = digits.classification(flat)
    assert (x.shape, labels.shape) == ((1_347, *image), (1_347,))
    assert (test_x.shape, test_labels.shape) == ((450, *image), (450,))
    assert x.dtype == test_x.dtype == np.float64
    assert (x.min(), x.max()) == (0, 1)
    assert np.issubdtype(labels.dtype, np.integer)
    num_tested = np.bincount(test_labels, minlength=10)
    num_of_class = np.bincount(labels) + num_tested
    assert np.all(np.abs(num_tested - num_of_class * 450 / 1_797) < 1)


def test_each_digit_trains_or_tests_once():
    pixels, labels = load_digits(return_X_y=True)
    theirs = np.column_stack([pixels / 16, labels])
    ours = np.column_stack(partition(flat=True))
    np.testing.assert_array_equal(*(rows[np.lexsort(rows.T)] for rows in (ours, theirs)))


def test_both_shapes_have_the_same_images():
    (flat, labels), (square, same_labels) = partition(flat=True), partition(flat=False)
    np.testing.assert_array_equal(flat, square.reshape(-1, 64))
    np.testing.assert_array_equal(labels, same_labels)


#
# ResNet-18
#


def shapes(make, *arguments):
    """Return the shapes of all trained arrays without computing them."""
    made, _ = eqx.filter_eval_shape(
        eqx.nn.make_with_state(make), jax.random.key(0), *arguments
    )
    arrays = [x for x in jax.tree.leaves(made) if isinstance(x, jax.ShapeDtypeStruct)]
    return [x.shape for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def test_resnet18_has_the_published_size():
    assert sum(map(np.prod, shapes(resnet18))) == 11_173_962
    # 4,800 channels, each with a bias instead of a scale and a shift.
    assert sum(map(np.prod, shapes(resnet18, False))) == 11_169_162
    sides = [shape[-1] for shape in shapes(resnet18) if len(shape) == 4]
    assert (sides.count(3), sides.count(1)) == (17, 3)


@pytest.fixture(scope="module")
def some_digits():
    (x, labels), _ = digits.classification(flat=False)
    return jnp.asarray(x[:64]), jnp.asarray(labels[:64])


@pytest.fixture(scope="module")
def normalised():
    """Return the smallest network, its state, and its outputs for a batch."""
    make = eqx.nn.make_with_state(resnet18)
    network, state = make(jax.random.key(0), True, 2, 10, 1)
    over = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    return network, state, jax.jit(jax.vmap(network, **over))


@pytest.fixture(scope="module")
def unnormalised():
    return drawn(lambda key: resnet18(key, False, 2, 10, 1))


def literal_resnet(network, images):
    """Compute by SciPy's correlations on all images together, normalised by their
    statistics if the network normalises."""

    def convolve(layer, x, stride):
        weight = np.asarray(layer.weight)
        pad = weight.shape[2] // 2
        x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
        x = [[correlate(image, w, "valid")[0] for w in weight] for image in x]
        x = np.array(x)[:, :, ::stride, ::stride]
        if layer.norm is None:
            return x + np.asarray(layer.bias)
        x = x - x.mean(axis=(0, 2, 3), keepdims=True)
        return x / np.sqrt(np.mean(x**2, axis=(0, 2, 3), keepdims=True) + 1e-5)

    x = relu(convolve(network.first, images, 1))
    for i, block in enumerate(network.blocks):
        stride = 2 if i in (2, 4, 6) else 1
        residual = convolve(block.second, relu(convolve(block.first, x, stride)), 1)
        if stride == 2:
            x = convolve(block.shortcut, x, 2)
        x = relu(x + residual)
    return x.mean(axis=(2, 3)) @ network.dense.weight.T + network.dense.bias[None]


@pytest.mark.exhaustive
def test_resnet_against_a_literal_loop(normalised, some_digits):
    network, state, batched = normalised
    images, _ = some_digits
    outputs, _ = batched(images[:16], state)
    assert outputs.shape == (16, 10)
    expected = literal_resnet(network, np.asarray(images[:16]))
    np.testing.assert_allclose(outputs, expected, rtol=1e-9, atol=1e-9)


def test_unnormalised_resnet_against_a_literal_loop(unnormalised, some_digits):
    images = some_digits[0][:4]
    outputs = jax.jit(jax.vmap(unnormalised))(images)
    expected = literal_resnet(unnormalised, np.asarray(images))
    np.testing.assert_allclose(outputs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_no_derivative_of_the_unnormalised_resnet_is_zero(unnormalised, some_digits):
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(network):
        return jnp.sum(jax.vmap(network)(some_digits[0][:4]) ** 2)

    for leaf in jax.tree.leaves(gradient(unnormalised)):
        assert jnp.any(leaf != 0)


def test_without_normalisation_a_block_keeps_the_scale():
    block = Block(jax.random.key(0), 64, 64, 1, normalise=False)
    x = jax.nn.relu(images(8, 64, 8, 8))
    y = jax.jit(jax.vmap(lambda x: block(x, None)[0]))(x)
    # The scale grows by a quarter at most; an unscaled block would nearly treble it.
    assert 0.9 < jnp.mean(y**2) / jnp.mean(x**2) < 1.25


def test_a_resnet_that_normalises_needs_its_state():
    make = eqx.nn.make_with_state(lambda key: resnet18(key, True, 2, 10, 1))
    network, _ = eqx.filter_eval_shape(make, jax.random.key(0))
    with pytest.raises(ValueError, match=r"needs its state: call `model\(x, state\)`"):
        eqx.filter_eval_shape(lambda network: network(jnp.zeros((1, 8, 8))), network)


CROSS_ENTROPY = gnlin.SoftmaxCrossEntropy(reduction="mean")


@pytest.mark.exhaustive
def test_fit_updates_the_statistics_of_the_resnet(normalised, some_digits):
    network, state, batched = normalised
    x, labels = some_digits
    batches = [(x[i : i + 16], labels[i : i + 16]) for i in (0, 16)]
    result = gnlin.fit(
        network,
        batches,
        gnlin.IterativeLinearisation(2, 0.03),
        loss=CROSS_ENTROPY,
        steps=2,
        state=state,
        progress=False,
    )
    assert np.all(np.isfinite(result.history["loss"]))
    assert np.any(result.model.first.weight != network.first.weight)
    # K = 2, so both batches pass through the initial network.
    _, expected = batched(batches[1][0], batched(batches[0][0], state)[1])
    for ours, theirs in zip(*map(jax.tree.leaves, (result.state, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    mean, _ = result.state.get(network.blocks[-1].second.norm.batch_state_index)
    assert np.any(mean != 0)


#
# The transformer
#


@pytest.mark.parametrize(
    ("image", "patch", "width", "depth", "heads", "num_classes"),
    [((1, 8, 8), 4, 16, 1, 2, 10), ((3, 12, 8), 4, 6, 2, 3, 7)],
)
def test_size_of_the_transformer(image, patch, width, depth, heads, num_classes):
    sizes_of_all = image, patch, width, depth, heads, num_classes
    network = drawn(lambda key: transformer(key, *sizes_of_all))
    channels, height, image_width = image
    embedding = (channels * patch**2 + 1) * width
    positions = (height // patch) * (image_width // patch) * width
    norm = 2 * width
    attention = 4 * width**2
    dense = (width + 1) * 4 * width + (4 * width + 1) * width
    last = (width + 1) * num_classes
    size = embedding + positions + depth * (2 * norm + attention + dense) + norm + last
    assert sizes([network]) == [size]
    outputs = eqx.filter_eval_shape(jax.vmap(network), jnp.zeros((2, *image)))
    assert outputs.shape == (2, num_classes)


def test_size_of_the_default_transformer():
    assert sum(map(np.prod, shapes(transformer))) == 26_218


def test_patches_are_squares_row_by_row():
    x = np.arange(2 * 4 * 6).reshape(2, 4, 6)
    expected = [x[:, i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2, 4)]
    np.testing.assert_array_equal(patches(jnp.asarray(x), 2), expected)


@pytest.fixture(scope="module")
def tiny_transformer():
    return drawn(transformer, patch=4, width=16, depth=1, heads=2)


def test_the_transformer_knows_where_a_patch_is(tiny_transformer):
    """Without positions, the order of patches makes no difference."""
    network = tiny_transformer
    without = eqx.tree_at(lambda n: n.positions, network, jnp.zeros((4, 16)))
    x = images(1, 8, 8)
    moved = jnp.roll(x, 4, axis=2)
    outputs = eqx.filter_jit(lambda network, x: network(x))
    assert not np.allclose(outputs(network, x), outputs(network, moved))
    np.testing.assert_allclose(outputs(without, x), outputs(without, moved), rtol=1e-9)


def test_transformer_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="3 x 3 do not tile an image of 8 x 8"):
        transformer(jax.random.key(0), patch=3)
    with pytest.raises(ValueError, match="3 heads do not share a width of 32 evenly"):
        transformer(jax.random.key(0), heads=3)


@pytest.mark.slow
def test_fit_of_the_transformer(tiny_transformer, some_digits):
    result = gnlin.fit(
        tiny_transformer,
        some_digits,
        gnlin.IterativeLinearisation(2, optimiser=optax.adam(1e-2), restart=False),
        loss=CROSS_ENTROPY,
        batch_size=16,
        epochs=12,
        progress=False,
    )
    loss = result.history["loss"]
    assert np.mean(loss[-4:]) < 0.5 * np.mean(loss[:4])
