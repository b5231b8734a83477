"""`poecaps encode`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import poecaps
from poecaps.cli.main import main
from tests.cli.conftest import arrays

if TYPE_CHECKING:
    from pathlib import Path


def test_codes_and_firing_probabilities_are_written(run: Path, tmp_path: Path) -> None:
    assert main(["encode", str(run), "--out", str(tmp_path / "deep" / "codes.npz")]) == 0
    written = arrays(tmp_path / "deep" / "codes.npz")
    images = poecaps.data.load("mnist-sample")
    assert images.labels is not None
    with torch.no_grad():
        codes = poecaps.load(run).encode(images.batch(range(48)))
    np.testing.assert_allclose(written["codes"], codes.numpy(), atol=1e-6)
    np.testing.assert_allclose(written["firing"], codes.norm(dim=-1).numpy(), atol=1e-6)
    np.testing.assert_array_equal(written["labels"], images.labels[:48])
