"""Time one step of the sampler of a density: five leapfrog steps and a Metropolis test.

`python -m benchmarks.sampler --device cuda --json docs/results/sampler-cuda.json` compares ways to
take the same step. Three cases are over the 576 capsules of the paper: its 20 experts of 16, ten
times as many, and 20 with routing. The last one is what the preset `energy` samples: 600 experts of
8 that read 256 principal components, which are one capsule, so that there are no votes to save.

`poecaps`
    `poecaps.sampling.hmc_step`. With one routing iteration, the energy and its gradient are two
    matrix products; with more, the gradient goes through the routing kernels.
`poecaps, replayed`
    The same from a CUDA graph; on a GPU only.
`einsum and autograd`
    The equations as they are written: votes by einsum, routing, the energy, and its gradient by
    autograd.
`matrix product and autograd`
    With one iteration only: votes are never formed, the energy is a matrix product, and autograd
    finds the gradient.

All of them use the same random numbers, and the largest difference of their results is shown. The
alternatives take turns; times are medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from poecaps import functional as F
from poecaps.energy import CapsuleDensity
from poecaps.sampling import DensityTarget, hmc_step, start_chains

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchmarks.machine import Step

LEAPFROG_STEPS, STEP_SIZE = 5, 0.05


@dataclass(frozen=True)
class Case:
    """Sizes of a density and number of chains."""

    experts: int
    dim: int
    iterations: int
    chains: int
    components: int = 0
    """Principal components that the experts read; 0: all capsules."""

    def __str__(self) -> str:
        read = f" of {self.components} components" if self.components else ""
        return f"{self.experts}×{self.dim}{read}, R {self.iterations}, {self.chains} chains"

    def density(self, device: torch.device) -> CapsuleDensity:
        """Return a density with random weights, of the components alone if there are any."""
        inputs = (1, self.components) if self.components else (INPUTS, IN_DIM)
        return CapsuleDensity(
            *inputs,
            self.experts,
            self.dim,
            linear_dims=self.dim if self.components else self.dim // 2,
            strength=5.0,
            iterations=self.iterations,
            generator=torch.Generator(device).manual_seed(0),
            device=device,
        )


INPUTS, IN_DIM = 576, 8
CASES = (
    Case(20, 16, 1, 128),
    Case(200, 16, 1, 32),
    Case(20, 16, 3, 128),
    Case(600, 8, 1, 256, components=256),
)


class Autograd:
    """A target whose energy is written down by einsum, and whose gradient autograd finds."""

    def __init__(self, density: CapsuleDensity, *, votes: bool) -> None:
        self.density, self.votes = density, votes

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute minus the log-density of the base measure and its gradient."""
        return u.square().sum(-1) / 2, u

    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute F and its gradient by autograd."""
        density = self.density
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            x = u.view(-1, density.in_capsules, density.in_dim)
            weight = density.weight.detach()
            if self.votes:
                routed = F.routing_by_agreement(
                    x,
                    weight,
                    iterations=density.iterations,
                    sharpness=density.sharpness,
                    normalize=density.normalize,
                )
                z = routed.preactivation * density.out_capsules
            else:
                z = torch.einsum("bik,ijdk->bjd", x, weight)
            z = F.forward_side(z, density.linear_dims, density.origin.detach())
            energy = F.free_energy(z, strength=density.strength.detach())
            (gradient,) = torch.autograd.grad(energy.sum(), u)
        return energy.detach(), gradient


def steps_of(case: Case, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return the alternatives, each of which takes one step and returns the positions."""
    density = case.density(device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (case.chains, density.in_capsules * density.in_dim)
    position, momentum = torch.randn(2, *shape, generator=generator, device=device)
    uniform = torch.rand(case.chains, generator=generator, device=device)
    one = torch.ones(case.chains, device=device)

    def step_on(target: Any) -> Callable[[], Tensor]:
        chains = start_chains(target, position, one)
        step_size = torch.full((), STEP_SIZE, device=device)

        @torch.no_grad()
        def step() -> Tensor:
            moved, _ = hmc_step(
                target,
                chains,
                momentum,
                uniform,
                step_size=step_size,
                leapfrog_steps=LEAPFROG_STEPS,
            )
            return moved.position

        return step

    ours = step_on(DensityTarget(density))
    steps = {"poecaps": ours}
    if device.type == "cuda":
        steps["poecaps, replayed"] = machine.captured(ours)
    steps["einsum and autograd"] = step_on(Autograd(density, votes=True))
    if case.iterations == 1:
        steps["matrix product and autograd"] = step_on(Autograd(density, votes=False))
    return steps


def measure(case: Case, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time the alternatives of a case, and compare their results."""
    steps = steps_of(case, device)
    expected = steps["einsum and autograd"]()
    errors = {
        name: ((step() - expected).norm() / expected.norm()).item() for name, step in steps.items()
    }
    plain: dict[str, Step] = dict(steps)
    times = machine.time_in_turns(plain, rounds, device)
    ours = min(times[name]["median_s"] for name in times if name.startswith("poecaps"))
    return {
        name: {**summary, "times_poecaps": summary["median_s"] / ours, "difference": errors[name]}
        for name, summary in times.items()
    }


def table(case: str, results: dict[str, dict[str, float]]) -> str:
    """Format the results of a case."""
    lines = [f"{case:32} median ms      min      max  × poecaps  difference"]
    for name, found in results.items():
        times = (found[each] * 1e3 for each in ("median_s", "min_s", "max_s"))
        numbers = " ".join(f"{value:8.3f}" for value in times)
        lines.append(
            f"  {name:30} {numbers}  {found['times_poecaps']:9.2f}  {found['difference']:.1e}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the numbers if a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often the alternatives take turns (default: 7)"
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.sampler", parser, options),
        "machine": machine.describe(device),
        "cases": {},
    }
    print(json.dumps(report["machine"], indent=1, ensure_ascii=False), flush=True)
    for case in CASES:
        report["cases"][str(case)] = found = measure(case, options.rounds, device)
        print(table(str(case), found), flush=True)
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
