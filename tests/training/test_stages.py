"""The loss, the metrics and the result of each stage."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import Architecture, CapsuleNetwork, squash
from poecaps.data import ImageSet
from poecaps.training import DecoderStage, EncoderStage, PixelDecoderStage, train
from poecaps.training.config import stage_options
from poecaps.training.distributed import Distributed
from poecaps.training.features import FeatureCache
from poecaps.training.stages import DecoderTrainer, factor_for_firing, make_stages
from tests.training.runs import config_for, metrics, weights, without_epochs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("pixel_decoder", [False, True])
def test_the_names_of_the_stages_are_those_of_the_options(
    pixel_decoder: bool, data: Path, generator: torch.Generator
) -> None:
    config = config_for(data)
    config = replace(config, model=replace(config.model, pixel_decoder=pixel_decoder))
    network = CapsuleNetwork(
        Architecture(**vars(config.model), image_shape=(1, 20, 19)), generator=generator
    )
    images = ImageSet(np.load(data))
    cache = FeatureCache(images, network, torch.device("cpu"), Distributed(), bfloat16=False)
    stages = make_stages(config, cache)
    named = stage_options(config)
    assert [stage.name for stage in stages] == list(named)
    assert all(stage.options is getattr(config, named[stage.name]) for stage in stages)


def test_later_stages_leave_earlier_parts_alone(data: Path, finished: Path, tmp_path: Path) -> None:
    """A run whose later stages have no epochs has the same earlier parts, bit for bit."""
    train(config_for(data, decoder=DecoderStage(epochs=0)), tmp_path / "a")
    train(
        config_for(data, encoder=EncoderStage(epochs=0), decoder=DecoderStage(epochs=0)),
        tmp_path / "b",
    )
    whole, no_decoder, no_capsules = (
        weights(finished),
        weights(tmp_path / "a"),
        weights(tmp_path / "b"),
    )
    for name in whole:
        if name.startswith(("autoencoder.", "preprocessing.")):
            assert torch.equal(whole[name], no_capsules[name])
        if name.startswith(("autoencoder.", "preprocessing.", "encoders.")):
            assert torch.equal(whole[name], no_decoder[name])
        if name == "decoders.0.weight":
            assert not torch.equal(whole[name], no_decoder[name])


def test_layers_start_from_different_weights_of_the_given_size(data: Path, tmp_path: Path) -> None:
    config = without_epochs(
        data,
        encoder=EncoderStage(epochs=0, init_std=0.3),
        decoder=DecoderStage(epochs=0, init_std=0.05),
    )
    network: Any = train(config, tmp_path / "run")
    up, down = network.encoders[0].weight.detach(), network.decoders[0].weight.detach()
    assert up.std().item() == pytest.approx(0.3, rel=0.1)
    assert down.std().item() == pytest.approx(0.05, rel=0.1)
    assert not torch.allclose(up.flatten()[:50] / 0.3, down.flatten()[:50] / 0.05)


def test_experts_compete_during_training_and_all_fire_afterwards(
    data: Path, finished: Path
) -> None:
    """In the finished run two experts won at a time; now the winner has the highest firing."""
    network = CapsuleNetwork.load(finished)
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        code = network.encode(images)
    assert bool((code.norm(dim=-1) > 0).all())
    assert all(not layer.balance.any() and layer.winners is None for layer in network.encoders)  # type: ignore[operator]


def test_the_strongest_expert_has_the_target_firing(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    encoder = EncoderStage(
        epochs=4, learning_rate=0.05, mixing="bernoulli", winners=2, target_firing=0.4
    )
    model = replace(config_for(data).model, experts=((4, 5),))
    plain = train(
        config_for(data, model=model, encoder=replace(encoder, target_firing=None)),
        tmp_path / "plain",
    )
    tempered = train(config_for(data, model=model, encoder=encoder), tmp_path / "tempered")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        before, after = (network.encode(images).norm(dim=-1) for network in (plain, tempered))
    assert after.amax(1).mean().item() == pytest.approx(0.4, abs=0.02)
    assert before.amax(1).mean().item() != pytest.approx(0.4, abs=0.05)
    assert torch.equal(before.argsort(1), after.argsort(1))


@pytest.mark.parametrize("target", [0.01, 0.5, 0.99])
def test_the_factor_for_a_firing_probability_is_found(
    target: float, generator: torch.Generator
) -> None:
    norm = torch.rand(100, generator=generator) * 50
    square = (norm * factor_for_firing(norm, target)).square()
    assert (square / (1 + square)).mean().item() == pytest.approx(target, rel=1e-4)
    assert factor_for_firing(torch.zeros(5), target) == 1


def test_some_images_are_decoded_from_their_strongest_expert_alone(
    generator: torch.Generator,
) -> None:
    network = CapsuleNetwork(
        Architecture(image_shape=(1, 20, 19), features=8, experts=((3, 5),)), generator=generator
    )
    y, x = (squash(torch.randn(4, *shape, generator=generator)) for shape in ((3, 5), (4, 8)))
    cache: Any = SimpleNamespace(
        network=network, codes=lambda layer, indices: y, inputs=lambda layer, indices: x
    )
    stage = DecoderTrainer(0, DecoderStage(single_expert_share=0.5), cache)
    numbers = torch.tensor([0.1, 0.6, 0.4999, 0.5])
    random: Any = SimpleNamespace(uniform=lambda *shape: numbers.view(shape))
    loss = stage.loss(torch.arange(4), random)
    for image in (0, 2):
        for expert in set(range(3)) - {int(y[image].norm(dim=-1).argmax())}:
            y[image, expert] = 0
    torch.testing.assert_close(loss, network.decoders[0].contrastive_divergence(y, x))  # type: ignore[operator]


def test_a_decoder_may_learn_what_the_encoder_reconstructs(generator: torch.Generator) -> None:
    """The second reading of the data of the decoder's rule: z_i = Σ_j c_ij W_ijᵀ y_j."""
    network: Any = CapsuleNetwork(
        Architecture(image_shape=(1, 20, 19), features=8, experts=((3, 5),)), generator=generator
    )
    x = squash(torch.randn(4, 4, 8, generator=generator))
    y = network.encoders[0](x).detach()
    cache: Any = SimpleNamespace(
        network=network, codes=lambda layer, indices: y, inputs=lambda layer, indices: x
    )
    stage = DecoderTrainer(0, DecoderStage(target="reconstruction"), cache)
    c = network.encoders[0].route(x).coefficients
    target = squash(torch.einsum("bij,ijdk,bjd->bik", c, network.encoders[0].weight, y)).detach()
    expected = network.decoders[0].contrastive_divergence(y, target)
    random: Any = SimpleNamespace(uniform=lambda *shape: torch.ones(shape))
    torch.testing.assert_close(stage.loss(torch.arange(4), random), expected)
    assert not torch.allclose(expected, network.decoders[0].contrastive_divergence(y, x))


def test_the_pixel_decoder_and_the_lowest_decoder_learn_sharp_images(
    data: Path, tmp_path: Path
) -> None:
    """The loss is the mean absolute error of the pixels plus a little cross-entropy."""
    stage = PixelDecoderStage(
        epochs=1,
        optimizer="sgd",
        learning_rate=0.0,
        momentum=0.0,
        single_expert_share=0.0,
        cross_entropy=0.2,
    )
    config = config_for(data, pixel_decoder=stage, batch_size=96, precision="float32")
    network = train(config, tmp_path / "run")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        drawn = network.reconstruct(images)
        entropy = torch.nn.functional.binary_cross_entropy(drawn, images)
        expected = (drawn - images).abs().mean() + 0.2 * entropy
        relative = (drawn - images).square().sum() / (images - images.mean(0)).square().sum()
    border = images.mean(0)[:, -1].clamp(0.5 / 255, 1 - 0.5 / 255)  # no feature reaches it
    torch.testing.assert_close(drawn[7, :, -1], border)
    line = next(line for line in metrics(tmp_path / "run") if line["stage"] == "pixel decoder")
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-3)
    assert line["reconstruction_error"] == pytest.approx(relative.item(), rel=1e-3)
    tuned = train(
        replace(config, pixel_decoder=replace(stage, epochs=20, learning_rate=0.3)),
        tmp_path / "tuned",
    )
    with torch.no_grad():
        assert (tuned.reconstruct(images) - images).abs().mean() < 0.97 * (
            drawn - images
        ).abs().mean()
    ours, theirs = weights(tmp_path / "tuned"), weights(tmp_path / "run")
    moved = {name.rpartition(".")[0] for name in ours if not torch.equal(ours[name], theirs[name])}
    assert {"pixel_decoder", "decoders.0"} <= moved
    assert not any(
        name.startswith(("autoencoder", "encoders", "preprocessing", "decoders.1"))
        for name in moved
    )


def test_the_pixel_decoder_learns_its_share_from_the_strongest_expert_alone(
    data: Path, tmp_path: Path
) -> None:
    stage = PixelDecoderStage(
        epochs=1,
        optimizer="sgd",
        learning_rate=0.0,
        momentum=0.0,
        single_expert_share=1.0,
        cross_entropy=0.0,
    )
    strong = DecoderStage(epochs=0, init_std=1.0)  # so that what is drawn depends on the code
    network = train(
        config_for(data, decoder=strong, pixel_decoder=stage, batch_size=96, precision="float32"),
        tmp_path / "run",
    )
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        code = network.encode(images)
        norm = code.norm(dim=-1, keepdim=True)
        alone, together = (
            (network.decode(y) - images).abs().mean().item()
            for y in (code * (norm == norm.amax(1, keepdim=True)), code)
        )
    (line,) = [line for line in metrics(tmp_path / "run") if line["stage"] == "pixel decoder"]
    assert line["loss"] == pytest.approx(alone, rel=1e-3)
    assert alone != pytest.approx(together, rel=3e-3)
