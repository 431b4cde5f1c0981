"""Figures show all that was found, also where little was found."""

import dataclasses

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection, LineCollection
from matplotlib.figure import Figure
from test_benchmarks_judged import looks
from test_benchmarks_k_vs_lambda import runs_of
from test_benchmarks_own_task import settings_of, TASK, written
from test_benchmarks_schedules import scheduled

from benchmarks import training
from benchmarks.experiment import Runs
from benchmarks.experiments import schedules, solved_subproblem
from benchmarks.experiments.k_vs_lambda import _figures
from benchmarks.experiments.k_vs_lambda._curves import DAMPED, DESCENT
from benchmarks.experiments.k_vs_lambda._tasks import CLASSES, make_task, QUICK
from benchmarks.figures import band, figure


SEEDS = 10


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, which are not written."""
    figures = []
    save = lambda self, part, **look: figures.append(self)
    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr("benchmarks.figures.write_whole", lambda path, write: write(path))
    return figures


def test_a_panel_without_finite_values_on_logarithmic_axes_is_drawn(tmp_path):
    with figure(tmp_path / "empty.png") as drawing:
        empty, known = drawing.subplots(1, 2)
        band(empty, [0.1, 0.01], np.full((2, 2), np.nan), "blue", "x", "o-")
        band(known, [0.1, 0.01], np.array([[2.0, 30.0]]), "blue", "x", "o-")
        for axes in (empty, known):
            axes.set(xscale="log", yscale="log")
    assert (tmp_path / "empty.png").stat().st_size > 0
    assert (tmp_path / "empty.pdf").stat().st_size > 0
    assert empty.get_xlim() == empty.get_ylim() == (1, 10)
    assert known.get_ylim()[0] < 2
    assert known.get_ylim()[1] > 30


@pytest.mark.parametrize("number", [1, 2])
def test_the_range_at_a_single_point_is_seen(number):
    axes = Figure().subplots()
    values = np.array([[2.0, 3.0], [4.0, 7.0]])[:, :number]
    band(axes, [10, 100][:number], values, "blue")
    drawn = axes.collections[0]
    kinds = {1: LineCollection, 2: FillBetweenPolyCollection}
    assert isinstance(drawn, kinds[number])
    if number == 1:
        np.testing.assert_array_equal(drawn.get_segments(), [[[10, 2], [10, 4]]])
    assert axes.dataLim.intervaly.tolist() == [2, 4] if number == 1 else [2, 7]


def accuracies_of(axes):
    """The numbers on the vertical axis that the lines of a panel have."""
    return np.concatenate([line.get_ydata() for line in axes.lines])


def within_limits(axes):
    low, high = axes.get_ylim()
    return low <= accuracies_of(axes).min() and accuracies_of(axes).max() <= high


def test_panels_with_a_common_axis_show_the_data_of_all(drawn, tmp_path):
    ends = dict.fromkeys(schedules.SCHEDULES, (0.75, 0.95))
    less = dict.fromkeys(schedules.SCHEDULES, (0.2, 0.98))
    throughout = scheduled(schedules.STEPS, {schedules.FIRST: (0.9, 0.9)})[0]
    all_runs = [
        Runs({"by": schedules.THROUGHOUT}, throughout.columns),
        *scheduled(schedules.STEPS, ends),
        *scheduled(schedules.DAMPING, less),
    ]
    for runs in all_runs:
        runs.columns["test_accuracy"] = 0.1 + runs["test_accuracy_linearised"] / 2
    settings = dataclasses.replace(schedules.QUICK, seeds=SEEDS)
    schedules.draw(settings, all_runs, tmp_path)
    steps, damping, network, _ = drawn[0].axes
    assert steps.get_ylim() == damping.get_ylim() == network.get_ylim()
    assert all(map(within_limits, (steps, damping, network)))


def solutions(settings):
    """Made-up runs of `solved-subproblem`, which end at these accuracies."""
    columns = lambda *ends: {
        "feature_updates": np.tile([[1.0, 4.0]], (SEEDS, 1)),
        "first_test_accuracy": np.full(SEEDS, 0.1),
        "test_accuracy": looks(*ends),
        "train_accuracy": looks(*ends),
        "train_accuracy_linearised": looks(*ends),
        "gradient": looks(*SEEDS * [1e-5]),
        "unsolved": looks(*SEEDS * [0], start=0),
    }
    solved = [
        Runs(
            {"solver": solved_subproblem.SOLVED, "tolerance": tolerance},
            columns(*SEEDS * [0.6]),
        )
        for tolerance in settings.tolerances
    ]
    others = solved_subproblem.SGD, solved_subproblem.ADAM
    return [*solved, *(Runs({"solver": x}, columns(*SEEDS * [0.7])) for x in others)]


@pytest.mark.parametrize("is_own", [False, True])
def test_the_papers_gap_is_drawn_on_the_papers_task_alone(is_own, drawn, tmp_path):
    settings = dataclasses.replace(solved_subproblem.QUICK, seeds=SEEDS)
    if is_own:
        task = written(tmp_path / "my_task.py", TASK)
        settings = dataclasses.replace(settings_of(solved_subproblem, task), seeds=SEEDS)
    caption = solved_subproblem.draw(settings, solutions(settings), tmp_path)
    assert ("in the paper" in caption["solved_subproblem"]) != is_own
    (legend,) = drawn[0].legends
    said = [text.get_text() for text in legend.get_texts()]
    assert ("solved, in the paper" in said) != is_own
    assert len(set(said)) == len(said)
    assert not any(axes.get_legend() for axes in drawn[0].axes)
    assert is_whole(drawn[0])


def is_whole(drawing):
    """Whether the legend lies within the figure."""
    drawing.draw_without_rendering()
    (legend,) = drawing.legends
    box, page = legend.get_window_extent(), drawing.bbox
    return page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_the_legend_of_the_filters_is_whole(number, drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(_figures.gnlin, "TangentKernel", lambda model: lambda x: x)
    monkeypatch.setattr(_figures, "eigenvalues", lambda _: np.logspace(-3, 1, 8))
    tasks = {name: make_task(QUICK, name) for name in ("digits", "quintic")[:number]}
    spectra = {name: np.tile(np.logspace(-3, 1, 8), (4, 1)) for name in tasks}
    path = tmp_path / "filters.png"
    _figures._draw_filters(path, tasks, QUICK.periods, [1, 2, 3], spectra)
    assert is_whole(drawn[0])


def test_a_line_breaks_at_a_strength_that_is_not_compared():
    """Only the second of four strengths is not compared, since there none trains."""
    error = np.random.default_rng(0).uniform(0.2, 0.3, (4, 4))
    loss = [[0.01, 1.0, 0.01, 0.01]] * 4
    a, b = (
        runs_of(by, error * (by == DESCENT), train_loss=loss) for by in (DESCENT, DAMPED)
    )
    axes = Figure().subplots()
    _figures._draw_difference(axes, make_task(QUICK, "digits"), a, b, "#000000")
    drawn = axes.lines[0].get_ydata()
    np.testing.assert_array_equal(np.isfinite(drawn), [True, False, True, True])


@pytest.mark.slow
def test_the_differences_are_drawn_where_strengths_are_compared(drawn, tmp_path):
    """Both train at the last two of four strengths, and the legend covers nothing."""
    error = np.random.default_rng(0).uniform(0.2, 0.3, (4, 4))
    loss = [[1.0, 1.0, 0.01, 0.01]] * 4
    names = "digits", CLASSES, "quintic"
    tasks = {name: make_task(QUICK, name) for name in names}
    both = {by: runs_of(by, error, train_loss=loss) for by in (DESCENT, DAMPED)}
    untrained = {by: runs_of(by, error, train_loss=1.0) for by in (DESCENT, DAMPED)}
    by_task = dict.fromkeys(names, both) | {CLASSES: untrained}
    _figures._draw_differences(tmp_path / "difference.png", tasks, by_task)
    for name, panel in zip(names, drawn[0].axes, strict=True):
        known = name != CLASSES
        assert panel.get_xlim() == ((5, 200) if known else (0.05, 200))
        if known:
            drawn[0].draw_without_rendering()
            legend = panel.get_legend().get_window_extent()
            assert legend.y1 < panel.get_window_extent().y0
            assert legend.y0 >= drawn[0].bbox.y0


@pytest.mark.parametrize("number", [0, 2, SEEDS])
def test_a_line_of_diverged_runs_is_marked_at_its_end(number):
    steps = np.tile([[10.0, 20.0]], (SEEDS, 1))
    stable = np.ones((SEEDS, 2))
    stable[:number, -1] = 0
    columns = {"inner_steps": steps, "test_accuracy": steps / 100, "stable": stable}
    axes = Figure().subplots()
    training.draw_band(axes, Runs({}, columns), "test_accuracy", "blue", "x")
    said = [text.get_text() for text in axes.texts]
    assert said == ([f"{number} of {SEEDS} diverged"] if number else [])
    if number:
        np.testing.assert_allclose(axes.lines[-1].get_xydata(), [[20, 20]])


def test_a_missing_font_is_no_news(tmp_path, caplog):
    with figure(tmp_path / "text.png") as drawing:
        drawing.text(0.5, 0.5, "text", fontfamily="No Such Font")
    assert not caplog.records


def test_the_interval_of_a_single_strength_is_seen():
    """Only the last of four strengths is compared, since only there both train."""
    generator = np.random.default_rng(0)
    error = generator.uniform(0.2, 0.3, (4, 4))
    loss = [[1.0, 1.0, 1.0, 0.01]] * 4
    a, b = (
        runs_of(by, error * (by == DESCENT), train_loss=loss) for by in (DESCENT, DAMPED)
    )
    axes = Figure().subplots()
    _figures._draw_difference(axes, make_task(QUICK, "digits"), a, b, "#000000")
    (bar,) = (x for x in axes.collections if isinstance(x, LineCollection))
    (((x, low), (same, high)),) = bar.get_segments()
    assert x == same == 100
    assert low < 100 * error[:, 3].mean() < high
    limits = axes.get_ylim()
    assert limits[0] < low
    assert high < limits[1]
