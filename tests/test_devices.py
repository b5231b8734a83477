"""The device and the precision of a computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps._devices import find_device, use_bfloat16

if TYPE_CHECKING:
    import pytest


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
