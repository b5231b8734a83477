"""Digits in a larger frame, and how codes change when they are transformed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks import affine_digits, transformations
from benchmarks.affine_digits import NAMES, draw_shapes, free_shifts, matrices, render, thicken
from benchmarks.internals import changed_options
from benchmarks.transformations import (
    ENCODER_ONLY,
    PEERS,
    POECAPS,
    encoder_with,
    explained,
    fit_map,
    main,
    make_pairs,
    measure,
    table,
)
from poecaps.data import ImageSet, load

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SMALL: dict[str, Any] = {
    "model__features": 8,
    "model__capsule_dim": 4,
    "model__experts": ((3, 5),),
    "model__joint_components": 4,
    "autoencoder__epochs": 1,
    "encoder__epochs": 1,
    "encoder__views__count": 2,
    "encoder__restarts": 2,
}


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    data = load("mnist-sample", split="test")
    assert data.labels is not None
    return replace(data, images=data.images[:300], labels=data.labels[:300])


def numbers_with(**changes: float) -> Tensor:
    numbers = torch.zeros(1, len(NAMES))
    for name, value in changes.items():
        numbers[0, NAMES.index(name.replace("_", " "))] = value
    return numbers


def centre_of_mass(image: Tensor) -> Tensor:
    """Pixels to the right and down from the centre: (1, 1, H, W) → (2,)."""
    height, width = image.shape[2:]
    mass = image[0, 0] / image.sum()
    columns, rows = torch.arange(width) - (width - 1) / 2, torch.arange(height) - (height - 1) / 2
    return torch.stack(((mass.sum(0) * columns).sum(), (mass.sum(1) * rows).sum()))


def test_nothing_changes_but_the_frame_without_a_transformation(digits: ImageSet) -> None:
    image = digits.batch([0])
    framed = render(image, numbers_with())
    assert framed.shape == (1, 1, 40, 40)
    torch.testing.assert_close(framed[:, :, 6:34, 6:34], image, atol=1e-5, rtol=0)
    assert framed.sum() == pytest.approx(image.sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rotation": 90.0}, (-4.0, 8.0)),  # clockwise: right becomes down
        ({"shear": 0.5}, (6.0, 4.0)),  # to the left below the centre
        ({"size": float(np.log(1.25))}, (10.0, 5.0)),
        ({"aspect": float(np.log(1.25))}, (10.0, 3.2)),
        ({"shift_x": 2.0, "shift_y": -3.0}, (10.0, 1.0)),
        ({"thickness": 1.0}, (8.0, 4.0)),
    ],
)
def test_a_spot_moves_as_a_transformation_says(
    change: dict[str, float], expected: tuple[float, float]
) -> None:
    """A spot, eight pixels right and four below of the centre."""
    image = torch.zeros(1, 1, 29, 29)
    image[0, 0, 14 + 3 : 14 + 6, 14 + 7 : 14 + 10] = 1
    numbers = numbers_with(**change)
    found = centre_of_mass(render(image, numbers, side=41))
    assert found.tolist() == pytest.approx(expected, abs=0.15)
    position = matrices(numbers)[0] @ torch.tensor([8.0, 4.0]) + numbers[0, 4:6]
    assert position.tolist() == pytest.approx(expected, abs=1e-4)


def test_thicker_digits_have_more_ink(digits: ImageSet) -> None:
    image = digits.batch(range(20))
    ink = [thicken(image, torch.full((20,), amount)).sum().item() for amount in (0.0, 0.5, 1.0)]
    assert ink[0] == pytest.approx(image.sum().item())
    assert ink[0] < ink[1] < ink[2]


def test_transformed_digits_are_within_the_frame_and_use_all_of_it(digits: ImageSet) -> None:
    found = affine_digits.affine_digits(digits)
    assert found.shape == (1, 40, 40)
    images = found.batch(slice(None))
    original = digits.batch(slice(None))
    # Whatever is cut off is missing. Sizes change the ink by e^(2 size) = width · height.
    generator = torch.Generator().manual_seed(affine_digits.SEED)
    area = draw_shapes(len(digits), generator)[:, 2].mul(2).exp()
    ratio = images.sum((1, 2, 3)) / original.sum((1, 2, 3)) / area
    assert ratio.min() > 0.97
    assert ratio.max() < 1.03
    lit = images.amax(0)[0] > 0.3
    rows, columns = lit.any(1).nonzero(), lit.any(0).nonzero()
    assert rows.min() <= 2
    assert rows.max() >= 37
    assert columns.min() <= 2
    assert columns.max() >= 37
    assert np.array_equal(found.images, affine_digits.affine_digits(digits).images)
    assert not np.array_equal(found.images, affine_digits.affine_digits(digits, seed=1).images)


def test_a_digit_that_is_too_large_is_cut_off_equally() -> None:
    image = torch.ones(1, 1, 28, 28)
    low, high = free_shifts(image, numbers_with(size=1.0))
    torch.testing.assert_close(low, torch.zeros(1, 2))
    torch.testing.assert_close(high, torch.zeros(1, 2))


def test_placed_digits_are_only_shifted_by_whole_pixels(digits: ImageSet) -> None:
    found = affine_digits.placed_digits(digits)
    flat = [np.sort(each.images.reshape(len(each), -1)) for each in (found, digits)]
    extra = flat[0].shape[1] - flat[1].shape[1]
    assert np.array_equal(flat[0][:, extra:], flat[1])
    centres = {tuple(centre_of_mass(found.batch([i])).round().tolist()) for i in range(100)}
    assert len(centres) > 50


def test_copies_of_a_digit_are_at_different_places(digits: ImageSet) -> None:
    found = affine_digits.placed_digits(digits, copies=3)
    assert len(found) == 3 * len(digits)
    assert found.labels is not None
    assert digits.labels is not None
    assert np.array_equal(found.labels[::3], digits.labels)
    assert np.array_equal(found.labels[2::3], digits.labels)
    ink = found.images.reshape(len(digits), 3, -1).sum(-1, dtype=int)
    assert (ink == ink[:, :1]).all()
    assert len({image.tobytes() for image in found.images}) > 2.8 * len(digits)


def test_the_file_is_a_dataset(tmp_path: Path) -> None:
    out = tmp_path / "digits.npz"
    affine_digits.main(["--data", "mnist-sample", "--out", str(out)])
    training, test = (load(str(out), split=split) for split in ("train", "test"))
    original = load("mnist-sample", split="test")
    assert training.shape == test.shape == (1, 40, 40)
    assert test.labels is not None
    assert original.labels is not None
    assert np.array_equal(test.labels, original.labels)


def test_a_map_finds_a_linear_relation(generator: torch.Generator) -> None:
    x = torch.randn(400, 6, generator=generator).double()
    weight = torch.randn(6, len(NAMES), generator=generator).double()
    y = x @ weight + 3
    torch.testing.assert_close(fit_map(x, y, 1e-9)(x), y, atol=1e-5, rtol=0)
    one = torch.zeros(400, dtype=torch.long)
    assert explained(x, y, one)["mean"] == pytest.approx(1, abs=1e-4)
    noise = torch.randn(400, 6, generator=generator)
    assert abs(explained(noise, y, one)["mean"]) < 0.1
    assert explained(torch.zeros(400, 3), y, one)["mean"] == pytest.approx(0, abs=0.02)


def test_every_group_has_a_map_of_its_own(generator: torch.Generator) -> None:
    x = torch.randn(600, 2, generator=generator)
    group = torch.randint(0, 2, (600,), generator=generator)
    sign = 2.0 * group - 1
    y = (x[:, :1] * sign.unsqueeze(1)).expand(600, len(NAMES))
    assert explained(x, y, group)["rotation"] > 0.99
    assert explained(x, y, group * 0)["rotation"] < 0.1
    assert explained(x, y, torch.arange(600))["rotation"] == pytest.approx(0, abs=0.05)  # too few


class Moments:
    """Reads position, size and ink: a code of which some transformations are linear functions."""

    name = "moments"

    def encode(self, images: Tensor) -> Tensor:
        ink = images.sum((1, 2, 3))
        centre = torch.cat([centre_of_mass(image.unsqueeze(0)).unsqueeze(0) for image in images])
        return torch.cat((centre, ink.unsqueeze(1).log()), dim=1)


def test_measures_of_a_code_that_knows_the_position(digits: ImageSet) -> None:
    before, after, change = make_pairs(digits)
    everything = transformations.Digits(digits, digits, digits, before, after, change)
    row = measure(Moments(), everything, torch.device("cpu"), seed=0)
    found = row["transformations"]["code"]
    assert found["shift x"] > 0.9
    assert found["shift y"] > 0.9
    assert found["rotation"] < 0.3
    assert "expert" not in row["transformations"]
    assert row["code_size"] == 3
    assert row["probe"]["placed"] == row["probe"]["affine"] > 0.15


@pytest.mark.parametrize("name", POECAPS)
def test_a_variant_is_valid_and_changes_only_its_options(name: str) -> None:
    config = POECAPS[name].config(data="mnist", seed=3)
    config.validate()
    changed = changed_options(config, "default")
    assert changed.items() <= {"data": "mnist", "seed": 3, **POECAPS[name].changes}.items()
    assert {key.replace("__", ".") for key in ENCODER_ONLY} <= changed.keys()


@pytest.mark.usefixtures("same_process")
def test_models_are_trained_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(POECAPS, "small", encoder_with(**SMALL))
    monkeypatch.setattr(transformations, "STUDY", ("small", *PEERS))
    rows = tmp_path / "rows.json"
    arguments = ["--data", "mnist-sample", "--device", "cpu", "--limit", "300", "--epochs", "1"]
    arguments += ["--only", "small;pixels;pca;vae", "--json", str(rows)]
    main(arguments)
    found = {row["variant"]: row for row in json.loads(rows.read_text())}
    assert list(found) == ["small", "pixels", "pca", "vae"]
    for name, row in found.items():
        assert 0 <= row["probe"]["affine"] <= row["probe"]["placed"] + 0.1 <= 1.1
        assert 0 < row["experts"]["placed"]["accuracy"] <= 1
        assert set(row["transformations"]["code"]) == {*NAMES, "mean"}
        assert (row["images"], row["test_images"]) == (300, 300)
        assert ("expert" in row["transformations"]) == ("same_expert" in row) == (name == "small")
    assert found["small"]["code_size"] == 15
    assert found["vae"]["epochs"] == 1
    assert "affine-digits.npz" in found["small"]["command"]
    assert found["pixels"]["code_size"] == 1600
    capsys.readouterr()
    main(arguments)  # everything is there
    assert len(json.loads(rows.read_text())) == 4
    assert "| pixels | 1 |" in table(json.loads(rows.read_text()))
