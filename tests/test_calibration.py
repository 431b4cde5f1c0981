"""The expected calibration error and its picture, compared with a loop in NumPy."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import gnlin


ece = gnlin.losses.expected_calibration_error


def by_a_loop(probabilities, labels, num_bins):
    """Return the error, and the accuracy and mean confidence of each bin with
    examples."""
    confidence, likeliest = probabilities.max(-1), probabilities.argmax(-1)
    error, bins = 0.0, []
    for k in range(num_bins):
        inside = (confidence > k / num_bins) & (confidence <= (k + 1) / num_bins)
        if inside.any():
            accuracy = np.mean(likeliest[inside] == labels[inside])
            bins.append((accuracy, confidence[inside].mean()))
            error += inside.mean() * abs(accuracy - confidence[inside].mean())
    return error, np.array(bins)


def drawn(n, classes, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(classes, 0.4), size=n)
    return p, np.array([rng.choice(classes, p=each**2 / sum(each**2)) for each in p])


@pytest.mark.parametrize("num_bins", [1, 15])
def test_the_expected_calibration_error(num_bins):
    p, labels = drawn(500, 4)
    expected, _ = by_a_loop(p, labels, num_bins)
    assert ece(p, labels, num_bins=num_bins) == pytest.approx(expected, rel=1e-12)
    found = jax.jit(lambda *of: ece(*of, num_bins=num_bins))(p, labels)
    assert found == pytest.approx(expected, rel=1e-12)
    # A sequence has one label for each position; negative labels do not count.
    pairs = p.reshape(250, 2, 4), np.where(labels < 3, labels, -1).reshape(250, 2)
    expected, _ = by_a_loop(p[labels < 3], labels[labels < 3], num_bins)
    assert ece(*pairs, num_bins=num_bins) == pytest.approx(expected, rel=1e-12)


def test_two_classes_by_one_probability():
    p, labels = drawn(200, 2)
    expected, _ = by_a_loop(p, labels, 15)
    for right in (labels, labels[:, None], labels.astype(float)):
        assert ece(p[:, 1], right) == pytest.approx(expected, rel=1e-12)
        assert ece(p[:, 1:], right) == pytest.approx(expected, rel=1e-12)
    counted = np.arange(200) < 150
    expected, _ = by_a_loop(p[counted], labels[counted], 15)
    found = ece(p[:, 1], np.where(counted, labels, -1))
    assert found == pytest.approx(expected, rel=1e-12)


def test_certain_and_right_is_calibrated():
    assert ece(jnp.eye(3, dtype=jnp.float32), jnp.arange(3, dtype=jnp.uint8)) == 0
    assert ece(jnp.eye(3), jnp.array([1, 2, 0])) == 1
    assert jnp.isnan(ece(jnp.eye(3), jnp.full(3, -1)))
    # Half precision cannot count beyond 2048.
    p = jnp.full((5000, 1), 0.75, jnp.float16)
    assert ece(p, jnp.arange(5000) % 4 > 0) == pytest.approx(0, abs=1e-6)


def test_the_reliability_diagram():
    plt.switch_backend("Agg")
    p, labels = drawn(500, 4)
    error, bins = by_a_loop(p, labels, 10)
    ax = gnlin.losses.reliability_diagram(p, labels, num_bins=10)
    points, _, _ = ax.containers[1]
    np.testing.assert_allclose(points.get_ydata(), bins[:, 0])
    np.testing.assert_allclose(points.get_xdata(), bins[:, 1])
    shares = [bar.get_height() for bar in ax.containers[0]]
    assert len(shares) == 10
    assert sum(shares) == pytest.approx(1)
    assert f"ECE {100 * error:.1f} %" in ax.get_legend_handles_labels()[0][1].get_label()
    assert gnlin.losses.reliability_diagram(p, labels, ax=ax) is ax
    plt.close("all")


def test_errors_of_arguments():
    p, labels = drawn(20, 3)
    for said, call in {
        "between 0 and 1": lambda: ece(np.log(p), labels),
        "labels must lie between 0 and 2": lambda: ece(p, labels + 1),
        "must be integers, one for each": lambda: ece(p, np.eye(3)[labels]),
        "are int64 of the shape": lambda: ece(p, labels[:5]),
        "`num_bins`": lambda: ece(p, labels, num_bins=0),
    }.items():
        with pytest.raises(ValueError, match=said):
            call()


def test_a_label_of_no_class_is_refused():
    with pytest.raises(ValueError, match="labels must lie between 0 and 1"):
        gnlin.losses.expected_calibration_error(np.array([0.2, 0.7]), np.array([1, 7]))
