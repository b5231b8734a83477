"""A pytest plugin that makes Triton's interpreter faster.

The interpreter replaces the functions of `triton.language` at every call of a function of a
kernel, which takes a third of the time of the tests. Here they are replaced once, for good.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    modules: Any = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(modules)
    unchanged = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _: unchanged
