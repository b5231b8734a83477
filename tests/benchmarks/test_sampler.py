"""The benchmark of the sampler runs, and its alternatives take the same step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import machine, sampler

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INPUTS", 6)
    monkeypatch.setattr(sampler, "IN_DIM", 4)
    cases = (sampler.Case(3, 4, 1, 5), sampler.Case(3, 4, 3, 5))
    monkeypatch.setattr(sampler, "CASES", cases)
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)


@pytest.mark.usefixtures("small")
def test_all_alternatives_take_the_same_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    sampler.main(["--device", "cpu", "--rounds", "1", "--json", str(file)])
    cases = json.loads(file.read_text())["cases"]
    even, routed = cases.values()
    assert even.keys() == {"poecaps", "einsum and autograd", "matrix product and autograd"}
    assert routed.keys() == {"poecaps", "einsum and autograd"}
    for found in (*even.values(), *routed.values()):
        assert found["difference"] < 1e-5
        assert found["times_poecaps"] > 0
    assert "einsum and autograd" in capsys.readouterr().out
