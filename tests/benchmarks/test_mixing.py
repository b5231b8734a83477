"""The sceptical questions about a trained density: their measures, and the whole script."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks import mixing
from benchmarks.mixing import balanced, forgetting, log_partition, main, nearest, table, worst
from poecaps import Architecture, sampling
from poecaps.data import load
from poecaps.evaluation import load_classifier
from poecaps.options import DensityOptions
from tests.networks import untrained_with_density

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps import CapsuleNetwork
    from poecaps.evaluation import Classifier


@pytest.fixture
def network(generator: torch.Generator) -> CapsuleNetwork:
    density = DensityOptions(experts=(3, 4), linear_dims=2, base_components=4)
    shape = Architecture(features=8, experts=((3, 4),), joint_components=4, density=density)
    return untrained_with_density(shape, load("mnist-sample").batch(range(60)), generator)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load_classifier("mnist", torch.device("cpu"))


def test_chains_start_at_equally_many_images_of_each_class() -> None:
    images = load("mnist-sample", split="test")
    assert images.labels is not None
    found = balanced(images, 3)
    rows = [np.flatnonzero(images.labels == each)[:3] for each in range(10)]
    assert torch.equal(found, images.batch(np.concatenate(rows)))
    with pytest.raises(ValueError, match=r"--per-class must be at most \d+, but is 2000"):
        balanced(images, 2000)


def test_the_worst_trace_decides(generator: torch.Generator) -> None:
    good = torch.randn(200, 10, generator=generator)
    apart = good + 3 * (torch.arange(10) % 2)
    found, alone = worst([good, apart]), worst([good])
    assert alone["rhat"] == pytest.approx(1, abs=0.02)
    assert found["rhat"] > 1.5
    assert found["size"] < 0.1 * alone["size"]


def test_a_trace_that_never_changes_counts_only_if_chains_differ() -> None:
    """A class that no chain visits says nothing; one that no chain leaves says all."""
    never, always = torch.zeros(20, 4), (torch.arange(4) % 2).expand(20, 4)
    assert math.isnan(worst([never])["rhat"])
    assert worst([never, always])["rhat"] == math.inf
    assert worst([never, always])["size"] < 10
    assert math.isnan(worst([torch.randn(3, 4)])["rhat"])  # too few steps


def test_chains_that_do_not_move_do_not_forget(
    network: CapsuleNetwork, classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the directions that no expert reads, which are drawn anew in the first step."""
    start = network.whitened(balanced(load("mnist-sample", split="test"), 2))
    options = {"steps": 180, "every": 20, "levels": 0, "seed": 0}
    moving = forgetting(network, start, classifier, **options)
    assert moving["steps"] == list(range(0, 181, 20))
    assert moving["swap_rate"] is None
    assert sum(moving["shares"]) == pytest.approx(1)
    monkeypatch.setattr(mixing, "ADAPTED", 0)
    monkeypatch.setattr(sampling, "INITIAL_STEP_SIZE", 1e-6)
    held = forgetting(network, start, classifier, **options)
    first, *others = held["in_first_class"]
    assert first == 1
    assert len(set(others)) == 1
    assert others[0] > 0.5
    assert held["leading components"]["rhat"] > 10 > moving["leading components"]["rhat"]


def test_other_draws_begin_the_reverse_chains(
    network: CapsuleNetwork, generator: torch.Generator
) -> None:
    density = network.require_density()
    draws = density.base.from_white(torch.randn(40, 288, generator=generator))
    found = log_partition(density, draws, temperatures=5, seed=0)
    own, other = found["own ends"], found["tempered draws"]
    assert own["forward"] == other["forward"]
    assert own["reverse"] != other["reverse"]
    assert own["bracket"] == pytest.approx(own["reverse"] - own["forward"])


def test_copies_are_near_whatever_their_class(
    network: CapsuleNetwork, classifier: Classifier
) -> None:
    images = load("mnist-sample").batch(range(40))
    x = network.whitened(images)
    decoded = network.decode_whitened(x, tied=True)

    class Known:
        def batch(self, _: slice) -> torch.Tensor:
            return decoded

    found = nearest(network, {"copies": x, "noise": torch.randn(x.shape)}, Known(), classifier)  # type: ignore[arg-type]
    assert found["copies"]["all"] == pytest.approx(0, abs=1e-2)
    assert found["copies"]["by_class"] == pytest.approx(0, abs=1e-2)
    assert found["noise"]["all"] > 0.1


def test_the_script_answers_every_question(
    network: CapsuleNetwork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network.save(tmp_path / "run")
    numbers = tmp_path / "mixing.json"
    options = "--per-class 1 --steps 100 --every 50 --levels 3 --draws 20 --temperatures 5"
    options += " --components 4 20"
    main(
        [
            *("--network", str(tmp_path / "run"), "--limit", "300", "--json", str(numbers)),
            *options.split(),
        ]
    )
    found, printed = json.loads(numbers.read_text()), capsys.readouterr().out
    assert found["command"].startswith("python -m benchmarks.mixing --network")
    assert found["tempered"]["swap_rate"] > 0
    assert found["from_noise"]["draws"] == 20
    assert 0 <= found["from_noise"]["difference"] <= 1
    assert found["likelihood"]["training"]["images"] == 300
    assert found["likelihood"]["test"]["error"] > 0
    base = found["likelihood"]["test"]["base"]
    assert found["gaussians"].keys() == {"4", "20"}
    assert found["gaussians"]["20"]["test"] > found["gaussians"]["4"]["test"] > base
    assert found["nearest"].keys() == {"draws", "images"}
    assert table(found) in printed
    assert "| in the class of their start, steps 0 to 500 |" in printed
    with pytest.raises(SystemExit):
        main(["--network", str(tmp_path / "run"), "--every", "30"])
