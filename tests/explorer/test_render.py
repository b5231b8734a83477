"""Codes from the positions of sliders, images from codes, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork
from poecaps import functional as F
from poecaps.code_density import DOMAINS
from poecaps.data import ImageSet
from poecaps.explorer.render import STEPS, ExplorerModel, Setting, as_pixels
from tests.networks import TINY

if TYPE_CHECKING:
    from poecaps.code_density import Domain

SOME = (Setting(1, (0.5, -2.25, 0.0, 1.0, 3.0), 1.4, negative=True), Setting(3, (1.0,), 0.6))


@pytest.fixture(params=["digits", "colours"])
def model(request: pytest.FixtureRequest) -> ExplorerModel:
    return cast("ExplorerModel", request.getfixturevalue(request.param))


def some_image(model: ExplorerModel) -> np.ndarray:
    if model.images is not None:
        return np.asarray(model.images.images[7])
    channels, height, width = model.network.architecture.image_shape
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_sliders_at_zero_are_the_mean_of_an_expert(model: ExplorerModel) -> None:
    z = model.preactivation([Setting(2)])
    assert torch.equal(z[2], model.network.code_density.mean[2])
    assert not z[:2].any()
    start = model.network.traverse(2, torch.zeros(1))[0, 0]
    assert np.array_equal(model.decode([Setting(2)]), as_pixels(start.detach().unsqueeze(0))[0])


def test_a_slider_moves_by_standard_deviations(model: ExplorerModel) -> None:
    moved = model.preactivation([Setting(0, (0.0, 2.0))]) - model.preactivation([Setting(0)])
    expected = torch.zeros_like(moved)
    expected[0, 1] = 2 * model.network.code_density.std[0, 1]
    torch.testing.assert_close(moved, expected)


def test_magnitude_scales_and_the_sign_flips(model: ExplorerModel) -> None:
    plain = model.preactivation([Setting(1, (1.0, -1.0))])
    torch.testing.assert_close(model.preactivation([Setting(1, (1.0, -1.0), 2.5)]), 2.5 * plain)
    assert torch.equal(model.preactivation([Setting(1, (1.0, -1.0), negative=True)]), -plain)


def test_mixed_experts_add_up(model: ExplorerModel) -> None:
    first, second = Setting(0, (1.0,)), Setting(2, (-1.0,), 0.5)
    both = model.preactivation([first, second])
    assert torch.equal(both, model.preactivation([first]) + model.preactivation([second]))


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_draw_is_the_networks_own(model: ExplorerModel, domain: Domain) -> None:
    generator = torch.Generator().manual_seed(11)
    expert = None if domain == "joint" else 1
    wanted = model.network.sample(1, domain, expert=expert, generator=generator)[0]
    drawn = F.squash(model.preactivation(model.draw(domain, 1, 11)))
    torch.testing.assert_close(drawn, wanted, atol=0.02, rtol=0)


def test_every_expert_has_a_typical_sample_of_its_own(model: ExplorerModel) -> None:
    for j in range(model.experts):
        alone = model.decode([Setting(j)])
        assert (
            np.abs(model.typical_images[j].astype(int) - alone).max() <= 1
        )  # in a batch, sums round otherwise
    assert len({each.tobytes() for each in model.typical_images}) == model.experts


def test_the_traversal_sheet_shows_what_each_slider_does(model: ExplorerModel) -> None:
    settings = (Setting(0, (0.5, 1.0), 1.2, negative=True), Setting(1))
    sheet = model.traverse(settings, 0)
    assert sheet.shape[:2] == (model.parameters, len(STEPS))
    moved = model.decode([Setting(0, (0.5, STEPS[5]), 1.2, negative=True), Setting(1)])
    assert np.abs(sheet[1, 5].astype(int) - moved).max() <= 1


def test_what_is_encoded_is_what_the_network_says(model: ExplorerModel) -> None:
    pixels = some_image(model)
    seen = model.encode(pixels)
    image = torch.from_numpy(np.moveaxis(pixels, -1, 0).astype(np.float32)).unsqueeze(0) / 255
    with torch.no_grad():
        code = model.network.encode(image)[0]
        torch.testing.assert_close(torch.tensor(seen.firing), code.norm(dim=-1))
        torch.testing.assert_close(
            torch.tensor([seen.free_energy]), model.network.free_energy(image)
        )
        assert np.array_equal(seen.reconstruction, as_pixels(model.network.reconstruct(image))[0])


def test_a_code_survives_the_sliders(model: ExplorerModel) -> None:
    seen = model.encode(some_image(model))
    again = model.decode(seen.settings)
    assert np.abs(again.astype(int) - seen.reconstruction).mean() < 3
    assert np.abs(model.decode([Setting(0)]).astype(int) - seen.reconstruction).mean() > 3


def test_all_that_an_expert_listens_to_lies_on_the_grid(model: ExplorerModel) -> None:
    routing = model.encode(some_image(model)).routing
    assert routing.shape == (model.experts, *model.grid)
    np.testing.assert_allclose(
        routing.sum((1, 2)), 1, rtol=1e-5
    )  # Σ_i c_ij = 1, and so for a chain of layers


def test_the_heat_map_lies_as_the_image_does(digits: ExplorerModel) -> None:
    """Cells whose field has the lower right corner: the coefficients of capsules it changes."""
    pixels = some_image(digits)
    other = pixels.copy()
    other[23:27, 23:27] = 255 - other[23:27, 23:27]
    images = torch.from_numpy(np.stack([pixels, other])).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        said = digits.network.activations(images)
        routing = digits.network.encoders[0].route(digits.network.capsules(images[:1]))  # type: ignore[operator]
    changed = (said[0] != said[1]).any(-1)
    seen = digits.encode(pixels).routing
    rows, columns = digits.grid
    reached = [
        (r, c) for r in range(rows) for c in range(columns) if 2 * r + 16 >= 23 and 2 * c + 16 >= 23
    ]
    assert seen[1][tuple(zip(*reached, strict=True))].sum() == pytest.approx(
        float(routing.coefficients[0, changed, 1].sum()), rel=1e-4
    )


def test_the_background_of_images_of_floats(digits: ExplorerModel) -> None:
    assert digits.images is not None
    white = (255 - digits.images.images).astype(np.float32) / 255
    assert replace(digits, images=ImageSet(white)).background == 1


@pytest.mark.parametrize(("margin", "halvings"), [(0, 0), (3, 0), (2, 1), (1, 2)])
def test_receptive_fields(margin: int, halvings: int, generator: torch.Generator) -> None:
    """The pixels that the features at a position depend on."""
    side = 4 * 17 - 2 * margin
    shape = replace(TINY, image_shape=(1, side, side), kernel_size=5)
    network = CapsuleNetwork(replace(shape, margin=margin, halvings=halvings), generator=generator)
    model = ExplorerModel("model", "runs/model", network)
    image = torch.rand(1, 1, side, side, generator=generator, requires_grad=True)
    features = network.autoencoder.encode(image)
    assert features.shape[2:] == model.grid
    for row, column in ((0, 1), (model.grid[0] - 1, 2)):
        (grad,) = torch.autograd.grad(features[0, :, row, column].sum(), image, retain_graph=True)
        for axis, position in ((0, row), (1, column)):
            first = model.first_pixel + model.stride * position
            read = range(max(0, first), min(side, first + model.receptive_field))
            assert grad[0, 0].any(1 - axis).nonzero().flatten().tolist() == list(read)


@pytest.mark.parametrize("settings", [SOME, ()])
def test_three_lines_of_python_make_exactly_this_picture(
    settings: tuple[Setting, ...], digits: ExplorerModel
) -> None:
    lines = digits.python(settings)
    assert len(lines.splitlines()) == 3
    names: dict[str, torch.Tensor] = {}
    exec(lines, names)
    assert np.array_equal(as_pixels(names["image"])[0], digits.decode(settings))
