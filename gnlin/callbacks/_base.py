"""What a callback is told of a run, and when."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import PyTree


if TYPE_CHECKING:
    from .._common._history import History


class Run(abc.ABC):
    """A run of [`gnlin.fit`][], as its callbacks see it."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """The number of steps made so far."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """The maximum number of steps, or `None` if the data do not tell it."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """The number of epochs made so far."""

    @property
    @abc.abstractmethod
    def row(self) -> Mapping[str, float]:
        """The latest row of the history, by column. Only `record` changes it."""

    @property
    @abc.abstractmethod
    def history(self) -> "History":
        """The history so far."""

    @property
    @abc.abstractmethod
    def model(self) -> PyTree:
        """The model as trained so far."""

    @property
    @abc.abstractmethod
    def model_state(self) -> PyTree:
        """The model's state, or `None` if it has none. It is ready for inference, as that
        of the result: if the data are arrays or a list, the running statistics of batch
        normalisation are taken at the present parameters when this is read."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Why the run ended, as in `result.reason`. It is empty during the run and if all
        steps were made."""

    @property
    @abc.abstractmethod
    def linearisation_point(self) -> PyTree:
        """The model at the linearisation point, if it stays across batches; or `None`."""

    @abc.abstractmethod
    def record(self, figures: Mapping[str, float]) -> None:
        """Put figures into the latest row of the history, in the callback's `columns`."""

    @abc.abstractmethod
    def stop(self, reason: str, *, failed: bool = False) -> None:
        """End the run after this event, unless it has already ended. With `failed` the
        run warns and does not count as successful."""

    @abc.abstractmethod
    def arrays(self) -> list[np.ndarray]:
        """Return copies of the model's parameters and state, for `set_arrays`."""

    @abc.abstractmethod
    def set_arrays(self, arrays: list[np.ndarray]) -> None:
        """Make the run return these parameters and state instead of the last."""


class Callback:
    """Base class of callbacks. Override the methods of the events that you need. Other
    methods must not begin with `on_`.

    !!! example

        ```python
        class PrintLoss(gnlin.callbacks.Callback):
            def on_epoch(self, run):
                print(run.epoch, run.row["loss"])

        class BiasNorm(gnlin.callbacks.Callback):
            columns = ("bias_norm",)

            def on_epoch(self, run):
                norm = jnp.linalg.norm(run.model.layers[-1].bias)
                run.record({"bias_norm": float(norm)})
        ```

    **Attributes:**

    - `columns`: the columns of the history that the callback fills, by `run.record`.
    """

    columns: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        events = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in events:
                raise TypeError(
                    f"`{cls.__name__}.{name}` is not the name of an event, which are "
                    f"{', '.join(events)}."
                )

    def on_start(self, run: Run) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step(self, run: Run) -> None:
        """Called after each step."""

    def on_feature_update(self, run: Run) -> None:
        """Called after each step that linearised at a new point."""

    def on_validation(self, run: Run) -> None:
        """Called after each validation; `run.row` has its figures."""

    def on_epoch(self, run: Run) -> None:
        """Called after each epoch."""

    def on_checkpoint(self, run: Run) -> None:
        """Called after a checkpoint was written."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, whatever the reason."""

    def state(self) -> PyTree:
        """Return arrays, numbers and strings to keep in checkpoints. This is called after
        each step. Structure and shapes must always be the same, and arrays must be
        replaced rather than changed in place."""
        return None

    def restore(self, state: PyTree) -> None:
        """Restore what `state` returned, in a resumed run. It is not called if that was
        `None`."""
