"""Fine-tuning of a trained network on more images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from poecaps._modules import device_of
from poecaps.training.config import batch_sizes
from poecaps.training.distributed import Distributed, RandomNumbers
from poecaps.training.errors import TrainingError
from poecaps.training.features import FeatureCache
from poecaps.training.stages import AutoencoderTrainer, DensityTrainer, make_stages

if TYPE_CHECKING:
    from poecaps.data import ImageSet
    from poecaps.network import CapsuleNetwork
    from poecaps.training.config import Config


def fine_tune(
    network: CapsuleNetwork,
    config: Config,
    data: ImageSet,
    *,
    learning_rate_ratio: float,
    seed: int,
) -> None:
    """Train a trained network for one epoch on more images.

    The filters of the autoencoder and the preprocessing stay frozen, so that the inputs of the
    experts do not change. So does a density over the features: its Markov chains would have to
    start anew, and need hundreds of steps before they are draws of it. The code density is
    unchanged, too.

    Parameters
    ----------
    network
        Network to train, in place; it is frozen afterwards, as after `train`.
    config
        Options with which it was trained; but every stage uses Adam, without weight decay.
    data
        The new images.
    learning_rate_ratio
        Learning rate as a fraction of the initial learning rate of each stage.
    seed
        Seed of the order of the images and of all random numbers.

    Raises
    ------
    TrainingError
        If training diverges; the network is of no use then.
    """
    device = device_of(network)
    cache = FeatureCache(data, network, device, Distributed(), bfloat16=False)
    order = torch.Generator().manual_seed(seed)
    random = RandomNumbers(torch.Generator(device).manual_seed(seed), Distributed())
    network.requires_grad_()
    # The encoder learns from its weights on, of which there is nothing to choose.
    single = replace(config.encoder, restarts=1, halvings=0, recombinations=0)
    config = replace(config, encoder=single)
    for stage in make_stages(config, cache):
        if isinstance(stage, (AutoencoderTrainer, DensityTrainer)):
            continue
        stage.prepare(False, order)
        optimizer = torch.optim.Adam(
            stage.module.parameters(),
            lr=learning_rate_ratio * stage.options.learning_rate,
            betas=(stage.options.momentum, 0.999),
        )
        network.eval()
        stage.module.train()
        size = batch_sizes(config, len(data))[stage.name]
        for indices in torch.randperm(len(data), generator=order).split(size):
            optimizer.zero_grad(set_to_none=True)
            stage.loss(indices, random).backward()
            optimizer.step()
        if stage.has_diverged():
            raise TrainingError(f"{stage.name} diverged; lower learning_rate")
        stage.module.eval()
        stage.finish()
    network.eval().requires_grad_(False)
