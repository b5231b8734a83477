"""Networks that several tests use."""

from __future__ import annotations

import torch

from poecaps import Architecture, CapsuleNetwork, squash

TINY = Architecture(
    image_shape=(1, 20, 19),
    features=8,
    capsule_dim=4,
    experts=((3, 5),),
    joint_components=4,
    expert_components=2,
)


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
