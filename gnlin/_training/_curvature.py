"""Losses without curvature, with which a Gauss-Newton step is a damped gradient step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._canonical import are_read
from .._linearisation._group_loss import GroupLosses
from .._solver import IterativeLinearisation
from ..losses import AbstractLoss
from ._step import Shapes, StepSettings


def without_curvature(
    driver: str, setting: StepSettings, outputs: Shapes, targets: PyTree[Array]
) -> str:
    """Return a sentence if the Hessian of the loss in the outputs is zero everywhere, or
    "". Only losses of the user's own are traced, and none is compiled or evaluated.

    - `outputs`: the shapes of the outputs of a batch.
    """
    solver, loss = setting.solver, setting.loss
    is_prox = getattr(solver, "form", "quadratic") != "quadratic"
    if isinstance(solver, IterativeLinearisation) or is_prox:
        return ""  # it uses the loss itself, or its gradient
    if setting.prior is not None:
        outputs = outputs["data"]
    if isinstance(loss, GroupLosses):
        each = [(x, outputs[k], targets[k]) for k, x in loss.losses.items()]
    else:
        each = [(loss, outputs, targets)]
    if not all(is_flat(*of_group) for of_group in each):
        return ""
    name = type(each[0][0]).__name__
    return (
        f"The loss `{name}` has no curvature in the outputs, so that each step of "
        f"`gnlin.{driver}` is a gradient step with the damping as its only scale. If the "
        "model returns its own log-likelihood, let it return the quantities in it where "
        "the loss is convex in them, as in `z` and `log_det` of a normalising flow; "
        "elsewhere, as for a mixture, let `root(output, target)` of a "
        "`gnlin.authoring.AbstractElementwiseLoss` return 1; if the loss is of straight "
        "pieces, round its kinks; or use an optimiser of optax."
    )


def is_flat(loss: AbstractLoss, outputs: Shapes, targets: PyTree[Array]) -> bool:
    """Whether the loss of an example is linear in its outputs, in pieces: whether the
    program of the second derivative along a direction does not read the direction."""
    if type(loss).__module__.startswith("gnlin.") or not loss.has_observed_factor:
        return False
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    example = jax.tree.map(one, outputs)
    targets = _tree.zeros_like(outputs) if targets is None else targets
    target = jax.tree.map(lambda x: one(jax.eval_shape(jnp.asarray, x)), targets)

    def along(direction, at, target):
        slope = lambda at: loss.gradient(at, target)
        return jax.jvp(slope, (at,), (direction,))[1]

    program = jax.make_jaxpr(along)(example, example, target).jaxpr
    return not any(are_read(program)[: len(jax.tree.leaves(example))])
