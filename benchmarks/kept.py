"""Results that are kept in the repository, and the page that is made from them.

For each experiment, this keeps the verdicts, the table, and the settings with the commit
that made the runs. The figures are beside the page.
"""

import gzip
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import report
from ._options import no_folder, Refusal
from ._results import claim_folder, read_settings, write_whole
from .own_task import is_own


ROOT = Path(__file__).parents[1]
KEPT = Path("benchmarks") / "results"
PAGE = Path("docs")
"""Both folders are relative to the root of the repository."""


def keep(results: Path, names: Sequence[str], root: Path = ROOT) -> None:
    """Copy the finished results into the repository, where they replace the old ones, and
    write the page again."""
    if not results.is_dir():
        raise Refusal(
            f"'{results}' {no_folder(results)}; name the folder of the results with "
            "--out."
        )
    taken = []
    for name in names:
        settings = read_settings(results / name)
        if settings is None or not settings["finished"]:
            continue
        if settings["scale"] == "quick":
            print(f"{name} is not copied, because it is a quick run.")
            continue
        if is_own(settings["settings"].get("data", "")):
            print(f"{name} is not copied, because it is on a task of your own.")
            continue
        _copy(results / name, name, settings["figures"], root)
        taken.append(name)
    print(f"Finished experiments in '{results}': {', '.join(taken) or 'none'}.")
    if not (root / KEPT).exists():
        raise Refusal(f"'{results}' has no finished experiment; run one first.")
    report.write(root / KEPT, names, root / PAGE)


def _copy(folder: Path, name: str, figures: Sequence[str], root: Path) -> None:
    target = root / KEPT / name
    claim_folder(target)
    for file in ("settings.json", "verdicts.csv"):
        _write(target / file, (folder / file).read_bytes())
    pack(folder / table(name), target)
    copy_figures(folder, name, figures, root)


def pack(path: Path, target: Path) -> None:
    """Compress a table into a folder."""
    packed = gzip.compress(path.read_bytes(), mtime=0)
    _write(target / f"{path.name}.gz", packed)


def table(name: str) -> str:
    """Return the file name of an experiment's table."""
    return f"{name.replace('-', '_')}.csv"


def copy_figures(folder: Path, name: str, figures: Iterable[str], root: Path) -> None:
    """Copy an experiment's figures to those of the page."""
    pictures = root / PAGE / "report"
    claim_folder(pictures)
    for stem in figures:
        shutil.copyfile(folder / f"{stem}.png", pictures / report.picture(name, stem))


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda part: part.write_bytes(content))
