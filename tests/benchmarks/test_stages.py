"""The benchmark of the training stages runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import machine, stages
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from pathlib import Path


def test_the_benchmark_measures_and_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = PRESETS["default"]()
    model = replace(
        default.model, features=8, capsule_dim=4, experts=((3, 4),), equalized_components=2
    )
    monkeypatch.setitem(PRESETS, "default", lambda: replace(default, model=model))
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)
    monkeypatch.setattr(stages, "PROFILED_STEPS", 2)
    images = np.random.default_rng(0).integers(256, size=(40, 20, 19), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    given = ["--data", str(tmp_path / "images.npy"), "--batch", "8", "--rounds", "1"]
    stages.main([*given, "--profile", "50", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["stages"]) == list(stages.STAGES)
    for each in found["stages"].values():
        assert each["images_per_s"] == pytest.approx(8 / each["median_s"])
    parts = capsys.readouterr().out.split("\n\n")
    assert "images/s" in parts[0]
    for name, part in zip(stages.STAGES, parts[1:], strict=True):
        assert part.startswith(name)
    assert "aten::convolution_backward" in parts[1]
    assert "aten::convolution_backward" not in parts[2]
