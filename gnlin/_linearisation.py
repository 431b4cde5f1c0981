"""A function's linearisation at a point: the one object that every solver starts from."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PyTree

from . import _rows, _tree
from ._per_example import forward_is_cheaper, PerExample
from ._spectrum import from_kernel, Spectrum
from ._tree import matmul, ravel_pytree


DEFAULT_MEMORY_BUDGET = 2**31
"""Bytes that one linearisation's largest matrix may take, unless told otherwise."""

# The curvature is summed from parts of the Jacobian of so many bytes, or so many times as
# many as the sum takes, so that summing costs little.
_PART_BYTES = 2**20
_ROWS_A_SUM = 8


class Linearisation(eqx.Module):
    r"""A function linearised at a point: $f(y_s) + \phi\,(y - y_s)$.

    Made by [`gnlin.linearise`][]. The forward pass at the linearisation point is made
    once; products with $\phi$ and $\phi^\top$ do not repeat it.

    **Attributes:**

    - `point`: the linearisation point, a pytree of p parameters in all.
    - `outputs`: the function's outputs there, a pytree of m numbers in all.
    """

    point: PyTree[Array]
    outputs: PyTree[Array]
    _jvp: Callable[[PyTree[Array]], PyTree[Array]]
    # A function of independent examples, and these
    _examples: tuple[PerExample, PyTree[Array]] | None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p): the numbers of outputs and of parameters."""
        return _tree.size(self.outputs), _tree.size(self.point)

    @property
    def jacobian(self) -> lx.AbstractLinearOperator:
        r"""$\phi$ as a [lineax](https://docs.kidger.site/lineax) operator, from the
        parameters' structure to the outputs', matrix-free."""
        structure = jax.eval_shape(lambda: self.point)
        return lx.FunctionLinearOperator(self._jvp, structure)

    def __call__(self, y: PyTree[ArrayLike]) -> PyTree[Array]:
        """The linearised function at other parameters: one Jacobian-vector product."""
        difference = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype) - b, y, self.point)
        return jax.tree.map(jnp.add, self.outputs, self.jvp(difference))

    def jvp(self, tangent: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi\,v$: a Jacobian-vector product."""
        return self._jvp(tangent)

    def vjp(self, cotangent: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi^\top u$: a vector-Jacobian product."""
        (out,) = jax.linear_transpose(self._jvp, self.point)(cotangent)
        return out

    def num_row_passes(self) -> tuple[int, int]:
        """(Jacobian-vector, vector-Jacobian) products that `rows` takes."""
        m, p = self.shape
        num_outputs = m
        if self._examples is not None:
            _, args = self._examples
            num_outputs = m // jax.tree.leaves(args)[0].shape[0]
        return (p, 0) if forward_is_cheaper(num_outputs, p) else (0, num_outputs)

    def rows(self, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> PyTree[Array]:
        r"""The dense Jacobian, as the parameters' structure with a leading axis of
        length m: m x p numbers. By forward mode if p < m, else by reverse mode, in
        chunks that stay within the memory budget (bytes)."""
        if self._examples is not None:
            return _rows.dense(self.blocks(memory_budget))
        m, p = self.shape
        if forward_is_cheaper(m, p):
            flat, unravel = ravel_pytree(self.point)
            columns = self._chunked(
                lambda v: self.push_forward(unravel(v)),
                jnp.eye(p, dtype=flat.dtype),
                memory_budget,
            )
            return jax.vmap(unravel)(columns.T.astype(flat.dtype))
        flat, unravel = ravel_pytree(self.outputs)
        return self._chunked(
            lambda u: self.vjp(unravel(u)), jnp.eye(m, dtype=flat.dtype), memory_budget
        )

    def blocks(self, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> PyTree:
        """The Jacobian like `rows`, but of dense and convolutional layers their factors,
        where these are smaller: see `gnlin._layer`."""
        blocks = self._blocks_of(None, self.point, memory_budget)
        return jax.tree.unflatten(jax.tree.structure(self.point), blocks)

    def num_block_bytes(self) -> list[int]:
        """What `blocks` take in memory, for each array of parameters."""
        if self._examples is None:
            m, _ = self.shape
            return [m * leaf.nbytes for leaf in jax.tree.leaves(self.point)]
        fn, args = self._examples
        return fn.num_bytes(self.point, args)

    def blocks_fit(self, memory_budget: int) -> bool:
        """Whether `blocks` stay within so many bytes."""
        return sum(self.num_block_bytes()) <= memory_budget

    def matrix(self, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> Float[Array, "m p"]:
        r"""The dense Jacobian as one m x p matrix, parameters in `ravel_pytree` order."""
        return _rows.matrix(self.rows(memory_budget))

    def num_bytes(self) -> int:
        """What the dense Jacobian would take in memory."""
        m, p = self.shape
        return m * p * _tree.dtype(self.point).itemsize

    def materialise(self, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> "Linearisation":
        """The same linearisation with its Jacobian at hand, so that products with it are
        products with matrices."""
        structure = jax.tree.map(jnp.zeros_like, self.outputs)
        jvp = Partial(_jvp_of_rows, structure, self.blocks(memory_budget))
        return Linearisation(self.point, self.outputs, jvp, None)

    def with_outputs(self, outputs: PyTree[Array]) -> "Linearisation":
        """The same Jacobian with other outputs, of the same structure."""
        return eqx.tree_at(lambda lin: lin.outputs, self, outputs)

    def transformed(
        self, matrices: PyTree[Array], outputs: PyTree[Array]
    ) -> "Linearisation":
        r"""With each example's outputs multiplied by a matrix $R$ of its own: the
        Jacobian $R\phi$.

        **Arguments:**

        - `matrices`: an object with a method `mv`, all of whose arrays have a leading
            axis over the examples; so must have the function's outputs.
        - `outputs`: of the new linearisation.
        """
        jvp = Partial(_transformed_jvp, matrices, self._jvp)
        examples = None
        if self._examples is not None:
            fn, args = self._examples
            transformed = PerExample(eqx.Partial(_transformed_fn, fn.fn))
            examples = (transformed, (args, matrices))
        return Linearisation(self.point, outputs, jvp, examples)

    def kernel(self, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> Float[Array, "m m"]:
        r"""The empirical neural tangent kernel $\phi\phi^\top$.

        Of a [`gnlin.PerExample`][] (a model is one) it takes as many reverse passes as
        one example has outputs, and for dense and convolutional layers no rows of the
        Jacobian: products of what went into a layer and what came back. The memory
        budget (bytes) is kept by some arrays of parameters at a time; for an array whose
        part is too large by itself, or another function whose m x p Jacobian is, each
        chunk of rows is pulled back and pushed forward again, m passes each way.
        """
        groups, left = self._groups(memory_budget)
        m, _ = self.shape
        kernel = jnp.zeros((m, m), _tree.dtype((self.point, self.outputs)))
        for group in groups:
            # One group after the other, so that they share their memory.
            point, kernel = jax.lax.optimization_barrier((self.point, kernel))
            kernel += _rows.gram(self._blocks_of(group, point, memory_budget))
        if left:
            kernel += self._chunked_kernel(left, memory_budget).astype(kernel.dtype)
        return kernel

    def num_kernel_passes(self, memory_budget: int) -> tuple[int, int]:
        """(Jacobian-vector, vector-Jacobian) products that `kernel` takes."""
        m, _ = self.shape
        groups, left = self._groups(memory_budget)
        jvps, vjps = self.num_row_passes()
        of_left = m if left else 0
        return len(groups) * jvps + of_left, len(groups) * vjps + of_left

    def num_kernel_multiplications(self) -> float:
        """In `kernel`, once the passes are made."""
        m, p = self.shape
        if self._examples is None:
            return float(m) ** 2 * p
        fn, args = self._examples
        return fn.num_kernel_multiplications(self.point, args)

    def _groups(self, memory_budget: int) -> tuple[list[list[int]], list[int]]:
        """Arrays of parameters whose blocks fit together, and those too large."""
        groups, left = _grouped(self.num_block_bytes(), memory_budget)
        if self._examples is None and (left or len(groups) > 1):
            return [], list(range(len(jax.tree.leaves(self.point))))
        return groups, left

    def _blocks_of(self, leaves, point, memory_budget) -> list[Any]:
        """By some of the arrays of parameters, or all; of a function that is not of
        independent examples always by all."""
        if self._examples is None:
            return jax.tree.leaves(self.rows(memory_budget))
        fn, args = self._examples
        return fn.blocks(point, args, memory_budget, leaves)

    def _chunked_kernel(self, leaves: Sequence[int], memory_budget: int):
        """By some of the arrays of parameters, a chunk of rows at a time."""
        flat, _ = ravel_pytree(self.outputs)

        def row(u):
            pulled, structure = jax.tree.flatten(self.pull_back(u))
            kept = [x if k in leaves else jnp.zeros_like(x) for k, x in enumerate(pulled)]
            return self.push_forward(structure.unflatten(kept))

        return self._chunked(row, jnp.eye(flat.size, dtype=flat.dtype), memory_budget)

    def curvature(
        self, memory_budget: int = DEFAULT_MEMORY_BUDGET
    ) -> Float[Array, "p p"]:
        r"""$\phi^\top\phi$, parameters in `ravel_pytree` order.

        Of a [`gnlin.PerExample`][] by some examples at a time, so that no more of the
        Jacobian is held than the nearer memories take."""

        def gram(blocks: list[Any]) -> Float[Array, "p p"]:
            matrix = _rows.matrix(_rows.dense(blocks))
            return matmul(matrix.T, matrix)

        _, p = self.shape
        of_sum = p**2 * _tree.dtype(self.point).itemsize
        part = max(_PART_BYTES, _ROWS_A_SUM * of_sum)
        return self.summed(gram, min(memory_budget, part))

    def summed(
        self, of_blocks: Callable[[list[Any]], PyTree[Array]], memory_budget: int
    ) -> PyTree[Array]:
        """What a function makes of the Jacobian's blocks (in the order of the leaves of
        the parameters), summed over parts of the examples where these are independent."""
        if self._examples is None:
            return of_blocks(jax.tree.leaves(self.rows(memory_budget)))
        fn, args = self._examples
        return fn.summed(of_blocks, self.point, args, memory_budget)

    def spectrum(
        self,
        method: Literal["svd", "eigh"] | None = None,
        *,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> Spectrum:
        r"""The eigenpairs of the kernel and the residual in them, for any filter.

        The outputs are taken as the residual of a least-squares problem.

        **Arguments:**

        - `method`: `"svd"` factorises the m x p Jacobian, and resolves singular values
            down to rounding; `"eigh"` the kernel or the curvature, whichever is
            smaller, which is many times faster, but resolves them to the square root of
            rounding only. The default takes the first while it is cheap.
        - `memory_budget`: bytes that the Jacobian may take; beyond it the kernel is
            formed in chunks.
        """
        m, p = self.shape
        if method is None:
            method = "svd" if svd_is_cheap(m, p) else "eigh"
        if method not in ("svd", "eigh"):
            raise ValueError(
                f'`method` must be "svd" or "eigh", but {method!r} was given.'
            )
        residual, _ = ravel_pytree(self.outputs)
        if method == "svd" or (m > p and self.num_bytes() <= memory_budget):
            rows = self.rows(memory_budget)
        elif self.blocks_fit(memory_budget):
            rows = self.blocks(memory_budget)
        else:
            rows = None
        if rows is not None:
            pull_back = Partial(_rows.pull_back, rows)
            return _rows.spectrum(rows, residual, method, pull_back)
        return from_kernel(self.kernel(memory_budget), residual, self.pull_back)

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        r"""$\phi\,v$ as a flat vector, in `ravel_pytree` order of the outputs."""
        return ravel_pytree(self.jvp(tangent))[0]

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        r"""$\phi^\top a$ for a flat vector, in `ravel_pytree` order of the outputs."""
        flat, unravel = ravel_pytree(self.outputs)
        return self.vjp(unravel(cotangent.astype(flat.dtype)))

    def _chunked(self, fn, basis, memory_budget):
        """`fn` on each row of `basis`, as many at once as the budget allows."""
        # What the transposed pass holds is of the size of what the forward pass left.
        forward = sum(x.nbytes for x in jax.tree.leaves(self._jvp) if eqx.is_array(x))
        one_pass = forward + sum(self.shape) * basis.dtype.itemsize
        chunk = max(1, memory_budget // one_pass)
        if chunk >= basis.shape[0]:
            return jax.vmap(fn)(basis)
        return jax.lax.map(fn, basis, batch_size=chunk)


@overload
def linearise(
    fn: Callable[[Any, Any], PyTree],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: Literal[False] = False,
) -> Linearisation: ...


@overload
def linearise(
    fn: Callable[[Any, Any], tuple[PyTree, Any]],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: Literal[True],
) -> tuple[Linearisation, Any]: ...


def linearise(
    fn: Callable[[Any, Any], Any],
    y: PyTree,
    args: PyTree = None,
    *,
    has_aux: bool = False,
) -> Any:
    r"""Linearise a function at a point.

    **Arguments:**

    - `fn`: `fn(y, args)` returning a pytree of floating-point arrays (of residuals, for
        least squares); a [`gnlin.PerExample`][] makes its dense Jacobian cheaper.
    - `y`: the linearisation point, any pytree of floating-point arrays.
    - `args`: passed on, not differentiated.
    - `has_aux`: whether `fn` returns a pair, the second of auxiliary data.

    **Returns:** a [`gnlin.Linearisation`][]; with `has_aux`, a pair of it and the
    auxiliary data.

    **Raises:** `ValueError` if `y` has no entries, or is not real floating-point.

    !!! example

        ```python
        lin = gnlin.linearise(lambda y, x: jnp.exp(-y * x), jnp.array(1.0), x)
        lin.outputs, lin.jacobian, lin.kernel(), lin(jnp.array(1.1))
        ```
    """
    y = jax.tree.map(jnp.asarray, y)
    check_parameters(y)

    def with_aux(y_):
        out = fn(y_, args)
        return out if has_aux else (out, None)

    outputs, jvp, aux = jax.linearize(with_aux, y, has_aux=True)
    check_outputs(outputs)
    examples = (fn, args) if isinstance(fn, PerExample) else None
    lin = Linearisation(y, outputs, jvp, examples)
    return (lin, aux) if has_aux else lin


def _grouped(sizes: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """Indices in groups of at most that size together, and those that are larger; none
    of what has no size."""
    groups: list[list[int]] = []
    left, room = [], 0
    for k, size in enumerate(sizes):
        if size == 0:
            continue
        if size > most:
            left.append(k)
        elif groups and size <= room:
            groups[-1].append(k)
            room -= size
        else:
            groups.append([k])
            room = most - size
    return groups, left


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


# An SVD is dearer than `eigh` of the smaller Gram matrix, and far more accurate. Below
# this many multiplications (about a tenth of a millisecond) accuracy is taken for free.
_CHEAP_SVD = 50_000


def svd_is_cheap(m: int, p: int) -> bool:
    return m * p * min(m, p) <= _CHEAP_SVD


def _jvp_of_rows(outputs, rows, tangent):
    flat, unravel = ravel_pytree(outputs)
    return unravel(_rows.push_forward(rows, tangent).astype(flat.dtype))


def _transformed_jvp(matrices, jvp, tangent):
    return jax.vmap(lambda matrix, v: matrix.mv(v))(matrices, jvp(tangent))


def _transformed_fn(fn, y, args):
    example, matrix = args
    return matrix.mv(fn(y, example))
