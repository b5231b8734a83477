"""The non-public parts of poecaps that the benchmarks need, collected in one place."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import torch

from poecaps import _table
from poecaps._devices import find_device, use_bfloat16
from poecaps._graphs import MIN_REPLAYS, WARMUP_CALLS, Graphed
from poecaps.cli.arguments import command_for
from poecaps.kernels import cpu, dispatch
from poecaps.kernels.cpu import build
from poecaps.network import CapsuleNetwork
from poecaps.options import Architecture
from poecaps.training import recombination
from poecaps.training.config import batch_sizes, changed_options
from poecaps.training.distributed import Distributed
from poecaps.training.features import FeatureCache
from poecaps.training.optim import make_optimizer, set_learning_rate
from poecaps.training.stages import Comparison, EncoderTrainer, make_stages
from poecaps.training.steps import TrainingStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts
    from poecaps.data import ImageSet
    from poecaps.training import Config

__all__ = [
    "CAPTURE_STEPS",
    "WARM_UP_STEPS",
    "StageSteps",
    "backend_name",
    "balance_rate",
    "changed_options",
    "command_for",
    "compiler",
    "describe_backend",
    "find_device",
    "halvings_without_drops",
    "instruction_set",
    "instruction_sets",
    "recorded_launches",
    "release_buffers",
    "simd_available",
    "starts_observed",
    "table_constants",
]

# --------------------------------------------------------------------------------------------------
# Kernels


def simd_available() -> bool:
    """Return whether the compiled CPU backend can run on this machine."""
    return cpu.why_not_compiled() is None


def compiler() -> str | None:
    """Return the C compiler of the compiled CPU backend, or None if there is none."""
    return cpu.compiler_version()


def instruction_sets() -> list[str]:
    """Return the instruction sets that the compiled CPU backend can use, the best one first."""
    return [target.name for target in build.targets()] if simd_available() else []


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Let the compiled CPU backend use this instruction set."""
    before = os.environ.get(build.VARIABLE)
    os.environ[build.VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[build.VARIABLE]
        else:
            os.environ[build.VARIABLE] = before


@contextmanager
def recorded_launches(on: bool) -> Iterator[None]:
    """Let the Triton backend record the launches of a learning step and repeat them, or not."""
    from poecaps.kernels.triton import learning  # it imports Triton

    before, learning.PLAN_STEPS = learning.PLAN_STEPS, on
    try:
        yield
    finally:
        learning.PLAN_STEPS = before


def describe_backend(device: torch.device) -> str:
    """Describe in one line the backend that float32 layers use on a device."""
    return dispatch.describe(device)


def backend_name(device: torch.device) -> str:
    """Return the name, in tables, of the backend that float32 layers use on a device."""
    x, weight = torch.zeros(256, 576, 8, device=device), torch.zeros(576, 20, 16, 8, device=device)
    names: dict[dispatch.Backend, str] = {"triton": "Triton", "simd": "compiled C"}
    return names.get(dispatch.choose(x, weight), "plain PyTorch")


def release_buffers() -> None:
    """Free the memory that the compiled CPU backend keeps between calls."""
    cpu.release_workspace()


# --------------------------------------------------------------------------------------------------
# Training


WARM_UP_STEPS = WARMUP_CALLS + 1  # steps after which libraries are initialised
CAPTURE_STEPS = WARMUP_CALLS + MIN_REPLAYS  # steps of a stage from which one is captured


@contextmanager
def starts_observed(
    observe: Callable[[CapsuleNetwork, Sequence[CapsuleExperts]], None],
) -> Iterator[None]:
    """Call a function with the encoders of every stage that keeps the best of several.

    It is called with the network and the trained encoders, under the competition of the training,
    before one of them is kept.
    """
    keep = EncoderTrainer._keep_best

    def observed(stage: EncoderTrainer) -> None:
        observe(stage.cache.network, list(stage.starts.values()))
        keep(stage)

    with mock.patch.object(EncoderTrainer, "_keep_best", observed):
        yield


@contextmanager
def halvings_without_drops() -> Iterator[None]:
    """Let encoders be compared where the worse half would be dropped, but drop none."""

    def note(stage: EncoderTrainer, comparison: Comparison) -> None:
        stage.halvings.append(comparison)

    with mock.patch.object(EncoderTrainer, "_halve", note):
        yield


@contextmanager
def balance_rate(rate: float) -> Iterator[None]:
    """Let the balance of recombined encoders move at this rate."""
    with mock.patch.object(recombination, "BALANCE_RATE", rate):
        yield


@contextmanager
def table_constants(
    *, shrinkage: float = _table.SHRINKAGE, scale: float = _table.SCALE
) -> Iterator[None]:
    """Let models of tables use these constants."""
    with mock.patch.multiple(_table, SHRINKAGE=shrinkage, SCALE=scale):
        yield


class StageSteps:
    """Learning steps of one stage of a run, as `poecaps train` takes them.

    The stages before it are not trained: their weights are random.

    Parameters
    ----------
    config
        Options of the run.
    name
        Name of the stage, such as ``"encoder 1"``.
    data
        Training images.
    device
        Device of the network.
    """

    def __init__(self, config: Config, name: str, data: ImageSet, device: torch.device) -> None:
        self.architecture = Architecture.of(config.model, data.shape)
        generator = torch.Generator().manual_seed(0)
        network = CapsuleNetwork(self.architecture, generator=generator).to(device)
        network.autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        bfloat16, distributed = use_bfloat16(config.precision, device), Distributed()
        cache = FeatureCache(data, network, device, distributed, bfloat16=bfloat16)
        (stage,) = (each for each in make_stages(config, cache) if each.name == name)
        stage.prepare(True, torch.Generator().manual_seed(0))
        self.precision = "bfloat16" if bfloat16 else "float32"
        self.cuda_graph = device.type == "cuda" and stage.data_on_device()
        self.options = stage.options
        parameters = list(stage.module.parameters())
        factors = stage.learning_rate_factors()
        self.optimizer = make_optimizer(stage.options, parameters, factors)
        self.generator = torch.Generator(device).manual_seed(0)
        network.eval()
        stage.module.train()
        step = TrainingStep(stage, self.optimizer, distributed, self.generator)
        self.step = Graphed(step, device, self.generator) if self.cuda_graph else step
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).to(device)
        size = batch_sizes(config, len(data))[name]
        self.batches = order[: len(data) // size * size].split(size)
        self.taken = 0

    def __call__(self) -> Tensor:
        """Take the next step, on the next batch of images."""
        set_learning_rate(self.optimizer, self.options.learning_rate_at(0))
        self.taken += 1
        self.generator.manual_seed(self.taken)
        return self.step(self.batches[self.taken % len(self.batches)])
