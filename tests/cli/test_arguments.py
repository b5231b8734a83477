"""Conversions between command lines and configurations."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from poecaps.cli.arguments import command_for, preset_of
from poecaps.cli.main import main
from poecaps.training import PRESETS
from poecaps.training.config import Config, nearest_preset


@pytest.mark.parametrize("preset", PRESETS)
def test_the_command_of_a_configuration_trains_with_its_options(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for those that belong to the machine."""
    usual = PRESETS[preset]()
    model = replace(
        usual.model, experts=((40, 8), (20, 16)), whiten=not usual.model.whiten, scale=None
    )
    encoder = replace(usual.encoder, epochs=30, winners=None, final_learning_rate_ratio=1e-5)
    config = replace(
        usual, data="fashion-mnist", seed=3, model=model, encoder=encoder, batch_size=512
    )
    asked: list[Config] = []

    def note(given: Config, *_: Any, **__: Any) -> None:
        asked.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr("poecaps.cli.train.run_training", note)
    assert nearest_preset(config) == preset
    command = command_for(replace(config, device="cuda", data_path="/data"))
    assert main([*shlex.split(command)[1:], "--quiet"]) == 130
    assert asked == [config]


def test_a_command_names_only_what_differs_from_its_preset() -> None:
    default, paper = PRESETS["default"](), PRESETS["paper"]()
    assert command_for(default) == "poecaps train"
    assert command_for(paper) == "poecaps train --preset paper"
    assert command_for(replace(default, data="my pictures")) == "poecaps train --data 'my pictures'"


def test_the_last_preset_counts() -> None:
    assert preset_of(["train"]) == "default"
    assert preset_of(["train", "--preset", "default", "--preset=paper"]) == "paper"
    assert preset_of(["train", "--preset", "paper", "--seed", "1"]) == "paper"
