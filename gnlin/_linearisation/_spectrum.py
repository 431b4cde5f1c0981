"""The spectrum of a linearisation: one factorisation serves all filters."""

import dataclasses
import types
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import first_line, is_own, is_traced
from .._common._sharding import is_here
from .._linear_algebra._derivatives import with_derivative_of
from ..filters import GradientDescent, Tikhonov
from ._eigenvectors import Eigenvectors, resolved


# A result is doubtful if eigenvalues that wrongly count as zero change it by this part.
_DOUBTFUL = 0.01

Filter = Callable[[Float[Array, " k"]], Float[Array, " k"]]


def evaluated(filter: Filter, w: Float[Array, " k"]) -> Float[Array, " k"]:
    """Return g(w). Raise `ValueError` unless it has a value for each eigenvalue."""
    try:
        g = filter(w)
    except (TypeError, ValueError) as error:
        if is_own(error):
            raise
        raise ValueError(
            "A filter is called with the array of all eigenvalues, but "
            f"`{filter}` failed: {first_line(error)}."
        ) from error
    is_array = eqx.is_array_like(g)
    if not is_array or jnp.shape(g) != w.shape:
        what = f"one of the shape {jnp.shape(g)}" if is_array else repr(g)
        raise ValueError(
            "A filter must return a value for each eigenvalue, and so an array of the "
            f"shape {w.shape}, but `{filter}` returned {what}."
        )
    return g


class Spectrum(eqx.Module):
    r"""Eigenpairs of the kernel $\phi\phi^\top = U\,\mathrm{diag}(w)\,U^\top$.

    Made by [`gnlin.Linearisation.spectrum`][]. All filters at one linearisation point
    share one spectrum:

    !!! example

        ```python
        spectrum = gnlin.linearise(fn, y, args).spectrum()
        step = spectrum.step(gnlin.filters.Tikhonov(0.1))
        steps = jax.vmap(lambda damping: spectrum.step(gnlin.filters.Tikhonov(damping)))(
            jnp.logspace(-3, 3, 64)
        )
        ```

    **Attributes:**

    - `eigenvalues`: $w \ge 0$, the largest first. There are k = min(m, p) of them, or m
        if only the kernel fits in the memory budget. Values indistinguishable from zero
        at working precision are exactly zero. All are NaN if the Jacobian is not finite.
    - `coefficients`: $U^\top r$, the residual in the kernel's eigenvectors.
    """

    eigenvalues: Float[Array, " k"]
    coefficients: Float[Array, " k"]
    _s: Float[Array, " k"]  # sqrt(w), also of eigenvalues that `resolved` leaves out
    _vectors: Eigenvectors
    _residual: Float[Array, " m"]
    # The spectrum with faint eigenvalues, and the least damping at which it is used; None
    # if eigenvalues are known to rounding
    _faint: "tuple[Spectrum, Scalar] | None" = None

    def __repr__(self) -> str:
        w = self.eigenvalues
        known = isinstance(w, jax.Array) and not isinstance(w, Tracer)
        if not known or w.ndim != 1 or w.size == 0 or not is_here(w):
            return f"Spectrum(eigenvalues={eqx.tree_pformat(w)})"
        num_zero = int(jnp.sum(w == 0))
        zeros = f", {num_zero} of them zero" if num_zero else ""
        least, most = float(jnp.min(w)), float(jnp.max(w))
        return f"Spectrum({w.size} eigenvalues from {least:.3g} to {most:.3g}{zeros})"

    def step(self, filter: Filter) -> PyTree[Array]:
        r"""Return the step $\delta = -\phi^\top U g(w) U^\top r$.

        The step is differentiable in $\phi$ and r wherever g is, even where eigenvalues
        coincide and eigenvectors are not differentiable.

        **Arguments:**

        - `filter`: g, any function of the eigenvalues; see `gnlin.filters`.
        """
        w, rounding = self.eigenvalues, _tree.fixed(self._unresolved())
        g = resolved(evaluated(filter, w), w, rounding)
        step = self.lift(-g * self.coefficients)
        if not self._vectors.are_all:
            return step
        if isinstance(filter, types.FunctionType):  # it may close over traced arrays
            filter = eqx.filter_closure_convert(filter, w)
        given = self._vectors, self._residual, filter, w, rounding
        return with_derivative_of(Eigenvectors.step, step, *given)

    def with_residual(self, residual: PyTree[Array]) -> "Spectrum":
        """Return the spectrum with another residual of the same structure."""
        flat, faint = self._flat(residual), self._faint
        if faint is not None:
            faint = faint[0].with_residual(flat), faint[1]
        c = self._vectors.project(flat, self._s)
        return dataclasses.replace(self, coefficients=c, _residual=flat, _faint=faint)

    def damped(self, damping: ScalarLike) -> "Spectrum":
        """Return the spectrum for a damped step, which also has faint eigenvalues: those
        between the usual and the largest size of rounding. If the damping is too small,
        they are set to zero, because an eigenvalue that is only rounding would make the
        step long."""
        if self._faint is None:
            return self
        faint, least = self._faint
        sure = dataclasses.replace(self, _faint=None)
        return _tree.where(jnp.asarray(damping, least.dtype) >= least, faint, sure)

    def resolved(self) -> tuple["Spectrum", Bool[Array, ""]]:
        r"""Return the spectrum without eigenvalues below $\varepsilon^{1/2}$ of the
        largest one, and whether their true values are zero, in which case an SVD would
        add nothing.

        Eigenvalues of a Gram matrix below that threshold are rounding errors; those above
        it have a relative error of at most $\varepsilon^{1/2}$. To test the small ones,
        the Jacobian is applied to random sums of their eigenvectors, which resolves
        singular values down to $\varepsilon^{3/4}$ of the largest one.
        """
        w, vectors = self.eigenvalues, self._vectors
        if not self._is_of_gram:
            return self, jnp.array(True)
        eps, largest = jnp.finfo(w.dtype).eps, jnp.max(w)
        small = w <= eps ** (1 / 2) * largest
        are_zero = lambda: vectors.size_of(w, small) == 0
        zero = jax.lax.cond(jnp.any(small), are_zero, lambda: jnp.array(True))
        kept = eqx.tree_at(lambda s: s.eigenvalues, self, jnp.where(small, 0, w))
        return kept, zero | ~self.finite()

    def _lost(self, damping: ScalarLike = 0.0) -> tuple[int, float]:
        """Return how many eigenvalues of a Gram matrix count as zero, and an estimate of
        the sum of their true values. It is zero if they are truly zero or far below the
        damping, after an SVD, and while the program is traced."""
        w = self.eigenvalues
        several = w.ndim != 1 or jnp.ndim(damping) != 0
        unknown = is_traced((self, damping)) or several or not is_here(w)
        if not self._is_of_gram or unknown or not bool(self.finite()):
            return 0, 0.0
        number = int(jnp.sum(w == 0))
        if number * float(self._unresolved()) <= _DOUBTFUL * float(jnp.asarray(damping)):
            return number, 0.0
        size = self._vectors.size_of(w, w == 0)
        return number, float(size**2 * jnp.max(w))

    def _unresolved(self) -> Scalar:
        """Return the size below which eigenvalues of a Gram matrix count as zero."""
        w = self.eigenvalues
        return w.size * float(jnp.finfo(w.dtype).eps) * jnp.max(w, initial=0)

    def _warn_of_lost(self, result: str, number: int) -> None:
        verb = "eigenvalue counts" if number == 1 else "eigenvalues count"
        warnings.warn(
            f"{number} {verb} as zero without being zero, and {result}: eigenvalues "
            f"below {float(self._unresolved()):.2g} are unresolved here, so use "
            '`spectrum("svd")`, double precision, or a damping above them.',
            stacklevel=5,  # Equinox wraps both methods
        )

    def project(self, residual: PyTree[Array]) -> Float[Array, " k"]:
        r"""Return $U^\top r$ for another residual, flat or of the outputs' structure."""
        return self._vectors.project(self._flat(residual), self._s)

    def lift(self, coefficients: Float[Array, " k"]) -> PyTree[Array]:
        r"""Return $\phi^\top U z$ as a pytree of parameters."""
        return self._vectors.lift(coefficients, self._s)

    def gradient(self) -> PyTree[Array]:
        r"""Return the gradient of the loss at the linearisation point, $\phi^\top r$."""
        return self.lift(self.coefficients)

    def gradient_norm(self) -> Scalar:
        r"""Return $\lVert\phi^\top r\rVert$, computed from the eigenvalues."""
        return _tree.norm(jnp.sqrt(self.eigenvalues) * self.coefficients)

    def effective_dimension(self, damping: ScalarLike) -> Scalar:
        r"""Return $d(\lambda) = \sum_i w_i/(w_i + \lambda)$, the number of directions
        that the damping leaves free. Without damping it is the rank.

        **Arguments:**

        - `damping`: $\lambda \ge 0$.

        **Warns:** as [`gnlin.Spectrum.condition_number`][] does.

        ??? cite "Reference"

            T. Hastie, R. Tibshirani and J. Friedman, *The elements of statistical
            learning* (2009), equation 3.50.
        """
        found = jnp.sum(self.eigenvalues * Tikhonov(damping)(self.eigenvalues))
        number, total = self._lost(damping)
        if total > 0:
            more = total / float(jnp.maximum(damping, total / number))
            if more > _DOUBTFUL * float(found):
                self._warn_of_lost(f"would add up to {more:.3g} to the result", number)
        return found

    def condition_number(self, damping: ScalarLike = 0.0) -> Scalar:
        r"""Return $(w_1 + \lambda)/(w_k + \lambda)$, where $w_1$ is the largest
        eigenvalue and $w_k$ the smallest (without damping, the smallest that is not
        zero): how much longer the slowest eigenvector takes to learn than the fastest.

        **Arguments:**

        - `damping`: $\lambda \ge 0$.

        **Warns:** if eigenvalues that `"eigh"` does not resolve decide the result, unless
        the spectrum or the damping is traced. `"eigh"` leaves out the eigenvalues below
        $k\varepsilon w_1$ of k; in single precision and with $k = 1000$ these are below
        1e-4 of the largest. Results are reliable for a $\lambda$ well above that.
        """
        inverse = Tikhonov(damping)(self.eigenvalues)
        damped = self.eigenvalues + jnp.asarray(damping, self.eigenvalues.dtype)
        found = jnp.max(damped) * jnp.max(inverse)
        number, total = self._lost(damping)
        # The smallest is at most their mean.
        if total > 0 and total / number > _DOUBTFUL * float(jnp.asarray(damping)):
            self._warn_of_lost("would change the condition number", number)
        return found

    def steps_to_half(self, learning_rate: ScalarLike) -> Float[Array, " k"]:
        r"""Return, for each eigenvector, the number of gradient descent steps (a real
        number) after which the residual along it has halved,
        $\log\frac12/\log|1 - \eta w|$. It is infinite if w is zero, or too large for the
        learning rate.

        **Arguments:**

        - `learning_rate`: $\eta > 0$.

        **Warns:** if it is infinite for eigenvalues that are not zero but that `"eigh"`
        does not resolve, unless the spectrum is traced; see
        [`gnlin.Spectrum.condition_number`][].
        """
        number, total = self._lost()
        if total > 0:
            self._warn_of_lost("make the number of steps infinite", number)
        growth = GradientDescent(1, learning_rate).log_growth(self.eigenvalues)
        falls = ~(growth >= 0)
        half = jnp.log(jnp.asarray(0.5, growth.dtype))
        return jnp.where(falls, half / jnp.where(falls, growth, 1), jnp.inf)

    def shares(self, of: PyTree[Array]) -> Float[Array, " k"]:
        r"""Return $(u_i^\top v)^2/\lVert v\rVert^2$, the share of a vector $v$, such as
        the targets or the residual, along each eigenvector. The shares sum to less than 1
        if part of $v$ is orthogonal to all eigenvectors, and are zero if $v$ is zero.

        **Arguments:**

        - `of`: $v$, a pytree like the outputs.

        ??? cite "Reference"

            S. Arora et al., *Fine-grained analysis of optimization and generalization for
            overparameterized two-layer neural networks*, ICML (2019), section 4.
        """
        flat = self._flat(of)
        return self.project(_tree.divided(flat, _tree.norm(flat))) ** 2

    def _flat(self, outputs: PyTree[Array]) -> Float[Array, " m"]:
        return self._vectors.jacobian.codomain.ravel(outputs)

    @property
    def _is_of_gram(self) -> bool:
        """Whether these are all eigenpairs of a Gram matrix, which loses small ones."""
        vectors = self._vectors
        return vectors.are_all and (vectors.left is None or vectors.right is None)

    def finite(self) -> Array:
        """Whether the Jacobian and the residual were finite."""
        return _tree.all_finite((self.eigenvalues, self.coefficients))
