"""Preconditioned conjugate gradients: where they pay, and where they do not."""

import dataclasses
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

import gnlin
from gnlin.preconditioners import BlockDiagonal, Nystrom

from ..data import digits
from ..networks.mlp import digits_mlp
from .report import Comparison, Figure, Row, timed_row
from .task import in_double
from .timing import alternate, Case, ratio, Timing


PER_CLASS = 50
"""The number of images of each class: 5,000 outputs in all, for 3,010 parameters."""
RANKS = (50, 200)
NUM_FEATURES = 200
SMALLEST_SCALE = 1e-3

_Data = tuple[Float[Array, "n inputs"], Float[Array, "n outputs"]]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """A network and its data, and the accuracy to which it is solved."""

    name: str
    model: eqx.nn.MLP
    data: _Data
    tolerance: float
    damping: float
    pays: str = ""
    """The preconditioner that should pay here, as the beginning of its variant."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_rounds = 2 if quick else 5
    for setting in settings(quick):
        rows = of_one_linearisation(setting, num_rounds)
        figures = []
        if setting.pays and not quick:
            best = min(
                row.ratio
                for row in rows
                if row.ratio is not None and row.variant.startswith(setting.pays)
            )
            what = f"{setting.pays} over no preconditioner, {setting.name}"
            figures.append(Figure(what, "< 1", best))
        title = f"Conjugate gradients at one linearisation; {_described(setting)}"
        yield Comparison(title, rows, "none", figures=figures)


def settings(quick: bool) -> Iterator[Setting]:
    fresh, data = _network(), _digits(quick)
    trained = _trained(fresh, data, 5 if quick else 30)
    near = f"digits MLP, {'5' if quick else '30'} outer steps trained"
    yield Setting(near, trained, data, 1e-6, 1e-2, pays="Nystrom")
    yield Setting(near, trained, data, 0.1, 1e-2)
    yield Setting(near, trained, data, 1e-6, 1e2)
    yield Setting("digits MLP, fresh", fresh, data, 1e-6, 1.0)
    name = f"one layer of tanh, features on scales of 1 to {SMALLEST_SCALE:g}"
    layer, unlike = _layer(300 if quick else 2000)
    yield Setting(name, layer, unlike, 1e-6, 1e-4, pays="BlockDiagonal")
    yield Setting(name, layer, unlike, 1e-6, 1e2)


def of_one_linearisation(setting: Setting, num_rounds: int) -> list[Row]:
    tolerance, damping = jnp.asarray(setting.tolerance), jnp.asarray(setting.damping)
    cases, residuals = [], []
    for variant, preconditioner in _preconditioners().items():
        run = lambda preconditioner=preconditioner: _outer_step(
            setting.model, setting.data, tolerance, damping, preconditioner
        )
        end, counts = run()
        passes = f"{counts.num_jvps:.0f} + {counts.num_vjps:.0f} passes"
        note = f"{counts.num_inner_steps:.0f} iterations, {passes}"
        cases.append(Case("gnlin", variant, run, note=note))
        residuals.append(
            float(relative_residual(setting.model, end, setting.data, setting.damping))
        )
    rows = _rows(setting, alternate(cases, num_rounds))
    return [
        dataclasses.replace(row, linear_residual=residual, tolerance=setting.tolerance)
        for row, residual in zip(rows, residuals, strict=True)
    ]


def _preconditioners() -> dict[str, gnlin.preconditioners.AbstractPreconditioner | None]:
    return {
        "none": None,
        **{f"Nystrom({rank})": Nystrom(rank) for rank in RANKS},
        "BlockDiagonal()": BlockDiagonal(),
        "BlockDiagonal(1)": BlockDiagonal(1),
    }


def _rows(setting: Setting, timings: list[Timing]) -> list[Row]:
    """Return the rows, and note whether each preconditioner is faster than none, the
    first."""
    first, *others = timings
    task = f"preconditioners: {_described(setting)}"
    rows = [timed_row(task, first, first)]
    for timing in others:
        verdict = "pays" if ratio(timing, first) < 1 else "does not pay"
        row = timed_row(task, timing, first)
        rows.append(dataclasses.replace(row, note=f"{verdict}: {row.note}"))
    return rows


def _described(setting: Setting) -> str:
    return f"{setting.name}; tolerance {setting.tolerance:g}, damping {setting.damping:g}"


@eqx.filter_jit
def _outer_step(model, data: _Data, tolerance, damping, preconditioner):
    """Take an outer step. The program is compiled once for all dampings and
    tolerances."""
    fn, y = _residuals(model)
    solver = gnlin.TruncatedGaussNewton(
        tolerance,
        damping,
        search=None,
        method="matrix-free",
        preconditioner=preconditioner,
    )
    lin = gnlin.linearise(fn, y, data)
    state = solver.start(y, jax.eval_shape(fn, y, data))
    evaluate = lambda y_: fn(y_, data)
    y, state = solver.advance(gnlin.authoring.SumOfSquares(), lin, evaluate, state)
    return y, state.counts


@eqx.filter_jit
def relative_residual(
    model, end: PyTree[Array], data: _Data, damping
) -> Float[Array, ""]:
    """Return |phi^T phi s + phi^T r + lambda s| / |phi^T r|, by JAX's own products."""
    fn, y = _residuals(model)
    flat, unravel = ravel_pytree(y)
    step = ravel_pytree(end)[0] - flat
    residual, push = jax.linearize(lambda v: fn(unravel(v), data), flat)
    pull = jax.linear_transpose(push, flat)
    (left,), (gradient,) = pull(residual + push(step)), pull(residual)
    return jnp.linalg.norm(left + damping * step) / jnp.linalg.norm(gradient)


def _residuals(model) -> tuple[gnlin.PerExample, PyTree[Array]]:
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    return gnlin.PerExample(
        lambda y, xt: eqx.combine(y, frozen)(xt[0]) - xt[1]
    ), parameters


def _network() -> eqx.nn.MLP:
    return in_double(digits_mlp(jax.random.key(0)))


def _digits(quick: bool) -> _Data:
    (images, labels), _ = digits.examples(5 if quick else PER_CLASS)
    return jnp.asarray(images), jnp.asarray(labels)


def _trained(model: eqx.nn.MLP, data: _Data, num_steps: int) -> eqx.nn.MLP:
    solver = gnlin.TruncatedGaussNewton(0.1, damping=1.0, rtol=0.0, atol=0.0, search=None)
    return gnlin.solve(model, data, solver, max_steps=num_steps).model


def _layer(num_examples: int) -> tuple[eqx.nn.MLP, _Data]:
    """Return a layer and independent features, as if measured in unrelated units."""
    layer, features, targets = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(NUM_FEATURES, 5, 1, 0, final_activation=jnp.tanh, key=layer)
    x = jax.random.normal(features, (num_examples, NUM_FEATURES), float)
    x = x * jnp.geomspace(1, SMALLEST_SCALE, NUM_FEATURES)[None]
    return in_double(model), (
        x,
        jnp.tanh(jax.random.normal(targets, (num_examples, 5), float)),
    )
