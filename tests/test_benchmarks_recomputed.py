"""Three verdicts made again from the table that an experiment writes, by pandas and SciPy
and by none of the suite's own code."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks._results import write_table
from benchmarks.experiment import Runs
from benchmarks.experiments import data_scaling, large_k_augmented, xor_features


SEEDS = 6
rng = np.random.default_rng(7)


def table_of(all_runs, path):
    write_table(path, [row for runs in all_runs for row in runs.rows()])
    return pd.read_csv(path)


def interval(values):
    """Bootstrap by a plain loop, its quantiles at the level of Student's, widened."""
    generator = np.random.default_rng(99)
    n = len(values)
    means = [generator.choice(values, n).mean() for _ in range(20_000)]
    level = stats.norm.cdf(stats.t.ppf(0.025, n - 1) * math.sqrt(n / (n - 1)))
    return np.quantile(means, [level, 1 - level])


def check(verdict, values, above, below=math.inf):
    low, high = interval(np.asarray(values))
    width = high - low
    assert verdict.estimate == pytest.approx(np.mean(values))
    assert (verdict.low, verdict.high) == pytest.approx((low, high), abs=0.1 * width)
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
            columns = {"test_accuracy": 1 - error}
        return Runs({"period": period, "num_train": size}, columns)

    all_runs = [runs(period, size) for period in settings.periods for size in sizes]
    alike, worse, _ = data_scaling.judge_all(settings, all_runs)
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
