"""The measurement of the paper's claims, on models that satisfy or violate them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.claims import main, sign_flips
from poecaps.evaluation import background
from poecaps.training import PRESETS, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def network(decode: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Create a network of two experts that decodes the first number of a code to a grey image."""

    def sample(count: int, domain: str, expert: int, generator: torch.Generator) -> torch.Tensor:
        assert domain == "complete"
        z = torch.zeros(count, 2, 3)
        z[:, expert] = torch.randn(count, 3, generator=generator)
        return z

    return SimpleNamespace(
        architecture=SimpleNamespace(experts=((2, 3),)),
        code_density=SimpleNamespace(sample=sample),
        decode=lambda code: decode(code.sum(1)[:, 0]).view(-1, 1, 1, 1).expand(-1, 1, 4, 4),
    )


def test_negatives_that_disappear_with_the_opposite_sign(generator: torch.Generator) -> None:
    black = background([torch.zeros(5, 1, 4, 4)])
    found = sign_flips(network(torch.sigmoid), black, 300, generator)
    assert found.negatives == pytest.approx(0.5, abs=0.1)
    assert (found.negatives_removed, found.negatives_created) == (1, 1)
    assert found.negatives_of_opposites == pytest.approx(1 - found.negatives)


def test_negatives_that_do_not_depend_on_the_sign(generator: torch.Generator) -> None:
    black = background([torch.zeros(5, 1, 4, 4)])
    found = sign_flips(network(lambda grey: grey.square().clamp(max=1)), black, 300, generator)
    assert found.negatives_removed == 0
    assert found.negatives_created == 0
    assert sign_flips(network(torch.zeros_like), black, 50, generator).negatives_removed is None


def test_a_run_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = PRESETS["paper"]()
    none = {
        name: replace(getattr(paper, name), epochs=0)
        for name in ("autoencoder", "encoder", "decoder")
    }
    small = replace(paper.model, features=8, capsule_dim=4, experts=((3, 5),), joint_components=4)
    config = replace(paper, **none, model=small, data="mnist-sample", device="cpu")
    train(config, tmp_path / "run")
    files = ["--json", str(tmp_path / "claims.json"), "--figures", str(tmp_path)]
    for name in ("first", "second", "first"):
        main([str(tmp_path / "run"), "--name", name, "--draws", "6", "--device", "cpu", *files])
    other, found = json.loads((tmp_path / "claims.json").read_text())
    assert (other["run"], found["run"]) == ("second", "first")
    assert found["domains"].keys() == {"complete", "restricted", "learned"}
    assert found["training_seconds"] >= 0
    assert found["domains"]["complete"]["variation"].keys() == {
        "thickness",
        "slant",
        "width",
        "height",
    }
    assert all((tmp_path / f"run-{domain}.png").is_file() for domain in ("complete", "restricted"))
    assert "claims" not in capsys.readouterr().err
