"""Facts about the convolutional autoencoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poecaps.autoencoder import ConvAutoencoder, PixelDecoder


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((1, 28, 28), (6, 6)),
        ((3, 32, 32), (8, 8)),
        ((1, 28, 20), (6, 2)),
        ((1, 17, 18), (1, 1)),
        ((3, 29, 31), (7, 8)),
    ],
)
def test_any_image_size_goes_up_and_comes_back(
    shape: tuple[int, int, int], grid: tuple[int, int], generator: torch.Generator
) -> None:
    model = ConvAutoencoder(shape[0], features=6, generator=generator)
    images = torch.rand(2, *shape, generator=generator)
    features = model.encode(images)
    assert features.shape == (2, 6, *grid)
    assert model.grid(shape[1:]) == grid
    back = model.decode(features, shape[1:])
    assert back.shape == images.shape
    assert bool(((back > 0) & (back < 1)).all())


@pytest.mark.parametrize("size", [(28, 28), (29, 24)])
def test_the_decoder_has_the_encoders_filters_transposed(
    size: tuple[int, int], generator: torch.Generator
) -> None:
    """Without biases and with a negative slope of 1 both are linear: ⟨Ax, y⟩ = ⟨x, Aᵀy⟩."""
    model = ConvAutoencoder(
        features=5, bias=False, negative_slope=0.999999, generator=generator
    ).double()
    images = torch.randn(3, 1, *size, dtype=torch.float64, generator=generator)
    features = torch.randn(3, 5, *model.grid(size), dtype=torch.float64, generator=generator)
    up = (model.encode(images) * features).sum()
    down = (images * model.logits(features, size)).sum()
    torch.testing.assert_close(up, down, rtol=1e-3, atol=1e-3)
    assert sum(parameter.numel() for parameter in model.parameters()) == 5 * 81 + 5 * 5 * 81


@pytest.mark.parametrize(("channels", "bias"), [(1, True), (3, True), (1, False)])
def test_a_cpu_draws_what_transposed_convolutions_draw(
    channels: int, bias: bool, generator: torch.Generator
) -> None:
    model = ConvAutoencoder(channels, features=5, bias=bias, generator=generator).double()
    if bias:
        nn.init.normal_(model.deconv1_bias, generator=generator)  # type: ignore[arg-type]
    features = torch.randn(3, 5, 6, 4, dtype=torch.float64, generator=generator)
    hidden = nn.functional.conv_transpose2d(
        features, model.conv2_weight, model.deconv2_bias, stride=2, output_padding=1
    )
    hidden = nn.functional.leaky_relu(hidden, model.negative_slope)
    expected = nn.functional.conv_transpose2d(hidden, model.conv1_weight, model.deconv1_bias)
    ours = model.logits(features, (28, 24))
    torch.testing.assert_close(ours, expected)
    parameters = list(model.parameters())
    weight = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    gradients = (
        torch.autograd.grad((each * weight).sum(), parameters, allow_unused=True)
        for each in (ours, expected)
    )
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their)


def test_it_learns_to_reconstruct(generator: torch.Generator) -> None:
    """Shapes at random places: the error becomes a small part of that of the mean image."""
    images = torch.zeros(64, 1, 20, 20)
    for index, (row, column) in enumerate(
        torch.randint(2, 12, (64, 2), generator=generator).tolist()
    ):
        images[index, 0, row : row + 6, column : column + 6 - 4 * (index % 2)] = 1
    torch.manual_seed(0)
    model = ConvAutoencoder(features=16, dropout=0.1, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(images).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        error = (model(images) - images).square().mean()
    assert error < 0.3 * (images - images.mean(0)).square().mean()


def test_dropout_hides_features_in_training_alone(generator: torch.Generator) -> None:
    model = ConvAutoencoder(features=4, dropout=0.5, generator=generator)
    images = torch.rand(2, 1, 20, 20, generator=generator)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model.decode(model.encode(images), (20, 20)))
    torch.testing.assert_close(
        model.loss(images), nn.functional.binary_cross_entropy(model(images), images)
    )


def test_mistakes_are_named() -> None:
    model = ConvAutoencoder(features=4)
    with pytest.raises(
        ValueError,
        match=r"images must be at least 17×17 for filters of 9×9, but are 16×28; enlarge",
    ):
        model.encode(torch.zeros(1, 1, 16, 28))
    with pytest.raises(
        ValueError, match=r"images must have shape \(B, C=1, H, W\), but has shape \(1, 3, 28, 28\)"
    ):
        model.encode(torch.zeros(1, 3, 28, 28))
    with pytest.raises(ValueError, match=r"features must have shape \(B, F=4, h=6, w=6\)"):
        model.decode(torch.zeros(1, 4, 5, 5), (28, 28))
    with pytest.raises(ValueError, match="dropout must be below 1, but is 1"):
        ConvAutoencoder(dropout=1.0)
    with pytest.raises(
        ValueError, match="kernel_size must be a whole number of at least 1, but is 0"
    ):
        ConvAutoencoder(kernel_size=0)


def test_a_pixel_decoder_can_darken_pixels_that_no_feature_reaches(
    generator: torch.Generator,
) -> None:
    """Of 28 pixels the last is beyond the last stride: without a pixel bias, it is constant."""
    model = ConvAutoencoder(features=4, generator=generator)
    decoder = PixelDecoder(model, (28, 28))
    features = torch.randn(2, 4, 6, 6, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(decoder.logits(features), model.logits(features, (28, 28)))
        torch.testing.assert_close(*decoder.logits(features)[:, :, -1])
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        torch.sigmoid(decoder.logits(features)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.sigmoid(decoder.logits(features))[:, :, -1].max().item() < 0.1
        decoder.copy_from(model)
        torch.testing.assert_close(decoder.logits(features), model.logits(features, (28, 28)))
