"""Gradient descent and gradient flow on a linearised model, at any number of steps."""

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_flag, check_scalar, is_traced, is_zero
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._subproblem import choose, OnSpace, ProxLinear
from .._subproblem._base import undamped
from ..filters import (
    AbstractFilter,
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
)
from ..losses import AbstractLoss, SquaredError
from ._eigenbasis import Eigenbasis
from ._linearised import check_finite, LinearisedModel
from ._steps import in_the_limit, step_by_step


_NO_LIMIT = (
    "No minimum was found to which training converges, as with separable classes: pass a "
    "finite number, or add `damping`."
)
# A prediction is doubtful if this part of the squared residual lies along eigenvectors
# whose eigenvalues rounding hides.
_DOUBTFUL = 0.01
# The frames from a warning to the user's call of `__call__`, and of `loss`, around which
# Equinox has one more.
_OF_CALL, _OF_LOSS = 4, 5
# A placeholder for the number of steps, on which the setup does not depend.
_SOME_STEPS = 10_000


def gradient_descent(
    model: PyTree,
    data: Any,
    *,
    learning_rate: ScalarLike,
    momentum: ScalarLike = 0.0,
    nesterov: bool = False,
    damping: ScalarLike = 0.0,
    loss: AbstractLoss = SquaredError(),
    from_zero: bool = False,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "Descent":
    r"""Train a linearised model by full-batch gradient descent, and predict its outputs
    after any number of steps.

    For squared error the outputs after $K$ steps are

    $$f_K(x) = f(x) - \Theta(x, X)\,U g_K(w)\,U^\top (f(X) - Y),$$

    with the filter $g_K$ of [`gnlin.filters.GradientDescent`][] or one with momentum.
    This function factorises once; then any number of steps, even infinity, costs a
    product. With another loss the steps are made one by one.

    **Arguments:**

    - `model`: a model of one example's input, as for [`gnlin.solve`][].
    - `data`: the training data, `(inputs, targets)`, or with weights of the examples
        `(inputs, targets, weights)`.
    - `learning_rate`: $\eta$, for the loss as reduced (by default the sum over examples).
    - `momentum`, `nesterov`: the momentum, of heavy ball or of Nesterov, as in
        `optax.sgd`.
    - `damping`: $\lambda$ of $\frac\lambda2\lVert\theta - \theta_0\rVert^2$, which is
        added to the loss.
    - `loss`: the loss of one example.
    - `from_zero`: whether to replace the model's own outputs by zero. The prediction is
        then a regression with the model's kernel alone: the mean over centred
        initialisations, or, for a trained model, regression with the *after-kernel*.
    - `filter_spec`: the parameters to train, as for [`gnlin.solve`][].
    - `memory_budget`: the maximum bytes of a matrix. If the smaller of kernel and
        curvature takes more, steps are made one by one with squared error too.

    **Returns:** a [`gnlin.predict.Descent`][].

    **Raises:** `ValueError` if the data or a hyperparameter makes no sense, if anything
    is not finite, or if the descent diverges.

    !!! example

        ```python
        model = eqx.nn.MLP(3, 1, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
        train = inputs[:4], targets[:4, None]
        predict = gnlin.predict.gradient_descent(model, train, learning_rate=1e-3)
        predict(inputs[4:], steps=[0, 10, 1e3, math.inf])  # (4, 2, 1)
        ```

    ??? cite "Reference"

        J. Lee et al., *Wide Neural Networks of Any Depth Evolve as Linear Models Under
        Gradient Descent*, NeurIPS (2019), equations 8 to 11, for the flow.
    """
    check_flag("nesterov", nesterov)
    check_scalar("learning_rate", learning_rate)
    check_scalar("momentum", momentum)
    steps: AbstractFilter
    if nesterov:
        steps = Nesterov(_SOME_STEPS, learning_rate, momentum)
    elif is_zero(momentum):
        steps = GradientDescent(_SOME_STEPS, learning_rate)
    else:
        steps = HeavyBall(_SOME_STEPS, learning_rate, momentum)
    linearised = LinearisedModel.of(
        model, data, loss, filter_spec, memory_budget, from_zero
    )
    return Descent(linearised, *_way(linearised, steps, damping))


def gradient_flow(
    model: PyTree,
    data: Any,
    *,
    damping: ScalarLike = 0.0,
    loss: AbstractLoss = SquaredError(),
    from_zero: bool = False,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "Flow":
    r"""Train a linearised model by gradient flow, and predict its outputs after any time.

    Gradient flow is the limit of gradient descent for small steps, with $T = \eta K$. For
    squared error the outputs after a time $T$ are

    $$f_T(x) = f(x) - \Theta(x, X)\,U\,\tfrac{1 - e^{-wT}}{w}\,U^\top (f(X) - Y).$$

    With another loss a stabilised method solves the differential equation, with local
    errors below $10^{-6}$ of the step ($10^{-4}$ in single precision).

    **Arguments:** as in [`gnlin.predict.gradient_descent`][].

    **Returns:** a [`gnlin.predict.Flow`][].

    **Raises:** as [`gnlin.predict.gradient_descent`][].

    !!! example

        ```python
        model = eqx.nn.MLP(3, 1, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
        train = inputs[:4], targets[:4, None]
        predict = gnlin.predict.gradient_flow(model, train)
        predict(inputs[4:], times=jnp.logspace(-3, 3, 50))  # (50, 2, 1)
        ridge = gnlin.predict.gradient_flow(model, train, damping=0.1, from_zero=True)
        ridge(inputs[4:])  # kernel ridge regression
        ```
    """
    linearised = LinearisedModel.of(
        model, data, loss, filter_spec, memory_budget, from_zero
    )
    return Flow(linearised, *_way(linearised, GradientFlow(1.0), damping))


class AbstractPath(eqx.Module):
    """A linearised model that can be trained for any number of steps, or any time."""

    _linearised: LinearisedModel = eqx.field(repr=False)
    _way: Eigenbasis | OnSpace = eqx.field(repr=False)
    _filter: AbstractFilter = eqx.field(repr=False)

    # The filter's field for the number of steps, or the time, and the error if outputs
    # are not finite after a finite one
    _amount: ClassVar[str]
    _failed: ClassVar[str]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._linearised.train})"

    def _asked(self, name: str, given: Any, stacklevel: int) -> np.ndarray:
        """Return the numbers of steps, or the times, as an array. Warn if the last one
        reaches eigenvalues that rounding hides."""
        amounts, basis = _amounts(name, given), self._way
        if not isinstance(basis, Eigenbasis) or is_traced((basis, self._filter)):
            return amounts
        with jax.ensure_compile_time_eval():  # also where only the inputs are traced
            if basis.is_sure(self._filter_of(float(np.max(amounts)))):
                return amounts
            part, cutoff = float(_hidden(basis)), float(basis.cutoff)
        if part > _DOUBTFUL:
            is_single = jnp.finfo(basis.eigenvalues.dtype).bits < 64
            precision = "use double precision, or " if is_single else ""
            warnings.warn(
                f"Rounding hides the kernel's eigenvalues below {cutoff:.2g}. {part:.0%} "
                "of the squared residual lies along their eigenvectors. Unless these "
                "eigenvalues are zero, as for repeated examples, this part is trained "
                f"wrongly or not at all: {precision}pass smaller `{name}` or a larger "
                "`damping`.",
                stacklevel=stacklevel,
            )
        return amounts

    def _filter_of(self, amount: ScalarLike) -> AbstractFilter:
        """Return the filter for this number of steps, or this time."""
        field = lambda filter: getattr(undamped(filter)[0], self._amount)
        return eqx.tree_at(field, self._filter, amount)

    def _outputs(self, on: Linearisation, amounts: np.ndarray) -> PyTree[Array]:
        """Return the outputs, with a leading axis if `amounts` have one."""
        check_finite(on.outputs)
        changes = self._changes(on, amounts.ravel())
        finite = isinstance(changes, Tracer) or bool(jnp.all(jnp.isfinite(changes)))
        if not finite:
            bad = ~np.isfinite(np.asarray(changes)).all(axis=1)
            first = amounts.ravel()[bad].min()
            failed = self._failed if np.isfinite(first) else _NO_LIMIT
            raise ValueError(failed.format(f"{first:g}"))
        changes = changes.astype(_tree.dtype(on.outputs))
        unravel = on.jacobian.codomain.unravel
        moved = lambda change: jax.tree.map(jnp.add, on.outputs, unravel(change))
        return moved(changes[0]) if amounts.ndim == 0 else jax.vmap(moved)(changes)

    def _changes(
        self, on: Linearisation, amounts: Float[np.ndarray, " s"]
    ) -> Float[Array, "s n"]:
        """Return the changes of the flat outputs after each number of steps, or time."""
        way, filter_of = self._way, self._filter_of
        if isinstance(way, Eigenbasis):
            return _in_closed_form(way, filter_of, on, jnp.asarray(amounts, float))
        distinct, where = np.unique(amounts, return_inverse=True)
        finite = distinct[np.isfinite(distinct)]
        found = []
        if finite.size > 0:
            steps = jnp.asarray(finite, float)
            found.append(step_by_step(way, filter_of(1.0), on, steps))
        if finite.size < distinct.size:
            found.append(in_the_limit(way, filter_of(math.inf), on)[None])
        return jnp.concatenate(found)[where]

    def _loss(self, data: Any, amounts: np.ndarray) -> Array:
        on, objective = self._linearised.train, self._linearised.objective
        if data is not None:
            on, objective = self._linearised.on_data(data)
        return _values(objective, self._outputs(on, amounts), amounts.ndim)


class Descent(AbstractPath):
    """A linearised model under gradient descent; made by
    [`gnlin.predict.gradient_descent`][]."""

    _amount: ClassVar[str] = "period"
    _failed: ClassVar[str] = (
        "Gradient descent diverged by step {}: lower the learning rate, or add `damping`."
    )

    def __call__(
        self, inputs: PyTree[ArrayLike] | None = None, steps: ArrayLike | list = math.inf
    ) -> PyTree[Array]:
        """Return the outputs after some numbers of steps.

        **Arguments:**

        - `inputs`: n inputs, with a leading axis; `None` for the training inputs.
        - `steps`: the number of steps, or a list of numbers; `math.inf` for the limit.
            There is none if the loss has no minimum, like the cross-entropy of classes
            that the linearised model separates. The outputs are then those at which its
            gradient has almost vanished; with `damping` there is a limit.

        **Returns:** an array of the shape `(n, ...)`, or `(len(steps), n, ...)`.

        **Raises:** `ValueError` if `steps` are not whole numbers of at least 0, or if the
        descent diverges.
        """
        return self._outputs(
            self._linearised.on(inputs), self._asked("steps", steps, _OF_CALL)
        )

    def loss(self, steps: ArrayLike | list = math.inf, data: Any = None) -> Array:
        """Return the loss after some numbers of steps, on the training or other data."""
        return self._loss(data, self._asked("steps", steps, _OF_LOSS))


class Flow(AbstractPath):
    """A linearised model under gradient flow; made by
    [`gnlin.predict.gradient_flow`][]."""

    _amount: ClassVar[str] = "time"
    _failed: ClassVar[str] = (
        "Gradient flow could not be solved up to the time {}: pass shorter times or "
        "`math.inf`, or add `damping`."
    )

    def __call__(
        self, inputs: PyTree[ArrayLike] | None = None, times: ArrayLike | list = math.inf
    ) -> PyTree[Array]:
        """Return the outputs after a time of at least 0, or a list of times, as
        [`gnlin.predict.Descent.__call__`][] does after numbers of steps; `math.inf` for
        the limit."""
        return self._outputs(
            self._linearised.on(inputs), self._asked("times", times, _OF_CALL)
        )

    def loss(self, times: ArrayLike | list = math.inf, data: Any = None) -> Array:
        """Return the loss after some times, on the training or other data."""
        return self._loss(data, self._asked("times", times, _OF_LOSS))


def _way(
    linearised: LinearisedModel, filter: AbstractFilter, damping: ScalarLike
) -> tuple[Eigenbasis | OnSpace, AbstractFilter]:
    """Return the way to train, set up, and the filter with its damping."""
    check_scalar("damping", damping)
    whole = filter if is_zero(damping) else Damped(filter, damping)
    way = _set_up(linearised, whole)
    if isinstance(way, Eigenbasis):
        check_finite((way.eigenvalues, way.coefficients))
        _check_convergence(jnp.max(way.eigenvalues), filter, damping)
    else:
        check_finite(way.gradient_norm)
    return way, whole


@eqx.filter_jit
def _set_up(linearised: LinearisedModel, filter: AbstractFilter) -> Eigenbasis | OnSpace:
    train, objective = linearised.train, linearised.objective
    if objective.is_quadratic and Eigenbasis.fits(train.jacobian):
        return Eigenbasis.of(objective.expand(train))
    problem = ProxLinear(train.jacobian, train.outputs, objective)
    way = choose(problem, filter)
    assert isinstance(way, OnSpace)
    return way


@eqx.filter_jit
def _hidden(basis: Eigenbasis) -> Scalar:
    return basis.hidden()


@eqx.filter_jit
def _in_closed_form(
    basis: Eigenbasis,
    filter_of: Callable[[Scalar], AbstractFilter],
    on: Linearisation,
    amounts: Float[Array, " s"],
) -> Float[Array, "s n"]:
    seen = basis.seen_from(on.jacobian)

    def change(amount: Scalar) -> Float[Array, " n"]:
        changes = basis.change(on.jacobian, seen, filter_of(amount))
        return jnp.where(amount == 0, 0, changes)

    return jax.vmap(change)(amounts.astype(basis.eigenvalues.dtype))


@eqx.filter_jit
def _values(
    objective: AbstractObjective, outputs: PyTree[Array], num_axes: int
) -> Float[Array, "..."]:
    of = objective.value
    return of(outputs) if num_axes == 0 else jax.lax.map(of, outputs)


def _amounts(name: str, given: Any) -> np.ndarray:
    whole = name == "steps"
    what = "whole numbers of at least 0" if whole else "numbers of at least 0"
    wrong = f"`{name}` must be {what}, or `math.inf`, but {given!r} was given."
    if is_traced(given):
        raise ValueError(
            f"`{name}` must be known when the program is compiled: pass numbers instead "
            "of traced values."
        )
    try:
        amounts = np.asarray(given, float)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(wrong) from error
    sound = (amounts >= 0) & ((not whole) | (np.floor(amounts) == amounts))
    if amounts.ndim > 1 or amounts.size == 0 or not sound.all():
        raise ValueError(wrong)
    return amounts


def _check_convergence(largest: Scalar, filter: Any, damping: Any) -> None:
    """Raise if gradient descent on squared error diverges, unless numbers are traced."""
    if isinstance(filter, GradientFlow) or is_traced((largest, filter, damping)):
        return
    curvature = float(largest) + float(damping)
    most = float(filter.largest_stable()) / curvature if curvature > 0 else math.inf
    if float(filter.learning_rate) >= most:
        raise ValueError(
            f"At a learning rate of {float(filter.learning_rate):.8g} gradient descent "
            f"diverges on this linearised model: it must be less than {most:.8g}."
        )
