"""The history of a run while it grows."""

from collections.abc import Mapping

import numpy as np

from .._common._history import History


class Rows:
    """A growing table of floats."""

    def __init__(self, columns: list[str]):
        for i, name in enumerate(columns):
            if name in columns[:i]:
                raise ValueError(
                    f"The history would have two columns {name!r}: rename a metric or "
                    "the column of a callback."
                )
        self.columns = columns
        self._rows: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: list[float]) -> None:
        self._rows.append(row + [np.nan] * (len(self.columns) - len(row)))

    def amend(self, figures: Mapping[str, float]) -> None:
        """Fill in columns of the latest row."""
        for name, value in figures.items():
            if name not in self.columns:
                raise ValueError(
                    f"The history has no column {name!r}: name it in the `columns` of "
                    "the callback that records it."
                )
            self._rows[-1][self.columns.index(name)] = value

    def latest(self) -> dict[str, float]:
        if not self._rows:
            return dict.fromkeys(self.columns, np.nan)
        return dict(zip(self.columns, self._rows[-1], strict=True))

    def cut(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows only."""
        del self._rows[num_rows:]

    def as_array(self) -> np.ndarray:
        return np.array(self._rows, float).reshape(len(self._rows), len(self.columns))

    def restore(self, table: np.ndarray) -> None:
        self._rows = [list(map(float, row)) for row in table]

    def as_history(self) -> History:
        table = self.as_array()
        return History({name: table[:, i].copy() for i, name in enumerate(self.columns)})
