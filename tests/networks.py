"""Networks that several tests use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from poecaps import Architecture, CapsuleNetwork, sampling, squash
from poecaps.options import DensityOptions

if TYPE_CHECKING:
    import pytest

    from poecaps.sampling import Samples

TINY = Architecture(
    image_shape=(1, 20, 19),
    features=8,
    capsule_dim=4,
    experts=((3, 5),),
    joint_components=4,
    expert_components=2,
)
DENSITY = DensityOptions(experts=(3, 4), linear_dims=2, base_components=4)
TINY_DENSITY = replace(TINY, pixel_decoder=True, density=DENSITY)


def tiny_network(generator: torch.Generator) -> CapsuleNetwork:
    """Return an untrained network of the architecture TINY, with densities of random codes."""
    network = CapsuleNetwork(TINY, generator=generator).eval()
    network.code_density.fit(squash(torch.randn(200, 3, 5, generator=generator)), generator)
    return network


def untrained(
    architecture: Architecture, images: torch.Tensor, generator: torch.Generator
) -> CapsuleNetwork:
    """Return a network with large random weights, whose codes vary between images."""
    network = CapsuleNetwork(architecture, generator=generator).eval()
    with torch.no_grad():
        network.preprocessing.fit([network.activations(images)])
        for layer in (*network.encoders, *network.decoders):
            layer.reset_parameters(std=1.0, generator=generator)
        network.code_density.fit(network.encode(images), generator)
    return network


def shorten_chains(monkeypatch: pytest.MonkeyPatch, steps: int = 6) -> None:
    """Let chains whose number of steps is not given take a few steps only."""
    draw = CapsuleNetwork.sample_density

    def drawn(network: CapsuleNetwork, count: int, **options: Any) -> Samples:
        return draw(network, count, **{"steps": steps} | options)

    monkeypatch.setattr(CapsuleNetwork, "sample_density", drawn)
    shorten_draws(monkeypatch, max(steps, sampling.MAX_STATES))


def shorten_draws(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let draws by tempering whose number of steps is not given take a few steps only."""
    defaults = {**(sampling.draw.__kwdefaults__ or {}), "steps": steps}
    monkeypatch.setattr(sampling.draw, "__kwdefaults__", defaults)


def untrained_with_density(
    architecture: Architecture, images: torch.Tensor, generator: torch.Generator
) -> CapsuleNetwork:
    """Return an untrained network whose density has random experts, and a log Z of 1.5.

    Its pixel decoder, if there is one, differs from the filters of the autoencoder.
    """
    network = untrained(architecture, images, generator)
    density, whitening = network.require_density(), network.whitening
    assert whitening is not None
    with torch.no_grad():
        activations = network.activations(images)
        whitening.fit([activations])
        density.base.fit([network.whiten(activations)])
        density.reset_parameters(std=0.2, generator=generator)
        density.partition.copy_(torch.tensor([1.0, 2.0, 1.0]))
        for weight in () if network.pixel_decoder is None else network.pixel_decoder.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return network
