"""What is judged: where the curves agree, what parts them, the risk that theory bounds.

K steps solve more of each component than damping of their strength (`filters`), so that
their steps are longer. That these leave ReLUs off for all inputs, and that this is what
the network's error grows by, is an explanation, with three consequences: more units are
dead after K steps; the error is larger where more of them are; and a network whose units
cannot die has little of it. Another is that longer steps leave the range in which the
linearisation holds, so that less is fitted: then the error is larger where the training
loss is. (It was thought of after 40 seeds of the others had been seen.)
"""

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from numpy import ndarray

from ... import thresholds
from ...experiment import only, Runs
from ...verdicts import CONFIRMED, judge, rank_correlation, Verdict
from ._curves import (
    CLOSE,
    excess,
    largest_ratio,
    mean_of_seed,
    more_dead,
    share_agreeing,
    SOLVERS,
    where_tested,
)
from ._tasks import KVsLambda, make_task, RELU, SMOOTH, Task, TASKS


Both = tuple[Runs, Runs]
"""By K steps, and by damping."""
PerSeed = Float[ndarray, "seeds strengths"]


def judge_all(settings: KVsLambda, all_runs: Sequence[Runs]) -> list[Verdict]:
    tasks = {name: make_task(settings, name) for name in TASKS}
    by_task = {
        name: (
            only(all_runs, task=name, solver=first),
            only(all_runs, task=name, solver=second),
        )
        for name in TASKS
        for first, second in [SOLVERS]
    }
    return [
        *(_agree(tasks[name], by_task[name]) for name in TASKS),
        *_explained(by_task),
        *(
            _bounded(task, by_task[name])
            for name, task in tasks.items()
            if task.loss.is_quadratic
        ),
    ]


def _agree(task: Task, both: Both) -> Verdict:
    return judge(
        f"{task.title}: the two curves agree over most of the range where the filters "
        "differ",
        "share of the strengths at which they differ that lie in the longest stretch "
        f"where the mean test errors are within {CLOSE:.0%} of their range",
        where_tested(*both),
        thresholds.HALF_AGREES,
        statistic=share_agreeing,
    )


def _explained(by_task: Mapping[str, Both]) -> list[Verdict]:
    where = "where the filters differ"
    log_ratio = "log10 of test RMSE after K steps over that by damping"
    relu, smooth = (excess(*by_task[name]) for name in (RELU, SMOOTH))
    dead = more_dead(*by_task[RELU])
    loss = excess(*by_task[RELU], "train_loss")
    exceeds = judge(
        f"On the quintic K steps err more than damping {where}",
        f"{log_ratio}, mean over the strengths, a seed",
        mean_of_seed(relu),
        thresholds.RISES,
    )
    return [
        exceeds,
        judge(
            f"On the quintic K steps leave more units dead than damping {where}",
            "share of hidden units that are off on all training inputs after K steps "
            "less that by damping, mean over the strengths, a seed",
            mean_of_seed(dead),
            thresholds.RISES,
        ),
        judge(
            "On the quintic K steps err more where they leave more units dead",
            f"Spearman's correlation of {log_ratio} with the share of hidden units dead "
            "after K steps less that by damping, over the strengths, a seed",
            _correlations(dead, relu),
            thresholds.GOES_WITH,
        ),
        judge(
            "On the quintic K steps err more where they fit the training points less",
            f"Spearman's correlation of {log_ratio} with that of the training losses, "
            "over the strengths, a seed",
            _correlations(loss, relu),
            thresholds.GOES_WITH,
        ),
        judge(
            "With tanh, whose units cannot die, less than half of the excess on the "
            "quintic is left",
            f"{log_ratio}, mean over the strengths, with ReLU less twice that with tanh, "
            "a seed",
            mean_of_seed(relu - 2 * smooth),
            thresholds.MOST_OF_IT,
            untested="" if exceeds.outcome == CONFIRMED else "no excess is confirmed",
        ),
    ]


def _correlations(x: PerSeed, y: PerSeed) -> list[float]:
    return [float(rank_correlation(*of_seed)) for of_seed in zip(x, y, strict=True)]


def _bounded(task: Task, both: Both) -> Verdict:
    return judge(
        f"{task.title}: the networks' risk after K steps stays within the bound of a "
        "linear problem",
        "mean squared test error after K steps over that by damping, of means over the "
        "seeds, the largest of all strengths at which the filters differ",
        where_tested(*both, "test_mse"),
        thresholds.FLOW_AGAINST_RIDGE,
        statistic=largest_ratio,
    )
