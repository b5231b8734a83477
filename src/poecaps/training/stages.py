"""The training stages: for each part of the network its data, its loss and its metrics."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from poecaps import functional as F
from poecaps import metrics as measures
from poecaps._files import ModelError
from poecaps.kernels import pixels
from poecaps.training.config import CRITERIA
from poecaps.training.density import DensityLearner, load_weights
from poecaps.training.recombination import Recombination, choose_experts, recombined
from poecaps.training.seeds import Stream, make_generator
from poecaps.views import NUMBERS, make_copies, make_views

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from poecaps.autoencoder import ConvAutoencoder, PixelDecoder
    from poecaps.energy import CapsuleDensity
    from poecaps.layer import CapsuleDecoder, CapsuleExperts
    from poecaps.network import CapsuleNetwork
    from poecaps.training.config import (
        Config,
        Criterion,
        DecoderStage,
        DensityStage,
        EncoderStage,
        PixelDecoderStage,
        Stage,
    )
    from poecaps.training.distributed import RandomNumbers
    from poecaps.training.features import FeatureCache

# Images on which the density does not learn: a twentieth of them, but at most so many.
HELD_OUT_DIVISOR, MAX_HELD_OUT = 20, 1000
EXPLODED_WEIGHT = 1e3  # mean absolute value of weights that have diverged
# Multiplications by each weight of a capsule layer in a training step, for one image: all
# iterations of the routing and the gradient. Fitted to durations on a CPU.
ROUTING_WORK = 40
COLOUR_IMAGES = 4096  # most training images whose colours are measured
SCORED_IMAGES = 4096  # most training images by which one of several encoders is chosen


@dataclass(frozen=True)
class Comparison:
    """Scores of several encoders that learn from the same images."""

    step: int
    """Steps of the stage that were done."""
    starts: list[int]
    """Numbers of the encoders, counted from 1."""
    scores: dict[Criterion, list[float]]
    """Score of each of them by every criterion; the larger, the better."""

    def better_half(self, criterion: Criterion) -> list[int]:
        """Return the numbers of the encoders with the higher scores, in order."""
        score = dict(zip(self.starts, self.scores[criterion], strict=True))
        ranked = sorted(self.starts, key=score.__getitem__, reverse=True)
        return sorted(ranked[: (len(ranked) + 1) // 2])


@dataclass(frozen=True)
class Selection:
    """Which of several encoders was kept, and why."""

    criterion: Criterion
    kept: int
    """Number of the encoder, counted from 1."""
    starts: list[int]
    """Numbers of the encoders that have learned to the end; see `Recombination.number`."""
    scores: dict[Criterion, list[float]]
    """Score of each of these by every criterion; the larger, the better."""
    halvings: list[Comparison]
    """The comparisons after which the worse half was dropped."""
    recombinations: list[Recombination]
    """The encoders that were made of the experts of others."""


class StageTrainer(ABC):
    """Training of one part of the network, with all other parts frozen.

    Attributes
    ----------
    name
        Name of the stage in progress, metrics and messages, such as ``"encoder 1"``.
    options
        Options of the stage.
    module
        The part of the network that is trained.
    cache
        Images, and the outputs of the frozen parts.
    """

    name: str
    options: Stage
    module: nn.Module
    has_state = False
    """Whether the stage has a state beside the weights and the optimizer, see `state`."""
    has_convolutions = False
    """Whether the filters are trained, whose multiplications take less time than others."""
    selection: Selection | None = None
    """After `finish`: which of several trained parts was kept; None if there was only one."""

    def __init__(self, cache: FeatureCache) -> None:
        self.cache = cache

    @abstractmethod
    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Compute the inputs of the stage and, if it is `fresh`, initialize its weights."""

    @abstractmethod
    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""

    @abstractmethod
    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the loss () of the images with these indices (B,)."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Compute the running metrics, always on the same training images."""

    def held_out_error(self) -> float | None:
        """Compute the reconstruction error of `metrics` on held-out images, if there are any."""
        return None

    @abstractmethod
    def work(self, batch_size: int) -> float:
        """Estimate the multiplications of a step for one image; only the ratios matter."""

    def learning_rate_factors(self) -> list[float]:
        """Return the factor of the learning rate of each parameter, after `prepare`."""
        return [1.0 for _ in self.module.parameters()]

    def should_select(self, step: int, steps: int) -> bool:  # noqa: ARG002 (most stages never do)
        """Return whether other parts are trained from now on, after so many of all steps."""
        return False

    def select(self, step: int, steps: int) -> None:  # noqa: B027 (most stages never do)
        """Drop some of the parts, or replace all by new ones; all processes call it.

        Parameters of `module` that are left stay the same.
        """

    def has_diverged(self) -> bool:
        """Return whether the weights are not finite, or far too large."""
        means = [parameter.detach().abs().mean() for parameter in self.module.parameters()]
        return not bool((torch.stack(means) < EXPLODED_WEIGHT).all())

    def finish(self) -> None:  # noqa: B027 (most stages have nothing to do)
        """Bring the trained part into the form in which later stages use it."""

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs beside weights and optimizer; all processes call it."""
        return {}

    def load_state(self, state: Mapping[str, Tensor], source: Path) -> None:
        """Restore the `state` of a checkpoint; it is empty at the start of a stage."""
        if state:
            raise ModelError(f"{source} is damaged: {self.name} has no state {min(state)}")


class AutoencoderTrainer(StageTrainer):
    """Stage 1: the convolutional autoencoder learns to reconstruct images."""

    module: ConvAutoencoder

    has_convolutions = True

    def __init__(self, options: Stage, multi_scale: float, cache: FeatureCache) -> None:
        super().__init__(cache)
        self.name, self.options, self.multi_scale = "autoencoder", options, multi_scale
        self.module = cache.network.autoencoder

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:  # noqa: ARG002 (nothing is drawn)
        """Fit the colours of a fresh network that whitens them; it has initial filters already."""
        if fresh and self.module.stem.colour_whitening:
            indices = self.cache.probe_indices(COLOUR_IMAGES)
            batches = indices.split(self.cache.batch_size)
            self.module.stem.fit_colours(self.cache.images(batch) for batch in batches)

    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""
        return self.cache.has_images_on_device()

    def work(self, batch_size: int) -> float:  # noqa: ARG002 (the same for every size)
        """Estimate the multiplications: encoder and decoder, forward and twice backward."""
        return 6 * _convolution_work(self.cache.network)

    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the mean cross-entropy of the pixels, with dropout of the features."""
        images = self.cache.images(indices)
        height, width = images.shape[2:]
        uniform = None
        if self.module.dropout > 0:
            grid = self.module.grid((height, width))
            uniform = random.uniform(len(images), self.module.features, *grid)
        with self.cache.autocast():
            return self.module.loss(images, uniform=uniform, multi_scale=self.multi_scale)

    def metrics(self) -> dict[str, float]:
        """Compute the fraction of the images' variance that is lost."""
        return {"reconstruction_error": self._error(self.cache.images(self.cache.probe_indices()))}

    def held_out_error(self) -> float | None:
        """Compute the reconstruction error of held-out images, if there are any."""
        return None if self.cache.held_out is None else self._error(self.cache.held_out)

    def _error(self, images: Tensor) -> float:
        with self.cache.autocast():
            error: Tensor = (self.module(images).float() - images).square().sum()
        return (error / _variance(images)).item()


class DensityTrainer(StageTrainer):
    """A density over the input capsules learns by maximum likelihood, see `DensityLearner`."""

    module: CapsuleDensity
    options: DensityStage
    has_state = True

    def __init__(
        self, options: DensityStage, density: CapsuleDensity, seed: int, cache: FeatureCache
    ) -> None:
        super().__init__(cache)
        self.name, self.options, self.seed = "density", options, seed
        self.density = self.module = density

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Compute the capsules and start the chains; a fresh density fits its base measure."""
        self.cache.compute_inputs(0)
        order = torch.randperm(len(self.cache), generator=generator)
        held_out = min(MAX_HELD_OUT, len(self.cache) // HELD_OUT_DIVISOR)
        self.held_out, kept = order[:held_out], order[held_out:]
        self.kept = kept.to(self.cache.device)
        if fresh:
            self.cache.fit_density_base(kept.sort().values)
        if self.density.has_components:
            self.cache.cache_components()
            self.module = self.density.restrict()
        if fresh:
            _reset_parameters(self.module, self.options.init_std, generator)
        self.learner = DensityLearner(self.module, self.options, self.cache.distributed)
        self.learner.chains.start(generator)

    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""
        if self.density.has_components:
            return self.cache.has_components_on_device()
        return self.cache.has_inputs_on_device(0)

    def work(self, batch_size: int) -> float:
        """Estimate the multiplications: F of the images, its gradient at every leapfrog step."""
        weights: float = self.density.weight.numel()
        if self.density.has_components:  # W then maps components, not capsules
            weights *= self.cache.network.architecture.density.base_components
            weights /= self.density.in_capsules * self.density.in_dim
        gradients = 1 + (1 + self.options.leapfrog_steps) * self.options.chains / batch_size
        return 3 * self.density.iterations * weights * gradients

    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the mean of F over images minus that over draws of the density."""
        kept = self.kept[indices.to(self.kept.device) % len(self.kept)]
        return self.learner.loss(self._inputs(kept), random)

    def learning_rate_factors(self) -> list[float]:
        """Return the factors of weights, strengths and origins."""
        return self.learner.learning_rate_factors()

    def _inputs(self, indices: Tensor) -> Tensor:
        """Return what the density reads of images: (B,) → (B, I, K), or (B, 1, r)."""
        if self.density.has_components:
            return self.cache.components(indices)
        return self.cache.whitened(indices)

    def metrics(self) -> dict[str, float]:
        """Compute the free energies of training images, held-out images and chains.

        With the acceptance of the sampler and the running estimate of log Z, and with the mean of
        −F − log Z over the held-out images: how many nats the experts add to the base measure.
        Without held-out images, with no chain at t = 1 or none that has arrived there, the numbers
        that need them are left out.
        """
        density, chains = self.module, self.learner.chains
        probe = self.kept[: len(self.cache.probe_indices())]
        train = density.free_energy(self._inputs(probe)).mean()
        values = {"free_energy": train.item()}
        if len(self.held_out):
            held_out = density.free_energy(self._inputs(self.held_out)).mean()
            values["held_out_free_energy"] = held_out.item()
        capsules = density.base.from_white(chains.position)[chains.at_model()]
        if len(capsules):
            values["chain_free_energy"] = density.free_energy(capsules).mean().item()
        values["acceptance"] = chains.acceptance.item()
        log_partition = chains.log_partition()
        if math.isfinite(log_partition):
            values["log_partition"] = log_partition
            if len(self.held_out):
                values["nats"] = -values["held_out_free_energy"] - log_partition
        return values

    def finish(self) -> None:
        """Replace the weights by their average, and estimate the partition function."""
        if self.options.epochs > 0:
            self.learner.finish(self.seed)
        if self.module is not self.density:
            tensors = [*self.module.parameters(), *self.module.buffers()]
            self.cache.distributed.broadcast_from_main([tensor.detach() for tensor in tensors])
            self.density.extend(self.module)

    def state(self) -> dict[str, Tensor]:
        """Return the chains, and the weights that the state of the network does not hold."""
        return {**self.learner.state(), **self._restricted()}

    def load_state(self, state: Mapping[str, Tensor], source: Path) -> None:
        """Restore the chains and weights."""
        if state:
            self.learner.load_state(state, source)
            load_weights(self._restricted(), state, source)

    def _restricted(self) -> dict[str, Tensor]:
        """Return the weights of the density of the principal components, if that one learns."""
        if self.module is self.density:
            return {}
        return {
            f"restricted.{name}": parameter.detach()
            for name, parameter in self.module.named_parameters()
        }


class EncoderTrainer(StageTrainer):
    """Stage 2: a layer of experts learns by contrastive divergence.

    With `restarts`, several of them learn from different initial weights and the same inputs, and
    the best one becomes the layer of the network. The first of them is that layer itself, and
    learns what it would learn alone. With `halvings`, the worse ones are dropped on the way; the
    others do not notice it. With `recombinations`, new ones that are made of their experts take
    the place of all starts after half of the stage.

    Attributes
    ----------
    starts
        The layers that learn, by their numbers, counted from 1.
    halvings
        The comparisons after which some were dropped.
    recombinations
        The layers that were made of others; they are the `starts` from then on.
    """

    module: CapsuleExperts | nn.ModuleList
    options: EncoderStage

    def __init__(self, layer: int, options: EncoderStage, seed: int, cache: FeatureCache) -> None:
        super().__init__(cache)
        options.views.check_width(cache.data.shape[-1], "encoder.views.")
        self.name, self.options, self.seed = f"encoder {layer + 1}", options, seed
        self.layer, self.has_state = layer, options.restarts > 1
        self.experts = self.module = cast("CapsuleExperts", cache.network.encoders[layer])
        self.starts = {1: self.experts}
        self.halvings: list[Comparison] = []
        self.recombinations: list[Recombination] = []
        self.final_winners = self.experts.winners

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Compute the input capsules; a fresh first layer fits their preprocessing."""
        self.cache.compute_inputs(self.layer)
        for number in range(2, self.options.restarts + 1):
            self.starts[number] = copy.deepcopy(self.experts)
        if self.options.restarts > 1:
            self.module = nn.ModuleList(self.starts.values())
        if fresh:
            if self.layer == 0:
                self.cache.fit_preprocessing()
            for experts in self.starts.values():
                _reset_parameters(experts, self.options.init_std, generator)
        self.cache.cache_capsules()
        if self.options.winners is not None:
            for experts in self.starts.values():
                experts.winners = self.options.winners

    def should_select(self, step: int, steps: int) -> bool:
        """Return whether starts are dropped or recombined after so many of all steps."""
        return self._should_halve(step, steps) or self._should_recombine(step, steps)

    def select(self, step: int, steps: int) -> None:
        """Drop the worse half of the starts, several times if there are few steps; or recombine."""
        while self._should_halve(step, steps):
            self._halve(Comparison(step, list(self.starts), self._scores()))
        if self._should_recombine(step, steps):
            self._recombine(self._choose_recombinations())

    def _should_halve(self, step: int, steps: int) -> bool:
        return len(self.halvings) < self.options.halvings_after(step, steps)

    def _should_recombine(self, step: int, steps: int) -> bool:
        return not self.recombinations and self.options.recombines_after(step, steps)

    def _halve(self, comparison: Comparison) -> None:
        """Drop the worse half of the starts by their scores."""
        better = comparison.better_half(self.options.criterion)
        self.starts = {number: self.starts[number] for number in better}
        self.module = nn.ModuleList(self.starts.values())
        self.halvings.append(comparison)

    @torch.no_grad()
    def _choose_recombinations(self) -> list[Recombination]:
        """Choose the experts of the encoders that replace the starts.

        The first one is made of experts of all starts, the second and the third of those of either
        random half of them, the next two of those of other halves, and so on: encoders that differ,
        of which the best one can be kept. Every process chooses; the choice of the main process
        counts.
        """
        views, device = self.options.views.count, self.cache.statistics_device
        parts: dict[int, list[Tensor]] = {number: [] for number in self.starts}
        for _, x in self._scored_views():
            for number, experts in self.starts.items():
                parts[number].append(_log_odds(experts, x, views, device))
        log_odds = {number: torch.cat(each) for number, each in parts.items()}
        chosen = [
            choose_experts({start: log_odds[start] for start in group}, self.experts.out_capsules)
            for group in self._groups().values()
        ]
        found = torch.tensor(chosen, dtype=torch.float64, device=device)  # (R, J, 3)
        self.cache.distributed.broadcast_from_main([found])
        return self._recombinations_of(found)

    def _groups(self) -> dict[int, list[int]]:
        """Return the numbers of the recombinations, each with those of the starts it is made of."""
        count = self.options.restarts
        groups = [list(range(1, count + 1))]
        for pair in range(self.options.recombinations // 2):
            generator = make_generator(self.seed, Stream.RECOMBINATION, self.layer, pair)
            order = torch.randperm(count, generator=generator) + 1
            groups += [half.sort().values.tolist() for half in order.tensor_split(2)]
        return dict(enumerate(groups[: self.options.recombinations], start=count + 1))

    def _recombinations_of(self, chosen: Tensor) -> list[Recombination]:
        """Return the recombinations of the results (R, J, 3) of `choose_experts`."""
        return [
            Recombination(
                number,
                group,
                experts=[(int(start), int(expert)) for start, expert, _ in rows],
                stability=[stable for _, _, stable in rows],
            )
            for (number, group), rows in zip(self._groups().items(), chosen.tolist(), strict=True)
        ]

    def _recombine(self, recombinations: list[Recombination]) -> None:
        """Replace all starts by encoders that are made of their experts."""
        self.starts = {
            each.number: recombined(self.starts, each.experts) for each in recombinations
        }
        self.module = nn.ModuleList(self.starts.values())
        self.recombinations = recombinations

    def finish(self) -> None:
        """Keep the best start, end a competition for training only, scale the firing probabilities.

        Once the balance is folded into the weights, the winner is the expert with the highest
        firing probability. One factor for all weights changes neither the routing coefficients nor
        the winner, only how far the experts are squashed. If all of them were near 1, the codes
        would no longer show which expert is the strongest.
        """
        if self.options.restarts > 1:
            self._keep_best()
        if self.options.winners is not None:
            self.experts.winners = self.final_winners
            self.experts.fold_balance()
        if self.options.target_firing is not None:
            with torch.no_grad():
                x = self.cache.inputs(self.layer, self.cache.probe_indices())
                norm = self.experts.route(x).preactivation.norm(dim=-1).amax(1)
                norm = norm.to(self.cache.statistics_device)
                self.experts.weight.mul_(factor_for_firing(norm, self.options.target_firing))

    def _keep_best(self) -> None:
        """Make the start with the highest score the layer of the network, and drop the others."""
        numbers, scores, criterion = list(self.starts), self._scores(), self.options.criterion
        kept = numbers[scores[criterion].index(max(scores[criterion]))]
        self.experts.load_state_dict(self.starts[kept].state_dict())
        self.selection = Selection(
            criterion, kept, numbers, scores, self.halvings, self.recombinations
        )
        self.starts, self.module = {1: self.experts}, self.experts

    @torch.no_grad()
    def _scores(self) -> dict[Criterion, list[float]]:
        """Score all starts by every criterion, under the competition of the training.

        Every process scores them; the numbers of the main process count.
        """
        totals: dict[Criterion, Tensor] = {}
        views, device = self.options.views.count, self.cache.statistics_device
        for share, x in self._scored_views():
            each = [_score(experts, x, views, device) for experts in self.starts.values()]
            for name in each[0]:
                values = torch.tensor([scores[name] for scores in each], dtype=torch.float64)
                part = values * share
                totals[name] = totals[name] + part if name in totals else part
        scores = torch.stack(list(totals.values())).to(self.cache.statistics_device)
        self.cache.distributed.broadcast_from_main([scores])
        return dict(zip(totals, scores.tolist(), strict=True))

    def _scored_views(self) -> Iterator[tuple[float, Tensor]]:
        """Yield the input capsules of views of training images, always the same, in batches.

        Each comes with the share of its images: (B·views, I, K).
        """
        views = self.options.views
        generator = make_generator(self.seed, Stream.SCORED_VIEWS, self.layer)
        indices = self.cache.probe_indices(SCORED_IMAGES)
        for batch in indices.split(max(1, self.cache.batch_size // views.count)):
            uniform = torch.rand(len(batch), views.count - 1, NUMBERS, generator=generator)
            yield len(batch) / len(indices), self._views(batch, uniform.to(self.cache.device))

    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""
        if self.options.views.count > 1:
            return self.cache.has_images_on_device()
        return self.cache.has_inputs_on_device(self.layer)

    def work(self, batch_size: int) -> float:  # noqa: ARG002 (the same for every size)
        """Estimate the multiplications: the features of further views, and the routing of all."""
        options = self.options
        routing = ROUTING_WORK * self.experts.weight.numel() * options.mean_restarts()
        features = _convolution_work(self.cache.network) * (options.views.count - 1)
        return features + routing * options.views.count * options.k

    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the loss of contrastive divergence, on all views of the images.

        With several starts it is the sum of their losses: the gradient of each is that of its own.
        They learn from the same views and random numbers.
        """
        k, mixing, views = self.options.k, self.options.mixing, self.options.views.count
        x, uniform = self._inputs(indices, random), None
        if mixing == "bernoulli":
            uniform = random.uniform(k, len(x), self.experts.out_capsules, dim=1)
        loss, *others = (
            experts.contrastive_divergence(x, k, mixing=mixing, uniform=uniform, views=views)
            for experts in self.starts.values()
        )
        for other in others:
            loss = loss + other
        return loss

    def _inputs(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Return the input capsules of all views of the images: (B,) → (B·views, I, K)."""
        others = self.options.views.count - 1
        uniform = random.uniform(len(indices), others, NUMBERS) if others else torch.empty(0)
        return self._views(indices, uniform)

    def _views(self, indices: Tensor, uniform: Tensor) -> Tensor:
        """Return the input capsules of the views that numbers determine; see `make_views`.

        The features of the first view, the image itself, are in the cache.
        """
        options, cache = self.options.views, self.cache
        if options.count == 1:
            return cache.inputs(self.layer, indices)
        images = cache.images(indices)
        if not cache.has_inputs_on_device(self.layer):  # computed faster than copied
            return cache.inputs_of(self.layer, make_views(images, uniform, options))
        others = cache.inputs_of(self.layer, make_copies(images, uniform, options))
        first = cache.inputs(self.layer, indices).unsqueeze(1)
        return torch.cat((first, others.unflatten(0, (len(images), -1))), dim=1).flatten(0, 1)

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of the experts, the mean over all starts.

        These are the fraction of the capsules' square norm that is lost in a reconstruction and the
        mean firing probability, both under the competition of the training, and the effective rank
        of the codes, under the competition after it.
        """
        x = self.cache.inputs(self.layer, self.cache.probe_indices())
        each = [self._metrics_of(experts, x) for experts in self.starts.values()]
        return {name: sum(values[name] for values in each) / len(each) for name in each[0]}

    def held_out_error(self) -> float | None:
        """Compute the reconstruction error of held-out images, if there are any."""
        if self.cache.held_out is None:
            return None
        x = self.cache.held_out_inputs(self.layer)
        each = [measures.lost_share(x, experts.reconstruct(x)) for experts in self.starts.values()]
        return sum(each) / len(each)

    def _metrics_of(self, experts: CapsuleExperts, x: Tensor) -> dict[str, float]:
        """Compute the `metrics` of one start."""
        error = measures.lost_share(x, experts.reconstruct(x))
        firing = experts.firing_probability(x).mean()
        winners, experts.winners = experts.winners, self.final_winners
        rank = measures.effective_rank(experts(x).flatten(1).to(self.cache.statistics_device))
        experts.winners = winners
        return {
            "reconstruction_error": error,
            "firing": firing.item(),
            "effective_rank": rank,
        }

    def state(self) -> dict[str, Tensor]:
        """Return the starts that are not the layer of the network, and all choices so far.

        These determine which starts are left, and whether they were recombined.
        """
        weights = {
            f"start {number}.{name}": tensor
            for number, experts in self.starts.items()
            if experts is not self.experts
            for name, tensor in experts.state_dict().items()
        }
        compared = {
            f"halving {number}.{name}": torch.tensor(values, dtype=torch.float64)
            for number, comparison in enumerate(self.halvings, start=1)
            for name, values in (("step", comparison.step), *comparison.scores.items())
        }
        chosen = [
            [(*origin, stable) for origin, stable in zip(each.experts, each.stability, strict=True)]
            for each in self.recombinations
        ]
        recombined = {"recombinations": torch.tensor(chosen, dtype=torch.float64)} if chosen else {}
        return {**weights, **compared, **recombined}

    def load_state(self, state: Mapping[str, Tensor], source: Path) -> None:
        """Drop or recombine the starts as they were, and restore those that are left."""
        if not self.has_state:
            super().load_state(state, source)
        elif state:
            for number in range(1, self.options.halvings + 1):
                if f"halving {number}.step" in state:
                    self._halve(self._load_comparison(f"halving {number}", state, source))
            if "recombinations" in state:
                self._recombine(self._load_recombinations(state, source))
            weights = {name: each for name, each in self.state().items() if "start" in name}
            load_weights(weights, state, source, owner=self.name)

    def _load_recombinations(
        self, state: Mapping[str, Tensor], source: Path
    ) -> list[Recombination]:
        """Read which experts were recombined."""
        sizes = self.options.recombinations, self.experts.out_capsules, 3
        chosen = torch.zeros(sizes, dtype=torch.float64)
        load_weights({"recombinations": chosen}, state, source, owner=self.name)
        start, expert = chosen[..., 0], chosen[..., 1]
        known = (start >= 1) & (start <= len(self.starts)) & (expert >= 0) & (expert < sizes[1])
        if not known.all():
            raise ModelError(
                f"{source} is damaged: recombinations has experts that {self.name} does not have"
            )
        return self._recombinations_of(chosen)

    def _load_comparison(self, name: str, state: Mapping[str, Tensor], source: Path) -> Comparison:
        """Read a comparison of the starts that are left."""
        step = torch.zeros((), dtype=torch.float64)
        scores = {
            criterion: torch.zeros(len(self.starts), dtype=torch.float64)
            for criterion in CRITERIA
            if f"{name}.{criterion}" in state or criterion == self.options.criterion
        }
        expected = {f"{name}.{criterion}": each for criterion, each in scores.items()}
        load_weights({f"{name}.step": step, **expected}, state, source, owner=self.name)
        found = {criterion: each.tolist() for criterion, each in scores.items()}
        return Comparison(int(step), list(self.starts), found)


def _log_odds(experts: CapsuleExperts, x: Tensor, views: int, device: torch.device) -> Tensor:
    """Compute the log-odds of experts, of the views (B·views, I, K) of images: → (B, views, J)."""
    # The balance is a part of the log-odds once it is folded into the weights.
    log_odds = (F.log_odds(experts.route(x).preactivation) + experts.balance).to(device)
    by_image: Tensor = log_odds.unflatten(0, (-1, views))
    return by_image


def _score(
    experts: CapsuleExperts, x: Tensor, views: int, device: torch.device
) -> dict[Criterion, float]:
    """Score experts by all criteria, on the views (B·views, I, K) of images."""
    log_odds = _log_odds(experts, x, views, device)
    first = x.unflatten(0, (-1, views))[:, 0].contiguous()  # the images themselves
    scores: dict[Criterion, float] = {
        "margin": measures.margin(log_odds[:, 0]),
        "reconstruction": measures.reconstruction(first, experts.reconstruct(first)),
        "energy": measures.energy(experts.free_energy(first).to(device)),
    }
    if views > 1:
        scores["agreement"] = measures.agreement(log_odds)
    return scores


class DecoderTrainer(StageTrainer):
    """Stage 3: a capsule decoder learns to reconstruct the inputs of an encoder layer."""

    module: CapsuleDecoder
    options: DecoderStage

    def __init__(self, layer: int, options: DecoderStage, cache: FeatureCache) -> None:
        super().__init__(cache)
        self.name, self.options, self.layer = f"decoder {layer + 1}", options, layer
        self.module = cast("CapsuleDecoder", cache.network.decoders[layer])
        self.encoder = cast("CapsuleExperts", cache.network.encoders[layer])

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Compute the capsules and their codes."""
        self.cache.compute_codes(self.layer + 1)
        if fresh:
            _reset_parameters(self.module, self.options.init_std, generator)

    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""
        return all(map(self.cache.has_inputs_on_device, (self.layer, self.layer + 1)))

    def work(self, batch_size: int) -> float:  # noqa: ARG002 (the same for every size)
        """Estimate the multiplications of the routing."""
        return ROUTING_WORK * self.module.weight.numel()

    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the loss of the decoder's learning rule.

        The paper says of the data z_i that they are "fixed by the W's". They are the capsules that
        W encodes or, with the target "reconstruction", Σ_j c_ij W_ijᵀ y_j.
        """
        x = self.cache.inputs(self.layer, indices)
        if self.options.target == "reconstruction":
            with torch.no_grad():
                x = self.encoder.reconstruct(x)
        y = self.cache.codes(self.layer + 1, indices)
        y = _mask_to_strongest(y, self.options.single_expert_share, random)
        return self.module.contrastive_divergence(y, x)

    def metrics(self) -> dict[str, float]:
        """Compute the fraction of the capsules' variance, before squashing, that is lost."""
        indices = self.cache.probe_indices()
        x, y = self.cache.inputs(self.layer, indices), self.cache.codes(self.layer + 1, indices)
        return {"reconstruction_error": self._error(x, y)}

    def held_out_error(self) -> float | None:
        """Compute the reconstruction error of held-out images, if there are any."""
        if self.cache.held_out is None:
            return None
        return self._error(*map(self.cache.held_out_inputs, (self.layer, self.layer + 1)))

    def _error(self, x: Tensor, y: Tensor) -> float:
        z = F.unsquash(x)
        return ((F.unsquash(self.module(y)) - z).square().sum() / _variance(z)).item()


class PixelDecoderTrainer(StageTrainer):
    """Stage 4: the pixel decoder and the lowest capsule decoder learn to reconstruct images."""

    options: PixelDecoderStage

    has_convolutions = True

    def __init__(
        self,
        options: PixelDecoderStage,
        pixel_decoder: PixelDecoder,
        multi_scale: float,
        cache: FeatureCache,
    ) -> None:
        super().__init__(cache)
        self.multi_scale = multi_scale
        self.name, self.options, self.pixel_decoder = "pixel decoder", options, pixel_decoder
        decoders = cast("list[CapsuleDecoder]", list(cache.network.decoders))
        self.lowest, *self.higher = decoders
        self.module = nn.ModuleList([pixel_decoder, self.lowest])
        self.top = len(decoders)

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:  # noqa: ARG002 (nothing is drawn)
        """Compute the codes; a fresh pixel decoder starts with the filters of the autoencoder."""
        self.cache.compute_codes(self.top)
        if fresh:
            self.pixel_decoder.copy_from(self.cache.network.autoencoder)
            self.pixel_decoder.start_border(self.cache.images(self.cache.probe_indices()).mean(0))

    def data_on_device(self) -> bool:
        """Return whether all inputs of the stage are in the memory of the device."""
        return self.cache.has_images_on_device() and self.cache.has_inputs_on_device(self.top)

    def work(self, batch_size: int) -> float:  # noqa: ARG002 (the same for every size)
        """Estimate the multiplications of the routing and of the filters."""
        filters = 3 * _convolution_work(self.cache.network)
        return filters + ROUTING_WORK * self.lowest.weight.numel()

    def loss(self, indices: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the absolute error of the pixels, plus a small multiple of their cross-entropy.

        For a pixel that the code leaves uncertain, the absolute error is smallest at the median,
        which is sharp, and the cross-entropy at the mean, which is blurred. But the absolute error
        has almost no gradient at a pixel that is far off, which would never recover; a little
        cross-entropy gives it one.
        """
        y = self.cache.codes(self.top, indices)
        y = _mask_to_strongest(y, self.options.single_expert_share, random)
        logits, images = self._logits(y), self.cache.images(indices)
        loss = pixels.pixel_loss(logits, images, self.options.cross_entropy)
        if self.multi_scale:
            distance = F.laplacian_distance(torch.sigmoid(logits), images)
            loss = loss + self.multi_scale * distance
        return loss

    def metrics(self) -> dict[str, float]:
        """Compute the fraction of the images' variance that is lost between images and codes."""
        indices = self.cache.probe_indices()
        error = self._error(self.cache.images(indices), self.cache.codes(self.top, indices))
        return {"reconstruction_error": error}

    def held_out_error(self) -> float | None:
        """Compute the reconstruction error of held-out images, if there are any."""
        if self.cache.held_out is None:
            return None
        return self._error(self.cache.held_out, self.cache.held_out_inputs(self.top))

    def _error(self, images: Tensor, y: Tensor) -> float:
        error = torch.sigmoid(self._logits(y)) - images
        return (error.square().sum() / _variance(images)).item()

    def _logits(self, y: Tensor) -> Tensor:
        """Decode codes, with the routing held fixed as in the decoder's rule: → (B, C, H, W)."""
        with torch.no_grad():
            for decoder in reversed(self.higher):
                y = decoder(y)
        z = self.lowest.held_preactivation(y)
        activations = self.cache.network.preprocessing.inverse_transform(z)
        with self.cache.autocast():
            return self.cache.network.logits(activations).float()


def make_stages(config: Config, cache: FeatureCache) -> list[StageTrainer]:
    """Return the stages of a run, in the order of `poecaps.training.config.stage_options`."""
    layers = range(len(cache.network.encoders))
    stages: list[StageTrainer] = [AutoencoderTrainer(config.autoencoder, config.multi_scale, cache)]
    if cache.network.density is not None:
        stages.append(DensityTrainer(config.density, cache.network.density, config.seed, cache))
    stages += [EncoderTrainer(layer, config.encoder, config.seed, cache) for layer in layers]
    stages += [DecoderTrainer(layer, config.decoder, cache) for layer in layers]
    if cache.network.pixel_decoder is not None:
        pixel_decoder = cache.network.pixel_decoder
        stages.append(
            PixelDecoderTrainer(config.pixel_decoder, pixel_decoder, config.multi_scale, cache)
        )
    return stages


def _convolution_work(network: CapsuleNetwork) -> float:
    """Count the multiplications of the convolutions of the encoder, for one image."""
    autoencoder, (_, *sides) = network.autoencoder, network.architecture.image_shape
    rows, columns = autoencoder.grid((sides[0], sides[1]))
    height, width = autoencoder.stem.size((sides[0], sides[1]))
    halved: float = sum(
        weight.numel() * height * width * 4.0**above
        for above, weight in enumerate(reversed(list(autoencoder.stem.weights)))
    )
    inner = (height - autoencoder.kernel_size + 1) * (width - autoencoder.kernel_size + 1)
    first = autoencoder.conv1_weight.numel() * inner
    return halved + first + autoencoder.conv2_weight.numel() * rows * columns


def factor_for_firing(norm: Tensor, target: float) -> float:
    """Find the factor s for which the mean of (s‖z‖)²/(1+(s‖z‖)²) is the target firing probability.

    Parameters
    ----------
    norm : (N,)
        The norms ‖z‖.
    target
        Between 0 and 1.

    Returns
    -------
    float
        s, or 1 if all norms are 0.
    """
    if not norm.any():
        return 1.0
    low, high = -40.0, 40.0  # bounds of log s; the mean grows with s, so bisection finds it
    for _ in range(60):
        middle = (low + high) / 2
        square = (norm.double() * math.exp(middle)).square()
        if (square / (1 + square)).mean().item() < target:
            low = middle
        else:
            high = middle
    return math.exp(low)


def _reset_parameters(
    layer: CapsuleExperts | CapsuleDecoder | CapsuleDensity, std: float, generator: torch.Generator
) -> None:
    """Draw initial weights on the CPU, so that they are the same for every device."""
    device = layer.weight.device
    layer.cpu()
    layer.reset_parameters(std=std, generator=generator)
    layer.to(device)


def _mask_to_strongest(y: Tensor, share: float, random: RandomNumbers) -> Tensor:
    """Set all but the strongest expert to 0 in a random share of the codes (B, J, D)."""
    if share == 0:
        return y
    return pixels.mask_to_strongest(y, random.uniform(len(y), 1, 1), share)


def _variance(points: Tensor) -> Tensor:
    """Return the sum of the squared distances from the mean, above 0 even for equal points."""
    return (points - points.mean(0)).square().sum().clamp(min=1e-12)
