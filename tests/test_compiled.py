"""Limits on what a first call compiles; XLA's time is proportional to the fusions."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


HERE = pathlib.Path(__file__).parent

# Upper bounds on copies of the function and on fusions: 3 % above the counts with jax
# 0.10.1 on a CPU.
MOST = {
    "a fit": (3, 125),
    "a damped fit": (2, 62),
    "solve": (4, 295),
    "solve, softmax": (2, 448),
    "fit, softmax": (5, 406),
}


def check(*programs):
    script = HERE / "compiled_programs.py"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(HERE.parent)
    # LLVM optimises after XLA has made the fusions, so their number is the same without
    # it.
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, str(script), *programs]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    for program in programs:
        copies, fusions = MOST[program]
        assert counts[program]["copies"] <= copies, program
        assert counts[program]["fusions"] <= fusions, program


@pytest.mark.slow
def test_size_of_all_compiled_programs():
    check(*MOST)
