"""Time the passes of a capsule layer, as a user of PyTorch calls them, beside einsum.

`python -m benchmarks.passes` measures, at the sizes of the paper and 128 images: the forward pass;
forward and backward, with gradients in the capsules and in the weight (a layer of a network with
labels); the gradient of the free energy in the capsules (a sampler); and the learning step of
contrastive divergence. poecaps runs in compiled C for every instruction set that the CPU has, in
plain PyTorch, in half precision, under autocast and in `torch.compile`.

`python -m benchmarks.passes --device cuda --json docs/results/passes-cuda.json` measures the first
three on a GPU, with 256 images, in 3 iterations and in 1: launched by the host, and replayed as a
CUDA graph. Compiled einsum runs with 3 iterations only, because its compilation takes most of the
time. (`python -m benchmarks --device cuda` measures the learning step there.)

Einsum is differentiated by autograd, except for the learning step, whose gradient is the closed
form. It is eager or compiled, each in the faster of two orders of contractions (with or without
votes; see `benchmarks.routing`). All versions take turns, so that a change of the machine's speed
affects all of them. A version that fails has the reason in place of its times.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from benchmarks.internals import backend_name, instruction_set, instruction_sets
from benchmarks.routing import (
    ORDERS,
    PLAIN_TORCH,
    Sizes,
    make_problem,
    route_with_votes,
    route_without_votes,
)
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from benchmarks.machine import Step
    from poecaps import CapsuleExperts

    Encode = Callable[[Tensor, Tensor], Tensor]
    Pass = Callable[[Encode, Tensor, Tensor], Any]

CPU = torch.device("cpu")
ROUTES = {"votes": route_with_votes, "no votes": route_without_votes}
BATCH = {"cpu": 128, "cuda": 256}
ITERATIONS = {"cpu": [3], "cuda": [3, 1]}
COMPILED_ITERATIONS = 3  # of compiled einsum
REPLAYED = ", CUDA graph"
FEW_ROUNDS = 2  # to find the faster order


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the requested file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--batch", type=int, help="number of images (default: 128 on a CPU, 256 on a GPU)"
    )
    parser.add_argument(
        "--iterations", type=int, nargs="+", help="values of R (default: 3, and 1 on a GPU)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of turns of each version (default: 9)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, 2],
        help="threads to use on a CPU (default: 1 2)",
    )
    parser.add_argument("--no-compile", action="store_true", help="skip everything compiled")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    sizes = Sizes(batch=options.batch or BATCH[device.type])
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.passes", parser, options),
        "machine": machine.describe(device),
        "sizes": asdict(sizes),
        "threads": {},
    }
    before = torch.get_num_threads()
    for threads in options.threads if device.type == "cpu" else [before]:
        torch.set_num_threads(threads)
        report["threads"][str(threads)] = results = {}
        for iterations in options.iterations or ITERATIONS[device.type]:
            given = replace(sizes, iterations=iterations)
            for name, times in measure(
                given, options.rounds, device, is_compiling=not options.no_compile
            ):
                results[name] = times
                print(table(name, threads, times), flush=True)
                machine.write(report, options.json)
    torch.set_num_threads(before)


def measure(
    sizes: Sizes, rounds: int, device: torch.device = CPU, *, is_compiling: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time all versions of each pass in turns, and yield its name and the times.

    Times are compared with those of the first version: replays with its replay.
    """
    names = ["forward", *PASSES]
    if device.type == "cpu":
        names.append("learning step")
    for name in names:
        torch.compiler.reset()  # it would stop compiling the same function again and again
        results: dict[str, Any] = {}
        steps = _working(_ours(name, sizes, device, is_compiling=is_compiling), device, results)
        orders: dict[str, str] = {}
        modes = ["eager"]
        if is_compiling and (device.type == "cpu" or sizes.iterations == COMPILED_ITERATIONS):
            modes.append("compiled")
        for mode in modes:
            candidates = _einsum(name, sizes, device, is_compiled=mode == "compiled")
            working = _working(candidates, device, results, f"einsum, {mode}, ")
            is_replayed = any(order.endswith(REPLAYED) for order in working)
            tried = machine.time_in_turns(
                {
                    order: step
                    for order, step in working.items()
                    if order.endswith(REPLAYED) == is_replayed
                },
                FEW_ROUNDS,
                device,
            )
            fastest = min(tried, key=lambda each: tried[each]["median_s"]).removesuffix(REPLAYED)
            for suffix in ("", REPLAYED):
                if f"{fastest}{suffix}" in working:
                    version = f"einsum, {mode}{suffix}"
                    orders[version], steps[version] = fastest, working[f"{fastest}{suffix}"]
        results |= machine.time_in_turns(steps, rounds, device)
        first = next(iter(steps))
        for version in steps:
            base = f"{first}{REPLAYED}" if version.endswith(REPLAYED) else first
            seconds = results.get(base, {}).get("median_s")
            ratio = results[version]["median_s"] / seconds if seconds else None
            results[version] |= {"times_poecaps": ratio, "order": orders.get(version)}
        title = name if sizes.iterations == Sizes().iterations else f"{name}, R {sizes.iterations}"
        yield title, results


def _working(
    steps: dict[str, Step], device: torch.device, results: dict[str, Any], prefix: str = ""
) -> dict[str, Step]:
    """Return the steps that run, and on a GPU their replays; add the reasons of all others."""
    working: dict[str, Step] = {}
    for name, step in steps.items():
        try:
            step()
            working[name] = step
        except Exception as error:  # of any part of the compiler
            results[f"{prefix}{name}"] = {"failed": _first_line(error)}
            continue
        if device.type == "cuda" and name not in NOT_CAPTURED:
            try:
                working[f"{name}{REPLAYED}"] = machine.captured(step)
            except Exception as error:
                torch.cuda.synchronize()
                results[f"{prefix}{name}{REPLAYED}"] = {"failed": _first_line(error)}
    return working


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def table(name: str, threads: int, times: dict[str, Any]) -> str:
    """Format the times of one pass."""
    title = f"{name}, {threads} thread{'s' * (threads > 1)}"
    lines = [f"\n{title:<52}{'median ms':>12}{'min':>9}{'max':>9}{'× first':>9}"]
    for version, result in times.items():
        if "failed" in result:
            lines.append(f"  {version:<50}  {result['failed']}")
            continue
        numbers = (1e3 * result[key] for key in ("median_s", "min_s", "max_s"))
        label = version if result["order"] is None else f"{version} ({result['order']})"
        row = "{:12.3f}{:9.3f}{:9.3f}".format(*numbers)
        ratio = "" if result["times_poecaps"] is None else f"{result['times_poecaps']:.2f}"
        lines.append(f"  {label:<50}{row}{ratio:>9}")
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

REDUCED = "reduce-overhead"  # mode of torch.compile that replays CUDA graphs
NOT_CAPTURED = (PLAIN_TORCH, f"poecaps, torch.compile, {REDUCED}")


def _layer_step(name: str, layer: CapsuleExperts, x: Tensor, mode: str = "") -> Step:
    """Return a pass of a layer, called as a user calls it.

    Parameters
    ----------
    name
        Name of the pass.
    layer, x : (B, I, K)
        The layer, and its capsules.
    mode
        Mode of `torch.compile`, empty: the layer is not compiled.
    """
    leaf = x.clone().requires_grad_()

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if not mode:
            return function
        traced: Callable[[Tensor], Tensor] = torch.compile(
            function, dynamic=False, fullgraph=True, mode=mode
        )
        return traced

    encode, energy = compiled(layer.forward), compiled(layer.free_energy)
    loss = compiled(layer.contrastive_divergence)

    def run() -> Any:
        if mode == REDUCED:
            torch.compiler.cudagraph_mark_step_begin()
        if name == "forward":
            with torch.no_grad():
                return encode(x)
        if name == "forward and backward":
            return torch.autograd.grad(encode(leaf).square().sum(), (leaf, layer.weight))
        if name == "gradient in the inputs":
            return torch.autograd.grad(energy(leaf).sum(), (leaf,))
        return torch.autograd.grad(loss(x), (layer.weight,))

    if name == "gradient in the inputs":
        layer.requires_grad_(False)
    return run


def _ours(
    name: str, sizes: Sizes, device: torch.device = CPU, *, is_compiling: bool
) -> dict[str, Step]:
    """Return the versions of poecaps, the best one first."""

    def step_in(dtype: torch.dtype = torch.float32, mode: str = "", **given: Any) -> Step:
        layer, x = make_problem(sizes, device)
        for option, value in given.items():
            setattr(layer, option, value)
        return _layer_step(name, layer.to(dtype), x.to(dtype), mode)

    step = step_in()
    if device.type == "cuda":
        steps = {f"poecaps, {backend_name(device)}": step}
    else:
        steps = {f"poecaps, {each}": _with(each, step) for each in instruction_sets()}
    steps[PLAIN_TORCH] = step_in(backend="torch")
    steps["poecaps, autocast to bfloat16"] = _autocast(step, device)
    steps["poecaps, bfloat16"] = step_in(torch.bfloat16)
    if name == "forward":
        steps["poecaps, float16"] = step_in(torch.float16)
    if is_compiling:
        steps["poecaps, torch.compile"] = step_in(mode="default")
        if device.type == "cuda":
            steps[NOT_CAPTURED[1]] = step_in(mode=REDUCED)
    return steps


def _with(name: str, step: Step) -> Step:
    def with_instruction_set() -> Any:
        with instruction_set(name):
            return step()

    return with_instruction_set


def _autocast(step: Step, device: torch.device) -> Step:
    def under_autocast() -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return step()

    return under_autocast


def _einsum(
    name: str, sizes: Sizes, device: torch.device = CPU, *, is_compiled: bool
) -> dict[str, Step]:
    """Return einsum in each order of contractions."""
    layer, x = make_problem(sizes, device)
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
