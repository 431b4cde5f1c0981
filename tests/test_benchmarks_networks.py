"""The benchmarks' convolutional networks, and the digits that they classify."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import correlate
from sklearn.datasets import load_digits

from benchmarks.data import digits
from benchmarks.networks.cnn import digits_cnn, lenet, max_pool, smooth_digits_cnn


def sizes(layers):
    """Parameters of each layer."""
    arrays = (jax.tree.leaves(eqx.filter(layer, eqx.is_array)) for layer in layers)
    return [sum(array.size for array in of_layer) for of_layer in arrays]


#
# Networks
#


def test_lenet_has_the_published_size():
    network = lenet(jax.random.key(0))
    assert sizes(network.convolutions) == [3_800, 62_550]
    assert sizes(network.dense) == [150_120, 10_164, 850]
    assert sizes([network]) == [227_484]


def test_digits_cnn_has_the_size_that_it_is_said_to():
    network = digits_cnn(jax.random.key(0))
    assert sizes(network.convolutions) == [160, 2_320]
    assert sizes(network.dense) == [3_120, 490]
    assert sizes([network]) == [6_090]


def test_smooth_digits_cnn_has_the_size_that_it_is_said_to():
    network = smooth_digits_cnn(jax.random.key(0))
    assert sizes(network.convolutions) == [160, 4_640]
    assert sizes(network.dense) == [1_290]
    assert sizes([network]) == [6_090]


@pytest.mark.parametrize(
    ("make", "image", "num_classes"),
    [
        (lenet, (3, 32, 32), 10),
        (lambda key: lenet(key, 4, (1, 28, 28), 7), (1, 28, 28), 7),
        (digits_cnn, (1, 8, 8), 10),
        (smooth_digits_cnn, (1, 8, 8), 10),
        (lambda key: smooth_digits_cnn(key, 5), (1, 8, 8), 5),
    ],
)
def test_networks_are_of_one_example(make, image, num_classes):
    network = make(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, *image))
    outputs = jax.vmap(network)(images)
    assert outputs.shape == (2, num_classes)
    np.testing.assert_allclose(outputs[1], network(images[1]), rtol=1e-12)


def relu(x):
    return np.maximum(x, 0)


def literal(network, image, padding, activation):
    """The network, by SciPy's correlations and a loop over windows."""
    for layer in network.convolutions:
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
    ("network", "image", "padding", "activation"),
    [
        (lenet(jax.random.key(0), 2, (3, 16, 16), 4), (3, 16, 16), 0, relu),
        (digits_cnn(jax.random.key(0)), (1, 8, 8), 1, relu),
        (smooth_digits_cnn(jax.random.key(0)), (1, 8, 8), 1, np.tanh),
    ],
)
def test_networks_against_a_literal_loop(network, image, padding, activation):
    image = jax.random.normal(jax.random.key(1), image)
    expected = literal(network, np.asarray(image), padding, activation)
    np.testing.assert_allclose(network(image), expected, rtol=1e-12)


@pytest.mark.parametrize("window", [2, 3])
def test_pooling_agrees_with_reduce_window(window):
    x = jax.random.normal(jax.random.key(0), (2, 6, 12))
    reference = eqx.nn.MaxPool2d(window, stride=window)
    ours, pull_back = jax.vjp(lambda x: max_pool(x, window), x)
    theirs, their_pull_back = jax.vjp(reference, x)
    np.testing.assert_array_equal(ours, theirs)
    cotangent = jax.random.normal(jax.random.key(1), ours.shape)
    np.testing.assert_array_equal(pull_back(cotangent)[0], their_pull_back(cotangent)[0])


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


def test_a_stratified_split_is_spread_through_the_file():
    labels = np.tile([1, 0], 8)
    train, test = digits.stratified_split(labels, num_test=4)
    assert list(test) == [0, 1, 8, 9]
    assert sorted([*train, *test]) == list(range(16))


def partition(flat):
    """All images and labels, the training ones first."""
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


def test_both_shapes_are_of_the_same_images():
    (flat, labels), (square, same_labels) = partition(flat=True), partition(flat=False)
    np.testing.assert_array_equal(flat, square.reshape(-1, 64))
    np.testing.assert_array_equal(labels, same_labels)
