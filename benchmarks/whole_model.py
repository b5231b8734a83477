"""Train the whole model with a preset and draw what it makes.

`python -m benchmarks.whole_model --folder runs/digits` writes the network, its running numbers and four pictures:
reconstructions of test images, draws from all experts together, draws from one expert at a time, and the curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import plotting
from poecaps.data import load
from poecaps.training import PRESETS, train

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWS = 4  # of each expert, as in the paper's Figure 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist-sample", help="a set's name or a path (default: mnist-sample)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="default", help="(default: default)")
    parser.add_argument("--winners", type=int, help="experts that may fire for an image (default: all)")
    parser.add_argument("--epochs", type=int, help="of every stage (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--folder", type=Path, required=True, help="new folder for the results")
    options = parser.parse_args(arguments)

    config = dataclasses.replace(PRESETS[options.preset](), data=options.data, seed=options.seed)
    if options.winners is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, winners=options.winners))
    if options.epochs is not None:
        stages = {
            name: dataclasses.replace(getattr(config, name), epochs=options.epochs)
            for name in ("autoencoder", "encoder", "decoder")
        }
        config = dataclasses.replace(config, **stages)

    started = time.perf_counter()
    network = train(config, options.folder, report=show)
    print(f"trained in {time.perf_counter() - started:.0f} s")

    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(options.seed)
    named = options.data.endswith("-sample")
    images = load(options.data, split="test" if named else "train").batch(range(40)).to(device)
    with torch.no_grad():
        plotting.reconstructions(images, network.reconstruct(images), options.folder / "reconstructions.png")
        plotting.image_grid(
            network.generate(60, "joint", generator=generator), options.folder / "joint.png", columns=20
        )
        experts = range(network.architecture.experts[-1][0])
        alone = [network.generate(DRAWS, "learned", expert=j, generator=generator) for j in experts]
        plotting.expert_grid(torch.stack(alone, dim=1), options.folder / "learned.png")
    plotting.training_curves(options.folder / "metrics.jsonl", options.folder / "curves.png")
    print(f"pictures are in {options.folder}")


def show(line: dict[str, Any]) -> None:
    """Print the running numbers of a few steps."""
    numbers = ("reconstruction_error", "firing", "effective_rank")
    seen = "  ".join(f"{name.replace('_', ' ')} {line[name]:.3f}" for name in numbers if name in line)
    print(f"{line['stage']:12} epoch {line['epoch']:5.2f}  {seen}", flush=True)


if __name__ == "__main__":
    main()
