"""Dataclasses from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from poecaps._files import DamagedError, read_json
from poecaps._json import dataclass_from_json

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Inner:
    pairs: tuple[tuple[int, int], ...]
    name: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    size: int
    inner: Inner = field(default_factory=lambda: Inner(((1, 2),)))


def test_a_dataclass_is_rebuilt_from_its_json() -> None:
    outer = Outer(3, Inner(((1, 2), (3, 4)), "a"))
    assert dataclass_from_json(Outer, json.loads(json.dumps(asdict(outer)))) == outer


@pytest.mark.parametrize(
    "values",
    [
        None,
        [3],
        {"size": 3},
        {"size": 3, "inner": {"pairs": [], "name": None, "share": None}, "more": 1},
        {"size": 3, "inner": {"pairs": []}},
        {"size": 3, "inner": 5},
    ],
)
def test_missing_and_unknown_fields_are_an_error(values: Any) -> None:
    with pytest.raises(ValueError, match="must have the fields"):
        dataclass_from_json(Outer, values)


def test_fields_with_a_default_may_be_missing_if_allowed() -> None:
    assert dataclass_from_json(Outer, {"size": 3}, defaults=True) == Outer(3)
    inner = {"size": 3, "inner": {"pairs": [[5, 6]]}}
    assert dataclass_from_json(Outer, inner, defaults=True) == Outer(3, Inner(((5, 6),)))
    wrong: list[Any] = [{"inner": {"pairs": []}}, {"size": 3, "inner": {}}, {"size": 3, "more": 1}]
    for values in wrong:
        with pytest.raises(ValueError, match="must have the fields"):
            dataclass_from_json(Outer, values, defaults=True)


def test_a_whole_number_is_a_float_where_one_is_expected() -> None:
    """PyTorch refuses some options as int, and all that 64 bits cannot hold."""
    for number in (0, 2**64):
        share = dataclass_from_json(Inner, {"pairs": [], "name": None, "share": number}).share
        assert type(share) is float
        assert share == number
    too_large: dict[str, Any] = {"pairs": [], "name": None, "share": 10**400}
    assert dataclass_from_json(Inner, too_large).share == 10**400


@pytest.mark.parametrize("checksum", ["", '"checksum": "0", '])
def test_json_that_is_nested_too_deeply_is_refused(checksum: str, tmp_path: Path) -> None:
    """At every depth: reading it and computing its checksum descend by different functions."""
    path, depth = tmp_path / "run.json", 0
    for depth in range(51, 1100):
        path.write_text(f'{{{checksum}"x": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(DamagedError, match="nested more than 50 times"):
            read_json(path)
    path.write_text(f'{{"x": {"[" * 49}{"]" * 49}}}')
    assert list(read_json(path)) == ["x"]
