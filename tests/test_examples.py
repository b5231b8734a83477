"""The examples run at a small size, and their models learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(name: str, *options: str) -> list[float]:
    """Run an example and return the percentages that it prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in re.findall(r"([\d.]+)%", result.stdout)]


def test_experts_are_a_layer_of_a_supervised_network() -> None:
    accuracy = run("supervised.py", "--images", "1000", "--test", "300", "--epochs", "2")
    assert len(accuracy) == 2
    assert accuracy[-1] > 30  # ten digits, twenty steps


def test_experts_learn_in_the_form_of_a_trainer() -> None:
    lost = run("training_step.py", "--images", "1000", "--epochs", "2")
    assert len(lost) == 2
    assert lost[-1] < 60  # 100 before training


def test_features_are_compared_with_those_of_an_rbm() -> None:
    size = ["--images", "300", "--test", "300", "--epochs", "1", "--filters", "16"]
    assert min(run("sklearn_features.py", *size)) > 40  # chance is 10
