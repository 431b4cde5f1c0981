"""Files of results: folders are checked beforehand, and writes are atomic."""

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ._options import Refusal


try:
    import fcntl
except ImportError:  # on Windows, where the folder is not locked
    fcntl = None

KEPT = Path(__file__).parent / "results"
"""The results in the repository."""
PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "lineax",
    "optimistix",
    "optax",
    "gnlin",
    "numpy",
    "scipy",
    "scikit-learn",
    "matplotlib",
    "jaxopt",
)


def claim_folder(folder: Path) -> None:
    """Create the folder and test that it can be written to, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise Refusal(
            f"Results cannot go to '{folder}', which is a file or lies within one; name "
            "a folder with --out."
        ) from None
    except OSError as error:
        raise Refusal(
            f"Results cannot go to '{folder}' ({error.strerror}); name another folder "
            "with --out."
        ) from None


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim the folder, and remove it again if the request is refused before anything
    is written."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        claim_folder(folder)
        yield
    except Refusal:
        with suppress(OSError):  # from the innermost on, up to one that is not empty
            for path in new:
                path.rmdir()
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder, or raise `Refusal` if another process uses it.

    The system releases the lock when the process ends, even if it is killed.
    """
    path = folder / ".lock"
    try:
        lock = _locked(path)
    except BlockingIOError:
        raise Refusal(
            f"Another command is writing to '{folder}'; wait for its end, or name "
            "another folder with --out."
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Keep the lock only if its last holder has not deleted the file meanwhile.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it, so that readers never see half of it."""
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
    """Write one line for each dataclass, with its fields as columns. `None` is empty."""
    write_table(path, [dataclasses.asdict(row) for row in rows])


def write_verdicts(path: Path, verdicts: Sequence[Any], scale: str) -> None:
    """Write one line for each verdict, with the scale of its runs: a quick run decides
    nothing."""
    write_table(path, [dataclasses.asdict(v) | {"scale": scale} for v in verdicts])


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one line for each row. Columns that a row lacks are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the content of `settings.json`, or `None` if there is no such file."""
    path = folder / "settings.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refusal(
            f"'{path}' cannot be read ({error}); name another folder of results, or "
            "delete this one."
        ) from None


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages.

    Raises `PackageNotFoundError` if a package is missing.
    """
    return {"python": platform.python_version()} | {
        package: version(package) for package in PACKAGES
    }


def commit() -> str:
    """Return the commit of the running code, with a note if there are uncommitted
    changes, or nothing outside a repository."""
    here = Path(__file__).parents[1]
    head = git(here, "rev-parse", "HEAD")
    changed = git(here, "status", "--porcelain", "--", "gnlin", "benchmarks")
    return f"{head} with changes" if head and changed else head


def git(folder: Path, *words: str) -> str:
    """Return git's output, which is empty if there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def circumstances() -> dict[str, Any]:
    """Describe everything besides the settings that may affect the numbers."""
    import jax  # imported here, so that `list` and `--help` are fast

    (device,) = jax.numpy.zeros(()).devices()  # --device may choose another
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "backend": device.platform,
        "device": device.device_kind,
        "x64": bool(jax.config.read("jax_enable_x64")),
        "versions": versions(),
    }
