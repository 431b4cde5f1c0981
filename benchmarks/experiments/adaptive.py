"""Feature updates when they are due, against the best fixed period.

The digits of `k-sweep`. Fixed periods over six decades, and iterative linearisation that
linearises anew when the kernel has drifted too far, when the loss does not fall as
predicted, or at the first of both. Compared at equal feature updates, and at equal test
accuracy, with the fixed period that is best in hindsight.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Float
from numpy import ndarray
from rich.console import Console
from rich.progress import track
from threadpoolctl import threadpool_limits

import gnlin

from .. import _results
from .._options import Options
from ..figures import BLACK, BLUE, figure, GREEN, ORANGE, VERMILION
from ..verdicts import judge, print_verdicts, Verdict
from .k_sweep import Curves, LEARNING_RATE, train_curves


NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
NUM_UPDATES, NUM_UPDATES_QUICK = 24, 3
PERIODS = 10.0 ** np.arange(1, 7, 0.5)
PERIODS_QUICK = 10.0 ** np.array([2, 4])
LONGEST = 10**6
DESCENT = gnlin.IterativeLinearisation(LONGEST, LEARNING_RATE, method="flow")
DEFAULT = "ratio 0.25"
TRIGGERS = {
    "drift 0.1": (0.1, None),
    "drift 0.5": (0.5, None),
    "drift 1 or ratio 0.25": (1.0, 0.25),
    DEFAULT: (None, 0.25),
}
COLOURS = dict(zip(TRIGGERS, (ORANGE, GREEN, BLUE, VERMILION), strict=True))
SHARE = 0.98
"""Of the accuracy that the best fixed period ends with: the accuracy to be reached."""
AFTER = 10
"""Feature updates, at which accuracies are compared."""


def run(options: Options) -> None:
    """Train, draw, judge, and write rows, settings and verdicts."""
    start = time.perf_counter()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    num_updates = NUM_UPDATES_QUICK if options.quick else NUM_UPDATES
    periods = PERIODS_QUICK if options.quick else PERIODS
    console = Console()
    # LAPACK's threads and XLA's wait for each other on matrices as small as these.
    with threadpool_limits(1, user_api="blas"):
        fixed = [
            train_curves(
                "fixed",
                float(period),
                gnlin.IterativeLinearisation(
                    jnp.asarray(period), LEARNING_RATE, method="flow"
                ),
                num_updates,
                num_seeds,
            )
            for period in track(np.round(periods), "fixed periods", console=console)
        ]
        adaptive = [
            train_curves(
                name,
                None,
                gnlin.AdaptiveLinearisation(DESCENT, *trigger),
                num_updates,
                num_seeds,
            )
            for name, trigger in track(TRIGGERS.items(), "triggers", console=console)
        ]
    verdicts = judge_all(fixed, adaptive)
    print_verdicts(console, verdicts)
    draw(options.out / "adaptive.png", fixed, adaptive)
    rows = [row for each in (*fixed, *adaptive) for row in each.rows()]
    seconds = time.perf_counter() - start
    settings: dict[str, Any] = {
        "seeds": num_seeds,
        "quick": options.quick,
        "periods": np.round(periods).tolist(),
        "longest_period": LONGEST,
        "triggers": {name: list(trigger) for name, trigger in TRIGGERS.items()},
        "learning_rate": LEARNING_RATE,
        "feature_updates": num_updates,
        "best_fixed_period": quickest(fixed).period,
        "wall_seconds": round(seconds, 1),
    }
    _results.write_run(options.out, "adaptive", rows, verdicts, settings)
    num_runs = num_seeds * (len(fixed) + len(adaptive))
    console.print(f"{num_runs} runs in {seconds:.0f} s.", highlight=False)


def updates_to(curves: Curves, accuracy: float) -> Float[ndarray, " seeds"]:
    """Feature updates until a test accuracy is reached; one more than all of them where
    it is not."""
    reached = curves.test_accuracy >= accuracy
    first = curves.updates[np.argmax(reached, axis=1)]
    return np.where(reached.any(axis=1), first, curves.updates[-1] + 1)


def aim(fixed: Sequence[Curves]) -> float:
    return SHARE * max(curves.final.mean() for curves in fixed)


def quickest(fixed: Sequence[Curves]) -> Curves:
    """The fixed period that reaches the aim after the fewest updates, on average over
    the seeds."""
    return min(fixed, key=lambda curves: updates_to(curves, aim(fixed)).mean())


def judge_all(fixed: Sequence[Curves], adaptive: Sequence[Curves]) -> list[Verdict]:
    (default,) = (curves for curves in adaptive if curves.solver == DEFAULT)
    best, target = quickest(fixed), aim(fixed)
    ratio = np.log2(updates_to(best, target) / updates_to(default, target))
    at = np.searchsorted(default.updates, min(AFTER, default.updates[-1]))
    ahead = max(fixed, key=lambda curves: curves.test_accuracy[:, at].mean())
    difference = default.test_accuracy[:, at] - ahead.test_accuracy[:, at]
    return [
        judge(
            f"A trigger ({DEFAULT}) reaches the accuracy with fewer feature updates",
            f"log2 of the updates of K = {best.period:.3g}, the quickest, over its own, "
            f"to {target:.1%}, a seed",
            ratio,
            above=0,
        ),
        judge(
            f"After {default.updates[at]:.0f} updates it is as accurate",
            f"test accuracy less that of K = {ahead.period:.3g}, then the best, a seed",
            difference,
            above=-0.02,
        ),
    ]


def draw(path: Path, fixed: Sequence[Curves], adaptive: Sequence[Curves]) -> None:
    """Test accuracy over feature updates; and the periods that the triggers chose."""
    colours = matplotlib.colormaps["Greys"]
    with figure(path, width=11, height=4.6) as drawing:
        accuracy, chosen = drawing.subplots(1, 2)
        for curves in fixed[::2]:
            assert curves.period is not None
            colour = colours(0.25 + 0.6 * np.log10(curves.period) / 6)
            mean = 100 * curves.test_accuracy.mean(axis=0)
            label = f"K = {curves.period:.3g}"
            accuracy.plot(curves.updates, mean, color=colour, label=label, linewidth=1)
        for curves in adaptive:
            mean = 100 * curves.test_accuracy.mean(axis=0)
            look = {"color": COLOURS[curves.solver], "label": curves.solver}
            accuracy.plot(curves.updates, mean, **look)
            total = np.pad(curves.inner_steps, ((0, 0), (1, 0)))
            periods = np.diff(total) / np.diff(curves.updates, prepend=0)
            chosen.plot(curves.updates, np.exp(np.log(periods).mean(axis=0)), **look)
        best = quickest(fixed).period
        label = f"the quickest fixed K, {best:.3g}"
        chosen.axhline(best, color=BLACK, linestyle="--", linewidth=1, label=label)
        accuracy.set(xscale="log", xlabel="Feature updates", ylabel="Test accuracy (%)")
        chosen.set(xscale="log", yscale="log", xlabel="Feature updates")
        chosen.set_ylabel("Period $K$ (geometric mean over seeds)")
        accuracy.legend(fontsize="x-small")
        chosen.legend(fontsize="small")
