"""Iterative linearisation that linearises again only when it has to."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_scalar, check_period, check_positive, check_share
from .._common._passes import Passes
from .._common._tree import ravel_pytree
from .._linearisation._linearisation import Linearisation, linearise
from .._linearisation._objective import AbstractObjective
from ._base import AbstractGaussNewton
from ._iterative_linearisation import IterativeLinearisation
from ._state import Evaluate, State, Update
from ._stepping import take_step
from ._termination import rounding_of_loss


# The largest period to try, also if that of `descent` is infinite.
_LARGEST_PERIOD = 2.0**40
# The approximate number of periods tried at a linearisation.
_TRIALS = 10


class AdaptiveLinearisation(AbstractGaussNewton):
    r"""Iterative linearisation that linearises again when the kernel has drifted, or when
    the loss does not fall as predicted.

    A linearisation is trusted while

    - $\lVert\Theta u - \Theta_s u\rVert \le \tau\,\lVert\Theta_s u\rVert$ for one random
        probe u: the kernel has not drifted further than `max_drift`, by the estimate of
        [`gnlin.features.kernel_drift`][];
    - $L(f_s) - L(f) \ge \rho\,(L(f_s) - L(f_\mathrm{lin}))$: the loss of the network has
        fallen by at least `min_ratio` times the decrease that its linearisation predicts.

    On a full batch K is searched for at each linearisation. The last K is doubled while
    the point after K steps is trusted, or else halved until it is; K = 1 is always
    accepted. All trials share one factorisation. Each takes a forward pass, and for the
    drift a tangent and a transposed pass. Across batches the trust is tested every
    `check_every` inner steps, on the current batch, and the model is linearised at the
    current point when it is lost.

    **Arguments:**

    - `descent`: the inner steps, a [`gnlin.IterativeLinearisation`][]. Its `period`,
        which may be infinite, is the largest K.
    - `max_drift`: $\tau > 0$, or `None` to ignore the kernel. This test is the more
        cautious one: the kernel may drift far while the steps are still good.
    - `min_ratio`: $\rho$ from 0 to 1, or `None` to ignore the loss.
    - `check_every`: the number of inner steps between two tests, across batches.

    The columns `num_inner_steps` and `num_feature_updates` of a history show the result.

    !!! example

        ```python
        solver = gnlin.methods.AdaptiveLinearisation(
            gnlin.IterativeLinearisation(period=10**6, learning_rate=1e-3), min_ratio=0.5
        )
        ```
    """

    descent: IterativeLinearisation
    max_drift: ScalarLike | None = eqx.field(converter=as_scalar)
    min_ratio: ScalarLike | None = eqx.field(converter=as_scalar)
    check_every: int

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
            check_share("min_ratio", min_ratio)
        check_period("check_every", check_every)
        self.descent = descent
        self.max_drift = max_drift
        self.min_ratio = min_ratio
        self.check_every = check_every
        for name in AbstractGaussNewton.__dataclass_fields__:
            setattr(self, name, getattr(descent, name))

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> Scalar:
        """Return the first period to try."""
        return jnp.ones((), float)

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        descent = self.descent
        if descent.optimiser is not None:
            raise ValueError(
                "On a full batch an `optimiser` cannot be used: give `descent` a "
                "`learning_rate`, or pass `batch_size` to `gnlin.fit`."
            )
        longest = _longest(descent.period)
        subproblem = descent.subproblem(objective, lin, longest, _TRIALS)
        trusted_at = self._trust(objective, lin, evaluate, num_steps, may_rise=False)

        def trusted(period: Scalar) -> Bool[Array, ""]:
            answer = subproblem.solve(descent.filter(period))
            linearised = _tree.axpy(1, lin.jvp(answer.step), lin.outputs)
            solved = answer.result == optx.RESULTS.successful
            candidate = lin.moved(answer.step)
            return solved & trusted_at(candidate, linearised)

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
        update = take_step(
            *given,
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
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        seed: Int[Array, ""],
        *,
        may_rise: bool,
    ):
        """Return a function that says whether to trust the linearised outputs at `y`.

        - `may_rise`: whether to trust a predicted rise of the loss.
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
                budget = lin.jacobian.memory_budget
                now = linearise(lambda y, _: evaluate(y), y, memory_budget=budget)
                outputs = now.outputs
                change = _tree.axpy(-1, before, now.jvp(now.vjp(probe)))
                size, drift = _tree.norm(before), _tree.norm(change)
                good &= drift <= jnp.asarray(self.max_drift, size.dtype) * size
            if self.min_ratio is not None:
                loss = objective.value(lin.outputs)
                rounding = rounding_of_loss(loss, None, lin.point)
                predicted = objective.decrease(lin.outputs, linearised)
                actual = objective.decrease(lin.outputs, outputs)
                enough = jnp.asarray(self.min_ratio, predicted.dtype) * predicted
                # The quadratic form may predict a rise, and so may a batch of which the
                # last steps knew nothing.
                enough = enough if may_rise else jnp.maximum(enough, 0)
                good &= actual >= enough - rounding
            return good & _tree.all_finite(outputs)

        return trusted

    #
    # Mini-batches
    #

    def start_stream(self, y, outputs) -> State:
        return self.descent.start_stream(y, outputs)

    def linearisation_point(self, state: State) -> PyTree[Array] | None:
        return self.descent.linearisation_point(state)

    def advance_stream(self, objective, fn, y, args, state, *, has_aux):
        def evaluate(y):
            return fn(y, args)[0] if has_aux else fn(y, args)

        def triggered(lin, outputs, num_steps):
            def look():
                given = objective, lin, evaluate, num_steps
                return ~self._trust(*given, may_rise=True)(y, outputs)

            due = num_steps % self.check_every == 0
            return jax.lax.cond(due, look, lambda: jnp.array(False))

        return self.descent.advance_stream(
            objective, fn, y, args, state, has_aux=has_aux, trigger=triggered
        )


class _Search(eqx.Module):
    """A search for the longest trusted period, by powers of two."""

    period: Scalar  # to try next
    best: Scalar  # the longest trusted one so far
    rising: Bool[Array, ""]
    over: Bool[Array, ""]
    num_trials: Array


def _longest(period: ScalarLike) -> ScalarLike:
    if isinstance(period, int | float):
        return min(float(period), _LARGEST_PERIOD)
    return jnp.minimum(jnp.asarray(period, float), _LARGEST_PERIOD)
