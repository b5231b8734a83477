"""What people see while a run goes."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from poecaps.training import Progress, Stage, resume, train
from poecaps.training.progress import LiveLine, PlainLines, ProgressMeter, TensorBoard, display
from tests.training.runs import Stop, config_for, without_epochs

if TYPE_CHECKING:
    from pathlib import Path


def at(step: int, stage: str = "encoder 1", **changes: Any) -> Progress:
    values: dict[str, Any] = {
        "stage": stage,
        "number": 2,
        "stages": 3,
        "step": step,
        "steps": 20,
        "epoch": step / 10,
        "epochs": 2,
        "total_step": 100 + step,
        "images_per_second": 1234.5,
        "seconds_left": 3725.0,
        "run_seconds_left": 4000.0,
        "metrics": {
            "loss": 1.0,
            "reconstruction_error": 0.25,
            "firing": 0.5,
            "effective_rank": 12.34,
        },
        "measured": step % 5 == 0,
    }
    return Progress(**values | changes)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_summary_has_what_tells_whether_it_learns() -> None:
    expected = "epoch 1.5/2  1,234 images/s  error 0.250  firing 0.50  rank 12.3  1:02:05 left"
    assert at(15).summary() == f"{expected} (run: 1:06:40)"
    assert at(15, number=3).summary() == expected, "the last stage ends with the run"
    assert at(20).summary().endswith("rank 12.3"), "nothing of the stage is left"
    assert (
        at(15, number=3, metrics={}, seconds_left=59.6).summary()
        == "epoch 1.5/2  1,234 images/s  1:00 left"
    )


def test_before_the_first_step_there_is_nothing_to_sum_up() -> None:
    nothing: dict[str, Any] = {"images_per_second": 0.0, "seconds_left": float("inf")}
    assert at(0, **nothing).summary() == "starts"
    assert at(13, **nothing).summary() == "resumes at epoch 1.3"


def test_without_a_terminal_there_is_one_plain_line_for_each_epoch() -> None:
    out = io.StringIO()
    show = display(out)
    assert isinstance(show, PlainLines)
    for step in range(21):
        show(at(step, images_per_second=100.0 * step))
    show.close()
    lines = out.getvalue().splitlines()
    assert ["starts" in lines[0], "epoch 1.0" in lines[1], "epoch 2.0" in lines[2]] == [True] * 3
    assert len(lines) == 3
    assert all(line.isprintable() and line.startswith("2/3 encoder 1 ") for line in lines)


def test_without_a_terminal_a_long_epoch_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poecaps._progress.PLAIN_DELAY", 0.0)
    out = io.StringIO()
    show = display(out)
    for step in (0, 1, 2):
        show(at(step, images_per_second=100.0 * step, measured=False))
    assert [line.split()[4] for line in out.getvalue().splitlines()[1:]] == ["0.1/2", "0.2/2"]


def test_the_time_left_of_the_run_includes_the_later_stages() -> None:
    meter = ProgressMeter(
        {"autoencoder": 2, "encoder 1": 4, "decoder 1": 0},
        "autoencoder",
        first_step=0,
        steps_per_epoch={"autoencoder": 10, "encoder 1": 5, "decoder 1": 10},
        batch_size=8,
        work={"autoencoder": 3.0, "encoder 1": 3.0, "decoder 1": 9.0},
    )
    half = meter.update(10)
    assert half.seconds_left > 0
    # 10 steps are left, and 20 steps of the same duration.
    assert half.run_seconds_left == pytest.approx(3 * half.seconds_left)
    assert meter.update(20).seconds_left == 0


def test_the_time_left_of_the_run_uses_the_speed_of_earlier_stages_of_the_same_kind() -> None:
    meter = ProgressMeter(
        {"autoencoder": 2, "encoder 1": 4, "decoder 1": 2, "pixel decoder": 3},
        "encoder 1",
        first_step=0,
        steps_per_epoch={"autoencoder": 10, "encoder 1": 5, "decoder 1": 10, "pixel decoder": 10},
        batch_size=8,
        work={"autoencoder": 3.0, "encoder 1": 3.0, "decoder 1": 3.0, "pixel decoder": 900.0},
        expected={"pixel decoder": 2.0},
    )
    half = meter.update(10)
    # 10 steps are left, and 20 of the decoder; 30 of the pixel decoder take 2 s each.
    assert half.run_seconds_left == pytest.approx(3 * half.seconds_left + 60)


def test_every_stage_expects_later_ones_to_be_as_fast_as_those_of_their_kind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[str, set[str]] = {}

    class Meter(ProgressMeter):
        def __init__(self, epochs: Any, stage: str, **options: Any) -> None:
            super().__init__(epochs, stage, **options)
            expected[stage] = set(options["expected"])

    monkeypatch.setattr("poecaps.training.trainer.ProgressMeter", Meter)
    train(config_for(data), tmp_path / "run")
    for stage, others in expected.items():
        is_between = stage not in ("autoencoder", "pixel decoder")
        assert others == ({"pixel decoder"} if is_between else set())
    assert {"autoencoder", "encoder 1", "decoder 1", "pixel decoder"} <= expected.keys()


def test_on_a_terminal_one_line_is_drawn_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("LIVE_DELAY", "LIVE_PAUSE"):
        monkeypatch.setattr(f"poecaps._progress.{pause}", 0.0)
    monkeypatch.setenv("COLUMNS", "140")
    out = Terminal()
    show = display(out)
    assert isinstance(show, LiveLine)
    for stage in ("encoder 1", "encoder 2"):
        for step in range(21):
            show(at(step, stage, images_per_second=100.0 * step))
    show.close()
    assert out.getvalue().count("\n") == 2
    drawn = out.getvalue().replace("\n", "").split("\r\x1b[K")[1:]
    assert len(drawn) == 42
    assert all(len(line) < 140 for line in drawn)
    assert "━" * 7 + "─" * 7 + "  50%" in drawn[10]
    assert "encoder 2" in drawn[-1]
    assert "100%" in drawn[-1]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (140, ["━", "error 0.250", "rank 12.3", "left"]),
        (105, ["error 0.250", "left"]),
        (82, ["left"]),
    ],
)
def test_a_narrow_terminal_shows_less_but_the_time_left(
    columns: int, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    display(out)(at(10))
    (line,) = out.getvalue().split("\r\x1b[K")[1:]
    assert len(line) < columns
    assert [each for each in ("━", "error 0.250", "rank 12.3", "left") if each in line] == shown


def test_a_run_cut_short_leaves_the_cursor_on_a_new_line() -> None:
    out = Terminal()
    out.encoding = "ascii"
    show = display(out)
    show(at(3))
    show.close()
    assert out.getvalue().endswith("\n")
    assert out.getvalue().isascii()


def test_every_step_is_reported_and_every_number_is_written(data: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    train(config_for(data), tmp_path / "run", report=seen.append)
    assert [each.step for each in seen if each.stage == "autoencoder"] == list(range(25))
    assert [each.total_step for each in seen if each.step][-1] == 6 * (4 + 3 + 3 + 3 + 3 + 2)
    written = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    measured = [each for each in seen if each.measured]
    assert [line["stage"] for line in written] == [each.stage for each in measured]
    assert all(
        each.metrics.items() <= line.items() for line, each in zip(written, measured, strict=True)
    )
    assert all(line["images_per_second"] > 0 for line in written)
    assert seen[-1].seconds_left == seen[-1].run_seconds_left == 0


@pytest.mark.parametrize("at", [13, 0])  # between two checkpoints, or between two stages
def test_tensorboard_has_the_curves_of_the_metrics_without_gaps_or_doubles(
    at: int, data: Path, tmp_path: Path
) -> None:
    board = TensorBoard(tmp_path / "run")

    def stop(progress: Progress) -> None:
        board(progress)
        if progress.stage == "encoder 1" and progress.step == at:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), tmp_path / "run", report=stop)
    board.close()
    second = TensorBoard(tmp_path / "run")
    resume(tmp_path / "run", report=second)
    second.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for stage, name in (
        ("autoencoder", "loss"),
        ("encoder 1", "effective_rank"),
        ("decoder 2", "reconstruction_error"),
    ):
        curve = [point.value for point in events.Scalars(f"{stage}/{name}")]
        assert curve == pytest.approx([line[name] for line in lines if line["stage"] == stage])


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'poecaps\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_held_out_images_that_are_the_training_images_have_the_same_error(
    data: Path, tmp_path: Path
) -> None:
    """So that the two curves differ by the images alone."""
    images = np.load(data)
    np.savez(tmp_path / "twice.npz", x_train=images, x_test=images)
    seen: list[Progress] = []
    train(config_for(tmp_path / "twice.npz"), tmp_path / "run", report=seen.append)
    measured = [each for each in seen if each.measured]
    assert {each.stage for each in measured} >= {"autoencoder", "encoder 2", "pixel decoder"}
    for each in measured:
        assert each.metrics["held_out_error"] == pytest.approx(
            each.metrics["reconstruction_error"], rel=1e-4
        )


def test_a_stage_of_one_epoch_has_a_curve(data: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    config = without_epochs(data, autoencoder=Stage(epochs=1), batch_size=4)
    train(config, tmp_path / "run", report=seen.append)
    assert sum(each.measured for each in seen if each.stage == "autoencoder") >= 10
