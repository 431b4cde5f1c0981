"""The Jacobian of any function that is sparse, by few passes: columns of which no row
reads two are of one colour, and one tangent pass finds all of a colour."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .._common._passes import Passes
from .._common._tree import ravel_pytree, Structure
from ._by_passes import ByPasses
from ._directions import check_jac, Direction
from ._gathered import Gathered, Sparse


# Whole rows of an array are read, where they hold up to so many times what is not zero:
# parameters of one pose, or of one point, then stay together.
_WHOLE_ROWS = 2.5


class Sparsity(eqx.Module):
    """Which parameters each residual reads, for the `sparsity=` of
    [`gnlin.Residuals`][]: the Jacobian then is made by as many passes as this has
    colours, and held as what is not zero.

    It is found by [asdex](https://adrianhill.de/asdex) (`pip install gnlin[sparse]`)
    from the program of the function, for all parameters; and for the whole numbers among
    `args` (what reads what) as they are here: with others it has to be found anew.

    **Arguments:**

    - `fn`: `fn(y, args)`, the residuals, as `optimistix.least_squares` takes it.
    - `y`: parameters; only their shapes matter.
    - `args`: passed on.
    - `jac`: whether the passes are of forward mode, `"fwd"`, or of reverse mode, `"bwd"`.
        By default of the mode that takes fewer.
    - `pattern`: where it is known, an m x p array (or one of `scipy.sparse`) that is zero
        where the Jacobian is, in `ravel_pytree` order; it is not checked.

    **Attributes:**

    - `num_colors`: the passes that a Jacobian takes.

    **Raises:** `ImportError` if asdex is not installed; `ValueError` if a pattern has
    another shape than the Jacobian.

    !!! example

        ```python
        fn = lambda y, _: jnp.sin(y[1:]) - y[:-1]
        y0 = jnp.ones(50)
        group = gnlin.Residuals(fn, sparsity=gnlin.Sparsity(fn, y0))
        solution = optx.least_squares(group, gnlin.LevenbergMarquardt(), y0)
        ```

    ??? cite "Reference"

        A. H. Gebremedhin, F. Manne and A. Pothen, *What color is your Jacobian? Graph
        coloring for computing derivatives*, SIAM Review 47 (2005).
    """

    index: list[Int[Array, "m _"]]  # the rows of each array that each residual reads
    places: list[Int[Array, "m _ _"]]  # where their entries are in what the passes find
    colors: Int[Array, " _"]  # of columns, or of rows
    num_colors: int = eqx.field(static=True)
    by_columns: bool = eqx.field(static=True)
    num_residuals: int = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)  # of the parameters
    factor_operations: float = eqx.field(static=True)

    def __init__(
        self,
        fn: Callable[[Any, Any], PyTree[Array]],
        y: PyTree,
        args: Any = None,
        *,
        jac: Direction | None = None,
        pattern: Any = None,
    ):
        check_jac(jac)
        asdex = _asdex()
        y = jax.tree.map(jnp.asarray, y)
        outputs = jax.eval_shape(lambda y_: fn(y_, args), y)
        shape = Structure.of(outputs).size, Structure.of(y).size
        if pattern is None:
            found = asdex.jacobian_sparsity(lambda y_: fn(y_, args), y)
            rows, columns = np.asarray(found.rows), np.asarray(found.cols)
        else:
            rows, columns = _entries(pattern, shape)
        found = asdex.SparsityPattern.from_coo(rows, columns, shape)
        with warnings.catch_warnings():
            # Of one that is dense: which is what the passes then are, too
            warnings.simplefilter("ignore", asdex.DenseColoringWarning)
            coloured = asdex.jacobian_coloring_from_sparsity(
                found, mode="rev" if jac == "bwd" else jac
            )
        self.num_colors = int(coloured.num_colors)
        self.by_columns = coloured.mode == "fwd"
        self.num_residuals = shape[0]
        self.factor_operations = _factor_operations(rows, columns, shape)
        self.shapes = tuple(x.shape for x in jax.tree.leaves(y))
        colors = np.asarray(coloured.colors)
        self.colors = jnp.asarray(colors)
        color, entry = (
            (colors[columns], rows) if self.by_columns else (colors[rows], columns)
        )
        place = color * (shape[0] if self.by_columns else shape[1]) + entry
        self.index, self.places = [], []
        start = 0
        for leaf in self.shapes:
            own = (start <= columns) & (columns < start + math.prod(leaf))
            index, places = _by_rows(
                rows[own], columns[own] - start, place[own], leaf, shape[0]
            )
            self.index.append(jnp.asarray(index))
            self.places.append(jnp.asarray(places))
            start += math.prod(leaf)

    def check(self, y: Structure, outputs: Structure) -> None:
        """Raises `ValueError` if it is of another function."""
        shapes = tuple(x.shape for x in y.leaves)
        if (self.shapes, self.num_residuals) != (shapes, outputs.size):
            raise ValueError(
                f"`sparsity` is of {self.num_residuals} residuals of parameters of the "
                f"shapes {self.shapes}, but here are {outputs.size}, of {shapes}: make "
                "it of the same function and parameters."
            )

    def jacobian(self, passes: ByPasses) -> Sparse:
        """By one pass a colour, and what each residual reads taken from them."""
        domain, codomain = passes.domain, passes.codomain
        self.check(domain, codomain)
        jac = "fwd" if self.by_columns else "bwd"
        if passes.jac not in (None, jac):
            raise ValueError(
                f'The function is to be differentiated by `jac="{passes.jac}"` only, but '
                f'its `sparsity` is for `jac="{jac}"`: make it with '
                f'`gnlin.Sparsity(..., jac="{passes.jac}")`.'
            )

        def of_columns(seed):
            return passes.push_forward(domain.unravel(seed))

        def of_rows(seed):
            return ravel_pytree(passes.pull_back(seed))[0]

        every = jnp.arange(self.num_colors, dtype=self.colors.dtype)
        seeds = self.colors[None] == every[:, None]
        if self.by_columns:
            found = passes.chunked(of_columns, seeds.astype(domain.dtype))
            taken = Passes(jvps=self.num_colors)
        else:
            found = passes.chunked(of_rows, seeds.astype(codomain.dtype))
            taken = Passes(vjps=self.num_colors)
        found = jnp.append(found.ravel(), jnp.zeros(1, found.dtype))
        blocks = [
            Gathered(found[places][:, None].astype(leaf.dtype), index, leaf.shape)
            for index, places, leaf in zip(
                self.index, self.places, domain.leaves, strict=True
            )
        ]
        fixed = domain, codomain, passes.memory_budget
        return Sparse(*fixed, blocks, taken, self.factor_operations)


def _by_rows(
    rows: np.ndarray,
    entries: np.ndarray,
    place: np.ndarray,
    shape: tuple[int, ...],
    num_residuals: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Of one array of parameters: which of its rows each residual reads, and the place of
    each of their entries; -1 of those that are zero. Single entries are rows of their
    own, where whole ones would be mostly zero."""

    def grouped(size: int) -> tuple[np.ndarray, np.ndarray]:
        num = math.prod(shape) // size
        read, inverse = np.unique(rows * num + entries // size, return_inverse=True)
        by, of = np.divmod(read, num)
        nums = np.bincount(by, minlength=num_residuals)
        slot = np.arange(len(read)) - np.repeat(np.cumsum(nums) - nums, nums)
        # What is not read is some row, another for each residual, and zero.
        index = np.arange(num_residuals)[:, None] % num
        index = np.repeat(index, nums.max(initial=0), axis=1)
        index[by, slot] = of
        places = np.full((*index.shape, size), -1)
        places[rows, slot[inverse], entries % size] = place
        return index, places

    if math.prod(shape) == 0:
        size = math.prod(shape[1:])
        return np.zeros((num_residuals, 0), int), np.zeros((num_residuals, 0, size), int)
    by_entries = grouped(1)
    if len(shape) < 2:
        return by_entries
    whole = grouped(math.prod(shape[1:]))
    few = whole[1].size <= _WHOLE_ROWS * by_entries[1].size
    return whole if few else by_entries


# Entries of the curvature past which nobody factorises it.
_MOST_ENTRIES = 1e8


def _factor_operations(
    rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> float:
    """Of a Cholesky factorisation of the curvature within its envelope, in reverse
    Cuthill-McKee order; a sparse one in a better order takes fewer."""
    from scipy.sparse import csr_array  # dear to import
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    nums = np.bincount(rows, minlength=shape[0]).astype(float)
    if np.sum(nums**2) > _MOST_ENTRIES:
        return math.inf
    pattern = csr_array((np.ones(len(rows), np.int32), (rows, columns)), shape)
    curvature = (pattern.T @ pattern).tocsr()
    order = reverse_cuthill_mckee(curvature, symmetric_mode=True)
    place = np.empty(shape[1], int)
    place[order] = np.arange(shape[1])
    these = curvature.tocoo()
    first = np.arange(shape[1])
    np.minimum.at(first, place[these.row], place[these.col])
    return float(np.sum((np.arange(shape[1]) - first) ** 2.0))


def _entries(pattern: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of what is not zero."""
    if getattr(pattern, "shape", None) != shape:
        raise ValueError(
            f"`pattern` must be an array of the Jacobian's shape, {shape}, but "
            f"{getattr(pattern, 'shape', pattern)!r} was given."
        )
    if hasattr(pattern, "tocoo"):
        found = pattern.tocoo()
        rows, columns = (x[found.data != 0] for x in (found.row, found.col))
    else:
        rows, columns = np.nonzero(np.asarray(pattern))
    return rows.astype(int), columns.astype(int)


def _asdex() -> Any:
    try:
        import asdex
    except ImportError as error:
        raise ImportError(
            "`gnlin.Sparsity` colours Jacobians by asdex, which is not installed: "
            "`pip install gnlin[sparse]`."
        ) from error
    return asdex
