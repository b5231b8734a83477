"""The whole model: encoding, decoding, the generation domains, traversals and argument errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from poecaps import Architecture, CapsuleNetwork, squash, unsquash
from poecaps._modules import BATCH_SIZE
from poecaps.code_density import DOMAINS
from tests.networks import TINY, tiny_network


@pytest.fixture
def network(generator: torch.Generator) -> CapsuleNetwork:
    return tiny_network(generator)


def test_a_pixel_decoder_replaces_the_decoder_of_the_autoencoder(
    generator: torch.Generator,
) -> None:
    plain = CapsuleNetwork(TINY, generator=generator).eval()
    network = CapsuleNetwork(replace(TINY, pixel_decoder=True)).eval()
    network.load_state_dict(plain.state_dict(), strict=False)
    assert network.pixel_decoder is not None
    network.pixel_decoder.copy_from(network.autoencoder)
    code = plain.sample(5, "complete", generator=generator)
    torch.testing.assert_close(network.decode(code), plain.decode(code))
    with torch.no_grad():
        network.pixel_decoder.conv2_weight.mul_(2)
    assert not torch.allclose(network.decode(code), plain.decode(code), atol=1e-4)
    images = torch.rand(2, *TINY.image_shape, generator=generator)
    torch.testing.assert_close(network.encode(images), plain.encode(images))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 28, 20)])
def test_images_of_any_kind_go_through(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    network = CapsuleNetwork(
        replace(TINY, image_shape=shape, experts=((6, 5), (3, 4))), generator=generator
    ).eval()
    images = torch.rand(2, *shape, generator=generator)
    assert network.encode(images).shape == (2, 3, 4)
    assert network.reconstruct(images).shape == images.shape
    assert network.free_energy(images).shape == (2,)
    for domain in DOMAINS:
        assert network.generate(2, domain, generator=generator).shape == images.shape


def test_each_position_holds_its_own_capsules(
    network: CapsuleNetwork, generator: torch.Generator
) -> None:
    """Capsule i is at position i // 2 (8 features make 2 capsules of 4), channels in order."""
    images = torch.rand(1, 1, 20, 19, generator=generator)
    features = network.autoencoder.encode(images)
    a = network.activations(images)
    rows, columns = features.shape[2:]
    for row, column, half in itertools.product(range(rows), range(columns), range(2)):
        expected = features[0, 4 * half : 4 * half + 4, row, column]
        torch.testing.assert_close(a[0, (row * columns + column) * 2 + half], expected)
    drawn = network.decode_capsules(network.capsules(images))
    torch.testing.assert_close(
        drawn, network.autoencoder.decode(features, (20, 19)), rtol=1e-3, atol=1e-4
    )


def test_domains(network: CapsuleNetwork, generator: torch.Generator) -> None:
    for domain in ("complete", "restricted", "learned"):
        code = network.sample(300, domain, expert=1, generator=generator)
        assert bool((code[:, [0, 2]] == 0).all())
        assert bool((code[:, 1].norm(dim=-1) > 0).all())
    agreement = network.code_density.mean_direction[1]
    restricted = network.sample(300, "restricted", expert=1, generator=generator)[:, 1] @ agreement
    complete = network.sample(300, "complete", expert=1, generator=generator)[:, 1] @ agreement
    assert bool((restricted >= 0).all())
    assert 0.3 < (complete > 0).float().mean().item() < 0.7
    assert bool((network.sample(50, "joint", generator=generator).norm(dim=-1) > 0).all())
    anyone = network.sample(300, "learned", generator=generator).norm(dim=-1) > 0
    assert bool((anyone.sum(1) == 1).all())
    assert bool((anyone.sum(0) > 50).all())


def test_a_traversal_goes_from_its_start_in_standard_deviations(
    network: CapsuleNetwork, generator: torch.Generator
) -> None:
    offsets = torch.tensor([-1.5, 0.0, 2.0])
    start = squash(torch.randn(3, 5, generator=generator))
    images = network.traverse(2, offsets, start=start)
    assert images.shape == (5, 3, 1, 20, 19)
    z = unsquash(start)
    z[2, 4] += 2.0 * network.code_density.std[2, 4]
    torch.testing.assert_close(
        images[4, 2], network.decode(squash(z).unsqueeze(0))[0], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        images[:, 1], network.decode(start.unsqueeze(0)).expand(5, -1, -1, -1)
    )
    assert torch.equal(network.traverse(2, [-1.5, 0, 2], start=start), images)
    assert torch.equal(network.traverse(2), network.traverse(2, (-3, -2, -1, 0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r"offsets must have shape \(S\), but has shape \(\)"):
        network.traverse(2, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert must be a whole number from 0 to 2"):
        network.traverse(3, offsets)
    with pytest.raises(ValueError, match="start must have shape"):
        network.traverse(0, offsets, start=start[:2])


def test_the_same_seed_gives_the_same_images(network: CapsuleNetwork) -> None:
    first, second, other = (
        network.generate(3, "joint", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_generated_images_have_no_gradient(network: CapsuleNetwork) -> None:
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not network.generate(2).requires_grad
    assert not network.traverse(0, torch.zeros(1)).requires_grad
    assert network.decode(network.sample(2)).requires_grad


def test_errors_name_the_argument(network: CapsuleNetwork) -> None:
    with pytest.raises(
        ValueError, match=r"domain must be one of .*, but is 'joined'; did you mean 'joint'"
    ):
        network.generate(1, "joined")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert must be a whole number from 0 to 2, but is 3"):
        network.generate(1, "learned", expert=3)
    with pytest.raises(ValueError, match="expert must be None in the domain 'joint'"):
        network.generate(1, "joint", expert=1)
    with pytest.raises(ValueError, match="features must be a multiple of capsule_dim"):
        CapsuleNetwork(replace(TINY, capsule_dim=3))


@pytest.mark.parametrize("method", ["encode", "reconstruct", "free_energy"])
def test_images_of_another_size_raise_an_error(network: CapsuleNetwork, method: str) -> None:
    call = getattr(network, method)
    for height, width in ((32, 32), (19, 20), (5, 5)):
        with pytest.raises(ValueError, match=f"^images must be 20×19, but are {height}×{width}$"):
            call(torch.rand(2, 1, height, width))
    with pytest.raises(ValueError, match="C must be that of the model"):
        call(torch.rand(2, 20, 19, 1))
    with pytest.raises(ValueError, match=r"images\.unsqueeze\(0\)"):
        call(torch.rand(1, 20, 19))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, but is list"):
        call([0.0])


@pytest.mark.parametrize("method", ["encode", "reconstruct", "free_energy"])
def test_pixels_outside_0_to_1_raise_an_error(network: CapsuleNetwork, method: str) -> None:
    call, pixels = getattr(network, method), torch.linspace(0, 1, 380).view(1, 1, 20, 19)
    with pytest.raises(
        ValueError, match=r"^images must be from 0 to 1, but are from 0 to 255; .* images / 255$"
    ):
        call(255 * pixels)
    with pytest.raises(ValueError, match="but are from -1 to 1; rescale them"):
        call(2 * pixels - 1)
    with pytest.raises(ValueError, match="but are from nan to nan"):
        call(pixels / pixels)
    with pytest.raises(TypeError, match=r"dtype is torch\.uint8; .* images\.float\(\) / 255"):
        call((255 * pixels).to(torch.uint8))
    call(1.0005 * pixels)  # rounding
    assert len(network.activations(255 * pixels)) == 1  # not checked in training


def test_batches_of_large_images_are_divided(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such that no array has more numbers than one image may have."""
    network = tiny_network(generator)
    assert network.images_at_once() == BATCH_SIZE
    whole, rows = network.generate(7, generator=generator.manual_seed(0)), network.traverse(0)
    largest = 12 * 11 * 8  # what the first convolution computes
    monkeypatch.setattr("poecaps.network.MAX_NUMBERS", 3 * largest)
    assert network.images_at_once() == 3
    assert network.images_at_once(2) == 2
    counts, decode = list[int](), network.decode

    def counted(code: torch.Tensor) -> torch.Tensor:
        counts.append(len(code))
        return decode(code)

    monkeypatch.setattr(network, "decode", counted)
    torch.testing.assert_close(network.generate(7, generator=generator.manual_seed(0)), whole)
    assert counts == [3, 3, 1]
    torch.testing.assert_close(network.traverse(0), rows)
    assert max(counts) == 3
    monkeypatch.setattr("poecaps.network.MAX_NUMBERS", 1)
    assert network.images_at_once() == 1


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"image_shape": (3, 3000, 3000), "halvings": 3}, 64 * 1500**2),
        ({"image_shape": (1, 4096, 4096), "features": 64, "halvings": 4}, 32 * 2048**2),
        ({"image_shape": (1, 1400, 1400)}, 128 * 1392**2),
        ({"image_shape": (1, 28, 28), "margin": 4}, 128 * 28**2),
        ({"image_shape": (3, 64, 64), "halvings": 2, "features": 2, "capsule_dim": 2}, 3 * 64**2),
    ],
)
def test_images_of_a_few_thousand_pixels_are_valid(changes: Any, largest: int) -> None:
    architecture = Architecture(**changes)
    architecture.validate()
    assert architecture.largest_array() == largest
