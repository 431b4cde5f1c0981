"""A pose graph: the path of a robot from noisy odometry and a few loop closures.

    python docs/examples/pose_graph.py [--quick] [--out FOLDER]

The unknowns are poses in the plane, (x, y, angle), and each measurement is one pose in
the frame of another. This solves the least-squares problem through optimistix, draws
`pose_graph.png` and prints a table.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)

SIGMA = jnp.array([0.05, 0.05, 0.02])  # standard deviations: metres, metres, radians


# --8<-- [start:problem]
def between(a, b):
    """Pose b in the frame of pose a."""
    cos, sin = jnp.cos(a[2]), jnp.sin(a[2])
    dx, dy, turn = b - a
    turn = jnp.arctan2(jnp.sin(turn), jnp.cos(turn))
    return jnp.array([cos * dx + sin * dy, cos * dy - sin * dx, turn])


def residuals(poses, graph):
    """Misfits in standard deviations; the last residual holds the first pose."""
    edges, measured = graph

    def misfit(edge, measurement):
        found = between(poses[edge[0]], poses[edge[1]]) - measurement
        return found.at[2].set(jnp.arctan2(jnp.sin(found[2]), jnp.cos(found[2]))) / SIGMA

    return jax.vmap(misfit)(edges, measured), 1e3 * poses[0]


def solve(odometry, graph):
    return optx.least_squares(residuals, gnlin.LevenbergMarquardt(), odometry, graph)


# --8<-- [end:problem]


def drive(num_poses, laps=2):
    """True poses of a robot that drives `laps` times around a bent ring."""
    angle = jnp.linspace(0, 2 * jnp.pi * laps, num_poses)
    radius = 10 + 2 * jnp.cos(3 * angle)
    xy = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], 1)
    forward = jnp.gradient(xy, axis=0)
    heading = jnp.unwrap(jnp.arctan2(forward[:, 1], forward[:, 0]))
    first = jnp.concatenate([xy[0], heading[:1]])
    return jax.vmap(lambda pose: between(first, pose))(
        jnp.concatenate([xy, heading[:, None]], 1)
    )


def measure(poses, laps, key):
    """Measure each pose from the one before, and every sixth from one lap before."""
    n = len(poses)
    lap = n // laps
    steps = [(i, i + 1) for i in range(n - 1)]
    closures = [(i, i + lap) for i in range(0, n - lap, 6)]
    edges = jnp.array(steps + closures)
    exact = jax.vmap(between)(poses[edges[:, 0]], poses[edges[:, 1]])
    return edges, exact + SIGMA * jax.random.normal(key, exact.shape)


def dead_reckoning(measured, num_poses):
    """Poses from odometry alone, in which small errors of the heading add up."""

    def move(pose, step):
        cos, sin = jnp.cos(pose[2]), jnp.sin(pose[2])
        dx, dy, turn = step
        moved = pose + jnp.array([cos * dx - sin * dy, sin * dx + cos * dy, turn])
        return moved, moved

    start = jnp.zeros(3)
    rest = jax.lax.scan(move, start, measured[: num_poses - 1])[1]
    return jnp.concatenate([start[None], rest])


def error(poses, true):
    return float(jnp.sqrt(jnp.mean(jnp.sum((poses - true)[:, :2] ** 2, axis=1))))


def draw(true, odometry, solved, graph, path):
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    panels = {"odometry": odometry, "solved": solved}
    for axes, (name, poses) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for a, b in np.asarray(graph[0][len(true) - 1 :]):
            ends = poses[jnp.array([a, b])]
            axes.plot(ends[:, 0], ends[:, 1], color="#E69F00", linewidth=0.8)
        axes.plot(true[:, 0], true[:, 1], color="#BBBBBB", linewidth=4, label="true")
        axes.plot(poses[:, 0], poses[:, 1], color="#0072B2", label=name)
        axes.set(title=f"{name}: {error(poses, true):.2f} m from the truth")
        axes.set_aspect("equal")
        axes.axis("off")
    figure.savefig(path)


def main(out: Path, quick: bool):
    num_poses = 60 if quick else 160
    true = drive(num_poses)
    graph = measure(true, 2, jax.random.key(1))
    odometry = dead_reckoning(graph[1], num_poses)
    solution = solve(odometry, graph)

    print("| | error (m) | squared residuals |")
    print("|---|---|---|")
    for name, poses in {"odometry": odometry, "solved": solution.value}.items():
        misfit = sum(jnp.sum(r**2) for r in residuals(poses, graph))
        print(f"| {name} | {error(poses, true):.3f} | {misfit:.1f} |")
    print(
        f"{3 * len(graph[0])} residuals, {3 * num_poses} parameters, "
        f"{solution.stats['num_feature_updates']} steps"
    )
    out.mkdir(parents=True, exist_ok=True)
    draw(true, odometry, solution.value, graph, out / "pose_graph.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer poses")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
