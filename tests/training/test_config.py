"""Options of a run: invalid values, presets and changes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from poecaps.options import ModelOptions
from poecaps.training import (
    PRESETS,
    DecoderStage,
    EncoderStage,
    PixelDecoderStage,
    Stage,
    train,
)
from poecaps.training.config import Preset, changed_options, nearest_preset, stage_options
from poecaps.training.optim import make_optimizer
from tests.training.runs import config_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1 to 1048576, but is 0"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"checkpoint_every": -1.0}, "checkpoint_every must be"),
        ({"precision": "float16"}, "precision must be one of"),
        ({"device": "meta"}, "device must be auto, cpu, mps, or a GPU"),
        (
            {"device": "cudda"},
            "device must be auto, cpu, mps, or a GPU such as cuda:0, but is 'cudda'",
        ),
        ({"autoencoder": Stage(epochs=-1)}, r"autoencoder.epochs must be"),
        (
            {"encoder": EncoderStage(learning_rate=float("nan"))},
            r"encoder.learning_rate must be a finite",
        ),
        ({"encoder": EncoderStage(k=0)}, r"encoder.k must be"),
        ({"decoder": DecoderStage(momentum=1.0)}, r"decoder.momentum must be below 1"),
        (
            {"encoder": EncoderStage(target_firing=1.0)},
            r"encoder.target_firing must be between 0 and 1",
        ),
        (
            {"decoder": DecoderStage(single_expert_share=1.1)},
            r"decoder.single_expert_share must be at most 1",
        ),
        (
            {"encoder": EncoderStage(winners=4)},
            r"encoder.winners must be at most 3, the number of experts, but is 4",
        ),
        (
            {"model": ModelOptions(joint_components=0)},
            r"model.joint_components must be a whole number from 1 to 1048576",
        ),
        ({"model": ModelOptions(capsule_dim=0)}, r"model.capsule_dim must be"),
        ({"model": ModelOptions(experts=())}, r"model.experts must be one or more pairs"),
        ({"model": ModelOptions(scale=0.0)}, r"model.scale must be above 0"),
        ({"model": ModelOptions(scale=float("nan"))}, r"model.scale must be a finite number"),
    ],
)
def test_invalid_options_are_an_error(
    changes: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_for(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def with_option(options: Any, name: str, value: int) -> Any:
    """Return options with another value of one, such as model.features."""
    first, _, rest = name.partition(".")
    return replace(
        options, **{first: with_option(getattr(options, first), rest, value) if rest else value}
    )


@pytest.mark.parametrize(
    ("option", "largest"),
    [
        *((name, 100) for name in ("model.iterations", "model.density.iterations", "encoder.k")),
        ("density.leapfrog_steps", 100),
        ("encoder.views.count", 1000),
        ("encoder.restarts", 1000),
        *((f"model.{name}", 2**20) for name in ("joint_components", "expert_components")),
        ("model.equalized_components", 2**20),
        ("model.density.base_components", 2**20),
        *(
            (name, 2**20)
            for name in (
                "batch_size",
                "encoder.batch_size",
                "density.chains",
                "density.partition_chains",
            )
        ),
    ],
)
def test_sizes_have_upper_bounds(option: str, largest: int, data: Path) -> None:
    """Of a file from a stranger, they are all that limits time and memory."""
    config = config_for(data)
    with_option(config, option, largest).validate()
    message = rf"{option} must be a whole number from \d to {largest}, but is {largest + 1}"
    with pytest.raises(ValueError, match=message):
        with_option(config, option, largest + 1).validate()


def test_a_stage_of_the_wrong_class_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="decoder must be a DecoderStage, but is a Stage"):
        train(config_for(data, decoder=Stage()), tmp_path / "run")


def test_the_pixel_decoder_stage_needs_a_pixel_decoder(data: Path) -> None:
    config = config_for(data)
    config = replace(config, model=replace(config.model, pixel_decoder=False))
    with pytest.raises(
        ValueError, match=r"must be 0 .* without a pixel decoder; set model.pixel_d"
    ):
        config.validate()
    replace(config, pixel_decoder=PixelDecoderStage(epochs=0)).validate()


@pytest.mark.parametrize("preset", PRESETS)
def test_changed_options_are_those_that_differ_from_a_preset(preset: str) -> None:
    config = PRESETS[preset]()
    assert changed_options(config, preset) == {}
    changed = replace(
        config, seed=3, device="cpu", encoder=replace(config.encoder, k=2, learning_rate=7.0)
    )
    expected = {"seed": 3, "encoder.k": 2, "encoder.learning_rate": 7.0}
    assert nearest_preset(changed) == preset
    assert changed_options(changed, preset) == expected
    assert changed_options(changed, preset, include_machine=True) == expected | {"device": "cpu"}


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (2, 16),
        (180, 16),
        (1023, 16),
        (1024, 32),
        (1797, 32),
        (4095, 64),
        (4096, 128),
        (60_000, 128),
    ],
)
def test_few_images_are_learned_in_small_batches(images: int, expected: int) -> None:
    """An epoch has at least 32 steps, unless batches would have fewer than 16 images."""
    for preset in PRESETS.values():
        config = preset()
        assert config.batch_size_for(images) == expected
        assert replace(config, batch_size=100).batch_size_for(images) == 100


def test_each_stage_has_a_name_and_a_field_of_options(data: Path) -> None:
    config = config_for(data)  # two capsule layers
    assert stage_options(config) == {
        "autoencoder": "autoencoder",
        "encoder 1": "encoder",
        "encoder 2": "encoder",
        "decoder 1": "decoder",
        "decoder 2": "decoder",
        "pixel decoder": "pixel_decoder",
    }


def test_the_command_line_offers_every_preset() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_options_may_be_whole_numbers(optimizer: Any) -> None:
    """PyTorch refuses some of them as int."""
    stage = Stage(optimizer=optimizer, momentum=0, weight_decay=10**30)
    parameter = torch.nn.Parameter(torch.ones(2))
    made = make_optimizer(stage, [parameter])
    parameter.grad = torch.ones(2)
    made.step()
