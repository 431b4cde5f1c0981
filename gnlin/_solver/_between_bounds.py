"""A step between bounds: from face to face of the box."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import forwards_only
from .._linearisation._bounds import Box
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective


# On so many faces in one step, and then it ends where it is.
_MOST_FACES = 100

Again = Callable[[Linearisation], PyTree[Array]]
"""Solves a linearised problem again, to the same end: its step."""


class _Path(NamedTuple):
    step: PyTree[Array]  # so far
    target: PyTree[Array]  # the solution on the face, or beyond it
    held: PyTree[Bool[Array, "..."]]  # at a bound that it came to
    num_faces: Int[Array, ""]


Inverse = Callable[[], Float[Array, "p p"]]
"""Of the damped curvature, parameters in `ravel_pytree` order."""


def between_bounds(
    objective: AbstractObjective,
    lin: Linearisation,
    step: PyTree[Array],
    again: Again | None = None,
    inverse: Inverse | None = None,
) -> tuple[PyTree[Array], Scalar]:
    """What a step becomes within the linearisation's box, and what the linearised
    objective falls by.

    It is followed to where the first parameter comes to its bound, which stays there; the
    linearised problem of the others is solved again, and that step is followed, until one
    stays within the box: the linearised objective falls all along. Without `again` it is
    the part of the step up to the first bound, or the step with each parameter ending at
    its own bound, whichever lowers the linearised objective more. With `inverse` no
    face needs a factorisation: holding one parameter moves the others along a column of
    the inverse.

    ??? cite "Reference"

        C. L. Lawson and R. J. Hanson, *Solving least squares problems* (1974), chapter
        23; J. Nocedal and S. J. Wright, *Numerical optimization* (2006), section 16.5.
    """
    box, point = lin.box, lin.point
    assert box is not None

    def predicted(step):
        linearised = _tree.axpy(1, lin.jvp(step), lin.outputs)
        return objective.decrease(lin.outputs, linearised)

    def next_face(path: _Path) -> _Path:
        ahead = jax.tree.map(jnp.subtract, path.target, path.step)
        y, at_bound = box.followed(_tree.axpy(1, path.step, point), ahead)
        held = jax.tree.map(jnp.logical_or, path.held, at_bound)
        step = jax.tree.map(jnp.subtract, y, point)
        fixed = jax.tree.map(lambda h, d: jnp.where(h, d, 0), held, step)
        outputs = _tree.axpy(1, lin.jvp(fixed), lin.outputs)
        assert again is not None
        free = again(lin.with_outputs(outputs).within(box, held))
        target = jax.tree.map(jnp.where, held, fixed, _tree.cast_like(free, point))
        return _Path(step, target, held, path.num_faces + 1)

    def goes_on(path: _Path) -> Bool[Array, ""]:
        return box.is_left(point, path.target) & (path.num_faces < _MOST_FACES)

    def bent():
        if inverse is not None:
            return _walked(box, point, step, inverse())
        if again is None:
            ends = box.followed(point, step)[0], lin.moved(step)
            one, other = (jax.tree.map(jnp.subtract, y, point) for y in ends)
            return _tree.where(predicted(one) >= predicted(other), one, other)
        no = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), point)
        start = _Path(_tree.zeros_like(step), step, no, jnp.array(0))
        path = forwards_only(jax.lax.while_loop(goes_on, next_face, start))
        unsolved = box.is_left(point, path.target)
        return _tree.where(unsolved, path.step, path.target)

    step = jax.lax.cond(box.is_left(point, step), bent, lambda: step)
    return step, predicted(step)


class _FlatPath(NamedTuple):
    step: Float[Array, " p"]
    target: Float[Array, " p"]
    inverse: Float[Array, "p p"]  # on the face; zero for what is held


def _walked(
    box: Box, point: PyTree[Array], step: PyTree[Array], inverse: Float[Array, "p p"]
) -> PyTree[Array]:
    """From face to face, to the least of the damped problem on the last of them."""
    target, unravel = ravel_pytree(step)
    y, lower, upper = (ravel_pytree(x)[0] for x in (point, box.lower, box.upper))
    low, high = lower - y, upper - y

    def is_beyond(path: _FlatPath) -> Bool[Array, " p"]:
        return (path.target < low) | (path.target > high)

    def next_face(path: _FlatPath) -> _FlatPath:
        ahead, beyond = path.target - path.step, is_beyond(path)
        end = jnp.where(ahead < 0, low, high)
        room = (end - path.step) / jnp.where(beyond, ahead, 1)
        room = jnp.where(beyond, room, jnp.inf)
        k = jnp.argmin(room)
        step = jnp.clip(path.step + room[k] * ahead, low, high).at[k].set(end[k])
        # The least where the k-th is held, and the inverse of the curvature of the rest.
        column = path.inverse[:, k] / path.inverse[k, k]
        target = path.target - column * (path.target[k] - end[k])
        rest = path.inverse - jnp.outer(column, path.inverse[k])
        rest = rest.at[k].set(0).at[:, k].set(0)
        return _FlatPath(step, target.at[k].set(end[k]), rest)

    # Each parameter comes to its bound once at most.
    path = _FlatPath(jnp.zeros_like(target), target, inverse.astype(target.dtype))
    goes_on = lambda path: jnp.any(is_beyond(path))
    path = forwards_only(jax.lax.while_loop(goes_on, next_face, path))
    return unravel(path.target)
