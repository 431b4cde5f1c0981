"""What a user gives for a fit, checked and in one form."""

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
    """One of the parameters, a number or an array."""
    value = _as_floats(value, "start")
    if not isinstance(value, Tracer) and not np.all(np.isfinite(value)):
        raise ValueError(f"`start` must be finite, but {value} was given.")
    return value


def as_x(x: PyTree[Any]) -> PyTree[Array]:
    """Of a list of numbers their array, of a data frame a dictionary of its columns."""
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        x = {str(name): x[name].to_numpy() for name in x.columns}
    if isinstance(x, list) and all(isinstance(value, int | float) for value in x):
        x = np.asarray(x)
    return jax.tree.map(lambda value: _as_array(value, "x"), x)


def _as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"`{name}` is a masked array, and a mask would be lost: pass "
            f"`{name}.filled(np.nan)`, of floating-point numbers, and "
            '`nan_policy="omit"`.'
        )
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        known = np.asarray(value, None if isinstance(value, np.ndarray) else object)
        first = known.ravel()[0] if known.size else None
        if known.dtype.kind in "mM" or isinstance(first, _TIMES):
            raise ValueError(
                f"`{name}` holds dates or times: pass numbers, such as days by "
                f'`({name} - {name}[0]) / np.timedelta64(1, "D")` of a NumPy array.'
            ) from error
        of_model = " (of a model those that `eqx.partition` finds)" * callable(value)
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
    # Of no weak type: that of a Python number would be compiled apart.
    kind = value.dtype if jnp.issubdtype(value.dtype, jnp.floating) else float
    return jnp.asarray(value, kind)


def parted(start: PyTree, fixed: Iterable[str]) -> tuple[PyTree, dict]:
    """Those that are free, and the others."""
    if not jax.tree.leaves(start):
        raise ValueError(f"`start` holds no parameter, but {start!r}.")
    names = [fixed] if isinstance(fixed, str) else list(fixed)
    if not names:
        return start, {}
    if not isinstance(start, Mapping):
        raise ValueError(
            "`fixed` is for parameters with names, in a dictionary; of others make the "
            "lower and the upper bound equal."
        )
    check_names(names, start, "to be fixed")
    free = {k: value for k, value in start.items() if k not in names}
    if not free:
        raise ValueError("All parameters are fixed: there is nothing to fit.")
    return free, {k: start[k] for k in start if k in names}


def limits(bounds: Any, start: PyTree, kept: dict) -> Any:
    """`(lower, upper)` of those that are free, for a solver."""
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        if not isinstance(start, Mapping):
            raise ValueError(
                "`bounds` by names are for parameters in a dictionary: pass a pair "
                "`(lower, upper)`."
            )
        check_names(bounds, start, "to have bounds")
        for name, pair in bounds.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(
                    f"The bounds of {name!r} must be a pair `(lower, upper)`, but "
                    f"{pair!r} was given."
                )
        bounds = tuple({name: pair[k] for name, pair in bounds.items()} for k in (0, 1))
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            "`bounds` must be a dictionary `{name: (lower, upper)}`, or a pair "
            f"`(lower, upper)`, but {bounds!r} was given."
        )
    if isinstance(start, Mapping):
        bounds = tuple(
            {k: v for k, v in b.items() if k not in kept} if isinstance(b, Mapping) else b
            for b in bounds
        )
    else:
        bounds = tuple(_like(start, bound) for bound in bounds)
    return jax.tree.map(lambda b: _as_floats(b, "bounds"), tuple(bounds))


def _like(start: PyTree[Array], bound: Any) -> Any:
    """A list of bounds for an array of parameters, or an array for a list of numbers."""
    structure = jax.tree.structure(start)
    if isinstance(start, Array) and isinstance(bound, list | tuple):
        return np.asarray(bound)
    if isinstance(start, list | tuple) and np.shape(bound) == (structure.num_leaves,):
        return structure.unflatten(list(bound))
    return bound


class Values(NamedTuple):
    """y as it was given, and how it is to be read.

    - `many`: whether its leading axis is over data sets.
    - `axis_of_start`: of their starts, if each has its own.
    """

    tree: PyTree[Array]
    many: bool
    axis_of_start: int | None

    def of_one(self) -> PyTree[jax.ShapeDtypeStruct]:
        """What one data set looks like."""
        skip = int(self.many)
        return jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape[skip:], v.dtype), self.tree
        )

    def flat(self) -> Float[Array, "*sets m"]:
        """As numbers in a row, or in one for each data set."""
        return jax.vmap(flat)(self.tree) if self.many else flat(self.tree)


def several(curve: Curve, free: PyTree, kept: dict, x: PyTree, y: PyTree) -> Values:
    """y, and whether it is of several data sets."""
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
    given = jax.tree.map(lambda v: _wholly_missing(_as_array(v, "y")), y)
    structure, of_y = jax.tree.structure(given), [v.shape for v in jax.tree.leaves(given)]
    numbers = {shape[:1] for shape in of_y}
    of_one = structure, [shape[1:] for shape in of_y]
    if own_shapes == (structure, of_y):
        return _of_one_kind(called(free), Values(given, False, None))
    if len(numbers) == 1 and numbers != {()}:
        (number,) = numbers.pop()
        own = all(s.shape[:1] == (number,) for s in jax.tree.leaves(free))
        first = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), free)
        if of_one[1] == [()] and own_shapes == of_one:
            raise ValueError(
                f"`f(start, x)` is one number, and `y` has the shape {of_y[0]}: return a "
                "value for each, as by `jnp.broadcast_to`."
            )
        if own and shapes(first) == of_one:
            return _of_one_kind(called(first), Values(given, True, 0))
        if own_shapes == of_one:
            return _of_one_kind(called(free), Values(given, True, None))
    if failures:
        of_numpy = isinstance(failures[0], jax.errors.TracerArrayConversionError)
        about_types = isinstance(failures[0], TypeError | ValueError)
        if (is_own(failures[0]) or not about_types) and not of_numpy:
            raise failures[0]
        said = str(failures[0]).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            "`f` is called as `f(parameters, x)`, of JAX's operations, and failed: "
            f"{type(failures[0]).__name__}: {said}."
        ) from failures[0]
    raise ValueError(
        "`f(start, x)` must have the shapes of `y`, "
        f"{jax.tree.map(jnp.shape, given)}, but has "
        f"{jax.tree.map(lambda o: o.shape, called(free))}."
    )


def _of_one_kind(out: PyTree, values: Values) -> Values:
    """Both real, or both complex."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(values.tree), strict=True)
    for kinds in pairs:
        of_f, of_y = ("complex" if jnp.iscomplexobj(v) else "real" for v in kinds)
        if of_f != of_y:
            raise ValueError(
                f"`f(start, x)` is {of_f}, and `y` is {of_y}: both must be of one kind."
            )
    return values


def _wholly_missing(value: Array) -> Array:
    """Of a complex number of which one part is missing, the other is, too."""
    if not jnp.iscomplexobj(value):
        return value
    return jnp.where(jnp.isnan(value), jnp.nan * (1 + 1j), value)


def with_x(x: PyTree[Array], y: Values, nan_policy: str) -> tuple[PyTree, Values]:
    """The data without the points whose x is missing: these are missing in y."""
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
    lengths = {v.shape[int(y.many) :][:1] for v in jax.tree.leaves(y.tree)}
    lengths |= {
        value.shape[:1]
        for value, is_missing in zip(leaves, missing, strict=True)
        if is_missing
    }
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "`x` has a missing value (NaN), and its leading axis is not that of `y`: "
            "leave these points out."
        )
    rows = np.zeros(lengths.pop(), bool)
    for value, is_missing in zip(leaves, missing, strict=True):
        if is_missing:
            rows |= np.isnan(value).reshape(len(rows), -1).any(axis=1)
    # Any numbers at which `f` is finite, such as those of another point.
    other = int(np.argmin(rows))

    def filled(value, is_missing):
        return value.at[np.flatnonzero(rows)].set(value[other]) if is_missing else value

    leaves = [filled(*pair) for pair in zip(leaves, missing, strict=True)]
    at = (slice(None),) * y.many + (np.flatnonzero(rows),)

    def emptied(value):
        kind = value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else float
        return _wholly_missing(value.astype(kind).at[at].set(jnp.nan))

    return structure.unflatten(leaves), y._replace(tree=jax.tree.map(emptied, y.tree))


def errors_of_x(x: PyTree[Array], sigma_x: Any) -> tuple[PyTree, PyTree]:
    """The x's as floats, and the standard deviation of each; `None` of none."""
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
        raise ValueError(
            "`sigma_x` must be finite, and positive, or 0 for an x that is exact."
        )
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
    """The data, and which of it is of one data set."""
    y = values.flat()
    known = not isinstance(y, Tracer)
    numpy: Any = np if known else jnp  # in which each operation takes less
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
            raise ValueError("There is no data: all of `y` is missing, or it is empty.")
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
    """Of all points of a data set, or of each, or a factor of their covariance.

    - `are_own`: whether they are of each data set, on a leading axis.
    - `left_out`: which are infinite, if any may be.
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
    # Within a compiled function the arrays are traced even where `sigma` is a number.
    known = not isinstance(missing, Tracer) and not isinstance(numbers, Tracer)
    if known and not np.all(missing | (numbers > 0)):
        raise ValueError(
            "`sigma` must be positive at every point, and infinite for those that are to "
            "be left out."
        )
    infinite = np.isinf(numbers) if known else jnp.isinf(numbers)
    left_out = None if known and not np.any(infinite) else infinite
    return _Errors(jnp.where(missing | infinite, 1, numbers), are_own, left_out)


def _factor(sigma: Any, y: Array, values: Values, missing: Any) -> Array | None:
    """A lower triangular factor of a covariance; `None` of standard deviations. Missing
    points have neither row nor column: that of the identity, and no value."""
    m, shape = y.shape[-1], np.shape(sigma) if _is_array(sigma) else ()
    (of_y, *others) = [v.shape for v in jax.tree.leaves(values.of_one())]
    if shape != (m, m) or (not others and of_y == shape):
        return None
    # Of m data sets of m points each may have its deviations: those are no covariance.
    unclear = y.shape == shape
    are_traced = isinstance(sigma, Tracer) or isinstance(missing, Tracer)
    if are_traced and unclear:
        return None
    numpy: Any = jnp if are_traced else np
    given = numpy.asarray(sigma, y.dtype)
    # Data sets that miss the same points, or none, have one factor.
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
    raise ValueError(f"`sigma`, a covariance, must be {must}.")


def _deviations(sigma: Any, y: Array, values: Values) -> tuple[Array, bool]:
    """In the shapes of y, of one data set or of all; and whether each has its own."""
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
                    list(map(_broadcast, leaves, jax.tree.leaves(like)))
                )
                return Values(each, are_own, None).flat(), are_own
    raise ValueError(
        "`sigma` must be one number, have the shape of `y`, "
        f"{jax.tree.map(jnp.shape, tree)}, or be the {m} x {m} covariance, but has the "
        f"shape {jax.tree.map(jnp.shape, sigma)}."
    )


def _broadcast(sigma: Array, like: Any) -> Array:
    """The same of a real and an imaginary part."""
    sigma = jnp.broadcast_to(sigma, like.shape)
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    return jax.lax.complex(sigma, sigma) if is_complex else sigma


def _is_array(value: Any) -> bool:
    """Or what NumPy makes one of: no dictionary, and no model."""
    if isinstance(value, Tracer):
        return True
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:  # of arrays of different shapes
        return False
