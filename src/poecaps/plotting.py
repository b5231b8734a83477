"""Pictures of what a network makes: grids of images, drawn pixel by pixel, and the curves of a training run.

Every function writes a PNG, and beside it under the same name an ``.npz`` of the arrays it shows, and returns the path
of the PNG. The same input gives the same PNG, byte for byte.

In a grid each pixel of an image is a square of k×k pixels; k is chosen so that an image measures about 56 to 112 pixels
where it can. The images lie `LINE` pixels apart, and the grid ends `MARGIN` pixels above the lower edge of the page.
Titles are drawn in Pillow's own font, which has ASCII only; other letters are replaced by the nearest.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
import unicodedata
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import _checks as checks

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    Array = np.ndarray[Any, Any]
    PathLike = str | os.PathLike[str]

TOLERANCE = 1e-6  # how far rounding may carry a value out of 0 to 1
MARGIN, LINE = 20, 1
TITLE_SIZE, LABEL_SIZE = 18, 14
PAPER, INK, SEPARATOR = (255, 255, 255), (40, 40, 40), (190, 190, 190)
PER_LINE = 20  # originals side by side
PLAIN = str.maketrans("×–—−‘’“”", "x---''\"\"")
NUMBER = (int, float)  # as JSON has them; not bool, which is an int as well
NO_CURVE = ("step", "epoch", "images_per_second", "seconds")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#4b4b9b", "#56b4e9", "#666666")


def expert_grid(images: Tensor | Array, path: PathLike, *, title: str | None = None) -> Path:
    """Draw what each expert generates: one column per expert under its number, one row per draw.

    Parameters
    ----------
    images : (rows, experts, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images`.
    path, title
        The PNG to write, and a line above the grid.
    """
    array = _as_images("images", images, ("rows", "experts", "C", "H", "W"))
    return _draw_grid(
        list(array), path, {"images": array}, title, above=[str(j) for j in range(array.shape[1])]
    )


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
        The PNG to write, and a line above the grid.
    columns
        Images in a row; by default as many as make the grid roughly square.
    raw
        Whether to write the ``.npz``, too.
    """
    array = _as_images("images", images, ("N", "C", "H", "W"))
    if columns is None:
        columns = math.ceil(math.sqrt(len(array) * array.shape[2] / array.shape[3]))
    checks.require_int("columns", columns, 1)
    rows = [array[start : start + columns] for start in range(0, len(array), columns)]
    return _draw_grid(rows, path, {"images": array} if raw else {}, title)


def reconstructions(
    originals: Tensor | Array,
    reconstructions: Tensor | Array,
    path: PathLike,
    *,
    title: str | None = None,
) -> Path:
    """Draw images above their reconstructions, twenty to a line.

    Parameters
    ----------
    originals, reconstructions : (N, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `originals` and `reconstructions`.
    path, title
        The PNG to write, and a line above the grid.
    """
    first = _as_images("originals", originals, ("N", "C", "H", "W"))
    second = _as_images("reconstructions", reconstructions, ("N", "C", "H", "W"))
    if first.shape != second.shape:
        raise ValueError(
            f"reconstructions must have the shape of originals, {first.shape}, but has shape {second.shape}; "
            "give one reconstruction for each original"
        )
    starts = range(0, len(first), PER_LINE)
    rows = [array[start : start + PER_LINE] for start in starts for array in (first, second)]
    arrays = {"originals": first, "reconstructions": second}
    return _draw_grid(
        rows, path, arrays, title, left=["original", "reconstruction"] * len(starts), group=2
    )


def traversal_grid(
    images: Tensor | Array,
    path: PathLike,
    *,
    values: Sequence[float] | Tensor | Array,
    title: str | None = None,
) -> Path:
    """Draw what each instantiation parameter changes: one row per parameter, one column per value it is given.

    Parameters
    ----------
    images : (parameters, steps, C, H, W)
        Floats from 0 to 1; C is 1 or 3. The ``.npz`` holds `images` and `values`.
    path, title
        The PNG to write, and a line above the grid.
    values : (steps,)
        The numbers above the columns.
    """
    array = _as_images("images", images, ("parameters", "steps", "C", "H", "W"))
    numbers = torch.as_tensor(values, dtype=torch.float64).detach().cpu().numpy()
    if numbers.shape != (array.shape[1],) or not np.isfinite(numbers).all():
        raise ValueError(
            f"values must be {array.shape[1]} finite numbers, one for each step of images, but is {numbers.tolist()}"
        )
    above = [
        f"{number + 0.0:.3g}" for number in numbers
    ]  # adding 0 takes the sign from a negative zero
    left = [str(parameter) for parameter in range(len(array))]
    return _draw_grid(
        list(array), path, {"images": array, "values": numbers}, title, above=above, left=left
    )


def training_curves(metrics: PathLike, path: PathLike) -> Path:
    """Draw the curves of a training run over its epochs: one column per stage, one panel per curve.

    Parameters
    ----------
    metrics
        A file of one JSON object a line, each with a ``stage`` and an ``epoch``. Every other number is a point of a
        curve, but for ``step``, ``images_per_second`` and ``seconds``. Of a point given twice, by a run that was
        resumed, the last counts. A last line that a crash has cut is passed over.
    path
        The PNG to write. The ``.npz`` holds for each curve ``"<stage>/<curve>"`` (points, 2): epochs and values.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    stages = read_metrics(Path(metrics))
    names = dict.fromkeys(name for curves in stages.values() for name in curves)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    rows, width = max(map(len, stages.values())), max(12.0, 2.4 * len(stages))
    number = FuncFormatter(lambda value, _: f"{value:.10g}".replace("-", "−"))

    with style.context("default"):  # whatever style the caller has set for figures of their own
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(width, 0.8 + 1.9 * rows), dpi=100, layout=layout)
        panels = figure.subplots(rows, len(stages), squeeze=False, sharex="col")
        for column, (stage, curves) in zip(panels.T, stages.items(), strict=True):
            headings = [
                textwrap.fill(name.replace("_", " "), int(13 * width / len(stages)) - 10)
                for name in curves
            ]
            for panel, heading, (name, points) in zip(
                column, headings, curves.items(), strict=False
            ):
                marker = (
                    "o" if len(points) <= 30 else None
                )  # few points, perhaps one, would be lost in a bare line
                panel.plot(
                    *points.T, color=colours[name], linewidth=1.3, marker=marker, markersize=3
                )
                panel.set_title(heading, loc="left", fontsize=10, color="#404040")
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
                stage,
                (0, 1),
                above,
                "axes fraction",
                "offset points",
                fontsize=12,
                fontweight="bold",
            )
            column[len(curves) - 1].tick_params(labelbottom=True)
            column[len(curves) - 1].set_xlabel("epoch", fontsize=9, color="#404040")
            for unused in column[len(curves) :]:
                unused.remove()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
    arrays = {
        f"{stage}/{name}": points
        for stage, curves in stages.items()
        for name, points in curves.items()
    }
    return _write(path, picture.getvalue(), arrays)


def read_metrics(source: Path) -> dict[str, dict[str, Array]]:
    """Read the points (points, 2) of every curve of every stage, both in the order of the file."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    lines = source.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):  # the crash came before the end of the line
                break
            entry = None
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("stage"), str)
            and type(entry.get("epoch")) in NUMBER
        ):
            raise ValueError(
                f"{source}, line {number}, must be a JSON object with a stage and an epoch, but is "
                f"{line[:80].decode(errors='replace')!r}; mend the line or remove it"
            )
        for name, value in entry.items():
            if name not in NO_CURVE and type(value) in NUMBER:
                found.setdefault(entry["stage"], {}).setdefault(name, {})[entry["epoch"]] = value
    if not found:
        raise ValueError(
            f"{source} holds no metrics; give the metrics.jsonl of a run that has taken a step"
        )
    return {
        stage: {name: np.array(sorted(points.items()), float) for name, points in curves.items()}
        for stage, curves in found.items()
    }


def _as_images(name: str, value: Tensor | Array, axes: Sequence[str]) -> Array:
    """Check images and return them as an array, in the precision they came in."""
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
            f"{name} must have shape ({', '.join(axes)}) with C 1 or 3, and not be empty, but has shape {value.shape}; "
            "bring its axes into this order, and add those that are missing"
        )
    bad = ~((value >= -TOLERANCE) & (value <= 1 + TOLERANCE))  # true for NaN as well
    if bad.any():
        where = tuple(int(index) for index in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} must hold floats from 0 to 1, but {name}{list(where)} = {value[where]}; "
            "bring them there, for example with a sigmoid or by dividing by 255"
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
    """Draw rows of images (columns, C, H, W), the last perhaps shorter, with a gap after every `group` rows."""
    from PIL import Image, ImageDraw, ImageFont

    small, large = ImageFont.load_default(size=LABEL_SIZE), ImageFont.load_default(size=TITLE_SIZE)
    columns, (height, width) = len(rows[0]), rows[0].shape[2:]
    # As large as fills a page of 640 pixels, and in any case so large that a label does not run into the next.
    scale = max(1, round(min(max(640 / max(len(rows), columns), 56), 112) / max(height, width)))
    scale = max([scale, *(math.ceil((small.getlength(text) + 6) / width) for text in above)])
    scale = max(scale, math.ceil(LABEL_SIZE / height) if left else 1)
    height, width = height * scale, width * scale

    x_grid = MARGIN + max((math.ceil(small.getlength(text)) + 10 for text in left), default=0)
    x_cells = [x_grid + LINE + column * (width + LINE) for column in range(columns)]
    right = x_cells[-1] + width + LINE
    lines = textwrap.wrap(
        _as_ascii(title or ""), max(right - x_grid, 320) // 9
    )  # a letter takes about 9 pixels
    right = max([right, *(x_grid + math.ceil(large.getlength(line)) for line in lines)])
    y_grid = MARGIN + (24 * len(lines) + 8 if lines else 0) + (LABEL_SIZE + 6 if above else 0)
    y_cells = [
        y_grid + LINE + row * (height + LINE) + (row // group * 12 if group else 0)
        for row in range(len(rows))
    ]

    page = np.full((y_cells[-1] + height + LINE + MARGIN, right + MARGIN, 3), PAPER, np.uint8)
    for y, row in zip(y_cells, rows, strict=True):
        pixels = np.moveaxis(np.rint(row.astype(np.float32) * 255).astype(np.uint8), 1, -1)
        for x, cell in zip(x_cells, pixels, strict=False):
            page[y - LINE : y + height + LINE, x - LINE : x + width + LINE] = SEPARATOR
            page[y : y + height, x : x + width] = cell.repeat(scale, axis=0).repeat(scale, axis=1)
    image = Image.fromarray(page)
    draw = ImageDraw.Draw(image)
    for index, text in enumerate(lines):
        draw.text((x_grid, MARGIN + 24 * index + 16), text, INK, large, anchor="ls")
    for x, text in zip(x_cells, above, strict=False):
        draw.text((x + width // 2, y_grid - 6), text, INK, small, anchor="ms")
    for y, text in zip(y_cells, left, strict=False):
        draw.text((x_grid - 10, y + height // 2), text, INK, small, anchor="rm")
    picture = io.BytesIO()
    image.save(picture, format="png")
    return _write(path, picture.getvalue(), arrays)


def _as_ascii(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.translate(PLAIN))
    return "".join(
        letter if letter.isascii() else "?"
        for letter in letters
        if not unicodedata.combining(letter)
    )


def _write(path: PathLike, picture: bytes, arrays: Mapping[str, Array]) -> Path:
    """Write both files, or without arrays the picture, under passing names first, so that old ones stay whole."""
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise ValueError(f"path must name a PNG, but is {str(path)!r}; let it end in .png")
    target.parent.mkdir(parents=True, exist_ok=True)
    npz, png = (
        target.with_name(f".{target.stem}-{uuid.uuid4().hex}{suffix}")
        for suffix in (".npz", ".png")
    )
    try:
        if arrays:
            np.savez(npz, **arrays)  # type: ignore[arg-type]  # its stub takes the names for options
        png.write_bytes(picture)
        if arrays:
            npz.replace(target.with_suffix(".npz"))
        png.replace(target)
    except OSError as error:  # a full disk does not say which file it was
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        npz.unlink(missing_ok=True)
        png.unlink(missing_ok=True)
    return target
