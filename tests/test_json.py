"""Dataclasses from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from poecaps._json import dataclass_from_json


@dataclass(frozen=True)
class Inner:
    pairs: tuple[tuple[int, int], ...]
    name: str | None = None


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
        {"size": 3, "inner": {"pairs": [], "name": None}, "more": 1},
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
