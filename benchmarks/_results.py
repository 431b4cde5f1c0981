"""Files of results: a folder that is sure to take them, and writes that are whole."""

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "lineax",
    "optimistix",
    "gnlin",
    "numpy",
    "scipy",
    "scikit-learn",
    "matplotlib",
    "jaxopt",
)


class UnusableFolder(Exception):
    """Says in one sentence why nothing can be written there."""


def claim_folder(folder: Path) -> None:
    """Make the folder, and write to it: better refused now than after the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UnusableFolder(
            f"Results cannot go to '{folder}', which is a file or lies within one; name "
            "a folder with --out."
        ) from None
    except OSError as error:
        raise UnusableFolder(
            f"Results cannot go to '{folder}' ({error.strerror}); name another folder "
            "with --out."
        ) from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file, then rename: whoever reads it finds the old or the new."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda part: part.write_text(text))


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """One line a dataclass, its fields the columns; `None` is an empty cell."""

    def write(part: Path) -> None:
        with part.open("w", newline="") as file:
            names = [field.name for field in dataclasses.fields(rows[0])]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)

    write_whole(path, write)


def write_run(
    out: Path,
    name: str,
    rows: Sequence[Any],
    verdicts: Sequence[Any],
    settings: dict[str, Any],
) -> None:
    """What lasts of an experiment beside its figures: NAME.csv, a row a run;
    verdicts.csv; and settings.json, with all that the numbers may depend on."""
    write_csv(out / f"{name}.csv", rows)
    write_csv(out / "verdicts.csv", verdicts)
    write_json(out / "settings.json", {**settings, **circumstances()})


def versions() -> dict[str, str]:
    """Raises `PackageNotFoundError` where one is not installed."""
    return {"python": platform.python_version()} | {
        package: version(package) for package in PACKAGES
    }


def circumstances() -> dict[str, Any]:
    """What the numbers may depend on besides the settings."""
    import jax  # not above: `list` and `--help` are to be quick

    return {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "x64": bool(jax.config.read("jax_enable_x64")),
        "versions": versions(),
    }
