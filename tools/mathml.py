"""Equations of the documentation as MathML, which browsers draw by themselves: nothing is fetched, no script runs.

The source is LaTeX in the two forms that code hosts draw as well: a fence of ``math``, and $`…`$ within a line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

if TYPE_CHECKING:
    from markdown import Markdown

BAR = re.compile(r"<mo>(&#x02016;|&#x0007C;)</mo>")  # of a norm, or of an absolute value
PLAIN_BAR = r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>'  # a stretched one sits askew in an ordinary font
NAME = re.compile(
    r"<mo>([a-z]{2,})</mo>"
)  # of a function; as an operator it would stand apart from what follows


def mathml(source: str, display: str) -> str:
    """Turn LaTeX into MathML."""
    return NAME.sub(r"<mi>\1</mi>", BAR.sub(PLAIN_BAR, convert(source, display=display)))


def equation(source: str, _language: str, css_class: str, *_: Any, **__: Any) -> str:
    """Turn the inside of a fence into an equation on a line of its own, as superfences asks for it."""
    return f'<div class="{css_class}">{mathml(source, "block")}</div>'


class _WithinLine(InlineProcessor):  # type: ignore[misc]
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: ARG002, N802 (as it is called)
        return self.md.htmlStash.store(mathml(m.group(1), "inline")), m.start(0), m.end(0)


class _Equations(Extension):  # type: ignore[misc]
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name that Markdown calls)
        md.inlinePatterns.register(
            _WithinLine(r"\$`(.+?)`\$", md), "mathml", 200
        )  # before code, at 190


def makeExtension(**options: Any) -> Extension:  # noqa: N802 (the name that Markdown calls)
    """Make the extension that draws $`…`$."""
    return _Equations(**options)
