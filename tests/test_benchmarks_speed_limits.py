"""Tables of wide problems, kernels and the device: numbers are right; times are not
tested."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks.cnn import digits_cnn
from benchmarks.speed import (
    cross_entropy_steps,
    device,
    kernels,
    memory,
    task as tasks,
    wide,
)


@pytest.mark.exhaustive
def test_wide_steps_are_solved():
    task = tasks.quintic(width=5, num_examples=6)
    rows = wide.damped(task)
    measured = [row for row in rows if row.seconds is not None]
    assert [row.library for row in measured[:2]] == ["hand-written", "gnlin"]
    assert all(row.solved for row in measured[:2])
    assert all(0 < row.ratio < math.inf for row in measured)
    assert {row.library for row in rows} >= {"optimistix", "jaxopt"}


def test_linear_residual_by_products_matches_the_oracle():
    task = tasks.quintic(width=5, num_examples=6)
    step = 0.5 * task.oracle.damped(tasks.DAMPING)
    case = kernels.Case("", "", lambda: None, step=lambda: step)
    found = wide.linear_residual(task)(case)
    expected = task.oracle.linear_residual(step, tasks.DAMPING)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.exhaustive
def test_kernels_agree(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 7)
    images = jax.random.normal(jax.random.key(1), (3, 1, 8, 8))
    model = tasks.in_double(digits_cnn(jax.random.key(0)))
    rows = kernels.of_digits(model, images, 1)
    assert len(rows) == 3
    assert all(row.step_error < 1e-12 for row in rows)
    (row,) = kernels.of_resnet(2, 2)
    assert row.step_error < 1e-5


@pytest.mark.slow
def test_the_device_is_reported():
    comparisons = list(device.comparisons(quick=True))
    assert [comparison.rows[0].library for comparison in comparisons] == ["jax", "jax"]
    for comparison in comparisons:
        assert all("GFLOP/s" in row.note for row in comparison.rows)


def test_peak_memory_counts_live_arrays():
    with memory.PeakMemory() as peak:
        x = jnp.ones(2**24).block_until_ready()  # 128 MiB
    if peak.bytes is not None:  # on Linux
        assert 2**26 < peak.bytes < 2**29
    del x


@pytest.mark.exhaustive
def test_inner_steps_on_cross_entropy_agree(monkeypatch):
    powers = {how: [4] for how in cross_entropy_steps.PERIODS}
    monkeypatch.setattr(cross_entropy_steps, "PERIODS", powers)
    rows = cross_entropy_steps.rows(10**4, 1, num_images=4)
    assert len(rows) == 3
    (flow,) = [row for row in rows if row.note == "gradient flow"]
    assert flow.step_error < 1e-3
