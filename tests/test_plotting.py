"""The figures that a user sees, and the arrays that are saved with them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from matplotlib import style
from PIL import Image

from poecaps.plotting import (
    SEPARATOR,
    animation,
    chain_strip,
    expert_grid,
    image_grid,
    reconstructions,
    training_curves,
    traversal_grid,
)
from poecaps.training.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]
DARK = 100  # pixels below this value belong to text


def make_pixels(*shape: int, seed: int = 7) -> Array:
    """Random uint8, all odd, so that none has the colour of a separator."""
    return np.random.default_rng(seed).integers(0, 128, shape, dtype=np.uint8) * 2 + 1


def as_images(pixels: Array) -> torch.Tensor:
    return torch.from_numpy(pixels).float() / 255


def open_page(path: Path) -> Array:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


class Grid:
    """A page split at its separators, without knowledge of the layout."""

    def __init__(self, path: Path, height: int, width: int) -> None:
        self.page = open_page(path)
        is_line = (self.page == SEPARATOR).all(axis=-1)
        x_lines, y_lines = (np.flatnonzero(is_line.sum(axis) > 40) for axis in (0, 1))
        self.x_spans = [(int(a) + 1, int(b)) for a, b in pairwise(x_lines)]
        # Spans lower than an image are gaps between rows.
        highest = int(np.diff(y_lines).max())
        self.y_spans = [(int(a) + 1, int(b)) for a, b in pairwise(y_lines) if b - a == highest]
        self.height, self.width = height, width

    def cell(self, row: int, column: int) -> Array:
        """Return the image in a cell, (H, W, 3); each pixel must be a square of one colour."""
        (top, bottom), (left, right) = self.y_spans[row], self.x_spans[column]
        tile = self.page[top:bottom, left:right]
        scale = (bottom - top) // self.height
        assert tile.shape == (self.height * scale, self.width * scale, 3)
        image = tile[::scale, ::scale]
        np.testing.assert_array_equal(tile, image.repeat(scale, axis=0).repeat(scale, axis=1))
        return image

    def above(self, column: int) -> Array:
        """The strip of the page above a column."""
        left, right = self.x_spans[column]
        return self.page[: self.y_spans[0][0] - 1, left:right, 0]

    def left(self, row: int) -> Array:
        """The strip of the page to the left of a row."""
        top, bottom = self.y_spans[row]
        return self.page[top:bottom, : self.x_spans[0][0] - 1, 0]


def as_colour(pixels: Array) -> Array:
    """(C, H, W) as the page shows it, (H, W, 3)."""
    return np.broadcast_to(np.moveaxis(pixels, 0, -1), (*pixels.shape[1:], 3))


def ink(strip: Array) -> Array:
    return np.argwhere(strip < DARK)


@pytest.mark.parametrize(
    "shape", [(1, 28, 28), (3, 32, 32), (3, 5, 9), (1, 33, 7), (1, 1, 1), (3, 120, 90)], ids=str
)
def test_every_expert_has_its_column_and_every_pixel_its_place(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    pixels = make_pixels(3, 5, *shape)
    grid = Grid(expert_grid(as_images(pixels), tmp_path / "experts.png"), *shape[1:])
    assert (len(grid.y_spans), len(grid.x_spans)) == (3, 5)
    for row in range(3):
        for expert in range(5):
            np.testing.assert_array_equal(grid.cell(row, expert), as_colour(pixels[row, expert]))


@pytest.mark.parametrize("size", [(28, 28), (64, 64), (40, 2), (10, 40), (1, 1)], ids=str)
def test_the_number_of_an_expert_stands_centred_above_its_column(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    grid = Grid(
        expert_grid(as_images(make_pixels(5, 12, 1, *size)), tmp_path / "experts.png"), *size
    )
    for expert, (left, right) in enumerate(grid.x_spans):
        label = ink(grid.above(expert))
        assert np.ptp(label[:, 0]) >= 8, "a number must be large enough to read"
        assert abs(label[:, 1].mean() - (right - left) / 2) < 3
        assert not len(ink(grid.above(expert)[:, [0, -1]])), "numbers must not run into each other"
    assert len({grid.above(expert).tobytes() for expert in range(12)}) == 12


def test_numbers_do_not_depend_on_the_images(tmp_path: Path) -> None:
    first, second = (
        Grid(
            expert_grid(as_images(make_pixels(2, 4, 1, 6, 6, seed=seed)), tmp_path / f"{seed}.png"),
            6,
            6,
        )
        for seed in (1, 2)
    )
    for expert in range(4):
        np.testing.assert_array_equal(first.above(expert), second.above(expert))


def test_a_column_may_have_the_number_of_any_expert(tmp_path: Path) -> None:
    images, path = as_images(make_pixels(2, 4, 1, 28, 28)), tmp_path / "experts.png"
    usual = Grid(expert_grid(images, path), 28, 28)
    with np.load(path.with_suffix(".npz")) as arrays:
        assert arrays["experts"].tolist() == [0, 1, 2, 3]
    chosen = Grid(expert_grid(images, path, experts=[0, 3, 17, 3]), 28, 28)
    with np.load(path.with_suffix(".npz")) as arrays:
        assert arrays["experts"].tolist() == [0, 3, 17, 3]
        np.testing.assert_array_equal(arrays["images"], images)
    for column, expert in ((0, 0), (1, 3), (3, 3)):
        np.testing.assert_array_equal(chosen.above(column), usual.above(expert))
    assert not any(np.array_equal(chosen.above(2), usual.above(expert)) for expert in range(4))
    with pytest.raises(ValueError, match="experts must be 4 numbers, one for each column of"):
        expert_grid(images, path, experts=[1, 2, 3])


@pytest.mark.parametrize(("columns", "rows"), [(None, 4), (5, 3), (1, 13), (50, 1)])
def test_images_follow_row_after_row(tmp_path: Path, columns: int | None, rows: int) -> None:
    pixels = make_pixels(13, 3, 10, 10)
    grid = Grid(image_grid(as_images(pixels), tmp_path / "images.png", columns=columns), 10, 10)
    assert len(grid.y_spans) == rows
    for index in range(13):
        cell = grid.cell(*divmod(index, len(grid.x_spans)))
        np.testing.assert_array_equal(cell, as_colour(pixels[index]))
    for index in range(13, rows * len(grid.x_spans)):
        assert (grid.cell(*divmod(index, len(grid.x_spans))) == 255).all(), (
            "past the last image the page is white"
        )


def test_a_grid_of_oblong_images_is_roughly_square(tmp_path: Path) -> None:
    for height, width in [(4, 40), (40, 4)]:
        page = open_page(image_grid(torch.rand(40, 1, height, width), tmp_path / "images.png"))
        assert 1 / 2 < page.shape[0] / page.shape[1] < 2


def test_originals_stand_above_their_reconstructions_twenty_to_a_line(tmp_path: Path) -> None:
    first, second = make_pixels(23, 1, 7, 5, seed=1), make_pixels(23, 1, 7, 5, seed=2)
    grid = Grid(reconstructions(as_images(first), as_images(second), tmp_path / "pairs.png"), 7, 5)
    assert (len(grid.y_spans), len(grid.x_spans)) == (4, 20)
    for index in range(23):
        line, column = divmod(index, 20)
        np.testing.assert_array_equal(grid.cell(2 * line, column), as_colour(first[index]))
        np.testing.assert_array_equal(grid.cell(2 * line + 1, column), as_colour(second[index]))
    labels = [grid.left(row) for row in range(4)]
    np.testing.assert_array_equal(labels[0], labels[2])
    np.testing.assert_array_equal(labels[1], labels[3])
    widths = [np.ptp(ink(label)[:, 1]) for label in labels]
    assert widths[1] > widths[0] > 0, "'reconstruction' is longer than 'original'"


def test_a_traversal_names_its_parameters_and_values(tmp_path: Path) -> None:
    pixels = make_pixels(11, 3, 3, 6, 4)
    values = torch.tensor([-1.5, -0.0, 0.1])
    grid = Grid(traversal_grid(as_images(pixels), tmp_path / "first.png", values=values), 6, 4)
    for parameter in range(11):
        for step in range(3):
            np.testing.assert_array_equal(
                grid.cell(parameter, step), as_colour(pixels[parameter, step])
            )
    assert all(len(ink(grid.above(step))) for step in range(3))
    assert all(len(ink(grid.left(parameter))) for parameter in range(11))
    assert len({grid.left(parameter).tobytes() for parameter in range(11)}) == 11

    other = Grid(
        traversal_grid(
            as_images(pixels), tmp_path / "second.png", values=[1.5, 0, np.float32(0.1)]
        ),
        6,
        4,
    )
    assert grid.above(0).tobytes() != other.above(0).tobytes()
    np.testing.assert_array_equal(grid.above(1), other.above(1), "a negative zero is written as 0")
    np.testing.assert_array_equal(grid.above(2), other.above(2))


def test_the_rows_of_a_traversal_can_be_in_any_order(tmp_path: Path) -> None:
    """With their numbers beside them; the arrays stay in the order of the parameters."""
    pixels = make_pixels(3, 2, 1, 6, 4)
    usual, other = (
        traversal_grid(as_images(pixels), tmp_path / f"{name}.png", values=[0, 1], order=order)
        for name, order in (("usual", None), ("other", [2, 0, 1]))
    )
    grid, changed = Grid(usual, 6, 4), Grid(other, 6, 4)
    for row, parameter in enumerate([2, 0, 1]):
        np.testing.assert_array_equal(changed.left(row), grid.left(parameter))
        for step in range(2):
            np.testing.assert_array_equal(changed.cell(row, step), grid.cell(parameter, step))
    with np.load(usual.with_suffix(".npz")) as first, np.load(other.with_suffix(".npz")) as second:
        np.testing.assert_array_equal(first["images"], second["images"])
    for order in ([0, 1], [0, 1, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="order must have each number from 0 to 2 once"):
            traversal_grid(as_images(pixels), other, values=[0, 1], order=order)


def test_every_chain_has_its_row_and_every_time_its_column(tmp_path: Path) -> None:
    pixels = make_pixels(4, 3, 3, 6, 5)
    path = chain_strip(as_images(pixels), tmp_path / "strip.png", steps=[0, 5, 10, 15])
    grid = Grid(path, 6, 5)
    assert (len(grid.y_spans), len(grid.x_spans)) == (3, 4)
    for time in range(4):
        for chain in range(3):
            np.testing.assert_array_equal(grid.cell(chain, time), as_colour(pixels[time, chain]))
    assert len({grid.above(time).tobytes() for time in range(4)}) == 4  # the numbers of steps
    with np.load(path.with_suffix(".npz")) as file:
        assert set(file) == {"images", "steps"}
        np.testing.assert_array_equal(file["images"], as_images(pixels).numpy(), strict=True)
        assert file["steps"].tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (5, 3, 2), (9, 3, 3)])
def test_an_animation_shows_every_time_as_a_grid(
    tmp_path: Path, count: int, columns: int, rows: int, channels: int
) -> None:
    pixels = make_pixels(4, count, channels, 6, 5)
    path = animation(as_images(pixels), tmp_path / "moving.png", milliseconds=50)
    assert [file.name for file in tmp_path.iterdir()] == ["moving.png"]
    with Image.open(path) as picture:
        assert getattr(picture, "n_frames", 1) == 4
        assert picture.info["loop"] == 0
        durations = []
        for time in range(4):
            picture.seek(time)
            durations.append(picture.info["duration"])
            page = np.asarray(picture.convert("RGB"))
            scale = page.shape[0] // (6 * rows)
            assert page.shape == (6 * rows * scale, 5 * columns * scale, 3)
            assert 400 < page.shape[1] <= 560
            small = page[::scale, ::scale]
            np.testing.assert_array_equal(page, small.repeat(scale, 0).repeat(scale, 1))
            cells = small.reshape(rows, 6, columns, 5, 3).swapaxes(1, 2).reshape(-1, 6, 5, 3)
            for cell, shown in zip(cells, pixels[time], strict=False):
                np.testing.assert_array_equal(cell, as_colour(shown))
            assert not cells[count:].any()
    assert durations == [50, 50, 50, 1000]


def test_an_animation_of_one_time_is_a_picture(tmp_path: Path) -> None:
    path = animation(as_images(make_pixels(1, 4, 1, 6, 6)), tmp_path / "still.png")
    assert open_page(path).shape[0] > 400


def test_the_same_animation_is_the_same_file(tmp_path: Path) -> None:
    images = as_images(make_pixels(3, 4, 1, 6, 6))
    first, second = (animation(images, tmp_path / f"{name}.png") for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_arguments_of_chains_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    images, path = torch.zeros(2, 3, 1, 4, 4), tmp_path / "page.png"
    with pytest.raises(ValueError, match="steps must be 2 numbers, one for each time, but are 3"):
        chain_strip(images, path, steps=[0, 1, 2])
    with pytest.raises(ValueError, match=r"images must have shape \(times, chains, C, H, W\)"):
        chain_strip(images[0], path, steps=[0, 1, 2])
    with pytest.raises(ValueError, match=r"images\[0, 0, 0, 0, 0\] = 2.0"):
        chain_strip(images + 2, path, steps=[0, 1])
    with pytest.raises(ValueError, match=r"images must have shape \(times, N, C, H, W\)"):
        animation(images[0], path)
    with pytest.raises(ValueError, match=r"images\[0, 0, 0, 0, 0\] = -1.0"):
        animation(images - 1, path)
    with pytest.raises(ValueError, match="milliseconds must be a whole number of at least 1"):
        animation(images, path, milliseconds=0)
    for draw in (animation, lambda *args: chain_strip(*args, steps=[0, 1])):
        with pytest.raises(ValueError, match=r"page\.gif.*end in \.png"):
            draw(images, tmp_path / "page.gif")
    assert not list(tmp_path.iterdir())


def test_the_numbers_of_parameters_do_not_run_into_each_other(tmp_path: Path) -> None:
    images = as_images(make_pixels(12, 3, 1, 2, 90))
    grid = Grid(traversal_grid(images, tmp_path / "page.png", values=range(3)), 2, 90)
    for parameter in range(12):
        label = ink(grid.left(parameter))
        assert np.ptp(label[:, 0]) >= 8, "a number must be large enough to read"
        assert not len(ink(grid.left(parameter)[[0, -1]]))


def test_a_title_stands_above_and_leaves_the_grid_as_it_was(tmp_path: Path) -> None:
    images = as_images(make_pixels(2, 8, 1, 28, 28))
    plain, titled = (
        open_page(expert_grid(images, tmp_path / "page.png", title=title))
        for title in (None, "MNIST")
    )
    extra = len(titled) - len(plain)
    np.testing.assert_array_equal(titled[-len(plain) + 20 :], plain[20:])
    assert len(ink(titled[: extra + 20, :, 0])) > len(ink(plain[:20, :, 0])) == 0


@pytest.mark.parametrize(
    "title", ["a very long title " * 9, "Donaudampfschifffahrtsgesellschaft" * 3, "W" * 60]
)
def test_nothing_is_cut_at_the_edges_of_the_page(tmp_path: Path, title: str) -> None:
    images, path = torch.zeros(12, 2, 1, 3, 3), tmp_path / "page.png"
    for page in (
        expert_grid(images, path, title=title),
        image_grid(images[:, 0], path, title=title),
        reconstructions(images[:, 0], images[:, 1], path, title=title),
        traversal_grid(images, path, values=[-0.001234, 123456789.0], title=title),
    ):
        inside = np.zeros(open_page(page).shape[:2], bool)
        inside[10:-10, 10:-10] = True
        assert (open_page(page)[~inside] == 255).all()


def test_letters_that_the_font_lacks_are_replaced_by_the_nearest(tmp_path: Path) -> None:
    images = torch.zeros(1, 1, 3, 3)
    fancy = image_grid(images, tmp_path / "fancy.png", title="données – 2 × 3 “β”")
    plain = image_grid(images, tmp_path / "plain.png", title='donnees - 2 x 3 "?"')
    assert fancy.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_and_arrays_of_any_precision_look_the_same(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    images = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=dtype, requires_grad=True).reshape(
        1, 1, 2, 2
    )
    cell = Grid(image_grid(images, tmp_path / "tensor.png"), 2, 2).cell(0, 0)
    assert cell[..., 0].tolist() == [[0, 64], [128, 255]]
    array = images.detach().double().numpy()
    assert (
        image_grid(array, tmp_path / "array.png").read_bytes()
        == (tmp_path / "tensor.png").read_bytes()
    )


def test_the_arrays_lie_beside_the_picture(tmp_path: Path) -> None:
    five = np.random.default_rng(1).random((2, 3, 1, 4, 4))
    four = five[0].astype(np.float32)
    values = [-1.0, 0.0, 1.0]
    made = {
        expert_grid(five, tmp_path / "new" / "folder" / "a.1.png"): {
            "images": five,
            "experts": np.arange(3),
        },
        image_grid(torch.from_numpy(four), tmp_path / "new" / "folder" / "a.2.png"): {
            "images": four
        },
        reconstructions(four, 1 - four, tmp_path / "r.PNG"): {
            "originals": four,
            "reconstructions": 1 - four,
        },
        traversal_grid(five, str(tmp_path / "t.png"), values=values): {
            "images": five,
            "values": np.array(values),
        },
    }
    for path, arrays in made.items():
        with np.load(path.with_suffix(".npz")) as file:
            assert set(file) == set(arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(file[name], array, strict=True)
    names = sorted(file.name for file in (tmp_path / "new" / "folder").iterdir())
    assert names == ["a.1.npz", "a.1.png", "a.2.npz", "a.2.png"]


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(4, 28, 28), ValueError, "images must have shape (N, C, H, W)"),
        (torch.zeros(4, 28, 28, 1), ValueError, "has shape (4, 28, 28, 1)"),
        (torch.zeros(4, 2, 5, 5), ValueError, "C 1 or 3"),
        (torch.zeros(0, 1, 5, 5), ValueError, "not be empty"),
        (torch.full((1, 1, 2, 2), 1.1), ValueError, "images[0, 0, 0, 0] = 1.1"),
        (
            torch.tensor([0.5, -0.001]).reshape(2, 1, 1, 1),
            ValueError,
            "images[1, 0, 0, 0] = -0.001",
        ),
        (torch.tensor([[0, np.nan]]).reshape(1, 1, 1, 2), ValueError, "images[0, 0, 0, 1] = nan"),
        (np.zeros((1, 1, 2, 2), np.uint8), TypeError, "uint8"),
        (torch.zeros(1, 1, 2, 2, dtype=torch.int64), TypeError, "int64"),
        ([[[[0.5]]]], TypeError, "list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_that_are_none_are_refused(
    tmp_path: Path, images: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        image_grid(images, tmp_path / "page.png")
    assert not list(tmp_path.iterdir())


def test_what_rounding_does_to_a_value_is_no_error(tmp_path: Path) -> None:
    images = np.array([-5e-7, 1 + 5e-7]).reshape(1, 1, 1, 2)
    assert Grid(image_grid(images, tmp_path / "page.png"), 1, 2).cell(0, 0)[0, :, 0].tolist() == [
        0,
        255,
    ]


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    images, path = torch.zeros(2, 3, 1, 4, 4), tmp_path / "page.png"
    with pytest.raises(ValueError, match=r"values must be 3 finite numbers.*\[1.0, 2.0\]"):
        traversal_grid(images, path, values=[1, 2])
    with pytest.raises(ValueError, match=r"values must be 3 finite numbers.*nan"):
        traversal_grid(images, path, values=[1, 2, np.nan])
    with pytest.raises(
        ValueError, match=r"reconstructions must have the shape of originals, \(3, 1, 4, 4\)"
    ):
        reconstructions(images[0], images[0, :2], path)
    with pytest.raises(ValueError, match=r"reconstructions\[0, 0, 0, 0\] = 2.0"):
        reconstructions(images[0], images[0] + 2, path)
    with pytest.raises(ValueError, match="columns must be a whole number of at least 1, but is 0"):
        image_grid(images[0], path, columns=0)
    with pytest.raises(ValueError, match=r"page\.jpg.*end in \.png"):
        expert_grid(images, tmp_path / "page.jpg")
    assert not list(tmp_path.iterdir())


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """As on a disk that is full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(
            torch.zeros(1, 1, 200, 200, dtype=torch.float64), id="large arrays, small picture"
        ),
        pytest.param(torch.rand(200, 3, 1, 1).half(), id="small arrays, large picture"),
    ],
)
def test_a_write_that_fails_leaves_the_old_files_whole(
    tmp_path: Path, images: torch.Tensor
) -> None:
    path = image_grid(torch.rand(1, 1, 2, 2), tmp_path / "page.png")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    sizes = sorted(
        file.stat().st_size
        for file in image_grid(images, tmp_path / "other" / "page.png").parent.iterdir()
    )
    with no_file_larger_than(sum(sizes) // 2), pytest.raises(OSError, match="File too large"):
        image_grid(images, path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


# Curves


def write_metrics(path: Path, *entries: dict[str, Any], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + end, encoding="utf-8")
    return path


def run_of(stage: str, **curves: Callable[[int], float | None]) -> list[dict[str, Any]]:
    """Ten steps, half an epoch each."""
    return [
        {
            "stage": stage,
            "step": step,
            "epoch": step / 2,
            "images_per_second": 400.0,
            "seconds": 1.0,
        }
        | {name: curve(step) for name, curve in curves.items()}
        for step in range(10)
    ]


def coloured(page: Array) -> Array:
    """Where the page is neither grey nor white: the curves."""
    return np.argwhere(np.ptp(page.astype(int), axis=-1) > 60)


def test_every_stage_has_a_column_with_a_panel_for_each_of_its_curves(tmp_path: Path) -> None:
    entries = run_of("autoencoder", loss=lambda step: 1.0 / (step + 1), probe=lambda step: None)
    entries += run_of(
        "encoder 1", loss=lambda step: float(step), rank=lambda step: 4.0 if step % 2 else None
    )
    path = training_curves(
        write_metrics(tmp_path / "metrics.jsonl", *entries), tmp_path / "curves.png"
    )

    page = open_page(path)
    assert page.shape[1] == 1200
    middle = page.shape[0] // 2
    top_left, top_right = coloured(page[:middle, :600]), coloured(page[:middle, 600:])
    assert len(coloured(page[middle:, 600:]))
    below = page[len(page) * 2 // 3 :, :600]
    assert (below == 255).all(), "the first stage has one curve: what is always null has no panel"
    for points, falls in [(top_left, True), (top_right, False)]:
        first, last = points[points[:, 1].argmin(), 0], points[points[:, 1].argmax(), 0]
        assert (first < last) == falls

    epochs = np.arange(10) / 2
    with np.load(path.with_suffix(".npz")) as file:
        assert list(file) == ["autoencoder/loss", "encoder 1/loss", "encoder 1/rank"]
        np.testing.assert_array_equal(
            file["encoder 1/loss"], np.stack([epochs, np.arange(10)], axis=1)
        )
        np.testing.assert_array_equal(
            file["encoder 1/rank"], [[epoch, 4] for epoch in epochs[1::2]]
        )


def test_curves_that_were_read_already_are_drawn_like_their_file(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", *run_of("autoencoder", loss=float))
    from_file = training_curves(metrics, tmp_path / "file.png")
    from_curves = training_curves(read_metrics(metrics), tmp_path / "curves.png")
    assert from_curves.read_bytes() == from_file.read_bytes()


def test_a_single_point_can_be_seen(tmp_path: Path) -> None:
    metrics = write_metrics(
        tmp_path / "metrics.jsonl", {"stage": "autoencoder", "epoch": 0, "loss": 1}
    )
    assert len(coloured(open_page(training_curves(metrics, tmp_path / "curves.png"))))


def test_a_run_that_diverged_can_still_be_drawn(tmp_path: Path) -> None:
    entries = run_of(
        "encoder 1",
        loss=lambda step: [1.0, np.inf, np.nan][min(step // 3, 2)],
        other=lambda _: np.nan,
    )
    path = training_curves(
        write_metrics(tmp_path / "metrics.jsonl", *entries), tmp_path / "curves.png"
    )
    assert len(coloured(open_page(path)))


@pytest.mark.parametrize("name", ["$\\frac$", "$x", "größer_字"])
@pytest.mark.filterwarnings("error")
def test_a_name_is_drawn_as_it_is(name: str, tmp_path: Path) -> None:
    """It is no formula, and needs no other font."""
    entries = run_of(name, **{name: float})
    training_curves(write_metrics(tmp_path / "m.jsonl", *entries), tmp_path / "curves.png")


@pytest.mark.parametrize("large", [1e308, -1e308, 1e31, 5e-324])
@pytest.mark.filterwarnings("error")
def test_numbers_without_an_axis_are_left_out_of_the_picture(large: float, tmp_path: Path) -> None:
    entries = run_of("autoencoder", loss=lambda step: large if step % 3 else 1.0)
    entries += run_of("encoder 1", loss=lambda _: large)
    entries += [entry | {"epoch": large * entry["epoch"]} for entry in run_of("a", loss=float)]
    path = training_curves(write_metrics(tmp_path / "m.jsonl", *entries), tmp_path / "curves.png")
    with np.load(path.with_suffix(".npz")) as file:
        assert file["encoder 1/loss"][:, 1].tolist() == [large] * 10


def test_more_curves_than_a_page_can_show_are_only_in_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to draw them grows with the square of their number."""
    monkeypatch.setattr("poecaps.plotting.MAX_PANELS", 4)
    names = {"loss": float, "rank": float}
    entries = [entry for stage in "abc" for entry in run_of(stage, **names)]
    path = write_metrics(tmp_path / "m.jsonl", *entries)
    few = write_metrics(tmp_path / "few.jsonl", *entries[:20])
    page = open_page(training_curves(path, tmp_path / "curves.png"))
    assert np.array_equal(page, open_page(training_curves(few, tmp_path / "few.png")))
    with np.load(tmp_path / "curves.npz") as file:
        assert len(file.files) == 6


def test_many_stages_and_long_names_are_not_cut_at_the_edges(tmp_path: Path) -> None:
    stages = [
        "autoencoder",
        *(f"{part} {layer}" for part in ("encoder", "decoder") for layer in (1, 2, 3)),
    ]
    names = ("normalised_reconstruction_error_of_the_capsules", "loss")
    entries = [
        entry
        for stage in stages
        for entry in run_of(stage, **dict.fromkeys(names, lambda step: -1e-5 * step))
    ]
    page = open_page(
        training_curves(
            write_metrics(tmp_path / "metrics.jsonl", *entries), tmp_path / "curves.png"
        )
    )
    inside = np.zeros(page.shape[:2], bool)
    inside[4:-4, 4:-4] = True
    assert (page[~inside] == 255).all()


def test_the_last_line_may_be_cut_by_a_crash(tmp_path: Path) -> None:
    entries = run_of("autoencoder", loss=lambda step: float(step))
    whole = training_curves(
        write_metrics(tmp_path / "whole.jsonl", *entries[:9]), tmp_path / "whole.png"
    )
    line = json.dumps(entries[9] | {"stage": "größer"}, ensure_ascii=False).encode()
    for length in range(len(line)):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes((tmp_path / "whole.jsonl").read_bytes() + line[:length])
        if length % 40 == 0 or line[length - 1] > 127:  # also in the middle of a letter
            assert training_curves(cut, tmp_path / "cut.png").read_bytes() == whole.read_bytes()
    unended = write_metrics(tmp_path / "unended.jsonl", *entries[:9], end="")
    assert training_curves(unended, tmp_path / "cut.png").read_bytes() == whole.read_bytes()


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    first, second = (
        run_of("autoencoder", loss=lambda step: 5.0),
        run_of("autoencoder", loss=lambda step: float(step)),
    )
    resumed = write_metrics(tmp_path / "resumed.jsonl", *first[:6:2], *second[3:])
    with np.load(training_curves(resumed, tmp_path / "curves.png").with_suffix(".npz")) as file:
        assert file["autoencoder/loss"].tolist() == [
            [0, 5],
            [1, 5],
            *([step / 2, step] for step in range(3, 10)),
        ]


@pytest.mark.parametrize(
    "line",
    [
        '{"stage": "auto',
        "[1, 2]",
        '{"epoch": 1, "loss": 2}',
        '{"stage": "encoder 1", "loss": 2}',
        "loss 2",
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    good = json.dumps(run_of("autoencoder", loss=float)[0])
    metrics.write_text(f"{good}\n\n{line}\n{good}\n", encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=re.escape(f"{metrics}, line 3, must be a JSON object") + ".*" + re.escape(line),
    ):
        training_curves(metrics, tmp_path / "curves.png")


@pytest.mark.parametrize(
    "text", ["", "\n", '{"stage": "auto', '{"stage": "autoencoder", "epoch": 0, "step": 1}\n']
)
def test_a_file_without_metrics_is_refused(tmp_path: Path, text: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{metrics} contains no metrics")):
        training_curves(metrics, tmp_path / "curves.png")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    images = as_images(make_pixels(3, 4, 3, 9, 9))
    metrics = write_metrics(tmp_path / "metrics.jsonl", *run_of("autoencoder", loss=float))
    draws: list[Callable[[Path], Path]] = [
        lambda path: expert_grid(images, path, title="experts"),
        lambda path: image_grid(images[0], path),
        lambda path: reconstructions(images[0], images[1], path),
        lambda path: traversal_grid(images, path, values=range(4)),
        lambda path: training_curves(metrics, path),
    ]
    for draw in draws:
        first = draw(tmp_path / "first.png").read_bytes()
        with style.context("dark_background"):  # the caller's own taste has no part in it
            second = draw(tmp_path / "second.png").read_bytes()
        assert first == second
        assert b"tEXt" not in first, "no names, dates or versions inside"


def test_drawing_leaves_pyplot_alone_and_importing_loads_no_drawing_library(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", *run_of("autoencoder", loss=float))
    program = (
        "import sys; from poecaps import plotting; print({'PIL', 'matplotlib'} & set(sys.modules));"
        "plotting.training_curves(*sys.argv[1:]); print('matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(metrics), str(tmp_path / "curves.png")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["set()", "False"]
