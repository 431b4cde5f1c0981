"""The first filters' change since initialisation, as training goes on, K = 1 and large.

The runs of `large-k-augmented`, of which those are taken that are already there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..experiment import Runs
from ..figures import figure
from ..verdicts import judge, Verdict
from . import large_k_augmented
from .large_k_augmented import caption, ends, LargeK


LARGEST = 0.5
"""A change of so much is white, and of so much the other way black."""
NUM_SHOWN = 8
"""Looks."""
SHARE = 0.2
"""Of its way, at which K = 1 is claimed to be where large K ends."""


def change(runs: Runs) -> Float[ndarray, "seeds looks filters channels height width"]:
    """Since initialisation, which is the first of the looks."""
    return runs["filters"] - runs["filters"][:, :1]


def travelled(runs: Runs) -> Float[ndarray, "seeds looks"]:
    """The 2-norm of the change."""
    return np.sqrt(np.square(change(runs)).sum(axis=(2, 3, 4, 5)))


def way_of_the_first(first: Runs, last: Runs) -> Float[ndarray, " seeds"]:
    """After which share of its steps K = 1 has changed its filters by as much as large K
    does in the end: the first look at which it has."""
    ways, end = travelled(first), travelled(last)[:, -1:]
    reached = ways >= end
    share = np.argmax(reached, axis=1) / (reached.shape[1] - 1)
    share = np.where(reached.any(axis=1), share, 1.0)
    return np.where(np.isfinite(ways[:, -1:] + end)[:, 0], share, np.nan)


def judge_all(settings: LargeK, all_runs: Sequence[Runs]) -> list[Verdict]:
    first, last = ends(settings, all_runs)
    return [
        judge(
            "The filters of K = 1 move much faster",
            "log2 of the change in the end with K = 1 over that with large K, a seed",
            np.log2(travelled(first)[:, -1] / travelled(last)[:, -1]),
            above=1,
        ),
        judge(
            f"Large K ends where K = 1 is after about {SHARE:.0%} of its steps",
            "share of its steps after which K = 1 has moved as far, a seed",
            way_of_the_first(first, last),
            above=SHARE / 2,
            below=2 * SHARE,
        ),
    ]


def draw(settings: LargeK, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Of the first seed: a row a filter, a column a look, for both K."""
    both = ends(settings, all_runs)
    last = both[0]["filters"].shape[1] - 1
    looks = np.linspace(0, last, NUM_SHOWN).round().astype(int)
    with figure(out / "filters.png", width=10, height=7.5) as drawing:
        rows = 2 * settings.num_filters
        axes = drawing.subplots(rows, NUM_SHOWN, squeeze=False)
        for half, runs in zip(np.split(axes, 2), both, strict=True):
            steps = np.concatenate([[0], runs["inner_steps"].mean(axis=0)])
            for row, filter in zip(half, range(settings.num_filters), strict=True):
                for panel, look in zip(row, looks, strict=True):
                    panel.imshow(
                        _picture(change(runs)[0, look, filter]),
                        cmap="gray",
                        vmin=0,
                        vmax=1,
                    )
                    panel.set(xticks=[], yticks=[])
                    panel.spines[:].set_visible(True)
            for panel, look in zip(half[0], looks, strict=True):
                panel.set_title(f"{steps[look]:,.0f}", fontsize="small")
            half[0, 0].set_ylabel(f"K = {runs.point['period']:,}")
    return {
        "filters": f"Change of the first {settings.num_filters} filters since "
        f"initialisation, from -{LARGEST:g} (black) to {LARGEST:g} (white), after the "
        f"steps above each column; the first of the seeds. {caption(settings, all_runs)}"
    }


def _picture(filter: Float[ndarray, "channels height width"]) -> ndarray:
    image = np.clip((filter + LARGEST) / (2 * LARGEST), 0, 1)
    return image.transpose(1, 2, 0) if len(image) == 3 else image[0]


EXPERIMENT = dataclasses.replace(
    large_k_augmented.EXPERIMENT,
    judge=judge_all,
    draw=draw,
    paper="The runs of large-k-augmented: K = 1 moves much faster; large K ends where "
    "K = 1 is at about 20 % of the way.",
    runs_of="large-k-augmented",
)
