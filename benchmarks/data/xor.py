"""XOR with noise: X = z + e, with z uniform on {-1, 1}^2 and e ~ N(0, 0.1 I), and
y = X_1 X_2."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray


VARIANCE = 0.1


def examples(
    number: int, seed: int
) -> tuple[Float[ndarray, "n 2"], Float[ndarray, "n 1"]]:
    rng = np.random.default_rng(seed)
    z = rng.choice([-1.0, 1.0], size=(number, 2))
    x = z + np.sqrt(VARIANCE) * rng.standard_normal((number, 2))
    return x, np.prod(x, axis=1, keepdims=True)
