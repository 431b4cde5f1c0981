"""The table of a run's steps."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._checks import is_traced
from ._words import how_many


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
"""The columns that hold integers."""
_OF_GROUP = "loss/"


def of_full_batch(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a full-batch run, all of whose steps are feature updates, in
    their order."""
    if "num_feature_updates" in rows:
        rows = {**rows, "step": rows["num_feature_updates"]}
    return {name: rows[name] for name in (*COLUMNS, *rows) if name in rows}


class History(eqx.Module, Mapping[str, Any]):
    r"""A table of a run, with one row for each step. The loss and its gradient in a row
    are evaluated before the step, on the examples of the step.

    It is a mapping from the names of its columns to the columns, so its length is their
    number. The number of steps is `len(history.step)`, or `solution.stats["num_steps"]`.

    | column | |
    |---|---|
    | `step` | 1, 2, ... |
    | `epoch` | the epoch of the step, 0, 1, ..., in [`gnlin.fit`][] |
    | `loss` | reduced loss on the step's examples, before the step |
    | `loss/...` | loss of each group of residuals, if there are several |
    | `gradient_norm` | 2-norm of the gradient of `loss` |
    | `step_norm` | 2-norm of the step; 0 if none was taken |
    | `damping` | damping of the step; 0 if the solver has none |
    | `num_inner_steps` | inner steps, on the subproblem |
    | `num_feature_updates` | linearisations so far |
    | `validation_loss` | mean loss over the validation examples, after the step |
    | `validation_...` | each of `metrics` on the validation examples, after the step |
    | `validation_..._linearised` | the same for the linearised model |
    | others | columns of callbacks, such as [`gnlin.callbacks.Measure`][] |

    Columns are NumPy arrays. Inside your own compiled program, and of several runs under
    `jax.vmap`, they are JAX arrays, and rows of steps that were not made are NaN.
    Columns of validation and of callbacks are NaN for steps at which nothing was
    measured. Through `optimistix.least_squares(..., options={"history": number})` the
    table has at most this number of rows, and is `solution.stats["history"]`. If
    iterative linearisation keeps $\theta_s$ across batches, `loss` and `gradient_norm`
    are those of the linearised model.

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
        self._names, self._arrays = tuple(columns), tuple(columns.values())

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(
                f"The history has no column {name!r}; it has {', '.join(self._names)}."
            )
        number, column = (self._arrays[self._names.index(x)] for x in ("step", name))
        is_array = isinstance(column, np.ndarray | jax.Array)
        if is_traced((number, column)) or not is_array or number.ndim != 1:
            return column
        # A program has rows for all steps that it may make.
        made = np.asarray(column)[~np.isnan(np.asarray(number))]
        return made.astype(int) if name in COUNTS else made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            said = error.args[0]
            if name == "plot":
                said += ' For a picture: `history.to_pandas().plot(x="step", y="loss")`.'
            raise AttributeError(said) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        if not self._names:
            return "History(not kept)"
        num_rows = " x ".join(map(str, np.shape(self["step"])))
        return f"History({how_many(num_rows, 'step')}: {', '.join(self._names)})"

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._names)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each step."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "`to_pandas` needs pandas: install it with `pip install pandas`, or use "
                "`to_csv`."
            ) from error
        return pandas.DataFrame(self._of_one_run())

    def to_csv(self, path: str | os.PathLike) -> None:
        """Write comma-separated values, with the names in the first row."""
        table = np.stack(list(self._of_one_run().values()), axis=1)
        header = io.StringIO()
        csv.writer(header, lineterminator="").writerow(self._names)
        head = {"header": header.getvalue(), "comments": ""}
        np.savetxt(path, table, "%.17g", delimiter=",", **head)

    def _of_one_run(self) -> dict[str, np.ndarray]:
        if np.ndim(self["step"]) != 1:
            raise ValueError(
                "A table holds one run, but this history holds several: select one by "
                "`jax.tree.map(lambda column: column[0], history)`."
            )
        return {name: np.asarray(column) for name, column in self.items()}


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the history's columns for the losses of groups."""
    return {name: f"{_OF_GROUP}{name}" for name in names}


def losses_by_group(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses of groups among the columns of a history, or of a row of it."""
    return {
        column.removeprefix(_OF_GROUP): losses
        for column, losses in columns.items()
        if column.startswith(_OF_GROUP)
    }
