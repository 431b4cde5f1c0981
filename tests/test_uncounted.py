"""Batches in which no target counts, and signed weights."""

import math

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gnlin


LOSS = gnlin.SoftmaxCrossEntropy(ignore_index=-1)
rng = np.random.default_rng(0)
INPUTS = rng.normal(size=(160, 2))
LABELS = (INPUTS[:, 0] * INPUTS[:, 1] > 0).astype(int)
BATCHES = [(INPUTS[i : i + 32], LABELS[i : i + 32]) for i in range(0, 160, 32)]
IGNORED = INPUTS[:32], np.full(32, -1)
WEIGHTLESS = INPUTS[:32], LABELS[:32], np.zeros(32)


def network():
    return eqx.nn.MLP(2, 2, 5, 1, jnp.tanh, key=jax.random.key(0))


def flat(model):
    return jax.flatten_util.ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0]


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.LevenbergMarquardt(),
        gnlin.DampedGaussNewton(1.0),
        gnlin.IterativeLinearisation(3, learning_rate=0.1, momentum=0.9),
        optax.adam(1e-2),
    ],
    ids=["levenberg_marquardt", "damped", "iterative", "adam"],
)
def test_a_batch_in_which_nothing_counts_makes_no_step(solver):
    options = {"loss": LOSS, "progress": False}
    first, then = BATCHES[:2], BATCHES[2:4]
    plain = gnlin.fit(network(), first + then, solver, steps=4, **options)
    gap = gnlin.fit(network(), [*first, IGNORED, *then], solver, steps=5, **options)
    np.testing.assert_array_equal(flat(gap.model), flat(plain.model))
    losses = np.insert(plain.history.loss, 2, np.nan)
    np.testing.assert_array_equal(gap.history.loss, losses)
    assert gap.history["step_norm"][2] == 0
    assert gap.history["damping"][2] == gap.history["damping"][1]


def test_batches_of_weight_zero_before_and_among_others():
    whole = [(*batch, np.ones(32)) for batch in BATCHES]
    batches = [WEIGHTLESS, *whole[:3], WEIGHTLESS, *whole[3:]]
    loss = gnlin.SoftmaxCrossEntropy()
    options = {"loss": loss, "progress": False}
    stop = gnlin.callbacks.EarlyStop(patience=1, monitor="loss")
    solution = gnlin.fit(
        network(),
        batches,
        epochs=4,
        validation=BATCHES[0],
        validate_every=5,
        callbacks=[stop],
        **options,
    )
    plain = gnlin.fit(network(), whole, epochs=4, **options)
    np.testing.assert_array_equal(flat(solution.model), flat(plain.model))
    assert np.isnan(solution.history.loss).sum() == 8


@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_run_in_which_nothing_counts_warns_once(batch_size):
    with pytest.warns(UserWarning, match="no target counts") as told:
        solution = gnlin.fit(
            network(), IGNORED, loss=LOSS, steps=3, batch_size=batch_size, progress=False
        )
    assert len(told) == 1
    np.testing.assert_array_equal(flat(solution.model), flat(network()))
    with pytest.warns(UserWarning, match="no target counts"):
        gnlin.solve(network(), IGNORED, loss=LOSS)


def test_a_loss_that_is_not_finite_is_no_batch_without_targets():
    broken = np.full_like(INPUTS[:32], np.nan), LABELS[:32]
    with pytest.warns(UserWarning, match="The inputs of example 0 and of 31 more"):
        gnlin.fit(network(), [BATCHES[0], broken], loss=LOSS, steps=2, progress=False)


def test_traced_weights_that_are_negative_give_nan():
    weights = np.where(np.arange(160) == 3, -1.0, 1.0)

    @jax.jit
    def loss(weights):
        data = INPUTS, LABELS, weights
        return gnlin.solve(network(), data, loss=LOSS, max_steps=2).loss

    assert math.isnan(loss(weights))
    assert math.isfinite(loss(np.abs(weights)))
    with pytest.raises(ValueError, match="put signed weights, such as advantages, into"):
        gnlin.solve(network(), (INPUTS, LABELS, weights), loss=LOSS)


@pytest.mark.parametrize("driver", ["solve", "fit"])
@pytest.mark.parametrize("masked", [False, True])
def test_inputs_and_targets_that_are_not_finite_are_both_named(driver, masked):
    mask = np.arange(5) < np.arange(1, 6)[:, None]
    inputs = {"x": np.where(mask, 1.0, np.nan), "mask": mask}
    fill = lambda d: jnp.where(d["mask"], d["x"], 0 if masked else d["x"])
    model = lambda net, d: net(fill(d)), eqx.nn.Linear(5, 5, key=jax.random.key(0))
    where = "of example 0 and of 3 more"
    both = f"The inputs {where}, and the targets {where} are not"
    options = {"max_steps": 2} if driver == "solve" else {"steps": 2}
    with pytest.warns(UserWarning, match=both):
        getattr(gnlin, driver)(model, (inputs, np.where(mask, 1.0, np.nan)), **options)


def test_a_model_in_single_precision():
    """The row of a batch in which nothing counts has the types of any other."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0), dtype=np.float32)
    batches = [(x, np.array([0, 1] * 4)), (x, np.full(8, -1))]
    loss = gnlin.SoftmaxCrossEntropy(ignore_index=-1)
    for solver in (gnlin.LevenbergMarquardt(), optax.sgd(0.1)):
        result = gnlin.fit(model, batches, solver, loss=loss, epochs=1)
        np.testing.assert_array_equal(np.isnan(result.history.loss), [False, True])
