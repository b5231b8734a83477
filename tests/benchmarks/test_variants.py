"""The images that a study learns from, chooses on and measures."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import variants
from benchmarks.internals import changed_options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Write images whose pixels are their numbers: 0 to 9 for training, 100 to 103 for tests."""
    training, test = (
        np.broadcast_to(np.array(numbers, np.uint8)[:, None, None], (len(numbers), 2, 2))
        for numbers in (range(10), range(100, 104))
    )
    np.savez(tmp_path / "x.npz", x_train=training, y_train=np.arange(10), x_test=test)
    return tmp_path / "x.npz"


@pytest.mark.parametrize(
    ("arguments", "learned", "measured"),
    [
        ([], range(10), range(100, 104)),
        (["--held-out", "3"], range(7), range(7, 10)),
        (["--held-out", "3", "--on", "held-out"], range(7), range(7, 10)),
        (["--held-out", "3", "--on", "test"], range(7), range(100, 104)),
        (["--held-out", "9"], range(5), range(5, 10)),
    ],
)
def test_a_study_learns_chooses_and_tests_on_different_images(
    arguments: list[str], learned: range, measured: range, numbered: Path
) -> None:
    parser = ArgumentParser()
    variants.add_protocol(parser)
    options = parser.parse_args(arguments)
    options.data, options.path = str(numbered), None
    training, images = variants.load_images(options)
    assert training.images.reshape(len(training.images), -1)[:, 0].tolist() == list(learned)
    assert images.images.reshape(len(images.images), -1)[:, 0].tolist() == list(measured)
    assert training.labels is not None
    assert training.labels.tolist() == list(learned)
    on = "test" if measured[0] == 100 else "held-out"
    assert variants.protocol_of(options) == {"held_out": options.held_out, "on": on}


@pytest.mark.parametrize("arguments", [["--on", "held-out"], ["--held-out", "-1"]])
def test_without_held_out_images_none_are_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    variants.add_protocol(parser)
    with pytest.raises(SystemExit):
        variants.check_protocol(parser, parser.parse_args(arguments))
    assert "--on held-out needs a number of images above 0" in capsys.readouterr().err


def test_a_variant_can_have_other_filters() -> None:
    parser = ArgumentParser()
    variants.add_filters(parser)
    config = variants.preset_with("fast", encoder__epochs=3).config()
    assert variants.with_filters(config, parser.parse_args([])) == config
    changed = variants.with_filters(config, parser.parse_args(["--filters", "7"]))
    assert changed_options(changed, "fast") == {"encoder.epochs": 3, "model.features": 7}
