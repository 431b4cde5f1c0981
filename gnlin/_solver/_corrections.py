"""From a step to one after which the outputs are as the linearisation predicts."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._passes import Passes
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._subproblem import Answer
from ._base import Evaluate, increased


# A step is too long for the linearisation if its first correction is longer than this
# part of it. Transtrum and Sethna (2012, section 4) have twice as much for geodesic
# acceleration, which is twice as long. Without this limit the loss of thirteen runs
# (networks and differential equations) after 40 steps was 80 times as large.
_TOO_LONG = 0.375
# The most corrections of a step where they are cheap beside a linearisation, and the most
# elsewhere. With 8 and with 32 the loss of these runs after 40 steps was 1.5 and 0.7
# times as large. A thousand small fits at once took 6 times as long with 16 as with 3.
_MOST, _FEW = 16, 3
# A correction is left out if the loss falls by all but this part of the prediction.
_CLOSE = 0.05
# The least error of the outputs that is corrected, as a multiple of their rounding.
_ROUNDINGS = 20


def num_corrections(linearisation: float, product: float) -> int:
    """Return how often to correct a step, from the seconds that a linearisation with its
    factorisation takes, and a product with the Jacobian and its transpose."""
    return int(min(max(linearisation / product, _FEW), _MOST))


class Corrected(eqx.Module):
    """The corrected step with the lowest loss so far.

    - `actual`: the decrease of the loss.
    - `trusted`: whether the first correction was short.
    - `next_step`: the next step to evaluate.
    - `number`: the number of steps evaluated so far.
    - `goes_on`: whether to evaluate the next one.
    - `num_inner_steps`, `passes`: totals of the corrections.
    """

    step: PyTree[Array]
    outputs: PyTree[Array]
    actual: Scalar
    trusted: Bool[Array, ""]
    next_step: PyTree[Array]
    number: Int[Array, ""]
    goes_on: Bool[Array, ""]
    num_inner_steps: Float[Array, ""]
    passes: Passes


def corrected(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    step: PyTree[Array],
    length: Scalar,
    predicted: Scalar,
    rounding: tuple[Scalar, Scalar],
    solve: Callable[[PyTree[Array]], tuple[Answer, Scalar]],
    most: int,
) -> Corrected:
    r"""Evaluate a step $\delta_0$, and correct it while the loss falls.

    The damped least-squares step for the error of the linearisation is added, with the
    factorisation that made $\delta_0$:
    $$\delta_{k+1} = \delta_k - (\phi^\top\phi + \lambda)^{-1}\phi^\top
    \bigl(f(y + \delta_k) - f(y) - \phi\,\delta_0\bigr).$$
    These are chord iterations (simplified Newton) for the point at which the outputs are
    as predicted. The first one agrees with geodesic acceleration to second order.

    - `length`: the length of the step in the damped variables.
    - `predicted`: the predicted decrease of the loss.
    - `rounding`: the rounding of the loss, and of the norm of the whitened outputs.
    - `solve`: a function that returns the damped step for a whitened residual, and its
        length.
    - `most`: the largest number of corrections.

    ??? cite "References"

        M. K. Transtrum and J. P. Sethna, arXiv:1201.5885 (2012).

        P. Deuflhard, *Newton Methods for Nonlinear Problems* (2011), section 2.1.2.
    """
    dtype = predicted.dtype
    of_loss, of_outputs = rounding
    root = objective.root(lin.outputs)

    def after(step: PyTree[Array]) -> tuple[PyTree[Array], Scalar]:
        outputs = evaluate(lin.moved(step))
        return outputs, objective.decrease(lin.outputs, outputs).astype(dtype)

    yes, nothing = jnp.array(True), jnp.zeros((), jnp.result_type(float))
    if most == 0:
        passes = Passes().traced()
        return Corrected(
            step, *after(step), yes, step, jnp.array(1), ~yes, nothing, passes
        )
    target = jax.tree.map(jnp.add, lin.outputs, lin.jvp(step))

    def correct(last: Corrected) -> Corrected:
        outputs, actual = after(last.next_step)
        first = last.number == 0
        better = first | (actual > last.actual + of_loss)
        close = predicted - actual <= jnp.maximum(_CLOSE * predicted, of_loss)
        error = root(jax.tree.map(jnp.subtract, outputs, target))
        size = _tree.norm(error)
        known = jnp.isfinite(size) & (size > _ROUNDINGS * of_outputs.astype(size.dtype))
        error = jax.tree.map(lambda x: jnp.where(known, x, 0), error)
        answer, correction_length = solve(error)
        correction = _tree.cast_like(answer.step, lin.point)
        if lin.box is not None:
            correction = lin.box.within(lin.moved(last.next_step), correction)
        short = correction_length.astype(dtype) <= _TOO_LONG * length
        trusted = jnp.where(first, close | short, last.trusted)
        return Corrected(
            step=_tree.where(better, last.next_step, last.step),
            outputs=_tree.where(better, outputs, last.outputs),
            actual=jnp.where(better, actual, last.actual),
            trusted=trusted,
            next_step=_tree.axpy(1, correction, last.next_step),
            number=last.number + 1,
            goes_on=better & ~close & trusted & known & (last.number < most),
            num_inner_steps=increased(last.num_inner_steps, answer.num_inner_steps),
            passes=(last.passes + answer.passes).traced(),
        )

    least, number = jnp.full((), -jnp.inf, dtype), jnp.array(0)
    passes = Passes(jvps=lin.jacobian.a_product().jvps).traced()
    start = Corrected(step, lin.outputs, least, yes, step, number, yes, nothing, passes)
    return jax.lax.while_loop(lambda now: now.goes_on, correct, start)
