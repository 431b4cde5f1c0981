"""The example scripts run, and say and draw what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
# User code, and optax, may rely on JAX's promotion.
DEFAULTS = {
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
}


def run(name, *arguments):
    """Run a script as a user does, in single precision."""
    command = [sys.executable, EXAMPLES / name, "--quick", *arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **DEFAULTS}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def percentages(text):
    """Return the percentages in each row of a table, by its first cell."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if "%" in line)
    return {
        first: [float(x) for x in re.findall(r"([\d.]+)%", " | ".join(rest))]
        for first, *rest in rows
    }


def test_burgers():
    last = run("burgers.py").splitlines()[-1]
    error, estimate, after = map(float, last.split("|")[2:5])
    assert 0.8 < estimate / error < 1.25
    assert after < 0.1 * error < 0.01


def test_digits(tmp_path):
    run("digits.py", "--out", tmp_path)
    assert (tmp_path / "digits_training.png").stat().st_size > 10_000
    rows = percentages((tmp_path / "digits_training.md").read_text())
    assert len(rows) == 10
    assert rows["damped Gauss-Newton"][0] > 85
    assert rows["Adam"][0] > 60


def test_evidence():
    rows = run("evidence.py").splitlines()[2:]
    assert len(rows) == 2
    for row in rows:
        errors = map(float, re.findall(r"([\d.]+) ±", row))
        without_prior, with_evidence, adam, _ = errors
        assert with_evidence < 0.7 * without_prior
        assert with_evidence < 1.2 * adam


def test_function_space(tmp_path):
    said = run("function_space.py", "--out", tmp_path)
    for name in ("tangent_kernel.png", "uncertainty.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    shares = [int(x) for x in re.findall(r"\| (\d+) % \|", said)]
    assert shares[1] > shares[0] + 5
    assert 0.9 < float(said.split()[-1]) <= 1.0


def test_idea(tmp_path):
    said = run("idea.py", "--out", tmp_path)
    assert (tmp_path / "idea.png").stat().st_size > 10_000
    distances = [float(x) for x in re.findall(r"([\d.]+) from the targets", said)]
    assert max(distances[:2]) < 0.5 < distances[2]


def test_linear_probe():
    rows = percentages(run("linear_probe.py"))
    assert rows["layer 3"][1] > rows["layer 3"][0] + 5


def test_reactors():
    rows = [line.strip("| ").split(" | ") for line in run("reactors.py").splitlines()[2:]]
    solved = {(where, name): int(number) for where, name, number, _ in rows}
    ours = "gnlin.LevenbergMarquardt()"
    assert solved["near", ours] == 40
    assert solved["far", ours] >= 33
    far = sorted(n for (where, _), n in solved.items() if where == "far")
    assert far[-3] < 30  # of solvers that take no part of the undamped step


def test_transfer():
    rows = percentages(run("transfer.py"))
    assert len(rows["4"]) == 4
    assert all(x > 60 for x in rows["4"])


def test_ode_parameters():
    said = run("ode_parameters.py")
    assert re.search(r"^\| `ForwardMode` \|", said, re.MULTILINE)
    assert "converged in" in said


def test_posteriors():
    said = run("posteriors.py")
    rows = [line.split("|")[1:4] for line in said.splitlines() if "%" in line]
    assert len(rows) == 15
    found = {(how.strip(), name.strip()): figures for how, name, figures in rows}
    numbers = {k: float(figures.split(",")[0]) for k, figures in found.items()}
    assert all(0 < number < 2.4 for number in numbers.values())
    assert len(set(numbers.values())) > 6
