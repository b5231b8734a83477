"""Time the learning steps of the autoencoder as training takes them.

`python -m benchmarks.autoencoder --device cuda` (or cpu) takes steps of the first stage of the preset `default` on the
bundled digits: images that lie on the device, bfloat16 where the device is fast with it, Adam, and on a GPU replays of
one recorded step. It prints images and operations a second for some batch sizes, beside what the device reaches in a
large product. The batch sizes take turns. `--json FILE` keeps the numbers.

Operations are counted by `flops`: multiplications and additions of the two convolutions and of their two transposed
ones, forward and, backward, of both products of each, but that the first convolution needs no gradient in the images.
Nothing else counts, neither activations nor Adam.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from poecaps._devices import find_device, use_bfloat16
from poecaps.data import load
from poecaps.network import Architecture, CapsuleNetwork
from poecaps.training import PRESETS
from poecaps.training.distributed import Distributed
from poecaps.training.features import FeatureCache
from poecaps.training.graphs import MIN_REPLAYS, WARMUP_STEPS, GraphedStep
from poecaps.training.optim import make_optimizer, set_learning_rate
from poecaps.training.stages import AutoencoderTrainer
from poecaps.training.trainer import TrainingStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.machine import Step
    from poecaps.data import ImageSet


def flops(architecture: Architecture) -> float:
    """Count the operations of a learning step for one image: two for each multiplication that is added.

    A convolution to N positions with F filters over C channels of k×k numbers multiplies N·F·C·k² times, and so do its
    transposed, its gradient in the filters and its gradient in what it sees. The first: forward and filters, 2 times;
    the other three: 3 times.
    """
    channels, height, width = architecture.image_shape
    kernel, features = architecture.kernel_size, architecture.features
    first = (height - kernel + 1) * (width - kernel + 1) * features * channels * kernel**2
    rows, columns = ((side - 2 * kernel + 1) // 2 + 1 for side in (height, width))
    second = rows * columns * features * features * kernel**2
    return 2.0 * ((2 + 3) * first + (3 + 3) * second)


def make_steps(data: ImageSet, batch: int, device: torch.device) -> tuple[Step, dict[str, Any]]:
    """Return a function that takes the next step of the first stage, and what is to be known about it."""
    config = replace(PRESETS["default"](), batch_size=batch, device=str(device))
    options = {each.name: getattr(config.model, each.name) for each in fields(config.model)}
    architecture = Architecture(**options, image_shape=data.shape)
    network = CapsuleNetwork(architecture, generator=torch.Generator().manual_seed(0)).to(device)
    network.autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    half, distributed = use_bfloat16(config.precision, device), Distributed()
    cache = FeatureCache(data, network, device, distributed, bfloat16=half)
    stage = AutoencoderTrainer(config.autoencoder, cache)
    stage.prepare(True, torch.Generator().manual_seed(0))
    recorded = device.type == "cuda" and stage.data_on_device()
    optimizer = make_optimizer(stage.options, list(stage.module.parameters()))
    draws = torch.Generator(device).manual_seed(0)
    network.eval()
    stage.module.train()
    plain = TrainingStep(stage, optimizer, distributed, draws)
    take = GraphedStep(plain, draws) if recorded else plain
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).to(device)
    parts = [order[start : start + batch] for start in range(0, len(data) - batch + 1, batch)]
    taken = 0

    def step() -> Any:
        nonlocal taken
        taken += 1
        set_learning_rate(optimizer, stage.options.learning_rate_at(0))
        draws.manual_seed(taken)
        return take(parts[taken % len(parts)])

    about = {
        "precision": "bfloat16" if half else "float32",
        "recorded": recorded,
        "flop_per_image": flops(architecture),
    }
    return step, about


def measure(data: ImageSet, batches: Sequence[int], rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Time steps of each batch size, in turns."""
    steps, found = {}, {}
    for batch in batches:
        name = str(batch)
        steps[name], found[name] = make_steps(data, batch, device)
        for _ in range(WARMUP_STEPS + 1 if device.type == "cpu" else WARMUP_STEPS + MIN_REPLAYS):
            steps[name]()
    for name, times in machine.in_turns(steps, rounds, device).items():
        rate = int(name) / times["median_s"]
        found[name] |= times | {"images_per_s": rate, "flop_per_s": rate * found[name]["flop_per_image"]}
    return found


def table(found: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, float]) -> str:
    """Lay out what `measure` found."""
    lines = [f"{'batch':>6}{'median ms':>12}{'min':>9}{'max':>9}{'images/s':>13}{'TFLOP/s':>10}{'of ceiling':>12}"]
    for batch, each in found.items():
        times = "{:12.3f}{:9.3f}{:9.3f}".format(*(1e3 * each[key] for key in ("median_s", "min_s", "max_s")))
        share = each["flop_per_s"] / ceilings[f"{each['precision']}_flop_per_s"]
        lines.append(f"{batch:>6}{times}{each['images_per_s']:13,.0f}{each['flop_per_s'] / 1e12:10.2f}{share:12.1%}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", default="mnist-sample", help="images to learn from (default: mnist-sample)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[128, 512, 2048], help="batch sizes (default: 128 512 2048)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="how often the batch sizes take turns (default: 9)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    device, data = find_device(options.device), load(options.data)
    if too_large := [batch for batch in options.batch if batch > len(data)]:
        parser.error(f"--batch must be at most {len(data)}, the number of images, but is {too_large[0]}")
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.autoencoder", parser, options),
        "machine": machine.describe(device),
        "ceilings": machine.ceilings(device),
    }
    print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
    report["batches"] = measure(data, options.batch, options.rounds, device)
    print(table(report["batches"], report["ceilings"]))
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
