"""The evaluation protocol: every measure of a model, computed in one fixed way, and its table."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps._devices import statistics_device
from poecaps._modules import BATCH_SIZE, device_of, in_batches
from poecaps.code_density import DENSITY_DOMAINS, DOMAIN_INFO, DOMAINS, Domain, kmeans
from poecaps.evaluation import fidelity, measures
from poecaps.evaluation.probe import LinearProbe, linear_probe
from poecaps.metrics import effective_rank
from poecaps.network import CapsuleNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from poecaps._progress import Report
    from poecaps.data import ImageSet
    from poecaps.evaluation.classifier import Classifier, Predictions

MISSING = "–"  # cell of a table without a result
FEWEST_IMAGES = 2  # of one image there is no covariance
# Fréchet distances of fewer samples are noticeably biased upwards; a note says so.
FEWEST_UNBIASED_SAMPLES = 2000
# Balls around fewer test images, as far as the fifth nearest of them, cover most of all images.
FEWEST_TEST_IMAGES = 100
# Images per forward pass of a network on a CPU: activations of larger batches exceed its caches.
CPU_BATCH_SIZE = 50
# Work of a draw by Markov chains, in passes of an image through a network; for the time left only.
CHAIN_WORK = 100
KMEANS_STARTS = 10  # random initial centres, of which the best result counts


class Encoder(Protocol):
    """A model that can be evaluated: a name and codes of images.

    A model that also satisfies one of the protocols `SupportsFiring`, `SupportsReconstruction`,
    `SupportsSampling`, `SupportsExpertSampling` or `SupportsDensityExperts` is evaluated on that,
    too.
    """

    @property
    def name(self) -> str:
        """Name of the model in tables."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Encode images: (B, C, H, W) → (B, S)."""
        ...


@runtime_checkable
class SupportsFiring(Protocol):
    """An encoder whose codes contain a firing probability for each expert."""

    def firing(self, codes: Tensor) -> Tensor:
        """Return the firing probabilities in codes: (B, S) → (B, J)."""
        ...


@runtime_checkable
class SupportsReconstruction(Protocol):
    """An encoder that can reconstruct images."""

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        ...


@runtime_checkable
class SupportsSampling(Protocol):
    """An encoder that can draw images, from one or several domains."""

    @property
    def domains(self) -> Sequence[str]:
        """Names of the domains; the domain of whole codes is ``"joint"`` for every model."""
        ...

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images: (count, C, H, W), in [0, 1]."""
        ...


@runtime_checkable
class SupportsExpertSampling(Protocol):
    """An encoder that can draw images from a single expert."""

    @property
    def experts(self) -> int:
        """J, the number of experts."""
        ...

    def sample_expert(self, count: int, expert: int, generator: torch.Generator) -> Tensor:
        """Draw images from expert j: (count, C, H, W), in [0, 1]."""
        ...


@runtime_checkable
class SupportsDensityExperts(Protocol):
    """An encoder with a density, from whose experts it can draw images."""

    @property
    def density_experts(self) -> int:
        """Number of experts of the density; 0 if there is no density."""
        ...

    def sample_density_experts(self, experts: Tensor, generator: torch.Generator) -> Tensor:
        """Draw an image from each of these experts alone: (B,) → (B, C, H, W), in [0, 1]."""
        ...


class NetworkEncoder:
    """A `CapsuleNetwork` as an `Encoder`; the network is set to evaluation mode.

    If it has a density, the domain ``"model"`` is that of draws from the density by chains from
    noise; ``"model-tied"`` is the same, decoded by the filters of the autoencoder instead of the
    pixel decoder; ``"model-experts"`` is that of draws from the density with one expert on.
    """

    def __init__(self, network: CapsuleNetwork, name: str = "poecaps") -> None:
        self.network, self.name = network.eval(), name
        self.report: Report | None = None  # of the steps of Markov chains
        self.domains: Sequence[str] = DOMAINS
        self.density_experts = 0
        if network.density is not None:
            self.density_experts = network.density.out_capsules
            together = (each for each in DENSITY_DOMAINS if DOMAIN_INFO[each].whole_code)
            self.domains = (*DOMAINS, *together)
        self.experts, self.dim = network.architecture.experts[-1]

    def encode(self, images: Tensor) -> Tensor:
        """Compute the squashed experts of the highest layer: (B, C, H, W) → (B, J·D)."""
        return _in_small_batches(lambda batch: self.network.encode(batch).flatten(1), images)

    def firing(self, codes: Tensor) -> Tensor:
        """Compute P(a_j = 1 | x) = ‖squash(z_j)‖: (B, J·D) → (B, J)."""
        firing: Tensor = codes.view(-1, self.experts, self.dim).norm(dim=-1)
        return firing

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        return _in_small_batches(self.network.reconstruct, images)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images from a domain; see `CapsuleNetwork.generate`."""
        if domain in DENSITY_DOMAINS:
            return self.network.generate_from_density(
                count, tied=domain == "model-tied", generator=generator, report=self.report
            )
        checked: Domain = domain  # type: ignore[assignment]  # the network checks the name
        return self._decode(self.network.sample(count, checked, generator=generator))

    def sample_expert(self, count: int, expert: int, generator: torch.Generator) -> Tensor:
        """Draw images from the domain ``"learned"`` of one expert."""
        return self._decode(
            self.network.sample(count, "learned", expert=expert, generator=generator)
        )

    def sample_density_experts(self, experts: Tensor, generator: torch.Generator) -> Tensor:
        """Draw images from P(x | only this expert is on) of each of these experts."""
        return self.network.generate_from_density(
            len(experts), expert=experts, generator=generator, report=self.report
        )

    def _decode(self, codes: Tensor) -> Tensor:
        return _in_small_batches(self.network.decode, codes)


def _in_small_batches(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply a function to a batch: in parts on a CPU, at once on a GPU."""
    size = CPU_BATCH_SIZE if inputs.device.type == "cpu" else len(inputs)
    return in_batches(function, inputs, size)


@dataclass(frozen=True)
class SampleMetrics:
    """Metrics of samples from one domain; those that need a classifier are None without one."""

    frechet: measures.FrechetDistance | None
    """Between the samples and the test images, in the features of the classifier."""
    recognisability: measures.Recognisability | None
    diversity: measures.Diversity | None
    negatives: measures.Negatives
    matched_frechet: measures.FrechetDistance | None
    """The same as `frechet`, after the contrast of the samples is matched to training images."""
    random_frechet: measures.FrechetDistance
    """In random features, with matched contrast; the variance of the test images' features is 1."""
    neighbourhoods: fidelity.Neighbourhoods | None
    """In the same features; None with too few samples or test images."""
    nearest: fidelity.NearestImages
    """Distances to the nearest training images."""
    errors: dict[str, float]
    """Standard errors over samples, by the path of the number, such as ``"frechet.distance"``."""


@dataclass(frozen=True)
class ExpertMetrics:
    """Metrics of samples drawn from one expert at a time, the same number from each."""

    samples_per_expert: int
    recognisability: measures.Recognisability
    diversity: measures.Diversity
    purity: measures.Purity
    variety: measures.Variety | None
    variation: measures.Variation | None


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`. Measures that could not be computed are None; `notes` say why."""

    name: str
    data: str
    training_images: int
    test_images: int
    samples: int
    """Number of samples from each domain."""
    seed: int
    code_size: int
    """S, the length of a code."""
    probe: LinearProbe | None
    """Linear probe on codes."""
    firing_probe: LinearProbe | None
    """Linear probe on firing probabilities only."""
    specialisation: measures.Clustering | None
    """Of the most active expert, on test images."""
    firing_clusters: measures.Clustering | None
    """Of k-means on firing probabilities, with as many clusters as labels, on test images."""
    effective_rank: float
    """Participation ratio (Σλ)²/Σλ² of the covariance of the test images' codes."""
    reconstruction: measures.Reconstruction | None
    """On test images."""
    domains: dict[str, SampleMetrics]
    """Samples from each domain."""
    experts: ExpertMetrics | None
    """Samples from one expert at a time."""
    density_experts: ExpertMetrics | None
    """Samples from the density with one of its experts on at a time."""
    training_samples: SampleMetrics
    """Training images measured as if they were samples: the result of a perfect model."""
    reconstructed_samples: SampleMetrics | None
    """The same training images, reconstructed: the best that the decoder can draw."""
    notes: tuple[str, ...]
    classifier: dict[str, Any] | None = None
    """Metadata of the classifier: training options and test accuracy."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything else that the caller wants to keep, such as the training time."""

    def to_json(self) -> str:
        """Return everything as JSON; NaN and infinity become null."""
        return json.dumps(nan_to_none(asdict(self)), indent=2, ensure_ascii=False)

    def table(self) -> str:
        """Format the results as aligned plain text."""
        return comparison_table([self])

    def with_metadata(self, **metadata: Any) -> Evaluation:
        """Return a copy with additional metadata."""
        return replace(self, metadata=self.metadata | metadata)


@torch.no_grad()
def evaluate(
    network: CapsuleNetwork | Encoder,
    data_train: ImageSet,
    data_test: ImageSet,
    classifier: Classifier | None = None,
    *,
    seed: int = 0,
    samples: int = 10_000,
    device: torch.device | str | None = None,
    report: Report | None = None,
) -> Evaluation:
    """Evaluate a trained model.

    Only the linear probes are fitted, and nothing is selected on the test images. The same seed
    gives the same numbers on the same device.

    Parameters
    ----------
    network
        A network, or any `Encoder`. The optional protocols it satisfies (`SupportsFiring`,
        `SupportsReconstruction`, `SupportsSampling`, `SupportsExpertSampling`,
        `SupportsDensityExperts`) determine which measures are computed.
    data_train, data_test
        Images to fit the probes on, and images to measure on. Without labels, the probes and the
        specialisation are omitted.
    classifier
        Classifier of samples, from `load_classifier` or `train_classifier`; its classes must be the
        labels. Without one, samples are measured in `RandomFeatures` only.
    seed
        Seed of the samples.
    samples
        Number of samples from each domain, and in total from single experts.
    device
        Device of the computation. A network and the classifier are moved there; any other encoder
        must accept images there. None: the device of the network, or the CPU for other encoders. In
        place of an Apple GPU, which lacks float64, the CPU computes.
    report
        Called with the work that is done and all work, in passes of an image through the model.

    Raises
    ------
    ValueError
        If there are fewer than two training or test images; if the images do not fit the network,
        or training and test images differ in shape; if a label is not a class of the classifier; if
        codes are not finite, or samples are not images in [0, 1].
    """
    checks.require_int("seed", seed, 0)
    checks.require_int("samples", samples, 2)
    for name, images in (("data_train", data_train), ("data_test", data_test)):
        if len(images) < FEWEST_IMAGES:
            raise ValueError(
                f"{name} must have at least {FEWEST_IMAGES} images, but has {len(images)}"
            )
    if data_train.shape != data_test.shape:
        raise ValueError(
            f"data_test must have images of the shape {data_train.shape}, like data_train, "
            f"but has {data_test.shape}"
        )
    if isinstance(network, CapsuleNetwork):
        if network.architecture.image_shape != data_test.shape:
            raise ValueError(
                "data_test must have images of the shape of the network, "
                f"{network.architecture.image_shape}, but has {data_test.shape}; "
                "evaluate on the dataset that the network was trained on"
            )
        device = statistics_device(torch.device(device_of(network) if device is None else device))
        network = NetworkEncoder(network.to(device))
    if classifier is not None and data_test.labels is not None:
        lowest, highest = int(data_test.labels.min()), int(data_test.labels.max())
        if lowest < 0 or highest >= classifier.head.out_features:
            raise ValueError(
                "labels must be classes of the classifier, from 0 to "
                f"{classifier.head.out_features - 1}, but range from {lowest} to {highest}; "
                "evaluate with the classifier of this dataset, or without one"
            )
    return _Evaluator(
        network,
        data_train,
        data_test,
        classifier,
        seed,
        samples,
        torch.device(device or "cpu"),
        report,
    ).run()


@dataclass(frozen=True)
class _LabelMeasures:
    """The measures of an `Evaluation` that need labels."""

    probe: LinearProbe | None = None
    firing_probe: LinearProbe | None = None
    specialisation: measures.Clustering | None = None
    firing_clusters: measures.Clustering | None = None


class _Evaluator:
    """The state of one evaluation."""

    def __init__(
        self,
        encoder: Encoder,
        data_train: ImageSet,
        data_test: ImageSet,
        classifier: Classifier | None,
        seed: int,
        samples: int,
        device: torch.device,
        report: Report | None,
    ) -> None:
        self.encoder, self.data_train, self.data_test = encoder, data_train, data_test
        self.seed, self.samples, self.device = seed, samples, device
        self.classifier = None if classifier is None else classifier.to(device).eval()
        self.report, self.work = report, 0
        self.test = data_test.batch(slice(None)).to(device)
        self.test_features = None if self.classifier is None else self._predict(self.test).features
        self.background = measures.background(self._training_batches())
        self.levels = fidelity.pixel_levels(self._training_batches())
        self.random_features = fidelity.RandomFeatures(data_test.shape[0]).to(device)
        extracted = self._counted(self.random_features.extract(self.test))
        spread = extracted.double().var(0).sum().sqrt().float()
        self.feature_scale = 1 / spread if spread > 0 else torch.ones_like(spread)
        self.test_random_features = extracted * self.feature_scale
        self.test_distances = self._distances_to_nearest(self.test)
        self.notes: list[str] = []

    def run(self) -> Evaluation:
        """Compute every measure that the encoder and the data allow."""
        encoder = self.encoder
        if self.classifier is None:
            self.notes.append(
                "no classifier for these data: Fréchet distances are those of random features; "
                "compare them only with distances on the same data"
            )
        if self.samples < FEWEST_UNBIASED_SAMPLES:
            self.notes.append(
                f"Fréchet distances of {self.samples:,} samples, fewer than "
                f"{FEWEST_UNBIASED_SAMPLES:,}, are too large; "
                "compare them only with distances of the same number of samples"
            )
        if len(self.test) < FEWEST_TEST_IMAGES:
            self.notes.append(
                f"only {len(self.test):,} test images: precision, recall, density and coverage are "
                "of little use, and the other measures are rough"
            )
        if len(self.data_train) < self.samples:
            self.notes.append(
                f"only {len(self.data_train):,} training images in place of {self.samples:,} "
                "samples: their Fréchet distance is slightly too large"
            )
        codes = in_batches(self._encode, self.test)
        if not bool(codes.isfinite().all()):
            raise ValueError(
                f"codes of {encoder.name} must be finite, but contain NaN or infinity; "
                "the model may have diverged"
            )
        with_labels = self._label_measures(codes)
        reconstruction = None
        if isinstance(encoder, SupportsReconstruction):
            batches = self.test.split(BATCH_SIZE)
            pairs = ((batch, self._counted(encoder.reconstruct(batch))) for batch in batches)
            reconstruction = measures.reconstruction(pairs, self.background.mean)
        domains = {}
        if isinstance(encoder, SupportsSampling):
            domains = {
                domain: self._sample_metrics(self._sample(encoder, domain))
                for domain in encoder.domains
            }
        density_experts = None
        if isinstance(encoder, SupportsDensityExperts) and encoder.density_experts:
            draws = self._sample_density_experts(encoder)
            domains["model-experts"] = self._sample_metrics(torch.cat(draws))
            density_experts = self._metrics_of_experts(draws)
        known = self._random_training_images()
        reconstructed = None
        if isinstance(encoder, SupportsReconstruction):
            images = torch.cat(
                [self._counted(encoder.reconstruct(batch)) for batch in known.split(BATCH_SIZE)]
            )
            reconstructed = self._sample_metrics(images)
        return Evaluation(
            name=encoder.name,
            data=self.data_test.source,
            training_images=len(self.data_train),
            test_images=len(self.data_test),
            samples=self.samples,
            seed=self.seed,
            code_size=codes.shape[1],
            probe=with_labels.probe,
            firing_probe=with_labels.firing_probe,
            specialisation=with_labels.specialisation,
            firing_clusters=with_labels.firing_clusters,
            effective_rank=effective_rank(codes),
            reconstruction=reconstruction,
            domains=domains,
            experts=self._expert_metrics(),
            density_experts=density_experts,
            training_samples=self._sample_metrics(known),
            reconstructed_samples=reconstructed,
            notes=tuple(self.notes),
            classifier=None if self.classifier is None else dict(self.classifier.metadata),
        )

    def _label_measures(self, codes: Tensor) -> _LabelMeasures:
        """Compute the probes on codes and firing probabilities, and compare experts with labels."""
        if self.data_train.labels is None or self.data_test.labels is None:
            self.notes.append("no labels: the probes and the specialisation are omitted")
            return _LabelMeasures()
        train_labels, test_labels = (
            torch.from_numpy(labels) for labels in (self.data_train.labels, self.data_test.labels)
        )
        train_codes = in_batches(self._encode, self._training_batches())
        probe = self._probe("codes", train_codes, train_labels, codes, test_labels)
        if not isinstance(self.encoder, SupportsFiring):
            return _LabelMeasures(probe)
        firing = self.encoder.firing(codes)
        firing_probe = self._probe(
            "firing", self.encoder.firing(train_codes), train_labels, firing, test_labels
        )
        clusters = _best_kmeans(firing, len(test_labels.unique()), self._generator("clusters"))
        return _LabelMeasures(
            probe,
            firing_probe,
            measures.specialisation(firing, test_labels),
            measures.clustering(clusters, test_labels),
        )

    def _probe(self, inputs: str, *codes_and_labels: Tensor) -> LinearProbe:
        probe = linear_probe(*codes_and_labels)
        if not probe.converged:
            self.notes.append(
                f"the linear probe on {inputs} did not converge in {probe.steps} steps"
            )
        return probe

    def _sample_metrics(self, images: Tensor) -> SampleMetrics:
        matched = fidelity.match_contrast(images, self.levels)
        features = self._counted(self.random_features.extract(matched)) * self.feature_scale
        reference = self.test_random_features
        neighbourhoods = None
        if min(len(features), len(reference)) > fidelity.NEIGHBOURS:
            neighbourhoods = fidelity.neighbourhoods(features, reference)
        nearest = fidelity.nearest_images(self._distances_to_nearest(images), self.test_distances)
        errors = {
            "random_frechet.distance": fidelity.frechet_error(features, reference),
            "nearest.nearer": nearest.nearer_error,
        }
        if neighbourhoods is not None:
            errors |= {
                f"neighbourhoods.{name}": getattr(neighbourhoods, f"{name}_error")
                for name in ("precision", "recall", "density", "coverage")
            }
        frechet = matched_frechet = recognisability = diversity = None
        if self.classifier is not None and self.test_features is not None:
            predictions, matched_features = self._predict(images), self._predict(matched).features
            frechet = measures.frechet_distance(predictions.features, self.test_features)
            matched_frechet = measures.frechet_distance(matched_features, self.test_features)
            recognisability = measures.recognisability(predictions.probabilities)
            diversity = measures.diversity(predictions.labels)
            share = recognisability.share
            errors |= {
                "frechet.distance": fidelity.frechet_error(
                    predictions.features, self.test_features
                ),
                "matched_frechet.distance": fidelity.frechet_error(
                    matched_features, self.test_features
                ),
                "recognisability.share": math.sqrt(share * (1 - share) / len(images)),
            }
        return SampleMetrics(
            frechet=frechet,
            recognisability=recognisability,
            diversity=diversity,
            negatives=measures.negatives(images, self.background),
            matched_frechet=matched_frechet,
            random_frechet=measures.frechet_distance(features, reference),
            neighbourhoods=neighbourhoods,
            nearest=nearest,
            errors=errors,
        )

    def _distances_to_nearest(self, images: Tensor) -> Tensor:
        first = images[: fidelity.MAX_NEAREST]
        return fidelity.distances_to_nearest(first, self._training_batches())

    def _expert_metrics(self) -> ExpertMetrics | None:
        encoder = self.encoder
        if self.classifier is None or not isinstance(encoder, SupportsExpertSampling):
            return None
        count = self._samples_per_expert(encoder.experts)
        generator = self._generator("one expert")
        draws = [
            self._checked(
                torch.cat(
                    [
                        self._counted(encoder.sample_expert(size, expert, generator))
                        for size in _batch_sizes(count)
                    ]
                )
            )
            for expert in range(encoder.experts)
        ]
        return self._metrics_of_experts(draws)

    def _sample_density_experts(self, encoder: SupportsDensityExperts) -> tuple[Tensor, ...]:
        """Draw (n, C, H, W) from each expert of the density; experts share the chain calls."""
        count = self._samples_per_expert(encoder.density_experts)
        experts = torch.arange(encoder.density_experts, device=self.device)
        generator = self._generator("model-experts")

        def draw(part: Tensor) -> Tensor:
            self._watch_chains(len(part))
            return self._counted(encoder.sample_density_experts(part, generator), CHAIN_WORK)

        draws = in_batches(draw, experts.repeat_interleave(count))
        return torch.split(self._checked(draws), count)

    def _samples_per_expert(self, experts: int) -> int:
        return max(2, self.samples // experts)

    def _metrics_of_experts(self, draws: Sequence[Tensor]) -> ExpertMetrics | None:
        """Measure draws (n, C, H, W) of each expert."""
        if self.classifier is None:
            return None
        count = len(draws[0])
        predictions = self._predict(torch.cat(tuple(draws)))
        predicted = predictions.labels.view(len(draws), count)
        variety = variation = None
        if self.data_test.labels is not None:
            labels = torch.from_numpy(self.data_test.labels)
            variety = measures.variety(draws, predicted, self.test, labels)
            variation = measures.variation(draws, predicted, self.test, labels)
        return ExpertMetrics(
            count,
            measures.recognisability(predictions.probabilities),
            measures.diversity(predictions.labels),
            measures.purity(predicted),
            variety,
            variation,
        )

    def _encode(self, images: Tensor) -> Tensor:
        return self._counted(self.encoder.encode(images))

    def _predict(self, images: Tensor) -> Predictions:
        assert self.classifier is not None  # noqa: S101 (the callers have one)
        start = self.work
        return self.classifier.predict(
            images, report=lambda done, _: self._report_work(start + done)
        )

    def _counted(self, images: Tensor, work: int = 1) -> Tensor:
        """Return images or codes, and report that they are computed."""
        self._report_work(self.work + work * len(images))
        return images

    def _report_work(self, work: int) -> None:
        self.work = work
        if self.report is not None:
            self.report(work, self._total_work())

    def _watch_chains(self, count: int) -> None:
        """Report the steps of the chains that the network will run for so many draws."""
        start, work = self.work, CHAIN_WORK * count

        def report(done: int, total: int) -> None:
            if self.report is not None and done < total:
                self.report(start + work * done // total, self._total_work())

        if isinstance(self.encoder, NetworkEncoder):
            self.encoder.report = report

    def _total_work(self) -> int:
        """Count the work of all measures, in passes of an image through the model."""
        encoder, classify = self.encoder, int(self.classifier is not None)
        judge = 1 + 2 * classify  # random features, and the classifier before and after matching
        reconstructs = isinstance(encoder, SupportsReconstruction)
        total = (classify + 2 + reconstructs) * len(self.data_test)
        if self.data_train.labels is not None and self.data_test.labels is not None:
            total += len(self.data_train)
        if isinstance(encoder, SupportsSampling):
            draws = sum(_work_of(domain) + judge for domain in encoder.domains)
            total += draws * self.samples
        if isinstance(encoder, SupportsDensityExperts) and encoder.density_experts:
            count = encoder.density_experts * self._samples_per_expert(encoder.density_experts)
            total += (CHAIN_WORK + judge + classify) * count
        if isinstance(encoder, SupportsExpertSampling) and classify:
            total += 2 * encoder.experts * self._samples_per_expert(encoder.experts)
        known = judge + (1 + judge if reconstructs else 0)
        return total + known * min(self.samples, len(self.data_train))

    def _training_batches(self) -> Iterator[Tensor]:
        return (batch.to(self.device) for batch in self.data_train.batches(BATCH_SIZE))

    def _random_training_images(self) -> Tensor:
        order = torch.randperm(
            len(self.data_train), generator=torch.Generator().manual_seed(self.seed)
        )
        return self.data_train.batch(order[: self.samples]).to(self.device)

    def _sample(self, encoder: SupportsSampling, domain: str) -> Tensor:
        generator, work = self._generator(domain), _work_of(domain)

        def draw(size: int) -> Tensor:
            self._watch_chains(size)
            return self._counted(encoder.sample(size, domain, generator), work)

        return self._checked(torch.cat([draw(size) for size in _batch_sizes(self.samples)]))

    def _checked(self, images: Tensor) -> Tensor:
        """Raise ValueError unless samples are images in [0, 1]; NaN would pass as not negative."""
        in_range = bool(((images >= 0) & (images <= 1)).all())
        if images.shape[1:] != self.data_test.shape or not in_range:
            raise ValueError(
                f"samples of {self.encoder.name} must be images of shape {self.data_test.shape} "
                f"from 0 to 1, but have shape {tuple(images.shape[1:])} "
                f"and range from {images.min().item():.3g} to {images.max().item():.3g}"
            )
        return images

    def _generator(self, name: str) -> torch.Generator:
        """Create a random generator per domain, so that the domains do not affect each other.

        The name enters the seed: a changed name gives different samples.
        """
        seed = np.random.SeedSequence((self.seed, zlib.crc32(name.encode()))).generate_state(1)[0]
        return torch.Generator(self.device).manual_seed(int(seed))


def _best_kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Cluster points (N, S) several times, and return the clusters (N,) with the least variance."""

    def variance(nearest: Tensor) -> float:
        centres = torch.stack([points[nearest == each].mean(0) for each in range(clusters)])
        return float((points - centres.nan_to_num()[nearest]).square().sum())

    found = [kmeans(points, clusters, generator) for _ in range(KMEANS_STARTS)]
    return min(found, key=variance)


def _work_of(domain: str) -> int:
    """Return the work of a draw from a domain."""
    return CHAIN_WORK if domain in DENSITY_DOMAINS else 1


def _batch_sizes(count: int) -> Iterable[int]:
    return (min(BATCH_SIZE, count - start) for start in range(0, count, BATCH_SIZE))


def nan_to_none(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None, recursively."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Rows of the table: label, path of the value in an evaluation, format

CODE_ROWS = (
    ("code size", "code_size", "d"),
    ("linear probe, test accuracy", "probe.test_accuracy", ".4f"),
    ("linear probe, training accuracy", "probe.train_accuracy", ".4f"),
    ("linear probe on firing probabilities", "firing_probe.test_accuracy", ".4f"),
    ("most active expert, accuracy", "specialisation.accuracy", ".4f"),
    ("most active expert, purity", "specialisation.purity", ".4f"),
    ("NMI of most active expert and label", "specialisation.normalised", ".3f"),
    ("AMI (adjusted for chance)", "specialisation.adjusted", ".3f"),
    ("adjusted Rand index", "specialisation.adjusted_rand", ".3f"),
    ("mutual information, nats", "specialisation.mutual_information", ".3f"),
    ("k-means on firing probabilities, accuracy", "firing_clusters.accuracy", ".4f"),
    ("k-means on firing probabilities, NMI", "firing_clusters.normalised", ".3f"),
    (
        "k-means on firing probabilities, adjusted Rand index",
        "firing_clusters.adjusted_rand",
        ".3f",
    ),
    ("effective number of active experts", "specialisation.effective_experts", ".1f"),
    ("effective rank", "effective_rank", ".1f"),
    ("reconstruction error per pixel", "reconstruction.error", ".5f"),
    ("reconstruction error, % of mean image", "reconstruction.relative", ".1%"),
)
CLASSIFIER_ROWS = (
    ("recognisable (confidence ≥ 90 %)", "recognisability.share", ".1%"),
    ("diversity, effective classes", "diversity.effective_classes", ".2f"),
)
SAMPLE_ROWS = (
    ("Fréchet distance", "frechet.distance", ".2f"),
    ("Fréchet distance, contrast matched", "matched_frechet.distance", ".2f"),
    ("Fréchet distance, random features", "random_frechet.distance", ".4f"),
    ("precision", "neighbourhoods.precision", ".1%"),
    ("recall", "neighbourhoods.recall", ".1%"),
    ("density", "neighbourhoods.density", ".3f"),
    ("coverage", "neighbourhoods.coverage", ".1%"),
    *CLASSIFIER_ROWS,
    ("negatives", "negatives.share", ".1%"),
    ("nearer to training images than test images", "nearest.nearer", ".1%"),
)
EXPERT_ROWS = (
    *CLASSIFIER_ROWS,
    ("purity", "purity.mean", ".1%"),
    ("variety, % of the class", "variety.mean", ".1%"),
    *(
        (f"variation of {name}, % of the class", f"variation.{name}", ".1%")
        for name in ("thickness", "slant", "width", "height")
    ),
)
DOMAIN_TITLES: dict[str, str] = {
    domain: (
        f"samples from the whole code ({DOMAIN_INFO[domain].description}), domain {domain}"
        if DOMAIN_INFO[domain].whole_code
        else f"samples from a random expert, domain {domain}"
    )
    for domain in DOMAINS
} | {
    domain: f"samples from {DOMAIN_INFO[domain].description}, domain {domain}"
    for domain in DENSITY_DOMAINS
}


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """Format several evaluations as one table of aligned plain text, with a column for each."""
    if not evaluations:
        raise ValueError("evaluations must contain at least one evaluation, but is empty")
    sections: dict[str, dict[str, list[str]]] = {}
    domains = list(
        dict.fromkeys(domain for evaluation in evaluations for domain in evaluation.domains)
    )
    for evaluation in evaluations:
        for section, labelled_cells in _sections(evaluation, domains):
            for label, text in labelled_cells:
                sections.setdefault(section, {}).setdefault(label, []).append(text)
    sections = {
        section: {
            label: cells for label, cells in rows.items() if any(cell != MISSING for cell in cells)
        }
        for section, rows in sections.items()
    }
    names = [evaluation.name for evaluation in evaluations]
    all_cells = [cells for rows in sections.values() for cells in rows.values()]
    widths = [
        max(len(name), *(len(cells[i]) for cells in all_cells)) for i, name in enumerate(names)
    ]
    label_width = max(len(label) for rows in sections.values() for label in rows) + 2
    first = evaluations[0]
    lines = [
        f"{first.data}: {first.training_images:,} training images, {first.test_images:,} test "
        f"images, {first.samples:,} samples, seed {first.seed}",
        "",
        _line("", names, label_width, widths),
    ]
    for section, rows in sections.items():
        if rows:
            lines.append(section)
            lines += [
                _line(f"  {label}", cells, label_width, widths) for label, cells in rows.items()
            ]
    notes = dict.fromkeys(
        f"note: {note}" if len(evaluations) == 1 else f"note: {evaluation.name}: {note}"
        for evaluation in evaluations
        for note in evaluation.notes
    )
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _line(label: str, cells: Sequence[str], label_width: int, widths: Sequence[int]) -> str:
    aligned = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{label:<{label_width}}{aligned}".rstrip()


def _sections(
    evaluation: Evaluation, domains: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield title and labelled cells of each section; the same sections for every evaluation."""
    yield "code", _cells(evaluation, CODE_ROWS)
    for domain in domains:
        title = DOMAIN_TITLES.get(domain, f"samples, domain {domain}")
        yield title, _cells(evaluation.domains.get(domain), SAMPLE_ROWS)
    title = "samples from each expert in turn, domain learned"
    yield title, _cells(evaluation.experts, EXPERT_ROWS)
    title = "samples from each expert of the energy in turn, domain model-experts"
    yield title, _cells(evaluation.density_experts, EXPERT_ROWS)
    title = "training images in place of samples"
    yield title, _cells(evaluation.training_samples, SAMPLE_ROWS)
    title = "reconstructions of training images in place of samples"
    yield title, _cells(evaluation.reconstructed_samples, SAMPLE_ROWS)


def _cells(metrics: object, rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Return label and formatted value of each row; a dash if the value is None or NaN.

    A value with a standard error is followed by the half-width of its 95 % interval.
    """
    errors = getattr(metrics, "errors", {})
    cells = []
    for label, path, form in rows:
        value: Any = metrics
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        text = MISSING
        if value is not None and not math.isnan(value):
            text = format(value, form)
            if path in errors:
                text += f" ± {format(fidelity.Z_95 * errors[path], form)}"
        cells.append((label, text.replace("%", " %")))
    return cells
