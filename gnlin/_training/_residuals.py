"""Groups of residuals, each with its own function, examples and loss."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, ArrayLike, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_scalar,
    check_callable,
    check_finite_nonnegative,
    first_line,
    shown,
)
from .._jacobian import Sparsity
from .._linearisation._group_loss import objective_of
from .._linearisation._recognised import AbstractRecognised, Posed
from ..losses import (
    AbstractElementwiseLoss,
    AbstractLoss,
    SoftmaxCrossEntropy,
    SquaredError,
)
from ..losses._base import check_loss
from ._data import a_kind_of, as_arrays, leading_lengths, rows_not_finite
from ._group_network import GroupNetwork, of_groups


class Residuals(AbstractRecognised):
    r"""A group of residuals: a function of the model and one example, with its examples.

    The objective is the sum over groups of `weight` times the `loss` of the residuals of
    all examples. With squared error it is

    $$\sum_g w_g\,\tfrac12 \sum_n \lVert f_g(\theta, x_n)\rVert^2.$$

    A group can also be passed to `optimistix.least_squares` as the function, and several
    groups as [`gnlin.Groups`][]. The solvers of gnlin then see its examples and its loss.
    Other solvers see residuals such that half their sum of squares is the objective.

    **Arguments:**

    - `fn`: `fn(model, example)`, the residuals of one example: an array, or a pytree of
        arrays. It may differentiate the model with respect to its input. A complex array
        becomes a real one with the real and imaginary parts on a new last axis.
    - `data`: the examples, a pytree of arrays with a leading axis over examples; a data
        frame is a dictionary of its columns. They are converted to at least the
        parameters' precision, for derivatives with respect to them. In [`gnlin.fit`][],
        `data` may be a function `points(key)` that draws such arrays for each step, by
        `jax.random`: it is compiled, so NumPy's generators would return the same points
        in each step. They may have noise: the default solver then damps more after the
        first steps. Without data, `fn` returns all residuals at once: it is called as
        `fn(y, args)` with optimistix's `args`, or with `args=None` elsewhere, where it is
        a function of the model alone, such as a penalty.
    - `weight`: the weight of the group, finite and not negative; for example, a volume
        divided by the number of points.
    - `loss`: the loss of the residuals, [`gnlin.SquaredError`][] by default. It may be
        robust, such as [`gnlin.losses.Huber`][], or compare with `targets`, such as
        [`gnlin.SoftmaxCrossEntropy`][].
    - `select`: a function that says which parameters an example reads, if these are few.
        `select(example)` has the model's structure, and holds for each array the indices
        of the rows that are read (integers of any shape; an empty array for none). `fn`
        is called with these rows instead of the model. The Jacobian is then sparse, and
        products cost only its nonzero entries.
    - `sparsity`: a [`gnlin.Sparsity`][], for a group without data whose residuals each
        read few parameters.
    - `targets`: the targets of the loss: arrays with a leading axis over examples. The
        default is zeros; [`gnlin.SoftmaxCrossEntropy`][] needs targets. Those of complex
        residuals are complex.

    **Raises:** `ValueError` if there are no examples, or the weight is invalid; also if
    the solver is not gnlin's and the loss is neither squared nor robust.

    !!! example

        ```python
        robust = gnlin.Residuals(residuals, loss=gnlin.losses.Huber(0.1))
        solution = optx.least_squares(robust, gnlin.LevenbergMarquardt(), y0, args)
        ```

        ```python
        x = jnp.linspace(0, 1, 20)
        net = eqx.nn.MLP("scalar", "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        interior = gnlin.Residuals(lambda net, x: jax.grad(net)(x) + net(x), x)
        start = gnlin.Residuals(lambda net, x: net(x) - 1, jnp.zeros(1), weight=10.0)
        solution = gnlin.solve(net, {"interior": interior, "start": start})
        solution.history["loss/start"]
        ```
    """

    fn: Callable[[Any, Any], PyTree[Array]]
    data: Any = None
    weight: ScalarLike = eqx.field(default=1.0, converter=as_scalar, kw_only=True)
    loss: AbstractLoss = eqx.field(default=SquaredError(), kw_only=True)
    targets: PyTree[ArrayLike] = eqx.field(default=None, kw_only=True)
    select: Callable[[Any], PyTree[Array]] | None = eqx.field(default=None, kw_only=True)
    sparsity: Sparsity | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        if callable(self.data) and not callable(self.fn):
            raise ValueError(
                "The function comes before the data, `gnlin.Residuals(fn, data)`, but "
                f"{shown(self.fn)} was given as `fn`."
            )
        check_callable(
            "fn", self.fn, "a function of a model and one example", "lambda m, x: m(x)"
        )
        if self.select is not None:
            check_callable(
                "select", self.select, "a function of one example", "lambda x: x"
            )
            if self.data is None:
                raise ValueError(
                    "`select` is a function of one example, but there are no examples: "
                    "pass `data`, or leave `select` out."
                )
        if isinstance(self.data, Sparsity):
            raise ValueError(
                "A `gnlin.Sparsity` was given as the data: pass it as `sparsity=`."
            )
        if self.sparsity is not None:
            _check_sparsity(self.sparsity, self.data, self.loss)
        check_finite_nonnegative("weight", self.weight)
        check_loss(self.loss)
        needs_classes = isinstance(self.loss, SoftmaxCrossEntropy)
        if self.targets is None and needs_classes and not callable(self.data):
            raise ValueError(
                "The outputs of a `SoftmaxCrossEntropy` are compared with classes: pass "
                "`targets`."
            )

    def posed(self, y: PyTree[Array], args: Any) -> Posed:
        return Groups(self).posed(y, args)

    def hoisted(self, y: PyTree[Array], args: Any) -> "Groups":
        return Groups(self).hoisted(y, args)


def _check_sparsity(sparsity: Any, data: Any, loss: AbstractLoss) -> None:
    if not isinstance(sparsity, Sparsity):
        raise ValueError(
            "`sparsity` must be a `gnlin.Sparsity`, such as "
            f"`gnlin.Sparsity(fn, y, args)`, but {a_kind_of(sparsity)} was given."
        )
    if data is not None:
        raise ValueError(
            "`sparsity` is for a group without data: leave `data` out, or pass `select` "
            "to say what an example reads."
        )
    if not isinstance(loss, SquaredError | AbstractElementwiseLoss):
        raise ValueError(
            "With `sparsity` the loss must be a sum over residuals, squared or robust, "
            f"but {type(loss).__name__} was given."
        )


class Groups(AbstractRecognised):
    """Several groups of residuals as one function for `optimistix.least_squares`.

    The solvers of gnlin see each group's examples and loss. Other solvers see residuals
    such that half their sum of squares is the objective.

    **Arguments:**

    - `groups`: [`gnlin.Residuals`][] in a dictionary or a list, as for
        [`gnlin.solve`][]. Groups without data are called with optimistix's `args`.
        There is no auxiliary data: for `has_aux=True` pass
        `lambda y, args: (groups(y, args), aux)`.

    **Raises:** `ValueError` if `groups` is anything else; also if the solver is not
    gnlin's and a loss is neither squared nor robust.

    !!! example

        ```python
        penalty = gnlin.Residuals(lambda y, _: y, weight=1e-3)
        groups = gnlin.Groups([gnlin.Residuals(residuals), penalty])
        solution = optx.least_squares(groups, gnlin.LevenbergMarquardt(), y0, args)
        ```
    """

    groups: Any

    def __check_init__(self):
        if as_groups(self.groups) is None:
            raise ValueError(
                "`groups` must be `gnlin.Residuals` in a dictionary or a list, but "
                f"{a_kind_of(self.groups)} was given."
            )

    def posed(self, y: PyTree[Array], args: Any) -> Posed:
        network, inputs, targets, losses = self._network(y, args)
        outputs = eqx.filter_eval_shape(network.function(), y, inputs)
        losses.check(outputs, targets)
        objective = objective_of(losses, outputs, (inputs, targets, None))
        return network.function(), inputs, objective

    def hoisted(self, y: PyTree[Array], args: Any) -> "Groups":
        network, inputs, _, _ = self._network(y, args)
        functions = network.canonical(y, inputs).groups
        groups: GroupsByName = as_groups(self.groups)  # type: ignore[assignment]
        replaced = {
            name: dataclasses.replace(
                group, fn=functions[name].fn, select=functions[name].select
            )
            for name, group in groups.items()
        }
        return Groups(replaced)

    def _network(self, y: PyTree[Array], args: Any) -> tuple[GroupNetwork, Any, Any, Any]:
        """Return the network of the groups, its inputs, the targets and the losses."""
        groups: GroupsByName = as_groups(self.groups)  # type: ignore[assignment]
        if args is not None and all(group.data is not None for group in groups.values()):
            raise ValueError("The groups have their own data: leave `args` out.")
        _, network, (inputs, targets, _), losses = of_groups(y, groups, lambda _: True)
        inputs = {k: args if groups[k].data is None else x for k, x in inputs.items()}
        return network, inputs, targets, losses


GroupsByName = Mapping[str, Residuals]


def check_order(driver: str, model: Any, data: Any) -> None:
    """Raise `ValueError` if the model and the data are swapped."""
    parts = model
    if isinstance(model, Mapping):
        parts = list(model.values())
    elif not isinstance(model, list | tuple):
        parts = [model]
    are_groups = any(isinstance(part, Residuals | Groups) for part in parts)
    is_model = isinstance(data, eqx.Module) and not isinstance(data, Residuals | Groups)
    are_arrays = isinstance(model, list | tuple) and not any(map(callable, parts))
    are_arrays &= not callable(model)
    if are_groups or (is_model and are_arrays):
        raise ValueError(
            f"The arguments of `gnlin.{driver}` are swapped: pass the model first, "
            f"`gnlin.{driver}(model, {'groups' if are_groups else 'data'})`."
        )


def as_groups(data: Any) -> GroupsByName | None:
    """Return groups by name from a dictionary, a list or a single group; else `None`."""
    if isinstance(data, Groups):
        data = data.groups
    pairs: list = []
    if isinstance(data, Residuals):
        pairs = [("residuals", data)]
    elif isinstance(data, Mapping):
        pairs = list(data.items())
    elif isinstance(data, list | tuple):
        pairs = [(str(k), group) for k, group in enumerate(data)]
    if not any(isinstance(group, Residuals) for _, group in pairs):
        return None
    for name, group in pairs:
        if not isinstance(name, str) or not isinstance(group, Residuals):
            raise ValueError(
                f"Each group must be a `gnlin.Residuals` under a name, but "
                f"{a_kind_of(group)} was given under {name!r}."
            )
    return {name: _with_arrays(name, group) for name, group in pairs}


def _with_arrays(name: str, group: Residuals) -> Residuals:
    if callable(group.data):
        _check_sampler(name, group)
        return group
    trees = {"data": _tree.columns(group.data), "targets": group.targets}
    of_data = f"data of the group {name!r}"
    trees = as_arrays(of_data, trees)
    if group.data is None:
        return dataclasses.replace(group, targets=trees["targets"])
    if not jax.tree.leaves(trees["data"]):
        raise ValueError(f"The group {name!r} has no data: pass arrays.")
    lengths = leading_lengths(of_data, trees)
    if len(lengths) > 1:
        shapes = (str(leaf.shape) for leaf in jax.tree.leaves(trees))
        found = " and ".join(dict.fromkeys(shapes))
        raise ValueError(
            f"All arrays of the group {name!r} must have a leading axis over the same "
            f"number of examples, but have the shapes {found}."
        )
    if 0 in lengths:
        raise ValueError(f"The group {name!r} holds 0 examples: leave it out.")
    return dataclasses.replace(group, **trees)


def _check_sampler(name: str, group: Residuals) -> None:
    """Check a group that draws its examples, by the shapes of one draw."""
    if group.targets is not None and isinstance(group.loss, SquaredError):
        raise ValueError(
            f"The group {name!r} draws its data: leave its `targets` out, and subtract "
            "them in `fn`."
        )
    if group.targets is not None or isinstance(group.loss, SoftmaxCrossEntropy):
        raise ValueError(
            f"The group {name!r} draws its data, and has no targets of drawn points for "
            f"its loss, a `{type(group.loss).__name__}`: draw batches of points and "
            "targets in a generator, `gnlin.fit(model, batches(), loss=loss, steps=...)`."
        )
    try:
        drawn = jax.eval_shape(group.data, jax.random.key(0))
    except TypeError as error:
        raise ValueError(
            f"The `data` function of the group {name!r} is called with a key and must "
            f"return arrays, but failed: {first_line(error)}."
        ) from error
    sizes = {x.shape[0] if x.ndim > 0 else None for x in jax.tree.leaves(drawn)}
    if len(sizes) != 1 or sizes & {None, 0}:
        raise ValueError(
            f"The group {name!r} must draw arrays with a leading axis over the same "
            "number of examples, at least one, but draws the shapes "
            f"{_tree.listed_shapes(drawn)}."
        )


def refuse_groups(data: Any) -> None:
    if as_groups(data) is not None:
        raise ValueError(
            "Predictions need `(inputs, targets)`, but groups of `gnlin.Residuals` were "
            "given: for the errors of their parameters use `gnlin.predict.covariance`, "
            "for their Jacobian, kernel and curvature `gnlin.features.linearise_model`."
        )


def refuse_for_groups(**options: Any) -> None:
    """Raise `ValueError` if an option that groups do not have was given."""
    for name, value in options.items():
        default = SquaredError() if name == "loss" else None
        if not eqx.tree_equal(value, default):
            hint = {
                "loss": "each group has its own",
                "validation": "take figures on other data by `gnlin.callbacks.Measure`",
                "prior": "add the parameters as one more, such as `gnlin.Residuals(lambda"
                " model, _: eqx.filter(model, eqx.is_inexact_array), weight=1 / s**2)`",
            }.get(name, "groups have none")
            raise ValueError(f"`{name}` is not for groups of residuals: {hint}.")


def where_not_finite(groups: GroupsByName) -> str:
    """Return a sentence that names a group's non-finite example or target, or ""."""
    for name, group in groups.items():
        both = {"example": group.data, "the target of example": group.targets}
        found = []
        for what, tree in both.items():
            bad = next(rows_not_finite(eqx.filter(tree, eqx.is_array)), None)
            found += [] if bad is None else [f"{what} {bad[0]}"]
        if found:
            said, verb = " and ".join(found), "is" if len(found) == 1 else "are"
            said = said[0].upper() + said[1:]
            return f"{said} of the group {name!r} {verb} not finite."
    return ""
