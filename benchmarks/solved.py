"""Linearised networks that are trained until their loss is minimal.

L-BFGS runs until no entry of the gradient of the mean loss exceeds a tolerance. If a
hyperplane separates the classes there is no minimum, but the learned function has settled
by then.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree
from numpy import ndarray
from scipy.optimize import minimize

from . import scores, training
from .dry_run import Tally
from .experiment import Place, Runs
from .scores import score, spread, trained_loss
from .training import (
    accuracy_of,
    Columns,
    Draw,
    Images,
    in_precision_of,
    Labelled,
    linearised,
    load,
    mean_loss,
    stateless,
)


TOLERANCE = 1e-4
MOST_STEPS = 5_000


class Solved(NamedTuple):
    moved: Float[ndarray, " p"]
    """The displacement from the linearisation point, as one vector."""
    num_steps: int
    loss: float
    residual: float
    """The largest entry of the gradient at the end."""


def solve(
    model: PyTree,
    data: Labelled,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
) -> Solved:
    """Linearise a network at a model, and minimise its mean loss."""
    size = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0].size
    found = minimize(
        lambda moved: tuple(map(np.asarray, _loss_and_gradient(moved, model, data))),
        np.zeros(size),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": tolerance, "ftol": 0, "maxiter": most_steps, "maxfun": 10**6},
    )
    residual = float(np.abs(found.jac).max())
    return Solved(found.x, found.nit, float(found.fun), residual)


def _rehearse(settings: Images, place: Place, num_steps: int) -> None:
    """Measure the steps of L-BFGS on the first problem, for a dry run."""
    seed = settings.first_seed

    @functools.cache
    def start():
        model = stateless(settings)(jax.random.key(seed))
        return model, load(settings, place, seed).train

    def attempt(number):
        found = solve(*start(), 0.0, number)
        # Each step takes one forward and one reverse pass.
        return Tally(found.num_steps, 2 * found.num_steps)

    program = "L-BFGS", settings.network, settings.num_train
    assert place.rehearsal is not None
    place.rehearsal(
        program, settings.seeds, num_steps, attempt, share=training.share(settings)
    )


#
# K = infinity: the first problem alone
#


def train_endlessly(settings: Images, place: Place) -> Columns:
    """Train all seeds with K = infinity: linearise once and solve. There is one look, at
    the end, and `finished` says whether the tolerance was reached."""
    make_model = stateless(settings)
    if place.rehearsal is not None:
        _rehearse(settings, place, MOST_STEPS)
    runs = [
        _first(make_model(jax.random.key(seed)), load(settings, place, seed))
        for seed in settings.each_seed
    ]
    return {name: np.array([[run[name]] for run in runs]) for name in runs[0]}


def solved_accuracy(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the linearised network's test accuracies; NaN where the problem is not
    solved."""
    finished = runs.final("finished") > 0
    return np.where(finished, runs.final("test_accuracy_linearised"), np.nan)


def _first(model: PyTree, draw: Draw) -> dict[str, float | bool]:
    found = solve(model, draw.train)
    of_training = spread(draw.train[1])
    accuracy = lambda data: float(
        _accuracy_linearised(found.moved, model, data, of_training)
    )
    return {
        "inner_steps": float(found.num_steps),
        "train_loss": found.loss,
        "gradient": found.residual,
        "finished": bool(found.residual <= TOLERANCE),
        "train_accuracy_linearised": accuracy(draw.train),
        "validation_accuracy_linearised": accuracy(draw.validation),
        "test_accuracy_linearised": accuracy(draw.test),
    }


#
# One problem after the other
#


def train_solving(
    settings: Images,
    place: Place,
    num_updates: int,
    *,
    tolerance: float = TOLERANCE,
    until_trained: bool = False,
    most_steps: int = MOST_STEPS,
) -> Columns:
    """Train all seeds by solving one linearised problem after another, with a look at
    each feature update. A run ends when there is nothing left to solve or the network is
    trained, and its last look is repeated.

    `trained` says whether the mean training loss is at most `TRAINED_LOSS`, `unsolved`
    counts the problems so far that were not solved to the tolerance, `gradient` is
    the largest gradient entry that remained in any problem, and `stable` says whether the
    loss is finite.
    """
    make_model = stateless(settings)
    if place.rehearsal is not None:
        _rehearse(settings, place, num_updates * most_steps)
    runs = [
        _one_after_the_other(
            make_model(jax.random.key(seed)),
            load(settings, place, seed),
            num_updates,
            tolerance,
            until_trained,
            most_steps,
        )
        for seed in settings.each_seed
    ]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}


def _one_after_the_other(
    model: PyTree,
    draw: Draw,
    num_updates: int,
    tolerance: float,
    until_trained: bool,
    most_steps: int,
) -> Columns:
    looks, num_steps, unsolved, residual = [], 0, 0, 0.0
    enough, of_training = trained_loss(draw.train[1]), spread(draw.train[1])
    for update in range(1, num_updates + 1):
        found = solve(model, draw.train, tolerance, most_steps)
        point, model = model, moved_by(found.moved, model)
        num_steps += found.num_steps
        unsolved += found.residual > tolerance
        residual = max(residual, found.residual)
        linearised = partial(_accuracy_linearised, found.moved, point, spread=of_training)
        accuracy = partial(accuracy_of, model, None, spread=of_training)
        train_loss = float(mean_loss(model, None, draw.train))
        trained = bool(train_loss <= enough)
        looks.append(
            {
                "feature_updates": update,
                "inner_steps": num_steps,
                "gradient": residual,
                "unsolved": unsolved,
                "trained": trained,
                "stable": math.isfinite(train_loss),
                "train_loss": train_loss,
                "train_loss_linearised": found.loss,
                "train_accuracy": accuracy(draw.train),
                "validation_accuracy": accuracy(draw.validation, least=-math.inf),
                "test_accuracy": accuracy(draw.test),
                "train_accuracy_linearised": linearised(draw.train),
                "test_accuracy_linearised": linearised(draw.test),
            }
        )
        if found.num_steps == 0 or (until_trained and trained):
            break
    looks += [looks[-1]] * (num_updates - len(looks))
    kind = lambda value: bool if isinstance(value, bool) else float
    return {
        name: np.array([x[name] for x in looks], kind(first))
        for name, first in looks[0].items()
    }


def described(all_runs: Sequence[Runs], tolerances: Sequence[float]) -> str:
    """Describe, for a caption, how accurately these problems were solved."""
    left = [f"{runs.final('gradient').max():.1e}" for runs in all_runs]
    problems = sum(int(runs.final("feature_updates").sum()) for runs in all_runs)
    unsolved = sum(int(runs.final("unsolved").sum()) for runs in all_runs)
    return (
        "solved by L-BFGS in double precision until no entry of the mean loss's "
        f"gradient exceeds {' or '.join(f'{each:g}' for each in tolerances)} (largest "
        f"final entries: {' and '.join(left)}; {unsolved} of {problems} problems "
        "unsolved)"
    )


@eqx.filter_jit
def moved_by(moved, model: PyTree) -> PyTree:
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    start, unravel = ravel_pytree(parameters)
    return eqx.combine(unravel(start + moved), frozen)


#
# Functions compiled once for any model and any part of the data
#


def _linearised(moved, model: PyTree, inputs: Array) -> Array:
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    start, unravel = ravel_pytree(parameters)
    fn = lambda y: jax.vmap(eqx.combine(unravel(y), frozen))(inputs)
    return linearised(fn, start, moved)


def _linearised_loss(moved, model: PyTree, data: Labelled) -> Array:
    images, labels = in_precision_of(model, data)
    outputs = _linearised(moved, model, images)
    return scores.mean_loss(outputs, labels)


@eqx.filter_jit
def _loss_and_gradient(moved, model: PyTree, data: Labelled) -> tuple[Array, Array]:
    return jax.value_and_grad(_linearised_loss)(jnp.asarray(moved), model, data)


@eqx.filter_jit
def _accuracy_linearised(moved, model: PyTree, data: Labelled, spread) -> Array:
    images, labels = in_precision_of(model, data)
    return score(_linearised(jnp.asarray(moved), model, images), labels, spread)


@eqx.filter_jit
def damped(there: PyTree, model: PyTree, data: Labelled, damping) -> tuple[Array, Array]:
    """Return the damped loss of a linearised network, and the largest entry of its
    gradient.

    The network is linearised at `model` and evaluated at the parameters of `there`. The
    damped loss is the mean loss plus `damping` times the squared distance from `model`.
    """
    flat = lambda model: ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0]

    def value(moved):
        of_data = _linearised_loss(moved, model, data)
        return of_data + damping * jnp.sum(moved**2)

    found, gradient = jax.value_and_grad(value)(flat(there) - flat(model))
    return found, jnp.abs(gradient).max()
