"""Docstrings as the reference of the documentation shows them: what describes several parameters, once for each.

Griffe, which reads docstrings for the site, gives all of ``a, b`` the type and the default of the first.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(r"^(\w+(?:, \w+)+)((?:\n+ +.*)+)", re.MULTILINE)


def separated(text: str) -> str:
    """Repeat the description of parameters that share one, unless they share a type as well."""

    def repeat(group: re.Match[str]) -> str:
        return "\n".join(f"{name}{group[2]}" for name in group[1].split(", "))

    return GROUP.sub(repeat, text)


class Separated(griffe.Extension):
    """Separates what `griffe` would mix up."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002 (the names that griffe calls by)
        """Rewrite the docstring of what was found, if there is one."""
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)
