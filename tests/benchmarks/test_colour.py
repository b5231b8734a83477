"""Digits in colour on grounds of increasing difficulty, and the study that measures them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks import colour, coloured_digits
from benchmarks.coloured_digits import (
    GROUNDS,
    candidate_colours,
    crops,
    draw_grounds,
    farthest_colours,
)
from benchmarks.internals import changed_options
from poecaps.data import ImageSet, load
from poecaps.evaluation import judge

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "model__features": 8,
    "model__capsule_dim": 4,
    "model__experts": ((3, 5),),
    "model__joint_components": 4,
    "model__colour_whitening": True,
    "autoencoder__epochs": 1,
    "encoder__epochs": 1,
    "decoder__epochs": 1,
    "pixel_decoder__epochs": 1,
    "multi_scale": 1.0,
}


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load("mnist-sample", split="test").subset(range(200))


@pytest.fixture(scope="module")
def photographs() -> ImageSet:
    """Every pixel tells its photograph, its row and its column."""
    images = np.empty((10, 32, 36, 3), np.uint8)
    images[..., 0] = 20 * np.arange(10).reshape(-1, 1, 1)
    images[..., 1] = np.arange(32).reshape(1, -1, 1)
    images[..., 2] = np.arange(36)
    return ImageSet(images, np.arange(10) % 2)


def grounds(name: str, photographs: ImageSet) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return draw_grounds(name, (50, 28, 28), generator, photographs)


def test_grounds_are_increasingly_difficult(photographs: ImageSet) -> None:
    black, plates, plain, gradient, _ = (grounds(name, photographs) for name in GROUNDS)
    assert not black.any()
    assert torch.equal(plates, plain)
    assert torch.equal(plain, plain[:, :, :1, :1].expand_as(plain))
    assert plain[:, :, 0, 0].std(0).min() > 0.2
    assert gradient.std((2, 3)).mean() > 0.1
    slopes = gradient.diff(dim=2).abs().amax().item()
    assert 0 < slopes <= 2 / 27 + 1e-6  # from one colour of the grid to the next in 13.5 pixels


def test_crops_are_parts_of_photographs_and_half_of_them_mirrored(photographs: ImageSet) -> None:
    pixels = grounds("photograph", photographs).mul(255).round()
    number, row, column = pixels.unbind(1)
    assert torch.equal(number, number[:, :1, :1].expand_as(number))
    assert len(number.unique()) == 10
    assert torch.equal(row.diff(dim=1), torch.ones(50, 27, 28))
    assert set(row[:, 0, 0].tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    steps = column.diff(dim=2)
    assert torch.equal(steps, steps[:, :1, :1].expand_as(steps))
    mirrored = steps[:, 0, 0] == -1
    assert set(steps.unique().tolist()) == {-1.0, 1.0}
    assert 10 < mirrored.sum() < 40
    assert set(column.amin((1, 2)).tolist()) == {float(left) for left in range(9)}


@pytest.mark.parametrize("shape", [(2, 27, 30, 3), (2, 30, 27, 3), (2, 30, 30, 1)])
def test_photographs_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="photographs must have three channels and be at least"):
        crops(ImageSet(np.zeros(shape, np.uint8)), (1, 28, 28), torch.Generator())


def test_a_ground_that_cannot_be_drawn_is_an_error(digits: ImageSet) -> None:
    with pytest.raises(ValueError, match="needs photographs"):
        coloured_digits.coloured_digits(digits, "photograph")
    with pytest.raises(ValueError, match="plates, plain, gradient, photograph, but is 'green'"):
        coloured_digits.coloured_digits(digits, "green")


def drawn_colours(ink: torch.Tensor, ground: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return farthest_colours(ink, ground, candidate_colours("plain", len(ink), generator))


def test_a_digit_on_a_plate_is_black_or_white(digits: ImageSet) -> None:
    ink = digits.batch(slice(None))
    ground = draw_grounds("plates", (200, 28, 28), torch.Generator().manual_seed(0))
    colours = farthest_colours(ink, ground, candidate_colours("plates", 200, torch.Generator()))
    dark = ground[:, :, 0, 0].square().sum(1) < (1 - ground[:, :, 0, 0]).square().sum(1)
    assert torch.equal(colours.flatten(1), dark.float().unsqueeze(1).expand(-1, 3))
    assert 0.3 < dark.double().mean() < 0.7


def test_a_digit_has_one_colour_that_differs_from_its_ground(digits: ImageSet) -> None:
    ink = digits.batch(slice(None))
    ground = draw_grounds("plain", (200, 28, 28), torch.Generator().manual_seed(0))
    colours = drawn_colours(ink, ground, seed=1)
    contrast = (colours - ground[:, :, :1, :1]).norm(dim=1).flatten()
    assert contrast.min() > 0.4
    darker = (colours.mean(1) < ground[:, :, :1, :1].mean(1)).double().mean()
    assert 0.3 < darker < 0.7
    # Below the digit, not elsewhere: a colour may be that of the ground beside it.
    half = torch.zeros(1, 1, 28, 28)
    half[..., :14] = 1
    two = torch.zeros(1, 3, 28, 28)
    two[..., 14:] = 1
    found = [
        drawn_colours(half.expand(50, -1, -1, -1), each.expand(50, -1, -1, -1))
        for each in (two, 1 - two)
    ]
    assert found[0].mean() > 0.6
    assert found[1].mean() < 0.4


@pytest.mark.parametrize("ground", GROUNDS)
def test_the_images_depend_on_the_seed_alone(
    ground: str, digits: ImageSet, photographs: ImageSet
) -> None:
    first, again, other = (
        coloured_digits.coloured_digits(digits, ground, seed, photographs=photographs)
        for seed in (0, 0, 1)
    )
    assert first.shape == (3, 28, 28)
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)
    assert first.labels is not None
    assert digits.labels is not None
    assert np.array_equal(first.labels, digits.labels)
    ink = digits.images[..., 0]
    full = first.images.astype(float)[ink == 255]
    number = np.nonzero(ink == 255)[0]
    for each in range(0, 200, 20):  # full ink hides the ground
        assert len(np.unique(full[number == each], axis=0)) <= 1


def test_the_file_is_a_dataset(tmp_path: Path, photographs: ImageSet) -> None:
    out, behind = tmp_path / "digits.npz", tmp_path / "photographs.npz"
    np.savez(behind, x_train=photographs.images[:5], x_test=photographs.images[5:])
    arguments = ["--data", "mnist-sample", "--ground", "photograph", "--out", str(out)]
    coloured_digits.main([*arguments, "--photographs", str(behind)])
    training, test = (load(str(out), split=split) for split in ("train", "test"))
    original = load("mnist-sample", split="test")
    assert training.shape == test.shape == (3, 28, 28)
    assert test.labels is not None
    assert original.labels is not None
    assert np.array_equal(test.labels, original.labels)
    # Red is the number of the photograph: the parts share none.
    corners = [set(part.images[:, 0, 0, 0].tolist()) for part in (training, test)]
    assert corners == [{0, 20, 40, 60, 80}, {100, 120, 140, 160, 180}]


def test_the_ground_photograph_needs_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coloured_digits.main(["--ground", "photograph", "--out", "unused.npz"])
    assert "--ground photograph needs --photographs" in capsys.readouterr().err


@pytest.mark.parametrize("name", colour.VARIANTS)
def test_a_variant_is_valid_and_changes_only_its_options(name: str) -> None:
    variant = colour.VARIANTS[name]
    config = variant.config(data="plain.npz")
    config.validate()
    assert changed_options(config, variant.preset) == {"data": "plain.npz", **variant.changes}


def arguments_with(tmp_path: Path, *more: str) -> list[str]:
    arguments = ["--data", "mnist-sample", "--device", "cpu", "--limit", "120", "--samples", "20"]
    return [*arguments, "--photographs", str(tmp_path / "photographs.npz"), *more]


@pytest.mark.usefixtures("same_process")
def test_variants_are_trained_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (40, 32, 32, 3), np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "photographs.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    monkeypatch.setattr(judge, "PASSES", 1)  # images that a classifier sees: one epoch of them
    monkeypatch.setitem(colour.VARIANTS, "small", colour.default_with(**SMALL))
    names = ["plain: small", "photograph: small", "photographs alone: small"]
    names.append(f"plain: {colour.COMPONENTS}")
    monkeypatch.setattr(colour, "STUDY", tuple(names))
    rows = tmp_path / "rows.json"
    arguments = arguments_with(tmp_path, "--json", str(rows), "--pictures", str(tmp_path))
    colour.main(arguments)
    found = {row["variant"]: row for row in json.loads(rows.read_text())}
    assert list(found) == names
    for name, row in found.items():
        assert row["on"] == "test"
        assert row["training_images"] == (40 if "alone" in name else 120)
        assert 0 <= row["judge"] <= 1
        evaluation = row["evaluation"]
        assert 0 < evaluation["probe"]["test_accuracy"] <= 1
        assert 0 <= evaluation["domains"]["joint"]["recognisability"]["share"] <= 1
        assert ("command" in row) == ("learned" in evaluation["domains"]) == ("small" in name)
    assert "--data plain.npz --model.features 8" in found["plain: small"]["command"]
    assert len(list(tmp_path.glob("*.png"))) == 2 * len(names)
    capsys.readouterr()
    colour.main(arguments)  # everything is there
    assert len(json.loads(rows.read_text())) == len(names)
    colour.main(["--table", str(rows)])
    assert "| photographs alone: small | 1 |" in capsys.readouterr().out


def test_held_out_digits_have_photographs_of_their_own(
    tmp_path: Path, photographs: ImageSet
) -> None:
    images = np.repeat(photographs.images, 2, axis=0)
    images[..., 0] = 10 * np.arange(20).reshape(-1, 1, 1)
    np.savez(tmp_path / "photographs.npz", x_train=images, x_test=images + 1)
    parser = colour.make_parser()
    arguments = arguments_with(tmp_path, "--held-out", "100")
    made = colour.make_images("photograph", parser.parse_args(arguments))
    numbers = [set(part.images[:, 0, 0, 0].tolist()) for part in (made.training, made.measured)]
    assert numbers[1] == {0, 100}
    assert numbers[0] == {10 * number for number in range(20)} - numbers[1]


def test_digits_are_enlarged_before_they_are_coloured(tmp_path: Path) -> None:
    options = colour.make_parser().parse_args(arguments_with(tmp_path, "--size", "56"))
    made = colour.make_images("plain", options)
    assert made.training.shape == made.measured.shape == (3, 56, 56)
    grey = load("mnist-sample").subset(range(120))
    large = colour.enlarged(grey, 56)
    assert large.labels is not None
    assert (large.labels == grey.labels).all()
    halved = torch.nn.functional.avg_pool2d(large.batch(slice(None)), 2)
    assert (halved - grey.batch(slice(None))).abs().mean() < 0.03
    assert colour.enlarged(grey, None) is grey


@pytest.mark.parametrize("name", ["photograph", colour.PHOTOGRAPHS])
def test_photographs_need_the_option(name: str) -> None:
    options = colour.make_parser().parse_args(["--data", "mnist-sample"])
    with pytest.raises(ValueError, match="need --photographs"):
        colour.make_images(name, options)
