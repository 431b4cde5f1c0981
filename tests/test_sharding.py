"""Several devices, several processes: the same numbers, and arrays stay where they were.

In processes of their own, since the number of devices is fixed before jax starts.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sharded_problems import ALL, FEW


ROOT = Path(__file__).resolve().parents[1]

# Conjugate gradients to rounding stop at a step that depends on the order of sums.
TO_ROUNDING, ITERATED = 1e-11, 1e-8
TIMEOUT = 1200


def start(*arguments):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",  # otherwise it fills a pipe that nobody reads yet
    }
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "sharded_problems.py", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(child):
    """Return the output of a finished process."""
    try:
        out, err = child.communicate(timeout=TIMEOUT)
    finally:
        child.kill()
    assert child.returncode == 0, err[-3000:]
    return dict(json.loads(line) for line in out.splitlines() if line.startswith('["'))


@pytest.fixture(scope="module")
def few():
    return finished(start("few"))


@pytest.fixture(scope="module")
def every():
    return finished(start("all"))


def check(name, found):
    limit = ITERATED if "matrix-free" in name else TO_ROUNDING
    assert found["difference"] <= limit
    assert found.get("kept", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEW if "traffic" not in name])
def test_as_on_one_device(few, name):
    check(name, few[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_every_solver_as_on_one_device(every, name):
    check(name, every[name])


@pytest.mark.slow
def test_a_matrix_free_product_is_one_all_reduce(few):
    found = few["traffic: matrix-free"]
    of_parameters = 8 * found["p"]
    collectives = found["collectives"]
    assert {kind for kind, _, _ in collectives} == {"all-reduce"}
    # Inside the loop of outer steps: the product of conjugate gradients, and the
    # verdict's probes.
    assert [size for _, size, depth in collectives if depth == 2] == 2 * [of_parameters]
    assert max(depth for _, _, depth in collectives) == 2
    # The gradient, its rounding and the verdict's product, with losses
    around = [size for _, size, depth in collectives if depth < 2]
    assert 3 * of_parameters < sum(around) < 3 * of_parameters + 200


@pytest.mark.slow
def test_the_kernel_is_one_all_reduce(few):
    found = few["traffic: eigh"]
    m, p, collectives = found["m"], found["p"], found["collectives"]
    with_the_loss = 8 * m**2 + 8
    assert [size for _, size, _ in collectives].count(with_the_loss) == 1
    assert max(size for _, size, _ in collectives) == with_the_loss
    # Only cotangents are gathered, not the Jacobian.
    assert sum(size for _, size, _ in collectives) < 8 * m * p / 8


@pytest.mark.exhaustive
def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [start("processes", index, 2, port) for index in range(2)]
    try:
        told = [finished(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert told[0] == told[1]
    assert len(told[0]) == 2
    for name, found in told[0].items():
        check(name, found)
