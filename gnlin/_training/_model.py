"""Models as functions of their trainable parameters."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, PyTree

from .._common._canonical import canonical, of_one_example, read_by
from .._common._checks import explains_itself, first_line
from .._common._convolutions import channels_last
from .._common._precision import full_precision
from .._jacobian import PerExample
from .._linearisation._admitted import check_parameters
from ._data import a_kind_of


_INSIDE = (
    "The model is inside a transformation, such as `jax.vmap`: pass the model itself, "
    "which is called on one example."
)
_HALF = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


class Frozen(eqx.Module):
    """The part of a model that is not trained."""

    rest: PyTree
    # Original dtypes of the parameters. Half precision is trained in single precision,
    # because rounding would hide the progress of a step. All that the model computes with
    # is then converted too, because convolutions do not mix dtypes.
    dtypes: tuple[np.dtype, ...] = eqx.field(static=True)
    fn: Callable | None  # None unless the model is a pair `(fn, parameters)`
    of_state: tuple[Any, ...] = eqx.field(static=True, default=())
    # Which leaves of the model are trained
    trained: tuple[bool, ...] = eqx.field(static=True, default=())
    # Values that functions read from outside; another value compiles a new program
    read: tuple = eqx.field(static=True, default=())

    def with_parameters(self, parameters: PyTree) -> PyTree:
        """Return the model with `parameters` in their original dtypes."""
        return self._model(_in_dtypes(parameters, self.dtypes), self.rest)

    def with_state(self, state: PyTree) -> PyTree:
        """Return the model's state in its original dtypes."""
        return _in_dtypes(state, self.of_state)

    def in_training(self, parameters: PyTree) -> PyTree:
        """Return the model with `parameters` in the dtypes in which they are trained."""
        return self._model(parameters, in_single(self.rest))

    def _model(self, parameters: PyTree, rest: PyTree) -> PyTree:
        model = eqx.combine(parameters, rest)
        return model if self.fn is None else (self.fn, model)


def partition(
    model: PyTree, filter_spec: PyTree | Callable[[Any], bool], *, called: bool = True
) -> tuple[PyTree, Frozen]:
    """Split a model into (parameters, frozen) as `equinox.partition` does, with checks.
    `called` says whether the model itself is called on the input of one example; groups
    of residuals have their own functions instead."""
    fn, trained = model if called and _is_pair(model) else (None, model)
    if fn is not None or not called:
        trained = _with_arrays(trained)
    instead = _instead(model, called)
    if instead or (called and fn is None and not callable(model)):
        kind = "a pytree of arrays"
        if called:
            kind = (
                "callable on one example's input, or a pair `(fn, parameters)` with "
                "`fn(parameters, x)`"
            )
        raise ValueError(
            f"The model must be {kind}, but {a_kind_of(model)} was given{instead}."
        )
    try:
        parameters, rest = eqx.partition(trained, filter_spec)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`filter_spec` must be a function of a leaf, or booleans in the structure of "
            f"the model, but {filter_spec!r} was given."
        ) from error
    leaves = [leaf for leaf in jax.tree.leaves(parameters) if eqx.is_array(leaf)]
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError(_why_nothing_is_trained(model, trained, filter_spec))
    if len(leaves) < len(jax.tree.leaves(parameters)):
        raise ValueError(
            "`filter_spec` selects leaves of the model that are not arrays, which cannot "
            "be trained: for a whole part write `equinox.is_inexact_array`, not `True`."
        )
    if filter_spec is eqx.is_inexact_array:
        _warn_of_whole_numbers(trained)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    parameters = in_single(parameters)
    check_parameters(parameters)
    with_path = jax.tree_util.tree_leaves_with_path
    places = {path for path, _ in with_path(parameters)}
    among = tuple(path in places for path, _ in with_path(trained))
    read = read_by(jax.tree.leaves((rest, fn)))
    return parameters, Frozen(rest, dtypes, fn, trained=among, read=read)


def _why_nothing_is_trained(model: Any, trained: PyTree, filter_spec: Any) -> str:
    if inspect.isroutine(model):
        if any(map(eqx.is_array, jax.tree.leaves(inspect.unwrap(model)))):
            return _INSIDE
        return (
            "A plain function has no trainable array: pass it with its parameters, as a "
            "pair `(fn, parameters)` with `fn(parameters, x)`."
        )
    given = jax.tree.leaves(trained)
    if any(isinstance(x, float) for x in given) and not any(map(eqx.is_array, given)):
        return (
            "The model has Python floats, but no trainable array: convert those that are "
            "to be trained to arrays, for example by `jnp.asarray`."
        )
    arrays = [x for x in given if eqx.is_array_like(x) and not callable(x)]
    if arrays and filter_spec is eqx.is_inexact_array:
        return (
            "The model has no trainable array, because its arrays have the dtype "
            f"{jnp.asarray(arrays[0]).dtype}: convert them by `.astype(float)`."
        )
    return "The model has no trainable array: `filter_spec` selects none of its leaves."


def _instead(model: Any, called: bool) -> str:
    """Return what to pass instead of what a run or a fit returns, or ""."""
    if isinstance(model, optx.Solution):
        return ": pass its `.value`"
    if not type(model).__module__.startswith("gnlin."):
        return ""
    if hasattr(model, "standard_errors"):  # a fit of curves
        of_curve = "`(f, fit.parameters)`, or use `fit.band` or `fit.derived`"
        return f": pass {of_curve if called else '`fit.parameters`'}"
    return ": pass `solution.model`" if hasattr(model, "history") else ""


def _with_arrays(parameters: PyTree) -> PyTree:
    """Convert Python floats in dictionaries, lists and tuples to arrays, so that they are
    trained, and integers too if all leaves are numbers. Numbers inside a module, such as
    the rate of dropout, are left alone."""
    of_path = jax.tree_util.tree_flatten_with_path(parameters)[0]
    plain = jax.tree_util.DictKey, jax.tree_util.SequenceKey
    numbers = all(_is_number(leaf) for _, leaf in of_path)

    def each(path, leaf):
        is_number = numbers or isinstance(leaf, float | np.floating)
        is_plain = all(isinstance(key, plain) for key in path)
        return jnp.asarray(leaf, float) if is_number and is_plain else leaf

    return jax.tree_util.tree_map_with_path(each, parameters)


def _warn_of_whole_numbers(trained: PyTree) -> None:
    """Warn if an entry of a dictionary holds whole numbers, which are not trained."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        plain = all(isinstance(key, jax.tree_util.DictKey) for key in path) and path
        is_number = not isinstance(leaf, bool) and eqx.is_array_like(leaf)
        whole = is_number and jnp.issubdtype(jnp.result_type(leaf), jnp.signedinteger)
        if plain and whole:
            holds = "holds whole numbers"
            how = "convert it by `.astype(float)`, or pass indices with the data"
            if jnp.ndim(leaf) == 0:
                holds, how = "is a whole number", "write it with a point, as 1.0 for 1"
            warnings.warn(
                f"The parameter {path[-1].key!r} {holds}, and is not trained; to train "
                f"it, {how}.",
                stacklevel=5,
            )


def _is_number(leaf: Any) -> bool:
    kinds = float | int | np.floating | np.integer
    return isinstance(leaf, kinds) and not isinstance(leaf, bool)


def _is_pair(model: Any) -> bool:
    pair = isinstance(model, tuple) and len(model) == 2 and not callable(model)
    return pair and callable(model[0]) and not inspect.isroutine(model[1])


def _function_of(model: Any) -> Callable:
    return functools.partial(*model) if _is_pair(model) else model


def in_single(tree: PyTree) -> PyTree:
    """Convert arrays in half precision to single precision."""
    is_half = lambda x: eqx.is_array(x) and x.dtype in _HALF
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def _in_dtypes(tree: PyTree, dtypes: tuple[Any, ...]) -> PyTree:
    """Undo `in_single` for leaves that had these dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, dtypes, strict=True)
    return structure.unflatten([x.astype(d) if d in _HALF else x for x, d in pairs])


def _called(model: Any, x: PyTree, *args, **kwargs) -> Any:
    """Call a model on one example's input, and explain its errors."""
    try:
        with full_precision():
            return _function_of(model)(x, *args, **kwargs)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if "wrapped with `filter_vmap`" in str(error):
            raise ValueError(_INSIDE) from error
        if kwargs.get("key") is None and _takes_key(model) and "key" in str(error):
            raise ValueError(
                "The model needs a `key`, for example for dropout, but has none here: "
                "pass `equinox.nn.inference_mode(model)`."
            ) from error
        if "requires a key" in str(error) and not _takes_key(model):
            raise ValueError(
                "The model has dropout but no argument `key`: define `__call__(self, x, "
                "key)`, and pass the key on."
            ) from error
        if explains_itself(error):
            raise
        remedy = (
            "; convert the inputs to the dtype of the model's parameters"
            if "dtypes" in str(error)
            else ""
        )
        raise ValueError(
            "The model is called on the input of one example, without the data's leading "
            f"axis, but on an input {_shapes(x)} it failed: {first_line(error)}{remedy}."
        ) from error


def checked(
    outputs: Any, must: str = "The model must return an array, or a pytree of arrays"
) -> PyTree[Array]:
    """Return outputs in at least single precision, in which the loss is computed; raise
    `ValueError` unless they are arrays."""
    leaves = jax.tree.leaves(outputs)
    if not leaves or not all(map(eqx.is_array_like, leaves)):
        raise ValueError(f"{must}, but returned {outputs!r}.")
    return in_single(outputs)


def _shapes(x: PyTree) -> str:
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    described = " and ".join(f"of shape {shape}" for shape in shapes)
    axis = " (for an axis over features pass `inputs[:, None]`)" if () in shapes else ""
    return described + axis


class Network(eqx.Module):
    """A model as a function of its parameters, a batch of inputs, keys and its state.

    Without state, examples are independent and the function is a [`gnlin.PerExample`][].
    With state, such as the statistics of batch normalisation, it is a function of the
    whole batch, and returns (outputs, new state).
    """

    frozen: Frozen
    takes_key: bool = eqx.field(static=True)
    has_state: bool = eqx.field(static=True)
    axis_name: str = eqx.field(static=True)
    part_size: int | None = eqx.field(static=True, default=None)
    program: Callable[[PyTree, tuple], PyTree[Array]] | None = None  # from `canonical`

    def function(self) -> Callable[[PyTree, Any], Any]:
        """Return `fn(parameters, args)`, where `args` is made by the method `args`."""
        if self.has_state:
            return eqx.Partial(_apply_with_state, self)
        return PerExample(self.program or eqx.Partial(_apply, self), self.part_size)

    def canonical(
        self, parameters: PyTree, inputs: PyTree, key: Array | None = None
    ) -> "Network":
        """Return an equivalent network, compared by what it computes from inputs of these
        shapes, so that redefining a model's functions causes no recompilation. `None`
        is a key of JAX's default kind."""
        if self.has_state:
            return self
        key = jax.random.key(0) if key is None else key
        example = of_one_example(inputs), key if self.takes_key else None
        program = canonical(eqx.Partial(_apply, self), parameters, example)
        return dataclasses.replace(self, frozen=Frozen(None, (), None), program=program)

    def args(self, inputs: PyTree, keys: Array | None, state: PyTree) -> tuple:
        return (inputs, keys, state) if self.has_state else (inputs, keys)

    def drawn(self, data: tuple, key: Array) -> tuple:
        """Return the examples of a step, which here are all of `data`."""
        return data

    def keywords(self, key: Array | None) -> dict[str, Array | None]:
        return {"key": key} if self.takes_key else {}


def is_of_model(fn: Callable) -> bool:
    """Whether `fn` was made by `Network.function`."""
    of_one = fn.fn if isinstance(fn, PerExample) else None
    return isinstance(of_one, eqx.Partial) and of_one.func is _apply


def make_network(
    model: PyTree,
    filter_spec: PyTree | Callable[[Any], bool],
    state: PyTree = None,
    axis_name: str = "batch",
    part_size: int | None = None,
) -> tuple[PyTree, Network]:
    """Return (parameters, network)."""
    if not isinstance(axis_name, str):
        raise ValueError(
            '`axis_name` must be the name of the batch\'s axis, such as "batch", but '
            f"{axis_name!r} was given."
        )
    if part_size is not None and state is not None:
        raise ValueError(
            "`part_size` is for independent examples, but the model's batch "
            "normalisation couples them: leave it out."
        )
    parameters, frozen = partition(model, filter_spec)
    if state is None and _has_state(model):
        raise ValueError(
            "The model has state, such as batch normalisation's: make it by "
            "`model, state = equinox.nn.make_with_state(Model)(...)` and pass `state` to "
            "`gnlin.fit`, `gnlin.solve` or `gnlin.TangentKernel`; or, to keep its "
            "statistics fixed, pass the pair `(lambda m, x: m(x, state)[0], "
            "equinox.nn.inference_mode(model))`."
        )
    if state is not None and not _has_state(model):
        raise ValueError("The model has no state: leave `state` out.")
    of_state = tuple(jnp.result_type(x) for x in jax.tree.leaves(state))
    frozen = dataclasses.replace(frozen, of_state=of_state)
    takes_key, has_state = _takes_key(model), state is not None
    return parameters, Network(frozen, takes_key, has_state, axis_name, part_size)


def in_inference(model: PyTree, state: PyTree) -> PyTree:
    """Return a model in inference mode; if it has a state, as a pair `(fn, parameters)`
    that has none."""
    model = eqx.nn.inference_mode(model)
    return model if state is None else (eqx.Partial(_with_state, in_single(state)), model)


def _with_state(state: PyTree, model: PyTree, x: PyTree) -> PyTree[Array]:
    return model(x, state, **({"key": None} if _takes_key(model) else {}))[0]


def _apply(network: Network, parameters: PyTree, example: tuple) -> PyTree[Array]:
    x, key = example
    model = network.frozen.in_training(parameters)
    return checked(_called(model, in_single(x), **network.keywords(key)))


def _apply_with_state(
    network: Network, parameters: PyTree, args: tuple
) -> tuple[PyTree[Array], PyTree]:
    inputs, keys, state = args
    model = network.frozen.in_training(parameters)

    def one(x, key, state):
        outputs, state = _called(model, in_single(x), state, **network.keywords(key))
        return checked(outputs), state

    batched = jax.vmap(
        one, axis_name=network.axis_name, in_axes=(0, 0, None), out_axes=(0, None)
    )
    try:
        return channels_last(batched)(inputs, keys, state)
    except NameError as error:  # JAX raises it for an unknown axis name
        if "axis name" not in str(error):
            raise
        raise ValueError(
            f"The model normalises over another axis than {network.axis_name!r}: pass "
            "its `axis_name`."
        ) from error


def _has_state(model: PyTree) -> bool:
    if _is_pair(model):  # its function handles any state
        return False
    index = lambda x: isinstance(x, eqx.nn.StateIndex)
    return any(map(index, jax.tree.leaves(model, is_leaf=index)))


def _takes_key(model: Any) -> bool:
    try:
        return "key" in inspect.signature(_function_of(model)).parameters
    except (TypeError, ValueError):
        return False
