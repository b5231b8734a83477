"""A training run from start to end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import functional as F
from poecaps import unsquash
from poecaps.energy import CapsuleDensity
from poecaps.kernels import cpu, dispatch
from poecaps.layer import CapsuleDecoder, CapsuleExperts, CapsuleRouting
from poecaps.serialization import read_tensors
from poecaps.training import (
    PRESETS,
    DecoderStage,
    EncoderStage,
    Progress,
    Stage,
    TrainingError,
    resume,
    train,
)
from poecaps.training.checkpoint import CHECKPOINT
from poecaps.training.distributed import RandomNumbers
from poecaps.training.stages import AutoencoderTrainer
from tests.training.runs import Stop, assert_same_weights, config_for, metrics, without_epochs

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trained_network_beats_the_mean_image(data: Path, tmp_path: Path) -> None:
    tiny = config_for(data)
    model = replace(tiny.model, experts=((4, 8),))
    longer = replace(
        tiny,
        model=model,
        autoencoder=Stage(epochs=30, learning_rate=5e-3),
        encoder=EncoderStage(epochs=10, learning_rate=0.05),
        decoder=DecoderStage(epochs=30, learning_rate=0.03),
    )
    network = train(longer, tmp_path / "run")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        error = (network.reconstruct(images) - images).square().mean()
        assert error < 0.8 * (images - images.mean(0)).square().mean()


@pytest.mark.parametrize("mixing", F.MIXINGS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_fast_versions_learn_what_the_reference_learns(
    normalize: F.Axis,
    mixing: F.Mixing,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain PyTorch, and compiled C where there is a compiler."""
    versions = ["plain", *(["compiled"] if cpu.why_not_compiled() is None else [])]
    config = config_for(data)
    encoder = replace(config.encoder, mixing=mixing)
    config = replace(config, model=replace(config.model, normalize=normalize), encoder=encoder)
    for version in versions:
        least = 0 if version == "compiled" else math.inf
        monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", least)
        cpu.release_workspace()
        train(config, tmp_path / version)
        kept = len(cpu.routing._spare_workspaces)
        assert kept == (version == "compiled")  # it keeps its workspace
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: "reference")
    train(config, tmp_path / "reference")
    for version in versions:
        runs = (metrics(tmp_path / name) for name in (version, "reference"))
        for ours, theirs in zip(*runs, strict=True):
            assert ours.pop("stage") == theirs.pop("stage")
            # The loss is a small difference of free energies, and learning amplifies rounding
            # errors.
            assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-2, abs=1e-3)
            assert ours == pytest.approx(theirs, rel=5e-3, abs=1e-5)


def test_the_metrics_cover_each_stage_from_start_to_end(finished: Path) -> None:
    lines = metrics(finished)
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    assert stages == [
        "autoencoder",
        "encoder 1",
        "encoder 2",
        "decoder 1",
        "decoder 2",
        "pixel decoder",
    ]
    for stage, epochs in zip(stages, (4, 3, 3, 3, 3, 2), strict=True):
        steps = [line["step"] for line in lines if line["stage"] == stage]
        assert steps == sorted(set(steps))
        assert steps[-1] == epochs * 6
        numbers = {"loss", "learning_rate", "reconstruction_error"}
        if stage.startswith("encoder"):
            numbers |= {"firing", "effective_rank"}
        assert all(numbers <= line.keys() for line in lines if line["stage"] == stage)


def test_the_network_is_ready_for_use(data: Path, finished: Path, tmp_path: Path) -> None:
    network = train(config_for(data), tmp_path / "run")
    assert not any(part.training for part in network.modules())
    assert all(parameter.is_contiguous() for parameter in network.parameters())
    assert_same_weights(tmp_path / "run", finished)
    network = train(config_for(data, precision="float32"), tmp_path / "exact")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        z = unsquash(network.encode(images))
    strongest = z.norm(dim=-1).argmax(1)
    own = next(j for j in range(3) if (strongest == j).sum() > 4)  # the density has seen all images
    torch.testing.assert_close(
        network.code_density.mean[own], z[strongest == own, own].mean(0), rtol=0.1, atol=0.02
    )


def test_each_seed_has_its_own_weights_orders_and_draws(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[torch.Tensor] = []
    draws: list[torch.Tensor] = []
    loss, uniform = AutoencoderTrainer.loss, RandomNumbers.uniform

    def watched_loss(
        self: AutoencoderTrainer, indices: torch.Tensor, random: RandomNumbers
    ) -> torch.Tensor:
        batches.append(indices)
        return loss(self, indices, random)

    def watched_uniform(self: RandomNumbers, *shape: int, dim: int = 0) -> torch.Tensor:
        draws.append(uniform(self, *shape, dim=dim))
        return draws[-1]

    monkeypatch.setattr(AutoencoderTrainer, "loss", watched_loss)
    monkeypatch.setattr(RandomNumbers, "uniform", watched_uniform)
    first = []
    for seed in (0, 1):
        network = train(
            without_epochs(data, seed=seed, autoencoder=Stage(epochs=2, learning_rate=0.0)),
            tmp_path / str(seed),
        )
        # A learning rate of 0 leaves the initial weights.
        first.append(network.autoencoder.conv1_weight.detach())
    assert not torch.equal(*first)
    orders = [torch.cat(batches[start : start + 6]) for start in (0, 6, 12, 18)]
    assert all(torch.equal(order.sort().values, torch.arange(96)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4  # two epochs of two seeds
    assert len({float(drawn.sum()) for drawn in draws}) == 24


def test_training_leaves_the_random_numbers_of_the_caller_alone(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(config_for(data, encoder=EncoderStage(epochs=1, mixing="bernoulli")), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def decoder_after(data: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Weights of the upper decoder after steps of SGD on all images at once."""
    plain: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    plain |= {"final_learning_rate_ratio": 1.0}
    stage = DecoderStage(**plain | options)
    network: Any = train(
        without_epochs(data, decoder=stage, batch_size=96, precision="float32"), folder
    )
    weight: torch.Tensor = network.decoders[1].weight.detach()
    return weight


def test_sgd_has_momentum_learning_rate_decay_and_weight_decay(data: Path, tmp_path: Path) -> None:
    def after(name: str, **options: Any) -> torch.Tensor:
        return decoder_after(data, tmp_path / name, **options)

    start, one, two = after("0", epochs=0), after("1", epochs=1), after("2", epochs=2)
    shrunk = after("weight decay", epochs=1, weight_decay=0.25)
    torch.testing.assert_close(shrunk, one - 0.25 * start)  # w − η (gradient + λ w)
    pushed = after("momentum", epochs=2, momentum=0.5)
    torch.testing.assert_close(
        pushed, two + 0.5 * (one - start)
    )  # the second step repeats half of the first
    slowed = after(
        "decay", epochs=2, final_learning_rate_ratio=0.0
    )  # the cosine is 1 at the first of two steps, 1/2 at the second
    torch.testing.assert_close(slowed, one + 0.5 * (two - one))


def test_divergence_names_stage_step_and_rate_and_keeps_the_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    wild = config_for(
        data,
        encoder=EncoderStage(epochs=4, optimizer="sgd", learning_rate=1e30),
        checkpoint_every=0,
    )
    with pytest.raises(
        TrainingError, match=r"encoder 1 diverged at step \d+ with a learning rate of \d\S*; lower"
    ):
        train(wild, tmp_path / "run")
    before = (tmp_path / "run" / CHECKPOINT).read_bytes()
    with pytest.raises(TrainingError, match="The last checkpoint is in"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == before


def test_diverged_weights_stop_the_run_before_they_are_saved(data: Path, tmp_path: Path) -> None:
    """They are finite all the time, but far too large."""
    wild = config_for(
        data,
        decoder=DecoderStage(epochs=6, optimizer="sgd", learning_rate=1e8, momentum=0.0),
        checkpoint_every=0,
    )
    with pytest.raises(
        TrainingError, match=r"decoder 1 diverged at step \d+ with a learning rate of"
    ):
        train(wild, tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    assert all(
        tensor.isfinite().all() and tensor.float().abs().mean() < 1e3 for tensor in tensors.values()
    )
    assert about["stage"] <= 3


def test_a_stage_can_have_a_batch_size_of_its_own(data: Path, tmp_path: Path) -> None:
    """Said of one stage or of the other one, it is the same run, and it is resumed as it was."""
    autoencoder = Stage(epochs=2, learning_rate=5e-3)
    encoder = EncoderStage(epochs=2, learning_rate=0.05, winners=1)
    config = without_epochs(data, autoencoder=autoencoder, encoder=encoder, checkpoint_every=0)
    larger = replace(config, encoder=replace(encoder, batch_size=48))
    smaller = replace(config, batch_size=48, autoencoder=replace(autoencoder, batch_size=16))
    steps: dict[str, int] = {}

    def report(progress: Progress) -> None:
        steps[progress.stage] = progress.steps
        if progress.stage == "encoder 2" and progress.step == 3:
            raise Stop

    train(larger, tmp_path / "larger")
    with pytest.raises(Stop):
        train(smaller, tmp_path / "smaller", report=report)
    resume(tmp_path / "smaller")
    assert steps == {"autoencoder": 12, "encoder 1": 4, "encoder 2": 4}
    assert_same_weights(tmp_path / "larger", tmp_path / "smaller")
    assert metrics(tmp_path / "larger") == metrics(tmp_path / "smaller")


def test_the_paper_preset_trains(data: Path, tmp_path: Path) -> None:
    config = PRESETS["paper"]()
    stages = {
        name: replace(getattr(config, name), epochs=2)
        for name in ("autoencoder", "encoder", "decoder")
    }
    model = replace(config.model, features=8)
    network = train(
        replace(config, data=str(data), batch_size=16, device="cpu", model=model, **stages),
        tmp_path / "run",
    )
    assert network.autoencoder.conv1_bias is None
    assert not network.preprocessing.mean.any()
    assert torch.equal(network.preprocessing.matrix, torch.eye(8).expand(4, 8, 8))


@pytest.mark.parametrize(
    "layer",
    [
        CapsuleExperts(3, 2, 4, 5),
        CapsuleDecoder(4, 5, 3, 2),
        CapsuleDensity(3, 2, 4, 5),
        CapsuleDensity(3, 2, 4, 5, iterations=3),
    ],
)
def test_layers_on_a_cpu_are_not_captured(layer: CapsuleRouting) -> None:
    assert not layer.is_capturable
