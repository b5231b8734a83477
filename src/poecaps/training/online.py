"""More images for a network that is trained already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps.training.stages import Material, plan
from poecaps.training.workers import Workers

if TYPE_CHECKING:
    from poecaps.data import ImageSet
    from poecaps.network import CapsuleNetwork
    from poecaps.training.config import Config


def learn_more(
    network: CapsuleNetwork, config: Config, data: ImageSet, *, share: float, seed: int
) -> None:
    """Go over more images once, with every part of a trained network but its filters and its scaling.

    What the experts see must not change under them, so the filters, and the map of their features to capsules, stay
    as they are. The density of codes stays as well.

    Parameters
    ----------
    network
        Changed in place; it comes out frozen, as from training.
    config
        That it was trained with; each stage goes on by Adam, whatever it began with.
    data
        The new images.
    share
        Learning rates, as a share of those that the stages began with.
    seed
        Of the order of images and of all draws.
    """
    device = network.code_density.mean.device
    material = Material(data, network, device, Workers(), half=False)
    order, draws = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    network.requires_grad_()
    for task in plan(config, material)[1:]:
        task.prepare(False, order)
        parameters = list(task.part.parameters())
        optimizer = torch.optim.Adam(
            parameters, lr=share * task.stage.learning_rate, betas=(task.stage.momentum, 0.999)
        )
        network.eval()
        task.part.train()
        for chosen in torch.randperm(len(data), generator=order).split(config.batch_size):
            optimizer.zero_grad(set_to_none=True)
            task.loss(
                chosen, lambda like: torch.rand(like.shape, generator=draws, device=device)
            ).backward()
            optimizer.step()
        task.part.eval()
        task.finish()
    network.eval().requires_grad_(False)
