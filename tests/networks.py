"""Networks that tests share."""

from __future__ import annotations

import torch

from poecaps.network import Architecture, CapsuleNetwork


def untrained(
    architecture: Architecture, images: torch.Tensor, generator: torch.Generator
) -> CapsuleNetwork:
    """Make a network with random but strong weights: it answers one image unlike another, as a trained one does."""
    network = CapsuleNetwork(architecture, generator=generator).eval()
    with torch.no_grad():
        network.preprocessing.fit([network.activations(images)])
        for layer in (*network.encoders, *network.decoders):
            layer.reset_parameters(std=1.0, generator=generator)
        network.code_density.fit(network.encode(images), generator)
    return network
