"""What a run leaves: the model, how it ended, and a table with one row a step."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
import optimistix as optx
from jaxtyping import PyTree

from .._solver import result_name


Model = TypeVar("Model")

COLUMNS = (
    "step",
    "epoch",
    "loss",
    "gradient_norm",
    "step_norm",
    "damping",
    "num_inner_steps",
    "num_feature_updates",
)

COUNTS = ("step", "epoch", "num_feature_updates")
"""Those of whole numbers."""


class History(eqx.Module, Mapping[str, Any]):
    r"""What happened in a run, one row a step, by columns.

    Each row is of one point: the loss there and its gradient, on the examples of the step
    that is then taken.

    | column | |
    |---|---|
    | `step` | 1, 2, ... |
    | `epoch` | 0, 1, ...: the one that the step belongs to, in [`gnlin.fit`][] |
    | `loss` | on the step's examples, as reduced, before the step |
    | `loss/...` | of each group of residuals, where there are several |
    | `gradient_norm` | 2-norm of that loss's gradient |
    | `step_norm` | 2-norm of the step; 0 where none was taken |
    | `damping` | of the step; 0 for a solver without one |
    | `num_inner_steps` | steps on the subproblem |
    | `num_feature_updates` | linearisations so far |
    | `validation_loss` | mean over the validation examples, after the step |
    | `validation_...` | each of `metrics`, likewise |
    | `validation_..._linearised` | the same, of the linearised model |
    | others | of the callbacks, such as [`gnlin.callbacks.Measure`][] |

    The columns are NumPy arrays. Under `jax.jit` and `jax.vmap` they are JAX's, and rows
    of steps that were not made are NaN, as are validation and callbacks' columns where
    nothing was looked at. Where iterative linearisation keeps $\theta_s$ across batches,
    `loss` and `gradient_norm` are of the linearised model.

    !!! example

        ```python
        history = solution.history
        history.loss, history["loss"], history.columns, len(history.step)
        history.to_pandas()
        ```
    """

    _names: tuple[str, ...] = eqx.field(static=True)
    _arrays: tuple[Any, ...]

    def __init__(self, columns: Mapping[str, Any]):
        known = all(isinstance(x, np.ndarray) for x in columns.values())
        self._names = tuple(columns)
        self._arrays = tuple(
            x.astype(int) if known and name in COUNTS else x
            for name, x in columns.items()
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(
                f"The history has no column {name!r}, but {', '.join(self._names)}."
            )
        return self._arrays[self._names.index(name)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        num_rows = " x ".join(map(str, np.shape(self["step"])))
        return f"History({num_rows} steps: {', '.join(self._names)})"

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return list(self._names)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row a step."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "`to_pandas` needs pandas: install it with `pip install pandas`, or use "
                "`to_csv`."
            ) from error
        return pandas.DataFrame(self._of_one_run())

    def to_csv(self, path: str | os.PathLike) -> None:
        """Write it as comma-separated values, with a first row of names."""
        table = np.stack(list(self._of_one_run().values()), axis=1)
        header = ",".join(self._names)
        np.savetxt(path, table, "%.17g", delimiter=",", header=header, comments="")

    def _of_one_run(self) -> dict[str, np.ndarray]:
        if np.ndim(self["step"]) != 1:
            raise ValueError(
                "A table is of one run, and this history of several: take one of them, "
                "`jax.tree.map(lambda column: column[0], history)`."
            )
        return {name: np.asarray(column) for name, column in self.items()}


class Solution(eqx.Module, Generic[Model]):
    r"""What [`gnlin.solve`][] and [`gnlin.fit`][] return.

    **Attributes:**

    - `model`: the trained model: the last finite one, or the best, if the run diverged or
        a callback has asked for it.
    - `state`: the model's state; `None` if it has none.
    - `loss`: the model's, on all examples, as the last step left it; `None` where nothing
        has computed it: after mini-batches, and of a model that a callback chose.
    - `result`: an `optimistix.RESULTS`. `successful` if it has converged or a callback
        has stopped it, `nonlinear_max_steps_reached` if all steps were made or the run
        was interrupted, `stagnation` if it stood still away from a solution, `nonfinite`
        or `nonlinear_divergence` if it ended early.
    - `reason`: the same in words; empty under `jax.jit` and `jax.vmap`.
    - `history`: a [`gnlin.History`][].
    - `stats`: `num_steps`, `num_feature_updates`, `num_inner_steps`, `num_jvps` and
        `num_vjps` (passes of the whole batch through the model, tangent and transposed),
        `num_accepted_steps`, `num_rejected_steps`; `max_steps` of `solve`, `num_epochs`
        of `fit`.
    - `linearisation_point`: the model at $\theta_s$, where iterative linearisation has
        kept it across batches; else `None`.
    """

    model: Model
    state: PyTree
    loss: Any
    result: optx.RESULTS
    # No leaf: a solution may come out of `jax.jit`.
    reason: str = eqx.field(static=True)
    history: History
    stats: dict[str, Any]
    linearisation_point: Model | None = None

    def __repr__(self) -> str:
        name, history = type(self.model).__name__, self.history
        if not self.reason:
            return f"Solution({name}, {history!r})"
        losses = [*history.loss[:1], *history.loss[-1:]]
        if self.loss is not None:
            losses[1:] = [self.loss]
        from_to = " -> ".join(f"{float(loss):.4g}" for loss in losses)
        ended = f"{result_name(self.result)}, {self.reason!r}"
        return f"Solution({name}, {ended}, loss {from_to or 'unknown'})"


NO_GRADIENT = (
    "the gradient is exactly zero. Do the outputs depend on the parameters that are "
    "trained (`filter_spec`, `jax.lax.stop_gradient`)?"
)


def on_host(tree: PyTree) -> PyTree:
    """The Python numbers in a tree of scalar arrays."""
    return jax.tree.map(lambda x: np.asarray(x).item(), tree)


def in_words(result: str, num_steps: int, why: str = "") -> str:
    """A `reason`; `why` is that of a failure."""
    if result == "nonlinear_max_steps_reached":
        return f"all {num_steps} steps were made"
    ended = "converged" if result == "successful" else why.split(";")[0]
    return f"step {num_steps}: {ended}"
