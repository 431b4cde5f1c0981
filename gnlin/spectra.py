r"""Spectra of large kernels, by products alone.

What [`gnlin.Linearisation.spectrum`][] says of every eigenvalue, these say of a kernel
$\phi\phi^\top$ that is too large to be factorised, or to be held: its largest eigenpairs,
and sums over all of them, with their errors. The curvature $\phi^\top\phi$ has the same
eigenvalues, besides zeros. Each product is a transposed and a tangent pass, on vectors of
the smaller of m outputs and p parameters.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Scalar, ScalarLike

from ._common import _tree
from ._common._checks import as_key, check_count, check_finite_positive
from ._common._tree import matmul, ravel_pytree
from ._jacobian import AbstractJacobian
from ._linear_algebra import _lanczos, _nystrom
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


# Vectors in the basis for k pairs, where memory allows. More of them save products.
_BASIS, _MORE = 4, 40
# Bases' worth of products that are the most.
_MOST = 10


class Eigenpairs(eqx.Module):
    r"""The k largest eigenpairs of the kernel $\phi\phi^\top$ and of the curvature
    $\phi^\top\phi$, as [`gnlin.spectra.leading`][] finds them.

    **Attributes:**

    - `eigenvalues`: `w`, the largest first. Those that rounding cannot tell from zero are
        exactly zero.
    - `residuals`: $\lVert A x - w x\rVert$ of each, as the iteration tells; rounding
        apart.
    - `num_products`: with the kernel, of a transposed and a tangent pass each.
    - `converged`: whether all residuals are within the tolerance.
    """

    eigenvalues: Float[Array, " k"]
    residuals: Float[Array, " k"]
    num_products: Int[Array, ""]
    converged: Bool[Array, ""]
    # Of the smaller side
    _vectors: Float[Array, "k n"] = eqx.field(repr=False)
    _lin: Linearisation = eqx.field(repr=False)

    def __repr__(self) -> str:
        return _tree.in_words(self)

    def on_outputs(self) -> Float[Array, "m k"]:
        r"""Eigenvectors of the kernel, a column each, in `ravel_pytree` order. With fewer
        parameters than outputs they are $\phi v/\sqrt w$, a tangent pass each, and zero
        where w is."""
        if _outputs_are_fewer(self._lin.jacobian):
            return self._vectors.T
        push_forward = self._lin.jacobian.push_forward
        pushed = jax.lax.map(
            lambda v: push_forward(self._on_parameters(v)), self._vectors
        )
        return (self._inverse_roots()[:, None] * pushed.astype(self._vectors.dtype)).T

    def on_parameters(self) -> PyTree[Array]:
        r"""Eigenvectors of the curvature, in the parameters' structure with a leading
        axis of length k. With no more outputs than parameters they are
        $\phi^\top u/\sqrt w$, a transposed pass each, and zero where w is."""
        if not _outputs_are_fewer(self._lin.jacobian):
            return jax.vmap(self._on_parameters)(self._vectors)
        pull_back = self._lin.jacobian.pull_back
        scaled = self._inverse_roots()[:, None] * self._vectors
        return jax.lax.map(pull_back, scaled)

    def spectrum(self, residual: PyTree[Array] | None = None) -> Spectrum:
        """The same as a [`gnlin.Spectrum`][] of k eigenpairs, with its filters and
        measures: a step by it is one within these directions.

        **Arguments:**

        - `residual`: of the outputs' structure; by default the outputs.
        """
        residual = self._lin.outputs if residual is None else residual
        jacobian, s = self._lin.jacobian, jnp.sqrt(self.eigenvalues)
        if _outputs_are_fewer(jacobian):
            project = Partial(matmul, self._vectors)
            lift = Partial(_lift_outputs, jacobian, self._vectors)
        else:
            project = Partial(_project_parameters, jacobian, self._vectors, s)
            lift = Partial(_lift_parameters, jacobian, self._vectors, s)
        return Spectrum(self.eigenvalues, ravel_pytree(residual)[0], project, lift)

    def _inverse_roots(self) -> Float[Array, " k"]:
        w = self.eigenvalues
        return jnp.where(w == 0, 0, 1 / jnp.sqrt(jnp.where(w == 0, 1, w)))

    def _on_parameters(self, v: Float[Array, " p"]) -> PyTree[Array]:
        return self._lin.jacobian.domain.unravel(v)


@eqx.filter_jit
def leading(
    lin: Linearisation,
    k: int,
    *,
    tolerance: ScalarLike = 1e-5,
    max_products: int | None = None,
) -> Eigenpairs:
    r"""The k largest eigenvalues of the kernel $\phi\phi^\top$, and their eigenvectors,
    without forming it.

    By Lanczos' process on the smaller side, every vector orthogonal to all before it. It
    ends when $\lVert A x - w x\rVert \le \tau\,w$ for each pair, or ten roundings of the
    largest eigenvalue where that is more; and when a random vector beside them has found
    no more in 24 products, as it would where an eigenvalue is a multiple one. So k may
    be more than the rank. The basis is of some 4 k vectors, or as many as half the
    linearisation's memory budget holds; beyond, it begins anew from the best of them.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][] of m outputs and p parameters.
    - `k`: how many, at most min(m, p).
    - `tolerance`: $\tau > 0$, of the residuals relative to their eigenvalues. Eigenvalues
        are as precise as its square over the gap between them, eigenvectors as it is.
    - `max_products`: the most products to be made, about; `None` for ten bases' worth.

    **Returns:** [`gnlin.spectra.Eigenpairs`][]. Of a Jacobian that is not finite they are
    NaN, and have not converged.

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
    product, n, dtype = _smaller_side(lin.jacobian)
    check_count("k", k)
    if k > n:
        raise ValueError(
            f"A Jacobian of {' x '.join(map(str, lin.shape))} has {n} eigenpairs, but "
            f"{k} were asked for."
        )
    # Twice: a basis that begins anew is there beside the old one.
    room = lin.jacobian.memory_budget // (2 * n * dtype.itemsize)
    capacity = min(n, _BASIS * k + _MORE, room)
    if capacity < min(n, k + 2):
        raise ValueError(
            f"{k} eigenvectors of {n} numbers, twice, take more than the memory budget "
            f"of {lin.jacobian.memory_budget} bytes: ask for fewer, or linearise with a "
            "larger `memory_budget`."
        )
    if max_products is None:
        max_products = _MOST * capacity
    check_count("max_products", max_products)
    key = jax.random.key(0)
    start = jax.random.normal(key, (n,), dtype)
    found = _lanczos.leading(
        product, start, k, capacity, tolerance, max_products, jax.random.fold_in(key, 1)
    )
    return Eigenpairs(
        found.eigenvalues,
        found.residuals,
        found.num_products,
        found.converged,
        found.vectors,
        lin,
    )


class Estimate(eqx.Module):
    """A number, estimated from random vectors.

    **Attributes:**

    - `value`: the mean over random vectors.
    - `standard_error`: of that mean, as they differ among themselves.
    """

    value: Scalar
    standard_error: Scalar

    def __repr__(self) -> str:
        return _tree.in_words(self)


@eqx.filter_jit
def trace(lin: Linearisation, *, key: Key[Array, ""], num_probes: int = 32) -> Estimate:
    r"""$\mathrm{tr}(\phi\phi^\top)$, from as many products as there are probes.

    By XNysTrace: the trace of a randomised Nyström approximation, and of what it leaves
    as each probe sees it that has been left out. Its error falls with the eigenvalues
    beyond the number of probes, where Hutchinson's falls with the root of that number.
    The standard error takes what the probes say as independent. They share the others:
    with as many as a third of all dimensions the error is up to twice what it says.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][].
    - `key`: of the random vectors.
    - `num_probes`: at least 2, of length min(m, p); with as many as that, or more, the
        trace is exact, and no probe is drawn.

    ??? cite "Reference"

        E. N. Epperly, J. A. Tropp and R. J. Webber, *XTrace: making the most of every
        sample in stochastic trace estimation*, SIAM J. Matrix Anal. Appl. 45 (2024).
    """
    _check_several("num_probes", num_probes)
    key = as_key(key)
    product, n, dtype = _smaller_side(lin.jacobian)
    if num_probes >= n:
        each = jax.lax.map(lambda e: jnp.vdot(e, product(e)), jnp.eye(n, dtype=dtype))
        return Estimate(jnp.sum(each), jnp.zeros((), dtype))
    # On the sphere of radius sqrt(n), a column each
    probes = jax.random.normal(key, (n, num_probes), dtype)
    probes *= (n**0.5 / jnp.linalg.norm(probes, axis=0))[None]
    sketch = jax.lax.map(product, probes.T).T
    # So many probes have next to no length along some direction (Marchenko and Pastur),
    # and the shift is to be seen there, too.
    least = 1 - (num_probes / n) ** 0.5 + 1 / n
    sketch, shift = _nystrom.shifted(probes, sketch, n**0.5 / least)

    # The Nystrom approximation is B B^T, in the basis Q.
    q, r = jnp.linalg.qr(sketch)
    factor = _nystrom.core_factor(probes, sketch)
    b = _nystrom.halved(factor, r)
    # C^-T, so that H^-1 is its square
    inverse = _nystrom.halved(factor, jnp.eye(num_probes, dtype=dtype))
    scale = jnp.linalg.norm(inverse, axis=1)
    left_out = matmul(b, inverse.T) / scale[None]
    seen = jnp.sum(left_out * matmul(q.T, probes), axis=0)
    # What is left is zero on the other probes, and the part of a probe that is orthogonal
    # to them is to stand for n - l + 1 dimensions.
    _, upper = jnp.linalg.qr(probes)
    upward = jax.scipy.linalg.solve_triangular(upper, jnp.eye(num_probes, dtype=dtype))
    stretch = (n - num_probes + 1) * jnp.sum(upward**2, axis=1)
    compressed = jnp.sum(b**2) - jnp.sum(left_out**2, axis=0)
    return _mean(compressed + stretch * seen**2 - shift * n)


@eqx.filter_jit
def log_determinant(
    lin: Linearisation,
    damping: ScalarLike,
    *,
    key: Key[Array, ""],
    num_probes: int = 16,
    num_steps: int = 64,
) -> Estimate:
    r"""$\log\det(\phi\phi^\top + \lambda I)$, of m x m, by stochastic Lanczos quadrature:

    $$E\,z^\top\log(\phi\phi^\top + \lambda I)\,z$$

    over random signs z, each by so many steps of Lanczos' process from it. That of the
    curvature is $(p - m)\log\lambda$ more.

    **Arguments:**

    - `lin`: a [`gnlin.Linearisation`][].
    - `damping`: $\lambda > 0$.
    - `key`: of the random vectors.
    - `num_probes`: how many of them, at least 2.
    - `num_steps`: products for each, of which there are min(m, p) at most. The standard
        error does not tell what they miss, which falls as
        $\exp(-4\,\mathrm{steps}\,\sqrt{\lambda/w_1})$.

    ??? cite "Reference"

        S. Ubaru, J. Chen and Y. Saad, *Fast estimation of tr(f(A)) via stochastic Lanczos
        quadrature*, SIAM J. Matrix Anal. Appl. 38 (2017).
    """
    each = _quadratures(lin, jnp.log, damping, key, num_probes, num_steps)
    m, p = lin.shape
    return _mean(each + max(m - p, 0) * jnp.log(jnp.asarray(damping, each.dtype)))


@eqx.filter_jit
def effective_dimension(
    lin: Linearisation,
    damping: ScalarLike,
    *,
    key: Key[Array, ""],
    num_probes: int = 16,
    num_steps: int = 64,
) -> Estimate:
    r"""$d(\lambda) = \sum_i w_i/(w_i + \lambda)$, how many directions a damping leaves
    free, by stochastic Lanczos quadrature, as [`gnlin.spectra.log_determinant`][]. Where
    all eigenvalues are at hand, [`gnlin.Spectrum.effective_dimension`][] sums them.
    """
    left = lambda damped: 1 - jnp.asarray(damping, damped.dtype) / damped
    return _mean(_quadratures(lin, left, damping, key, num_probes, num_steps))


def _quadratures(
    lin: Linearisation,
    of_damped: Callable[[Float[Array, " s"]], Float[Array, " s"]],
    damping: ScalarLike,
    key: Key[Array, ""],
    num_probes: int,
    num_steps: int,
) -> Float[Array, " probes"]:
    """Of a function of the damped eigenvalues, its sum by each probe."""
    check_finite_positive("damping", damping)
    _check_several("num_probes", num_probes)
    check_count("num_steps", num_steps)
    product, n, dtype = _smaller_side(lin.jacobian)

    def of_probe(key: Key[Array, ""]) -> Scalar:
        of_signs, of_steps = jax.random.split(key)
        signs = jax.random.rademacher(of_signs, (n,), dtype)
        steps = min(num_steps, n)
        nodes, weights = _lanczos.quadrature(product, signs, steps, of_steps)
        return jnp.sum(weights * of_damped(nodes + jnp.asarray(damping, dtype)))

    return jax.lax.map(of_probe, jax.random.split(as_key(key), num_probes))


def _mean(each: Float[Array, " probes"]) -> Estimate:
    return Estimate(jnp.mean(each), jnp.std(each, ddof=1) / each.size**0.5)


def _smaller_side(
    jacobian: AbstractJacobian,
) -> tuple[_lanczos.Product, int, jnp.dtype]:
    """Products with the kernel or the curvature, of n x n, as precise as they are."""
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


def _lift_outputs(jacobian, vectors, z):
    return jacobian.pull_back(matmul(z, vectors))


def _lift_parameters(jacobian, vectors, s, z):
    return jacobian.domain.unravel(matmul(s * z, vectors))


def _project_parameters(jacobian, vectors, s, residual):
    pulled, _ = ravel_pytree(jacobian.pull_back(residual))
    along = matmul(vectors, pulled.astype(vectors.dtype))
    return jnp.where(s == 0, 0, along / jnp.where(s == 0, 1, s))


def _check_several(name: str, number: int) -> None:
    check_count(name, number)
    if number < 2:
        raise ValueError(
            f"`{name}` must be at least 2, for an error is told by how they differ, but "
            f"{number} was given."
        )
