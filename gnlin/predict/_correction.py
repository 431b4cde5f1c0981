"""The change that one more Gauss-Newton step would make: an estimate of the error."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_callable, check_count, first_line, is_own, is_traced
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._subproblem import check_method, choose, Method
from .._training._data import a_kind_of, as_inputs
from .._training._group_network import of_groups
from .._training._model import Frozen, in_single
from .._training._residuals import as_groups, Groups, GroupsByName, Residuals
from .._training._solution import model_and_spec, Solution
from .._training._step import StepSettings
from ..filters import PseudoInverse
from ._linearised import check_finite


# The largest part of the residuals' norm that may remain without a warning. In 30 runs of
# seven equations, at twice the points of the training, the estimate was 0.5 to 1.1 times
# the error with up to 0.55, and 0.03 to 0.8 times with 0.85 to 1.
_TOO_MUCH = 0.7
# A network jumps between the points of the training if its loss elsewhere is more than
# these multiples of the loss there, and of the first one. Such networks meet their
# equations to 1e-20, are wrong by 0.7 to 1.7, and their estimates may be 0.01 to 0.08.
_JUMPS, _OF_START = 1e3, 1e-3

Outputs = Callable[[Any, Any], PyTree[Array]]


def correction(
    model: PyTree,
    groups: GroupsByName | Groups | Sequence[Residuals] | Residuals,
    *,
    filter_spec: PyTree | Callable[[Any], bool] | None = None,
    method: Method = "svd",
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "Correction":
    r"""Estimate the error of a model that was trained on groups of residuals, such as the
    solution of a differential equation, without a reference; and correct it.

    The undamped Gauss-Newton step $\delta = -\phi^+ r$ leads to the parameters at which
    the linearised model has the smallest residuals. To first order, the outputs' change
    $\phi_*\delta$ along the step is their error with the opposite sign. So its size
    estimates the error, and outputs to which it is added are usually more accurate by
    some digits.

    Pass residuals at twice as many points as for the training, and at more points than
    there are parameters, because the residuals may be larger between the points of the
    training. A singularity of the solution needs still more points. The estimate is too
    small if the step leaves most of the residuals, as for a network that is too small for
    the solution; then there is a warning. There is another one if the network jumps
    between the points of its training: residuals at the points are then tiny, and large
    elsewhere, and the estimate may be far off. For noisy data there is no estimate, since
    the undamped step fits the noise.

    **Arguments:**

    - `model`: the [`gnlin.Solution`][] of the training; or the trained model, if the
        losses need not be compared.
    - `groups`: the groups of residuals, as for [`gnlin.solve`][], at more points.
    - `filter_spec`: the parameters that were trained, as for [`gnlin.solve`][]. By
        default these are the parameters of the solution that were trained, or all
        parameters if a model is passed.
    - `method`: the way to compute the step, as in [`gnlin.GaussNewton`][]. Singular
        values (`"svd"`) are the most accurate. `"eigh"` takes less time for thousands of
        parameters, but does not see errors below about $10^{-7}$ of the outputs.
    - `memory_budget`: the maximum bytes of a matrix.

    **Returns:** a [`gnlin.predict.Correction`][].

    **Raises:** `ValueError` if there are no groups, if one draws its points, if anything
    is not finite, or if the Jacobian does not fit into the memory budget.

    !!! example

        ```python
        decay = lambda net, x: jax.grad(net)(x) + net(x)
        start = gnlin.Residuals(lambda net, x: net(x) - 1, jnp.zeros(1), weight=10.0)
        groups = {"decay": gnlin.Residuals(decay, jnp.linspace(0, 1, 20)), "start": start}
        net = eqx.nn.MLP("scalar", "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        net = gnlin.solve(net, groups, max_steps=5).model

        more = groups | {"decay": gnlin.Residuals(decay, jnp.linspace(0, 1, 50))}
        correction = gnlin.predict.correction(net, more)
        x = jnp.linspace(0, 1, 7)
        correction(x)  # exp(-x) - jax.vmap(net)(x), to first order
        jax.vmap(correction.corrected)(x)  # closer to exp(-x)
        ```

    ??? cite "Reference"

        P. Deuflhard, *Newton Methods for Nonlinear Problems* (2004), section 2.1, for
        Newton's correction as an estimate of the error.
    """
    check_method(method, damped=False)
    check_count("memory_budget", memory_budget)
    named = as_groups(groups)
    if named is None:
        raise ValueError(
            "`groups` must be `gnlin.Residuals`, or a dictionary or list of them, but "
            f"{a_kind_of(groups)} was given."
        )
    solution = model if isinstance(model, Solution) else None
    model, filter_spec = model_and_spec(model, filter_spec)
    parameters, network, batch, losses = of_groups(model, named, filter_spec)
    setting = StepSettings(None, losses, network)
    step, remaining, loss = _step(setting, parameters, batch, method, memory_budget)
    check_finite((step, remaining))
    if solution is not None and solution.loss is not None and not is_traced(loss):
        losses = solution.history.get("loss", ())
        first = losses[0] if len(losses) else 0.0
        if loss > _OF_START * first and loss > _JUMPS * solution.loss:
            warnings.warn(
                f"The loss is {float(loss):.2g} at these points, and "
                f"{float(solution.loss):.2g} at those of the training: the network jumps "
                "between them, and the estimate may be far off. Train on more points.",
                stacklevel=2,
            )
    if not is_traced(remaining) and remaining > _TOO_MUCH:
        warnings.warn(
            f"After the correction {float(remaining):.0%} of the residuals' norm remain, "
            "so the estimate of the error is too small: the model may be too small for "
            "the solution, or the residuals may be rounding.",
            stacklevel=2,
        )
    return Correction(step, remaining, parameters, network.frozen)


@eqx.filter_jit
def _step(
    setting: StepSettings,
    parameters: PyTree[Array],
    batch: tuple,
    method: Method,
    memory_budget: int,
) -> tuple[PyTree[Array], Scalar, Scalar]:
    lin, objective = setting.linearised(parameters, batch, memory_budget)
    problem = objective.expand(lin)
    cost = problem.jacobian.cost()
    if method == "svd" and not cost.rows_fit:
        m, p = cost.shape
        raise ValueError(
            f"The {m:,} x {p:,} Jacobian does not fit into the memory budget of "
            f"{memory_budget:,} bytes: pass fewer points, raise `memory_budget`, or use "
            '`method="auto"`.'
        )
    undamped = PseudoInverse()
    step = choose(problem, undamped, method=method).solve(undamped).step
    before = _tree.norm(problem.residual)
    after = _tree.norm(_tree.axpy(1, problem.jacobian.mv(step), problem.residual))
    loss = objective.value(lin.outputs)
    return step, after / jnp.where(before > 0, before, 1), loss


class Correction(eqx.Module):
    """The change that one more Gauss-Newton step would make, from
    [`gnlin.predict.correction`][].

    **Attributes:**

    - `step`: the change of each parameter, in the structure of the model, with `None` for
        other leaves. For an unknown coefficient of the equation it estimates the error,
        with the opposite sign.
    - `remaining`: the norm of the linearised residuals after the step, divided by their
        norm before. Up to a half, the estimates of smooth solutions were within a factor
        of 2 of the error.
    """

    step: PyTree[Array]
    remaining: Scalar
    _parameters: PyTree[Array] = eqx.field(repr=False)
    _frozen: Frozen = eqx.field(repr=False)

    def __repr__(self) -> str:
        return f"Correction(of {_tree.size(self.step):,} parameters)"

    def __call__(
        self, inputs: PyTree[ArrayLike], outputs: Outputs | None = None
    ) -> PyTree[Array]:
        """Return the change of the outputs on n inputs, to first order.

        **Arguments:**

        - `inputs`: n inputs, with a leading axis.
        - `outputs`: `outputs(model, x)`, the outputs at one input, such as a derivative;
            by default the model's own.

        **Returns:** an array of the shape `(n, ...)`, or a pytree of such arrays.

        **Raises:** `ValueError` if the model cannot be called and `outputs` is left out.
        """
        return _changes(self, self._checked(outputs), as_inputs(inputs))

    def corrected(self, x: PyTree[ArrayLike], outputs: Outputs | None = None) -> Any:
        """Return the corrected outputs at one input. JAX can differentiate this function,
        and map it over inputs: `jax.vmap(correction.corrected)(inputs)`.

        The arguments are as for a call, but for one input.
        """
        before, change = self._pair(self._checked(outputs), x)
        return jax.tree.map(jnp.add, before, change)

    def _pair(self, outputs: Outputs, x: Any) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the outputs at one input, and their change."""

        def at(parameters):
            model = self._frozen.in_training(parameters)
            try:
                return outputs(model, x)
            except (IndexError, TypeError, ValueError) as error:
                if is_own(error):
                    raise
                called = "The model" if outputs is _own else "`outputs(model, x)`"
                shapes = " and ".join(str(jnp.shape(a)) for a in jax.tree.leaves(x))
                raise ValueError(
                    f"{called} is called on one input, here of the shape {shapes}, but "
                    f"failed: {first_line(error)}."
                ) from error

        return jax.jvp(at, (self._parameters,), (self.step,))

    def _checked(self, outputs: Outputs | None) -> Outputs:
        if outputs is None and not callable(self._frozen.rest):
            raise ValueError(
                "The model cannot be called on an input: pass "
                '`outputs=lambda model, x: model["u"](x)`, or similar.'
            )
        if outputs is None:
            return _own
        example = "lambda net, x: jax.grad(net)(x)"
        check_callable("outputs", outputs, "a function of a model and an input", example)
        return outputs


def _own(model: Callable[[Any], PyTree[Array]], x: Any) -> PyTree[Array]:
    return model(in_single(x))


@eqx.filter_jit
def _changes(
    correction: Correction, outputs: Outputs, inputs: PyTree[Array]
) -> PyTree[Array]:
    return jax.vmap(lambda x: correction._pair(outputs, x)[1])(inputs)
