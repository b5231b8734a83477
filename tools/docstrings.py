"""Repeat the shared description of several parameters for each, for the reference pages.

Griffe, which parses docstrings for the documentation site, gives all parameters of an entry
``a, b`` the type and the default of the first one.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(r"^(\w+(?:, \w+)+)((?:\n+ +.*)+)", re.MULTILINE)


def separated(text: str) -> str:
    """Repeat the description of parameters that share one, unless they also share a type."""

    def repeat(group: re.Match[str]) -> str:
        return "\n".join(f"{name}{group[2]}" for name in group[1].split(", "))

    return GROUP.sub(repeat, text)


class Separated(griffe.Extension):
    """A griffe extension that applies `separated` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002 (names of griffe)
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)
