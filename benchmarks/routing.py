"""Time one learning step of the capsule encoder: ours against einsum, eager and compiled, in one run.

`python -m benchmarks --device cuda` (or cpu; `make bench` is the latter) prints tables: median time and spread of each
version, ratios to ours, memory beyond weight and data, shares of what the device can do, the decoder's step against the
reference, how time and memory grow with each size, and the largest number of inputs that trains. Versions take turns in
every round, so that a change of the machine's speed meets all of them. `--json FILE` keeps the numbers, `--plot FILE`
draws how they grow; `--read FILE` measures nothing and draws what a file holds.

The opponents are written as well as einsum allows: every contraction has two operands, the gradient is the closed form
of Algorithm 1 rather than autograd's, nothing is kept longer than it is needed, and the order of contractions is the
fastest of three on the device, found anew in each run for every batch size and for eager and compiled einsum each
(`ORDERS`). `reference` is `poecaps.functional` under autograd; `ours, plain PyTorch` is what stands in on a CPU where
nothing can be compiled.
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
from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import lanes, votefree
from poecaps.kernels.common import Options
from poecaps.layer import CapsuleDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from benchmarks.machine import Step

    Results = dict[str, dict[str, Any]]


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
LADDER = (10_000, 30_000, 100_000, 300_000, 1_000_000)
LAYER = (8, 64, 16, 256)  # K, J, D and B of the ladder
FEW = 3  # rounds, where many sizes are measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[256, 1024], help="batch sizes (default: 256 1024)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="how often the versions take turns (default: 9)"
    )
    parser.add_argument("--normalize", default="inputs", choices=F.AXES)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled opponent")
    parser.add_argument(
        "--autotune", action="store_true", help="compile it in mode max-autotune-no-cudagraphs"
    )
    parser.add_argument(
        "--no-growth", action="store_true", help="leave out how time and memory grow with each size"
    )
    parser.add_argument(
        "--no-ladder", action="store_true", help="leave out the search for the largest I (GPU only)"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--plot", type=Path, help="where to draw how time and memory grow")
    parser.add_argument("--read", type=Path, help="measure nothing; draw the numbers of this file")
    options = parser.parse_args(arguments)
    if options.read is not None:
        report = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        report = {}
        for report in measure(options, {"command": machine.command("benchmarks", parser, options)}):
            machine.write(report, options.json)  # after every part, for a run may be cut
    if options.plot is not None and "growth" in report:
        draw(report, options.plot)


def measure(options: argparse.Namespace, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure everything that the options ask for, and yield the report whenever something was added to it."""
    device, usual = torch.device(options.device), Sizes(normalize=options.normalize)
    report |= {"machine": machine.describe(device), "sizes": asdict(usual)}
    report["ceilings"] = machine.ceilings(device)
    print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
    ways = (
        {}
        if options.no_compile
        else {"compiled": "max-autotune-no-cudagraphs" if options.autotune else "default"}
    )
    report["orders"], report["steps"], known = {}, {}, {}
    fastest: dict[Sizes, dict[str, str]] = {}
    for batch in options.batch:
        sizes = replace(usual, batch=batch)
        report["orders"][str(batch)] = tried = try_orders(sizes, device, options.rounds, ways)
        fastest[sizes] = {way: _fastest(found) for way, found in tried.items()}
        known[sizes] = compare(
            sizes, device, options.rounds, _versions(device, fastest[sizes], ways)
        )
        report["steps"][str(batch)] = known[sizes]
        print(table(sizes, known[sizes], report["ceilings"]), flush=True)
        yield report
    report["decoder"] = {}
    for batch in options.batch if device.type == "cuda" else options.batch[:1]:
        sizes = replace(usual, batch=batch)
        found = compare(sizes, device, min(options.rounds, 2 * FEW), _decoder_versions(device))
        report["decoder"][str(batch)] = found
        print(table(sizes, found, {}, "decoder"), flush=True)
        yield report
    if not options.no_growth:
        order = next(iter(fastest.values()))["eager"]
        report["growth"] = grow(usual, device, min(options.rounds, FEW), order, known)
        yield report
    if device.type == "cuda" and not options.no_ladder:
        report["largest"] = climb(device)
        yield report


# ---------------------------------------------------------------------------------------------------------
# What is done with the versions


def compare(
    sizes: Sizes, device: torch.device, rounds: int, versions: Mapping[str, Version]
) -> Results:
    """Time the versions of one step, in turns, and measure the memory that each takes.

    A replay of a CUDA graph is set against our replay, anything else against our plain step.
    """
    steps: dict[str, Step] = {}
    result: Results = {}
    for name, version in versions.items():
        result[name] = {"order": version.order}
        try:
            steps[name] = version.make(sizes, device)
        except RuntimeError as error:  # a capture may fail, and memory run out
            result[name]["failed"] = str(error).splitlines()[0]
    for name, found in machine.in_turns(steps, rounds, device).items():
        result[name] |= found
    for name in steps:
        own = result[name]["median_s"]
        ours = result["ours, CUDA graph" if versions[name].graph else "ours"].get("median_s")
        result[name] |= {"times_ours": own / ours if ours else None} | versions[name].rates(
            sizes, own
        )
        result[name]["extra_bytes"] = (
            None if versions[name].graph else machine.extra_memory(steps[name], device)
        )
    steps.clear()
    gc.collect()
    return result


def table(sizes: Sizes, result: Results, ceilings: Mapping[str, float], what: str = "step") -> str:
    """Lay out what `compare` found."""
    head = f"{'median ms':>12}{'min':>9}{'max':>9}{'× ours':>9}{'extra MB':>11}{'% product':>11}{'% copy':>8}"
    lines = [f"\nB = {sizes.batch:>4}: {what:<34}{head}"]
    for name, found in result.items():
        if "failed" in found:
            lines.append(f"{'':<10}{name:<34}  {found['failed']}")
            continue
        numbers = "{:12.3f}{:9.3f}{:9.3f}".format(
            *(1e3 * found[key] for key in ("median_s", "min_s", "max_s"))
        )
        memory = "" if found["extra_bytes"] is None else f"{found['extra_bytes'] / 1e6:.1f}"
        shares = [share(found, ceilings, *which) for which in (OF_PRODUCT, OF_COPY)]
        cells = ["" if each is None else f"{each:.1%}" for each in shares]
        ratio = "" if found["times_ours"] is None else f"{found['times_ours']:.2f}"
        lines.append(
            f"{'':<10}{name:<34}{numbers}{ratio:>9}{memory:>11}{cells[0]:>11}{cells[1]:>8}"
        )
    return "\n".join(lines)


OF_PRODUCT, OF_COPY = ("flop_per_s", "float32_flop_per_s"), ("bytes_per_s", "copy_bytes_per_s")


def share(
    found: Mapping[str, Any], ceilings: Mapping[str, float], rate: str, ceiling: str
) -> float | None:
    """Tell which part of the device's own rate a version reaches, if both are known."""
    if found.get(rate) is None or ceiling not in ceilings:
        return None
    return float(found[rate] / ceilings[ceiling])


def try_orders(
    sizes: Sizes, device: torch.device, rounds: int, ways: Mapping[str, str]
) -> dict[str, Results]:
    """Time the opponents in each order of contractions; on a GPU replays of them, so that the host does not count."""
    found: dict[str, Results] = {}
    graph = device.type == "cuda"
    for way, mode in {"eager": "", **ways}.items():
        versions = {order: Version("einsum", order, mode=mode, graph=graph) for order in ORDERS}
        ours = {"ours, CUDA graph" if graph else "ours": Version("ours", graph=graph)}
        found[way] = compare(sizes, device, min(rounds, FEW), {**ours, **versions})
        for order in ORDERS if graph else ():  # a replay takes no memory of its own
            step = replace(versions[order], graph=False).make(sizes, device)
            step()
            found[way][order]["extra_bytes"] = machine.extra_memory(step, device)
        for order in ORDERS:
            each = found[way][order]
            said = (
                each.get("failed")
                or f"{1e3 * each['median_s']:9.3f} ms, {each['times_ours']:6.2f} × ours"
            )
            print(f"{way:>10}, {order:<24} {said}", flush=True)
    return found


def _fastest(found: Results) -> str:
    return min(
        (each for each in ORDERS if "median_s" in found[each]),
        key=lambda each: found[each]["median_s"],
    )


def grow(
    usual: Sizes, device: torch.device, rounds: int, order: str, known: Mapping[Sizes, Results]
) -> dict[str, dict[str, Any]]:
    """Measure ours and eager einsum while one size at a time changes; what is known already is not measured again."""
    versions = _versions(device, {"eager": order}, {}, others=False)
    all_known = dict(known)
    found: dict[str, dict[str, Any]] = {}
    for name, values in GROWTH.items():
        found[name] = {}
        for value in values:
            sizes = replace(usual, **{name: value})  # type: ignore[arg-type]
            if sizes not in all_known:
                all_known[sizes] = compare(sizes, device, rounds, versions)
            found[name][str(value)] = {each: all_known[sizes][each] for each in versions}
            ours, theirs = (
                found[name][str(value)][each].get("median_s") for each in ("ours", "einsum, eager")
            )
            said = [f"{1e3 * each:9.3f} ms" if each else "failed" for each in (ours, theirs)]
            print(f"{name:>10} = {value:>5}: ours {said[0]}, eager einsum {said[1]}", flush=True)
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw time and memory against each size, both axes logarithmic."""
    from matplotlib.figure import Figure  # an extra

    growth = report["growth"]
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    panels = figure.subplots(2, len(growth), sharey="row", squeeze=False)
    for column, (name, found) in enumerate(growth.items()):
        for version, style in STYLES.items():
            runs = {
                int(value): of[version]
                for value, of in found.items()
                if "median_s" in of.get(version, {})
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
        panels[1, column].set_xlabel(NAMES.get(name, name))
        for panel in panels[:, column]:
            panel.set_xticks([int(value) for value in found], list(found))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("MB beyond weight and data")
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"One learning step of the capsule encoder, {report['machine']['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


STYLES = {
    "ours": "C0o-",
    "ours, CUDA graph": "C0^:",
    "einsum, eager": "C1s--",
    "einsum, eager, CUDA graph": "C1v:",
}
NAMES = {
    "batch": "images B",
    "inputs": "capsules I",
    "experts": "experts J",
    "iterations": "iterations R",
}


def climb(device: torch.device) -> dict[str, dict[str, Any]]:
    """Find how many inputs train: whole steps, optimiser and all, ours with SGD and Adam, and those of eager einsum."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("ours, SGD", "ours, Adam", "einsum (votes once), SGD", "einsum (no votes), SGD"):
        found[name] = {}
        for inputs in LADDER:
            found[name][str(inputs)] = reached = _rung(name, inputs, device)
            gc.collect()
            torch.cuda.empty_cache()
            if reached is None:
                print(f"{name}, I = {inputs:>9,}: out of memory", flush=True)
                break
            print(
                f"{name}, I = {inputs:>9,}: {reached['seconds']:8.3f} s a step, "
                f"peak {reached['peak_bytes'] / 2**30:6.1f} GiB, finite: {reached['finite']}",
                flush=True,
            )
    return found


def _rung(name: str, inputs: int, device: torch.device) -> dict[str, Any] | None:
    """Take two whole steps with so many inputs, if there is room for them."""
    try:
        return _two_steps(name, inputs, device)
    except torch.cuda.OutOfMemoryError:
        return None


def _two_steps(name: str, inputs: int, device: torch.device) -> dict[str, Any]:
    """Take two whole steps, and time the second."""
    in_dim, experts, out_dim, batch = LAYER
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
        if name.startswith("ours"):
            layer.contrastive_divergence(x).backward()
        else:
            layer.weight.grad = einsum_step(x, layer.weight.detach(), sizes, order)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    taken = machine.seconds(step, 1, device)
    some = layer.weight.detach()[:: max(1, inputs // 100)]
    return {
        "seconds": taken,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "finite": bool(some.isfinite().all()),
    }


# ---------------------------------------------------------------------------------------------------------
# The versions

Kind = Literal["ours", "plain", "reference", "einsum", "decoder", "decoder reference"]


@dataclass(frozen=True)
class Version:
    """One way to take a step."""

    kind: Kind
    order: str | None = None
    """Of einsum's contractions."""
    mode: str = ""
    """Of torch.compile; not compiled if empty."""
    graph: bool = False
    """Whether the step is recorded as a CUDA graph, and replays of it are timed."""
    tf32: bool = False
    """Whether products of float32 may round their operands to 10 bits."""

    def make(self, sizes: Sizes, device: torch.device) -> Step:
        """Make the problem, and return a function that takes the step and returns the gradient."""
        if self.kind == "einsum":
            step = _einsum(sizes, device, self.order or "", self.mode)
        elif self.kind.startswith("decoder"):
            step = _decoder_step(sizes, device, reference=self.kind.endswith("reference"))
        elif self.kind == "plain":
            step = _plain_step(sizes, device)
        else:
            step = _step(*_problem(sizes, device, reference=self.kind == "reference"))
        step = machine.with_precision("high" if self.tf32 else "", step)
        return _captured(step) if self.graph else step

    def rates(self, sizes: Sizes, seconds: float) -> dict[str, float]:
        """Turn the seconds of a step of the encoder into operations and, where they are known, bytes a second."""
        if self.kind.startswith("decoder"):
            return {}
        found = {"flop_per_s": flops(sizes) / seconds}
        if self.kind in ("ours", "plain"):
            found["bytes_per_s"] = least_bytes(sizes) / seconds
        elif self.order is not None and not self.mode:
            found["bytes_per_s"] = traffic(sizes, self.order) / seconds
        return found


def _versions(
    device: torch.device, orders: Mapping[str, str], ways: Mapping[str, str], *, others: bool = True
) -> dict[str, Version]:
    found = {"ours": Version("ours")}
    for way, order in orders.items():
        found[f"einsum, {way}"] = Version("einsum", order, mode=ways.get(way, ""))
    if device.type == "cuda":
        found |= {
            f"{name}, CUDA graph": replace(version, graph=True) for name, version in found.items()
        }
        for name in [each for each in ("einsum, compiled, CUDA graph",) if each in found]:
            found["einsum, compiled, tf32, CUDA graph"] = replace(found[name], tf32=True)
    if others and device.type == "cpu" and lanes.obstacle() is None:
        found["ours, plain PyTorch"] = Version("plain")
    if others:
        found["reference"] = Version("reference")
    return found


def _decoder_versions(device: torch.device) -> dict[str, Version]:
    found = {"ours": Version("decoder")}
    if device.type == "cuda":
        found["ours, CUDA graph"] = Version("decoder", graph=True)
    return found | {"reference": Version("decoder reference")}


def _problem(
    sizes: Sizes, device: torch.device, *, reference: bool = False
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
        backend="reference" if reference else None,
    )
    layer.reset_parameters(std=0.1, generator=generator)
    x = squash(torch.randn(sizes.batch, sizes.inputs, sizes.in_dim, generator=generator))
    return layer.to(device), x.to(device)


def _step(layer: CapsuleExperts, x: Tensor) -> Step:
    return lambda: _gradient(layer, layer.contrastive_divergence(x))


def _plain_step(sizes: Sizes, device: torch.device) -> Step:
    """Return the step that is taken where nothing can be compiled."""
    layer, x = _problem(sizes, device)
    options = Options(sizes.iterations, sizes.sharpness, sizes.normalize)
    return lambda: _gradient(
        layer, votefree.contrastive_divergence(x, layer.weight, 1, options, lambda _: None)[0]
    )


def _decoder_step(sizes: Sizes, device: torch.device, *, reference: bool) -> Step:
    """Return a learning step of the decoder, from the experts down to the capsules."""
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
    layer.to(device)
    return lambda: _gradient(layer, layer.contrastive_divergence(y, x))


def _gradient(layer: CapsuleExperts, loss: Tensor) -> Tensor | None:
    """Hand the gradient over, so that it is memory of the step for all versions alike."""
    loss.backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    return gradient


def _captured(step: Step) -> Step:
    """Record the step once; what is timed is its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _einsum(sizes: Sizes, device: torch.device, order: str, mode: str) -> Step:
    layer, x = _problem(sizes, device)
    weight = layer.weight.detach()
    step = ORDERS[order]
    if mode:
        step = torch.compile(step, mode=mode, dynamic=False)
    return lambda: step(x, weight, sizes)


# ---------------------------------------------------------------------------------------------------------
# The opponents


def einsum_step(x: Tensor, weight: Tensor, sizes: Sizes, order: str = "votes once") -> Tensor:
    """Compute −ΔW of Algorithm 1 with einsum: (B, I, K), (I, J, D, K) → (I, J, D, K)."""
    return ORDERS[order](x, weight, sizes)


def _as_written(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Follow the equations one by one: votes (B, I, J, D) up and again from what the model sees, D numbers down."""
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    c, z = _route(u, sizes)
    del u
    sent = torch.einsum("bij,bjd->bijd", c, F.squash(z))
    model = F.squash(torch.einsum("bijd,ijdk->bik", sent, weight))
    del sent
    z_model = torch.einsum("bij,bijd->bjd", c, torch.einsum("bik,ijdk->bijd", model, weight))
    away = torch.einsum("bijd,bik->ijdk", torch.einsum("bij,bjd->bijd", c, _pull(z_model)), model)
    toward = torch.einsum("bijd,bik->ijdk", torch.einsum("bij,bjd->bijd", c, _pull(z)), x)
    return (away - toward) * (2 / len(x))


def _votes_once(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Keep votes for the routing; afterwards mix the K numbers below, which are fewer, before the product with W."""
    u = torch.einsum("bik,ijdk->bijd", x, weight)
    c, z = _route(u, sizes)
    del u
    return _learn(x, weight, c, z)


def _no_votes(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """Mix the K numbers below before every product with W; norms of votes come from WᵀW, and votes are never made."""
    axis = 1 if sizes.normalize == "inputs" else 2
    gram = torch.einsum("ijdk,ijdl->ijkl", weight, weight)
    square = torch.einsum("bijk,bik->bij", torch.einsum("bil,ijkl->bijk", x, gram), x)
    scale = sizes.sharpness * torch.where(square > 0, square.clamp(min=1e-30).rsqrt(), 0)
    b = torch.zeros_like(square)
    c = torch.softmax(b, axis)
    z = _up(c, x, weight)
    for _ in range(sizes.iterations - 1):
        along = torch.einsum("bjd,ijdk->bijk", F.direction(z), weight)
        b = b + scale * torch.einsum("bijk,bik->bij", along, x)
        del along
        c = torch.softmax(b, axis)
        z = _up(c, x, weight)
    return _learn(x, weight, c, z)


def _route(u: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Route votes (B, I, J, D) by the cosine: c (B, I, J) and z (B, J, D)."""
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


def _learn(x: Tensor, weight: Tensor, c: Tensor, z: Tensor) -> Tensor:
    """Go down and up, and compute the gradient, with nothing larger than (B, I, J, K)."""
    model = F.squash(
        torch.einsum("bij,bijk->bik", c, torch.einsum("bjd,ijdk->bijk", F.squash(z), weight))
    )
    mixed = torch.einsum("bij,bik->bijk", c, model)
    z_model = torch.einsum("bijk,ijdk->bjd", mixed, weight)
    gradient = torch.einsum("bjd,bijk->ijdk", _pull(z_model), mixed)
    del mixed
    gradient = gradient - torch.einsum(
        "bjd,bijk->ijdk", _pull(z), torch.einsum("bij,bik->bijk", c, x)
    )
    return gradient * (2 / len(x))


def _up(c: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bijk,ijdk->bjd", torch.einsum("bij,bik->bijk", c, x), weight)


def _pull(z: Tensor) -> Tensor:
    pull: Tensor = z / (1 + z.square().sum(-1, keepdim=True))
    return pull


ORDERS: dict[str, Callable[[Tensor, Tensor, Sizes], Tensor]] = {
    "as written": _as_written,
    "votes once": _votes_once,
    "no votes": _no_votes,
}


# ---------------------------------------------------------------------------------------------------------
# What a step has to do


def flops(sizes: Sizes) -> float:
    """Count the operations that a step needs, whoever takes it: what is done twice to save memory counts once.

    Five products of votes or of their like with W (up, down, up again, twice for the gradient), and for each vote its
    norm, R mixings and R − 1 agreements.
    """
    pairs = sizes.batch * sizes.inputs * sizes.experts
    return float(2 * pairs * sizes.out_dim * (5 * sizes.in_dim + 2 * sizes.iterations))


def least_bytes(sizes: Sizes) -> float:
    """Count the bytes a step must move at least: W and x in, ΔW out."""
    weight = sizes.inputs * sizes.experts * sizes.out_dim * sizes.in_dim
    return 4.0 * (2 * weight + sizes.batch * sizes.inputs * sizes.in_dim)


def traffic(sizes: Sizes, order: str) -> float:
    """Count the bytes that eager einsum writes and reads at least: only what is of the size of votes, or K of D."""
    pairs, again = 4.0 * sizes.batch * sizes.inputs * sizes.experts, sizes.iterations - 1
    votes, inputs = pairs * sizes.out_dim, pairs * sizes.in_dim
    routing = 2 + 1 + 2 * again  # made, norm, first mixing; then agreement and mixing
    return {
        "as written": votes
        * (routing + 2 + 2 + 2 + 2),  # sent, votes of the model, both halves of the gradient
        "votes once": votes * routing
        + inputs * (2 + 3 + 2),  # down; model mixed, up, gradient; data mixed, gradient
        "no votes": inputs * (2 + 2 + 4 * again + 2 + 3 + 2),
    }[order]


if __name__ == "__main__":
    main()
