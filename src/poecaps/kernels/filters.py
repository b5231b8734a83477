"""The autoencoder's convolutions on a GPU, by Triton kernels that never write a patch.

Two convolutions up and the same two transposed down, with what lies between them: biases, leaky ReLUs and dropout. They
take what bfloat16 autocast would make of their arguments; sums are float32. `poecaps.kernels.windows` says how; this
module launches it. Shapes and letters are those of that module: a fine grid (B, H, W, F) and a coarse one (B, P, Q, F).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import _checks as checks
from poecaps.kernels import launch
from poecaps.kernels.flash import installed
from poecaps.kernels.launch import Tile, padded, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Window(Tile):
    """What one program of a product holds, rows × columns, and how it is run."""

    rows: int = 128
    columns: int = 128
    depth: int = 64  # of a step
    warps: int = 4
    stages: int = 3
    limit: int = 1000  # taps above which a place is shared by two programs, where there are few programs


# By kind of kernel: the best of a sweep on an H200, for few images and for many.
WINDOWS = {
    "up": Window(),
    "down": Window(limit=13),
    "slope": Window(),
    "few_up": Window(depth=32, stages=1),
    "few_slope": Window(stages=1),
    "few_columns": Window(warps=8, stages=2, registers=128),
}

# Steps of a product that it costs to write a part of a sum and to read it again.
PART = 8

# Channels come in vectors of 16 bytes, of which the matrix units take two.
MULTIPLE = 16

# Pixels of an image that are folded at once; numbers that are summed at once; rows that are joined at once.
FOLD, SUM, JOIN = 128, 2048, 8

# Parts above which torch sums them sooner.
MOST_PARTS = 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes of the images' channels, the two grids and the filters."""

    channels: int
    features: int
    side: int
    fine: tuple[int, int]
    coarse: tuple[int, int]

    @property
    def grids(self) -> dict[str, int]:
        """What kernels are told that go from grid to grid."""
        (height, width), (rows, columns) = self.fine, self.coarse
        return {"H": height, "W": width, "P": rows, "Q": columns, "S": self.side, "F": self.features}

    @property
    def few(self) -> dict[str, int]:
        """What kernels are told that go from image to grid."""
        return {"H": self.fine[0], "W": self.fine[1], "S": self.side, "C": self.channels}

    @property
    def patch(self) -> int:
        """Numbers that a filter sees in an image."""
        return self.side**2 * self.channels

    def columns(self, window: Window) -> int:
        """Features in a block."""
        return min(window.columns, padded(self.features, 16))

    def depth(self, window: Window) -> int:
        """Features in a step: the longest that divides them."""
        return next(depth for depth in (window.depth, 32, 16) if self.features % depth == 0)


def sizes(first: Tensor, size: tuple[int, int]) -> Sizes:
    """Tell the sizes for first filters (F, C, S, S) and images of this height and width."""
    features, channels, side, _ = first.shape
    height, width = (each - side + 1 for each in size)
    return Sizes(channels, features, side, (height, width), ((height - side) // 2 + 1, (width - side) // 2 + 1))


@dataclass(frozen=True)
class Shape:
    """What becomes of a sum: a bias, the leaky ReLU, or the derivative of the one that gave `seen`; dropout."""

    slope: float
    bias: Tensor | None = None
    leak: bool = False
    seen: Tensor | None = None
    drawn: Tensor | None = None
    share: float = 0.0

    @property
    def flags(self) -> dict[str, Any]:
        """What kernels are told."""
        given = {"BIAS": self.bias is not None, "LEAK": self.leak, "GATE": self.seen is not None}
        return {**given, "SLOPE": self.slope}

    def tensors(self, spare: Tensor) -> tuple[Tensor, Tensor]:
        """Bias and what was seen; a tensor in place of what is not there."""
        return (spare if self.bias is None else self.bias, spare if self.seen is None else self.seen)


# ---------------------------------------------------------------------------------------------------------
# What can run


def fits(seen: Tensor, first: Tensor, second: Tensor, size: Sequence[int]) -> bool:
    """Tell whether these kernels can take images of this size, or features of them, and both layers' filters."""
    kind, features = seen.device.type, len(first)
    tensors = (seen, first, second)
    return (
        not torch.compiler.is_compiling()
        and torch.is_autocast_enabled(kind)
        and torch.get_autocast_dtype(kind) == torch.bfloat16
        and installed()
        and (_is_large(seen.device) if kind == "cuda" else os.environ.get("TRITON_INTERPRET") == "1")
        and all(each.device == seen.device and not checks.is_wrapped(each) for each in tensors)
        and first.dtype == second.dtype == torch.float32
        and seen.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and features % MULTIPLE == 0
        and len(seen) > 0
        and len(seen) * max(features, first[0].numel()) * size[0] * size[1] < 2**31  # offsets have 32 bits
    )


@cache
def _is_large(device: torch.device) -> bool:
    """Tell whether a device has the memory on the chip that the products' stages need."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def describe(device: torch.device) -> str:
    """Say in one line how training convolves on a device, and why not faster."""
    if device.type != "cuda":
        return "torch: its own, and products where channels are few"
    if not installed():
        return "torch: its own, and products where channels are few, because Triton is not installed"
    if not _is_large(device):
        return "torch: its own, and products where channels are few; the kernels need compute capability 9 or 10"
    return "triton: GPU kernels that write no patches, in bfloat16"


# ---------------------------------------------------------------------------------------------------------
# The autoencoder


@torch.no_grad()
def encode(images: Tensor, filters: Filters, slope: float) -> Tensor:
    """Compute features, without a gradient: (B, C, H+S−1, W+S−1) → (B, F, P, Q)."""
    which = sizes(filters.first, (images.shape[2], images.shape[3]))
    _, features = _way_up(images.contiguous(), filters.laid(), which, slope, None, 0.0)
    return features.permute(0, 3, 1, 2)


def decode(features: Tensor, filters: Filters, size: tuple[int, int], slope: float) -> Tensor:
    """Compute images before their sigmoid: (B, F, P, Q) → (B, C, *size), float32."""
    return _apply(_Decode, (features, *filters.down), sizes(filters.first, size), slope)


def reconstruct(images: Tensor, filters: Filters, drawn: Tensor | None, share: float, slope: float) -> Tensor:
    """Encode, drop a share of the features, those whose `drawn` (B, F, P, Q) is less, and `decode`."""
    which = sizes(filters.first, (images.shape[2], images.shape[3]))
    return _apply(_Reconstruct, (images, drawn, *filters.all), which, slope, share)


@dataclass(frozen=True)
class Filters:
    """Filters and biases of an autoencoder, up and down."""

    first: Tensor  # (F, C, S, S)
    second: Tensor  # (F, F, S, S)
    up_1: Tensor | None  # (F,)
    up_2: Tensor | None
    down_2: Tensor | None
    down_1: Tensor | None  # (C,)

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        """All of them, in order."""
        return self.first, self.second, self.up_1, self.up_2, self.down_2, self.down_1

    @property
    def down(self) -> tuple[Tensor | None, ...]:
        """Those of the way down."""
        return self.first, self.second, self.down_2, self.down_1

    def laid(self) -> Filters:
        """Lay them as the kernels take them: channels last, the second in bfloat16."""
        last = torch.channels_last
        first, second = self.first.detach().contiguous(memory_format=last), self.second.detach()
        return Filters(first, second.to(torch.bfloat16, memory_format=last), *self.all[2:])


def _apply(function: Any, tensors: tuple[Tensor | None, ...], *rest: Any) -> Tensor:
    """Apply a function; keep nothing for a gradient that nobody will ask for."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        out: Tensor = function.apply(*tensors, *rest)
    else:
        with torch.no_grad():
            out = function.forward(None, *tensors, *rest)
    return out


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        first: Tensor,
        second: Tensor,
        down_2: Tensor | None,
        down_1: Tensor | None,
        which: Sizes,
        slope: float,
    ) -> Tensor:
        filters = Filters(first, second, None, None, down_2, down_1).laid()
        coarse = features.permute(0, 2, 3, 1).to(torch.bfloat16).contiguous()
        hidden, images = _way_down(coarse, filters, which, slope)
        if ctx is not None:
            ctx.save_for_backward(coarse, hidden, filters.first, filters.second)
            ctx.rest = (which, slope, features.dtype, down_2 is not None, down_1 is not None)
        return images

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coarse, hidden, first, second = ctx.saved_tensors
        which, slope, dtype, has_2, has_1 = ctx.rest
        gradient = gradient.contiguous()
        part = _few_parts(hidden, which, 1)
        to_hidden, down_2 = _last_gradient(gradient, hidden, first, part[0], which, slope, has_2)
        to_features = torch.empty_like(coarse, dtype=dtype)
        _up(to_hidden, second, which, Shape(slope), to_features)
        to_second = _slope([(coarse, to_hidden)], which)
        to_first, _ = _few_join(part, which, False)
        return (
            to_features.permute(0, 3, 1, 2),
            to_first,
            to_second,
            down_2,
            _channel_sums(gradient) if has_1 else None,
            None,
            None,
        )


class _Reconstruct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        drawn: Tensor | None,
        first: Tensor,
        second: Tensor,
        up_1: Tensor | None,
        up_2: Tensor | None,
        down_2: Tensor | None,
        down_1: Tensor | None,
        which: Sizes,
        slope: float,
        share: float,
    ) -> Tensor:
        filters = Filters(first, second, up_1, up_2, down_2, down_1).laid()
        images, drawn = images.contiguous(), None if drawn is None else drawn.contiguous()
        fine, coarse = _way_up(images, filters, which, slope, drawn, share)
        hidden, out = _way_down(coarse, filters, which, slope)
        if ctx is not None:
            ctx.save_for_backward(images, drawn, fine, coarse, hidden, filters.first, filters.second)
            ctx.rest = (which, slope, share, [each is not None for each in (up_1, up_2, down_2, down_1)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, drawn, fine, coarse, hidden, first, second = ctx.saved_tensors
        which, slope, share, (has_up_1, has_up_2, has_down_2, has_down_1) = ctx.rest
        gradient = gradient.contiguous()
        part = _few_parts(hidden, which, 2)
        to_hidden, down_2 = _last_gradient(gradient, hidden, first, part[0], which, slope, has_down_2)
        to_coarse = torch.empty_like(coarse)
        shape = Shape(slope, seen=coarse, drawn=drawn, share=share)
        up_2 = _up(to_hidden, second, which, shape, to_coarse, sums=has_up_2)
        to_second = _slope([(coarse, to_hidden), (to_coarse, fine)], which)
        to_fine = torch.empty_like(fine)
        _down(to_coarse, second, which, Shape(slope, seen=fine), to_fine)
        _few_slope(images, to_fine, which, part[1], has_up_1)
        to_first, up_1 = _few_join(part, which, has_up_1)
        down_1 = _channel_sums(gradient) if has_down_1 else None
        return None, None, to_first, to_second, up_1, up_2, down_2, down_1, None, None, None


def _way_up(
    images: Tensor, filters: Filters, which: Sizes, slope: float, drawn: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    """Compute both grids from images: → (B, H, W, F), (B, P, Q, F)."""
    fine = images.new_empty(len(images), *which.fine, which.features, dtype=torch.bfloat16)
    _few_up(images, filters.first, which, Shape(slope, filters.up_1, leak=True), fine)
    coarse = fine.new_empty(len(images), *which.coarse, which.features)
    _up(fine, filters.second, which, Shape(slope, filters.up_2, leak=True, drawn=drawn, share=share), coarse)
    return fine, coarse


def _way_down(coarse: Tensor, filters: Filters, which: Sizes, slope: float) -> tuple[Tensor, Tensor]:
    """Compute the fine grid and images from the coarse grid: → (B, H, W, F), (B, C, H+S−1, W+S−1)."""
    hidden = coarse.new_empty(len(coarse), *which.fine, which.features)
    _down(coarse, filters.second, which, Shape(slope, filters.down_2, leak=True), hidden)
    return hidden, _few_down(hidden, filters.first, filters.down_1, which)


def _last_gradient(
    gradient: Tensor, hidden: Tensor, first: Tensor, part: Tensor, which: Sizes, slope: float, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return gradients in the sums that gave `hidden` and in its bias, and put that in the filters in `part`."""
    to_hidden = torch.empty_like(hidden)
    to_bias = _few_up(gradient, first, which, Shape(slope, seen=hidden), to_hidden, sums=has_bias)
    _few_slope(gradient, hidden, which, part, False)
    return to_hidden, to_bias


# ---------------------------------------------------------------------------------------------------------
# Many channels, stride 2


def _room(window: Window, device: torch.device) -> int:
    return window.resident * launch._multiprocessors(device)


def _up(x: Tensor, w: Tensor, which: Sizes, shape: Shape, out: Tensor, *, sums: bool = False) -> Tensor | None:
    """Convolve x (B, H, W, F) with stride 2 and shape it: → out (B, P, Q, F); returns its column sums (F,)."""
    batch, window = len(x), WINDOWS["up"]
    rows = batch * which.coarse[0] * which.coarse[1]
    high, wide, deep = min(window.rows, padded(rows, 16)), which.columns(window), which.depth(window)
    grid = (-(-rows // high), -(-which.features // wide))
    steps = which.side**2 * which.features // deep
    splits, each = launch._split(grid[0] * grid[1], steps, _room(window, x.device), PART)
    part = x.new_empty(splits, rows, which.features, dtype=torch.float32)
    blocks = {"BM": high, "BN": wide, "BK": deep}
    run("window_up", (*grid, splits), (x, w, part, batch, each), {**which.grids, **blocks}, window)
    grid = (-(-rows // JOIN), -(-which.features // wide))
    total = part.new_empty(grid[0] if sums else 1, which.features)
    drawn = out if shape.drawn is None else shape.drawn
    constants = {"F": which.features, "AREA": which.coarse[0] * which.coarse[1], **shape.flags, "SHARE": shape.share}
    constants |= {"DROP": shape.drawn is not None, "SUMS": sums, "BM": JOIN, "BN": wide}
    run("window_join", grid, (part, *shape.tensors(out), drawn, out, total, rows, splits), constants)
    return _sum(total) if sums else None


def _down(f: Tensor, w: Tensor, which: Sizes, shape: Shape, out: Tensor) -> None:
    """Convolve f (B, P, Q, F) transposed with stride 2 and shape it: → out (B, H, W, F)."""
    batch, window = len(f), WINDOWS["down"]
    high, wide, deep = min(window.rows, padded(batch, 16)), which.columns(window), which.depth(window)
    blocks, across = -(-batch // high), -(-which.features // wide)
    few = which.fine[0] * which.fine[1] * blocks * across < 4 * _room(window, f.device)
    jobs, places = _jobs(which, window.limit if few else 1000, f.device)
    part = f.new_empty(len(places) or 1, 2, batch, which.features, dtype=torch.float32)
    constants = {**which.grids, **shape.flags, "BM": high, "BN": wide, "BK": deep}
    arguments = (f, w, jobs, *shape.tensors(out), out, part, batch, blocks)
    run("window_down", (len(jobs) * blocks, across), arguments, constants, window)
    if len(places) > 0:
        constants = {"H": which.fine[0], "W": which.fine[1], "F": which.features, **shape.flags}
        grid = (len(places), -(-batch // JOIN), across)
        joined = (part, places, *shape.tensors(out), out, batch)
        run("window_pairs", grid, joined, {**constants, "BM": JOIN, "BN": wide})


@cache
def _jobs(which: Sizes, limit: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """List what `window_down` has to do, the longest first: (place, first tap, taps, pair or −1), and pairs' places."""

    def taps(position: int, count: int) -> int:
        low, high = max(position - which.side + 2, 0) // 2, min(position // 2, count - 1)
        return max(0, high - low + 1)

    (height, width), (rows, columns) = which.fine, which.coarse
    jobs: list[tuple[int, int, int, int]] = []
    places: list[int] = []
    for y in range(height):
        for x in range(width):
            place, count = y * width + x, taps(y, rows) * taps(x, columns)
            if count > limit:
                half = count - count // 2
                jobs += [(place, 0, half, len(places)), (place, half, count - half, len(places))]
                places.append(place)
            else:
                jobs.append((place, 0, count, -1))
    jobs.sort(key=lambda job: -job[2])
    return tuple(torch.tensor(each, dtype=torch.int32, device=device) for each in (jobs, places))  # type: ignore[return-value]


def _slope(sources: list[tuple[Tensor, Tensor]], which: Sizes) -> Tensor:
    """Sum the gradient in the second filters over one or two pairs (B, P, Q, F), (B, H, W, F): → (F, F, S, S)."""
    (f, x), (g, y) = sources[0], sources[-1]
    batch, window = len(f), WINDOWS["slope"]
    high, wide = min(window.rows, padded(which.features, 16)), which.columns(window)
    deep = min(window.depth, padded(batch, 16))
    grid = (which.side**2 * -(-which.features // wide), -(-which.features // high))
    steps = -(-batch // deep) * which.coarse[0] * which.coarse[1]
    room = _room(window, f.device)
    splits, each = launch._split(grid[0] * grid[1] * len(sources), steps, room, PART)
    part = f.new_empty(
        splits * len(sources), which.features, which.side, which.side, which.features, dtype=torch.float32
    )
    blocks = {"EVEN": batch % deep == 0, "BM": high, "BN": wide, "BK": deep}
    constants = {**which.grids, "SOURCES": len(sources), **blocks}
    run("window_slope", (*grid, len(part)), (f, x, g, y, part, batch, each, splits), constants, window)
    return _sum(part).permute(0, 3, 1, 2)


def _channel_sums(images: Tensor) -> Tensor:
    """Sum over images and pixels, in two steps because few numbers remain: (B, C, H, W) → (C,)."""
    return images.flatten(2).sum(2).sum(0)


def _sum(part: Tensor) -> Tensor:
    """Sum parts: (splits, …) → (…)."""
    if len(part) == 1:
        return part[0]
    if len(part) > MOST_PARTS:
        return part.sum(0)
    out = torch.empty_like(part[0])
    high = min(128, padded(len(part), 1))
    wide = SUM // high
    run("window_sum", (-(-out.numel() // wide),), (part, out, out.numel(), len(part)), {"BM": high, "BN": wide})
    return out


# ---------------------------------------------------------------------------------------------------------
# Few channels, stride 1


def _few_up(images: Tensor, w: Tensor, which: Sizes, shape: Shape, out: Tensor, *, sums: bool = False) -> Tensor | None:
    """Convolve images (B, C, H+S−1, W+S−1) and shape it: → out (B, H, W, F); returns its column sums (F,)."""
    window = WINDOWS["few_up"]
    rows, wide = out.numel() // which.features, which.columns(window)
    high = min(window.rows, padded(rows, 16))
    grid = (-(-rows // high), -(-which.features // wide))
    total = images.new_empty(grid[0] if sums else 1, which.features, dtype=torch.float32)
    constants = {**which.few, "F": which.features, **shape.flags, "SUMS": sums}
    blocks = {"BM": high, "BN": wide, "BK": window.depth}
    arguments = (images, w, *shape.tensors(out), out, total, len(images))
    run("window_few_up", grid, arguments, {**constants, **blocks}, window)
    return _sum(total) if sums else None


def _few_parts(g: Tensor, which: Sizes, sources: int) -> Tensor:
    """Make room for what `_few_slope` gives for g (B, H, W, F): (sources, splits, F, S·S·C+1)."""
    window = WINDOWS["few_slope"]
    high, wide = min(window.rows, padded(which.features, 16)), min(window.columns, padded(which.patch + 1, 16))
    programs = -(-which.features // high) * -(-(which.patch + 1) // wide)
    steps = -(-(g.numel() // which.features) // window.depth)
    splits, _ = launch._split(programs, steps, _room(window, g.device))
    return g.new_empty(sources, splits, which.features, which.patch + 1, dtype=torch.float32)


def _few_slope(images: Tensor, g: Tensor, which: Sizes, part: Tensor, ones: bool) -> None:
    """Sum g (B, H, W, F) times what filters saw in images, then g itself: → part (splits, F, S·S·C+1)."""
    window = WINDOWS["few_slope"]
    high, wide = min(window.rows, padded(which.features, 16)), min(window.columns, padded(which.patch + 1, 16))
    grid = (-(-which.features // high), -(-(which.patch + 1) // wide), len(part))
    each = -(-g.numel() // (which.features * window.depth * len(part)))
    constants = {**which.few, "F": which.features, "ONES": ones, "BM": high, "BN": wide, "BK": window.depth}
    run("window_few_slope", grid, (images, g, part, len(images), each), constants, window)


def _few_join(part: Tensor, which: Sizes, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Sum what `_few_slope` gave: → (F, C, S, S), (F,)."""
    part = part.flatten(0, 1)
    out = part.new_empty(which.features, which.side, which.side, which.channels)
    bias = part.new_empty(which.features)
    wide = SUM // 32
    constants = {"F": which.features, "K": which.patch, "BIAS": has_bias, "BM": 32, "BN": wide}
    run("window_few_join", (-(-part[0].numel() // wide),), (part, out, bias, len(part)), constants)
    return out.permute(0, 3, 1, 2), bias if has_bias else None


def _few_down(hidden: Tensor, w: Tensor, bias: Tensor | None, which: Sizes) -> Tensor:
    """Convolve hidden (B, H, W, F) transposed: → (B, C, H+S−1, W+S−1), float32."""
    window = WINDOWS["few_columns"]
    batch, (height, width) = len(hidden), which.fine
    columns = hidden.new_empty(batch, which.patch, height * width)
    rows = batch * height * width
    high, wide = min(window.rows, padded(rows, 16)), min(window.columns, padded(which.patch, 16))
    deep = min(window.depth, padded(which.features, 16))
    constants = {**which.few, "F": which.features, "BM": high, "BN": wide, "BK": deep}
    run(
        "window_few_columns",
        (-(-rows // high), -(-which.patch // wide)),
        (hidden, w, columns, batch),
        constants,
        window,
    )
    size = height + which.side - 1, width + which.side - 1
    out = hidden.new_empty(batch, which.channels, *size, dtype=torch.float32)
    constants = {**which.few, "BIAS": bias is not None, "BN": FOLD}
    grid = (batch * which.channels, -(-size[0] * size[1] // FOLD))
    run("window_few_fold", grid, (columns, out if bias is None else bias, out), constants)
    return out
