"""Time one learning step of the capsule encoder: ours against einsum, eager and compiled, in one run.

`python -m benchmarks --device cuda` (or cpu; `make bench` is the latter) prints tables: median time and spread of each
version, ratios to ours, memory beyond weight and data, how both grow with each size, the largest number of inputs that
trains, and what share of the device's own measured rates that is. Versions take turns in every round, so that a change
of the machine's speed meets all of them. `--json FILE` keeps the numbers, `--plot FILE` draws how they grow.

The opponents are written as well as einsum allows: the votes are made once a step and kept, contractions go in their
best order, and the gradient is the closed form of Algorithm 1 rather than autograd's. `reference` is
`poecaps.functional` under autograd.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import CapsuleExperts, kernels, squash
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Of one step; the paper's unless told otherwise."""

    batch: int = 256
    inputs: int = 576
    in_dim: int = 8
    experts: int = 20
    out_dim: int = 16
    iterations: int = 3
    sharpness: float = 5.0
    normalize: F.Axis = "inputs"


GROWTH: dict[str, tuple[int, ...]] = {
    "batch": (64, 256, 1024),
    "inputs": (144, 576, 2304),
    "experts": (5, 20, 80),
    "iterations": (1, 3, 8),
}
STATUS = Path("/proc/self/status")  # what Linux tells of a process
LADDER = (10_000, 30_000, 100_000, 300_000, 1_000_000)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024], help="batch sizes (default: 256 1024)")
    parser.add_argument("--rounds", type=int, default=9, help="how often the versions take turns (default: 9)")
    parser.add_argument("--normalize", default="inputs", choices=F.AXES)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled opponent")
    parser.add_argument("--no-growth", action="store_true", help="leave out how time and memory grow with each size")
    parser.add_argument("--no-ladder", action="store_true", help="leave out the search for the largest I (GPU only)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--plot", type=Path, help="where to draw how time and memory grow")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    usual = Sizes(normalize=options.normalize)
    report: dict[str, Any] = {"machine": _machine(device), "sizes": asdict(usual), "ceilings": _ceilings(device)}
    print(json.dumps(report, indent=1))
    report["steps"] = {}
    for batch in options.batch:
        sizes = replace(usual, batch=batch)
        report["steps"][batch] = compare(sizes, device, options.rounds, compiled=not options.no_compile)
        print(table(sizes, report["steps"][batch]))
    if not options.no_growth:
        report["growth"] = grow(usual, device, options.rounds)
    if device.type == "cuda" and not options.no_ladder:
        report["largest"] = climb(device)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot is not None and "growth" in report:
        draw(report, options.plot)


def compare(
    sizes: Sizes, device: torch.device, rounds: int, *, compiled: bool = True, others: bool = True
) -> dict[str, dict[str, float | None]]:
    """Time the versions of one step, in turns, and measure the memory each takes."""
    steps = {name: make(sizes, device) for name, make in _versions(device, compiled=compiled, others=others).items()}
    repeats = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        repeats[name] = max(1, min(200, int(0.1 / _time(step, 3, device))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_time(step, repeats[name], device))
    ours = statistics.median(times["ours"])
    result: dict[str, dict[str, float | None]] = {}
    for name, values in times.items():
        middle = statistics.median(values)
        result[name] = {
            "median_s": middle,
            "min_s": min(values),
            "max_s": max(values),
            "times_ours": middle / ours,
            "extra_bytes": None if "graph" in name else extra_memory(name, sizes, device),
        }
    result["ours"] |= {"flop_per_s": flops(sizes) / ours, "bytes_per_s": least_bytes(sizes) / ours}
    return result


def table(sizes: Sizes, result: dict[str, dict[str, float | None]]) -> str:
    """Lay out what `compare` found."""
    lines = [f"\nB = {sizes.batch}: {'step':<20}{'median ms':>12}{'min':>9}{'max':>9}{'× ours':>9}{'extra MB':>11}"]
    for name, found in result.items():
        milliseconds = [1e3 * (found[key] or 0) for key in ("median_s", "min_s", "max_s")]
        extra = found["extra_bytes"]
        memory = "" if extra is None else f"{extra / 1e6:11.1f}"
        numbers = "{:12.3f}{:9.3f}{:9.3f}".format(*milliseconds)
        lines.append(f"{'':<9}{name:<20}{numbers}{found['times_ours']:9.2f}{memory}")
    rate, traffic = (result["ours"][key] or 0 for key in ("flop_per_s", "bytes_per_s"))
    lines.append(f"{'':<9}ours: {rate / 1e12:.3f} TFLOP/s, {traffic / 1e9:.1f} GB/s of the least traffic")
    return "\n".join(lines)


def grow(usual: Sizes, device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure ours and eager einsum while one size at a time changes."""
    found: dict[str, dict[str, Any]] = {}
    for name, values in GROWTH.items():
        found[name] = {}
        for value in values:
            sizes = replace(usual, **{name: value})  # type: ignore[arg-type]
            found[name][str(value)] = compare(sizes, device, min(rounds, 3), compiled=False, others=False)
            ours, theirs = (found[name][str(value)][each]["median_s"] for each in ("ours", "einsum, eager"))
            print(
                f"{name:>10} = {value:>5}: ours {1e3 * ours:9.3f} ms, eager einsum {1e3 * theirs:9.3f} ms", flush=True
            )
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw time and memory against each size, both axes logarithmic."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    panels = figure.subplots(2, len(GROWTH), sharey="row")
    for column, (name, values) in enumerate(GROWTH.items()):
        for version, style in (("ours", "o-"), ("einsum, eager", "s--")):
            runs = [report["growth"][name][str(value)][version] for value in values]
            panels[0, column].loglog(values, [1e3 * run["median_s"] for run in runs], style, label=version)
            panels[1, column].loglog(
                values, [max(run["extra_bytes"] or 0, 1e5) / 1e6 for run in runs], style, label=version
            )
        panels[1, column].set_xlabel(name)
        for panel in panels[:, column]:
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("MB beyond weight and data")
    panels[0, 0].legend(frameon=False)
    figure.suptitle(f"One learning step, {report['machine']['device']}")
    figure.savefig(path, dpi=110)


def climb(device: torch.device) -> dict[str, Any]:
    """Find how many inputs train at J = 64, B = 256, on our path."""
    found: dict[str, Any] = {}
    for inputs in LADDER:
        layer = x = None
        try:
            layer = CapsuleExperts(inputs, 8, 64, 16, sharpness=5.0, device=device)
            x = torch.rand(256, inputs, 8, device=device).mul_(0.3)
            _step(layer, x)()
            seconds, peak = _time(_step(layer, x), 1, device), torch.cuda.max_memory_allocated(device)
            gradient = layer.weight.grad
            finite = gradient is not None and bool(gradient[:: inputs // 100].isfinite().all())
            found[str(inputs)] = {"seconds": seconds, "peak_bytes": peak, "finite": finite}
            print(f"I = {inputs:>9,}: {seconds:8.3f} s a step, peak {peak / 2**30:6.1f} GiB, finite: {finite}")
        except torch.cuda.OutOfMemoryError:
            found[str(inputs)] = None
            print(f"I = {inputs:>9,}: out of memory")
            break
        finally:
            layer = x = gradient = None
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return found


# The versions


def _versions(
    device: torch.device, *, compiled: bool = True, others: bool = True
) -> dict[str, Callable[[Sizes, torch.device], Step]]:
    versions: dict[str, Callable[[Sizes, torch.device], Step]] = {"ours": lambda at, on: _step(*_problem(at, on))}
    if device.type == "cuda":
        versions["ours, CUDA graph"] = lambda at, on: _captured(*_problem(at, on))
    versions["einsum, eager"] = lambda at, on: _einsum(at, on, einsum_step)
    if compiled:
        versions["einsum, compiled"] = lambda at, on: _einsum(at, on, torch.compile(einsum_step))
    if others:
        versions["reference"] = lambda at, on: _step(*_problem(at, on, "reference"))
    return versions


def _problem(
    sizes: Sizes, device: torch.device, backend: kernels.Backend | None = None
) -> tuple[CapsuleExperts, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = CapsuleExperts(
        sizes.inputs,
        sizes.in_dim,
        sizes.experts,
        sizes.out_dim,
        iterations=sizes.iterations,
        sharpness=sizes.sharpness,
        normalize=sizes.normalize,
        backend=backend,
    )
    layer.reset_parameters(std=0.1, generator=generator)
    x = squash(torch.randn(sizes.batch, sizes.inputs, sizes.in_dim, generator=generator))
    return layer.to(device), x.to(device)


def _step(layer: CapsuleExperts, x: Tensor) -> Step:
    def step() -> None:
        layer.weight.grad = None
        layer.contrastive_divergence(x).backward()

    return step


def _captured(layer: CapsuleExperts, x: Tensor) -> Step:
    """Record the step once; what is timed is its replay."""
    step = _step(layer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _einsum(sizes: Sizes, device: torch.device, step: Callable[..., Tensor]) -> Step:
    layer, x = _problem(sizes, device)
    weight = layer.weight.detach()
    return lambda: step(x, weight, sizes)


def einsum_step(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Compute −ΔW of Algorithm 1 with votes kept: (B, I, K), (I, J, D, K) → (I, J, D, K)."""
    axis = 1 if sizes.normalize == "inputs" else 2
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    norm = u.square().sum(-1, keepdim=True)
    unit = u * torch.where(norm > 0, norm.rsqrt(), 0)
    b = u.new_zeros(u.shape[:3])
    c = torch.softmax(b, axis)
    z = torch.einsum("bij,bijd->bjd", c, u)
    for _ in range(sizes.iterations - 1):
        b = b + sizes.sharpness * torch.einsum("bijd,bjd->bij", unit, F.direction(z))
        c = torch.softmax(b, axis)
        z = torch.einsum("bij,bijd->bjd", c, u)
    sent = c.unsqueeze(-1) * F.squash(z).unsqueeze(1)
    model = F.squash(torch.einsum("bijd,ijdk->bik", sent, weight))
    z_model = torch.einsum("bij,bijd->bjd", c, torch.einsum("bik,ijdk->bijd", model, weight))
    toward = c.unsqueeze(-1) * _pull(z).unsqueeze(1)
    away = c.unsqueeze(-1) * _pull(z_model).unsqueeze(1)
    gradient = torch.einsum("bijd,bik->ijdk", away, model) - torch.einsum("bijd,bik->ijdk", toward, x)
    return gradient * (2 / len(x))


def _pull(z: Tensor) -> Tensor:
    pull: Tensor = z / (1 + z.square().sum(-1, keepdim=True))
    return pull


# What is measured


def flops(sizes: Sizes) -> float:
    """Count the operations of one step on the vote-free path: products with W, and what is done to each vote."""
    pairs = sizes.batch * sizes.inputs * sizes.experts
    product = 2 * pairs * sizes.out_dim * sizes.in_dim
    vote = 2 * pairs * sizes.out_dim
    passes = sizes.iterations * product + (sizes.iterations - 1) * 3 * vote  # up; agreement, norm, mixing
    return float(passes + (product + vote) + (product + vote) + 2 * (product + vote))  # down, up again, ΔW


def least_bytes(sizes: Sizes) -> float:
    """Count the bytes a step must move at least: W and x in, ΔW out."""
    weight = sizes.inputs * sizes.experts * sizes.out_dim * sizes.in_dim
    return 4.0 * (2 * weight + sizes.batch * sizes.inputs * sizes.in_dim)


def extra_memory(version: str, sizes: Sizes, device: torch.device) -> int | None:
    """Measure the memory that a step takes beyond weight and data, at its peak.

    On a CPU, by how far a process of its own grows during a step, after a step of a tiny problem that brings in code
    and buffers of the libraries. It is 0 if the step fits into what making the problem had taken and given back, and
    None where the system does not tell.
    """
    if device.type == "cpu":
        if not STATUS.exists():
            return None
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return int(pool.apply(_growth_of_a_process, (version, sizes)))
    step = _versions(device)[version](sizes, device)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _growth_of_a_process(version: str, sizes: Sizes) -> int:
    make = _versions(torch.device("cpu"))[version]
    make(replace(sizes, batch=4), torch.device("cpu"))()
    step = make(sizes, torch.device("cpu"))
    before = _highest()
    step()
    return _highest() - before


def _highest() -> int:
    """Read the most memory that this process ever held; getrusage would count that of its parent before it."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    return 1024 * int(kilobytes)


def _time(step: Step, repeats: int, device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(repeats):
        step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / repeats


def _ceilings(device: torch.device) -> dict[str, float]:
    """Measure what the device can do: a large copy, and a large product, on a GPU in float32 and in tf32."""
    many, side = (2**30, 8192) if device.type == "cuda" else (2**26, 2048)
    source = torch.rand(many, device=device)
    target = source.clone()
    found = {"copy_bytes_per_s": 2 * 4 * many / _time(lambda: target.copy_(source), 5, device)}
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    for name, tf32 in (("float32", False), ("tf32", True)) if device.type == "cuda" else (("float32", False),):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left @ right
        found[f"{name}_flop_per_s"] = 2 * side**3 / _time(lambda: left @ right, 5, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    found = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
    return found | {"routing": kernels.describe(device)}


if __name__ == "__main__":
    main()
