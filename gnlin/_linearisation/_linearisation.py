"""The linearisation of a function at a point, from which every solver starts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import check_count, check_one_of, check_takes
from .._common._complex import check_real
from .._common._sharding import is_sharded
from .._common._tree import ravel_pytree, Structure
from .._jacobian import (
    AbstractJacobian,
    AtHand,
    AtOnce,
    ByPasses,
    check_jac,
    DEFAULT_MEMORY_BUDGET,
    Direction,
    is_zero_map,
    itself,
    OfExamples,
    only_direction,
    PerExample,
    PerGroup,
    Retracted,
    ScaledColumns,
    Selected,
    Sparse,
    Stacked,
    WithPrior,
)
from ._admitted import check_outputs, check_parameters
from ._bounds import Box
from ._decompositions import default_method, spectrum_of
from ._retraction import Retraction
from ._spectrum import Spectrum


class Linearisation(eqx.Module):
    r"""A function linearised at a point: $f(y_s) + \phi\,(y - y_s)$.

    Made by [`gnlin.linearise`][]. Products with $\phi$ and $\phi^\top$ do not repeat the
    forward pass at the linearisation point.

    **Attributes:**

    - `point`: the linearisation point, a pytree of p parameters.
    - `outputs`: the function's outputs at that point, a pytree of m numbers.
    - `jacobian`: $\phi$, a [lineax](https://docs.kidger.site/lineax) operator from the
        parameters' structure to the outputs', matrix-free.
    """

    point: PyTree[Array]
    outputs: PyTree[Array]
    jacobian: AbstractJacobian
    box: Box | None = None  # bounds on the parameters
    retraction: Retraction | None = None  # None if steps are added
    # Whether the derivative is zero whatever the numbers are, as of a rounded function
    is_flat: bool = eqx.field(static=True, default=False)

    def __repr__(self) -> str:
        m, p = self.shape
        return f"Linearisation({m:,} outputs, {p:,} parameters)"

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p): the numbers of outputs and of parameters."""
        return self.jacobian.shape

    def __call__(self, y: PyTree[ArrayLike]) -> PyTree[Array]:
        """Evaluate the linearised function at `y`, by one Jacobian-vector product."""
        check_real("The point `y`", y)
        difference = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype) - b, y, self.point)
        return jax.tree.map(jnp.add, self.outputs, self.jvp(difference))

    def jvp(self, tangent: PyTree[Array]) -> PyTree[Array]:
        r"""Return the Jacobian-vector product $\phi\,v$."""
        return self.jacobian.mv(tangent)

    def vjp(self, cotangent: PyTree[Array]) -> PyTree[Array]:
        r"""Return the vector-Jacobian product $\phi^\top u$."""
        return self.jacobian.rmv(cotangent)

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        r"""Return $\phi\,v$ as a flat vector, in `ravel_pytree` order of the outputs."""
        return self.jacobian.push_forward(tangent)

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        r"""Return $\phi^\top a$ for a flat vector $a$ in `ravel_pytree` order."""
        return self.jacobian.pull_back(cotangent)

    def rows(self) -> PyTree[Array]:
        """Return the dense Jacobian: the parameters' structure, with a leading axis of
        length m on each array.

        It is made by forward mode if p < m, else by reverse mode, unless `jac` or the
        function allows only one. For a [`gnlin.PerExample`][], such as a model, m counts
        the outputs of one example."""
        return self.jacobian.rows()

    def matrix(self) -> Float[Array, "m p"]:
        """Return the dense Jacobian as one m x p matrix, in `ravel_pytree` order."""
        return self.jacobian.as_matrix()

    def kernel(self, other: "Linearisation | None" = None) -> Float[Array, "m k"]:
        r"""Return the empirical neural tangent kernel $\phi\phi^\top$, or the kernel
        $\phi\phi'^\top$ between two data sets, as in `test.kernel(train)`, if `other` is
        a linearisation with the same parameters on other data.

        For a [`gnlin.PerExample`][], this takes as many reverse passes as one example has
        outputs. Dense and convolutional layers need no rows of the Jacobian: their kernel
        is made from activations and backward signals. Arrays of parameters are processed
        in groups that fit in the memory budget. If one array alone, or the m x p Jacobian
        of another kind of function, does not fit, m forward and m reverse passes are made
        in chunks instead.
        """
        if other is None:
            return self.jacobian.gram()
        check_same_parameters(self, other)
        return self.jacobian.gram_with(other.jacobian)

    def curvature(self) -> Float[Array, "p p"]:
        r"""Return $\phi^\top\phi$, parameters in `ravel_pytree` order. For a
        [`gnlin.PerExample`][], it is summed over batches of examples."""
        return self.jacobian.curvature()

    def spectrum(self, method: Literal["svd", "eigh"] | None = None) -> Spectrum:
        r"""Return the kernel's spectrum, from which any filter's step is cheap.

        The outputs are taken as the residual of a least-squares problem.

        **Arguments:**

        - `method`: `"svd"` factorises the m x p Jacobian, and resolves singular values
            down to rounding. `"eigh"` factorises the kernel or the curvature, whichever
            is smaller. It is up to ten times faster, but resolves eigenvalues $w$ only
            down to $k\varepsilon$ times the largest of k, so that in single precision
            condition numbers above about 1e5 are wrong. The default is `"svd"` if
            m p min(m, p) is at most 50,000, and in single precision up to 1e10, such as
            1,500 x 4,400 (1.7 s on one core), if the Jacobian fits in the memory budget.

        **Raises:** `ValueError` for another method.
        """
        if method is None:
            method = default_method(self.jacobian)
        check_one_of("method", method, ("svd", "eigh"))
        return spectrum_of(self.jacobian, self.outputs, method)

    def materialise(self) -> "Linearisation":
        """Return the linearisation with its Jacobian in memory: products then need no
        passes through the function."""
        return self.with_jacobian(self.jacobian.at_hand())

    def in_one_array(self) -> "tuple[Linearisation, Callable[[Array], PyTree[Array]]]":
        """Return the linearisation with its Jacobian in memory and with respect to the
        raveled parameters, and a function that unravels them. Loops over parameters
        compile and run faster for one array: with an MLP of 14 layers a first call takes
        7 s instead of 20, and twenty steps take 1.8 s instead of 8.2. The parameters keep
        their structure if they have several dtypes or are on several devices, if there
        are bounds or a retraction, or if the Jacobian is more than a matrix."""
        leaves = jax.tree.leaves(self.point)
        alike = len(leaves) > 1 and len({x.dtype for x in leaves}) == 1
        plain = self.box is None and self.retraction is None and not is_sharded()
        if not (alike and plain):
            return self.materialise(), lambda parameters: parameters
        jacobian = self.jacobian.of_one_array().at_hand().of_one_array()
        if len(jacobian.domain.leaves) > 1:
            return self.with_jacobian(jacobian), lambda parameters: parameters
        point, unravel = ravel_pytree(self.point)
        return Linearisation(point, self.outputs, jacobian), unravel

    def with_outputs(self, outputs: PyTree[Array]) -> "Linearisation":
        """Return the linearisation with other outputs, of the same shapes."""
        Structure.of(self.outputs).check(outputs)
        return dataclasses.replace(self, outputs=outputs)

    def with_jacobian(self, jacobian: AbstractJacobian) -> "Linearisation":
        """Return the linearisation with its Jacobian replaced."""
        return dataclasses.replace(self, jacobian=jacobian)

    def along(self, retraction: Retraction) -> "Linearisation":
        """Return the linearisation with respect to steps along a retraction."""
        jacobian = Retracted.of(self.jacobian, retraction.tangents(self.point))
        return dataclasses.replace(self, jacobian=jacobian, retraction=retraction)

    def within(self, box: Box, blocked: PyTree[Array]) -> "Linearisation":
        """Return the linearisation with bounds, and with zero columns for the `blocked`
        parameters, which stay where they are. Columns are NaN if no value lies between
        the bounds, so that the run ends as not finite: traced bounds cannot be checked.
        """

        def each(blocked, x, low, high):
            scale = jnp.where(blocked, jnp.inf, 1)
            return jnp.where(low <= high, scale, jnp.nan).astype(x.dtype)

        scale = jax.tree.map(each, blocked, self.point, box.lower, box.upper)
        jacobian = ScaledColumns.of(self.jacobian, scale)
        box = box.without(blocked, self.point)
        return dataclasses.replace(self, jacobian=jacobian, box=box)

    def moved(self, step: PyTree[Array], length: ScalarLike = 1.0) -> PyTree[Array]:
        """Return the point after `length` times `step`, clipped to the bounds or moved
        by the retraction. All solvers move points here."""
        if self.retraction is not None:
            return self.retraction.moved(self.point, _tree.scale(length, step))
        if self.box is None:
            return _tree.axpy(length, step, self.point)
        return self.box.moved(self.point, _tree.scale(length, step))


def linearise(
    fn: Callable[[Any, Any], PyTree],
    y: PyTree,
    args: PyTree = None,
    *,
    jac: Direction | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> Linearisation:
    r"""Linearise a function at a point.

    **Arguments:**

    - `fn`: `fn(y, args)` returning a pytree of floating-point arrays (the residuals, in
        least squares). A [`gnlin.PerExample`][] has a cheaper dense Jacobian.
    - `y`: the linearisation point, any pytree of floating-point arrays.
    - `args`: the second argument of `fn`, which is not differentiated.
    - `jac`: the mode by which the dense Jacobian is made: `"fwd"` (forward) or `"bwd"`
        (reverse). By default the mode that takes fewer passes.
    - `memory_budget`: limit, in bytes, on the largest matrix made from the Jacobian.

    A function may be differentiable in one mode only: a `jax.custom_vjp` has no forward
    mode, a `lax.while_loop` no reverse mode. Its dense Jacobian is then made at once, in
    that mode, and used for all products.

    **Returns:** a [`gnlin.Linearisation`][].

    **Raises:** `ValueError` if the function does not take two arguments; if `y` has no
    entries, or is not real floating-point; if the function cannot be differentiated in
    the mode `jac`; if it has one mode only and its dense Jacobian exceeds the memory
    budget.

    !!! example

        ```python
        lin = gnlin.linearise(lambda y, x: jnp.exp(-y * x), jnp.array(1.0), x)
        lin.outputs, lin.jacobian, lin.kernel(), lin(jnp.array(1.1))
        ```
    """
    check_takes("fn(y, args)", fn, 2)
    lin, _ = linearised(fn, y, args, False, memory_budget, jac)
    return lin


def linearised(
    fn: Callable[[Any, Any], Any],
    y: PyTree,
    args: PyTree,
    has_aux: bool,
    memory_budget: int,
    jac: Direction | None = None,
) -> tuple[Linearisation, Any]:
    """Linearise as `linearise` does; return also auxiliary data, or `None`.

    - `has_aux`: whether `fn` returns a pair `(outputs, auxiliary data)`.
    """
    check_count("memory_budget", memory_budget)
    check_jac(jac)
    for leaf in jax.tree.leaves(y):
        if not eqx.is_array_like(leaf):
            raise ValueError(
                f"`y` must hold arrays only, but holds {leaf!r}: for an Equinox model "
                "use `gnlin.features.linearise_model`, or the arrays of `eqx.partition`."
            )
    y = jax.tree.map(jnp.asarray, y)
    check_parameters(y)
    if isinstance(fn, PerGroup):
        lins = {
            name: linearised(part, y, args[name], False, memory_budget, jac)[0]
            for name, part in fn.each().items()
        }
        return _stacked(y, lins), None
    if isinstance(fn, WithPrior):
        lin, aux = linearised(fn.fn, y, args, has_aux, memory_budget, jac)
        prior, _ = linearised(AtOnce(itself), y, None, False, memory_budget)
        return _stacked(y, {"data": lin, "prior": prior}), aux

    def with_aux(y_):
        out = fn(y_, args)
        return out if has_aux else (out, None)

    outputs, jvp, aux = jax.linearize(with_aux, y, has_aux=True)
    check_outputs(outputs)
    domain, codomain = Structure.of(y), Structure.of(outputs)
    program = jax.make_jaxpr(jvp)(domain.tree).jaxpr
    only = only_direction(jvp, program, domain, codomain)
    check_jac(jac, only)
    jac = jac or only
    by_passes = domain, codomain, memory_budget, jvp, jac
    jacobian = ByPasses(*by_passes)
    if isinstance(fn, AtOnce) and fn.sparsity is not None:
        jacobian = fn.sparsity.jacobian(jacobian)
    elif isinstance(fn, PerExample) and isinstance(fn.fn, Selected):
        jacobian = Sparse.of_examples(fn.fn, y, args, codomain, memory_budget, jac)
    elif isinstance(fn, PerExample):
        jacobian = OfExamples(*by_passes, fn, y, args)
    if only is not None:
        # Products in the missing mode need the dense Jacobian.
        check_at_hand(jacobian, only)
        few = jacobian.passes_at_once(domain.dtype.itemsize) >= domain.size
        if only == "fwd" and type(jacobian) is ByPasses and few:
            outputs, jacobian, aux = _by_tangents(with_aux, jacobian, y)
        else:
            jacobian = jacobian.at_hand()
    return Linearisation(y, outputs, jacobian, is_flat=is_zero_map(program)), aux


def _stacked(y: PyTree[Array], lins: Mapping[str, Linearisation]) -> Linearisation:
    outputs = {name: lin.outputs for name, lin in lins.items()}
    parts = {name: lin.jacobian for name, lin in lins.items()}
    is_flat = all(lin.is_flat for lin in lins.values())
    return Linearisation(y, outputs, Stacked(parts), is_flat=is_flat)


def _by_tangents(
    with_aux: Callable[[PyTree], tuple[PyTree, Any]], jacobian: ByPasses, y: PyTree[Array]
) -> tuple[PyTree[Array], AtHand, Any]:
    """Return the outputs, the Jacobian in memory and the auxiliary data, by one copy of
    the function, which may hold a loop that takes long to compile. `jax.linearize` and
    its tangents would hold two."""

    def along(tangent):
        tangent = jacobian.domain.unravel(tangent)
        outputs, change, aux = jax.jvp(with_aux, (y,), (tangent,), has_aux=True)
        return outputs, ravel_pytree(change)[0], aux

    basis = jnp.eye(jacobian.domain.size, dtype=jacobian.domain.dtype)
    outputs, columns, aux = jax.vmap(along)(basis)
    outputs, aux = jax.tree.map(lambda x: x[0], (outputs, aux))
    return outputs, AtHand.of_columns(jacobian, columns), aux


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
            "The kernel between two linearisations needs parameters of the same shapes "
            "and dtypes, but theirs differ."
        )
