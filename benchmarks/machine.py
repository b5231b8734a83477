"""What the benchmarks of speed share: the machine, how long a step takes, and what the device can do at best."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shlex
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import poecaps
from poecaps import kernels
from poecaps.kernels import lanes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    Step = Callable[[], Any]

MEMORY, FORGET = (
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
)  # what Linux tells of a process
FILES = ("json", "plot", "read", "keep")  # options that change nothing that is measured
ENOUGH = 0.1  # seconds a turn lasts at least


def describe(device: torch.device) -> dict[str, str]:
    """Name device and versions that a time depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    found = {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if device.type == "cuda":
        import triton

        found |= {"cuda": str(torch.version.cuda), "triton": triton.__version__}
    elif (compiler := lanes.compiler()) is not None:
        found["compiler"] = compiler
    return found | {"poecaps": poecaps.__version__, "routing": kernels.describe(device)}


def _processor() -> str:
    """Name the processor and the threads that torch uses of it."""
    threads, name = torch.get_num_threads(), platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.is_file() and (
        found := re.search(r"^model name\s*:\s*(.+)$", about.read_text(), re.M)
    ):
        name = found[1]
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def command(module: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command that measures the same; a folder of images is called FOLDER, and files are left out."""
    words = ["python", "-m", module]
    for name, value in vars(options).items():
        if name in FILES or (value == parser.get_default(name) and name != "device"):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if name == "path":
            words.append("FOLDER")
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def write(report: dict[str, Any], file: Path | None) -> None:
    """Write what was measured, if a file is named."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# Time


def seconds(step: Step, repeats: int, device: torch.device) -> float:
    """Time a step, as the mean of so many in a row."""
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


def in_turns(
    steps: dict[str, Step], rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time steps in turns: median, least and most of what the rounds gave, and how many there were.

    A step of more than a second sits out every other round, and one of more than two takes part in every third.
    """
    repeats, every = {}, {}
    for name, step in steps.items():
        step()
        once = seconds(step, 1, device)
        once = seconds(step, 5, device) if once < ENOUGH else once
        repeats[name] = max(1, min(200, int(ENOUGH / once)))
        every[name] = max(1, min(1 + int(once), rounds // 3))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            if number % every[name] == 0:
                times[name].append(seconds(step, repeats[name], device))
    return {name: spread(values) for name, values in times.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Tell the median of some times, the least and the most, and how many they are."""
    return {
        "median_s": statistics.median(values),
        "min_s": min(values),
        "max_s": max(values),
        "rounds": len(values),
    }


# Memory


def tells_memory() -> bool:
    """Tell whether the system says, of this process, what it held at most since it was last asked to forget."""
    return MEMORY.exists() and os.access(FORGET, os.W_OK)


def extra_memory(step: Step, device: torch.device) -> int | None:
    """Measure the memory that a step takes at its peak beyond what is there before; None where the system is silent.

    The step must have been taken before, so that what libraries keep for good does not count.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    if not tells_memory():
        return None
    _give_back()
    FORGET.write_text("5")
    before = _held("VmRSS")
    step()
    return max(0, _held("VmHWM") - before)


def _give_back() -> None:
    """Give memory that was freed, and what is kept for the next call, back to the system, so that taking it shows."""
    lanes.forget()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _held(what: str) -> int:
    (kilobytes,) = re.findall(rf"{what}:\s+(\d+) kB", MEMORY.read_text())
    return 1024 * int(kilobytes)


# What the device can do


def ceilings(device: torch.device, *, large: bool = True) -> dict[str, float]:
    """Measure the best rates of a large copy and of a large product, in each precision that training may use."""
    on_gpu = device.type == "cuda"
    many, side = (2**30, 8192) if on_gpu else (2**26, 2048)
    if not large:
        many, side = 2**12, 32
    source = torch.rand(many, device=device)
    target = source.clone()
    found = {"copy_bytes_per_s": 2 * 4 * many / _best(lambda: target.copy_(source), device)}
    kinds = {
        "float32": (torch.float32, "highest"),
        "tf32": (torch.float32, "high"),
        "bfloat16": (torch.bfloat16, ""),
    }
    for name, (dtype, precision) in kinds.items():
        if name == "tf32" and not on_gpu:
            continue
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        product = with_precision(precision, lambda left=left, right=right: left @ right)  # type: ignore[misc]
        found[f"{name}_flop_per_s"] = 2 * side**3 / _best(product, device)
    return found


def with_precision(precision: str, step: Step) -> Step:
    """Take a step with products of float32 made so: "highest", or "high", which is tf32 on a GPU; "": as it is."""
    if not precision:
        return step

    def taken() -> Any:
        usual = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return step()
        finally:
            torch.set_float32_matmul_precision(usual)

    return taken


def _best(step: Step, device: torch.device) -> float:
    step()
    return min(seconds(step, 5 if device.type == "cuda" else 1, device) for _ in range(7))
