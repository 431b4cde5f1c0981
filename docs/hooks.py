"""Mathematics as MathML, at build time: the pages need no script and no network."""

import html
import re

from latex2mathml.converter import convert


_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
# What Python says of an `__init__` without a docstring; the class has one.
_NO_DOCSTRING = re.compile(r"<p>Initialize self\.\s+See help\(type\(self\)\).*?</p>")


def on_page_content(content: str, **_) -> str:
    content = _NO_DOCSTRING.sub("", content)
    content = _INLINE.sub(lambda m: convert(html.unescape(m[1])), content)
    return _DISPLAY.sub(lambda m: convert(html.unescape(m[1]), display="block"), content)
