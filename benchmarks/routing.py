"""Time one learning step of the capsule encoder: ours against einsum, eager and compiled, in one run.

`python -m benchmarks.routing --device cuda` (or cpu) prints a table: median time and spread of each version, ratios to
ours, peak memory beyond weight and data, the largest number of inputs that trains, and what share of the device's own
measured rates that is. Versions take turns in every round, so that a change of the machine's speed meets all of them.

The opponents are written as well as einsum allows: the votes are made once a step and kept, contractions go in their
best order, and the gradient is the closed form of Algorithm 1 rather than autograd's. `reference` is
`poecaps.functional` under autograd.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import CapsuleExperts, squash
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

INPUTS, IN_DIM, EXPERTS, OUT_DIM, ITERATIONS = 576, 8, 20, 16, 3  # the paper's
SHARPNESS = 5.0
LADDER = (10_000, 30_000, 100_000, 300_000, 1_000_000)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024], help="batch sizes (default: 256 1024)")
    parser.add_argument("--rounds", type=int, default=9, help="how often the versions take turns (default: 9)")
    parser.add_argument("--normalize", default="inputs", choices=F.AXES)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled opponent")
    parser.add_argument("--no-ladder", action="store_true", help="leave out the search for the largest I")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report: dict[str, Any] = {"machine": _machine(device), "sizes": _sizes(options.normalize), "steps": {}}
    print(report["machine"])
    if device.type == "cuda":
        report["ceilings"] = _ceilings(device)
        print(report["ceilings"])
    for batch in options.batch:
        report["steps"][batch] = measure(batch, device, options)
    if device.type == "cuda" and not options.no_ladder:
        report["largest"] = climb(device)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(batch: int, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Time the versions of one step at one batch size, in turns."""
    layer, x = _problem(batch, device, options.normalize)
    steps = {"ours": _step(layer, x)}
    if device.type == "cuda":
        steps["ours, CUDA graph"] = _captured(layer, x)
    weight = layer.weight.detach()
    steps["einsum, eager"] = lambda: einsum_step(x, weight, options.normalize)
    if not options.no_compile:
        compiled = torch.compile(einsum_step)
        steps["einsum, compiled"] = lambda: compiled(x, weight, options.normalize)
    reference, _ = _problem(batch, device, options.normalize, backend="reference")
    steps["reference"] = _step(reference, x)
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        repeats[name] = max(1, min(200, int(0.1 / _time(step, 3, device))))
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(_time(step, repeats[name], device))
    ours = statistics.median(times["ours"])
    result = {}
    print(f"\nB = {batch}: {'step':<20}{'median ms':>12}{'min':>9}{'max':>9}{'× ours':>9}{'extra MB':>11}")
    for name, values in times.items():
        middle = statistics.median(values)
        extra = _extra_memory(steps[name], layer, device) if "graph" not in name else None
        result[name] = {
            "median_s": middle,
            "min_s": min(values),
            "max_s": max(values),
            "times_ours": middle / ours,
            "extra_bytes": extra,
        }
        memory = "" if extra is None else f"{extra / 1e6:11.1f}"
        line = f"{1e3 * middle:12.3f}{1e3 * min(values):9.3f}{1e3 * max(values):9.3f}{middle / ours:9.2f}{memory}"
        print(f"{'':<9}{name:<20}{line}")
    work = flops(batch)
    result["ours"]["flop_per_s"] = work / ours
    result["ours"]["bytes_per_s"] = least_bytes(batch) / ours
    rate, traffic = work / ours / 1e12, least_bytes(batch) / ours / 1e9
    print(f"{'':<9}ours: {rate:.2f} TFLOP/s, {traffic:.0f} GB/s of the least traffic")
    return result


def climb(device: torch.device) -> dict[str, Any]:
    """Find how many inputs train at J = 64, B = 256, on our path."""
    found: dict[str, Any] = {}
    for inputs in LADDER:
        layer = x = None
        try:
            layer = CapsuleExperts(inputs, IN_DIM, 64, OUT_DIM, sharpness=SHARPNESS, device=device)
            x = torch.rand(256, inputs, IN_DIM, device=device).mul_(0.3)
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


def einsum_step(x: Tensor, weight: Tensor, normalize: F.Axis) -> Tensor:
    """Compute −ΔW of Algorithm 1 with votes kept: (B, I, K), (I, J, D, K) → (I, J, D, K)."""
    axis = 1 if normalize == "inputs" else 2
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    norm = u.square().sum(-1, keepdim=True)
    unit = u * torch.where(norm > 0, norm.rsqrt(), 0)
    b = u.new_zeros(u.shape[:3])
    c = torch.softmax(b, axis)
    z = torch.einsum("bij,bijd->bjd", c, u)
    for _ in range(ITERATIONS - 1):
        b = b + SHARPNESS * torch.einsum("bijd,bjd->bij", unit, F.direction(z))
        c = torch.softmax(b, axis)
        z = torch.einsum("bij,bijd->bjd", c, u)
    sent = c.unsqueeze(-1) * F.squash(z).unsqueeze(1)
    model = F.squash(torch.einsum("bijd,ijdk->bik", sent, weight))
    z_model = torch.einsum("bij,bijd->bjd", c, torch.einsum("bik,ijdk->bijd", model, weight))
    toward = c.unsqueeze(-1) * _pull(z).unsqueeze(1)
    away = c.unsqueeze(-1) * _pull(z_model).unsqueeze(1)
    gradient = torch.einsum("bijd,bik->ijdk", away, model) - torch.einsum("bijd,bik->ijdk", toward, x)
    return gradient * (2 / len(x))


def flops(batch: int) -> float:
    """Count the operations of one step on the vote-free path: products with W, and what is done to each vote."""
    pairs = batch * INPUTS * EXPERTS
    product = 2 * pairs * OUT_DIM * IN_DIM
    vote = 2 * pairs * OUT_DIM
    passes = ITERATIONS * product + (ITERATIONS - 1) * 3 * vote  # up; agreement, norm, mixing
    return float(passes + (product + vote) + (product + vote) + 2 * (product + vote))  # down, up again, ΔW


def least_bytes(batch: int) -> float:
    """Count the bytes a step must move at least: W and x in, ΔW out."""
    return 4.0 * (2 * INPUTS * EXPERTS * OUT_DIM * IN_DIM + batch * INPUTS * IN_DIM)


def _pull(z: Tensor) -> Tensor:
    pull: Tensor = z / (1 + z.square().sum(-1, keepdim=True))
    return pull


def _problem(batch: int, device: torch.device, normalize: F.Axis, backend: Any = None) -> tuple[CapsuleExperts, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = CapsuleExperts(
        INPUTS,
        IN_DIM,
        EXPERTS,
        OUT_DIM,
        iterations=ITERATIONS,
        sharpness=SHARPNESS,
        normalize=normalize,
        backend=backend,
    )
    layer.reset_parameters(std=0.1, generator=generator)
    x = squash(torch.randn(batch, INPUTS, IN_DIM, generator=generator))
    return layer.to(device), x.to(device)


def _step(layer: CapsuleExperts, x: Tensor) -> Callable[[], Any]:
    def step() -> None:
        layer.weight.grad = None
        layer.contrastive_divergence(x).backward()

    return step


def _captured(layer: CapsuleExperts, x: Tensor) -> Callable[[], Any]:
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


def _time(step: Callable[[], Any], repeats: int, device: torch.device) -> float:
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


def _extra_memory(step: Callable[[], Any], layer: CapsuleExperts, device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    layer.weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _ceilings(device: torch.device) -> dict[str, float]:
    """Measure what the device can do: a large copy, a large product in float32 and in tf32."""
    source = torch.rand(2**30, device=device)
    target = source.clone()
    copy = 2 * 4 * source.numel() / _time(lambda: target.copy_(source), 5, device)
    left, right = (torch.randn(8192, 8192, device=device) for _ in range(2))
    rates = {}
    for name, tf32 in (("float32", False), ("tf32", True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left @ right
        rates[f"{name}_flop_per_s"] = 2 * 8192**3 / _time(lambda: left @ right, 5, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"copy_bytes_per_s": copy, **rates}


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    found = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
    return found


def _sizes(normalize: str) -> dict[str, Any]:
    return {"I": INPUTS, "K": IN_DIM, "J": EXPERTS, "D": OUT_DIM, "R": ITERATIONS, "normalize": normalize}


if __name__ == "__main__":
    main()
