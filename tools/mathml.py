"""Convert the equations of the documentation to MathML, which browsers render without scripts.

The source is LaTeX in the two forms that code hosts render as well: a fenced ``math`` block, and
inline $`…`$.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

if TYPE_CHECKING:
    from markdown import Markdown

BAR = re.compile(r"<mo>(&#x02016;|&#x0007C;)</mo>")  # the bar of a norm or an absolute value
# A stretched bar is misaligned in ordinary fonts.
PLAIN_BAR = r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>'
# The name of a function: marked up as an operator, it would have space before its argument.
NAME = re.compile(r"<mo>([a-z]{2,})</mo>")


def mathml(source: str, display: str) -> str:
    """Convert LaTeX to MathML."""
    return NAME.sub(r"<mi>\1</mi>", BAR.sub(PLAIN_BAR, convert(source, display=display)))


def equation(source: str, _language: str, css_class: str, *_: Any, **__: Any) -> str:
    """Render the content of a fenced block as a display equation; the signature of superfences."""
    return f'<div class="{css_class}">{mathml(source, "block")}</div>'


class _InlineEquation(InlineProcessor):  # type: ignore[misc]
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: ARG002, N802 (a name of Markdown)
        return self.md.htmlStash.store(mathml(m.group(1), "inline")), m.start(0), m.end(0)


class _Equations(Extension):  # type: ignore[misc]
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (a name of Markdown)
        # Code has priority 190; equations must come first.
        md.inlinePatterns.register(_InlineEquation(r"\$`(.+?)`\$", md), "mathml", 200)


def makeExtension(**options: Any) -> Extension:  # noqa: N802 (a name of Markdown)
    """Create the Markdown extension that renders $`…`$."""
    return _Equations(**options)
