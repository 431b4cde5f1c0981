"""Line searches: how much of a step to take."""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_count
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from ._state import Evaluate
from ._termination import rounding_of_loss


_MAX_SEARCH_STEPS = 40


class Found(NamedTuple):
    """The result of a line search.

    - `length`: the fraction of the step to take.
    - `outputs`: the outputs at the new point.
    - `any`: whether an acceptable fraction was found.
    """

    length: Scalar
    outputs: PyTree[Array]
    any: Bool[Array, ""]


class GridSearch(eqx.Module):
    """A line search that tries the whole step, a half of it, a quarter and so on, and
    takes the fraction with the lowest loss. If none lowers the loss, it takes no step.

    **Arguments:**

    - `num_halvings`: $k$, where the shortest fraction tried is $2^{-k}$.

    !!! example

        ```python
        solver = gnlin.DampedGaussNewton(1e-8, search=gnlin.methods.GridSearch())
        ```

    ??? cite "Reference"

        J. Müller and M. Zeinhofer, *Achieving high accuracy with PINNs via energy natural
        gradient descent*, ICML (2023), section 4.
    """

    num_halvings: int = eqx.field(static=True, default=30)

    def __check_init__(self):
        check_count("num_halvings", self.num_halvings)

    def along(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        direction: PyTree[Array],
    ) -> Found:
        """Return the fraction of `direction` with the lowest loss."""

        def attempt(best: tuple, length: Scalar) -> tuple:
            outputs = evaluate(lin.moved(direction, length))
            outputs = _tree.cast_like(outputs, lin.outputs)
            gain = objective.decrease(lin.outputs, outputs).astype(dtype)
            found = length, outputs, gain
            return _tree.where(gain > best[2], found, best), None

        dtype = _tree.dtype(direction)
        lengths = 0.5 ** jnp.arange(self.num_halvings + 1, dtype=dtype)
        zero = jnp.zeros((), dtype)
        start = zero, lin.outputs, zero
        (length, outputs, gain), _ = jax.lax.scan(attempt, start, lengths)
        return Found(length, outputs, gain > 0)


Search = optx.AbstractSearch | GridSearch | Literal["auto"] | None


def check_search(search: object) -> None:
    known = isinstance(search, optx.AbstractSearch | GridSearch | None)
    if not (known or (isinstance(search, str) and search == "auto")):
        raise ValueError(
            '`search` must be "auto", `None`, a `gnlin.methods.GridSearch` or a search '
            f"of optimistix, such as `optimistix.BacktrackingArmijo()`, but {search!r} "
            "was given."
        )


def safeguard(
    search: Search, objective: AbstractObjective
) -> optx.AbstractSearch | GridSearch | None:
    """Resolve `"auto"` to a search for steps that nothing else checks."""
    if not isinstance(search, str):
        return search
    checked = objective.is_quadratic and not objective.is_sample
    return None if checked else optx.BacktrackingArmijo()


def searched(
    search: optx.AbstractSearch | GridSearch,
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    gradient: PyTree[Array],
    direction: PyTree[Array],
) -> Found:
    """Return the fraction of `direction` that a search accepts."""
    if isinstance(search, GridSearch):
        return search.along(objective, lin, evaluate, direction)
    zero = jnp.zeros((), _tree.dtype(lin.outputs))
    # Steps and gradient are in the variables of the linearisation, which differ from the
    # parameters if there is a retraction.
    nowhere = _tree.zeros_like(direction)
    nowhere, gradient, zero = _tree.promoted((nowhere, gradient, zero))
    # Measure the loss from here: its differences are known better than its values.
    here = optx.FunctionInfo.EvalGrad(zero, gradient)

    def attempt(carry):
        step_size, _, _, state, num_steps = carry
        outputs = evaluate(lin.moved(direction, step_size))
        tried = _tree.cast_like(_tree.scale(step_size, direction), nowhere)
        change = -objective.decrease(lin.outputs, outputs).astype(zero.dtype)
        there = optx.FunctionInfo.Eval(jnp.where(jnp.isnan(change), jnp.inf, change))
        next_size, accept, _, state = search.step(
            jnp.array(False), nowhere, tried, here, there, state
        )
        lost = _tree.all_finite(outputs) & (jnp.abs(change) <= rounding) & flat
        accept = accept | lost
        step_size = jnp.where(accept, step_size, next_size.astype(step_size.dtype))
        outputs = _tree.cast_like(outputs, lin.outputs)
        return step_size, outputs, accept, state, num_steps + 1

    loss = objective.value(lin.outputs).astype(zero.dtype)
    rounding = rounding_of_loss(loss, None, lin.point)
    # A search cannot judge a slope that is lost in the rounding of the loss.
    flat = jnp.abs(_tree.dot(gradient, direction)).astype(zero.dtype) <= rounding
    state = search.init(nowhere, jax.eval_shape(lambda: here))
    first = optx.FunctionInfo.Eval(zero)
    begin = jnp.array(True), nowhere, nowhere, here, first, state
    step_size, _, _, state = search.step(*begin)
    no = jnp.array(False)
    start = step_size.astype(zero.dtype), lin.outputs, no, state, jnp.array(0)
    step_size, outputs, found, _, _ = jax.lax.while_loop(
        lambda carry: ~carry[2] & (carry[4] < _MAX_SEARCH_STEPS), attempt, start
    )
    return Found(step_size, outputs, found)
