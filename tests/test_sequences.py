"""Losses of sequences, masks and class weights, compared with NumPy and with runs on only
the targets that count."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import drawn, each_once, numbers

import gnlin
from gnlin._linearisation._objective import BatchLoss


N, T, C = 4, 3, 5
RANDOM = np.random.default_rng(0)
OUTPUTS = RANDOM.normal(size=(N, T, C)) * 3
LABELS = RANDOM.integers(0, C, (N, T))
COUNTS = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]], bool)
MASKED = np.where(COUNTS, LABELS, -1)
WEIGHTS = np.array([0.5, 2.0, 0.0, 1.0, 3.0])
EXAMPLES = np.array([1.0, 0.5, 2.0, 3.0])

LOSSES = {
    "a mask": {"ignore_index": -1},
    "a mask, smoothed": {"ignore_index": -1, "label_smoothing": 0.2},
    "a mask and class weights": {"ignore_index": -1, "class_weights": WEIGHTS},
    "all": {"ignore_index": -1, "class_weights": WEIGHTS, "label_smoothing": 0.2},
    "nothing": {},
}


def by_hand(outputs, labels, weights, ignore_index=None, class_weights=None, smooth=0.0):
    """Return (value, gradient, Hessians) of the mean, target by target."""
    class_weights = np.ones(C) if class_weights is None else class_weights
    value, count = 0.0, 0.0
    gradient, hessian = np.zeros((N, T, C)), np.zeros((N, T, C, C))
    for i, t in np.ndindex(N, T):
        if labels[i, t] == ignore_index:
            continue
        y = (1 - smooth) * np.eye(C)[labels[i, t]] + smooth / C
        y = class_weights * y
        p = np.exp(outputs[i, t]) / np.sum(np.exp(outputs[i, t]))
        value -= weights[i] * y @ np.log(p)
        gradient[i, t] = weights[i] * (y.sum() * p - y)
        hessian[i, t] = weights[i] * y.sum() * (np.diag(p) - np.outer(p, p))
        count += weights[i] * class_weights[labels[i, t]]
    return value / count, gradient / count, hessian / count


@pytest.mark.parametrize(
    ("name", "dtype"), each_once(list(LOSSES), [np.float64, np.float32])
)
def test_a_mean_over_the_targets_that_count(name, dtype):
    options = LOSSES[name]
    loss = gnlin.SoftmaxCrossEntropy(reduction="mean", **options)
    labels = MASKED if "ignore_index" in options else LABELS
    outputs = np.where(COUNTS[..., None], OUTPUTS, np.nan) if options else OUTPUTS
    v = RANDOM.normal(size=OUTPUTS.shape)

    @eqx.filter_jit
    def run(loss, outputs, labels, v, weights):
        shapes = jax.eval_shape(lambda: outputs)
        objective = BatchLoss(loss, shapes, labels, weights)
        factors = jax.vmap(loss.factor)(outputs, labels)
        slopes = jax.vmap(loss.gradient)(outputs, labels)
        whitened, rest = jax.vmap(lambda r, g: r.whiten(g))(factors, slopes)
        back = jax.vmap(lambda r, u: r.transpose_mv(u))(factors, whitened)
        value, gradient = objective.value(outputs), objective.gradient(outputs)
        curved = objective.curvature(outputs)(v)
        fall = objective.decrease(outputs, outputs + v)
        return (value, gradient, curved, fall), (slopes, back + rest)

    arrays = (jnp.asarray(x, dtype) for x in (outputs, v, EXAMPLES))
    outputs, v, weights = arrays
    found, (slopes, again) = run(loss, outputs, jnp.asarray(labels), v, weights)
    assert all(x.dtype == dtype for x in found)
    oracle = functools.partial(
        by_hand,
        labels=labels,
        weights=EXAMPLES,
        ignore_index=loss.ignore_index,
        class_weights=options.get("class_weights"),
        smooth=loss.label_smoothing,
    )
    value, gradient, hessian = oracle(OUTPUTS)
    expected = value, gradient, np.einsum("itcd,itd->itc", hessian, v)
    expected = *expected, value - oracle(OUTPUTS + np.asarray(v))[0]
    tolerance = 1e3 * np.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(again, slopes, rtol=tolerance, atol=tolerance)


def test_labels_and_their_probabilities_have_one_mean():
    one_hot = np.eye(C)[LABELS]
    labels = optax.losses.softmax_cross_entropy_with_integer_labels(OUTPUTS, LABELS)
    shapes = jax.ShapeDtypeStruct(OUTPUTS.shape, float)
    for weights in (None, WEIGHTS):
        loss = gnlin.SoftmaxCrossEntropy(reduction="mean", class_weights=weights)
        own = np.ones((N, T)) if weights is None else weights[LABELS]
        expected = np.average(labels, weights=own)

        @jax.jit
        def values(outputs, *targets, loss=loss):
            return [BatchLoss(loss, shapes, x).value(outputs) for x in targets]

        for found in values(OUTPUTS, LABELS, one_hot):
            assert float(found) == pytest.approx(expected, rel=1e-12)


#
# Runs
#


class Token(eqx.Module):
    """A layer for one target."""

    layer: eqx.nn.Linear

    def __init__(self):
        self.layer = drawn(eqx.nn.Linear, 2, C)

    def __call__(self, x):
        return self.layer(x)


class Sequence(Token):
    """The same layer at each position."""

    def __call__(self, x):
        return jax.vmap(self.layer)(x)


X = RANDOM.normal(size=(N, T, 2))
MASK = gnlin.SoftmaxCrossEntropy(ignore_index=-1)
SOLVERS = {
    "levenberg-marquardt": gnlin.LevenbergMarquardt(),
    "descent": gnlin.IterativeLinearisation(5, 0.1),
}


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(
            solver, id=name, marks=() if name == "descent" else pytest.mark.exhaustive
        )
        for name, solver in SOLVERS.items()
    ],
)
def test_masked_targets_are_left_out(solver):
    mean = gnlin.SoftmaxCrossEntropy(reduction="mean", ignore_index=-1)
    run = functools.partial(gnlin.solve, solver=solver, loss=mean, max_steps=3)
    masked = run(Sequence(), (X, MASKED))
    alone = run(Token(), (X[COUNTS], LABELS[COUNTS]))
    np.testing.assert_allclose(masked.history.loss, alone.history.loss, rtol=1e-7)
    np.testing.assert_allclose(numbers(masked.model), numbers(alone.model), rtol=1e-6)


def test_a_fully_masked_batch_takes_no_step():
    nothing = np.full_like(MASKED, -1)
    data = [(X, MASKED), (X, nothing), (X, MASKED)]
    solver = gnlin.DampedGaussNewton(0.1)
    result = gnlin.fit(Sequence(), data, solver, loss=MASK, epochs=1, progress=False)
    np.testing.assert_array_equal(result.history["step_norm"] > 0, [True, False, True])
    assert np.isnan(result.history["loss"][1])


def test_validation_figures_are_means_over_the_targets_that_count():
    solver = gnlin.IterativeLinearisation(3, 0.1)
    result = gnlin.fit(
        Sequence(),
        (X, MASKED),
        solver,
        loss=MASK,
        batch_size=1,
        steps=2,
        validation=[(X[i : i + 1], MASKED[i : i + 1]) for i in range(N)],
        metrics={"accuracy": gnlin.losses.accuracy},
        progress=False,
    )
    outputs = np.asarray(jax.vmap(result.model)(X))
    expected = by_hand(outputs, MASKED, np.ones(N), ignore_index=-1)[0]
    assert result.history["validation_loss"][-1] == pytest.approx(expected)
    right = np.mean(np.argmax(outputs, axis=-1)[COUNTS] == LABELS[COUNTS])
    assert result.history["validation_accuracy"][-1] == pytest.approx(right)
    assert float(gnlin.losses.accuracy(outputs, jnp.asarray(MASKED))) == pytest.approx(
        right
    )


#
# Examples of weight zero
#

BAD = X.copy()
BAD[1] = np.nan
NO_LABEL = LABELS.copy()
NO_LABEL[1] = -7
ZERO = np.array([1.0, 0.0, 2.0, 0.5])


def without_weight(run, *kinds):
    """Compare `run(data, loss)` for an example of weight zero that has NaNs, and for the
    same example with finite numbers. Both are one program."""
    targets = RANDOM.normal(size=(N, T, C))
    missing = targets.copy()
    missing[1] = np.nan
    cases = {
        "squares": (missing, targets, gnlin.SquaredError()),
        "classes": (NO_LABEL, LABELS, gnlin.SoftmaxCrossEntropy()),
    }
    for given, kept, loss in map(cases.get, kinds):
        finite = run((X, kept, ZERO), loss)
        np.testing.assert_allclose(run((BAD, given, ZERO), loss), finite, rtol=1e-8)


def solved(data, loss):
    solver = gnlin.DampedGaussNewton(0.1)
    solution = gnlin.solve(Sequence(), data, solver, loss=loss, max_steps=2)
    return jnp.append(solution.history.loss, solution.loss)


@pytest.mark.slow
def test_an_example_of_weight_zero_may_be_nan():
    """This holds for a known and for a traced weight."""
    without_weight(solved, "squares")
    without_weight(jax.jit(solved, static_argnums=1), "classes")


def test_an_example_of_weight_zero_in_training():
    def trained(data, loss):
        result = gnlin.fit(
            Sequence(),
            [data],
            gnlin.IterativeLinearisation(2, 0.1),
            loss=loss,
            steps=3,
            validation=data,
            progress=False,
        )
        return [*numbers(result.model), result.history["validation_loss"][-1]]

    without_weight(trained, "squares", "classes")


#
# Mistakes
#


def is_one_sentence(message):
    return message.endswith(".") and "\n" not in message and ". " not in message


MISTAKES = {
    "a label that is none": (MASKED, {}, "one is -1; .* `ignore_index=-1`"),
    "another label": (MASKED - 1, {"ignore_index": -1}, "-2; .*ignore_index=-2"),
    "a fraction": (LABELS, {"ignore_index": 1.5}, "`ignore_index` must be"),
    "a boolean": (LABELS, {"ignore_index": True}, "`ignore_index` must be"),
    "too few weights": (LABELS, {"class_weights": [1, 2]}, "5 classes.* are 2"),
    "negative weights": (LABELS, {"class_weights": [-1.0] * C}, "class_weights"),
    "no weights": (LABELS, {"class_weights": [0.0] * C}, "not all of them zero"),
    "infinite": (LABELS, {"class_weights": [np.inf] * C}, "finite"),
    "a word": (LABELS, {"class_weights": "balanced"}, "'balanced' was given"),
    "a number": (LABELS, {"class_weights": 2.0}, "one number for each class"),
    "of tokens": (LABELS[:, :2], {}, r"shape \(4, 3\).*\(4, 2\)"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("labels", "options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(labels, options, words):
    def run():
        loss = gnlin.SoftmaxCrossEntropy(**options)
        gnlin.solve(Sequence(), (X, labels), gnlin.GaussNewton(), loss=loss)

    with pytest.raises(ValueError, match=words) as caught:
        run()
    assert is_one_sentence(str(caught.value)), str(caught.value)
