"""Train networks with the prior of the largest evidence, and compare their errors on new
data with those of `gnlin.fit` without a prior and of Adam."""

import argparse
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer, load_diabetes, make_friedman1

import gnlin


RATES = 1e-3, 3e-3, 1e-2, 3e-2
SQUARED, SOFTMAX = gnlin.SquaredError(), gnlin.SoftmaxCrossEntropy()


class Task(NamedTuple):
    name: str
    data: Callable
    num_train: int
    loss: gnlin.authoring.AbstractLoss
    batch_size: int


# --8<-- [start:evidence]
def with_evidence(model, data, loss, *, rounds=3, **settings):
    """Train with the prior that the round before found most probable."""
    noise = 1.0 if isinstance(loss, gnlin.SquaredError) else None
    prior = 1.0
    for _ in range(rounds):
        result = gnlin.fit(model, data, loss=loss, prior=prior, **settings)
        found = gnlin.predict.posterior(result, data, loss=loss, noise=noise).tuned()
        # Squared error does not know the noise, so a training's prior is in units of it.
        prior = found.prior if noise is None else found.prior / found.noise
    return gnlin.fit(model, data, loss=loss, prior=prior, **settings), prior
    # --8<-- [end:evidence]


def friedman(seed: int):
    """Draw Friedman's first function with noise of variance 1."""
    x, y = make_friedman1(6_144, noise=1.0, random_state=seed)
    return 2 * x - 1, y[:, None] - 14.4


def diabetes(seed: int):
    x, y = load_diabetes(return_X_y=True)
    return x / x.std(axis=0), (y[:, None] - y.mean()) / y.std()


def breast_cancer(seed: int):
    x, labels = load_breast_cancer(return_X_y=True)
    return (x - x.mean(axis=0)) / x.std(axis=0), labels


TASKS = (
    Task("Friedman's function, noise of variance 1", friedman, 2_048, SQUARED, 128),
    Task("diabetes", diabetes, 300, SQUARED, 100),
    Task("breast cancer, log loss", breast_cancer, 300, SOFTMAX, 100),
)


def errors(task: Task, seed: int, epochs: int) -> dict[str, float]:
    """Return the mean loss on new data for each way to train; squared errors are not
    halved."""
    x, y = (jnp.asarray(a) for a in task.data(seed))
    x = x.astype(jnp.float32)
    y = y if task.loss is SOFTMAX else y.astype(jnp.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    train, new = order[: task.num_train], order[task.num_train :]
    num_outputs = 2 if task.loss is SOFTMAX else 1
    key = jax.random.key(seed)
    model = eqx.nn.MLP(x.shape[1], num_outputs, 32, 2, activation=jnp.tanh, key=key)
    data = x[train], y[train]
    settings = {"batch_size": task.batch_size, "key": key, "progress": False}

    def error(model) -> float:
        outputs = jax.vmap(model)(x[new])
        if task.loss is SQUARED:
            return float(jnp.mean((outputs - y[new]) ** 2))
        chances = jax.nn.log_softmax(outputs)
        return -float(jnp.mean(jnp.take_along_axis(chances, y[new, None], 1)))

    def adam(rate: float, prior: float | None) -> float:
        # As many passes through the network as `gnlin.fit` makes by default.
        settled = settings | {"epochs": 3 * epochs, "prior": prior}
        solver = optax.adam(rate)
        return error(gnlin.fit(model, data, solver, loss=task.loss, **settled).model)

    settings_of_gnlin = settings | {"epochs": epochs}
    found, prior = with_evidence(model, data, task.loss, **settings_of_gnlin)
    plain = gnlin.fit(model, data, loss=task.loss, **settings_of_gnlin)
    return {
        "no prior": error(plain.model),
        "largest evidence": error(found.model),
        "Adam": min(adam(rate, None) for rate in RATES),
        "Adam, this prior": min(adam(rate, prior) for rate in RATES),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, no large data")
    quick = parser.parse_args().quick
    # A few epochs do not reach the minimum of a classifier, and a posterior says so.
    warnings.filterwarnings("ignore", message=".*standard deviations of the posterior")
    seeds, tasks, epochs = (1, TASKS[1:], 10) if quick else (5, TASKS, 20)
    for i, task in enumerate(tasks):
        rows = [errors(task, seed, epochs) for seed in range(seeds)]
        if i == 0:
            print(f"| | {' | '.join(rows[0])} |\n|---|{'---|' * len(rows[0])}")
        cells = []
        for name in rows[0]:
            values = np.array([row[name] for row in rows])
            cells.append(f"{values.mean():.3f} ± {np.ptp(values) / 2:.3f}")
        print(f"| {task.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
