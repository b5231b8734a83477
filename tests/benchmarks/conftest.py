"""Fixtures of the benchmark tests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import variants

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.variants import Job, Row


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    """Write a file of 64 bars of several sizes, in two classes."""
    images, labels = np.zeros((64, 20, 19), np.uint8), np.arange(64) % 2
    for number, image in enumerate(images):
        image[4 : 8 + number % 9, 3 : 5 + number % 7] = 255
    np.savez(tmp_path / "bars.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return tmp_path / "bars.npz"


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of a study in this process."""

    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, run: Callable[[Job], Row], job: Job) -> Future[Row]:
            future: Future[Row] = Future()
            future.set_result(run(job))
            return future

    monkeypatch.setattr(variants, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(variants, "as_completed", lambda futures: futures)  # in their order
