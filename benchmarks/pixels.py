"""Measure the likelihood of images in pixels, in bits per dimension, for several densities.

`python -m benchmarks.pixels --data mnist --path FOLDER --json FILE` prints a table. All densities
are over the same numbers, an invertible map of the pixels:

1. uniform noise makes the bytes continuous, y = (pixel + noise)/256;
2. logit(λ + (1 − 2λ) y) with λ = 10⁻⁶;
3. each patch of 4×4 pixels is a capsule of 16 numbers, centred and whitened.

With x the capsules, log P(y) = log P(x) + log |det ∂x/∂y|, and bits per dimension are
8 − log₂ P(y)/D for images of D pixels. This is the protocol of Papamakarios, Pavlakou and Murray,
"Masked autoregressive flow for density estimation", 2017 (arXiv 1705.07057), so that the numbers
can be compared with published ones; rows in italics are quoted. The noise is drawn once: all
densities are fitted to and measured on the same numbers.

independent capsules    a Gaussian for each patch, the base measure without components
full covariance         a Gaussian for all pixels, the base measure with all components
factor analysers        a mixture of factor analysers, whose size is chosen on held-out images
Gaussian RBM            hidden units over the same full covariance
poecaps                 expert capsules over the same full covariance; and, with fewer experts over
                        independent capsules, with one and with three routing iterations

The last training images are held out (10,000; with --quick 1,000), and all options were chosen on
such images of MNIST; test images are used for the table only. Models with a partition function Z
are measured by annealed importance sampling in both directions: the columns "lower" and "upper"
show the bits per dimension with the lower and with the upper estimate of log Z, and "bits/dim"
those with the mean of both. "error" is the standard error over test images; for several seeds, a
cell is the mean and the standard deviation over them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from benchmarks import machine
from benchmarks.baselines import limit
from benchmarks.density_baselines import FactorAnalysers, GaussianRBM, even_schedule, fit_rbm
from benchmarks.variants import cell
from poecaps._devices import find_device
from poecaps._modules import MappedBatches, in_batches
from poecaps.data import ImageSet, load
from poecaps.energy import CapsuleDensity, GaussianBase
from poecaps.likelihood import bracket_log_partition, estimate_log_partition
from poecaps.preprocessing import Preprocessing
from poecaps.training import DensityStage, fit_density

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from poecaps.likelihood import LogPartition

LAMBDA = 1e-6
PATCH = 4
BATCH = 1000  # images that are mapped, or whose likelihood is computed, together

# Test log-likelihood of MNIST in nats, in logit space: Papamakarios et al. 2017 (arXiv 1705.07057).
# Fully connected models; the number of layers is in brackets.
PUBLISHED_NATS = {
    "Gaussian": -1366.9,
    "MADE": -1380.8,
    "MADE MoG": -1038.5,
    "Real NVP (5)": -1323.2,
    "MAF (5)": -1300.5,
    "MAF MoG (5)": -1100.3,
}
# Bits per dimension of MNIST: Grathwohl et al. 2019 (arXiv 1810.01367). Convolutional models with
# several scales.
PUBLISHED_BITS = {"Real NVP": 1.06, "Glow": 1.05, "FFJORD": 0.99}


@dataclass(frozen=True)
class Size:
    """Number of images, and the effort of training and of measuring.

    The most expensive model has 2·784 experts of one number. One of its learning steps is 6
    evaluations of the energy and its gradient for all chains, and a forward and backward pass for
    chains and data: 26 GFLOP for 512 chains and 1,024 images. So 4,000 steps are 0.1 PFLOP, a few
    seconds at the rate of one H200; launching the kernels takes longer.
    """

    training: int | None = None
    """Maximum number of training images; None: all."""
    held_out: int = 10_000
    """Last images of the training set, which no model is fitted to."""
    test: int | None = None
    """Maximum number of test images."""
    steps: int = 4000
    """Learning steps of the RBM and of poecaps."""
    routed_steps: int = 2000
    """Learning steps of the two models that compare routing iterations; 0: leave them out."""
    batch_size: int = 1024
    chains: int = 512
    average: float = 0.998
    """Decay of the running average of the weights."""
    annealing_steps: int = 1000
    """Temperatures of annealed importance sampling."""
    annealing_chains: int = 128
    analysers: tuple[tuple[int, int], ...] = (
        (20, 32),
        (50, 32),
        (50, 64),
        (100, 32),
    )
    """Candidates: number of factor analysers, and of factors."""
    iterations: int = 50
    """Of expectation maximization."""


FULL = Size()
QUICK = Size(
    training=4000,
    held_out=1000,
    test=2000,
    steps=250,
    routed_steps=0,
    batch_size=128,
    chains=128,
    average=0.98,
    annealing_steps=60,
    annealing_chains=32,
    analysers=((10, 8), (20, 8)),
    iterations=6,
)


# --------------------------------------------------------------------------------------------------
# From pixels to capsules


def dequantize(images: ImageSet, generator: torch.Generator) -> Tensor:
    """Turn bytes into numbers from 0 to 1, (pixel + noise)/256: → (N, H, W), float64.

    The noise is drawn on the CPU: the same for every device.
    """
    pixels = torch.from_numpy(images.images[..., 0].copy())
    noise = torch.rand(pixels.shape, generator=generator, dtype=torch.float64)
    return (pixels + noise) / 256


class PatchMap(nn.Module):
    """An invertible map from images (B, H, W) with values from 0 to 1 to capsules (B, I, K).

    Parameters
    ----------
    height, width
        H and W, multiples of the patch.
    patch
        Side of a patch, a capsule of K = patch² numbers.
    """

    def __init__(self, height: int, width: int, patch: int = PATCH) -> None:
        super().__init__()
        self.grid, self.patch = (height // patch, width // patch), patch
        self.whitening = Preprocessing(
            math.prod(self.grid), patch**2, centre=True, scale=None, whiten=True
        )

    def fit(self, y: Tensor) -> None:
        """Fit mean and whitening of the patches to images (N, H, W)."""
        self.whitening.fit(MappedBatches(self._logits, y.split(BATCH)))

    def forward(self, y: Tensor) -> Tensor:
        """Compute the capsules: (B, H, W) → (B, I, K)."""
        return self.whitening.transform(self._logits(y))

    def inverse(self, x: Tensor) -> Tensor:
        """Compute the images of capsules: (B, I, K) → (B, H, W)."""
        rows, columns = self.grid
        z = self.whitening.inverse_transform(x).view(-1, rows, columns, self.patch, self.patch)
        z = z.transpose(2, 3).reshape(-1, rows * self.patch, columns * self.patch)
        return (torch.sigmoid(z) - LAMBDA) / (1 - 2 * LAMBDA)

    def log_det(self, y: Tensor) -> Tensor:
        """Compute log |det ∂x/∂y|: (B, H, W) → (B,)."""
        return self.logit_log_det(y) + torch.linalg.slogdet(self.whitening.matrix.double())[1].sum()

    def logit_log_det(self, y: Tensor) -> Tensor:
        """Compute the share of the logit in `log_det`: (B, H, W) → (B,)."""
        p = LAMBDA + (1 - 2 * LAMBDA) * y
        each = math.log(1 - 2 * LAMBDA) - torch.log(p) - torch.log1p(-p)
        return each.flatten(1).sum(1)

    def _logits(self, y: Tensor) -> Tensor:
        """Compute the patches of the logit: (B, H, W) → (B, I, K)."""
        z = torch.logit(LAMBDA + (1 - 2 * LAMBDA) * y)
        patches = z.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        return patches.reshape(len(y), -1, self.patch**2)


def bits_per_dim(log_prob: Tensor, dims: int) -> Tensor:
    """Turn log P(y) in nats (B,), with y the pixels divided by 256, into bits for each pixel."""
    return 8 - log_prob / (dims * math.log(2))


@dataclass(frozen=True)
class Split:
    """Images as capsules.

    Attributes
    ----------
    x : (N, I, K)
    log_det : (N,)
        log |det ∂x/∂y|, float64.
    """

    x: Tensor
    log_det: Tensor


@dataclass(frozen=True)
class Problem:
    """The images that densities are fitted to and measured on."""

    training: Split
    held_out: Split
    test: Split
    logit_log_det: float
    """Mean of log |det| of the logit alone, over test images."""
    size: Size
    seed: int

    @property
    def device(self) -> torch.device:
        """The device of the capsules."""
        return self.training.x.device

    @property
    def shape(self) -> tuple[int, int]:
        """I and K."""
        return self.training.x.shape[1], self.training.x.shape[2]

    def generator(self) -> torch.Generator:
        """Return a new source of random numbers for a model."""
        return torch.Generator(self.device).manual_seed(self.seed)


def make_problem(
    training: ImageSet, test: ImageSet, size: Size, seed: int, device: torch.device
) -> Problem:
    """Hold out the last training images, draw the noise, and map all images to capsules."""
    held_out = ImageSet(training.images[-size.held_out :])
    training = limit(ImageSet(training.images[: -size.held_out]), size.training)
    noise = torch.Generator().manual_seed(seed)
    # Test images come first: their noise does not depend on the number of training images.
    y_test, y_held_out, y_training = (
        dequantize(images, noise).to(device)
        for images in (limit(test, size.test), held_out, training)
    )
    patches = PatchMap(*y_test.shape[1:]).to(device)
    patches.fit(y_training)

    def split(y: Tensor) -> Split:
        return Split(in_batches(patches, y, BATCH), in_batches(patches.log_det, y, BATCH))

    return Problem(
        split(y_training),
        split(y_held_out),
        split(y_test),
        patches.logit_log_det(y_test).mean().item(),
        size,
        seed,
    )


# --------------------------------------------------------------------------------------------------
# Densities


@dataclass(frozen=True)
class Fitted:
    """A fitted density.

    Attributes
    ----------
    log_density
        log P(x), or log P(x) + log Z if there is a partition function: (B, I, K) → (B,).
    seconds
        Time of fitting.
    base
        The base measure, if the density is an energy over one.
    partition
        Estimates of log Z.
    chosen
        Options that were chosen on held-out images.
    """

    log_density: Callable[[Tensor], Tensor]
    seconds: float
    base: GaussianBase | None = None
    partition: LogPartition | None = None
    chosen: str = ""


def gaussian(problem: Problem, components: int) -> Fitted:
    """Fit the base measure of poecaps by itself."""
    start = time.perf_counter()
    base = GaussianBase(*problem.shape, components, device=problem.device)
    base.fit(problem.training.x.split(BATCH))
    return Fitted(base.log_prob, _elapsed(start, problem.device))


def factor_analysers(problem: Problem) -> Fitted:
    """Fit mixtures of factor analysers, and choose one on held-out images."""
    start = time.perf_counter()
    found = []
    for analysers, factors in problem.size.analysers:
        mixture = FactorAnalysers(
            problem.training.x.flatten(1),
            analysers,
            factors,
            iterations=problem.size.iterations,
            generator=problem.generator(),
        )
        score = mixture.log_prob(problem.held_out.x.flatten(1)).mean().item()
        found.append((score, f"{analysers} analysers of {factors} factors", mixture))
    _, chosen, best = max(found, key=lambda each: each[0])
    seconds = _elapsed(start, problem.device)
    return Fitted(lambda x: best.log_prob(x.flatten(1)), seconds, chosen=chosen)


def gaussian_rbm(problem: Problem) -> Fitted:
    """Fit a Gaussian RBM over the coordinates u of the full covariance."""
    size, generator = problem.size, problem.generator()
    start = time.perf_counter()
    base = GaussianBase(*problem.shape, math.prod(problem.shape), device=problem.device)
    base.fit(problem.training.x.split(BATCH))
    rbm = GaussianRBM(math.prod(problem.shape), scale=4.0, bias=-8.0, device=problem.device)
    options = _learning(size, learning_rate=3e-4, strength_rate=300.0)
    fit_rbm(
        rbm,
        base.to_white(problem.training.x),
        schedule=even_schedule(size.steps),
        batch_size=size.batch_size,
        options=options,
        generator=generator,
    )
    seconds = _elapsed(start, problem.device)
    partition = bracket_log_partition(
        rbm,
        chains=size.annealing_chains,
        steps=size.annealing_steps,
        leapfrog_steps=options.leapfrog_steps,
        generator=generator,
    )
    return Fitted(
        lambda x: base.log_prob(x) - rbm.free_energy(base.to_white(x)), seconds, base, partition
    )


def single_number_experts(problem: Problem) -> Fitted:
    """Fit two experts of one linear number for each number of the capsules.

    They start as the two sides of that number, ±4x + 5, and so learn its marginal first. From
    random weights they learn much more slowly: in a random direction of 784, pixels look Gaussian.
    """
    density = _density(problem, 2 * math.prod(problem.shape), 1, strength=0.5)
    _start_as_sides(density, scale=4.0, origin=5.0)
    return _fit_density(problem, density, _learning(problem.size, 1e-4, strength_rate=500.0))


def patch_experts(problem: Problem) -> Fitted:
    """Fit two experts for each capsule, of as many numbers, which start as its two sides."""
    density = _density(problem, 2 * problem.shape[0], problem.shape[1], strength=0.3)
    _start_as_sides(density, scale=2.0, origin=0.0)
    return _fit_density(problem, density, _learning(problem.size, 1e-4, strength_rate=300.0))


def routed_experts(problem: Problem, iterations: int) -> Fitted:
    """Fit 20 experts of 16 numbers, the sizes of the paper, over independent capsules."""
    generator = problem.generator()
    density = CapsuleDensity(
        *problem.shape,
        20,
        16,
        linear_dims=16,
        strength=5.0,
        iterations=iterations,
        generator=generator,
        device=problem.device,
    )
    options = _learning(problem.size, 5e-3, strength_rate=5.0)
    return _fit_density(problem, density, options, problem.size.routed_steps)


def models(problem: Problem) -> dict[str, Callable[[], Fitted]]:
    """Return the densities by name."""
    capsules, dim = problem.shape
    found: dict[str, Callable[[], Fitted]] = {
        "independent capsules": partial(gaussian, problem, 0),
        "full covariance": partial(gaussian, problem, capsules * dim),
        "factor analysers": partial(factor_analysers, problem),
        f"Gaussian RBM, {2 * capsules * dim} units": partial(gaussian_rbm, problem),
        f"poecaps, {2 * capsules * dim}×1": partial(single_number_experts, problem),
        f"poecaps, {2 * capsules}×{dim}": partial(patch_experts, problem),
    }
    if problem.size.routed_steps:
        for iterations in (1, 3):
            name = f"poecaps, 20×16, R {iterations}, over independent capsules"
            found[name] = partial(routed_experts, problem, iterations)
    return found


def _elapsed(start: float, device: torch.device) -> float:
    """Return the seconds since a start, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _learning(size: Size, learning_rate: float, strength_rate: float) -> DensityStage:
    """Return the options of the chains and of the optimizer.

    Chains are persistent: with the full covariance as base measure, they move through the model
    within a few steps, and all of them are draws of it at any time.
    """
    return DensityStage(
        learning_rate=learning_rate,
        final_learning_rate_ratio=0.05,
        strength_rate=strength_rate,
        chains=size.chains,
        lifetime=0,
        average=size.average,
        partition_steps=0,  # estimated separately, so that it does not count as training
    )


def _density(problem: Problem, experts: int, dim: int, *, strength: float) -> CapsuleDensity:
    """Return a density whose numbers are all linear, over the full covariance."""
    return CapsuleDensity(
        *problem.shape,
        experts,
        dim,
        linear_dims=dim,
        strength=strength,
        base_components=math.prod(problem.shape),
        device=problem.device,
    )


@torch.no_grad()
def _start_as_sides(density: CapsuleDensity, scale: float, origin: float) -> None:
    """Let J·D = 2·I·K expert numbers start as the two sides ±scale·x of each capsule number."""
    side = scale * torch.eye(density.in_capsules * density.in_dim, device=density.weight.device)
    shape = (density.out_capsules, density.out_dim, density.in_capsules, density.in_dim)
    density.weight.copy_(torch.cat((side, -side)).view(shape).permute(2, 0, 1, 3))
    density.origin.fill_(origin)


def _fit_density(
    problem: Problem, density: CapsuleDensity, options: DensityStage, steps: int | None = None
) -> Fitted:
    """Learn a density, and estimate its partition function."""
    size, start = problem.size, time.perf_counter()
    fit_density(
        density,
        problem.training.x,
        steps=steps or size.steps,
        batch_size=size.batch_size,
        options=options,
        seed=problem.seed,
    )
    seconds = _elapsed(start, problem.device)
    partition = estimate_log_partition(
        density,
        chains=size.annealing_chains,
        steps=size.annealing_steps,
        leapfrog_steps=options.leapfrog_steps,
        generator=problem.generator(),
    )
    base = density.base
    assert isinstance(base, GaussianBase)  # noqa: S101
    return Fitted(lambda x: base.log_prob(x) - density.free_energy(x), seconds, base, partition)


# --------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of test images under one density.

    Attributes
    ----------
    bits, error
        Bits per dimension, with the mean of the two estimates of log Z, and its standard error.
    lowest, highest
        Bits per dimension with the lower and the upper estimate of log Z.
    held_out_bits, training_bits
        The same as `bits`, of held-out and of training images.
    nats
        Log-likelihood in logit space.
    nats_above_base, nats_above_base_error
        Mean of log P(x) − log base(x) and its standard error, for an energy over a base measure.
    seconds
        Time of fitting.
    chosen
        Options that were chosen on held-out images.
    partition
        Estimates of log Z.
    """

    name: str
    seed: int
    bits: float
    error: float
    lowest: float
    highest: float
    held_out_bits: float
    training_bits: float
    nats: float
    nats_above_base: float | None
    nats_above_base_error: float | None
    seconds: float
    chosen: str
    partition: dict[str, float] | None


@torch.no_grad()
def measure(name: str, fitted: Fitted, problem: Problem) -> Likelihood:
    """Compute the likelihood of all splits."""
    dims = math.prod(problem.shape)
    partition = fitted.partition
    low, high = (0.0, 0.0) if partition is None else (partition.forward, partition.reverse)
    log_z = (low + high) / 2

    def log_prob(split: Split) -> Tensor:
        density = in_batches(fitted.log_density, split.x, BATCH).double()
        return density + split.log_det - log_z

    test = log_prob(problem.test)
    bits, error = _mean(bits_per_dim(test, dims))
    above: tuple[float, float] | tuple[None, None] = (None, None)
    if fitted.base is not None:
        base = in_batches(fitted.base.log_prob, problem.test.x, BATCH)
        above = _mean(test - problem.test.log_det - base)
    width = (high - low) / (2 * dims * math.log(2))
    return Likelihood(
        name=name,
        seed=problem.seed,
        bits=bits,
        error=error,
        lowest=bits - width,
        highest=bits + width,
        held_out_bits=bits_per_dim(log_prob(problem.held_out), dims).mean().item(),
        training_bits=bits_per_dim(log_prob(problem.training), dims).mean().item(),
        nats=test.mean().item() - problem.logit_log_det,
        nats_above_base=above[0],
        nats_above_base_error=above[1],
        seconds=fitted.seconds,
        chosen=fitted.chosen,
        partition=None if partition is None else asdict(partition),
    )


def _mean(values: Tensor) -> tuple[float, float]:
    """Return the mean of numbers (N,) and its standard error."""
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


def published(data: str, problem: Problem) -> list[dict[str, Any]]:
    """Return published bits per dimension; those of MNIST in logit space are converted.

    The difference between the two is the determinant of the logit, which is the same for every
    model: its mean over test images is added.
    """
    if data != "mnist":
        return []
    dims = math.prod(problem.shape)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "bits": bits_per_dim(torch.tensor(nats + problem.logit_log_det), dims).item(),
            "nats": nats,
            "source": "arXiv 1705.07057",
        }
        for name, nats in PUBLISHED_NATS.items()
    ]
    rows += [
        {"name": name, "bits": bits, "nats": None, "source": "arXiv 1810.01367"}
        for name, bits in PUBLISHED_BITS.items()
    ]
    return rows


COLUMNS = {  # head: key of `Likelihood`, format
    "bits/dim": ("bits", ".3f"),
    "error": ("error", ".3f"),
    "lower": ("lowest", ".3f"),
    "upper": ("highest", ".3f"),
    "held out": ("held_out_bits", ".3f"),
    "nats, logit": ("nats", ".1f"),
    "above base": ("nats_above_base", ".1f"),
}


def table(report: Mapping[str, Any]) -> str:
    """Format the likelihoods as Markdown, the measured ones first."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for found in report["models"]:
        by_name.setdefault(found["name"], []).append(found)
    rows = []
    for name, seeds in by_name.items():
        chosen = " or ".join(dict.fromkeys(filter(None, (found["chosen"] for found in seeds))))
        exact = seeds[0]["partition"] is None
        cells = [
            "–"
            if exact and key in ("lowest", "highest")
            else cell([each[key] for each in seeds], form)
            for key, form in COLUMNS.values()
        ]
        rows.append([f"{name}, {chosen}" if chosen else name, str(len(seeds)), *cells])
    for found in report["published"]:
        numbers = {
            "bits/dim": cell([found["bits"]], ".2f"),
            "nats, logit": cell([found["nats"]], ".1f"),
        }
        name = f"*{found['name']}, published ({found['source']})*"
        rows.append([name, "–", *(numbers.get(head, "–") for head in COLUMNS)])
    head = ["model", "seeds", *COLUMNS]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def go_on(report: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return a report with the results that a file has; rows name machines other than its first.

    Raises
    ------
    ValueError
        If the results of the file cannot be compared with ours.
    """
    if path is None or not path.exists():
        return report
    before: dict[str, Any] = json.loads(path.read_text())
    now = json.loads(json.dumps(report))  # with lists for tuples
    for key in ("data", "size"):
        if before[key] != now[key]:
            raise ValueError(
                f"--json {path} has results of another {key}, {before[key]} instead of {now[key]}; "
                f"use another file"
            )
    return report | {"machine": before["machine"], "models": before["models"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON file; go on where a run was interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist", help="dataset of grey images (default: mnist)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--seeds", default="0", help="seeds, comma-separated (default: 0)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer images and steps, for one CPU core; without routing",
    )
    parser.add_argument("--only", help="models, separated by semicolons (default: all)")
    parser.add_argument("--json", type=Path, help="file to add the numbers to")
    options = parser.parse_args(arguments)
    training, test = (
        load(options.data, split=split, path=options.path) for split in ("train", "test")
    )
    size = QUICK if options.quick else FULL
    channels, height, width = training.shape
    if channels != 1 or height % PATCH or width % PATCH:
        parser.error(
            f"--data must have grey images with sides that are multiples of {PATCH} pixels, "
            f"but has images of shape {training.shape} (C, H, W)"
        )
    if len(training) <= size.held_out:
        parser.error(
            f"--data must have more than {size.held_out} training images, which are held out, "
            f"but has {len(training)}; use --quick"
        )
    if training.images.dtype != np.uint8 or test.images.dtype != np.uint8:
        parser.error(f"--data must have images of bytes, but has {training.images.dtype}")
    device = find_device(options.device)
    problems = [
        make_problem(training, test, size, seed, device)
        for seed in map(int, options.seeds.split(","))
    ]
    first = problems[0]
    names = options.only.split(";") if options.only else list(models(first))
    if unknown := [name for name in names if name not in models(first)]:
        parser.error(
            f"--only must be a list of {'; '.join(models(first))}; but contains "
            f"{'; '.join(unknown)}"
        )
    report: dict[str, Any] = {
        "machine": machine.describe(device),
        "data": {
            "training_images": len(first.training.x),
            "held_out_images": len(first.held_out.x),
            "test_images": len(first.test.x),
        },
        "size": asdict(size),
        "models": [],
        "published": published(options.data, first),
    }
    print(json.dumps(report["data"] | report["machine"], indent=1, ensure_ascii=False), flush=True)
    ours = report["machine"]
    try:
        report = go_on(report, options.json)
    except ValueError as error:
        parser.error(str(error))
    other = {} if report["machine"] == ours else {"machine": ours}
    known = {(found["name"], found["seed"]) for found in report["models"]}
    for problem in problems:
        for name, fit in models(problem).items():
            if name not in names or (name, problem.seed) in known:
                continue
            with warnings.catch_warnings():
                # How far the two estimates of log Z are from each other is in the table.
                warnings.filterwarnings("ignore", message="log Z is uncertain")
                found = measure(name, fit(), problem)
            print(f"{name}: {found.bits:.3f} bits/dim, {found.seconds:.0f} s", flush=True)
            row = argparse.Namespace(**vars(options) | {"only": name, "seeds": str(problem.seed)})
            command = machine.command("benchmarks.pixels", parser, row)
            report["models"].append(asdict(found) | {"command": command} | other)
            machine.write(report, options.json)  # an interrupted run keeps its results
    print(f"\n{table(report)}")


if __name__ == "__main__":
    main()
