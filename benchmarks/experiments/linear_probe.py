"""Linear probes of the first two layers, for K = 1 and for large K.

The runs of `large-k-augmented` are reused if they exist.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import thresholds, training
from ..experiment import Runs
from ..figures import figure
from ..shortfall import untrained
from ..verdicts import at_ceiling, judge, Verdict
from . import large_k_augmented
from .large_k_augmented import (
    caption,
    COLOURS,
    ends,
    LargeK,
    PROBED_LAYERS,
    SHARE,
    share_of_the_way,
)


def judge_all(settings: LargeK, all_runs: Sequence[Runs]) -> list[Verdict]:
    first, last = ends(settings, all_runs)
    small = f"K = {first.point['period']:,}"
    finished = lambda values: training.where_trained(values, first, last)
    lacking = untrained(first, last)
    half = first["test_accuracy"].shape[1] // 2
    verdicts = []
    for layer in PROBED_LAYERS:
        of_first, of_last = first[f"probe_{layer}"], last[f"probe_{layer}"]
        verdicts += [
            judge(
                f"Probes of layer {layer} improve more slowly with large K",
                "difference in mean probe accuracy over the first half of training, "
                f"large K less {small}",
                np.mean(of_last[:, :half] - of_first[:, :half], axis=1),
                thresholds.FALLS,
                untested=at_ceiling(of_first[:, 0]),
            ),
            judge(
                f"Probes of layer {layer} end lower with large K",
                f"difference in final probe accuracy, large K less {small}",
                finished(of_last[:, -1] - of_first[:, -1]),
                thresholds.FALLS,
                untested=at_ceiling(of_first[:, 0]),
                lacking=lacking,
            ),
        ]
    behind = lambda name: first.final(name) - last.final(name)
    deepest = f"probe_{PROBED_LAYERS[-1]}"
    verdicts += [
        judge(
            f"Probes end as accurate with large K as they are with {small} after about "
            f"{SHARE:.0%} of the steps",
            f"share of the steps after which the probe of layer {PROBED_LAYERS[-1]} is "
            f"as accurate with {small} as with large K at the end (1 if it never is), "
            "median over the seeds",
            finished(
                share_of_the_way(
                    np.pad(first[deepest], ((0, 0), (1, 0))), last.final(deepest)
                )
            ),
            thresholds.FIFTH_OF_THE_WAY,
            statistic=lambda ways: float(np.median(ways)),
            untested=at_ceiling(first[deepest][:, 0]),
            lacking=lacking,
        ),
        judge(
            "Large K loses less test accuracy than probe accuracy",
            f"loss of final test accuracy with large K relative to {small}, less the "
            "same loss of the accuracy of the second layer's probes",
            finished(behind("test_accuracy") - behind(deepest)),
            thresholds.FALLS,
            lacking=lacking,
        ),
    ]
    return verdicts


def draw(settings: LargeK, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    with figure(out / "linear_probe.png", width=11, height=4.6) as drawing:
        panels = drawing.subplots(1, len(PROBED_LAYERS), sharey=True)
        for panel, layer in zip(panels, PROBED_LAYERS, strict=True):
            for runs, colour in zip(ends(settings, all_runs), COLOURS, strict=True):
                label = f"K = {runs.point['period']:,}"
                training.draw_band(panel, runs, f"probe_{layer}", colour, label)
            panel.set(title=f"Layer {layer}", xlabel="Steps")
        panels[0].set_ylabel("Test accuracy of the probe (%)")
        panels[0].legend()
    return {
        "linear_probe": "Test accuracy over steps of a linear classifier of each "
        f"layer's pooled activations, trained on {settings.num_probed:,} images; "
        f"means and ranges over the seeds. {caption(settings, all_runs)}"
    }


EXPERIMENT = dataclasses.replace(
    large_k_augmented.EXPERIMENT,
    judge=judge_all,
    draw=draw,
    paper="In the paper, in the runs of large-k-augmented, the accuracy of linear "
    "probes improves more slowly with large K, and ends lower.",
    runs_of="large-k-augmented",
)
