"""The longest step that keeps its promise: which part of it is to be kept.

[`gnlin.LevenbergMarquardt`][] on a full batch takes the longest step at which the loss
still falls by a part of what is predicted, the `ratio` of `gnlin.damping.LongestStep`.
This experiment compares the losses that several ratios reach after some numbers of
steps, on networks that fit a function or images and on Burgers' equation.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree
from numpy import ndarray
from scipy.stats import qmc

import gnlin

from .. import equations, thresholds
from .._results import write_whole
from ..data import digits
from ..experiment import Columns, Experiment, only, Place, Point, Runs, Settings
from ..figures import BLACK, figure, shades
from ..networks.mlp import TanhMLP
from ..verdicts import judge, Verdict


DEFAULT, SMALL, LARGE = 0.25, 0.075, 0.75
VISCOSITY = 0.01
# The equation's weight beside its start: both parts of the loss then fall together.
_OF_EQUATION = 1e-2
# A loss below this part of the first is rounding: all such losses count as equal.
_ROUNDING = 1e-28

#
# Problems
#


class Problem(NamedTuple):
    title: str
    model: Callable[[Key[Array, ""]], PyTree]
    data: Callable[[], PyTree]


def _network(width: int, key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, "scalar", width, 3, jnp.tanh, key=key)


def _wave() -> tuple[Float[Array, "400 2"], Float[Array, "400"]]:
    points = np.random.default_rng(0).uniform(-1, 1, (400, 2))
    x, y = points.T
    values = np.sin(4 * x) * np.cos(5 * y) + np.exp(-10 * (x**2 + y**2))
    return jnp.asarray(points), jnp.asarray(values)


def _classifier(key: Key[Array, ""]) -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 10, 20, 2, jnp.tanh, key=key)


def _images() -> tuple[Float[Array, "100 64"], Float[Array, "100 10"]]:
    pixels, labels = digits.examples(per_class=10)[0]
    return jnp.asarray(pixels), jnp.asarray(labels)


def _periodic(model: PyTree) -> equations.Function:
    """The model as a function of a point (t, x), with period 2 in x."""
    return lambda point: model(
        jnp.stack([jnp.cos(jnp.pi * point[1]), jnp.sin(jnp.pi * point[1]), point[0]])
    )


def _inside(model: PyTree, point: equations.Point) -> Float[Array, ""]:
    return equations.burgers(_periodic(model), point, VISCOSITY)


def _at_start(model: PyTree, point: equations.Point) -> Float[Array, ""]:
    return _periodic(model)(point) + jnp.sin(jnp.pi * point[1])


def _burgers() -> equations.Groups:
    """512 points inside and 64 at the start."""
    drawn = qmc.Sobol(2, rng=0).random(512)
    inside = jnp.asarray(drawn * [1, 2] - [0, 1])
    start = equations.grid(np.zeros(1), np.linspace(-1, 1, 64, endpoint=False))
    group = functools.partial(gnlin.Residuals, loss=gnlin.SquaredError(reduction="sum"))
    return {
        "interior": group(_inside, inside, weight=_OF_EQUATION / len(inside)),
        "start": group(_at_start, start, weight=1 / len(start)),
    }


PROBLEMS = {
    "network-16": Problem(
        "a network, 2-16-16-16-1, on 400 points", functools.partial(_network, 16), _wave
    ),
    "network-32": Problem(
        "a network, 2-32-32-32-1, on 400 points", functools.partial(_network, 32), _wave
    ),
    "digits": Problem("100 digits, 64-20-20-10", _classifier, _images),
    "burgers": Problem(
        "Burgers, 3-10-10-10-1, 512 + 64 points",
        functools.partial(TanhMLP, (3, 10, 10, 10)),
        _burgers,
    ),
}


@dataclasses.dataclass(frozen=True)
class Ratio(Settings):
    seeds: int = 6
    """Five that agree in sign would not be enough to decide a claim."""
    ratios: tuple[float, ...] = (0.01, SMALL, DEFAULT, 0.5, LARGE)
    problems: tuple[str, ...] = tuple(PROBLEMS)
    looks: tuple[int, ...] = (10, 20, 40, 80)
    """The numbers of steps after which the loss is taken."""
    judged_after: int = 40
    """One of these; the claim on Burgers' equation is judged at the last of them."""


EMBEDDED = Ratio()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    ratios=(SMALL, DEFAULT, LARGE),
    problems=("network-16", "burgers"),
    looks=(2, 5),
    judged_after=5,
)
FULL = dataclasses.replace(
    EMBEDDED, seeds=20, ratios=(0.01, 0.03, SMALL, 0.15, DEFAULT, 0.35, 0.5, LARGE, 0.9)
)


def swept(settings: Ratio) -> list[float]:
    """The ratios in ascending order, the default always among them."""
    return sorted({*settings.ratios, DEFAULT})


def points(settings: Ratio) -> list[Point]:
    return [
        {"problem": problem, "ratio": ratio}
        for problem in settings.problems
        for ratio in swept(settings)
    ]


def train(settings: Ratio, point: Point, place: Place) -> Columns:
    # An array, so that all ratios share a compiled program.
    rule = gnlin.damping.LongestStep(jnp.asarray(point["ratio"]))
    solver = gnlin.LevenbergMarquardt(damping=rule)
    problem, looks = PROBLEMS[point["problem"]], np.array(settings.looks)
    data, losses = problem.data(), []
    for seed in range(settings.seeds):
        model = problem.model(jax.random.key(seed))
        losses.append(losses_after(looks, model, data, solver))
    return {"steps": np.tile(looks, (settings.seeds, 1)), "loss": np.array(losses)}


def losses_after(
    looks: ndarray, model: PyTree, data: Any, solver: gnlin.LevenbergMarquardt
) -> Float[ndarray, " looks"]:
    """The losses after so many steps; a run that has ended keeps its last loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where rounding lets no step gain anything
        end = gnlin.solve(model, data, solver, max_steps=int(looks.max()), progress=False)
    losses = np.append(end.history.loss, float(end.loss))
    losses = np.maximum(losses, _ROUNDING * losses[0])
    return losses[np.minimum(looks, len(losses) - 1)]


#
# Verdicts
#


def log_losses(
    settings: Ratio, all_runs: Sequence[Runs], problem: str, look: int
) -> Float[ndarray, "seeds ratios"]:
    """log10 of the losses after so many steps."""
    runs = [only(all_runs, problem=problem, ratio=ratio) for ratio in swept(settings)]
    place = settings.looks.index(look)
    return np.log10(np.stack([each["loss"][:, place] for each in runs], axis=1))


def judge_all(settings: Ratio, all_runs: Sequence[Runs]) -> list[Verdict]:
    ratios, after = swept(settings), settings.judged_after
    logs = {
        name: log_losses(settings, all_runs, name, after) for name in settings.problems
    }
    verdicts = [
        judge(
            f"{PROBLEMS[name].title}: after {after} steps the default's loss is within "
            "a factor of 10 of the best ratio's",
            "log10 of the quotient of their geometric means over the seeds",
            values,
            thresholds.NEAR_BEST_RATIO,
            statistic=lambda values: float(_excess(values)[ratios.index(DEFAULT)]),
        )
        for name, values in logs.items()
    ]
    verdicts.append(
        judge(
            f"After {after} steps no one ratio is best on all problems",
            "for each ratio the largest of all problems' log10 of its loss over the best "
            "ratio's, geometric means over the seeds; of these the least",
            np.stack(list(logs.values()), axis=1),
            thresholds.NO_ONE_RATIO,
            statistic=lambda values: float(_excess(values).max(axis=0).min()),
        )
    )
    if "burgers" in settings.problems and {SMALL, LARGE} <= set(ratios):
        last = settings.looks[-1]
        values = log_losses(settings, all_runs, "burgers", last)
        small, large = values[:, ratios.index(SMALL)], values[:, ratios.index(LARGE)]
        verdicts.append(
            judge(
                f"{PROBLEMS['burgers'].title}: after {last} steps a ratio of {SMALL:g} "
                f"has at most a tenth of the loss of {LARGE:g}",
                "log10 of the quotient of their losses, a seed",
                small - large,
                thresholds.TENTH_OF_LOSS,
            )
        )
    return verdicts


def _excess(logs: Float[ndarray, "seeds *problems ratios"]) -> Float[ndarray, "..."]:
    """log10 of each ratio's loss over the best one's, of geometric means over seeds."""
    mean = logs.mean(axis=0)
    return mean - mean.min(axis=-1, keepdims=True)


#
# Table and figure
#


def table(settings: Ratio, all_runs: Sequence[Runs]) -> str:
    """The geometric means over the seeds in Markdown, the best of each row in bold
    where others are worse."""
    ratios = swept(settings)
    lines = [
        "| | steps | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |",
        "|" + "---|" * (2 + len(ratios)),
    ]
    for name in settings.problems:
        for look in settings.looks:
            loss = 10 ** log_losses(settings, all_runs, name, look).mean(axis=0)
            cells, best = [f"{each:.1e}" for each in loss], f"{loss.min():.1e}"
            if {*cells} != {best}:
                cells = [f"**{cell}**" if cell == best else cell for cell in cells]
            title = PROBLEMS[name].title if look == settings.looks[0] else ""
            lines.append(f"| {' | '.join([title, f'{look}', *cells])} |")
    return "\n".join(lines) + "\n"


def draw(settings: Ratio, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    text = table(settings, all_runs)
    write_whole(out / "ratio.md", lambda part: part.write_text(text))
    ratios = swept(settings)
    at, columns = np.arange(len(ratios)), min(len(settings.problems), 2)
    rows = -(-len(settings.problems) // columns)
    with figure(out / "ratio.png", 4.6 * columns, 3.6 * rows + 0.4) as drawing:
        panels = drawing.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[len(settings.problems) :]:
            panel.set_axis_off()
        for panel, name in zip(panels, settings.problems, strict=False):
            for look, colour in zip(
                settings.looks, shades(len(settings.looks)), strict=True
            ):
                logs = log_losses(settings, all_runs, name, look)
                ends = 10 ** logs.min(axis=0), 10 ** logs.max(axis=0)
                mean, label = 10 ** logs.mean(axis=0), f"{look} steps"
                panel.plot(at, mean, "o-", color=colour, label=label)
                panel.fill_between(at, *ends, color=colour, alpha=0.15, linewidth=0)
            panel.axvline(ratios.index(DEFAULT), color=BLACK, linestyle=":", linewidth=1)
            panel.set_xticks(at, [f"{ratio:g}" for ratio in ratios])
            panel.set(yscale="log", xlabel="Ratio", ylabel="Loss")
            panel.set_title(PROBLEMS[name].title, fontsize="medium")
        handles = panels[0].get_legend_handles_labels()
        drawing.legend(*handles, loc="outside lower center", ncols=len(settings.looks))
    return {
        "ratio": "The loss after some numbers of steps over the part of its promise that "
        f"a step has to keep: geometric means and ranges of {settings.seeds} seeds "
        "(initialisations); the default is dotted."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The rule comes from sketched problems, with a ratio of 0.075 "
    "(arXiv:2607.02194); what decides the ratio is not said there.",
    grid="ratios",
    steps="",
    bounds=(1e-6, 1 - 1e-6),
)
