"""The verdicts, at the strengths at which both train and their filters differ.

There are four questions. Do the networks end with the same error, in units of the task?
Which of the two is better, and why? Which leaves more runs untrained, at strengths at
which most are trained? Does the networks' risk stay within the theoretical bound for one
linear problem?

At equal strength K steps solve more of each component than damping (`filters`),
especially if its eigenvalue is near lambda. If this causes the difference, K steps end
like damping that solves as much of the kernel, and their distance from damping of equal
strength grows with the difference of the solved components.

On the quintic two other explanations are tested. In the first, longer steps turn ReLUs
off for all inputs. Then more units are dead after K steps, the error is larger where more
units are dead, and a network whose units cannot die has little of the excess. In the
second, longer steps leave the range in which the linearisation holds, so that the network
fits less. Then the error is larger where the training loss is larger. (The second was
proposed after 40 seeds of the other claims had been seen.)
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ... import thresholds
from ...experiment import only, Runs
from ...verdicts import CONFIRMED, judge, mean_of_seed, rank_correlation, Verdict
from ._curves import (
    apart,
    difference,
    difference_at_equal_solution,
    largest_ratio,
    more_thrown_off,
    PerRun,
    SOLVERS,
    solves_more,
    squared_errors,
)
from ._tasks import (
    AnySettings,
    DIGITS,
    DRAWN,
    make_task,
    names_of,
    OWN,
    RELU,
    SMOOTH,
    Task,
)


Both = tuple[Runs, Runs]
"""The runs by K steps and by damping."""
PerSeed = Float[ndarray, " seeds"]
BOTH_TRAIN = "both train and the filters differ"


def judge_all(settings: AnySettings, all_runs: Sequence[Runs]) -> list[Verdict]:
    tasks = {name: make_task(settings, name) for name in names_of(settings)}
    by_task = {
        name: (
            only(all_runs, task=name, solver=first),
            only(all_runs, task=name, solver=second),
        )
        for name in tasks
        for first, second in [SOLVERS]
    }
    parts = {name: difference(task, *by_task[name]) for name, task in tasks.items()}
    better = {name: _better(task, parts[name]) for name, task in tasks.items()}
    drawn = {name: task for name, task in tasks.items() if name in (*DRAWN, OWN)}
    return [
        *(_alike(task, parts[name]) for name, task in drawn.items()),
        *better.values(),
        *(
            verdict
            for name in tasks
            if name in (*DIGITS, OWN) and tasks[name].loss.is_quadratic
            for verdict in _by_filters(tasks[name], by_task[name], better[name])
        ),
        *(
            _thrown_off(task, by_task[name])
            for name, task in tasks.items()
            if name in (RELU, SMOOTH, OWN)
        ),
        *(
            _by_units(by_task, parts, better[RELU].outcome == CONFIRMED)
            if RELU in tasks
            else ()
        ),
        *(
            _bounded(task, by_task[name])
            for name, task in drawn.items()
            if task.has_theory
        ),
    ]


def _over(*values: PerRun, where: str = BOTH_TRAIN) -> str:
    """Say over which strengths a quantity is taken, and how many have a value."""
    counts = [f"{np.isfinite(x).any(axis=0).sum()} of {x.shape[1]}" for x in values]
    return f"over the strengths at which {where} ({' and '.join(counts)})"


def _correlation(values: PerRun) -> str:
    return (
        f"Spearman's correlation, {_over(values)}, of the differences between K steps "
        "and damping"
    )


def _alike(task: Task, parts: PerRun) -> Verdict:
    return judge(
        f"{task.title}: K steps and damping of equal strength end with the same test "
        "error",
        f"{task.difference}, mean {_over(parts)}",
        mean_of_seed(parts),
        task.margin,
    )


def _better(task: Task, parts: PerRun) -> Verdict:
    return judge(
        f"{task.title}: damping has a smaller test error than K steps of equal strength",
        f"{task.difference}, mean {_over(parts)}",
        mean_of_seed(parts),
        thresholds.RISES,
    )


def _by_filters(task: Task, both: Both, better: Verdict) -> list[Verdict]:
    parts, left = difference(task, *both), difference_at_equal_solution(task, *both)
    found = np.where(np.isfinite(left), parts, np.nan)
    untested = "" if better.outcome == CONFIRMED else "no excess is confirmed"
    error = "log10 test RMSE" if task.in_decades else "test error"
    return [
        judge(
            f"{task.title}: K steps are nearly as good as damping that solves as much "
            "of the kernel",
            f"{task.difference} of equal strength, less twice the absolute difference "
            "from damping that solves as much of the final kernel; each a mean over the "
            f"seeds and {_over(found)}",
            _together(mean_of_seed(found), mean_of_seed(left)),
            thresholds.MOST_OF_IT,
            statistic=_less_twice,
            untested=untested,
        ),
        judge(
            f"{task.title}: the difference in test error grows with the difference "
            "between the filters",
            f"{_correlation(parts)} in {error} and in the solved part of the kernel",
            _correlations(solves_more(task, both[0]), parts),
            thresholds.GOES_WITH,
            untested=untested,
        ),
    ]


def _together(whole: PerSeed, left: PerSeed) -> Float[ndarray, "seeds 2"]:
    """Stack both values of each seed; NaN if one of them is unknown."""
    both = np.stack([whole, left], axis=1)
    return np.where(np.isfinite(both).all(axis=1, keepdims=True), both, np.nan)


def _less_twice(values: Float[ndarray, "seeds 2"]) -> float:
    """Return the mean of the first column less twice the size of the second's mean. The
    size of each seed's value would not do, since it contains the seed's noise."""
    whole, left = values.mean(axis=0)
    return float(whole - 2 * np.abs(left))


def _thrown_off(task: Task, both: Both) -> Verdict:
    more = more_thrown_off(*both)
    where = "at least one of the two trains and the filters differ"
    return judge(
        f"{task.title}: K steps leave more runs untrained than damping",
        "difference in the share of untrained runs, K steps less damping, mean "
        f"{_over(more, where=where)}",
        mean_of_seed(more),
        thresholds.RISES,
    )


def _by_units(
    by_task: Mapping[str, Both], parts: Mapping[str, PerRun], exceeds: bool
) -> list[Verdict]:

    relu, smooth = mean_of_seed(parts[RELU]), mean_of_seed(parts[SMOOTH])
    dead = apart(*by_task[RELU], "dead")
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = (
            Runs(runs.point, {**runs.columns, "log_loss": np.log10(runs["train_loss"])})
            for runs in by_task[RELU]
        )
    return [
        judge(
            "On the quintic K steps leave more hidden units dead than damping",
            "difference in the share of hidden units that are off on all training "
            f"inputs, K steps less damping, mean {_over(dead)}",
            mean_of_seed(dead),
            thresholds.RISES,
        ),
        judge(
            "On the quintic the excess error of K steps is larger where they leave more "
            "hidden units dead",
            f"{_correlation(parts[RELU])} in log10 test RMSE and in the share of dead "
            "hidden units",
            _correlations(dead, parts[RELU]),
            thresholds.GOES_WITH,
        ),
        judge(
            "On the quintic the excess error of K steps is larger where they fit the "
            "training points less well",
            f"{_correlation(parts[RELU])} in log10 test RMSE and in log10 training loss",
            _correlations(apart(a, b, "log_loss"), parts[RELU]),
            thresholds.GOES_WITH,
        ),
        judge(
            "With tanh, whose units cannot die, less than half of the excess error on "
            "the quintic remains",
            "log10 of the ratio of test RMSE, K steps over damping, with ReLU less "
            "twice the absolute value with tanh; each a mean over the seeds and "
            f"{_over(parts[RELU], parts[SMOOTH])}",
            _together(relu, smooth),
            thresholds.MOST_OF_IT,
            statistic=_less_twice,
            untested="" if exceeds else "no excess is confirmed",
        ),
    ]


def _correlations(x: PerRun, y: PerRun) -> list[float]:
    return [float(rank_correlation(*of_seed)) for of_seed in zip(x, y, strict=True)]


def _bounded(task: Task, both: Both) -> Verdict:
    errors = squared_errors(*both)
    return judge(
        f"{task.title}: the risk of K steps relative to damping stays within the bound "
        "for a linear problem",
        "ratio of mean squared test errors, K steps over damping, median over the "
        f"seeds, largest {_over(errors[:, 0] / errors[:, 1])}",
        errors,
        thresholds.FLOW_AGAINST_RIDGE,
        statistic=largest_ratio,
    )
