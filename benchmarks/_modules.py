"""Names and summaries of everything that can be run.

This module imports none of it, so that `list` and `--help` are fast.
"""

import ast
import importlib.util
from pathlib import Path


EXPERIMENTS = {
    name: f"benchmarks.experiments.{name.replace('-', '_')}"
    for name in (
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
}
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
