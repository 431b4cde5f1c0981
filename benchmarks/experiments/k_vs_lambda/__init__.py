"""The main comparison: K steps on each linearised model against damping 1/(eta K).

There are two ways to solve each linearised problem incompletely: stop its descent after K
steps of size eta, or damp it by lambda. Both are swept over six orders of magnitude. At
lambda = 1/(eta K) their spectral filters are nearly the same. Do they train the same
networks?

With squared error, where K steps are one formula, the tasks are a quintic by a 5-layer
network and 40 handwritten digits by a small one. Another network for the quintic has tanh
instead of ReLU, so that its units cannot die. With cross-entropy, where few steps are
taken literally and many as gradient flow, the tasks are the digits' classes and the
quintic's sign. The digits are also run with fewer images and with a wider network. All
runs are on the full batch, with a fixed number of outer steps, from several
initialisations and draws of the digits, which both solvers share.

The results are compared in units of the task (points of test error, decades of RMSE), at
the strengths at which both train. Where lambda is many times the largest eigenvalue both
filters are equal by construction, and those strengths do not count. The verdicts are on
four questions: whether the two end with the same error, which is better and why, which
leaves more runs untrained, and whether the networks' risks stay within a theoretical
bound for one linear problem (`benchmarks/linear_theory.py`).

A user's own task (`--task`) replaces all of these.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array

import gnlin

from ...dry_run import Tally
from ...experiment import Columns, Experiment, Place, Point
from ...linear_theory import linear_problem, ridge_and_flow
from ...networks.mlp import dead_units
from ...training import flow_error, FLOW_FROM, outputs_of
from ._curves import DAMPED, DESCENT, eigenvalues, SOLVERS
from ._figures import draw
from ._tasks import (
    AnySettings,
    CHECKED,
    CLASSES,
    EMBEDDED,
    FULL,
    losses_of,
    make_task,
    MEDIUM,
    names_of,
    OWN,
    own,
    QUICK,
    start,
    Task,
    tested_examples,
    with_rate,
)
from ._verdicts import judge_all


def points(settings: AnySettings) -> list[Point]:
    """Return a point for each task and solver. It has all strengths, which are batched in
    one program if the loss is squared error."""
    names = names_of(settings)
    return [{"task": task, "solver": solver} for task in names for solver in SOLVERS]


def train(settings: AnySettings, point: Point, place: Place) -> Columns:
    task, solver = make_task(settings, str(point["task"])), str(point["solver"])
    if place.rehearsal is None:
        found = _train(settings, task, solver)
        if point["task"] in (CLASSES, OWN) and solver == DESCENT:
            return {**found, **_flow_errors(settings, task)}
        return found
    middle = settings.periods[len(settings.periods) // 2]
    one_run = dataclasses.replace(settings, seeds=1, periods=(middle,))

    def attempt(number: int) -> Tally:
        found = _train(one_run, dataclasses.replace(task, more_seeds=1), solver)
        return Tally(found["feature_updates"].sum(), found["passes"].sum())

    num_runs = settings.seeds * task.more_seeds * len(settings.periods)
    program = point["task"], solver
    place.rehearsal(program, num_runs, task.num_steps, attempt, whole=True)


def _flow_errors(settings: AnySettings, task: Task) -> Columns:
    """Return the error of gradient flow, if a loss that is not quadratic needs it."""
    models = [start(task, jax.random.key(seed)) for seed in settings.each_seed]
    if task.loss.is_quadratic or any(state is not None for _, state in models):
        return {}
    how = task.loss, task.learning_rate, CHECKED
    data = [task.drawn(seed)[0] for seed in settings.each_seed]
    errors = [
        flow_error(model, of_seed, *how)
        for (model, _), of_seed in zip(models, data, strict=True)
    ]
    return {"flow_error": np.array(errors)}


def _train(settings: AnySettings, task: Task, solver: str) -> Columns:
    periods = np.array(settings.periods)
    if task.loss.is_quadratic or solver == DAMPED:
        return _train_at(periods, settings, task, solver, "auto")
    literal = periods < FLOW_FROM
    parts = [
        _train_at(periods[chosen], settings, task, solver, method)
        for method, chosen in (("kernel", literal), ("flow", ~literal))
        if chosen.any()
    ]
    return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}


def _train_at(periods, settings: AnySettings, task: Task, solver, method) -> Columns:
    """Train all seeds at some of the strengths."""
    num_seeds, num_periods = settings.seeds * task.more_seeds, len(periods)
    first_seed = settings.first_seed * task.more_seeds
    seeds = range(first_seed, first_seed + num_seeds)
    shape = num_seeds, num_periods
    all_periods = np.broadcast_to(periods, shape)

    draws = [task.drawn(seed) for seed in seeds]
    draws = jax.tree.map(lambda *parts: jnp.stack(parts), *draws)
    places = jnp.repeat(jnp.arange(num_seeds), num_periods)
    runs = places, first_seed + places, jnp.asarray(all_periods.ravel())
    # Without a formula for a step, parallel runs would all wait for the slowest.
    together = num_periods if task.loss.is_quadratic else None
    found = _sweep(task, solver, method, together, runs, draws)
    dampings = [task.damping(period) for period in periods.tolist()]
    guessed, least = np.transpose([losses_of(task, seed) for seed in seeds])[..., None]
    excess = found["train_loss"] - np.repeat(least, num_periods)
    return {
        "guessing_loss": np.broadcast_to(guessed - least, shape),
        "period": all_periods,
        "damping": np.broadcast_to(dampings, shape),
        **{k: np.reshape(v, (*shape, *v.shape[1:])) for k, v in found.items()},
        "train_loss": np.reshape(excess, shape),
    }


@functools.partial(jax.jit, static_argnums=range(4))
def _sweep(task: Task, solver, method, together: int | None, runs, draws):
    def one(run):
        place, seed, period = run
        data, test = jax.tree.map(lambda parts: parts[place], draws)
        return _run(task, solver, method, (seed, period), data, test)

    return jax.lax.map(one, runs, batch_size=together)


def _run(task: Task, solver, method, run, train, test) -> dict[str, Array]:
    seed, period = run
    initial, state = start(task, jax.random.key(seed))
    rate, loss = task.learning_rate, task.loss
    damping = gnlin.filters.equivalent_damping(period, rate)
    if solver == DESCENT:
        solver = gnlin.IterativeLinearisation(period, rate, method=method)
    else:
        solver = gnlin.DampedGaussNewton(damping, form="prox-linear", search=None)
    solution = gnlin.solve(
        initial,
        train,
        solver,
        loss=loss,
        max_steps=task.num_steps,
        state=state,
        divergence=None,
    )
    model, result, stats = solution.model, solution.result, solution.stats
    kernel = gnlin.TangentKernel(model, state=solution.state)(train[0])
    first_kernel = gnlin.TangentKernel(initial, state=state)(train[0])
    stable = result == optx.RESULTS.successful
    stable |= result == optx.RESULTS.nonlinear_max_steps_reached
    outputs = outputs_of(model, solution.state, test[0])
    if task.has_theory:
        some = jax.tree.map(lambda x: x[: tested_examples(test)], test)
        problem = linear_problem(model, initial, train, some)
        # The kernel is the same, and is decomposed once: two independent decompositions
        # may wait for each other forever (jax 0.10, two cores).
        spectrum = jnp.sort(problem.spectrum.eigenvalues)
        theory = ridge_and_flow(problem, damping, task.num_steps)
        theory |= {"test_mse": jnp.mean((outputs - test[1]) ** 2)}
    else:
        spectrum, theory = eigenvalues(kernel), {}
    return {
        "train_loss": solution.loss,
        "test_error": task.test_error(outputs, test[1]),
        "dead": dead_units(model, train[0]) if task.can_die else jnp.array(jnp.nan),
        "distance": gnlin.features.parameter_distance(model, initial),
        "kernel_alignment": gnlin.features.kernel_alignment(kernel, first_kernel),
        "largest_eigenvalue": spectrum[-1],
        "stable": stable,
        "feature_updates": stats["num_feature_updates"],
        "inner_steps": stats["num_inner_steps"],
        "passes": stats["num_jvps"] + stats["num_vjps"],
        "spectrum": spectrum,
        **theory,
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper, which sweeps K and lambda separately.",
    grid="periods",
    runs_at_a_point=lambda settings: len(settings.periods),
    own=own,
    trains_state=lambda settings: True,
    takes_loss=True,
    completed=with_rate,
    medium=MEDIUM,
    rehearsed=True,
)
