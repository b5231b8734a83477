"""The measure of a frame around images, and its benchmark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import frame
from benchmarks.variants import preset_with

if TYPE_CHECKING:
    from pathlib import Path


def test_a_frame_is_measured_by_its_distance_to_the_border(generator: torch.Generator) -> None:
    images = torch.rand(20, 3, 1, 1, generator=generator).mul(0.5).expand(-1, -1, 32, 30).clone()
    assert frame.differences(images) == pytest.approx([0.0] * 5, abs=1e-6)
    images[..., 0] += 0.2
    images[..., -1] += 0.2
    images[..., 0, 1:-1] += 0.2
    images[..., -1, 1:-1] += 0.2
    assert frame.differences(images) == pytest.approx([0.2, 0.0, 0.0, 0.0, 0.0], abs=1e-6)


def test_structure_inside_an_image_makes_it_less_flat() -> None:
    images = torch.full((10, 1, 32, 32), 0.5)
    images[3:, :, 10:20, 10:20] = 1.0
    images[..., :1, :] = 0.0
    alone = frame.differences(images[:3])
    assert frame.differences(images) == pytest.approx(alone)


def test_crops_are_always_the_same() -> None:
    images = frame.crops(6).images
    assert images.shape == (6, 32, 32, 3)
    assert (images == frame.crops(6).images).all()
    assert frame.crops(6, 64).images.shape == (6, 64, 64, 3)


def test_variants_are_trained_once_and_shown_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ("autoencoder", "encoder", "decoder", "pixel_decoder")
    small = preset_with(
        "fast",
        model__features=8,
        model__experts=((3, 4),),
        model__joint_components=2,
        model__margin=4,
        **{f"{stage}__epochs": 1 for stage in stages},
    )
    monkeypatch.setattr(frame, "VARIANTS", {"even": small})
    file = tmp_path / "frame.json"
    arguments = ["--crops", "60", "--json", str(file), "--pictures", str(tmp_path)]
    for _ in range(2):
        frame.main(arguments)
        written = json.loads(file.read_text())
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("|")[2].strip() for line in lines[2:]] == list(frame.KINDS.values())
    assert written == json.loads(file.read_text())
    assert (tmp_path / "frame-even.png").is_file()
    with pytest.raises(SystemExit):
        frame.main(["--only", "odd"])
