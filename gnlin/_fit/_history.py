"""The history of a run: a plain table, one row a step."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


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


class FitHistory(Mapping):
    r"""What happened in a run of [`gnlin.fit`][], one row a step, by columns of NumPy
    arrays.

    | column | |
    |---|---|
    | `step` | 1, 2, ... |
    | `epoch` | 0, 1, ...: the one that the step belongs to |
    | `loss` | on the step's batch, as reduced, before the step |
    | `gradient_norm` | 2-norm of that loss's gradient |
    | `step_norm` | 2-norm of the step; 0 where none was taken |
    | `damping` | of the step; 0 for a solver without one |
    | `num_inner_steps` | steps on the subproblem |
    | `num_feature_updates` | linearisations so far |
    | `validation_loss` | mean over the validation examples, after the step |
    | `validation_...` | each of `metrics`, likewise |
    | `validation_..._linearised` | the same, of the linearised model |
    | others | of the callbacks, such as [`gnlin.callbacks.Measure`][] |

    Where the validation data were not looked at, or a callback did not measure, their
    columns are NaN. Where iterative
    linearisation keeps $\theta_s$ across batches, `loss` and `gradient_norm` are of the
    linearised model, and the last kind of columns is there.

    !!! example

        ```python
        history = result.history
        history["loss"], history.columns, len(history["step"])
        history.to_pandas()
        ```
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(
                f"The history has no column {name!r}, but {', '.join(self.columns)}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        num_rows = len(self._columns["step"])
        return f"FitHistory({num_rows} steps: {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return list(self._columns)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row a step."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "`to_pandas` needs pandas: install it with `pip install pandas`, or use "
                "`to_csv`."
            ) from error
        return pandas.DataFrame(self._columns)

    def to_csv(self, path: str | os.PathLike) -> None:
        """Write it as comma-separated values, with a first row of names."""
        table = np.stack(list(self._columns.values()), axis=1)
        header = ",".join(self.columns)
        np.savetxt(path, table, "%.17g", delimiter=",", header=header, comments="")


class Rows:
    """Rows as they come in, as floats."""

    def __init__(self, columns: list[str]):
        self.columns = columns
        self._rows: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: list[float]) -> None:
        self._rows.append(row + [np.nan] * (len(self.columns) - len(row)))

    def amend(self, figures: Mapping[str, float]) -> None:
        """Figures of the latest row that were not known yet."""
        for name, value in figures.items():
            self._rows[-1][self.columns.index(name)] = value

    def latest(self) -> dict[str, float]:
        if not self._rows:
            return dict.fromkeys(self.columns, np.nan)
        return dict(zip(self.columns, self._rows[-1], strict=True))

    def column(self, name: str) -> list[float]:
        i = self.columns.index(name)
        return [row[i] for row in self._rows]

    def cut(self, num_rows: int) -> None:
        """Leave out what came after so many."""
        del self._rows[num_rows:]

    def as_array(self) -> np.ndarray:
        return np.array(self._rows, float).reshape(len(self._rows), len(self.columns))

    def restore(self, table: np.ndarray) -> None:
        self._rows = [list(map(float, row)) for row in table]

    def as_history(self) -> FitHistory:
        table = self.as_array()
        return FitHistory(
            {
                name: table[:, i].astype(int) if name in COUNTS else table[:, i].copy()
                for i, name in enumerate(self.columns)
            }
        )
