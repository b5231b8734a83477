"""The opponents of the benchmark compute what we do, and the benchmark runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import routing
from benchmarks.routing import Sizes, einsum_step, main
from poecaps import CapsuleExperts, squash
from poecaps import functional as F

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sizes(batch=6, inputs=9, in_dim=3, experts=4, out_dim=5)


@pytest.mark.parametrize("normalize", F.AXES)
def test_einsum_takes_our_step(normalize: F.Axis, generator: torch.Generator) -> None:
    layer = CapsuleExperts(9, 3, 4, 5, sharpness=5.0, normalize=normalize, dtype=torch.float64)
    layer.reset_parameters(std=1.0, generator=generator)
    x = squash(torch.randn(6, 9, 3, dtype=torch.float64, generator=generator))
    layer.contrastive_divergence(x).backward()
    sizes = Sizes(6, 9, 3, 4, 5, normalize=normalize)
    torch.testing.assert_close(einsum_step(x, layer.weight.detach(), sizes), layer.weight.grad)


def test_the_benchmark_measures_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(routing, "GROWTH", {"batch": (4, 8), "inputs": (5, 10)})
    monkeypatch.setattr(routing, "extra_memory", lambda *_: 10**6)
    monkeypatch.setattr(routing, "_ceilings", lambda _: {})
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "growth.png")]
    main(["--batch", "4", "--rounds", "1", "--no-compile", *files])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"]["4"].keys() == {"ours", "einsum, eager", "reference"}
    assert found["growth"]["inputs"].keys() == {"5", "10"}
    assert found["steps"]["4"]["ours"]["times_ours"] == 1
    assert (tmp_path / "growth.png").stat().st_size > 1000
    assert "einsum, eager" in capsys.readouterr().out


@pytest.mark.skipif(not routing.STATUS.exists(), reason="the system does not tell")
def test_eager_einsum_takes_more_memory_than_we_do() -> None:
    sizes = Sizes(batch=64, inputs=600)
    torch.ones(2**28)  # a gigabyte that this process held is none of theirs
    ours, theirs = (routing.extra_memory(name, sizes, torch.device("cpu")) for name in ("ours", "einsum, eager"))
    votes = 4 * 64 * 600 * 20 * 16
    assert ours is not None
    assert theirs is not None
    assert theirs > votes
    assert ours < theirs / 2
