# mypy: ignore-errors
# The function below is a language of its own, compiled by Triton: its arguments are pointers.
"""A Triton kernel for a step of Adam.

torch's own gives 65,536 numbers to each multiprocessor, which leaves most of them idle for a layer of capsules.
This module imports Triton; nothing imports it before the first call that needs it.
"""

import triton.language as tl

from poecaps.kernels.tiles import kernel


@kernel
def adam_step(
    p, g, m, v, step, rate, logs, rows,
    BETA_1: tl.constexpr, BETA_2: tl.constexpr, L2: tl.constexpr, EPS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Move `rows` numbers p along their gradient g, with its moments m and v, `step` being the count of this step.

    1 − β^step is the small difference of large numbers: `logs` has ln β₁ and ln β₂ as float64.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = n < rows
    count = tl.load(step).to(tl.float64)
    first = (1.0 - tl.exp(count * tl.load(logs))).to(tl.float32)
    second = (1.0 - tl.exp(count * tl.load(logs + 1))).to(tl.float32)
    here = tl.load(p + n, mask=mask, other=0.0)
    slope = tl.load(g + n, mask=mask, other=0.0) + L2 * here
    mean = tl.load(m + n, mask=mask, other=0.0)
    mean += (1 - BETA_1) * (slope - mean)
    square = BETA_2 * tl.load(v + n, mask=mask, other=0.0) + (1 - BETA_2) * slope * slope
    tl.store(m + n, mean, mask=mask)
    tl.store(v + n, square, mask=mask)
    pace = tl.load(rate) / first
    tl.store(p + n, here - pace * mean / (tl.sqrt(square) / tl.sqrt(second) + EPS), mask=mask)
