"""Reference solutions of periodic evolution equations, in Fourier modes.

The time stepping is by exponential differences of fourth order (A.-K. Kassam and L. N.
Trefethen, *Fourth-order time-stepping for stiff PDEs*, SIAM J. Sci. Comput. 26, 2005).
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Complex, Float
from numpy import ndarray


def evolved(
    points: Float[ndarray, "n 2"],
    *,
    symbol: Callable[[ndarray], ndarray],
    speed: float,
    start: Callable[[ndarray], ndarray],
    period: float,
    num_modes: int = 512,
    step: float = 1e-4,
) -> Float[ndarray, " n"]:
    """The solution of u_t + speed u u_x = L u at points (t, x), where L multiplies the
    mode exp(ikx) by `symbol(k)`."""
    times, which = np.unique(np.asarray(points)[:, 0], return_inverse=True)
    wave = 2 * np.pi / period * np.arange(num_modes // 2 + 1)
    here = np.fft.rfft(start(period * np.arange(num_modes) / num_modes))
    found, now = [], 0.0
    for time in times:
        number = max(1, int(np.ceil((time - now) / step - 1e-9)))
        if time > now:
            here = _advanced(
                here, wave, symbol(wave), speed, (time - now) / number, number
            )
        now = time
        found.append(here / num_modes)
    modes = np.array(found)
    modes[:, 1:] *= 2  # modes of negative frequency
    phases = np.exp(1j * np.outer(np.asarray(points)[:, 1], wave))
    return np.real(np.sum(modes[which] * phases, axis=1))


def _advanced(
    modes: Complex[ndarray, " k"],
    wave: Float[ndarray, " k"],
    symbol: ndarray,
    speed: float,
    step: float,
    number: int,
) -> Complex[ndarray, " k"]:
    n, kept = 2 * (len(wave) - 1), wave <= wave[-1] * 2 / 3

    def slope(modes):
        return -0.5j * speed * wave * np.fft.rfft(np.fft.irfft(modes, n) ** 2) * kept

    # Means over a circle, since the formulas cancel near 0.
    circle = np.exp(2j * np.pi * (np.arange(64) + 0.5) / 64)
    z = step * symbol[:, None] + circle
    mean = lambda x: step * np.mean(x, axis=1)
    whole, half = np.exp(step * symbol), np.exp(step * symbol / 2)
    q = mean((np.exp(z / 2) - 1) / z)
    first = mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    middle = mean((2 + z + np.exp(z) * (z - 2)) / z**3)
    last = mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)
    for _ in range(number):
        at_v = slope(modes)
        a = half * modes + q * at_v
        at_a = slope(a)
        at_b = slope(half * modes + q * at_a)
        at_c = slope(half * a + q * (2 * at_b - at_v))
        modes = whole * modes + first * at_v + 2 * middle * (at_a + at_b) + last * at_c
    return modes
