"""Minimal filtering computes the convolutions of PyTorch and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from poecaps.autoencoder import ConvAutoencoder
from poecaps.kernels import winograd

# Side of the filters, height and width of the inputs; even and odd.
SIZES = [(9, 20, 20), (9, 24, 19), (5, 12, 13), (4, 11, 9), (9, 9, 9), (1, 5, 5)]


@pytest.mark.parametrize(("kernel_size", "height", "width"), SIZES)
def test_convolutions_and_their_gradients(
    kernel_size: int, height: int, width: int, generator: torch.Generator
) -> None:
    weight = torch.randn(5, 3, kernel_size, kernel_size, generator=generator)
    x = torch.randn(4, 3, height, width, generator=generator)
    y = nn.functional.conv2d(x, weight, stride=2)
    grad_y, grad_x = (torch.randn(*each.shape, generator=generator) for each in (y, x))
    padding = [(side - kernel_size) % 2 for side in (height, width)]
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (x, y, weight)]
        if dtype == torch.float32:
            filters = winograd.Filters(leaves[2], (y.shape[2], y.shape[3]))
            up = filters.conv2d(leaves[0])
            down = filters.conv_transpose2d(leaves[1], (height, width))
        else:
            up = nn.functional.conv2d(leaves[0], leaves[2], stride=2)
            down = nn.functional.conv_transpose2d(
                leaves[1], leaves[2], stride=2, output_padding=padding
            )
        torch.autograd.backward([up, down], [grad_y.to(dtype), grad_x.to(dtype)])
        found.append([up, down, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, exact in zip(*found, strict=True):
        assert ours.shape == exact.shape
        assert ((ours - exact).norm() / exact.norm()).item() < 1e-4


def test_gradients_of_gradients(generator: torch.Generator) -> None:
    """As a penalty on the gradient needs them, in the inputs and in the filters."""
    found: list[tuple[Tensor, ...]] = []
    sources = [torch.randn(4, 3, 5, 5, generator=generator)]
    sources += [torch.randn(2, 3, 12, 13, generator=generator)]
    sources += [torch.randn(2, 4, 4, 5, generator=generator)]
    with torch.inference_mode():  # the matrices are made once, whoever needs them first
        winograd._matrices.cache_clear()
        winograd.Filters(sources[0], (4, 5)).conv2d(sources[1])
    for ours in (True, False):
        weight, x, y = leaves = [each.clone().requires_grad_() for each in sources]
        if ours:
            filters = winograd.Filters(weight, (4, 5))
            up, down = filters.conv2d(x), filters.conv_transpose2d(y, (12, 13))
        else:
            up = nn.functional.conv2d(x, weight, stride=2)
            down = nn.functional.conv_transpose2d(y, weight, stride=2, output_padding=(1, 0))
        total = up.pow(3).sum() + down.pow(3).sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        penalty = torch.stack([each.square().sum() for each in first]).sum()
        found.append(torch.autograd.grad(penalty, leaves))
    for second, exact in zip(*found, strict=True):
        assert ((second - exact).norm() / exact.norm()).item() < 1e-4


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_of_images_use_pytorch(generator: torch.Generator) -> None:
    """torch.func and forward-mode differentiation go through a model with trainable filters."""
    model = ConvAutoencoder(features=winograd.MIN_CHANNELS, kernel_size=5, generator=generator)
    images = torch.rand(2, 1, 17, 16, generator=generator, requires_grad=True)
    (exact,) = torch.autograd.grad(model.encode(images).sum(), images)
    image = images.detach()
    found = torch.func.grad(lambda x: model.encode(x).sum())(image)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(image, torch.ones_like(image))
        tangent = forward_ad.unpack_dual(model.encode(dual).sum()).tangent
    torch.testing.assert_close(tangent, exact.sum(), rtol=1e-3, atol=1e-3)


def test_only_training_uses_it(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise features would depend on whether a gradient is needed later."""
    model = ConvAutoencoder(features=winograd.MIN_CHANNELS, kernel_size=5, generator=generator)
    images = torch.rand(2, 1, 17, 16, generator=generator)
    used: list[Tensor] = []
    make = winograd.Filters.__init__

    def note(filters: winograd.Filters, weight: Tensor, grid: tuple[int, int]) -> None:
        used.append(weight)
        make(filters, weight, grid)

    monkeypatch.setattr(winograd.Filters, "__init__", note)
    model.eval()
    with torch.no_grad():
        model(images)
    model.requires_grad_(False)
    model(images)
    assert used == []
    with winograd.in_training(), torch.no_grad():
        model(images)
    assert len(used) == 1
    model(images)
    assert len(used) == 1
    used.clear()
    model.requires_grad_()
    losses = [model.loss(images)]
    assert len(used) == 1  # encoder and decoder share it
    monkeypatch.setattr(winograd, "why_not", lambda *_: "for this test")
    losses.append(model.loss(images))
    assert len(used) == 1
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-9


@torch.no_grad()
def test_images_in_chunks(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient, so that the memory does not grow with the batch; also no images."""
    monkeypatch.setattr(winograd, "CHUNK", 2)
    model = ConvAutoencoder(features=winograd.MIN_CHANNELS, kernel_size=5, generator=generator)
    images = torch.rand(5, 1, 17, 16, generator=generator)
    model.eval()
    exact = model(images)
    with winograd.in_training():
        torch.testing.assert_close(model(images), exact, rtol=1e-3, atol=1e-4)
        assert model(images[:0]).shape == (0, 1, 17, 16)


def test_autocast_does_not_round_it(generator: torch.Generator) -> None:
    """Half precision has too few digits for the points."""
    weight = torch.randn(4, 4, 9, 9, generator=generator).requires_grad_()
    x = torch.randn(2, 4, 20, 20, generator=generator)
    exact = nn.functional.conv2d(x.double(), weight.double(), stride=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = winograd.Filters(weight, (6, 6)).conv2d(x)
        y.square().sum().backward()
    assert y.dtype == torch.float32
    assert ((y - exact).norm() / exact.norm()).item() < 1e-4
    assert weight.grad is not None
    (grad,) = torch.autograd.grad(exact.square().sum(), weight)
    assert ((weight.grad - grad).norm() / grad.norm()).item() < 1e-4


@pytest.mark.parametrize("channels", [1, 3])
def test_an_autoencoder_learns_under_autocast(channels: int, generator: torch.Generator) -> None:
    """The other convolutions are in bfloat16."""
    model = ConvAutoencoder(channels, features=32, generator=generator).eval()
    assert winograd.why_not(model.conv2_weight, (6, 6)) is None
    images = torch.rand(4, channels, 28, 28, generator=generator)
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        with (
            winograd.in_training(),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled),
        ):
            loss = model.loss(images)
        loss.backward()
        gradients.append(
            torch.cat([g.flatten() for p in model.parameters() if (g := p.grad) is not None])
        )
    exact, rounded = gradients
    assert ((rounded - exact).norm() / exact.norm()).item() < 0.05


@pytest.mark.parametrize(
    ("weight", "grid", "reason"),
    [
        (torch.empty(32, 32, 9, 9), (6, 6), None),
        (torch.empty(32, 32, 9, 9), (8, 8), None),
        (torch.empty(32, 32, 9, 9), (6, 9), "at most 8×8, but is 6×9"),
        (torch.empty(32, 8, 9, 9), (6, 6), "there are 8"),
        (torch.empty(32, 32, 9, 9, dtype=torch.float64), (6, 6), "torch.float64"),
        (torch.empty(32, 32, 9, 9, device="meta"), (6, 6), "not on 'meta'"),
    ],
)
def test_the_choice(weight: Tensor, grid: tuple[int, int], reason: str | None) -> None:
    found = winograd.why_not(weight, grid)
    assert (found is None) == (reason is None)
    if found is not None and reason is not None:
        assert reason in found
