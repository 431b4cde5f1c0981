"""Exact steps by NumPy and LAPACK alone: a step that is not solved earns no credit."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np


SOLVED = 1e-6
"""A step with a larger relative linear residual is not a solution, however fast."""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The linearised problem at one point, dense and in double precision."""

    jacobian: np.ndarray
    residual: np.ndarray

    @functools.cached_property
    def _svd(self):
        return np.linalg.svd(self.jacobian, full_matrices=False)

    def filtered(self, g: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return -phi^T U g(w) U^T r. It uses the singular values of phi, since forming
        phi phi^T would square the condition number."""
        u, s, vt = self._svd
        return -vt.T @ (s * g(s**2) * (u.T @ self.residual))

    def damped(self, damping: float) -> np.ndarray:
        return self.filtered(lambda w: 1 / (w + damping))

    def descent(self, period: float, learning_rate: float) -> np.ndarray:
        """Return K steps of gradient descent, for learning rates below 1 / eigenvalue."""

        def g(w):
            safe = np.where(w > 0, w, 1)
            shrunk = -np.expm1(period * np.log1p(-learning_rate * safe))
            return np.where(w > 0, shrunk / safe, period * learning_rate)

        return self.filtered(g)

    def linear_residual(self, step: np.ndarray, damping: float) -> float:
        """Return |phi^T phi s + phi^T r + lambda s| / |phi^T r|."""
        phi, r = self.jacobian, self.residual
        left = phi.T @ (phi @ step + r) + damping * step
        return float(np.linalg.norm(left) / np.linalg.norm(phi.T @ r))


def relative_error(step: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(step - exact) / np.linalg.norm(exact))
