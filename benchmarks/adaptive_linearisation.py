"""Iterative linearisation that linearises again only when it has to.

This solver is written with the parts that gnlin has for solvers of one's own."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Int, PyTree, Scalar

import gnlin
from gnlin.authoring import AbstractGaussNewton, Passes, take_step, Update


# The largest period to try, also if that of `descent` is infinite.
_LARGEST_PERIOD = 2.0**40
# The approximate number of periods tried at a linearisation.
_TRIALS = 10


class AdaptiveLinearisation(AbstractGaussNewton):
    r"""Iterative linearisation that linearises again when the kernel has drifted, or when
    the loss does not fall as predicted.

    A linearisation is trusted while

    - $\lVert\Theta u - \Theta_s u\rVert \le \tau\,\lVert\Theta_s u\rVert$ for one random
        probe u: the kernel has not drifted further than `max_drift`;
    - $L(f_s) - L(f) \ge \rho\,(L(f_s) - L(f_\mathrm{lin}))$: the loss of the network has
        fallen by at least `min_ratio` times the decrease that its linearisation predicts.

    On a full batch K is searched for at each linearisation. The last K is doubled while
    the point after K steps is trusted, or else halved until it is; K = 1 is always
    accepted. All trials share one factorisation. Across batches the trust is tested every
    `check_every` inner steps, on the current batch, and the model is linearised at the
    current point when it is lost.

    - `descent`: the inner steps. Its `period`, which may be infinite, is the largest K.
    - `max_drift`, `min_ratio`: tau and rho, or `None` for no such test.
    """

    descent: gnlin.IterativeLinearisation
    max_drift: float | None = None
    min_ratio: float | None = 0.25
    check_every: int = 10

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> Scalar:
        """Return the first period to try."""
        return jnp.ones((), float)

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        period: Any = self.descent.period
        longest = min(float(period), _LARGEST_PERIOD)
        descent = dataclasses.replace(self.descent, period=longest)
        subproblem = descent.subproblem(objective, lin, _TRIALS)
        trusted_at = self._trust(objective, lin, evaluate, num_steps, may_rise=False)

        def trusted(period: Scalar) -> Bool[Array, ""]:
            answer = subproblem.solve(descent.filter(period))
            linearised = jax.tree.map(jnp.add, lin.outputs, lin.jvp(answer.step))
            solved = answer.result == optx.RESULTS.successful
            return solved & trusted_at(lin.moved(answer.step), linearised)

        def attempt(search: _Search) -> _Search:
            good = trusted(search.period)
            # The first trial decides whether to try longer or shorter periods.
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
        given = objective, lin, evaluate, subproblem, answer
        update = take_step(*given, memory=search.best)
        drifts = 0 if self.max_drift is None else 1
        looks = Passes(1 + drifts, drifts) * search.num_trials + Passes(drifts, drifts)
        return eqx.tree_at(lambda u: u.passes, update, update.passes + looks)

    def _trust(self, objective, lin, evaluate, seed: Int[Array, ""], *, may_rise: bool):
        """Return a function that says whether to trust the linearised outputs at `y`.

        - `may_rise`: whether to trust a predicted rise of the loss, as on a batch of
            which the last steps knew nothing.
        """
        flat, unravel = ravel_pytree(lin.outputs)
        key = jax.random.fold_in(jax.random.key(0), seed)
        probe = unravel(jax.random.normal(key, flat.shape, flat.dtype))
        before = probe if self.max_drift is None else lin.jvp(lin.vjp(probe))

        def trusted(y, linearised) -> Bool[Array, ""]:
            good = jnp.array(True)
            if self.max_drift is None:
                outputs = evaluate(y)
            else:
                now = gnlin.linearise(lambda y, _: evaluate(y), y)
                outputs = now.outputs
                change = jax.tree.map(jnp.subtract, now.jvp(now.vjp(probe)), before)
                size, drift = (
                    jnp.linalg.norm(ravel_pytree(tree)[0]) for tree in (before, change)
                )
                good &= drift <= self.max_drift * size
            if self.min_ratio is not None:
                loss = objective.value(lin.outputs)
                rounding = 10 * jnp.finfo(loss.dtype).eps * jnp.abs(loss)
                predicted = objective.decrease(lin.outputs, linearised)
                actual = objective.decrease(lin.outputs, outputs)
                enough = self.min_ratio * predicted
                enough = enough if may_rise else jnp.maximum(enough, 0)
                good &= actual >= enough - rounding
            return good & jnp.all(jnp.isfinite(ravel_pytree(outputs)[0]))

        return trusted

    #
    # Mini-batches
    #

    def start_stream(self, y, outputs) -> Any:
        return self.descent.start_stream(y, outputs)

    def linearisation_point(self, state) -> PyTree[Array] | None:
        return self.descent.linearisation_point(state)

    def advance_stream(self, objective, fn, y, args, state, *, has_aux):
        given = objective, fn, y, args, state
        new_y, new, outputs, aux = self.descent.advance_stream(*given, has_aux=has_aux)
        num_steps = state.memory.num_steps + 1

        def evaluate(y, _=None):
            return fn(y, args)[0] if has_aux else fn(y, args)

        def is_lost():
            lin = gnlin.linearise(evaluate, state.memory.point)
            trust = self._trust(objective, lin, evaluate, num_steps, may_rise=True)
            return ~trust(y, outputs)

        due = num_steps % self.check_every == 0
        lost = jax.lax.cond(due, is_lost, lambda: jnp.array(False))
        fresh = self.descent.start_stream(new_y, jax.eval_shape(lambda: outputs)).memory
        memory = jax.tree.map(lambda a, b: jnp.where(lost, a, b), fresh, new.memory)
        return new_y, dataclasses.replace(new, memory=memory), outputs, aux


class _Search(eqx.Module):
    """A search for the longest trusted period, by powers of two."""

    period: Scalar  # to try next
    best: Scalar  # the longest trusted one so far
    rising: Bool[Array, ""]
    over: Bool[Array, ""]
    num_trials: Array
