"""What each parameter of an expert changes, measured on its images.

A parameter is varied by two standard deviations on both sides of the mean. Its effect is the mean
change of the pixels. A measure of the images, such as the thickness of the strokes, is named if it
follows the parameter and changes clearly more than every other measure. Only grey images on a plain
background have strokes that can be measured: for photographs, no measure is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from poecaps.explorer.render import STEPS, Setting

if TYPE_CHECKING:
    from poecaps.explorer.render import ExplorerModel

Array = np.ndarray[Any, Any]
Measure = Literal[
    "thickness", "width", "height", "slant", "brightness", "horizontal", "vertical", "size"
]
MEASURES: tuple[Measure, ...] = get_args(Measure)

REACH = 2.0  # standard deviations on both sides
# Changes of the measures that are equally visible: shares, but for slant (a tangent) and positions
# (shares of the side of the image).
VISIBLE = {
    "thickness": 0.15,
    "width": 0.12,
    "height": 0.12,
    "slant": 0.15,
    "brightness": 0.15,
    "horizontal": 0.05,
    "vertical": 0.05,
    "size": 0.12,
}
LEAST, LEAD = 1.0, 1.6  # visible changes of a measure that is named, and times those of the second
MONOTONE = 0.9  # squared correlation of a measure with the parameter
TINY = 1e-9


@dataclass(frozen=True)
class Effect:
    """What a parameter changes."""

    size: float
    """Mean change of a pixel, as a share of the brightness, per standard deviation."""
    measure: Measure | None
    """What it changes above all, if one measure dominates; None without a plain background."""
    rises: bool
    """Whether this measure rises with the parameter."""


def effects(model: ExplorerModel, expert: int) -> tuple[Effect, ...]:
    """Measure the effect of each parameter of an expert, which is on alone: (D,)."""
    chosen = [i for i, step in enumerate(STEPS) if abs(step) <= REACH]
    steps = np.array(STEPS)[chosen]
    images = model.traverse([Setting(expert)], expert)[:, chosen].mean(-1) / 255
    if model.background is None:
        return tuple(Effect(_size(steps, each), None, rises=False) for each in images)
    return tuple(_effect(steps, each) for each in np.abs(images - round(model.background)))


def _size(steps: Array, images: Array) -> float:
    """Return the mean change of a pixel from step to step: (T,), (T, H, W)."""
    return float(np.abs(np.diff(images, axis=0)).mean() / np.diff(steps).mean())


def _effect(steps: Array, ink: Array) -> Effect:
    """Measure the images of one parameter: (T,), (T, H, W), with a background of 0."""
    scores = {}
    for name, values in moments(ink).items():
        change, fit = _line(steps, values)
        scores[name] = change / VISIBLE[name] if fit >= MONOTONE else 0.0
    ranked = sorted(scores, key=lambda name: -abs(scores[name]))
    first, second = (abs(scores[name]) for name in ranked[:2])
    named: Measure | None = None
    if first >= LEAST and first >= LEAD * second:
        named = next(each for each in MEASURES if each == ranked[0])
    return Effect(_size(steps, ink), named, scores[ranked[0]] > 0)


def _line(steps: Array, values: Array) -> tuple[float, float]:
    """Return the change of values (T,) along a line over all steps, and its squared correlation."""
    x, y = steps - steps.mean(), values - values.mean()
    slope = float(x @ y / (x @ x))
    return slope * float(np.ptp(steps)), float((x @ y) ** 2 / max((x @ x) * (y @ y), TINY**2))


def moments(ink: Array) -> dict[str, Array]:
    """Measure images of light strokes on black: (T, H, W) → (T,) each.

    Returns
    -------
    thickness
        Log of twice the area of the strokes divided by the length of their outline.
    width, height
        Log of the standard deviation of the ink along each axis, where the other is unchanged.
    size
        Log of the geometric mean of both, where they change alike.
    slant
        Tangent of the angle by which the strokes lean to the right.
    brightness
        Log of the mean brightness of the ink.
    horizontal, vertical
        Centre of mass, to the right and downwards, as a share of the side.
    """
    count, rows, columns = ink.shape
    mass = ink.sum((1, 2)) + TINY
    y, x = np.arange(rows)[:, None], np.arange(columns)[None]
    centre_x, centre_y = ((ink * axis).sum((1, 2)) / mass for axis in (x, y))
    dx, dy = x - centre_x[:, None, None], y - centre_y[:, None, None]
    xx, yy, xy = ((ink * each).sum((1, 2)) / mass + TINY for each in (dx * dx, dy * dy, dx * dy))
    sheared = (xx - xy**2 / yy).clip(min=TINY)  # the width of the strokes if they did not lean
    width, height = np.log(sheared) / 2, np.log(yy) / 2
    brightness = (ink**2).sum((1, 2)) / mass + TINY
    edges = np.hypot(*np.gradient(np.pad(ink, ((0, 0), (1, 1), (1, 1))), axis=(1, 2)))
    outline = edges.sum((1, 2)) + TINY
    size = (width + height) / 2
    grows = np.ptp(width) > 0 and _alike(width, height)
    nothing = np.zeros(count)
    return {
        "thickness": np.log(2 * mass / outline),
        "width": nothing if grows else width,
        "height": nothing if grows else height,
        "size": size if grows else nothing,
        "slant": -xy / yy,
        "brightness": np.log(brightness),
        "horizontal": centre_x / columns,
        "vertical": centre_y / rows,
    }


def _alike(first: Array, second: Array) -> bool:
    """Return whether two measures (T,) change in the same direction, by about as much."""
    a, b = first[-1] - first[0], second[-1] - second[0]
    return bool(a * b > 0 and min(abs(a), abs(b)) > 0.6 * max(abs(a), abs(b)))
