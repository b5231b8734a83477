"""What people use now, measured by the protocol that measures poecaps.

`python -m benchmarks.baselines --data mnist --path FOLDER --json FILE` trains each baseline and prints one table.

Every code has 320 numbers, as the 20 experts of 16 dimensions have, except where the name says otherwise. Every model
that is trained by passes over the images makes as many as the preset `default` makes in all its stages; the seconds
are recorded. Samples that use the whole code are called "joint" for all of them:

pixels            the images themselves; the linear probe's starting point
k-means           20 clusters of the images, as many as there are experts; code: which one, 20 numbers. No samples
pca               the leading principal components; samples from the density that poecaps fits to its codes, a mixture
                  of Gaussians of low rank
bernoulli-rbm     scikit-learn's BernoulliRBM; code: P(h | v); samples by long Gibbs chains, started from coins, and
                  once more from training images, which flatters a model whose chains do not mix
gaussian-rbm      a Gaussian-Bernoulli RBM, centred, with persistent chains; code and samples likewise
autoencoder       the convolutional autoencoder of poecaps without capsules; code: the leading principal components of
                  its features; samples from the same density as for pca, decoded. What poecaps adds is measured
                  against this: the same filters, as many numbers, the same density
autoencoder-all   the same autoencoder; code: all its features, 4,608 for 28×28 pixels. No samples
vae               a convolutional variational autoencoder; code: the mean of the posterior; samples from its prior, and
                  once more, "density", from the same density as for pca, fitted to its codes

The hidden units of the RBMs fire or not, so they are asked for their specialisation too; with 320 units in place of 20
experts that is not like for like, as it is with the clusters.
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

from poecaps import Architecture, CapsuleNetwork, ConvAutoencoder
from poecaps.code_density import PCAMixture
from poecaps.data import ImageSet, load
from poecaps.evaluation import CLASSIFIERS, NetworkEncoder, evaluate, load_classifier, side_by_side
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from poecaps.evaluation import Encoder, Evaluation

SIZE = 320  # numbers in a code
BATCH = 128


@dataclass(frozen=True)
class Budget:
    """What a baseline may spend."""

    epochs: int
    """Passes over the training images."""
    gibbs: int
    """Steps of a Gibbs chain before its image is taken."""
    seed: int
    device: torch.device


def default_epochs() -> int:
    """Count the passes that the preset `default` makes in all its stages."""
    config = PRESETS["default"]()
    return sum(
        stage.epochs
        for stage in (config.autoencoder, config.encoder, config.decoder, config.pixel_decoder)
    )


class Draws:
    """A model that draws images in one way, which uses the whole code."""

    domains = ("joint",)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Draw images: (count, C, H, W), from 0 to 1."""
        if domain != "joint":
            raise ValueError(
                f"domain must be 'joint', the only one a baseline has, but is {domain!r}"
            )
        return self.draw(count, generator)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw images in the way of the model."""
        raise NotImplementedError


# Pixels and principal components


class Pixels:
    """The images themselves."""

    name = "pixels"

    def encode(self, images: Tensor) -> Tensor:
        """Lay the pixels in a row."""
        return images.flatten(1)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return what was given."""
        return images


class Clusters:
    """As many clusters of the images as there are experts; code: 1 for the nearest, 0 for the others."""

    name = "k-means"
    COUNT = 20

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        from sklearn.cluster import KMeans

        found = KMeans(self.COUNT, n_init=1, random_state=budget.seed).fit(
            data.batch(slice(None)).flatten(1).numpy()
        )
        self.centres = torch.from_numpy(found.cluster_centers_).float().to(budget.device)

    def encode(self, images: Tensor) -> Tensor:
        """Find the nearest centre: (B, C, H, W) → (B, 20)."""
        nearest = torch.cdist(images.flatten(1), self.centres).argmin(1)
        return nn.functional.one_hot(nearest, self.COUNT).float()

    def firing(self, codes: Tensor) -> Tensor:
        """Return the code, which says which cluster it is."""
        return codes

    def reconstruct(self, images: Tensor) -> Tensor:
        """Return the nearest centre."""
        return (self.encode(images) @ self.centres).view_as(images)


class PrincipalComponents:
    """The directions of largest variance of rows (N, V), at most `size` of them."""

    def __init__(self, batches: Callable[[], Iterator[Tensor]], size: int = SIZE) -> None:
        count, first, second = 0, torch.zeros(()), torch.zeros(())
        for rows in batches():
            count += len(rows)
            first = rows.double().sum(0) + first.to(rows.device)
        self.mean = (first / count).float()
        for rows in batches():
            centred = (rows - self.mean).double()
            second = centred.T @ centred + second.to(rows.device)
        self.axes = torch.linalg.eigh(second / count)[1].flip(1)[:, :size].float()

    def down(self, rows: Tensor) -> Tensor:
        """(N, V) → (N, S)."""
        return (rows - self.mean) @ self.axes

    def up(self, codes: Tensor) -> Tensor:
        """(N, S) → (N, V)."""
        return codes @ self.axes.T + self.mean


class Density:
    """The mixture that poecaps fits to whole codes, for codes (N, S) of any kind."""

    def __init__(self, codes: Tensor, seed: int) -> None:
        self.density = PCAMixture(codes.shape[1], Architecture().joint_components).to(codes.device)
        self.density.fit(codes, torch.Generator().manual_seed(seed))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes: (count, S)."""
        return self.density.sample(count, generator)


class PCA(Draws):
    """Principal components of the pixels, and a density of them."""

    name = "pca"

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        self.shape = data.shape
        self.components = PrincipalComponents(
            lambda: (part.flatten(1) for part in _batches(data, budget))
        )
        self.density = Density(
            torch.cat([self.encode(part) for part in _batches(data, budget)]), budget.seed
        )

    def encode(self, images: Tensor) -> Tensor:
        """Project: (B, C, H, W) → (B, S)."""
        return self.components.down(images.flatten(1))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Project and go back."""
        return self._draw(self.encode(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes from the density and go back."""
        return self._draw(self.density.sample(count, generator))

    def _draw(self, codes: Tensor) -> Tensor:
        return self.components.up(codes).clamp(0, 1).view(-1, *self.shape)


# Restricted Boltzmann machines


class Machine:
    """A restricted Boltzmann machine: hidden units given visible ones, and back.

    Two kinds of chains draw images: those of the domain "joint" start from coins, and show what the model is; those of
    "from images" start from training images, and flatter a model whose chains do not mix.
    """

    domains = ("joint", "from images")

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        self.data, self.gibbs, self.device = data, budget.gibbs, budget.device

    def up(self, v: Tensor) -> Tensor:
        """P(h = 1 | v): (B, V) → (B, S)."""
        raise NotImplementedError

    def down(self, h: Tensor) -> Tensor:
        """Mean of v given h: (B, S) → (B, V)."""
        raise NotImplementedError

    def draw_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Draw v given h: (B, S) → (B, V)."""
        raise NotImplementedError

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw hidden units as independent coins: (count, S)."""
        raise NotImplementedError

    def encode(self, images: Tensor) -> Tensor:
        """P(h = 1 | v): (B, C, H, W) → (B, S)."""
        return self.up(images.flatten(1))

    def firing(self, codes: Tensor) -> Tensor:
        """Return the code, which is how likely each unit fires."""
        return codes

    def reconstruct(self, images: Tensor) -> Tensor:
        """Go up and down by means."""
        return self.down(self.encode(images)).clamp(0, 1).view_as(images)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Run Gibbs chains; return the mean of v at their ends."""
        if domain == "joint":
            h = self.start(count, generator)
        else:
            chosen = torch.randint(
                len(self.data), (count,), generator=generator, device=self.device
            ).cpu()
            images = self.data.batch(chosen).to(self.device)
            h = torch.bernoulli(self.encode(images), generator=generator)
        for _ in range(self.gibbs):
            h = torch.bernoulli(self.up(self.draw_visible(h, generator)), generator=generator)
        return self.down(h).clamp(0, 1).view(-1, *self.data.shape)


@dataclass(frozen=True, eq=False)
class FittedBernoulli:
    """Result of `fit_bernoulli`."""

    weight: np.ndarray
    visible: np.ndarray
    hidden: np.ndarray
    seconds: float


def fit_bernoulli(data: ImageSet, budget: Budget) -> FittedBernoulli:
    """Train scikit-learn's BernoulliRBM, on one core: its products are too small to be shared."""
    from sklearn.neural_network import BernoulliRBM
    from threadpoolctl import threadpool_limits

    started = time.perf_counter()
    machine = BernoulliRBM(
        SIZE, learning_rate=0.05, batch_size=50, n_iter=budget.epochs, random_state=budget.seed
    )
    with threadpool_limits(1):
        machine.fit(data.batch(slice(None)).flatten(1).numpy())
    found = machine.components_, machine.intercept_visible_, machine.intercept_hidden_
    return FittedBernoulli(*found, seconds=time.perf_counter() - started)


class BernoulliMachine(Machine):
    """scikit-learn's BernoulliRBM, trained on the CPU by its own persistent chains."""

    name = "bernoulli-rbm"

    def __init__(
        self, data: ImageSet, budget: Budget, fitted: FittedBernoulli | None = None
    ) -> None:
        super().__init__(data, budget)
        fitted = fitted or fit_bernoulli(data, budget)
        self.seconds = fitted.seconds
        self.weight, self.visible, self.hidden = (
            torch.from_numpy(np.asarray(each, np.float32)).to(budget.device)
            for each in (fitted.weight, fitted.visible, fitted.hidden)
        )

    def up(self, v: Tensor) -> Tensor:
        """P(h = 1 | v): (B, V) → (B, S)."""
        return torch.sigmoid(v @ self.weight.T + self.hidden)

    def down(self, h: Tensor) -> Tensor:
        """P(v = 1 | h): (B, S) → (B, V)."""
        return torch.sigmoid(h @ self.weight + self.visible)

    def draw_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Draw black or white pixels: (B, S) → (B, V)."""
        return torch.bernoulli(self.down(h), generator=generator)

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw fair coins: (count, S)."""
        return torch.rand(count, SIZE, generator=generator, device=self.device).round()


class GaussianMachine(Machine):
    """A Gaussian-Bernoulli RBM, centred, with a variance for each pixel, trained by persistent chains.

    E(v, h) = Σ_i (v_i − b_i)²/2σ_i² − Σ_ij (v_i − μ_i)/σ_i² W_ij (h_j − λ_j) − Σ_j c_j (h_j − λ_j), so that
    P(h = 1 | v) = sigmoid(c + Wᵀ(v − μ)/σ²) and v | h ~ N(b + W(h − λ), σ²). μ is the mean training image, λ follows
    the mean of the hidden units on data. Centring makes the gradient of W independent of the biases (Melchior, Fischer
    and Wiskott 2016). The variances are learned with the rest, from a floor up: a pixel that is always black would
    otherwise drive its variance to 0 and freeze the chains.
    """

    name = "gaussian-rbm"
    CHAINS = 512
    STEPS = 5  # of each chain between two steps of learning
    RATE = 5e-3
    DECAY = 1e-4  # ℓ2 on W
    FLOOR = 0.05  # of σ², for pixels from 0 to 1
    FOLLOW = 0.01  # how fast λ follows

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
            0.01 * torch.randn(pixels, SIZE, generator=generator, device=device)
        )
        self.visible = nn.Parameter(self.mean.clone())
        self.hidden = nn.Parameter(torch.zeros(SIZE, device=device))
        self.log_variance = nn.Parameter(variance.clamp(min=self.FLOOR).log())
        self.offset = torch.full((SIZE,), 0.5, device=device)

        parameters = [self.weight, self.visible, self.hidden, self.log_variance]
        chains = torch.bernoulli(self.offset.expand(self.CHAINS, -1), generator=generator)
        optimizer, schedule = _optimizer(parameters, self.RATE, _steps(data, budget))
        for images in _shuffled(data, budget):
            v = images.flatten(1)
            h = self.up(v)
            self.follow(h.mean(0))
            for _ in range(self.STEPS):
                v_chain = self.draw_visible(chains, generator)
                h_chain = self.up(v_chain)
                chains = torch.bernoulli(h_chain, generator=generator)
            for parameter, up, down in zip(
                parameters, self.push(v, h), self.push(v_chain, h_chain), strict=True
            ):
                parameter.grad = (
                    down - up + (self.DECAY * parameter if parameter is self.weight else 0)
                )
            optimizer.step()
            schedule.step()
            self.log_variance.clamp_(min=math.log(self.FLOOR), max=0)

    def push(self, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean of −∂E/∂(W, b, c, log σ²) over visible (B, V) and hidden (B, S) states."""
        precision = (-self.log_variance).exp()
        scaled, centred = (v - self.mean) * precision, h - self.offset
        apart = v - self.visible
        return (
            scaled.T @ centred / len(v),
            (apart * precision).mean(0),
            centred.mean(0),
            (apart.square() * precision / 2 - scaled * (centred @ self.weight.T)).mean(0),
        )

    def follow(self, mean: Tensor) -> None:
        """Move λ towards the mean of the hidden units, without changing the model."""
        step = self.FOLLOW * (mean - self.offset)
        self.offset += step
        self.visible.add_(self.weight @ step)

    def up(self, v: Tensor) -> Tensor:
        """P(h = 1 | v): (B, V) → (B, S)."""
        return torch.sigmoid(
            (v - self.mean) * (-self.log_variance).exp() @ self.weight + self.hidden
        )

    def down(self, h: Tensor) -> Tensor:
        """Mean of v given h: (B, S) → (B, V)."""
        return (h - self.offset) @ self.weight.T + self.visible

    def draw_visible(self, h: Tensor, generator: torch.Generator) -> Tensor:
        """Draw v ~ N(b + W(h − λ), σ²): (B, S) → (B, V)."""
        mean = self.down(h)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return mean + noise * (self.log_variance / 2).exp()

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw coins that fall as often as the units fire on data: (count, S)."""
        return torch.bernoulli(self.offset.clamp(0, 1).expand(count, -1), generator=generator)


# Autoencoders


class AllFeatures:
    """The convolutional autoencoder of poecaps, without capsules; code: all its features."""

    name = "autoencoder-all"

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(budget.seed)
        shape = Architecture()
        self.model = ConvAutoencoder(
            data.shape[0],
            features=shape.features,
            kernel_size=shape.kernel_size,
            dropout=shape.dropout,
            generator=generator,
        ).to(budget.device)
        self.size = data.shape[1:]
        torch.manual_seed(budget.seed)
        rate = PRESETS["default"]().autoencoder.learning_rate
        optimizer, schedule = _optimizer(list(self.model.parameters()), rate, _steps(data, budget))
        half = budget.device.type == "cuda"
        for images in _shuffled(data, budget):
            with torch.autocast(budget.device.type, torch.bfloat16, enabled=half):
                loss = self.model.loss(images)
            _step(loss, optimizer, schedule)
        self.model.eval()
        self.seconds = time.perf_counter() - started

    def encode(self, images: Tensor) -> Tensor:
        """Lay the features in a row."""
        return self.model.encode(images).flatten(1)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode."""
        return self.model(images)


class FeatureComponents(Draws):
    """The same autoencoder; code: principal components of its features, with a density of them."""

    name = "autoencoder"

    def __init__(self, data: ImageSet, budget: Budget, features: AllFeatures | None = None) -> None:
        self.features = features or AllFeatures(data, budget)
        started = time.perf_counter()
        with torch.no_grad():
            self.components = PrincipalComponents(
                lambda: (self.features.encode(part) for part in _batches(data, budget))
            )
            self.density = Density(
                torch.cat([self.encode(part) for part in _batches(data, budget)]), budget.seed
            )
        self.seconds = self.features.seconds + time.perf_counter() - started

    def encode(self, images: Tensor) -> Tensor:
        """Project the features: (B, C, H, W) → (B, S)."""
        return self.components.down(self.features.encode(images))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Project, go back and decode."""
        return self._draw(self.encode(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes from the density, go back and decode."""
        return self._draw(self.density.sample(count, generator))

    def _draw(self, codes: Tensor) -> Tensor:
        height, width = self.features.size
        rows, columns = self.features.model.grid((height, width))
        features = self.components.up(codes).view(len(codes), -1, rows, columns)
        return self.features.model.decode(features, (height, width))


class Variational(nn.Module):
    """A convolutional variational autoencoder: standard normal prior, Bernoulli pixels (Kingma and Welling 2014).

    The divergence from the prior is phased in (Sønderby et al. 2016) and the posterior starts narrow; otherwise the
    noise in 320 numbers teaches the decoder early on to ignore them all. Small batches make more of the same passes.
    """

    name = "vae"
    domains = ("joint", "density")
    RATE = 2e-3
    BATCH = 32
    WARM_UP = 0.3  # share of the steps
    NARROW = -4.0  # log-variance of the posterior at the start

    def __init__(self, data: ImageSet, budget: Budget) -> None:
        super().__init__()
        torch.manual_seed(budget.seed)
        channels, self.height, self.width = data.shape
        grid = math.ceil(self.height / 4), math.ceil(self.width / 4)
        last = nn.Linear(512, 2 * SIZE)
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
            nn.Linear(SIZE, 512),
            nn.ReLU(),
            nn.Linear(512, 64 * grid[0] * grid[1]),
            nn.ReLU(),
            nn.Unflatten(1, (64, *grid)),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1),
        )
        with torch.no_grad():
            last.bias[SIZE:].fill_(self.NARROW)
        self.to(budget.device)
        steps = _steps(data, budget, self.BATCH)
        optimizer, schedule = _optimizer(list(self.parameters()), self.RATE, steps)
        for step, images in enumerate(_shuffled(data, budget, self.BATCH)):
            _step(self.loss(images, min(1.0, step / (self.WARM_UP * steps))), optimizer, schedule)
        self.eval()
        with torch.no_grad():
            self.density = Density(
                torch.cat([self.encode(part) for part in _batches(data, budget)]), budget.seed
            )

    def loss(self, images: Tensor, share: float = 1.0) -> Tensor:
        """Compute the negative evidence lower bound, in nats per image, with a share of its divergence."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        pixels = nn.functional.binary_cross_entropy_with_logits(
            self._logits(codes), images, reduction="sum"
        )
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return (pixels + share * divergence) / len(images)

    def encode(self, images: Tensor) -> Tensor:
        """Mean of the posterior: (B, C, H, W) → (B, S)."""
        return self.encoder(images).chunk(2, dim=1)[0]

    def reconstruct(self, images: Tensor) -> Tensor:
        """Decode the mean of the posterior."""
        return torch.sigmoid(self._logits(self.encode(images)))

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Decode draws from the prior, or from the density of the codes: (count, C, H, W), from 0 to 1."""
        if domain == "joint":
            codes = torch.randn(count, SIZE, generator=generator, device=generator.device)
        else:
            codes = self.density.sample(count, generator)
        return torch.sigmoid(self._logits(codes))

    def _logits(self, codes: Tensor) -> Tensor:
        return self.decoder(codes)[:, :, : self.height, : self.width]


# What they share


def _batches(data: ImageSet, budget: Budget) -> Iterator[Tensor]:
    return (part.to(budget.device) for part in data.batches(500))


def _shuffled(data: ImageSet, budget: Budget, batch: int = BATCH) -> Iterator[Tensor]:
    """Batches of all epochs."""
    generator = torch.Generator().manual_seed(budget.seed)
    for _ in range(budget.epochs):
        for images in data.batches(min(batch, len(data)), generator=generator, drop_last=True):
            yield images.to(budget.device)


def _optimizer(
    parameters: list[nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Adam whose rate falls along a cosine to a hundredth, as in the training of poecaps."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, rate / 100)


def _steps(data: ImageSet, budget: Budget, batch: int = BATCH) -> int:
    return budget.epochs * (len(data) // min(batch, len(data)))


def _step(
    loss: Tensor, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()


BASELINES: dict[str, Callable[[ImageSet, Budget], Encoder]] = {
    "pixels": lambda *_: Pixels(),
    "k-means": Clusters,
    "pca": PCA,
    "gaussian-rbm": GaussianMachine,
    "autoencoder": FeatureComponents,
    "autoencoder-all": AllFeatures,
    "vae": Variational,
    "bernoulli-rbm": BernoulliMachine,
}


def compare(
    names: Sequence[str],
    train: ImageSet,
    test: ImageSet,
    classifier: Any,
    budgets: Sequence[Budget],
    samples: int,
) -> Iterator[Evaluation]:
    """Train and evaluate baselines, one after the other, each with every budget.

    scikit-learn's machines need minutes of one core, and are trained in processes of their own meanwhile.
    """
    autoencoders: dict[Budget, AllFeatures] = {}
    with ProcessPoolExecutor(len(budgets), multiprocessing.get_context("spawn")) as pool:
        machines = {
            each: pool.submit(fit_bernoulli, train, each)
            for each in budgets
            if "bernoulli-rbm" in names
        }
        for name, budget in itertools.product(names, budgets):
            if name == "pixels" and budget != budgets[0]:
                continue  # nothing about them is random
            started = time.perf_counter()
            encoder: Encoder
            if name == "bernoulli-rbm":
                encoder = BernoulliMachine(train, budget, machines[budget].result())
            elif name.startswith("autoencoder"):
                features = autoencoders[budget] = autoencoders.get(budget) or AllFeatures(
                    train, budget
                )
                encoder = (
                    features
                    if name == "autoencoder-all"
                    else FeatureComponents(train, budget, features)
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
            yield result.with_about(
                epochs=0 if name in ("pixels", "k-means", "pca") else budget.epochs,
                training_seconds=round(getattr(encoder, "seconds", trained - started), 3),
                evaluation_seconds=round(time.perf_counter() - trained, 1),
                gibbs_steps=budget.gibbs if isinstance(encoder, Machine) else 0,
            )


SPREAD: dict[str, Callable[[Any], Any]] = {
    "probe": lambda of: of.probe and of.probe.test_accuracy,
    "reconstruction": lambda of: of.reconstruction and of.reconstruction.relative,
    "effective rank": lambda of: of.effective_rank,
}
SPREAD_OF_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "Fréchet": lambda of: of.frechet and of.frechet.distance,
    "recognisable": lambda of: of.recognisability and of.recognisability.share,
    "classes": lambda of: of.diversity and of.diversity.classes,
}


def spread(results: Sequence[Evaluation]) -> str:
    """Lay out mean ± standard deviation over seeds as text, for each model that was measured with more than one."""
    lines = []
    for name in dict.fromkeys(result.name for result in results):
        same = [result for result in results if result.name == name]
        if len(same) == 1:
            continue
        values = {label: [read(each) for each in same] for label, read in SPREAD.items()}
        for domain, (label, read) in itertools.product(same[0].domains, SPREAD_OF_SAMPLES.items()):
            values[f"{domain}: {label}"] = [read(each.domains[domain]) for each in same]
        lines.append(f"{name}, mean ± standard deviation over {len(same)} seeds")
        lines += [
            f"  {label:30}{np.mean(numbers):10.4g} ± {np.std(numbers, ddof=1):.2g}"
            for label, numbers in values.items()
            if None not in numbers
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="mnist-sample", help="a set's name or a path (default: mnist-sample)"
    )
    parser.add_argument("--path", help="folder that holds a full set known by name")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: a GPU)"
    )
    parser.add_argument("--only", help=f"some of {','.join(BASELINES)} (default: all)")
    parser.add_argument(
        "--network", type=Path, action="append", default=[], help="a trained network to set beside"
    )
    parser.add_argument(
        "--epochs", type=int, help="passes over the images (default: as many as the preset default)"
    )
    parser.add_argument(
        "--gibbs", type=int, default=1000, help="steps of a Gibbs chain (default: 1000)"
    )
    parser.add_argument("--samples", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument(
        "--limit", type=int, help="use so many training and at most so many test images"
    )
    parser.add_argument("--seeds", default="0", help="one or several, as in 0,1,2 (default: 0)")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)

    names = options.only.split(",") if options.only else list(BASELINES)
    if unknown := [name for name in names if name not in BASELINES]:
        parser.error(
            f"--only must name some of {', '.join(BASELINES)}, but names {', '.join(unknown)}"
        )
    train, test = (
        _limit(load(options.data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    judged = options.data.removesuffix("-sample") in CLASSIFIERS
    classifier = load_classifier(options.data, options.device) if judged else None
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
            f"{result.name}, seed {result.seed}: trained in {result.about['training_seconds']} s, "
            f"evaluated in {result.about['evaluation_seconds']} s",
            flush=True,
        )
        if (
            options.json is not None
        ):  # after each, so that a run that is cut short leaves what it has
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps([json.loads(each.to_json()) for each in results], indent=2) + "\n"
            )
    print(
        f"\n{side_by_side([result for result in results if result.seed == seeds[0]])}\n\n{spread(results)}".rstrip()
    )


def _limit(data: ImageSet, most: int | None) -> ImageSet:
    """Take evenly spaced images, because the order of a set may mean something."""
    if most is None or most >= len(data):
        return data
    chosen = np.linspace(0, len(data) - 1, most).round().astype(np.int64)
    labels = None if data.labels is None else data.labels[chosen]
    return ImageSet(data.images[chosen], labels, label_names=data.label_names, source=data.source)


if __name__ == "__main__":
    main()
