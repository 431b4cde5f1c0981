"""How a run ended, in words; and doubts about a run that ended well: it has not moved,
its loss has risen, or it explains little."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._common import _tree
from .._common._checks import is_traced
from .._common._history import losses_by_group
from .._common._sharding import is_here
from .._common._words import how_many
from .._linearisation._group_loss import any_counts, GroupLosses
from .._linearisation._linearisation import linearised
from .._solver import AbstractGaussNewton, IterativeLinearisation
from .._solver._schedules import out_of_range
from ..losses import SquaredError
from ._group_network import GroupNetwork
from ._messages import (
    AT_START,
    is_endless,
    LAST_FINITE,
    LEFT_OUT,
    NO_GRADIENT,
    result_name,
    shorter_steps,
    why_it_ended,
)
from ._step import Carry, StepSettings


# A run of fewer steps is not judged, unless it has converged or is far off.
_LOOKED_BACK = 10
# The loss has risen, or is far off, if it is more than this multiple of the first loss.
_WORSE, _FAR_OFF = 2.0, 100.0
# Across batches the first and the last tenth of the losses are compared. More than this
# part of all pairs of an early and a late loss rise if the loss has risen, by however
# little. Noise makes half of them rise, give or take a standard deviation; with losses
# that are `_WORSE`, this many standard deviations are enough.
_RISEN, _DEVIATIONS = 0.9, 2.0
# A run has lost its progress if the median loss over some tenth of the steps is less than
# this part of the median over the last tenth, and the latter is still more than the
# second part of the first loss.
_LOST, _SOLVED = 0.1, 0.01
# On a full batch the loss bounces if it rises in more than this part of the later half of
# the steps, and by more in all than it falls in that half.
_BOUNCES = 0.2
# The further columns that a run on batches is judged by.
_JUDGED = "gradient_norm", "step_norm"
# A model explains little if its loss is more than this part of the best constant's.
_UNEXPLAINED = 0.95
_NO_BRANCH = (
    "`jnp.where` does not stop the derivative of the branch that is not taken, such as "
    "that of `sqrt` at 0: give that branch a safe argument, by a second `jnp.where`. If "
    "the derivative is very large, take other units of the parameters."
)
_TRAINED = (
    "that are trained (`filter_spec`, `jax.lax.stop_gradient`, second derivatives of a "
    "ReLU)"
)


def why_it_failed(setting: StepSettings, carry: Carry, num_steps: int) -> str:
    """Return the reason of a failure in words."""
    state = carry.solver_state
    if result_name(state.result) == "nonfinite":
        report, last = state.report, LAST_FINITE if num_steps > 1 else AT_START
        # A setting that is out of range makes the damping NaN.
        is_set_wrong, wrong = bool(jnp.isnan(report.damping)), ""
        if is_set_wrong:
            number = int(state.counts.num_feature_updates) - 1
            wrong = out_of_range(setting.solver, number)
        if wrong:
            return f"{wrong}; {last}."
        if _has_no_derivative(carry):
            return (
                "the derivative is not finite, or its squares overflow, but the loss is "
                f"finite; {last}. {_NO_BRANCH}"
            )
        if not jnp.isfinite(report.loss):
            return (
                f"the loss is not finite; {last}. Look for values in the data that are "
                "not finite, and at logarithms, divisions and powers in the function."
            )
        if is_set_wrong:
            what = "its damping, or another setting of the solver, is out of range"
            return f"{what}; {last}."
        return (
            f"the step is not finite; {last}. Use more damping, `bounds`, another start "
            "or double precision."
        )
    shorter = shorter_steps(setting.solver, on_batches=setting.streaming)
    factor = setting.divergence
    if carry.watch is None or factor is None:
        return why_it_ended(state.result, shorter)
    # Inner steps that diverge are not taken, also if the loss is far above its start.
    has_moved = bool(state.report.step_norm)
    return why_it_ended(state.result, shorter, factor if has_moved else None)


def _has_no_derivative(carry: Carry) -> bool:
    """Whether a run failed because only the derivative of its loss is not finite."""
    state, report = carry.solver_state, carry.solver_state.report
    return result_name(state.result) == "nonfinite" and bool(
        jnp.isfinite(report.loss) & ~jnp.isfinite(report.gradient_norm)
    )


def group_at_fault(
    setting: StepSettings,
    carry: Carry,
    data: tuple,
    num_steps: int,
    row: Mapping[str, float],
) -> str:
    """Return a sentence that names the first group whose loss is not finite, or else
    whose derivative is not, or "". Derivatives take a pass through each group.

    - `data`: the data of all steps, before points are drawn.
    - `row`: the last one of the history.
    """
    for name, loss in losses_by_group(row).items():
        if not np.isfinite(loss):
            return f"The loss of the group {name!r} is not finite."
    network = setting.network
    if not isinstance(network, GroupNetwork) or not _has_no_derivative(carry):
        return ""
    if len(network.groups) == 1:
        return ""
    inputs, *_ = setting.drawn(data, num_steps - 1)
    budget = setting.solver.memory_budget
    for name, fn in network.function().each().items():
        lin, _ = linearised(fn, carry.parameters, inputs[name], False, budget)
        pulled = lin.vjp(jax.tree.map(jnp.ones_like, lin.outputs))
        if not jnp.isfinite(_tree.norm(pulled)):
            return f"The derivative of the group {name!r} is not finite."
    return ""


def after_full_batch(
    setting: StepSettings,
    carry: Carry,
    data: tuple,
    rows: Mapping[str, np.ndarray],
    last: float,
    *,
    converged: bool,
) -> str:
    """Return a sentence with a doubt about a run of `gnlin.solve`, or "".

    - `rows`: the history.
    - `last`: the loss at the end.
    """
    losses = rows["loss"]
    if _has_not_moved(rows):
        return f"`gnlin.solve` made no step: {NO_GRADIENT} {_TRAINED}."
    if uncounted := nothing_counts("solve", setting, data, rows):
        return uncounted
    num_steps = len(losses)
    judged = converged or num_steps >= _LOOKED_BACK
    least = _WORSE if judged else _FAR_OFF
    risen = ""
    if num_steps > 0 and _is_worse(float(losses[0]), last, least):
        risen = f"the loss has risen from {losses[0]:.4g} to {last:.4g}"
    elif not converged and _bounces(losses) and not _is_random(setting, carry, data):
        risen = (
            f"the loss rose in {np.sum(np.diff(losses) > 0)} of them, to {last:.4g} in "
            f"the end: it was {losses[0]:.4g} at first, and {losses.min():.4g} at best"
        )
    if risen:
        shorter = shorter_steps(setting.solver, on_batches=False)
        made = f"made {how_many(num_steps, 'step')}"
        if of_linearised_only(setting.solver):
            made = "trained the linearised model to convergence"
        elif converged:
            return (
                f"`gnlin.solve` has converged, but {risen}. {LEFT_OUT}, and this may be "
                f"the solution. Otherwise use {shorter}."
            )
        return f"`gnlin.solve` {made}, and {risen}. Use {shorter}."
    changes = lambda losses: len(losses) > 0 and np.ptp(losses) > 0
    for name, own in losses_by_group(rows).items():
        # The loss of a group is the same in all rows, to the last digit.
        if np.any(own) and changes(losses) and not changes(own):
            return (
                f"`gnlin.solve` has not changed the loss of the group {name!r}: its "
                "residuals may not depend on the parameters that are trained, as second "
                "derivatives of a ReLU (the default activation of `eqx.nn.MLP`) do not; "
                "in a differential equation use a smooth one, such as `jnp.tanh`."
            )
    return ""


def nothing_counts(
    driver: str, setting: StepSettings, data: tuple, rows: Mapping[str, np.ndarray]
) -> str:
    """Return a sentence if no target of a run that has not failed counts, or "".

    - `data`: all data, or the first batch of a loader.
    """
    losses = rows["loss"]
    if np.any(np.nan_to_num(losses, nan=0.0)) or np.any(rows["gradient_norm"]):
        return ""
    counts = any_counts(setting.loss, data)
    if len(losses) == 0 or counts is None or is_traced(counts) or counts:
        return ""
    return (
        f"`gnlin.{driver}` made no step: no target counts, since all of them have the "
        "weight zero, or are the `ignore_index` of the loss."
    )


def after_batches(
    setting: StepSettings, rows: Mapping[str, np.ndarray], *, made_all: bool
) -> str:
    """Return a sentence with a doubt about a run of `gnlin.fit`, or "".

    - `rows`: the history. Batches in which no target counts have no loss.
    """
    known = ~np.isnan(rows["loss"])
    if made_all:
        rows = {name: rows[name][known] for name in ("loss", *_JUDGED)}
    losses = rows["loss"]
    if _has_not_moved(rows):
        return f"`gnlin.fit` made no step: {NO_GRADIENT} {_TRAINED}."
    if not made_all or len(losses) < _LOOKED_BACK:
        return ""
    if np.any(losses) and not np.any(rows["step_norm"]):
        return (
            "`gnlin.fit` made no step: none lowered the loss of its batch. Scale each "
            "input to mean 0 and variance 1, or use more damping."
        )
    since = _risen_from(losses)
    if not since:
        return ""
    is_drawn = isinstance(setting.loss, GroupLosses) and setting.loss.is_drawn
    shorter = shorter_steps(setting.solver, on_batches=setting.streaming and not is_drawn)
    more = "draw more points in each step, or " if is_drawn else ""
    return (
        f"`gnlin.fit` made all {len(losses)} steps, but the loss rose {since}: {more}use "
        f"{shorter}."
    )


def of_linearised_only(solver: AbstractGaussNewton) -> bool:
    """Whether a solver ends the run once the linearised model has converged."""
    is_iterative = isinstance(solver, IterativeLinearisation)
    return is_iterative and is_endless(solver.period)


def _risen_from(losses: np.ndarray) -> str:
    """Return from where to where the losses of batches have risen, in words, or "".

    Medians are compared, because a batch with an outlier has a large loss at any time.
    """
    some = min(_LOOKED_BACK, len(losses) // 2)
    size = max(some, len(losses) // 10)
    parts = losses[-(len(losses) // size * size) :].reshape(-1, size)
    *between, end = map(float, np.median(parts, axis=1))
    # A loss of zero, such as that of a batch whose targets are met, cannot be the unit.
    known = losses[losses != 0] if np.any(losses) else losses
    first, start = float(known[0]), float(np.median(known[:size]))
    best = min(between, default=end)
    if 0 < best < _LOST * end and end > _SOLVED * first:
        return f"from {best:.3g} in between to {end:.3g}"
    share = np.mean(losses[-size:] > losses[:size, None])
    deviation = np.sqrt((2 * size + 1) / (12 * size**2))  # of the share, by chance
    by_much = _is_worse(start, end) and end > min(first, _LOST * first)
    enough = min(_RISEN, 0.5 + _DEVIATIONS * deviation) if by_much else _RISEN
    if share > enough and (by_much or end > max(first, start)):
        return f"from {start:.3g} to {end:.3g}"
    return ""


def explains_little(
    driver: str, setting: StepSettings, data: tuple, last: float, remedy: str
) -> str:
    """Return a sentence if a model is hardly better than the best constant, or "". Only
    squared error without a prior is judged, and only targets that vary.

    - `last`: the loss of all examples.
    - `remedy`: what to do instead of standardising the data.
    """
    loss, (_, targets, weights) = setting.loss, data
    if not isinstance(loss, SquaredError) or setting.prior is not None:
        return ""
    leaves = jax.tree.leaves(targets)
    if not all(map(is_here, leaves)):
        return ""
    y = np.concatenate([np.asarray(x, float).reshape(len(x), -1) for x in leaves], 1)
    weights = np.ones(len(y)) if weights is None else np.asarray(weights)
    mean = np.average(y, axis=0, weights=weights)
    deviation = np.sqrt(np.average((y - mean) ** 2, axis=0, weights=weights))
    constant = 0.5 * np.sum(deviation**2)
    if loss.reduction == "sum":
        constant *= np.sum(weights)
    varies = deviation > 1e-12 * np.abs(mean)
    if not (np.any(varies) and last >= _UNEXPLAINED * constant):
        return ""
    unusual = varies & (
        (np.abs(mean) > 3 * deviation) | (np.abs(np.log10(deviation + ~varies)) > 1)
    )
    said, k = "", np.argmax(unusual)
    if unusual[k]:
        said = f" (mean {mean[k]:.2g}, standard deviation {deviation[k]:.2g})"
    return (
        f"The model of `gnlin.{driver}` explains less than 5 % of the total variance of "
        f"the targets: standardise the inputs and the targets{said}, or {remedy}, unless "
        "the targets are mostly noise."
    )


def _is_worse(first: float, last: float, multiple: float = _WORSE) -> bool:
    """Whether a loss has risen far; it may be negative."""
    return last > first + (multiple - 1) * abs(first)


def _bounces(losses: np.ndarray) -> bool:
    """Whether the losses of a full batch rise in many of the later steps, and by more
    than they fall."""
    if len(losses) < _LOOKED_BACK:
        return False
    later = losses[len(losses) // 2 :]
    changes = np.diff(later)
    rises = changes[changes > 0]
    often = len(rises) > _BOUNCES * len(later)
    fallen = max(later[0] - later[-1], _SOLVED * abs(losses[0]))
    return bool(often and rises.sum() > fallen)


def _is_random(setting: StepSettings, carry: Carry, data: tuple) -> bool:
    """Whether the loss differs between steps, as it does with dropout."""
    args = setting.args(data[0], 0, carry.model_state)
    return setting.is_random(carry.parameters, args)


def _has_not_moved(rows: Mapping[str, np.ndarray]) -> bool:
    losses = rows["loss"]
    is_loss = bool(np.any(losses)) and bool(np.all(np.isfinite(losses)))
    return is_loss and not np.any(rows["gradient_norm"])
