"""The order of the imports: no module imports a higher one, not inside functions either."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import poecaps

ROOT = Path(poecaps.__file__).parent

# From the lowest floor to the highest. A module may import modules of lower floors, and of its own
# package. CONTRIBUTING.md has a table with the same rows; a new module needs a place in both.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "_checks",
        "_devices",
        "_files",
        "_graphs",
        "_json",
        "_modules",
        "_progress",
        "_version",
        "metrics",
    ),
    ("functional", "data"),
    ("kernels",),
    ("layer", "autoencoder", "preprocessing", "code_density", "options", "views"),
    ("energy",),
    ("sampling",),
    ("likelihood",),
    ("serialization",),
    ("network",),
    ("models", "training"),
    ("applications", "evaluation", "export", "plotting", "_table"),
    ("card", "sklearn", "explorer"),
    ("hub",),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in ROOT.rglob("*.py")
)


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in its source."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {resolve(alias.name) for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            if node.module and is_ours(node.module):
                found |= {resolve(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {module}


def is_ours(name: str) -> bool:
    return name == "poecaps" or name.startswith("poecaps.")


def resolve(name: str) -> str:
    """Module of the package that a dotted name belongs to, without the leading ``poecaps.``."""
    parts = name.split(".")[1:]
    while parts:
        dotted = ".".join(parts)
        for each in (dotted, f"{dotted}.__init__"):
            if each in MODULES:
                return each
        parts.pop()
    return "__init__"


def test_every_module_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} == set(FLOOR)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    for other in imported(module):
        same = room_of(other) == room_of(module)
        assert same or FLOOR[room_of(other)] < FLOOR[room_of(module)], f"{module} imports {other}"


def test_no_two_modules_import_each_other() -> None:
    # Raises CycleError, which names the cycle.
    list(TopologicalSorter({module: imported(module) for module in MODULES}).static_order())
