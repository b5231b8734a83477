"""Views of images: transformations with known results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nn

from poecaps.views import NUMBERS, ViewOptions, make_views, transform, within_border

NOTHING: dict[str, Any] = dict.fromkeys(("rotation", "shift", "scale", "aspect", "shear"), 0.0)
ROTATION, SCALE, ASPECT, SHEAR, SHIFT_X, SHIFT_Y, MIRROR = range(NUMBERS)


def numbers(count: int, **fixed: float) -> Tensor:
    """Numbers that change nothing, but for those that are given, from −1 to 1."""
    result = torch.full((count, NUMBERS), 0.5)
    for name, value in fixed.items():
        result[:, globals()[name]] = (value + 1) / 2
    return result


def smooth(generator: torch.Generator, count: int, height: int, width: int) -> Tensor:
    """Images that bilinear interpolation hardly changes, dark towards the edges."""
    y, x = torch.meshgrid(
        torch.linspace(-1, 1, height) * height, torch.linspace(-1, 1, width) * width, indexing="ij"
    )
    centre = 0.3 * torch.randn(count, 2, 1, 1, generator=generator) * min(height, width)
    radius = 0.15 * min(height, width) * (1 + torch.rand(count, 2, 1, 1, generator=generator))
    return torch.exp(
        -(((x - centre[:, 0]) / radius[:, 0]) ** 2) - ((y - centre[:, 1]) / radius[:, 1]) ** 2
    ).unsqueeze(1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 31), (1, 9, 1)])
def test_in_the_middle_of_the_range_nothing_changes(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    images = torch.rand(5, *shape, generator=generator)
    found = transform(images, numbers(5), ViewOptions(count=2, rotation=90, shift=0.5, scale=1))
    torch.testing.assert_close(found, images, rtol=0, atol=1e-4)


def test_a_quarter_turn(generator: torch.Generator) -> None:
    images = torch.rand(4, 3, 11, 11, generator=generator)
    options = ViewOptions(**NOTHING | {"rotation": 90.0})
    for sign, turns in ((1, 1), (-1, -1)):
        found = transform(images, numbers(4, ROTATION=sign), options)
        torch.testing.assert_close(found, torch.rot90(images, -turns, (3, 2)), rtol=0, atol=1e-4)


def test_a_rotation_of_an_oblong_image_does_not_distort_it(generator: torch.Generator) -> None:
    """A quarter turn, cut to the middle square that both images have."""
    images = smooth(generator, 4, 20, 40)
    found = transform(images, numbers(4, ROTATION=1), ViewOptions(**NOTHING | {"rotation": 90.0}))
    square = images[..., 10:30]
    torch.testing.assert_close(
        found[..., 10:30], torch.rot90(square, -1, (3, 2)), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(("name", "axis", "sign"), [("SHIFT_X", 3, 1), ("SHIFT_Y", 2, -1)])
def test_a_shift_moves_by_a_fraction_of_the_size(
    name: str, axis: int, sign: int, generator: torch.Generator
) -> None:
    images = torch.rand(4, 1, 20, 40, generator=generator)
    found = transform(images, numbers(4, **{name: sign}), ViewOptions(**NOTHING | {"shift": 0.1}))
    pixels = images.shape[axis] // 10
    inside = images.shape[axis] - pixels
    start, stop = (pixels, 0) if sign > 0 else (0, pixels)
    torch.testing.assert_close(
        found.narrow(axis, stop, inside),
        images.narrow(axis, start, inside),
        rtol=0,
        atol=1e-4,
    )
    # Beyond the edge, the nearest pixel.
    edge = images.narrow(axis, images.shape[axis] - 1 if sign > 0 else 0, 1)
    outside = found.narrow(axis, inside if sign > 0 else 0, pixels)
    torch.testing.assert_close(outside, edge.expand_as(outside), rtol=0, atol=1e-4)


def test_half_of_the_numbers_mirror(generator: torch.Generator) -> None:
    images = torch.rand(2, 3, 8, 13, generator=generator)
    options = ViewOptions(**NOTHING, mirror=True)
    uniform = numbers(2)
    uniform[:, MIRROR] = torch.tensor([0.6, 0.4])
    found = transform(images, uniform, options)
    torch.testing.assert_close(found[0], images[0].flip(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], images[1], rtol=0, atol=1e-4)
    unmirrored = transform(images, uniform, ViewOptions(**NOTHING))
    torch.testing.assert_close(unmirrored, images, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "option", "matrix"),
    [
        ("SCALE", "scale", lambda a: [[math.exp(a), 0], [0, math.exp(a)]]),
        ("ASPECT", "aspect", lambda a: [[math.exp(a), 0], [0, math.exp(-a)]]),
        ("SHEAR", "shear", lambda a: [[1, a], [0, 1]]),
        (
            "ROTATION",
            "rotation",
            lambda a: [
                [math.cos(math.radians(a)), -math.sin(math.radians(a))],
                [math.sin(math.radians(a)), math.cos(math.radians(a))],
            ],
        ),
    ],
)
def test_a_transformation_is_its_matrix(name: str, option: str, matrix: Any) -> None:
    """Of the coordinates in pixels, also in an oblong image: images whose values are positions."""
    height, width, largest = 16, 30, 20.0 if option == "rotation" else 0.3
    y, x = torch.meshgrid(
        torch.arange(height) - (height - 1) / 2,
        torch.arange(width) - (width - 1) / 2,
        indexing="ij",
    )
    positions = torch.stack((x, y))
    options = ViewOptions(**NOTHING | {option: largest})
    found = transform(positions.unsqueeze(0), numbers(1, **{name: 0.5}), options)[0]
    expected = torch.einsum("ab,bhw->ahw", torch.tensor(matrix(0.5 * largest)), positions)
    # Far from the edges, where values are not extrapolated
    found, expected = found[:, 6:10, 11:19], expected[:, 6:10, 11:19]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_each_image_is_transformed_in_its_own_way(generator: torch.Generator) -> None:
    image = smooth(generator, 1, 28, 28)
    uniform = torch.rand(6, NUMBERS, generator=generator)
    options = ViewOptions(count=2, mirror=True)
    together = transform(image.expand(6, -1, -1, -1), uniform, options)
    alone = torch.cat([transform(image, row.unsqueeze(0), options) for row in uniform])
    torch.testing.assert_close(together, alone)
    assert torch.pdist(together.flatten(1)).min() > 0.01


def test_every_image_is_followed_by_its_views(generator: torch.Generator) -> None:
    images = torch.rand(5, 2, 12, 12, generator=generator)
    options = ViewOptions(count=4)
    uniform = torch.rand(5, 3, NUMBERS, generator=generator)
    views = make_views(images, uniform, options)
    assert views.shape == (20, 2, 12, 12)
    assert torch.equal(views[::4], images)
    for view in range(3):
        torch.testing.assert_close(
            views[view + 1 :: 4], transform(images, uniform[:, view], options)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "views.count must be a whole number from 1 to 1000, but is 0"),
        ({"rotation": -1.0}, "views.rotation must be .*, but is -1"),
        ({"rotation": 200.0}, "views.rotation must be at most 180, but is 200"),
        ({"shift": 1.5}, "views.shift must be at most 1, but is 1.5"),
        ({"scale": math.nan}, "views.scale must be .*, but is nan"),
        ({"mirror": 1}, "views.mirror must be True or False, but is 1"),
    ],
)
def test_invalid_options_are_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ViewOptions(**options).validate("views.")


@pytest.mark.parametrize("shape", [(1, 12, 9), (3, 9, 1), (1, 1, 1)])
def test_positions_within_the_border_give_its_padding(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    """Where there is no padding by the border, as on Apple's GPUs in older releases."""
    images = torch.rand(4, *shape, generator=generator)
    grid = 6 * torch.rand(4, 7, 5, 2, generator=generator) - 3
    expected = nn.grid_sample(images, grid, padding_mode="border", align_corners=False)
    found = nn.grid_sample(images, within_border(grid, *shape[1:]), align_corners=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_views_are_the_same_without_padding_by_the_border(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(6, 2, 12, 9, generator=generator)
    uniform, options = torch.rand(6, NUMBERS, generator=generator), ViewOptions(count=2, shift=0.5)
    expected = transform(images, uniform, options)
    monkeypatch.setattr("poecaps.views.pads_border", lambda device: device.type != "cpu")
    torch.testing.assert_close(transform(images, uniform, options), expected, rtol=0, atol=1e-5)
