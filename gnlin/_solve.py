"""Full-batch training of a model in one compiled program."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Key, PyTree, ScalarLike

from ._common._checks import as_key, check_count, check_flag, is_traced
from ._common._history import History, of_full_batch
from ._common._progress import Bar
from ._common._sharding import automatic, choosing, mesh_of, on_mesh, places
from ._linearisation._bounds import check_start
from ._linearisation._group_loss import GroupLosses
from ._linearisation._recognised import check_not_one
from ._linearisation._retraction import check_still, flaw_of
from ._solver import AbstractGaussNewton, as_solver, LevenbergMarquardt
from ._training._curvature import without_curvature
from ._training._data import as_batch, not_finite
from ._training._divergence import check_divergence
from ._training._ending import (
    after_full_batch,
    explains_little,
    group_at_fault,
    of_linearised_only,
    why_it_failed,
)
from ._training._full_batch import run
from ._training._group_network import GroupNetwork, of_groups
from ._training._messages import in_words, result_name, WELL
from ._training._model import in_single, make_network, Network
from ._training._prior import Prior
from ._training._pulled import only_pulled
from ._training._residuals import (
    as_groups,
    check_order,
    Groups,
    GroupsByName,
    refuse_for_groups,
    Residuals,
    where_not_finite,
)
from ._training._solution import Model, on_host, Solution
from ._training._statistics import at_the_end, doubt_of_inference
from ._training._step import checked_outputs, key_of_steps, StepSettings
from .losses import AbstractLoss, SquaredError
from .losses._base import check_loss
from .losses._of_examples import loss_beside


def solve(
    model: Model,
    data: tuple[PyTree, ...] | GroupsByName | Groups | Sequence[Residuals] | Residuals,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
    prior: ScalarLike | None = None,
    max_steps: int = 256,
    key: Key[Array, ""] | None = None,
    state: PyTree = None,
    divergence: float | None = 100.0,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    axis_name: str = "batch",
    part_size: int | None = None,
    history: bool = True,
    progress: bool = True,
    throw: bool = False,
) -> Solution[Model]:
    r"""Train a model on a full batch.

    The whole run is one compiled program, and works under `jax.jit` and `jax.vmap`, both
    over a solver's hyperparameters and over models. JAX's functions return arrays only:
    `equinox.filter_jit` and `equinox.filter_vmap` also return a whole solution, which
    holds the functions of the model. The result of a few steps has
    derivatives with respect to hyperparameters, data and models in forward mode
    (`jax.jvp`, `jax.jacfwd`). Reverse mode is an error, because the number of steps is
    not known in advance. The derivative is that of the path that the steps take, which
    may be far from that of the solution: for a network that solves u'' = -k, the
    derivative of u(1/2) by k was 3.2 after 10 steps, and is 0.125 for the solution.
    Where the data determine the minimum, differentiate the minimum instead, by
    `optimistix.least_squares` with [`gnlin.methods.ImplicitAdjoint`][].

    **Arguments:**

    - `model`: any callable pytree, such as an `equinox.nn.MLP`, that maps one input to
        one output, a pytree of floating-point arrays. Or a pair `(fn, parameters)` with
        `fn(parameters, x)`, where Python floats in dictionaries and lists are trained
        too. A model, inputs and a state in half precision are computed with in single
        precision, and the model and its state are returned in half precision. If the
        model takes a `key` (for dropout), each example gets its own key in each step.
    - `data`: `(inputs, targets)`, pytrees of arrays with a leading axis over n examples,
        or `(inputs, targets, weights)` with n weights of the examples in the loss. Or
        groups of residuals: one [`gnlin.Residuals`][], or a dictionary or list of them,
        with their own functions of the model and losses. The history's columns
        `"loss/..."` hold the loss of each group.
    - `solver`: any solver of gnlin, such as [`gnlin.LevenbergMarquardt`][], which needs
        no tuning; or an optimiser from optax.
    - `loss`: [`gnlin.SquaredError`][], [`gnlin.SoftmaxCrossEntropy`][] or another
        [`gnlin.authoring.AbstractLoss`][]; by default summed over examples.
    - `prior`: the standard deviation $s$ of a normal prior of each trained parameter
        about zero, which is weight decay: $\frac{1}{2 s^2}\lVert\theta\rVert^2$ is added
        to the sum of the loss over all examples. If the loss is a mean, both are divided
        by the number of targets, or by the sum of their weights: a target has the weight
        of its example, times that of its class if there are `class_weights`. For squared
        error, $s$ is in units of the noise's standard deviation.
        [`gnlin.predict.posterior`][] takes the prior from the solution. The history has
        the two parts as `"loss/data"` and `"loss/prior"`.
    - `max_steps`: maximum number of outer steps, each of which is one feature update.
    - `key`: the key for dropout; `jax.random.key(0)` by default. All evaluations within a
        step use the same keys, and the next step uses others, so that such a run never
        converges.
    - `state`: the model's state (from `equinox.nn.make_with_state`), if it has one. The
        linearisation includes the statistics of the batch. `solution.loss` is the loss of
        `solution.model` in inference mode with `solution.state`, if the state is that of
        `equinox.nn.BatchNorm` or `equinox.nn.SpectralNorm`, and the model has no dropout.
    - `divergence`: end the run and return the best model if the loss is more than this
        multiple of its initial value for five steps in a row, or after the last step;
        `None` for no such limit.
    - `filter_spec`: the leaves to train, as for `equinox.partition`: a function of a
        leaf, or a pytree of booleans. The default trains all floating-point arrays.
    - `axis_name`: the `axis_name` of the model's batch normalisation.
    - `part_size`: how many examples (of each group) have their activations in memory at
        once. Each product recomputes the others' activations, which takes about 4/3 of
        the time. `None` means all examples.
    - `history`: whether to record each step. With many small runs under `jax.vmap`,
        recording takes longer than the steps.
    - `progress`: whether to show a progress bar in a terminal, for runs longer than a
        second.
    - `throw`: whether to raise an error if the run becomes non-finite, diverges or
        stagnates. If not, a warning is issued, and `solution.result` says so. Reaching
        `max_steps` causes neither.

    **Returns:** a [`gnlin.Solution`][]. Ctrl-C ends a run within about a second and
    returns the best model so far, unless the run is part of a larger compiled program.

    **Raises:** `ValueError` if there is no data or no trainable parameter, if numbers of
    examples or shapes do not match, or if a trainable leaf is not real or not finite.

    !!! example

        ```python
        model = eqx.nn.MLP(1, 1, 50, 4, jnp.tanh, key=jax.random.key(0))
        x = jnp.linspace(-1, 1, 20)[:, None]
        solution = gnlin.solve(model, (x, jnp.sin(3 * x)))
        solution.model, solution.loss, solution.stats["num_feature_updates"]
        ```
    """
    solver = as_solver(solver)
    check_count("max_steps", max_steps)
    max_steps = int(max_steps)
    if part_size is not None:
        check_count("part_size", part_size)
    check_flag("history", history)
    check_flag("progress", progress)
    check_flag("throw", throw)
    check_divergence(divergence)
    check_loss(loss)
    if key is not None:
        key = key_of_steps(as_key(key))
    check_order("solve", model, data)
    groups, mesh = as_groups(data), mesh_of((model, data))
    model, state = automatic((model, state))
    network: Network | GroupNetwork
    losses: AbstractLoss | GroupLosses = loss.as_arguments().reduced("sum")
    of_prior = None
    if groups is None:
        losses, batch = loss_beside(losses, as_batch(data))
        if prior is not None:
            if solver.retraction is not None:
                raise ValueError(
                    "`prior` is about zero for each number, such as those of a "
                    "quaternion, and does not suit a `retraction`: leave `prior` out, or "
                    "make it a group of residuals."
                )
            of_prior = Prior.of(prior, losses, batch)
        parameters, network = make_network(
            model, filter_spec, state, axis_name, part_size
        )
        state = in_single(state)
    else:
        refuse_for_groups(loss=loss, state=state, key=key, prior=prior)
        parameters, network, batch, losses = of_groups(
            model, groups, filter_spec, part_size=part_size
        )
        if losses.is_quadratic and all(g.data is None for g in groups.values()):
            outputs = eqx.filter_eval_shape(network.function(), parameters, batch[0])
            check_not_one(outputs, parameters)
    check_start(solver.bounds, parameters)
    parameters = solver.admissible(parameters)
    check_still(solver.retraction, parameters)
    compiled = network
    if mesh is None and not is_traced((network, parameters, batch)):
        compiled = network.canonical(parameters, batch[0], key)
    placed = places((parameters, state), batch)
    setting = StepSettings(
        solver, losses, compiled, key, divergence, places=placed, prior=of_prior
    )
    with choosing():
        if not losses.is_quadratic:  # squared error accepts targets of any value
            outputs = checked_outputs(setting, parameters, state, batch)
            flat = without_curvature("solve", setting, outputs, batch[1])
            if flat and not is_traced((parameters, batch)):
                warnings.warn(flat, stacklevel=2)
        if not is_traced((parameters, batch)):
            uncanonical = setting._replace(network=network)
            if pulled := only_pulled(uncanonical, parameters, state, batch):
                warnings.warn(pulled, stacklevel=2)
        with Bar(max_steps, progress) as bar:
            (carry, num_steps), rows, result, loss_now, is_interrupted = run(
                setting, batch, (parameters, state), max_steps, history, bar
            )
    rows = of_full_batch(rows)
    stats = {"num_steps": num_steps, **carry.solver_state.counts.by_name()}
    reason = warning = ""
    has_failed = False
    if not is_traced((num_steps, loss_now, rows)):
        stats, loss_now = on_host((stats, loss_now))
        num_steps = stats["num_steps"]
        rows = {name: np.asarray(x)[:num_steps] for name, x in rows.items()}
        ended, why, little = result_name(result), "", ""
        has_failed = ended not in WELL and not is_interrupted
        if ended in ("successful", "stagnation"):
            little = explains_little("solve", setting, batch, loss_now, "start elsewhere")
        if is_interrupted:
            watch = carry.watch
            if watch is not None and float(watch.best) < loss_now:  # Return the best.
                carry, loss_now = carry._replace(parameters=watch.y), float(watch.best)
            warning = f"`gnlin.solve` was interrupted after step {num_steps}."
        elif has_failed:
            why = why_it_failed(setting, carry, num_steps)
            row = {name: x[-1] for name, x in rows.items() if len(x)}
            at_fault = (
                (where_not_finite(groups) if groups else not_finite(*batch))
                or group_at_fault(setting, carry, batch, num_steps, row)
                or flaw_of(solver.retraction, carry.parameters)
                or little
            )
            warning = (
                f"`gnlin.solve` stopped at step {num_steps} of at most {max_steps}: "
                f"{why} {at_fault}".rstrip()
            )
        elif history:
            converged = ended == "successful"
            warning = after_full_batch(
                setting, carry, batch, rows, float(loss_now), converged=converged
            )
            if warning:
                warning = flaw_of(solver.retraction, carry.parameters) or warning
        warning = warning or little
        interrupted = f"step {num_steps}: interrupted"
        reason = interrupted
        if not is_interrupted:
            higher = len(rows.get("loss", ())) > 0 and bool(rows["loss"][0] < loss_now)
            higher &= of_linearised_only(setting.solver)
            reason = in_words(ended, num_steps, why, higher=higher)
    model_state = None
    if network.has_state:
        model_state, loss_now = at_the_end(setting, carry, batch)
        if reason:
            loss_now = on_host(loss_now)
    if network.has_state and reason and not warning:
        given = "solve", setting, carry.parameters, model_state, [batch]
        losses_of_run = rows.get("loss", ())
        warning = doubt_of_inference(*given, losses_of_run, training=loss_now)
    solution = Solution(
        model=network.frozen.with_parameters(carry.parameters),
        state=network.frozen.with_state(model_state),
        loss=loss_now,
        result=result,
        _reason=reason,
        history=History(rows),
        stats={**stats, "max_steps": max_steps},
        prior=None if of_prior is None else of_prior.deviation,
        _trained=(network.frozen.trained, network.frozen.fn is not None),
        _has_retraction=solver.retraction is not None,
    )
    solution = on_mesh(solution, mesh)
    if has_failed and throw:
        raise eqx.EquinoxRuntimeError(warning)
    if warning:
        warnings.warn(warning, stacklevel=2)
    if throw:
        well = [result == getattr(optx.RESULTS, name) for name in WELL]
        return result.error_if(solution, ~functools.reduce(jnp.logical_or, well))
    return solution
