"""The benchmark of the autoencoder runs, and counts the operations of a step."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import autoencoder, machine
from benchmarks.autoencoder import flops, main
from poecaps.options import Architecture
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 21, 24)])
def test_operations_agree_with_the_counter_of_torch(shape: tuple[int, int, int]) -> None:
    architecture = Architecture(features=6, capsule_dim=2, kernel_size=5, image_shape=shape)
    images, first, second = (
        torch.rand(2, *shape),
        torch.rand(6, shape[0], 5, 5),
        torch.rand(6, 6, 5, 5),
    )
    for filters in (first, second):
        filters.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        features = conv2d(conv2d(images, first), second, stride=2)
        rest = [(side - 9) % 2 for side in shape[1:]]
        conv_transpose2d(
            conv_transpose2d(features, second, stride=2, output_padding=rest), first
        ).sum().backward()
    assert counter.get_total_flops() == len(images) * flops(architecture)


def test_the_benchmark_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = PRESETS["default"]()
    small = replace(default, model=replace(default.model, features=8, capsule_dim=4))
    monkeypatch.setitem(PRESETS, "default", lambda: small)
    monkeypatch.setattr(machine, "ceilings", functools.partial(machine.ceilings, large=False))
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)
    images = np.random.default_rng(0).integers(256, size=(40, 20, 19), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    given = ["--data", str(tmp_path / "images.npy"), "--batch", "4", "16", "--rounds", "1"]
    main([*given, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"command", "machine", "ceilings", "batches"}
    assert found["batches"].keys() == {"4", "16"}
    for batch, each in found["batches"].items():
        assert each.keys() >= {
            "precision",
            "cuda_graph",
            "median_s",
            "min_s",
            "max_s",
            "rounds",
            "flop_per_image",
        }
        assert each["images_per_s"] == pytest.approx(int(batch) / each["median_s"])
        assert each["flop_per_s"] == pytest.approx(each["images_per_s"] * each["flop_per_image"])
        assert not each["cuda_graph"]
    assert "TFLOP/s" in capsys.readouterr().out


def test_a_batch_size_above_the_number_of_images_is_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        autoencoder.main(["--batch", "20000"])
    assert "at most 10000" in capsys.readouterr().err
