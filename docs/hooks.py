"""Hooks of the build. They turn mathematics into MathML, which needs no script and no
network, link the reference to the source, which is part of the site, and collect the
publications that docstrings cite."""

import ast
import html
import importlib
import inspect
import re
import textwrap
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File


PACKAGE = Path(__file__).resolve().parents[1] / "gnlin"

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
_CITED = re.compile(r'\?\?\? cite "References?"\n\n((?:    .*\n?|\n)*)')
_SURNAME = re.compile(r"[A-ZÅ]\. ([A-Z]\w+)")
# Python's default docstring of `__init__`; the class has the real one.
_NO_DOCSTRING = re.compile(r"<p>Initialize self\.\s+See help\(type\(self\)\).*?</p>")
_HEADING = re.compile(
    r'(<h\d id="(gnlin[\w.]*)" class="doc doc-heading">)(.*?)(</h\d>)', re.DOTALL
)


def on_files(files, config):
    """Add a page for each source file of the package, and exclude it from the search."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        text = (
            "---\nsearch: { exclude: true }\nhide: [toc]\n---\n"
            f'# {name}\n\n```{{ .python linenums="1" }}\n{path.read_text()}\n```\n'
        )
        files.append(File.generated(config, f"source/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    place = "<!-- publications -->"
    return markdown.replace(place, publications()) if place in markdown else markdown


def publications() -> str:
    """Return a list of all publications that docstrings cite, with the places."""
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for block in _CITED.findall(ast.get_docstring(node) or ""):
                for cited in textwrap.dedent(block).strip().split("\n\n"):
                    place = f"`{node.name}` in [`{name}`](source/{name}.md)"
                    places.setdefault(" ".join(cited.split()), []).append(place)
    in_order = sorted(places, key=lambda cited: _SURNAME.findall(cited)[:1])
    return "\n".join(f"- {cited} {', '.join(places[cited])}." for cited in in_order)


def on_page_content(content: str, page, **_) -> str:
    content = _NO_DOCSTRING.sub("", content)
    content = _INLINE.sub(lambda m: mathematics(html.unescape(m[1])), content)
    content = _DISPLAY.sub(lambda m: mathematics(html.unescape(m[1]), "block"), content)
    root = "../" * page.url.count("/")
    return _HEADING.sub(lambda m: m[1] + m[3] + _source(m[2], root) + m[4], content)


def mathematics(tex: str, display: str = "inline") -> str:
    """Convert LaTeX to MathML, with LaTeX's spacing."""
    code = convert(tex, display=display)
    # Make a transpose a letter: an operator would have space around it.
    code = code.replace("<mo>&#x022A4;</mo>", '<mi mathvariant="normal">&#x022A4;</mi>')
    code = code.replace("<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">/</mo>')
    # After another operator, a minus is a sign, not a difference.
    code = re.sub(
        r"((?:^|<mrow>|<mo[^>]*>(?:=|\(|\[|,|&#x(?:0003D|00028|0005B|0002C|02190|02264);)"
        r"</mo>))<mo>&#x02212;</mo>",
        r'\1<mo form="prefix">&#x02212;</mo>',
        code,
    )
    # Join the letters of an operator's name.
    letter = r'<mi mathvariant="normal">(\w)</mi>'
    code = re.sub(
        rf"(?:{letter}){{2,}}",
        lambda m: f"<mi>{''.join(re.findall(letter, m[0]))}</mi>",
        code,
    )
    return _with_bars(code)


def _with_bars(code: str) -> str:
    """Let bars of norms and absolute values open and close in turn."""
    sides = {}

    def bar(match):
        side = sides[match[1]] = (
            "postfix" if sides.get(match[1]) == "prefix" else "prefix"
        )
        attributes = f'form="{side}" stretchy="false" lspace="0" rspace="0"'
        return f"<mo {attributes}>{match[1]}</mo>"

    return re.sub(r"<mo[^>]*>(&#x02016;|&#x0007C;)</mo>", bar, code)


def _source(name: str, root: str) -> str:
    """A link to the lines that define a public name."""
    thing = importlib.import_module("gnlin")
    for part in name.split(".")[1:]:
        thing = getattr(thing, part, None)
    thing = inspect.unwrap(getattr(thing, "fget", None) or thing)
    try:
        path = Path(inspect.getsourcefile(thing)).relative_to(PACKAGE.parent).as_posix()
        line = max(inspect.getsourcelines(thing)[1], 1)
    except (TypeError, OSError, ValueError):
        return ""
    return (
        f'<a class="gnlin-source" href="{root}source/{path}/#__codelineno-0-{line}">'
        "source</a>"
    )
