"""The choice of the Triton backend for routing, and the launch of its kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from poecaps.kernels.triton import support
from poecaps.kernels.triton.launch import padded, split_k
from tests.kernels.problems import needs_triton


@needs_triton
def test_kernels_are_not_compiled_for_the_values_of_numbers() -> None:
    """A compiled kernel is reused for other batch sizes; it may depend on addresses alone."""
    code = """
import triton
from poecaps.kernels.triton import adam, coefficients, conv1, conv2, conv_common, learning
from poecaps.kernels.triton import reconstruction, routing_backward, routing_forward
from poecaps.kernels.triton import weight_gradient

modules = [adam, coefficients, conv1, conv2, conv_common, learning]
modules += [reconstruction, routing_backward, routing_forward, weight_gradient]
kernels = [
    each for module in modules for name, each in vars(module).items()
    if isinstance(each, triton.JITFunction) and name.endswith("_kernel")
]
assert len(kernels) > 10
for kernel in kernels:
    for each in kernel.params:
        if not each.is_constexpr:
            assert each.do_not_specialize != each.name.endswith("_ptr"), (kernel, each.name)
    # Tensors come first, then numbers, as `launch` expects.
    kinds = [0 if each.name.endswith("_ptr") else 1 + each.is_constexpr for each in kernel.params]
    assert kinds == sorted(kinds), kernel
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("needs_grad", [True, False])
def test_why_not(needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(
        i: int, k: int, j: int, d: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> str | None:
        x = torch.empty(1, i, k, dtype=dtype, device=device)
        weight = torch.empty(i, j, d, k, dtype=dtype, device=device)
        return support.why_not(x, weight, needs_grad=needs_grad)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(support, "installed", lambda: True)
    assert why_not(4, 3, 2, 2) is None
    assert why_not(1, 64, 1, 64) is None
    assert "torch.float64; use torch.float32" in str(why_not(4, 3, 2, 2, torch.float64))
    assert "65 dimensions; use capsules of at most 64" in str(why_not(1, 65, 1, 2))
    assert "65 dimensions; use capsules of at most 64" in str(why_not(1, 2, 1, 65))
    assert why_not(1, 1, 2**20 // 16, 9) is None
    assert "1,048,576 numbers" in str(why_not(1, 1, 2**20 // 16 + 1, 9))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "move layer and data to a CUDA device" in str(why_not(4, 3, 2, 2))
    monkeypatch.setattr(support, "installed", lambda: False)
    assert "pip install triton" in str(why_not(4, 3, 2, 2))


@pytest.mark.parametrize("programs", [1, 7, 300])
@pytest.mark.parametrize("steps", [1, 5, 576])
def test_the_splits_of_a_sum_cover_it(programs: int, steps: int) -> None:
    for reduce_cost in (0, 8):
        splits, steps_per_split = split_k(programs, steps, 264, reduce_cost)
        assert (splits - 1) * steps_per_split < steps <= splits * steps_per_split


def test_padded_sizes_are_powers_of_two() -> None:
    assert [padded(size, 1) for size in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert padded(3, 16) == 16
