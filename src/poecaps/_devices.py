"""The device and the precision of a computation."""

from __future__ import annotations

import os

import torch


def find_device(name: str) -> torch.device:
    """Return the device with this name.

    Parameters
    ----------
    name
        ``"cpu"``, a GPU such as ``"cuda:1"``, ``"cuda"`` for the GPU of this process (each process
        that `torchrun` starts on a machine has a different one), or ``"auto"`` for that GPU if
        there is one, else the CPU.

    Raises
    ------
    ValueError
        If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("poecaps needs float64 and was not tested on other types of device")
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises many types of exception here
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device must be auto, cpu, or a GPU such as cuda:0, but is {name!r} ({reason})"
        ) from error
    return device


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
    # Private functions of torch: a version without them counts as a CPU without bfloat16.
    has_avx512 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return bool(has_avx512()) or bool(has_amx())
