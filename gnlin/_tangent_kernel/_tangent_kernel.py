"""The tangent kernel of a model, as a function of two sets of inputs."""

import collections
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, Literal, NamedTuple, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._checks import check_count, check_flag, is_traced, is_whole
from .._common._identity import checksum, program
from .._common._sharding import mesh_of
from .._jacobian import DEFAULT_MEMORY_BUDGET, OfExamples, PerExample
from .._linearisation._linearisation import Linearisation
from .._training._data import as_inputs
from .._training._model import in_inference, is_of_model, make_network
from ._file import KernelFile, Place, tiles
from ._parts import (
    Blocks,
    blocks_of,
    by_parameter,
    diagonal_of,
    look,
    mirrored,
    number_of,
    place_of,
    product,
    shape_of,
    tile_of,
)


Outputs = Literal["all", "trace", "diagonal"] | int


class TangentKernel(eqx.Module):
    r"""The empirical neural tangent kernel of a model, as a function of two sets of
    inputs,

    $$\Theta_{ic,jd} = \sum_k \frac{\partial f_c(x_i)}{\partial\theta_k}
    \frac{\partial f_d(x'_j)}{\partial\theta_k}.$$

    The kernel takes one reverse pass through an example for each of its outputs. For
    dense and convolutional layers no rows of the Jacobian are formed. The trace and the
    diagonal over outputs are computed without the full kernel.

    **Arguments:**

    - `model`: a model of one example's input, as for [`gnlin.solve`][]: an Equinox model
        or a pair `(fn, parameters)`; or the [`gnlin.Linearisation`][] of a
        [`gnlin.PerExample`][], whose examples are then the inputs.
    - `outputs`: `"all"`; `"trace"`, the sum over outputs $\sum_c\Theta_{ic,jc}$;
        `"diagonal"`, each output with itself; or the index of one output.
    - `filter_spec`: the parameters, as for `equinox.partition`: a function of a leaf, or
        a pytree of booleans. By default they are all floating-point arrays.
    - `state`: the state of a model with batch normalisation, which stays constant.
    - `memory_budget`: the maximum bytes of a kernel with all that it is computed from. A
        kernel that takes more is computed in tiles, on all devices.

    **Raises:** `ValueError` if the model has no such parameters, or if `outputs` is none
    of these.

    !!! example

        ```python
        model = eqx.nn.MLP(3, 2, 16, 2, key=jax.random.key(0))
        test, train = inputs[:3], inputs[3:]
        gnlin.TangentKernel(model)(test, train)  # (3, 2, 5, 2)
        gnlin.TangentKernel(model, outputs="trace")(test, train)  # (3, 5)
        ```

    ??? cite "Reference"

        A. Jacot, F. Gabriel and C. Hongler, *Neural Tangent Kernel: Convergence and
        Generalization in Neural Networks*, NeurIPS (2018), equation 4; for layers as
        products: R. Novak, J. Sohl-Dickstein and S. Schoenholz, *Fast Finite Width Neural
        Tangent Kernel*, ICML (2022), section 3.3.
    """

    outputs: Outputs = eqx.field(static=True)
    memory_budget: int = eqx.field(static=True)
    _fn: PerExample = eqx.field(repr=False)
    _point: PyTree[Array] = eqx.field(repr=False)
    _has_keys: bool = eqx.field(static=True, repr=False)

    def __init__(
        self,
        model: PyTree,
        *,
        outputs: Outputs = "all",
        filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
        state: PyTree = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        check_count("memory_budget", memory_budget)
        named = isinstance(outputs, str) and outputs in get_args(get_args(Outputs)[0])
        if not (named or is_whole(outputs)):
            raise ValueError(
                '`outputs` must be "all", "trace", "diagonal", or the index of one '
                f"output, but {outputs!r} was given."
            )
        self.outputs = outputs if isinstance(outputs, str) else int(outputs)
        self.memory_budget = memory_budget
        self._has_keys = True
        if isinstance(model, Linearisation):
            if state is not None or filter_spec is not eqx.is_inexact_array:
                raise ValueError(
                    "A linearisation already has parameters and state: leave "
                    "`filter_spec` and `state` out, or pass the model."
                )
            if not isinstance(model.jacobian, OfExamples):
                raise ValueError(
                    "The tangent kernel needs a function of one example, but the "
                    "linearisation is of a function of all examples: linearise a "
                    "`gnlin.PerExample`, or pass the model."
                )
            self._fn, self._point = model.jacobian.function, model.point
            self._has_keys = is_of_model(self._fn)
            return
        if state is not None:
            model = in_inference(model, state)
        parameters, network = make_network(model, filter_spec)
        fn = network.function()
        assert isinstance(fn, PerExample)
        self._fn, self._point = fn, parameters

    def __repr__(self) -> str:
        num_parameters = f"{_tree.size(self._point):,} parameters"
        return f"TangentKernel({num_parameters}, outputs={self.outputs!r})"

    @overload
    def __call__(
        self,
        x1: PyTree,
        x2: PyTree | None = None,
        *,
        file: None = None,
        progress: bool = False,
    ) -> Float[Array, "..."]: ...

    @overload
    def __call__(
        self,
        x1: PyTree,
        x2: PyTree | None = None,
        *,
        file: str | os.PathLike,
        progress: bool = False,
    ) -> np.ndarray: ...

    def __call__(
        self,
        x1: PyTree,
        x2: PyTree | None = None,
        *,
        file: str | os.PathLike | None = None,
        progress: bool = False,
    ) -> Float[Array, "..."] | np.ndarray:
        """Compute the kernel between two sets of n1 and n2 inputs, for c outputs.

        **Arguments:**

        - `x1`, `x2`: inputs, with a leading axis over examples. Without `x2` the result
            is the kernel of `x1` with itself, and each pair is computed once.
        - `file`: the path of a NumPy file, to which the kernel is written tile by tile,
            so that it may exceed the memory. If a run was killed, the next call with the
            same file resumes it, to the same bytes; a file that is complete is read.
        - `progress`: whether to show a progress bar, which advances with each tile.

        **Returns:** an array of the shape `(n1, c, n2, c)`; `(n1, n2)` for the trace or
        one output, `(n1, n2, c)` for the diagonal. With `file` it is a NumPy array that
        stays on disk.

        **Raises:** `ValueError` if the model cannot be called on such inputs, needs a
        key, or has several arrays of outputs; if the kernel exceeds the memory budget and
        there is no `file`; or if the file cannot be written, holds another kernel, or is
        being written by another process.
        """
        check_flag("progress", progress)
        sets = self._checked(x1, x2)
        if file is not None:
            return self._in_file(_npy(file), sets, progress)
        shape = shape_of(self, sets.n1, sets.n2, sets.c)
        self._check_budget(
            shape, sets.dtype, "pass `file`, to which it is written tile by tile, or"
        )
        whole = sets.n1, sets.n2
        inside = is_traced((self, sets)) or mesh_of((sets.x1, sets.x2))
        tile = whole if inside else self._tile(sets)
        if tile == whole:
            return tile_of(self, sets.x1, sets.x2)
        kernel = np.empty(shape, sets.dtype)
        for parts in self._tiles(sets, tile, 0, progress):
            for place, part in parts:
                kernel[place] = part
        return jnp.asarray(kernel)

    def _in_file(self, path: Path, sets: "_Sets", progress: bool) -> np.ndarray:
        if is_traced((self, sets)):
            raise ValueError(
                "A kernel cannot be written to a `file` inside a compiled function: call "
                "it outside, or leave `file` out."
            )
        first = jax.tree.map(jnp.asarray, (_first(sets.x1), _first(sets.x2)))
        arrays, rest = eqx.partition((self, *first), eqx.is_array)
        tile_of_one = jax.jit(lambda arrays: tile_of(*eqx.combine(arrays, rest)))
        identity = {
            "parameters": checksum(self._point),
            "inputs": checksum((sets.x1, sets.x2)),
            "outputs": str(self.outputs),
            "functions": program(tile_of_one, arrays),
        }
        shape = shape_of(self, sets.n1, sets.n2, sets.c)
        kept = KernelFile(path, shape, sets.dtype, identity)
        with kept.alone():
            tile, num_done = kept.begin(self._tile(sets))
            rest = self._tiles(sets, tile, num_done, progress)
            for number, parts in enumerate(rest, num_done + 1):
                kept.put(parts, tile, number)
            return kept.finished()

    def by_parameter(self, x1: PyTree, x2: PyTree | None = None) -> PyTree[Array]:
        """Return the contribution of each array of parameters to the kernel, in the
        structure of the model."""
        sets = self._checked(x1, x2)
        shape = shape_of(self, sets.n1, sets.n2, sets.c)
        shape = len(jax.tree.leaves(self._point)), *shape
        self._check_budget(shape, sets.dtype, "pass fewer inputs, or")
        return by_parameter(self, sets.x1, sets.x2)

    def _check_budget(self, shape: tuple[int, ...], dtype: np.dtype, do: str) -> None:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.memory_budget:
            raise ValueError(
                f"The kernel, of the shape {shape}, takes {num_bytes:,} bytes, but the "
                f"memory budget is {self.memory_budget:,}: {do} raise `memory_budget`."
            )

    def diagonal(self, x: PyTree) -> Float[Array, "n c"]:
        r"""Return $\Theta_{ic,ic}$ for each input and output, without the full kernel."""
        return diagonal_of(self, self._checked(x, None).x1)

    def _checked(self, x1: PyTree, x2: PyTree | None) -> "_Sets":
        x1 = as_inputs(x1)
        n1 = n2 = number_of(x1)
        if x2 is not None:
            x2 = as_inputs(x2)
            n2 = number_of(x2)
        shapes, dtype, num_bytes = look(self, _first(x1), _first(x2))
        if shapes[0] != shapes[-1]:
            raise ValueError(
                "The model must have outputs of the same shape on both sets of inputs, "
                f"but has {shapes[0]} and {shapes[-1]}."
            )
        c = math.prod(shapes[0])
        if not isinstance(self.outputs, str) and not 0 <= self.outputs < c:
            raise ValueError(
                f"`outputs` is {self.outputs}, but the model has outputs 0 to {c - 1}."
            )
        return _Sets(x1, x2, n1, n2, c, dtype, num_bytes)

    #
    # Tiles
    #

    def _tile(self, sets: "_Sets") -> tuple[int, int]:
        """Return the rows and columns of a tile. Each takes at most a quarter of the
        memory budget, because intermediate results of the passes take as much again, and
        there is at least one for each device."""

        def sides(number: int) -> tuple[int, int]:
            size = math.ceil(max(sets.n1, sets.n2) / number)
            return min(size, sets.n1), min(size, sets.n2)

        def num_bytes(rows: int, columns: int) -> int:
            # The kernel, and one part that is added to it
            entries = 2 * math.prod(shape_of(self, rows, columns, sets.c))
            return (rows + columns) * sets.bytes_of_one + entries * sets.dtype.itemsize

        number, most = jax.local_device_count(), max(sets.n1, sets.n2)
        while number < most and num_bytes(*sides(number)) > self.memory_budget / 4:
            number += 1
        return sides(number)

    def _tiles(
        self, sets: "_Sets", tile: tuple[int, int], num_done: int, progress: bool
    ) -> Iterator[list[tuple[Place, np.ndarray]]]:
        """Yield the parts of each tile that is not done. Each device computes its next
        tile in the meantime."""
        from tqdm.auto import tqdm

        symmetric = sets.x2 is None
        all_tiles = tiles((sets.n1, sets.n2), tile, symmetric)
        devices = jax.local_devices()
        several = len(devices) > 1
        here = [_put(self, device) for device in devices] if several else [self]
        waiting: collections.deque = collections.deque()
        # The blocks of the latest rows on each device.
        made: dict[int, tuple[slice, Blocks]] = {}

        def rows_of(x, at, k):
            part = jax.tree.map(lambda a: a[at], x)
            return blocks_of(here[k], _put(part, devices[k]) if several else part)

        def finished():
            (rows, columns), tile = waiting.popleft()
            tile = np.asarray(tile)
            yield place_of(self, rows, columns), tile
            if symmetric and rows != columns:
                yield place_of(self, columns, rows), tile.transpose(mirrored(self))

        with tqdm(total=len(all_tiles), initial=num_done, disable=not progress) as bar:
            for number in range(num_done, len(all_tiles)):
                rows, columns = all_tiles[number]
                k = number % len(devices)
                if k not in made or made[k][0] != rows:
                    made.pop(k, None)
                    made[k] = rows, rows_of(sets.x1, rows, k)
                these, those = made[k][1], None
                if not (symmetric and rows == columns):
                    those = rows_of(sets.x1 if symmetric else sets.x2, columns, k)
                waiting.append(((rows, columns), product(here[k], these, those)))
                del these, those
                if len(waiting) == len(devices):
                    yield list(finished())
                    bar.update()
            while waiting:
                yield list(finished())
                bar.update()


class _Sets(NamedTuple):
    """One or two sets of inputs, and facts about the model's outputs for them.

    - `bytes_of_one`: the bytes of the blocks of one example.
    """

    x1: PyTree
    x2: PyTree | None
    n1: int
    n2: int
    c: int
    dtype: np.dtype
    bytes_of_one: int


def _first(x: PyTree | None) -> PyTree | None:
    return jax.tree.map(lambda a: a[:1], x)


def _put(tree: PyTree, device: Any) -> PyTree:
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, device), rest)


def _npy(file: str | os.PathLike) -> Path:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise ValueError(f"`file` must be the path of a file, but {file!r} was given.")
    path = Path(file).expanduser()
    return path if path.suffix == ".npy" else path.with_name(path.name + ".npy")
