"""Measure what poecaps gains where it goes around a library.

`python -m benchmarks.libraries --json docs/results/libraries-cuda.json` compares five parts of
poecaps with the library function that each replaces:

`optimizer`
    A step of `FusedAdam` and of `torch.optim.Adam` with ``fused=True, capturable=True``, for the
    parameters of the autoencoder and of the encoder: launched from Python, and replayed from a CUDA
    graph. And the time of the first step in a fresh process, with the imports that it triggers.
`launch`
    The launch of a compiled Triton kernel with and without the reuse of compiled kernels
    (`poecaps.kernels.triton.launch.REUSE_COMPILED`): host time for a small kernel, host time and
    whole time for a learning step of the encoder.
`directions`
    `leading_directions`, which reads the points in batches, and `torch.pca_lowrank`, which needs
    all of them in one matrix: time, memory, and the variance that the directions capture, relative
    to that of the exact ones. As in training, the points are cached in float16, and batches are
    converted to float32 when they are read.
`eigenvectors`
    `leading_eigenvectors_by_iteration` and `torch.linalg.eigh` for many symmetric matrices: time,
    error of the eigenvalues, and the part of their sum that the eigenvectors capture.
`convolution`
    The gradient of the autoencoder's loss on a CPU, with minimal filtering
    (`poecaps.kernels.winograd`) and with PyTorch's convolutions of float32: time, and the largest
    relative difference of a gradient from that of float64. `--device cpu --part convolution` takes
    a minute.

The alternatives take turns; times are medians with minimum and maximum. Without a GPU, `launch`,
`eigenvectors` and the steps of `optimizer` are skipped, and `directions` are computed on the CPU
alone. `--part` selects parts, `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks import machine
from poecaps import CapsuleExperts, squash
from poecaps.autoencoder import ConvAutoencoder
from poecaps.code_density import leading_eigenvectors_by_iteration
from poecaps.kernels import winograd
from poecaps.preprocessing import leading_directions
from poecaps.training.optim import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from benchmarks.machine import Step

    Times = dict[str, dict[str, float]]

ENCODER = (576, 8, 20, 16)  # I, K, J, D of the paper
BATCH, FEATURES = 128, 128
LEARNING_RATE = 1e-3

KERNEL_REPEATS, STEP_REPEATS = 200, 10  # launches before a wait; CUDA queues about a thousand

POINTS, DIMENSIONS = 10_000, 4608  # 6×6 positions of 128 features
COMPONENTS = 16  # of the preset `default`
SPARE = 16  # further directions that are iterated; the default of `leading_directions`
CHUNKS = {"cpu": 250, "cuda": 1000}  # points in a batch, as in training

MATRICES, MATRIX_SIZE, LEADING = 1000, 128, 8  # mixture over whole codes of the preset `default`
POINTS_PER_MATRIX = 60

NEEDS_GPU = "skipped: needs a GPU"

FIRST_STEP = """
import sys, time
import torch
from poecaps.training.optim import FusedAdam
device = torch.device(sys.argv[2])
parameter = torch.nn.Parameter(torch.zeros({size}, device=device))
parameter.grad = torch.ones_like(parameter)
start = time.perf_counter()
if sys.argv[1] == "FusedAdam":
    optimizer = FusedAdam([{{"params": [parameter]}}], 1e-3)
else:
    capturable = device.type == "cuda"
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True, capturable=capturable)
optimizer.step()
parameter.sum().item()
print(time.perf_counter() - start)
"""


# --------------------------------------------------------------------------------------------------
# Optimizer


def measure_optimizer(rounds: int, device: torch.device) -> dict[str, Any]:
    """Time steps of both optimizers, and the first step in a fresh process."""
    found: dict[str, Any] = {}
    if device.type == "cuda":
        autoencoder = ConvAutoencoder().to(device)
        autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        encoder = CapsuleExperts(*ENCODER, device=device)
        for name, module in {"autoencoder": autoencoder, "encoder": encoder}.items():
            steps = _optimizer_steps(list(module.parameters()))
            graphs = {f"{key}, CUDA graph": machine.captured(step) for key, step in steps.items()}
            found[f"step, {name}"] = machine.time_in_turns(steps | graphs, rounds, device)
    else:
        found["step"] = NEEDS_GPU
    names = ("FusedAdam", "torch.optim.Adam")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            times[name].append(_first_step_seconds(name, device))
    found["first step in a process"] = {name: machine.summary(times[name]) for name in names}
    return found


def _optimizer_steps(parameters: Sequence[nn.Parameter]) -> dict[str, Step]:
    """Return a step of each optimizer, both on copies of the same parameters and gradients."""
    copies = [
        [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        for _ in range(2)
    ]
    for group in copies:
        for parameter in group:
            parameter.grad = 1e-3 * torch.randn_like(parameter)
    rate = torch.tensor(LEARNING_RATE, device=parameters[0].device)
    return {
        "FusedAdam": FusedAdam([{"params": copies[0]}], LEARNING_RATE).step,
        "torch.optim.Adam": torch.optim.Adam(copies[1], lr=rate, fused=True, capturable=True).step,
    }


def _first_step_seconds(name: str, device: torch.device) -> float:
    """Time construction and first step of an optimizer in a fresh process, for an encoder's weight.

    Compiled Triton kernels are in Triton's cache, as in every process but the first on a machine.
    """
    inputs, in_dim, experts, out_dim = ENCODER
    code = FIRST_STEP.format(size=inputs * experts * out_dim * in_dim)
    command = [sys.executable, "-c", code, name, str(device)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 (ours)
    return float(done.stdout)


# --------------------------------------------------------------------------------------------------
# Launch


def measure_launch(rounds: int, device: torch.device) -> dict[str, Any]:
    """Time launches with and without the reuse of compiled kernels."""
    if device.type != "cuda":
        return {"launch": NEEDS_GPU}
    from poecaps.kernels.triton.conv_common import sum_splits

    partial = torch.rand(4, 512, device=device)
    layer = CapsuleExperts(*ENCODER, device=device)
    x = squash(torch.randn(BATCH, *ENCODER[:2], device=device))

    def kernel() -> None:
        sum_splits(partial)

    def learning_step() -> None:
        layer.zero_grad()
        layer.contrastive_divergence(x).backward()

    return {
        "small kernel, host": _with_and_without_reuse(
            kernel, lambda step: _host_seconds(step, KERNEL_REPEATS), rounds
        ),
        "learning step, host": _with_and_without_reuse(
            learning_step, lambda step: _host_seconds(step, STEP_REPEATS), rounds
        ),
        "learning step": _with_and_without_reuse(
            learning_step, lambda step: machine.seconds(step, STEP_REPEATS, device), rounds
        ),
    }


def _with_and_without_reuse(step: Step, timer: Callable[[Step], float], rounds: int) -> Times:
    from poecaps.kernels.triton import launch

    names = {"reused": True, "found by Triton": False}
    times: dict[str, list[float]] = {name: [] for name in names}
    before = launch.REUSE_COMPILED
    try:
        for _ in range(rounds):
            for name, reuse in names.items():
                launch.REUSE_COMPILED = reuse
                step()  # compiles in the first round
                times[name].append(timer(step))
    finally:
        launch.REUSE_COMPILED = before
    return {name: machine.summary(values) for name, values in times.items()}


def _host_seconds(step: Step, repeats: int) -> float:
    """Time the host's part of a step, without waiting for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats


# --------------------------------------------------------------------------------------------------
# Leading principal directions


def measure_directions(rounds: int, device: torch.device) -> dict[str, Any]:
    """Compare both ways to the leading principal directions, on the CPU and, if any, the GPU."""
    points = _decaying_points(POINTS, DIMENSIONS)
    exact = _exact_variance(points.to(device))
    kinds = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
    return {
        f"directions, {kind.type}": _compare_directions(points.to(kind), exact, rounds)
        for kind in kinds
    }


def _decaying_points(count: int, size: int) -> Tensor:
    """Draw centred points (N, S) whose n-th component has variance 1/n."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.arange(1, size + 1).rsqrt()
    points = torch.randn(count, size, generator=generator) * deviation
    return points - points.mean(0)


def _exact_variance(points: Tensor) -> float:
    """Return the variance in the exact leading directions, from all eigenvalues in float64."""
    exact = points.double()
    eigenvalues = torch.linalg.eigvalsh(exact.T @ exact / len(exact))
    return eigenvalues[-COMPONENTS:].sum().item()


class _Batches:
    """Cached points (N, S), converted to float32 batch by batch whenever they are read."""

    def __init__(self, points: Tensor) -> None:
        self.cached, self.size = points.half(), CHUNKS[points.device.type]

    def __iter__(self) -> Iterator[Tensor]:
        return (batch.float() for batch in self.cached.split(self.size))


def _compare_directions(points: Tensor, exact: float, rounds: int) -> dict[str, dict[str, Any]]:
    device, batches = points.device, _Batches(points)

    def streaming() -> Tensor:
        return leading_directions(batches, points.shape[1], COMPONENTS)[1]

    def lowrank(iterations: int) -> Tensor:
        torch.manual_seed(0)
        matrix = torch.cat(list(batches))
        basis = torch.pca_lowrank(matrix, COMPONENTS + SPARE, center=False, niter=iterations)[2]
        return basis[:, :COMPONENTS]

    methods: dict[str, Callable[[], Tensor]] = {
        "leading_directions": streaming,
        "torch.pca_lowrank, niter=2": lambda: lowrank(2),
        "torch.pca_lowrank, niter=8": lambda: lowrank(8),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, times in machine.time_in_turns(dict(methods), rounds, device).items():
        captured = (points.double() @ methods[name]().double()).square().sum().item() / len(points)
        memory = machine.extra_memory(methods[name], device)
        found[name] = {**times, "captured": captured / exact, "memory_bytes": memory}
    return found


# --------------------------------------------------------------------------------------------------
# Leading eigenvectors of many matrices


def measure_eigenvectors(rounds: int, device: torch.device) -> dict[str, Any]:
    """Compare both ways to the leading eigenvectors of many symmetric matrices."""
    if device.type != "cuda":
        return {"eigenvectors": NEEDS_GPU}
    return {"eigenvectors, cuda": _compare_eigenvectors(_covariances(device), rounds)}


def _covariances(device: torch.device) -> Tensor:
    """Return covariance matrices (M, S, S) of few points with decaying variances, float64."""
    points = _decaying_points(MATRICES * POINTS_PER_MATRIX, MATRIX_SIZE).double().to(device)
    points = points.view(MATRICES, POINTS_PER_MATRIX, MATRIX_SIZE)
    return points.mT @ points / POINTS_PER_MATRIX


def _compare_eigenvectors(matrices: Tensor, rounds: int) -> dict[str, dict[str, Any]]:
    def iteration() -> tuple[Tensor, Tensor]:
        return leading_eigenvectors_by_iteration(matrices, LEADING)

    def eigh() -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrices)
        return values[:, -LEADING:], vectors[:, :, -LEADING:]

    exact = eigh()[0]
    methods: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "leading_eigenvectors_by_iteration": iteration,
        "torch.linalg.eigh": eigh,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, times in machine.time_in_turns(dict(methods), rounds, matrices.device).items():
        values, vectors = methods[name]()
        error = ((values - exact).abs().amax(1) / exact[:, -1]).max().item()
        captured = (vectors * (matrices @ vectors)).sum((1, 2)) / exact.sum(1)
        found[name] = {
            **times,
            "eigenvalue_error": error,
            "captured": captured.min().item(),  # of the worst matrix
        }
    return found


# --------------------------------------------------------------------------------------------------
# Convolutions


def measure_convolution(rounds: int, device: torch.device) -> dict[str, Any]:  # noqa: ARG001 (always on the CPU)
    """Compare a step of the autoencoder on the CPU with that of PyTorch's convolutions."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    model = ConvAutoencoder(features=FEATURES, dropout=0.0, generator=generator)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(BATCH, 1, 28, 28, generator=generator)

    def gradients(module: ConvAutoencoder, batch: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module.loss(batch), list(module.parameters()))

    def by_torch() -> tuple[Tensor, ...]:
        with mock.patch.object(winograd, "why_not", return_value="for comparison"):
            return gradients(model, images)

    methods: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "minimal filtering": lambda: gradients(model, images),
        "torch.nn.functional.conv2d": by_torch,
    }
    found: dict[str, Any] = machine.time_in_turns(dict(methods), rounds, cpu)
    exact = gradients(copy.deepcopy(model).double(), images.double())
    for name, method in methods.items():
        errors = [
            ((ours - other).norm() / other.norm()).item()
            for ours, other in zip(method(), exact, strict=True)
        ]
        found[name]["gradient_error"] = max(errors)
    return {"step, autoencoder, cpu": found}


# --------------------------------------------------------------------------------------------------
# Command


PARTS = {
    "optimizer": measure_optimizer,
    "launch": measure_launch,
    "directions": measure_directions,
    "eigenvectors": measure_eigenvectors,
    "convolution": measure_convolution,
}


def table(found: Mapping[str, Any]) -> str:
    """Format the results of the parts."""
    lines = [f"{'':>44}{'median ms':>12}{'min':>11}{'max':>11}"]
    for name, methods in found.items():
        if isinstance(methods, str):
            lines.append(f"{name}: {methods}")
            continue
        lines.append(name)
        for method, each in methods.items():
            times = (1e3 * each[key] for key in ("median_s", "min_s", "max_s"))
            line = f"{method:>44}" + "{:12.4f}{:11.4f}{:11.4f}".format(*times)
            if "captured" in each:
                line += f"   captured {each['captured']:.6f}"
            if "gradient_error" in each:
                line += f"   error {each['gradient_error']:.1e}"
            if "eigenvalue_error" in each:
                line += f", error {each['eigenvalue_error']:.1e}"
            if each.get("memory_bytes") is not None:
                line += f", {each['memory_bytes'] / 2**20:,.0f} MiB"
            lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the numbers if a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument(
        "--part", nargs="+", default=list(PARTS), choices=list(PARTS), help="parts (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="how often the alternatives take turns (default: 9)"
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.libraries", parser, options),
        "machine": machine.describe(device),
    }
    print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
    for part in options.part:
        report[part] = PARTS[part](options.rounds, device)
        print(table(report[part]), flush=True)
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
