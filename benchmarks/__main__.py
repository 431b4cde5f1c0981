"""Run the experiments and benchmarks of gnlin."""

import argparse
import dataclasses
import difflib
import importlib
import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ._modules import BENCHMARKS, EXPERIMENTS, MODULES, summary, TABLES
from ._options import MOST_SEEDS, MOST_STEPS, Options, Refusal
from ._results import alone_in, claimed, KEPT, read_settings, versions


DEFAULT = "k-vs-lambda"
COMMANDS = {
    "all": "Run all experiments one after another, and then write the report.",
    "report": "Write one page of the experiments' results, as HTML and Markdown.",
    "merge": "Merge results of one experiment that differ only in their seeds.",
    "rejudge": "Judge the results in the repository again, from their tables.",
    "keep": "Copy the results and the report into the repository, replacing old ones.",
    "data": "Verify the files of MNIST or CIFAR-10, or download them.",
    "list": "List everything that can be run, with the time of the runs in the report.",
}
DEVICES = "cpu", "gpu"
OURS = ("benchmarks.", "gnlin.")
DIFFERENT = 1
"""The exit code of `rejudge` if a verdict is not as kept."""
INTERRUPTED = 130
"""The exit code that shells give a process ended by SIGINT."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, message + "\n")


class _Formatter(argparse.HelpFormatter):
    """A help formatter that does not break names at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = _parser()
    given, unknown = parser.parse_known_intermixed_args(arguments)
    try:
        _check_unknown(parser, unknown)
        return _dispatch(given)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumable = given.name in EXPERIMENTS or given.name == "all"
        advice = " Continue with --resume." if resumable else ""
        print(f"Interrupted before all results were written.{advice}", file=sys.stderr)
        return INTERRUPTED


def _dispatch(given: argparse.Namespace) -> int:
    name = given.name
    if name not in MODULES and name not in COMMANDS:
        raise Refusal(_unknown(name, MODULES | COMMANDS, "experiment"))
    if given.parts and name not in ("data", "speed", "merge", "rejudge"):
        raise Refusal(f"'{name}' takes no second name; leave '{given.parts[0]}' out.")
    if len(given.parts) > 1 and name not in ("merge", "rejudge"):
        raise Refusal(f"'{given.parts[1]}' is one name too many; see --help.")
    part = given.parts[0] if given.parts else None
    if given.quick and given.scale is not None:
        raise Refusal("--quick is a scale of its own; leave --scale out.")
    scale = "quick" if given.quick else given.scale or "embedded"
    _check_apply(given, scale)
    if name == "list":
        return _list()
    if name == "data":
        return _data(part, given.data_dir)
    if name == "merge":
        _prepare(None)
        from .merge import merge

        merge([Path(folder) for folder in given.parts], given.out)
        return 0
    if name == "report":
        _prepare(None)
        folder, other = given.out or Path("results"), given.against
        if other is not None and not other.is_file():
            raise Refusal(f"There is no report '{other}' to compare with.")
        return _report(folder) or _against(folder, other)
    if name == "rejudge":
        return _rejudge(given.parts)
    if name == "keep":
        from .kept import keep

        keep(given.out or Path("results"), list(EXPERIMENTS))
        return 0
    names = list(EXPERIMENTS) if name == "all" else [name]
    out = given.out or (Path("results") if name == "all" else Path("results") / name)
    if name == "all" and given.dry_run:
        raise Refusal("--dry-run needs a single experiment; name one instead of 'all'.")
    options = Options(
        out,
        scale,
        seeds=given.seeds,
        first_seed=given.seed_offset,
        steps=given.steps,
        grid=given.grid,
        data_dir=given.data_dir,
        reduction=given.reduction,
        task=given.task,
        resume=given.resume,
    )
    if name == "speed" and part is not None:
        options = dataclasses.replace(options, tables=(_table(part),))
    if given.dry_run:
        _prepare(given.device)
        from .dry_run import dry_run

        dry_run(name, _imported(name).EXPERIMENT, options)
        return 0
    with claimed(out):
        _prepare(given.device)
        if name != "all":
            _run(name, options)
            return 0
        return _all(names, options)


def _check_apply(given: argparse.Namespace, scale: str) -> None:
    """Refuse options that would have no effect."""
    name = given.name
    if name not in EXPERIMENTS and name != "all":
        for option, value in vars(given).items():
            if value not in (None, False, []) and option not in _taken(name):
                flag = option.replace("_", "-")
                raise Refusal(f"'{name}' takes no --{flag}; leave it out.")
        return
    if given.against is not None:
        raise Refusal(f"'{name}' takes no --against; only `report` does.")
    for option in ("steps", "grid", "reduction", "task"):
        if getattr(given, option) is not None and name == "all":
            raise Refusal(
                f"--{option} needs a single experiment; name one instead of 'all'."
            )
    if given.data_dir is not None and scale != "full":
        raise Refusal("--data-dir is for --scale full; the other scales need no files.")


def _taken(name: str) -> tuple[str, ...]:
    """Return the options that a benchmark or a command accepts."""
    options = {
        "list": (),
        "data": ("parts", "data_dir"),
        "merge": ("parts", "out"),
        "report": ("out", "against"),
        "keep": ("out",),
        "rejudge": ("parts",),
    }
    return "name", *options.get(name, ("parts", "quick", "device", "out"))


def _prepare(device: str | None) -> None:
    """Select double precision and the device. Raise `Refusal` if a package or the device
    is missing."""
    import jax

    jax.config.update("jax_enable_x64", True)
    try:
        versions()
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    if device is None:
        return
    try:
        jax.config.update("jax_default_device", jax.devices(device)[0])
    except RuntimeError:
        raise Refusal(
            f"jax finds no {device} here (its default is {jax.default_backend()}); leave "
            "--device out, or install a jax that supports it."
        ) from None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(OURS):
            raise
        raise _not_installed(error) from None


def _run(name: str, options: Options) -> None:
    module = _imported(name)
    if name in BENCHMARKS:
        with alone_in(options.out):
            module.run(options)
        return
    from .experiment import run

    run(name, module.EXPERIMENT, options)


def _not_installed(error: ModuleNotFoundError) -> Refusal:
    return Refusal(
        f"The benchmarks need '{error.name}', which is not installed; run "
        '`python -m pip install -e ".[bench]"`.'
    )


def _all(names: Sequence[str], options: Options) -> int:
    """Run each experiment in its own folder, even if others fail, and write the
    report."""
    import jax

    failed = []
    for name in names:
        try:
            _run(name, dataclasses.replace(options, out=options.out / name))
        except Refusal as refusal:
            print(f"{name}: {refusal}", file=sys.stderr)
            failed.append(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        # Thousands of compiled programs would use up the process's memory mappings.
        jax.clear_caches()
    code = _report(options.out)
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 2 if failed else code


def _report(folder: Path) -> int:
    from .report import write

    write(folder, list(EXPERIMENTS))
    return 0


def _against(folder: Path, other: Path | None) -> int:
    if other is not None:
        from .against import compare

        compare(folder, other)
    return 0


def _rejudge(names: Sequence[str]) -> int:
    for name in names:
        if name not in EXPERIMENTS:
            raise Refusal(_unknown(name, EXPERIMENTS, "experiment"))
    _prepare(None)
    from .rejudge import rejudge

    return 0 if rejudge(names or list(EXPERIMENTS)) else DIFFERENT


def _list() -> int:
    summaries = {name: summary(module) for name, module in MODULES.items()} | COMMANDS
    width = max(map(len, summaries))
    for name, line in summaries.items():
        print(f"{name:<{width}}  {line}{_took(name)}")
    return 0


def _took(name: str) -> str:
    """Say how long the runs in the repository took; nothing if there are none."""
    kept = read_settings(KEPT / name) or {}
    if kept.get("borrowed", True):
        return ""
    minutes = max(round(kept["run_seconds"] / 60), 1)
    return f" ({minutes} min)" if minutes < 100 else f" ({minutes / 60:.0f} h)"


def _data(name: str | None, data_dir: Path | None) -> int:
    from .data.standard import DATASETS, run

    known = ", ".join(DATASETS)
    if name is None or data_dir is None:
        raise Refusal(
            f"Name a data set ({known}) and its folder: "
            "`python -m benchmarks data mnist --data-dir DIR`."
        )
    if name not in DATASETS:
        raise Refusal(_unknown(name, DATASETS, "data set", f"The data sets are {known}."))
    return run(name, data_dir)


def _table(name: str) -> str:
    if name not in TABLES:
        known = f"The tables are {', '.join(TABLES)}."
        raise Refusal(_unknown(name, TABLES, "table", known))
    return name


def _unknown(
    name: str,
    names: Iterable[str],
    kind: str,
    advice: str = "See `python -m benchmarks list`.",
) -> str:
    return f"There is no {kind} '{name}'{_nearest(name.lower(), names)} {advice}"


def _nearest(name: str, names: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return f"; did you mean '{nearest[0]}'?" if nearest else "."


def _check_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    if not unknown:
        return
    name = unknown[0].partition("=")[0]
    if name.startswith("-"):
        nearest = _nearest(name, parser._option_string_actions)
        raise Refusal(f"There is no option '{name}'{nearest} See --help.")
    raise Refusal(f"'{name}' is one name too many; see --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks",
        description=f"{__doc__} Without arguments, runs {DEFAULT}.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    # A list that begins with a negative number is a value, too, and not an option.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT,
        metavar="NAME",
        help=f"an experiment ({', '.join(EXPERIMENTS)}), a benchmark "
        f"({', '.join(BENCHMARKS)}), or a command ({', '.join(COMMANDS)}); `list` "
        "describes them, and says how long the experiments take",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        default=[],
        metavar="PART",
        help="with `data`: mnist or cifar10; with `speed`: one of its tables "
        f"({', '.join(TABLES)}); with `merge`: folders of results; with "
        "`rejudge`: experiments",
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        metavar="SCALE",
        help="embedded (the default: minutes on two cores, needs no files), medium (the "
        "paper's CNN on images of textures, needs no files) or full (the paper's "
        "settings, on MNIST and CIFAR-10)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a coarse test run, mostly of a minute or less (k-vs-lambda: four or more)",
    )
    parser.add_argument(
        "--data-dir",
        type=_folder,
        metavar="DIR",
        help="folder of the data files, for `data` and for --scale full",
    )
    parser.add_argument(
        "--seeds",
        type=_number_of_seeds,
        metavar="N",
        help="number of seeds (default: depends on the scale)",
    )
    parser.add_argument(
        "--seed-offset",
        type=_seed_offset,
        metavar="N",
        help="the first seed (default: 0), so that several jobs with different seeds can "
        "be merged",
    )
    parser.add_argument(
        "--grid",
        type=_numbers,
        metavar="A,B,...",
        help="values to sweep, such as 1,100,1e6 for the periods of k-sweep",
    )
    parser.add_argument(
        "--steps",
        type=_number_of_steps,
        metavar="N",
        help="number of steps of each run (default: depends on the scale); on the full "
        "batch of k-sweep, stability and xor-features, a run has at least as many "
        "linearised problems as most_updates or fewest_updates says in its "
        "settings.json, so that a large K takes more steps",
    )
    parser.add_argument(
        "--reduction",
        type=_reduction,
        metavar="R",
        help="sum or mean: the reduction of the loss, which determines what a learning "
        "rate on mini-batches means; on the full batch it is the sum (default: depends "
        "on the scale; at the full scale the sum over the training set, which agrees "
        "with the paper's boundary of stability)",
    )
    parser.add_argument(
        "--task",
        type=_folder,
        metavar="FILE",
        help="Python file with your own model and data, for the experiments that accept "
        "one, and with your own loss, for k-vs-lambda",
    )
    parser.add_argument(
        "--against",
        type=_folder,
        metavar="FILE",
        help="with `report`: the report.json of another report, to print the differences",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run in the same folder; without it, the runs there "
        "are replaced",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not run the experiment, but estimate its runs, steps, passes, hours "
        "and memory from measurements of about a minute",
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        help="cpu or gpu (default: jax's default)",
    )
    parser.add_argument(
        "--out",
        type=_folder,
        metavar="DIR",
        help="folder for the results, which must not contain results with other "
        "settings (default: results/NAME; for `all` and `report`: results, with a "
        "subfolder for each experiment)",
    )
    return parser


def _one_of(names: Sequence[str], text: str) -> str:
    if text not in names:
        known = f"{', '.join(names[:-1])} or {names[-1]}"
        nearest = _nearest(text.lower(), names)
        raise argparse.ArgumentTypeError(f"must be {known}, but is '{text}'{nearest}")
    return text


def _scale(text: str) -> str:
    return _one_of(("embedded", "medium", "full"), text)


def _reduction(text: str) -> str:
    return _one_of(("sum", "mean"), text)


def _device(text: str) -> str:
    return _one_of(DEVICES, text)


def _folder(text: str) -> Path:
    if "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must be the name of a folder, but is {text!r}, with a null character."
        )
    return Path(text)


def _number_of_seeds(text: str) -> int:
    return _count(text, MOST_SEEDS)


def _number_of_steps(text: str) -> int:
    return _count(text, MOST_STEPS)


def _seed_offset(text: str) -> int:
    return _count(text, MOST_SEEDS, least=0)


def _count(text: str, most: int, least: int = 1) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least} and at most {most:,}, but is "
            f"'{text}'."
        )
    return number


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or any(math.isnan(number) for number in numbers):
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas between, such as 1,100,1e6, but is '{text}'."
        )
    return numbers


def end(code: int) -> NoReturn:
    """Exit with this code. After an interruption, skip the interpreter's cleanup: XLA's
    threads may still be computing, and would crash when their buffers are freed."""
    if code != INTERRUPTED:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # during parsing, or for a second time
        code = INTERRUPTED
    end(code)
