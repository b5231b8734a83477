"""Codes on equal terms: k-subspaces on a known case, and rows of the study."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import equal_terms
from benchmarks.baselines import Autoencoder, Budget
from benchmarks.equal_terms import CODES, PIXEL_LOSSES, STUDY, DecodedCode, fit_subspaces, main
from poecaps.data import load

if TYPE_CHECKING:
    from pathlib import Path


def test_balanced_subspaces_of_points_that_lie_on_some(generator: torch.Generator) -> None:
    """Three planes of which one has most points: each subspace is a plane that the points span."""
    planes = torch.linalg.qr(torch.randn(3, 12, 2, generator=generator))[0]
    owner = torch.tensor([0] * 200 + [1] * 200 + [2] * 200)
    scale = torch.tensor([1.0, 1.0, 3.0])[owner].unsqueeze(1)
    points = torch.einsum(
        "psd,pd->ps", planes[owner], scale * torch.randn(600, 2, generator=generator)
    )
    found = fit_subspaces(points, 3, 2, generator)
    torch.testing.assert_close(found.mT @ found, torch.eye(2).expand(3, 2, 2), atol=1e-5, rtol=0)
    explained = torch.einsum("ps,jsd->pjd", points, found).square().sum(2)
    best = explained.argmax(1)
    assert best.bincount(minlength=3).min() > 150
    share = explained.amax(1) / points.square().sum(1)
    assert share.median().item() > 0.99


def test_every_code_gets_every_loss() -> None:
    assert len(STUDY) == len(CODES) * len(PIXEL_LOSSES) + 1
    assert len(set(STUDY)) == len(STUDY)


def test_losses_are_smallest_at_the_images() -> None:
    images = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for loss in PIXEL_LOSSES.values():
        assert loss(20 * (images - 0.5), images) < loss(torch.zeros(4), images)


def test_the_decoder_learns_to_reconstruct_and_draws_from_the_density(
    bars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that ignores its code loses all of the variance, at best."""
    monkeypatch.setattr(equal_terms, "DECODER_RATE", 0.01)
    data = load(str(bars))
    images = data.batch(slice(None))
    budget = Budget(30, gibbs=0, seed=0, device=torch.device("cpu"))
    encode = equal_terms.pixel_pca(data, budget)
    model = DecodedCode("pixels", encode, data, PIXEL_LOSSES["squared error"], budget, 8)
    with torch.no_grad():
        error = (model.reconstruct(images) - images).square().mean()
        drawn = model.sample(10, "joint", torch.Generator().manual_seed(0))
    variance = (images.mean(0) - images).square().mean()
    assert error < 0.6 * variance
    assert drawn.shape == (10, 1, 20, 19)
    nearest = torch.cdist(drawn.flatten(1), images.flatten(1)).amin(1)
    assert nearest.square().mean() < 0.8 * variance * images[0].numel()
    assert drawn.std(0).mean() > 0.01  # they differ


def test_the_autoencoder_has_the_requested_filters(bars: Path) -> None:
    budget = Budget(0, gibbs=0, seed=0, device=torch.device("cpu"), filters=8)
    model = Autoencoder(load(str(bars)), budget)
    assert {each.shape[0] for each in model.model.parameters() if each.dim() == 4} == {8}


@pytest.mark.usefixtures("same_process")
def test_rows_have_the_same_measures(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    codes = ("pixel PCA", "random W", "k-subspaces", "k-means, residual")
    only = ";".join(f"{code}, squared error" for code in codes)
    size = ["--data", str(bars), "--device", "cpu", "--samples", "20"]
    size += ["--epochs", "1", "--filters", "8"]
    main([*size, "--only", only, "--held-out", "16", "--json", str(rows)])
    found = json.loads(rows.read_text())
    assert [row["variant"] for row in found] == only.split(";")
    for row in found:
        assert row["evaluation"]["training_images"] == 48
        assert (row["held_out"], row["on"]) == (16, "held-out")
        assert row["evaluation"]["test_images"] == 16
        assert row["evaluation"]["domains"].keys() == {"joint"}
        assert f"--only '{row['variant']}'" in row["command"]
        assert row["command"].endswith("--samples 20 --epochs 1 --filters 8")
    distances = [
        row["evaluation"]["domains"]["joint"]["random_frechet"]["distance"] for row in found
    ]
    assert len({f"{each:.4g}" for each in distances}) == len(codes)  # each row has its own code
    sizes = {row["variant"].split(",")[0]: row["evaluation"]["code_size"] for row in found}
    assert sizes["k-subspaces"] == sizes["random W"] == 320
    assert "| k-subspaces, squared error | 1 |" in capsys.readouterr().out
