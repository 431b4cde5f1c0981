"""The quintic y = x^5/32 - x^3/2 + 2x - 1, where its values are within [-4, 4].

With u = x/2 the quintic is u (u^2 - 2)^2 - 1. Its values at its turning points lie within
-2.7 and 0.7, so that it passes -4 and 4 once each, at x = -3.6257 and x = 3.8058. These
are the ends of `INTERVAL`. The paper can also be read to mean that x itself is within
[-4, 4], which is `OTHER_INTERVAL`; the quintic is then within 9 of zero.
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
    """Return inputs evenly spaced over the whole interval, with both ends, and
    targets."""
    x = np.linspace(*interval, number)[:, None]
    return x, POLYNOMIAL(x)
