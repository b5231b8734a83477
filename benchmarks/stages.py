"""Measure a learning step of each stage of training, and list what it spends its time on.

`python -m benchmarks.stages --device cuda` (or cpu) takes steps of all stages of the preset
`default` on the bundled digits, in the way of `poecaps train`, on a GPU as replays of a CUDA graph.
The stages before the one that is measured are not trained: their weights are random. The stages
take turns.

`--profile N` also lists, for each stage, the N kernels (on a CPU, operators of PyTorch) that take
the most time in a step, how often each runs, and the sum over all of them. `--json FILE` writes the
times to a file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine
from benchmarks.internals import CAPTURE_STEPS, WARM_UP_STEPS, StageSteps, find_device
from poecaps.data import load
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STAGES = ("autoencoder", "encoder 1", "decoder 1", "pixel decoder")
PROFILED_STEPS = 20


class Kernel(NamedTuple):
    """A kernel or operator, in one step."""

    name: str
    runs: float
    seconds: float


def kernels_of(step: StageSteps, device: torch.device) -> list[Kernel]:
    """List the kernels of a step, those that take the most time first."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            each = microseconds / 1e6 / PROFILED_STEPS
            found.append(Kernel(event.key, event.count / PROFILED_STEPS, each))
    return sorted(found, key=lambda kernel: -kernel.seconds)


def profile_table(name: str, kernels: Sequence[Kernel], rows: int) -> str:
    """Format the kernels of a step of a stage."""
    runs, seconds = sum(each.runs for each in kernels), sum(each.seconds for each in kernels)
    lines = [f"\n{name:<74}{'runs':>8}{'µs':>10}"]
    lines += [
        f"  {kernel.name[:70]:<72}{kernel.runs:8.1f}{1e6 * kernel.seconds:10.1f}"
        for kernel in kernels[:rows]
    ]
    lines.append(f"  {'all':<72}{runs:8.1f}{1e6 * seconds:10.1f}")
    return "\n".join(lines)


def table(times: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the times of a step of each stage."""
    lines = [f"{'stage':<20}{'median ms':>12}{'min':>9}{'max':>9}{'images/s':>13}"]
    for name, result in times.items():
        numbers = (1e3 * result[key] for key in ("median_s", "min_s", "max_s"))
        row = "{:12.3f}{:9.3f}{:9.3f}".format(*numbers)
        lines.append(f"{name:<20}{row}{result['images_per_s']:13,.0f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--data", default="mnist-sample", help="training images (default: mnist-sample)"
    )
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--batch", type=int, default=128, help="batch size (default: 128)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of turns of each stage (default: 9)"
    )
    parser.add_argument("--profile", type=int, default=0, help="number of kernels to list")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    device, data = find_device(options.device), load(options.data)
    config = replace(PRESETS["default"](), batch_size=options.batch, device=str(device))
    steps = {}
    for name in options.stages:
        steps[name] = StageSteps(config, name, data, device)
        for _ in range(CAPTURE_STEPS if device.type == "cuda" else WARM_UP_STEPS):
            steps[name]()
    times: dict[str, Any] = machine.time_in_turns(dict(steps), options.rounds, device)
    for result in times.values():
        result["images_per_s"] = options.batch / result["median_s"]
    print(table(times), flush=True)
    for name, step in steps.items() if options.profile else ():
        print(profile_table(name, kernels_of(step, device), options.profile), flush=True)
    report = {
        "command": machine.command("benchmarks.stages", parser, options),
        "machine": machine.describe(device),
        "stages": times,
    }
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
