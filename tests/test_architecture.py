"""docs/architecture.md lists every file, and each file imports only from files below
it."""

import ast
import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gnlin"
_NAME = re.compile(r"(?<!\S)(\w+\.py|\w+/)(?!\S)")


def listing():
    """List the paths of files in gnlin/, from the top of the page to the bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\ngnlin/\n(.*?)\n\n", text, re.DOTALL)
    assert block
    paths, folder = [], ""
    for line in block[1].splitlines():
        deep, names = line.startswith("    "), _NAME.findall(line)
        if not deep:
            folder = names[0] if names[0].endswith("/") else ""
        paths += [folder * deep + name for name in names if name.endswith(".py")]
    return paths


ORDER = {path: place for place, path in enumerate(listing())}


def sources():
    found = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in found if not path.endswith("__init__.py"))


def test_every_file_is_listed():
    assert sorted(ORDER) == sources()


def imported(path):
    """Yield the files that a file imports from; a folder stands for its `__init__`."""
    file = PACKAGE / path
    tree = ast.parse(file.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        if not relative or node in for_types:
            continue
        base = file.parents[node.level - 1]
        target = base.joinpath(*node.module.split(".")) if node.module else base
        names = [target] if node.module else [target / a.name for a in node.names]
        for name in names:
            if name.with_suffix(".py").exists():
                yield name.with_suffix(".py").relative_to(PACKAGE).as_posix()
            else:
                folder = name.relative_to(PACKAGE).as_posix()
                assert name.is_dir(), f"{path} imports {folder}"
                yield f"{folder}/"


def test_imports_point_down():
    pairs = [(path, name) for path in sources() for name in imported(path)]
    assert len(pairs) > 100
    for path, name in pairs:
        inside = [p for p in ORDER if p == name or p.startswith(name)]
        if name.endswith("/") and path.startswith(name):
            continue  # its own folder's public face
        assert min(ORDER[p] for p in inside) > ORDER[path], f"{path} imports {name}"
