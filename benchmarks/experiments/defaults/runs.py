"""One run of a task by `gnlin.fit`, and its results."""

import math
import time
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Float, PyTree
from numpy import ndarray

import gnlin

from ...training import padded
from .tasks import Examples, Task, Trainable


Figures = dict[str, float | ndarray]
DIVERGED = optx.RESULTS.nonfinite, optx.RESULTS.nonlinear_divergence
BATCH_SIZE = 128


def run_task(
    task: Task,
    seed: int,
    solver: Any = None,
    *,
    batch_size: int | None = BATCH_SIZE,
    epochs: int | None = None,
    num_looks: int = 20,
    **options: Any,
) -> Figures:
    """Run a task by `gnlin.fit`, with its own default if `solver` is `None`.

    **Returns:**

    - `score`, `train_loss`: the final test score, and the final training loss;
    - `test_scores`, `validation_scores`: the scores at evenly spaced looks;
    - `best_score`: the test score at the look with the best validation score;
    - `steps`, `seconds`, `diverged`;
    - `passes`: the number of passes through the model on a batch of examples: forward,
        tangent and transposed ones.
    """
    data, start = task.data(seed), task.start(seed)
    epochs = epochs or task.epochs
    num_steps = epochs * (len(data.train[1]) // batch_size if batch_size else 1)
    first_loss = mean_loss(task, *start, data.train)
    begun = time.perf_counter()
    result = fitted(
        task,
        start,
        data.train,
        solver,
        key=jax.random.key(seed),
        batch_size=batch_size,
        epochs=epochs,
        validation=data.validation,
        validate_every=math.ceil(num_steps / num_looks),
        metrics={"score": task.metric},
        callbacks=[TestScore(task, data.test)],
        **options,
    )
    seconds = time.perf_counter() - begun
    history = result.history
    looked = ~np.isnan(history["test_score"])
    tested, validated = (
        padded(history[name][looked], num_looks)
        for name in ("test_score", "validation_score")
    )
    train_loss = mean_loss(task, result.model, result.state, data.train)
    return {
        "score": score(task, result.model, result.state, data.test),
        "train_loss": train_loss,
        "test_scores": tested,
        "validation_scores": validated,
        "best_score": float(tested[np.argmax(task.sign * validated)]),
        "steps": result.stats["num_steps"],
        "passes": num_passes(result.stats, across=batch_size is not None),
        "seconds": seconds,
        "diverged": has_diverged(result, first_loss, train_loss),
    }


def fitted(
    task: Task, start: Trainable, train: Examples, solver: Any = None, **options: Any
) -> gnlin.Solution:
    """Train a task by `gnlin.fit`, with its own default if `solver` is `None`."""
    given = () if solver is None else (solver,)
    with warnings.catch_warnings():
        # `has_diverged` says whether a run has diverged.
        warnings.filterwarnings("ignore", message="`gnlin.fit`")
        result = gnlin.fit(
            start.model,
            train,
            *given,
            loss=task.loss,
            state=start.state,
            progress=False,
            **options,
        )
    if result.reason.endswith("interrupted"):
        raise KeyboardInterrupt
    return result


def has_diverged(result: gnlin.Solution, first_loss: float, last_loss: float) -> bool:
    ended_early = any(bool(result.result == each) for each in DIVERGED)
    return ended_early or not last_loss <= first_loss


def num_passes(stats: dict[str, Any], across: bool) -> int:
    """Return the number of passes through the model: tangent and transposed ones, and a
    forward pass for each linearisation and each trial of a step. Across batches each
    linearisation takes one more, which evaluates the last step on the next batch."""
    forward = stats["num_feature_updates"] * (2 if across else 1)
    trials = stats["num_accepted_steps"] + stats["num_rejected_steps"]
    return int(stats["num_jvps"] + stats["num_vjps"] + forward + trials)


class TestScore(gnlin.callbacks.Callback):
    """Records the test score whenever `fit` validates."""

    columns = ("test_score",)

    def __init__(self, task: Task, data: Examples):
        self.task = task
        self.data = data

    def on_validation(self, run: Any) -> None:
        found = score(self.task, run.model, run.model_state, self.data)
        run.record({"test_score": found})


def score(task: Task, model: PyTree, state: PyTree, data: Examples) -> float:
    return float(_mean(task.metric, task, model, state, _on_device(data)))


def mean_loss(task: Task, model: PyTree, state: PyTree, data: Examples) -> float:
    return float(_mean(task.mean_loss, task, model, state, _on_device(data)))


def _on_device(data: Examples) -> tuple[Array, Array]:
    inputs, targets = data
    return jnp.asarray(inputs), jnp.asarray(targets)


@eqx.filter_jit
def _mean(figure, task, model, state, data) -> Float[Array, ""]:
    inputs, targets = data
    outputs, _ = task.apply(eqx.nn.inference_mode(model), state, inputs)
    return figure(outputs, targets)
