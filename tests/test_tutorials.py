"""The tutorials' scripts reach the results on their pages, on smaller problems."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import gnlin


EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


def rows(name, folder=None):
    """Return the numbers of each row of the table that a script prints, by its first
    cell. Check that it drew a picture."""
    out = () if folder is None else ("--out", folder)
    command = [sys.executable, EXAMPLES / f"{name}.py", "--quick", *out]
    # User code, and optax, may rely on JAX's promotion.
    environment = {
        **os.environ,
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
        "JAX_NUMPY_RANK_PROMOTION": "allow",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not out or (folder / f"{name}.png").stat().st_size > 10_000
    lines = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    number = r"[-+]?[\d.,]*\d(?:e[-+]\d+)?"
    found = {
        first: [float(x.replace(",", "")) for x in re.findall(number, " | ".join(rest))]
        for first, *rest in lines
    }
    return {first: numbers for first, numbers in found.items() if numbers}


@pytest.mark.slow
def test_fit(tmp_path):
    found = rows("fit", tmp_path)
    for name in ("background", "height", "rate"):
        true, value, error, by_hand, spread = found[name]
        assert abs(value - true) < 3 * error
        assert abs(error - by_hand) <= 1.01e-4
        # A hundred refits determine the spread to 7 %, and the linearisation is
        # approximate.
        assert abs(spread / error - 1) < 0.25


@pytest.mark.exhaustive
def test_poisson(tmp_path):
    found = rows("poisson", tmp_path)
    errors = {name.split(",")[0]: numbers[0] for name, numbers in found.items()}
    # After 40, 100 and 300 steps.
    assert errors["Levenberg-Marquardt"] < 1e-5
    assert errors["Levenberg-Marquardt"] < 1e-2 * errors["L-BFGS"]
    assert errors["Levenberg-Marquardt"] < 1e-2 * errors["Adam"]


@pytest.mark.exhaustive
def test_linearised(tmp_path):
    found = rows("linearised", tmp_path)
    narrow, wide = found["16"], found["128"]
    assert all(w < 0.1 * n for w, n in zip(wide, narrow, strict=True))
    assert max(wide) < 0.01


@pytest.mark.exhaustive
def test_bundle_adjustment(tmp_path):
    found = rows("bundle_adjustment", tmp_path)
    # 640 residuals and 12 of what is known, 288 parameters; 27 is the standard deviation
    assert abs(found["solved"][1] - 364) < 4 * 27
    assert found["solved"][0] < 0.2 * found["start"][0]


@pytest.mark.exhaustive
def test_bundle_adjustment_counts_its_steps(tmp_path, capsys, monkeypatch):
    path = EXAMPLES / "bundle_adjustment.py"
    example = runpy.run_path(str(path))
    solved, solve = [], gnlin.solve
    record = lambda *args: solved.append(solve(*args)) or solved[-1]
    monkeypatch.setattr(gnlin, "solve", record)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        example["main"](tmp_path, True)
    steps = len(solved[0].history.loss)
    assert f", {steps} steps" in capsys.readouterr().out
    assert steps != len(solved[0].history)


@pytest.mark.slow
def test_pose_graph(tmp_path):
    found = rows("pose_graph", tmp_path)
    (before, misfit), (after, least) = found["odometry"], found["solved"]
    assert after < 0.5 * before
    assert least < 1e-2 * misfit


@pytest.mark.exhaustive
def test_classifier(tmp_path):
    found = rows("classifier", tmp_path)
    (ours, *_), (adams, *_) = found.values()
    assert ours > 93
    assert ours > adams - 3


@pytest.mark.exhaustive
def test_transformer(tmp_path):
    found = rows("transformer", tmp_path)
    # The rule is right nine times out of ten, and its entropy is 0.464.
    assert found["validation"][0] < 0.8
    assert found["validation"][1] > 75


@pytest.mark.exhaustive
def test_which_line():
    found = rows("which_line")
    for name in ("a small fit", "many fits, the worst", "a graph"):
        *_, above, rate = found[name]
        assert above > 1e-6
        assert rate > 0
    steps, _, reached, adams, _ = found["a differential equation"]
    assert steps == 40
    assert reached < 1e-3 * adams
