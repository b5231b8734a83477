"""A run that takes seconds, from Python and from the command line.

96 bars of 20×19 pixels, 8 features, 2 layers of experts.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from poecaps import CapsuleNetwork
from poecaps.options import ModelOptions
from poecaps.training import Config, DecoderStage, EncoderStage, PixelDecoderStage, Stage
from poecaps.training.metrics import METRICS

if TYPE_CHECKING:
    from pathlib import Path


def config_for(data: Path, **changes: Any) -> Config:
    model = ModelOptions(
        features=8,
        capsule_dim=4,
        experts=((4, 5), (3, 4)),
        joint_components=4,
        whiten=True,
        equalized_components=2,
        pixel_decoder=True,
        margin=0,
        even_overlap=False,
    )
    tiny = Config(
        data=str(data),
        model=model,
        autoencoder=Stage(epochs=4, learning_rate=5e-3),
        encoder=EncoderStage(
            epochs=3, learning_rate=0.05, mixing="bernoulli", winners=2, target_firing=0.5
        ),
        decoder=DecoderStage(epochs=3, learning_rate=0.03, single_expert_share=0.5),
        pixel_decoder=PixelDecoderStage(
            epochs=2, optimizer="sgd", learning_rate=0.1, single_expert_share=0.5
        ),
        batch_size=16,
        device="cpu",
    )
    return replace(tiny, **changes)


def without_epochs(data: Path, **changes: Any) -> Config:
    """A run that takes only the steps of the given stages."""
    stages = {
        "autoencoder": Stage(epochs=0),
        "encoder": EncoderStage(epochs=0),
        "decoder": DecoderStage(epochs=0),
        "pixel_decoder": PixelDecoderStage(epochs=0),
    }
    return config_for(data, **stages | changes)


class Stop(Exception):  # noqa: N818
    """Raised by a report to end a run."""


OPTIONS = (
    shlex.split("""
    --preset default --model.features 8 --model.capsule-dim 4 --model.experts 4 5 3 4
    --model.joint-components 4 --model.equalized-components 2 --model.normalize inputs
    --model.sharpness 5 --model.scale 0.4 --autoencoder.epochs 4 --autoencoder.learning-rate 5e-3
    --encoder.epochs 3 --encoder.learning-rate 0.05 --encoder.mixing bernoulli --encoder.winners 2
    --decoder.epochs 3 --decoder.learning-rate 0.03 --decoder.single-expert-share 0.5
    --pixel-decoder.epochs 2 --pixel-decoder.optimizer sgd --pixel-decoder.learning-rate 0.1
    --pixel-decoder.single-expert-share 0.5 --batch-size 16 --device cpu --checkpoint-every 0""")
)  # the same as config_for, with a checkpoint after every step


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(CapsuleNetwork.load(folder).state_dict())


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "images_per_second"}
        for line in lines
    ]
