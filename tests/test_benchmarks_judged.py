"""The evaluation of runs before verdicts, on made-up runs with a known answer."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

import gnlin
from benchmarks import training
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import (
    batch,
    data_scaling,
    filters,
    k_sweep,
    kernel_drift,
    lambda_sweep_cnn,
    lazy_to_rich,
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
    """Make up two looks, with one seed for each final value."""
    return np.array([[start, final] for final in finals])


def trained(point, columns):
    """Make up trained runs, unless the columns say otherwise."""
    shape = next(x.shape[:2] for x in columns.values())
    loss = {"train_loss": np.zeros(shape), "guessing_loss": np.full(shape, 2.0)}
    return Runs(point, loss | columns)


def test_untrained_runs_give_no_verdict():
    # One look of thirty is noisy, and the last run reached its loss too late.
    loss = np.full((4, 30), 0.05)
    loss[1, -1] = 0.12
    loss[2], loss[3, :-1] = np.nan, 1.0
    quick, slow = trained({}, {"train_loss": loss}), trained({}, {"x": np.ones((4, 30))})
    values = np.arange(8.0).reshape(4, 2)
    expected = np.where([[True], [True], [False], [False]], values, np.nan)
    np.testing.assert_array_equal(training.where_trained(values, quick, slow), expected)


def test_full_and_mini_batches_are_compared_look_by_look():
    settings = dataclasses.replace(batch.QUICK, periods=(1, 10))
    apart = {1: 0.0, 10: 0.04}
    runs = [
        trained(
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
            accuracy = looks(*(1 - error))
            return {"test_accuracy": accuracy, "validation_accuracy": 0 * accuracy}
        # The last seed was not solved.
        finished = np.array([[1.0]] * 7 + [[0.0]])
        return {
            "test_accuracy_linearised": 1 - error[:, None],
            "finished": finished,
        }

    runs = [
        trained({"period": period, "num_train": size}, columns(period, size))
        for period in exponent
        for size in sizes
    ]
    alike, worse, at_the_end, by_validation = data_scaling.judge_all(settings, runs)
    assert alike.estimate == pytest.approx(-0.02)
    assert worse.estimate == pytest.approx(0.2)
    assert at_the_end.estimate == pytest.approx(0.2 * np.log10(400))
    # All looks are equally good on the validation images, so the first one counts.
    first = 1 - runs[3]["test_accuracy"][:7, 0]
    last = 2 * 400**-0.3 * np.linspace(1.0, 1.01, 8)[:7]
    assert by_validation.estimate == pytest.approx(np.mean(np.log10(last / first)))
    assert outcomes([alike, worse, at_the_end]) == 3 * ["confirmed"]
    assert [v.num_left_out for v in (alike, worse, at_the_end)] == [0, 1, 1]


def test_filters_travel_and_are_compared_at_the_end():
    settings = dataclasses.replace(filters.large_k_augmented.QUICK, periods=(1, 10))
    way = np.linspace(0, 1, 11)[None, :, None, None, None, None]
    shape = 2, 11, 3, 1, 2, 2
    runs = [
        trained({"period": 1}, {"filters": 7 + np.broadcast_to(way, shape)}),
        trained({"period": 10}, {"filters": 7 + 0.25 * np.broadcast_to(way, shape)}),
    ]
    np.testing.assert_allclose(
        filters.travelled(runs[0])[0], np.sqrt(12) * np.linspace(0, 1, 11)
    )
    *further, way_of_first = filters.judge_all(settings, runs)
    assert [v.estimate for v in further] == pytest.approx([2, 2])
    assert way_of_first.estimate == pytest.approx(0.3)


def test_kernels_that_change_early_or_late():
    settings = dataclasses.replace(kernel_drift.QUICK, periods=(1, 10))
    angles = {1: [1.0, 0.2, 0.2, 0.2, 0.2], 10: [0.1, 0.1, 0.4, 0.1, 0.1]}
    runs = [
        trained(
            {"period": period},
            {
                name: np.full((7, 1), angle)
                for name, angle in zip(kernel_drift.ANGLES, of_period, strict=True)
            },
        )
        for period, of_period in angles.items()
    ]
    verdicts = kernel_drift.judge_all(settings, runs)
    assert [v.estimate for v in verdicts] == pytest.approx(
        [np.log2(5), 1 / 1.8, -2, 1 / 8]
    )
    assert outcomes(verdicts) == 2 * ["confirmed"] + 2 * ["refuted"]


@pytest.mark.exhaustive
def test_kernel_rotation_does_not_depend_on_the_number_of_looks():
    settings = dataclasses.replace(kernel_drift.QUICK, learning_rate=1e-2)
    found = [
        kernel_drift.angles(
            Runs(
                {},
                kernel_drift.train(
                    dataclasses.replace(settings, num_looks=num_looks),
                    {"period": 1},
                    Place(),
                ),
            )
        )
        for num_looks in (5, 25)
    ]
    assert found[0].min() > 1e-3
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_deficits_at_infinite_k_along_each_axis():
    settings = dataclasses.replace(
        lazy_to_rich.QUICK,
        seeds=6,
        scales=(0.1, 1.0, 10.0),
        widths=(4, 40, 400),
        width=40,
    )
    points = lazy_to_rich.points(settings)
    assert points == [
        {"width": 40, "scale": 0.1},
        {"width": 40, "scale": 1.0},
        {"width": 40, "scale": 10.0},
        {"width": 4, "scale": 1.0},
        {"width": 400, "scale": 1.0},
    ]

    def columns(width, scale):
        lazy = math.log10(scale) + math.log10(width / 40)
        error = 0.2 + 1e-3 * np.arange(6)[:, None]
        of = {
            "network_error": error,
            "large_k_error": error + 0.004 * (scale == 10),
            "damped_error": error + 0.02 * (width == 400),
            "endless_error": error + 0.3 - 0.1 * lazy,
        }
        of |= {
            f"{name}_drift": 0 * error + 0.5 - 0.2 * lazy for name in lazy_to_rich.TRAINED
        }
        of |= {f"{name}_train_rmse": 0 * error for name in lazy_to_rich.TRAINED}
        of["damped_train_rmse"][5] = 1.0 if width == 400 else 0.0
        return of

    runs = [Runs(point, columns(**point)) for point in points]
    verdicts = lazy_to_rich.judge_all(settings, runs)
    expected = [-0.1, -0.2, 0.004, 0.004, -0.1, -0.2, 0.0, 0.02]
    assert [v.estimate for v in verdicts] == pytest.approx(expected)
    # The last seed has not fitted the wide network.
    assert [v.num_left_out for v in verdicts] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_dampings_at_which_runs_are_untrained_or_unsolved_are_not_judged():
    settings = dataclasses.replace(
        lambda_sweep_cnn.QUICK, dampings=(1e-3, 0.01, 0.1, 1.0, 10.0), compared=()
    )
    test = 0.1, 0.80, 0.82, 0.84, 0.1
    trained, unsolved = (1, 1, 1, 1, 0), (1, 0, 0, 0, 0)
    runs = [
        Runs(
            {"solved_by": None, "damping": damping},
            {
                "trained": looks(*5 * [a]),
                "unsolved": looks(*5 * [b]),
                "test_accuracy": looks(*(c + 1e-3 * np.arange(5))),
            },
        )
        for damping, a, b, c in zip(
            settings.dampings, trained, unsolved, test, strict=True
        )
    ]
    (verdict,) = lambda_sweep_cnn.judge_all(settings, runs)
    assert verdict.estimate == pytest.approx(0.02)
    assert verdict.outcome == "confirmed"
    for of_damping in runs[2:]:
        of_damping.columns["trained"] *= 0
    (verdict,) = lambda_sweep_cnn.judge_all(settings, runs)
    assert verdict.outcome == NOT_TESTED


def test_methods_are_compared_at_the_strongest_damping():
    settings = dataclasses.replace(
        lambda_sweep_cnn.QUICK, compared=(0.1, 1e-5), adam_steps=(10, 100)
    )
    above = {
        ("Newton", 0): 1.0,
        ("truncated Newton", 0): 1.0,
        ("Adam", 10): 2,
        ("Adam", 100): 1 + 1e-5,
    }
    runs = [
        Runs(
            {"solved_by": by, "steps": steps, "damping": damping},
            {"damped_loss": factor * np.array([[2.0], [3.0], [4.0]])},
        )
        for damping in settings.compared
        for (by, steps), factor in above.items()
    ]
    runs += [
        Runs(
            {"solved_by": None, "damping": damping},
            {"trained": looks(1, 1), "test_accuracy": looks(0.5, 0.5)},
        )
        for damping in settings.dampings
    ]
    verdict = lambda_sweep_cnn.judge_all(settings, runs)[-1]
    assert verdict.estimate == pytest.approx(1e-5)
    assert "0.1" in verdict.claim


def test_the_rise_is_at_the_period_that_is_best_in_the_other_seeds():
    # The best period of each seed is above zero by noise alone, but this estimate is not.
    apart = np.array([[0.3, -0.1, -0.1], [-0.1, 0.3, -0.1], [-0.1, -0.1, 0.3]])
    np.testing.assert_allclose(k_sweep.rise(apart), -0.1)
    risen = apart + np.array([0.0, 1.0, 0.0])
    np.testing.assert_allclose(k_sweep.rise(risen), risen[:, 1])
    # A period that most of the others have not finished is none, and a seed that has not
    # finished the best of the others says nothing.
    some = risen.copy()
    some[:2, 1] = np.nan
    np.testing.assert_allclose(k_sweep.rise(some), [np.nan, np.nan, -0.1])
    assert np.isnan(k_sweep.rise(np.full((3, 2), np.nan))).all()


def test_the_k_sweep_leaves_out_untrained_and_unsolved_runs():
    settings = dataclasses.replace(k_sweep.QUICK, periods=(1.0, 100.0, 1e4, 1e6, 1e8))
    final = {1.0: 0.80, 100.0: 0.805, 1e4: 0.78, 1e6: 0.83, 1e8: 0.6}
    runs = [
        Runs(
            {"solver": k_sweep.DESCENT, "learning_rate": 1e-3, "period": period},
            {
                "test_accuracy": looks(*8 * [end]),
                "trained": looks(*7 * [1], 1 if period != 1e4 else 0),
                "inner_steps": looks(*8 * [max(2_000, period)]),
            },
        )
        for period, end in final.items()
    ]
    runs += [
        Runs(
            {"solver": k_sweep.DAMPED, "learning_rate": 1e-3, "period": period},
            {"test_accuracy": looks(*8 * [end + 0.02]), "trained": looks(*8 * [1])},
        )
        for period, end in final.items()
        if period > 1
    ]
    runs += [
        Runs(
            {"solver": k_sweep.SOLVED, "tolerance": tolerance},
            {
                "test_accuracy": looks(*8 * [end]),
                "trained": looks(*8 * [1]),
                "unsolved": looks(1, *7 * [0]),
            },
        )
        for tolerance, end in zip(settings.solved_to, (0.9, 0.61), strict=True)
    ]
    verdicts = k_sweep.judge_all(settings, runs)
    estimates = [v.estimate for v in verdicts]
    # The training takes 2,000 steps: a tenth of it is longer than 100.
    assert estimates == pytest.approx(2 * [0.005, 0.02, 0.03, -0.2, -0.01, 0.02])
    assert [v.num_left_out for v in verdicts] == 2 * [0, 1, 0, 0, 1, 1]
    assert outcomes(verdicts[:6]) == ["confirmed", "refuted", *4 * ["confirmed"]]
    assert "K = 1e+08, 5e+04 times the training length," in verdicts[3].claim


def swept(settings, final):
    """Make up runs of eight seeds that end at these accuracies by period."""
    steps = looks(*8 * [2_000])
    runs = [
        Runs(
            {"solver": solver, "learning_rate": 1e-3, "period": period},
            {"test_accuracy": looks(*8 * [end]), "inner_steps": steps},
        )
        for solver in (k_sweep.DESCENT, k_sweep.DAMPED)
        for period, end in final.items()
    ]
    return runs + [
        Runs(
            {"solver": k_sweep.SOLVED, "tolerance": tolerance},
            {"test_accuracy": looks(*8 * [0.3]), "unsolved": looks(*8 * [0])},
        )
        for tolerance in settings.solved_to
    ]


def test_the_k_sweep_names_the_periods_that_were_run():
    final = {10.0: 0.8, 20.0: 0.8, 1e3: 0.8, 1e6: 0.3}
    settings = dataclasses.replace(k_sweep.QUICK, periods=tuple(final))
    verdicts = k_sweep.judge_all(settings, swept(settings, final))
    said = [text for v in verdicts for text in (v.claim, v.quantity)]
    assert not any("K = 1 " in text or "K = 1," in text for text in said)
    claim = (
        "K up to 1000, 0.5 times the training length, gives the test accuracy of K = 10"
    )
    assert verdicts[1].claim.startswith(claim)
    assert "between K and K = 10, largest" in verdicts[1].quantity
    assert "less K = 10" in verdicts[3].quantity


def test_a_period_longer_than_a_run_is_not_tested():
    settings = dataclasses.replace(
        k_sweep.QUICK, periods=(1.0, 10.0, 1e6), batch_size=16, num_steps=1_000
    )
    final = {1.0: 0.80, 10.0: 0.80, 1e6: 0.3}
    verdicts = k_sweep.judge_all(settings, swept(settings, final))[:6]
    of_longest = [v for v in verdicts if v.claim.startswith("K = 1e+06")]
    assert outcomes(of_longest) == 2 * [NOT_TESTED]
    assert of_longest[0].note == "K is longer than the 1,000 steps of a run"
    assert verdicts[0].outcome == "confirmed"
    assert verdicts[1].estimate == pytest.approx(0)  # without the longest period


def test_sufficient_number_of_updates():
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
        trained(
            {"period": period},
            dict.fromkeys(names, of_period) | {"probe_1": of_period + 0.485},
        )
        for period, of_period in probed.items()
    ]
    verdicts = linear_probe.judge_all(settings, runs)
    found = [v.estimate for v in verdicts]
    assert found == pytest.approx([-0.15, 0.01, -0.15, 0.01, 1.0, 0.0], abs=1e-12)
    # The share of the first layer begins at 98.5 %.
    untested = [v.outcome.startswith("not tested") for v in verdicts]
    assert untested == [True, True, False, False, False, False]
    runs[1].columns["probe_2"][:, -1] = 0.9
    assert linear_probe.judge_all(settings, runs)[4].estimate == pytest.approx(0.5)


def test_levelling_leaves_the_look_after_a_feature_update_out():
    # Rises by 0.1 a look in the first half of a period, and by 0.05 in the second. The
    # look at its end belongs to the new linearisation.
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
        trained({"period": 1.0}, {"test_accuracy": looks(0.95, 0.96)}),
        trained({"period": 10.0}, {"test_accuracy": looks(0.90, 0.97)}),
        Runs(
            {"period": math.inf},
            {
                "test_accuracy_linearised": np.array([[0.5], [0.6]]),
                "finished": np.array([[1.0], [1.0]]),
            },
        ),
    ]
    alike, within, worse = mnist_k.judge_all(settings, runs)
    # These are the means over the seeds: 0.955 and 0.935.
    assert alike.estimate == within.estimate == pytest.approx(0.02)
    assert worse.estimate == pytest.approx(-0.38)
    assert NOT_TESTED not in outcomes([alike, within, worse])
    for finite in runs[:2]:
        finite.columns["train_loss"] += 1.0
    for data in ("digits", "mnist"):
        of_data = dataclasses.replace(settings, data=data)
        assert set(outcomes(mnist_k.judge_all(of_data, runs))) == {NOT_TESTED}


def test_learning_in_a_period_is_compared_just_before_the_first_update():
    settings = dataclasses.replace(
        mnist_k.QUICK, periods=(1.0, 4.0), num_steps=8, num_looks=8
    )
    steps = np.tile(np.arange(1.0, 9.0), (2, 1))
    accuracy = np.tile([0.2, 0.5, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95], (2, 1))
    of_linearised = np.tile([0.2, 0.4, 0.6, 0.95, 0.95, 0.95, 0.95, 0.95], (2, 1))
    columns = {
        "inner_steps": steps,
        "test_accuracy": accuracy,
        "test_accuracy_linearised": of_linearised,
    }
    runs = [trained({"period": k}, columns) for k in settings.periods]
    *_, learns_less = mnist_k.judge_all(settings, runs)
    assert "learn less" in learns_less.claim
    assert learns_less.estimate == pytest.approx(0.6 - 0.9)


def test_residual_networks_are_judged_by_their_best_and_what_large_k_loses():
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
        trained({"network": n, "period": k}, {"test_accuracy": np.tile(a, (7, 1))})
        for (n, k), a in best.items()
    ]
    verdicts = resnet.judge_all(settings, runs)
    assert [v.estimate for v in verdicts] == pytest.approx([-0.005, -0.25, 0.745])
    assert outcomes(verdicts) == ["confirmed", "refuted", "confirmed"]
    runs[0].columns["train_loss"][:] = 1.0
    plain, _, stable = resnet.judge_all(settings, runs)
    assert plain.outcome == stable.outcome == NOT_TESTED
    assert plain.note.startswith("7 of 7 seeds have no value: plain with K = 1")


def test_solved_problems_are_judged_by_the_closest_solution():
    settings = solved_subproblem.QUICK
    columns = lambda final, trained, **more: {
        "test_accuracy": looks(*8 * [final], start=0.75),
        "validation_accuracy": looks(*8 * [0.2], start=0.9),
        "trained": looks(*trained),
        **more,
    }
    ones = 8 * [1]
    runs = [
        Runs(
            {"solver": "each problem solved", "tolerance": tolerance},
            columns(end, ones, unsolved=looks(*7 * [0], 1)),
        )
        for tolerance, end in zip(settings.tolerances, (0.9, 0.6), strict=True)
    ]
    runs.append(Runs({"solver": "SGD, K = 1"}, columns(0.7, ones)))
    runs.append(Runs({"solver": "Adam"}, columns(0.71, [0, *ones[1:]])))
    verdicts = solved_subproblem.judge_all(settings, runs)
    estimates = [v.estimate for v in verdicts]
    assert estimates == pytest.approx([-0.1, -0.1, 0.0, 0.01])
    assert [v.num_left_out for v in verdicts] == 4 * [1]
    assert verdicts[1].outcome == "confirmed"


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
        10: [1.0, silent, 1.0],  # the second has no verdict
        100: [nan, 1.0, 1.0],  # the first is not finite
    }
    runs = [
        Runs(
            {"period": period, "learning_rate": rate},
            {
                "stable": np.ones((2, 2)),
                "train_loss": looks(loss, loss),
                "guessing_loss": looks(silent, silent),
            },
        )
        for period, of_period in losses.items()
        for rate, loss in zip(settings.learning_rates, of_period, strict=True)
    ]
    largest = stability.largest_stable(settings, runs)
    np.testing.assert_allclose(largest, [[np.nan, 1e-3, 1e-4]] * 2)


def stability_runs(is_stable, periods=(1, 10, 100)):
    """Settings, and runs of seven seeds that are stable where `is_stable` says so."""
    settings = dataclasses.replace(
        stability.QUICK,
        num_train=10,
        periods=periods,
        learning_rates=(1e-3, 1e-2, 1e-1),
    )
    runs = [
        Runs(
            {"period": period, "learning_rate": rate},
            {
                "stable": np.full((7, 2), is_stable(period, rate)),
                "train_loss": looks(*[1] * 7),
                "guessing_loss": looks(*[20] * 7),
            },
        )
        for period in settings.periods
        for rate in settings.learning_rates
    ]
    return settings, runs


def test_divergence_that_depends_on_k_is_found():
    settings, runs = stability_runs(lambda period, rate: period * rate < 0.05)
    depends, tenth, slope = stability.judge_all(settings, runs)
    assert slope.estimate == pytest.approx(-1)
    assert depends.estimate == tenth.estimate == pytest.approx(-2)
    assert outcomes([depends, tenth, slope]) == ["confirmed", "refuted", "refuted"]


def test_a_largest_stable_rate_that_rises_with_k_refutes_that_it_falls():
    settings, runs = stability_runs(lambda period, rate: rate < 0.005 * period**0.5)
    depends, tenth, _ = stability.judge_all(settings, runs)
    assert depends.estimate == pytest.approx(1)
    assert outcomes([depends, tenth]) == ["refuted", "confirmed"]


def test_a_run_that_was_not_stable_has_diverged():
    stable = np.array([[1, 1], [1, 0]])
    columns = {"train_loss": looks(1.0, 1.0), "guessing_loss": looks(9.0, 9.0)}
    diverged = stability.diverged(Runs({}, columns | {"stable": stable}))
    np.testing.assert_array_equal(diverged, [False, True])


def test_a_run_that_only_falls_slowly_has_not_diverged():
    """The loss is still above that of guessing, which is far below the start."""
    columns = {
        "stable": np.ones((5, 2)),
        "first_train_loss": np.full((5, 1), 1.0),
        "train_loss": looks(0.5, 0.999, 1.5, 0.1, np.nan),
        "guessing_loss": looks(*5 * [0.1]),
    }
    diverged = stability.diverged(Runs({}, columns))
    np.testing.assert_array_equal(diverged, [False, False, True, True, True])


@pytest.mark.slow
def test_the_first_loss_is_that_before_training():
    settings = dataclasses.replace(stability.QUICK, seeds=2, num_train=20)
    first = training.first_losses(settings, Place())
    loss = gnlin.SoftmaxCrossEntropy()
    for seed in range(2):
        images, labels = training.load(settings, Place(), seed).train
        outputs = jax.vmap(training.model_of(settings)(jax.random.key(seed)))(images)
        objective = gnlin.authoring.BatchLoss(loss, outputs, labels)
        assert first[seed] == pytest.approx(float(objective.value(outputs)) / 20)


def test_claims_name_the_periods_that_were_run():
    is_stable = lambda period, rate: rate < 0.05
    of = lambda *periods: stability.judge_all(*stability_runs(is_stable, periods))
    depends, tenth, over = of(3, 10, 30)
    assert depends.claim.startswith("K = 30 diverges at learning rates at which K = 3 ")
    assert depends.quantity.endswith("K = 30 less K = 3")
    assert "learning rate of K = 3 is" in tenth.claim
    assert over.claim.startswith("From K = 3 to K = 30 the largest")
    assert "at most a factor of 1.1 " in over.claim
    assert "at most a factor of 1.5 " in of(1, 10, 3_000)[2].claim


def test_the_figure_of_stability_shows_rates_below_the_grid(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, part, **_: drawn.append(self))
    monkeypatch.setattr("benchmarks.figures.write_whole", lambda path, write: write(path))
    made = stability_runs(lambda period, rate: period < 100 and rate < 0.005)
    captions = stability.draw(*made, tmp_path)
    assert "A run takes 20 steps, or 2 feature updates if" in captions["stability"]
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0, 0, -1])
    assert axes.get_ylim()[0] < -1
