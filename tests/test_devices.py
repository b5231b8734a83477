"""The device, the precision and the memory of a computation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from poecaps._devices import find_device, keep_freed_memory, use_bfloat16

# Count the pages that the system gives to large tensors of a second step. In a process of its own,
# because the memory of others depends on the tests before.
PAGES = """
import resource, sys, torch
from poecaps._devices import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("glibc")
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(6_500_000) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
step(); step(); print(step())
"""


def test_freed_memory_is_kept() -> None:
    """A step then gets the memory of the step before, without new pages."""
    if not keep_freed_memory():
        pytest.skip("needs glibc")
    pages = [
        int(subprocess.check_output([sys.executable, "-c", PAGES, mode], text=True))
        for mode in ("return", "keep")
    ]
    assert 100 * pages[1] < pages[0]


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


def test_precision_is_bfloat16_where_wanted_or_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for fast in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert use_bfloat16("auto", cpu) is fast
        assert use_bfloat16("bfloat16", cpu)
        assert not use_bfloat16("float32", cpu)
