"""Train common baselines and evaluate them with the protocol that evaluates poecaps.

`python -m benchmarks.baselines --data mnist --path FOLDER --json FILE` trains each baseline and
prints one table.

Every code has 320 numbers, like the 20 experts of 16 dimensions, unless stated otherwise below.
Every model that is trained by passes over the images makes as many passes as all stages of the
preset `default` together; the training time is recorded. Samples from the whole code have the
domain name "joint" for every model:

pixels            the images themselves, the starting point of the linear probe
k-means           20 clusters of the images, as many as experts; the code is the cluster as a
                  one-hot vector of 20 numbers; no samples
pca               the leading principal components; samples from the density that poecaps fits to
                  its codes, a mixture of low-rank Gaussians
bernoulli-rbm     scikit-learn's BernoulliRBM; the code is P(h | v); samples by long Gibbs chains
                  that start from random hidden units, and a second time (domain "from images") from
                  training images, which favours a model whose chains do not mix
gaussian-rbm      a centred Gaussian-Bernoulli RBM with persistent chains; code and samples likewise
autoencoder       the convolutional autoencoder of poecaps without capsules; the code is the leading
                  principal components of its features; samples from the same density as for pca,
                  decoded. This baseline shows what capsules add: it has the same filters, the same
                  code size and the same density
autoencoder-all   the same autoencoder; the code is all its features, 4,608 for 28×28 pixels; no
                  samples
vae               a convolutional variational autoencoder; the code is the posterior mean; samples
                  from its prior, and a second time (domain "density") from the same density as for
                  pca, fitted to its codes

The specialisation is also computed for the hidden units of the RBMs. With 320 units instead of 20
experts it is not directly comparable, whereas that of the 20 clusters is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from benchmarks import machine, variants
from poecaps import Architecture, CapsuleNetwork, ConvAutoencoder
from poecaps._modules import in_batches
from poecaps.code_density import PCAMixture
from poecaps.data import ImageSet
from poecaps.evaluation import (
    CLASSIFIERS,
    NetworkEncoder,
    comparison_table,
    evaluate,
    load_classifier,
)
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from poecaps.evaluation import Encoder, Evaluation, SampleMetrics

CODE_SIZE = 320
BATCH_SIZE = 128


@dataclass(frozen=True)
class Budget:
    """Training effort, sampling effort, seed and device of a baseline."""

    epochs: int
    """Passes over the training images."""
    gibbs: int
    """Steps of a Gibbs chain before its image is used."""
    seed: int
    device: torch.device
    filters: int = Architecture().features
    """Of each convolution of the autoencoder of poecaps."""


def default_epochs() -> int:
    """Return the number of passes over the images in all stages of the preset `default`."""
    config = PRESETS["default"]()
    return sum(
        stage.epochs
        for stage in (config.autoencoder, config.encoder, config.decoder, config.pixel_decoder)
    )


class SingleDomainSampler:
    """A model with a single domain of samples, that of whole codes."""

    domains = ("joint",)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images: (count, C, H, W), from 0 to 1."""
        if domain != "joint":
            raise ValueError(
                f"domain must be 'joint', the only domain of this baseline, but is {domain!r}"
            )
        return self.draw(count, generator)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw images: (count, C, H, W), from 0 to 1."""
        raise NotImplementedError


# Pixels and principal components


class Pixels:
    """The images themselves."""

    name = "pixels"

    def encode(self, images: Tensor) -> Tensor:
        """Flatten the pixels: (B, C, H, W) → (B, V)."""
        return images.flatten(1)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return the images unchanged."""
        return images


class KMeansClusters:
    """K-means clusters of the images, as many as experts; the code is one-hot."""

    name = "k-means"
    COUNT = 20

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        from sklearn.cluster import KMeans

        clusters = KMeans(self.COUNT, n_init=1, random_state=budget.seed).fit(
            data.batch(slice(None)).flatten(1).numpy()
        )
        self.centres = torch.from_numpy(clusters.cluster_centers_).float().to(budget.device)

    def encode(self, images: Tensor) -> Tensor:
        """Encode the nearest centre as a one-hot vector: (B, C, H, W) → (B, 20)."""
        nearest = torch.cdist(images.flatten(1), self.centres).argmin(1)
        return nn.functional.one_hot(nearest, self.COUNT).float()

    def firing(self, codes: Tensor) -> Tensor:
        """Return the codes: the cluster of an image is the only one that fires."""
        return codes

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return the nearest centre."""
        return (self.encode(images) @ self.centres).view_as(images)


class PrincipalComponents:
    """The directions of largest variance of rows (N, V), at most `size` directions."""

    def __init__(self, batches: Callable[[], Iterator[Tensor]], size: int = CODE_SIZE) -> None:
        count, first, second = 0, torch.zeros(()), torch.zeros(())
        for rows in batches():
            count += len(rows)
            first = rows.double().sum(0) + first.to(rows.device)
        self.mean = (first / count).float()
        for rows in batches():
            centred = (rows - self.mean).double()
            second = centred.T @ centred + second.to(rows.device)
        self.axes = torch.linalg.eigh(second / count)[1].flip(1)[:, :size].float()

    def transform(self, rows: Tensor) -> Tensor:
        """Project rows on the components: (N, V) → (N, S)."""
        return (rows - self.mean) @ self.axes

    def inverse_transform(self, codes: Tensor) -> Tensor:
        """Map codes back to rows: (N, S) → (N, V)."""
        return codes @ self.axes.T + self.mean


class CodeMixture:
    """The mixture that poecaps fits to whole codes, fitted to codes (N, S) of any model."""

    def __init__(self, codes: Tensor, seed: int) -> None:
        self.density = PCAMixture(codes.shape[1], Architecture().joint_components).to(codes.device)
        self.density.fit(codes, torch.Generator().manual_seed(seed))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes: (count, S)."""
        return self.density.sample(count, generator)


class PCA(SingleDomainSampler):
    """Principal components of the pixels, with a density."""

    name = "pca"

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        self.shape = data.shape
        self.components = PrincipalComponents(
            lambda: (batch.flatten(1) for batch in _batches(data, budget))
        )
        self.density = CodeMixture(in_batches(self.encode, _batches(data, budget)), budget.seed)

    def encode(self, images: Tensor) -> Tensor:
        """Project the pixels: (B, C, H, W) → (B, S)."""
        return self.components.transform(images.flatten(1))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Project and map back."""
        return self._decode(self.encode(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes from the density and map them to images."""
        return self._decode(self.density.sample(count, generator))

    def _decode(self, codes: Tensor) -> Tensor:
        return self.components.inverse_transform(codes).clamp(0, 1).view(-1, *self.shape)


# Restricted Boltzmann machines


class RBM:
    """A restricted Boltzmann machine: P(h | v) and P(v | h).

    Two kinds of Gibbs chains draw images. Chains of the domain "joint" start from random hidden
    units and sample the model; chains of the domain "from images" start from training images and
    favour a model whose chains do not mix.
    """

    domains = ("joint", "from images")

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        self.data, self.gibbs_steps, self.device = data, budget.gibbs, budget.device

    def hidden_probability(self, v: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, V) → (B, S)."""
        raise NotImplementedError

    def visible_mean(self, h: Tensor) -> Tensor:
        """Compute E[v | h]: (B, S) → (B, V)."""
        raise NotImplementedError

    def sample_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Sample v given h: (B, S) → (B, V)."""
        raise NotImplementedError

    def random_hidden(self, count: int, generator: torch.Generator) -> Tensor:
        """Sample independent hidden units: (count, S)."""
        raise NotImplementedError

    def encode(self, images: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, C, H, W) → (B, S)."""
        return self.hidden_probability(images.flatten(1))

    def firing(self, codes: Tensor) -> Tensor:
        """Return the codes, which are the firing probabilities of the units."""
        return codes

    def reconstruct(self, images: Tensor) -> Tensor:
        """Compute E[v | P(h | v)]."""
        return self.visible_mean(self.encode(images)).clamp(0, 1).view_as(images)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Run Gibbs chains and return E[v | h] at their ends."""
        if domain == "joint":
            h = self.random_hidden(count, generator)
        else:
            chosen = torch.randint(
                len(self.data), (count,), generator=generator, device=self.device
            ).cpu()
            images = self.data.batch(chosen).to(self.device)
            h = torch.bernoulli(self.encode(images), generator=generator)
        for _ in range(self.gibbs_steps):
            h = torch.bernoulli(
                self.hidden_probability(self.sample_visible(h, generator)), generator=generator
            )
        return self.visible_mean(h).clamp(0, 1).view(-1, *self.data.shape)


@dataclass(frozen=True, eq=False)
class FittedRBM:
    """Result of `fit_bernoulli_rbm`."""

    weight: np.ndarray
    visible: np.ndarray
    hidden: np.ndarray
    seconds: float


def fit_bernoulli_rbm(data: ImageSet, budget: Budget) -> FittedRBM:
    """Train scikit-learn's BernoulliRBM on one core; its products are too small for several."""
    from sklearn.neural_network import BernoulliRBM as SklearnRBM
    from threadpoolctl import threadpool_limits

    started = time.perf_counter()
    rbm = SklearnRBM(
        CODE_SIZE, learning_rate=0.05, batch_size=50, n_iter=budget.epochs, random_state=budget.seed
    )
    with threadpool_limits(1):
        rbm.fit(data.batch(slice(None)).flatten(1).numpy())
    fitted = rbm.components_, rbm.intercept_visible_, rbm.intercept_hidden_
    return FittedRBM(*fitted, seconds=time.perf_counter() - started)


class BernoulliRBM(RBM):
    """scikit-learn's BernoulliRBM, trained on the CPU with persistent chains."""

    name = "bernoulli-rbm"

    def __init__(self, data: ImageSet, budget: Budget, fitted: FittedRBM | None = None) -> None:
        super().__init__(data, budget)
        fitted = fitted or fit_bernoulli_rbm(data, budget)
        self.seconds = fitted.seconds
        self.weight, self.visible, self.hidden = (
            torch.from_numpy(np.asarray(values, np.float32)).to(budget.device)
            for values in (fitted.weight, fitted.visible, fitted.hidden)
        )

    def hidden_probability(self, v: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, V) → (B, S)."""
        return torch.sigmoid(v @ self.weight.T + self.hidden)

    def visible_mean(self, h: Tensor) -> Tensor:
        """Compute P(v = 1 | h): (B, S) → (B, V)."""
        return torch.sigmoid(h @ self.weight + self.visible)

    def sample_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Sample binary pixels: (B, S) → (B, V)."""
        return torch.bernoulli(self.visible_mean(h), generator=generator)

    def random_hidden(self, count: int, generator: torch.Generator) -> Tensor:
        """Sample hidden units with probability ½: (count, S)."""
        return torch.rand(count, CODE_SIZE, generator=generator, device=self.device).round()


class GaussianRBM(RBM):
    """A centred Gaussian-Bernoulli RBM with one variance per pixel, trained with persistent chains.

    The energy is::

        E(v, h) = Σ_i (v_i − b_i)²/2σ_i² − Σ_ij (v_i − μ_i)/σ_i² W_ij (h_j − λ_j)
                  − Σ_j c_j (h_j − λ_j)

    so that P(h = 1 | v) = sigmoid(c + Wᵀ(v − μ)/σ²) and v | h ~ N(b + W(h − λ), σ²). μ is the mean
    training image; λ is a running mean of the hidden units on data. Centring makes the gradient of
    W independent of the biases (Melchior, Fischer and Wiskott 2016). The variances are learned too,
    with a lower bound: the variance of a pixel that is always black would otherwise go to 0 and
    freeze the chains.
    """

    name = "gaussian-rbm"
    CHAINS = 512
    GIBBS_STEPS = 5  # Gibbs steps of each chain per learning step
    LEARNING_RATE = 5e-3
    WEIGHT_DECAY = 1e-4  # of W
    MIN_VARIANCE = 0.05  # lower bound of σ², for pixels in [0, 1]
    OFFSET_RATE = 0.01  # rate of the running mean λ

    @torch.no_grad()
    def __init__(self, data: ImageSet, budget: Budget) -> None:
        super().__init__(data, budget)
        device, pixels = budget.device, math.prod(data.shape)
        generator = torch.Generator(device).manual_seed(budget.seed)
        sums = torch.zeros(2, pixels, dtype=torch.float64, device=device)
        for images in _batches(data, budget):
            v = images.flatten(1).double()
            sums += torch.stack([v.sum(0), v.square().sum(0)])
        self.mean = (sums[0] / len(data)).float()
        variance = (sums[1] / len(data)).float() - self.mean.square()
        self.weight = nn.Parameter(
            0.01 * torch.randn(pixels, CODE_SIZE, generator=generator, device=device)
        )
        self.visible = nn.Parameter(self.mean.clone())
        self.hidden = nn.Parameter(torch.zeros(CODE_SIZE, device=device))
        self.log_variance = nn.Parameter(variance.clamp(min=self.MIN_VARIANCE).log())
        self.offset = torch.full((CODE_SIZE,), 0.5, device=device)

        parameters = [self.weight, self.visible, self.hidden, self.log_variance]
        chains = torch.bernoulli(self.offset.expand(self.CHAINS, -1), generator=generator)
        optimizer, schedule = make_optimizer(parameters, self.LEARNING_RATE, _steps(data, budget))
        for images in _shuffled(data, budget):
            v = images.flatten(1)
            h = self.hidden_probability(v)
            self.update_offset(h.mean(0))
            for _ in range(self.GIBBS_STEPS):
                v_chain = self.sample_visible(chains, generator)
                h_chain = self.hidden_probability(v_chain)
                chains = torch.bernoulli(h_chain, generator=generator)
            positive, negative = self.energy_gradient(v, h), self.energy_gradient(v_chain, h_chain)
            for parameter, data_term, model_term in zip(
                parameters, positive, negative, strict=True
            ):
                decay = self.WEIGHT_DECAY * parameter if parameter is self.weight else 0
                parameter.grad = model_term - data_term + decay
            optimizer.step()
            schedule.step()
            self.log_variance.clamp_(min=math.log(self.MIN_VARIANCE), max=0)

    def energy_gradient(self, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the mean of −∂E/∂(W, b, c, log σ²) over states v (B, V) and h (B, S)."""
        precision = (-self.log_variance).exp()
        scaled, centred = (v - self.mean) * precision, h - self.offset
        residual = v - self.visible
        return (
            scaled.T @ centred / len(v),
            (residual * precision).mean(0),
            centred.mean(0),
            (residual.square() * precision / 2 - scaled * (centred @ self.weight.T)).mean(0),
        )

    def update_offset(self, mean: Tensor) -> None:
        """Move λ towards the mean of the hidden units; the distribution does not change."""
        step = self.OFFSET_RATE * (mean - self.offset)
        self.offset += step
        self.visible.add_(self.weight @ step)

    def hidden_probability(self, v: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, V) → (B, S)."""
        return torch.sigmoid(
            (v - self.mean) * (-self.log_variance).exp() @ self.weight + self.hidden
        )

    def visible_mean(self, h: Tensor) -> Tensor:
        """Compute E[v | h]: (B, S) → (B, V)."""
        return (h - self.offset) @ self.weight.T + self.visible

    def sample_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Sample v ~ N(b + W(h − λ), σ²): (B, S) → (B, V)."""
        mean = self.visible_mean(h)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return mean + noise * (self.log_variance / 2).exp()

    def random_hidden(self, count: int, generator: torch.Generator) -> Tensor:
        """Sample hidden units with their mean probability on data: (count, S)."""
        return torch.bernoulli(self.offset.clamp(0, 1).expand(count, -1), generator=generator)


# Autoencoders


class Autoencoder:
    """The convolutional autoencoder of poecaps without capsules; the code is all its features."""

    name = "autoencoder-all"

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(budget.seed)
        shape = Architecture()
        self.model = ConvAutoencoder(
            data.shape[0],
            features=budget.filters,
            kernel_size=shape.kernel_size,
            dropout=shape.dropout,
            generator=generator,
        ).to(budget.device)
        self.size = data.shape[1:]
        torch.manual_seed(budget.seed)
        rate = PRESETS["default"]().autoencoder.learning_rate
        optimizer, schedule = make_optimizer(
            list(self.model.parameters()), rate, _steps(data, budget)
        )
        half = budget.device.type == "cuda"
        for images in _shuffled(data, budget):
            with torch.autocast(budget.device.type, torch.bfloat16, enabled=half):
                loss = self.model.loss(images)
            take_step(loss, optimizer, schedule)
        self.model.eval()
        self.seconds = time.perf_counter() - started

    def encode(self, images: Tensor) -> Tensor:
        """Flatten the features: (B, C, H, W) → (B, S)."""
        return self.model.encode(images).flatten(1)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode."""
        return self.model(images)


class AutoencoderPCA(SingleDomainSampler):
    """The same autoencoder; the code is principal components of its features, with a density."""

    name = "autoencoder"

    def __init__(self, data: ImageSet, budget: Budget, features: Autoencoder | None = None) -> None:
        self.features = features or Autoencoder(data, budget)
        started = time.perf_counter()
        with torch.no_grad():
            self.components = PrincipalComponents(
                lambda: (self.features.encode(batch) for batch in _batches(data, budget))
            )
            self.density = CodeMixture(in_batches(self.encode, _batches(data, budget)), budget.seed)
        self.seconds = self.features.seconds + time.perf_counter() - started

    def encode(self, images: Tensor) -> Tensor:
        """Project the features: (B, C, H, W) → (B, S)."""
        return self.components.transform(self.features.encode(images))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Project the features, map back and decode."""
        return self._decode(self.encode(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes from the density, map them to features and decode."""
        return self._decode(self.density.sample(count, generator))

    def _decode(self, codes: Tensor) -> Tensor:
        height, width = self.features.size
        rows, columns = self.features.model.grid((height, width))
        features = self.components.inverse_transform(codes).view(len(codes), -1, rows, columns)
        return self.features.model.decode(features, (height, width))


class VAE(nn.Module):
    """A convolutional VAE: standard normal prior, Bernoulli pixels (Kingma and Welling 2014).

    The weight of the divergence from the prior is increased gradually (Sønderby et al. 2016) and
    the posterior starts narrow; otherwise the decoder learns early to ignore the code because of
    the noise in its 320 numbers. A small batch size gives more steps for the same number of passes.
    """

    name = "vae"
    domains = ("joint", "density")
    LEARNING_RATE = 2e-3
    BATCH_SIZE = 32
    WARM_UP = 0.3  # share of the steps in which the weight of the divergence rises to 1
    INITIAL_LOG_VARIANCE = -4.0  # of the posterior

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        super().__init__()
        torch.manual_seed(budget.seed)
        channels, self.height, self.width = data.shape
        grid = math.ceil(self.height / 4), math.ceil(self.width / 4)
        last = nn.Linear(512, 2 * CODE_SIZE)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * grid[0] * grid[1], 512),
            nn.ReLU(),
            last,
        )
        self.decoder = nn.Sequential(
            nn.Linear(CODE_SIZE, 512),
            nn.ReLU(),
            nn.Linear(512, 64 * grid[0] * grid[1]),
            nn.ReLU(),
            nn.Unflatten(1, (64, *grid)),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1),
        )
        with torch.no_grad():
            last.bias[CODE_SIZE:].fill_(self.INITIAL_LOG_VARIANCE)
        self.to(budget.device)
        steps = _steps(data, budget, self.BATCH_SIZE)
        optimizer, schedule = make_optimizer(list(self.parameters()), self.LEARNING_RATE, steps)
        for step, images in enumerate(_shuffled(data, budget, self.BATCH_SIZE)):
            take_step(
                self.loss(images, min(1.0, step / (self.WARM_UP * steps))), optimizer, schedule
            )
        self.eval()
        with torch.no_grad():
            self.density = CodeMixture(in_batches(self.encode, _batches(data, budget)), budget.seed)

    def loss(self, images: Tensor, divergence_weight: float = 1.0) -> Tensor:
        """Compute the negative ELBO in nats per image, with a weighted divergence."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        pixels = nn.functional.binary_cross_entropy_with_logits(
            self._logits(codes), images, reduction="sum"
        )
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return (pixels + divergence_weight * divergence) / len(images)

    def encode(self, images: Tensor) -> Tensor:
        """Compute the posterior mean: (B, C, H, W) → (B, S)."""
        return self.encoder(images).chunk(2, dim=1)[0]

    def reconstruct(self, images: Tensor) -> Tensor:
        """Decode the posterior mean."""
        return torch.sigmoid(self._logits(self.encode(images)))

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Decode draws from the prior or from the density: (count, C, H, W), from 0 to 1."""
        if domain == "joint":
            codes = torch.randn(count, CODE_SIZE, generator=generator, device=generator.device)
        else:
            codes = self.density.sample(count, generator)
        return torch.sigmoid(self._logits(codes))

    def _logits(self, codes: Tensor) -> Tensor:
        return self.decoder(codes)[:, :, : self.height, : self.width]


# Shared by the baselines


def _batches(data: ImageSet, budget: Budget) -> Iterator[Tensor]:
    return (batch.to(budget.device) for batch in data.batches(500))


def _shuffled(data: ImageSet, budget: Budget, batch_size: int = BATCH_SIZE) -> Iterator[Tensor]:
    """Yield the shuffled batches of all epochs."""
    generator = torch.Generator().manual_seed(budget.seed)
    for _ in range(budget.epochs):
        for images in data.batches(min(batch_size, len(data)), generator=generator, drop_last=True):
            yield images.to(budget.device)


def make_optimizer(
    parameters: list[nn.Parameter], learning_rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Create Adam with a cosine schedule down to 1 % of the rate, as in training poecaps."""
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, learning_rate / 100)
    return optimizer, schedule


def _steps(data: ImageSet, budget: Budget, batch_size: int = BATCH_SIZE) -> int:
    return budget.epochs * (len(data) // min(batch_size, len(data)))


def take_step(
    loss: Tensor, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Take a step of the optimizer and of its schedule."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()


BASELINES: dict[str, Callable[[ImageSet, Budget], Encoder]] = {
    "pixels": lambda *_: Pixels(),
    "k-means": KMeansClusters,
    "pca": PCA,
    "gaussian-rbm": GaussianRBM,
    "autoencoder": AutoencoderPCA,
    "autoencoder-all": Autoencoder,
    "vae": VAE,
    "bernoulli-rbm": BernoulliRBM,
}


def compare(
    names: Sequence[str],
    train: ImageSet,
    test: ImageSet,
    classifier: Any,
    budgets: Sequence[Budget],
    samples: int,
) -> Iterator[Evaluation]:
    """Train and evaluate baselines one after the other, each with every budget.

    scikit-learn's RBMs take minutes on one core; they are trained in parallel, in other processes.
    """
    autoencoders: dict[Budget, Autoencoder] = {}
    with ProcessPoolExecutor(len(budgets), multiprocessing.get_context("spawn")) as pool:
        fitted_rbms = {
            budget: pool.submit(fit_bernoulli_rbm, train, budget)
            for budget in budgets
            if "bernoulli-rbm" in names
        }
        for name, budget in itertools.product(names, budgets):
            if name == "pixels" and budget != budgets[0]:
                continue  # pixels do not depend on the seed
            started = time.perf_counter()
            encoder: Encoder
            if name == "bernoulli-rbm":
                encoder = BernoulliRBM(train, budget, fitted_rbms[budget].result())
            elif name.startswith("autoencoder"):
                features = autoencoders[budget] = autoencoders.get(budget) or Autoencoder(
                    train, budget
                )
                encoder = (
                    features
                    if name == "autoencoder-all"
                    else AutoencoderPCA(train, budget, features)
                )
            else:
                encoder = BASELINES[name](train, budget)
            trained = time.perf_counter()
            result = evaluate(
                encoder,
                train,
                test,
                classifier,
                seed=budget.seed,
                samples=samples,
                device=budget.device,
            )
            yield result.with_metadata(
                epochs=0 if name in ("pixels", "k-means", "pca") else budget.epochs,
                training_seconds=round(getattr(encoder, "seconds", trained - started), 3),
                evaluation_seconds=round(time.perf_counter() - trained, 1),
                gibbs_steps=budget.gibbs if isinstance(encoder, RBM) else 0,
            )


CODE_METRICS: dict[str, Callable[[Evaluation], float | None]] = {
    "linear probe": lambda result: result.probe.test_accuracy if result.probe else None,
    "relative reconstruction error": (
        lambda result: result.reconstruction.relative if result.reconstruction else None
    ),
    "effective rank": lambda result: result.effective_rank,
}
SAMPLE_METRICS: dict[str, Callable[[SampleMetrics], float | None]] = {
    "Fréchet distance": lambda samples: samples.frechet.distance if samples.frechet else None,
    "recognisable": (
        lambda samples: samples.recognisability.share if samples.recognisability else None
    ),
    "effective classes": (
        lambda samples: samples.diversity.effective_classes if samples.diversity else None
    ),
}


def seed_statistics(results: Sequence[Evaluation]) -> str:
    """Format mean ± standard deviation over seeds, for each model with several seeds."""
    lines = []
    for name in dict.fromkeys(result.name for result in results):
        same = [result for result in results if result.name == name]
        if len(same) == 1:
            continue
        values = {
            label: [metric(result) for result in same] for label, metric in CODE_METRICS.items()
        }
        for domain, (label, sample_metric) in itertools.product(
            same[0].domains, SAMPLE_METRICS.items()
        ):
            values[f"{domain}: {label}"] = [sample_metric(each.domains[domain]) for each in same]
        lines.append(f"{name}, mean ± standard deviation over {len(same)} seeds")
        for label, numbers in values.items():
            known = [number for number in numbers if number is not None]
            if len(known) == len(numbers):
                lines.append(f"  {label:34}{np.mean(known):10.4g} ± {np.std(known, ddof=1):.2g}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="mnist-sample", help="name or path of a dataset (default: mnist-sample)"
    )
    parser.add_argument("--path", help="folder of the full mnist or fashion-mnist")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default: a GPU if available)",
    )
    parser.add_argument(
        "--only", help=f"baselines, comma-separated: {','.join(BASELINES)} (default: all)"
    )
    parser.add_argument(
        "--network",
        type=Path,
        action="append",
        default=[],
        help="folder of a trained network to compare with; may be repeated",
    )
    parser.add_argument(
        "--epochs", type=int, help="passes over the images (default: those of the preset default)"
    )
    parser.add_argument(
        "--gibbs",
        type=int,
        default=1000,
        help="steps of a Gibbs chain before its image is used (default: 1000)",
    )
    parser.add_argument(
        "--samples", type=int, default=10_000, help="samples from each domain (default: 10000)"
    )
    parser.add_argument(
        "--limit", type=int, help="maximum number of training images, and of test images"
    )
    parser.add_argument("--seeds", default="0", help="seeds, comma-separated (default: 0)")
    variants.add_protocol(parser)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)

    names = options.only.split(",") if options.only else list(BASELINES)
    if unknown := [name for name in names if name not in BASELINES]:
        parser.error(
            f"--only must be a list of {', '.join(BASELINES)}, but contains {', '.join(unknown)}"
        )
    variants.check_protocol(parser, options)
    train, test = (limit(images, options.limit) for images in variants.load_images(options))
    has_classifier = options.data.removesuffix("-sample") in CLASSIFIERS
    classifier = load_classifier(options.data, options.device) if has_classifier else None
    epochs = options.epochs if options.epochs is not None else default_epochs()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    budgets = [Budget(epochs, options.gibbs, seed, torch.device(options.device)) for seed in seeds]

    results: list[Evaluation] = []
    for folder in options.network:
        encoder = NetworkEncoder(CapsuleNetwork.load(folder, options.device), folder.name)
        results.append(
            evaluate(
                encoder,
                train,
                test,
                classifier,
                seed=seeds[0],
                samples=options.samples,
                device=options.device,
            )
        )
    for result in compare(names, train, test, classifier, budgets, options.samples):
        results.append(result)
        print(
            f"{result.name}, seed {result.seed}: "
            f"trained in {result.metadata['training_seconds']} s, "
            f"evaluated in {result.metadata['evaluation_seconds']} s",
            flush=True,
        )
        # After each model, so that an interrupted run keeps its results.
        machine.write([json.loads(each.to_json()) for each in results], options.json)
    of_first_seed = [result for result in results if result.seed == seeds[0]]
    print(f"\n{comparison_table(of_first_seed)}\n\n{seed_statistics(results)}".rstrip())


def limit(data: ImageSet, count: int | None) -> ImageSet:
    """Return at most `count` images, evenly spaced because a dataset may be ordered."""
    if count is None or count >= len(data):
        return data
    chosen = np.linspace(0, len(data) - 1, count).round().astype(np.int64)
    labels = None if data.labels is None else data.labels[chosen]
    return ImageSet(data.images[chosen], labels, label_names=data.label_names, source=data.source)


if __name__ == "__main__":
    main()
