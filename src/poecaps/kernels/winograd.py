"""Convolutions with stride 2 that multiply less: minimal filtering, for training on a CPU.

A filter of r numbers over n = m + r − 1 inputs gives m outputs. Written out, that takes m·r
multiplications; Toom's and Cook's evaluation of polynomials at n points takes n (Winograd,
*Arithmetic Complexity of Computations*, 1980; Lavin and Gray, 2016)::

    y = Aᵀ [(G g) ⊙ (B d)],      A (n, m), G (n, r), B (n, n)

and in two dimensions the same along both axes. The sum over the channels is taken before Aᵀ, so
that all multiplications are one matrix product for each of the n² points. A stride of 2 is the sum
of four convolutions with stride 1, of the even and the odd rows and columns.

For the paper's 6×6 outputs of 9×9 filters, the points are 10×10: 400 multiplications for each pair
of channels in place of 2,916. In float32 the result has an error of about 5e-5, where bfloat16 has
3e-3. The transposed convolution and all gradients are the same maps, transposed.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

STRIDE = 2

# Finite points of evaluation; the last one is infinity. Chosen for small errors of 10 points: more
# than 12 have errors above 1e-3.
POINTS = (0, 1, -1, 0.4, -0.4, 2.5, -2.5, 0.7, -1 / 0.7, -0.7, 1 / 0.7)

# Images at a time without a gradient, where batches are larger than those of a training step.
CHUNK = 128

# Channels from which on the products take longer than the maps around them.
MIN_CHANNELS = 32


_in_training = ContextVar("in_training", default=False)


@contextmanager
def in_training() -> Iterator[None]:
    """Use minimal filtering for all convolutions, also without a gradient, as on cached features.

    Elsewhere only filters that are being trained use it, so that features have all their digits.
    """
    token = _in_training.set(True)
    try:
        yield
    finally:
        _in_training.reset(token)


def is_wanted(weight: Tensor) -> bool:
    """Return whether filters are being trained, or used in training."""
    return _in_training.get() or (torch.is_grad_enabled() and weight.requires_grad)


def why_not(weight: Tensor, grid: tuple[int, int], x: Tensor | None = None) -> str | None:
    """Return why minimal filtering cannot serve a layer, or would be slower; None if it can.

    Parameters
    ----------
    weight : (F, C, S, S)
    grid
        (h, w) of its outputs.
    x
        What the model reads, if it is known.
    """
    if any(checks.is_transformed(each) for each in (weight, x) if each is not None):
        return "torch.func cannot transform minimal filtering"
    if weight.device.type != "cpu":
        return f"minimal filtering runs on CPUs, not on {weight.device.type!r}"
    if weight.dtype != torch.float32:
        return f"minimal filtering computes in float32, but the filters are {weight.dtype}"
    if min(weight.shape[:2]) < MIN_CHANNELS:
        return f"minimal filtering needs {MIN_CHANNELS} channels, but there are {weight.shape[1]}"
    most = len(POINTS) + 2 - _taps(weight)
    if max(grid) > most:
        return f"the grid of features must be at most {most}×{most}, but is {grid[0]}×{grid[1]}"
    return None


class Filters:
    """The filters of a convolution with stride 2, evaluated at all points.

    Parameters
    ----------
    weight : (F, C, S, S)
    grid
        (h, w) of the outputs.
    """

    def __init__(self, weight: Tensor, grid: tuple[int, int]) -> None:
        self.maps = _Maps(grid, _taps(weight))
        self.points: Tensor = _Evaluation.apply(weight, self.maps)  # type: ignore[no-untyped-call]

    def conv2d(self, x: Tensor) -> Tensor:
        """Convolve with stride 2: (B, C, H, W) → (B, F, h, w), float32.

        In memory, the result has the axes (h, w, B, F).
        """
        return _in_chunks(
            lambda part: _Conv2d.apply(part.float(), self.points, self.maps),  # type: ignore[no-untyped-call]
            x,
        )

    def conv_transpose2d(self, y: Tensor, size: tuple[int, int]) -> Tensor:
        """Convolve with the filters transposed: (B, F, h, w) → (B, C, *size), float32."""
        return _in_chunks(
            lambda part: _ConvTranspose2d.apply(part.float(), self.points, self.maps, size),  # type: ignore[no-untyped-call]
            y,
        )


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to images: all of them if a gradient is recorded, otherwise in chunks."""
    if torch.is_grad_enabled() or len(x) <= CHUNK:
        return function(x)
    return torch.cat([function(part) for part in x.split(CHUNK)])


class _Evaluation(torch.autograd.Function):
    """U = G g, the filters at all points."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, maps: _Maps) -> Tensor:
        ctx.maps, ctx.kernel_size = maps, weight.shape[-1]
        with _float32():
            return maps.of_filters(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with _float32():
            return ctx.maps.to_filters(grad, ctx.kernel_size), None


class _Conv2d(torch.autograd.Function):
    """y = Aᵀ [U ⊙ (B x)], with the filters U at all points."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, maps: _Maps) -> Tensor:
        ctx.maps, ctx.size = maps, x.shape[2:]
        with _float32():
            points = maps.of_inputs(x)
            ctx.save_for_backward(x, points, filters)
            return maps.to_outputs(torch.bmm(points, filters))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, points, filters = ctx.saved_tensors
        with _float32():
            if torch.is_grad_enabled():  # the gradient is differentiated again, also in x
                points = ctx.maps.of_inputs(x)
            grad = ctx.maps.of_outputs(grad_y)
            needs_x, needs_filters, _ = ctx.needs_input_grad
            grad_x = ctx.maps.to_inputs(torch.bmm(grad, filters.mT), ctx.size) if needs_x else None
            return grad_x, torch.bmm(points.mT, grad) if needs_filters else None, None


class _ConvTranspose2d(torch.autograd.Function):
    """x = Bᵀ [U ⊙ (A y)], with the filters U at all points."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, filters: Tensor, maps: _Maps, size: tuple[int, int]) -> Tensor:
        ctx.maps = maps
        with _float32():
            points = maps.of_outputs(y)
            ctx.save_for_backward(y, points, filters)
            return maps.to_inputs(torch.bmm(points, filters.mT), size)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y, points, filters = ctx.saved_tensors
        with _float32():
            if torch.is_grad_enabled():  # the gradient is differentiated again, also in y
                points = ctx.maps.of_outputs(y)
            grad = ctx.maps.of_inputs(grad_x)
            needs_y, needs_filters, *_ = ctx.needs_input_grad
            grad_y = ctx.maps.to_outputs(torch.bmm(grad, filters)) if needs_y else None
            return grad_y, torch.bmm(grad.mT, points) if needs_filters else None, None, None


class _Maps:
    """The linear maps to the points and back, of h×w outputs and r×r taps."""

    def __init__(self, grid: tuple[int, int], taps: int) -> None:
        self.grid, self.taps = grid, taps
        self.inputs = (grid[0] + taps - 1, grid[1] + taps - 1)  # (u, v), of each phase
        rows, columns = (_matrices(side, taps) for side in grid)
        self.a, self.g, self.b = zip(rows, columns, strict=True)

    def of_filters(self, weight: Tensor) -> Tensor:
        """Evaluate filters: (F, C, S, S) → (u·v, 4·C, F)."""
        taps = self.taps
        padded = _resized(weight, (STRIDE * taps, STRIDE * taps))
        phases = padded.unflatten(3, (taps, STRIDE)).unflatten(2, (taps, STRIDE))
        phases = phases.permute(2, 4, 3, 5, 1, 0).flatten(2)  # (r, r, 4·C·F)
        return _along_both(self.g, phases).reshape(-1, STRIDE**2 * weight.shape[1], len(weight))

    def to_filters(self, points: Tensor, kernel_size: int) -> Tensor:
        """Apply Gᵀ, and join the phases: (u·v, 4·C, F) → (F, C, S, S)."""
        taps, filters = self.taps, points.shape[-1]
        phases = _along_both(_transposed(self.g), points.reshape(*self.inputs, -1))
        phases = phases.reshape(taps, taps, STRIDE, STRIDE, -1, filters).permute(0, 2, 1, 3, 5, 4)
        rows = phases.reshape(taps * STRIDE, taps * STRIDE, filters, -1)
        rows = rows[:kernel_size, :kernel_size].flatten(0, 1)  # (S·S, F, C)
        # As a matrix, because torch transposes a matrix in blocks, which takes half of the time.
        weight = rows.flatten(1).T.contiguous()
        return weight.view(filters, -1, kernel_size, kernel_size)

    def of_inputs(self, x: Tensor) -> Tensor:
        """Apply B to each phase: (B, C, H, W) → (u·v, B, 4·C)."""
        u, v = self.inputs
        x = _resized(x, (STRIDE * u, STRIDE * v)).permute(0, 2, 3, 1)
        phases = x.unflatten(2, (v, STRIDE)).unflatten(1, (u, STRIDE))
        phases = phases.permute(1, 3, 0, 2, 4, 5).flatten(2)  # (u, v, B·4·C)
        return _along_both(self.b, phases).reshape(u * v, len(x), -1)

    def to_inputs(self, points: Tensor, size: tuple[int, int]) -> Tensor:
        """Apply Bᵀ, and join the phases: (u·v, B, 4·C) → (B, C, *size)."""
        (u, v), batch = self.inputs, points.shape[1]
        phases = _along_both(_transposed(self.b), points.reshape(u, v, -1))
        phases = phases.reshape(u, v, batch, STRIDE, STRIDE, -1).permute(2, 0, 3, 1, 4, 5)
        x = phases.reshape(batch, u * STRIDE, v * STRIDE, -1).permute(0, 3, 1, 2)
        return _resized(x, size)

    def of_outputs(self, y: Tensor) -> Tensor:
        """Apply A: (B, F, h, w) → (u·v, B, F)."""
        points = _along_both(self.a, y.permute(2, 3, 0, 1).flatten(2))
        return points.reshape(-1, *y.shape[:2])

    def to_outputs(self, points: Tensor) -> Tensor:
        """Apply Aᵀ: (u·v, B, F) → (B, F, h, w)."""
        y = _along_both(_transposed(self.a), points.reshape(*self.inputs, -1))
        return y.reshape(*self.grid, *points.shape[1:]).permute(2, 3, 0, 1)


def _transposed(matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.T for each in matrices)


def _float32() -> torch.autocast:
    """Return a context in which autocast does not round the products."""
    return torch.autocast("cpu", enabled=False)


def _along_both(matrices: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Apply a matrix along each of the first two axes: (p, u), (q, v), (u, v, N) → (p, q, N)."""
    left, right = matrices
    rows: Tensor = (left @ x.flatten(1)).unflatten(1, x.shape[1:])
    return right @ rows


def _resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut images, or pad them with zeros, below and to the right: (..., H, W) → (..., *size)."""
    below, beside = size[0] - x.shape[-2], size[1] - x.shape[-1]
    return x if below == beside == 0 else nn.functional.pad(x, (0, beside, 0, below))


def _taps(weight: Tensor) -> int:
    """Return r, the numbers of a filter along an axis that meet the even rows."""
    return -(-weight.shape[-1] // STRIDE)


@cache
@torch.inference_mode(mode=False)  # a later caller may need a gradient of a gradient
def _matrices(outputs: int, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return A (n, m), G (n, r) and B (n, n) of m outputs and r taps, float32.

    With V(s) the (n, s) matrix that evaluates a polynomial with s coefficients at the n points, a
    product of polynomials is V(n)⁻¹ [(V(m) a) ⊙ (V(r) g)], and the correlation its transpose in a:
    A = V(m), G = V(r) and B = V(n)⁻ᵀ. All rows that belong to a point are scaled to equal norms.
    """
    count = outputs + taps - 1
    finite = torch.tensor(POINTS[: count - 1], dtype=torch.float64, device="cpu")

    def evaluation(size: int) -> Tensor:
        infinity = torch.eye(size, dtype=torch.float64, device="cpu")[-1:]
        powers = torch.arange(size, device="cpu")
        return torch.cat([finite[:, None] ** powers, infinity])

    matrices = [evaluation(outputs), evaluation(taps), torch.linalg.inv(evaluation(count)).T]
    norms = [matrix.norm(dim=1, keepdim=True) for matrix in matrices]
    scale = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
    a, g, b = (
        (scale / norm * matrix).float() for matrix, norm in zip(matrices, norms, strict=True)
    )
    return a, g, b
