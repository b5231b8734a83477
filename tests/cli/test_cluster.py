"""`poecaps cluster`."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from poecaps.applications import cluster
from poecaps.cli.main import main
from tests.cli.conftest import arrays

if TYPE_CHECKING:
    from pathlib import Path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_images_are_sorted_by_expert(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "sorted.csv"
    options = ["--split", "train", "--columns", "3", "--out", str(out)]
    assert main(["cluster", str(run), *options]) == 0
    printed = capsys.readouterr().out
    rows, network = table(out), poecaps.load(run)
    images = poecaps.data.load("mnist-sample")
    assert images.labels is not None
    pixels = images.batch(range(len(rows)))
    with torch.no_grad():
        firing = network.encode(pixels).norm(dim=-1)
    assert [int(row["expert"]) for row in rows] == firing.argmax(1).tolist()
    assert [int(row["label"]) for row in rows] == images.labels[: len(rows)].tolist()
    best = firing.sort(dim=1, descending=True).values
    np.testing.assert_allclose([float(row["firing"]) for row in rows], best[:, 0], atol=1e-4)
    margin = torch.logit(best[:, 0]) - torch.logit(best[:, 1])
    np.testing.assert_allclose([float(row["margin"]) for row in rows], margin, atol=1e-3)
    active = firing.argmax(1).unique()
    assert f"{len(active)} of {firing.shape[1]} experts are the most active one" in printed
    sheet = arrays(out.with_suffix(".npz"))
    assert len(sheet) == len(active)
    for expert in active.tolist():
        members = firing.argmax(1) == expert
        shown = sheet[f"{expert}: {members.sum():,}"]
        assert len(shown) == min(3, int(members.sum()))
        strongest = pixels[members][margin[members].argmax()]
        np.testing.assert_allclose(shown[0], strongest, atol=1e-6)


def test_a_folder_of_pictures_is_sorted_by_their_names(run: Path, tmp_path: Path) -> None:
    images = poecaps.data.load("mnist-sample")
    for number in range(12):
        folder = tmp_path / "pictures" / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.images[number, :, :, 0]).save(folder / f"{number}.png")
    out = tmp_path / "sorted.csv"
    data = ["--data", str(tmp_path / "pictures"), "--split", "train"]
    assert main(["cluster", str(run), *data, "--out", str(out)]) == 0
    rows = table(out)
    names = [row["image"] for row in rows]
    assert sorted(names) == sorted(
        f"{'odd' if number % 2 else 'even'}/{number}.png" for number in range(12)
    )
    assert all(row["image"].startswith(row["label"]) for row in rows)
    with torch.no_grad():
        firing = poecaps.load(run).encode(images.batch(range(12))).norm(dim=-1)
    expected = {f"{number}.png": int(firing[number].argmax()) for number in range(12)}
    assert {row["image"].split("/")[1]: int(row["expert"]) for row in rows} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "clusters.txt"], "--out must name a .csv file, but is clusters.txt"),
        (["--columns", "0"], "--columns must be a whole number of at least 1, but is 0"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", str(run), *options]) == 2
    assert capsys.readouterr().err == f"poecaps: {message}\n"


def test_one_expert_has_no_rival(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its margin is 0, as there is no second expert."""
    network = poecaps.load(run)
    images = poecaps.data.load("mnist-sample").batch(range(4))
    monkeypatch.setattr(network, "encode", lambda batch: torch.full((len(batch), 1, 2), 0.5))
    found = cluster(network, images)
    assert found.expert.tolist() == [0] * 4
    assert found.margin.tolist() == [0.0] * 4
