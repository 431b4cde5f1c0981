"""Bundle adjustment: cameras and points from images of the points.

    python docs/examples/bundle_adjustment.py [--quick] [--out FOLDER]

Each observation reads one camera and one point, and the points are eliminated. This
draws `bundle_adjustment.png` and prints a table.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)

SIGMA = 2e-3  # standard deviation of an observation, in focal lengths


# --8<-- [start:problem]
def rotated(angles, x):
    """Rotate x by three angles, about z, y and x."""
    for angle, (i, j) in zip(angles, [(0, 1), (2, 0), (1, 2)], strict=True):
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        x = x.at[i].set(cos * x[i] - sin * x[j]).at[j].set(sin * x[i] + cos * x[j])
    return x


def seen(camera, point):
    """The image of a point in a pinhole camera (three angles, a shift)."""
    x = rotated(camera[:3], point) + camera[3:]
    return x[:2] / x[2]


def misfit(scene, observation):
    return (seen(scene["camera"], scene["point"]) - observation["at"]) / SIGMA


def groups(observations, known):
    """The observations, and the first two cameras, which fix position and scale."""
    return {
        "sights": gnlin.Residuals(
            misfit,
            observations,
            select=lambda o: {"camera": o["camera"], "point": o["point"]},
        ),
        "known": gnlin.Residuals(
            lambda scene, k: 1e3 * (scene["camera"] - known[k]),
            jnp.arange(2),
            select=lambda k: {"camera": k, "point": jnp.zeros(0, int)},
        ),
    }


# --8<-- [end:problem]


def scene(num_cameras, num_points):
    """Points on a trefoil knot, and cameras on a circle around it that look inwards."""
    t = jnp.linspace(0, 2 * jnp.pi, num_points, endpoint=False)
    knot = [jnp.sin(t) + 2 * jnp.sin(2 * t), jnp.cos(t) - 2 * jnp.cos(2 * t)]
    points = jnp.stack([knot[0], -jnp.sin(3 * t), knot[1]], axis=1)
    turn = jnp.linspace(0, 2 * jnp.pi, num_cameras, endpoint=False)
    zero = jnp.zeros_like(turn)
    cameras = jnp.stack([zero, turn, zero, zero, zero, zero + 8], axis=1)
    return {"camera": cameras, "point": points}


def observed(true, each, key):
    """Noisy images of each point in some of the cameras."""
    num_cameras, num_points = (len(true[name]) for name in ("camera", "point"))
    keys = jax.random.split(key, num_points + 1)
    choose = lambda k: jax.random.choice(k, num_cameras, (each,), replace=False)
    camera = jax.vmap(choose)(keys[1:]).ravel()
    point = jnp.repeat(jnp.arange(num_points), each)
    at = jax.vmap(seen)(true["camera"][camera], true["point"][point])
    at = at + SIGMA * jax.random.normal(keys[0], at.shape)
    return {"camera": camera, "point": point, "at": at}


def error(points, true):
    return float(jnp.sqrt(jnp.mean(jnp.sum((points - true) ** 2, axis=1))))


def draw(true, panels, path):
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        known, points = (np.asarray(x["point"]) for x in (true, found))
        axes.plot(*known[:, [0, 2]].T, color="#BBBBBB", linewidth=4, label="true")
        axes.plot(*points[:, [0, 2]].T, ".", color="#0072B2", markersize=3)
        for camera in np.asarray(found["camera"]):
            turn = -camera[1]
            back = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
            place, ahead = -back @ camera[[3, 5]], back @ np.array([0, 1.2])
            axes.plot(*place, "o", color="#E69F00", markersize=4)
            axes.plot(*np.stack([place, place + ahead]).T, color="#E69F00", linewidth=1)
        axes.set(
            title=f"{name}: points {error(points, true['point']):.2f} from the truth"
        )
        axes.set_aspect("equal")
        axes.axis("off")
    figure.savefig(path)


def main(out: Path, quick: bool):
    true = scene(8, 80) if quick else scene(24, 600)
    observations = observed(true, 4, jax.random.key(0))
    keys = dict(zip(true, jax.random.split(jax.random.key(1)), strict=True))
    start = {
        name: x + 0.15 * jax.random.normal(keys[name], x.shape)
        for name, x in true.items()
    }
    start["camera"] = start["camera"].at[:2].set(true["camera"][:2])
    solver = gnlin.LevenbergMarquardt(method="schur")
    solution = gnlin.solve(start, groups(observations, true["camera"]), solver)
    found = solution.model

    num_residuals = 2 * len(observations["camera"])
    num_parameters = sum(x.size for x in true.values())
    print("| | error of points | squared residuals |")
    print("|---|---|---|")
    losses = {"start": solution.history.loss[0], "solved": float(solution.loss)}
    for name, each in {"start": start, "solved": found}.items():
        from_truth = error(each["point"], true["point"])
        print(f"| {name} | {from_truth:.3f} | {2 * losses[name]:.1f} |")
    print(
        f"{num_residuals} residuals, {num_parameters} parameters, of which "
        f"{true['camera'].size} are not eliminated, {solution.stats['num_steps']} steps"
    )
    out.mkdir(parents=True, exist_ok=True)
    draw(true, {"start": start, "solved": found}, out / "bundle_adjustment.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cameras and points")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
