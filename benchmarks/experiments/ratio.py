"""How much of the predicted decrease the longest step must achieve.

[`gnlin.LevenbergMarquardt`][] on a full batch takes the longest step at which the loss
still falls by a given part of the predicted decrease, the `ratio` of
`gnlin.damping.LongestStep`. At several ratios, the experiment measures the loss after
given numbers of steps, on networks that fit functions and images and on Burgers'
equation, and the number of steps that NIST's fits take.
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
from jaxtyping import Array, Bool, Float, Key, PyTree
from numpy import ndarray
from scipy.stats import qmc

import gnlin

from .. import equations, thresholds
from .._results import write_whole
from ..data import digits, nist
from ..experiment import Columns, Experiment, only, Place, Point, Runs, Settings
from ..figures import BLACK, BLUE, figure, fill, shades
from ..networks.mlp import TanhMLP
from ..verdicts import judge, Verdict
from .nist import attempt, through_optimistix


DEFAULT, SMALL, LARGE = 0.25, 0.075, 0.75
FITS = "nist"
VISCOSITY = 0.01
# Weight of Burgers' equation relative to its initial condition: both fall together.
_OF_EQUATION = 1e-2
# A loss below this part of the first is rounding; all such losses count as equal.
_ROUNDING = 1e-28

#
# Problems
#


class Problem(NamedTuple):
    title: str
    model: Callable[[Key[Array, ""]], PyTree]
    data: Callable[[], PyTree]
    valley: bool = False
    """Whether small ratios are claimed to be better than large ones, not the reverse."""


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
    """Return the model as a function of a point (t, x) that has the period 2 in x."""
    return lambda point: model(
        jnp.stack([jnp.cos(jnp.pi * point[1]), jnp.sin(jnp.pi * point[1]), point[0]])
    )


def _inside(model: PyTree, point: equations.Point) -> Float[Array, ""]:
    return equations.burgers.burgers(_periodic(model), point, VISCOSITY)


def _at_start(model: PyTree, point: equations.Point) -> Float[Array, ""]:
    return _periodic(model)(point) + jnp.sin(jnp.pi * point[1])


def _burgers(number: int) -> equations.Groups:
    """Return the residuals of Burgers' equation at `number` points, and of its initial
    condition at an eighth as many."""
    drawn = qmc.Sobol(2, rng=0).random(number)
    inside = jnp.asarray(drawn * [1, 2] - [0, 1])
    start = equations.grid(np.zeros(1), np.linspace(-1, 1, number // 8, endpoint=False))
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
        functools.partial(_burgers, 512),
        valley=True,
    ),
    "burgers-large": Problem(
        "Burgers, 3-16-16-16-1, 2,048 + 256 points",
        functools.partial(TanhMLP, (3, 16, 16, 16)),
        functools.partial(_burgers, 2048),
        valley=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Ratio(Settings):
    seeds: int = 6
    """With five seeds, even identical values would not decide a claim."""
    ratios: tuple[float, ...] = (0.01, 0.075, 0.15, 0.25, 0.5, 0.75, 0.9)
    problems: tuple[str, ...] = ("network-16", "network-32", "digits", "burgers")
    looks: tuple[int, ...] = (5, 10, 20, 40, 80)
    """Numbers of steps after which to look."""
    judged_after: int = 40
    """The look at which claims are judged."""
    fits: tuple[str, ...] = tuple(nist.MODELS)
    """NIST's fits, each from both starts."""


EMBEDDED = Ratio()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    ratios=(0.075, 0.25, 0.75),
    problems=("network-16",),
    looks=(2, 5),
    judged_after=5,
    fits=("Misra1a", "BoxBOD"),
)
FULL = dataclasses.replace(EMBEDDED, problems=tuple(PROBLEMS))


def swept(settings: Ratio) -> list[float]:
    """Return the ratios in ascending order, always with the default."""
    return sorted({*settings.ratios, DEFAULT})


def points(settings: Ratio) -> list[Point]:
    return [
        {"problem": problem, "ratio": ratio}
        for problem in (*settings.problems, FITS)
        for ratio in swept(settings)
    ]


def train(settings: Ratio, point: Point, place: Place) -> Columns:
    nist.require(settings.fits)
    # An array, so that all ratios share a compiled program.
    rule = gnlin.damping.LongestStep(jnp.asarray(point["ratio"]))
    solver = gnlin.LevenbergMarquardt(damping=rule)
    if point["problem"] == FITS:
        return _fit(settings, solver)
    problem, looks = PROBLEMS[point["problem"]], np.array(settings.looks)
    data, losses = problem.data(), []
    for seed in settings.each_seed:
        model = problem.model(jax.random.key(seed))
        losses.append(losses_after(looks, model, data, solver))
    return {"steps": np.tile(looks, (settings.seeds, 1)), "loss": np.array(losses)}


def losses_after(
    looks: ndarray, model: PyTree, data: Any, solver: gnlin.LevenbergMarquardt
) -> Float[ndarray, " looks"]:
    """Return the losses at the looks; a run that has ended keeps its last loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # if rounding allows no further decrease
        end = gnlin.solve(model, data, solver, max_steps=int(looks.max()), progress=False)
    losses = np.append(end.history.loss, float(end.loss))
    losses = np.maximum(losses, _ROUNDING * losses[0])
    return losses[np.minimum(looks, len(losses) - 1)]


def _fit(settings: Ratio, solver: gnlin.LevenbergMarquardt) -> Columns:
    """Run NIST's fits; each fit takes the place of a seed."""
    solve = through_optimistix(solver)
    rows = [
        attempt(nist.load(name), start, FITS, solve)
        for name in settings.fits
        for start in (1, 2)
    ]
    return {
        "fit": np.array([[row.case] for row in rows]),
        "steps": np.array([[row.steps or 0] for row in rows]),
        "solved": np.array([[row.solved] for row in rows]),
    }


#
# Verdicts
#


def log_losses(
    settings: Ratio, all_runs: Sequence[Runs], problem: str, look: int
) -> Float[ndarray, "seeds ratios"]:
    """Return log10 of the losses after this number of steps."""
    runs = [only(all_runs, problem=problem, ratio=ratio) for ratio in swept(settings)]
    place = settings.looks.index(look)
    return np.log10(np.stack([each["loss"][:, place] for each in runs], axis=1))


def solved_and_log_steps(
    settings: Ratio, all_runs: Sequence[Runs]
) -> tuple[Bool[ndarray, "fits ratios"], Float[ndarray, "fits ratios"]]:
    """Return whether each fit is solved, and log10 of its steps, which is NaN for fits
    that some ratio does not solve."""
    runs = [only(all_runs, problem=FITS, ratio=ratio) for ratio in swept(settings)]
    solved, steps = (
        np.concatenate([each[name] for each in runs], axis=1)
        for name in ("solved", "steps")
    )
    by_all = solved.all(axis=1, keepdims=True)
    return solved, np.log10(np.where(by_all, np.maximum(steps, 1), np.nan))


def judge_all(settings: Ratio, all_runs: Sequence[Runs]) -> list[Verdict]:
    ratios, after = np.array(swept(settings)), settings.judged_after
    logs = {
        name: log_losses(settings, all_runs, name, after) for name in settings.problems
    }

    def excess_of_default(values):
        mean = values.mean(axis=0)
        return float(mean[ratios == DEFAULT][0] - mean.min())

    def least_excess(values):
        mean = values.mean(axis=0)  # by problem and ratio
        return float((mean - mean.min(axis=1, keepdims=True)).max(axis=0).min())

    def small_over_large(values):
        mean = values.mean(axis=0)
        return float(mean[ratios < DEFAULT].min() - mean[ratios > DEFAULT].min())

    one_sided = not (np.any(ratios < DEFAULT) and np.any(ratios > DEFAULT))
    verdicts = [
        judge(
            f"{PROBLEMS[name].title}: after {after} steps the loss of the default ratio "
            "is within a factor of 10 of the best ratio's",
            "log10 of the ratio of losses, default over best, geometric means over the "
            "seeds",
            values,
            thresholds.NEAR_BEST_RATIO,
            statistic=excess_of_default,
        )
        for name, values in logs.items()
    ]
    verdicts.append(
        judge(
            f"After {after} steps no single ratio is best on all problems",
            "log10 of (loss / loss of the best ratio), geometric means over the "
            "seeds, maximum over the problems, minimum over the ratios",
            np.stack(list(logs.values()), axis=1),
            thresholds.NO_ONE_RATIO,
            statistic=least_excess,
        )
    )
    for name, values in logs.items():
        valley = PROBLEMS[name].valley
        untested = ""
        if one_sided:
            values, untested = [], "all ratios are on one side of the default"
        elif small_over_large(values) == 0:
            untested = "the best ratios of both sides end at the same loss"
        verdicts.append(
            judge(
                f"{PROBLEMS[name].title}: after {after} steps some ratio "
                f"{'below' if valley else 'above'} the default is better than all on the "
                "other side",
                "log10 of the ratio of smallest losses, ratios below the default over "
                "ratios above, geometric means over the seeds",
                values,
                thresholds.FALLS if valley else thresholds.RISES,
                statistic=small_over_large,
                untested=untested,
            )
        )
    if "burgers" in settings.problems and {SMALL, LARGE} <= set(ratios):
        last = settings.looks[-1]
        values = log_losses(settings, all_runs, "burgers", last)
        small, large = (values[:, ratios == ratio][:, 0] for ratio in (SMALL, LARGE))
        verdicts.append(
            judge(
                f"{PROBLEMS['burgers'].title}: after {last} steps a ratio of {SMALL:g} "
                f"has at most a tenth of the loss of {LARGE:g}",
                f"log10 of the ratio of losses, {SMALL:g} over {LARGE:g}",
                small - large,
                thresholds.TENTH_OF_LOSS,
            )
        )
    verdicts.append(
        judge(
            "NIST's fits: the ratio changes the number of steps by at most a tenth",
            "log10 of (most steps / fewest steps) over the ratios, geometric means over "
            "the fits that all ratios solve",
            solved_and_log_steps(settings, all_runs)[1],
            thresholds.TENTH_OF_STEPS,
            statistic=lambda values: float(np.ptp(values.mean(axis=0))),
        )
    )
    return verdicts


#
# Table and figure
#


def table(settings: Ratio, all_runs: Sequence[Runs]) -> str:
    """Return a table in Markdown, with the best of each row in bold unless all are
    equal."""
    ratios = swept(settings)
    lines = [
        "| | steps | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |",
        "|" + "---|" * (2 + len(ratios)),
    ]

    def add(title: str, steps: str, values: ndarray, best: float, shown: str) -> None:
        cells, wanted = [format(value, shown) for value in values], format(best, shown)
        bold = [f"**{cell}**" if cell == wanted else cell for cell in cells]
        lines.append(
            f"| {' | '.join([title, steps, *(bold if {*cells} - {wanted} else cells)])} |"
        )

    for name in settings.problems:
        for look in settings.looks:
            loss = 10 ** log_losses(settings, all_runs, name, look).mean(axis=0)
            title = PROBLEMS[name].title if look == settings.looks[0] else ""
            add(title, f"{look}", loss, loss.min(), ".1e")
    solved, steps = solved_and_log_steps(settings, all_runs)
    mean = 10 ** np.nanmean(steps, axis=0)
    add("NIST's fits: steps, geometric mean", "", mean, mean.min(), ".1f")
    number = solved.sum(axis=0)
    add(f"NIST's fits: solved of {len(solved)}", "", number, number.max(), "d")
    return "\n".join(lines) + "\n"


def draw(settings: Ratio, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    text = table(settings, all_runs)
    write_whole(out / "ratio.md", lambda part: part.write_text(text))
    ratios, num_panels = swept(settings), len(settings.problems) + 1
    at, rows = np.arange(len(ratios)), -(-num_panels // 3)
    columns = min(num_panels, 3)
    with figure(out / "ratio.png", 4.2 * columns, 3.6 * rows + 0.4) as drawing:
        panels = drawing.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[num_panels:]:
            panel.set_axis_off()
        for panel in panels[:num_panels]:
            panel.axvline(ratios.index(DEFAULT), color=BLACK, linestyle=":", linewidth=1)
            panel.set_xticks(at, [f"{ratio:g}" for ratio in ratios])
            panel.set_xlabel("Ratio")
        for panel, name in zip(panels, settings.problems, strict=False):
            for look, colour in zip(
                settings.looks, shades(len(settings.looks)), strict=True
            ):
                logs = log_losses(settings, all_runs, name, look)
                mean = 10 ** logs.mean(axis=0)
                ends = 10 ** logs.min(axis=0), 10 ** logs.max(axis=0)
                panel.plot(at, mean, "o-", color=colour, label=f"{look} steps")
                fill(panel, at, *ends, colour)
            panel.set(yscale="log", ylabel="Loss")
            panel.set_title(PROBLEMS[name].title, fontsize="small")
        solved, steps = solved_and_log_steps(settings, all_runs)
        last = panels[num_panels - 1]
        mean = 10 ** np.nanmean(steps, axis=0)
        last.plot(at, mean, "o-", color=BLUE)
        last.set(ylabel="Steps, geometric mean", ylim=(0, 1.15 * mean.max()))
        last.set_title(f"NIST's fits ({solved.all(axis=1).sum()})", fontsize="small")
        handles = panels[0].get_legend_handles_labels()
        drawing.legend(*handles, loc="outside lower center", ncols=len(settings.looks))
    return {
        "ratio": "The loss after several numbers of steps, over the part of the "
        "predicted decrease that a step must achieve; geometric means and ranges "
        f"over {settings.seeds} seeds. The dotted line marks the default. The last "
        "panel shows the number of steps of NIST's fits that all ratios solve. "
        f"Losses below {_ROUNDING:g} of the first count as rounding."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The rule comes from arXiv:2607.02194, which uses a ratio of 0.075 for "
    "sketched problems, and does not say how to choose the ratio.",
    grid="ratios",
    seedless=lambda point: point["problem"] == FITS,
    steps="",
    bounds=(1e-6, 1 - 1e-6),
)
