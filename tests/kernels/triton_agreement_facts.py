"""On random problems, Triton's layers agree with the reference in float64.

On a GPU, or else in Triton's interpreter, which `test_triton_facts` starts.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings

from tests.kernels.agreement import TOLERANCE, assert_agrees, problems

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"
DTYPES = [each for each in TOLERANCE if each != torch.float64]


@settings(max_examples=4 if IS_INTERPRETED else 30)
@given(problem=problems(most=3 if IS_INTERPRETED else 20, dims=[(3, 5), (2, 2)], dtypes=DTYPES))
def test_layers_agree_on_random_problems(problem: dict[str, Any]) -> None:
    """Of any size, dtype and layout of the memory; the interpreter is slow."""
    assert_agrees("triton", problem, DEVICE)
