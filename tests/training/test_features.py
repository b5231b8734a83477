"""Where images, features and codes are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from poecaps.training import Progress, train
from poecaps.training.run import run_training
from tests.systems import needs_proc
from tests.training.runs import assert_same_weights, config_for

if TYPE_CHECKING:
    import pytest


@needs_proc
def test_tensors_that_do_not_fit_into_memory_are_mapped_files(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, features and codes; the trained network does not depend on where they are."""
    monkeypatch.setattr("poecaps.data.buffers.MAX_IN_MEMORY", 0)
    mapped: dict[str, tuple[int, int]] = {}

    def temporary() -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            line for line in maps if tempfile.gettempdir() in line and line.endswith("(deleted)")
        }

    before = temporary()  # of other tests in this process

    def look(progress: Progress) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped[progress.stage] = (
            sum(line.endswith(str(data)) for line in maps),
            len(temporary() - before),
        )

    train(config_for(data), tmp_path / "run", report=look)
    assert (
        mapped
        == {  # the images; their features, then the experts of one layer, then those of the other
            "autoencoder": (1, 0),
            "encoder 1": (1, 1),
            "encoder 2": (1, 2),
            "decoder 1": (1, 2),
            "decoder 2": (1, 3),
            "pixel decoder": (1, 3),
        }
    )
    assert_same_weights(tmp_path / "run", finished)


def test_the_encoding_of_all_images_is_reported(data: Path, tmp_path: Path) -> None:
    """Features before the first encoder, and codes before what reads them; it may take minutes."""
    stage, calls = [""], []

    def counted(done: int, total: int) -> None:
        calls.append((stage[0], done, total))

    def follow(progress: Progress) -> None:
        stage[0] = progress.stage

    run_training(config_for(data), tmp_path / "run", report=follow, encoding=counted)
    ends = [name for name, done, total in calls if done == total]
    assert {total for *_, total in calls} == {96}
    assert {"encoder 1", "encoder 2", "decoder 2"} <= set(ends)
    assert next(call for call in calls if call[0] == "encoder 1") == ("encoder 1", 0, 96)
    assert "autoencoder" not in ends
