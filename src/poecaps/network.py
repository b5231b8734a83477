"""The whole model: images → features → capsules → experts, and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._files import ModelError, read_json, read_tensors, write_json, write_tensors
from poecaps.autoencoder import ConvAutoencoder, PixelDecoder
from poecaps.layer import CapsuleDecoder, CapsuleExperts

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

Domain = Literal["complete", "restricted", "learned", "joint"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)

FORMAT, VERSION = "poecaps", 2
JOINT_SIZE = 128  # principal components of whole codes that these are drawn in
JOINT_RANK = 8  # of the Gaussians that they are drawn from
MOST_LEVELLED = 100  # times that a direction is weakened
FEWEST = 25  # points that a Gaussian of a mixture is fitted to, on average
STEPS, REACH = (
    7,
    3.0,
)  # images in a row of a traversal, and how many standard deviations it goes to both sides
BATCHED = (
    32  # rows of the largest symmetric matrices whose eigenvectors a GPU finds for many at once
)
HALF_ERROR = 1e-3  # of the norm of a tensor that rounding to float16 may cost; 2e-4 is usual


@dataclass(frozen=True)
class ModelOptions:
    """Everything that shapes a `CapsuleNetwork`, but for the images it sees."""

    features: int = 128
    """Filters of each convolution."""
    kernel_size: int = 9
    """Side of the filters."""
    bias: bool = True
    """Whether the convolutions have biases."""
    dropout: float = 0.2
    """Share of features hidden from the decoder while the autoencoder trains."""
    capsule_dim: int = 8
    """Features that make one input capsule."""
    experts: tuple[tuple[int, int], ...] = ((20, 16),)
    """Number and dimension of the experts of each capsule layer, from the lowest to the highest."""
    iterations: int = 3
    """Repeats of routing by agreement."""
    sharpness: float = 5.0
    """Factor of the agreement in routing."""
    normalize: F.Axis = "inputs"
    """Whether an expert shares its attention among inputs, or an input its votes among experts."""
    agreement: F.Agreement = "cosine"
    """How agreement is measured."""
    winners: int | None = None
    """How many experts may fire for an image; None: all."""
    decoder_sharpness: float = 1.0
    """Factor of the agreement in the routing of the capsule decoder."""
    centre: bool = True
    """Whether the mean over the training images is subtracted from each input capsule."""
    scale: float | None = 0.4
    """Mean norm that input capsules are scaled to before they are squashed; None: left as they are."""
    whiten: bool = False
    """Whether each input capsule is whitened by its covariance over the training images."""
    equalized_components: int = 0
    """Strongest directions of all input capsules together that are brought down to the last of them; 0: none."""
    pixel_decoder: bool = False
    """Whether images are drawn by filters of their own, tuned in a last stage, not by those that see them."""
    joint_components: int = 1000
    """Gaussians in the density that whole codes are drawn from, at most; each is fitted to 25 images or more."""
    expert_components: int = 20
    """Gaussians in the density that the code of one expert is drawn from, at most."""

    def check(self, name: str = "") -> None:
        """Refuse values that cannot be meant; `name` comes before that of the field."""
        for field in (
            "features",
            "kernel_size",
            "capsule_dim",
            "iterations",
            "joint_components",
            "expert_components",
        ):
            checks.require_int(name + field, getattr(self, field), 1)
        pairs = self.experts
        if (
            not isinstance(pairs, tuple)
            or not pairs
            or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
        ):
            raise ValueError(
                f"{name}experts must be one pair or more of a number and a dimension, but is {pairs!r}"
            )
        for each in (number for pair in pairs for number in pair):
            checks.require_int(f"every number of {name}experts", each, 1)
        if self.features % self.capsule_dim:
            raise ValueError(
                f"{name}features must be a multiple of capsule_dim, but {self.features} is none of {self.capsule_dim}"
            )
        checks.require_nonnegative(f"{name}dropout", self.dropout)
        if self.dropout >= 1:
            raise ValueError(f"{name}dropout must be below 1, but is {self.dropout}")
        if self.scale is not None:
            checks.require_nonnegative(f"{name}scale", self.scale)
            if self.scale == 0:
                raise ValueError(
                    f"{name}scale must be above 0, or None to leave capsules as they are"
                )
        checks.require_nonnegative(f"{name}decoder_sharpness", self.decoder_sharpness)
        checks.require_nonnegative(f"{name}sharpness", self.sharpness)
        checks.require_int(f"{name}equalized_components", self.equalized_components, 0)
        checks.require_choice(f"{name}normalize", self.normalize, get_args(F.Axis))
        checks.require_choice(f"{name}agreement", self.agreement, get_args(F.Agreement))
        if self.winners is not None:
            checks.require_int(f"{name}winners", self.winners, 1, min(count for count, _ in pairs))


@dataclass(frozen=True)
class Architecture(ModelOptions):
    """Everything that shapes a `CapsuleNetwork`; what training changes is in its weights."""

    image_shape: tuple[int, int, int] = (1, 28, 28)
    """C, H, W."""


class Preprocessing(nn.Module):
    """An affine map of all capsules, fitted to training data, that is undone on the way back.

    x = squash(s L A (a − m)), with m the mean (or 0), A_i the inverse root of the covariance of each capsule (or 1), L
    the levelling (or 1) and s one number that brings the mean norm to its target (or 1).

    Whitening makes the directions within one capsule equally strong, but a few directions that all capsules share
    still carry most of the variance, and experts learn little else. With V the `level` leading principal directions
    of all I·K numbers A(a − m) and λ their variances, of which λ_r is the smallest::

        L = 1 + V (diag √(λ_r/λ) − 1) Vᵀ

    brings them down to the last of them and leaves everything else alone. No direction is weakened more than 100
    times.
    """

    mean: Tensor
    matrix: Tensor
    inverse: Tensor
    components: Tensor | None
    factors: Tensor | None

    def __init__(
        self,
        capsules: int,
        dim: int,
        *,
        centre: bool,
        scale: float | None,
        whiten: bool,
        equalized_components: int = 0,
    ) -> None:
        super().__init__()
        if equalized_components > capsules * dim:
            raise ValueError(
                f"equalized_components must be at most {capsules * dim}, the numbers in all capsules, but is {equalized_components}"
            )
        self.centre, self.scale, self.whiten = centre, scale, whiten
        identity = torch.eye(dim).expand(capsules, dim, dim)
        self.register_buffer("mean", torch.zeros(capsules, dim))
        self.register_buffer("matrix", identity.clone())
        self.register_buffer("inverse", identity.clone())
        self.register_buffer(
            "components",
            torch.eye(capsules * dim, equalized_components) if equalized_components else None,
        )
        self.register_buffer(
            "factors", torch.ones(equalized_components) if equalized_components else None
        )

    def to_capsules(self, a: Tensor) -> Tensor:
        """Squash scaled activations: (B, I, K) → (B, I, K)."""
        return F.squash(
            self._level(
                torch.einsum("ikl,bil->bik", self.matrix, a.to(self.mean.dtype) - self.mean)
            )
        )

    def from_capsules(self, x: Tensor) -> Tensor:
        """Undo `to_capsules`: (B, I, K) → (B, I, K)."""
        return self.undo(F.unsquash(x))

    def undo(self, z: Tensor) -> Tensor:
        """Undo what comes before squashing: (B, I, K) → (B, I, K)."""
        return torch.einsum("ikl,bil->bik", self.inverse, self._level(z, back=True)) + self.mean

    def _level(self, z: Tensor, *, back: bool = False) -> Tensor:
        """Multiply by L, or back by its inverse: (B, I, K) → (B, I, K)."""
        if self.components is None or self.factors is None:
            return z
        flat, factors = z.flatten(1), 1 / self.factors if back else self.factors
        return (flat + (flat @ self.components * (factors - 1)) @ self.components.T).view_as(z)

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Fit to activations (B, I, K), seen in several passes over `batches`, which must be the same each time."""
        count = 0
        first, second = torch.zeros_like(self.mean, dtype=torch.float64), self.matrix.double() * 0
        for a in batches:
            a = a.double()
            count += len(a)
            first += a.sum(0)
            second += torch.einsum("bik,bil->ikl", a, a)
        mean = first / count
        covariance = second / count - torch.einsum("ik,il->ikl", mean, mean)
        centre = mean if self.centre else torch.zeros_like(mean)
        matrix = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device).expand_as(
            covariance
        )
        if self.whiten:
            values, vectors = torch.linalg.eigh(covariance)
            values = values.clamp(min=0) + 1e-3 * values.clamp(min=0).mean() + 1e-12
            matrix = vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)

        def scaled(around: Tensor) -> Iterator[Tensor]:
            return (
                torch.einsum("ikl,bil->bik", matrix.float(), a.float() - around.float())
                for a in batches
            )

        self.mean.copy_(centre)
        if self.components is not None and self.factors is not None:
            variance, directions = _leading_directions(
                lambda: (z.flatten(1) for z in scaled(mean)), mean.numel(), len(self.factors)
            )
            self.components.copy_(directions)
            least = variance[-1].clamp(min=MOST_LEVELLED**-2 * variance[0])
            self.factors.copy_((least / variance.clamp(min=1e-30)).sqrt().clamp(max=1))
        if self.scale is not None:
            norms = torch.stack(
                [self._level(z).norm(dim=-1).mean(1).double().sum() for z in scaled(centre)]
            )
            matrix = matrix * (self.scale * count / norms.sum())
        self.matrix.copy_(matrix)
        self.inverse.copy_(torch.linalg.inv(matrix))


def _leading_directions(
    batches: Callable[[], Iterable[Tensor]],
    size: int,
    count: int,
    *,
    spare: int = 16,
    rounds: int = 8,
) -> tuple[Tensor, Tensor]:
    """Variances (R,) and orthonormal directions (S, R) of the R leading principal components of points (B, S).

    By subspace iteration with some directions to spare: each round is one pass over the points, and no S×S matrix is
    ever made. Directions of nearly equal variance may come out mixed.
    """
    width = min(count + spare, size)
    basis = torch.randn(size, width, generator=torch.Generator().manual_seed(0))
    for _ in range(rounds):
        image, points = None, 0
        for part in batches():
            basis = basis.to(part.device)
            step = part.T @ (part @ basis)
            image, points = step if image is None else image.add_(step), points + len(part)
        assert image is not None  # noqa: S101 (there is at least one image)
        basis = torch.linalg.qr(image)[0]
    # Within the subspace found, the principal directions themselves.
    small = torch.zeros(width, width, dtype=torch.float64, device=basis.device)
    for part in batches():
        seen = (part @ basis).double()
        small += seen.T @ seen
    values, vectors = torch.linalg.eigh(small / points)
    best = vectors.flip(1)[:, :count].to(basis.dtype)
    return values.flip(0)[:count].clamp(min=0), basis @ best


class GaussianMixtures(nn.Module):
    """Several mixtures of Gaussians over vectors of S numbers, each with M parts of low rank R."""

    weights: Tensor
    means: Tensor
    factors: Tensor

    def __init__(self, count: int, parts: int, size: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.full((count, parts), 1 / parts))
        self.register_buffer("means", torch.zeros(count, parts, size))
        self.register_buffer("factors", torch.zeros(count, parts, size, min(rank, size)))

    @torch.no_grad()
    def fit(self, index: int, points: Tensor, generator: torch.Generator | None) -> None:
        """Fit one of the mixtures to points (N, S): a Gaussian for each cluster, of which there may be fewer than M."""
        parts, _, rank = self.factors[index].shape
        nearest = _clusters(points, min(parts, max(1, len(points) // FEWEST)), generator)
        count = torch.bincount(nearest, minlength=parts)
        mean = torch.zeros_like(self.means[index]).index_add_(0, nearest, points) / count.clamp(
            min=1
        ).unsqueeze(1)
        members = (points - mean[nearest])[nearest.argsort(stable=True)].split(count.tolist())
        covariance = torch.stack([each.T @ each / max(1, len(each)) for each in members])
        values, vectors = _leading_eigenvectors(covariance.double(), rank)
        factor = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        self.weights[index], self.means[index], self.factors[index] = (
            count / len(points),
            mean,
            factor.to(mean.dtype),
        )

    def sample(self, which: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a point from the mixture with each of these indices: (B,) → (B, S)."""
        part = torch.multinomial(self.weights[which], 1, generator=generator).squeeze(1)
        noise = torch.randn(
            len(which), self.factors.shape[3], 1, generator=generator, device=self.factors.device
        )
        return self.means[which, part] + (self.factors[which, part] @ noise).squeeze(-1)


class MixtureOfCodes(nn.Module):
    """A mixture of Gaussians over the leading principal components of codes of S numbers.

    What lies outside these components is at its mean: it is little, and would make the mixture several times as large.
    """

    mean: Tensor
    components: Tensor

    def __init__(self, size: int, gaussians: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("components", torch.eye(size, min(JOINT_SIZE, size)))
        self.mixture = GaussianMixtures(1, gaussians, min(JOINT_SIZE, size), rank=JOINT_RANK)

    @torch.no_grad()
    def fit(self, codes: Tensor, generator: torch.Generator | None) -> None:
        """Fit to codes (N, S)."""
        self.mean.copy_(codes.mean(0))
        centred = codes - self.mean
        directions = torch.linalg.eigh((centred.T @ centred).double())[1]
        self.components.copy_(directions[:, -self.components.shape[1] :])
        self.mixture.fit(0, centred @ self.components, generator)

    def sample(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw codes: (count, S)."""
        which = torch.zeros(count, dtype=torch.long, device=self.mean.device)
        return self.mean + self.mixture.sample(which, generator) @ self.components.T


class CodeDensity(nn.Module):
    """What generation knows about the codes of the training images, in the space before squashing.

    For each expert: the mean direction of its codes, and a mixture of Gaussians fitted to its codes of the images for
    which it is the strongest, with the mean and the standard deviation of these. For whole codes:
    a mixture again, of their leading principal components.
    """

    mean_direction: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self, experts: int, dim: int, *, joint_components: int, expert_components: int
    ) -> None:
        super().__init__()
        self.register_buffer("mean_direction", torch.zeros(experts, dim))
        self.register_buffer("mean", torch.zeros(experts, dim))
        self.register_buffer("std", torch.ones(experts, dim))
        self.per_expert = GaussianMixtures(experts, expert_components, dim, rank=dim)
        self.joint = MixtureOfCodes(experts * dim, joint_components)

    @torch.no_grad()
    def fit(self, codes: Tensor, generator: torch.Generator | None = None) -> None:
        """Fit to squashed codes (N, J, D); `generator` chooses the first centres of clusters."""
        z = F.unsquash(codes.float())
        self.mean_direction.copy_(F.direction(z).mean(0))
        norm = z.norm(dim=-1)
        strongest = norm.argmax(1)
        for j in range(z.shape[1]):
            own = z[strongest == j, j]
            if (
                len(own) <= z.shape[2]
            ):  # too few to tell anything: all images for which it fires, or else all
                own = z[norm[:, j] > 0, j] if norm[:, j].any() else z[:, j]
            self.mean[j], self.std[j] = own.mean(0), own.std(0, correction=0)
            self.per_expert.fit(j, own, generator)
        self.joint.fit(z.flatten(1), generator)

    def sample(
        self, count: int, domain: Domain, expert: int | None, generator: torch.Generator | None
    ) -> Tensor:
        """Draw preactivations (count, J, D); see `CapsuleNetwork.generate`."""
        experts, dim = self.mean.shape
        device = self.mean.device
        if domain == "joint":
            return self.joint.sample(count, generator).view(-1, experts, dim)
        noise = torch.randn(count, dim, generator=generator, device=device)
        chosen = torch.randint(experts, (count,), generator=generator, device=device)
        if expert is not None:
            chosen = torch.full_like(chosen, expert)
        if domain == "learned":
            noise = self.per_expert.sample(chosen, generator)
        elif domain == "restricted":
            agrees = (noise * self.mean_direction[chosen]).sum(-1, keepdim=True) >= 0
            noise = torch.where(agrees, noise, -noise)
        return nn.functional.one_hot(chosen, experts).unsqueeze(-1) * noise.unsqueeze(1)


def _leading_eigenvectors(matrices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues (M, R), rising, and eigenvectors (M, S, R) of symmetric matrices (M, S, S), all ≥ 0."""
    size = matrices.shape[-1]
    if matrices.device.type != "cpu" and size > BATCHED >= 2 * count:
        return _by_iteration(matrices, count)
    values, vectors = torch.linalg.eigh(matrices)
    return values[:, size - count :], vectors[:, :, size - count :]


def _by_iteration(matrices: Tensor, count: int, rounds: int = 16) -> tuple[Tensor, Tensor]:
    """`_leading_eigenvectors`, by products that turn a few directions to where a matrix is largest.

    For a GPU, where torch takes matrices of more than 32 rows one after the other: here only the small eigenproblems
    that keep the directions orthogonal are left.
    """
    directions = torch.randn(
        matrices.shape[-1], BATCHED, generator=torch.Generator().manual_seed(0)
    ).to(matrices)
    for _ in range(rounds):
        image = matrices @ directions
        square, turn = torch.linalg.eigh(image.mT @ image)  # in the end λ²
        known = square > 1e-20 * square[:, -1:]
        directions = image @ turn * torch.where(known, square, torch.inf).rsqrt().unsqueeze(1)
    return square[:, -count:].clamp(min=0).sqrt(), directions[:, :, -count:]


def _clusters(z: Tensor, count: int, generator: torch.Generator | None, rounds: int = 25) -> Tensor:
    """Index of the cluster of each point (N, S), by Lloyd's algorithm: (N,)."""
    first = torch.randperm(
        len(z), generator=generator, device=None if generator is None else generator.device
    )
    centres = z[first[:count].to(z.device)]
    nearest = torch.zeros(len(z), dtype=torch.long, device=z.device)
    for _ in range(rounds):
        nearest = torch.cat([torch.cdist(part, centres).argmin(1) for part in z.split(4096)])
        members = torch.bincount(nearest, minlength=len(centres)).clamp(min=1).unsqueeze(1)
        centres = torch.zeros_like(centres).index_add_(0, nearest, z) / members
    return nearest


class CapsuleNetwork(nn.Module):
    """Autoencoder, capsule encoder and capsule decoder, joined.

    Parameters
    ----------
    architecture
        Sizes and options; by default those of `Architecture()`.
    generator
        Source of the initial weights.
    """

    def __init__(
        self, architecture: Architecture | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.architecture = a = architecture or Architecture()
        a.check()
        channels, height, width = a.image_shape
        self.autoencoder = ConvAutoencoder(
            channels,
            features=a.features,
            kernel_size=a.kernel_size,
            dropout=a.dropout,
            bias=a.bias,
            generator=generator,
        )
        rows, columns = self.autoencoder.grid((height, width))
        below = (rows * columns * a.features // a.capsule_dim, a.capsule_dim)
        self.pixel_decoder = (
            PixelDecoder(self.autoencoder, (height, width)) if a.pixel_decoder else None
        )
        self.preprocessing = Preprocessing(
            *below,
            centre=a.centre,
            scale=a.scale,
            whiten=a.whiten,
            equalized_components=a.equalized_components,
        )
        self.encoders, self.decoders = nn.ModuleList(), nn.ModuleList()
        for above in a.experts:
            self.encoders.append(
                CapsuleExperts(
                    *below,
                    *above,
                    iterations=a.iterations,
                    sharpness=a.sharpness,
                    normalize=a.normalize,
                    agreement=a.agreement,
                    winners=a.winners,
                    generator=generator,
                )
            )
            self.decoders.append(
                CapsuleDecoder(
                    *above,
                    *below,
                    iterations=a.iterations,
                    sharpness=a.decoder_sharpness,
                    agreement=a.agreement,
                    generator=generator,
                )
            )
            below = above
        self.code_density = CodeDensity(
            *below, joint_components=a.joint_components, expert_components=a.expert_components
        )

    def activations(self, images: Tensor) -> Tensor:
        """Features grouped into capsules, before scaling and squashing: (B, C, H, W) → (B, I, K)."""
        checks.require_tensor("images", images)
        channels, height, width = self.architecture.image_shape
        # The autoencoder checks the rest; it would see images of other sizes as well.
        if (
            images.ndim == 4
            and images.shape[1] == channels
            and tuple(images.shape[2:]) != (height, width)
        ):
            raise ValueError(
                f"images must be {height}×{width}, but are {images.shape[2]}×{images.shape[3]}"
            )
        features = self.autoencoder.encode(images)
        return features.permute(0, 2, 3, 1).reshape(
            len(features), -1, self.architecture.capsule_dim
        )

    def capsules(self, images: Tensor) -> Tensor:
        """Input capsules of the first layer: (B, C, H, W), from 0 to 1 → (B, I, K)."""
        activations = self.activations(images)
        checks.check_pixels_on_cpu(
            images, "images"
        )  # not in `activations`, with which training sees its own images
        return self.preprocessing.to_capsules(activations)

    def encode(self, images: Tensor) -> Tensor:
        """Code of images, the experts of the highest layer: (B, C, H, W) → (B, J, D)."""
        x = self.capsules(images)
        for encoder in self.encoders:
            x = encoder(x)
        return x

    def decode(self, code: Tensor) -> Tensor:
        """Images from codes: (B, J, D) → (B, C, H, W)."""
        x = code
        for decoder in reversed(self.decoders):
            x = decoder(x)
        return self.draw(x)

    def draw(self, x: Tensor) -> Tensor:
        """Images from input capsules: (B, I, K) → (B, C, H, W)."""
        return torch.sigmoid(self.logits(self.preprocessing.from_capsules(x)))

    def logits(self, activations: Tensor) -> Tensor:
        """Images before their sigmoid from what `activations` gives: (B, I, K) → (B, C, H, W)."""
        _, height, width = self.architecture.image_shape
        rows, columns = self.autoencoder.grid((height, width))
        features = activations.reshape(len(activations), rows, columns, -1).permute(0, 3, 1, 2)
        if self.pixel_decoder is None:
            return self.autoencoder.logits(features, (height, width))
        return self.pixel_decoder.logits(features)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        return self.decode(self.encode(images))

    def free_energy(self, images: Tensor) -> Tensor:
        """F of the input capsules under the first layer: (B, C, H, W) → (B,)."""
        free_energy: Tensor = self.encoders[0].free_energy(self.capsules(images))  # type: ignore[operator]
        return free_energy

    def sample(
        self,
        count: int,
        domain: Domain = "joint",
        *,
        expert: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw codes of the highest layer from a domain: (count, J, D); see `generate`."""
        checks.require_int("count", count, 1)
        checks.require_choice("domain", domain, DOMAINS)
        if expert is not None:
            if domain == "joint":
                raise ValueError(
                    "expert must be None in the domain 'joint', where all experts are drawn together"
                )
            checks.require_int("expert", expert, 0, self.architecture.experts[-1][0] - 1)
        return F.squash(self.code_density.sample(count, domain, expert, generator))

    @torch.no_grad()
    def generate(
        self,
        count: int,
        domain: Domain = "joint",
        *,
        expert: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw images from the model, without gradients; for these decode what `sample` draws.

        Parameters
        ----------
        count
            How many.
        domain
            Where codes are drawn before they are squashed and decoded. With one expert on and all others 0:
            ``"complete"``, N(0, 1) in every dimension (the paper);
            ``"restricted"``, the same, negated where it disagrees with the expert's mean direction over the training
            images (the paper);
            ``"learned"``, a mixture of Gaussians fitted to the codes of the training images for which the expert is the
            strongest.
            With all experts together: ``"joint"``, a mixture of Gaussians fitted to whole codes.
        expert
            Which expert is on; None: one drawn at random for each image.
        generator
            Source of the draws, on the model's device.

        Returns
        -------
        (count, C, H, W)
            From 0 to 1.
        """
        return self.decode(self.sample(count, domain, expert=expert, generator=generator))

    @torch.no_grad()
    def traverse(
        self,
        expert: int,
        offsets: Tensor | Sequence[float] | None = None,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """Vary the instantiation parameters of an expert one at a time, before squashing, without gradients.

        Parameters
        ----------
        expert
            Whose parameters.
        offsets : (S,), optional
            How far to go from the start, in standard deviations of the parameter over the training images for which
            the expert is the strongest; by default −3, −2, …, 3.
        start : (J, D), optional
            Code to start from; by default the mean of the expert's codes of these images, with all others 0.

        Returns
        -------
        (D, S, C, H, W)
            One row of images for each parameter.
        """
        experts, dim = self.architecture.experts[-1]
        checks.require_int("expert", expert, 0, experts - 1)
        mean, deviation = self.code_density.mean[expert], self.code_density.std[expert]
        far = torch.as_tensor(
            torch.linspace(-REACH, REACH, STEPS) if offsets is None else offsets
        ).to(mean)
        checks.require_shape(
            "offsets", far, "S", (None,), "give one number for each image of a row"
        )
        if start is None:
            z = torch.zeros_like(self.code_density.mean)
            z[expert] = mean
        else:
            checks.require_shape("start", start, "JD", (experts, dim), "give the code of one image")
            z = F.unsquash(start.to(mean))
        steps = torch.diag(deviation).unsqueeze(1) * far.unsqueeze(1)  # (D, S, D)
        varied = z.repeat(dim, len(far), 1, 1)
        varied[:, :, expert] += steps
        images = self.decode(F.squash(varied.flatten(0, 1)))
        return images.view(dim, len(far), *images.shape[1:])

    def save(self, folder: str | os.PathLike[str], *, half: bool = False) -> None:
        """Write `config.json` and `model.safetensors` into a folder, which `load` reads back.

        Parameters
        ----------
        folder
            Where to; it is made if need be.
        half
            Whether the file is to be about half as large: filters, the weights of capsule layers and the factors of
            the densities are rounded to float16, which `load` turns into float32 again. What takes little room and may
            not be rounded stays as it is: biases, the scaling and its inverse, the means and shares that decide what a
            seed draws. So does a tensor with numbers too small for float16.

        Raises
        ------
        ValueError
            If numbers are too large for float16.
        """
        folder = Path(folder)
        about = {"format": FORMAT, "version": VERSION}
        tensors = _in_half(self) if half else self.state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(
            folder / "model.safetensors", tensors, about | ({"half": True} if half else {})
        )
        write_json(folder / "config.json", about | {"architecture": asdict(self.architecture)})

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> CapsuleNetwork:
        """Read what `save` wrote, in evaluation mode, float32 and frozen.

        No parameter asks for a gradient, so that results can be used at once; `network.requires_grad_()` unfreezes all.

        Raises
        ------
        FileNotFoundError
            If the folder holds no model.
        ModelError
            If its files are damaged, foreign, or of a newer version.
        """
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{folder} holds no trained model: there is no {name} in it"
                )
        config = read_json(folder / "config.json")
        architecture = read_architecture(config, folder / "config.json")
        tensors, about = read_tensors(folder / "model.safetensors")
        check_version(about, folder / "model.safetensors")
        if about.get("half") is True:
            tensors = {
                name: each.float() if each.dtype == torch.float16 else each
                for name, each in tensors.items()
            }
        try:
            with torch.device("meta"):  # nothing is allocated before the sizes are known to agree
                network = cls(architecture)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{folder / 'config.json'} describes no possible architecture ({error})"
            ) from error
        network.load_tensors(tensors, folder / "model.safetensors")
        return network.to(device).eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, device: torch.device | str = "cpu", **options: Any
    ) -> CapsuleNetwork:
        """Open a network of the package, from a folder or from the Hugging Face Hub, frozen as `load` does.

        Parameters
        ----------
        model
            Name of a model that comes with poecaps, such as ``"mnist"``, a folder that `save` or a run wrote, or the
            name of a repository on the Hub, such as ``"me/digits"``.
        device
            Where it goes.
        options
            For the Hub: `revision`, `cache_dir`, `force_download`, `local_files_only`, `token`.

        Raises
        ------
        FileNotFoundError
            If there is no such model, and it cannot be the name of a repository.
        ModuleNotFoundError
            If it is no folder and huggingface_hub is not installed.
        ModelError
            If its files are damaged, foreign, or of a newer version.
        """
        from poecaps import hub

        return hub.from_pretrained(model, device=device, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        run: str | os.PathLike[str] | None = None,
        half: bool = False,
        licence: str = "unknown",
        **options: Any,
    ) -> str:
        """Put the network on the Hugging Face Hub, with a model card and a picture of what it draws.

        Parameters
        ----------
        repo_id
            Name of the repository, such as ``"me/digits"``; it is made if need be.
        run
            Folder of the run that the network comes from. The card then says how it was trained and, after `poecaps
            evaluate`, how good it is; paths and names of the machine are left out.
        half
            Whether the large tensors are rounded to float16; see `save`.
        licence
            Of the weights, as the Hub writes it, such as ``"mit"``.
        options
            For the Hub: `private`, `token`, `branch`, `create_pr`, `commit_message`.

        Returns
        -------
        str
            The address of the commit.

        Raises
        ------
        ModuleNotFoundError
            If huggingface_hub is not installed.
        """
        from poecaps import hub

        return hub.push_to_hub(self, repo_id, run=run, half=half, licence=licence, **options)

    def load_tensors(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Take over a state_dict read from a file, if it is one of this architecture."""
        wanted = {name: _describe(tensor) for name, tensor in self.state_dict().items()}
        found = {name: _describe(tensor) for name, tensor in tensors.items()}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ModelError(
                    f"{source} does not fit its architecture: {name} is {found.get(name, 'missing')}, "
                    f"where {wanted.get(name, 'nothing')} is due"
                )
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise ModelError(f"{source} holds no usable weights: {broken[0]} is not finite")
        self.load_state_dict(dict(tensors), assign=True)


def _in_half(network: CapsuleNetwork) -> dict[str, Tensor]:
    """Round what is large in a network to float16, where that costs little; see `CapsuleNetwork.save`."""
    tensors: dict[str, Tensor] = network.state_dict()
    large = [name for name, parameter in network.named_parameters() if parameter.ndim > 1]
    for name in (*large, *(name for name in tensors if name.endswith(".factors"))):
        exact, rounded = tensors[name], tensors[name].half()
        if not rounded.isfinite().all():
            raise ValueError(
                f"{name} reaches {exact.abs().max():.3g}, but float16 ends at {torch.finfo(torch.float16).max:.0f}; "
                "save without half"
            )
        if (rounded.float() - exact).norm() <= HALF_ERROR * exact.norm():
            tensors[name] = rounded
    return tensors


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def check_version(about: Mapping[str, Any], source: Path) -> None:
    """Refuse files of other programs and of later versions of this one."""
    if about.get("format") != FORMAT or not isinstance(about.get("version"), int):
        raise ModelError(f"{source} was not written by poecaps")
    if about["version"] > VERSION:
        raise ModelError(
            f"{source} has format version {about['version']}, but this poecaps knows versions up to {VERSION}; upgrade"
        )


def read_architecture(config: Mapping[str, Any], source: Path) -> Architecture:
    """Rebuild an `Architecture` from its JSON."""
    check_version(config, source)
    values = config.get("architecture")
    known = {field.name for field in fields(Architecture)}
    # What a file does not mention is as it was before there was a choice: the default.
    if not isinstance(values, dict) or not {"image_shape", "experts"} <= values.keys() <= known:
        raise ModelError(
            f"{source} is damaged: it must describe an architecture by {', '.join(sorted(known))}"
        )
    try:
        shape = tuple(values["image_shape"])
        experts = tuple(tuple(layer) for layer in values["experts"])
    except TypeError as error:
        raise ModelError(
            f"{source} is damaged: image_shape and experts must be lists ({error})"
        ) from error
    return Architecture(**values | {"image_shape": shape, "experts": experts})
