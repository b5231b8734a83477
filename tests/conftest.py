from __future__ import annotations

import os

# Set before torch is imported: the tests compute too little for several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "poecaps",
    deadline=None,  # no test depends on time
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("poecaps")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260215)
