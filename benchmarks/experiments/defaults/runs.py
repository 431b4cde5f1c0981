"""One run of a task, by `gnlin.fit` or by Adam, and what it has come to."""

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

from .tasks import Examples, Task


Figures = dict[str, float | ndarray]


def run_task(
    task: Task,
    seed: int,
    solver: Any = None,
    *,
    batch_size: int | None = 128,
    epochs: int | None = None,
    num_looks: int = 20,
    **options: Any,
) -> Figures:
    """A run of `gnlin.fit`, with its own default for `None` as the solver.

    **Returns:**

    - `score`, `train_loss`: on test and training examples in the end;
    - `scores`, `validation_scores`, `losses`: at looks evenly spaced in steps, the last
        of the batches;
    - `best_score`: on test examples, at the look with the best validation score;
    - `steps`, `passes`, `seconds`, `diverged`; the passes are through the model on as many
        examples as a batch has, forward, tangent and transposed ones.
    """
    data, (model, state) = task.data(seed), task.start(seed)
    epochs = epochs or task.epochs
    num_batches = len(data.train[1]) // batch_size if batch_size else 1
    every = max(1, epochs * num_batches // num_looks)
    tested = TestScore(task, data.test)
    given = () if solver is None else (solver,)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        # That a run has diverged is told below.
        warnings.filterwarnings("ignore", message="`gnlin.fit`")
        result = gnlin.fit(
            model,
            data.train,
            *given,
            loss=task.loss,
            batch_size=batch_size,
            epochs=epochs,
            key=jax.random.key(seed),
            state=state,
            validation=data.validation,
            validate_every=every,
            metrics={"score": task.metric},
            callbacks=[tested],
            progress=False,
            **options,
        )
    seconds = time.perf_counter() - begun
    history = result.history
    looked = np.flatnonzero(~np.isnan(history["validation_score"]))
    scores, validation = (
        history["test_score"][looked],
        history["validation_score"][looked],
    )
    outputs = predict(task, result.model, result.state, data.train[0])
    test_outputs = predict(task, result.model, result.state, data.test[0])
    train_loss = mean_loss(task, outputs, data.train[1])
    sign = 1 if task.higher_is_better else -1
    ended = [optx.RESULTS.nonfinite, optx.RESULTS.nonlinear_divergence]
    return {
        "score": float(task.metric(test_outputs, jnp.asarray(data.test[1]))),
        "train_loss": float(train_loss),
        "scores": scores,
        "validation_scores": validation,
        "losses": history["loss"][looked],
        "best_score": float(scores[np.argmax(sign * validation)]),
        "steps": result.stats["num_steps"],
        "passes": num_passes(result.stats),
        "seconds": seconds,
        "diverged": any(bool(result.result == each) for each in ended),
    }


def num_passes(stats: dict[str, Any]) -> int:
    """Through the model: tangent and transposed ones, and a forward pass for each
    linearisation and each trial of a step."""
    return int(
        stats["num_jvps"]
        + stats["num_vjps"]
        + stats["num_feature_updates"]
        + stats["num_accepted_steps"]
        + stats["num_rejected_steps"]
    )


class TestScore(gnlin.callbacks.Callback):
    """On the test examples, whenever `fit` looks at those for validation."""

    columns = ("test_score",)

    def __init__(self, task: Task, data: Examples):
        self.task = task
        self.data = data

    def on_validation(self, run: Any) -> None:
        inputs, targets = self.data
        outputs = predict(self.task, run.model, run.model_state, inputs)
        score = self.task.metric(outputs, jnp.asarray(targets))
        run.record({"test_score": float(score)})


def predict(task: Task, model: PyTree, state: PyTree, inputs: ndarray) -> Array:
    """Without dropout, and with the statistics that training has gathered."""
    arrays, static = eqx.partition(eqx.nn.inference_mode(model), eqx.is_array)
    return _predict(task, static, arrays, state, jnp.asarray(inputs))


@eqx.filter_jit
def _predict(task, static, arrays, state, inputs):
    model = eqx.combine(arrays, static)
    return apply(task, model, state, inputs, None)[0]


def apply(task: Task, model: PyTree, state: PyTree, inputs: Array, key: Any):
    """(the outputs on a batch, the new state)"""
    if task.has_state:
        batched = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        return batched(inputs, state)
    if key is None:
        return jax.vmap(model)(inputs), None
    keys = jax.random.split(key, len(inputs))
    return jax.vmap(lambda x, key: model(x, key=key))(inputs, keys), None


def mean_loss(task: Task, outputs: Array, targets: ndarray | Array) -> Float[Array, ""]:
    """Of one example."""
    return jnp.mean(jax.vmap(task.loss.value)(outputs, jnp.asarray(targets)))
