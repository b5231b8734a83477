"""Apple's GPUs, which lack float64; here the CPU stands in for one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from poecaps import CapsuleNetwork, _devices
from poecaps.options import Architecture, DensityOptions
from poecaps.training import train
from tests.training.runs import config_for

if TYPE_CHECKING:
    from pathlib import Path

# Functions that compute in float64, on what was moved to the device of statistics before.
STATISTICS = {
    ("preprocessing", "fit"),
    ("code_density", "fit"),
    ("metrics", "effective_rank"),
    ("metrics", "margin"),
    ("metrics", "energy"),
    ("metrics", "agreement"),
    ("stages", "factor_for_firing"),
    ("stages", "_scores"),
}


class NoFloat64(TorchFunctionMode):
    """Raise an error if a function outside of `STATISTICS` makes a tensor of float64."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            frame, places = sys._getframe(1), set()
            while frame is not None:
                module = frame.f_globals.get("__name__", "").rpartition(".")[2]
                places.add((module, frame.f_code.co_name))
                frame = frame.f_back  # type: ignore[assignment]
            if not places & STATISTICS:
                raise TypeError(f"{function} needs float64")
        return result


@pytest.mark.parametrize("restarts", [1, 2])
def test_only_statistics_need_float64(restarts: int, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 20, 19), np.uint8)
    np.save(tmp_path / "x.npy", images)
    config = config_for(tmp_path / "x.npy", precision="float32")
    object.__setattr__(config.encoder, "restarts", restarts)
    with NoFloat64():
        network = train(config, tmp_path / "run")
        loaded = CapsuleNetwork.load(tmp_path / "run")
        batch = torch.from_numpy(images[:3, None] / np.float32(255))
        loaded.reconstruct(batch)
        loaded.generate(2)
        loaded.traverse(0)
    assert not any(tensor.dtype == torch.float64 for tensor in network.state_dict().values())


def test_statistics_of_an_apple_gpu_are_computed_by_the_cpu() -> None:
    assert _devices.statistics_device(torch.device("mps")) == torch.device("cpu")
    for name in ("cpu", "cuda:1"):
        assert _devices.statistics_device(torch.device(name)) == torch.device(name)
    assert not _devices.use_bfloat16("auto", torch.device("mps"))


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"device must be auto, cpu, mps, or a GPU .*'mps'"):
        _devices.find_device("mps")


def test_a_density_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = DensityOptions(experts=(2, 3), linear_dims=0, base_components=0)
    sizes = {"features": 4, "capsule_dim": 2, "experts": ((2, 3),), "image_shape": (1, 17, 17)}
    network = CapsuleNetwork(Architecture(**sizes, density=options))  # type: ignore[arg-type]

    class Weight:
        device = torch.device("mps")

    monkeypatch.delattr(type(network.density), "weight", raising=False)
    network.density._parameters.pop("weight")  # type: ignore[union-attr]
    network.density.weight = Weight()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="a density needs float64, which mps does not have"):
        network.require_density()
