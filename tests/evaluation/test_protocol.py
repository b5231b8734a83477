"""The whole protocol, on a tiny network and on encoders with few or many abilities."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork
from poecaps.code_density import DENSITY_DOMAINS, DOMAINS
from poecaps.data import ImageSet, load
from poecaps.evaluation import (
    Evaluation,
    NetworkEncoder,
    SampleMetrics,
    comparison_table,
    evaluate,
    load_classifier,
)
from poecaps.evaluation.protocol import CHAIN_WORK
from poecaps.options import ModelOptions
from poecaps.training import Config, DecoderStage, EncoderStage, Stage
from poecaps.training import train as train_network
from tests.networks import TINY_DENSITY, shorten_chains, untrained_with_density

if TYPE_CHECKING:
    from torch import Tensor

EVERY_MEASURE = (
    "linear probe, test accuracy",
    "linear probe on firing probabilities",
    "NMI of most active expert and label",
    "effective rank",
    "reconstruction error",
    "samples from the whole code (all experts together), domain joint",
    "samples from a random expert, domain complete",
    "reconstructions of training images in place of samples",
    "Fréchet distance",
    "Fréchet distance, contrast matched",
    "Fréchet distance, random features",
    "precision",
    "recall",
    "density",
    "coverage",
    "nearer to training images than test images",
    "recognisable",
    "diversity",
    "negatives",
    "samples from each expert in turn, domain learned",
    "purity",
    "variety",
)


def part(split: Any, count: int) -> ImageSet:
    whole = load("mnist-sample", split=split)
    assert whole.labels is not None
    return ImageSet(whole.images[:count], whole.labels[:count], source=f"{count} digits")


@pytest.fixture(scope="module")
def digits() -> tuple[ImageSet, ImageSet]:
    return part("train", 400), part("test", 200)


@pytest.fixture(scope="module")
def network(
    digits: tuple[ImageSet, ImageSet], tmp_path_factory: pytest.TempPathFactory
) -> CapsuleNetwork:
    folder = tmp_path_factory.mktemp("evaluation")
    np.save(folder / "x.npy", digits[0].images)
    config = Config(
        data=str(folder / "x.npy"),
        model=ModelOptions(
            features=16, experts=((5, 6),), normalize="outputs", sharpness=20.0, joint_components=6
        ),
        autoencoder=Stage(epochs=3, learning_rate=5e-3),
        encoder=EncoderStage(epochs=3, learning_rate=0.05),
        decoder=DecoderStage(epochs=3, learning_rate=0.03),
        batch_size=50,
        device="cpu",
        precision="float32",
    )
    return train_network(config, folder / "run")


@pytest.fixture(scope="module")
def evaluation(network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]) -> Evaluation:
    return evaluate(network, *digits, load_classifier("mnist"), samples=300)


def test_every_measure_of_a_network_is_computed(evaluation: Evaluation) -> None:
    assert evaluation.code_size == 30
    assert evaluation.probe is not None
    assert evaluation.firing_probe is not None
    assert evaluation.specialisation is not None
    assert evaluation.reconstruction is not None
    assert evaluation.experts is not None
    assert evaluation.probe.test_accuracy > 0.4  # ten digits; chance is 0.1
    assert evaluation.probe.test_accuracy > evaluation.firing_probe.test_accuracy
    assert 1 <= evaluation.effective_rank <= 30
    assert set(evaluation.domains) == {"complete", "restricted", "learned", "joint"}
    assert evaluation.experts.samples_per_expert == 60
    assert len(evaluation.experts.purity.per_expert) == 5
    (note,) = evaluation.notes
    assert note.startswith("Fréchet distances of 300 samples, fewer than 2,000, are too large")


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("classified", [True, False])
def test_the_work_is_reported_up_to_its_end(
    labelled: bool, classified: bool, network: CapsuleNetwork
) -> None:
    train, test = (
        each if labelled else replace(each, labels=None)
        for each in (part("train", 60), part("test", 40))
    )
    seen: list[tuple[int, int]] = []
    evaluate(
        network,
        train,
        test,
        load_classifier("mnist") if classified else None,
        samples=33,
        report=lambda *report: seen.append(report),
    )
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def test_the_reconstruction_error_is_that_of_the_network(
    evaluation: Evaluation, network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    images = digits[1].batch(slice(None))
    with torch.no_grad():
        error = (network.reconstruct(images) - images).square().mean().item()
    assert evaluation.reconstruction is not None
    assert evaluation.reconstruction.error == pytest.approx(error, rel=1e-4)


def test_training_images_score_better_than_samples(evaluation: Evaluation) -> None:
    def distance(of: SampleMetrics) -> float:
        assert of.frechet is not None
        return of.frechet.distance

    reference = evaluation.training_samples
    assert reference.recognisability is not None
    assert reference.diversity is not None
    assert reference.recognisability.share > 0.97
    assert reference.diversity.effective_classes > 9.5
    assert reference.negatives.share == 0
    assert all(distance(reference) < distance(of) for of in evaluation.domains.values())


def test_the_table_and_the_json_contain_everything(evaluation: Evaluation) -> None:
    table = evaluation.table()
    assert all(measure in table for measure in EVERY_MEASURE)
    assert len({len(line) for line in table.splitlines() if line.startswith("  ")}) == 1  # aligned
    read = json.loads(evaluation.to_json())
    assert read["probe"]["test_accuracy"] == evaluation.probe.test_accuracy  # type: ignore[union-attr]
    assert read["domains"]["joint"]["frechet"]["distance"] > 0
    assert read["classifier"]["data"] == "mnist"
    assert json.loads(evaluation.with_metadata(epochs=3).to_json())["metadata"] == {"epochs": 3}


def test_the_seed_changes_the_samples_only(
    evaluation: Evaluation, network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    torch.manual_seed(5)
    again = evaluate(network, *digits, load_classifier("mnist"), samples=300)
    assert again == evaluation
    other = evaluate(network, *digits, load_classifier("mnist"), samples=300, seed=1)
    assert other.domains != evaluation.domains
    assert other.probe == evaluation.probe


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_measures_the_same(
    evaluation: Evaluation, network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    try:
        there = evaluate(network, *digits, load_classifier("mnist"), samples=300, device="cuda")
    finally:
        network.cpu()  # the other tests share it
    assert there.probe is not None
    assert evaluation.probe is not None
    assert there.probe.test_accuracy == pytest.approx(evaluation.probe.test_accuracy, abs=0.02)
    assert there.effective_rank == pytest.approx(evaluation.effective_rank, rel=0.01)
    for domain, of in there.domains.items():  # a GPU draws different random numbers
        frechet = evaluation.domains[domain].frechet
        assert of.frechet is not None
        assert frechet is not None
        assert of.frechet.distance == pytest.approx(frechet.distance, rel=0.2)


def test_without_a_classifier_or_labels_the_other_measures_are_computed(
    network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    train, test = (ImageSet(each.images) for each in digits)
    result = evaluate(network, train, test, samples=20)
    assert (result.probe, result.specialisation, result.experts) == (None, None, None)
    assert result.domains["joint"].frechet is None
    assert result.domains["joint"].negatives.share is not None
    assert result.reconstruction is not None
    assert "\nnote: no classifier" in result.table()
    assert "\nnote: no labels" in result.table()
    other = dataclasses.replace(result, name="other")
    assert "\nnote: other: no labels" in comparison_table([result, other])
    json.loads(result.to_json())


def test_a_network_with_a_density_is_measured_on_draws_of_it(
    digits: tuple[ImageSet, ImageSet],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten_chains(monkeypatch)
    sizes = replace(TINY_DENSITY, image_shape=(1, 28, 28))
    images = digits[0].batch(range(60))
    dense = untrained_with_density(sizes, images, generator)
    seen: list[tuple[int, int]] = []
    result = evaluate(
        dense,
        *digits,
        load_classifier("mnist"),
        samples=6,
        report=lambda *report: seen.append(report),
    )
    assert seen[-1][0] == seen[-1][1]
    done = [each for each, _ in seen]
    assert done == sorted(done)
    within = CHAIN_WORK * 6  # the work of one domain, of whose chains several steps are reported
    assert max(b - a for a, b in itertools.pairwise(done)) < within
    assert tuple(result.domains) == (*DOMAINS, *DENSITY_DOMAINS)
    model, tied = result.domains["model"], result.domains["model-tied"]
    assert model.frechet is not None
    assert tied.frechet is not None
    assert min(model.frechet.distance, tied.frechet.distance) > 0
    table = result.table()
    assert "samples from the energy, domain model\n" in table
    assert "samples from the energy, tied filters, domain model-tied\n" in table
    assert "samples from the energy with one expert on, domain model-experts\n" in table
    assert "samples from each expert of the energy in turn, domain model-experts\n" in table


def test_experts_of_a_density_are_measured_by_the_same_draws_as_their_domain(
    digits: tuple[ImageSet, ImageSet],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts 0 and 2 draw one digit each, and expert 1 two digits."""
    sizes = replace(TINY_DENSITY, image_shape=(1, 28, 28))
    dense = untrained_with_density(sizes, digits[0].batch(range(60)), generator)
    images, classifier = digits[1].batch(slice(None)), load_classifier("mnist")
    seen_as = classifier.predict(images).labels
    three, one, seven, zero = ((seen_as == label).nonzero()[:10, 0] for label in (3, 1, 7, 0))
    own, calls = ((three, three), (one, seven), (zero, zero)), []

    def drawn(_: CapsuleNetwork, count: int, *, expert: Tensor, **__: object) -> Tensor:
        calls.append(expert)
        assert count == len(expert) > 1
        index = [own[int(j)][k % 2][k % 10] for k, j in enumerate(expert)]
        return images[torch.stack(index)]

    monkeypatch.setattr(CapsuleNetwork, "generate_from_density", drawn)
    encoder = NetworkEncoder(dense)
    encoder.domains = ()
    result = evaluate(encoder, *digits, classifier, samples=30)
    (experts,) = calls  # all chains run together
    assert experts.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    found = result.density_experts
    assert found is not None
    assert found.samples_per_expert == 10
    assert found.purity.per_expert == (1.0, 0.5, 1.0)
    assert found.purity.labels[::2] == (3, 0)
    assert found.recognisability == result.domains["model-experts"].recognisability
    assert found.diversity == result.domains["model-experts"].diversity


def test_draws_of_the_density_are_those_of_the_network(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_chains(monkeypatch)
    dense = untrained_with_density(
        TINY_DENSITY, torch.rand(60, 1, 20, 19, generator=generator), generator
    )
    encoder, draws = NetworkEncoder(dense), []
    state = generator.get_state()
    for domain, is_tied in (("model", False), ("model-tied", True)):
        found = encoder.sample(3, domain, generator.set_state(state))
        expected = dense.generate_from_density(
            3, tied=is_tied, generator=generator.set_state(state)
        )
        assert torch.equal(found, expected)
        draws.append(found)
    assert (draws[0] - draws[1]).abs().max() > 0.01


def test_a_network_without_a_density_has_no_such_domains(network: CapsuleNetwork) -> None:
    assert tuple(NetworkEncoder(network).domains) == DOMAINS


class Pixels:
    """The smallest encoder that can be evaluated."""

    name = "pixels"

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)


class Memory(Pixels):
    """A perfect model: it draws test images, keeps all pixels, and has one expert per label."""

    name = "memory"
    domains = ("joint",)
    experts = 10

    def __init__(self, data: ImageSet) -> None:
        assert data.labels is not None
        self.images, self.labels = data.batch(slice(None)), torch.from_numpy(data.labels)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(images.flatten(1), self.images.flatten(1)).argmin(1)
        return torch.eye(10)[self.labels[nearest]]

    def firing(self, codes: torch.Tensor) -> torch.Tensor:
        return codes

    def reconstruct(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def sample(self, count: int, domain: str, generator: torch.Generator) -> torch.Tensor:
        assert domain == "joint"
        return self.images[torch.randint(len(self.images), (count,), generator=generator)]

    def sample_expert(self, count: int, expert: int, generator: torch.Generator) -> torch.Tensor:
        own = self.images[self.labels == expert]
        return own[torch.randint(len(own), (count,), generator=generator)]


def test_a_perfect_model_gets_perfect_scores(digits: tuple[ImageSet, ImageSet]) -> None:
    result = evaluate(
        Memory(digits[1]), digits[1], digits[1], load_classifier("mnist"), samples=1000
    )
    assert result.probe is not None
    assert result.specialisation is not None
    assert result.reconstruction is not None
    assert result.experts is not None
    assert result.experts.variety is not None
    assert result.probe.test_accuracy == 1
    assert result.specialisation.normalised == pytest.approx(1)
    assert result.specialisation.accuracy == 1
    assert result.firing_clusters is not None
    assert result.firing_clusters.accuracy > 0.7  # centres may start at equal points
    (line,) = (each for each in result.table().splitlines() if "probabilities, adjusted" in each)
    assert line.split()[-1] == f"{result.firing_clusters.adjusted_rand:.3f}"
    assert result.reconstruction.error == 0
    assert result.domains["joint"].negatives.share == 0
    assert result.experts.purity.mean > 0.97
    assert result.experts.recognisability.share > 0.97
    assert result.experts.variety.mean == pytest.approx(
        1, abs=0.1
    )  # repeated draws make it a little less


def test_missing_measures_of_an_encoder_are_dashes(
    evaluation: Evaluation, digits: tuple[ImageSet, ImageSet]
) -> None:
    pixels = evaluate(Pixels(), *digits, load_classifier("mnist"), samples=50)
    assert (pixels.domains, pixels.experts, pixels.reconstruction, pixels.specialisation) == (
        {},
        None,
        None,
        None,
    )
    table = comparison_table([pixels, evaluation])
    header, *lines = (line for line in table.splitlines() if line.startswith("  "))
    assert header.split() == ["pixels", "poecaps"]
    purity = next(line for line in lines if line.split()[0] == "purity")
    assert purity.split()[1] == "–"


class Diverged(Memory):
    """Draws invalid images."""

    def __init__(self, data: ImageSet, pixel: float) -> None:
        super().__init__(data)
        self.pixel = pixel

    def sample(self, count: int, domain: str, generator: torch.Generator) -> torch.Tensor:
        images = super().sample(count, domain, generator)
        images[0, 0, 3, 3] = self.pixel
        return images


@pytest.mark.parametrize("pixel", [float("nan"), -0.5, 1.5])
def test_invalid_samples_are_rejected(digits: tuple[ImageSet, ImageSet], pixel: float) -> None:
    with pytest.raises(
        ValueError, match=r"samples of memory must be images of shape \(1, 28, 28\) from 0 to 1"
    ):
        evaluate(Diverged(digits[1], pixel), *digits, samples=20)


class Broken(Pixels):
    """Codes that are not finite."""

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) / 0


def test_codes_that_are_not_finite_are_rejected(digits: tuple[ImageSet, ImageSet]) -> None:
    train, test = (ImageSet(each.images) for each in digits)
    with pytest.raises(ValueError, match="codes of pixels must be finite"):
        evaluate(Broken(), train, test, samples=20)


def test_labels_outside_the_classes_of_the_classifier_are_rejected(
    digits: tuple[ImageSet, ImageSet],
) -> None:
    assert digits[1].labels is not None
    other = ImageSet(digits[1].images, digits[1].labels + 1)
    with pytest.raises(ValueError, match="from 0 to 9, but range from 1 to 10"):
        evaluate(Pixels(), digits[0], other, load_classifier("mnist"), samples=20)


@pytest.mark.parametrize("few", ["data_train", "data_test"])
def test_a_single_image_has_no_covariance(few: str, digits: tuple[ImageSet, ImageSet]) -> None:
    single = ImageSet(digits[0].images[:1], digits[0].labels[:1])  # type: ignore[index]
    train, test = (single, digits[1]) if few == "data_train" else (digits[0], single)
    with pytest.raises(ValueError, match=f"{few} must have at least 2 images, but has 1"):
        evaluate(Pixels(), train, test, samples=20)


def test_a_note_reports_a_probe_that_did_not_converge(
    digits: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = evaluate(Pixels(), *digits, samples=20).notes
    assert first.startswith("no classifier for these data: Fréchet distances are those of random")
    assert second.startswith("Fréchet distances of 20 samples, fewer than 2,000, are too large")
    monkeypatch.setattr("poecaps.evaluation.probe.MAX_STEPS", 2)
    cut_short = evaluate(Pixels(), *digits, samples=20)
    assert cut_short.probe is not None
    assert not cut_short.probe.converged
    assert "the linear probe on codes did not converge in 2 steps" in cut_short.table()


def test_a_note_reports_fewer_training_images_than_samples(
    digits: tuple[ImageSet, ImageSet],
) -> None:
    assert any(
        "only 400 training images in place of 401 samples" in note
        for note in evaluate(Pixels(), *digits, samples=401).notes
    )


def test_small_batches_on_a_cpu_give_the_same_numbers(
    network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    encoder, images = NetworkEncoder(network), digits[1].batch(range(120))
    with torch.no_grad():
        torch.testing.assert_close(encoder.encode(images), network.encode(images).flatten(1))
        torch.testing.assert_close(encoder.reconstruct(images), network.reconstruct(images))
        drawn, expected = (
            draw(120, "joint", generator=torch.Generator().manual_seed(3))
            for draw in (encoder.sample, network.generate)
        )
    torch.testing.assert_close(drawn, expected)


def test_invalid_arguments_are_rejected(
    network: CapsuleNetwork, digits: tuple[ImageSet, ImageSet]
) -> None:
    small = ImageSet(digits[0].images[:, :20])
    with pytest.raises(
        ValueError, match=r"data_test must have images of the shape \(1, 28, 28\), like data_train"
    ):
        evaluate(network, digits[0], small)
    with pytest.raises(ValueError, match="must have images of the shape of the network"):
        evaluate(network, small, small)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 2"):
        evaluate(network, *digits, samples=1)
    with pytest.raises(ValueError, match="at least one"):
        comparison_table([])


def test_results_cannot_be_changed(evaluation: Evaluation) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        evaluation.seed = 3  # type: ignore[misc]
