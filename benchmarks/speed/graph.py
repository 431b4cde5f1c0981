"""Whole runs on sparse problems: pose graphs and bundle adjustment, beside SciPy."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

import gnlin

from .report import Comparison, Figure, Row, timed_row
from .timing import alternate, Case


RTOL = 1e-8
"""A run counts as solved if its cost is at most this share above the least of all."""
MOST_STEPS = 200
GNLIN, OURS, ITS_OWN = "LM, select=", "trf, our derivatives", "trf, jac_sparsity"


class Problem(NamedTuple):
    """The residuals of an example are `fn(selected, example)`, and `select(example)`
    gives the indices of the parameters that they read."""

    name: str
    start: Any
    fn: Callable
    select: Callable
    examples: Mapping[str, jax.Array]

    def group(self) -> gnlin.Residuals:
        return gnlin.Residuals(self.fn, self.examples, select=self.select)


def comparisons(quick: bool) -> Iterator[Comparison]:
    problems = (
        (pose_graph(60, 150), laps(60, 5, 20), sphere(4, 10), bundle(4, 40, 160))
        if quick
        else (
            pose_graph(1_000, 4_000),
            laps(3_000, 300),
            sphere(50, 50),
            bundle(50, 5_000, 25_000),
        )
    )
    for problem in problems:
        rows = solved(problem, 1 if quick else 3)
        ours, scipy, its_own = rows
        figures = [
            Figure(f"{problem.name}: SciPy's time over gnlin's", "> 1", its_own.ratio),
            Figure("... with our derivatives", "> 1", scipy.ratio),
            Figure(
                f"{problem.name}: gnlin's cost over SciPy's, less 1",
                f"<= {RTOL:g}",
                (ours.linear_residual or 0.0) - (scipy.linear_residual or 0.0),
            ),
        ]
        title = f"{problem.name}, to convergence"
        yield Comparison(title, rows, "gnlin", figures=figures)


def solved(problem: Problem, num_rounds: int) -> list[Row]:
    """Return a row for each run. The error is the relative excess of the cost over the
    least of all."""
    ends: dict[str, float] = {}
    group = problem.group()

    def by_gnlin():
        solution = gnlin.solve(problem.start, group, max_steps=MOST_STEPS)
        ends[GNLIN] = float(solution.loss)
        return solution.loss

    def by_scipy(exact: bool):
        run, name = _scipy(problem, exact), OURS if exact else ITS_OWN

        def other():
            ends[name] = run()
            return np.zeros(1)

        return Case("SciPy", name, other, max_rounds=1)

    cases = [Case("gnlin", GNLIN, by_gnlin), by_scipy(True), by_scipy(False)]
    timings = alternate(cases, num_rounds)
    least = min(ends.values())
    rows = []
    for timing in timings:
        name = timing.case.variant
        row = timed_row(problem.name, timing, timings[0], tolerance=RTOL)
        above = ends[name] / least - 1
        rows.append(
            dataclasses.replace(
                row, linear_residual=above, note=f"cost {ends[name]:.10g}"
            )
        )
    return rows


def _scipy(problem: Problem, exact: bool) -> Callable[[], float]:
    """Return a run of SciPy that knows the pattern of the Jacobian. Its values come from
    automatic differentiation of the examples if `exact`, or else from SciPy's own
    differences, which group the columns."""
    from scipy.optimize import least_squares
    from scipy.sparse import coo_matrix

    flat, unravel = jax.flatten_util.ravel_pytree(problem.start)
    numbers = unravel(jnp.arange(flat.size, dtype=flat.dtype))

    def chosen(y):
        rows = jax.vmap(problem.select)(problem.examples)
        return jax.tree.map(lambda a, r: a[r], y, rows)

    @jax.jit
    def values(v):
        return jax.vmap(problem.fn)(chosen(unravel(v)), problem.examples).ravel()

    @jax.jit
    def entries(v):
        parts = jax.vmap(jax.jacfwd(problem.fn))(chosen(unravel(v)), problem.examples)
        n = values(v).size // len(jax.tree.leaves(problem.examples)[0])
        flat_parts = [x.reshape(x.shape[0] * n, -1) for x in jax.tree.leaves(parts)]
        return jnp.concatenate(flat_parts, axis=1)

    index = [
        np.asarray(x, int).reshape(x.shape[0], -1)
        for x in jax.tree.leaves(chosen(numbers))
    ]
    m = values(flat).size
    per_example = np.concatenate(index, axis=1)
    columns = np.repeat(per_example, m // len(per_example), axis=0)
    rows = np.repeat(np.arange(m), columns.shape[1])

    def jacobian(v):
        data = np.asarray(entries(v)).ravel()
        shape = m, flat.size
        return coo_matrix((data, (rows, columns.ravel())), shape=shape).tocsr()

    pattern = coo_matrix(
        (np.ones(rows.size), (rows, columns.ravel())), shape=(m, flat.size)
    ).tocsr()

    def run() -> float:
        how: Any = {"jac": jacobian} if exact else {"jac_sparsity": pattern}
        found = least_squares(
            lambda v: np.asarray(values(v)),
            np.asarray(flat),
            **how,
            method="trf",
            x_scale="jac",
            tr_solver="lsmr",
            ftol=1e-12,
            xtol=1e-12,
            gtol=1e-12,
            max_nfev=MOST_STEPS,
        )
        return float(found.cost)

    return run


#
# The problems
#


def _between(a, b):
    """Return pose b in the frame of pose a."""
    cos, sin = jnp.cos(a[2]), jnp.sin(a[2])
    dx, dy, turn = b - a
    return jnp.stack([cos * dx + sin * dy, cos * dy - sin * dx, _wrapped(turn)])


def _wrapped(angle):
    return jnp.arctan2(jnp.sin(angle), jnp.cos(angle))


SIGMA = np.array([0.05, 0.05, 0.02])


def pose_graph(num_poses: int, num_edges: int) -> Problem:
    """Return the graph of a robot that drives laps of a ring, with odometry and places
    that it sees again. No pose is fixed, so that the minimum is unique only up to a rigid
    motion."""
    rng = np.random.default_rng(0)
    angle = np.linspace(0, 4 * np.pi, num_poses)
    radius = 10 + 2 * np.cos(3 * angle)
    xy = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    forward = np.gradient(xy, axis=0)
    heading = np.unwrap(np.arctan2(forward[:, 1], forward[:, 0]))
    true = jnp.asarray(np.column_stack([xy, heading]))
    odometry = [(k, k + 1) for k in range(num_poses - 1)]
    ends = rng.integers(0, num_poses, size=(num_edges - len(odometry), 2))
    near = (ends[:, 0] + rng.integers(2, 30, len(ends))) % num_poses
    ends[:, 1] = np.where(rng.random(len(ends)) < 0.8, near, ends[:, 1])
    ends[:, 1] = np.where(
        ends[:, 0] == ends[:, 1], (ends[:, 0] + 1) % num_poses, ends[:, 1]
    )
    start = true + jnp.asarray(rng.normal(size=true.shape) * [0.5, 0.5, 0.1])
    return _poses(true, np.concatenate([odometry, ends]), rng, "pose graph", start)


def laps(num_poses: int, num_closures: int, a_lap: int = 200) -> Problem:
    """Return the graph of a robot on a ring that sometimes recognises a place that it
    passed a lap before, so that it is nearly a chain. The start is the estimate by
    odometry."""
    rng = np.random.default_rng(0)
    angle = 2 * np.pi * np.arange(num_poses) / a_lap
    true = np.column_stack([10 * np.cos(angle), 10 * np.sin(angle), angle + np.pi / 2])
    odometry = np.column_stack([np.arange(num_poses - 1), np.arange(1, num_poses)])
    first = rng.choice(num_poses - a_lap, num_closures, replace=False)
    ends = np.concatenate([odometry, np.column_stack([first, first + a_lap])])
    problem = _poses(jnp.asarray(true), ends, rng, "laps")
    start = [true[0]]
    for dx, dy, turn in np.asarray(problem.examples["measured"])[: num_poses - 1]:
        x, y, heading = start[-1]
        cos, sin = np.cos(heading), np.sin(heading)
        there = x + cos * dx - sin * dy, y + sin * dx + cos * dy, heading + turn
        start.append(np.array(there))
    return problem._replace(start=jnp.asarray(np.array(start)))


def _poses(true, ends, rng: np.random.Generator, what: str, start=None) -> Problem:
    edges = jnp.asarray(ends)
    exact = jax.vmap(_between)(true[edges[:, 0]], true[edges[:, 1]])
    measured = exact + jnp.asarray(SIGMA * rng.normal(size=exact.shape))

    def misfit(pair, edge):
        found = _between(pair[0], pair[1]) - edge["measured"]
        return jnp.append(found[:2], _wrapped(found[2])) / SIGMA

    examples = {"ends": edges, "measured": measured}
    name = f"{what}, {len(true):,} poses, {len(edges):,} edges"
    return Problem(name, start, misfit, lambda edge: edge["ends"], examples)


def sphere(num_rings: int, a_ring: int) -> Problem:
    """Return the graph of a robot that circles up a sphere, in three dimensions. Each
    pose has an edge to the next one and, after the first ring, to the one below. With 50
    rings of 50 poses, it has the poses and edges of the benchmark of that name. The
    parameters of a pose are a rotation vector and a shift, both relative to the estimate
    by odometry."""
    rng = np.random.default_rng(0)
    num_poses = num_rings * a_ring
    k = np.arange(num_poses)
    around, up = 2 * np.pi * k / a_ring, np.pi * (0.1 + 0.8 * k / num_poses)
    out = np.stack(
        [np.sin(up) * np.cos(around), np.sin(up) * np.sin(around), np.cos(up)], 1
    )
    along = np.stack([-np.sin(around), np.cos(around), 0 * around], 1)
    turns = jnp.asarray(np.stack([along, np.cross(out, along), out], axis=2))
    shifts = jnp.asarray(10 * out)
    ends = np.concatenate(
        [
            np.column_stack([k[:-1], k[1:]]),
            np.column_stack([k[:-a_ring], k[a_ring:]]),
        ]
    )
    of = {"turn": turns, "shift": shifts}
    at = lambda poses, which: jax.tree.map(lambda x: x[which], poses)
    exact = jax.vmap(_between_3d)(*(at(of, which) for which in ends.T))
    noise = jnp.asarray(rng.normal(size=(len(ends), 6)) * SIGMA_3D)
    measured = {
        "turn": jnp.einsum("nij,njk->nik", exact["turn"], _turn(noise[:, :3])),
        "shift": exact["shift"] + noise[:, 3:],
    }

    def ahead(pose, edge):
        there = {
            "turn": pose["turn"] @ edge["turn"],
            "shift": pose["shift"] + pose["turn"] @ edge["shift"],
        }
        return there, there

    first, odometry = at(of, 0), at(measured, slice(num_poses - 1))
    _, others = jax.lax.scan(ahead, first, odometry)
    believed = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, others)

    def misfit(pair, edge):
        poses = [
            {
                "turn": base["turn"] @ _turn(moved[:3]),
                "shift": base["shift"] + moved[3:],
            }
            for moved, base in zip(pair, edge["believed"], strict=True)
        ]
        found = _between_3d(*poses)
        turn = edge["measured"]["turn"].T @ found["turn"]
        off = jnp.stack([turn[2, 1], turn[0, 2], turn[1, 0]])
        off -= jnp.stack([turn[1, 2], turn[2, 0], turn[0, 1]])
        shift = found["shift"] - edge["measured"]["shift"]
        return jnp.concatenate([0.5 * off, shift]) / SIGMA_3D

    edges = jnp.asarray(ends)
    bases = tuple(at(believed, which) for which in ends.T)
    examples = {"ends": edges, "measured": measured, "believed": bases}
    name = f"sphere, {num_poses:,} poses in 3-D, {len(ends):,} edges"
    start = jnp.zeros((num_poses, 6))
    return Problem(name, start, misfit, lambda edge: edge["ends"], examples)


SIGMA_3D = np.array([0.01] * 3 + [0.05] * 3)


def _between_3d(a, b):
    return {
        "turn": a["turn"].T @ b["turn"],
        "shift": a["turn"].T @ (b["shift"] - a["shift"]),
    }


def _turn(vectors):
    """Return the rotation matrices of rotation vectors."""
    rotated = jnp.vectorize(_rotated, signature="(k),(k)->(k)")
    units = (jnp.broadcast_to(unit, vectors.shape) for unit in jnp.eye(3))
    return jnp.stack([rotated(vectors, unit) for unit in units], axis=-1)


def _rotated(vector, x):
    """Rotate by a rotation vector (Rodrigues)."""
    square = jnp.sum(vector**2)
    angle = jnp.sqrt(jnp.where(square > 0, square, 1))
    small = square < 1e-12
    a = jnp.where(small, 1 - square / 6, jnp.sin(angle) / angle)
    b = jnp.where(small, 0.5 - square / 24, (1 - jnp.cos(angle)) / angle**2)
    turned = jnp.cross(vector, x)
    return x + a * turned + b * jnp.cross(vector, turned)


def bundle(num_cameras: int, num_points: int, num_observations: int) -> Problem:
    """Return a problem of cameras around a cloud of points, each of which some cameras
    see. The unknowns are the cameras' rotation vectors and translations, and the points.
    The observations have noise of a thousandth of the focal length."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, size=(num_points, 3))
    around = np.linspace(0, 2 * np.pi, num_cameras, endpoint=False)
    rotations = np.column_stack(
        [0.1 * rng.normal(size=(num_cameras, 1)), around, 0 * around]
    )
    shifts = np.column_stack([0.1 * rng.normal(size=(num_cameras, 2)), 5 + 0 * around])
    cameras = jnp.asarray(np.concatenate([rotations, shifts], axis=1))
    each = num_observations // num_points
    seen_by = np.stack(
        [rng.choice(num_cameras, each, replace=False) for _ in range(num_points)]
    )
    camera, point = seen_by.ravel(), np.repeat(np.arange(num_points), each)

    def projected(chosen):
        pose, x = chosen["cameras"], chosen["points"]
        x, y, z = _rotated(pose[:3], x) + pose[3:]
        return jnp.stack([x / z, y / z])

    true = {"cameras": cameras, "points": jnp.asarray(points)}
    pairs = {"cameras": cameras[camera], "points": true["points"][point]}
    seen = jax.vmap(projected)(pairs)
    seen = seen + 1e-3 * jnp.asarray(rng.normal(size=seen.shape))
    examples = {
        "camera": jnp.asarray(camera),
        "point": jnp.asarray(point),
        "seen": seen,
    }
    start = jax.tree.map(lambda x: x + 0.02 * jnp.asarray(rng.normal(size=x.shape)), true)
    return Problem(
        f"bundle adjustment, {num_cameras} cameras, {num_points:,} points",
        start,
        lambda chosen, example: (projected(chosen) - example["seen"]) / 1e-3,
        lambda example: {"cameras": example["camera"], "points": example["point"]},
        examples,
    )
