"""The device, the precision and the memory of a computation."""

from __future__ import annotations

import ctypes
import os
import re
import sys

import torch

# Parameters of mallopt, from malloc.h of glibc, and the values that `keep_freed_memory` sets.
M_TRIM_THRESHOLD, TRIM_THRESHOLD = -1, 2**31 - 1
M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 2**30


def find_device(name: str) -> torch.device:
    """Return the device with this name.

    Parameters
    ----------
    name
        ``"cpu"``, a GPU such as ``"cuda:1"``, ``"cuda"`` for the GPU of this process (each process
        that `torchrun` starts on a machine has a different one), ``"mps"`` for the GPU of an Apple
        computer, or ``"auto"`` for an NVIDIA GPU if there is one, else the CPU.

    Raises
    ------
    ValueError
        If there is no such device. The message names those that there are.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("poecaps was not made for other types of device")
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises many types of exception here
        raise ValueError(
            f"device must be auto, cpu, mps, or a GPU such as cuda:0, but is {name!r}"
            f"{_reason(name, error)}; available here: {', '.join(_available_devices())}"
        ) from error
    return device


def _reason(name: str, error: Exception) -> str:
    """Return why a device cannot be used, where torch says so in a sentence."""
    is_cuda = name.startswith("cuda:") and name[5:].isdecimal()
    # Of other devices, torch lists all its backends: about a thousand characters.
    if not is_cuda and not (name == "mps" and torch.backends.mps.is_available()):
        return ""
    sentence = re.split(r"\. |\n", str(error), maxsplit=1)[0].rstrip(".")
    return f" ({sentence})"


def _available_devices() -> list[str]:
    """Return the names of the devices of this machine."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps]


def statistics_device(device: torch.device) -> torch.device:
    """Return the device on which statistics of results are computed in float64.

    This is the device itself, but the CPU for Apple's GPUs, which lack float64.
    """
    return torch.device("cpu") if device.type == "mps" else device


def use_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether convolutions run in bfloat16.

    Parameters
    ----------
    precision
        ``"float32"``, ``"bfloat16"``, or ``"auto"`` for bfloat16 if the device multiplies in it.
    device
        Device of the convolutions.
    """
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if device.type != "cpu":
        return False
    # Private functions of torch: a version without them counts as a CPU without bfloat16.
    has_avx512 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return bool(has_avx512()) or bool(has_amx())


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next allocations.

    By default, glibc returns the memory of large tensors to the system. A training step on a CPU
    then gets the same memory page by page, and zeroed, again and again, which takes about a fifth
    of its time. The peak of the memory grows only by fragmentation. The setting is that of the
    whole process, so it is for programs, not for functions of a library.

    Returns
    -------
    bool
        Whether that is possible: on Linux with glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, MMAP_THRESHOLD), (M_TRIM_THRESHOLD, TRIM_THRESHOLD))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
