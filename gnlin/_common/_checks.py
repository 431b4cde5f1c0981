"""Checks of hyperparameters: one sentence each, raised when a solver is built.

A traced value cannot be looked at before the program runs, and passes. A schedule is to
be asked about first, where one may be: it is no number.
"""

import dis
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.core import Tracer
from jaxtyping import Array, Bool, Key, PyTree, ScalarLike


def as_scalar(value):
    """A number as a 0-dimensional NumPy array, anything else (an array, a traced value,
    a schedule) as it is: equinox traces arrays, so that another number of the same
    solver does not compile again."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return np.asarray(value, float) if is_number else value


def as_float(period: ScalarLike) -> ScalarLike:
    # A Python integer may be too large for JAX's integers, but never for a float.
    return float(period) if isinstance(period, int) else period


def is_traced(tree: PyTree) -> bool:
    """Whether any of its numbers is not known before a program runs."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _known(value: object) -> bool:
    return not isinstance(value, Tracer)


def _real(name: str, value: Any) -> np.ndarray:
    # A Python integer may be too large for NumPy's, but not for a float.
    number = np.asarray(float(value) if type(value) is int else value)
    if number.dtype.kind not in "iuf" or isinstance(value, list | tuple):
        raise ValueError(f"`{name}` must be a real number, but {value!r} was given.")
    return number


def check_positive(name: str, value) -> None:
    if _known(value) and not np.all(_real(name, value) > 0):
        raise ValueError(f"`{name}` must be greater than 0, but {value} was given.")


def check_callable(name: str, value: object, what: str, example: str) -> None:
    if not callable(value):
        raise ValueError(
            f"`{name}` must be {what}, such as `{example}`, but {value!r} was given."
        )


def check_search(search: object, *also: type) -> None:
    known = isinstance(search, (optx.AbstractSearch, type(None), *also))
    if not (known or (isinstance(search, str) and search == "auto")):
        raise ValueError(
            "`search` must be one of optimistix's, such as "
            "`optimistix.BacktrackingArmijo()`, a `gnlin.methods.GridSearch`, or `None`, "
            f"but {search!r} was given."
        )


def check_nonnegative(name: str, value) -> None:
    if _known(value) and not np.all(_real(name, value) >= 0):
        raise ValueError(f"`{name}` must not be negative, but {value} was given.")


def check_finite_nonnegative(name: str, value) -> None:
    check_nonnegative(name, value)
    if _known(value) and not np.all(np.isfinite(_real(name, value))):
        raise ValueError(f"`{name}` must be finite, but {value} was given.")


def check_finite_positive(name: str, value) -> None:
    check_positive(name, value)
    if _known(value) and not np.all(np.isfinite(_real(name, value))):
        raise ValueError(f"`{name}` must be finite, but {value} was given.")


def check_scalar(name: str, value) -> None:
    """One number, and no schedule; traced or not."""
    if callable(value) or np.ndim(value) != 0 or isinstance(value, str | bool):
        raise ValueError(f"`{name}` must be one number, but {value!r} was given.")


def check_fraction(name: str, value) -> None:
    """Strictly between 0 and 1."""
    if _known(value):
        number = _real(name, value)
        if not np.all((number > 0) & (number < 1)):
            raise ValueError(
                f"`{name}` must lie strictly between 0 and 1, but {value} was given."
            )


def check_between(name: str, value, least: float, most: float) -> None:
    if _known(value):
        number = _real(name, value)
        if not np.all((number >= least) & (number <= most)):
            raise ValueError(
                f"`{name}` must lie between {least:g} and {most:g}, but {value} was "
                "given."
            )


def check_less_than_one(name: str, value) -> None:
    """Zero included, one not."""
    if _known(value):
        number = _real(name, value)
        if not np.all((number >= 0) & (number < 1)):
            raise ValueError(
                f"`{name}` must be at least 0 and less than 1, but {value} was given."
            )


def check_range(name: str, value, above: float, most: float) -> None:
    """Above one number, and at most another."""
    if _known(value):
        number = _real(name, value)
        if not np.all((number > above) & (number <= most)):
            raise ValueError(
                f"`{name}` must be above {above:g} and at most {most:g}, but {value} was "
                "given."
            )


def check_period(name: str, value) -> None:
    """A whole number of at least 1, or infinity."""
    if _known(value):
        number = _real(name, value)
        if not np.all((number >= 1) & (number == np.floor(number))):
            raise ValueError(
                f"`{name}` must be a whole number of at least 1, or `math.inf`, but "
                f"{value} was given."
            )


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(name: str, value) -> None:
    """A whole number of at least 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, but {value!r} was given."
        )


def check_whole(name: str, value) -> None:
    if not is_whole(value):
        raise ValueError(f"`{name}` must be a whole number, but {value!r} was given.")


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """`what` they would be for, as in "to be fixed"."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(
                f"There is no parameter {name!r} {what}, but "
                f"{', '.join(map(repr, known))}."
            )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be `True` or `False`, but {value!r} was given.")


def is_key(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_key(key: Any) -> Key[Array, ""]:
    """One key, of the new style."""
    if eqx.is_array(key) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)  # as of `jax.random.PRNGKey`
    if not is_key(key) or key.shape != ():
        is_array = isinstance(key, jax.Array | np.ndarray)
        shown = f"{key.dtype}{list(key.shape)}" if is_array else repr(key)
        raise ValueError(
            f"`key` must be one key, such as `jax.random.key(0)`, but {shown} was given."
        )
    return key


#
# The same inside a program, where a number is not known until it runs
#


def nonnegative(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) >= 0) & jnp.isfinite(x)


def positive(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) > 0) & jnp.isfinite(x)


def fraction(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) > 0) & (jnp.asarray(x) < 1)


def nan_unless(sound: Bool[Array, ""], value: ScalarLike) -> Array:
    """NaN in place of a number that cannot be meant: the run then ends as not finite, and
    not as if it had found something."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(float)
    return jnp.where(sound, value, jnp.asarray(jnp.nan, value.dtype))


#
# Derivatives that there are none of
#

_INSTEAD = (
    "differentiate the minimum, by `optimistix.least_squares(..., "
    "adjoint=gnlin.methods.ImplicitAdjoint())`"
)
_BACKWARDS = (
    "The number of these steps is known only when they are made, so that there is no "
    f"reverse-mode derivative through them: use `jax.jvp` or `jax.jacfwd`, or {_INSTEAD}."
)
_STOPPED_EARLY = (
    "Conjugate gradients that stop early have no derivative: use a solver or a `method` "
    f"that solves the linearised problem exactly, or {_INSTEAD}."
)


def forwards_only(x: PyTree) -> PyTree:
    """What a loop of unknown length ends with: an error in reverse mode."""
    return eqxi.nondifferentiable_backward(x, msg=_BACKWARDS)


def stopped_early(x: PyTree) -> PyTree:
    """What conjugate gradients solve not quite: an error where it is differentiated."""
    return eqxi.nondifferentiable(x, msg=_STOPPED_EARLY)


_RAISE = dis.opmap["RAISE_VARARGS"]
# Packages in whose frames an error ends that says that shapes or types do not match.
_LIBRARIES = frozenset(
    {"beartype", "equinox", "gnlin", "jax", "jaxlib", "jaxtyping", "numpy"}
)


def is_own(error: Exception) -> bool:
    """Whether an error from a user's function is to be passed on as it is.

    That is so if a `raise` of the user's code made it, and not a library that was called
    there, nor an operation on what the function was given. It is also so of JAX's own
    kinds of errors, such as of `np.exp` where `jnp.exp` is meant: they explain
    themselves.
    """
    if type(error).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
    return raised and module.partition(".")[0] not in _LIBRARIES
