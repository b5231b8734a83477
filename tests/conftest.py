from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: what is computed here is too small to share

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "poecaps",
    deadline=None,  # nothing is timed in a test
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("poecaps")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260215)
