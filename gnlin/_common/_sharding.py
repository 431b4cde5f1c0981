"""Runs on arrays that are sharded over several devices.

XLA chooses which device computes what, from the sharding of the arrays. This module adds
three constraints: parameters keep their sharding, a batch has the sharding of its data
set, and the kernel is a sum over parameters.
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
    """The shardings of the arrays of a run; hashable, and empty on one device.

    - `mesh`: the mesh of the devices.
    - `axes`: the axes of the mesh that any array is sharded over.
    - `carry`: the sharding of each array that a step passes to the next.
    - `batch`: the sharding of each array of the data.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    carry: tuple[NamedSharding, ...] = ()
    batch: tuple[NamedSharding, ...] = ()


def places(carry: PyTree, data: PyTree) -> Places:
    """Return the places of concrete arrays."""
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
    """Return the sharding of each leaf; a leaf without one is replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return tuple(_sharding(x) or everywhere for x in jax.tree.leaves(tree))


def keep(tree: PyTree, shardings: tuple[NamedSharding, ...]) -> PyTree:
    """Constrain the shardings of a tree's leaves, inside a compiled program."""
    if not shardings:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    kept = [
        jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, kept)


def everywhere(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Replicate a tree on all devices, inside a compiled program, so that each process
    can read it."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def is_here(x: Any) -> bool:
    """Whether this process can read all numbers of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


#
# Meshes with explicit axes, as `jax.make_mesh` makes them. On these, programs must state
# the sharding of each product; with automatic axes, XLA chooses it
#


def automatic(tree: PyTree) -> PyTree:
    """Move arrays with explicit axes to the same devices with automatic axes."""

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
    """Make the axes of the current mesh, set by `jax.set_mesh`, automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        yield
        return
    types = (AxisType.Auto,) * len(mesh.axis_names)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=types)):
        yield


def on_mesh(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Move arrays back to the mesh on which they were given."""
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
def sharded(places: Places) -> Iterator[None]:
    """Trace a program for arrays at these places."""
    token = _PLACES.set(places)
    try:
        yield
    finally:
        _PLACES.reset(token)


def is_sharded() -> bool:
    """Whether a program is being traced for arrays on several devices."""
    return bool(_PLACES.get().axes)


def by_columns(matrix: Float[Array, "m p"]) -> Float[Array, "parts m k"]:
    """Split a matrix into one part of columns for each device.

    Each device computes the rows of a Jacobian for its examples. For the product of all
    rows with all rows, XLA would gather them on every device. With columns, the product
    is a sum over the devices.
    """
    mesh, axes, *_ = _PLACES.get()
    assert mesh is not None
    num_parts = math.prod(mesh.shape[axis] for axis in axes)
    padded = jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % num_parts)))
    parts = padded.reshape(matrix.shape[0], num_parts, -1).swapaxes(0, 1)
    # The last axis, which by convention shards the parameters, comes first, since its
    # devices hold these columns already.
    spec = PartitionSpec(axes[::-1])
    return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))


def _sharding(x: Any) -> NamedSharding | None:
    """Return the sharding of a concrete array on a mesh, or `None`."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return None
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _names(spec: PartitionSpec) -> Iterator[str]:
    for part in spec:
        if part is not None:
            yield from (part if isinstance(part, tuple) else (part,))
