"""The whole model: images → features → capsules → experts, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps import sampling, serialization
from poecaps._files import ModelError
from poecaps._modules import BATCH_SIZE
from poecaps.autoencoder import ConvAutoencoder, PixelDecoder
from poecaps.code_density import DOMAIN_INFO, DOMAINS, CodeDensity
from poecaps.energy import BallBase, CapsuleDensity
from poecaps.layer import CapsuleDecoder, CapsuleExperts
from poecaps.options import MAX_NUMBERS, Architecture
from poecaps.preprocessing import Preprocessing

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.code_density import Domain
    from poecaps.sampling import Samples

DENSITY_STEPS = 600  # steps of a chain from noise to a draw of the density
TRAVERSAL_STEPS = 7  # images in a row of a traversal
TRAVERSAL_REACH = 3.0  # its ends, in standard deviations of the training codes


class CapsuleNetwork(nn.Module):
    """Autoencoder, capsule encoder and capsule decoder: an encoder and a generator of images.

    Parameters
    ----------
    architecture
        Sizes and options; by default those of `Architecture()`.
    generator
        Source of the initial weights.

    Attributes
    ----------
    autoencoder
        Stage 1: convolutions from images to features, and back.
    pixel_decoder
        Stage 4: separate filters from features to images, or None.
    preprocessing
        Map from features to the input capsules of the first layer, and back.
    density, whitening
        `CapsuleDensity` over the whitened features, and the map to them; or None.
    encoders, decoders
        Stages 2 and 3: `CapsuleExperts` and `CapsuleDecoder` of each layer, the lowest first.
    code_density
        Densities of the codes of the highest layer, from which images are generated.
    """

    def __init__(
        self, architecture: Architecture | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.architecture = a = architecture or Architecture()
        a.validate()
        channels, height, width = a.image_shape
        self.autoencoder = ConvAutoencoder(
            channels,
            features=a.features,
            kernel_size=a.kernel_size,
            margin=a.margin or 0,
            even_overlap=a.even_overlap or False,
            halvings=a.halvings,
            colour_whitening=a.colour_whitening,
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
        self.density: CapsuleDensity | None = None
        self.whitening: Preprocessing | None = None
        if a.density.experts is not None:
            components, numbers = a.density.base_components, below[0] * below[1]
            checks.require_int("model.density.base_components", components, 0, numbers)
            self.whitening = Preprocessing(*below, centre=True, scale=None, whiten=True)
            self.density = CapsuleDensity(
                *below,
                *a.density.experts,
                linear_dims=a.density.linear_dims,
                strength=a.density.strength,
                base=a.density.base,
                base_components=a.density.base_components,
                base_max_variance=a.density.base_max_variance,
                iterations=a.density.iterations,
                sharpness=a.density.sharpness,
                normalize=a.density.normalize,
                agreement=a.density.agreement,
                generator=generator,
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

    def images_at_once(self, most: int = BATCH_SIZE) -> int:
        """Return how many images should go through the network together: fewer if they are large.

        Such that no array of a batch has more numbers than one image may have.
        """
        return max(1, min(most, MAX_NUMBERS // self.architecture.largest_array()))

    # Images to codes

    def activations(self, images: Tensor) -> Tensor:
        """Compute the features, grouped into capsules: (B, C, H, W) → (B, I, K).

        The values of the pixels are not checked, because training calls this method for images
        that were checked before.
        """
        checks.require_tensor("images", images)
        channels, height, width = self.architecture.image_shape
        # The autoencoder checks everything else, but accepts images of other sizes.
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
        """Compute the input capsules of the first layer: (B, C, H, W), from 0 to 1 → (B, I, K)."""
        activations = self.activations(images)
        checks.check_pixels_on_cpu(images, "images")
        return self.preprocessing.to_capsules(activations)

    def encode(self, images: Tensor) -> Tensor:
        """Encode images as the experts of the highest layer: (B, C, H, W) → (B, J, D)."""
        x = self.capsules(images)
        for encoder in self.encoders:
            x = encoder(x)
        return x

    def free_energy(self, images: Tensor) -> Tensor:
        """Compute F of the input capsules under the first layer: (B, C, H, W) → (B,)."""
        free_energy: Tensor = self.encoders[0].free_energy(self.capsules(images))  # type: ignore[operator]
        return free_energy

    def whitened(self, images: Tensor) -> Tensor:
        """Compute the capsules of the density: (B, C, H, W), from 0 to 1 → (B, I, K)."""
        activations = self.activations(images)
        checks.check_pixels_on_cpu(images, "images")
        return self.whiten(activations)

    def whiten(self, activations: Tensor) -> Tensor:
        """Turn `activations` into the capsules of the density: (B, I, K) → (B, I, K)."""
        density, whitening = self._with_density()
        z = whitening.transform(activations)
        return F.squash(z) if isinstance(density.base, BallBase) else z

    def log_prob(self, images: Tensor) -> Tensor:
        """Compute the log-density of the features, relative to independent capsules.

        log P(v) − log N(v; 0, 1) in nats, with v the whitened capsules of an image: how much more
        probable the experts and the base measure make it than independent capsules do. With a base
        measure on the ball, log P(x) relative to the uniform density.

        Parameters
        ----------
        images : (B, C, H, W)
            From 0 to 1.

        Returns
        -------
        (B,)
        """
        density, x = self.require_density(), self.whitened(images)
        return density.log_ratio(x) + density.base.log_ratio(x)

    # Codes to images

    def decode(self, code: Tensor) -> Tensor:
        """Decode codes to images: (B, J, D) → (B, C, H, W)."""
        x = code
        for decoder in reversed(self.decoders):
            x = decoder(x)
        return self.decode_capsules(x)

    def _decode_in_parts(self, codes: Tensor) -> Tensor:
        """Decode codes, in parts if the images are large: (B, J, D) → (B, C, H, W)."""
        parts = codes.split(self.images_at_once(max(1, len(codes))))
        return self.decode(codes) if len(parts) == 1 else torch.cat(list(map(self.decode, parts)))

    def decode_capsules(self, x: Tensor) -> Tensor:
        """Decode the input capsules of the first layer to images: (B, I, K) → (B, C, H, W)."""
        return torch.sigmoid(self.logits(self.preprocessing.from_capsules(x)))

    def decode_whitened(self, x: Tensor, *, tied: bool = False) -> Tensor:
        """Decode capsules of the density to images: (B, I, K) → (B, C, H, W).

        Parameters
        ----------
        x : (B, I, K)
        tied
            Whether the transposed filters of the autoencoder decode them even if the model has a
            pixel decoder.
        """
        density, whitening = self._with_density()
        if isinstance(density.base, BallBase):
            x = F.unsquash(x)
        return torch.sigmoid(self.logits(whitening.inverse_transform(x), tied=tied))

    def require_density(self) -> CapsuleDensity:
        """Return the density of the network; raise ValueError if it has none."""
        return self._with_density()[0]

    def _with_density(self) -> tuple[CapsuleDensity, Preprocessing]:
        if self.density is None or self.whitening is None:
            raise ValueError(
                "this model has no density; train one with the preset energy, or with the option "
                "model.density.experts"
            )
        if self.density.weight.device.type == "mps":
            raise ValueError("a density needs float64, which mps does not have; use the device cpu")
        return self.density, self.whitening

    def logits(self, activations: Tensor, *, tied: bool = False) -> Tensor:
        """Decode `activations` to images before the sigmoid: (B, I, K) → (B, C, H, W).

        By the pixel decoder if there is one; by the filters of the autoencoder if not, or if `tied`
        is true.
        """
        _, height, width = self.architecture.image_shape
        rows, columns = self.autoencoder.grid((height, width))
        features = activations.reshape(len(activations), rows, columns, -1).permute(0, 3, 1, 2)
        if self.pixel_decoder is None or tied:
            return self.autoencoder.logits(features, (height, width))
        return self.pixel_decoder.logits(features)

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode: (B, C, H, W) → (B, C, H, W)."""
        return self.decode(self.encode(images))

    # Generation

    @torch.no_grad()
    def sample_density(
        self,
        count: int,
        *,
        steps: int = DENSITY_STEPS,
        expert: int | Tensor | None = None,
        **options: Any,
    ) -> Samples:
        """Draw capsules from the density by Markov chains that start from noise.

        Parameters
        ----------
        count
            Number of chains.
        steps
            Steps of a chain. In two thirds of them it is annealed from the base measure to the
            model; the others leave the density exactly invariant.
        expert : int or (count,) of int, optional
            Draw from P(x | only this expert is on): one expert, or one for each chain. None: from
            P(x).
        options
            Further options of `poecaps.sampling.sample`, such as `ladder`, `start` or `generator`.
        """
        density = self._with_density()[0]
        checks.require_int("steps", steps, 2)
        options.setdefault("anneal", round(sampling.ANNEALED_SHARE * steps))
        checks.require_int("anneal", options["anneal"], 0, steps - 1)
        if expert is not None:
            options["on"] = self._only(expert, count)
        return sampling.sample(density, count, steps=steps - options["anneal"], **options)

    def _only(self, expert: int | Tensor, count: int) -> Tensor:
        """Return states in which only one expert is on: (J,), or (count, J) for as many experts."""
        density = self.require_density()
        if isinstance(expert, torch.Tensor):
            remedy = "give one expert for each chain"
            checks.require_shape("expert", expert, "B", (count,), remedy)
            for each in expert.unique().tolist():
                checks.require_int("expert", each, 0, density.out_capsules - 1)
        else:
            checks.require_int("expert", expert, 0, density.out_capsules - 1)
        on = torch.eye(density.out_capsules, device=density.weight.device)
        return on[expert]

    @torch.no_grad()
    def draw_from_density(
        self,
        count: int,
        *,
        levels: int | None = None,
        expert: int | Tensor | None = None,
        **options: Any,
    ) -> Samples:
        """Draw capsules from the density, with the diagnostics of the chains.

        Parameters
        ----------
        count
            Number of draws.
        levels
            Temperatures of parallel tempering (`poecaps.sampling.draw`), by which each mode of the
            density is drawn as often as it is probable; by default 32, and with an expert 0.
            0: the ends of chains that are annealed from noise (`sample_density`), which is faster.
        expert : int or (count,) of int, optional
            Draw from P(x | only this expert is on), see `sample_density`.
        options
            Number of `steps`, and further options of `poecaps.sampling.draw` or `sample_density`.
        """
        if levels is None:
            levels = sampling.LEVELS if expert is None else 0
        checks.require_int("levels", levels, 0)
        if levels and expert is None:
            return sampling.draw(self._with_density()[0], count, levels=levels, **options)
        ladder = sampling.tempering_ladder(levels) if levels else None
        return self.sample_density(count, expert=expert, ladder=ladder, **options)

    @torch.no_grad()
    def generate_from_density(self, count: int, *, tied: bool = False, **options: Any) -> Tensor:
        """Draw images from the density, without gradients: (count, C, H, W), from 0 to 1.

        Parameters
        ----------
        count
            Number of images.
        tied
            Whether images are decoded by the transposed filters of the autoencoder, and not by the
            pixel decoder.
        options
            Of `draw_from_density`: `levels`, `expert`, the number of `steps` and others.
        """
        return self.decode_whitened(self.draw_from_density(count, **options).capsules, tied=tied)

    def sample(
        self,
        count: int,
        domain: Domain = "joint",
        *,
        expert: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw codes of the highest layer, with the parameters of `generate`: (count, J, D)."""
        checks.require_int("count", count, 1)
        checks.require_choice("domain", domain, DOMAINS)
        if expert is not None:
            if DOMAIN_INFO[domain].whole_code:
                raise ValueError(
                    f"expert must be None in the domain {domain!r}, which draws all experts "
                    "together"
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
        """Draw images from the model, without gradients.

        For images with a gradient, call `decode` on the codes of `sample`.

        Parameters
        ----------
        count
            Number of images.
        domain
            Density from which codes are drawn before they are squashed and decoded. With one
            expert on and all others 0:
            ``"complete"``, N(0, 1) in every dimension (the paper);
            ``"restricted"``, the same, but negated if it disagrees with the expert's mean direction
            over the training images for which the expert is the strongest (the paper);
            ``"learned"``, a mixture of Gaussians fitted to the codes of the training images for
            which the expert is the strongest.
            With all experts together: ``"joint"``, a mixture of Gaussians fitted to whole codes.
        expert
            Index of the expert that is on; None: one drawn at random for each image.
        generator
            Source of the draws, on the device of the model.

        Returns
        -------
        (count, C, H, W)
            From 0 to 1.
        """
        codes = self.sample(count, domain, expert=expert, generator=generator)
        return self._decode_in_parts(codes)

    @torch.no_grad()
    def traverse(
        self,
        expert: int,
        offsets: Tensor | Sequence[float] | None = None,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """Vary the instantiation parameters of an expert one at a time, without gradients.

        Parameters are varied before squashing.

        Parameters
        ----------
        expert
            Index of the expert.
        offsets : (S,), optional
            Distances from the start, in standard deviations of the parameter over the training
            images for which the expert is the strongest; by default −3, −2, …, 3.
        start : (J, D), optional
            Code to start from; by default the mean of the expert's codes of these images, with all
            other experts 0.

        Returns
        -------
        (D, S, C, H, W)
            One row of images for each parameter.
        """
        experts, dim = self.architecture.experts[-1]
        checks.require_int("expert", expert, 0, experts - 1)
        mean, std = self.code_density.mean[expert], self.code_density.std[expert]
        if offsets is None:
            offsets = torch.linspace(-TRAVERSAL_REACH, TRAVERSAL_REACH, TRAVERSAL_STEPS)
        offsets = torch.as_tensor(offsets).to(mean)
        checks.require_shape(
            "offsets", offsets, "S", (None,), "give one number for each image of a row"
        )
        if start is None:
            z = torch.zeros_like(self.code_density.mean)
            z[expert] = mean
        else:
            checks.require_shape("start", start, "JD", (experts, dim), "give the code of one image")
            z = F.unsquash(start.to(mean))
        varied = z.repeat(dim, len(offsets), 1, 1)
        varied[:, :, expert] += torch.diag(std).unsqueeze(1) * offsets.unsqueeze(1)  # (D, S, D)
        codes = F.squash(varied.flatten(0, 1))
        images = self._decode_in_parts(codes)
        return images.view(dim, len(offsets), *images.shape[1:])

    # Files

    def save(self, folder: str | os.PathLike[str], *, half: bool = False) -> None:
        """Write `config.json` and `model.safetensors` into a folder, for `load`.

        Parameters
        ----------
        folder
            Created if it does not exist.
        half
            Whether to write a file of about half the size: filters, the weights of capsule layers
            and the factors of the code densities are rounded to float16, which `load` converts back
            to float32. Everything small and sensitive stays in float32: biases, the preprocessing
            and its inverse, and the means and mixture weights, which decide the draws of a seed.
            So do tensors whose numbers are too small for float16.

        Raises
        ------
        ValueError
            If numbers are too large for float16.
        """
        tensors = serialization.half_precision(self) if half else self.state_dict()
        serialization.write_model(Path(folder), self.architecture, tensors, half=half)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> CapsuleNetwork:
        """Read a folder that `save` wrote: in evaluation mode, float32 and frozen.

        No parameter requires a gradient, so that results can be converted to NumPy directly;
        `network.requires_grad_()` makes all of them trainable.

        Raises
        ------
        FileNotFoundError
            If the folder does not contain a model.
        ModelError
            If its files are damaged, not written by poecaps, or of another format version.
        """
        folder = Path(folder)
        architecture, tensors = serialization.read_model(folder)
        try:
            with torch.device("meta"):  # no memory is allocated before the sizes are compared
                network = cls(architecture)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{folder} describes an invalid architecture ({error})") from error
        weights = folder / serialization.WEIGHTS
        serialization.load_state(network, tensors, weights)
        try:
            for mixtures in (network.code_density.per_expert, network.code_density.joint.mixture):
                mixtures.check_weights()
        except ValueError as error:
            raise ModelError(f"{weights} has an invalid code density: {error}") from error
        return network.to(device).eval().requires_grad_(False)
