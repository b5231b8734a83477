"""The benchmark of inpainting and denoising by a density: its controls, and the whole script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.posterior import PixelGaussian, main, without_experts
from poecaps import Architecture
from poecaps.data import load
from poecaps.options import DensityOptions
from tests.networks import untrained_with_density

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps import CapsuleNetwork


@pytest.fixture
def network(generator: torch.Generator) -> CapsuleNetwork:
    density = DensityOptions(experts=(3, 4), linear_dims=2, base_components=4)
    shape = Architecture(features=8, experts=((3, 4),), joint_components=4, density=density)
    return untrained_with_density(shape, load("mnist-sample").batch(range(60)), generator)


def test_the_gaussian_predicts_what_it_has_not_seen(generator: torch.Generator) -> None:
    """Of three pixels, the third is the mean of the others."""
    seen = torch.rand(5000, 1, 1, 3, generator=generator)
    seen[..., 2] = seen[..., :2].mean(-1)
    gaussian = PixelGaussian(seen)
    known = torch.tensor([[True, True, False]])
    images = torch.tensor([0.2, 0.8, 0.0]).view(1, 1, 1, 3)
    found = gaussian.posterior_mean(images, known, 1e-3)
    torch.testing.assert_close(
        found, torch.tensor([0.2, 0.8, 0.5]).view(1, 1, 1, 3), atol=2e-3, rtol=0
    )
    nothing = gaussian.posterior_mean(images, known, 1e3)  # the noise hides everything
    torch.testing.assert_close(nothing, seen.mean(0, keepdim=True), atol=2e-3, rtol=0)


def test_the_gaussian_removes_noise_like_a_wiener_filter(generator: torch.Generator) -> None:
    seen = 0.5 + 0.1 * torch.randn(20000, 1, 1, 2, generator=generator)  # independent pixels
    found = PixelGaussian(seen).posterior_mean(
        torch.full((1, 1, 1, 2), 0.7), torch.ones(1, 2, dtype=torch.bool), 0.1
    )
    torch.testing.assert_close(found, torch.full((1, 1, 1, 2), 0.6), atol=5e-3, rtol=0)


def test_without_experts_the_base_measure_is_left(network: CapsuleNetwork) -> None:
    images = load("mnist-sample").batch(range(5))
    with torch.no_grad():
        network.require_density().origin.fill_(1.0)
    density, control = (each.require_density() for each in (network, without_experts(network)))
    with torch.no_grad():
        assert density.free_energy(network.whitened(images)).std() > 1e-3
        assert bool((control.free_energy(network.whitened(images)) == 0).all())


def test_the_script_measures_every_method(
    network: CapsuleNetwork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "run")
    numbers, picture = tmp_path / "posterior.json", tmp_path / "posterior.png"
    main(
        [
            *("--network", str(tmp_path / "run"), "--images", "6", "--draws", "2", "--steps", "3"),
            *("--limit", "100", "--json", str(numbers), "--picture", str(picture)),
        ]
    )
    found, printed = json.loads(numbers.read_text()), capsys.readouterr().out
    assert found["images"] == 6
    for task in ("inpainting", "denoising"):
        rows = found[task]
        first = next(iter(rows.values()))
        assert first["difference"] == first["difference_error"] == 0
        assert rows["original"]["error"] == 0
        assert rows["original"]["correct"] > 0.8
        for name, row in rows.items():
            assert name in printed
            assert row["difference"] == pytest.approx(row["error"] - first["error"])
    assert found["denoising"]["noisy image"]["error"] > 0.01
    assert found["inpainting"]["mean image"]["error"] > 0.01  # of the hidden pixels
    assert picture.is_file()
