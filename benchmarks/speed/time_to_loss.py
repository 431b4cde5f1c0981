"""Time to a given loss from the same starts: gnlin, first-order methods, and others."""

import dataclasses
from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..data import digits
from ..networks.cnn import smooth_digits_cnn
from ..networks.mlp import digits_mlp, quintic_mlp
from . import contenders
from .problem import Contender, cross_entropy, Problem, squared_error
from .report import Comparison, Row, timed_row
from .task import in_double
from .timing import alternate, Case, Timing


BEST = "gnlin's best"


def comparisons(quick: bool) -> Iterator[Comparison]:
    rounds = 1 if quick else 3
    for problem, field in problems(quick):
        rows = times_to(problem, field, rounds)
        title = (
            f"Time to a training loss of {problem.target:.3g}{problem.says} in double "
            f"precision; {problem.name}; {problem.num_starts}"
        )
        yield Comparison(title, rows, BEST)


def problems(quick: bool) -> list[tuple[Problem, list[Contender]]]:
    if quick:
        small = sinc(0.03, num_starts=1)
        field = [contenders.levenberg_marquardt(small), *contenders.first_order(small)]
        return [(small, field)]
    regressions = [sinc(0.03, num_starts=3), sinc(0.001, num_starts=3), quintic(0.1)]
    classifiers = [digits_by("mlp", 30, 0.1), digits_by("cnn", 10, 0.1)]
    return [
        *((problem, contenders.of_regression(problem)) for problem in regressions),
        *((problem, contenders.of_classification(problem)) for problem in classifiers),
    ]


def sinc(rms: float, num_starts: int) -> Problem:
    """Return the fit of 100 points of sin(x)/x by 20 tanh units, with 61 parameters."""
    x = jnp.linspace(-10.0, 10.0, 100)[:, None]
    make = lambda key: eqx.nn.MLP(1, 1, 20, 1, activation=jnp.tanh, key=key)
    data = x, jnp.sinc(x / jnp.pi)
    return _regression("sinc, 61 parameters", make, data, num_starts, rms, 50_000)


def quintic(rms: float) -> Problem:
    """Return the paper's regression."""
    from ..data.quintic import examples

    x, y = (jnp.asarray(values) for values in examples(20))
    return _regression("quintic, p = 7,801", quintic_mlp, (x, y), 1, rms, 20_000)


def _regression(name, make, data, num_starts, rms, most_steps) -> Problem:
    return Problem(
        name,
        *_starts(make, num_starts),
        data,
        squared_error,
        target=0.5 * len(data[1]) * rms**2,
        most_steps=most_steps,
        says=f" (RMS {rms:g})",
    )


def digits_by(kind: str, per_class: int, target: float) -> Problem:
    """Return the classification of digits by a dense or a convolutional network."""
    (images, labels), _ = digits.labelled(per_class, flat=kind == "mlp")
    make = {"mlp": digits_mlp, "cnn": smooth_digits_cnn}[kind]
    return Problem(
        f"{len(labels)} digits, {kind}",
        *_starts(make, 1),
        (jnp.asarray(images), jnp.asarray(labels)),
        cross_entropy,
        target,
        most_steps=1_000,
        most_newton_steps=20,
        says=" a digit",
    )


def _starts(make, number: int):
    models = [in_double(make(jax.random.key(seed))) for seed in range(number)]
    starts = [eqx.filter(model, eqx.is_inexact_array) for model in models]
    return models[0], starts


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A contender at its best setting, and the steps that it takes from each start."""

    contender: Contender
    setting: str
    steps: list[int]

    @property
    def name(self) -> str:
        return f"{self.contender.library} {self.variant}"

    @property
    def variant(self) -> str:
        return f"{self.contender.variant} {self.setting}".strip()


def tune(contender: Contender, problem: Problem) -> Tuned | None:
    """Choose the setting with the fewest steps from the first start. Return `None` if it
    does not reach the loss from every start."""
    best, fewest = None, contender.most_steps
    for setting in contender.settings:
        steps = contender.find(setting, problem.starts[0], fewest)
        if steps is not None and (best is None or steps < fewest):
            best, fewest = setting, steps
    if best is None:
        return None
    steps = [fewest]
    for start in problem.starts[1:]:
        found = contender.find(best, start, contender.most_steps)
        if found is None:
            return None
        steps.append(found)
    return Tuned(contender, best, steps)


def times_to(problem: Problem, field: Sequence[Contender], num_rounds: int) -> list[Row]:
    """Return the rows, the fastest first. Contenders that do not reach the loss come
    last."""
    tuned = [(contender, tune(contender, problem)) for contender in field]
    reached = [found for _, found in tuned if found is not None]
    jax.clear_caches()  # so that compiling is measured
    timings = alternate([_case(found, problem) for found in reached], num_rounds)
    ours = [timing for timing in timings if timing.case.library == "gnlin"]
    best = min(ours, key=lambda timing: timing.median, default=None)
    task = f"time to {problem.target:.3g}: {problem.name}"
    timings.sort(key=lambda timing: timing.median)
    rows = [timed_row(task, timing, best) for timing in timings]
    if best is not None and best is not timings[0]:
        why = _why(best, timings[0], reached)
        place = timings.index(best)
        rows[place] = dataclasses.replace(rows[place], note=rows[place].note + why)
    return [*rows, *(_missed(task, each) for each, found in tuned if found is None)]


def _why(ours: Timing, first: Timing, reached: Sequence[Tuned]) -> str:
    """Explain gnlin's time by the cost of its steps."""
    per_step = []
    for timing in (ours, first):
        name = timing.case.name
        (steps,) = (np.mean(tuned.steps) for tuned in reached if tuned.name == name)
        per_step.append(timing.median / steps)
    return f"; a step takes as long as {per_step[0] / per_step[1]:.0f} of the first's"


def _case(tuned: Tuned, problem: Problem) -> Case:
    contender = tuned.contender
    pairs = list(zip(problem.starts, tuned.steps, strict=True))
    steps = ", ".join(f"{n:,}" for n in tuned.steps)
    return Case(
        contender.library,
        tuned.variant,
        lambda: [contender.run(tuned.setting, start, n) for start, n in pairs],
        count=len,
        note=f"{steps} steps{contender.note}",
    )


def _missed(task: str, contender: Contender) -> Row:
    settings = "; ".join(filter(None, contender.settings))
    note = f"not reached in {contender.most_steps:,} steps from each start: {settings}"
    return Row(task, contender.library, contender.variant, note=note)
