"""The kernels of the autoencoder give what float64 gives: on a GPU, or in Triton's interpreter, by `test_filters`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from poecaps.autoencoder import ConvAutoencoder, Painter
from poecaps.kernels import filters
from poecaps.kernels.filters import Shape, Sizes
from poecaps.kernels.launch import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 1e-4  # float32 sums of bfloat16 products
ROUNDED = 1e-2  # bfloat16; the interpreter cuts bits off where a GPU rounds

# Images, channels, features, side of the filters and of the images: rest rows, even sides, a batch beyond a block.
SIZES = [
    (3, 1, 16, 3, (8, 9)),
    (2, 3, 32, 3, (7, 8)),
    (2, 1, 48, 4, (9, 8)),
    (19, 1, 16, 2, (5, 4)),
]


class Problem:
    """Random grids and filters, as the kernels take them and as PyTorch does."""

    def __init__(self, sizes: tuple[int, int, int, int, tuple[int, int]], generator: torch.Generator) -> None:
        self.batch, self.channels, self.features, self.side, self.size = sizes
        self.generator = generator
        first = self.draw(self.features, self.channels, self.side, self.side)
        second = self.draw(self.features, self.features, self.side, self.side)
        self.which: Sizes = filters.sizes(first, self.size)
        self.first = first.contiguous(memory_format=torch.channels_last)
        self.second = second.to(torch.bfloat16, memory_format=torch.channels_last)
        self.fine = self.draw(self.batch, *self.which.fine, self.features).bfloat16()
        self.coarse = self.draw(self.batch, *self.which.coarse, self.features).bfloat16()
        self.images = self.draw(self.batch, self.channels, *self.size)
        self.padding = [(side - self.side) % 2 for side in self.which.fine]

    def draw(self, *shape: int) -> Tensor:
        """Draw numbers that bfloat16 can hold."""
        return torch.randn(shape, generator=self.generator).bfloat16().float().to(DEVICE)


def wide(grid: Tensor) -> Tensor:
    """Turn a grid (B, h, w, F) into PyTorch's (B, F, h, w), float64."""
    return grid.permute(0, 3, 1, 2).double()


def gradient(out: Tensor, of: Tensor, pull: Tensor) -> Tensor:
    return torch.autograd.grad(out, of, pull)[0]


def assert_close(ours: Tensor | None, exact: Tensor | None, bound: float = EXACT) -> None:
    assert ours is not None
    assert exact is not None
    assert ours.shape == exact.shape
    assert ((ours.double() - exact).norm() / exact.norm()).item() < bound


@pytest.fixture(params=SIZES, ids=str)
def problem(request: pytest.FixtureRequest, generator: torch.Generator) -> Problem:
    return Problem(request.param, generator)


def test_up(problem: Problem) -> None:
    p = problem
    exact = F.conv2d(wide(p.fine), p.second.double(), stride=2)
    out = torch.empty_like(p.coarse, dtype=torch.float32)
    filters._up(p.fine, p.second, p.which, Shape(0.2), out)
    assert_close(out.permute(0, 3, 1, 2), exact)
    bias = p.draw(p.features)
    drawn = torch.rand(p.batch, p.features, *p.which.coarse, generator=p.generator).to(DEVICE)
    filters._up(p.fine, p.second, p.which, Shape(0.2, bias, leak=True, drawn=drawn, share=0.25), out)
    leaked = F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2) * (drawn >= 0.25) / 0.75
    assert_close(out.permute(0, 3, 1, 2), leaked)
    sums = filters._up(p.fine, p.second, p.which, Shape(0.2, seen=p.coarse), out, sums=True)
    gated = torch.where(wide(p.coarse) > 0, exact, 0.2 * exact)
    assert_close(out.permute(0, 3, 1, 2), gated)
    assert_close(sums, gated.sum((0, 2, 3)))


@pytest.mark.parametrize("limit", [1, 1000])
def test_down(problem: Problem, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem
    monkeypatch.setitem(filters.WINDOWS, "down", filters.Window(limit=limit, resident=10**6))
    exact = F.conv_transpose2d(wide(p.coarse), p.second.double(), stride=2, output_padding=p.padding)
    out, bias = torch.empty_like(p.fine, dtype=torch.float32), p.draw(p.features)
    filters._down(p.coarse, p.second, p.which, Shape(0.2, bias, leak=True), out)
    assert_close(out.permute(0, 3, 1, 2), F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2))
    filters._down(p.coarse, p.second, p.which, Shape(0.2, seen=p.fine), out)
    assert_close(out.permute(0, 3, 1, 2), torch.where(wide(p.fine) > 0, exact, 0.2 * exact))


def test_slope(problem: Problem) -> None:
    p = problem
    fine, coarse = p.draw(*p.fine.shape).bfloat16(), p.draw(*p.coarse.shape).bfloat16()
    exact = torch.zeros_like(p.second, dtype=torch.float64).requires_grad_()
    one = gradient(F.conv2d(wide(p.fine), exact, stride=2), exact, wide(p.coarse))
    other = gradient(F.conv2d(wide(fine), exact, stride=2), exact, wide(coarse))
    assert_close(filters._slope([(p.coarse, p.fine)], p.which), one)
    assert_close(filters._slope([(p.coarse, p.fine), (coarse, fine)], p.which), one + other)


@pytest.mark.parametrize("parts", [1, 2, 100, 300, 1500])
def test_sum(parts: int, generator: torch.Generator) -> None:
    part = torch.randn(parts, 3, 47, generator=generator).to(DEVICE)
    assert_close(filters._sum(part), part.double().sum(0))


def test_few(problem: Problem) -> None:
    """The first filters: up, their gradient, and down."""
    p = problem
    exact = F.conv2d(p.images.double(), p.first.double())
    out, bias = torch.empty_like(p.fine, dtype=torch.float32), p.draw(p.features)
    filters._few_up(p.images, p.first, p.which, Shape(0.2, bias, leak=True), out)
    assert_close(out.permute(0, 3, 1, 2), F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2))
    sums = filters._few_up(p.images, p.first, p.which, Shape(0.2, seen=p.fine), out, sums=True)
    gated = torch.where(wide(p.fine) > 0, exact, 0.2 * exact)
    assert_close(out.permute(0, 3, 1, 2), gated)
    assert_close(sums, gated.sum((0, 2, 3)))
    part = filters._few_parts(p.fine, p.which, 1)
    filters._few_slope(p.images, p.fine, p.which, part[0], True)
    ours, ones = filters._few_join(part, p.which, True)
    weight = p.first.double().requires_grad_()
    assert_close(ours, gradient(F.conv2d(p.images.double(), weight), weight, wide(p.fine)))
    assert_close(ones, wide(p.fine).sum((0, 2, 3)))
    bias = p.draw(p.channels)
    drawn = filters._few_down(p.fine, p.first, bias, p.which)
    assert_close(drawn, F.conv_transpose2d(wide(p.fine), p.first.double(), bias.double()), ROUNDED)


def model_of(p: Problem, **options: Any) -> ConvAutoencoder:
    model = ConvAutoencoder(p.channels, features=p.features, kernel=p.side, generator=p.generator, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(generator=p.generator)
            parameter.copy_(parameter.bfloat16())
    return model.to(DEVICE)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of the kernels that are launched."""
    calls: list[str] = []

    def noted(name: str, *rest: Any) -> None:
        calls.append(name)
        run(name, *rest)

    monkeypatch.setattr(filters, "run", noted)
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_an_autoencoder_learns_as_in_float64(
    sizes: Any, bias: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, calls = Problem(sizes, generator), count_calls(monkeypatch)
    model, images = model_of(p, bias=bias).train(), p.images.sigmoid().bfloat16().float()
    exact = model_of(p, bias=bias).double().train()
    exact.load_state_dict(model.state_dict())
    drawn = torch.rand(p.batch, p.features, *p.which.coarse, generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model.loss(images, draw=lambda like: drawn)
    assert "window_up" in calls
    theirs = exact.loss(images.double(), draw=lambda like: drawn.double())
    assert_close(loss, theirs, ROUNDED)
    loss.backward()
    theirs.backward()
    for our, their in zip(model.parameters(), exact.parameters(), strict=True):
        assert_close(our.grad, their.grad, 3 * ROUNDED)
    model.eval()
    calls.clear()
    with torch.no_grad():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            features, back = model.encode(images), model(images)
        assert_close(features, exact.encode(images.double()), ROUNDED)
        assert_close(back, exact.eval()(images.double()), ROUNDED)
    assert calls.count("window_up") == 2


def test_a_painter_paints_as_in_float64(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    p, calls = Problem(SIZES[1], generator), count_calls(monkeypatch)
    model = model_of(p)
    painter, exact = Painter(model, p.size), Painter(model, p.size).double()
    features = wide(p.coarse).float().requires_grad_()
    exact_features = features.detach().double().requires_grad_()
    pull = p.draw(p.batch, p.channels, *p.size)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = painter.logits(features)
    theirs = exact.logits(exact_features)
    assert "window_down" in calls
    assert_close(ours, theirs, ROUNDED)
    (ours * pull).sum().backward()
    (theirs * pull).sum().backward()
    assert features.grad is not None
    assert features.grad.dtype == torch.float32
    assert_close(features.grad, exact_features.grad, 3 * ROUNDED)
    for our, their in zip(painter.parameters(), exact.parameters(), strict=True):
        assert_close(our.grad, their.grad, 3 * ROUNDED)


def test_what_does_not_fit_is_left_to_pytorch(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    p, calls = Problem(SIZES[0], generator), count_calls(monkeypatch)
    model_of(p)(p.images.sigmoid())
    odd = ConvAutoencoder(p.channels, features=12, kernel=p.side, generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        odd(p.images.sigmoid())
    assert calls == []


def test_what_fits() -> None:
    """bfloat16 autocast, and as many images as offsets of 32 bits reach."""
    model = ConvAutoencoder(features=16, kernel=9).to(DEVICE)
    one = torch.rand(1, 1, 28, 28).to(DEVICE)
    most = (2**31 - 1) // (81 * 28 * 28)

    def fits(images: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
        with torch.autocast(DEVICE, dtype=dtype):
            return filters.fits(images, model.first, model.second, (28, 28))

    assert fits(one)
    assert fits(one.half())
    assert not fits(one, torch.float16)
    assert not fits(one.double())
    assert fits(one.expand(most, -1, -1, -1))
    assert not fits(one.expand(most + 1, -1, -1, -1))
    assert not fits(one[:0])


@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (3, 9, 8), (2, 3, 2, 8)], ids=str)
def test_what_are_no_images_is_refused(shape: tuple[int, ...], generator: torch.Generator) -> None:
    model = ConvAutoencoder(3, features=16, kernel=2, generator=generator).to(DEVICE)
    images = torch.rand(shape).to(DEVICE)
    for see in (model, model.loss):
        with torch.autocast(DEVICE, dtype=torch.bfloat16), pytest.raises(ValueError, match="images must"):
            see(images)
