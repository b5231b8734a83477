"""The device, the precision and the memory of a computation."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from poecaps._devices import find_device, keep_freed_memory, use_bfloat16

# Print the memory that glibc has from the system while a step holds large tensors, and after it has
# freed them, as glibc counts it. By default, it maps blocks above 32 MiB one by one, always. In a
# process of its own, because the memory of others depends on the tests before.
MEMORY = """
import ctypes, sys, torch
from poecaps._devices import keep_freed_memory

class Memory(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Memory

def held():
    memory = mallinfo()
    return memory.arena + memory.hblkhd

if sys.argv[1] == "keep":
    keep_freed_memory()
before = held()
for _ in range(3):
    tensors = [torch.ones(10_000_000) for _ in range(3)]
    used = held() - before
    del tensors
    print(used, held() - before)
"""


@pytest.mark.parametrize("mode", ["return", "keep"])
def test_freed_memory_is_kept(mode: str) -> None:
    """By default, it goes back to the system after every step."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2") or not keep_freed_memory():
        pytest.skip("needs glibc 2.33 or later")
    command = [sys.executable, "-c", MEMORY, mode]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert len(lines) == 3
    for used, kept in (map(int, line.split()) for line in lines):
        assert used > 100_000_000
        assert kept == used if mode == "keep" else kept < used / 10


def test_cuda_is_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(1))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("auto", "cuda"):
        assert find_device(name) == torch.device("cuda:3")
    assert find_device("cuda:1") == torch.device("cuda:1")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["mps", "cuda:77", "cuda", "hpu", "meta", "toaster", ""])
def test_a_missing_device_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch lists about forty of its backends for a device that it does not have."""
    monkeypatch.setenv("LOCAL_RANK", "77")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"but is '{name}.*; available here: cpu") as info:
        find_device(name)
    assert len(str(info.value)) < 200
    assert "\n" not in str(info.value)


def test_the_devices_of_the_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, device: object) -> None:
        raise RuntimeError("CUDA error: out of memory. Compile with\nmore lines")

    monkeypatch.setattr(torch, "zeros", fail)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    expected = r"'cuda:0' \(CUDA error: out of memory\); available here: cpu, cuda:0, cuda:1, mps$"
    with pytest.raises(ValueError, match=expected):
        find_device("cuda:0")


def test_precision_is_bfloat16_where_wanted_or_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for fast in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert use_bfloat16("auto", cpu) is fast
        assert use_bfloat16("bfloat16", cpu)
        assert not use_bfloat16("float32", cpu)
