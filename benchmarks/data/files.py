"""The standard files of a data set: found in a folder, checked, or downloaded."""

import dataclasses
import hashlib
import http.client
import io
import shlex
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urljoin

from jaxtyping import Int, UInt8
from numpy import ndarray

from .._options import Refusal
from .._results import write_whole


Examples: TypeAlias = tuple[UInt8[ndarray, "n channels height width"], Int[ndarray, " n"]]
"""Images and their classes."""

_TIMEOUT = 60  # seconds without an answer


class DataError(Refusal):
    """Says in one sentence what is wrong with which file, and what to do."""


class Damage(Exception):
    """Says what a reader found wrong with its file, as part of that sentence."""


Part: TypeAlias = Mapping[str, Callable[[Path], Any]]
"""A reader for each file or folder that may hold the part. The first is preferred, and
can be downloaded. Readers raise `Damage` or `OSError`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The condition of a file, also as a sentence."""

    path: Path
    condition: Literal["sound", "damaged", "absent"]
    sentence: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The names of a data set's files, where to download them, and how to read them."""

    name: str
    host: str
    """The address of the folder from which the files can be downloaded."""
    md5: Mapping[str, str]
    """The checksums by file name. A file without one is checked by its structure
    alone."""
    parts: Sequence[Part]

    def load(self, data_dir: Path) -> list[Any]:
        """Load all parts. Raise `DataError` if one is absent or damaged."""
        return [self._read_first(part, data_dir) for part in self.parts]

    def verify(self, data_dir: Path) -> list[Finding]:
        """Report whether each file in the folder is sound, and which parts are absent."""
        findings = []
        for part in self.parts:
            there = _there(part, data_dir)
            findings += [self._verify(part, path) for path in there]
            if not there:
                sentence = self._absent(part, data_dir)
                findings.append(Finding(data_dir / _first(part), "absent", sentence))
        return findings

    def download(self, data_dir: Path, out: Callable[[str], object]) -> None:
        """Download the files of all absent parts. Raise `DataError` if that fails."""
        for part in self.parts:
            if not _there(part, data_dir):
                self._download(_first(part), data_dir, out)

    def _read_first(self, part: Part, data_dir: Path) -> Any:
        there = _there(part, data_dir)
        if not there:
            raise DataError(self._absent(part, data_dir))
        return self._read(part, there[0])

    def _read(self, part: Part, path: Path) -> Any:
        try:
            # Check this before anything else reads the file.
            if path.name in self.md5:
                _check_file(path, self.md5[path.name])
            return part[path.name](path)
        except Damage as damage:
            raise DataError(
                f"'{path}' is damaged: {damage}; delete it, and "
                f"{self._remedy(part, path.parent)}."
            ) from None
        except OSError as error:
            raise DataError(
                f"'{path}' cannot be read ({_reason(error)}); make it readable, or "
                f"delete it and {self._remedy(part, path.parent)}."
            ) from None

    def _verify(self, part: Part, path: Path) -> Finding:
        try:
            self._read(part, path)
        except DataError as error:
            return Finding(path, "damaged", str(error))
        of_file = path.name in self.md5
        checked = of_file or any(file.name in self.md5 for file in path.glob("*"))
        known = "checksum and contents" if checked else "contents"
        return Finding(path, "sound", f"'{path}' is sound, by its {known}.")

    def _download(self, name: str, data_dir: Path, out: Callable[[str], object]) -> None:
        url, path = urljoin(self.host, name), data_dir / name
        out(f"Downloading {url}.")

        def write(partial: Path) -> None:
            with (
                urllib.request.urlopen(url, timeout=_TIMEOUT) as response,
                partial.open("wb") as file,
            ):
                shutil.copyfileobj(response, file)
            _check_file(partial, self.md5[name])

        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            write_whole(path, write)
        except Damage as damage:
            raise DataError(
                f"What {url} sent is not the whole file, or another one: {damage}; try "
                f"again, or download it elsewhere and put it into '{data_dir}'."
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise DataError(
                f"{url} could not be downloaded to '{path}' ({_reason(error)}); try "
                f"again, or download it elsewhere and put it into '{data_dir}'."
            ) from None
        out(f"'{path}' is sound, by its checksum.")

    def _absent(self, part: Part, data_dir: Path) -> str:
        first, *others = (f"'{name}'" for name in part)
        return (
            f"There is no {first} in '{data_dir}' (nor {', '.join(others)}); "
            f"{self._remedy(part, data_dir)}."
        )

    def _remedy(self, part: Part, data_dir: Path) -> str:
        command = ["python", "-m", "benchmarks", "data", self.name]
        command += ["--data-dir", str(data_dir)]
        return (
            f"download {urljoin(self.host, _first(part))} there, by hand or by "
            f"`{shlex.join(command)}`"
        )


def check_labels(labels: UInt8[ndarray, " n"], name: str, num_classes: int = 10) -> None:
    """Raise `Damage` if a label is out of range."""
    largest = labels.max(initial=0)
    if largest >= num_classes:
        raise Damage(
            f"{name} has a label of {largest}, where they go from 0 to {num_classes - 1}"
        )


def check_md5(
    contents: io.BufferedReader | io.BytesIO, expected: str, whose: str = "its MD5"
) -> None:
    """Raise `Damage` if the MD5 differs. This protects against accidents. Contents are
    never executed, whatever their checksum."""
    digest = hashlib.file_digest(contents, lambda: hashlib.md5(usedforsecurity=False))
    if digest.hexdigest() != expected:
        raise Damage(f"{whose} is {digest.hexdigest()}, not {expected}")


def _first(part: Part) -> str:
    return next(iter(part))


def _there(part: Part, data_dir: Path) -> list[Path]:
    try:
        return [data_dir / name for name in part if (data_dir / name).exists()]
    except OSError as error:
        raise DataError(
            f"'{data_dir}' cannot be looked into ({_reason(error)}); make it readable, "
            "or name another folder with --data-dir."
        ) from None


def _check_file(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        check_md5(file, expected)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    return getattr(error, "strerror", None) or str(error)
