"""Iterative linearisation that linearises anew when, and only when, it has to."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_scalar, check_nonnegative, check_period, check_positive
from .._common._passes import Passes
from .._common._tree import ravel_pytree
from .._linearisation._linearisation import Linearisation, linearise
from .._linearisation._objective import AbstractObjective
from ._base import AbstractGaussNewton, Evaluate, State, Update
from ._iterative_linearisation import IterativeLinearisation
from ._stepping import take_step


# Doubling the period stops here where it has no bound of its own.
_LARGEST_PERIOD = 2.0**40
# How many periods are tried at a linearisation, about.
_TRIALS = 10
_ROUNDINGS = 10


class AdaptiveLinearisation(AbstractGaussNewton):
    r"""Iterative linearisation whose feature updates are triggered: by the kernel's
    drift, by a loss that does not fall as predicted, or by whichever comes first.

    A linearisation is trusted while

    - $\lVert\Theta u - \Theta_s u\rVert \le \tau\,\lVert\Theta_s u\rVert$, with one
        random probe u: the kernel has not moved further than `max_drift`, as
        [`gnlin.features.kernel_drift`][] estimates it;
    - $L(f_s) - L(f) \ge \rho\,(L(f_s) - L(f_\mathrm{lin}))$: the loss of the network has
        fallen by at least `min_ratio` of what its linearisation says.

    On a full batch K is found anew at each linearisation: the last one is doubled while
    the point after K steps is trusted, or else halved until it is (K = 1 is taken
    anyhow). One factorisation serves all trials; each takes a forward pass, for the
    drift a tangent and a transposed one more. Across batches it looks every
    `check_every` inner steps, on the batch at hand, and linearises anew where it stands
    when the trust is lost.

    **Arguments:**

    - `descent`: the inner steps, a [`gnlin.IterativeLinearisation`][]; its `period`,
        which may be infinite, is the longest.
    - `max_drift`: $\tau > 0$, or `None` not to look at the kernel. A kernel may drift far
        while the steps are still good: of the two this is the cautious one.
    - `min_ratio`: $\rho$ from 0 to 1, or `None` not to look at the loss.
    - `check_every`: inner steps from one look to the next, across batches.

    The columns `num_inner_steps` and `num_feature_updates` of a history tell what it did.

    !!! example

        ```python
        solver = gnlin.methods.AdaptiveLinearisation(
            gnlin.IterativeLinearisation(period=10**6, learning_rate=1e-3), min_ratio=0.5
        )
        ```
    """

    descent: IterativeLinearisation
    max_drift: ScalarLike | None = eqx.field(default=None, converter=as_scalar)
    min_ratio: ScalarLike | None = eqx.field(default=0.25, converter=as_scalar)
    check_every: int = 10

    def __init__(
        self,
        descent: IterativeLinearisation,
        max_drift: ScalarLike | None = None,
        min_ratio: ScalarLike | None = 0.25,
        check_every: int = 10,
    ):
        if not isinstance(descent, IterativeLinearisation):
            raise ValueError(
                "`descent` must be a `gnlin.IterativeLinearisation`, but "
                f"{descent!r} was given."
            )
        if max_drift is None and min_ratio is None:
            raise ValueError(
                "Nothing would trigger a feature update: pass `max_drift` or "
                "`min_ratio`, or use `descent` itself."
            )
        if max_drift is not None:
            check_positive("max_drift", max_drift)
        if min_ratio is not None:
            check_nonnegative("min_ratio", min_ratio)
            if isinstance(min_ratio, float | int) and min_ratio > 1:
                raise ValueError(
                    f"`min_ratio` must be at most 1, but {min_ratio} was given."
                )
        check_period("check_every", check_every)
        self.descent = descent
        self.max_drift = max_drift
        self.min_ratio = min_ratio
        self.check_every = check_every
        self.rtol = descent.rtol
        self.atol = descent.atol
        self.norm = descent.norm
        self.memory_budget = descent.memory_budget
        self.bounds = descent.bounds
        self.retraction = descent.retraction
        self.verbose = descent.verbose

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> Scalar:
        """The period to try first."""
        return jnp.ones((), float)

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: Scalar,
        num_steps: Int[Array, ""],
    ) -> Update:
        descent = self.descent
        if descent.optimiser is not None:
            raise ValueError(
                "On one batch the period is found by doubling, and an `optimiser`'s "
                "steps cannot be: give `descent` a `learning_rate`, or pass `batch_size` "
                "to `gnlin.fit`."
            )
        longest = _longest(descent.period)
        subproblem = descent.subproblem(objective, lin, longest, _TRIALS)
        trusted_at = self._trust(objective, lin, num_steps)

        def trusted(period: Scalar) -> Bool[Array, ""]:
            answer = subproblem.solve(descent.filter(period))
            linearised = _tree.axpy(1, lin.jvp(answer.step), lin.outputs)
            solved = answer.result == optx.RESULTS.successful
            candidate = lin.moved(answer.step)
            return solved & trusted_at(evaluate, candidate, linearised)

        def attempt(search: _Search) -> _Search:
            good = trusted(search.period)
            # The first trial says whether to look above or below.
            rising = jnp.where(search.num_trials == 0, good, search.rising)
            best = jnp.where(good, search.period, search.best)
            period = jnp.where(rising, search.period * 2, jnp.ceil(search.period / 2))
            outside = (period > longest) | (search.period <= 1) & ~rising
            over = (good != rising) | outside
            return _Search(period, best, rising, over, search.num_trials + 1)

        no = jnp.array(False)
        start = jnp.minimum(memory, longest)
        search = jax.lax.while_loop(
            lambda search: ~search.over,
            attempt,
            _Search(start, jnp.ones((), float), no, no, jnp.array(0)),
        )
        answer = subproblem.solve(descent.filter(search.best))
        answer = eqx.tree_at(lambda a: a.num_inner_steps, answer, search.best)
        update = take_step(
            self,
            objective,
            lin,
            evaluate,
            subproblem,
            answer,
            memory=search.best,
            damping=descent.damping_now(),
            again=lambda lin: (
                descent.subproblem(objective, lin, search.best)
                .solve(descent.filter(search.best))
                .step
            ),
        )
        drifts = 0 if self.max_drift is None else 1
        looks = Passes(1 + drifts, drifts) * search.num_trials + Passes(drifts, drifts)
        return eqx.tree_at(lambda u: u.passes, update, update.passes + looks)

    def _trust(
        self, objective: AbstractObjective, lin: Linearisation, seed: Int[Array, ""]
    ):
        """A function of a point, as `evaluate` sees it and as its linearisation does."""
        flat, unravel = ravel_pytree(lin.outputs)
        key = jax.random.fold_in(jax.random.key(0), seed)
        probe = unravel(jax.random.normal(key, flat.shape, flat.dtype))
        of_then = probe if self.max_drift is None else lin.jvp(lin.vjp(probe))

        def trusted(evaluate, y, linearised) -> Bool[Array, ""]:
            good = jnp.array(True)
            if self.max_drift is None:
                outputs = evaluate(y)
            else:
                budget = lin.jacobian.memory_budget
                now = linearise(lambda y, _: evaluate(y), y, memory_budget=budget)
                outputs = now.outputs
                moved = _tree.axpy(-1, of_then, now.jvp(now.vjp(probe)))
                was, drift = _tree.norm(of_then), _tree.norm(moved)
                good &= drift <= jnp.asarray(self.max_drift, was.dtype) * was
            if self.min_ratio is not None:
                rounding = _ROUNDINGS * _tree.eps(lin.outputs)
                rounding *= jnp.abs(objective.value(lin.outputs))
                predicted = objective.decrease(lin.outputs, linearised)
                actual = objective.decrease(lin.outputs, outputs)
                enough = jnp.asarray(self.min_ratio, predicted.dtype) * predicted
                good &= actual >= enough - rounding
            return good & _tree.all_finite(outputs)

        return trusted

    #
    # Mini-batches
    #

    def start_stream(
        self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]
    ) -> State:
        return self.descent.start_stream(y, outputs)

    def linearisation_point(self, state: State) -> PyTree[Array] | None:
        return self.descent.linearisation_point(state)

    def check_curvature_batch(self) -> None:
        self.descent.check_curvature_batch()

    def advance_stream(
        self,
        objective: AbstractObjective,
        fn: Callable[[Any, Any], Any],
        y: PyTree[Array],
        args: PyTree,
        state: State,
        *,
        has_aux: bool,
    ) -> tuple[PyTree[Array], State, Scalar, Any]:
        def evaluate(y):
            return fn(y, args)[0] if has_aux else fn(y, args)

        def triggered(lin, outputs, num_steps):
            def look():
                trusted_at = self._trust(objective, lin, num_steps)
                return ~trusted_at(evaluate, y, outputs)

            due = num_steps % self.check_every == 0
            return jax.lax.cond(due, look, lambda: jnp.array(False))

        return self.descent.advance_stream(
            objective, fn, y, args, state, has_aux=has_aux, trigger=triggered
        )


class _Search(eqx.Module):
    """For the longest period that is trusted, by powers of two."""

    period: Scalar  # to try next
    best: Scalar
    rising: Bool[Array, ""]
    over: Bool[Array, ""]
    num_trials: Array


def _longest(period: ScalarLike) -> ScalarLike:
    if isinstance(period, int | float):
        return min(float(period), _LARGEST_PERIOD)
    return jnp.minimum(jnp.asarray(period, float), _LARGEST_PERIOD)
