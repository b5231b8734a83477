"""The non-public parts of poecaps that the benchmarks need, collected in one place."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from poecaps import kernels
from poecaps.kernels import lanes, votefree
from poecaps.kernels.common import Options
from poecaps.network import Architecture, CapsuleNetwork
from poecaps.training import PRESETS, loop
from poecaps.training.config import changes
from poecaps.training.config import command as command_for
from poecaps.training.loop import find_device
from poecaps.training.stages import AutoencoderTask, Material
from poecaps.training.steps import FEWEST, PLAIN, Steps
from poecaps.training.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps import CapsuleExperts
    from poecaps.data import ImageSet

__all__ = [
    "CAPTURE_STEPS",
    "WARM_UP_STEPS",
    "AutoencoderSteps",
    "backend_name",
    "changes",
    "command_for",
    "compiler",
    "describe_backend",
    "find_device",
    "plain_torch_loss",
    "release_buffers",
    "simd_available",
]

# --------------------------------------------------------------------------------------------------
# Kernels


def simd_available() -> bool:
    """Return whether the compiled CPU backend can run on this machine."""
    return lanes.obstacle() is None


def compiler() -> str | None:
    """Return the C compiler of the compiled CPU backend, or None if there is none."""
    return lanes.compiler()


def describe_backend(device: torch.device) -> str:
    """Describe in one line the backend that float32 layers use on a device."""
    return kernels.describe(device)


def backend_name(device: torch.device) -> str:
    """Return the name, in tables, of the backend that float32 layers use on a device."""
    if device.type == "cuda" and kernels.describe(device).startswith("triton"):
        return "Triton"
    return "compiled C" if device.type == "cpu" and simd_available() else "plain PyTorch"


def release_buffers() -> None:
    """Free the memory that the compiled CPU backend keeps between calls."""
    lanes.forget()


def plain_torch_loss(layer: CapsuleExperts, x: Tensor) -> Tensor:
    """Compute the loss of CD-1 with the plain PyTorch backend: (B, I, K) → ()."""
    options = Options(layer.iterations, layer.sharpness, layer.normalize)
    return votefree.contrastive_divergence(x, layer.weight, 1, options, lambda _: None)[0]


# --------------------------------------------------------------------------------------------------
# Training


WARM_UP_STEPS = PLAIN + 1  # steps after which libraries are initialised and buffers allocated
CAPTURE_STEPS = PLAIN + FEWEST  # steps of a stage from which one is captured as a CUDA graph


class AutoencoderSteps:
    """Learning steps of the first stage of the preset `default`, as `poecaps train` takes them."""

    def __init__(self, data: ImageSet, batch_size: int, device: torch.device) -> None:
        config = replace(PRESETS["default"](), batch_size=batch_size, device=str(device))
        options = {each.name: getattr(config.model, each.name) for each in fields(config.model)}
        self.architecture = Architecture(**options, image_shape=data.shape)
        generator = torch.Generator().manual_seed(0)
        network = CapsuleNetwork(self.architecture, generator=generator).to(device)
        network.autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        half, workers = loop._wants_bfloat16(config.precision, device), Workers()
        material = Material(data, network, device, workers, half=half)
        task = AutoencoderTask("autoencoder", config.autoencoder, network.autoencoder, material)
        task.prepare(True, torch.Generator().manual_seed(0))
        self.precision = "bfloat16" if half else "float32"
        self.cuda_graph = device.type == "cuda" and task.is_resident()
        self.optimizer = loop._optimizer(task.stage, list(task.part.parameters()))
        self.generator = torch.Generator(device).manual_seed(0)
        network.eval()
        task.part.train()
        self.stage = task.stage
        self.steps = Steps(task, self.optimizer, workers, self.generator, recorded=self.cuda_graph)

    def take(self, indices: Tensor, seed: int) -> Tensor:
        """Take one step on the images with these indices; the seed is that of the dropout."""
        loop._set_rate(self.optimizer, self.stage.learning_rate_at(0))
        self.generator.manual_seed(seed)
        return self.steps.take(indices)
