"""On random problems, layers agree with the reference in float64, by every backend for CPUs.

`triton_agreement_facts` has those for GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings

from poecaps.kernels.cpu import build
from tests.kernels.agreement import TOLERANCE, assert_agrees, problems
from tests.kernels.problems import needs_simd

if TYPE_CHECKING:
    from poecaps.kernels.dispatch import Backend

# The C is compiled for every pair of dimensions K and D.
DIMS = [(k, d) for k in (1, 3, 8) for d in (1, 5, 17)]
ONE_PAIR = [(5, 17)]  # fills no vector; compiling takes most of the time
COMPILED = [each for each in TOLERANCE if each != torch.float64]


@pytest.mark.parametrize("backend", [None, "torch"])
@settings(max_examples=30)
@given(problem=problems(dims=DIMS))
def test_layers_agree_on_random_problems(backend: Backend | None, problem: dict[str, Any]) -> None:
    """Of any size, dtype and layout of the memory."""
    assert_agrees(backend, problem)


@needs_simd
@settings(max_examples=30)
@given(problem=problems(dims=DIMS, dtypes=COMPILED))
def test_compiled_layers_agree_on_random_problems(problem: dict[str, Any]) -> None:
    """By the best instruction set of this CPU."""
    assert_agrees("simd", problem)


@needs_simd
@pytest.mark.parametrize("target", [pytest.param(each, id=each.name) for each in build.targets()])
@settings(max_examples=15)
@given(problem=problems(dims=ONE_PAIR, dtypes=COMPILED))
def test_every_instruction_set_agrees_on_random_problems(
    target: build.Target, problem: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:  # for each problem
        patch.setenv(build.VARIABLE, target.name)
        assert build.library(*problem["sizes"][4:2:-1]).lanes == target.lanes
        assert_agrees("simd", problem)
