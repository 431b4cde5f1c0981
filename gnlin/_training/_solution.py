"""The result of a run: the model, how the run ended, and the history of its steps."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
import optimistix as optx
from jaxtyping import PyTree

from .._common._checks import is_traced
from .._common._history import History
from ._messages import in_words, result_name, why_it_ended


Model = TypeVar("Model")


class Solution(eqx.Module, Generic[Model]):
    r"""The result of [`gnlin.solve`][] and [`gnlin.fit`][].

    **Attributes:**

    - `model`: the trained model: the last finite one, or the best one if the run diverged
        or a callback asked for it.
    - `state`: the model's state, ready for inference mode; `None` if it has none. The
        running statistics of batch normalisation are those of `model`, unless its batches
        came from an iterable other than a list ([`gnlin.predict.batch_statistics`][]).
    - `loss`: the model's loss on all examples, with the prior's part; `None` if it was
        not computed, as after mini-batches, or for a model that a callback chose. With
        dropout it is a loss in training mode, under the masks of a step.
    - `result`: an `optimistix.RESULTS`: `successful` if the run converged or a callback
        stopped it; `nonlinear_max_steps_reached` if all steps were made or the run was
        interrupted; `stagnation` if no step reduced the loss any further, although
        the linearised problem promises a decrease; `nonfinite` or
        `nonlinear_divergence` if it failed.
    - `reason`: the result in words; empty inside your own compiled program, and if the
        solution holds several runs.
    - `history`: a [`gnlin.History`][].
    - `stats`: `num_steps`, `num_feature_updates`, `num_inner_steps`, `num_jvps` and
        `num_vjps` (tangent and transposed passes of the whole batch through the model),
        `num_accepted_steps`, `num_rejected_steps`; also `max_steps` from `solve`, or
        `num_epochs` from `fit`.
    - `linearisation_point`: the model at $\theta_s$ if iterative linearisation kept it
        across batches, else `None`.
    - `prior`: the standard deviation of the prior, `None` if there was none.
        [`gnlin.predict.posterior`][] takes it from here.
    """

    model: Model
    state: PyTree
    loss: Any
    result: optx.RESULTS
    _reason: str = eqx.field(static=True)  # as the run ended; "" in a program
    history: History
    stats: dict[str, Any]
    linearisation_point: Model | None = None
    prior: Any = None
    # Which leaves were trained, and whether the model is a pair `(fn, parameters)`
    _trained: tuple[tuple[bool, ...], bool] | None = eqx.field(static=True, default=None)
    _has_retraction: bool = eqx.field(static=True, default=False)

    @property
    def reason(self) -> str:
        """Why the run ended, in words."""
        number = self.stats["num_steps"]
        if self._reason or is_traced((number, self.result)) or np.ndim(number):
            return self._reason
        why, *_ = why_it_ended(self.result).split(":")
        return in_words(result_name(self.result), int(number), why)

    def __repr__(self) -> str:
        name, history = type(self.model).__name__, self.history
        if not self.reason:
            return f"Solution({name}, {history!r})"
        each = history.get("loss", ())  # empty with `history=False`
        losses = [*each[:1], *each[-1:]]
        if self.loss is not None:
            losses[1:] = [self.loss]
        from_to = " -> ".join(f"{float(loss):.4g}" for loss in losses)
        ended = f"{result_name(self.result)}, {self.reason!r}"
        what = "batch losses" if self.loss is None else "loss"
        return f"Solution({name}, {ended}, {what} {from_to or 'unknown'})"


Spec = PyTree | Callable[[Any], bool]


def model_and_spec(
    model: Any, filter_spec: Spec | None, retraction: Any = None
) -> tuple[Any, Spec]:
    """Return the model of a solution, or a model itself, with the leaves that are its
    parameters: by default those that were trained, or all floating-point arrays."""
    solution = model if isinstance(model, Solution) else None
    if solution is not None and solution._has_retraction and retraction is None:
        raise ValueError(
            "The model was trained along a `retraction`: pass it to "
            "`gnlin.predict.covariance`, too. The other functions of `gnlin.predict` "
            "have none, since they add steps to the parameters."
        )
    model = model if solution is None else solution.model
    if filter_spec is not None:
        return model, filter_spec
    if solution is None or solution._trained is None:
        return model, eqx.is_inexact_array
    trained, is_pair = solution._trained
    structure = jax.tree.structure(model[1] if is_pair else model)
    return model, structure.unflatten(trained)


def on_host(tree: PyTree) -> PyTree:
    """Convert scalar arrays to Python numbers."""
    return jax.tree.map(lambda x: np.asarray(x).item(), tree)
