"""Some verdicts, recomputed from an experiment's table by pandas and SciPy, without code
of the suite."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks._results import write_table
from benchmarks.experiment import Runs
from benchmarks.experiments import (
    data_scaling,
    k_vs_lambda,
    lambda_sweep,
    large_k_augmented,
    xor_features,
)


SEEDS = 6
rng = np.random.default_rng(7)


def table_of(all_runs, path):
    write_table(path, [row for runs in all_runs for row in runs.rows()])
    return pd.read_csv(path)


def interval(values, statistic=np.mean):
    """Bootstrap in a plain loop, with quantiles at the widened level of Student's t, or
    Student's own interval where this is wider."""
    generator = np.random.default_rng(99)
    n = len(values)
    means = [statistic(generator.choice(values, n)) for _ in range(4_000)]
    quantile = stats.t.ppf(0.025, n - 1) * math.sqrt(n / (n - 1))
    level, estimate = stats.norm.cdf(quantile), statistic(values)
    low, high = np.quantile(means, [level, 1 - level])
    half = -quantile * np.std(means)
    return min(low, estimate - half), max(high, estimate + half)


def check(verdict, values, above, below=math.inf, statistic=np.mean, tolerance=0.1):
    low, high = interval(np.asarray(values), statistic)
    width = high - low
    assert verdict.estimate == pytest.approx(statistic(np.asarray(values)))
    assert (verdict.low, verdict.high) == pytest.approx(
        (low, high), abs=tolerance * width
    )
    within = above < low and high < below
    beyond = high < above or low > below
    expected = "confirmed" if within else "refuted" if beyond else "undecided"
    assert verdict.outcome == expected


def test_large_k_is_nearly_as_accurate(tmp_path):
    settings = dataclasses.replace(large_k_augmented.EMBEDDED, periods=(1, 10))

    def runs(period, mean):
        shape = SEEDS, 4
        accuracy = rng.normal(mean, 0.003, shape)
        columns = {"test_accuracy": accuracy, "validation_accuracy": rng.random(shape)}
        columns["feature_updates"] = np.tile(np.arange(1.0, 5.0), (SEEDS, 1))
        columns |= {"train_loss": np.zeros(shape), "guessing_loss": np.ones(shape)}
        return Runs({"period": period}, columns)

    all_runs = [runs(1, 0.95), runs(10, 0.93)]
    final, stopped, _ = large_k_augmented.judge_all(settings, all_runs)
    table = table_of(all_runs, tmp_path / "table.csv")
    by_run = table.groupby(["period", "seed"])
    last = by_run.last()["test_accuracy"]
    check(final, (last[10] - last[1]).to_numpy(), above=-0.01)
    best = table.loc[by_run["validation_accuracy"].idxmax()]
    best = best.set_index(["period", "seed"])["test_accuracy"]
    check(stopped, (best[10] - best[1]).to_numpy(), above=-0.01)


def test_infinity_scales_worse(tmp_path):
    sizes = 50, 100, 400
    settings = dataclasses.replace(
        data_scaling.EMBEDDED, sizes=sizes, periods=(1.0, 10.0, math.inf)
    )

    def runs(period, size):
        exponent = {1.0: -0.5, 10.0: -0.45, math.inf: -0.3}[period]
        error = size**exponent * rng.uniform(0.9, 1.1, (SEEDS, 3))
        if math.isinf(period):
            columns = {"test_accuracy_linearised": 1 - error[:, :1]}
            columns["finished"] = np.ones((SEEDS, 1))
        else:
            columns = {"test_accuracy": 1 - error, "train_loss": 0 * error}
            columns["validation_accuracy"] = rng.random((SEEDS, 3))
            columns["guessing_loss"] = np.ones((SEEDS, 1))
        return Runs({"period": period, "num_train": size}, columns)

    all_runs = [runs(period, size) for period in settings.periods for size in sizes]
    alike, worse, _, by_validation = data_scaling.judge_all(settings, all_runs)
    table = table_of(all_runs, tmp_path / "table.csv")
    by_run = table.groupby(["period", "num_train", "seed"])
    least = 1 - by_run[["test_accuracy", "test_accuracy_linearised"]].max().max(axis=1)

    def slopes(period):
        errors = least[period].unstack("num_train")
        x = np.log10(errors.columns.to_numpy(float))
        return np.array(
            [stats.linregress(x, np.log10(row)).slope for _, row in errors.iterrows()]
        )

    check(alike, slopes(10.0) - slopes(1.0), above=-0.05, below=0.05)
    check(worse, slopes(math.inf) - slopes(1.0), above=0)
    first = table[(table["period"] == 1) & (table["num_train"] == 400)]
    looks = first.loc[first.groupby("seed")["validation_accuracy"].idxmax()]
    of_one = 1 - looks["test_accuracy"].to_numpy()
    ratio = np.log10(least[math.inf].unstack("num_train")[400].to_numpy() / of_one)
    check(by_validation, ratio, above=0)


def test_alignment_falls_as_k_grows(tmp_path):
    settings = dataclasses.replace(
        xor_features.EMBEDDED, scales=(1.0,), periods=(1.0, 10.0, 100.0, 1e3)
    )

    def runs(solver, period):
        alignment = 0.9 - 0.02 * np.log10(period) + rng.normal(0, 0.02, SEEDS)
        columns = {"alignment": alignment, "weighted_alignment": rng.random(SEEDS)}
        columns["test_accuracy"] = rng.normal(0.9, 0.01, SEEDS)
        point = {"scale": 1.0, "solver": solver, "period": period}
        return Runs(point, columns)

    solvers = xor_features.BY_PERIOD, xor_features.BY_DAMPING
    all_runs = [runs(solver, k) for solver in solvers for k in settings.periods]
    verdict = xor_features.judge_all(settings, all_runs)[0]
    table = table_of(all_runs, tmp_path / "table.csv")
    table = table[table["solver"] == "iterative-linearisation"]
    found = [
        stats.spearmanr(of_seed["period"], of_seed["alignment"]).statistic
        for _, of_seed in table.groupby("seed")
    ]
    check(verdict, found, above=-math.inf, below=0)


@pytest.mark.slow
def test_difference_between_k_steps_and_damping(tmp_path):
    descent, damped = "iterative-linearisation", "damped-gauss-newton"
    seeds = 8
    shape = seeds, 5
    generator = np.random.default_rng(11)

    def runs(task, solver):
        error = 10 ** generator.normal(-1, 0.02, shape)
        dead = generator.uniform(0.1, 0.2, shape)
        if solver == descent and task == "quintic":
            dead = dead + generator.uniform(0, 0.3, shape)
            error = error * 100**dead
        columns = {
            "period": np.broadcast_to([1e6, 1e5, 1e4, 1e3, 10.0], shape),
            "damping": np.broadcast_to([0.1, 1.0, 10.0, 100.0, 1e4], shape),
            # At the last strength this is less than a tenth of lambda.
            "largest_eigenvalue": np.full(shape, 900.0),
            "spectrum": np.broadcast_to(np.logspace(-1, 2.9, 5), (*shape, 5)),
            "guessing_loss": np.full(shape, 1e3),
            "test_error": error,
            "test_mse": error**2,
            "train_loss": error * generator.uniform(1, 3, shape),
            "dead": dead,
            "stable": np.ones(shape, bool),
        }
        return Runs({"task": task, "solver": solver}, columns)

    all_runs = [runs(*point.values()) for point in k_vs_lambda.points(k_vs_lambda.QUICK)]
    judged = k_vs_lambda.judge_all(k_vs_lambda.QUICK, all_runs)
    verdicts = {verdict.claim: verdict for verdict in judged}
    quintic, more_dead, by_dead, by_loss, smooth = (
        verdict
        for claim, verdict in verdicts.items()
        if claim.startswith(("Quintic, squared error: damping", "On the", "With tanh"))
    )
    table = table_of(all_runs, tmp_path / "table.csv")
    table = table[table["damping"] < 1e4].set_index(["task", "seed", "damping", "solver"])

    def both(name, task):
        column = table[name].xs(task).unstack("solver")
        return column[descent].unstack("damping"), column[damped].unstack("damping")

    def excess(task):
        k, damping = both("test_error", task)
        return np.log10(k / damping)

    k_dead, damped_dead = both("dead", "quintic")
    relu, tanh, dead = excess("quintic"), excess("quintic-tanh"), k_dead - damped_dead
    check(quintic, relu.mean(axis=1), above=0)
    check(more_dead, dead.mean(axis=1), above=0)
    k, damping = both("test_error", "digits")
    on_digits = verdicts[
        "Digits, squared error: damping has a smaller test error than K steps of equal "
        "strength"
    ]
    check(on_digits, (k - damping).mean(axis=1), above=0)
    correlations = [
        stats.spearmanr(dead.loc[seed], relu.loc[seed]).statistic for seed in range(seeds)
    ]
    check(by_dead, correlations, above=0.5)
    k_loss, damped_loss = both("train_loss", "quintic")
    loss = k_loss / damped_loss
    correlations = [
        stats.spearmanr(loss.loc[seed], relu.loc[seed]).statistic for seed in range(seeds)
    ]
    check(by_loss, correlations, above=0.5)
    of_seed = np.stack([relu.mean(axis=1), tanh.mean(axis=1)], axis=1)
    left = lambda both: both[:, 0].mean() - 2 * np.abs(both[:, 1].mean())
    check(smooth, of_seed, above=0, statistic=left, tolerance=0.2)

    def largest(errors):
        return np.median(errors[:, 0] / errors[:, 1], axis=0).max()

    squared = "quintic", "quintic-tanh", "digits"
    of_risk = [v for claim, v in verdicts.items() if "risk" in claim]
    for verdict, task in zip(of_risk, squared, strict=True):
        errors = np.stack([each.to_numpy() for each in both("test_mse", task)], axis=1)
        check(verdict, errors, -math.inf, 1.6862, statistic=largest, tolerance=0.2)


@pytest.mark.slow
def test_the_error_falls_with_the_effective_dimension(tmp_path):
    shape = SEEDS, 6
    dampings = np.logspace(-2, 2, 6)
    train = rng.choice([0.05, 0.05, 0.05, 0.2], shape)
    columns = {
        "damping": np.broadcast_to(dampings, shape),
        "train_rmse": train,
        "test_rmse": 10 ** (-0.1 * np.log10(dampings) + rng.normal(0, 0.1, shape)),
        "roughness": rng.uniform(1, 2, shape),
        "effective_dimension": 10 - np.log10(dampings) + rng.normal(0, 1, shape),
    }
    all_runs = [Runs({"interval": name}, columns) for name in lambda_sweep.INTERVALS]
    verdicts = lambda_sweep.judge_all(lambda_sweep.QUICK, all_runs)
    table = table_of(all_runs[:1], tmp_path / "table.csv")
    table = table[table["train_rmse"] <= 0.1]
    of_damping = table.groupby("damping")["seed"].count()
    table = table[table["damping"].isin(of_damping.index[of_damping >= SEEDS / 2])]

    def correlation(runs):
        return stats.spearmanr(runs["test_rmse"], runs["effective_dimension"]).statistic

    of_seed = [correlation(runs) for _, runs in table.groupby("seed") if len(runs) > 2]
    check(verdicts[5], of_seed, above=0.7)
    over_seeds = [correlation(runs) for _, runs in table.groupby("damping")]
    assert verdicts[6].estimate == pytest.approx(np.mean(over_seeds))
