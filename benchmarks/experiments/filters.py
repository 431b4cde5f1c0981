"""How far the first-layer filters move during training, for K = 1 and for large K.

The runs of `large-k-augmented` are reused if they exist.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from .. import thresholds, training
from ..experiment import Runs
from ..figures import figure
from ..shortfall import untrained
from ..verdicts import judge, Verdict
from . import large_k_augmented
from .large_k_augmented import caption, COLOURS, ends, LargeK, SHARE, share_of_the_way


SHARES = 0.1, 0.2, 0.5, 1.0
"""Shares of the steps after which the filters are compared."""
JUDGED = SHARES[:2]


def change(runs: Runs) -> Float[ndarray, "seeds looks filters channels height width"]:
    """Return the change since initialisation, which is look 0."""
    return runs["filters"] - runs["filters"][:, :1]


def travelled(runs: Runs) -> Float[ndarray, "seeds looks"]:
    """Return the 2-norm of the change; infinite if a run has diverged."""
    with np.errstate(over="ignore"):
        return np.sqrt(np.square(change(runs)).sum(axis=(2, 3, 4, 5)))


def way_of_the_first(first: Runs, last: Runs) -> Float[ndarray, " seeds"]:
    """Return the share of the steps after which the filters of K = 1 have moved as far as
    those of large K in the whole run."""
    return share_of_the_way(travelled(first), travelled(last)[:, -1])


def look_after(runs: Runs, share: float) -> int:
    """Return the index of the look after a share of the steps; look 0 is before any."""
    return round(share * (runs["filters"].shape[1] - 1))


def judge_all(settings: LargeK, all_runs: Sequence[Runs]) -> list[Verdict]:
    first, last = ends(settings, all_runs)
    small = f"K = {first.point['period']:,}"
    with np.errstate(divide="ignore", invalid="ignore"):  # runs may have diverged
        ratio = np.log2(travelled(first)[:, 1:] / travelled(last)[:, 1:])
    return [
        *(
            judge(
                f"After {share:.0%} of the steps the filters have moved much further "
                f"with {small} than with large K",
                f"log2 of the ratio of the distances moved, {small} over large K",
                ratio[:, look_after(first, share) - 1],
                thresholds.TWICE_AS_FAR,
            )
            for share in JUDGED
        ),
        judge(
            f"With large K the filters end as far from initialisation as with {small} "
            f"after about {SHARE:.0%} of the steps",
            f"share of the steps after which the filters of {small} have moved as far as "
            "those of large K at the end (1 if they never do), median over the seeds",
            training.where_trained(way_of_the_first(first, last), first, last),
            thresholds.FIFTH_OF_THE_WAY,
            statistic=lambda ways: float(np.median(ways)),
            lacking=untrained(first, last),
        ),
    ]


def draw(settings: LargeK, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the distance that the filters have moved, for all seeds, and the filters of
    the median seed."""
    both = ends(settings, all_runs)
    ways = travelled(both[0])[:, -1]
    seed = int(np.argsort(ways)[len(ways) // 2])
    looks = [look_after(both[0], share) for share in SHARES]
    shown = [
        [change(runs)[seed, look, : settings.num_filters] for look in looks]
        for runs in both
    ]
    largest = float(np.nanmax(np.abs(np.array(shown))))
    with figure(out / "filters.png", width=13, height=3.8) as drawing:
        parts: Any = drawing.subfigures(1, 3, width_ratios=[1.6, 1, 1])
        left, *halves = parts
        axes = left.subplots()
        for runs, colour in zip(both, COLOURS, strict=True):
            _draw_ways(axes, runs, colour)
        axes.set(xlabel="Steps", ylabel="Change of the filters (2-norm)")
        axes.legend()
        for half, runs, of_look in zip(halves, both, shown, strict=True):
            half.suptitle(f"K = {runs.point['period']:,}")
            panels = half.subplots(settings.num_filters, len(looks), squeeze=False)
            for column, share, filters in zip(panels.T, SHARES, of_look, strict=True):
                column[0].set_title(f"{share:.0%}", fontsize="small")
                for panel, filter in zip(column, filters, strict=True):
                    panel.imshow(_picture(filter, largest), cmap="gray", vmin=0, vmax=1)
                    panel.set(xticks=[], yticks=[])
                    panel.spines[:].set_visible(True)
    return {
        "filters": "Left: the distance of the first-layer filters from initialisation "
        "over steps; medians and ranges over the seeds. Right: the change of the "
        f"first {settings.num_filters} filters in the median seed, after several "
        f"shares of the steps, from -{largest:.2g} (black) to {largest:.2g} "
        f"(white). {caption(settings, all_runs)}"
    }


def _draw_ways(axes: Any, runs: Runs, colour: str) -> None:
    ways = travelled(runs)
    steps = np.concatenate([[0], runs["inner_steps"].mean(axis=0)])
    label = f"K = {runs.point['period']:,}"
    axes.plot(steps, np.median(ways, axis=0), color=colour, label=label)
    axes.fill_between(steps, ways.min(axis=0), ways.max(axis=0), color=colour, alpha=0.15)


def _picture(filter: Float[ndarray, "channels height width"], largest: float) -> ndarray:
    image = np.clip((filter / largest + 1) / 2, 0, 1)
    return image.transpose(1, 2, 0) if len(image) == 3 else image[0]


EXPERIMENT = dataclasses.replace(
    large_k_augmented.EXPERIMENT,
    judge=judge_all,
    draw=draw,
    paper="In the paper, in the runs of large-k-augmented, the filters move much faster "
    "with K = 1. With large K they end where those of K = 1 are after about 20 % of "
    "the training.",
    runs_of="large-k-augmented",
)
