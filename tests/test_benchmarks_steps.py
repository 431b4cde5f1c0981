"""The steps of a run, the loss of its learning rate, and the types of its columns."""

import csv
import dataclasses

import numpy as np
import pytest

from benchmarks import training
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Place, rows_of, Runs
from benchmarks.experiments import (
    batch,
    k_sweep,
    kernel_drift,
    lambda_sweep,
    schedules,
    stability,
)


TINY = dataclasses.replace(
    k_sweep.QUICK,
    seeds=1,
    periods=(1.0,),
    other_learning_rates=(),
    solved_to=(1e-2,),
    num_steps=4,
    most_updates=2,
    num_looks=2,
    num_train=10,
)


@pytest.mark.parametrize(
    ("period", "problems"), [(1, 300), (10, 50), (100, 50), (7, 50), (5, 60)]
)
def test_a_run_of_a_large_k_has_a_least_number_of_problems(period, problems, monkeypatch):
    """N / K problems, or 50: for K = 10 these are 500 steps, where 300 are requested."""
    asked = []
    monkeypatch.setattr(
        training, "full_batch", lambda *given, **more: asked.append(given[3]) or {}
    )
    settings = dataclasses.replace(k_sweep.EMBEDDED, num_steps=300)
    point = {"solver": k_sweep.DESCENT, "learning_rate": 1e-3, "period": float(period)}
    k_sweep._train(settings, point, Place())
    assert asked == [problems]


@pytest.mark.parametrize("experiment", [k_sweep, stability, schedules, kernel_drift])
def test_on_the_full_batch_the_rate_refers_to_the_sum(experiment, tmp_path):
    made = experiment.EXPERIMENT.settings(Options(tmp_path, "embedded"))
    assert (made.batch_size, made.reduction) == (None, "sum")
    for reduction in ("mean", "sum"):
        with pytest.raises(Refusal, match="full batch, where the learning rate"):
            experiment.EXPERIMENT.settings(
                Options(tmp_path, "embedded", reduction=reduction)
            )


def test_on_mini_batches_the_reduction_can_be_chosen(tmp_path):
    for scale, default in (("embedded", "mean"), ("full", "sum")):
        of = lambda **more: batch.EXPERIMENT.settings(
            Options(tmp_path, scale, **more)  # noqa: B023
        )
        assert of().reduction == default
        for reduction in ("mean", "sum"):
            assert of(reduction=reduction).reduction == reduction
    with pytest.raises(Refusal, match="does not use mini-batches"):
        lambda_sweep.EXPERIMENT.settings(Options(tmp_path, "embedded", reduction="sum"))


@pytest.mark.slow
def test_the_sum_is_what_a_run_on_the_full_batch_descends_on():
    """One step of the training parameters, by the gradient of the summed loss."""
    import jax

    import gnlin

    model = training.stateless(TINY)(jax.random.key(0))
    draw = training.load(TINY, Place(), 0)
    rate = 1e-3
    end = lambda reduction, rate: (
        gnlin.solve(
            model,
            draw.train,
            gnlin.IterativeLinearisation(1, rate),
            loss=gnlin.SoftmaxCrossEntropy(reduction=reduction),
            max_steps=1,
        ).model
    )
    columns = training.descend(
        dataclasses.replace(TINY, num_steps=1, num_looks=1),
        Place(),
        1.0,
        rate,
        fewest_updates=1,
    )
    found = float(columns["train_loss"][0, -1])
    expected = float(training.mean_loss(end("sum", rate), None, draw.train))
    other = float(training.mean_loss(end("mean", rate), None, draw.train))
    assert found == pytest.approx(expected, rel=1e-9)
    assert abs(found - other) > 1e-4


@pytest.mark.slow
def test_truth_values_have_one_type_in_all_rows():
    runs = [
        Runs(point, {k: np.asarray(v) for k, v in columns.items()})
        for point in k_sweep.points(TINY)
        for columns in [k_sweep.train(TINY, point, Place())]
    ]
    rows = rows_of(TINY, runs)
    for name in ("trained", "stable"):
        assert {type(row[name]) for row in rows} == {bool}
    drift = dataclasses.replace(
        batch.QUICK, seeds=1, periods=(1,), num_steps=2, num_looks=2
    )
    columns = batch.train(drift, {"batch": batch.MINI_BATCHES, "period": 1}, Place())
    assert columns["stable"].dtype == bool


def test_old_tables_with_numbers_in_place_of_truth_values_are_read(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text(
        "seed,trained,stable,test_accuracy\n0,1.0,True,0.5\n1,0.0,False,0.25\n"
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    axes = {"trained": 2, "stable": 2, "test_accuracy": 2}
    runs = Runs.of_rows({}, rows, axes)
    counted = training.counted(runs, runs.final("test_accuracy"))
    np.testing.assert_array_equal(counted, [0.5, np.nan])
    new = [dict(row, trained=str(row["trained"] == "1.0")) for row in rows]
    again = Runs.of_rows({}, new, axes)
    np.testing.assert_array_equal(
        training.counted(again, again["test_accuracy"][:, -1]), counted
    )
