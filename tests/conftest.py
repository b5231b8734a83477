from __future__ import annotations

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260215)
