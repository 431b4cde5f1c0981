"""Missing points, and the errors of x and y: checks, and their conversion to one
form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._common._checks import is_traced
from .._common._complex import check_real
from .._common._warn import warn
from ._arrays import as_floats, in_each_leaf
from ._curve import broadcast, Curve, Data, wholly_missing
from ._values import Values


def with_x(
    curve: Curve, start: PyTree, x: PyTree[Array], y: Values, nan_policy: str
) -> tuple[PyTree, Values]:
    """Mark points with a missing x as missing in y, and replace their x by that of
    another point.

    - `start`: the free parameters of one data set.
    """
    if is_traced(x):
        return x, y
    leaves, structure = jax.tree.flatten(x)
    floats = [k for k, v in enumerate(leaves) if jnp.issubdtype(v.dtype, jnp.inexact)]
    wrong = {k: flags for k in floats if np.any(flags := np.isnan(leaves[k]))}
    if not wrong:
        return x, y
    if nan_policy == "raise":
        raise ValueError(
            '`x` has a missing value (NaN): leave it out, or pass `nan_policy="omit"`.'
        )
    lengths = {v.shape[:1] for v in jax.tree.leaves(y.of_one())}
    lengths |= {flags.shape[:1] for flags in wrong.values()}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "`x` has a missing value (NaN), and its leading axis differs from `y`'s: "
            "leave these points out."
        )
    (shape,) = lengths
    rows = np.zeros(shape, bool)
    for flags in wrong.values():
        rows |= flags.reshape(len(rows), -1).any(axis=1)
    missing, other = np.flatnonzero(rows), int(np.argmin(rows))
    for k in wrong:
        leaves[k] = leaves[k].at[missing].set(leaves[k][other])

    def emptied(value):
        kind = value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else float
        at = (slice(None), missing) if y.many else missing
        return wholly_missing(value.astype(kind).at[at].set(jnp.nan))

    y = y._replace(tree=jax.tree.map(emptied, y.tree))
    filled, curve = structure.unflatten(leaves), curve.on(start, x)
    if is_traced((start, curve.fixed)):
        return filled, y
    outputs = (jax.tree.leaves(curve.values(start, each)) for each in (filled, x))
    for new, old in zip(*outputs, strict=True):
        if not np.array_equal(new[~rows], old[~rows], equal_nan=True):
            raise ValueError(
                "`x` has a missing value (NaN), which `f` also reads at other points, so "
                "that its point cannot be left out: fill it in, and set `y` to NaN at "
                "the points where `f` reads it."
            )
    return filled, y


def errors_of_x(x: PyTree[Array], sigma_x: Any, sigma: Any) -> tuple[PyTree, PyTree]:
    """Return x as floats and the standard deviation of each entry, if there are any."""
    if sigma_x is None:
        return x, None
    each = in_each_leaf(sigma_x, x)
    if jax.tree.structure(each) != jax.tree.structure(x):
        raise ValueError(
            "`sigma_x` must be one number, or have the structure of `x`, but "
            f"{sigma_x!r} was given."
        )
    x = jax.tree.map(lambda value: as_floats(value, "x"), x)
    errors = jax.tree.map(_error_of_x, x, each)
    if sigma is None:
        raise ValueError(
            "`sigma_x` needs `sigma`, because data do not determine the ratio of both "
            "errors: pass the standard deviations of `y`, too."
        )
    return x, errors


def _error_of_x(x: Array, given: Any) -> Array:
    check_real("`sigma_x`", given)
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
    """Return the data, and the axes of its fields over data sets, for `jax.vmap`, or
    `None` if it is one data set."""
    y = values.flat()
    are_traced = is_traced((y, sigma))
    numpy: Any = jnp if are_traced else np  # NumPy has less overhead per operation
    missing = numpy.isnan(y)
    if nan_policy == "raise" and are_traced:
        # A traced NaN cannot raise, but must not be left out.
        missing = numpy.zeros_like(missing)
    errors, are_own, left_out = _errors(sigma, y, values, missing)
    if surely(numpy.any(numpy.isinf(y) & ~left_out)):
        raise ValueError("`y` must be finite, but has an infinite value.")
    if nan_policy == "raise" and surely(numpy.any(missing & ~left_out)):
        raise ValueError(
            '`y` has a missing value (NaN): leave it out, or pass `nan_policy="omit"`.'
        )
    if surely(numpy.all(missing)):
        raise ValueError("There is no data: all of `y` is missing, or `y` is empty.")
    missing = missing | left_out
    if surely(missing.all()):
        raise ValueError("There is no data: all of `sigma` is infinite.")
    counted = jnp.asarray(~missing, y.dtype)
    if not surely(~missing.any()):
        y = jnp.where(missing, 0, y)
    data, of_sigma = Data(x, y, errors, counted, sigma_x), 0 if are_own else None
    axes: Any = Data(None, 0, of_sigma, 0, spread=0, steps=0)  # type: ignore
    return data, axes if values.many else None


def surely(condition: Any) -> bool:
    """Whether a condition holds, as far as is known before the program runs."""
    return not isinstance(condition, Tracer) and bool(condition)


def _errors(
    sigma: Any, y: Float[Array, "*sets m"], values: Values, missing: Any
) -> tuple[Array, bool, Any]:
    """Return the standard deviations of y or a factor of the covariance, whether each
    data set has its own on a leading axis, and which standard deviations are infinite."""
    if sigma is None:
        return jnp.ones(y.shape[:-1], y.dtype), values.many, np.False_
    factor = _factor(sigma, y, values, missing)
    if factor is not None:
        return factor, factor.ndim == 3, np.False_
    numbers, are_own = _deviations(sigma, y, values)
    if values.many and not are_own:
        missing = missing.all(axis=0)
    # Inside a compiled function `numbers` is traced even if `sigma` is a plain number.
    numpy: Any = jnp if is_traced((missing, numbers)) else np
    if surely(~numpy.all(missing | (numbers > 0))):
        raise ValueError(
            "`sigma` must be positive at every point, and infinite at those to leave out."
        )
    left_out = numpy.isinf(numbers)
    return jnp.where(missing | left_out, 1, numbers), are_own, left_out


def _factor(sigma: Any, y: Array, values: Values, missing: Any) -> Array | None:
    """Return the Cholesky factor of a covariance, or `None` for standard deviations. The
    rows and columns of missing points are replaced by those of the identity."""
    m, shape = y.shape[-1], np.shape(sigma) if _is_array(sigma) else ()
    (of_y, *others) = [v.shape for v in jax.tree.leaves(values.of_one())]
    if shape not in ((m, m), (1, m, m)) or (not others and of_y == shape):
        return None
    if y.shape == shape:  # m data sets of m points
        _warn_of_covariance(sigma)
        return None
    check_real("`sigma`", sigma)
    are_traced = is_traced((sigma, missing))
    numpy: Any = jnp if are_traced else np
    # Data sets that miss the same points share one factor.
    if missing.ndim == 2 and not are_traced and np.all(missing == missing[:1]):
        missing = missing[0]
    unknown = missing[..., :, None] | missing[..., None, :]
    identity, given = numpy.eye(m, dtype=y.dtype), numpy.asarray(sigma, y.dtype)
    given = given.reshape(m, m)
    given = numpy.where(unknown, identity, given)
    factor = jnp.linalg.cholesky(jnp.asarray(given))
    if are_traced:
        return factor
    symmetric = np.all(np.isfinite(given)) and _is_symmetric(given)
    if symmetric and np.all(np.isfinite(factor)):
        # The part of each variance that the entries before do not determine.
        left, whole = (np.diagonal(x, 0, -2, -1) for x in (factor, given))
        if np.all(left**2 > 10 * np.finfo(given.dtype).eps * whole):
            return factor
        raise ValueError(
            "`sigma` is a covariance and must not be singular, but to rounding some "
            "points of y determine another one: leave out points that repeat others."
        )
    must = "positive definite" if symmetric else "symmetric and finite"
    if np.any(np.diagonal(np.asarray(sigma).reshape(m, m)) != np.diagonal(given)):
        must += f" in {given.dtype}: take other units of y, or double precision"
    raise ValueError(f"`sigma` is a covariance and must be {must}.")


def _warn_of_covariance(sigma: Any) -> None:
    """Warn if standard deviations of m data sets of m points could be a covariance."""
    if is_traced(sigma) or len(sigma) == 1:
        return
    given = np.asarray(sigma, float)
    if not (np.all(np.isfinite(given)) and _is_symmetric(given)):
        return
    if np.all(np.linalg.eigvalsh(given) > 0):
        warn(
            f"`sigma` of the shape {np.shape(sigma)} is read as the standard deviation "
            f"of each point of {len(sigma)} data sets: for a covariance that they share, "
            "pass `sigma[None]`."
        )


def _is_symmetric(matrix: np.ndarray) -> bool:
    """Whether covariances are symmetric up to rounding, in units of their deviations."""
    deviations = np.sqrt(np.abs(np.diagonal(matrix, axis1=-2, axis2=-1)))
    units = deviations[..., :, None] * deviations[..., None, :]
    rounding = max(1e-8, 10 * float(np.finfo(matrix.dtype).eps))
    return np.allclose(matrix, np.swapaxes(matrix, -1, -2), atol=rounding * units)


def _deviations(sigma: Any, y: Array, values: Values) -> tuple[Array, bool]:
    """Return the standard deviations, flat, and whether each data set has its own."""
    tree, structure, m = values.tree, jax.tree.structure(values.tree), y.shape[-1]
    if _is_array(sigma):
        array = as_floats(sigma, "sigma").astype(y.dtype)
        if array.shape in (y.shape, (m,)):
            return array, values.many and array.shape == y.shape
        if array.ndim == 0 or structure == jax.tree.structure(0):
            sigma = jax.tree.map(lambda _: array, tree)
    if jax.tree.structure(sigma) == structure:
        leaves = [as_floats(s, "sigma").astype(y.dtype) for s in jax.tree.leaves(sigma)]
        ones = jax.tree.leaves(values.of_one())
        pairs = zip(leaves, ones, strict=True)
        are_own = any(s.shape not in ((), one.shape) for s, one in pairs)
        likes = jax.tree.leaves(tree) if are_own else ones
        each = zip(leaves, ones, likes, strict=True)
        if all(
            s.shape in ((), one.shape, like.shape)
            or (values.many and s.shape == _of_sets(like))
            for s, one, like in each
        ):
            whole = structure.unflatten(list(map(broadcast, leaves, likes)))
            return Values(whole, are_own).flat(), are_own
    one_for_all = "1 x " if y.shape == (m, m) else ""
    of_each = f"or {jax.tree.map(_of_sets, tree)} for one number of each data set, "
    of_each *= values.many
    order = " (of a dictionary in the order of the sorted keys)"
    order *= structure != jax.tree.structure(0)
    if any(map(jnp.iscomplexobj, jax.tree.leaves(tree))):
        order += " (with the real and the imaginary part of each point in turn)"
    raise ValueError(
        "`sigma` must be one number, have the shape of `y`, "
        f"{jax.tree.map(jnp.shape, tree)}, {of_each}or be the {one_for_all}{m} x {m} "
        f"covariance of the flattened `y`{order}, but has the "
        f"shape {jax.tree.map(jnp.shape, sigma)}."
    )


def _of_sets(y: Array) -> tuple[int, ...]:
    """Return the shape that holds one number for each data set."""
    return (*y.shape[:1], *(1,) * (y.ndim - 1))


def _is_array(value: Any) -> bool:
    """Whether NumPy can convert a value to an array of numbers."""
    if isinstance(value, Tracer):
        return True
    try:
        kind = np.asarray(value).dtype.kind
    except ValueError:  # a list of arrays of different shapes
        return False
    # An array of Python objects is refused later.
    return kind in "biufc" or (kind == "O" and hasattr(value, "dtype"))
