"""The benchmark of the sampler runs, and its alternatives take the same step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import machine, sampler
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INPUTS", 6)
    monkeypatch.setattr(sampler, "IN_DIM", 4)
    cases = tuple(sampler.Case(3, 4, *rest) for rest in ((1, 5), (3, 5), (1, 5, 7)))
    monkeypatch.setattr(sampler, "CASES", cases)
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)


@pytest.mark.usefixtures("small")
def test_all_alternatives_take_the_same_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    sampler.main(["--device", "cpu", "--rounds", "1", "--json", str(file)])
    cases = json.loads(file.read_text())["cases"]
    even, routed, components = cases.values()
    assert list(cases)[2] == "3×4 of 7 components, R 1, 5 chains"
    assert even.keys() == {"poecaps", "einsum and autograd", "matrix product and autograd"}
    assert routed.keys() == {"poecaps", "einsum and autograd"}
    assert components.keys() == even.keys()
    for found in (*even.values(), *routed.values(), *components.values()):
        assert found["difference"] < 1e-5
        assert found["times_poecaps"] > 0
    assert "einsum and autograd" in capsys.readouterr().out


def test_the_last_case_is_what_the_preset_samples() -> None:
    """A density that is restricted to its components, with the sizes of the preset."""
    options = PRESETS["energy"]().model.density
    assert options is not None
    density = sampler.CASES[-1].density(torch.device("cpu"))
    assert (density.in_capsules, density.in_dim) == (1, options.base_components)
    assert (density.out_capsules, density.out_dim) == options.experts
    assert density.linear_dims == options.linear_dims
    assert density.iterations == options.iterations
