"""Tables of whole runs, times to a loss, growth and compilation: small, and without
absolute times."""

import dataclasses
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._modules import summary, TABLES
from benchmarks.speed import (
    contenders,
    devices,
    growth,
    least_squares,
    problem,
    start,
    sweeps,
    task as tasks,
    time_to_loss,
)
from benchmarks.speed.timing import Case, Timing


@pytest.fixture(scope="module")
def task():
    return tasks.quintic(width=4, num_examples=6)


@pytest.fixture(scope="module")
def line():
    """Fit ten points of a line by a linear network, which any method can."""
    x = jnp.linspace(-1.0, 1.0, 10)[:, None]
    make = lambda key: eqx.nn.MLP(1, 1, 3, 0, key=key)
    data = x, 2 * x + 1
    return time_to_loss._regression("line", make, data, 2, 1e-3, 2_000)


@pytest.mark.parametrize("name", ["sweep", "growth", "training", "start"])
def test_tables_are_registered(name):
    assert summary(TABLES[name]) != "(not installed)"


#
# Whole runs
#


@pytest.mark.exhaustive
def test_one_program_gives_the_losses_of_the_loop(task):
    grid = sweeps.grid_of(task, num_seeds=2, num_dampings=3)
    assert grid.name == "6 runs"
    rows = sweeps.whole_runs(grid, 1, num_steps=2, batch_sizes=(4,))
    assert [row.variant for row in rows] == [
        "a loop over the compiled run",
        "the same steps in one run, with no call",
        "a loop over gnlin.solve",
        "one program, 4 at once",
    ]
    assert all(0 < row.ratio < math.inf for row in rows)
    assert all(row.step_error < 1e-10 for row in rows if row.library == "gnlin")
    assert sweeps._figure(grid, rows).measured == pytest.approx(1 / rows[-1].ratio)


#
# Times to a loss
#


@pytest.mark.exhaustive
def test_all_reach_the_line_and_stop_there(line):
    for contender in (
        *contenders.first_order(line),
        contenders.lbfgs(line),
        contenders.levenberg_marquardt(line),
        *least_squares.optimistix(line),
        least_squares.scipy(line),
    ):
        tuned = time_to_loss.tune(contender, line)
        assert tuned is not None, contender
        assert len(tuned.steps) == 2
        again = contender.find(tuned.setting, line.starts[0], tuned.steps[0])
        assert again == tuned.steps[0], contender


@pytest.mark.slow
def test_runs_that_miss_the_loss_have_no_time(line):
    adam, momentum = contenders.first_order(line)
    slow = dataclasses.replace(adam, most_steps=2)
    rows = time_to_loss.times_to(line, [slow, momentum], num_rounds=1)
    assert [row.seconds is None for row in rows] == [False, True]
    assert "not reached in 2 steps" in rows[1].note


@pytest.mark.slow
def test_problems_have_their_sizes():
    sinc = time_to_loss.sinc(0.03, num_starts=1)
    assert problem.num_parameters(sinc) == 61
    assert problem.small(sinc)
    assert problem.num_parameters(time_to_loss.quintic(0.1)) == 7801
    cnn = time_to_loss.digits_by("cnn", 1, 0.1)
    value = cnn.value(cnn.starts[0], cnn.data)
    assert value == pytest.approx(np.log(10), rel=0.2)


#
# Growth
#


def test_exponent_of_a_power_law():
    sizes = (2, 4, 8)
    timings = [
        Timing(Case("", "", lambda: None), (3.0 * n**2, 5.0 * n**2), 0.0) for n in sizes
    ]
    assert growth.exponent(sizes, timings) == pytest.approx(2)


def test_growth_has_a_row_a_size_and_an_exponent(task):
    axis = growth.Axis("m", (4, 6), "expected 1", [lambda m: growth.limit(task)])
    rows = growth.grown(axis, 1)
    assert [row.variant.split(":")[0] for row in rows] == [
        "m = 4",
        "m = 6",
        "exponent in m",
    ]
    assert "expected 1" in rows[-1].note


@pytest.mark.parametrize("width", [25, 400])
def test_width_is_found_again(width):
    assert growth._width(tasks.quintic(width, 1).num_parameters) == width


@pytest.mark.exhaustive
def test_programs_that_grow_make_their_steps(task):
    for case in (
        growth.damped(task),
        growth.inner_steps(task)(10),
        growth.sweep(task)(3),
    ):
        assert case.count(case.run()) >= 1


def test_bytes_are_of_collectives_in_loops():
    inside = 'metadata={op_name="jit(run)/while/body/dot"}'
    program = f"""
      %a = f64[4,2]{{1,0}} all-reduce(%b), {inside}
      %c = (f64[3], /*index=1*/s32[]) all-gather-start(%d), {inside}
      %e = f64[100] all-reduce(%b), metadata={{op_name="jit(run)/dot"}}
      %f = f64[100] add(%b), {inside}
    """
    assert devices.bytes_in_loops(program) == 8 * 8 + 3 * 8 + 4


@pytest.mark.exhaustive
def test_two_devices_communicate():
    found = devices.on_devices(2, 1, 1, [devices.DAMPED])[devices.DAMPED]
    kernel = (2 * devices.NUM_EXAMPLES) ** 2 * 8
    assert found["bytes"] >= kernel
    assert 0 < found["seconds"] < math.inf


#
# Compiling
#


@pytest.mark.slow
def test_the_time_to_compile_is_reported(task):
    rows = start.compiling(task.name, [start._by_hand(task)], 1)
    assert rows[0].seconds > 0
