"""Literal steps of gradient descent on the linearised problem."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_float, forwards_only, is_zero
from ..filters import Nesterov
from ._base import Descent
from ._spaces import Linearised


class Momentum(eqx.Module):
    r"""Gradient descent as an optimiser whose hyperparameters may be traced.

    Heavy ball (Polyak, 1964): $v \leftarrow \mu v - \eta g$, $z \leftarrow z + v$;
    Nesterov (1983): $z \leftarrow z + \mu v - \eta g$ with the new $v$.
    """

    learning_rate: ScalarLike
    momentum: ScalarLike = 0.0
    nesterov: bool = False

    @staticmethod
    def of(filter: Descent) -> "Momentum":
        """Return the optimiser whose steps a filter stands for."""
        momentum = getattr(filter, "momentum", 0.0)
        return Momentum(filter.learning_rate, momentum, isinstance(filter, Nesterov))

    def init(self, y: PyTree[Array]) -> PyTree[Array] | None:
        return None if is_zero(self.momentum) else _tree.zeros_like(y)

    def update(self, gradient, velocity, y):
        step = _tree.scale(-jnp.asarray(self.learning_rate), gradient)
        if velocity is None:
            return step, None
        velocity = _tree.axpy(self.momentum, velocity, step)
        if self.nesterov:
            return _tree.axpy(self.momentum, velocity, step), velocity
        return velocity, velocity


class Descended(NamedTuple):
    """The state after a number of steps, in the coordinates of a space."""

    z: PyTree[Array]
    velocity: PyTree[Array] | None  # None without momentum
    num_steps: Scalar  # a float, because it may exceed 2^31
    diverged: Bool[Array, ""]


def descend(
    problem: Linearised,
    filter: Descent,
    period: ScalarLike,
    damping: ScalarLike,
    start: Descended | None = None,
) -> Descended:
    r"""Take `period` steps of a filter, from the linearisation point or from `start`, the
    state after fewer steps, on
    $L(f + \phi\delta) + g_0^\top\delta + \frac\lambda2\lVert\delta\rVert^2$.
    """
    zero, optimiser = problem.space.zero(), Momentum.of(filter)
    period = jnp.asarray(as_float(period), float)

    def advance(z, velocity, g):
        step, velocity = optimiser.update(g, velocity, z)
        return _tree.axpy(1, step, z), velocity

    def body(carry):
        k, z, velocity, _ = carry
        g = problem.gradient(z, damping)
        grown = ~(_tree.norm(g) <= largest)
        return k + 1, *advance(z, velocity, g), grown

    gradient = problem.first_gradient()
    # A gradient that has grown by 1/eps counts as divergence.
    largest = _tree.norm(gradient) / jnp.finfo(_tree.dtype(zero)).eps
    if start is None:
        k, grown = jnp.ones((), period.dtype), jnp.array(False)
        z, velocity = advance(zero, optimiser.init(zero), gradient)
    else:
        z, velocity, k, grown = start
    end = jax.lax.while_loop(
        lambda carry: (carry[0] < period) & ~carry[3], body, (k, z, velocity, grown)
    )
    k, z, velocity, grown = forwards_only(end)
    return Descended(z, velocity, k, grown | ~_tree.all_finite(z))


def updated(
    optimiser: Any,
    gradient: PyTree[Array],
    state: PyTree,
    y: PyTree[Array],
    loss: Scalar,
) -> tuple[PyTree[Array], PyTree]:
    """Return an optax optimiser's updates and new state. Those that adapt to the loss, as
    `optax.contrib.reduce_on_plateau` does, are passed it as `value`."""
    import optax  # here, so that `import gnlin` is light

    optimiser = optax.with_extra_args_support(optimiser)
    # Optax mixes dtypes when it divides by powers of its step count.
    with jax.numpy_dtype_promotion("standard"):
        try:
            return optimiser.update(gradient, state, y, value=loss)
        except TypeError as error:
            if "keyword-only" not in str(error):
                raise
            raise ValueError(
                "This optimiser needs more than the gradient and the loss, as "
                "`optax.lbfgs` does to search along its steps: pass one of gnlin's "
                "solvers, or pass groups to `optimistix.least_squares` with "
                "`optimistix.LBFGS(rtol, atol)`."
            ) from error
