"""The experiments are those in their folder, in the order of the report."""

import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import benchmarks
from benchmarks import _modules
from benchmarks.experiment import Experiment


HERE = Path(benchmarks.__file__).parent


def test_every_file_that_defines_an_experiment_is_found():
    modules = pkgutil.iter_modules([str(HERE / "experiments")])
    imported = {
        module.name: importlib.import_module(f"benchmarks.experiments.{module.name}")
        for module in modules
    }
    found = {
        name.replace("_", "-")
        for name, module in imported.items()
        if isinstance(getattr(module, "EXPERIMENT", None), Experiment)
    }
    assert set(_modules.EXPERIMENTS) == found
    assert list(_modules.EXPERIMENTS) == list(_modules._ORDER)


def test_what_is_not_named_in_the_order_comes_last_by_name(tmp_path):
    write = lambda name, text: (tmp_path / name).write_text(text)
    write("zebra.py", "EXPERIMENT: Experiment = 1\n")
    write("my_own.py", '"""Mine."""\nEXPERIMENT = Experiment(\n')
    write("k_sweep.py", "EXPERIMENT = 1\n")
    write("adaptive.py", "EXPERIMENT = 1\n")
    write("helper.py", "def f():\n    EXPERIMENT = 1\n")
    write("another.py", "from .k_sweep import EXPERIMENT\n\nEXPERIMENTS = 1\n")
    write("_draft.py", "EXPERIMENT = 1\n")
    write("__init__.py", "EXPERIMENT = 1\n")
    (tmp_path / "folder").mkdir()
    write("folder/__init__.py", "EXPERIMENT = 1\n")
    (tmp_path / "other").mkdir()
    found = _modules.experiments(tmp_path)
    assert list(found) == ["k-sweep", "adaptive", "folder", "my-own", "zebra"]
    assert found["my-own"] == "benchmarks.experiments.my_own"


def test_a_copy_of_an_experiment_can_be_run_by_its_name(tmp_path):
    """The files are those of the repository, with one more."""
    there = tmp_path / "benchmarks"
    shutil.copytree(HERE, there, ignore=shutil.ignore_patterns("results", "__pycache__"))
    text = (there / "experiments" / "kernel_drift.py").read_text()
    first = text.partition("\n")[0]
    copied = text.replace(first, '"""What I want to know.', 1)
    (there / "experiments" / "my_own.py").write_text(copied)

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PATH": ""},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    assert any(
        line.split(maxsplit=1) == ["my-own", "What I want to know."]
        for line in run("list").splitlines()
    )
    assert "leave --data-dir out" not in run("my-own", "--data-dir", "x")
    assert "--data-dir is for --scale full" in run("my-own", "--data-dir", "x")
