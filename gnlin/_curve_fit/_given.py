"""What a user gives for a fit, checked and in one form."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._checks import check_names
from ._program import Curve, Data, flat


def as_start(value: Any) -> Array:
    """One of the parameters, a number or an array."""
    value = _as_floats(value, "start")
    if not isinstance(value, Tracer) and not np.all(np.isfinite(value)):
        raise ValueError(f"`start` must be finite, but {value} was given.")
    return value


def _as_floats(value: Any, name: str) -> Array:
    try:
        value = jnp.asarray(value)
    except TypeError as error:
        raise ValueError(
            f"`{name}` must hold numbers or arrays, but {value!r} was given."
        ) from error
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ValueError(
            f"`{name}` must be real: fit real and imaginary parts as two parameters."
        )
    # Of no weak type: that of a Python number would be compiled apart.
    kind = value.dtype if jnp.issubdtype(value.dtype, jnp.floating) else float
    return jnp.asarray(value, kind)


def parted(start: PyTree, fixed: Iterable[str]) -> tuple[PyTree, dict]:
    """Those that are free, and the others."""
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
    return jax.tree.map(lambda b: _as_floats(b, "bounds"), tuple(bounds))


def several(
    curve: Curve, free: PyTree, kept: dict, x: PyTree, y: PyTree
) -> tuple[Array, int | None]:
    """y as numbers in a row, or in one for each data set; and the axis of their starts,
    if each has its own."""
    given = jnp.asarray(y) if isinstance(y, list | tuple | float | int) else y
    given = jax.tree.map(jnp.asarray, given)

    failures: list[Exception] = []

    def called(free):  # `f` itself, which is then not traced for each call
        return jax.eval_shape(curve.f, curve.merged(free, kept), x)

    def shapes(free):
        try:
            out = called(free)
        except Exception as error:
            failures.append(error)
            return None
        return jax.tree.structure(out), [o.shape for o in jax.tree.leaves(out)]

    structure, of_y = jax.tree.structure(given), [v.shape for v in jax.tree.leaves(given)]
    if shapes(free) == (structure, of_y):
        return flat(given), None
    numbers = {shape[:1] for shape in of_y}
    of_one = structure, [shape[1:] for shape in of_y]
    if len(numbers) == 1 and numbers != {()}:
        (number,) = numbers.pop()
        own = all(s.shape[:1] == (number,) for s in jax.tree.leaves(free))
        first = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), free)
        if own and shapes(first) == of_one:
            return jax.vmap(flat)(given), 0
        if shapes(free) == of_one:
            return jax.vmap(flat)(given), None
    if failures:
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
    x: PyTree, y: Float[Array, "*sets m"], sigma: Any, sigma_x: PyTree, nan_policy: str
) -> tuple[Data, Any]:
    """The data, and which of it is of one data set."""
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
    counted = jnp.asarray(numpy.where(missing, 0, 1), y.dtype)
    errors = _errors(sigma, y)
    covariance = _is_covariance(errors, y)
    if covariance and known and np.any(missing):
        raise ValueError(
            "With a covariance as `sigma` no value of `y` may be missing: leave its row "
            "and column out."
        )
    if not known or np.any(missing):
        y = jnp.where(missing, 0, y)
    data: Any = Data(x, y, errors, counted, sigma_x)
    if y.ndim == 1:
        return data, Data(None, None, None, None)  # type: ignore[arg-type]
    own = sigma is None or (errors.ndim == 2 and not covariance)
    return data, Data(None, 0, 0 if own else None, 0)  # type: ignore[arg-type]


def _is_covariance(errors: Any, y: Array) -> bool:
    m = y.shape[-1]
    return errors.shape == (m, m) and y.shape != (m, m)


def _errors(sigma: Any, y: Float[Array, "*sets m"]) -> Array:
    """One of all points, or of each, or a factor of their covariance."""
    if sigma is None:
        return jnp.ones(y.shape[:-1], y.dtype)
    known, m = not isinstance(sigma, Tracer), y.shape[-1]
    given: Any = np.asarray(sigma, y.dtype) if known else sigma
    if _is_covariance(given, y):
        if known and not (np.all(np.isfinite(given)) and np.allclose(given, given.T)):
            raise ValueError("`sigma`, a covariance, must be symmetric and finite.")
        factor = jnp.linalg.cholesky(jnp.asarray(given))
        if known and not bool(jnp.all(jnp.isfinite(factor))):
            raise ValueError("`sigma`, a covariance, must be positive definite.")
        return factor
    if known and not np.all((given > 0) & np.isfinite(given)):
        raise ValueError("`sigma` must be positive and finite, at every point.")
    each = jnp.asarray(given)
    if each.shape in ((), (m,), y.shape):
        return jnp.broadcast_to(each, y.shape if each.ndim == 2 else (m,))
    if each.size == m:  # of values in more than one axis
        return each.reshape(m)
    raise ValueError(
        f"`sigma` must be one number, have the shape of `y`, or be the {m} x {m} "
        f"covariance, but has the shape {each.shape}."
    )
