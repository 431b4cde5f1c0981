"""A function's linearisation at a point: the one object that every solver starts from."""

from collections.abc import Callable
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree, ScalarLike

from . import _tree
from ._bounds import Box, free_scale
from ._checks import check_count
from ._jacobian import (
    AbstractJacobian,
    AtHand,
    AtOnce,
    ByPasses,
    check_jac,
    DEFAULT_MEMORY_BUDGET,
    Direction,
    OfExamples,
    only_direction,
    PerExample,
    PerGroup,
    Scaled,
    Selected,
    Sparse,
    Stacked,
    Turned,
)
from ._retraction import Retraction
from ._sharding import is_spread
from ._spectrum import Spectrum, spectrum_of, svd_is_cheap
from ._tree import ravel_pytree, Structure


class Linearisation(eqx.Module):
    r"""A function linearised at a point: $f(y_s) + \phi\,(y - y_s)$.

    Made by [`gnlin.linearise`][]. The forward pass at the linearisation point is made
    once; products with $\phi$ and $\phi^\top$ do not repeat it.

    **Attributes:**

    - `point`: the linearisation point, a pytree of p parameters in all.
    - `outputs`: the function's outputs there, a pytree of m numbers in all.
    - `jacobian`: $\phi$, a [lineax](https://docs.kidger.site/lineax) operator from the
        parameters' structure to the outputs', matrix-free.
    """

    point: PyTree[Array]
    outputs: PyTree[Array]
    jacobian: AbstractJacobian
    # Where a point may move to; None for anywhere
    box: Box | None = None
    # How it moves; None for straight on
    retraction: Retraction | None = None

    def __repr__(self) -> str:
        m, p = self.shape
        return f"Linearisation({m:,} outputs, {p:,} parameters)"

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p): the numbers of outputs and of parameters."""
        return self.jacobian.shape

    def __call__(self, y: PyTree[ArrayLike]) -> PyTree[Array]:
        """The linearised function at other parameters: one Jacobian-vector product."""
        difference = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype) - b, y, self.point)
        return jax.tree.map(jnp.add, self.outputs, self.jvp(difference))

    def jvp(self, tangent: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi\,v$: a Jacobian-vector product."""
        return self.jacobian.mv(tangent)

    def vjp(self, cotangent: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi^\top u$: a vector-Jacobian product."""
        return self.jacobian.rmv(cotangent)

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        r"""$\phi\,v$ as a flat vector, in `ravel_pytree` order of the outputs."""
        return self.jacobian.push_forward(tangent)

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        r"""$\phi^\top a$ for a flat vector, in `ravel_pytree` order of the outputs."""
        return self.jacobian.pull_back(cotangent)

    def rows(self) -> PyTree[Array]:
        r"""The dense Jacobian, as the parameters' structure with a leading axis of
        length m: m x p numbers. By forward mode if p < m, else by reverse mode, unless
        `jac` was given or the function has one direction only; of a
        [`gnlin.PerExample`][] (a model is one) likewise, an example by itself."""
        return self.jacobian.rows()

    def matrix(self) -> Float[Array, "m p"]:
        r"""The dense Jacobian as one m x p matrix, parameters in `ravel_pytree` order."""
        return self.jacobian.as_matrix()

    def kernel(self, other: "Linearisation | None" = None) -> Float[Array, "m k"]:
        r"""The empirical neural tangent kernel $\phi\phi^\top$; with another
        linearisation, of the same parameters on other data, that between the two sets,
        $\phi\phi'^\top$, as in `test.kernel(train)`.

        Of a [`gnlin.PerExample`][] it takes as many reverse passes as one example has
        outputs, and for dense and convolutional layers no rows of the Jacobian: products
        of what went into a layer and what came back. The memory budget is kept by some
        arrays of parameters at a time; for an array whose part is too large by itself, or
        another function whose m x p Jacobian is, each chunk of rows is pulled back and
        pushed forward again, m passes each way.
        """
        if other is None:
            return self.jacobian.gram()
        check_same_parameters(self, other)
        return self.jacobian.gram_with(other.jacobian)

    def curvature(self) -> Float[Array, "p p"]:
        r"""$\phi^\top\phi$, parameters in `ravel_pytree` order; of a
        [`gnlin.PerExample`][] by some examples at a time."""
        return self.jacobian.curvature()

    def spectrum(self, method: Literal["svd", "eigh"] | None = None) -> Spectrum:
        r"""The eigenpairs of the kernel and the residual in them, for any filter.

        The outputs are taken as the residual of a least-squares problem.

        **Arguments:**

        - `method`: `"svd"` factorises the m x p Jacobian, and resolves singular values
            down to rounding; `"eigh"` the kernel or the curvature, whichever is
            smaller, which is many times faster, but resolves them to the square root of
            rounding only. The default takes the first while it is cheap.

        **Raises:** `ValueError` for another method.
        """
        if method is None:
            method = "svd" if svd_is_cheap(*self.shape) else "eigh"
        if method not in ("svd", "eigh"):
            raise ValueError(
                f'`method` must be "svd" or "eigh", but {method!r} was given.'
            )
        return spectrum_of(self.jacobian, self.outputs, method)

    def materialise(self) -> "Linearisation":
        """The same linearisation with its Jacobian at hand, so that products with it are
        products with matrices."""
        return self.with_jacobian(self.jacobian.at_hand())

    def in_one_array(
        self,
    ) -> "tuple[Linearisation, Callable[[Array], PyTree[Array]]]":
        """The same of a function of all parameters in one array, and how they become
        their tree again. What loops over parameters compiles faster for one array than
        for the many of a network. Only where the matrix is in memory, the parameters are
        of one dtype, on one device, and nothing but added to: else itself."""
        jacobian, leaves = self.jacobian, jax.tree.leaves(self.point)
        alike = len(leaves) > 1 and len({x.dtype for x in leaves}) == 1
        added = self.box is None and self.retraction is None and not is_spread()
        if not (isinstance(jacobian, AtHand) and jacobian.is_matrix and alike and added):
            return self, lambda parameters: parameters
        point, unravel = ravel_pytree(self.point)
        return Linearisation(point, self.outputs, jacobian.of_one_array()), unravel

    def with_outputs(self, outputs: PyTree[Array]) -> "Linearisation":
        """The same Jacobian with other outputs, of the same structure."""
        fixed = self.box, self.retraction
        return Linearisation(self.point, outputs, self.jacobian, *fixed)

    def with_jacobian(self, jacobian: AbstractJacobian) -> "Linearisation":
        """The same, with the Jacobian in another form."""
        fixed = self.box, self.retraction
        return Linearisation(self.point, self.outputs, jacobian, *fixed)

    def along(self, retraction: Retraction) -> "Linearisation":
        """The same by the steps of a retraction."""
        jacobian = Turned(self.jacobian, retraction.tangents(self.point))
        return Linearisation(self.point, self.outputs, jacobian, self.box, retraction)

    def within(self, box: Box, blocked: PyTree[Array]) -> "Linearisation":
        """The same between bounds, at which the `blocked` parameters stay: their columns
        are zero."""
        jacobian = Scaled(self.jacobian, free_scale(blocked, self.point))
        box = box.without(blocked, self.point)
        return Linearisation(self.point, self.outputs, jacobian, box)

    def moved(self, step: PyTree[Array], length: ScalarLike = 1.0) -> PyTree[Array]:
        r"""$\theta + \delta$, or so much of it, between the bounds, or by a retraction:
        where a point moves, it moves here."""
        if self.retraction is not None:
            return self.retraction.moved(self.point, _tree.scale(length, step))
        if self.box is None:
            return _tree.axpy(length, step, self.point)
        return self.box.moved(self.point, _tree.scale(length, step))


@overload
def linearise(
    fn: Callable[[Any, Any], PyTree],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: Literal[False] = False,
    jac: Direction | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> Linearisation: ...


@overload
def linearise(
    fn: Callable[[Any, Any], tuple[PyTree, Any]],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: Literal[True],
    jac: Direction | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> tuple[Linearisation, Any]: ...


def linearise(
    fn: Callable[[Any, Any], Any],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: bool = False,
    jac: Direction | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> Any:
    r"""Linearise a function at a point.

    **Arguments:**

    - `fn`: `fn(y, args)` returning a pytree of floating-point arrays (of residuals, for
        least squares); a [`gnlin.PerExample`][] makes its dense Jacobian cheaper.
    - `y`: the linearisation point, any pytree of floating-point arrays.
    - `args`: passed on, not differentiated.
    - `has_aux`: whether `fn` returns a pair, the second of auxiliary data.
    - `jac`: whether the dense Jacobian is made by forward mode, `"fwd"`, or by reverse
        mode, `"bwd"`. By default by whichever takes fewer passes.
    - `memory_budget`: bytes that the largest matrix made of it may take.

    A function may have one direction only: a `jax.custom_vjp` has no forward mode, a
    `lax.while_loop` no reverse mode. Its dense Jacobian is then made at once, by the mode
    that there is, and products are with that.

    **Returns:** a [`gnlin.Linearisation`][]; with `has_aux`, a pair of it and the
    auxiliary data.

    **Raises:** `ValueError` if `y` has no entries, or is not real floating-point; if the
    function has no derivative of the direction `jac`, or one direction only and a dense
    Jacobian beyond the memory budget.

    !!! example

        ```python
        lin = gnlin.linearise(lambda y, x: jnp.exp(-y * x), jnp.array(1.0), x)
        lin.outputs, lin.jacobian, lin.kernel(), lin(jnp.array(1.1))
        ```
    """
    check_count("memory_budget", memory_budget)
    check_jac(jac)
    y = jax.tree.map(jnp.asarray, y)
    check_parameters(y)
    if isinstance(fn, PerGroup):
        lins = {
            name: linearise(of_group, y, args[name], jac=jac, memory_budget=memory_budget)
            for name, of_group in fn.each().items()
        }
        outputs = {name: lin.outputs for name, lin in lins.items()}
        parts = {name: lin.jacobian for name, lin in lins.items()}
        return Linearisation(y, outputs, Stacked(parts))

    def with_aux(y_):
        out = fn(y_, args)
        return out if has_aux else (out, None)

    outputs, jvp, aux = jax.linearize(with_aux, y, has_aux=True)
    check_outputs(outputs)
    domain, codomain = Structure.of(y), Structure.of(outputs)
    only = only_direction(jvp, domain, codomain)
    check_jac(jac, only)
    jac = jac or only
    jacobian = ByPasses(domain, codomain, memory_budget, jvp, jac)
    if isinstance(fn, AtOnce) and fn.sparsity is not None:
        jacobian = fn.sparsity.jacobian(jacobian)
    elif isinstance(fn, PerExample) and isinstance(fn.fn, Selected):
        jacobian = Sparse.of_examples(fn.fn, y, args, codomain, memory_budget, jac)
    elif isinstance(fn, PerExample):
        if has_aux:
            fn = PerExample(eqx.Partial(_without_aux, fn.fn), fn.part_size)
        jacobian = OfExamples(jacobian, fn, y, args)
    if only is not None:
        # Products of the other direction are with its rows.
        check_at_hand(jacobian, only)
        few = jacobian.passes_at_once(domain.dtype.itemsize) >= domain.size
        if only == "fwd" and type(jacobian) is ByPasses and few:
            outputs, jacobian, aux = _by_tangents(with_aux, jacobian, y)
        else:
            jacobian = jacobian.at_hand()
    lin = Linearisation(y, outputs, jacobian)
    return (lin, aux) if has_aux else lin


def _by_tangents(
    with_aux: Callable[[PyTree], tuple[PyTree, Any]], jacobian: ByPasses, y: PyTree[Array]
) -> tuple[PyTree[Array], AtHand, Any]:
    """The outputs, the Jacobian at hand, and the auxiliary data, by one program. Between
    `jax.linearize` and its tangents a loop of unknown length would be there twice, and
    compiled twice."""

    def along(tangent):
        tangent = jacobian.domain.unravel(tangent)
        outputs, change, aux = jax.jvp(with_aux, (y,), (tangent,), has_aux=True)
        return outputs, ravel_pytree(change)[0], aux

    basis = jnp.eye(jacobian.domain.size, dtype=jacobian.domain.dtype)
    outputs, columns, aux = jax.vmap(along)(basis)
    outputs, aux = jax.tree.map(lambda x: x[0], (outputs, aux))
    return outputs, AtHand.of_columns(jacobian, columns), aux


def _without_aux(fn, y, example):
    out, _ = fn(y, example)
    return out


def check_at_hand(jacobian: AbstractJacobian, only: Direction) -> None:
    if not jacobian.fits():
        m, p = jacobian.shape
        missing = "reverse" if only == "fwd" else "forward"
        raise ValueError(
            f"The function has no {missing}-mode derivative, and needs its {m:,} x {p:,} "
            f"Jacobian in memory, which takes {sum(jacobian.block_bytes()):,} bytes of a "
            f"memory budget of {jacobian.memory_budget:,}: raise `memory_budget`, or use "
            "a function that has both."
        )


def check_same_parameters(one: Linearisation, other: Linearisation) -> None:
    if one.jacobian.domain != other.jacobian.domain:
        raise ValueError(
            "The kernel between two linearisations is of the same parameters, but "
            "theirs have other shapes or dtypes."
        )


def check_parameters(y: PyTree) -> None:
    leaves = jax.tree.leaves(y)
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("There are no parameters: `y` must hold at least one number.")
    for leaf in leaves:
        if leaf.dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                "Parameters must be real floating-point arrays, of single or double "
                f"precision, but one has dtype {leaf.dtype}; convert it with "
                "`astype(float)`, or split complex numbers into real and imaginary parts."
            )


def check_outputs(outputs: PyTree) -> None:
    leaves = jax.tree.leaves(outputs)
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("There are no residuals: the function returned no numbers.")
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                "Residuals must be real floating-point arrays, but the function returned "
                f"one of dtype {leaf.dtype}; split complex residuals into real and "
                "imaginary parts."
            )
