"""What the hidden units of an XOR network learn, as K and lambda vary.

Noisy XOR can be solved by features along the four corners, but also by random features.
One hidden layer is trained to convergence by K steps on each linearisation, and by
damping at matched strength, lambda = 1/(eta K). It starts from the usual initialisation
and from a small one, which leaves more features to learn. The alignment of a unit is
`max_c cos(w, c)` over the corners c. Its mean over the units is the paper's statistic
(equation 11); a second mean weights each unit by its contribution, |output weight| |w|.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

import gnlin

from .. import thresholds
from ..data import xor
from ..experiment import Columns, Experiment, Place, Point, Runs, select, Settings
from ..figures import band, BLACK, BLUE, figure, ORANGE, shades
from ..networks.mlp import xor_mlp
from ..verdicts import at_ceiling, judge, rank_correlation, Verdict


CORNERS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
# From this number of steps on, the spectrum is cheaper than the steps.
_SPECTRUM_PAYS = 1000
_SHOWN = 4
"""Number of strengths that are drawn."""

ALIGNMENTS = {"alignment": "Alignment", "weighted_alignment": "Weighted alignment"}
COLOURS = BLUE, ORANGE
BY_PERIOD, BY_DAMPING = "iterative-linearisation", "damped-gauss-newton"


@dataclasses.dataclass(frozen=True)
class XorFeatures(Settings):
    seeds: int = 10
    scales: tuple[float, ...] = (1.0, 0.3)
    """Scales of the initial weights, relative to the usual ones."""
    periods: tuple[float, ...] = tuple((10.0 ** np.arange(8)).tolist())
    """K; the dampings are 1/(eta K)."""
    learning_rate: float = 1e-4
    """Its product with the kernel's largest eigenvalue must stay below 2."""
    num_steps: int = 10**5
    """Inner steps for every K, with at least `fewest_updates` feature updates."""
    fewest_updates: int = 300
    damped_steps: int = 300
    num_train: int = 200
    num_test: int = 1000


EMBEDDED = XorFeatures()
QUICK = dataclasses.replace(EMBEDDED, seeds=2, periods=(1e3, 1e5, 1e7), fewest_updates=10)
FULL = dataclasses.replace(
    EMBEDDED, seeds=20, num_steps=10**6, fewest_updates=3000, damped_steps=3000
)


def points(settings: XorFeatures) -> list[Point]:
    return [
        {"scale": scale, "solver": solver, "period": period}
        for scale in settings.scales
        for solver in (BY_PERIOD, BY_DAMPING)
        for period in settings.periods
    ]


def train(settings: XorFeatures, point: Point, place: Place) -> Columns:
    data, test = (
        _drawn(settings, number, start)
        for number, start in ((settings.num_train, 0), (settings.num_test, 10_000))
    )
    period: Any = point["period"]
    damping = gnlin.filters.equivalent_damping(
        jnp.asarray(period), settings.learning_rate
    )
    num_steps = settings.damped_steps
    solver = gnlin.DampedGaussNewton(damping, search=None)
    if point["solver"] == BY_PERIOD:
        num_steps = max(int(settings.num_steps / period), settings.fewest_updates)
        method = "matrix-free" if period < _SPECTRUM_PAYS else "auto"
        solver = gnlin.IterativeLinearisation(
            jnp.asarray(period), settings.learning_rate, method=method
        )
    runs = jnp.asarray(settings.each_seed), data, test
    found = _train(runs, jnp.asarray(point["scale"]), solver, num_steps)
    return {"damping": np.full(settings.seeds, damping), **jax.device_get(found)}


def _drawn(settings: XorFeatures, number: int, start: int) -> tuple[Array, ...]:
    """Return inputs and targets, with a first axis over the seeds."""
    drawn = [xor.examples(number, start + seed) for seed in settings.each_seed]
    return tuple(jnp.asarray(np.stack(part)) for part in zip(*drawn, strict=True))


@eqx.filter_jit
def _train(runs, scale: Float[Array, ""], solver, num_steps: int):
    def one(run):
        seed, data, test = run
        model = xor_mlp(jax.random.key(seed), scale)
        solution = gnlin.solve(model, data, solver, max_steps=num_steps, divergence=None)
        return _measure(solution.model, data, test, solution.stats["num_feature_updates"])

    return jax.lax.map(one, runs)


def with_corners(rows: Float[Array, "units 2"]) -> Float[Array, " units"]:
    """Return the cosine between each row and its nearest corner; 0 for a row of zeros."""
    corners = jnp.asarray(CORNERS) / np.sqrt(2)
    size = jnp.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / jnp.where(size > 0, size, 1)
    return jnp.max(jnp.matmul(unit, corners.T, precision="highest"), axis=1)


def _measure(model: eqx.nn.MLP, data, test, feature_updates) -> dict[str, Array]:
    first, last = model.layers
    assert last.weight.ndim == 2
    rows, output = first.weight, last.weight[0]
    alignment = with_corners(rows)
    share = jnp.abs(output) * jnp.linalg.norm(rows, axis=1)
    residual = jax.vmap(model)(data[0]) - data[1]
    right = jnp.sign(jax.vmap(model)(test[0])) == jnp.sign(test[1])
    return {
        "train_rmse": jnp.sqrt(jnp.mean(residual**2)),
        "test_accuracy": jnp.mean(right),
        "alignment": jnp.mean(alignment),
        "weighted_alignment": jnp.sum(share * alignment) / jnp.sum(share),
        "feature_updates": feature_updates,
        # First-layer rows, and the output weight.
        "weights": jnp.column_stack([rows, output]),
    }


def judge_all(settings: XorFeatures, all_runs: Sequence[Runs]) -> list[Verdict]:
    return [
        verdict
        for scale in settings.scales
        for solver in (BY_PERIOD, BY_DAMPING)
        for verdict in _judge(
            settings, scale, solver, select(all_runs, scale=scale, solver=solver)
        )
    ]


def _judge(
    settings: XorFeatures, scale: float, solver: str, all_runs: Sequence[Runs]
) -> list[Verdict]:
    over = "K" if solver == BY_PERIOD else "1/lambda"
    claim = "as K grows" if solver == BY_PERIOD else "as lambda shrinks"
    claim += f", {_initial(scale)}"
    last, first = all_runs[-1]["test_accuracy"], all_runs[0]["test_accuracy"]
    return [
        *(
            judge(
                f"{kind} with the corners falls {claim}",
                f"Spearman's correlation of {kind.lower()} (mean over the units) with "
                f"{over}",
                rank_correlation(
                    np.array(settings.periods),
                    np.stack([runs[name] for runs in all_runs], axis=1),
                ),
                thresholds.FALLS,
            )
            for name, kind in ALIGNMENTS.items()
        ),
        judge(
            f"Accuracy does not fall {claim}",
            f"difference in test accuracy, largest {over} less smallest",
            last - first,
            thresholds.NOT_LOST,
            untested=at_ceiling(first, last),
        ),
    ]


def _initial(scale: float) -> str:
    return "usual initialisation" if scale == 1 else f"{scale:g} x usual initialisation"


def draw(settings: XorFeatures, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw for each initialisation and solver the alignment over strength, and at a few
    strengths a histogram of alignments and the units' weights."""
    num_shown = min(_SHOWN, len(settings.periods))
    shown = np.linspace(0, len(settings.periods) - 1, num_shown).round().astype(int)
    kinds = [(s, solver) for s in settings.scales for solver in (BY_PERIOD, BY_DAMPING)]
    largest = max(np.abs(runs["weights"][0, :, 2]).max() for runs in all_runs)
    with figure(out / "xor_features.png", width=17, height=3 * len(kinds)) as drawing:
        axes = drawing.subplots(len(kinds), 2 + num_shown, squeeze=False)
        points = None
        for row, (scale, solver) in zip(axes, kinds, strict=True):
            of_kind = select(all_runs, scale=scale, solver=solver)
            over = r"K" if solver == BY_PERIOD else r"1/(\eta\lambda)"
            for (name, kind), colour in zip(ALIGNMENTS.items(), COLOURS, strict=True):
                values = np.stack([runs[name] for runs in of_kind], axis=1)
                band(row[0], settings.periods, values, colour, kind, "o-")
            row[0].set(xscale="log", xlabel=f"${over}$")
            row[0].set_title(_initial(scale).capitalize(), fontsize="medium")
            _draw_histogram(row[1], [of_kind[i] for i in shown])
            for plane, i in zip(row[2:], shown, strict=True):
                points = _draw_plane(plane, of_kind[i]["weights"][0], largest)
                plane.set_title(_strength(of_kind[i]), fontsize="medium")
            row[2].set_ylabel("$w_2$")
        axes[0, 0].legend(fontsize="small")
        for axis in axes[-1, 2:]:
            axis.set_xlabel("$w_1$")
        if points is not None:
            drawing.colorbar(points, ax=axes[:, -1], label="Output weight")
    caption = (
        "Left: mean alignment of the hidden units with the nearest corner, over K and "
        "over damping of matched strength, from the usual initialisation and from a "
        f"smaller one; means and ranges over {settings.seeds} seeds. Second column: "
        "histograms of the alignments of all units, and of random directions (dotted). "
        "Right: the units' weights for one seed, coloured by output weight. The network "
        f"is 2-100-1, and each seed draws its own {settings.num_train} noisy XOR points."
    )
    return {"xor_features": caption}


def alignments(runs: Runs) -> Float[ndarray, " units"]:
    """Return the alignments of all units of all seeds."""
    rows = runs["weights"][..., :2].reshape(-1, 2)
    return np.asarray(with_corners(jnp.asarray(rows)))


def _draw_histogram(axes, all_runs: Sequence[Runs]) -> None:
    """Draw histograms of the alignments at each strength, and of random directions."""
    bins = np.linspace(np.sqrt(0.5), 1, 21)
    # The angle to the nearest corner is uniform for random directions.
    random = np.diff(-np.arccos(bins)) / (np.pi / 4)
    axes.stairs(100 * random, bins, color=BLACK, linestyle=":", label="random")
    for runs, colour in zip(all_runs, shades(len(all_runs)), strict=True):
        number, _ = np.histogram(alignments(runs), bins)
        share = 100 * number / number.sum()
        axes.stairs(share, bins, color=colour, label=_strength(runs))
    axes.set(xlabel="Alignment", ylabel="Units (%)")
    axes.legend(fontsize="xx-small", loc="upper left")


def _draw_plane(axes, weights: Float[ndarray, "units 3"], largest: float) -> Any:
    """Draw the weights of one seed's units, coloured from -`largest` to `largest`."""
    span = 1.1 * np.abs(weights[:, :2]).max()
    axes.set(xlim=(-span, span), ylim=(-span, span), aspect="equal")
    return axes.scatter(
        *weights[:, :2].T,
        c=weights[:, 2],
        cmap="coolwarm",
        vmin=-largest,
        vmax=largest,
        s=14,
    )


def _strength(runs: Runs) -> str:
    if runs.point["solver"] == BY_PERIOD:
        return f"$K = ${_power(float(runs.point['period'] or 0))}"
    return rf"$\lambda = ${_power(runs['damping'][0])}"


def _power(x: float) -> str:
    exponent = np.log10(x)
    if abs(exponent - round(exponent)) < 1e-6:
        return f"$10^{{{round(exponent)}}}$"
    return f"{x:.3g}"


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains one hidden layer on noisy XOR to convergence. Alignment "
    "with the corners falls as K grows or lambda shrinks, but accuracy does not.",
    grid="periods",
)
