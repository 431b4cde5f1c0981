"""Checks of the arguments of `curve_fit`, and their conversion to one form."""

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._common._checks import check_names, is_own
from ._curve import Curve, Data, flat


_TIMES = datetime.date, datetime.time, datetime.timedelta


def as_start(value: Any) -> Array:
    """Convert one leaf of `start`, a number or an array, to a finite array."""
    value = _as_floats(value, "start")
    if not isinstance(value, Tracer) and not np.all(np.isfinite(value)):
        raise ValueError(f"`start` must be finite, but {value} was given.")
    return value


def as_x(x: PyTree[Any]) -> PyTree[Array]:
    """Convert x to a pytree of arrays."""
    return jax.tree.map(lambda value: _as_array(value, "x"), columns_of(x))


def columns_of(x: PyTree[Any]) -> PyTree[Any]:
    """Return a data frame as a dictionary of its columns, and a list of numbers as one
    array. Arrays are not read."""
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        return {str(name): x[name].to_numpy() for name in x.columns}
    if isinstance(x, list) and all(isinstance(value, int | float) for value in x):
        return np.asarray(x)
    return x


def _as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"`{name}` is a masked array, whose mask would be lost: pass "
            f"`{name}.filled(np.nan)` as floating-point numbers, and "
            '`nan_policy="omit"`.'
        )
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        known = np.asarray(value, None if isinstance(value, np.ndarray) else object)
        first = known.ravel()[0] if known.size else None
        if known.dtype.kind in "mM" or isinstance(first, _TIMES):
            raise ValueError(
                f"`{name}` holds dates or times: pass numbers, such as days, which for a "
                f'NumPy array are `({name} - {name}[0]) / np.timedelta64(1, "D")`.'
            ) from error
        of_model = " (for a model, those from `eqx.partition`)" * callable(value)
        given = f"an array of {known.dtype}" if hasattr(value, "dtype") else repr(value)
        raise ValueError(
            f"`{name}` must hold numbers or arrays{of_model}, but {given} was given."
        ) from error


def _as_floats(value: Any, name: str) -> Array:
    value = _as_array(value, name)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ValueError(
            f"`{name}` must be real: fit real and imaginary parts as two parameters."
        )
    # An explicit dtype avoids a weak type, which would trigger a second compilation.
    kind = value.dtype if jnp.issubdtype(value.dtype, jnp.floating) else float
    return jnp.asarray(value, kind)


def parted(start: PyTree, fixed: Iterable[str]) -> tuple[PyTree, dict]:
    """Split the parameters into the free ones and the fixed ones."""
    if not jax.tree.leaves(start):
        raise ValueError(f"`start` must hold a parameter, but {start!r} was given.")
    names = [fixed] if isinstance(fixed, str) else list(fixed)
    if not names:
        return start, {}
    if not isinstance(start, Mapping):
        raise ValueError(
            "`fixed` needs parameters in a dictionary: for others, make the lower and "
            "upper bounds equal."
        )
    check_names(names, _names(start), "to be fixed")
    free, kept = _split(start, names)
    if not jax.tree.leaves(free):
        raise ValueError("All parameters are fixed: there is nothing to fit.")
    return free, kept


def _names(tree: Mapping) -> list:
    """Return the names of all entries, such as `a`, and `a.width` of an entry within."""
    names = list(tree)
    for name, value in tree.items():
        if isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in _names(value)]
    return names


def _split(tree: Mapping, names: list, within: str = "") -> tuple[dict, dict]:
    """Split nested dictionaries into the entries that are not named, and the others."""
    free, kept = {}, {}
    for key, value in tree.items():
        name = f"{within}{key}" if within else key
        if name in names:
            kept[key] = value
        elif isinstance(value, Mapping):
            free[key], held = _split(value, names, f"{name}.")
            kept |= {key: held} if held else {}
        else:
            free[key] = value
    return free, kept


def limits(bounds: Any, start: PyTree, free: PyTree) -> Any:
    """Return the bounds `(lower, upper)` of the free parameters, for a solver."""
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        if not isinstance(start, Mapping):
            raise ValueError(
                "`bounds` by name need parameters in a dictionary: pass a pair "
                "`(lower, upper)`."
            )
        bounds = tuple(_end(bounds, start, k) for k in (0, 1))
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            "`bounds` must be a dictionary `{name: (lower, upper)}`, or a pair "
            f"`(lower, upper)`, but {bounds!r} was given."
        )
    if isinstance(start, Mapping):
        bounds = tuple(_of_free(bound, start, free) for bound in bounds)
    else:
        bounds = tuple(_like(start, bound) for bound in bounds)
    return jax.tree.map(lambda b: _as_floats(b, "bounds"), tuple(bounds))


def _end(bounds: Mapping, start: Mapping, k: int) -> dict:
    """Return the lower (k = 0) or upper (k = 1) end of bounds by name."""
    check_names(bounds, start, "to have bounds")
    ends = {}
    for name, pair in bounds.items():
        if isinstance(pair, Mapping) and isinstance(start[name], Mapping):
            ends[name] = _end(pair, start[name], k)
        elif isinstance(pair, tuple | list) and len(pair) == 2:
            ends[name] = pair[k]
        else:
            raise ValueError(
                f"The bounds of {name!r} must be a pair `(lower, upper)`, but {pair!r} "
                "was given."
            )
    return ends


def _of_free(bound: Any, start: Any, free: Any) -> Any:
    """Leave out the bounds of fixed parameters."""
    if not all(isinstance(tree, Mapping) for tree in (bound, start, free)):
        return bound
    return {
        name: _of_free(value, start.get(name), free.get(name))
        for name, value in bound.items()
        if name in free or name not in start
    }


def _like(start: PyTree[Array], bound: Any) -> Any:
    """Convert a list of bounds to an array if `start` is an array, and vice versa."""
    structure = jax.tree.structure(start)
    if isinstance(start, Array) and isinstance(bound, list | tuple):
        return np.asarray(bound)
    if isinstance(start, list | tuple) and np.shape(bound) == (structure.num_leaves,):
        return structure.unflatten(list(bound))
    return bound


class Values(NamedTuple):
    """y as given, and the meaning of its leading axis.

    - `many`: whether the leading axis is over data sets.
    - `axis_of_start`: 0 if each data set has its own start, else `None`.
    """

    tree: PyTree[Array]
    many: bool
    axis_of_start: int | None

    def of_one(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Return the shapes and types of one data set."""
        skip = int(self.many)
        return jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape[skip:], v.dtype), self.tree
        )

    def flat(self) -> Float[Array, "*sets m"]:
        """Return y as one vector, or as one vector for each data set."""
        return jax.vmap(flat)(self.tree) if self.many else flat(self.tree)


def as_y(curve: Curve, free: PyTree, kept: dict, x: PyTree, y: PyTree) -> Values:
    """Decide whether y is one data set or several, by the shapes that `f` returns."""
    failures: list[Exception] = []

    def called(free):
        return curve.on(free, kept, x).shapes(free, kept, x)

    def shapes(free):
        try:
            out = called(free)
        except Exception as error:
            failures.append(error)
            return None
        return jax.tree.structure(out), [o.shape for o in jax.tree.leaves(out)]

    own_shapes = shapes(free)
    if isinstance(y, list | tuple | float | int):
        as_tree = jax.tree.structure(y)
        if own_shapes is None or own_shapes[0] != as_tree or not own_shapes[1]:
            y = _as_array(y, "y")
    given = jax.tree.map(lambda v: wholly_missing(_as_array(v, "y")), y)
    structure, of_y = jax.tree.structure(given), [v.shape for v in jax.tree.leaves(given)]
    numbers = {shape[:1] for shape in of_y}
    of_one = structure, [shape[1:] for shape in of_y]
    if own_shapes == (structure, of_y):
        return _same_kind(called(free), Values(given, False, None))
    if len(numbers) == 1 and numbers != {()}:
        (number,) = numbers.pop()
        own = all(s.shape[:1] == (number,) for s in jax.tree.leaves(free))
        first = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), free)
        if of_one[1] == [()] and own_shapes == of_one:
            raise ValueError(
                f"`f(start, x)` is one number, and `y` has the shape {of_y[0]}: return a "
                "value for each point, for example by `jnp.broadcast_to`."
            )
        if own and shapes(first) == of_one:
            return _same_kind(called(first), Values(given, True, 0))
        if own_shapes == of_one:
            return _same_kind(called(free), Values(given, True, None))
    if own_shapes is None:
        of_numpy = isinstance(failures[0], jax.errors.TracerArrayConversionError)
        about_types = isinstance(failures[0], TypeError | ValueError)
        if (is_own(failures[0]) or not about_types) and not of_numpy:
            raise failures[0]
        said = str(failures[0]).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            "`f(parameters, x)` failed (it must take these two arguments and use JAX's "
            f"operations): {type(failures[0]).__name__}: {said}."
        ) from failures[0]
    raise ValueError(
        "`f(start, x)` must have the shapes of `y`, "
        f"{jax.tree.map(jnp.shape, given)}, but has "
        f"{jax.tree.map(lambda o: o.shape, called(free))}."
    )


def _same_kind(out: PyTree, values: Values) -> Values:
    """Return y after a check that it is complex exactly where `f` is."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(values.tree), strict=True)
    for kinds in pairs:
        of_f, of_y = ("complex" if jnp.iscomplexobj(v) else "real" for v in kinds)
        if of_f != of_y:
            raise ValueError(
                f"`f(start, x)` is {of_f}, and `y` is {of_y}: both must be of the same "
                "kind."
            )
    return values


def wholly_missing(value: Array) -> Array:
    """Make both parts of a complex number NaN if one of them is."""
    if not jnp.iscomplexobj(value):
        return value
    return jnp.where(jnp.isnan(value), jnp.nan * (1 + 1j), value)


def with_x(x: PyTree[Array], y: Values, nan_policy: str) -> tuple[PyTree, Values]:
    """Mark points of missing x as missing in y, and replace their x by another's."""
    leaves, structure = jax.tree.flatten(x)
    floats = [jnp.issubdtype(value.dtype, jnp.inexact) for value in leaves]
    known = not any(isinstance(value, Tracer) for value in leaves)
    missing = [
        known and inexact and bool(np.any(np.isnan(value)))
        for value, inexact in zip(leaves, floats, strict=True)
    ]
    if not any(missing):
        return x, y
    if nan_policy == "raise":
        raise ValueError(
            '`x` has a missing value (NaN): leave it out, or pass `nan_policy="omit"`.'
        )
    wrong = [leaf for leaf, is_so in zip(leaves, missing, strict=True) if is_so]
    lengths = {v.shape[int(y.many) :][:1] for v in jax.tree.leaves(y.tree)}
    lengths |= {leaf.shape[:1] for leaf in wrong}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "`x` has a missing value (NaN), and its leading axis differs from `y`'s: "
            "leave these points out."
        )
    rows = np.zeros(lengths.pop(), bool)
    for leaf in wrong:
        rows |= np.isnan(leaf).reshape(len(rows), -1).any(axis=1)
    other = int(np.argmin(rows))  # a point whose x is not missing

    def filled(value, is_missing):
        return value.at[np.flatnonzero(rows)].set(value[other]) if is_missing else value

    leaves = [filled(*pair) for pair in zip(leaves, missing, strict=True)]
    at = (slice(None),) * y.many + (np.flatnonzero(rows),)

    def emptied(value):
        kind = value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else float
        return wholly_missing(value.astype(kind).at[at].set(jnp.nan))

    return structure.unflatten(leaves), y._replace(tree=jax.tree.map(emptied, y.tree))


def errors_of_x(x: PyTree[Array], sigma_x: Any) -> tuple[PyTree, PyTree]:
    """Return x as floats and the standard deviation of each entry, if there are any."""
    if sigma_x is None:
        return x, None
    leaves, structure = jax.tree.flatten(x)
    given = jax.tree.leaves(sigma_x)
    if jax.tree.structure(sigma_x) == jax.tree.structure(0):
        given = given * len(leaves)
    elif jax.tree.structure(sigma_x) != structure:
        raise ValueError(
            "`sigma_x` must be one number, or have the structure of `x`, but "
            f"{sigma_x!r} was given."
        )
    leaves = [_as_floats(value, "x") for value in leaves]
    errors = [_error_of_x(*pair) for pair in zip(leaves, given, strict=True)]
    return structure.unflatten(leaves), structure.unflatten(errors)


def _error_of_x(x: Array, given: Any) -> Array:
    known = not isinstance(given, Tracer)
    if known and not np.all((np.asarray(given) >= 0) & np.isfinite(given)):
        raise ValueError("`sigma_x` must be finite, and positive, or 0 for an exact x.")
    try:
        return jnp.broadcast_to(jnp.asarray(given, x.dtype), x.shape)
    except ValueError as error:
        raise ValueError(
            f"`sigma_x` must be one number, or have the shape of `x`, {x.shape}, but has "
            f"the shape {jnp.shape(given)}."
        ) from error


def data_of(
    x: PyTree, values: Values, sigma: Any, sigma_x: PyTree, nan_policy: str
) -> tuple[Data, Any]:
    """Return the data, and the axes of its fields over data sets, for `jax.vmap`."""
    y = values.flat()
    known = not isinstance(y, Tracer)
    numpy: Any = np if known else jnp  # NumPy has less overhead per operation
    missing = numpy.isnan(y)
    if known:
        if np.any(np.isinf(y)):
            raise ValueError("`y` must be finite, but has an infinite value.")
        if nan_policy == "raise" and np.any(missing):
            raise ValueError(
                "`y` has a missing value (NaN): leave it out, or pass "
                '`nan_policy="omit"`.'
            )
        if np.all(missing):
            raise ValueError("There is no data: all of `y` is missing, or `y` is empty.")
    errors = _errors(sigma, y, values, missing)
    if errors.left_out is not None:
        missing = missing | errors.left_out
        if known and not isinstance(missing, Tracer) and np.all(missing):
            raise ValueError("There is no data: all of `sigma` is infinite.")
    counted = jnp.asarray(jnp.where(missing, 0, 1), y.dtype)
    if not known or isinstance(missing, Tracer) or np.any(missing):
        y = jnp.where(missing, 0, y)
    data: Any = Data(x, y, errors.numbers, counted, sigma_x)
    if not values.many:
        return data, Data(None, None, None, None)  # type: ignore[arg-type]
    own = 0 if errors.are_own else None
    return data, Data(None, 0, own, 0, None, 0)  # type: ignore[arg-type]


class _Errors(NamedTuple):
    """The errors of y.

    - `numbers`: one or more standard deviations, or a factor of the covariance.
    - `are_own`: whether each data set has its own, on a leading axis.
    - `left_out`: whether each is infinite, if any may be.
    """

    numbers: Array
    are_own: bool
    left_out: Any = None


def _errors(
    sigma: Any, y: Float[Array, "*sets m"], values: Values, missing: Any
) -> _Errors:
    if sigma is None:
        return _Errors(jnp.ones(y.shape[:-1], y.dtype), values.many)
    factor = _factor(sigma, y, values, missing)
    if factor is not None:
        return _Errors(factor, factor.ndim == 3)
    numbers, are_own = _deviations(sigma, y, values)
    if values.many and not are_own:
        missing = missing.all(axis=0)
    # Inside a compiled function `numbers` is traced even if `sigma` is a plain number.
    known = not isinstance(missing, Tracer) and not isinstance(numbers, Tracer)
    if known and not np.all(missing | (numbers > 0)):
        raise ValueError(
            "`sigma` must be positive at every point, and infinite at those to leave out."
        )
    infinite = np.isinf(numbers) if known else jnp.isinf(numbers)
    left_out = None if known and not np.any(infinite) else infinite
    return _Errors(jnp.where(missing | infinite, 1, numbers), are_own, left_out)


def _factor(sigma: Any, y: Array, values: Values, missing: Any) -> Array | None:
    """Return the Cholesky factor of a covariance, or `None` for standard deviations. The
    rows and columns of missing points are replaced by those of the identity."""
    m, shape = y.shape[-1], np.shape(sigma) if _is_array(sigma) else ()
    (of_y, *others) = [v.shape for v in jax.tree.leaves(values.of_one())]
    if shape != (m, m) or (not others and of_y == shape):
        return None
    # With m data sets of m points, an m x m array may be one or the other: it is taken as
    # a covariance if it is symmetric and positive definite.
    unclear = y.shape == shape
    are_traced = isinstance(sigma, Tracer) or isinstance(missing, Tracer)
    if are_traced and unclear:
        return None
    numpy: Any = jnp if are_traced else np
    given = numpy.asarray(sigma, y.dtype)
    # Data sets that miss the same points share one factor.
    if missing.ndim == 2 and not are_traced and np.all(missing == missing[:1]):
        missing = missing[0]
    unknown = missing[..., :, None] | missing[..., None, :]
    given = numpy.where(unknown, numpy.eye(m, dtype=y.dtype), given)
    if are_traced:
        return jnp.linalg.cholesky(given)
    transposed = np.swapaxes(given, -1, -2)
    symmetric = np.all(np.isfinite(given)) and np.allclose(given, transposed)
    factor = jnp.linalg.cholesky(jnp.asarray(given)) if symmetric else jnp.array(np.nan)
    if bool(jnp.all(jnp.isfinite(factor))):
        return factor
    if unclear:
        return None
    must = "positive definite" if symmetric else "symmetric and finite"
    raise ValueError(f"`sigma` is a covariance and must be {must}.")


def _deviations(sigma: Any, y: Array, values: Values) -> tuple[Array, bool]:
    """Return the standard deviations, flat, and whether each data set has its own."""
    tree, of_one, m = values.tree, values.of_one(), y.shape[-1]
    structure = jax.tree.structure(tree)
    if _is_array(sigma):
        array = _as_floats(sigma, "sigma").astype(y.dtype)
        if array.shape in (y.shape, (m,)):
            return array, values.many and array.shape == y.shape
        if array.ndim == 0 or structure == jax.tree.structure(0):
            sigma = jax.tree.map(lambda _: array, tree)
    if jax.tree.structure(sigma) == structure:
        leaves = [_as_floats(s, "sigma").astype(y.dtype) for s in jax.tree.leaves(sigma)]
        for like, are_own in ((of_one, False), (tree, values.many)):
            shapes = zip(
                leaves, jax.tree.leaves(of_one), jax.tree.leaves(like), strict=True
            )
            if all(s.shape in ((), one.shape, v.shape) for s, one, v in shapes):
                each = structure.unflatten(
                    list(map(broadcast, leaves, jax.tree.leaves(like)))
                )
                return Values(each, are_own, None).flat(), are_own
    raise ValueError(
        "`sigma` must be one number, have the shape of `y`, "
        f"{jax.tree.map(jnp.shape, tree)}, or be the {m} x {m} covariance, but has the "
        f"shape {jax.tree.map(jnp.shape, sigma)}."
    )


def broadcast(sigma: Array, like: Any) -> Array:
    """Broadcast to the shape of y, with the same sigma for real and imaginary parts."""
    sigma = jnp.broadcast_to(sigma, like.shape)
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    return jax.lax.complex(sigma, sigma) if is_complex else sigma


def _is_array(value: Any) -> bool:
    """Whether NumPy converts it to a numeric array, unlike a dictionary or a model."""
    if isinstance(value, Tracer):
        return True
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:  # a list of arrays of different shapes
        return False
