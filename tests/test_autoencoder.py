"""Facts about the convolutional autoencoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from poecaps.autoencoder import ConvAutoencoder, PixelDecoder, Stem, overlap_shares
from poecaps.functional import laplacian_distance


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
        mean = torch.rand(1, 28, 28, generator=generator)
        decoder.start_border(mean)
        images = torch.sigmoid(decoder.logits(features))
    torch.testing.assert_close(images[:, :, -1], mean[:, -1].expand(2, 1, 28))
    torch.testing.assert_close(images[..., -1], mean[..., -1].expand(2, 1, 28))
    torch.testing.assert_close(
        images[..., :-1, :-1], model.decode(features, (28, 28))[..., :-1, :-1]
    )


@pytest.mark.parametrize(
    ("size", "options", "grid"),
    [
        ((28, 28), {"margin": 4}, (10, 10)),
        ((32, 31), {"margin": 1}, (9, 9)),
        ((64, 64), {"halvings": 1}, (8, 8)),
        ((96, 64), {"halvings": 2, "margin": 8}, (6, 2)),
    ],
)
def test_larger_images_and_margins_go_up_and_come_back(
    size: tuple[int, int],
    options: dict[str, Any],
    grid: tuple[int, int],
    generator: torch.Generator,
) -> None:
    model = ConvAutoencoder(3, features=6, generator=generator, **options)
    images = torch.rand(2, 3, *size, generator=generator)
    features = model.encode(images)
    assert features.shape == (2, 6, *grid)
    assert model.grid(size) == grid
    assert model.decode(features, size).shape == images.shape
    assert PixelDecoder(model, size).logits(features).shape == images.shape
    model.loss(images).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("margin", "is_reached"), [(0, False), (1, True), (4, True)])
def test_features_reach_the_last_row_of_an_image_with_a_margin(
    margin: int, is_reached: bool, generator: torch.Generator
) -> None:
    """Of an even side, so that the stride of 2 leaves out the last row of a decoder's output."""
    model = ConvAutoencoder(features=4, margin=margin, generator=generator)
    features = torch.randn(20, 4, *model.grid((28, 28)), generator=generator)
    rows = model.logits(features, (28, 28)).std(0).mean((0, 2))
    assert bool((rows[:-1] > 0.01).all())
    assert (rows[-1] > 0.01) == is_reached


def test_with_a_wide_margin_all_pixels_are_sums_of_as_many_filters() -> None:
    """Of equal features and filters; without a margin the corners are a small part of the rest."""
    for margin, share in ((0, 0.01), (8, 0.5)):
        model = ConvAutoencoder(features=4, kernel_size=5, margin=margin, bias=False)
        for weight in (model.conv1_weight, model.conv2_weight):
            nn.init.ones_(weight)
        logits = model.logits(torch.ones(1, 4, *model.grid((24, 24))), (24, 24))
        least, most = logits.aminmax()
        assert (least / most > share) == (margin > 0)


@pytest.mark.parametrize(
    ("kernel_size", "side"), [(9, 48), (9, 55), (5, 31), (4, 26), (3, 18), (2, 10)]
)
def test_overlap_shares_are_those_of_the_transposed_convolutions(
    kernel_size: int, side: int
) -> None:
    """Of filters of ones, a pixel is the number of those that overlap there."""
    model = ConvAutoencoder(features=1, kernel_size=kernel_size, bias=False)
    for weight in (model.conv1_weight, model.conv2_weight):
        nn.init.ones_(weight)
    logits = model.logits(torch.ones(1, 1, *model.grid((side, side))), (side, side))
    pairs = logits[0, 0].diagonal().sqrt()  # of a square, rows and columns have equally many
    inner = pairs[side // 2 : side // 2 + 2].min()  # an odd K: the next pixel has one more
    reached = pairs > 0
    expected = (pairs / inner).clamp(max=1)[reached]
    torch.testing.assert_close(overlap_shares(kernel_size, side)[reached], expected)


@pytest.mark.parametrize("margin", [4, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_with_even_overlap_equal_filters_decode_a_flat_image(margin: int, channels: int) -> None:
    model = ConvAutoencoder(channels, features=4, margin=margin, even_overlap=True)
    for weight in (model.conv1_weight, model.conv2_weight):
        nn.init.constant_(weight, 0.01)
    nn.init.constant_(model.deconv1_bias, 0.5)  # type: ignore[arg-type]
    features = torch.ones(1, 4, *model.grid((24, 30)))
    decoder = PixelDecoder(model, (24, 30))
    for logits in (model.logits(features, (24, 30)), decoder.logits(features)):
        # Of 9×9 filters with stride 2, 40 and 41 overlap in turn, in both directions.
        torch.testing.assert_close(logits, logits.mean().expand_as(logits), rtol=0.05, atol=0)
    model.even_overlap = False
    uneven = model.logits(features, (24, 30)) - 0.5
    assert uneven.min() < 0.5 * uneven.max()


def test_even_overlap_keeps_the_data_type() -> None:
    model = ConvAutoencoder(1, features=4, margin=8, halvings=1, even_overlap=True)
    model.to(torch.bfloat16).eval()
    assert model(torch.rand(2, 1, 32, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_flat_images_are_learned_without_a_frame(generator: torch.Generator) -> None:
    """Of images of one colour each, the border is reconstructed as well as the centre."""
    images = torch.rand(40, 1, 1, 1, generator=generator).expand(-1, 1, 24, 24)
    errors = []
    for even_overlap in (False, True):
        torch.manual_seed(0)
        model = ConvAutoencoder(
            features=8,
            kernel_size=5,
            margin=2,
            even_overlap=even_overlap,
            dropout=0.0,
            generator=torch.Generator().manual_seed(0),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(150):
            optimizer.zero_grad()
            model.loss(images).backward()
            optimizer.step()
        with torch.no_grad():
            back = model(images)
        centre = back[..., 8:16, 8:16].mean((2, 3))
        frame = torch.cat([back[:, :, 0], back[:, :, -1], back[..., 0], back[..., -1]], -1)
        errors.append((frame.mean(-1) - centre).abs().mean().item())
    assert errors[1] < 0.25 * errors[0], errors


def test_every_way_to_decode_evens_out_the_overlap(generator: torch.Generator) -> None:
    """The loss, the reconstruction and the pixel decoder; all but the bias is divided."""
    images = torch.rand(3, 1, 24, 21, generator=generator)
    plain = ConvAutoencoder(features=4, margin=4, generator=generator).eval()
    nn.init.constant_(plain.deconv1_bias, 0.3)  # type: ignore[arg-type]
    even = ConvAutoencoder(features=4, margin=4, even_overlap=True).eval()
    even.load_state_dict(plain.state_dict())
    features = plain.encode(images)
    assert torch.equal(even.encode(images), features)
    rows, columns = (overlap_shares(9, side + 8)[4:-4] for side in (24, 21))
    expected = (plain.logits(features, (24, 21)) - 0.3) / torch.outer(rows, columns) + 0.3
    torch.testing.assert_close(even.logits(features, (24, 21)), expected)
    torch.testing.assert_close(even(images), torch.sigmoid(expected))
    torch.testing.assert_close(PixelDecoder(even, (24, 21)).logits(features), expected)
    torch.testing.assert_close(
        even.loss(images), nn.functional.binary_cross_entropy_with_logits(expected, images)
    )


def test_halvings_need_sides_that_can_be_halved() -> None:
    model = ConvAutoencoder(features=4, halvings=2, margin=1)
    with pytest.raises(
        ValueError, match="multiples of 4, but have 66×66; scale them, or use fewer"
    ):
        model.grid((64, 64))
    with pytest.raises(ValueError, match="but are 14×14"):
        model.grid((14, 14))
    with pytest.raises(ValueError, match="halvings must be a whole number from 0 to 10"):
        ConvAutoencoder(halvings=11)


def test_whitened_colours_have_the_same_variance_and_come_back(
    generator: torch.Generator,
) -> None:
    mixing = torch.tensor([[0.1, 0.02, 0.0], [0.1, -0.01, 0.01], [0.1, 0.0, -0.02]])
    images = 0.5 + torch.einsum(
        "bchw,dc->bdhw", torch.randn(6, 3, 20, 20, generator=generator).clamp(-3, 3), mixing
    )
    stem = Stem(3, 4, colour_whitening=True)
    stem.fit_colours(images.split(4))
    white = stem.encode(images).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(white.T.cov(), torch.eye(3), rtol=0, atol=1e-3)
    assert white.mean(0).abs().max() < 1e-4
    mean = images.mean((0, 2, 3)).view(3, 1, 1)
    expected = 4 * (images - mean) + torch.logit(mean)
    torch.testing.assert_close(stem.decode(stem.encode(images)), expected, rtol=0, atol=1e-3)


def test_a_pixel_decoder_copies_the_stem(generator: torch.Generator) -> None:
    model = ConvAutoencoder(
        3, features=4, halvings=1, margin=2, colour_whitening=True, generator=generator
    )
    model.stem.fit_colours([torch.rand(4, 3, 8, 8, generator=generator)])
    features = torch.randn(2, 4, *model.grid((36, 36)), generator=generator)
    decoder = PixelDecoder(model, (36, 36))
    torch.testing.assert_close(decoder.logits(features), model.logits(features, (36, 36)))
    decoder.stem.weights[0].data.zero_()
    assert model.stem.weights[0].any()


def test_the_loss_of_several_scales_is_added(generator: torch.Generator) -> None:
    model = ConvAutoencoder(features=4, generator=generator).eval()
    images = torch.rand(3, 1, 20, 20, generator=generator)
    added = model.loss(images, multi_scale=0.5) - model.loss(images)
    torch.testing.assert_close(added, 0.5 * laplacian_distance(model(images), images))
