"""Arrays on several devices: what `jax.sharding` leaves open about a run on them.

Which device computes what is XLA's choice, from where the arrays are. It is told three
things: that parameters stay where they came from, that a batch is spread as the data set
that it was taken from, and that the kernel is a sum over parameters.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree


class Places(NamedTuple):
    """Where the arrays of a run are; hashable, and empty on one device.

    - `mesh`: of all devices that hold one.
    - `axes`: those of its axes that an array is sharded over.
    - `carry`: of each array that a step hands to the next.
    - `batch`: of each array of the data.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    carry: tuple[NamedSharding, ...] = ()
    batch: tuple[NamedSharding, ...] = ()


def places(carry: PyTree, data: PyTree) -> Places:
    """Of arrays that arrive; traced ones do not say where they are."""
    mesh = mesh_of((carry, data))
    if mesh is None:
        return Places()
    of_carry, of_data = _shardings(carry, mesh), _shardings(data, mesh)
    used = {name for sharding in of_carry + of_data for name in _names(sharding.spec)}
    axes = tuple(name for name in mesh.axis_names if name in used)
    return Places(mesh, axes, of_carry, of_data)


def mesh_of(tree: PyTree) -> Mesh | None:
    for leaf in jax.tree.leaves(tree):
        sharding = _sharding(leaf)
        if sharding is not None and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _shardings(tree: PyTree, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Of each leaf; what has none is copied to all devices."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return tuple(_sharding(x) or everywhere for x in jax.tree.leaves(tree))


def keep(tree: PyTree, shardings: tuple[NamedSharding, ...]) -> PyTree:
    """Inside a compiled program: the same numbers, each array sharded so."""
    if not shardings:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    kept = [
        jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, kept)


def everywhere(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Inside a compiled program: a copy on each device, which each process can read."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def is_here(x: Any) -> bool:
    """Whether this process can look at all the numbers of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


#
# Meshes whose axes are part of the arrays' types, as `jax.make_mesh` makes them: their
# programs say of each product how it is sharded, and XLA is asked for nothing
#


def automatic(tree: PyTree) -> PyTree:
    """The same arrays in the same places, on meshes on which XLA chooses."""

    def moved(x):
        sharding = _sharding(x)
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
            return x
        types = (AxisType.Auto,) * len(sharding.mesh.axis_names)
        devices = np.asarray(sharding.mesh.devices)
        mesh = Mesh(devices, sharding.mesh.axis_names, axis_types=types)
        return jax.device_put(x, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(moved, tree)


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """On such arrays, also inside of a `jax.set_mesh` of the others."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        yield
        return
    types = (AxisType.Auto,) * len(mesh.axis_names)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=types)):
        yield


def on_mesh(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Back to the mesh that they came on."""
    if mesh is None:
        return tree

    def moved(x):
        sharding = _sharding(x)
        if sharding is None or sharding.mesh == mesh:
            return x
        return jax.device_put(x, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(moved, tree)


#
# The kernel
#

_NOWHERE = Places()
_PLACES = contextvars.ContextVar("places", default=_NOWHERE)


@contextlib.contextmanager
def spread(places: Places) -> Iterator[None]:
    """While a program is traced for arrays that are there."""
    token = _PLACES.set(places)
    try:
        yield
    finally:
        _PLACES.reset(token)


def is_spread() -> bool:
    """Whether the program that is traced is for arrays on several devices."""
    return bool(_PLACES.get().axes)


def by_columns(matrix: Float[Array, "m p"]) -> Float[Array, "parts m k"]:
    """A matrix in as many parts as there are devices, each with some of the columns.

    An m x p Jacobian is made by rows, each device those of its examples, and for the
    product of all rows with all rows XLA would gather it on every device. By columns it
    is a sum over parts.
    """
    mesh, axes, *_ = _PLACES.get()
    assert mesh is not None
    num_parts = math.prod(mesh.shape[axis] for axis in axes)
    padded = jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % num_parts)))
    parts = padded.reshape(matrix.shape[0], num_parts, -1).swapaxes(0, 1)
    # The parameters' own axis, by custom the last, first: it has its columns already.
    spec = PartitionSpec(axes[::-1])
    return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))


def _sharding(x: Any) -> NamedSharding | None:
    """Of an array on a mesh."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return None
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _names(spec: PartitionSpec) -> Iterator[str]:
    for part in spec:
        if part is not None:
            yield from (part if isinstance(part, tuple) else (part,))
