"""Measure the speed of the autoencoder's learning steps.

`python -m benchmarks.autoencoder --device cuda` (or cpu) takes steps of the first stage of the
preset `default` on the bundled digits, in the way of `poecaps train`: images on the device,
bfloat16 if the device supports it, Adam, and on a GPU replays of a step captured as a CUDA graph.
It prints images and operations per second for several batch sizes, and compares them with the rate
of a large matrix product on the device. The batch sizes take turns. `--json FILE` writes the
numbers to a file.

`flops` counts the operations: multiplications and additions of the two convolutions and the two
transposed convolutions, in the forward pass and in both gradients of the backward pass, except for
the gradient of the first convolution with respect to the images, which is not needed. Activations
and Adam do not count.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from benchmarks.internals import CAPTURE_STEPS, WARM_UP_STEPS, StageSteps, find_device
from poecaps.data import load
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from benchmarks.machine import Step
    from poecaps import Architecture
    from poecaps.data import ImageSet


def flops(architecture: Architecture) -> float:
    """Count the operations of a learning step per image: two for each multiply-add.

    A convolution to N positions with F filters over C channels of k×k pixels has N·F·C·k²
    multiply-adds, and so do its transpose, its gradient with respect to the filters and its
    gradient with respect to its input. The first convolution needs two of these, the other three
    layers need three each.
    """
    channels, height, width = architecture.image_shape
    kernel, features = architecture.kernel_size, architecture.features
    first = (height - kernel + 1) * (width - kernel + 1) * features * channels * kernel**2
    rows, columns = ((side - 2 * kernel + 1) // 2 + 1 for side in (height, width))
    second = rows * columns * features * features * kernel**2
    return 2.0 * ((2 + 3) * first + (3 + 3) * second)


def make_step(data: ImageSet, batch_size: int, device: torch.device) -> tuple[Step, dict[str, Any]]:
    """Return a function that takes the next step of the first stage, and facts about the step."""
    config = replace(PRESETS["default"](), batch_size=batch_size, device=str(device))
    steps = StageSteps(config, "autoencoder", data, device)
    facts = {
        "precision": steps.precision,
        "cuda_graph": steps.cuda_graph,
        "flop_per_image": flops(steps.architecture),
    }
    return steps, facts


def measure(
    data: ImageSet, batch_sizes: Sequence[int], rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Time steps of each batch size, in turns."""
    steps, results = {}, {}
    for batch_size in batch_sizes:
        name = str(batch_size)
        steps[name], results[name] = make_step(data, batch_size, device)
        for _ in range(CAPTURE_STEPS if device.type == "cuda" else WARM_UP_STEPS):
            steps[name]()
    for name, times in machine.time_in_turns(steps, rounds, device).items():
        rate = int(name) / times["median_s"]
        results[name] |= times | {
            "images_per_s": rate,
            "flop_per_s": rate * results[name]["flop_per_image"],
        }
    return results


def table(results: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, float]) -> str:
    """Format the results of `measure`."""
    lines = [
        f"{'batch':>6}{'median ms':>12}{'min':>9}{'max':>9}{'images/s':>13}{'TFLOP/s':>10}"
        f"{'of ceiling':>12}"
    ]
    for batch_size, result in results.items():
        times = "{:12.3f}{:9.3f}{:9.3f}".format(
            *(1e3 * result[key] for key in ("median_s", "min_s", "max_s"))
        )
        share = result["flop_per_s"] / ceilings[f"{result['precision']}_flop_per_s"]
        lines.append(
            f"{batch_size:>6}{times}{result['images_per_s']:13,.0f}"
            f"{result['flop_per_s'] / 1e12:10.2f}{share:12.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--data", default="mnist-sample", help="training images (default: mnist-sample)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[128, 512, 2048],
        help="batch sizes (default: 128 512 2048)",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of turns of each batch size (default: 9)"
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    device, data = find_device(options.device), load(options.data)
    if too_large := [size for size in options.batch if size > len(data)]:
        parser.error(
            f"--batch must be at most {len(data)}, the number of images, but is {too_large[0]}"
        )
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
