"""Run the experiments and benchmarks of gnlin."""

import argparse
import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ._options import Options
from ._results import claim_folder, UnusableFolder, versions


DEFAULT = "k-vs-lambda"
# Imported when run, not before: `list` and `--help` are to be quick.
MODULES = {
    "k-vs-lambda": "benchmarks.experiments.k_vs_lambda",
    "adaptive": "benchmarks.experiments.adaptive",
    "k-sweep": "benchmarks.experiments.k_sweep",
    "lambda-sweep": "benchmarks.experiments.lambda_sweep",
    "xor-features": "benchmarks.experiments.xor_features",
    "nist": "benchmarks.experiments.nist",
    "speed": "benchmarks.speed",
    "speed-training": "benchmarks.speed_training",
}
TAKE_SEEDS = ("k-vs-lambda", "adaptive", "k-sweep", "lambda-sweep", "xor-features")
OURS = ("benchmarks.", "gnlin.")
INTERRUPTED = 130
"""The exit code of shells for what SIGINT ended."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, message + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.name == "list":
        _list()
        return 0
    if options.name == "data":
        return _data(options.dataset, options.data_dir)
    if options.name not in MODULES:
        return _refuse(_unknown(options.name, MODULES, "experiment"))
    if options.dataset is not None or options.data_dir is not None:
        return _refuse(f"'{options.name}' needs no files; leave them out.")
    if options.seeds is not None and options.name not in TAKE_SEEDS:
        return _refuse(f"'{options.name}' runs from fixed starts; leave --seeds out.")
    out = options.out or Path("results") / options.name
    try:
        claim_folder(out)
    except UnusableFolder as error:
        return _refuse(str(error))
    try:
        return _run(MODULES[options.name], Options(options.seeds, out, options.quick))
    except KeyboardInterrupt:
        print("Interrupted before all results were written.", file=sys.stderr)
        return INTERRUPTED


def _run(module: str, options: Options) -> int:
    try:
        experiment = _load(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(OURS):
            raise
        return _refuse(
            f"The benchmarks need '{error.name}', which is not installed; run "
            '`python -m pip install -e ".[bench]"`.'
        )
    experiment.run(options)
    return 0


def _load(module: str) -> ModuleType:
    """Raises `ModuleNotFoundError` for all that a run needs: better now than after it."""
    import jax

    jax.config.update("jax_enable_x64", True)
    versions()
    return importlib.import_module(module)


def _list() -> None:
    width = max(map(len, MODULES))
    for name, module in MODULES.items():
        print(f"{name:<{width}}  {_summary(module)}")


def _summary(module: str) -> str:
    """The first line of a module's docstring, read without running the module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "(not installed)"
    tree = ast.parse(Path(spec.origin).read_text())
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def _data(name: str | None, data_dir: Path | None) -> int:
    from .data.standard import DATASETS, run

    known = ", ".join(DATASETS)
    if name is None or data_dir is None:
        return _refuse(
            f"Name a data set ({known}) and its folder: "
            "`python -m benchmarks data mnist --data-dir DIR`."
        )
    if name not in DATASETS:
        return _refuse(_unknown(name, DATASETS, "data set", f"There are {known}."))
    return run(name, data_dir)


def _unknown(
    name: str,
    names: Iterable[str],
    kind: str,
    advice: str = "`python -m benchmarks list` names them all.",
) -> str:
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    question = f"; did you mean '{nearest[0]}'?" if nearest else "."
    return f"There is no {kind} '{name}'{question} {advice}"


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks",
        description=f"{__doc__} Without arguments, runs {DEFAULT}.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT,
        metavar="NAME",
        help=f"what to run: {', '.join(MODULES)}; `list`, a line on each; or `data`, to "
        "verify the files of a data set, and download those that are not there",
    )
    parser.add_argument(
        "dataset", nargs="?", metavar="DATASET", help="with `data`: mnist or cifar10"
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="with `data`: the files' folder"
    )
    parser.add_argument(
        "--seeds",
        type=_at_least_one,
        metavar="N",
        help="how many random initialisations, for an experiment that has some: "
        f"{', '.join(TAKE_SEEDS)} (default: its own number)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results; files of the same name are overwritten "
        "(default: results/NAME)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a coarse run of some seconds, to see that it works",
    )
    return parser


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, but is '{text}'."
        )
    return number


if __name__ == "__main__":
    sys.exit(main())
