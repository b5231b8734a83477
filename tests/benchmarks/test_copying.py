"""Copies, test images and blurred images beside the training images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.copying import CONTRASTS, DRAWS, RECONSTRUCTIONS, main, measure, share, table
from poecaps import Architecture, CapsuleNetwork

if TYPE_CHECKING:
    from pathlib import Path


def test_copies_are_nearer_and_other_images_of_the_distribution_are_not(
    generator: torch.Generator,
) -> None:
    def images(count: int) -> torch.Tensor:
        return torch.rand(count, 1, 4, 4, generator=generator)

    training, test = images(500), images(400)
    kinds = {"copies": training[:400], "others": images(400)}
    found = measure(kinds, test, lambda: training.split(200))
    assert share(found, "copies").value == 1
    others = share(found, "others")
    assert abs(others.value - 0.5) < 2 * others.half_width
    assert tuple(found["copies"]) == tuple(CONTRASTS)
    # Numbers that differ by a monotone function only are the same once their contrast is matched.
    steeper = {"others": torch.sigmoid(3 * torch.logit(kinds["others"].clamp(1e-6, 1 - 1e-6)))}
    again = measure(steeper, test, lambda: training.split(200))
    assert share(again, "others", "contrast matched").value == pytest.approx(
        share(found, "others", "contrast matched").value, abs=1e-3
    )
    assert "| A | copies | 100.0 % ± 0.0 % |" in table({"A": found})


def test_a_network_is_measured(bars: Path, tmp_path: Path, generator: torch.Generator) -> None:
    shape = Architecture(features=8, experts=((3, 5),), joint_components=2, image_shape=(1, 20, 19))
    CapsuleNetwork(shape, generator=generator).save(tmp_path / "network")
    out = tmp_path / "copying.json"
    main([str(tmp_path / "network"), "--data", str(bars), "--samples", "30", "--json", str(out)])
    assert list(json.loads(out.read_text())) == [DRAWS, RECONSTRUCTIONS]
