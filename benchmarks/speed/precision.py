"""The damped step with a refined kernel in lower precision, beside double alone."""

from collections.abc import Iterator

import gnlin

from . import damped_step, wide
from .report import Comparison, Row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case


SIZES = ((182, 500), (182, 2000))
QUICK = ((10, 20),)
WAYS = {
    "double": None,
    "float32 kernel, to 1e-10": gnlin.methods.MixedPrecision("float32", 1e-10),
    "bfloat16 kernel, to 1e-10": gnlin.methods.MixedPrecision("bfloat16", 1e-10),
    "bfloat16 kernel, to 1e-3": gnlin.methods.MixedPrecision("bfloat16", 1e-3),
}
NUM_STEPS = 2


def comparisons(quick: bool) -> Iterator[Comparison]:
    for width, num_outputs in QUICK if quick else SIZES:
        task = quintic(width, num_outputs)
        rows = steps(task, 3)
        yield Comparison(f"Mixed precision; {task.name}", rows, "double")


def steps(task: Task, num_rounds: int) -> list[Row]:
    cases = [_case(task, name, precision) for name, precision in WAYS.items()]
    timings = alternate(cases, num_rounds)
    return wide.solved_rows(f"mixed precision: {task.name}", task, timings)


def _case(task: Task, name: str, precision: gnlin.methods.MixedPrecision | None) -> Case:
    solver = gnlin.DampedGaussNewton(
        DAMPING,
        rtol=0.0,
        atol=0.0,
        search=None,
        method="kernel" if precision is None else precision,
    )
    data = task.inputs, task.targets

    def run(num_steps: int):
        return gnlin.solve(task.model, data, solver, max_steps=num_steps)

    inner = float(run(1).history.num_inner_steps[0])
    return Case(
        "gnlin",
        name,
        lambda: run(NUM_STEPS),
        count=lambda _: NUM_STEPS,
        step=lambda: task.flat_step(damped_step.arrays(run(1).model)),
        note="" if precision is None else f"{inner:.0f} refinements",
    )
