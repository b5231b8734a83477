"""Measure the speed of the encoder's learning steps, with several views and restarts.

`python -m benchmarks.encoder --device cuda` (or cpu) takes steps of the second stage of the preset
`default` on the bundled digits, in the way of `poecaps train`: inputs on the device, bfloat16
convolutions if the device supports them, Adam, and on a GPU replays of a step captured as a CUDA
graph. It prints images per second for 1, 2, 4 and 8 views of every image (an image counts once,
however many views it has), and for 1, 2, 4 and 8 encoders that learn at the same time, with one
view and with `--restart-views` views. All of them take turns. `--json FILE` writes the numbers to a
file.

The column "×" is the time of a step relative to that of one view and one encoder. The features of a
single view are those of the image, and were computed before the stage; those of other views are
computed in the step, for all encoders together.

`--experts 10 32` sets the experts, and `--features` the filters of the autoencoder; smaller numbers
are for a first look on a CPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from benchmarks.baselines import limit
from benchmarks.internals import CAPTURE_STEPS, WARM_UP_STEPS, StageSteps, find_device
from poecaps.data import load
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from poecaps.data import ImageSet
    from poecaps.training import Config


def config_with(base: Config, views: int, restarts: int) -> Config:
    """Return options with so many views and restarts."""
    encoder = base.encoder
    changed = replace(encoder, views=replace(encoder.views, count=views), restarts=restarts)
    return replace(base, encoder=changed)


def measure(
    base: Config,
    cases: Sequence[tuple[int, int]],
    data: ImageSet,
    rounds: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Time steps of each case, a number of views and one of restarts, in turns."""
    steps = {}
    for views, restarts in dict.fromkeys(cases):
        step = StageSteps(config_with(base, views, restarts), "encoder 1", data, device)
        for _ in range(CAPTURE_STEPS if device.type == "cuda" else WARM_UP_STEPS):
            step()
        steps[f"{views} {restarts}"] = step
    times = machine.time_in_turns(dict(steps), rounds, device)
    first = times["1 1"]["median_s"]
    rows = []
    for views, restarts in dict.fromkeys(cases):
        step, found = steps[f"{views} {restarts}"], times[f"{views} {restarts}"]
        row: dict[str, Any] = {"views": views, "restarts": restarts}
        row |= {"precision": step.precision, "cuda_graph": step.cuda_graph, **found}
        row["images_per_s"] = base.batch_size_for(len(data)) / found["median_s"]
        row["relative"] = found["median_s"] / first
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `measure`."""
    lines = [
        f"{'views':>6}{'restarts':>10}{'median ms':>12}{'min':>10}{'max':>10}"
        f"{'images/s':>13}{'×':>8}"
    ]
    for row in rows:
        times = "{:12.3f}{:10.3f}{:10.3f}".format(
            *(1e3 * row[key] for key in ("median_s", "min_s", "max_s"))
        )
        lines.append(
            f"{row['views']:>6}{row['restarts']:>10}{times}{row['images_per_s']:13,.0f}"
            f"{row['relative']:8.2f}"
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
    parser.add_argument("--limit", type=int, help="maximum number of training images")
    parser.add_argument("--batch", type=int, default=128, help="batch size (default: 128)")
    parser.add_argument(
        "--counts",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="numbers of views, and of restarts (default: 1 2 4 8)",
    )
    parser.add_argument(
        "--restart-views", type=int, default=4, help="views of restarts (default: 4)"
    )
    parser.add_argument(
        "--experts",
        type=int,
        nargs=2,
        default=[20, 16],
        help="number and dimension of the experts (default: 20 16)",
    )
    parser.add_argument(
        "--features", type=int, default=128, help="filters of a convolution (default: 128)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of turns (default: 9)")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    device, data = find_device(options.device), limit(load(options.data), options.limit)
    if options.batch > len(data):
        parser.error(
            f"--batch must be at most {len(data)}, the number of images, but is {options.batch}"
        )
    base = PRESETS["default"]()
    experts = ((options.experts[0], options.experts[1]),)
    model = replace(base.model, features=options.features, experts=experts)
    base = replace(base, model=model, batch_size=options.batch, device=str(device))
    cases = [(1, 1), *((count, 1) for count in options.counts)]
    for views in (1, options.restart_views):
        cases += [(views, count) for count in options.counts]
    for views, restarts in cases:
        config_with(base, views, restarts).validate()
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.encoder", parser, options),
        "machine": machine.describe(device),
    }
    print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
    report["steps"] = measure(base, cases, data, options.rounds, device)
    print(table(report["steps"]))
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
