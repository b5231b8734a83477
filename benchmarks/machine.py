"""Shared by the speed benchmarks: description of the machine, times, memory and peak rates."""

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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

import poecaps
from benchmarks import internals
from poecaps._files import atomic_write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    Step = Callable[[], Any]

T = TypeVar("T")

# Linux: memory of this process, and the file that resets its peak
MEMORY_STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FILE_OPTIONS = ("json", "plot", "read", "keep")  # options without effect on the measurement
MIN_TURN_SECONDS = 0.1  # a step is repeated for at least this long in each turn


def describe(device: torch.device) -> dict[str, str]:
    """Return the name of the device and the versions that a time depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    description = {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if device.type == "cuda":
        import triton

        description |= {"cuda": str(torch.version.cuda), "triton": triton.__version__}
    elif (compiler := internals.compiler()) is not None:
        description["compiler"] = compiler
    return description | {
        "poecaps": poecaps.__version__,
        "backend": internals.describe_backend(device),
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use, which `taskset` can limit."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """Return the name of the processor and the number of threads that torch uses."""
    threads, name = torch.get_num_threads(), platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file() and (
        match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
    ):
        name = match[1]
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def command(module: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command of this measurement, without output files and with FOLDER for --path."""
    words = ["python", "-m", module]
    for name, value in vars(options).items():
        if name in FILE_OPTIONS or (value == parser.get_default(name) and name != "device"):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if name == "path":
            words.append("FOLDER")
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def write(report: Any, file: Path | None) -> None:
    """Write a report as JSON, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as opened:
            opened.write((json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


# Time


def seconds(step: Step, repeats: int, device: torch.device) -> float:
    """Return the mean time of a step over several repeats."""
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


def time_in_turns(
    steps: dict[str, Step], rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time steps in turns; see `summary` for the result of each.

    A step of more than a second takes part in every second round only, and a step of more than two
    seconds in every third round.
    """
    repeats, period = {}, {}
    for name, step in steps.items():
        step()
        once = seconds(step, 1, device)
        once = seconds(step, 5, device) if once < MIN_TURN_SECONDS else once
        repeats[name] = max(1, min(200, int(MIN_TURN_SECONDS / once)))
        period[name] = max(1, min(1 + int(once), rounds // 3))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            if number % period[name] == 0:
                times[name].append(seconds(step, repeats[name], device))
    return {name: summary(values) for name, values in times.items()}


def summary(times: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of times, and their number."""
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "rounds": len(times),
    }


def captured(step: Callable[[], T]) -> Callable[[], T]:
    """Capture a step as a CUDA graph, and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> T:
        graph.replay()
        return result

    return replay


# Memory


def can_measure_memory() -> bool:
    """Return whether the system reports the peak memory of this process and can reset it."""
    return MEMORY_STATUS.exists() and os.access(RESET_PEAK, os.W_OK)


def extra_memory(step: Step, device: torch.device) -> int | None:
    """Return the peak memory of a step beyond the memory in use before it, in bytes.

    The result is None if the system does not report memory. The step must have run before, so that
    memory that libraries allocate once does not count.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    if not can_measure_memory():
        return None
    _release_memory()
    RESET_PEAK.write_text("5")
    before = _memory("VmRSS")
    step()
    return max(0, _memory("VmHWM") - before)


def _release_memory() -> None:
    """Return freed memory and kept buffers to the system, so that using them again is visible."""
    internals.release_buffers()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def _memory(field: str) -> int:
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", MEMORY_STATUS.read_text())
    return 1024 * int(kilobytes)


# Peak rates of the device


def ceilings(device: torch.device, *, large: bool = True) -> dict[str, float]:
    """Measure the rates of a large copy and of a large product in each precision of training."""
    on_gpu = device.type == "cuda"
    count, side = (2**30, 8192) if on_gpu else (2**26, 2048)
    if not large:
        count, side = 2**12, 32
    source = torch.rand(count, device=device)
    target = source.clone()
    rates = {"copy_bytes_per_s": 2 * 4 * count / _best(lambda: target.copy_(source), device)}
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
        rates[f"{name}_flop_per_s"] = 2 * side**3 / _best(product, device)
    return rates


def with_precision(precision: str, step: Step) -> Step:
    """Return a step that runs with a precision of float32 matrix products.

    "highest" is float32, "high" is tf32 on a GPU; an empty string leaves the precision unchanged.
    """
    if not precision:
        return step

    def precise_step() -> Any:
        previous = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return step()
        finally:
            torch.set_float32_matmul_precision(previous)

    return precise_step


def _best(step: Step, device: torch.device) -> float:
    step()
    return min(seconds(step, 5 if device.type == "cuda" else 1, device) for _ in range(7))
