"""The time and memory of one truncated step that takes the batch in parts."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

import gnlin

from .large import DAMPING, Problem
from .report import Comparison, Figure, Row, timed_row
from .timing import alternate, Case


TOLERANCE = 0.1
PART, UNSPLIT, MANY = 512, 2048, 16_384
MOST_MEMORY, MOST_TIME = 1.2, 1.4


def comparisons(quick: bool) -> Iterator[Comparison]:
    few = 16 if quick else 1  # divides the numbers of images
    with jax.enable_x64(False):
        rows = steps(PART // few, UNSPLIT // few, MANY // few, 2 if quick else 5)
    one, _, parts, many = rows
    assert one.peak_bytes
    assert many.peak_bytes
    figures = [
        Figure(
            f"peak memory of {MANY:,} images in parts of {PART}, over that of {PART}",
            f"<= {MOST_MEMORY:g}",
            None if quick else many.peak_bytes / one.peak_bytes,
        ),
        Figure(
            f"time an image of {UNSPLIT:,} in parts of {PART}, over unsplit",
            f"<= {MOST_TIME:g}",
            None if quick else parts.ratio,
        ),
    ]
    title = "A truncated step of a CNN by products, an image"
    yield Comparison(title, rows, "unsplit", figures=figures)


def steps(part: int, unsplit: int, many: int, num_rounds: int) -> list[Row]:
    cases, memory = [], []
    for n, part_size in ((part, None), (unsplit, None), (unsplit, part), (many, part)):
        variant = f"{n:,} images" + ("" if part_size is None else f" by {part_size}")
        case, num_bytes = _case(variant, n, part_size)
        cases.append(case)
        memory.append(num_bytes)
    timings = alternate(cases, num_rounds)
    return [
        dataclasses.replace(timed_row("parts", t, timings[1]), peak_bytes=num_bytes)
        for t, num_bytes in zip(timings, memory, strict=True)
    ]


def _case(variant: str, num_images: int, part_size: int | None) -> tuple[Case, int]:
    """Return the case, timed per image, and the memory that its program takes beyond data
    and parameters."""
    problem = Problem(num_images)
    residuals = gnlin.PerExample(problem.residual, part_size)
    solver = gnlin.TruncatedGaussNewton(
        TOLERANCE, DAMPING, search=None, method="matrix-free"
    )

    @jax.jit
    def step(y: Any, args: Any):
        lin = gnlin.linearise(residuals, y, args)
        state = solver.start(y, jax.eval_shape(lambda: lin.outputs))
        evaluate = lambda y: residuals(y, args)
        return solver.advance(gnlin.authoring.SumOfSquares(), lin, evaluate, state)

    compiled = step.lower(problem.parameters, problem.args).compile()
    case = Case(
        "gnlin",
        variant,
        lambda: step(problem.parameters, problem.args),
        count=lambda _: num_images,
    )
    memory = compiled.memory_analysis()
    return case, 0 if memory is None else memory.temp_size_in_bytes
