"""Further columns of the history: measures of the model, and of its kernel's change."""

from collections.abc import Callable, Mapping
from typing import Any, get_args, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .. import features
from .._common._checks import check_one_of, check_period
from .._tangent_kernel._tangent_kernel import TangentKernel
from ._base import Callback, Run


Event = Literal["step", "feature_update", "validation", "epoch"]
Every = Event | int


class _Looks(Callback):
    """A callback that calls `look` at one kind of event."""

    every: Every

    def look(self, run: Run) -> None:
        raise NotImplementedError

    def on_step(self, run: Run) -> None:
        every = 1 if self.every == "step" else self.every
        if not isinstance(every, str) and run.step % every == 0:
            self.look(run)

    def on_feature_update(self, run: Run) -> None:
        if self.every == "feature_update":
            self.look(run)

    def on_validation(self, run: Run) -> None:
        if self.every == "validation":
            self.look(run)

    def on_epoch(self, run: Run) -> None:
        if self.every == "epoch":
            self.look(run)


def _check_every(every: object) -> None:
    if isinstance(every, str):
        check_one_of("every", every, get_args(Event), "; or pass a number of steps")
    else:
        check_period("every", every)


class Measure(_Looks):
    """Adds figures of the model, such as measures of `gnlin.features`, to the history.

    **Arguments:**

    - `measures`: functions of the model, by name. Each name becomes a column.
    - `every`: the event to measure at: `"step"`, `"feature_update"`, `"validation"` or
        `"epoch"`; or a number of steps. In other rows the columns are NaN.

    !!! example

        ```python
        gnlin.callbacks.Measure(
            {"distance": lambda now: gnlin.features.parameter_distance(now, model)},
            every=10,
        )
        ```
    """

    def __init__(
        self,
        measures: Mapping[str, Callable[[PyTree], Any]],
        every: Every = "epoch",
    ):
        by_name = isinstance(measures, Mapping) and all(
            isinstance(name, str) and callable(f) for name, f in measures.items()
        )
        if not (measures and by_name):
            raise ValueError("`measures` must be functions of the model, by name.")
        _check_every(every)
        self.measures = dict(measures)
        self.every = every
        self.columns = tuple(measures)

    def look(self, run: Run) -> None:
        """Measure the model, and write the figures to the latest row."""
        model = run.model
        run.record({name: float(f(model)) for name, f in self.measures.items()})


class KernelVelocity(_Looks):
    r"""Adds a column `kernel_velocity` to the history: the speed at which the kernel
    changes. It is the [`gnlin.features.kernel_distance`][] from the previous kernel,
    divided by the number of steps. The first kernel belongs to the initial model.

    **Arguments:**

    - `inputs`: a batch of n inputs. Their kernel of `(n c)^2` numbers is kept until the
        next event, and in checkpoints.
    - `every`: the event to measure at, as in [`gnlin.callbacks.Measure`][].
    - `filter_spec`: the parameters of the kernel, as in [`gnlin.TangentKernel`][].

    !!! example

        ```python
        gnlin.callbacks.KernelVelocity(inputs, every=10)
        ```

    ??? cite "Reference"

        S. Fort et al., *Deep Learning versus Kernel Learning*, 2020.
    """

    columns = ("kernel_velocity",)

    def __init__(
        self,
        inputs: PyTree[Array],
        every: Every = "epoch",
        filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    ):
        _check_every(every)
        self.inputs = inputs
        self.every = every
        self.filter_spec = filter_spec

    def on_start(self, run: Run) -> None:
        self._keep(self._kernel(run), run)

    def look(self, run: Run) -> None:
        """Compare the kernel with the previous one, and write its velocity."""
        now, num_steps = self._kernel(run), run.step - int(self.last_step)
        if num_steps > 0:
            distance = float(features.kernel_distance(now, jnp.asarray(self.last)))
            run.record({"kernel_velocity": distance / num_steps})
            self._keep(now, run)

    def _kernel(self, run: Run) -> features.Kernel:
        model, state, spec = run.model, run.model_state, self.filter_spec
        return TangentKernel(model, filter_spec=spec, state=state)(self.inputs)

    def _keep(self, kernel: features.Kernel, run: Run) -> None:
        self.last, self.last_step = np.asarray(kernel), np.array(run.step)

    def state(self) -> PyTree:
        return self.last, self.last_step

    def restore(self, state: PyTree) -> None:
        self.last, self.last_step = state
