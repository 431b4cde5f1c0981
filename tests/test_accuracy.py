"""Accuracy of classifiers, computed by hand, and errors for shapes that would
broadcast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin


CLASSES = jnp.arange(12) % 3
ONE_HOT = jax.nn.one_hot(CLASSES, 3)
LEFT_OUT = CLASSES.at[:6].set(-1)


def test_labels_and_probabilities():
    outputs = jnp.roll(ONE_HOT, 1, axis=1).at[:3].set(ONE_HOT[:3])
    assert gnlin.losses.accuracy(outputs, CLASSES) == 0.25
    assert gnlin.losses.accuracy(outputs, ONE_HOT) == 0.25
    assert gnlin.losses.accuracy(np.asarray(outputs), np.asarray(CLASSES)) == 0.25
    # If two classes are equally probable, either counts as right.
    assert (
        gnlin.losses.accuracy(jnp.eye(3), jnp.array([[0, 1, 1], [0, 1, 1], [0, 1, 1]]))
        == 2 / 3
    )


@pytest.mark.parametrize("dtype", [float, int, bool])
def test_two_classes_by_one_output(dtype):
    outputs = jnp.array([-2.0, 0.1, 3.0, -0.1])
    targets = jnp.array([0, 0, 1, 0]).astype(dtype)
    assert gnlin.losses.accuracy(outputs, targets) == 0.75
    assert gnlin.losses.accuracy(outputs[:, None], targets[:, None]) == 0.75
    assert gnlin.losses.accuracy(outputs[:, None], ~targets.astype(bool)[:, None]) == 0.25


def test_labels_of_two_classes_by_one_output():
    outputs = jnp.array([2.0, 2.0, -1.0, jnp.nan])
    for labels, ignored in (([1, -1, 0, -1], None), ([1, 7, 0, 7], 7)):
        labels = jnp.array(labels)
        for given in ((outputs, labels), (outputs[:, None], labels)):
            assert gnlin.losses.accuracy(*given, ignore_index=ignored) == 1
        column = outputs[:, None], labels[:, None]
        assert gnlin.losses.accuracy(*column, ignore_index=ignored) == 1
    assert gnlin.losses.accuracy(outputs[:3, None], jnp.array([1, 0, 0])) == 2 / 3
    assert gnlin.losses.accuracy(outputs[:1], jnp.array(1)) == 1


def test_sequences_and_ignored_labels():
    outputs, labels = ONE_HOT.reshape(4, 3, 3), CLASSES.reshape(4, 3)
    assert gnlin.losses.accuracy(outputs, labels) == 1
    wrong = outputs.at[:2].set(jnp.nan).at[3, 0].set(jnp.array([0.0, 0.0, 1.0]))
    assert jnp.isnan(gnlin.losses.accuracy(wrong, labels))
    assert gnlin.losses.accuracy(wrong, LEFT_OUT.reshape(4, 3)) == pytest.approx(5 / 6)
    # Eight of the twelve labels are not 2, and half of these are 1.
    right = jnp.zeros((4, 3, 3)).at[..., 1].set(1)
    assert gnlin.losses.accuracy(right, labels, ignore_index=2) == 0.5
    assert jnp.isnan(gnlin.losses.accuracy(outputs, jnp.full((4, 3), -1)))


@pytest.mark.parametrize("targets", [CLASSES, ONE_HOT])
def test_nan_outputs_give_nan_accuracy(targets):
    assert jnp.isnan(
        jax.jit(gnlin.losses.accuracy)(ONE_HOT.at[3, 1].set(jnp.nan), targets)
    )


MISTAKES = {
    "labels in a column": (ONE_HOT, CLASSES[:, None], r"\(12,\).*int64.*\(12, 1\)"),
    "one label": (ONE_HOT, CLASSES[:1], r"\(12,\).*int64 of the shape \(1,\)"),
    "labels as floats": (
        ONE_HOT,
        CLASSES.astype(float),
        "must be integer labels.*are float64",
    ),
    "other classes": (ONE_HOT, jax.nn.one_hot(CLASSES, 5), r"\(12, 3\).*\(12, 5\)"),
    "a label that is none": (ONE_HOT, CLASSES + 1, "between 0 and 2, but one is 3"),
    "a third class by one output": (
        ONE_HOT[:, :1],
        CLASSES,
        "between 0 and 1, but one is 2",
    ),
    "one output and labels": (ONE_HOT[:, :1], CLASSES[:3], r"\(12, 1\).*\(3,\)"),
    "several outputs": ({"a": ONE_HOT, "b": ONE_HOT}, CLASSES, "one array of outputs"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("outputs", "targets", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(outputs, targets, words):
    with pytest.raises(ValueError, match=words) as caught:
        gnlin.losses.accuracy(outputs, targets)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message
