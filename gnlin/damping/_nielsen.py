"""A damping that each trial multiplies by a factor."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar, ScalarLike

from .._common._checks import as_scalar, check_finite_positive
from ._base import AbstractFromFirst, Kept, Trial


class _Changing(Kept):
    growth: Float[Array, ""]  # factor of the damping if the next trial fails


# The smallest factor of the damping in Nielsen's rule.
_LESS = 1 / 3
# If the ratio is at least the first number, the damping is multiplied by the second one.
# With 1/10 the median is 15 steps on NIST's fits and 22 on the classical problems, and
# without this rule 17 and 26.5. With 1/100 NIST's take 12.5, but some networks are a
# decade of loss behind after 25 steps.
_EXACT, _MUCH_LESS = 0.98, 1 / 10


class Nielsen(AbstractFromFirst):
    r"""A damping that falls by a factor of up to 3 after a good step, and rises by
    factors of 2, 4, 8 and so on after failing steps.

    $$\lambda \leftarrow \lambda\,\max\!\left(\tfrac13,\ 1 - (2\rho - 1)^3\right),$$

    with $\rho$ the decrease divided by the predicted decrease. As an addition to
    Nielsen's rule, $\lambda$ is divided by 10 if $\rho \ge 0.98$.

    **Arguments:**

    - `initial`: the first $\lambda$, divided by the curvature along the gradient.

    ??? cite "Reference"

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.
    """

    initial: ScalarLike = eqx.field(default=1e-3, converter=as_scalar)

    def __check_init__(self):
        check_finite_positive("initial", self.initial)

    def init(self, dtype: jnp.dtype) -> _Changing:
        return _Changing(jnp.array(-1, dtype), jnp.array(2, dtype))

    def after(self, state: _Changing, trial: Trial) -> _Changing:
        factor = jnp.where(trial.accepted, nielsen_factor(trial.ratio), state.growth)
        growth = jnp.where(trial.accepted, 2, 2 * state.growth)
        return _Changing(trial.damping * factor, growth)


def nielsen_factor(ratio: Scalar) -> Scalar:
    """Return the factor of the damping after an accepted step."""
    shrink = jnp.maximum(_LESS, 1 - (2 * ratio - 1) ** 3)
    return jnp.where(ratio >= _EXACT, _MUCH_LESS, shrink)
