"""The examples run at a small size, and their models learn."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
Run = Callable[..., list[float]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs an example and returns the percentages that it prints."""

    def run(name: str, *options: str) -> list[float]:
        program = str(ROOT / "examples" / name)
        monkeypatch.setattr(sys, "argv", [program, *options])
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(program, run_name="__main__")
        return [float(number) for number in re.findall(r"([\d.]+)%", capsys.readouterr().out)]

    return run


def test_experts_are_a_layer_of_a_supervised_network(run: Run) -> None:
    options = ["--images", "1000", "--test", "300", "--epochs", "2", "--device", "cpu"]
    accuracy = run("supervised.py", *options)
    assert len(accuracy) == 2
    assert accuracy[-1] > 30  # ten digits, twenty steps


def test_experts_learn_in_the_form_of_a_trainer(run: Run) -> None:
    lost = run("training_step.py", "--images", "1000", "--epochs", "2")
    assert len(lost) == 2
    assert lost[-1] < 60  # 100 before training


def test_features_are_compared_with_those_of_an_rbm(run: Run) -> None:
    size = ["--images", "300", "--test", "300", "--epochs", "1", "--filters", "16"]
    assert min(run("sklearn_features.py", *size)) > 40  # chance is 10
