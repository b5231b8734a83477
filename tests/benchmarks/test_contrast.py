"""The table of what contrast does to measures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.contrast import GAINS, main, table
from poecaps import Architecture, CapsuleNetwork

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    import torch


def test_a_change_beyond_the_interval_is_marked() -> None:
    def metrics(distance: float, share: float) -> dict[str, object]:
        return {
            "frechet": {"distance": distance},
            "recognisability": {"share": share},
            "errors": {"frechet.distance": 0.5, "recognisability.share": 0.01},
        }

    lines = table({"1": metrics(10, 0.5), "4": metrics(12, 0.51)}).splitlines()
    assert lines[2] == "| Fréchet distance | 10.0 | 12.0 * | ± 1.0 |"
    assert lines[3] == "| recognisable | 50.0 % | 51.0 % | ± 2.0 % |"


def test_measures_with_matched_contrast_are_never_marked(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], generator: torch.Generator
) -> None:
    shape = Architecture(features=8, experts=((3, 5),), joint_components=2, image_shape=(1, 20, 19))
    network = CapsuleNetwork(shape, generator=generator)
    network.code_density.joint.mixture.factors.normal_(generator=generator)
    network.save(tmp_path / "network")
    out = tmp_path / "contrast.json"
    size = ["--data", str(bars), "--samples", "40", "--device", "cpu"]
    main([str(tmp_path / "network"), *size, "--json", str(out)])
    lines = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    for name in ("Fréchet distance, random features", "precision", "recall", "density", "coverage"):
        assert "*" not in lines[name]
    assert list(json.loads(out.read_text())) == [f"{gain:g}" for gain in GAINS]
