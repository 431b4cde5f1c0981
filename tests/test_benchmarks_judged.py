"""What the experiments compute from their runs before they judge, on runs made up so that
the answer is known."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks import training
from benchmarks.experiment import Runs
from benchmarks.experiments import (
    batch,
    data_scaling,
    filters,
    kernel_drift,
    lambda_sweep_cnn,
    linear_probe,
    mnist_k,
    resnet,
    solved_subproblem,
    stability,
)
from benchmarks.verdicts import NOT_TESTED


def outcomes(verdicts):
    return [verdict.outcome for verdict in verdicts]


def looks(*finals, start=0.1):
    """Of two looks, a seed for each final value."""
    return np.array([[start, final] for final in finals])


def test_full_and_mini_batches_are_compared_look_by_look():
    settings = dataclasses.replace(batch.QUICK, periods=(1, 10))
    apart = {1: 0.0, 10: 0.04}
    runs = [
        Runs(
            {"batch": name, "period": period},
            {"test_accuracy": looks(0.9, 0.9, start=0.5) + (name != "full batch") * by},
        )
        for name in ("full batch", "mini-batches")
        for period, by in apart.items()
    ]
    ends, throughout = batch.judge_all(settings, runs)
    assert ends.estimate == pytest.approx(0.02)
    assert throughout.estimate == pytest.approx(0.02)


def test_data_scaling_recovers_exponents():
    sizes = (50, 100, 200, 400)
    settings = dataclasses.replace(
        data_scaling.QUICK, seeds=8, sizes=sizes, periods=(1.0, 10.0, math.inf)
    )
    exponent = {1.0: -0.5, 10.0: -0.52, math.inf: -0.3}

    def columns(period, size):
        error = 2 * size ** exponent[period] * np.linspace(1.0, 1.01, 8)
        if math.isfinite(period):
            return {"test_accuracy": looks(*(1 - error))}
        # The last seed was not solved.
        finished = np.array([[1.0]] * 7 + [[0.0]])
        return {
            "test_accuracy_linearised": 1 - error[:, None],
            "finished": finished,
        }

    runs = [
        Runs({"period": period, "num_train": size}, columns(period, size))
        for period in exponent
        for size in sizes
    ]
    alike, worse, at_the_end = data_scaling.judge_all(settings, runs)
    assert alike.estimate == pytest.approx(-0.02)
    assert worse.estimate == pytest.approx(0.2)
    assert at_the_end.estimate == pytest.approx(0.2 * np.log10(400))
    assert outcomes([alike, worse, at_the_end]) == 3 * ["confirmed"]
    assert [v.num_left_out for v in (alike, worse, at_the_end)] == [0, 1, 1]


def test_filters_travel_and_are_compared_at_the_end():
    settings = dataclasses.replace(filters.large_k_augmented.QUICK, periods=(1, 10))
    way = np.linspace(0, 1, 11)[None, :, None, None, None, None]
    shape = 2, 11, 3, 1, 2, 2
    runs = [
        Runs({"period": 1}, {"filters": 7 + np.broadcast_to(way, shape)}),
        Runs({"period": 10}, {"filters": 7 + 0.25 * np.broadcast_to(way, shape)}),
    ]
    np.testing.assert_allclose(
        filters.travelled(runs[0])[0], np.sqrt(12) * np.linspace(0, 1, 11)
    )
    *further, way_of_first = filters.judge_all(settings, runs)
    assert [v.estimate for v in further] == pytest.approx([2, 2])
    assert way_of_first.estimate == pytest.approx(0.3)


def test_the_kernel_that_changes_early_and_the_one_that_does_not():
    settings = dataclasses.replace(kernel_drift.QUICK, periods=(1, 10))
    early, late = np.full((7, 10), 1.0), np.full((7, 10), 1.0)
    early[:, :2], late[:, 5] = 0.9, 0.5
    runs = [
        Runs({"period": 1}, {"alignment_with_before": early}),
        Runs({"period": 10}, {"alignment_with_before": late}),
    ]
    assert outcomes(kernel_drift.judge_all(settings, runs)) == ["confirmed", "refuted"]


def test_runs_cut_short_by_damping_are_not_judged():
    settings = dataclasses.replace(
        lambda_sweep_cnn.QUICK, dampings=(0.01, 0.1, 1.0, 10.0)
    )
    train, test = (1.0, 1.0, 1.0, 0.3), (0.80, 0.82, 0.84, 0.1)
    runs = [
        Runs(
            {"damping": damping},
            {
                "train_accuracy": looks(a, a, a, a, a),
                "test_accuracy": looks(*(b + 1e-3 * np.arange(5))),
            },
        )
        for damping, a, b in zip(settings.dampings, train, test, strict=True)
    ]
    (verdict,) = lambda_sweep_cnn.judge_all(settings, runs)
    assert verdict.estimate == pytest.approx(0.02)
    assert verdict.outcome == "confirmed"


def test_updates_that_suffice():
    runs = Runs(
        {"period": 10},
        {
            "test_accuracy": np.array([[0.1, 0.5, 0.9, 0.92], [0.88, 0.5, 0.6, 0.9]]),
            "feature_updates": np.array([[1, 3, 5, 7], [1, 3, 5, 7]]),
        },
    )
    found = training.updates_to(runs, np.array([0.89, 0.87]))
    np.testing.assert_array_equal(found, [5, 1])
    found = training.updates_to(runs, np.array([0.95, 0.90]))
    np.testing.assert_array_equal(found, [8, 7])


def test_probes_are_judged_in_the_first_half_and_at_the_end():
    settings = dataclasses.replace(
        linear_probe.large_k_augmented.QUICK, periods=(1, 10), num_looks=4
    )
    probed = {
        1: np.tile([0.5, 0.9, 0.95, 0.95], (2, 1)),
        10: np.tile([0.4, 0.7, 0.90, 0.96], (2, 1)),
    }
    names = "probe_2", "test_accuracy"
    runs = [
        Runs(
            {"period": period},
            dict.fromkeys(names, of_period) | {"probe_1": of_period + 0.485},
        )
        for period, of_period in probed.items()
    ]
    verdicts = linear_probe.judge_all(settings, runs)
    found = [v.estimate for v in verdicts]
    assert found == pytest.approx([-0.15, 0.01, -0.15, 0.01, 0.0], abs=1e-12)
    # That of the first layer begins at 98.5 %.
    untested = [v.outcome.startswith("not tested") for v in verdicts]
    assert untested == [True, True, False, False, False]


def test_levelling_leaves_the_look_after_a_feature_update_out():
    # Rises by 0.1 a look in the first half of a period and by 0.05 in the second; the
    # look at its end is of the new linearisation.
    steps = np.tile(np.arange(10.0, 130.0, 10.0), (2, 1))

    def runs(accuracy):
        columns = {"test_accuracy_linearised": accuracy, "inner_steps": steps}
        return Runs({"period": 40.0}, columns)

    levels = runs(np.tile([0.3, 0.4, 0.45, 0.2], (2, 3)))
    np.testing.assert_allclose(mnist_k.levelling(levels, 40.0), 0.05)
    np.testing.assert_allclose(mnist_k.levelling(runs(steps), 40.0), 0, atol=1e-12)


def test_infinity_is_compared_with_the_worst_of_the_others():
    settings = dataclasses.replace(
        mnist_k.QUICK, periods=(1.0, 10.0, math.inf), num_steps=10, num_looks=2
    )
    runs = [
        Runs({"period": 1.0}, {"test_accuracy": looks(0.95, 0.96)}),
        Runs({"period": 10.0}, {"test_accuracy": looks(0.90, 0.97)}),
        Runs(
            {"period": math.inf},
            {
                "test_accuracy_linearised": np.array([[0.5], [0.6]]),
                "finished": np.array([[1.0], [1.0]]),
            },
        ),
    ]
    alike, within, *_, worse = mnist_k.judge_all(settings, runs)
    # Of the means over the seeds, 0.955 and 0.935.
    assert alike.estimate == within.estimate == pytest.approx(0.02)
    assert worse.estimate == pytest.approx(-0.38)
    assert NOT_TESTED not in outcomes([alike, within, worse])
    for finite in runs[:2]:
        finite.columns["test_accuracy"] -= 0.5
    assert set(outcomes(mnist_k.judge_all(settings, runs))) == {NOT_TESTED}
    on_mnist = dataclasses.replace(settings, data="mnist")
    assert NOT_TESTED not in outcomes(mnist_k.judge_all(on_mnist, runs))


def test_residual_networks_are_judged_by_their_best_and_their_fall():
    settings = dataclasses.replace(
        resnet.QUICK, periods=(1, 3), normalised_periods=(1, 3)
    )
    best = {
        (resnet.PLAIN, 1): [0.5, 0.91],
        (resnet.PLAIN, 3): [0.5, 0.905],
        (resnet.NORMALISED, 1): [0.5, 0.95],
        (resnet.NORMALISED, 3): [0.7, 0.2],
    }
    runs = [
        Runs({"network": n, "period": k}, {"test_accuracy": np.tile(a, (7, 1))})
        for (n, k), a in best.items()
    ]
    verdicts = resnet.judge_all(settings, runs)
    assert [v.estimate for v in verdicts] == pytest.approx([-0.005, -0.25, 0.5])
    assert outcomes(verdicts) == ["confirmed", "refuted", "confirmed"]
    for runs_of_one in runs[:2]:
        runs_of_one.columns["test_accuracy"][:] = 0.4
    plain, _, stable = resnet.judge_all(settings, runs)
    assert plain.outcome == stable.outcome == NOT_TESTED
    assert plain.note == "the network is not trained: its accuracy is 40.0%"


def test_solved_problems_are_judged_by_their_best():
    final = {"each problem solved": 0.6, "SGD, K = 1": 0.7, "Adam": 0.71}
    runs = [
        Runs({"solver": name}, {"test_accuracy": looks(best, best)})
        for name, best in final.items()
    ]
    verdicts = solved_subproblem.judge_all(solved_subproblem.QUICK, runs)
    assert [v.estimate for v in verdicts] == pytest.approx([-0.1, 0.01])


def test_the_largest_stable_rate_is_below_the_first_that_diverges():
    settings = dataclasses.replace(
        stability.QUICK,
        num_train=10,
        periods=(1, 10, 100),
        learning_rates=(1e-3, 1e-2, 1e-1),
    )
    nan, silent = float("nan"), 10 * math.log(10)
    losses = {
        1: [1.0, 2.0, 3.0],  # all stable
        10: [1.0, silent, 1.0],  # says nothing at the second
        100: [nan, 1.0, 1.0],  # not finite at the first
    }
    runs = [
        Runs(
            {"period": period, "learning_rate": rate},
            {"stable": np.ones((2, 2)), "train_loss": looks(loss, loss)},
        )
        for period, of_period in losses.items()
        for rate, loss in zip(settings.learning_rates, of_period, strict=True)
    ]
    largest = stability.largest_stable(settings, runs)
    np.testing.assert_allclose(largest, [[np.nan, 1e-3, 1e-4]] * 2)


def test_divergence_that_depends_on_k_is_found():
    settings = dataclasses.replace(
        stability.QUICK,
        num_train=10,
        periods=(1, 10, 100),
        learning_rates=(1e-3, 1e-2, 1e-1),
    )
    runs = [
        Runs(
            {"period": period, "learning_rate": rate},
            {
                "stable": np.full((7, 2), period * rate < 0.05),
                "train_loss": looks(*[1] * 7),
            },
        )
        for period in settings.periods
        for rate in settings.learning_rates
    ]
    slope, depends, tenth = stability.judge_all(settings, runs)
    assert slope.estimate == pytest.approx(-1)
    assert depends.estimate == tenth.estimate == pytest.approx(-2)
    assert outcomes([slope, depends, tenth]) == ["refuted", "confirmed", "refuted"]


def test_a_run_that_was_not_stable_has_diverged():
    stable = np.array([[1, 1], [1, 0]])
    columns = {"stable": stable, "train_loss": looks(1.0, 1.0)}
    diverged = stability.diverged(stability.QUICK, Runs({}, columns))
    np.testing.assert_array_equal(diverged, [False, True])
