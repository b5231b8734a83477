"""Time the passes of a capsule layer on a CPU, as a user of PyTorch calls them, beside einsum.

`python -m benchmarks.passes` measures, at the sizes of the paper and 128 images: the forward pass;
forward and backward, with gradients in the capsules and in the weight (a layer of a network with
labels); the gradient of the free energy in the capsules (a sampler); and the learning step of
contrastive divergence. poecaps runs in compiled C for every instruction set that the CPU has, in
plain PyTorch, and its forward pass also in half precision, under autocast and in `torch.compile`.

Einsum is differentiated by autograd, except for the learning step, whose gradient is the closed
form. It is eager or compiled, each in the faster of two orders of contractions (with or without
votes; see `benchmarks.routing`). All versions take turns, so that a change of the machine's speed
affects all of them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from benchmarks.internals import instruction_set, instruction_sets
from benchmarks.routing import (
    ORDERS,
    PLAIN_TORCH,
    Sizes,
    make_problem,
    route_with_votes,
    route_without_votes,
)
from poecaps import CapsuleExperts
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from benchmarks.machine import Step

    Encode = Callable[[Tensor, Tensor], Tensor]
    Pass = Callable[[Encode, Tensor, Tensor], Any]

CPU = torch.device("cpu")
ROUTES = {"votes": route_with_votes, "no votes": route_without_votes}
FEW_ROUNDS = 2  # to find the faster order


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the requested file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, help="number of images (default: 128)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of turns of each version (default: 9)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="threads to use (default: 1 2)"
    )
    parser.add_argument("--no-compile", action="store_true", help="skip everything compiled")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    sizes = Sizes(batch=options.batch)
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.passes", parser, options),
        "machine": machine.describe(CPU),
        "sizes": asdict(sizes),
        "threads": {},
    }
    before = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        report["threads"][str(threads)] = results = {}
        for name, times in measure(sizes, options.rounds, is_compiling=not options.no_compile):
            results[name] = times
            print(table(name, threads, times), flush=True)
            machine.write(report, options.json)
    torch.set_num_threads(before)


def measure(
    sizes: Sizes, rounds: int, *, is_compiling: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time all versions of each pass in turns, and yield its name and the times."""
    for name in ("forward", *PASSES, "learning step"):
        torch.compiler.reset()  # it would stop compiling the same function again and again
        steps = _ours(name, sizes, is_compiling=is_compiling)
        orders: dict[str, str] = {}
        for mode in ("eager", "compiled") if is_compiling else ("eager",):
            candidates = _einsum(name, sizes, is_compiled=mode == "compiled")
            tried = machine.time_in_turns(candidates, FEW_ROUNDS, CPU)
            order = min(tried, key=lambda each: tried[each]["median_s"])
            orders[f"einsum, {mode}"] = order
            steps[f"einsum, {mode}"] = candidates[order]
        times: dict[str, Any] = machine.time_in_turns(steps, rounds, CPU)
        fastest = next(iter(times.values()))["median_s"]
        for version, result in times.items():
            result["times_poecaps"] = result["median_s"] / fastest
            result["order"] = orders.get(version)
        yield name, times


def table(name: str, threads: int, times: dict[str, Any]) -> str:
    """Format the times of one pass."""
    title = f"{name}, {threads} thread{'s' * (threads > 1)}"
    lines = [f"\n{title:<42}{'median ms':>12}{'min':>9}{'max':>9}{'× first':>9}"]
    for version, result in times.items():
        numbers = (1e3 * result[key] for key in ("median_s", "min_s", "max_s"))
        label = version if result["order"] is None else f"{version} ({result['order']})"
        row = "{:12.1f}{:9.1f}{:9.1f}".format(*numbers)
        lines.append(f"  {label:<40}{row}{result['times_poecaps']:9.2f}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Passes of a function that encodes: (B, I, K), (I, J, D, K) → z (B, J, D)


def forward(encode: Encode, x: Tensor, weight: Tensor) -> Tensor:
    """Encode, without a gradient."""
    with torch.no_grad():
        return F.squash(encode(x, weight))


def forward_and_backward(encode: Encode, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Differentiate a loss of the code in the capsules and in the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(F.squash(encode(x, weight)).square().sum(), (x, weight))


def gradient_in_the_inputs(encode: Encode, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Differentiate the free energy in the capsules alone."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.free_energy(encode(x, weight.detach())).sum(), (x,))


PASSES: dict[str, Pass] = {
    "forward and backward": forward_and_backward,
    "gradient in the inputs": gradient_in_the_inputs,
}


# --------------------------------------------------------------------------------------------------
# Versions


def _layer_step(name: str, layer: CapsuleExperts, x: Tensor) -> Step:
    """Return a pass of a layer, called as a user calls it."""
    leaf = x.clone().requires_grad_()

    def learning_step() -> Any:
        return torch.autograd.grad(layer.contrastive_divergence(x), layer.weight)

    def differentiate() -> Any:
        return torch.autograd.grad(layer(leaf).square().sum(), (leaf, layer.weight))

    def slope() -> Any:
        return torch.autograd.grad(layer.free_energy(leaf).sum(), leaf)

    if name == "gradient in the inputs":
        layer.requires_grad_(False)
    steps: dict[str, Step] = {
        "forward": torch.no_grad()(lambda: layer(x)),
        "forward and backward": differentiate,
        "gradient in the inputs": slope,
        "learning step": learning_step,
    }
    return steps[name]


def _ours(name: str, sizes: Sizes, *, is_compiling: bool) -> dict[str, Step]:
    """Return the versions of poecaps, the best instruction set first."""
    layer, x = make_problem(sizes)
    step = _layer_step(name, layer, x)
    steps = {f"poecaps, {each}": _with(each, step) for each in instruction_sets()}
    plain, _ = make_problem(sizes)
    plain.backend = "torch"
    steps[PLAIN_TORCH] = _layer_step(name, plain, x)
    if name == "forward":
        steps["poecaps, autocast to bfloat16"] = _autocast(step)
        for dtype in (torch.bfloat16, torch.float16):
            half, _ = make_problem(sizes)
            steps[f"poecaps, {str(dtype).removeprefix('torch.')}"] = _layer_step(
                name, half.to(dtype), x.to(dtype)
            )
        if is_compiling:
            traced = torch.compile(layer, dynamic=False, fullgraph=True)
            steps["poecaps, torch.compile"] = torch.no_grad()(lambda: traced(x))
    return steps


def _with(name: str, step: Step) -> Step:
    def with_instruction_set() -> Any:
        with instruction_set(name):
            return step()

    return with_instruction_set


def _autocast(step: Step) -> Step:
    def under_autocast() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step()

    return under_autocast


def _einsum(name: str, sizes: Sizes, *, is_compiled: bool) -> dict[str, Step]:
    """Return einsum in each order of contractions."""
    layer, x = make_problem(sizes)
    weight = layer.weight.detach()
    steps: dict[str, Step] = {}
    if name == "learning step":
        for order, function in ORDERS.items():
            if is_compiled:
                function = torch.compile(function, dynamic=False)
            steps[order] = lambda function=function: function(x, weight, sizes)  # type: ignore[misc]
        return steps
    run = PASSES.get(name, forward)
    for order, route in ROUTES.items():
        encode = lambda x, weight, route=route: route(x, weight, sizes)[1]  # noqa: E731
        if is_compiled:
            encode = torch.compile(encode, dynamic=False)
        steps[order] = lambda encode=encode: run(encode, x, weight)  # type: ignore[misc]
    return steps


if __name__ == "__main__":
    main()
