"""Figures: grids of images, drawn without interpolation, and the curves of a training run.

Every function writes a PNG and, in the same folder and under the same name, an ``.npz`` file with
the arrays that it shows. It returns the path of the PNG. The same input gives the same PNG, byte
for byte.

In a grid, each pixel of an image is a square of k×k pixels; k is chosen such that an image measures
about 56 to 112 pixels, if possible. The images are `LINE` pixels apart, and the grid ends `MARGIN`
pixels above the lower edge of the page. Titles are drawn in Pillow's default font, which covers
only ASCII; other characters are replaced by similar ones.
"""

from __future__ import annotations

import io
import math
import textwrap
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps._files import atomic_write
from poecaps.training.metrics import read_metrics

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    Array = np.ndarray[Any, Any]
    PathLike = str | os.PathLike[str]

TOLERANCE = 1e-6  # values may exceed the range 0 to 1 by this rounding error
MARGIN, LINE = 20, 1
TITLE_SIZE, LABEL_SIZE = 18, 14
BACKGROUND, TEXT, SEPARATOR = (255, 255, 255), (40, 40, 40), (190, 190, 190)
ANIMATION_SIZE = 480  # width of an animation in pixels, about
IMAGES_PER_LINE = 20  # of `reconstructions`
ASCII_SUBSTITUTES = str.maketrans("×–—−‘’“”", "x---''\"\"")
MAX_PANELS = 100  # of `training_curves`, whose time grows with the square of their number
LARGEST = 1e30  # values of curves
MAIN, HELD_OUT = "reconstruction_error", "held_out_error"  # drawn in one panel
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#4b4b9b", "#56b4e9", "#666666")


def expert_grid(
    images: Tensor | Array,
    path: PathLike,
    *,
    experts: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw samples of each expert: one column per expert under its number, one row per sample.

    Parameters
    ----------
    images : (rows, experts, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images` and `experts`.
    path, title
        The PNG to write, and a title above the grid.
    experts : (experts,), optional
        The numbers above the columns; by default 0, 1, ….
    """
    array = _as_images("images", images, ("rows", "experts", "C", "H", "W"))
    numbers = range(array.shape[1]) if experts is None else experts
    if len(numbers) != array.shape[1]:
        raise ValueError(
            f"experts must be {array.shape[1]} numbers, one for each column of images, "
            f"but are {len(numbers)}"
        )
    arrays = {"images": array, "experts": np.asarray(numbers)}
    return _draw_grid(list(array), path, arrays, title, above=[str(j) for j in numbers])


def image_grid(
    images: Tensor | Array,
    path: PathLike,
    *,
    columns: int | None = None,
    title: str | None = None,
    raw: bool = True,
) -> Path:
    """Draw images side by side, row after row.

    Parameters
    ----------
    images : (N, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images`.
    path, title
        The PNG to write, and a title above the grid.
    columns
        Images in a row; by default chosen such that the grid is roughly square.
    raw
        Whether to write the ``.npz`` file.
    """
    array = _as_images("images", images, ("N", "C", "H", "W"))
    if columns is None:
        columns = math.ceil(math.sqrt(len(array) * array.shape[2] / array.shape[3]))
    checks.require_int("columns", columns, 1)
    rows = [array[start : start + columns] for start in range(0, len(array), columns)]
    return _draw_grid(rows, path, {"images": array} if raw else {}, title)


def contact_sheet(
    groups: Mapping[str, Tensor | Array], path: PathLike, *, title: str | None = None
) -> Path:
    """Draw groups of images, each in a row of its own after its name.

    Parameters
    ----------
    groups
        Images (n, C, H, W) of each group by its name, floats from 0 to 1; C is 1 or 3. The numbers
        of images may differ. The ``.npz`` holds them by the names.
    path, title
        The PNG to write, and a title above the grid.
    """
    if not groups:
        raise ValueError("groups must contain at least one group, but is empty")
    arrays = {
        name: _as_images(f"groups[{name!r}]", images, ("n", "C", "H", "W"))
        for name, images in groups.items()
    }
    return _draw_grid(list(arrays.values()), path, arrays, title, left=list(arrays))


def reconstructions(
    originals: Tensor | Array,
    reconstructions: Tensor | Array,
    path: PathLike,
    *,
    title: str | None = None,
) -> Path:
    """Draw images (top) and their reconstructions (bottom), twenty in a line.

    Parameters
    ----------
    originals, reconstructions : (N, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `originals` and `reconstructions`.
    path, title
        The PNG to write, and a title above the grid.
    """
    first = _as_images("originals", originals, ("N", "C", "H", "W"))
    second = _as_images("reconstructions", reconstructions, ("N", "C", "H", "W"))
    if first.shape != second.shape:
        raise ValueError(
            f"reconstructions must have the shape of originals, {first.shape}, but has shape "
            f"{second.shape}; give one reconstruction for each original"
        )
    starts = range(0, len(first), IMAGES_PER_LINE)
    rows = [array[start : start + IMAGES_PER_LINE] for start in starts for array in (first, second)]
    arrays = {"originals": first, "reconstructions": second}
    return _draw_grid(
        rows, path, arrays, title, left=["original", "reconstruction"] * len(starts), group=2
    )


def traversal_grid(
    images: Tensor | Array,
    path: PathLike,
    *,
    values: Sequence[float] | Tensor | Array,
    order: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw a traversal: one row per instantiation parameter, one column per value of it.

    The number of the parameter stands left of its row.

    Parameters
    ----------
    images : (parameters, steps, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images` and `values`.
    path, title
        The PNG to write, and a title above the grid.
    values : (steps,)
        The numbers above the columns.
    order : (parameters,), optional
        The parameters from the top row to the bottom one; by default in the order of `images`, as
        they are in the ``.npz`` in any case.
    """
    array = _as_images("images", images, ("parameters", "steps", "C", "H", "W"))
    numbers = torch.as_tensor(values, dtype=torch.float64).detach().cpu().numpy()
    if numbers.shape != (array.shape[1],) or not np.isfinite(numbers).all():
        raise ValueError(
            f"values must be {array.shape[1]} finite numbers, one for each step of images, but is "
            f"{numbers.tolist()}"
        )
    above = [f"{number + 0.0:.3g}" for number in numbers]  # adding 0.0 turns -0.0 into 0.0
    rows = list(range(len(array))) if order is None else list(order)
    if sorted(rows) != list(range(len(array))):
        raise ValueError(
            f"order must have each number from 0 to {len(array) - 1} once, but is {rows}"
        )
    return _draw_grid(
        [array[parameter] for parameter in rows],
        path,
        {"images": array, "values": numbers},
        title,
        above=above,
        left=[str(parameter) for parameter in rows],
    )


def chain_strip(
    images: Tensor | Array,
    path: PathLike,
    *,
    steps: Sequence[int],
    title: str | None = None,
) -> Path:
    """Draw Markov chains: one row per chain, one column per time.

    Parameters
    ----------
    images : (times, chains, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images` and `steps`.
    path, title
        The PNG to write, and a title above the grid.
    steps : (times,)
        Steps of the chain at each time, the numbers above the columns.
    """
    array = _as_images("images", images, ("times", "chains", "C", "H", "W"))
    if len(steps) != len(array):
        raise ValueError(
            f"steps must be {len(array)} numbers, one for each time, but are {len(steps)}"
        )
    arrays = {"images": array, "steps": np.asarray(steps)}
    rows = list(np.swapaxes(array, 0, 1))
    return _draw_grid(rows, path, arrays, title, above=[str(step) for step in steps])


def animation(images: Tensor | Array, path: PathLike, *, milliseconds: int = 80) -> Path:
    """Write an animated PNG of a grid of images that change over time, without an ``.npz``.

    Parameters
    ----------
    images : (times, N, C, H, W)
        Floats from 0 to 1; C is 1 or 3.
    path
        The PNG to write.
    milliseconds
        Time for which each picture is shown; the last one is shown for a second.
    """
    from PIL import Image

    array = _as_images("images", images, ("times", "N", "C", "H", "W"))
    checks.require_int("milliseconds", milliseconds, 1)
    times, count, channels, height, width = array.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    scale = max(1, round(ANIMATION_SIZE / (columns * width)))
    pages = np.zeros((times, rows * columns, channels, height, width), np.float32)
    pages[:, :count] = array
    pages = pages.reshape(times, rows, columns, channels, height, width)
    pages = pages.transpose(0, 1, 4, 2, 5, 3).reshape(times, rows * height, -1, channels)
    pixels = np.rint(pages * 255).astype(np.uint8).repeat(scale, 1).repeat(scale, 2)
    frames = [Image.fromarray(page[..., 0] if channels == 1 else page) for page in pixels]
    picture = io.BytesIO()
    durations = [milliseconds] * (times - 1) + [1000]
    frames[0].save(
        picture,
        format="png",
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
    )
    return _write(path, picture.getvalue(), {})


def training_curves(metrics: PathLike | Mapping[str, Mapping[str, Array]], path: PathLike) -> Path:
    """Draw the curves of a training run over its epochs: one column per stage, one panel per curve.

    The reconstruction errors of training images and of held-out images share a panel. At most
    `MAX_PANELS` panels are drawn: stages that need more are left out of the picture. So are values
    beyond ±10³⁰.

    Parameters
    ----------
    metrics
        The ``metrics.jsonl`` of a run, or the curves that `read_metrics` returns for it.
    path
        The PNG to write. The ``.npz`` holds each curve under ``"<stage>/<curve>"``, of shape
        (points, 2): epochs and values.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    stages = metrics if isinstance(metrics, Mapping) else read_metrics(Path(metrics))
    panels_of = {
        stage: [name for name in curves if name != HELD_OUT or MAIN not in curves]
        for stage, curves in stages.items()
    }
    while sum(map(len, panels_of.values())) > MAX_PANELS and len(panels_of) > 1:
        panels_of.popitem()
    names = dict.fromkeys(name for shown in panels_of.values() for name in shown)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    rows, width = max(map(len, panels_of.values())), max(12.0, 2.4 * len(panels_of))
    number = FuncFormatter(lambda value, _: f"{value:.10g}".replace("-", "−"))

    with style.context("default"):  # regardless of the style that the caller has set
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(width, 0.8 + 1.9 * rows), dpi=100, layout=layout)
        panels = figure.subplots(rows, len(panels_of), squeeze=False, sharex="col")
        for column, (stage, shown) in zip(panels.T, panels_of.items(), strict=True):
            curves, letters = stages[stage], int(13 * width / len(panels_of)) - 10
            headings = [textwrap.fill(_as_ascii(name.replace("_", " ")), letters) for name in shown]
            for panel, heading, name in zip(column, headings, shown, strict=False):
                points = _drawable(curves[name])
                # Without markers, a curve of a single point would be invisible.
                options = {"linewidth": 1.3, "marker": "o" if len(points) <= 30 else None}
                panel.plot(
                    *points.T, color=colours[name], markersize=3, label="training", **options
                )
                if name == MAIN and HELD_OUT in curves:
                    other = _drawable(curves[HELD_OUT]).T
                    panel.plot(*other, color="#303030", markersize=2, label="held out", **options)
                    panel.legend(fontsize=8, frameon=False)
                panel.set_title(heading, loc="left", fontsize=10, color="#404040", parse_math=False)
                panel.grid(color="#e4e4e4", linewidth=0.8)
                panel.spines[["top", "right"]].set_visible(False)
                panel.spines[["left", "bottom"]].set_color("#a0a0a0")
                panel.tick_params(
                    labelsize=9, color="#a0a0a0", labelcolor="#404040", labelbottom=False
                )
                panel.xaxis.set(
                    major_locator=MaxNLocator(6, steps=[1, 2, 5, 10]), major_formatter=number
                )
                panel.yaxis.set(
                    major_locator=MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]), major_formatter=number
                )
            above = (0, 24 + 12 * headings[0].count("\n"))
            column[0].annotate(
                _as_ascii(stage),
                (0, 1),
                above,
                "axes fraction",
                "offset points",
                fontsize=12,
                fontweight="bold",
                parse_math=False,
            )
            column[len(shown) - 1].tick_params(labelbottom=True)
            column[len(shown) - 1].set_xlabel("epoch", fontsize=9, color="#404040")
            for unused in column[len(shown) :]:
                unused.remove()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
    arrays = {
        f"{stage}/{name}": points
        for stage, curves in stages.items()
        for name, points in curves.items()
    }
    return _write(path, picture.getvalue(), arrays)


def _drawable(points: Array) -> Array:
    """Return the points of a curve, with NaN for values that Matplotlib has no axis for."""
    points = points[np.abs(points[:, 0]) <= LARGEST]
    return np.where(np.abs(points) <= LARGEST, points, np.nan)


def _as_images(name: str, value: Tensor | Array, axes: Sequence[str]) -> Array:
    """Check images and return them as an array of the same precision."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (
            value.float() if value.dtype == torch.bfloat16 else value
        ).numpy()  # NumPy has no bfloat16
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        given = (
            f"its dtype is {value.dtype}"
            if isinstance(value, np.ndarray)
            else f"is {type(value).__name__}"
        )
        raise TypeError(
            f"{name} must be a tensor or NumPy array of floats from 0 to 1, but {given}; convert it"
        )
    if value.ndim != len(axes) or value.shape[-3] not in (1, 3) or value.size == 0:
        raise ValueError(
            f"{name} must have shape ({', '.join(axes)}) with C 1 or 3, and not be empty, but has "
            f"shape {value.shape}; permute its axes, and add the missing ones"
        )
    bad = ~((value >= -TOLERANCE) & (value <= 1 + TOLERANCE))  # true for NaN as well
    if bad.any():
        where = tuple(int(index) for index in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} must hold floats from 0 to 1, but {name}{list(where)} = {value[where]}; "
            "rescale them, for example with a sigmoid or by dividing by 255"
        )
    return value


def _draw_grid(
    rows: Sequence[Array],
    path: PathLike,
    arrays: Mapping[str, Array],
    title: str | None,
    *,
    above: Sequence[str] = (),
    left: Sequence[str] = (),
    group: int = 0,
) -> Path:
    """Draw rows of images (columns, C, H, W) with labels, and a gap after every `group` rows.

    Rows may have different numbers of images.
    """
    from PIL import Image, ImageDraw, ImageFont

    small, large = ImageFont.load_default(size=LABEL_SIZE), ImageFont.load_default(size=TITLE_SIZE)
    columns, (height, width) = max(map(len, rows)), rows[0].shape[2:]
    # The grid should fill a page of 640 pixels, and neighbouring labels must not overlap.
    scale = max(1, round(min(max(640 / max(len(rows), columns), 56), 112) / max(height, width)))
    scale = max([scale, *(math.ceil((small.getlength(text) + 6) / width) for text in above)])
    scale = max(scale, math.ceil(LABEL_SIZE / height) if left else 1)
    height, width = height * scale, width * scale

    x_grid = MARGIN + max((math.ceil(small.getlength(text)) + 10 for text in left), default=0)
    x_cells = [x_grid + LINE + column * (width + LINE) for column in range(columns)]
    right = x_cells[-1] + width + LINE
    # A character of the title is about 9 pixels wide.
    lines = textwrap.wrap(_as_ascii(title or ""), max(right - x_grid, 320) // 9)
    right = max([right, *(x_grid + math.ceil(large.getlength(line)) for line in lines)])
    y_grid = MARGIN + (24 * len(lines) + 8 if lines else 0) + (LABEL_SIZE + 6 if above else 0)
    y_cells = [
        y_grid + LINE + row * (height + LINE) + (row // group * 12 if group else 0)
        for row in range(len(rows))
    ]

    page = np.full((y_cells[-1] + height + LINE + MARGIN, right + MARGIN, 3), BACKGROUND, np.uint8)
    for y, row in zip(y_cells, rows, strict=True):
        pixels = np.moveaxis(np.rint(row.astype(np.float32) * 255).astype(np.uint8), 1, -1)
        for x, cell in zip(x_cells, pixels, strict=False):
            page[y - LINE : y + height + LINE, x - LINE : x + width + LINE] = SEPARATOR
            page[y : y + height, x : x + width] = cell.repeat(scale, axis=0).repeat(scale, axis=1)
    image = Image.fromarray(page)
    draw = ImageDraw.Draw(image)
    for index, text in enumerate(lines):
        draw.text((x_grid, MARGIN + 24 * index + 16), text, TEXT, large, anchor="ls")
    for x, text in zip(x_cells, above, strict=False):
        draw.text((x + width // 2, y_grid - 6), text, TEXT, small, anchor="ms")
    for y, text in zip(y_cells, left, strict=False):
        draw.text((x_grid - 10, y + height // 2), text, TEXT, small, anchor="rm")
    picture = io.BytesIO()
    image.save(picture, format="png")
    return _write(path, picture.getvalue(), arrays)


def _as_ascii(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.translate(ASCII_SUBSTITUTES))
    return "".join(
        letter if letter.isascii() else "?"
        for letter in letters
        if not unicodedata.combining(letter)
    )


def _write(path: PathLike, picture: bytes, arrays: Mapping[str, Array]) -> Path:
    """Write the PNG and, if there are arrays, the ``.npz`` file, both atomically.

    Both are written before either is replaced, so that a full disk leaves the old pair intact.
    """
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise ValueError(f"path must name a PNG, but is {str(path)!r}; let it end in .png")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(target) as png:
            png.write(picture)
            png.flush()
            if arrays:
                with atomic_write(target.with_suffix(".npz")) as npz:
                    np.savez(npz, **arrays)  # type: ignore[arg-type]  # the stub misreads the names
    except OSError as error:  # the error of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target
