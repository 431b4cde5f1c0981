"""A quintic: y = x^5/32 - x^3/2 + 2x - 1, where it stays within [-4, 4].

The interval in x is the one on which it does so. With u = x/2 the quintic is
u (u^2 - 2)^2 - 1; its turning points lie within -2.7 and 0.7, so that it passes -4 and 4
once each, at x = -3.6257 and x = 3.8058. These are the interval's ends; or, as the paper
can be read too, x itself is within [-4, 4], and the quintic within 9 of zero.
"""

import numpy as np
from jaxtyping import Float
from numpy import ndarray


POLYNOMIAL = np.polynomial.Polynomial([-1, 2, 0, -1 / 2, 0, 1 / 32])
BOUND = 4.0


def _only_crossing(level: float) -> float:
    roots = (POLYNOMIAL - level).roots()
    (crossing,) = roots[np.abs(roots.imag) < 1e-9].real
    return float(crossing)


INTERVAL = _only_crossing(-BOUND), _only_crossing(BOUND)


OTHER_INTERVAL = -BOUND, BOUND


def examples(
    number: int, interval: tuple[float, float] = INTERVAL
) -> tuple[Float[ndarray, "n 1"], Float[ndarray, "n 1"]]:
    """Inputs evenly spaced over the whole interval, both ends included, and targets."""
    x = np.linspace(*interval, number)[:, None]
    return x, POLYNOMIAL(x)
