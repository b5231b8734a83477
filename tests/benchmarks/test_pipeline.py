"""The pipeline from files to Figure 2 runs, and the times of its parts add up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.pipeline import PANELS, QUALITY, main
from poecaps import CapsuleNetwork
from poecaps.code_density import CodeDensity
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [
    "reading files",
    "preparation",
    "autoencoder",
    "encoder 1",
    "decoder 1",
    "pixel decoder",
    "code density",
    "saving",
]


def test_the_pipeline_runs_for_each_seed(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = PRESETS["default"]()
    model = replace(
        default.model,
        features=8,
        capsule_dim=4,
        experts=((3, 5),),
        equalized_components=2,
        joint_components=4,
        expert_components=2,
    )
    stages = {
        name: replace(getattr(default, name), epochs=1)
        for name in ("autoencoder", "encoder", "decoder")
    }
    small = replace(
        default,
        model=model,
        **stages,
        pixel_decoder=replace(default.pixel_decoder, epochs=1),
        batch_size=16,
    )
    monkeypatch.setitem(PRESETS, "default", lambda: small)
    fit, save = CodeDensity.fit, CapsuleNetwork.save
    given = ["--data", str(bars), "--seeds", "3", "4", "--evaluate", "--samples", "20"]
    main([*given, "--json", str(tmp_path / "found.json"), "--keep", str(tmp_path / "runs")])

    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"command", "machine", "data", "setup", "rounds", "summary"}
    assert found["data"] == {"images": 64, "shape": [1, 20, 19]}
    assert found["setup"].keys() == {"interpreter and imports", "first small run, with compilation"}
    assert [each["seed"] for each in found["rounds"]] == [3, 4]
    for each in found["rounds"]:
        assert list(each["parts"]) == [*PARTS, "Figure 2"]
        assert each["total_s"] == pytest.approx(sum(each["parts"].values()))
        assert each["quality"].keys() == set(QUALITY)
        assert 0 <= each["quality"]["probe.test_accuracy"] <= 1
    assert found["summary"].keys() == {*PARTS, "Figure 2", "total"}
    for seed in (3, 4):
        CapsuleNetwork.load(tmp_path / "runs" / f"seed-{seed}")
        assert all(
            (tmp_path / "runs" / f"seed-{seed}" / f"{panel}.png").is_file() for panel in PANELS
        )
    assert (CodeDensity.fit, CapsuleNetwork.save) == (fit, save)
    assert "first small run" in capsys.readouterr().out
