"""A density that learns by Markov chains."""

from __future__ import annotations

import copy
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork, ModelError
from poecaps.energy import CapsuleDensity, GaussianBase
from poecaps.likelihood import estimate_log_partition, exact_log_partition, fit_log_partition
from poecaps.options import DensityOptions, ModelOptions
from poecaps.sampling import sample
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import (
    PRESETS,
    Config,
    EncoderStage,
    Stage,
    TrainingError,
    fit_density,
    resume,
    train,
)
from poecaps.training.chains import LearningChains, make_chains
from poecaps.training.checkpoint import CHECKPOINT, read_checkpoint
from poecaps.training.config import DensityStage, stage_options
from poecaps.training.density import DensityLearner
from poecaps.training.distributed import Distributed, RandomNumbers
from poecaps.training.optim import make_optimizer
from tests.densities import Known, make_density, two_modes
from tests.training.runs import Stop, assert_same_weights, metrics, weights, without_epochs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.training import Progress

CHAINS, NUMBERS, COMPONENTS = 16, 32, 4  # 8 capsules of dimension 4
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "without linear coordinates": ({"linear_dims": 0}, {"average": 0.0}),
    "tempered": ({}, {"levels": 4, "lifetime": 0}),
    "persistent": ({"base_components": 0}, {"lifetime": 0, "optimizer": "sgd"}),
    "routed on the ball": ({"base": "ball", "base_components": 0, "iterations": 3}, {}),
}


def density_config(
    data: Path, density: dict[str, Any] | None = None, stage: dict[str, Any] | None = None
) -> Config:
    """A run of 6 steps of the autoencoder and 12 of a density, and none of the other parts."""
    config = without_epochs(
        data, autoencoder=Stage(epochs=1, learning_rate=5e-3), checkpoint_every=0
    )
    options: dict[str, Any] = {"experts": (3, 4), "linear_dims": 2, "base_components": COMPONENTS}
    options |= {"strength": 2.0, **(density or {})}
    usual: dict[str, Any] = {"epochs": 2, "chains": CHAINS, "lifetime": 6, "leapfrog_steps": 2}
    usual |= {"partition_chains": 4, "partition_steps": 3, **(stage or {})}
    return replace(
        config,
        model=replace(config.model, density=DensityOptions(**options)),
        density=DensityStage(**usual),
    )


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Uninterrupted runs of the variants, each made once."""
    folders: dict[str, Path] = {}

    def run(variant: str) -> Path:
        if variant not in folders:
            folders[variant] = tmp_path_factory.mktemp("density") / "run"
            train(density_config(data, *VARIANTS[variant]), folders[variant])
        return folders[variant]

    return run


def stop_at(step: int, stage: str = "density") -> Callable[[Progress], None]:
    def stop(progress: Progress) -> None:
        if progress.stage == stage and progress.step >= step:
            raise Stop

    return stop


def images_of(data: Path) -> Tensor:
    return torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize(
    ("variant", "step"),
    [
        ("usual", 0),
        ("usual", 2),
        ("usual", 12),
        *((variant, 6) for variant in VARIANTS),
    ],
)
def test_a_resumed_density_is_bit_identical(
    variant: str, step: int, data: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    config = density_config(data, *VARIANTS[variant])
    with pytest.raises(Stop):
        train(config, tmp_path / "run", report=stop_at(step))
    stopped = read_checkpoint(tmp_path / "run")
    assert stopped.stage == 1
    assert stopped.step == max(0, step - 1)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole(variant))
    assert metrics(tmp_path / "run") == metrics(whole(variant))


def test_a_checkpoint_holds_the_chains(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(density_config(data), tmp_path / "run", report=stop_at(6))
    state = read_checkpoint(tmp_path / "run").stage_state
    assert state["position"].shape == (CHAINS, COMPONENTS)
    assert state["position"].std().item() == pytest.approx(1, abs=0.3)
    assert state["chain_step"] == 5
    assert state["average.0"].shape == state["restricted.weight"].shape == (1, 3, 4, COMPONENTS)
    resume(tmp_path / "run", report=None)
    assert not read_checkpoint(tmp_path / "run").stage_state  # the stage is over


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"position": None}, "position is not a state of these chains"),
        ({"position": torch.zeros(CHAINS, COMPONENTS + 1)}, "position is not a state"),
        ({"position": torch.full((CHAINS, COMPONENTS), torch.nan)}, "position is not a state"),
        ({"acceptance": None}, "acceptance is not a state of these chains"),
        ({"step_size": torch.zeros(1)}, "step_size is not a state of these chains"),
        ({"chain_step": torch.tensor(torch.inf)}, "chain_step is not a state of these chains"),
        ({"average.1": None}, "average.1 is not that of a density"),
        ({"average.0": torch.zeros(8, 3, 4)}, "average.0 is not that of a density"),
        ({"average.2": torch.full((3,), torch.nan)}, "average.2 is not that of a density"),
        ({"restricted.weight": None}, "restricted.weight is not that of a density"),
        ({"restricted.origin": torch.zeros(4)}, "restricted.origin is not that of a density"),
    ],
)
def test_a_damaged_state_of_the_stage_is_one_clear_error(
    state: dict[str, Tensor | None],
    message: str,
    stopped: Path,
    tmp_path: Path,
) -> None:
    tensors, about = read_tensors(stopped / CHECKPOINT)
    altered = {f"stage.{name}": value for name, value in state.items()}
    changed = {name: value for name, value in (tensors | altered).items() if value is not None}
    write_tensors(tmp_path / CHECKPOINT, changed, about)
    with pytest.raises(ModelError, match=f"is damaged: {message}"):
        resume(tmp_path)


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after 4 steps of the density."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        train(density_config(data), folder, report=stop_at(5))
    return folder


def test_a_stage_without_chains_refuses_them(data: Path, tmp_path: Path) -> None:
    config = replace(density_config(data), encoder=EncoderStage(epochs=1))
    with pytest.raises(Stop):
        train(config, tmp_path / "run", report=stop_at(4, "encoder 1"))
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    assert not any(name.startswith("stage.") for name in tensors)
    tensors["stage.position"] = torch.zeros(CHAINS, NUMBERS)
    write_tensors(tmp_path / "run" / CHECKPOINT, tensors, about)
    with pytest.raises(ModelError, match="is damaged: encoder 1 has no state position"):
        resume(tmp_path / "run")


def two_clusters(count: int, seed: int) -> np.ndarray:
    """Bars on the left or on the right, at two heights."""
    random = np.random.default_rng(seed)
    images = np.zeros((count, 20, 19), np.uint8)
    for image in images:
        column, row = (2, 12)[random.integers(2)], 4 + random.integers(4)
        image[row : row + 8, column : column + 5] = 255
    return images


def test_a_density_learns_two_clusters(tmp_path: Path) -> None:
    """Unseen images of the same kind become more probable than before the training."""
    np.save(tmp_path / "clusters.npy", two_clusters(320, seed=0))
    options = {"experts": (8, 4), "base_components": 8, "base_max_variance": 1.0}
    stage = {"epochs": 30, "chains": 64, "lifetime": 60, "learning_rate": 2e-2, "average": 0.98}
    config = density_config(tmp_path / "clusters.npy", options, stage)
    config = replace(config, batch_size=32, checkpoint_every=1e6)
    before = train(replace(config, density=replace(config.density, epochs=0)), tmp_path / "before")
    after = train(config, tmp_path / "after")
    images = torch.from_numpy(two_clusters(100, seed=1) / 255).float().unsqueeze(1)
    mean = []
    for network in (before, after):
        assert network.density is not None
        estimate = estimate_log_partition(
            network.density, chains=64, steps=60, generator=torch.Generator().manual_seed(0)
        )
        assert abs(estimate.bracket) < 1
        fit_log_partition(network.density, estimate)
        mean.append(network.log_prob(images).mean().item())
    assert mean[1] > mean[0] + 3


def test_the_metrics_are_those_of_images_and_chains(whole: Callable[[str], Path]) -> None:
    names = {"loss", "learning_rate", "free_energy", "held_out_free_energy", "acceptance"}
    for variant in VARIANTS:
        lines = [line for line in metrics(whole(variant)) if line["stage"] == "density"]
        assert [line["step"] for line in lines] == list(range(1, 13))
        expected = {*names, "chain_free_energy"}
        if variant != "persistent":
            expected |= {"log_partition", "nats"}
        for line in lines:
            assert line.keys() == expected | {"stage", "step", "epoch"}
            if variant != "persistent":
                nats = -line["held_out_free_energy"] - line["log_partition"]
                assert line["nats"] == pytest.approx(nats)


def test_a_density_learns_from_fewer_images_than_would_be_held_out(
    data: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "few.npy", np.load(data)[:12])
    network = train(density_config(tmp_path / "few.npy"), tmp_path / "run")
    assert network.log_prob(images_of(data)).isfinite().all()
    last = metrics(tmp_path / "run")[-1]
    assert "free_energy" in last
    assert "held_out_free_energy" not in last


def test_the_result_is_an_average_of_the_weights_which_does_not_steer_the_training(
    data: Path, tmp_path: Path
) -> None:
    """At step s the average keeps (1 + s)/(10 + s) of itself: its memory grows with the steps."""
    seen: dict[int, Tensor] = {}

    def watch(progress: Progress) -> None:
        checkpoint = read_checkpoint(tmp_path / "average")
        if checkpoint.stage == 1 and checkpoint.step > 0:
            seen[checkpoint.step] = checkpoint.model["density.weight"]

    options = {"base_components": 0}
    train(density_config(data, options, {"average": 0.6}), tmp_path / "average", report=watch)
    train(density_config(data, options, {"average": 0.0}), tmp_path / "last")
    train(density_config(data, options, {"learning_rate": 0.0}), tmp_path / "first")
    assert metrics(tmp_path / "average") == metrics(tmp_path / "last")
    seen[0] = expected = weights(tmp_path / "first")["density.weight"]
    seen[12] = weights(tmp_path / "last")["density.weight"]
    for step in range(13):
        decay = min((1 + step) / (10 + step), 0.6)
        expected = decay * expected + (1 - decay) * seen[step]
    found = weights(tmp_path / "average")["density.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(found, seen[12], rtol=0.01)


def test_a_density_leaves_all_other_parts_alone(
    data: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without a density, the model has no tensors of one, and the same autoencoder."""
    train(density_config(data, stage={"epochs": 0}), tmp_path / "untrained")
    config = replace(density_config(data), density=DensityStage(epochs=0))
    model = replace(config.model, density=DensityOptions())
    train(replace(config, model=model), tmp_path / "none")
    learned, untrained, none = (
        weights(whole("usual")),
        weights(tmp_path / "untrained"),
        weights(tmp_path / "none"),
    )
    own = {name for name in learned if name.startswith(("density.", "whitening."))}
    assert none.keys() == learned.keys() - own
    for name in learned.keys() - own:
        assert torch.equal(learned[name], untrained[name]), name
        if name.startswith(("autoencoder.", "preprocessing.")):
            assert torch.equal(learned[name], none[name]), name
    for name in ("density.weight", "density.log_strength", "density.partition"):
        assert not torch.equal(learned[name], untrained[name])
    for name in ("density.base.std", "density.base.directions", "whitening.matrix"):
        assert torch.equal(learned[name], untrained[name])


def test_a_trained_density_knows_its_partition_function_if_it_was_asked_to(
    data: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    network = CapsuleNetwork.load(whole("usual"))
    assert network.density is not None
    assert math.isfinite(network.density.log_partition)
    unknown = train(density_config(data, stage={"partition_steps": 0}), tmp_path / "run")
    with pytest.raises(ValueError, match="log Z is not known yet"):
        unknown.log_prob(images_of(data))
    with pytest.raises(ValueError, match="this model has no density; train one with the preset"):
        CapsuleNetwork().log_prob(torch.zeros(1, 1, 28, 28))


def test_divergence_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"density diverged at step \d+ with a learning rate of .*; lower"
    ):
        train(density_config(data, stage={"learning_rate": 1e6}), tmp_path / "run")


# --------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("variant", ["usual", "routed on the ball"])
def test_a_saved_density_gives_the_same_likelihood(
    variant: str, half: bool, data: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    network, images = CapsuleNetwork.load(whole(variant)), images_of(data)
    network.save(tmp_path / "saved", half=half)
    loaded = CapsuleNetwork.load(tmp_path / "saved")
    assert loaded.architecture == network.architecture
    expected, found = network.log_prob(images), loaded.log_prob(images)
    assert expected.std() > 0
    assert torch.equal(found, expected) or half
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert network.density is not None
    assert loaded.density is not None
    assert loaded.density.log_partition == network.density.log_partition
    stored = read_tensors(tmp_path / "saved" / "model.safetensors")[0]["density.weight"]
    assert stored.dtype == (torch.float16 if half else torch.float32)


def test_the_likelihood_of_images_is_relative_to_independent_capsules(
    data: Path, whole: Callable[[str], Path]
) -> None:
    """log P(v) − log N(v; 0, 1), with v the whitened capsules."""
    network, images = CapsuleNetwork.load(whole("usual")), images_of(data)
    v = network.whitened(images)
    independent = torch.distributions.Normal(0.0, 1.0).log_prob(v).sum((1, 2))
    expected = network.require_density().log_prob(v) - independent
    torch.testing.assert_close(network.log_prob(images), expected, rtol=0, atol=1e-3)


def test_a_network_draws_and_decodes_capsules_of_its_density(whole: Callable[[str], Path]) -> None:
    for variant in ("usual", "routed on the ball"):
        network = CapsuleNetwork.load(whole(variant))
        seeded = torch.Generator().manual_seed(0)
        samples = network.sample_density(5, steps=6, generator=seeded)
        images = network.decode_whitened(samples.capsules)
        assert images.shape == (5, 1, 20, 19)
        tied = network.decode_whitened(samples.capsules, tied=True)
        assert ((tied >= 0) & (tied <= 1)).all()
        features = network.activations(images)
        torch.testing.assert_close(
            network.decode_whitened(network.whiten(features), tied=True),
            torch.sigmoid(network.logits(features, tied=True)),
            rtol=0,
            atol=1e-3,
        )


def test_every_chain_of_a_network_may_have_an_expert_of_its_own(
    whole: Callable[[str], Path],
) -> None:
    network = CapsuleNetwork.load(whole("usual"))
    density, experts = network.require_density(), torch.tensor([2, 0, 0, 1])
    seeded = torch.Generator().manual_seed(0)
    state = seeded.get_state()
    found = network.sample_density(4, steps=6, expert=experts, generator=seeded)
    on = torch.nn.functional.one_hot(experts, 3)
    expected = sample(density, 4, on=on, steps=2, anneal=4, generator=seeded.set_state(state))
    assert torch.equal(found.capsules, expected.capsules)
    one, many = (
        network.sample_density(4, steps=6, expert=each, generator=seeded.set_state(state)).capsules
        for each in (1, torch.full((4,), 1))
    )
    assert torch.equal(one, many)
    assert not torch.equal(one, found.capsules)
    with pytest.raises(ValueError, match=r"expert must have shape \(B=3\), but has shape \(4,\)"):
        network.sample_density(3, expert=experts)
    with pytest.raises(ValueError, match="expert must be a whole number from 0 to 2, but is -1"):
        network.sample_density(4, expert=experts - 1)
    with pytest.raises(TypeError, match=r"expert must be a whole number from 0 to 2, but is 0\.0"):
        network.sample_density(4, expert=experts.float())
    with pytest.raises(ValueError, match="anneal must be a whole number from 0 to 5, but is 6"):
        network.sample_density(4, steps=6, anneal=6)


# --------------------------------------------------------------------------------------------------
# Options


def test_only_the_preset_energy_has_a_density() -> None:
    for name, preset in PRESETS.items():
        config = preset()
        config.validate()
        assert ("density" in stage_options(config)) == (name == "energy")
        assert (config.model.density.experts is not None) == (name == "energy")
        assert (config.density.epochs > 0) == (name == "energy")
    default, energy = PRESETS["default"](), PRESETS["energy"]()
    assert list(stage_options(energy))[:2] == ["autoencoder", "density"]
    model = replace(energy.model, density=default.model.density)
    assert replace(energy, model=model, density=default.density) == default


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chains": 1, "lifetime": 0}, ValueError, "chains must be .* from 2 to 1048576, but is 1"),
        ({"chains": 4}, ValueError, "chains must be a whole number from 5 to 1048576, but is 4"),
        ({"chains": 8.5}, TypeError, "chains must be a whole number"),
        ({"lifetime": -1}, ValueError, "lifetime must be a whole number of at least 0"),
        (
            {"levels": 4},
            ValueError,
            r"levels needs persistent chains, density.lifetime 0, but that is",
        ),
        ({"levels": 1, "lifetime": 0}, ValueError, "levels must be 0, or at least 2 and divide"),
        ({"levels": 3, "lifetime": 0}, ValueError, "divide density.chains, 16, but is 3"),
        ({"leapfrog_steps": 0}, ValueError, "leapfrog_steps must be .* from 1 to 100"),
        ({"target_acceptance": 0.0}, ValueError, "target_acceptance must be between 0 and 1"),
        ({"target_acceptance": 1.0}, ValueError, "target_acceptance must be between 0 and 1"),
        ({"target_acceptance": 1.5}, ValueError, "target_acceptance must be at most 1"),
        ({"average": 1.0}, ValueError, "density.average must be below 1"),
        ({"average": -0.1}, ValueError, "average must be a finite number of at least 0"),
        ({"partition_chains": 1}, ValueError, "partition_chains must be .* from 2 to 1048576"),
        ({"partition_steps": -1}, ValueError, "partition_steps must be .* from 0 to 1048576"),
        ({"init_std": -1.0}, ValueError, "init_std must be a finite number of at least 0"),
        ({"epochs": -1}, ValueError, "epochs must be a whole number from 0 to 1000000"),
    ],
)
def test_invalid_options_of_the_stage_are_an_error(
    options: dict[str, Any], error: type[Exception], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=rf"density\.{message}|{message}"):
        train(density_config(data, stage=options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": (3, 0)}, "every number of model.density.experts must be"),
        ({"experts": 3}, "model.density.experts must be a number and a dimension, but is 3"),
        ({"linear_dims": 5}, "model.density.linear_dims must be .* from 0 to 4, but is 5"),
        ({"strength": 0.0}, "model.density.strength must be above 0"),
        ({"base": "cube"}, "model.density.base must be one of 'gaussian', 'ball'"),
        ({"base": "ball"}, "base_components must be 0 with base='ball', but is 4"),
        ({"base_components": 33}, r"^model\.density\.base_components must be .* 32, but is 33"),
        ({"base_components": -1}, "model.density.base_components must be"),
        ({"base_max_variance": 0.0}, "model.density.base_max_variance must be above 0"),
        ({"normalize": "input"}, "model.density.normalize must be one of"),
    ],
)
def test_invalid_options_of_the_density_are_an_error(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(density_config(data, options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_density_cannot_train_one(data: Path) -> None:
    config = replace(density_config(data), model=ModelOptions())
    with pytest.raises(ValueError, match=r"density.epochs must be 0 .* set model.density.experts"):
        replace(config, pixel_decoder=PRESETS["paper"]().pixel_decoder).validate()


# --------------------------------------------------------------------------------------------------
# Chains


def chains_on(
    density: CapsuleDensity,
    generator: torch.Generator,
    distributed: Distributed | None = None,
    **options: Any,
) -> LearningChains:
    stage = DensityStage(**{"chains": 600, "lifetime": 60, "leapfrog_steps": 3} | options)
    chains = make_chains(density, stage, distributed or Distributed())
    chains.step_size.value.fill_(0.5)
    chains.start(generator)
    return chains


@pytest.fixture
def density(generator: torch.Generator) -> CapsuleDensity:
    return make_density(generator, 2, 1, 2, 2, linear_dims=1).float()


@pytest.mark.parametrize("lifetime", [1, 2, 3, 7, 49, 187])
def test_every_chain_starts_anew_once_in_a_lifetime(
    lifetime: int, density: CapsuleDensity, generator: torch.Generator
) -> None:
    """No start is missed by rounding."""
    chains = chains_on(density, generator, lifetime=lifetime, chains=64)
    for start in (0, 1000 * lifetime):
        starts, arrivals = torch.zeros(64), torch.zeros(64)
        chains.step.fill_(start + lifetime - 1)
        before = chains._inverse_temperature(chains.offsets, chains.step)[0]
        for step in range(start, start + 4 * lifetime):
            chains.step.fill_(step + lifetime)
            t, is_new = chains._inverse_temperature(chains.offsets, chains.step)
            before = before.masked_fill(is_new, 0)
            starts += is_new
            arrivals += (t >= 1) & (before < 1)
            assert bool((t > before)[t < 1].all())
            before = t
        assert torch.equal(starts, torch.full((64,), 4.0))
        assert lifetime < 3 or torch.equal(arrivals, torch.full((64,), 4.0))


@pytest.mark.parametrize("count", [5, 8, 64])
def test_some_chains_are_always_at_the_model(
    count: int, density: CapsuleDensity, generator: torch.Generator
) -> None:
    for lifetime in (1, 2, 7, 50):
        chains = chains_on(density, generator, chains=count, lifetime=lifetime)
        for step in range(2 * lifetime):
            chains.step.fill_(step)
            share = (
                (chains._inverse_temperature(chains.offsets, chains.step)[0] >= 1)
                .double()
                .mean()
                .item()
            )
            assert share > 0
            assert share == pytest.approx(1 / 3, abs=1.5 / count + 0.05)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lifetime": 150}, 0.5),
        ({"lifetime": 0, "levels": 8}, 0.354),
    ],
    ids=["annealed", "tempered"],
)
@pytest.mark.parametrize("learns", [False, True])
def test_only_tempered_chains_have_the_probabilities_of_the_modes(
    learns: bool, options: dict[str, Any], expected: float, generator: torch.Generator
) -> None:
    """Annealing finds both modes equally often, but one has 35 % of the probability.

    A density that learns has equal modes at first, and does not wait for the next annealing.
    """
    density = two_modes((10.0, 10.0 if learns else 10.2)).float()
    chains = chains_on(density, generator, chains=4000 if "levels" in options else 2000, **options)
    random = RandomNumbers(generator, Distributed())
    found = []
    for step in range(450):
        if learns and step == 140:
            density.log_strength.data.copy_(torch.tensor((10.0, 10.2)).log())
        capsules, weight = chains.advance(random)
        found.append((weight * (capsules.flatten() > 0)).sum().item())
    assert statistics.mean(found[150:]) == pytest.approx(expected, abs=0.05)
    assert statistics.mean(found[150:160]) == pytest.approx(expected, abs=0.12)


def test_chains_of_the_model_are_draws_with_weights_of_a_mean(
    density: CapsuleDensity, generator: torch.Generator
) -> None:
    chains = chains_on(density, generator)
    random = RandomNumbers(generator, Distributed())
    for _ in range(120):
        capsules, weight = chains.advance(random)
        assert weight.sum().item() == pytest.approx(1)
    draws = capsules[weight > 0].double()
    assert len(draws) == 200
    Known(density.double()).assert_are_draws(draws)
    assert chains.acceptance > 0.3


def test_the_given_random_numbers_decide_the_metropolis_test(
    density: CapsuleDensity, generator: torch.Generator
) -> None:
    """Those of the whole batch of chains, of which every process has its share."""

    class Chosen(RandomNumbers):
        number = 0.0

        def uniform(self, *shape: int, dim: int = 0) -> Tensor:
            return torch.full_like(super().uniform(*shape, dim=dim), self.number)

    chains, random = chains_on(density, generator, lifetime=0), Chosen(generator, Distributed())
    chains.step_size.value.fill_(1.5)
    chains.advance(random)
    assert chains.acceptance.item() == pytest.approx(1)
    random.number = 1.0  # only lower energies are accepted
    chains.advance(random)
    assert chains.acceptance < 0.8


@pytest.mark.parametrize(
    "options",
    [{"lifetime": 60}, {"lifetime": 0, "levels": 6}, {"lifetime": 0}],
    ids=["annealed", "tempered", "persistent"],
)
def test_a_density_learns_from_chains_of_the_model_alone(
    options: dict[str, Any], density: CapsuleDensity, generator: torch.Generator
) -> None:
    """The loss is the mean of F over data minus that over P; chains at other t have no part."""
    stage = DensityStage(**{"chains": 6000, "leapfrog_steps": 3, **options})
    learner = DensityLearner(density, stage, Distributed())
    learner.chains.step_size.value.fill_(0.5)
    learner.chains.start(generator)
    random = RandomNumbers(generator, Distributed())
    for _ in range(80):
        learner.chains.advance(random)
    x = torch.randn(5, 2, 1, generator=generator)
    data = density.free_energy(x).mean().item()
    with torch.no_grad():
        found = data - learner.loss(x, random).item()
    exact = copy.deepcopy(density).double()
    at_model, at_base = (Known(exact, t).expectation[-1].item() for t in (1.0, 0.0))
    assert found == pytest.approx(at_model, abs=0.1)
    assert at_base - at_model > 0.5


def test_chains_at_the_base_measure_are_drawn_anew_in_every_step(
    density: CapsuleDensity, generator: torch.Generator
) -> None:
    """From there, new states reach the model even if the sampler itself hardly moves."""
    chains = chains_on(density, generator, chains=40, levels=2, lifetime=0)
    chains.position.zero_()
    chains.step_size.value.fill_(1e-6)
    chains.advance(RandomNumbers(generator, Distributed()))
    assert (chains.position.norm(dim=1) > 1e-3).sum() == 20
    assert bool((chains.position[chains.at_model()].norm(dim=1) > 1e-3).any())


def test_persistent_chains_are_draws_and_never_start_anew(
    density: CapsuleDensity, generator: torch.Generator
) -> None:
    chains = chains_on(density, generator, lifetime=0)
    random = RandomNumbers(generator, Distributed())
    for _ in range(40):
        capsules, weight = chains.advance(random)
    torch.testing.assert_close(weight, torch.full((600,), 1 / 600))
    Known(density.double()).assert_are_draws(capsules.double())
    assert bool(chains.at_model().all())
    assert math.isnan(chains.log_partition())


@pytest.mark.parametrize(
    "options",
    [{"chains": 2400}, {"chains": 6000, "levels": 6, "lifetime": 0}],
    ids=["annealed", "tempered"],
)
def test_the_chains_estimate_the_partition_function(
    options: dict[str, Any], density: CapsuleDensity, generator: torch.Generator
) -> None:
    """Of a density that stays as it is, and then of one that has changed."""
    chains = chains_on(density, generator, **options)
    random = RandomNumbers(generator, Distributed())
    for strength in (0.0, 0.3):
        density.log_strength.data += strength
        for _ in range(80):
            chains.advance(random)
        exact = exact_log_partition(density)
        assert chains.log_partition() == pytest.approx(exact, abs=0.1)
    share = 1 / options.get("levels", 3)
    assert chains.at_model().double().mean().item() == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [{"lifetime": 60}, {"lifetime": 0, "levels": 8}],
    ids=["annealed", "tempered"],
)
def test_the_estimate_is_right_while_a_density_learns(options: dict[str, Any]) -> None:
    """Early, when the weights grow fast from random ones, and late, beside annealed sampling."""
    generator = torch.Generator().manual_seed(0)
    density = CapsuleDensity(1, 20, 12, 4, linear_dims=2, strength=4.0, generator=generator)
    mixing = torch.randn(6, 20, generator=generator)
    x = (torch.randn(1000, 6, generator=generator).sign() @ mixing).unsqueeze(1)
    stage = DensityStage(learning_rate=5e-3, chains=256, average=0.0, **options)
    learner = DensityLearner(density, stage, Distributed())
    learner.chains.start(generator)
    random = RandomNumbers(generator, Distributed())
    optimizer = make_optimizer(stage, list(density.parameters()), learner.learning_rate_factors())
    for step in range(240):
        optimizer.zero_grad()
        learner.loss(x[torch.randint(len(x), (64,), generator=generator)], random).backward()
        optimizer.step()
        if step in (10, 24, 79, 239):
            online = learner.chains.log_partition()
            assert online >= 0
            estimate = estimate_log_partition(density, chains=32, steps=150, generator=generator)
            assert estimate.bracket < 2
            assert step == 10 or online == pytest.approx(estimate.forward, rel=0.1)


def test_a_run_of_an_earlier_version_goes_on(stopped: Path, tmp_path: Path) -> None:
    """Its checkpoint has weights and energies of the chains, which are not used any more."""
    unused = {"stage.log_weight": torch.ones(CHAINS), "stage.energy": torch.ones(CHAINS)}
    for name, extra in (("now", {}), ("earlier", unused)):
        shutil.copytree(stopped, tmp_path / name)
        tensors, about = read_tensors(stopped / CHECKPOINT)
        write_tensors(tmp_path / name / CHECKPOINT, {**tensors, **extra}, about)
        resume(tmp_path / name)
    assert_same_weights(tmp_path / "earlier", tmp_path / "now")
    assert metrics(tmp_path / "earlier") == metrics(tmp_path / "now")


def test_the_step_size_of_the_chains_is_adapted(
    density: CapsuleDensity, generator: torch.Generator
) -> None:
    for first in (0.1, 20.0):
        chains = chains_on(density, generator, target_acceptance=0.7)
        chains.step_size.value.fill_(first)
        random = RandomNumbers(generator, Distributed())
        for _ in range(150):
            chains.advance(random)
        assert chains.acceptance.item() == pytest.approx(0.7, abs=0.15)


def test_processes_share_the_chains(density: CapsuleDensity, generator: torch.Generator) -> None:
    """They begin at the same states as those of one process, which has all of them."""
    state = generator.get_state()
    one = chains_on(density, generator, chains=10)
    parts = []
    for rank in range(2):
        generator.set_state(state)
        parts.append(chains_on(density, generator, Distributed(rank, 2), chains=10))
    assert torch.equal(torch.cat([part.position for part in parts]), one.position)
    assert torch.equal(torch.cat([part.offsets for part in parts]), one.offsets)
    saved = one.state()
    for part in parts:
        part.position.zero_()
        part.load_state(saved, Path("checkpoint"))
    assert torch.equal(torch.cat([part.position for part in parts]), one.position)
    with pytest.raises(ValueError, match=r"density.chains must be a multiple of the number of"):
        chains_on(density, generator, Distributed(0, 2), chains=11)


# --------------------------------------------------------------------------------------------------
# A density by itself

QUICK = DensityStage(
    strength_rate=1.0,
    learning_rate=2e-2,
    chains=64,
    lifetime=40,
    leapfrog_steps=3,
    average=0.9,
    partition_chains=32,
    partition_steps=50,
)


def clusters(count: int, seed: int) -> Tensor:
    """Points around (1.2, −0.8) and around its negation, as two capsules: (count, 2, 1)."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.randint(2, (count, 1), generator=generator) * 2.0 - 1
    spread = 0.3 * torch.randn(count, 2, generator=generator)
    return (side * torch.tensor([1.2, -0.8]) + spread).view(count, 2, 1)


def new_density(seed: int = 0, **options: Any) -> CapsuleDensity:
    generator = torch.Generator().manual_seed(seed)
    return CapsuleDensity(2, 1, 3, 2, linear_dims=1, strength=2.0, generator=generator, **options)


def held_out(density: CapsuleDensity) -> float:
    """Mean log-probability of other points of the two clusters, with the exact log Z."""
    x = clusters(1000, seed=2)
    with torch.no_grad():
        energy, base = density.free_energy(x), density.base.log_prob(x)
    return (base - energy).mean().item() - exact_log_partition(density)


def test_fitting_raises_the_probability_of_held_out_data() -> None:
    density = new_density()
    before = held_out(density)
    fit_density(density, clusters(500, seed=1), steps=200, batch_size=64, options=QUICK)
    assert held_out(density) > before + 0.2
    assert density.log_partition == pytest.approx(exact_log_partition(density), abs=0.2)
    assert density.log_partition > 0.5
    # A point between the clusters is less probable than their centres.
    centre = torch.tensor([1.2, -0.8]).view(1, 2, 1)
    with torch.no_grad():
        there, opposite, between = density.log_prob(torch.cat((centre, -centre, 0 * centre)))
    assert min(there, opposite) > between


def test_the_base_measure_is_fitted_too() -> None:
    x = clusters(500, seed=1)
    density, base = new_density(base_components=1), new_density(base_components=1).base
    base.fit([x])
    fit_density(density, x, steps=1, options=QUICK)
    for name, value in base.state_dict().items():
        torch.testing.assert_close(density.base.state_dict()[name], value)
    assert isinstance(density.base, GaussianBase)
    assert density.base.std.item() > 1.3


def test_fitting_with_the_same_seed_is_bit_identical() -> None:
    x, reports = clusters(100, seed=1), []
    fitted = [new_density() for _ in range(3)]
    for density, seed in zip(fitted, (4, 4, 5), strict=True):
        fit_density(
            density,
            x,
            steps=8,
            batch_size=16,
            options=QUICK,
            seed=seed,
            report=lambda *values: reports.append(values),
        )
    first, second, other = (density.state_dict() for density in fitted)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["weight"], other["weight"])
    assert [values[:2] for values in reports] == [(step, 8) for step in range(1, 9)] * 3
    assert reports[:8] == reports[8:16]
    assert all(math.isfinite(loss) for *_, loss in reports)


@pytest.mark.parametrize("components", [0, 1])
def test_a_second_fit_forgets_the_partition_function_of_the_first(components: int) -> None:
    density, x = new_density(base_components=components), clusters(50, seed=1)
    quick = replace(QUICK, partition_steps=2)
    fit_density(density, x, steps=2, options=quick)
    assert density.log_prob(x).isfinite().all()
    fit_density(density, 3 * x, steps=2, options=replace(quick, partition_steps=0))
    with pytest.raises(ValueError, match="log Z is not known yet"):
        density.log_prob(x)
    fit_density(density, x, steps=2, options=quick)
    with pytest.raises(TrainingError, match="diverged"):
        fit_density(density, x, steps=20, options=replace(quick, learning_rate=1e20))
    with pytest.raises(ValueError, match="log Z is not known yet"):
        density.log_prob(x)


def test_a_fit_that_diverges_is_an_error() -> None:
    options = replace(QUICK, learning_rate=1e20)
    with pytest.raises(
        TrainingError, match=r"the density diverged at step \d+; lower the learning"
    ):
        fit_density(new_density(), clusters(50, seed=1), steps=20, options=options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be a whole number of at least 1, but is 0"),
        ({"steps": 2.5}, TypeError, "steps must be a whole number"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1"),
        ({"x": torch.zeros(5, 3, 1)}, ValueError, r"x must have shape \(B, I=2, K=1\)"),
        ({"x": torch.zeros(0, 2, 1)}, ValueError, "x must hold at least one"),
        ({"x": torch.zeros(5, 2, 1, dtype=torch.float64)}, TypeError, "x is torch.float64 but"),
        ({"x": torch.full((5, 2, 1), torch.nan)}, ValueError, "x must be finite"),
        ({"x": np.zeros((5, 2, 1))}, TypeError, "x must be a torch.Tensor"),
        ({"options": replace(QUICK, chains=4)}, ValueError, "options.chains must be .* from 5 to"),
        ({"density": new_density().requires_grad_(False)}, ValueError, r"requires_grad_\(\) first"),
    ],
)
def test_invalid_arguments_of_a_fit_are_an_error(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    usual: dict[str, Any] = {
        "density": new_density(),
        "x": clusters(5, seed=1),
        "steps": 2,
        "options": QUICK,
    }
    with pytest.raises(error, match=message):
        fit_density(**usual | changes)


@pytest.mark.parametrize("components", [0, 4])
def test_strengths_and_origins_have_a_learning_rate_of_their_own(components: int) -> None:
    """The first step of Adam is the learning rate, up to its sign."""
    density = CapsuleDensity(8, 4, 3, 4, linear_dims=2, base_components=components)
    density.reset_parameters(0.1, torch.Generator().manual_seed(0))
    options = replace(QUICK, learning_rate=1e-3, average=0.0, strength_rate=7.0)
    x = torch.randn(64, 8, 4, generator=torch.Generator().manual_seed(1))
    fit_density(density, x, steps=1, options=options)
    expected = torch.full((3,), 7e-3)
    torch.testing.assert_close(density.log_strength.detach().abs(), expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(density.origin.detach().abs(), expected, rtol=1e-3, atol=0)
