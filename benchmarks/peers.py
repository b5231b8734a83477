"""Generative models that poecaps is compared with, each chosen on held-out images.

`python -m benchmarks.peers --data mnist --path FOLDER --json SEARCH` trains every peer below with
every option of its search, each for the same number of seconds, on all but the last 10,000 training
images, and measures it on these. SEARCH is the record of the search.

`python -m benchmarks.peers --data mnist --path FOLDER --chosen SEARCH --on test --seeds 0,1,2,3,4
--json FILE` trains the best option of each peer again, and measures it on the test images, once.
The best option has the smallest Fréchet distance in random features, which no change of contrast
improves, over all sources of samples of the peer.

regularised autoencoder  deterministic, with a penalty of its codes and of the decoder's weights
                         (Ghosh et al. 2020); samples from the mixture that poecaps fits to codes
VAE                      with Bernoulli pixels, or Gaussian ones of a learned variance (Rybkin et
                         al. 2021); samples from the prior, and from the mixture (domain "density")
flow on codes            a VAE whose codes are modelled by flow matching (Lipman et al. 2023), in
                         place of the second stage of Dai and Wipf (2019)
factor analysers         a mixture of factor analysers of the pixels; samples without pixel noise
Gaussian RBM             1,568 hidden units for 28×28 pixels; persistent chains of Hamiltonian
                         Monte Carlo; samples by annealed chains from noise
deep belief network      Bernoulli RBMs, greedily; samples by Gibbs chains of the uppermost one
flow matching            in pixels, with a small U-Net: the ceiling, without a code
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import baselines, variants
from benchmarks.baselines import CodeMixture, SingleDomainSampler
from benchmarks.density_baselines import FactorAnalysers, GaussianRBM, fit_rbm, move
from benchmarks.internals import find_device
from poecaps._modules import in_batches
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier
from poecaps.sampling import INITIAL_STEP_SIZE, StepSize
from poecaps.training import DensityStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from benchmarks.variants import Job
    from poecaps.data import ImageSet
    from poecaps.evaluation import Encoder

HELD_OUT = 10_000
BATCH_SIZE = 128
FLOW_STEPS = 50  # of the solver that draws from a flow
CHAIN_STEPS = 600  # of annealed chains
GIBBS_STEPS = 1000  # of the uppermost RBM of a deep belief network
SYNC_STEPS = 20  # steps after which the clock waits for a GPU
EM_ITERATIONS = 20


class Clock:
    """Training time: iterate over the progress of the training, from 0 to below 1.

    Parameters
    ----------
    seconds
        Seconds of training.
    steps
        Maximum number of steps; None: any number.
    device
        Device whose work is waited for.
    """

    def __init__(self, seconds: float, steps: int | None, device: torch.device) -> None:
        self.seconds, self.steps, self.device = seconds, steps or math.inf, device

    def __iter__(self) -> Iterator[float]:
        """Yield the progress at every step."""
        start = time.perf_counter()
        for step in itertools.count():
            if self.device.type == "cuda" and step % SYNC_STEPS == 0:
                torch.cuda.synchronize(self.device)
            progress = max((time.perf_counter() - start) / self.seconds, step / self.steps)
            if progress >= 1:
                return
            yield progress

    def part(self, share: float) -> Clock:
        """Return a clock for a share of the time."""
        steps = None if self.steps == math.inf else max(1, int(share * self.steps))
        return Clock(share * self.seconds, steps, self.device)


class Training:
    """Images, device, random numbers and time of a training."""

    def __init__(self, data: ImageSet, clock: Clock, seed: int) -> None:
        self.clock, self.device, self.seed = clock, clock.device, seed
        self.shape = data.shape
        self.images = data.batch(slice(None)).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        torch.manual_seed(seed)

    def batch(self) -> Tensor:
        """Draw a batch of images: (B, C, H, W)."""
        return self.images[self.indices(len(self.images))]

    def indices(self, count: int) -> Tensor:
        """Draw the numbers of the images of a batch."""
        size = min(BATCH_SIZE, count)
        return torch.randint(count, (size,), generator=self.generator, device=self.device)

    def fit(
        self,
        module: nn.Module,
        loss: Callable[[float], Tensor],
        rate: float,
        clock: Clock | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        """Minimise a loss, a function of the progress, by Adam with a cosine schedule."""
        optimizer = torch.optim.AdamW(module.parameters(), rate, weight_decay=weight_decay)
        for progress in clock or self.clock:
            for group in optimizer.param_groups:
                group["lr"] = rate * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)
            optimizer.zero_grad(set_to_none=True)
            loss(progress).backward()
            optimizer.step()
        module.eval().requires_grad_(False)


# --------------------------------------------------------------------------------------------------
# Autoencoders


def conv_encoder(shape: tuple[int, int, int], size: int) -> nn.Module:
    """Return a network from images to `size` numbers."""
    channels, height, width = shape
    grid = math.ceil(height / 4) * math.ceil(width / 4)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * grid, 512),
        nn.ReLU(),
        nn.Linear(512, size),
    )


class ConvDecoder(nn.Module):
    """A network from codes to logits of images."""

    def __init__(self, shape: tuple[int, int, int], size: int) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        grid = math.ceil(self.height / 4), math.ceil(self.width / 4)
        self.layers = nn.Sequential(
            nn.Linear(size, 512),
            nn.ReLU(),
            nn.Linear(512, 128 * grid[0] * grid[1]),
            nn.ReLU(),
            nn.Unflatten(1, (128, *grid)),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, channels, 4, stride=2, padding=1),
        )

    def forward(self, codes: Tensor) -> Tensor:
        """Compute logits: (B, S) → (B, C, H, W)."""
        logits: Tensor = self.layers(codes)[:, :, : self.height, : self.width]
        return logits


class Autoencoder(nn.Module):
    """Encoder and decoder of the peers with codes."""

    def __init__(self, shape: tuple[int, int, int], size: int, outputs: int) -> None:
        super().__init__()
        self.encoder, self.decoder = conv_encoder(shape, outputs), ConvDecoder(shape, size)

    def encode(self, images: Tensor) -> Tensor:
        """Encode images: (B, C, H, W) → (B, S)."""
        codes: Tensor = self.encoder(images)
        return codes

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes: (B, S) → (B, C, H, W)."""
        return torch.sigmoid(self.decoder(codes))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode."""
        return self.decode(self.encode(images))


class RegularisedAutoencoder(Autoencoder, SingleDomainSampler):
    """RAE: squared error + penalty · ‖z‖² / 2, with weight decay."""

    name = "regularised autoencoder"

    def __init__(self, training: Training, size: int, penalty: float) -> None:
        super().__init__(training.shape, size, size)
        self.to(training.device)

        def loss(_: float) -> Tensor:
            images = training.batch()
            codes = self.encode(images)
            error = (self.decode(codes) - images).square().flatten(1).sum(1)
            return (error + penalty * codes.square().sum(1) / 2).mean()

        training.fit(self, loss, 1e-3, weight_decay=1e-4)
        self.density = CodeMixture(in_batches(self.encode, training.images), training.seed)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Decode draws from the density of codes."""
        return self.decode(self.density.sample(count, generator))


class VAE(Autoencoder):
    """A VAE: E_q[−log p(x | z)] + β KL(q(z | x), N(0, 1)).

    The weight of the divergence grows in the first tenth of the training. The Gaussian likelihood
    has one variance, the mean squared error of the batch, which is its maximum.
    """

    name = "VAE"
    domains: tuple[str, ...] = ("joint", "density")
    WARM_UP = 0.1

    def __init__(
        self,
        training: Training,
        size: int,
        beta: float,
        likelihood: str,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(training.shape, size, 2 * size)
        self.size = size
        self.to(training.device)

        def loss(progress: float) -> Tensor:
            images = training.batch()
            mean, log_variance = self.encoder(images).chunk(2, dim=1)
            logits = self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
            if likelihood == "bernoulli":
                pixels = nn.functional.binary_cross_entropy_with_logits(
                    logits, images, reduction="sum"
                )
            else:
                error = (torch.sigmoid(logits) - images).square().mean()
                pixels = images.numel() * error.log() / 2
            divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
            return (pixels + beta * min(1.0, progress / self.WARM_UP) * divergence) / len(images)

        training.fit(self, loss, 1e-3, clock)
        self.density = CodeMixture(in_batches(self.encode, training.images), training.seed)

    def encode(self, images: Tensor) -> Tensor:
        """Compute the posterior mean: (B, C, H, W) → (B, S)."""
        mean: Tensor = self.encoder(images)[:, : self.size]
        return mean

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Decode draws from the prior, or from the density of codes."""
        if domain == "density":
            return self.decode(self.density.sample(count, generator))
        noise = torch.randn(count, self.size, generator=generator, device=generator.device)
        return self.decode(noise)


# --------------------------------------------------------------------------------------------------
# Flow matching


def flow_loss(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute E‖v(x_t, t) − (x − ε)‖² on the straight line x_t = (1 − t) ε + t x from noise ε."""
    noise, t = torch.randn_like(x), torch.rand(len(x), device=x.device)
    at = t.view(-1, *[1] * (x.ndim - 1))
    return (velocity((1 - at) * noise + at * x, t) - (x - noise)).square().mean()


@torch.no_grad()
def follow_flow(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Solve dx/dt = v(x, t) from t = 0 to 1 by the midpoint method."""
    step = 1 / FLOW_STEPS
    for number in range(FLOW_STEPS):
        t = torch.full((len(x),), number * step, device=x.device)
        middle = x + step / 2 * velocity(x, t)
        x = x + step * velocity(middle, t + step / 2)
    return x


def time_features(t: Tensor, count: int) -> Tensor:
    """Compute sines and cosines of a time from 0 to 1: (B,) → (B, count)."""
    angle = t.unsqueeze(1) * torch.logspace(0, 3, count // 2, device=t.device)
    return torch.cat([angle.sin(), angle.cos()], 1)


class CodeVelocity(nn.Module):
    """A velocity of codes: a perceptron with residual layers."""

    WIDTH, TIMES = 512, 64

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(size + self.TIMES, self.WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(self.WIDTH, self.WIDTH)) for _ in range(4)
        )
        self.last = nn.Linear(self.WIDTH, size)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute dx/dt: (B, S), (B,) → (B, S)."""
        h = self.first(torch.cat([x, time_features(t, self.TIMES)], 1))
        for block in self.blocks:
            h = h + block(h)
        velocity: Tensor = self.last(h)
        return velocity


class FlowOnCodes(VAE, SingleDomainSampler):
    """A VAE whose standardised codes are modelled by flow matching, each with half of the time."""

    name = "flow on codes"
    domains = ("joint",)

    def __init__(self, training: Training, size: int, beta: float) -> None:
        half = training.clock.part(0.5)
        super().__init__(training, size, beta, "bernoulli", half)
        codes = in_batches(self.encode, training.images)
        self.mean, self.std = codes.mean(0), codes.std(0).clamp(min=1e-3)
        codes = (codes - self.mean) / self.std
        self.velocity = CodeVelocity(size).to(training.device)

        def loss(_: float) -> Tensor:
            return flow_loss(self.velocity, codes[training.indices(len(codes))])

        training.fit(self.velocity, loss, 1e-3, half)

    def sample(self, count: int, domain: str, generator: torch.Generator) -> Tensor:
        """Decode codes at the end of the flow."""
        return SingleDomainSampler.sample(self, count, domain, generator)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Decode codes at the end of the flow."""
        noise = torch.randn(count, self.size, generator=generator, device=generator.device)
        return self.decode(self.mean + self.std * follow_flow(self.velocity, noise))


class UNet(nn.Module):
    """A velocity of images: convolutions at three resolutions, with the time added to each."""

    TIMES = 64

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        into = (channels, width, 2 * width, 2 * width, 4 * width, 3 * width)
        out = (width, 2 * width, 2 * width, 2 * width, width, width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1) for i, o in zip(into, out, strict=True)
        )
        self.second = nn.ModuleList(nn.Conv2d(o, o, 3, padding=1) for o in out)
        self.times = nn.ModuleList(nn.Linear(self.TIMES, o) for o in out)
        self.norms = nn.ModuleList(nn.GroupNorm(8, o) for o in out)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute dx/dt: (B, C, H, W), (B,) → (B, C, H, W)."""
        return self.levels(x, t)[1]

    def levels(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the lowest resolution, and dx/dt."""
        times = time_features(t, self.TIMES)

        def block(number: int, h: Tensor) -> Tensor:
            h = self.convolutions[number](h) + self.times[number](times)[:, :, None, None]
            h = nn.functional.silu(self.norms[number](h))
            return h + nn.functional.silu(self.second[number](h))

        shrink = partial(nn.functional.avg_pool2d, kernel_size=2, ceil_mode=True)
        high = block(0, x)
        middle = block(1, shrink(high))
        low = block(3, block(2, shrink(middle)))
        grow = nn.functional.interpolate
        up = block(4, torch.cat([grow(low, middle.shape[2:]), middle], 1))
        up = block(5, torch.cat([grow(up, high.shape[2:]), grow(middle, high.shape[2:])], 1))
        velocity: Tensor = self.last(up + high)
        return low, velocity


class FlowMatching(SingleDomainSampler):
    """Flow matching in pixels; the code is the lowest resolution of the U-Net, without noise."""

    name = "flow matching"

    def __init__(self, training: Training, width: int) -> None:
        self.shape = training.shape
        self.velocity = UNet(training.shape[0], width).to(training.device)

        def loss(_: float) -> Tensor:
            half = training.device.type == "cuda"
            with torch.autocast(training.device.type, torch.bfloat16, enabled=half):
                return flow_loss(self.velocity, 2 * training.batch() - 1)

        training.fit(self.velocity, loss, 1e-3)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Average the lowest resolution over positions: (B, C, H, W) → (B, S)."""
        low, _ = self.velocity.levels(2 * images - 1, torch.ones(len(images), device=images.device))
        return low.mean((2, 3))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Follow the flow from noise."""
        noise = torch.randn(count, *self.shape, generator=generator, device=generator.device)
        return ((follow_flow(self.velocity, noise) + 1) / 2).clamp(0, 1)


# --------------------------------------------------------------------------------------------------
# Densities of pixels


class PixelScale:
    """Standardised pixels: (x − mean) / s, with one s for all pixels."""

    def __init__(self, images: Tensor) -> None:
        flat = images.flatten(1)
        self.mean, self.scale, self.shape = flat.mean(0), flat.std().item(), images.shape[1:]

    def transform(self, images: Tensor) -> Tensor:
        """Standardise: (B, C, H, W) → (B, V)."""
        return (images.flatten(1) - self.mean) / self.scale

    def inverse_transform(self, x: Tensor) -> Tensor:
        """Map back to images: (B, V) → (B, C, H, W)."""
        return (x * self.scale + self.mean).clamp(0, 1).view(-1, *self.shape)


class FactorAnalyserMixture(SingleDomainSampler):
    """A mixture of factor analysers of the pixels; the code is P(analyser | x)."""

    name = "factor analysers"

    @torch.no_grad()
    def __init__(self, training: Training, analysers: int, factors: int) -> None:
        self.scale = PixelScale(training.images)
        iterations = min(EM_ITERATIONS, int(min(training.clock.steps, EM_ITERATIONS)))
        self.mixture = FactorAnalysers(
            self.scale.transform(training.images),
            analysers,
            factors,
            iterations=iterations,
            generator=torch.Generator().manual_seed(training.seed),
        )

    def encode(self, images: Tensor) -> Tensor:
        """Compute the posterior of the analysers: (B, C, H, W) → (B, M)."""
        return self.mixture.posterior(self.scale.transform(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the analyser and its factors, without the noise of single pixels."""
        return self.scale.inverse_transform(self.mixture.sample_means(count, generator))


class PixelRBM(SingleDomainSampler):
    """A Gaussian RBM of the pixels that learns by Hamiltonian Monte Carlo."""

    name = "Gaussian RBM"

    def __init__(self, training: Training, rate: float) -> None:
        self.scale = PixelScale(training.images)
        u = self.scale.transform(training.images)
        self.rbm = GaussianRBM(u.shape[1], scale=0.1, bias=-1.0, device=training.device)
        fit_rbm(
            self.rbm,
            u,
            schedule=training.clock,
            batch_size=BATCH_SIZE,
            options=DensityStage(learning_rate=rate, chains=512, lifetime=0, strength_rate=1.0),
            generator=training.generator,
        )

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, C, H, W) → (B, S)."""
        return self.rbm.hidden_probability(self.scale.transform(images))

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        """Compute E[v | P(h | v)]."""
        return self.scale.inverse_transform(self.rbm.visible_mean(self.encode(images)))

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Run annealed chains from noise, and return E[v | h] at their ends."""
        u = self.rbm.sample_base(count, generator)
        size = StepSize(u.new_tensor(INITIAL_STEP_SIZE), DensityStage().target_acceptance)
        for step in range(CHAIN_STEPS):
            t = min(1.0, 1.5 * (step + 1) / CHAIN_STEPS)
            u = move(self.rbm, u, t, size, DensityStage().leapfrog_steps, generator)
        h = torch.bernoulli(self.rbm.hidden_probability(u), generator=generator)
        return self.scale.inverse_transform(self.rbm.visible_mean(h))


class BernoulliLayer(nn.Module):
    """A Bernoulli RBM that learns by persistent contrastive divergence."""

    CHAINS = 512

    def __init__(self, visible: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(visible, hidden, device=device))
        self.visible = nn.Parameter(torch.zeros(visible, device=device))
        self.hidden = nn.Parameter(torch.zeros(hidden, device=device))

    def up(self, v: Tensor) -> Tensor:
        """Compute P(h = 1 | v): (B, V) → (B, S)."""
        return torch.sigmoid(v @ self.weight + self.hidden)

    def down(self, h: Tensor) -> Tensor:
        """Compute P(v = 1 | h): (B, S) → (B, V)."""
        return torch.sigmoid(h @ self.weight.T + self.visible)

    def free_energy(self, v: Tensor) -> Tensor:
        """Compute F(v) = −a·v − Σ_j log(1 + e^(w_j·v + b_j)): (B, V) → (B,)."""
        return -v @ self.visible - nn.functional.softplus(v @ self.weight + self.hidden).sum(1)

    @torch.no_grad()
    def gibbs(self, v: Tensor, generator: torch.Generator) -> Tensor:
        """Take a step of Gibbs sampling: (B, V) → (B, V)."""
        h = torch.bernoulli(self.up(v), generator=generator)
        return torch.bernoulli(self.down(h), generator=generator)

    def learn(self, v: Tensor, training: Training, rate: float, clock: Clock) -> None:
        """Learn from probabilities or pixels (N, V)."""
        with torch.no_grad():
            self.visible.copy_(torch.logit(v.mean(0).clamp(0.01, 0.99)))
        chains = torch.bernoulli(
            v.mean(0).expand(self.CHAINS, -1).contiguous(), generator=training.generator
        )

        def loss(_: float) -> Tensor:
            chains.copy_(self.gibbs(chains, training.generator))
            data = v[training.indices(len(v))]
            return self.free_energy(data).mean() - self.free_energy(chains).mean()

        training.fit(self, loss, rate, clock)


class DeepBeliefNetwork(SingleDomainSampler):
    """Bernoulli RBMs on top of each other (Hinton, Osindero and Teh 2006)."""

    name = "deep belief network"

    def __init__(self, training: Training, sizes: tuple[int, ...], rate: float) -> None:
        self.shape, self.layers = training.shape, []
        v = training.images.flatten(1)
        clock = training.clock.part(1 / len(sizes))
        for size in sizes:
            layer = BernoulliLayer(v.shape[1], size, training.device)
            layer.learn(v, training, rate, clock)
            self.layers.append(layer)
            with torch.no_grad():
                v = in_batches(layer.up, v)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Compute the probabilities of the uppermost units: (B, C, H, W) → (B, S)."""
        v = images.flatten(1)
        for layer in self.layers:
            v = layer.up(v)
        return v

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        """Compute the probabilities up to the uppermost units and back."""
        return self._down(self.encode(images), self.layers)

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Run Gibbs chains of the uppermost RBM from random units, and go down by means."""
        top, device = self.layers[-1], generator.device
        v = torch.rand(count, len(top.visible), generator=generator, device=device).round()
        for _ in range(GIBBS_STEPS):
            v = top.gibbs(v, generator)
        return self._down(torch.bernoulli(top.up(v), generator=generator), self.layers)

    def _down(self, h: Tensor, layers: Sequence[BernoulliLayer]) -> Tensor:
        for layer in reversed(layers):
            h = layer.down(h)
        return h.view(-1, *self.shape)


# --------------------------------------------------------------------------------------------------
# The search

SEARCH: dict[str, Callable[[Training], Encoder]] = {
    **{
        f"regularised autoencoder, {size} numbers, penalty {penalty:g}": partial(
            RegularisedAutoencoder, size=size, penalty=penalty
        )
        for size, penalty in itertools.product((16, 32, 64), (1e-3, 1e-2))
    },
    **{
        f"VAE, {size} numbers, β {beta:g}, {likelihood}": partial(
            VAE, size=size, beta=beta, likelihood=likelihood
        )
        for size, beta, likelihood in itertools.product(
            (8, 16, 32, 64), (0.5, 1.0), ("bernoulli", "gaussian")
        )
    },
    **{
        f"flow on codes, {size} numbers, β {beta:g}": partial(FlowOnCodes, size=size, beta=beta)
        for size, beta in itertools.product((16, 32), (0.1, 0.5))
    },
    **{
        f"factor analysers, {count} of {factors}": partial(
            FactorAnalyserMixture, analysers=count, factors=factors
        )
        for count, factors in ((50, 10), (100, 15), (200, 10))
    },
    **{
        f"Gaussian RBM, learning rate {rate:g}": partial(PixelRBM, rate=rate)
        for rate in (1e-3, 3e-3)
    },
    **{
        f"deep belief network, {'-'.join(map(str, sizes))}, learning rate {rate:g}": partial(
            DeepBeliefNetwork, sizes=sizes, rate=rate
        )
        for sizes, rate in itertools.product(((500, 500, 2000), (1000, 1000)), (1e-3, 3e-3))
    },
    **{f"flow matching, {width} filters": partial(FlowMatching, width=width) for width in (32, 64)},
}
CRITERION = "random_frechet.distance"


def chosen_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the best option of each peer, by rows that were measured on held-out images."""
    best: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row.get("on") != "held-out":
            raise ValueError(f"{row['variant']} was not measured on held-out images")
        domains = row["evaluation"]["domains"].values()
        distance = min(variants.lookup(each, CRITERION) or math.inf for each in domains)
        peer = row["variant"].split(", ")[0]
        best[peer] = min(best.get(peer, (math.inf, "")), (distance, row["variant"]))
    return [name for _, name in best.values()]


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate, and return the row."""
    o, device = job.options, find_device(job.options.device)
    data, images = (baselines.limit(each, o.limit) for each in variants.load_images(o))
    start = time.perf_counter()
    model = SEARCH[job.name](Training(data, Clock(o.seconds, o.steps, device), job.seed))
    trained = time.perf_counter()
    has_classifier = o.data.removesuffix("-sample") in CLASSIFIERS
    classifier = load_classifier(o.data, device) if has_classifier else None
    result = evaluate(
        model, data, images, classifier, seed=job.seed, samples=o.samples, device=device
    )
    return {
        "variant": job.name,
        "seed": job.seed,
        "command": variants.row_command("peers", job) + f" --seconds {o.seconds:g}",
        **variants.protocol_of(o),
        "seconds": o.seconds,
        "training_seconds": round(trained - start, 2),
        "evaluation_seconds": round(time.perf_counter() - trained, 2),
        "evaluation": json.loads(replace(result, name=job.name).to_json()),
    }


def _sample_columns(domain: str, heading: str) -> dict[str, tuple[str, str]]:
    path = f"evaluation.domains.{domain}."
    return {
        f"random FD{heading}": (f"{path}{CRITERION}", ".4f"),
        f"matched FD{heading}": (f"{path}matched_frechet.distance", ".1f"),
        f"FD{heading}": (f"{path}frechet.distance", ".1f"),
        f"coverage{heading}": (f"{path}neighbourhoods.coverage", ".1%"),
        f"recognisable{heading}": (f"{path}recognisability.share", ".1%"),
        f"nearer{heading}": (f"{path}nearest.nearer", ".1%"),
    }


COLUMNS = {  # heading: path of the number in a row, format
    "linear probe": ("evaluation.probe.test_accuracy", ".4f"),
    "pixel MSE": ("evaluation.reconstruction.error", ".4f"),
    **_sample_columns("joint", ""),
    **_sample_columns("density", ", mixture"),
    "training, s": ("training_seconds", ".0f"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in SEARCH}, COLUMNS, "model")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the requested rows, or print a file as a table."""
    parser = variants.make_parser(__doc__, samples=10_000)
    variants.add_protocol(parser, HELD_OUT)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of training (default: 60)"
    )
    parser.add_argument("--steps", type=int, help="maximum number of steps (default: any)")
    parser.add_argument("--chosen", type=Path, help="only the best options of this file")
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    options = parser.parse_args(arguments)
    study: Sequence[str] = list(SEARCH)
    if options.chosen is not None:
        study = chosen_names(json.loads(options.chosen.read_text()))
    variants.run_study(parser, arguments, study, run, table)


if __name__ == "__main__":
    main()
