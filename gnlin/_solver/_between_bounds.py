"""A step between bounds: from face to face of the box."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Scalar

from .. import _tree
from .._checks import forwards_only
from .._linearisation import Linearisation
from .._objective import AbstractObjective


# On so many faces in one step, and then it ends where it is.
_MOST_FACES = 100

Again = Callable[[Linearisation], PyTree[Array]]
"""Solves a linearised problem again, to the same end: its step."""


class _Path(NamedTuple):
    step: PyTree[Array]  # so far
    target: PyTree[Array]  # the solution on the face, or beyond it
    held: PyTree[Bool[Array, "..."]]  # at a bound that it came to
    num_faces: Int[Array, ""]


def between_bounds(
    objective: AbstractObjective,
    lin: Linearisation,
    step: PyTree[Array],
    again: Again | None = None,
) -> tuple[PyTree[Array], Scalar]:
    """What a step becomes within the linearisation's box, and what the linearised
    objective falls by.

    It is followed to where the first parameter comes to its bound, which stays there; the
    linearised problem of the others is solved again, and that step is followed, until one
    stays within the box: the linearised objective falls all along. Without `again` it is
    the part of the step up to the first bound, or the step with each parameter ending at
    its own bound, whichever lowers the linearised objective more.

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
