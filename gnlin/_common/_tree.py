"""Vector-space operations on pytrees of arrays: parameters, outputs and steps."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree, Scalar, ScalarLike

from ._complex import check_real


_FULL = jax.lax.Precision.HIGHEST
# Most entries of an array that `joined` joins with others.
_SMALL = 2**14


class Structure(NamedTuple):
    """A pytree's structure, and its leaves' shapes and dtypes; hashable."""

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @staticmethod
    def of(tree: PyTree) -> "Structure":
        leaves, treedef = jax.tree.flatten(tree)
        return Structure(
            treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        )

    @property
    def tree(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.treedef.unflatten(self.leaves)

    @property
    def size(self) -> int:
        return sum(leaf.size for leaf in self.leaves)

    @property
    def dtype(self) -> jnp.dtype:
        return dtype(self.leaves)

    @property
    def eps(self) -> float:
        return eps(self.leaves)

    @property
    def nbytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)

    def ravel(self, tree: PyTree[ArrayLike]) -> Array:
        """Return outputs of these shapes, or one array of all their numbers, as one
        array."""
        self.check(tree, [(self.size,)])
        return ravel_pytree(tree)[0]

    def check(self, tree: PyTree[ArrayLike], *others: list[tuple[int, ...]]) -> None:
        """Raise `ValueError` unless outputs are real and of these shapes, or others."""
        check_real("Targets, residuals and other arrays like the outputs", tree)
        given = [jnp.shape(x) for x in jax.tree.leaves(tree)]
        shapes = [x.shape for x in self.leaves]
        if given not in (shapes, *others):
            expected, found = (" and ".join(map(str, x)) for x in (shapes, given))
            raise ValueError(
                "Targets, residuals and other arrays like the outputs must have the "
                f"outputs' shapes, {expected}, but have {found or 'no array'}."
            )

    def unravel(self, flat: Array) -> PyTree[Array]:
        """Invert `ravel_pytree`."""
        check_real("A vector of real arrays", flat)
        ends = np.cumsum([leaf.size for leaf in self.leaves])[:-1]
        parts = zip(jnp.split(flat, ends), self.leaves, strict=True)
        leaves = [part.reshape(x.shape).astype(x.dtype) for part, x in parts]
        return self.treedef.unflatten(leaves)


def summed(arrays: Iterable[Array]) -> Array:
    """Return the sum of arrays of one shape, in the dtype that holds them all."""
    return functools.reduce(jnp.add, promoted(list(arrays)))


def size(tree: PyTree) -> int:
    """Return the number of entries in all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def dtype(tree: PyTree) -> jnp.dtype:
    """Return the dtype that holds all leaves without loss. Mixed dtypes are cast to it
    explicitly, since users may forbid JAX's implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*jax.tree.leaves(tree))


def at_least_single(tree: PyTree) -> jnp.dtype:
    """Return the dtype that holds all leaves in single precision or better."""
    # In one call, `result_type` would ignore a weakly typed array beside float32.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype(tree), jnp.float32)


def promoted(tree: PyTree[Array]) -> PyTree[Array]:
    """Cast all leaves to the dtype that holds them all."""
    common = dtype(tree)
    return jax.tree.map(lambda x: x.astype(common), tree)


def ravel_pytree(
    tree: PyTree[Array],
) -> tuple[Array, Callable[[Array], PyTree[Array]]]:
    """Call JAX's `ravel_pytree`, with promotion of mixed dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        return flatten_util.ravel_pytree(tree)


def eps(tree: PyTree) -> float:
    """Return the machine epsilon of the coarsest leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))


def matmul(a: Array, b: Array) -> Array:
    """Return `a @ b` in full precision; on accelerators the default may be TF32 or
    bfloat16. Half precision is summed in single precision."""
    wide = at_least_single((a, b))
    a, b = promoted((a, b))
    return jnp.matmul(a, b, precision=_FULL, preferred_element_type=wide)


def einsum(subscripts: str, *operands: Array) -> Array:
    """Call `jnp.einsum` in full precision, with promotion of mixed dtypes."""
    return jnp.einsum(subscripts, *promoted(operands), precision=_FULL)


def sum_of_products(a: Array, b: Array, axis: int = -1) -> Array:
    """Return the sum of the products along an axis, which keeps the length 1, in full
    precision. XLA computes it for all columns of a Jacobian as a product of matrices, in
    a half to a seventh of the time of products and sums (jax 0.10.1, on a CPU)."""
    products = jnp.vecdot(*promoted((a, b)), axis=axis, precision=_FULL)
    return jnp.expand_dims(products, axis)


def tensordot(a: Array, b: Array, axes: int) -> Array:
    """Call `jnp.tensordot` in full precision, with promotion of mixed dtypes."""
    return jnp.tensordot(*promoted((a, b)), axes=axes, precision=_FULL)


# Rows from which `gram` works by halves, and columns from which `gram_of_columns`
# transposes first. Measured on one and two cores: halves take 0.65 of the time in double
# precision and 0.75 to 0.95 in single; transposing takes 0.5 to 0.85 in double precision,
# and more than the plain product in single.
_HALVED, _TRANSPOSED = 1_500, 200


def gram(a: Array) -> Array:
    """Return `a @ a.T`; of a large array, compute only one of two symmetric blocks."""
    m = a.shape[0]
    if m < _HALVED or not on_one_cpu():
        return matmul(a, a.T)
    first, second = a[: m // 2], a[m // 2 :]
    between = matmul(second, first.T)
    return jnp.block([[gram(first), between.T], [between, gram(second)]])


def gram_of_triangle(a: Array) -> Array:
    """Return `a @ a.T` of a lower triangular matrix; of a large one, leave out zeros."""
    m = a.shape[0]
    if m < _HALVED or not on_one_cpu():
        return matmul(a, a.T)
    h = m // 2
    first, below, second = a[:h, :h], a[h:, :h], a[h:, h:]
    between = matmul(below, first.T)
    last = gram(below) + gram_of_triangle(second)
    return jnp.block([[gram_of_triangle(first), between.T], [between, last]])


def gram_of_columns(a: Array) -> Array:
    """Return `a.T @ a`."""
    if a.dtype != jnp.float64 or a.shape[1] < _TRANSPOSED or not on_one_cpu():
        return matmul(a.T, a)
    # Without the barrier, XLA removes the transpose.
    return gram(jax.lax.optimization_barrier(a.T))


def on_one_cpu() -> bool:
    """Whether the only device is a CPU."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def joined(tree: PyTree[Array]) -> list[Array]:
    """Return all entries in few arrays: the small leaves of each dtype are concatenated.

    A reduction of a tree is compiled for each of its arrays, which takes 20 ms or more,
    and a network of five layers has ten. With several devices the leaves are returned
    unchanged, since flattening a matrix that is sharded by columns gathers it.
    """
    leaves = jax.tree.leaves(tree)
    if jax.device_count() > 1:
        return leaves
    small, large = collections.defaultdict(list), []
    for leaf in leaves:
        if leaf.size <= _SMALL:
            small[leaf.dtype].append(leaf.ravel())
        else:
            large.append(leaf)
    return [jnp.concatenate(some) for some in small.values()] + large


def dot(a: PyTree[Array], b: PyTree[Array]) -> Scalar:
    """Return the Euclidean inner product of two trees of one structure. Half precision
    is summed in single precision."""

    def widened(x, like):
        return x.astype(at_least_single((x, like)))

    ours, theirs = jax.tree.map(widened, a, b), jax.tree.map(widened, b, a)
    products = map(jnp.multiply, joined(ours), joined(theirs))
    return total(list(products), at_least_single((a, b))).astype(dtype((a, b)))


def total(tree: PyTree[Array], dtype: jnp.dtype) -> Scalar:
    """Sum all entries of all leaves, each leaf in its own dtype."""
    sums = [jnp.sum(leaf).astype(dtype) for leaf in joined(tree)]
    return sum(sums, jnp.zeros((), dtype))


def norm(a: PyTree[Array]) -> Scalar:
    """Return the Euclidean norm, without overflow of squares in single precision."""
    if dtype(a) == jnp.float64:
        return jnp.sqrt(dot(a, a))
    largest = fixed(unit(a))  # on which the norm does not depend
    scaled = [x / largest.astype(x.dtype) for x in joined(a)]
    return (largest * jnp.sqrt(dot(scaled, scaled))).astype(dtype(a))


def root(x: Array) -> Array:
    """Return the square root, with the derivative zero at zero."""
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), x)


def column_norms(matrix: Float[Array, "m k"]) -> Float[Array, " k"]:
    """Return the norms of the columns, also if the squares of entries underflow or
    overflow."""
    largest = jnp.max(jnp.abs(matrix), axis=0)
    units = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return units * jnp.linalg.norm(matrix / units[None], axis=0)


def unit(a: PyTree[Array]) -> Scalar:
    """Return a number to divide by before squaring: the largest absolute value, or 1 if
    that is zero or not finite."""
    each = [jnp.max(jnp.abs(x), initial=0) for x in joined(a)]
    largest = functools.reduce(jnp.maximum, promoted(each))
    return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)


def axpy(s: ScalarLike, x: PyTree[Array], y: PyTree[Array]) -> PyTree[Array]:
    """Return `s x + y`, in the dtypes of `y`."""

    def each(a, b):
        wide_a, wide_b = promoted((a, b))
        return (_cast(s, wide_a.dtype) * wide_a + wide_b).astype(b.dtype)

    return jax.tree.map(each, x, y)


def scale(s: ScalarLike, x: PyTree[Array]) -> PyTree[Array]:
    """Return `s x`, in the dtypes of `x`."""
    return jax.tree.map(lambda a: _cast(s, a.dtype) * a, x)


def quotient(x: Array | ScalarLike, y: Array, where: Array | None = None) -> Array:
    """Return `x / y` where a condition holds, by default where `y` is not zero, and 0
    elsewhere, with derivatives that are finite there, too."""
    where = y != 0 if where is None else where
    return jnp.where(where, x / jnp.where(where, y, 1), 0)


def divided(x: PyTree[Array], norm: Scalar) -> PyTree[Array]:
    """Return `x` divided by a norm, or `x` itself if the norm is zero."""
    norm = jnp.where(norm == 0, 1, norm)

    def each(a):
        wide, by = promoted((a, norm))
        return (wide / by).astype(a.dtype)

    return jax.tree.map(each, x)


@jax.custom_jvp
def direction(x: PyTree[Array], norm: Scalar) -> PyTree[Array]:
    """Return `x` divided by its norm, or zero if `x` is zero; derivatives are finite
    there, too, and in any units."""
    return divided(x, norm)


@direction.defjvp
def _direction_jvp(primals, tangents):
    (x, norm), (change, _) = primals, tangents
    unit = divided(x, norm)
    return unit, divided(axpy(-dot(unit, change), unit, change), norm)


def _cast(s: ScalarLike, dtype: jnp.dtype) -> ScalarLike:
    """Cast a scalar array to a dtype; leave Python numbers, which are weakly typed."""
    return s if type(s) in (int, float) else jnp.asarray(s, dtype)


def cast_like(x: PyTree[Array], y: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """Cast `x` to the dtypes of `y`."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), x, y)


def fixed(x: PyTree) -> PyTree:
    """Stop gradients through the arrays of a tree, which may have other leaves."""
    arrays, others = eqx.partition(x, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), others)


def zeros_like(x: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[Array]:
    return jax.tree.map(jnp.zeros_like, x)


def where(condition: Bool[Array, ""], x: PyTree, y: PyTree) -> PyTree[Array]:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def all_finite(x: PyTree[Array]) -> Bool[Array, ""]:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in joined(x)]
    return jnp.all(jnp.stack(finite))


def any_nonzero(x: PyTree[Array]) -> Bool[Array, ""]:
    return jnp.any(jnp.stack([jnp.any(leaf != 0) for leaf in joined(x)]))


def columns(tree: PyTree) -> PyTree:
    """Return data frames as dictionaries of their columns, and the others unchanged."""

    def of_one(value):
        if hasattr(value, "columns") and hasattr(value, "to_numpy"):
            return {str(name): value[name] for name in value.columns}
        return value

    return jax.tree.map(of_one, tree)


def shapes_in_words(tree: PyTree) -> str:
    """Return the shapes of a pytree of arrays, or an object's kind, whose description
    would be long."""
    if isinstance(tree, eqx.Module):
        return (
            f"those of a {type(tree).__name__} (return its arrays, such as "
            "`solution.ys` of diffrax)"
        )
    return str(jax.tree.map(jnp.shape, tree))


def listed_shapes(tree: PyTree) -> str:
    """Return the shapes of the leaves of a pytree of arrays."""
    return ", ".join(str(jnp.shape(x)) for x in jax.tree.leaves(tree)) or "none"


def alike(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees have the same structure and shapes."""
    shapes = (jax.tree.map(jnp.shape, tree) for tree in (one, other))
    return bool(eqx.tree_equal(*shapes))


def in_words(module: Any) -> str:
    """Return a dataclass's `repr` with its scalars as numbers, and without defaults."""

    def plain(value):
        known = isinstance(value, np.ndarray | jax.Array) and not isinstance(
            value, Tracer
        )
        return value.item() if known and value.ndim == 0 else value

    shown = []
    for field in dataclasses.fields(module):
        value, default = plain(getattr(module, field.name)), plain(field.default)
        numbers = isinstance(value, int | float) and isinstance(default, int | float)
        if field.repr and not (value is default or (numbers and value == default)):
            is_module = isinstance(value, eqx.Module)
            text = repr(value) if is_module else eqx.tree_pformat(value)
            shown.append(f"{field.name}={text}")
    return f"{type(module).__name__}({', '.join(shown)})"
