"""Names and summaries of everything that can be run.

This module imports none of it, so that `list` and `--help` are fast.
"""

import ast
import importlib.util
import re
from pathlib import Path


_ORDER = (
    "k-vs-lambda",
    "k-sweep",
    "lambda-sweep",
    "lambda-sweep-cnn",
    "large-k-augmented",
    "linear-probe",
    "filters",
    "batch",
    "data-scaling",
    "xor-features",
    "provable-features",
    "solved-subproblem",
    "resnet",
    "mnist-k",
    "stability",
    "adaptive",
    "kernel-drift",
    "schedules",
    "beta-sweep",
    "regimes",
    "lazy-to-rich",
    "optimisers",
    "defaults",
    "tuning",
    "pinn",
    "equations",
    "ratio",
)
"""The order of the report. Experiments that are not named here follow by name."""
_FOLDER = Path(__file__).parent / "experiments"


def experiments(folder: Path = _FOLDER) -> dict[str, str]:
    """Return the module of each experiment in a folder: each file, or folder with an
    `__init__.py`, that defines `EXPERIMENT`."""
    found = {}
    for path in sorted((*folder.glob("*.py"), *folder.glob("*/__init__.py"))):
        stem = path.stem if path.parent == folder else path.parent.name
        text = path.read_text(encoding="utf-8", errors="replace")
        public = not stem.startswith(("_", "."))
        if public and re.search(r"^EXPERIMENT\b.*=", text, re.MULTILINE):
            found[stem.replace("_", "-")] = f"benchmarks.experiments.{stem}"
    known = [name for name in _ORDER if name in found]
    return {name: found[name] for name in dict.fromkeys([*known, *sorted(found)])}


EXPERIMENTS = experiments()
BENCHMARKS = {
    "nist": "benchmarks.experiments.nist",
    "nls": "benchmarks.experiments.nls",
    "speed": "benchmarks.speed",
    "speed-training": "benchmarks.speed_training",
}
MODULES = EXPERIMENTS | BENCHMARKS
TABLES = {
    "damped": "benchmarks.speed.damped_step",
    "wide": "benchmarks.speed.wide",
    "kernel": "benchmarks.speed.kernels",
    "function-space": "benchmarks.speed.function_space",
    "eigenpairs": "benchmarks.speed.eigenpairs",
    "preconditioners": "benchmarks.speed.preconditioners",
    "rejected": "benchmarks.speed.rejected",
    "small": "benchmarks.speed.small_fits",
    "curve-fit": "benchmarks.speed.curve_fits",
    "tall": "benchmarks.speed.tall",
    "large": "benchmarks.speed.large",
    "large-fits": "benchmarks.speed.large_fits",
    "parts": "benchmarks.speed.parts",
    "graph": "benchmarks.speed.graph",
    "kinematics": "benchmarks.speed.kinematics",
    "pinn": "benchmarks.speed.pinn",
    "inner-steps": "benchmarks.speed.inner_steps",
    "sweep": "benchmarks.speed.sweep",
    "growth": "benchmarks.speed.growth",
    "training": "benchmarks.speed.time_to_loss",
    "start": "benchmarks.speed.start",
    "device": "benchmarks.speed.device",
    "costs": "benchmarks.speed.costs",
    "auto": "benchmarks.speed.auto",
}
"""The tables of `speed`. Each module has a function `comparisons(quick)`."""


def summary(module: str) -> str:
    """Return the first line of a module's docstring, without running the module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "(not installed)"
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]
