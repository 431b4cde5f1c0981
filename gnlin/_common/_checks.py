"""Checks of hyperparameters, made when a solver is constructed.

Traced values pass, since they are not known before the program runs. A schedule is not a
number: where one is allowed, test for it before calling these.
"""

import difflib
import dis
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Key, PyTree, ScalarLike


# Of more names than the first number, an error lists at most the second number, which are
# like the one that was given.
_MOST_NAMES, _FEW_NAMES = 20, 5


def as_scalar(value):
    """Convert a number to a 0-dimensional NumPy array, which equinox traces, so that a
    solver with another number is not compiled again. Return anything else unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return np.asarray(value, float) if is_number else value


def to_jax(value: Any) -> Array:
    """Return an array of JAX's. Whole numbers that exceed its integer types, which would
    wrap, become floats, and NumPy's arrays may have any byte order."""
    if isinstance(value, np.ndarray | np.generic):
        value = as_jax_reads(np.asanyarray(value))  # JAX refuses masked arrays
    try:
        return jnp.asarray(value)
    except OverflowError:
        return jnp.asarray(value, float)


def as_jax_reads(value: np.ndarray) -> np.ndarray:
    """Return an array of NumPy that JAX can read without loss, as in `to_jax`; it is
    copied only if it must change."""
    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    if value.dtype.kind in "iu":
        kind = jax.dtypes.canonicalize_dtype(value.dtype)
        if kind != value.dtype and value.size > 0:
            info, ends = np.iinfo(kind), (value.min(), value.max())  # makes no copy
            fits = info.min <= ends[0] and ends[1] <= info.max
            value = value if fits else value.astype(float)
    return value


def as_float(period: ScalarLike) -> ScalarLike:
    """Convert a Python integer, which may exceed JAX's integer types, to a float."""
    return float(period) if isinstance(period, int) else period


def is_zero(value: Any) -> bool:
    """Whether a value is a number that is zero in every run."""
    is_known = isinstance(value, int | float | np.ndarray | np.generic)
    return bool(is_known and np.ndim(value) == 0 and value == 0)


def unless_zero(damping: Any) -> Any:
    """Convert a damping as `as_scalar` does, but zero to a Python number, which equinox
    does not trace, because without damping a problem may have to be solved otherwise."""
    return 0.0 if is_zero(damping) else as_scalar(damping)


def is_traced(tree: PyTree) -> bool:
    """Whether any leaf is traced."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _check(name: str, value: Any, holds: Callable[[np.ndarray], Any], what: str) -> None:
    """Raise unless a condition holds for a number, or for each number of an array."""
    if isinstance(value, Tracer):
        return
    # A Python integer may be too large for NumPy's integer types, but not for a float.
    number = np.asarray(float(value) if type(value) is int else value)
    if number.dtype.kind not in "iuf" or isinstance(value, list | tuple):
        hint = (
            ": a schedule may be the damping of `DampedGaussNewton` or of "
            "`TruncatedGaussNewton`, the period or learning rate of "
            "`IterativeLinearisation`, or be inside an `optimiser`, `optax.sgd(schedule)`"
        ) * inspect.isroutine(value)
        if inspect.isclass(value):
            hint = f": call it, `{value.__name__}(...)`"
        raise ValueError(
            f"`{name}` must be a real number, but {value!r} was given{hint}."
        )
    if not np.all(holds(number)):
        what = "not be NaN" if np.any(np.isnan(number)) else what
        raise ValueError(f"`{name}` must {what}, but {value} was given.")


def _checks_that(
    what: str, holds: Callable[[np.ndarray], Any]
) -> Callable[[str, Any], None]:
    return lambda name, value: _check(name, value, holds, what)


_check_finite = _checks_that("be finite", np.isfinite)
check_positive = _checks_that("be greater than 0", lambda x: x > 0)
check_nonnegative = _checks_that("not be negative", lambda x: x >= 0)
check_fraction = _checks_that("lie strictly between 0 and 1", lambda x: (x > 0) & (x < 1))
check_less_than_one = _checks_that(
    "be at least 0 and less than 1", lambda x: (x >= 0) & (x < 1)
)
check_up_to_one = _checks_that("be above 0 and at most 1", lambda x: (x > 0) & (x <= 1))
check_share = _checks_that("be between 0 and 1", lambda x: (x >= 0) & (x <= 1))
check_exponent = _checks_that("be above 1 and at most 2", lambda x: (x > 1) & (x <= 2))
check_period = _checks_that(
    "be a whole number of at least 1, or `math.inf`",
    lambda x: (x >= 1) & (x == np.floor(x)),
)


def check_finite_positive(name: str, value: Any) -> None:
    check_positive(name, value)
    _check_finite(name, value)


def check_finite_nonnegative(name: str, value: Any) -> None:
    check_nonnegative(name, value)
    _check_finite(name, value)


def check_scalar(name: str, value) -> None:
    """Raise unless a value is one number, traced or not."""
    if callable(value) or np.ndim(value) != 0 or isinstance(value, str | bool):
        raise ValueError(f"`{name}` must be one number, but {value!r} was given.")


# The most characters of a value that an error repeats.
_LONGEST = 60


def check_callable(name: str, value: object, what: str, example: str) -> None:
    if not callable(value):
        raise ValueError(
            f"`{name}` must be {what}, such as `{example}`, but {shown(value)} was given."
        )


def shown(value: object) -> str:
    """Return a value in words, without the numbers of an array."""
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array of {value.dtype} of the shape {value.shape}"
    words = repr(value)
    return words if len(words) <= _LONGEST else f"a {type(value).__name__}"


def one_array(name: str, given: Any, dtype: Any = None) -> np.ndarray:
    """Return a NumPy array of a number or of an array; refuse a tree of arrays."""
    try:
        array = np.asarray(given, dtype)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.dtype == object:
        hint = ": join several arrays, and those of y, into one by `jnp.concatenate`"
        raise ValueError(
            f"{name} must be a number, or one array of numbers, but {shown(given)} was "
            f"given{hint * isinstance(given, Mapping)}."
        )
    return array


def check_takes(call: str, fn: Callable, number: int, hint: str = "") -> None:
    """Raise `ValueError` unless a function takes this number of arguments.

    - `call`: how it is called, such as "augment(inputs, key)".
    - `hint`: ends the sentence.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # as of some built-in functions
        return
    try:
        signature.bind(*[None] * number)
    except TypeError as error:
        raise ValueError(
            f"The function is called as `{call}`, but its arguments are {signature}"
            f"{hint}."
        ) from error


def check_one_of(
    name: str, value: object, choices: Sequence[str], hint: str = ""
) -> None:
    """Raise unless a value is one of several strings. `hint` ends the sentence."""
    if not isinstance(value, str) or value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        known = f"{', '.join(others)} or {last}"
        raise ValueError(f"`{name}` must be {known}, but {value!r} was given{hint}.")


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(name: str, value) -> None:
    """Raise unless a value is a whole number of at least 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, but {value!r} was given."
        )


def check_whole(name: str, value) -> None:
    if not is_whole(value):
        raise ValueError(f"`{name}` must be a whole number, but {value!r} was given.")


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise unless all names are known. `what` completes "there is no parameter", as in
    "to be fixed"."""
    known = list(known)
    for name in names:
        if name not in known:
            near, others = known, "the parameters are"
            if len(known) > _MOST_NAMES:
                near = difflib.get_close_matches(str(name), map(str, known), _FEW_NAMES)
                near, others = near or known[:_FEW_NAMES], "there are"
            listed = ", ".join(map(repr, near)) + " and others" * (near is not known)
            raise ValueError(f"There is no parameter {name!r} {what}: {others} {listed}.")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be `True` or `False`, but {value!r} was given.")


def is_key(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_key(key: Any) -> Key[Array, ""]:
    """Return a key of JAX's new style, also from `jax.random.PRNGKey`; raise unless it is
    one key."""
    if eqx.is_array(key) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)
    if not is_key(key) or key.shape != ():
        is_array = isinstance(key, jax.Array | np.ndarray)
        shown = f"{key.dtype}{list(key.shape)}" if is_array else repr(key)
        raise ValueError(
            f"`key` must be one key, such as `jax.random.key(0)`, but {shown} was given."
        )
    return key


#
# Checks inside a program, of numbers that may be traced
#


def nonnegative(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) >= 0) & jnp.isfinite(x)


def positive(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) > 0) & jnp.isfinite(x)


def fraction(x: ScalarLike) -> Bool[Array, ""]:
    return (jnp.asarray(x) > 0) & (jnp.asarray(x) < 1)


def nan_unless(sound: Bool[Array, ""], value: ScalarLike) -> Array:
    """Return NaN in place of an invalid number, so that the run ends as not finite rather
    than as successful."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(float)
    return jnp.where(sound, value, jnp.asarray(jnp.nan, value.dtype))


#
# Errors for derivatives that do not exist
#

_INSTEAD = (
    "differentiate the minimum, by `optimistix.least_squares(..., "
    "adjoint=gnlin.methods.ImplicitAdjoint())`"
)
_BACKWARDS = (
    "The number of these steps is not known in advance, so that there is no reverse-mode "
    f"derivative through them: use `jax.jvp` or `jax.jacfwd`, or {_INSTEAD}."
)
_STOPPED_EARLY = (
    "Conjugate gradients that stop early have no derivative: use a solver or a `method` "
    f"that solves the linearised problem exactly, or {_INSTEAD}."
)


def forwards_only(x: PyTree) -> PyTree:
    """Return the result of a loop of unknown length; raise in reverse mode."""
    return eqxi.nondifferentiable_backward(x, msg=_BACKWARDS)


def stopped_early(x: PyTree) -> PyTree:
    """Return an input of conjugate gradients that stop early; raise if differentiated."""
    return eqxi.nondifferentiable(x, msg=_STOPPED_EARLY)


_RAISE = dis.opmap["RAISE_VARARGS"]
# Packages that raise errors about mismatched shapes or types.
_LIBRARIES = frozenset(
    {"beartype", "equinox", "gnlin", "jax", "jaxlib", "jaxtyping", "numpy"}
)


# What JAX raises for `np.exp`, `float` or a Python `if` on traced arrays
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_own(error: Exception) -> bool:
    """Whether an error from a user's function should be passed on unchanged.

    This holds if a `raise` statement of the user's code raised it, rather than a library
    or an operation on the function's arguments. It also holds for JAX's own kinds of
    errors, except where an array's value is missing, which `first_line` explains. An
    error without a message explains nothing.
    """
    if isinstance(error, _NEEDS_A_VALUE) or not str(error):
        return False
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


def explains_itself(error: Exception) -> bool:
    """Whether an error from a user's function should be passed on unchanged: it is the
    user's own, or not about what the function was called with."""
    kinds = TypeError, ValueError, *_NEEDS_A_VALUE
    return is_own(error) or not isinstance(error, kinds)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop, or its kind if
    it has none; or what to do where JAX has no value, or no derivative."""
    is_if = "truth value of an array" in str(error)
    if isinstance(error, _NEEDS_A_VALUE) or is_if:
        return (
            "it needs the value of an array, which JAX does not have while it traces: "
            "use JAX's operations, such as `jnp.exp` for `np.exp` or `math.exp`, leave "
            "`float` out, and for a Python `if` use `jnp.where` or `jax.lax.cond`"
        )
    if re.search(r"(-valued inputs .* got|primal dtype) (u?int|bool)", str(error)):
        return "it differentiates by whole numbers, which must be floats"
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def import_pyplot(name: str) -> Any:
    """Return `matplotlib.pyplot`, which the function `name` needs."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"`{name}` needs matplotlib: install it with `pip install matplotlib`."
        ) from error
    return plt


def says_where(module: str, **instead: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which says what to use `instead` of a name that
    the module no longer has."""

    def missing(name: str) -> Any:
        hint = f": {instead[name]}." if name in instead else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return missing
