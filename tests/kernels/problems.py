"""What tests of the versions on a CPU share."""

from __future__ import annotations

import torch
from torch import Tensor

from poecaps import functional as F
from poecaps import squash

OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]


def problem(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw capsules (B, I, K) and a weight (I, J, D, K) for sizes B, I, K, J, D."""
    b, i, k, j, d = sizes
    x = squash(torch.randn(b, i, k, generator=generator))
    return x, torch.randn(i, j, d, k, generator=generator)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()
