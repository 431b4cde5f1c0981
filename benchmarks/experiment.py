"""The parts of an experiment, and how its runs are made, kept, judged and drawn.

An experiment is a grid of points, such as the periods K, and its settings at each scale.
All runs at one point, one for each seed, are made together and written to one file as
soon as they are finished: an interrupted experiment continues after the last one.
"""

import copy
import dataclasses
import hashlib
import json
import math
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, get_type_hints, NamedTuple, NoReturn, TypeVar

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray
from rich.console import Console
from rich.progress import track
from threadpoolctl import threadpool_limits

from . import _results, own_task
from ._options import LARGE, MOST_SEEDS, MOST_STEPS, Options, Refusal, Scale
from .verdicts import print_verdicts, Verdict


Point = Mapping[str, Any]
"""The values that distinguish one point of the grid from the others."""

Columns = Mapping[str, Shaped[ndarray, "seeds ..."]]
"""Arrays by name, with axes over seeds and then over looks. A column with one axis is the
same at all looks. A column with more than two axes is used only in figures."""

CIRCUMSTANCES = "device", "x64", "versions"
"""Runs that differ in any of these must not be mixed."""

DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions that may be raised by reading a damaged archive or table."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of all seeds at one point."""

    point: Point
    columns: Columns

    def __getitem__(self, name: str) -> Shaped[ndarray, "seeds ..."]:
        return self.columns[name]

    @property
    def num_seeds(self) -> int:
        return len(next(iter(self.columns.values())))

    def final(self, name: str) -> Shaped[ndarray, " seeds"]:
        return self.columns[name][:, -1]

    def rows(self, first_seed: int = 0) -> list[dict[str, Any]]:
        """Return rows for a table, one for each seed and look."""
        table = {k: v[:, None] if v.ndim == 1 else v for k, v in self.columns.items()}
        table = {k: v for k, v in table.items() if v.ndim == 2}
        shape = np.broadcast_shapes(*(v.shape for v in table.values()))
        table = {k: np.broadcast_to(v, shape) for k, v in table.items()}
        return [
            {**self.point, "seed": first_seed + seed}
            | {name: column[seed, look].item() for name, column in table.items()}
            for seed in range(shape[0])
            for look in range(shape[1])
        ]

    @classmethod
    def of_rows(
        cls, point: Point, rows: Sequence[Mapping[str, str]], axes: Mapping[str, int]
    ) -> "Runs":
        """Return the runs whose `rows` these are, as read from a file. `axes` has the
        number of axes of each column. A column that `rows` leaves out is refused when it
        is asked for, and a column of one look is repeated at all looks."""
        num_seeds = len({row["seed"] for row in rows})
        columns = _Tabulated()
        for name, number in axes.items():
            cells = [row.get(name, "") for row in rows]
            if any(cells):
                values = _values(cells).reshape(num_seeds, -1)
                columns[name] = values[:, 0] if number == 1 else values
        return cls(point, columns)


class _Tabulated(dict[str, ndarray]):
    def __missing__(self, name: str) -> NoReturn:
        raise Refusal(f"the table lacks the column '{name}'")


def _values(cells: Sequence[str]) -> Shaped[ndarray, " rows"]:
    """Return the whole numbers, numbers, truth values or words that are written."""
    for kind in (int, float):
        try:
            return np.array([kind(cell) for cell in cells])
        except ValueError:
            pass
    words = np.array(cells)
    return words == "True" if {*cells} <= {"True", "False"} else words


def select(all_runs: Sequence[Runs], **at: Any) -> list[Runs]:
    """Return the runs at the points that have these values."""
    return [
        runs
        for runs in all_runs
        if all(runs.point.get(key) == value for key, value in at.items())
    ]


def only(all_runs: Sequence[Runs], **at: Any) -> Runs:
    (runs,) = select(all_runs, **at)
    return runs


class Made(NamedTuple):
    """Runs, with the time that they took and the code that made them."""

    runs: Runs
    seconds: float
    commits: Sequence[str]
    """The commits of the code that made the runs. Merged runs may have several."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs find their data, and where they store checkpoints to resume from."""

    data_dir: Path | None = None
    checkpoints: Path | None = None
    """The folder of the checkpoints; `None` for runs too short to need any."""
    resume: bool = False
    rehearsal: Callable[..., NoReturn] | None = None
    """A function that a dry run calls instead of making the runs
    (`benchmarks/dry_run.py`)."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that all experiments have; each adds its own."""

    seeds: int
    first_seed: int = 0

    @property
    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


S = TypeVar("S", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[S]):
    """The parts of an experiment. `draw` writes the figures into a folder, and returns
    their captions by file name, without the suffix."""

    quick: S
    embedded: S
    full: S
    points: Callable[[S], Sequence[Point]]
    train: Callable[[S, Point, Place], Columns]
    judge: Callable[[S, Sequence[Runs]], list[Verdict]]
    draw: Callable[[S, Sequence[Runs], Path], Mapping[str, str]]
    paper: str
    """The paper's result and its settings, in a sentence or two."""
    grid: str
    """The setting that `--grid` replaces; empty if there is none."""
    steps: str = "num_steps"
    """The setting that `--steps` replaces; empty if there is none."""
    bounds: tuple[float, float] = (1e-12, 1e12)
    """Bounds on the values of `--grid`. Beyond them no figure can be drawn, or a run does
    not end."""
    runs_at_a_point: Callable[[S], int] = lambda settings: 1
    """The number of runs of each seed at a point: more than one if the point has a grid
    of its own."""
    own: Callable[[S], Any] | None = None
    """Returns the settings for a user's own task, with the fields `data` and `network`.
    `None` if the experiment does not accept `--task`."""
    takes_loss: bool = False
    """Whether the runs take the loss of a user's own task."""
    trains_state: Callable[[S], bool] = lambda settings: False
    """Whether the runs with these settings can train a model with state."""
    completed: Callable[[Any], Any] = lambda settings: settings
    """Fills in the settings that follow from the task."""
    rehearsed: bool = False
    """Whether `train` calls the rehearsal, so that `--dry-run` can measure the runs."""
    derived: Callable[[Runs], Columns] = lambda runs: {}
    """Columns that follow from the others, for readers of the table: those by which a
    claim or a figure selects runs."""
    runs_of: str | None = None
    """The name of another experiment with the same settings and runs."""
    seedless: Callable[[Point], bool] = lambda point: False
    """Whether the runs at a point are the same for all seeds."""
    medium: Any = None
    """The settings for the paper's network on images that need no files
    (`benchmarks/data/textures.py`). `None` if the experiment is not about images."""

    def defaults(self, scale: Scale, of_own_task: bool) -> Any:
        """Return the settings of the scale, or those for a user's own task."""
        settings = getattr(self, scale)
        if settings is None:
            raise Refusal(
                "This experiment has no medium scale, which is only for images; leave "
                "--scale out."
            )
        if not of_own_task:
            return settings
        if self.own is None:
            whose = "has tasks of its own"
            if self.runs_of is not None:
                whose = f"reads the runs of '{self.runs_of}', which {whose}"
            raise Refusal(f"This experiment {whose}; leave --task out.")
        return self.own(settings)

    def settings(self, options: Options) -> Any:
        """Return the settings of the scale, as changed by the options."""
        settings = self.defaults(options.scale, options.task is not None)
        changes: dict[str, Any] = {}
        if options.task is not None:
            changes |= self._of_task(settings, options.task)
        if options.seeds is not None:
            changes["seeds"] = options.seeds
        if options.first_seed is not None:
            changes["first_seed"] = options.first_seed
        if options.grid is not None:
            if not self.grid:
                raise Refusal(
                    "This experiment has no numbers to sweep; leave --grid out."
                )
            said = f"--grid sets {self.grid} here, which"
            changes[self.grid] = self._grid(settings, options.grid, said)
        if options.steps is not None:
            if not hasattr(settings, self.steps):
                raise Refusal(
                    "This experiment has no single number of steps; leave --steps out."
                )
            changes[self.steps] = options.steps
        if options.reduction is not None:
            if _has_full_batch(settings, changes):
                raise Refusal(
                    "This experiment trains on the full batch, where the learning rate "
                    "refers to the sum of the loss; leave --reduction out."
                )
            if not hasattr(settings, "reduction"):
                raise Refusal(
                    "This experiment does not use mini-batches; leave --reduction out."
                )
            changes["reduction"] = options.reduction
        if _has_full_batch(settings, changes):
            if changes.get("reduction", "sum") != "sum":
                raise Refusal(
                    f"The task '{options.task}' sets 'reduction' to 'mean', but on the "
                    "full batch the learning rate refers to the sum of the loss; leave "
                    "it out."
                )
            changes["reduction"] = "sum"
        settings = dataclasses.replace(settings, **changes)
        if options.task is not None:
            task, seeds = str(options.task), settings.each_seed
            own_task.check(task, _num_examples(settings), seeds)
            if not self.trains_state(settings):
                own_task.check_stateless(task)
            if own_task.read(task).loss is not None and not self.takes_loss:
                raise Refusal(
                    f"The task '{task}' sets 'loss', but this experiment trains classes "
                    "by cross-entropy and values by squared error; leave it out, or run "
                    "`k-vs-lambda`."
                )
        return self.completed(settings)

    def settings_from(self, scale: Scale, described: Mapping[str, Any]) -> Any:
        """Return the settings that a `settings.json` describes. Raise `TypeError` if the
        experiment has no setting of such a name."""
        default = self.defaults(scale, own_task.is_own(described.get("data", "")))
        known = plain(dataclasses.asdict(default))
        # Values like the default's keep its types, such as the dataclass of a task.
        changes = {
            name: unplain(value)
            for name, value in described.items()
            if name not in known or known[name] != value
        }
        return dataclasses.replace(default, **changes)

    def _grid(
        self, settings: S, values: tuple[float, ...], said: str
    ) -> tuple[float, ...]:
        own = getattr(settings, self.grid)
        if not all(value > 0 for value in values):
            raise Refusal(f"{said} must be positive.")
        if math.inf in values and math.inf not in own:
            raise Refusal(f"{said} must be finite.")
        low, high = self.bounds
        if any(not low <= value <= high for value in values if math.isfinite(value)):
            raise Refusal(f"{said} must be from {low:g} to {high:g}.")
        counted = self.grid == "periods" or isinstance(own[0], int)
        if counted and any(value % 1 for value in values if math.isfinite(value)):
            raise Refusal(f"{said} must be whole numbers.")
        return tuple(type(own[0])(value) for value in values)

    def _of_task(self, settings: S, path: Path) -> dict[str, Any]:
        """Return the changes to the settings that a user's own task makes."""
        task, changes = own_task.read(str(path)), {}
        kinds = get_type_hints(type(settings))
        for name, value in task.settings.items():
            said = f"The task '{path}' sets '{name}' to {value!r}, but it"
            if name in ("data", "network"):
                raise Refusal(
                    f"The task '{path}' sets '{name}', which its own functions replace; "
                    "leave it out."
                )
            if name not in kinds:
                raise Refusal(
                    f"The task '{path}' sets '{name}', but this experiment has no such "
                    "setting; its settings.json lists all settings."
                )
            try:
                converted = own_task.of_kind(kinds[name], value)
            except TypeError:
                needed = own_task.described(kinds[name])
                raise Refusal(f"{said} must be {needed}.") from None
            if isinstance(converted, tuple):
                default = getattr(settings, name)
                falls = list(default) != sorted(default)
                converted = tuple(sorted(set(converted), reverse=falls))
            if name == self.grid:
                converted = self._grid(settings, converted, said)
            else:
                _check_range(name, converted, said)
            changes[name] = converted
        return changes | {"data": str(path), "network": own_task.named(path)}


def _has_full_batch(settings: Any, changes: Mapping[str, Any]) -> bool:
    """Return whether an experiment that could use mini-batches has the full batch."""
    if not hasattr(settings, "reduction"):
        return False
    return changes.get("batch_size", settings.batch_size) is None


def _num_examples(settings: Any) -> int | None:
    """Return the largest number of training examples of a run, or `None` for all."""
    sizes = getattr(settings, "sizes", ())
    return max(sizes) if sizes else getattr(settings, "num_train", None)


def _check_range(name: str, value: Any, said: str) -> None:
    """Raise `Refusal` if a setting of a task has a value that no run can have."""
    least, most = {
        "seeds": (1, MOST_SEEDS),
        "first_seed": (0, MOST_SEEDS),
    }.get(name, (1, MOST_STEPS))
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, int) and not least <= each <= most:
            raise Refusal(f"{said} must be a whole number from {least} to {most:,}.")
        if isinstance(each, float) and not 0 < each < math.inf:
            raise Refusal(f"{said} must be positive and finite.")


class Folder:
    """The folder of one experiment: its settings, the runs made so far, and its results
    at the end."""

    def __init__(
        self,
        path: Path,
        name: str,
        settings: Settings,
        options: Options,
        circumstances: Mapping[str, Any],
    ):
        self.path = path
        self.name = name
        self._resume = options.resume
        self.described = {
            "experiment": name,
            "scale": options.scale,
            "settings": plain(dataclasses.asdict(settings)),
        }
        self.circumstances = circumstances
        self._begun = False
        self._claimed = False
        _results.claim_folder(path)
        self._compare(options.resume)

    def announce(self, advice: str = "") -> None:
        """Say which finished runs will be replaced."""
        number = 0 if self._resume else len([*self.path.glob("runs/*.npz")])
        if number:
            points = "1 point" if number == 1 else f"{number} points"
            print(f"Replaces the finished runs of {points} in '{self.path}'{advice}.")

    def _begin(self) -> None:
        """Prepare the folder before the first run is written. Old runs are deleted only
        now, when new ones can replace them."""
        if self._begun:
            return
        if not self._resume:
            shutil.rmtree(self.path / "runs", ignore_errors=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        self.write_settings({"finished": False})
        self._begun = True

    def checkpoints(self, point: Point) -> Path:
        """Return the folder of the checkpoints of the unfinished runs at a point."""
        path = self.path / "checkpoints" / _name(point)
        if not self._resume:
            shutil.rmtree(path, ignore_errors=True)
        if not (self.path / "settings.json").exists():
            self.write_settings({"finished": False})
            self._claimed = True
        return path

    def release(self) -> None:
        """Make the folder free for other settings, if these have written nothing yet."""
        if self._claimed and not self._begun and not any(self.path.glob("checkpoints/*")):
            (self.path / "settings.json").unlink()

    def _compare(self, resume: bool) -> None:
        before = _results.read_settings(self.path)
        if before is None:
            if resume:
                print(f"'{self.path}' holds no runs to resume: they start anew.")
            return
        for key, value in self.described.items():
            if before.get(key) != value:
                raise Refusal(
                    f"'{self.path}' holds runs with other settings "
                    f"({difference(before.get(key), value, key)}); name another folder "
                    "with --out, or delete this one."
                )
        if not resume:
            return
        for key in CIRCUMSTANCES:
            if before.get(key) != self.circumstances[key]:
                old, new = before.get(key), self.circumstances[key]
                raise Refusal(
                    f"The runs in '{self.path}' were made in other circumstances "
                    f"({difference(old, new, key)}); resume where they were made, or "
                    "replace them by a run without --resume."
                )

    def write_settings(self, more: Mapping[str, Any]) -> None:
        content = {**self.described, **more, **self.circumstances}
        _results.write_json(self.path / "settings.json", content)

    def load(self, point: Point) -> Made | None:
        return load(self.path / "runs", point, self._stamp(self.name))

    def borrow(self, other: str, point: Point) -> Made | None:
        """Load the runs from another experiment's folder beside this one, if it has the
        same settings. They keep the commits that made them."""
        folder = self.path.parent / other
        settings = _results.read_settings(folder)
        mine = {"settings": self.described["settings"]} | {
            key: self.circumstances[key] for key in CIRCUMSTANCES
        }
        if settings is None or any(settings.get(k) != v for k, v in mine.items()):
            return None
        return load(folder / "runs", point, self._stamp(other))

    def _stamp(self, name: str) -> str:
        return stamp(name, {**self.described, **self.circumstances})

    def save(self, made: Made) -> None:
        runs = made.runs
        self._begin()
        path = _path(self.path / "runs", runs.point)
        path.parent.mkdir(exist_ok=True)
        columns: dict[str, Any] = {**runs.columns, "_seconds": np.array(made.seconds)}
        columns["_stamp"] = np.array(self._stamp(self.name))
        columns["_commit"] = np.array(made.commits)

        def write(part: Path) -> None:
            with part.open("wb") as file:
                np.savez_compressed(file, **columns)

        _results.write_whole(path, write)
        shutil.rmtree(self.path / "checkpoints" / _name(runs.point), ignore_errors=True)


def stamp(name: str, settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings and circumstances in which runs were made. Each
    file of runs stores it."""
    circumstances = [settings[key] for key in CIRCUMSTANCES]
    made_with = [name, settings["settings"], circumstances]
    return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()


def run(name: str, experiment: Experiment, options: Options) -> list[Verdict]:
    """Make the missing runs, and write the table, verdicts, figures and settings."""
    with _results.claimed(options.out), _results.alone_in(options.out):
        return _run(name, experiment, options)


def _run(name: str, experiment: Experiment, options: Options) -> list[Verdict]:
    settings = experiment.settings(options)
    circumstances = _results.circumstances()
    folder = Folder(options.out, name, settings, options, circumstances)
    folder.announce("; pass `--resume` to keep them")
    made, borrowed, commits = [], 0, [_results.commit()]
    # On such small matrices, the threads of LAPACK and of XLA wait for each other.
    threads = None if options.scale in LARGE else 1
    with threadpool_limits(threads, user_api="blas"):
        for point in track(experiment.points(settings), name):
            found = folder.load(point) if options.resume else None
            if found is None and experiment.runs_of is not None:
                found = folder.borrow(experiment.runs_of, point)
                borrowed += found is not None
            if found is None:
                try:
                    runs, seconds = _train(experiment, settings, point, folder, options)
                except Refusal:
                    folder.release()
                    raise
                found = Made(runs, seconds, commits)
                folder.save(found)
            made.append(found)
    return write_results(experiment, settings, folder, made, borrowed)


def write_results(
    experiment: Experiment,
    settings: Settings,
    folder: Folder,
    made: Sequence[Made],
    borrowed: int = 0,
) -> list[Verdict]:
    """Write the table, verdicts, figures and settings of all runs of an experiment, in
    this order, so that a figure that fails leaves the table and the verdicts."""
    console, name, out = Console(), folder.name, folder.path
    all_runs = with_derived(experiment, [each.runs for each in made])
    seconds = sum(each.seconds for each in made)
    verdicts = experiment.judge(settings, all_runs)
    stem = name.replace("-", "_")
    _results.write_table(out / f"{stem}.csv", rows_of(settings, all_runs))
    scale = folder.described["scale"]
    _results.write_verdicts(out / "verdicts.csv", verdicts, scale)
    print_verdicts(console, verdicts)
    if scale == "quick":
        console.print("This was a quick test run, whose verdicts are meaningless.")
    captions = experiment.draw(settings, all_runs, out)
    num_runs = sum(runs.num_seeds for runs in all_runs)
    num_runs *= experiment.runs_at_a_point(settings)
    results = {
        "finished": True,
        "paper": experiment.paper,
        "figures": dict(captions),
        "num_runs": num_runs,
        "run_seconds": round(seconds, 1),
        "commits": sorted({commit for each in made for commit in each.commits} - {""}),
        "borrowed": borrowed == len(made),
        "axes": axes_of(all_runs),
    }
    folder.write_settings(results)
    source = f" (reused from {experiment.runs_of})" if borrowed else ""
    console.print(
        f"{num_runs} runs{source} in {seconds:.0f} s. Written to {out}: "
        f"{', '.join(f'{c}.png' for c in captions)}, {stem}.csv, verdicts.csv, "
        "settings.json",
        highlight=False,
        soft_wrap=True,
    )
    return verdicts


def with_derived(experiment: Experiment, all_runs: Sequence[Runs]) -> list[Runs]:
    """Return the runs with the columns that follow from the others."""

    def whole(runs: Runs) -> Runs:
        columns: Any = copy.copy(runs.columns)
        columns.update(experiment.derived(runs))
        return Runs(runs.point, columns)

    return [whole(runs) for runs in all_runs]


def rows_of(settings: Settings, all_runs: Sequence[Runs]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return [row for runs in all_runs for row in runs.rows(_first_seed(settings, runs))]


def axes_of(all_runs: Sequence[Runs]) -> dict[str, int]:
    """Return the number of axes of each column, the largest at any point."""
    axes: dict[str, int] = {}
    for runs in all_runs:
        for name, column in runs.columns.items():
            axes[name] = max(column.ndim, axes.get(name, 0))
    return axes


def _first_seed(settings: Settings, runs: Runs) -> int:
    """Return the first seed of the table. A point may have several runs for each seed."""
    return settings.first_seed * runs.num_seeds // settings.seeds


def _train(experiment, settings, point, folder, options) -> tuple[Runs, float]:
    start = time.perf_counter()
    kept = folder.checkpoints(point) if options.scale in LARGE else None
    place = Place(options.data_dir, kept, options.resume)
    columns = experiment.train(settings, point, place)
    columns = {key: np.asarray(column) for key, column in columns.items()}
    return Runs(point, columns), time.perf_counter() - start


def load(folder: Path, point: Point, stamp: str | None = None) -> Made | None:
    """Load the runs at a point, or return `None` if there are none. Raise `Refusal` if
    the file is damaged or its stamp differs."""
    path = _path(folder, point)
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file) as archive:
            columns = {name: archive[name] for name in archive.files}
        seconds = float(columns.pop("_seconds"))
        found = str(columns.pop("_stamp", ""))
        commits = np.atleast_1d(columns.pop("_commit", "")).tolist()
    except DAMAGED as error:
        raise Refusal(
            f"'{path}' cannot be read ({error}); delete it to make these runs again."
        ) from None
    if stamp is not None and found != stamp:
        raise Refusal(
            f"'{path}' holds runs with other settings or versions; delete it to make "
            "these runs again."
        )
    return Made(Runs(point, columns), seconds, commits)


def _path(folder: Path, point: Point) -> Path:
    return folder / f"{_name(point)}.npz"


def _name(point: Point) -> str:
    def shown(value):
        if isinstance(value, float) and float(f"{value:g}") == value:
            return f"{value:g}"
        return str(value)

    name = ",".join(f"{key}={shown(value)}" for key, value in point.items())
    return "".join(c if c.isalnum() or c in "=,.+-_" else "-" for c in name) or "all"


def plain(value: Any) -> Any:
    """Return the value as it comes back from JSON."""
    if isinstance(value, Mapping):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def unplain(value: Any) -> Any:
    """Return the setting that `plain` has written."""
    if isinstance(value, list):
        return tuple(map(unplain, value))
    return float(value) if value in ("inf", "-inf", "nan") else value


def difference(
    old: Any, new: Any, key: str, where: tuple[str, str] = ("there", "now")
) -> str:
    """Describe the first difference between two values, in a few words."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for each in sorted({*old, *new}):
            if old.get(each) != new.get(each):
                return difference(old.get(each), new.get(each), each, where)
    return f"{key}: {_short(old)} {where[0]}, {_short(new)} {where[1]}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
