"""The Triton convolutions agree with float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from poecaps.autoencoder import ConvAutoencoder, PixelDecoder
from poecaps.kernels import convolution
from poecaps.kernels.triton import conv1, conv2, conv_common
from poecaps.kernels.triton.conv_common import Epilogue, GemmConfig, ProblemSize, problem_size
from poecaps.kernels.triton.launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 1e-4  # float32 sums of bfloat16 products
ROUNDED = 1e-2  # bfloat16; the interpreter truncates where a GPU rounds

# Images, channels, features, side of the filters and size of the images: rows that do not fill a
# block, even sides, a batch larger than a block.
SIZES = [
    (3, 1, 16, 3, (8, 9)),
    (2, 3, 32, 3, (7, 8)),
    (2, 1, 48, 4, (9, 8)),
    (19, 1, 16, 2, (5, 4)),
]


class Problem:
    """Random grids and filters, in the layout of the kernels."""

    def __init__(
        self, sizes: tuple[int, int, int, int, tuple[int, int]], generator: torch.Generator
    ) -> None:
        self.batch, self.channels, self.features, self.kernel_size, self.image_size = sizes
        self.generator = generator
        conv1_weight = self.randn(self.features, self.channels, self.kernel_size, self.kernel_size)
        conv2_weight = self.randn(self.features, self.features, self.kernel_size, self.kernel_size)
        self.size: ProblemSize = problem_size(conv1_weight, self.image_size)
        self.conv1_weight = conv1_weight.contiguous(memory_format=torch.channels_last)
        self.conv2_weight = conv2_weight.to(torch.bfloat16, memory_format=torch.channels_last)
        self.hidden = self.randn(self.batch, *self.size.hidden, self.features).bfloat16()
        self.grid = self.randn(self.batch, *self.size.grid, self.features).bfloat16()
        self.images = self.randn(self.batch, self.channels, *self.image_size)
        self.padding = [(side - self.kernel_size) % 2 for side in self.size.hidden]

    def randn(self, *shape: int) -> Tensor:
        """Draw numbers that bfloat16 represents exactly."""
        return torch.randn(shape, generator=self.generator).bfloat16().float().to(DEVICE)


def to_nchw(grid: Tensor) -> Tensor:
    """Return a grid (B, h, w, F) as (B, F, h, w), float64."""
    return grid.permute(0, 3, 1, 2).double()


def gradient(out: Tensor, of: Tensor, grad_out: Tensor) -> Tensor:
    return torch.autograd.grad(out, of, grad_out)[0]


def assert_close(ours: Tensor | None, exact: Tensor | None, bound: float = EXACT) -> None:
    assert ours is not None
    assert exact is not None
    assert ours.shape == exact.shape
    assert ((ours.double() - exact).norm() / exact.norm()).item() < bound


@pytest.fixture(params=SIZES, ids=str)
def problem(request: pytest.FixtureRequest, generator: torch.Generator) -> Problem:
    return Problem(request.param, generator)


def test_conv2(problem: Problem) -> None:
    p = problem
    exact = F.conv2d(to_nchw(p.hidden), p.conv2_weight.double(), stride=2)
    out, sums = conv2.conv2(p.hidden, p.conv2_weight, p.size, Epilogue(0.2), torch.float32)
    assert_close(out.permute(0, 3, 1, 2), exact)
    assert sums is None

    bias = p.randn(p.features)
    uniform = torch.rand(p.batch, p.features, *p.size.grid, generator=p.generator).to(DEVICE)
    epilogue = Epilogue(0.2, bias, leaky_relu=True, uniform=uniform, dropout=0.25)
    out, _ = conv2.conv2(p.hidden, p.conv2_weight, p.size, epilogue, torch.float32)
    activated = F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2)
    assert_close(out.permute(0, 3, 1, 2), activated * (uniform >= 0.25) / 0.75)

    epilogue = Epilogue(0.2, activation=p.grid)
    out, sums = conv2.conv2(
        p.hidden, p.conv2_weight, p.size, epilogue, torch.float32, sum_columns=True
    )
    expected = torch.where(to_nchw(p.grid) > 0, exact, 0.2 * exact)
    assert_close(out.permute(0, 3, 1, 2), expected)
    assert_close(sums, expected.sum((0, 2, 3)))


@pytest.mark.parametrize("max_taps", [1, 1000])
def test_conv2_transpose(problem: Problem, max_taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without positions that two programs share."""
    p = problem
    monkeypatch.setattr(conv2, "MAX_TAPS", max_taps)
    monkeypatch.setattr(conv2, "CONV_TRANSPOSE", GemmConfig(programs_per_sm=10**6))
    exact = F.conv_transpose2d(
        to_nchw(p.grid), p.conv2_weight.double(), stride=2, output_padding=p.padding
    )
    bias = p.randn(p.features)
    epilogue = Epilogue(0.2, bias, leaky_relu=True)
    out = conv2.conv2_transpose(p.grid, p.conv2_weight, p.size, epilogue, torch.float32)
    activated = F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2)
    assert_close(out.permute(0, 3, 1, 2), activated)
    epilogue = Epilogue(0.2, activation=p.hidden)
    out = conv2.conv2_transpose(p.grid, p.conv2_weight, p.size, epilogue, torch.float32)
    expected = torch.where(to_nchw(p.hidden) > 0, exact, 0.2 * exact)
    assert_close(out.permute(0, 3, 1, 2), expected)


def test_conv2_weight_grad(problem: Problem) -> None:
    p = problem
    hidden, grid = p.randn(*p.hidden.shape).bfloat16(), p.randn(*p.grid.shape).bfloat16()
    weight = torch.zeros_like(p.conv2_weight, dtype=torch.float64).requires_grad_()
    one = gradient(F.conv2d(to_nchw(p.hidden), weight, stride=2), weight, to_nchw(p.grid))
    other = gradient(F.conv2d(to_nchw(hidden), weight, stride=2), weight, to_nchw(grid))
    assert_close(conv2.conv2_weight_grad([(p.grid, p.hidden)], p.size), one)
    both = conv2.conv2_weight_grad([(p.grid, p.hidden), (grid, hidden)], p.size)
    assert_close(both, one + other)


@pytest.mark.parametrize("splits", [1, 2, 100, 300, 1500])
def test_sum_splits(splits: int, generator: torch.Generator) -> None:
    partial = torch.randn(splits, 3, 47, generator=generator).to(DEVICE)
    assert_close(conv_common.sum_splits(partial), partial.double().sum(0))


def test_conv1(problem: Problem) -> None:
    p = problem
    exact = F.conv2d(p.images.double(), p.conv1_weight.double())
    bias = p.randn(p.features)
    epilogue = Epilogue(0.2, bias, leaky_relu=True)
    out, sums = conv1.conv1(p.images, p.conv1_weight, p.size, epilogue, torch.float32)
    activated = F.leaky_relu(exact + bias.double().view(-1, 1, 1), 0.2)
    assert_close(out.permute(0, 3, 1, 2), activated)
    assert sums is None
    epilogue = Epilogue(0.2, activation=p.hidden)
    out, sums = conv1.conv1(
        p.images, p.conv1_weight, p.size, epilogue, torch.float32, sum_columns=True
    )
    expected = torch.where(to_nchw(p.hidden) > 0, exact, 0.2 * exact)
    assert_close(out.permute(0, 3, 1, 2), expected)
    assert_close(sums, expected.sum((0, 2, 3)))


def test_conv1_weight_grad(problem: Problem) -> None:
    p = problem
    weight = p.conv1_weight.double().requires_grad_()
    exact = gradient(F.conv2d(p.images.double(), weight), weight, to_nchw(p.hidden))
    buffer = conv1.conv1_weight_grad_buffer(p.hidden, p.size, uses=1)
    conv1.conv1_weight_grad(p.images, p.hidden, p.size, sum_x=True, out=buffer[0])
    grad_weight, grad_bias = conv1.sum_conv1_weight_grad(buffer, p.size, has_bias=True)
    assert_close(grad_weight, exact)
    assert_close(grad_bias, to_nchw(p.hidden).sum((0, 2, 3)))


def test_conv1_transpose(problem: Problem) -> None:
    p = problem
    bias = p.randn(p.channels)
    exact = F.conv_transpose2d(to_nchw(p.hidden), p.conv1_weight.double(), bias.double())
    assert_close(conv1.conv1_transpose(p.hidden, p.conv1_weight, bias, p.size), exact, ROUNDED)


def model_of(p: Problem, **options: Any) -> ConvAutoencoder:
    model = ConvAutoencoder(
        p.channels, features=p.features, kernel_size=p.kernel_size, generator=p.generator, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(generator=p.generator)
            parameter.copy_(parameter.bfloat16())
    return model.to(DEVICE)


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the kernels that are launched."""
    launched: list[Any] = []

    def recorded(kernel: Any, *rest: Any) -> None:
        launched.append(kernel)
        launch(kernel, *rest)

    for module in (conv_common, conv1, conv2):
        monkeypatch.setattr(module, "launch", recorded)
    return launched


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_an_autoencoder_learns_as_in_float64(
    sizes: Any, bias: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, launched = Problem(sizes, generator), record_launches(monkeypatch)
    model, images = model_of(p, bias=bias).train(), p.images.sigmoid().bfloat16().float()
    exact = model_of(p, bias=bias).double().train()
    exact.load_state_dict(model.state_dict())
    uniform = torch.rand(p.batch, p.features, *p.size.grid, generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model.loss(images, uniform=uniform)
    assert conv2.conv2_kernel in launched
    expected = exact.loss(images.double(), uniform=uniform.double())
    assert_close(loss, expected, ROUNDED)
    loss.backward()
    expected.backward()
    for our, their in zip(model.parameters(), exact.parameters(), strict=True):
        assert_close(our.grad, their.grad, 3 * ROUNDED)
    model.eval()
    launched.clear()
    with torch.no_grad():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            features, images_again = model.encode(images), model(images)
        assert_close(features, exact.encode(images.double()), ROUNDED)
        assert_close(images_again, exact.eval()(images.double()), ROUNDED)
    assert launched.count(conv2.conv2_kernel) == 2


def test_dropout_is_drawn_where_no_numbers_are_given(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, launched = Problem(SIZES[0], generator), record_launches(monkeypatch)
    model, images = model_of(p, dropout=0.5).train(), p.images.sigmoid()
    with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad():
        assert not torch.equal(model(images), model(images))
        model.eval()
        assert torch.equal(model(images), model(images))
    assert conv2.conv2_kernel in launched


def test_a_pixel_decoder_learns_as_in_float64(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, launched = Problem(SIZES[1], generator), record_launches(monkeypatch)
    model = model_of(p)
    decoder, exact = (
        PixelDecoder(model, p.image_size),
        PixelDecoder(model, p.image_size).double(),
    )
    features = to_nchw(p.grid).float().requires_grad_()
    exact_features = features.detach().double().requires_grad_()
    grad_out = p.randn(p.batch, p.channels, *p.image_size)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = decoder.logits(features)
    expected = exact.logits(exact_features)
    assert conv2.conv2_transpose_kernel in launched
    assert_close(ours, expected, ROUNDED)
    (ours * grad_out).sum().backward()
    (expected * grad_out).sum().backward()
    assert features.grad is not None
    assert features.grad.dtype == torch.float32
    assert_close(features.grad, exact_features.grad, 3 * ROUNDED)
    for our, their in zip(decoder.parameters(), exact.parameters(), strict=True):
        assert_close(our.grad, their.grad, 3 * ROUNDED)


def test_other_calls_are_served_by_pytorch(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without autocast, and with a number of features that the kernels cannot take."""
    p, launched = Problem(SIZES[0], generator), record_launches(monkeypatch)
    model_of(p)(p.images.sigmoid())
    odd = ConvAutoencoder(
        p.channels, features=12, kernel_size=p.kernel_size, generator=generator
    ).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        odd(p.images.sigmoid())
    assert launched == []


def test_why_not() -> None:
    """Each obstacle has its reason; the most images are those that 32-bit offsets reach."""
    parameters = ConvAutoencoder(features=16, kernel_size=9).to(DEVICE)._conv_parameters()
    one = torch.rand(1, 1, 28, 28).to(DEVICE)
    most = (2**31 - 1) // (81 * 28 * 28)

    def why_not(images: Tensor, dtype: torch.dtype = torch.bfloat16, **options: bool) -> str | None:
        with torch.autocast(DEVICE, dtype=dtype):
            return convolution.why_not(images, parameters, (28, 28), **options)

    assert why_not(one) is None
    assert why_not(one.half()) is None
    assert why_not(one.expand(most, -1, -1, -1)) is None
    for reason, expected in [
        (why_not(one, torch.float16), "need torch.autocast"),
        (convolution.why_not(one, parameters, (28, 28)), "need torch.autocast"),
        (why_not(one.double()), "use float32"),
        (why_not(one.expand(most + 1, -1, -1, -1)), "use smaller batches"),
        (why_not(one[:0]), "at least one image"),
        (why_not(one, needs_grad=True), "use torch.no_grad"),
    ]:
        assert reason is not None
        assert expected in reason


@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (3, 9, 8), (2, 3, 2, 8)], ids=str)
def test_invalid_images_raise_an_error(shape: tuple[int, ...], generator: torch.Generator) -> None:
    model = ConvAutoencoder(3, features=16, kernel_size=2, generator=generator).to(DEVICE)
    images = torch.rand(shape).to(DEVICE)
    for call in (model, model.loss):
        with (
            torch.autocast(DEVICE, dtype=torch.bfloat16),
            pytest.raises(ValueError, match="images must"),
        ):
            call(images)
