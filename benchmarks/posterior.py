"""Measure inpainting and denoising by the posterior of a density, each beside simpler methods.

`python -m benchmarks.posterior --data mnist-sample --network RUN --json FILE` prints a table. The
network needs a density, and all other parts for today's `poecaps.applications.inpaint`.

inpainting      the lower half of test images is hidden. By the posterior given the known pixels
                (`inpaint_by_density`), by `inpaint`, by a Gaussian that was fitted to the pixels of
                the training images, and by the mean image
denoising       Gaussian noise is added to test images. By the posterior (`denoise`), by the same
                Gaussian (a Wiener filter), by encoding and decoding, and the noisy image itself

"without experts" is a control: the posterior under the base measure alone. For each method: the
mean squared error of hidden pixels, or of all pixels; its mean difference from that of the
posterior; and the share of results to which a classifier gives the label of the original.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import poecaps
from benchmarks import machine
from benchmarks.applications import masks
from benchmarks.baselines import limit
from poecaps import plotting
from poecaps.applications import denoise, inpaint, inpaint_by_density
from poecaps.data import load
from poecaps.evaluation import load_classifier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork
    from poecaps.evaluation import Classifier

OBSERVED_NOISE = 0.1  # of known pixels, the default of `inpaint_by_density`
HIDDEN = "lower half"


@dataclass(frozen=True)
class Row:
    """Numbers of one method: means over images with their standard errors."""

    error: float
    standard_error: float
    difference: float
    """From the error of the posterior mean, image by image."""
    difference_error: float
    correct: float


@dataclass(frozen=True)
class PosteriorMetrics:
    """All numbers of one run."""

    network: str
    data: str
    images: int
    draws: int
    steps: int
    noise: float
    seed: int
    inpainting: dict[str, Row]
    denoising: dict[str, Row]


class PixelGaussian:
    """A Gaussian with a full covariance, fitted to the pixels of images (N, C, H, W)."""

    def __init__(self, images: Tensor) -> None:
        flat = images.flatten(1).double()
        self.mean = flat.mean(0)
        self.covariance = torch.cov(flat.T)

    def posterior_mean(self, images: Tensor, known: Tensor, noise: float) -> Tensor:
        """Compute the mean of all pixels given known ones with noise: → (N, C, H, W), 0 to 1.

        μ + Σ_·k (Σ_kk + σ²)⁻¹ (x_k − μ_k), with the known pixels k of a mask (H, W).
        """
        k = known.expand(images.shape[1:]).flatten()
        observed = self.covariance[k][:, k] + noise**2 * torch.eye(int(k.sum())).double()
        deviation = images.flatten(1).double()[:, k] - self.mean[k]
        mean = self.mean + torch.linalg.solve(observed, deviation.T).T @ self.covariance[k]
        return mean.clamp(0, 1).to(images.dtype).view_as(images)


def without_experts(network: CapsuleNetwork) -> CapsuleNetwork:
    """Return a copy of a network whose density is its base measure alone."""
    control = copy.deepcopy(network)
    density = control.require_density()
    with torch.no_grad():
        density.weight.zero_()
        density.origin.zero_()
    return control


def rows(
    results: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    measured: Tensor,
    classifier: Classifier,
) -> dict[str, Row]:
    """Measure the pixels of a mask in the results of all methods; the first is the posterior."""
    errors = {
        name: (result - images)[:, :, measured].square().mean((1, 2)).double()
        for name, result in results.items()
    }
    reference, root = next(iter(errors.values())), len(images) ** 0.5
    found = {}
    for name, error in errors.items():
        guesses = classifier.predict(results[name]).probabilities.argmax(1)
        difference = error - reference
        found[name] = Row(
            error.mean().item(),
            error.std().item() / root,
            difference.mean().item(),
            difference.std().item() / root,
            (guesses == labels).double().mean().item(),
        )
    return found


def inpainted(
    network: CapsuleNetwork,
    train: Tensor,
    images: Tensor,
    known: Tensor,
    *,
    draws: int,
    steps: int,
    seed: int,
) -> dict[str, Tensor]:
    """Inpaint images by every method: (N, C, H, W) each."""
    mean = train.mean(0)

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def drawn(model: CapsuleNetwork) -> Tensor:
        return inpaint_by_density(
            model,
            images,
            known,
            noise=OBSERVED_NOISE,
            draws=draws,
            steps=steps,
            generator=generator(),
        )

    posterior = drawn(network)
    gaussian = PixelGaussian(train).posterior_mean(images, known, OBSERVED_NOISE)
    return {
        "posterior, mean of the draws": posterior.mean(0),
        "posterior, one draw": posterior[0],
        "posterior without experts, mean of the draws": drawn(without_experts(network)).mean(0),
        "inpaint": inpaint(network, images, known, generator=generator()),
        "Gaussian of the pixels": torch.where(known, images, gaussian),
        "mean image": torch.where(known, images, mean),
        "original": images,
    }


@torch.no_grad()
def denoised(
    network: CapsuleNetwork,
    train: Tensor,
    images: Tensor,
    *,
    noise: float,
    draws: int,
    steps: int,
    seed: int,
) -> dict[str, Tensor]:
    """Add noise to images and remove it by every method: (N, C, H, W) each."""
    generator = torch.Generator().manual_seed(seed)
    noisy = images + noise * torch.randn(images.shape, generator=generator)
    visible = noisy.clamp(0, 1)  # all that models of images from 0 to 1 accept

    def drawn(model: CapsuleNetwork) -> Tensor:
        return denoise(
            model,
            noisy,
            noise=noise,
            draws=draws,
            steps=steps,
            generator=torch.Generator().manual_seed(seed),
        )

    everything = torch.ones(images.shape[2:], dtype=torch.bool)
    return {
        "posterior": drawn(network),
        "posterior without experts": drawn(without_experts(network)),
        "Gaussian of the pixels": PixelGaussian(train).posterior_mean(noisy, everything, noise),
        "encoded and decoded by the experts": network.reconstruct(visible),
        "encoded and decoded by the autoencoder": network.decode_whitened(
            network.whitened(visible)
        ),
        "noisy image": visible,
        "original": images,
    }


def table(result: PosteriorMetrics) -> str:
    """Format the numbers as text."""
    lines = [
        f"{result.network}, {result.data}: {result.images} test images, {result.draws} draws of "
        f"{result.steps} steps, seed {result.seed}"
    ]
    for title, found in (
        (f"inpainting of the {HIDDEN}", result.inpainting),
        (f"denoising, noise {result.noise}", result.denoising),
    ):
        lines.append(f"{title:48}{'squared error':>17}{'above posterior':>19}{'correct':>9}")
        lines += [
            f"  {name:46}{row.error:8.4f} ± {row.standard_error:6.4f}"
            f"{row.difference:10.4f} ± {row.difference_error:6.4f}{row.correct:9.0%}"
            for name, row in found.items()
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON file and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist-sample", help="dataset of the network")
    parser.add_argument("--path", help="folder of that dataset, if it is a full one")
    parser.add_argument("--network", required=True, help="folder of a run with a density")
    parser.add_argument("--images", type=int, default=16, help="test images (default: 16)")
    parser.add_argument("--draws", type=int, default=3, help="chains for each image (default: 3)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a chain (default: 200)")
    parser.add_argument("--noise", type=float, default=0.4, help="noise to remove (default: 0.4)")
    parser.add_argument("--limit", type=int, help="maximum number of training images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--picture", type=Path, help="PNG file for the images, a row each method")
    options = parser.parse_args(arguments)

    network = poecaps.load(options.network)
    train, test = (load(options.data, split=each, path=options.path) for each in ("train", "test"))
    known_images = limit(train, options.limit).batch(slice(None))
    chosen = limit(test, options.images)
    images = chosen.batch(slice(None))
    labels = torch.from_numpy(chosen.labels).long()
    classifier = load_classifier(options.data, torch.device("cpu"))
    known = masks(*images.shape[2:])[HIDDEN]
    chains = {"draws": options.draws, "steps": options.steps, "seed": options.seed}
    filled = inpainted(network, known_images, images, known, **chains)
    clean = denoised(network, known_images, images, noise=options.noise, **chains)
    result = PosteriorMetrics(
        network=str(options.network),
        data=options.data,
        images=len(images),
        noise=options.noise,
        inpainting=rows(filled, images, labels, ~known, classifier),
        denoising=rows(clean, images, labels, torch.ones_like(known), classifier),
        **chains,
    )
    print(table(result))
    machine.write(asdict(result), options.json)
    if options.picture is not None:
        shown = torch.cat([*filled.values(), *clean.values()])
        plotting.image_grid(shown, options.picture, columns=len(images))


if __name__ == "__main__":
    main()
