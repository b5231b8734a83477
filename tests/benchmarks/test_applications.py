"""The benchmark of applications: its parts against other libraries, and the whole script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import BernoulliRBM as SklearnRBM

from benchmarks.applications import auroc, main, masks, measure_novelty, rbm_free_energy
from benchmarks.baselines import CODE_SIZE, BernoulliRBM, Budget
from poecaps import Architecture, CapsuleNetwork
from poecaps.applications import log_prob, novelty_score
from poecaps.data import ImageSet, load
from poecaps.options import DensityOptions
from tests.networks import untrained_with_density

if TYPE_CHECKING:
    from pathlib import Path


def test_the_auroc_agrees_with_scikit_learn(generator: torch.Generator) -> None:
    inside = torch.randint(0, 20, (100,), generator=generator).float()  # with ties
    outside = torch.randint(5, 25, (70,), generator=generator).float()
    expected = roc_auc_score(np.repeat([0, 1], [100, 70]), torch.cat([inside, outside]))
    assert auroc(inside, outside) == pytest.approx(expected)


def test_the_free_energy_of_the_rbm_agrees_with_scikit_learn() -> None:
    data = ImageSet(load("mnist-sample").images[:200])
    ours = BernoulliRBM(data, Budget(1, 0, 0, torch.device("cpu")))
    theirs = SklearnRBM(CODE_SIZE, learning_rate=0.05, batch_size=50, n_iter=1, random_state=0)
    pixels = data.batch(slice(None)).flatten(1).numpy()
    theirs.fit(pixels)
    expected = torch.from_numpy(theirs._free_energy(pixels)).float()
    torch.testing.assert_close(
        rbm_free_energy(ours, data.batch(slice(None))), expected, rtol=1e-4, atol=1e-2
    )


def test_masks_hide_the_named_pixels() -> None:
    known = masks(28, 28)
    assert {name: int((~mask).sum()) for name, mask in known.items()} == {
        "right half": 392,
        "lower half": 392,
        "centre": 196,
    }
    assert known["right half"][:, :14].all()
    assert known["lower half"][:14].all()


def test_the_script_measures_every_application(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Architecture(features=8, experts=((3, 4),), joint_components=1, expert_components=1)
    CapsuleNetwork(shape, generator=torch.Generator().manual_seed(0)).save(tmp_path / "run")
    size = ["--limit", "60", "--epochs", "1", "--draws", "20", "--device", "cpu"]
    main(
        [
            "--network",
            str(tmp_path / "run"),
            *size,
            "--json",
            str(tmp_path / "out" / "applications.json"),
        ]
    )
    found = json.loads((tmp_path / "out" / "applications.json").read_text())
    printed = capsys.readouterr().out
    assert found["test_images"] == 60
    assert len(found["novelty"]) == 7
    assert all(0 <= value <= 1 for value in found["novelty"].values())
    assert found["interpolation"]["end points"] > 0.9  # real images of digits
    assert 0.3 < found["neighbours"]["pixels"] < 1  # chance is 0.1
    assert all(each["mean image"] < 0.3 for each in found["inpainting"].values())
    for value in found["neighbours"].values():
        assert f"{value:.4f}" in printed


def test_the_novelty_of_a_density_is_measured_beside_its_controls(
    generator: torch.Generator,
) -> None:
    train, test = (load("mnist-sample", split=split) for split in ("train", "test"))
    few, inside = ImageSet(train.images[:60]), test.batch(range(40))
    outside = torch.rand(inside.shape, generator=generator)
    density = DensityOptions(experts=(3, 4), linear_dims=2, base_components=4)
    shape = Architecture(features=8, experts=((3, 4),), density=density)
    network = untrained_with_density(shape, few.batch(slice(None)), generator)
    device = torch.device("cpu")
    with torch.no_grad():
        found = measure_novelty(network, few, inside, outside, Budget(0, 0, 0, device))
        scores = (
            auroc(novelty_score(network, inside, usual), novelty_score(network, outside, usual))
            for usual in (None, log_prob(network, few.batch(slice(None))))
        )
        v = [network.whitened(images) for images in (inside, outside)]
        base = network.require_density().base
        controls = {
            "−log P of the base measure": auroc(*(-base.log_ratio(each) for each in v)),
            "norm of the features": auroc(*(each.square().sum((1, 2)) for each in v)),
        }
    names = ("−log P", "distance from the median −log P")
    assert [found[f"poecaps: {name}"] for name in names] == list(scores)
    for name, value in controls.items():
        assert found[f"poecaps: {name}"] == value
    assert len(found) == 11  # the reconstruction error, and ten of five statistics
    assert all(name.startswith("poecaps") for name in found)  # no peer without epochs


def test_datasets_of_different_image_sizes_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x_test=np.zeros((5, 20, 20), np.uint8))
    with pytest.raises(SystemExit):
        main(["--network", "nowhere", "--limit", "5", "--against", str(tmp_path / "x.npz")])
    assert "--against must have images of shape (1, 28, 28)" in capsys.readouterr().err
