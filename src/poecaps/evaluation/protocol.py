"""The protocol: everything that is measured on a model, in one fixed way, and the table of the results."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps.evaluation import measures
from poecaps.evaluation.probe import LinearProbe, linear_probe
from poecaps.metrics import effective_rank
from poecaps.network import DOMAINS, CapsuleNetwork, Domain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from poecaps.data import ImageSet
    from poecaps.evaluation.classifier import Classifier

NOTHING = "–"  # where there is no result
BATCH = 250  # images that go through a model together
FEW = 2000  # samples, of which Fréchet distances are noticeably too large
CACHED = 50  # of them that a CPU takes at a time: what a network makes of more does not fit into its caches


class Encoder(Protocol):
    """What the protocol measures: a name, and codes of images. It may also be any of the protocols below."""

    @property
    def name(self) -> str:
        """What to call it in a table."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Code of images: (B, C, H, W) → (B, S)."""
        ...


@runtime_checkable
class Fires(Protocol):
    """An encoder whose codes say how active each of its experts is."""

    def firing(self, codes: Tensor) -> Tensor:
        """Read the firing probabilities off codes: (B, S) → (B, J)."""
        ...


@runtime_checkable
class Reconstructs(Protocol):
    """An encoder that can go back to images."""

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        ...


@runtime_checkable
class Samples(Protocol):
    """An encoder that draws images, in one way or in several."""

    @property
    def domains(self) -> Sequence[str]:
        """Names of the ways; the one that uses the whole code is called ``"joint"`` everywhere."""
        ...

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images: (count, C, H, W), from 0 to 1."""
        ...


@runtime_checkable
class SamplesExperts(Protocol):
    """An encoder that draws images from one of its experts."""

    @property
    def experts(self) -> int:
        """J."""
        ...

    def sample_expert(self, count: int, expert: int, generator: torch.Generator) -> Tensor:
        """Draw images from expert j: (count, C, H, W), from 0 to 1."""
        ...


class NetworkEncoder:
    """A `CapsuleNetwork` as the protocol sees it; it is put into evaluation mode."""

    domains: Sequence[str] = DOMAINS

    def __init__(self, network: CapsuleNetwork, name: str = "poecaps") -> None:
        self.network, self.name = network.eval(), name
        self.experts, self.dim = network.architecture.experts[-1]

    def encode(self, images: Tensor) -> Tensor:
        """Squashed experts of the highest layer, in one row: (B, C, H, W) → (B, J·D)."""
        return torch.cat([self.network.encode(part).flatten(1) for part in _cached(images)])

    def firing(self, codes: Tensor) -> Tensor:
        """P(a_j = 1 | x) = ‖squash(z_j)‖: (B, J·D) → (B, J)."""
        firing: Tensor = codes.view(-1, self.experts, self.dim).norm(dim=-1)
        return firing

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        return torch.cat([self.network.reconstruct(part) for part in _cached(images)])

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images from a domain; see `CapsuleNetwork.generate`."""
        chosen: Domain = domain  # type: ignore[assignment]  # the network refuses what is none
        return self._decode(self.network.sample(count, chosen, generator=generator))

    def sample_expert(self, count: int, expert: int, generator: torch.Generator) -> Tensor:
        """Draw images from the learned domain of one expert."""
        return self._decode(
            self.network.sample(count, "learned", expert=expert, generator=generator)
        )

    def _decode(self, codes: Tensor) -> Tensor:
        return torch.cat([self.network.decode(part) for part in _cached(codes)])


def _cached(batch: Tensor) -> Sequence[Tensor]:
    """Split a batch into what is done at a time: on a GPU, all of it."""
    parts: tuple[Tensor, ...] = batch.split(CACHED if batch.device.type == "cpu" else len(batch))
    return parts


@dataclass(frozen=True)
class SampleMetrics:
    """What is measured on images drawn in one way. What a classifier is needed for is None without one."""

    frechet: measures.FrechetDistance | None
    """Between the samples and the test images, in the features of the classifier."""
    recognisability: measures.Recognisability | None
    diversity: measures.Diversity | None
    negatives: measures.Negatives


@dataclass(frozen=True)
class ExpertMetrics:
    """What is measured on equally many draws of each expert."""

    draws: int
    """Of each expert."""
    recognisability: measures.Recognisability
    diversity: measures.Diversity
    purity: measures.Purity
    variety: measures.Variety | None
    variation: measures.Variation | None


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`. What could not be measured is None, and `notes` say why."""

    name: str
    data: str
    training_images: int
    test_images: int
    samples: int
    """Drawn in each way."""
    seed: int
    code_size: int
    """S, the numbers in a code."""
    probe: LinearProbe | None
    """On codes."""
    probe_of_firing: LinearProbe | None
    """On firing probabilities alone."""
    specialisation: measures.Specialisation | None
    """On test images."""
    effective_rank: float
    """Participation ratio (Σλ)²/Σλ² of the covariance of the test images' codes."""
    reconstruction: measures.Reconstruction | None
    """On test images."""
    domains: dict[str, SampleMetrics]
    experts: ExpertMetrics | None
    training: SampleMetrics
    """Training images in place of samples: what a perfect model would get."""
    notes: tuple[str, ...]
    classifier: dict[str, Any] | None = None
    """How the classifier was trained, and how well it does."""
    about: dict[str, Any] = field(default_factory=dict)
    """Whatever else the caller wants to keep: budget, seconds, options."""

    def to_json(self) -> str:
        """Write everything as JSON; what is not a number is null."""
        return json.dumps(without_nan(asdict(self)), indent=2, ensure_ascii=False)

    def table(self) -> str:
        """Lay the results out as aligned plain text."""
        return side_by_side([self])

    def with_about(self, **about: Any) -> Evaluation:
        """Return a copy that keeps these facts too."""
        return replace(self, about=self.about | about)


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
) -> Evaluation:
    """Measure a trained model.

    Nothing is fitted but the linear probes, and nothing is chosen by the test images. The same seed gives the same
    numbers on the same device.

    Parameters
    ----------
    network
        A network, or anything that is an `Encoder`. What else it can do (`Fires`, `Reconstructs`, `Samples`,
        `SamplesExperts`) decides what is measured.
    data_train, data_test
        Images that the probe learns from, and images that everything is measured on. Without labels, there is no probe
        and no specialisation.
    classifier
        The judge of samples, of `load_classifier`; its classes must be the labels. Without one, negatives are all that
        is measured on samples.
    seed
        Of the samples.
    samples
        How many are drawn in each way, and together from single experts.
    device
        Where the work is done. A network and the classifier are moved there; any other encoder must take images there.
        None: where the network is, or else the CPU.

    Raises
    ------
    ValueError
        If the images do not fit the network, or each other; if labels are none of the classifier's classes; if codes
        are not finite, or samples are no images from 0 to 1.
    """
    checks.require_int("seed", seed, 0)
    checks.require_int("samples", samples, 2)
    if data_train.shape != data_test.shape:
        raise ValueError(
            f"data_test must have images of the shape {data_train.shape}, as data_train has, but of {data_test.shape}"
        )
    if isinstance(network, CapsuleNetwork):
        if network.architecture.image_shape != data_test.shape:
            raise ValueError(
                f"data_test must have images of the shape {network.architecture.image_shape}, which the network was "
                f"made for, but of {data_test.shape}; evaluate on the set it was trained on"
            )
        device = next(network.parameters()).device if device is None else device
        network = NetworkEncoder(network.to(device))
    if classifier is not None and data_test.labels is not None:
        least, most = int(data_test.labels.min()), int(data_test.labels.max())
        if least < 0 or most >= classifier.head.out_features:
            raise ValueError(
                f"labels must be the classes of the classifier, from 0 to {classifier.head.out_features - 1}, but go "
                f"from {least} to {most}; evaluate with the classifier of this set, or with none"
            )
    return _Measurement(
        network, data_train, data_test, classifier, seed, samples, torch.device(device or "cpu")
    ).take()


class _Measurement:
    """Everything a measurement holds while it goes."""

    def __init__(
        self,
        encoder: Encoder,
        data_train: ImageSet,
        data_test: ImageSet,
        classifier: Classifier | None,
        seed: int,
        samples: int,
        device: torch.device,
    ) -> None:
        self.encoder, self.data_train, self.data_test = encoder, data_train, data_test
        self.seed, self.samples, self.device = seed, samples, device
        self.classifier = None if classifier is None else classifier.to(device).eval()
        self.test = data_test.batch(slice(None)).to(device)
        self.judged = None if self.classifier is None else self.classifier.judge(self.test)
        self.background = measures.background(self._training_images())
        self.notes: list[str] = []

    def take(self) -> Evaluation:
        """Measure everything that can be measured."""
        encoder = self.encoder
        if self.classifier is None:
            self.notes.append(
                "no classifier for this set: samples are judged by their background alone"
            )
        elif self.samples < FEW:
            self.notes.append(
                f"Fréchet distances of {self.samples:,} samples, fewer than {FEW:,}, are too large; compare them only "
                "with those of as many"
            )
        if len(self.data_train) < self.samples:
            self.notes.append(
                f"only {len(self.data_train):,} training images in place of {self.samples:,} samples: their Fréchet "
                "distance is a little too large"
            )
        codes = torch.cat([encoder.encode(part) for part in self.test.split(BATCH)])
        if not bool(codes.isfinite().all()):
            raise ValueError(
                f"codes of {encoder.name} must be finite, but hold NaN or infinity; has it diverged?"
            )
        probe, probe_of_firing, specialisation = self._read_labels(codes)
        reconstruction = None
        if isinstance(encoder, Reconstructs):
            pairs = ((part, encoder.reconstruct(part)) for part in self.test.split(BATCH))
            reconstruction = measures.reconstruction(pairs, self.background.mean)
        domains = {}
        if isinstance(encoder, Samples):
            domains = {
                domain: self._measure_samples(self._draw(encoder, domain))
                for domain in encoder.domains
            }
        about = None if self.classifier is None else dict(self.classifier.about)
        return Evaluation(
            name=encoder.name,
            data=self.data_test.source,
            training_images=len(self.data_train),
            test_images=len(self.data_test),
            samples=self.samples,
            seed=self.seed,
            code_size=codes.shape[1],
            probe=probe,
            probe_of_firing=probe_of_firing,
            specialisation=specialisation,
            effective_rank=effective_rank(codes),
            reconstruction=reconstruction,
            domains=domains,
            experts=self._measure_experts(),
            training=self._measure_samples(self._some_training_images()),
            notes=tuple(self.notes),
            classifier=about,
        )

    def _read_labels(
        self, codes: Tensor
    ) -> tuple[LinearProbe | None, LinearProbe | None, measures.Specialisation | None]:
        """Probe codes and firing probabilities, and find out what the experts stand for."""
        if self.data_train.labels is None or self.data_test.labels is None:
            self.notes.append("no labels: no probe and no specialisation")
            return None, None, None
        labels = torch.from_numpy(self.data_train.labels), torch.from_numpy(self.data_test.labels)
        train_codes = torch.cat([self.encoder.encode(part) for part in self._training_images()])
        probe = self._probe("codes", train_codes, labels[0], codes, labels[1])
        if not isinstance(self.encoder, Fires):
            return probe, None, None
        firing = self.encoder.firing(codes)
        of_firing = self._probe(
            "firing", self.encoder.firing(train_codes), labels[0], firing, labels[1]
        )
        return probe, of_firing, measures.specialisation(firing, labels[1])

    def _probe(self, what: str, *codes_and_labels: Tensor) -> LinearProbe:
        probe = linear_probe(*codes_and_labels)
        if not probe.converged:
            self.notes.append(
                f"the linear probe on {what} had not converged after {probe.steps} steps"
            )
        return probe

    def _measure_samples(self, images: Tensor) -> SampleMetrics:
        negatives = measures.negatives(images, self.background)
        if self.classifier is None or self.judged is None:
            return SampleMetrics(None, None, None, negatives)
        judged = self.classifier.judge(images)
        return SampleMetrics(
            measures.frechet_distance(judged.features, self.judged.features),
            measures.recognisability(judged.probabilities),
            measures.diversity(judged.verdicts),
            negatives,
        )

    def _measure_experts(self) -> ExpertMetrics | None:
        encoder = self.encoder
        if self.classifier is None or not isinstance(encoder, SamplesExperts):
            return None
        each = max(2, self.samples // encoder.experts)
        generator = self._generator("one expert")
        draws = [
            self._checked(
                torch.cat([encoder.sample_expert(part, expert, generator) for part in _parts(each)])
            )
            for expert in range(encoder.experts)
        ]
        judged = self.classifier.judge(torch.cat(draws))
        verdicts = judged.verdicts.view(encoder.experts, each)
        variety = variation = None
        if self.data_test.labels is not None:
            labels = torch.from_numpy(self.data_test.labels)
            variety = measures.variety(draws, verdicts, self.test, labels)
            variation = measures.variation(draws, verdicts, self.test, labels)
        return ExpertMetrics(
            each,
            measures.recognisability(judged.probabilities),
            measures.diversity(judged.verdicts),
            measures.purity(verdicts),
            variety,
            variation,
        )

    def _training_images(self) -> Iterator[Tensor]:
        return (part.to(self.device) for part in self.data_train.batches(BATCH))

    def _some_training_images(self) -> Tensor:
        order = torch.randperm(
            len(self.data_train), generator=torch.Generator().manual_seed(self.seed)
        )
        return self.data_train.batch(order[: self.samples]).to(self.device)

    def _draw(self, encoder: Samples, domain: str) -> Tensor:
        generator = self._generator(domain)
        return self._checked(
            torch.cat([encoder.sample(part, domain, generator) for part in _parts(self.samples)])
        )

    def _checked(self, images: Tensor) -> Tensor:
        """Refuse what no measure of images means anything for; NaN would even pass as no negative."""
        if images.shape[1:] != self.data_test.shape or not bool(
            ((images >= 0) & (images <= 1)).all()
        ):
            raise ValueError(
                f"samples of {self.encoder.name} must be images of shape {self.data_test.shape} from 0 to 1, but are "
                f"of {tuple(images.shape[1:])} from {images.min().item():.3g} to {images.max().item():.3g}"
            )
        return images

    def _generator(self, name: str) -> torch.Generator:
        """Make a source of random numbers of its own for each way of drawing, so that none depends on the others."""
        seed = np.random.SeedSequence((self.seed, zlib.crc32(name.encode()))).generate_state(1)[0]
        return torch.Generator(self.device).manual_seed(int(seed))


def _parts(count: int) -> Iterable[int]:
    return (min(BATCH, count - start) for start in range(0, count, BATCH))


def without_nan(value: Any) -> Any:
    """Put None in the place of what JSON has no word for."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Rows of the table: label, where the value is found, format

CODE_ROWS = (
    ("numbers", "code_size", "d"),
    ("linear probe, test accuracy", "probe.test_accuracy", ".4f"),
    ("linear probe, training accuracy", "probe.train_accuracy", ".4f"),
    ("linear probe on firing alone", "probe_of_firing.test_accuracy", ".4f"),
    ("NMI, most active expert and label", "specialisation.normalised", ".3f"),
    ("the same, adjusted for chance", "specialisation.adjusted", ".3f"),
    ("mutual information, nats", "specialisation.mutual_information", ".3f"),
    ("experts ever most active, effective", "specialisation.experts", ".1f"),
    ("effective rank", "effective_rank", ".1f"),
    ("reconstruction error, of a pixel", "reconstruction.error", ".5f"),
    ("reconstruction error, of the mean's", "reconstruction.relative", ".1%"),
)
JUDGEMENT_ROWS = (
    ("recognisable (at least 90 % sure)", "recognisability.share", ".1%"),
    ("diversity, effective classes", "diversity.classes", ".2f"),
)
SAMPLE_ROWS = (
    ("Fréchet distance", "frechet.distance", ".2f"),
    *JUDGEMENT_ROWS,
    ("negatives", "negatives.share", ".1%"),
)
EXPERT_ROWS = (
    *JUDGEMENT_ROWS,
    ("purity", "purity.mean", ".1%"),
    ("variety, of one class's", "variety.mean", ".1%"),
    *(
        (f"variation of {name}, of one class's", f"variation.{name}", ".1%")
        for name in ("thickness", "slant", "width", "height")
    ),
)


def side_by_side(evaluations: Sequence[Evaluation]) -> str:
    """Lay several evaluations out as one table of aligned plain text, a column for each."""
    if not evaluations:
        raise ValueError("evaluations must hold at least one, but are empty")
    sections: dict[str, dict[str, list[str]]] = {}
    domains = list(
        dict.fromkeys(domain for evaluation in evaluations for domain in evaluation.domains)
    )
    for evaluation in evaluations:
        for section, rows in _rows(evaluation, domains):
            for label, text in rows:
                sections.setdefault(section, {}).setdefault(label, []).append(text)
    sections = {
        section: {
            label: cells for label, cells in rows.items() if any(cell != NOTHING for cell in cells)
        }
        for section, rows in sections.items()
    }
    names = [evaluation.name for evaluation in evaluations]
    cells_of = [cells for labelled in sections.values() for cells in labelled.values()]
    widths = [
        max(len(name), *(len(cells[i]) for cells in cells_of)) for i, name in enumerate(names)
    ]
    left = max(len(label) for labelled in sections.values() for label in labelled) + 2
    first = evaluations[0]
    lines = [
        f"{first.data}: {first.training_images:,} training images, {first.test_images:,} test images, "
        f"{first.samples:,} samples, seed {first.seed}",
        "",
        _line("", names, left, widths),
    ]
    for section, labelled in sections.items():
        if labelled:
            lines += [
                section,
                *(_line(f"  {label}", cells, left, widths) for label, cells in labelled.items()),
            ]
    notes = dict.fromkeys(f"{each.name}: {note}" for each in evaluations for note in each.notes)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _line(label: str, cells: Sequence[str], left: int, widths: Sequence[int]) -> str:
    aligned = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{label:<{left}}{aligned}".rstrip()


def _rows(of: Evaluation, domains: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Sections of a table, the same for every evaluation: the title and the labelled cells of each."""
    yield "code", _cells(of, CODE_ROWS)
    for domain in domains:
        yield f"samples, {domain}", _cells(of.domains.get(domain), SAMPLE_ROWS)
    yield "samples, one expert at a time", _cells(of.experts, EXPERT_ROWS)
    yield "training images in place of samples", _cells(of.training, SAMPLE_ROWS)


def _cells(of: object, rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Label and formatted value of each row; a dash where the value, or what it belongs to, is None or NaN."""
    cells = []
    for label, path, form in rows:
        value: Any = of
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        shown = (
            NOTHING
            if value is None or math.isnan(value)
            else format(value, form).replace("%", " %")
        )
        cells.append((label, shown))
    return cells
