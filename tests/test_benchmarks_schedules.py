"""Schedules of strength, the sweep of beta, and what one feature update is worth: their
runs against runs by hand, and their verdicts on made-up runs with a known answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmarks_judged import outcomes

import gnlin
from benchmarks import own_task, scores, training
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import beta_sweep, kernel_drift, schedules, xor_features


SEEDS = 10


#
# Schedules
#


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("numbers", [(2, 2), (3, 20_000), (10, 1_000), (300, 20_000)])
def test_periods_are_whole_and_come_to_all_steps(name, numbers):
    num_updates, num_steps = numbers
    periods = schedules.SCHEDULES[name](num_updates, num_steps)
    assert len(periods) == num_updates
    assert periods.sum() == num_steps
    assert np.all(periods >= 1)
    assert np.all(periods % 1 == 0)


def test_periods_of_each_schedule():
    of = lambda name: schedules.SCHEDULES[name](4, 85).tolist()
    assert of(schedules.GROWING) == [1, 4, 16, 64]
    assert of(schedules.SHRINKING) == [64, 16, 4, 1]
    assert of(schedules.FIRST) == [1, 1, 1, 82]
    assert of(schedules.LAST) == [82, 1, 1, 1]
    assert sorted(of(schedules.CONSTANT)) == [21, 21, 21, 22]


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", [schedules.STEPS, schedules.DAMPING])
def test_a_scheduled_run_is_one_run(by):
    """K steps are compared with one solver after the other, and damping with gnlin's own
    schedule."""
    settings = dataclasses.replace(
        schedules.QUICK, seeds=2, num_steps=200, updates=(3, 4), num_train=20
    )
    point = {"by": by, "schedule": schedules.GROWING, "updates": 3}
    columns = schedules.train(settings, point, Place())
    periods = schedules.growing(3, 200)
    draw = training.load(settings, Place(), 1)
    model = training.model_of(settings)(jax.random.key(1))
    loss = gnlin.SoftmaxCrossEntropy()
    if by == schedules.STEPS:
        for period in periods.tolist():
            solver = gnlin.IterativeLinearisation(int(period), 1e-3)
            model = gnlin.solve(model, draw.train, solver, loss=loss, max_steps=1).model
    else:
        dampings = jnp.asarray(1 / (1e-3 * periods))
        solver = gnlin.DampedGaussNewton(
            lambda step: dampings[step], form="prox-linear", search=None
        )
        model = gnlin.solve(model, draw.train, solver, loss=loss, max_steps=3).model
    outputs = jax.vmap(model)(draw.train[0])
    expected = float(scores.mean_loss(outputs, draw.train[1]))
    assert columns["train_loss"][1, -1] == pytest.approx(expected, rel=1e-6)
    assert columns["feature_updates"][1, -1] == 3
    if by == schedules.STEPS:
        assert columns["inner_steps"][1, -1] == 200


def scheduled(by, ends, untrained=()):
    """Made-up runs at two numbers of updates, with these accuracies in the end."""
    runs = []
    for schedule, both in ends.items():
        for number, end in zip((3, 10), both, strict=True):
            loss = np.zeros((SEEDS, 1))
            # After a long frozen period three updates do not suffice.
            loss[list(untrained)] = 1.0
            if (schedule, number) == (schedules.LAST, 3):
                loss[:] = 1.0
            columns = {
                "test_accuracy_linearised": np.full((SEEDS, 1), end),
                "train_loss_linearised": loss,
                "guessing_loss": np.ones((SEEDS, 1)),
            }
            point = {"by": by, "schedule": schedule, "updates": number}
            runs.append(Runs(point, columns))
    return runs


def test_schedules_are_compared_at_equal_numbers_of_updates():
    ends = {
        schedules.FIRST: (0.5, 0.6),
        schedules.GROWING: (0.8, 0.88),
        schedules.CONSTANT: (0.7, 0.8),
        schedules.SHRINKING: (0.6, 0.8),
        schedules.LAST: (0.8, 0.84),
    }
    throughout = scheduled(schedules.STEPS, {schedules.FIRST: (0.805, 0.805)})[0]
    all_runs = [
        Runs({"by": schedules.THROUGHOUT}, throughout.columns),
        *scheduled(schedules.STEPS, ends),
        *scheduled(schedules.DAMPING, ends, untrained=(0,)),
    ]
    settings = dataclasses.replace(schedules.QUICK, seeds=SEEDS)
    verdicts = schedules.judge_all(settings, all_runs)
    apart = [-0.2, 0.09, -0.05, 0.04]
    expected = [*apart, 0.5, *apart, 0.45, -0.205, -0.005]
    assert [v.estimate for v in verdicts] == pytest.approx(expected)
    each = ["refuted", "confirmed", "confirmed", "refuted", "confirmed"]
    assert outcomes(verdicts) == [*each, *each, "refuted", "confirmed"]
    assert [v.num_left_out for v in verdicts] == 5 * [0] + 4 * [1] + 3 * [0]


#
# Beta
#


def falling(decades, then=()):
    """Runs whose gradient falls by so many decades in each step, or has these values."""
    logs = -np.cumsum([0.0, *decades])
    gradients = np.tile([*10.0 ** np.concatenate([logs, np.asarray(then)])], (SEEDS, 1))
    steps = np.arange(1, gradients.shape[1] + 1)
    return {
        "gradient_norm": 7 * gradients,
        "passes": np.tile(10 * steps, (SEEDS, 1)),
        "train_loss": np.zeros_like(gradients),
        "guessing_loss": np.ones((SEEDS, 1)),
    }


def test_the_rate_is_that_of_the_last_step_above_rounding():
    runs = Runs({}, falling([0.1, 0.1, 5.0, 3.0, 2.0], then=[-14.5, -14.4]))
    np.testing.assert_allclose(beta_sweep.rate(runs), -2)
    # Steps after the end count as none.
    ended = falling([4.0, 4.5, 1.5, 2.0])
    ended["gradient_norm"][:, -1] = np.nan
    np.testing.assert_allclose(beta_sweep.rate(Runs({}, ended)), -1.5)
    stuck = Runs({}, falling([1.0, 2.0, 4.0]))
    assert np.isnan(beta_sweep.rate(stuck)).all()


def test_the_order_is_that_of_the_last_steps_above_rounding():
    quadratic = Runs({}, falling([0.5, 1.0, 2.0, 4.0, 8.0]))
    np.testing.assert_allclose(beta_sweep.order(quadratic), 2)
    np.testing.assert_allclose(beta_sweep.order(Runs({}, falling(13 * [1.0]))), 1)
    stuck = Runs({}, falling([1.0, 2.0, 4.0]))
    assert np.isnan(beta_sweep.order(stuck)).all()


def test_passes_are_those_before_the_gradient():
    runs = Runs({}, falling(10 * [1.0]))
    np.testing.assert_allclose(beta_sweep.passes(runs), 80)
    assert np.isnan(beta_sweep.passes(Runs({}, falling([1.0])))).all()
    # The best of the others is not the best of the seed itself.
    others = np.array([[10.0, 100.0], [100.0, 10.0], [100.0, 10.0]])
    found = beta_sweep.against_best(np.full(3, 10.0), others)
    np.testing.assert_allclose(found[0], -1)
    assert np.isnan(beta_sweep.against_best(np.ones(1), np.ones((1, 2)))).all()


def test_rates_orders_and_accuracies_are_judged():
    settings = dataclasses.replace(beta_sweep.QUICK, tolerances=(0.1, 0.01, 0.001))
    rng = np.random.default_rng(0)

    def runs(point, decades, accuracy):
        columns = falling(decades) | {
            "test_accuracy": accuracy + rng.normal(0, 1e-3, (SEEDS, 1))
        }
        return Runs(point, columns)

    all_runs = [
        runs({"rule": beta_sweep.FIXED, "tolerance": 0.1}, 14 * [1.1], 0.8),
        runs({"rule": beta_sweep.FIXED, "tolerance": 0.01}, 7 * [2.1], 0.7),
        runs({"rule": beta_sweep.FIXED, "tolerance": 0.001}, 6 * [3.1], 0.6),
        runs({"rule": beta_sweep.WALKER, "exponent": 1.5}, [2, 3, 4.5, 6.75], 0.8),
        runs({"rule": beta_sweep.WALKER, "exponent": 2.0}, [1.5, 3, 6, 12], 0.8),
    ]
    verdicts = beta_sweep.judge_all(settings, all_runs)
    cost = np.log10(3 / 3)  # three steps each
    expected = [-0.1, 1.0, 2.0, 0.5, cost, 0.1]
    assert [v.estimate for v in verdicts] == pytest.approx(expected, abs=2e-3)
    assert outcomes(verdicts) == 6 * ["confirmed"]


@pytest.mark.exhaustive
def test_a_row_of_the_sweep_over_beta_solves_to_the_tolerance():
    """The linear residual of the first step, by NumPy, is within the tolerance."""
    settings = dataclasses.replace(beta_sweep.QUICK, seeds=2, num_steps=1)
    point = {"rule": beta_sweep.FIXED, "tolerance": 0.1}
    columns = beta_sweep.train(settings, point, Place())
    draw = training.load(settings, Place(), 1)
    model = training.model_of(settings)(jax.random.key(1))
    targets = np.eye(10)[np.asarray(draw.train[1])] - 0.1
    residual = np.asarray(jax.vmap(model)(draw.train[0])) - targets
    assert columns["train_loss"][1, 0] == pytest.approx(np.sum(residual**2) / 2)
    kernel = np.asarray(gnlin.TangentKernel(model)(draw.train[0])).reshape(100, 100)
    r = residual.ravel()
    # Conjugate gradients from zero, on the coefficients of the outputs.
    norm = np.sqrt(r @ kernel @ r)
    assert columns["gradient_norm"][1, 0] == pytest.approx(norm)
    left, direction, number = r.copy(), r.copy(), 0
    while np.sqrt(left @ kernel @ left) > 0.1 * norm:
        product = kernel @ direction
        size = (left @ kernel @ left) / (product @ product)
        new = left - size * product
        direction = new + (new @ kernel @ new) / (left @ kernel @ left) * direction
        left, number = new, number + 1
    assert columns["passes"][1, 0] == 2 * (number + 1)


#
# One feature update
#


@pytest.mark.exhaustive
def test_features_after_one_update_and_after_as_many_steps():
    settings = dataclasses.replace(kernel_drift.QUICK, seeds=2, lengths=(40, 7))
    draw = training.load(settings, Place(), 1)
    start = training.model_of(settings)(jax.random.key(1))
    loss = gnlin.SoftmaxCrossEntropy()
    by_hand = {
        kernel_drift.ONE_UPDATE: (gnlin.IterativeLinearisation(40, 1e-3), 1),
        kernel_drift.AS_MANY_STEPS: (gnlin.IterativeLinearisation(1, 1e-3), 40),
    }
    for after, (solver, updates) in by_hand.items():
        columns = kernel_drift.train(settings, {"after": after}, Place())
        np.testing.assert_array_equal(columns["inner_steps"], [[7, 40]] * 2)
        model = gnlin.solve(start, draw.train, solver, loss=loss, max_steps=updates).model
        outputs = jax.vmap(model)(draw.train[0])
        expected = float(scores.mean_loss(outputs, draw.train[1]))
        assert columns["train_loss"][1, 1] == pytest.approx(expected, rel=1e-6)
        kernels = [gnlin.TangentKernel(m)(draw.train[0][:20]) for m in (start, model)]
        cosine = float(gnlin.features.kernel_alignment(*kernels))
        assert np.cos(columns["angle"][1, 1]) == pytest.approx(cosine, rel=1e-6)


@pytest.mark.exhaustive
def test_regression_with_the_kernel_is_that_of_a_gaussian_process():
    settings = dataclasses.replace(kernel_drift.QUICK, num_train=30)
    draw = training.load(settings, Place(), 0)
    model = training.model_of(settings)(jax.random.key(0))
    inputs, labels = draw.train
    targets = jax.nn.one_hot(labels, 10, dtype=float)
    mean = targets.mean(axis=0, keepdims=True)
    kernel = np.asarray(gnlin.TangentKernel(model)(inputs)).reshape(300, 300)
    noise = np.sqrt(kernel_drift.RIDGE * np.mean(np.diag(kernel)))
    posterior = gnlin.predict.posterior(
        model, (inputs, targets - mean), noise=noise, from_zero=True
    )
    outputs = posterior(draw.test[0]).mean + mean
    expected = gnlin.losses.accuracy(outputs, draw.test[1])
    found = kernel_drift.regression_accuracy(model, None, draw)
    assert found == pytest.approx(float(expected))


def test_features_are_judged_at_the_longest_update():
    def runs(after, angles, accuracies):
        columns = {
            "angle": np.tile(angles, (SEEDS, 1)),
            "regression_accuracy": np.tile(accuracies, (SEEDS, 1)),
        }
        return Runs({"after": after}, columns)

    all_runs = [
        runs(kernel_drift.ONE_UPDATE, [0.1, 0.2], [0.5, 0.6]),
        runs(kernel_drift.AS_MANY_STEPS, [0.1, 0.8], [0.5, 0.9]),
    ]
    verdicts = kernel_drift._judge_features(kernel_drift.QUICK, all_runs)
    assert [v.estimate for v in verdicts] == pytest.approx([0.1, -0.3, -2])
    assert outcomes(verdicts) == 3 * ["confirmed"]


@pytest.mark.exhaustive
def test_a_task_with_state_has_features_too(tmp_path):
    from test_benchmarks_own_task import settings_of, STATE, written

    task = written(tmp_path / "my_task.py", STATE)
    settings = dataclasses.replace(settings_of(kernel_drift, task), seeds=1)
    for after in (kernel_drift.ONE_UPDATE, kernel_drift.AS_MANY_STEPS):
        columns = kernel_drift.train(settings, {"after": after}, Place())
        assert np.all(columns["angle"] > 0)
        assert np.all(columns["regression_accuracy"] > 0.3)
    own_task.read.cache_clear()


#
# The alignment of hidden units
#


def test_the_histogram_is_of_the_units_whose_mean_is_judged():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 50, 3))
    found = xor_features.alignments(Runs({}, {"weights": weights}))
    rows = jnp.asarray(weights[..., :2].reshape(-1, 2))
    np.testing.assert_allclose(found, xor_features.with_corners(rows))
    assert found.min() >= np.sqrt(0.5)
