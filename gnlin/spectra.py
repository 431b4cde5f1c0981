r"""Spectra of large kernels, by products alone.

[`gnlin.Linearisation.spectrum`][] computes all eigenvalues of a kernel $\phi\phi^\top$.
For a kernel that is too large to be factorised, or to be stored, these functions compute
the largest eigenpairs, and estimate sums over all eigenvalues, with standard errors. The
curvature $\phi^\top\phi$ has the same nonzero eigenvalues. A product takes a transposed
and a tangent pass; vectors have min(m, p) entries, for m outputs and p parameters.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Scalar, ScalarLike

from ._common import _tree
from ._common._checks import (
    as_key,
    as_scalar,
    check_count,
    check_finite_positive,
    is_traced,
    nan_unless,
)
from ._common._tree import ravel_pytree
from ._common._words import by_name, with_error
from ._jacobian import AbstractJacobian
from ._linear_algebra import _lanczos, _nystrom
from ._linearisation._eigenvectors import Eigenvectors
from ._linearisation._linearisation import Linearisation
from ._linearisation._spectrum import Spectrum


__all__ = [
    "Eigenpairs",
    "Estimate",
    "effective_dimension",
    "leading",
    "log_determinant",
    "trace",
]


# The basis for k pairs has _BASIS k + _MORE vectors if memory allows.
_BASIS, _MORE = 4, 40
# The default of `max_products`, in multiples of the basis.
_MOST = 10


class Eigenpairs(eqx.Module):
    r"""The k largest eigenpairs of the kernel $\phi\phi^\top$ and of the curvature
    $\phi^\top\phi$, as returned by [`gnlin.spectra.leading`][].

    **Attributes:**

    - `eigenvalues`: `w`, the largest first. Eigenvalues indistinguishable from zero at
        working precision are exactly zero.
    - `residuals`: $\lVert A x - w x\rVert$ of each pair, as the iteration estimates it
        (without rounding).
    - `num_products`: the products with the kernel, each of a transposed and a tangent
        pass.
    - `converged`: whether all residuals are within the tolerance.
    """

    eigenvalues: Float[Array, " k"]
    residuals: Float[Array, " k"]
    num_products: Int[Array, ""]
    converged: Bool[Array, ""]
    _vectors: Float[Array, "k n"] = eqx.field(repr=False)  # n = min(m, p)
    _lin: Linearisation = eqx.field(repr=False)

    def __repr__(self) -> str:
        return _tree.in_words(self)

    def on_outputs(self) -> Float[Array, "m k"]:
        r"""Return the eigenvectors of the kernel in columns, in `ravel_pytree` order.
        With fewer parameters than outputs they are $\phi v/\sqrt w$, which takes a
        tangent pass each, and zero if w is."""
        if _outputs_are_fewer(self._lin.jacobian):
            return self._vectors.T
        jacobian = self._lin.jacobian
        push = lambda v: jacobian.push_forward(jacobian.domain.unravel(v))
        pushed = jax.lax.map(push, self._vectors)
        roots = jnp.sqrt(self.eigenvalues)[:, None]
        return _tree.quotient(pushed.astype(roots.dtype), roots).T

    def on_parameters(self) -> PyTree[Array]:
        r"""Return the eigenvectors of the curvature, in the parameters' structure with a
        leading axis of length k. With at most as many outputs as parameters they are
        $\phi^\top u/\sqrt w$, which takes a transposed pass each, and zero if w is."""
        if not _outputs_are_fewer(self._lin.jacobian):
            return jax.vmap(self._lin.jacobian.domain.unravel)(self._vectors)
        scaled = _tree.quotient(self._vectors, jnp.sqrt(self.eigenvalues)[:, None])
        return jax.lax.map(self._lin.jacobian.pull_back, scaled)

    def spectrum(self, residual: PyTree[Array] | None = None) -> Spectrum:
        """Return the pairs as a [`gnlin.Spectrum`][], whose steps stay within these k
        directions.

        **Arguments:**

        - `residual`: a residual in the outputs' structure; by default the outputs.
        """
        residual = self._lin.outputs if residual is None else residual
        jacobian, columns = self._lin.jacobian, self._vectors.T
        if _outputs_are_fewer(jacobian):
            vectors = Eigenvectors(jacobian, left=columns)
        else:
            vectors = Eigenvectors(jacobian, right=columns)
        flat, s = jacobian.codomain.ravel(residual), jnp.sqrt(self.eigenvalues)
        coefficients = vectors.project(flat, s)
        return Spectrum(self.eigenvalues, coefficients, s, vectors, flat)


def leading(
    lin: Linearisation,
    k: int,
    *,
    tolerance: ScalarLike = 1e-5,
    max_products: int | None = None,
) -> Eigenpairs:
    r"""Find the k largest eigenvalues of the kernel $\phi\phi^\top$, and their
    eigenvectors, without forming it.

    This is the Lanczos process with full orthogonalisation, on the smaller side. It ends
    when $\lVert A x - w x\rVert \le \tau\,w$ for each pair (or 10 eps times the largest
    eigenvalue, if that is more), and 24 products from a random vector orthogonal to them
    have found no further pair. So it finds multiple eigenvalues, and k may exceed the
    rank. The basis has about 4 k vectors, or as many as half the linearisation's memory
    budget holds; when it is full, the process restarts from the best of them.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][] of m outputs and p parameters.
    - `k`: the number of eigenpairs, at most min(m, p).
    - `tolerance`: $\tau > 0$, for residuals relative to their eigenvalues. Eigenvectors
        have errors of about $\tau$, eigenvalues of $\tau^2$, over the relative gap.
    - `max_products`: the most products, approximately; `None` for ten times the basis.

    **Returns:** [`gnlin.spectra.Eigenpairs`][]. If the Jacobian is not finite, they are
    NaN and have not converged.

    **Raises:** `ValueError` if there are fewer than k eigenpairs, or if k + 2 vectors of
    length min(m, p) take more than half the memory budget.

    !!! example

        ```python
        model = eqx.nn.MLP(3, 2, 16, 2, key=jax.random.key(0))
        lin = gnlin.features.linearise_model(model, inputs)
        pairs = gnlin.spectra.leading(lin, 4)
        pairs.eigenvalues, pairs.on_outputs(), pairs.converged
        pairs.spectrum().steps_to_half(learning_rate=0.01)
        ```

    ??? cite "Reference"

        K. Wu and H. Simon, *Thick-restart Lanczos method for large symmetric eigenvalue
        problems*, SIAM J. Matrix Anal. Appl. 22 (2000).
    """
    check_finite_positive("tolerance", tolerance)
    return _leading(lin, k, as_scalar(tolerance), max_products)


@eqx.filter_jit
def _leading(
    lin: Linearisation, k: int, tolerance: ScalarLike, max_products: int | None
) -> Eigenpairs:
    product, n, dtype = _smaller_side(lin)
    check_count("k", k)
    if k > n:
        raise ValueError(
            f"A Jacobian of {' x '.join(map(str, lin.shape))} has {n} eigenpairs, but "
            f"{k} were asked for."
        )
    # A restart holds the old basis and the new one.
    room = lin.jacobian.memory_budget // (2 * n * dtype.itemsize)
    capacity = min(n, _BASIS * k + _MORE, room)
    if capacity < min(n, k + 2):
        raise ValueError(
            f"Two copies of {k} eigenvectors of {n} numbers take more than the memory "
            f"budget of {lin.jacobian.memory_budget} bytes: pass a smaller `k`, or "
            "linearise with a larger `memory_budget`."
        )
    if max_products is None:
        max_products = _MOST * capacity
    check_count("max_products", max_products)
    key, tolerance = jax.random.key(0), jnp.asarray(tolerance, dtype)
    start = jax.random.normal(key, (n,), dtype)
    found = _lanczos.leading(
        product, start, k, capacity, tolerance, max_products, jax.random.fold_in(key, 1)
    )
    return Eigenpairs(*found, lin)


class Estimate(NamedTuple):
    """A quantity that is known to within an error: a mean over random vectors, or a
    function of fitted parameters.

    **Attributes:**

    - `value`: the quantity.
    - `standard_error`: its standard error, in the same structure.
    """

    value: PyTree
    standard_error: PyTree

    def __str__(self) -> str:
        """The values beside their errors, with all the digits that these leave."""
        return repr(self) if is_traced(self) else by_name(with_error, *self)


@eqx.filter_jit
def trace(lin: Linearisation, *, key: Key[Array, ""], num_probes: int = 32) -> Estimate:
    r"""Estimate $\mathrm{tr}(\phi\phi^\top)$ from one product for each probe.

    This is XNysTrace: the trace of a randomised Nyström approximation, plus an estimate
    of the remainder from each probe that was left out of it. Its error falls with the
    eigenvalues beyond the number of probes; Hutchinson's falls only with the square root
    of that number. The standard error is the jackknife's, from what the estimate would be
    without each of the probes. It is right for spectra that fall slowly, and up to
    several times too large for those that fall fast.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][].
    - `key`: the key of the random vectors.
    - `num_probes`: at least 2. With min(m, p) or more, the trace is exact, and no random
        vector is drawn.

    ??? cite "Reference"

        E. N. Epperly, J. A. Tropp and R. J. Webber, *XTrace: making the most of every
        sample in stochastic trace estimation*, SIAM J. Matrix Anal. Appl. 45 (2024). The
        standard error: E. N. Epperly and J. A. Tropp, *Efficient error and variance
        estimation for randomized matrix computations*, SIAM J. Sci. Comput. 46 (2024).
    """
    _check_several(num_probes)
    key = as_key(key)
    product, n, dtype = _smaller_side(lin)
    if num_probes >= n:
        each = jax.lax.map(lambda e: jnp.vdot(e, product(e)), jnp.eye(n, dtype=dtype))
        exact = jnp.sum(each)
        return Estimate(exact, nan_unless(jnp.isfinite(exact), jnp.zeros((), dtype)))
    return Estimate(*_nystrom.trace(product, n, num_probes, key, dtype))


def log_determinant(
    lin: Linearisation,
    damping: ScalarLike,
    *,
    key: Key[Array, ""],
    num_probes: int = 16,
    num_steps: int = 64,
) -> Estimate:
    r"""Estimate $\log\det(\phi\phi^\top + \lambda I)$ of the m x m kernel.

    The estimate is the mean of $z^\top\log(\phi\phi^\top + \lambda I)\,z$ over vectors z
    of random signs, each computed by stochastic Lanczos quadrature. Add
    $(p - m)\log\lambda$ for the log-determinant of the damped curvature.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][].
    - `damping`: $\lambda > 0$.
    - `key`: the key of the random vectors.
    - `num_probes`: the number of random vectors, at least 2.
    - `num_steps`: the products for each vector, of which at most min(m, p) are made. The
        standard error does not include the error of too few steps, which falls as
        $\exp(-4\,\mathrm{steps}\,\sqrt{\lambda/w_1})$.

    ??? cite "Reference"

        S. Ubaru, J. Chen and Y. Saad, *Fast estimation of tr(f(A)) via stochastic Lanczos
        quadrature*, SIAM J. Matrix Anal. Appl. 38 (2017).
    """
    check_finite_positive("damping", damping)
    return _summed(lin, _log, as_scalar(damping), as_key(key), num_probes, num_steps)


def effective_dimension(
    lin: Linearisation,
    damping: ScalarLike,
    *,
    key: Key[Array, ""],
    num_probes: int = 16,
    num_steps: int = 64,
) -> Estimate:
    r"""Estimate $d(\lambda) = \sum_i w_i/(w_i + \lambda)$, the number of directions that
    a damping leaves free, by stochastic Lanczos quadrature. The arguments are those of
    [`gnlin.spectra.log_determinant`][]. [`gnlin.Spectrum.effective_dimension`][] computes
    it from all eigenvalues.
    """
    check_finite_positive("damping", damping)
    given = as_scalar(damping), as_key(key), num_probes, num_steps
    return _summed(lin, _part_left_free, *given)


def _log(eigenvalues: Array, damping: Scalar) -> Array:
    return jnp.log(eigenvalues + damping)


def _part_left_free(eigenvalues: Array, damping: Scalar) -> Array:
    return eigenvalues / (eigenvalues + damping)


@eqx.filter_jit
def _summed(
    lin: Linearisation,
    fn: Callable[[Array, Scalar], Array],
    damping: ScalarLike,
    key: Key[Array, ""],
    num_probes: int,
    num_steps: int,
) -> Estimate:
    """Estimate the sum of a function of the eigenvalues of the kernel and of the damping,
    which is an array, so that another one runs the same program."""
    _check_several(num_probes)
    check_count("num_steps", num_steps)
    product, n, dtype = _smaller_side(lin)
    damping = jnp.asarray(damping, dtype)

    def of_probe(key: Key[Array, ""]) -> Scalar:
        of_signs, of_steps = jax.random.split(key)
        signs = jax.random.rademacher(of_signs, (n,), dtype)
        steps = min(num_steps, n)
        nodes, weights = _lanczos.quadrature(product, signs, steps, of_steps)
        return jnp.sum(weights * fn(nodes, damping))

    each = jax.lax.map(of_probe, jax.random.split(key, num_probes))
    of_zeros = (lin.shape[0] - n) * fn(jnp.zeros_like(damping), damping)
    error = jnp.std(each, ddof=1) / num_probes**0.5
    return Estimate(jnp.mean(each) + of_zeros, error)


def _smaller_side(lin: Linearisation) -> tuple[_lanczos.Product, int, jnp.dtype]:
    """Return products with the kernel or the curvature, whichever is smaller, its size n,
    and the dtype that its precision deserves."""
    jacobian = getattr(lin, "jacobian", None)
    if jacobian is None:
        raise TypeError(
            "`lin` must be a linearisation, such as `gnlin.linearise(fn, y, args)` or "
            "`gnlin.features.linearise_model(model, inputs)`, but a "
            f"{type(lin).__name__} was given."
        )
    coarsest = max(jacobian.codomain.eps, jacobian.domain.eps)
    is_double = coarsest <= jnp.finfo(jnp.float64).eps
    dtype = jnp.dtype(jnp.float64 if is_double else jnp.float32)
    if _outputs_are_fewer(jacobian):

        def of_kernel(u: Float[Array, " m"]) -> Float[Array, " m"]:
            return jacobian.push_forward(jacobian.pull_back(u)).astype(dtype)

        return of_kernel, jacobian.codomain.size, dtype

    def of_curvature(v: Float[Array, " p"]) -> Float[Array, " p"]:
        product = jacobian.curvature_mv(jacobian.domain.unravel(v))
        return ravel_pytree(product)[0].astype(dtype)

    return of_curvature, jacobian.domain.size, dtype


def _outputs_are_fewer(jacobian: AbstractJacobian) -> bool:
    m, p = jacobian.shape
    return m <= p


def _check_several(num_probes: int) -> None:
    check_count("num_probes", num_probes)
    if num_probes < 2:
        raise ValueError(
            "`num_probes` must be at least 2 for a standard error, but "
            f"{num_probes} was given."
        )
