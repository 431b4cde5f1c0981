"""Inverse kinematics with joint limits for many targets, beside SciPy's one by one."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize

import gnlin

from .report import Comparison, Row, timed_row
from .timing import alternate, Case


NUM, FEW, NUM_BY_SCIPY = 1_000, 20, 50
MOST_STEPS = 100
REACHED = 1e-3
"""A target is reached if no entry of the position, in metres, or of the rotation matrix
is further off than this."""
# An arm of seven joints: the twists and lengths of its links, and the joints' limits.
TWISTS = np.pi / 2 * np.array([-1, 1, 1, -1, -1, 1, 0])
LENGTHS = np.array([0.34, 0.0, 0.4, 0.0, 0.4, 0.0, 0.13])
LIMITS = np.deg2rad([170, 120, 170, 120, 170, 120, 175])
POSTURE = 1e-5
"""The weight of pulling the joints to their middle, which settles the free motion."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    num, by_scipy = (FEW, 5) if quick else (NUM, NUM_BY_SCIPY)
    title = f"Inverse kinematics: seven joints with limits, {num:,} targets"
    yield Comparison(title, solved(num, by_scipy, 1 if quick else 3), "gnlin")


def pose(angles):
    """Return the rotation and the position of the hand, after Denavit and Hartenberg."""
    turn, place = jnp.eye(3), jnp.zeros(3)
    for angle, twist, length in zip(angles, TWISTS, LENGTHS, strict=True):
        place = place + length * turn[:, 2]
        cos, sin, c, s = jnp.cos(angle), jnp.sin(angle), np.cos(twist), np.sin(twist)
        turn = turn @ jnp.array(
            [[cos, -sin * c, sin * s], [sin, cos * c, -cos * s], [0, s, c]]
        )
    return turn, place


def residuals(angles, target):
    turn, place = pose(angles)
    wanted_turn, wanted_place = target
    return jnp.concatenate(
        [
            place - wanted_place,
            (turn - wanted_turn).ravel(),
            POSTURE * angles,
        ]
    )


def solved(num: int, num_by_scipy: int, num_rounds: int) -> list[Row]:
    """Return a row for each library. Its note has the share of targets that are reached,
    since a run may end at another local minimum."""
    random = np.random.default_rng(0)
    true = jnp.asarray(random.uniform(-0.9, 0.9, (num, 7)) * LIMITS)
    start = 0.1 * jnp.asarray(LIMITS)
    targets = jax.vmap(pose)(true)
    solver = gnlin.LevenbergMarquardt(bounds=(-jnp.asarray(LIMITS), jnp.asarray(LIMITS)))
    ends: dict[str, np.ndarray] = {}

    @jax.jit
    @jax.vmap
    def each(target):
        found = optx.least_squares(
            residuals, solver, start, target, max_steps=MOST_STEPS, throw=False
        )
        return found.value

    def by_gnlin():
        ends["gnlin"] = np.asarray(each(targets))
        return ends["gnlin"]

    value, slope = jax.jit(residuals), jax.jit(jax.jacfwd(residuals))

    def by_scipy():
        found = []
        for k in range(num_by_scipy):
            target = jax.tree.map(lambda x, k=k: x[k], targets)
            end = scipy.optimize.least_squares(
                lambda q, target=target: np.asarray(value(q, target)),
                np.asarray(start),
                jac=lambda q, target=target: np.asarray(slope(q, target)),  # type: ignore
                bounds=(-LIMITS, LIMITS),
                max_nfev=MOST_STEPS,
            )
            found.append(end.x)
        ends["SciPy"] = np.array(found)
        return ends["SciPy"]

    cases = [
        Case("gnlin", "LM with bounds, under vmap", by_gnlin, lambda _: num),
        Case("SciPy", "trf, our derivatives", by_scipy, lambda _: num_by_scipy),
    ]
    timings = alternate(cases, num_rounds)
    rows = []
    for timing in timings:
        angles = jnp.asarray(ends[timing.case.library])
        of = [x[: timing.case.count(None)] for x in targets]
        left = jnp.max(jnp.abs(jax.vmap(residuals)(angles, of)[:, :12]), axis=1)
        share = float(jnp.mean(left < REACHED))
        assert np.all(np.abs(ends[timing.case.library]) <= LIMITS)
        row = timed_row("kinematics, a target", timing, timings[0])
        rows.append(dataclasses.replace(row, note=f"{100 * share:.0f} % reached"))
    return rows
