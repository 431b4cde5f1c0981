"""A solver of your own: Gauss-Newton with damping in proportion to the gradient.

The damping vanishes at the solution, so that the steps become Gauss-Newton's, and no
damping has to be set (N. Yamashita and M. Fukushima, 2001).
"""

from collections.abc import Callable
from typing import Any

import optimistix as optx
from jaxtyping import Array, Int, PyTree

import gnlin


class ProportionalDamping(gnlin.authoring.AbstractGaussNewton):
    factor: float = 1.0

    def update(
        self,
        objective: gnlin.authoring.AbstractObjective,
        lin: gnlin.Linearisation,
        evaluate: Callable[[PyTree], PyTree],
        memory: Any,
        num_steps: Int[Array, ""],
    ) -> gnlin.authoring.Update:
        problem = objective.expand(lin)
        damped = gnlin.filters.Tikhonov(self.factor * optx.two_norm(problem.gradient()))
        subproblem = gnlin.authoring.choose(problem, damped)
        answer = subproblem.solve(damped)
        step = objective, lin, evaluate, subproblem, answer
        search = optx.BacktrackingArmijo()
        return gnlin.authoring.take_step(*step, search=search, damping=damped.damping)
