"""The interface of rules for the damping, and the trial that a rule judges."""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import nan_unless, positive
from .._subproblem import AbstractSubproblem


class Trial(eqx.Module):
    r"""The outcome of a trial with one damping, for a rule to judge.

    - `damping`: $\lambda$.
    - `ratio`: the decrease of the loss divided by the predicted decrease, at most 1.
    - `accepted`: whether the step may be taken.
    - `length`, `size`: $\lVert D\delta\rVert$ and $\lVert Dy\rVert$, with $D$ the scaling
        of the damping.
    - `share`: the predicted decrease divided by the one predicted for the undamped step;
        0 if the latter is unknown.
    - `noise`: whether both the decrease and its prediction are below the rounding of the
        loss.
    - `part`: the predicted decrease divided by the largest possible one, which is that of
        the undamped step or the loss itself, whichever is smaller.
    - `on_detour`: whether the linearisation is on a detour. The decreases are then
        counted from the point where the detour left.
    - `in_roundings`, `of_loss`: the predicted decrease divided by the rounding of the
        loss, and by the loss.
    """

    damping: Float[Array, ""]
    ratio: Float[Array, ""]
    accepted: Bool[Array, ""]
    length: Float[Array, ""]
    size: Float[Array, ""]
    share: Float[Array, ""]
    noise: Bool[Array, ""]
    part: Float[Array, ""]
    on_detour: Bool[Array, ""]
    in_roundings: Float[Array, ""] | float = math.inf
    of_loss: Float[Array, ""] | float = math.inf


# The smallest ratio of an accepted step, as in MINPACK.
_SUFFICIENT = 1e-4


class AbstractDamping(eqx.Module):
    r"""A rule that chooses the damping of each trial.

    A subclass keeps a state, which is any pytree, and defines `init`, `damping` and
    `after`. It may also override `begin`, which sees each linearisation once, `part`, by
    which a step is shortened, and `accepts` and `goes_on`, which decide whether a step is
    accepted and whether to try another damping at the same linearisation. The last
    accepted step that lowers the loss by more than rounding is taken.

    - `num_trials`: the approximate number of dampings tried at one linearisation. If it
        is large, a decomposition that serves all of them is worth its cost.
    - `detours`: whether some trials are the start of a detour (`is_detour`).
    """

    num_trials: ClassVar[int] = 2
    detours: ClassVar[bool] = False

    def __repr__(self) -> str:
        return _tree.in_words(self)

    @abc.abstractmethod
    def init(self, dtype: jnp.dtype) -> PyTree:
        """Return the state before the first trial of a run."""

    def begin(self, state: PyTree, subproblem: AbstractSubproblem) -> PyTree:
        """Return the state before the first trial at a linearisation."""
        return state

    @abc.abstractmethod
    def damping(
        self, state: PyTree, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        r"""Return the next $\lambda$ to try at the point `y`."""

    def part(self, state: PyTree) -> ScalarLike:
        """Return the part of the step to try next, between 0 and 1."""
        return 1.0

    @abc.abstractmethod
    def after(self, state: PyTree, trial: Trial) -> PyTree:
        """Return the state after a trial."""

    def accepts(self, state: PyTree, trial: Trial) -> Bool[Array, ""]:
        """Whether a trial's step is good enough, with the `state` before the trial."""
        return trial.ratio > _SUFFICIENT

    def goes_on(self, state: PyTree, trial: Trial) -> Bool[Array, ""]:
        """Whether to try another damping here, with the `state` after the trial."""
        return ~trial.accepted

    def is_detour(self, state: PyTree) -> Bool[Array, ""]:
        """Whether the next trial, if it is accepted, is the start of a detour. The next
        linearisation is then at its point, and the step taken so far is kept. If some
        trial there lowers the loss of that step as well as it has to, it is the next
        step, and otherwise the detour is forgotten."""
        return jnp.array(False)


class Kept(eqx.Module):
    damping: Float[Array, ""]  # to try next; negative before the first trial


class AbstractFromFirst(AbstractDamping):
    """A rule whose state holds the next damping."""

    initial: AbstractVar[ScalarLike]

    def begin(self, state: Kept, subproblem: AbstractSubproblem) -> Kept:
        damping = state.damping
        curvature = subproblem.curvature_along_gradient().astype(damping.dtype)
        safe = jnp.where(positive(curvature), curvature, 1)
        initial = nan_unless(positive(self.initial), self.initial)
        first = jnp.where(damping < 0, initial.astype(damping.dtype) * safe, damping)
        return eqx.tree_at(lambda s: s.damping, state, first)

    def damping(self, state, subproblem, y) -> Scalar:
        return state.damping
