"""Sparse Jacobians by colouring: columns without a common nonzero row may share a colour,
and one tangent pass computes all columns of a colour; likewise for rows."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .._common._complex import check_real
from .._common._passes import Passes
from .._common._tree import ravel_pytree, Structure
from ._by_passes import ByPasses
from ._directions import check_jac, Direction
from ._gathered import Gathered, Sparse


# Store whole rows of an array of parameters if that takes at most this multiple of the
# nonzero entries: parameters of one pose, or one point, then stay together.
_WHOLE_ROWS = 2.5


class Sparsity(eqx.Module):
    """The sparsity pattern of a Jacobian and its colouring, for the argument `sparsity`
    of [`gnlin.Residuals`][]. The Jacobian then takes one pass for each colour, and only
    nonzero entries are stored.

    [asdex](https://adrianhill.de/asdex) (`pip install gnlin[sparse]`) finds the pattern
    from the program of the function. It holds for all values of the parameters, but only
    for the integers in `args` as given here, since these may be indices: if they change,
    make a new `Sparsity`.

    **Arguments:**

    - `fn`: `fn(y, args)`, the residuals, as `optimistix.least_squares` takes it.
    - `y`: parameters; only their shapes matter.
    - `args`: passed on.
    - `jac`: the mode of the passes, `"fwd"` (forward) or `"bwd"` (reverse). By default
        the mode that takes fewer passes.
    - `pattern`: the pattern, if it is known: an m x p array (NumPy or `scipy.sparse`),
        zero where the Jacobian is zero, in `ravel_pytree` order. It is not checked.

    **Attributes:**

    - `num_colors`: the number of passes that a Jacobian takes.

    **Raises:** `ImportError` if asdex is not installed; `ValueError` if `pattern` does
    not have the Jacobian's shape.

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

    # For each array of parameters: the rows that each residual reads, and the positions
    # of their entries in the flattened result of the passes.
    index: list[Int[Array, "m _"]]
    places: list[Int[Array, "m _ _"]]
    colors: Int[Array, " _"]  # of columns if `by_columns`, else of rows
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
        check_real("Residuals with a `sparsity`", outputs)
        shape = Structure.of(outputs).size, Structure.of(y).size
        if pattern is None:
            found = asdex.jacobian_sparsity(lambda y_: fn(y_, args), y)
            # Products of their numbers, as below, exceed 32 bits.
            rows, columns = (np.asarray(x, int) for x in (found.rows, found.cols))
        else:
            rows, columns = _entries(pattern, shape)
        found = asdex.SparsityPattern.from_coo(rows, columns, shape)
        with warnings.catch_warnings():
            # A dense pattern is fine here: it takes as many passes as a dense Jacobian.
            warnings.simplefilter("ignore", asdex.DenseColoringWarning)
            mode = "rev" if jac == "bwd" else jac
            coloured = asdex.jacobian_coloring_from_sparsity(found, mode=mode)
        self.num_colors = int(coloured.num_colors)
        self.by_columns = coloured.mode == "fwd"
        self.num_residuals = shape[0]
        self.factor_operations = _factor_operations(rows, columns, shape)
        self.shapes = tuple(x.shape for x in jax.tree.leaves(y))
        colors = np.asarray(coloured.colors, int)
        self.colors = jnp.asarray(colors)
        if self.by_columns:
            place = colors[columns] * shape[0] + rows
        else:
            place = colors[rows] * shape[1] + columns
        self.index, self.places = [], []
        start = 0
        for leaf in self.shapes:
            own = (start <= columns) & (columns < start + math.prod(leaf))
            entries = columns[own] - start
            index, places = _by_rows(rows[own], entries, place[own], leaf, shape[0])
            self.index.append(jnp.asarray(index))
            self.places.append(jnp.asarray(places))
            start += math.prod(leaf)

    def check(self, y: Structure, outputs: Structure) -> None:
        """Raise `ValueError` if parameters or outputs do not have the expected shapes."""
        shapes = tuple(x.shape for x in y.leaves)
        if (self.shapes, self.num_residuals) != (shapes, outputs.size):
            raise ValueError(
                f"`sparsity` was made for {self.num_residuals} residuals and parameters "
                f"of shapes {self.shapes}, but the function has {outputs.size} residuals "
                f"and parameters of shapes {shapes}: make it from the same function."
            )

    def jacobian(self, passes: ByPasses) -> Sparse:
        """Return the sparse Jacobian, computed by one pass for each colour."""
        domain, codomain = passes.domain, passes.codomain
        self.check(domain, codomain)
        jac = "fwd" if self.by_columns else "bwd"
        if passes.jac not in (None, jac):
            raise ValueError(
                f'`jac="{passes.jac}"` was given, or is the only mode of the function, '
                f'but its `sparsity` is for `jac="{jac}"`: make it with '
                f'`gnlin.Sparsity(..., jac="{passes.jac}")`.'
            )

        if self.by_columns:
            of_seed = lambda seed: passes.push_forward(domain.unravel(seed))
            dtype, taken = domain.dtype, Passes(jvps=self.num_colors)
        else:
            of_seed = lambda seed: ravel_pytree(passes.pull_back(seed))[0]
            dtype, taken = codomain.dtype, Passes(vjps=self.num_colors)
        each_color = jnp.arange(self.num_colors, dtype=self.colors.dtype)
        seeds = self.colors[None] == each_color[:, None]
        found = passes.chunked(of_seed, seeds.astype(dtype))
        # `places` is -1 for zeros, so they read this last entry.
        found = jnp.append(found.ravel(), jnp.zeros(1, found.dtype))
        leaves = zip(self.index, self.places, domain.leaves, strict=True)
        blocks = [
            Gathered(found[places][:, None].astype(leaf.dtype), index, leaf.shape)
            for index, places, leaf in leaves
        ]
        budget = passes.memory_budget
        return Sparse(domain, codomain, budget, blocks, taken, self.factor_operations)


def _by_rows(
    rows: np.ndarray,
    entries: np.ndarray,
    place: np.ndarray,
    shape: tuple[int, ...],
    num_residuals: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for one array of parameters, the rows that each residual reads and the
    `place` of each entry of these rows (-1 if the entry is zero). If whole rows would be
    mostly zeros, each entry counts as a row of its own."""

    def grouped(size: int) -> tuple[np.ndarray, np.ndarray]:
        num_rows = math.prod(shape) // size
        read, inverse = np.unique(rows * num_rows + entries // size, return_inverse=True)
        residual, row = np.divmod(read, num_rows)
        counts = np.bincount(residual, minlength=num_residuals)
        slot = np.arange(len(read)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Pad residuals that read fewer rows with zero rows, at an arbitrary index that
        # differs between residuals.
        index = np.arange(num_residuals)[:, None] % num_rows
        index = np.repeat(index, counts.max(initial=0), axis=1)
        index[residual, slot] = row
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


# Above this number of products in the curvature, its factorisation is not considered.
_MOST_ENTRIES = 1e8


def _factor_operations(
    rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> float:
    """Return the operations of a Cholesky factorisation of the curvature within its
    envelope, in reverse Cuthill-McKee order; a sparse one takes fewer."""
    from scipy.sparse import csr_array  # slow to import
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    counts = np.bincount(rows, minlength=shape[0]).astype(float)
    if np.sum(counts**2) > _MOST_ENTRIES:
        return math.inf
    pattern = csr_array((np.ones(len(rows), np.int32), (rows, columns)), shape)
    curvature = (pattern.T @ pattern).tocsr()
    order = reverse_cuthill_mckee(curvature, symmetric_mode=True)
    place = np.empty(shape[1], int)
    place[order] = np.arange(shape[1])
    nonzero = curvature.tocoo()
    first = np.arange(shape[1])
    np.minimum.at(first, place[nonzero.row], place[nonzero.col])
    return float(np.sum((np.arange(shape[1]) - first) ** 2.0))


def _entries(pattern: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the columns of the nonzero entries."""
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
            "`gnlin.Sparsity` needs asdex, which cannot be imported here "
            f"({error}): run `pip install gnlin[sparse]`."
        ) from error
    return asdex
