"""The record of a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import poecaps
from poecaps._json import dataclass_from_json
from poecaps.data import ImageSet
from poecaps.training import record
from poecaps.training.config import Config
from tests.training.runs import config_for

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_records_what_is_needed_to_repeat_it(data: Path, finished: Path) -> None:
    about = json.loads((finished / "run.json").read_text())
    assert dataclass_from_json(Config, about["config"]) == config_for(data)
    assert about["seed"] == 0
    assert about["data"]["images"] == 96
    assert about["data"]["shape"] == [1, 20, 19]
    (start,) = about["starts"]
    assert start["versions"]["poecaps"] == poecaps.__version__
    assert start["versions"]["torch"] == torch.__version__
    assert start["processes"] == 1
    assert start["command"] == record.command_line()
    assert about["finished"] >= start["time"]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/poecaps", "train", "--out", "my run"], "poecaps train --out 'my run'"),
        (["/site/poecaps/__main__.py", "train"], "python -m poecaps train"),
    ],
)
def test_the_command_is_what_was_typed(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "-m", "poecaps", "train"])
    assert record.command_line() == command


def test_fingerprints_tell_data_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 6, 4), dtype=np.uint8)
    other = images.copy()
    other[20, 3, 2] ^= 1

    def fingerprint(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
        return str(record.describe_data(ImageSet(array))["sha256"])

    assert fingerprint(images) == fingerprint(images.copy())
    assert fingerprint(images) != fingerprint(other)
    assert fingerprint(images) != fingerprint(images.reshape(50, 4, 6))
    monkeypatch.setattr(
        record, "HASHED_BYTES", 300
    )  # bytes: 12 of 50 images fit, so every 4th is looked at, and 20 is one
    assert record.describe_data(ImageSet(images))["sha256_of"] == "every 4th image"
    assert fingerprint(images) != fingerprint(other)


def test_the_record_holds_the_config_as_json(data: Path) -> None:
    made = record.new_record(config_for(data), {})
    assert json.loads(json.dumps(made))["config"]["model"]["experts"] == [[4, 5], [3, 4]]
    assert made["config"] == asdict(config_for(data))


@pytest.mark.parametrize(("threads", "said"), [(1, "cpu (1 thread)"), (8, "cpu (8 threads)")])
def test_a_cpu_is_described_with_its_threads(
    threads: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert record.describe_device(torch.device("cpu")) == said


def test_a_record_without_its_machine_has_no_paths_and_no_commands(
    data: Path, finished: Path
) -> None:
    full = record.read(finished)
    public = record.without_machine(full)
    config = dataclass_from_json(Config, public["config"])
    assert config.data == public["data"]["source"] == data.name
    assert (config.device, config.checkpoint_every) == (Config().device, Config().checkpoint_every)
    (start,) = public["starts"]
    assert "command" not in start
    assert "platform" not in start["versions"]
    assert start["versions"]["torch"] == torch.__version__
    assert str(data.parent) not in json.dumps(public)
    for name in ("seed", "finished"):
        assert public[name] == full[name]
