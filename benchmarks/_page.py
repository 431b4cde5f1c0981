"""A page made of blocks, written as Markdown or as one HTML file."""

import base64
import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A link to the heading with this text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    text: str


Text = Sequence[str | Code | Link | Outcome]
"""Parts of a text. A newline is a line break."""


@dataclasses.dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclasses.dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[Text]]


@dataclasses.dataclass(frozen=True)
class Image:
    source: Path
    name: str
    """The file's name in the folder of figures beside the report."""
    alternative: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Details:
    title: str
    items: Mapping[str, str]


Block = Heading | Paragraph | Table | Image | Details


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_markdown_block, blocks)) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_escaped(text)}"
        case Paragraph(text):
            # Escape characters that would begin a list.
            return re.sub(r"^(\d*)([-+.)])(?=\s)", r"\1\\\2", _markdown_text(text))
        case Image(_, name, alternative, caption):
            image = f"![{_escaped(alternative)}](report/{name})"
            return f"{image}\n\n*{_escaped(caption)}*" if caption else image
        case Table(header, rows):
            names = [_escaped(name) for name in header]
            lines = [names, ["---"] * len(header)]
            lines += [[_markdown_text(cell) for cell in row] for row in rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Details(title, items):
            listed = "; ".join(f"{key} = {value}" for key, value in items.items())
            return f"{_escaped(title)}: {_escaped(listed)}."


def _markdown_text(text: Text) -> str:
    parts = []
    for each in text:
        match each:
            case str():
                parts.append(_escaped(each).replace("\n", "<br>"))
            case Code(code):
                fence = "``" if "`" in code else "`"
                parts.append(f"{fence}{code}{fence}")
            case Link(name):
                parts.append(f"[{_escaped(name)}](#{name})")
            case Outcome(outcome):
                parts.append(f"**{outcome}**")
    return "".join(parts)


def _escaped(text: str) -> str:
    """Escape for every dialect of Markdown. Some have no backslash for `$` and `~`, so
    these become entities."""
    text = html.escape(text, quote=False).replace("$", "&#36;").replace("~", "&#126;")
    return re.sub(r"([\\`*_{}\[\]|]|(?<!&)#)", r"\\\1", text)


def page(blocks: Sequence[Block], title: str) -> str:
    """Return the blocks as one HTML file that needs no others."""
    body = "\n".join(map(_html_block, blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _html_block(block: Block) -> str:
    match block:
        case Heading(level, text):
            name = html.escape(text)
            return f'<h{level} id="{name}">{name}</h{level}>'
        case Paragraph(text):
            return f"<p>{_html_text(text)}</p>"
        case Image(source, _, alternative, caption):
            data = base64.b64encode(source.read_bytes()).decode()
            return (
                f'<figure>\n<img alt="{html.escape(alternative)}" '
                f'src="data:image/png;base64,{data}">\n'
                f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
            )
        case Table(header, rows):
            names = "".join(f'<th scope="col">{html.escape(n)}</th>' for n in header)
            lines = "\n".join(
                "<tr>" + "".join(f"<td>{_html_text(cell)}</td>" for cell in row) + "</tr>"
                for row in rows
            )
            return (
                f'<div class="table" tabindex="0"><table>\n<thead><tr>{names}'
                f"</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
            )
        case Details(title, items):
            listed = "\n".join(
                f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>"
                for key, value in items.items()
            )
            return (
                f"<details>\n<summary>{html.escape(title)}</summary>\n"
                f"<dl>\n{listed}\n</dl>\n</details>"
            )


def _html_text(text: Text) -> str:
    parts = []
    for each in text:
        match each:
            case str():
                parts.append(html.escape(each).replace("\n", "<br>"))
            case Code(code):
                parts.append(f"<code>{html.escape(code)}</code>")
            case Link(name):
                parts.append(f'<a href="#{html.escape(name)}">{html.escape(name)}</a>')
            case Outcome(outcome):
                name = html.escape(outcome)
                parts.append(f'<span class="outcome {name}">{name}</span>')
    return "".join(parts)


_STYLE = """\
:root {
  color-scheme: light dark;
  --text: #1f2328; --faint: #59636e; --ground: #ffffff; --raised: #f3f5f7;
  --line: #d5dae0; --link: #0059b3;
  --confirmed: #00674b; --refuted: #a63c00; --undecided: #59636e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e4e7eb; --faint: #a3abb5; --ground: #15181c; --raised: #20252b;
    --line: #3a414a; --link: #7db8ff;
    --confirmed: #4cc9a4; --refuted: #ff9a62; --undecided: #a3abb5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; color: var(--text); background: var(--ground);
  font: 16px/1.55 system-ui, sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 1rem; }
p, figcaption, dl { max-width: 46rem; overflow-wrap: anywhere; }
h1, h2 { line-height: 1.25; }
h2 { margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
a { color: var(--link); }
code {
  font: 0.875em ui-monospace, monospace; background: var(--raised);
  padding: 0.1em 0.3em; border-radius: 4px; overflow-wrap: anywhere;
}
figure { margin: 1.25rem 0; }
img {
  max-width: 100%; height: auto; display: block; background: #ffffff; padding: 0.5rem;
  border: 1px solid var(--line); border-radius: 6px;
}
figcaption { margin-top: 0.5rem; color: var(--faint); font-size: 0.925rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.925rem; }
th, td {
  padding: 0.4rem 0.75rem 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
}
th { color: var(--faint); font-weight: 600; }
td:first-child { min-width: 7rem; }
td:nth-child(2) { min-width: 15rem; }
td:nth-child(n+4) { white-space: nowrap; }
.outcome { font-weight: 600; white-space: nowrap; }
.confirmed { color: var(--confirmed); }
.refuted { color: var(--refuted); }
.undecided, .untested { color: var(--undecided); }
summary { cursor: pointer; color: var(--link); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
dt { color: var(--faint); }
dd { margin: 0; }
@media print {
  :root {
    color-scheme: light;
    --text: #000000; --faint: #404040; --ground: #ffffff; --raised: #ffffff;
    --line: #b0b0b0; --link: #000000;
    --confirmed: #00674b; --refuted: #a63c00; --undecided: #404040;
  }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  .table { overflow: visible; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
