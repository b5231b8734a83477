"""Codes from the positions of sliders, images from codes, and back."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from poecaps import functional as F
from poecaps.explorer.render import STEPS, ExplorerModel, Setting, as_pixels
from poecaps.network import DOMAINS

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps.network import Domain

SOME = (Setting(1, (0.5, -2.25, 0.0, 1.0, 3.0), 1.4, negative=True), Setting(3, (1.0,), 0.6))


@pytest.fixture(params=["digits", "colours"])
def explored(request: pytest.FixtureRequest) -> ExplorerModel:
    return cast("ExplorerModel", request.getfixturevalue(request.param))


def some_image(explored: ExplorerModel) -> np.ndarray:
    if explored.images is not None:
        return np.asarray(explored.images.images[7])
    channels, height, width = explored.network.architecture.image_shape
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_sliders_at_zero_are_the_mean_of_an_expert(explored: ExplorerModel) -> None:
    z = explored.preactivation([Setting(2)])
    assert torch.equal(z[2], explored.network.code_density.mean[2])
    assert not z[:2].any()
    start = explored.network.traverse(2, torch.zeros(1))[0, 0]
    assert np.array_equal(explored.decode([Setting(2)]), as_pixels(start.detach().unsqueeze(0))[0])


def test_a_slider_moves_by_standard_deviations(explored: ExplorerModel) -> None:
    moved = explored.preactivation([Setting(0, (0.0, 2.0))]) - explored.preactivation([Setting(0)])
    expected = torch.zeros_like(moved)
    expected[0, 1] = 2 * explored.network.code_density.std[0, 1]
    torch.testing.assert_close(moved, expected)


def test_magnitude_scales_and_the_sign_flips(explored: ExplorerModel) -> None:
    plain = explored.preactivation([Setting(1, (1.0, -1.0))])
    torch.testing.assert_close(explored.preactivation([Setting(1, (1.0, -1.0), 2.5)]), 2.5 * plain)
    assert torch.equal(explored.preactivation([Setting(1, (1.0, -1.0), negative=True)]), -plain)


def test_mixed_experts_add_up(explored: ExplorerModel) -> None:
    first, second = Setting(0, (1.0,)), Setting(2, (-1.0,), 0.5)
    both = explored.preactivation([first, second])
    assert torch.equal(both, explored.preactivation([first]) + explored.preactivation([second]))


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_draw_is_the_networks_own(explored: ExplorerModel, domain: Domain) -> None:
    generator = torch.Generator().manual_seed(11)
    expert = None if domain == "joint" else 1
    wanted = explored.network.sample(1, domain, expert=expert, generator=generator)[0]
    drawn = F.squash(explored.preactivation(explored.draw(domain, 1, 11)))
    torch.testing.assert_close(drawn, wanted, atol=0.02, rtol=0)


def test_every_expert_has_a_typical_sample_of_its_own(explored: ExplorerModel) -> None:
    for j in range(explored.experts):
        alone = explored.decode([Setting(j)])
        assert (
            np.abs(explored.shelf[j].astype(int) - alone).max() <= 1
        )  # in a batch, sums round otherwise
    assert len({each.tobytes() for each in explored.shelf}) == explored.experts


def test_the_traversal_sheet_shows_what_each_slider_does(explored: ExplorerModel) -> None:
    settings = (Setting(0, (0.5, 1.0), 1.2, negative=True), Setting(1))
    sheet = explored.traverse(settings, 0)
    assert sheet.shape[:2] == (explored.parameters, len(STEPS))
    moved = explored.decode([Setting(0, (0.5, STEPS[5]), 1.2, negative=True), Setting(1)])
    assert np.abs(sheet[1, 5].astype(int) - moved).max() <= 1


def test_what_is_encoded_is_what_the_network_says(explored: ExplorerModel) -> None:
    pixels = some_image(explored)
    seen = explored.encode(pixels)
    image = torch.from_numpy(np.moveaxis(pixels, -1, 0).astype(np.float32)).unsqueeze(0) / 255
    with torch.no_grad():
        code = explored.network.encode(image)[0]
        torch.testing.assert_close(torch.tensor(seen.firing), code.norm(dim=-1))
        torch.testing.assert_close(
            torch.tensor([seen.free_energy]), explored.network.free_energy(image)
        )
        assert np.array_equal(
            seen.reconstruction, as_pixels(explored.network.reconstruct(image))[0]
        )


def test_a_code_survives_the_sliders(explored: ExplorerModel) -> None:
    seen = explored.encode(some_image(explored))
    again = explored.decode(seen.settings)
    assert np.abs(again.astype(int) - seen.reconstruction).mean() < 3
    assert np.abs(explored.decode([Setting(0)]).astype(int) - seen.reconstruction).mean() > 3


def test_all_that_an_expert_listens_to_lies_on_the_grid(explored: ExplorerModel) -> None:
    routing = explored.encode(some_image(explored)).routing
    assert routing.shape == (explored.experts, *explored.grid)
    np.testing.assert_allclose(
        routing.sum((1, 2)), 1, rtol=1e-5
    )  # Σ_i c_ij = 1, and so for a chain of layers


def test_the_heat_map_lies_as_the_image_does(digits: ExplorerModel) -> None:
    """The cells that reach the lower right corner show the coefficients of the capsules that change with it."""
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


def test_three_lines_of_python_make_exactly_this_picture(digits: ExplorerModel, tmp_path: Path) -> None:
    lines = digits.python(SOME)
    assert len(lines.splitlines()) == 3
    script = f"{lines}\nimport numpy\nnumpy.save({str(tmp_path / 'image.npy')!r}, image.numpy())\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    image = torch.from_numpy(np.load(tmp_path / "image.npy"))
    assert np.array_equal(as_pixels(image)[0], digits.decode(SOME))


def test_python_lines_without_an_expert_still_run(digits: ExplorerModel) -> None:
    names: dict[str, torch.Tensor] = {}
    exec(digits.python(()), names)
    assert np.array_equal(as_pixels(names["image"])[0], digits.decode(()))
