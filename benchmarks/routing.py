"""Compare one learning step of the capsule encoder with einsum, eager and compiled, in one run.

`python -m benchmarks --device cuda` (or cpu; `make bench` runs the latter) prints tables: median
time and range of each version, ratios to poecaps, memory beyond weight and data, shares of the
device's peak rates, the decoder's step compared with the reference, how time and memory grow with
each size, and the largest number of input capsules that can be trained. The versions take turns in
every round, so that a change of the machine's speed affects all of them. `--json FILE` writes the
numbers to a file, `--plot FILE` plots the growth; `--read FILE` only plots the numbers of a file.

The einsum versions are as fast as einsum allows: every contraction has two operands, the gradient
is the closed form of Algorithm 1 instead of autograd, intermediate tensors are freed as soon as
possible, and the order of contractions is the fastest of three on the device, determined in each
run for every batch size, separately for eager and compiled einsum (`ORDERS`; for the decoder's step
the faster of two, `DECODER_ORDERS`). `reference` is `poecaps.functional` under autograd;
`poecaps, plain PyTorch` is the version for machines without a C compiler.

On a GPU, steps are launched by the host, or replayed as a CUDA graph. The launches of a step of
poecaps are recorded once and then repeated (`poecaps.kernels.triton.plan`);
`poecaps, Triton, launches not recorded` is the step without that.

The tables of docs/benchmarks.md for a GPU come from
`python -m benchmarks --device cuda --json docs/results/routing-cuda.json`; `--no-growth` and
`--no-largest` leave out the parts that take longest. `python -m benchmarks.passes` measures the
passes of the layer under autograd.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks import machine
from benchmarks.internals import backend_name, recorded_launches, simd_available
from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.layer import CapsuleDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from benchmarks.machine import Step

    Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one step; the defaults are those of the paper."""

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
    "in_dim": (4, 8, 16),
    "out_dim": (8, 16, 32),
    "iterations": (1, 3, 8),
}
INPUT_COUNTS = (10_000, 30_000, 100_000, 300_000, 1_000_000)  # tried for the largest layer
LARGE_LAYER = (8, 64, 16, 256)  # K, J, D and B of the largest layer
FEW_ROUNDS = 3  # where many sizes are measured
PLAIN_TORCH = "poecaps, plain PyTorch"


def poecaps_name(device: torch.device, *, graph: bool = False) -> str:
    """Return the name of the fastest poecaps version on a device, in tables and JSON files."""
    return f"poecaps, {backend_name(device)}{', CUDA graph' if graph else ''}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[256, 1024], help="batch sizes (default: 256 1024)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of turns of each version (default: 9)"
    )
    parser.add_argument("--normalize", default="inputs", choices=F.AXES)
    parser.add_argument("--no-compile", action="store_true", help="skip compiled einsum")
    parser.add_argument(
        "--autotune", action="store_true", help="compile einsum in mode max-autotune-no-cudagraphs"
    )
    parser.add_argument(
        "--no-growth", action="store_true", help="skip the growth of time and memory with each size"
    )
    parser.add_argument(
        "--no-largest",
        action="store_true",
        help="skip the search for the largest number of input capsules (GPU only)",
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--plot", type=Path, help="file to plot the growth of time and memory to")
    parser.add_argument("--read", type=Path, help="do not measure; plot the numbers of this file")
    options = parser.parse_args(arguments)
    if options.read is not None:
        report = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        report = {}
        for report in measure(options, {"command": machine.command("benchmarks", parser, options)}):
            machine.write(
                report, options.json
            )  # after every part, so that an interrupted run keeps it
    if options.plot is not None and "growth" in report:
        plot(report, options.plot)


def measure(options: argparse.Namespace, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure everything that the options request, and yield the report after every part."""
    device, base = torch.device(options.device), Sizes(normalize=options.normalize)
    report |= {"machine": machine.describe(device), "sizes": asdict(base)}
    report["ceilings"] = machine.ceilings(device)
    print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
    compile_modes = (
        {}
        if options.no_compile
        else {"compiled": "max-autotune-no-cudagraphs" if options.autotune else "default"}
    )
    report["orders"], report["steps"], known = {}, {}, {}
    fastest: dict[Sizes, dict[str, str]] = {}
    for batch in options.batch:
        sizes = replace(base, batch=batch)
        tried = try_orders(sizes, device, options.rounds, compile_modes)
        report["orders"][str(batch)] = tried
        fastest[sizes] = {mode: _fastest(results) for mode, results in tried.items()}
        known[sizes] = compare(
            sizes, device, options.rounds, _versions(device, fastest[sizes], compile_modes)
        )
        report["steps"][str(batch)] = known[sizes]
        print(table(sizes, known[sizes], report["ceilings"]), flush=True)
        yield report
    report["decoder"] = {}
    for batch in options.batch if device.type == "cuda" else options.batch[:1]:
        sizes = replace(base, batch=batch)
        # Compiled einsum for the first batch size only: compilation takes most of the time.
        modes = compile_modes if batch == options.batch[0] else {}
        versions = _decoder_versions(sizes, device, modes)
        results = compare(sizes, device, min(options.rounds, 2 * FEW_ROUNDS), versions)
        report["decoder"][str(batch)] = results
        print(table(sizes, results, {}, "decoder"), flush=True)
        yield report
    if not options.no_growth:
        order = next(iter(fastest.values()))["eager"]
        report["growth"] = measure_growth(
            base, device, min(options.rounds, FEW_ROUNDS), order, known
        )
        yield report
    if device.type == "cuda" and not options.no_largest:
        report["largest"] = measure_largest(device)
        yield report


# --------------------------------------------------------------------------------------------------
# Measurements


def compare(
    sizes: Sizes, device: torch.device, rounds: int, versions: Mapping[str, Version]
) -> Results:
    """Time the versions of one step in turns, and measure the memory of each.

    Times are compared with those of poecaps: replays of a CUDA graph with the replay of poecaps,
    all others with the ordinary step of poecaps.
    """
    steps: dict[str, Step] = {}
    results: Results = {}
    for name, version in versions.items():
        results[name] = {"order": version.order}
        try:
            steps[name] = version.make(sizes, device)
        except RuntimeError as error:  # the capture can fail, and memory can run out
            results[name]["failed"] = str(error).splitlines()[0]
    for name, times in machine.time_in_turns(steps, rounds, device).items():
        results[name] |= times
    for name in steps:
        version, seconds = versions[name], results[name]["median_s"]
        baseline = next(
            other
            for other, candidate in versions.items()
            if candidate.is_poecaps and candidate.graph == version.graph
        )
        poecaps_seconds = results[baseline].get("median_s")
        ratio = seconds / poecaps_seconds if poecaps_seconds else None
        results[name] |= {"times_poecaps": ratio} | version.rates(sizes, seconds)
        results[name]["extra_bytes"] = (
            None if version.graph else machine.extra_memory(steps[name], device)
        )
    steps.clear()
    gc.collect()
    return results


def table(sizes: Sizes, results: Results, ceilings: Mapping[str, float], part: str = "step") -> str:
    """Format the results of `compare`."""
    head = (
        f"{'median ms':>12}{'min':>9}{'max':>9}{'× poecaps':>11}{'extra MB':>11}"
        f"{'% product':>11}{'% copy':>8}"
    )
    lines = [f"\nB = {sizes.batch:>4}: {part:<34}{head}"]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"{'':<10}{name:<34}  {result['failed']}")
            continue
        numbers = "{:12.3f}{:9.3f}{:9.3f}".format(
            *(1e3 * result[key] for key in ("median_s", "min_s", "max_s"))
        )
        memory = "" if result["extra_bytes"] is None else f"{result['extra_bytes'] / 1e6:.1f}"
        shares = [share(result, ceilings, *rates) for rates in (PRODUCT_RATES, COPY_RATES)]
        cells = ["" if value is None else f"{value:.1%}" for value in shares]
        ratio = "" if result["times_poecaps"] is None else f"{result['times_poecaps']:.2f}"
        lines.append(
            f"{'':<10}{name:<34}{numbers}{ratio:>11}{memory:>11}{cells[0]:>11}{cells[1]:>8}"
        )
    return "\n".join(lines)


# Pairs: the rate of a version, and the peak rate of the device that it is compared with
PRODUCT_RATES = ("flop_per_s", "float32_flop_per_s")
COPY_RATES = ("bytes_per_s", "copy_bytes_per_s")


def share(
    result: Mapping[str, Any], ceilings: Mapping[str, float], rate: str, ceiling: str
) -> float | None:
    """Return the share of the device's peak rate that a version reaches, if both are known."""
    if result.get(rate) is None or ceiling not in ceilings:
        return None
    return float(result[rate] / ceilings[ceiling])


def try_orders(
    sizes: Sizes, device: torch.device, rounds: int, compile_modes: Mapping[str, str]
) -> dict[str, Results]:
    """Time einsum in each order of contractions.

    On a GPU, replays of CUDA graphs are timed, so that the host does not affect the choice.
    """
    results: dict[str, Results] = {}
    graph = device.type == "cuda"
    for name, mode in {"eager": "", **compile_modes}.items():
        versions = {order: Version("einsum", order, mode=mode, graph=graph) for order in ORDERS}
        baseline = {poecaps_name(device, graph=graph): Version("poecaps", graph=graph)}
        results[name] = compare(sizes, device, min(rounds, FEW_ROUNDS), {**baseline, **versions})
        for order in ORDERS if graph else ():  # the memory of a replay cannot be measured
            step = replace(versions[order], graph=False).make(sizes, device)
            step()
            results[name][order]["extra_bytes"] = machine.extra_memory(step, device)
        for order in ORDERS:
            result = results[name][order]
            text = (
                result.get("failed")
                or f"{1e3 * result['median_s']:9.3f} ms, {result['times_poecaps']:6.2f} × poecaps"
            )
            print(f"{name:>10}, {order:<24} {text}", flush=True)
    return results


def _fastest(results: Results) -> str:
    timed = {
        order: result["median_s"]
        for order, result in results.items()
        if result["order"] is not None and "median_s" in result
    }
    return min(timed, key=lambda order: timed[order])


def measure_growth(
    base: Sizes, device: torch.device, rounds: int, order: str, known: Mapping[Sizes, Results]
) -> dict[str, dict[str, Any]]:
    """Measure poecaps and eager einsum for several values of one size at a time.

    Sizes with known results are not measured again.
    """
    versions = _versions(device, {"eager": order}, {}, others=False)
    all_known = dict(known)
    growth: dict[str, dict[str, Any]] = {}
    for name, values in GROWTH.items():
        growth[name] = {}
        for value in values:
            sizes = replace(base, **{name: value})  # type: ignore[arg-type]
            if sizes not in all_known:
                all_known[sizes] = compare(sizes, device, rounds, versions)
            results = {version: all_known[sizes][version] for version in versions}
            growth[name][str(value)] = results
            texts = [
                f"{version} {1e3 * results[version]['median_s']:9.3f} ms"
                if "median_s" in results[version]
                else f"{version} failed"
                for version in (poecaps_name(device), "einsum, eager")
            ]
            print(f"{name:>10} = {value:>5}: {', '.join(texts)}", flush=True)
    return growth


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot time and memory against each size, on logarithmic axes."""
    from matplotlib.figure import Figure  # an optional dependency

    growth = report["growth"]
    figure = Figure(figsize=(3.25 * len(growth), 5.5), layout="constrained")
    panels = figure.subplots(2, len(growth), sharey="row", squeeze=False)
    for column, (name, results) in enumerate(growth.items()):
        for version in next(iter(results.values())):
            style = line_style(version)
            runs = {
                int(value): versions[version]
                for value, versions in results.items()
                if "median_s" in versions.get(version, {})
            }
            if not runs:
                continue
            panels[0, column].loglog(
                list(runs), [1e3 * run["median_s"] for run in runs.values()], style, label=version
            )
            memory = {
                value: run["extra_bytes"] / 1e6 for value, run in runs.items() if run["extra_bytes"]
            }
            if memory:
                panels[1, column].loglog(list(memory), list(memory.values()), style, label=version)
        panels[1, column].set_xlabel(SIZE_NAMES.get(name, name))
        for panel in panels[:, column]:
            panel.set_xticks([int(value) for value in results], list(results))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("ms per step")
    panels[1, 0].set_ylabel("MB beyond weight and data")
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"One learning step of the capsule encoder, {report['machine']['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


SIZE_NAMES = {
    "batch": "images B",
    "inputs": "input capsules I",
    "experts": "experts J",
    "in_dim": "input dimension K",
    "out_dim": "expert dimension D",
    "iterations": "iterations R",
}


def line_style(version: str) -> str:
    """Return the matplotlib format of a version: poecaps blue, einsum orange, graphs dotted."""
    graph = version.endswith("CUDA graph")
    if version.startswith("poecaps"):
        return "C0^:" if graph else "C0o-"
    return "C1v:" if graph else "C1s--"


def measure_largest(device: torch.device) -> dict[str, dict[str, Any]]:
    """Find the largest number of input capsules that trains, with complete steps of an optimizer.

    The versions are poecaps with SGD and with Adam, and eager einsum with SGD.
    """
    results: dict[str, dict[str, Any]] = {}
    for name in (
        f"{poecaps_name(device)}, SGD",
        f"{poecaps_name(device)}, Adam",
        "einsum (votes once), SGD",
        "einsum (no votes), SGD",
    ):
        results[name] = {}
        for inputs in INPUT_COUNTS:
            results[name][str(inputs)] = result = _try_inputs(name, inputs, device)
            gc.collect()
            torch.cuda.empty_cache()
            if result is None:
                print(f"{name}, I = {inputs:>9,}: out of memory", flush=True)
                break
            print(
                f"{name}, I = {inputs:>9,}: {result['seconds']:8.3f} s per step, "
                f"peak {result['peak_bytes'] / 2**30:6.1f} GiB, finite: {result['finite']}",
                flush=True,
            )
    return results


def _try_inputs(name: str, inputs: int, device: torch.device) -> dict[str, Any] | None:
    """Take two steps with this number of input capsules; None if memory runs out."""
    try:
        return _two_steps(name, inputs, device)
    except torch.cuda.OutOfMemoryError:
        return None


def _two_steps(name: str, inputs: int, device: torch.device) -> dict[str, Any]:
    """Take two complete steps, and time the second."""
    in_dim, experts, out_dim, batch = LARGE_LAYER
    torch.cuda.reset_peak_memory_stats(device)
    layer = CapsuleExperts(inputs, in_dim, experts, out_dim, sharpness=5.0, device=device)
    x = torch.rand(batch, inputs, in_dim, device=device).mul_(0.3)
    if name.endswith("Adam"):
        optimizer: torch.optim.Optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, fused=True)
    else:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, foreach=False)
    sizes = Sizes(batch, inputs, in_dim, experts, out_dim)
    order = "votes once" if "votes once" in name else "no votes"

    def step() -> None:
        if name.startswith("poecaps"):
            layer.contrastive_divergence(x).backward()
        else:
            layer.weight.grad = einsum_step(x, layer.weight.detach(), sizes, order)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    seconds = machine.seconds(step, 1, device)
    some_weights = layer.weight.detach()[:: max(1, inputs // 100)]
    return {
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "finite": bool(some_weights.isfinite().all()),
    }


# --------------------------------------------------------------------------------------------------
# Versions

Kind = Literal[
    "poecaps", "plain", "reference", "einsum", "decoder", "decoder reference", "decoder einsum"
]


@dataclass(frozen=True)
class Version:
    """One implementation of the step."""

    kind: Kind
    order: str | None = None
    """Order of einsum's contractions."""
    mode: str = ""
    """Mode of torch.compile; empty: not compiled."""
    graph: bool = False
    """Whether the step is captured as a CUDA graph and its replays are timed."""
    tf32: bool = False
    """Whether float32 products may round their operands to tf32."""
    recorded: bool = True
    """Whether poecaps records the launches of a step, and repeats them."""

    @property
    def is_poecaps(self) -> bool:
        """Whether this is the fastest version of poecaps, which others are compared with."""
        return self.kind in ("poecaps", "decoder")

    def make(self, sizes: Sizes, device: torch.device) -> Step:
        """Create the data, and return a function that takes the step and returns the gradient."""
        if self.kind == "einsum":
            step = _einsum(sizes, device, self.order or "", self.mode)
        elif self.kind == "decoder einsum":
            step = _decoder_einsum(sizes, device, self.order or "", self.mode)
        elif self.kind.startswith("decoder"):
            step = _decoder_step(sizes, device, reference=self.kind.endswith("reference"))
        elif self.kind == "plain":
            step = _plain_step(sizes, device)
        else:
            step = _step(*make_problem(sizes, device, reference=self.kind == "reference"))
        if device.type == "cuda" and self.is_poecaps:
            step = _with_recorded_launches(step, self.recorded)
        step = machine.with_precision("high" if self.tf32 else "", step)
        return machine.captured(step) if self.graph else step

    def rates(self, sizes: Sizes, seconds: float) -> dict[str, float]:
        """Convert the time of an encoder step to operations and, if known, bytes per second."""
        if self.kind.startswith("decoder"):
            return {}
        rates = {"flop_per_s": flops(sizes) / seconds}
        if self.kind in ("poecaps", "plain"):
            rates["bytes_per_s"] = minimum_bytes(sizes) / seconds
        elif self.order is not None and not self.mode:
            rates["bytes_per_s"] = einsum_bytes(sizes, self.order) / seconds
        return rates


def _versions(
    device: torch.device,
    orders: Mapping[str, str],
    compile_modes: Mapping[str, str],
    *,
    others: bool = True,
) -> dict[str, Version]:
    versions = {poecaps_name(device): Version("poecaps")}
    for name, order in orders.items():
        versions[f"einsum, {name}"] = Version("einsum", order, mode=compile_modes.get(name, ""))
    if device.type == "cuda":
        versions |= {
            f"{name}, CUDA graph": replace(version, graph=True)
            for name, version in versions.items()
        }
        compiled = versions.get("einsum, compiled, CUDA graph")
        if compiled is not None:
            versions["einsum, compiled, tf32, CUDA graph"] = replace(compiled, tf32=True)
    if others and device.type == "cuda":
        name = f"{poecaps_name(device)}, launches not recorded"
        versions[name] = Version("poecaps", recorded=False)
    if others and device.type == "cpu" and simd_available():
        versions[PLAIN_TORCH] = Version("plain")
    if others:
        versions["reference"] = Version("reference")
    return versions


def _decoder_versions(
    sizes: Sizes, device: torch.device, compile_modes: Mapping[str, str]
) -> dict[str, Version]:
    """Return the versions of the decoder's step, with einsum in the faster order."""
    graph = device.type == "cuda"
    # On a CPU, compiled C does the routing and PyTorch the gradient.
    versions = {poecaps_name(device) if graph else "poecaps": Version("decoder")}
    for name, mode in {"eager": "", **compile_modes}.items():
        candidates = {
            order: Version("decoder einsum", order, mode=mode, graph=graph)
            for order in DECODER_ORDERS
        }
        baseline = {"poecaps": Version("decoder", graph=graph)}
        tried = compare(sizes, device, FEW_ROUNDS, {**baseline, **candidates})
        order = _fastest({order: tried[order] for order in candidates})
        versions[f"einsum, {name}"] = replace(candidates[order], graph=False)
    if graph:
        versions |= {
            f"{name}, CUDA graph": replace(version, graph=True)
            for name, version in versions.items()
        }
    return versions | {"reference": Version("decoder reference")}


def make_problem(
    sizes: Sizes, device: torch.device | str = "cpu", *, reference: bool = False
) -> tuple[CapsuleExperts, Tensor]:
    """Make a layer with random weights, and capsules for it."""
    generator = torch.Generator().manual_seed(0)
    layer = CapsuleExperts(
        sizes.inputs,
        sizes.in_dim,
        sizes.experts,
        sizes.out_dim,
        iterations=sizes.iterations,
        sharpness=sizes.sharpness,
        normalize=sizes.normalize,
        backend="reference" if reference else None,
    )
    layer.reset_parameters(std=0.1, generator=generator)
    x = squash(torch.randn(sizes.batch, sizes.inputs, sizes.in_dim, generator=generator))
    return layer.to(device), x.to(device)


def _step(layer: CapsuleExperts, x: Tensor) -> Step:
    return lambda: _gradient(layer, layer.contrastive_divergence(x))


def _plain_step(sizes: Sizes, device: torch.device) -> Step:
    """Return the step of the plain PyTorch backend."""
    layer, x = make_problem(sizes, device)
    layer.backend = "torch"
    return _step(layer, x)


def _decoder_step(sizes: Sizes, device: torch.device, *, reference: bool) -> Step:
    """Return a learning step of the decoder, from the experts to the capsules."""
    layer, y, x = _decoder_problem(sizes, device, reference=reference)
    return lambda: _gradient(layer, layer.contrastive_divergence(y, x))


def _decoder_problem(
    sizes: Sizes, device: torch.device, *, reference: bool
) -> tuple[CapsuleDecoder, Tensor, Tensor]:
    """Make a decoder with random weights, codes y (B, J, D) and capsules x (B, I, K)."""
    generator = torch.Generator().manual_seed(0)
    layer = CapsuleDecoder(
        sizes.experts,
        sizes.out_dim,
        sizes.inputs,
        sizes.in_dim,
        iterations=sizes.iterations,
        backend="reference" if reference else None,
    )
    layer.reset_parameters(std=0.1, generator=generator)
    y, x = (
        squash(torch.randn(sizes.batch, count, dim, generator=generator)).to(device)
        for count, dim in ((sizes.experts, sizes.out_dim), (sizes.inputs, sizes.in_dim))
    )
    return layer.to(device), y, x


def _with_recorded_launches(step: Step, recorded: bool) -> Step:
    def launched() -> Any:
        with recorded_launches(recorded):
            return step()

    return launched


def _gradient(layer: CapsuleExperts | CapsuleDecoder, loss: Tensor) -> Tensor | None:
    """Return the gradient and remove it from the layer, so that it counts as memory of the step."""
    loss.backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    return gradient


def _einsum(sizes: Sizes, device: torch.device, order: str, mode: str) -> Step:
    layer, x = make_problem(sizes, device)
    weight = layer.weight.detach()
    step = ORDERS[order]
    if mode:
        step = torch.compile(step, mode=mode, dynamic=False)
    return lambda: step(x, weight, sizes)


def _decoder_einsum(sizes: Sizes, device: torch.device, order: str, mode: str) -> Step:
    layer, y, x = _decoder_problem(sizes, device, reference=True)
    weight = layer.weight.detach()
    routing = replace(
        sizes,
        inputs=sizes.experts,
        in_dim=sizes.out_dim,
        experts=sizes.inputs,
        out_dim=sizes.in_dim,
        sharpness=layer.sharpness,
        normalize=layer.normalize,
    )
    step: Any = decoder_einsum_step
    if mode:
        step = torch.compile(step, mode=mode, dynamic=False)
    return lambda: step(y, x, weight, routing, DECODER_ORDERS[order])


# --------------------------------------------------------------------------------------------------
# Einsum


def einsum_step(x: Tensor, weight: Tensor, sizes: Sizes, order: str = "votes once") -> Tensor:
    """Compute −ΔW of Algorithm 1 with einsum: (B, I, K), (I, J, D, K) → (I, J, D, K)."""
    return ORDERS[order](x, weight, sizes)


def _as_written(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Follow the equations literally: votes (B, I, J, D) from data and from the reconstruction."""
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    c, z = _route(u, sizes)
    del u
    weighted = torch.einsum("bij,bjd->bijd", c, F.squash(z))
    x_model = F.squash(torch.einsum("bijd,ijdk->bik", weighted, weight))
    del weighted
    z_model = torch.einsum("bij,bijd->bjd", c, torch.einsum("bik,ijdk->bijd", x_model, weight))
    model_term = torch.einsum(
        "bijd,bik->ijdk", torch.einsum("bij,bjd->bijd", c, _grad_z(z_model)), x_model
    )
    data_term = torch.einsum("bijd,bik->ijdk", torch.einsum("bij,bjd->bijd", c, _grad_z(z)), x)
    return (model_term - data_term) * (2 / len(x))


def _votes_once(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Keep votes for the routing only; later weight the inputs (K < D) before products with W."""
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    c, z = _route(u, sizes)
    del u
    return _weight_gradient(x, weight, c, z)


def _no_votes(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Weight the inputs before every product with W; norms of votes from WᵀW, no votes."""
    return _weight_gradient(x, weight, *route_without_votes(x, weight, sizes))


def route_with_votes(x: Tensor, weight: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Route by cosine agreement, with votes: → c (B, I, J) and z (B, J, D)."""
    return _route(torch.einsum("bik,ijdk->bijd", x, weight), sizes)


def route_without_votes(x: Tensor, weight: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Route by cosine agreement, without votes: → c (B, I, J) and z (B, J, D)."""
    axis = 1 if sizes.normalize == "inputs" else 2
    gram = torch.einsum("ijdk,ijdl->ijkl", weight, weight)
    square = torch.einsum("bijk,bik->bij", torch.einsum("bil,ijkl->bijk", x, gram), x)
    scale = sizes.sharpness * torch.where(square > 0, square.clamp(min=1e-30).rsqrt(), 0)
    b = torch.zeros_like(square)
    c = torch.softmax(b, axis)
    z = _preactivation(c, x, weight)
    for _ in range(sizes.iterations - 1):
        projected = torch.einsum("bjd,ijdk->bijk", F.direction(z), weight)
        b = b + scale * torch.einsum("bijk,bik->bij", projected, x)
        del projected
        c = torch.softmax(b, axis)
        z = _preactivation(c, x, weight)
    return c, z


def _route(u: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Route votes (B, I, J, D) by cosine agreement; return c (B, I, J) and z (B, J, D)."""
    axis = 1 if sizes.normalize == "inputs" else 2
    norm = torch.linalg.vector_norm(u, dim=-1)
    scale = sizes.sharpness * torch.where(norm > 0, 1 / norm, 0)
    b = torch.zeros_like(norm)
    c = torch.softmax(b, axis)
    z = torch.einsum("bij,bijd->bjd", c, u)
    for _ in range(sizes.iterations - 1):
        b = b + scale * torch.einsum("bijd,bjd->bij", u, F.direction(z))
        c = torch.softmax(b, axis)
        z = torch.einsum("bij,bijd->bjd", c, u)
    return c, z


def _weight_gradient(x: Tensor, weight: Tensor, c: Tensor, z: Tensor) -> Tensor:
    """Reconstruct, and compute the gradient without any tensor larger than (B, I, J, K)."""
    x_model = F.squash(
        torch.einsum("bij,bijk->bik", c, torch.einsum("bjd,ijdk->bijk", F.squash(z), weight))
    )
    weighted = torch.einsum("bij,bik->bijk", c, x_model)
    z_model = torch.einsum("bijk,ijdk->bjd", weighted, weight)
    gradient = torch.einsum("bjd,bijk->ijdk", _grad_z(z_model), weighted)
    del weighted
    gradient = gradient - torch.einsum(
        "bjd,bijk->ijdk", _grad_z(z), torch.einsum("bij,bik->bijk", c, x)
    )
    return gradient * (2 / len(x))


def _preactivation(c: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bijk,ijdk->bjd", torch.einsum("bij,bik->bijk", c, x), weight)


def _grad_z(z: Tensor) -> Tensor:
    """Compute g(z) = z/(1+‖z‖²), half the negative gradient of the free energy in z."""
    grad_z: Tensor = z / (1 + z.square().sum(-1, keepdim=True))
    return grad_z


ORDERS: dict[str, Callable[[Tensor, Tensor, Sizes], Tensor]] = {
    "as written": _as_written,
    "votes once": _votes_once,
    "no votes": _no_votes,
}


def decoder_einsum_step(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    sizes: Sizes,
    route: Callable[[Tensor, Tensor, Sizes], tuple[Tensor, Tensor]],
) -> Tensor:
    """Compute −ΔU of the decoder: (B, J, D), (B, I, K), (J, I, K, D) → (J, I, K, D).

    Outputs (K < D) are weighted before the products with y. `sizes` are those of the routing from
    the experts to the capsules.
    """
    e, z_model = route(y, weight, sizes)
    weighted = torch.einsum("bji,bik->bjik", e, F.squash(z_model))
    y_model = F.squash(torch.einsum("bjik,jikd->bjd", weighted, weight))
    weighted = torch.einsum("bji,bik->bjik", e, _grad_z(z_model))
    gradient = torch.einsum("bjik,bjd->jikd", weighted, y_model)
    weighted = torch.einsum("bji,bik->bjik", e, F.g_of_squashed(x))
    gradient = gradient - torch.einsum("bjik,bjd->jikd", weighted, y)
    return gradient * (2 / len(y))


DECODER_ORDERS = {"votes": route_with_votes, "no votes": route_without_votes}


# --------------------------------------------------------------------------------------------------
# Operations and bytes of a step


def flops(sizes: Sizes) -> float:
    """Count the operations of a step, the same for all versions: recomputation is not counted.

    These are five products of the size of the votes with W (preactivation of the data,
    reconstruction, preactivation of the reconstruction, two for the gradient), and for each vote
    its norm, R weighted sums and R − 1 agreements.
    """
    pairs = sizes.batch * sizes.inputs * sizes.experts
    return float(2 * pairs * sizes.out_dim * (5 * sizes.in_dim + 2 * sizes.iterations))


def minimum_bytes(sizes: Sizes) -> float:
    """Count the bytes that a step must move at least: read W and x, write ΔW."""
    weight = sizes.inputs * sizes.experts * sizes.out_dim * sizes.in_dim
    return 4.0 * (2 * weight + sizes.batch * sizes.inputs * sizes.in_dim)


def einsum_bytes(sizes: Sizes, order: str) -> float:
    """Count the bytes that eager einsum writes and reads at least.

    Only tensors of the size of the votes (B, I, J, D) or (B, I, J, K) count.
    """
    pairs, again = 4.0 * sizes.batch * sizes.inputs * sizes.experts, sizes.iterations - 1
    votes, inputs = pairs * sizes.out_dim, pairs * sizes.in_dim
    # Votes: written, read for the norm and the first sum; then for each agreement and sum
    routing = 2 + 1 + 2 * again
    return {
        # weighted experts, votes of the reconstruction, both terms of the gradient
        "as written": votes * (routing + 2 + 2 + 2 + 2),
        # reconstruction; its weighted inputs, z, gradient; weighted data, gradient
        "votes once": votes * routing + inputs * (2 + 3 + 2),
        "no votes": inputs * (2 + 2 + 4 * again + 2 + 3 + 2),
    }[order]


if __name__ == "__main__":
    main()
