"""The stages: what each part of the network learns from, its loss, and how to tell whether it learns."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from poecaps import functional as F
from poecaps.data.buffers import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from poecaps.autoencoder import ConvAutoencoder, PixelDecoder
    from poecaps.data import ImageSet
    from poecaps.layer import CapsuleDecoder, CapsuleExperts
    from poecaps.network import CapsuleNetwork
    from poecaps.training.config import Config, DecoderStage, EncoderStage, PixelDecoderStage, Stage
    from poecaps.training.workers import Workers

    Draw = Callable[[Tensor], Tensor]

CHUNK = 250  # images that go through a frozen part together, on a CPU
WIDE = 1000  # and on a GPU
PROBE = 512  # training images that the running numbers are measured on


class Material:
    """Images, and what the frozen parts of the network make of them: made once, kept where the steps can reach it.

    On an accelerator with room for it, that is its memory; else the host's, and beyond some size a mapped file.
    """

    def __init__(
        self,
        data: ImageSet,
        network: CapsuleNetwork,
        device: torch.device,
        workers: Workers,
        *,
        half: bool,
    ) -> None:
        self.data, self.network, self.device, self.workers, self.half = (
            data,
            network,
            device,
            workers,
            half,
        )
        self.chunk = CHUNK if device.type == "cpu" else WIDE
        self.features: Tensor | None = None
        self.capsules: Tensor | None = None
        self.experts: dict[int, Tensor] = {}
        self.pixels: Tensor | None = None
        if data.images.dtype == np.uint8 and self._has_room(data.images.nbytes):
            self.pixels = torch.empty(len(data), *data.shape, dtype=torch.uint8, device=device)
            for start in range(
                0, len(data), WIDE
            ):  # in chunks, for the images may be a mapped file
                part = np.array(data.images[start : start + WIDE])
                self.pixels[start : start + WIDE] = torch.from_numpy(part).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.data)

    def images(self, indices: Tensor) -> Tensor:
        """Images from 0 to 1: (B,) → (B, C, H, W)."""
        if self.pixels is not None:
            return self.pixels[indices.to(self.device)] / 255
        return self.data.batch(indices.cpu()).to(self.device)

    def has_images(self) -> bool:
        """Tell whether the images lie in the memory of the device."""
        return self.pixels is not None

    def has_inputs(self, layer: int) -> bool:
        """Tell whether the `inputs` of a layer lie in the memory of the device; the codes of a layer are the next's."""
        kept = self.experts[layer] if layer > 0 else self.features
        return kept is not None and kept.device == self.device

    def make_inputs(self, layer: int) -> None:
        """Make what `inputs` of this layer are taken from; every process must call it."""
        if layer > 0:
            self.make_codes(layer)
        elif self.features is None:
            self.network.autoencoder.eval()
            rows = self.network.preprocessing.mean.shape

            def see(indices: Tensor) -> Tensor:
                with self.autocast():
                    return self.network.activations(self.images(indices))

            self.features = self._for_all(see, rows, torch.float16 if self.half else torch.float32)

    def keep_inputs(self) -> None:
        """Keep the `inputs` of the first layer, once it is known how they are scaled, where there is room for them."""
        size = len(self) * self.network.preprocessing.mean.numel() * torch.float32.itemsize
        if self.capsules is None and self._has_room(size):
            self.capsules = torch.cat(
                [self.inputs(0, part) for part in torch.arange(len(self)).split(self.chunk)]
            )

    def make_codes(self, layer: int) -> None:
        """Make the `codes` of this layer, counted from 1; every process must call it."""
        if layer not in self.experts:
            self.make_inputs(layer - 1)
            self.keep_inputs()
            encoder: CapsuleExperts = self.network.encoders[layer - 1].eval()  # type: ignore[assignment]
            rows = (encoder.out_capsules, encoder.out_dim)
            self.experts[layer] = self._for_all(
                lambda indices: encoder(self.inputs(layer - 1, indices)), rows, torch.float32
            )

    def fit_scaling(self) -> None:
        """Fit the scaling of the input capsules to the features."""
        features = self.features
        assert features is not None  # noqa: S101 (make_inputs(0) comes first)
        self.network.preprocessing.fit(_Parts(features, self.device, self.chunk))
        self.workers.follow_first(list(self.network.preprocessing.buffers()))

    def inputs(self, layer: int, indices: Tensor) -> Tensor:
        """Squashed capsules that a layer sees: (B,) → (B, I, K)."""
        if layer > 0:
            return self.codes(layer, indices)
        if self.capsules is not None:
            return _take(self.capsules, indices, self.device)
        assert self.features is not None  # noqa: S101 (make_inputs(0) comes first)
        with torch.no_grad():
            return self.network.preprocessing.to_capsules(
                _take(self.features, indices, self.device).float()
            )

    def codes(self, layer: int, indices: Tensor) -> Tensor:
        """Experts of a trained layer, counted from 1: (B,) → (B, J, D)."""
        return _take(self.experts[layer], indices, self.device)

    def probe(self) -> Tensor:
        """Return the indices of the images that the running numbers are measured on, from all over the set."""
        return torch.arange(0, len(self), math.ceil(len(self) / PROBE))

    def autocast(self) -> Any:
        """Let convolutions run in bfloat16 where that is wanted."""
        return (
            torch.autocast(self.device.type, dtype=torch.bfloat16) if self.half else nullcontext()
        )

    @torch.no_grad()
    def _for_all(
        self, make: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Make something of every image, each process its share: → (N, *shape)."""
        count, size = len(self), self.workers.size
        kept = self._room(count, *shape, dtype=dtype)
        for start in range(0, count, self.chunk * size):
            stop = min(start + self.chunk * size, count)
            length = size * math.ceil(
                (stop - start) / size
            )  # shares are equally long; the last image may come twice
            indices = torch.arange(start, start + length).clamp(max=count - 1)
            made = self.workers.gather(make(self.workers.share(indices)).to(dtype))
            kept[start:stop] = made[: stop - start]
        return kept

    def _room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._has_room(size):
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.from_numpy(allocate(shape, np.dtype(str(dtype).removeprefix("torch."))))

    def _has_room(self, size: int) -> bool:
        """Tell whether so many bytes are a small part of the accelerator's free memory."""
        return self.device.type == "cuda" and size < torch.cuda.mem_get_info(self.device)[0] // 4


class _Parts:
    """A tensor in chunks on a device, as often as one looks."""

    def __init__(self, whole: Tensor, device: torch.device, chunk: int) -> None:
        self.whole, self.device, self.chunk = whole, device, chunk

    def __iter__(self) -> Iterator[Tensor]:
        return (part.to(self.device) for part in self.whole.split(self.chunk))


def _take(kept: Tensor, indices: Tensor, device: torch.device) -> Tensor:
    return kept[indices.to(kept.device)].to(device)


class Task:
    """One stage for one part of the network."""

    def __init__(self, name: str, stage: Stage, part: nn.Module, material: Material) -> None:
        self.name, self.stage, self.part, self.material = name, stage, part, material

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Make what the steps learn from and, where the stage begins, give the part its initial weights."""
        raise NotImplementedError

    def finish(self) -> None:
        """Bring the part into the form in which later stages use it."""

    def is_resident(self) -> bool:
        """Tell whether all that the steps learn from lies in the memory of the device."""
        raise NotImplementedError

    def loss(self, indices: Tensor, draw: Draw) -> Tensor:
        """Compute the loss of the images with these indices (B,); `draw` gives uniform numbers."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        """Measure, on the same few images every time, whether the part learns."""
        raise NotImplementedError

    def _reset(self, std: float, generator: torch.Generator) -> None:
        device = self.material.device
        self.part.cpu()
        self.part.reset_parameters(std=std, generator=generator)  # type: ignore[operator]
        self.part.to(device)


class AutoencoderTask(Task):
    """Stage 1: the convolutional autoencoder learns to reconstruct images."""

    part: ConvAutoencoder

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Do nothing: the filters have their initial weights, and learn from the images themselves."""

    def is_resident(self) -> bool:
        """Tell whether all that the steps learn from lies in the memory of the device."""
        return self.material.has_images()

    def loss(self, indices: Tensor, draw: Draw) -> Tensor:
        """Compute the cross-entropy of the pixels."""
        with self.material.autocast():
            return self.part.loss(self.material.images(indices), draw=draw)

    def measure(self) -> dict[str, float]:
        """Measure the share of the images' variance that is lost."""
        images = self.material.images(self.material.probe())
        with self.material.autocast():
            error = (self.part(images).float() - images).square().sum()
        return {"reconstruction_error": (error / _variance(images)).item()}


class EncoderTask(Task):
    """Stage 2: a layer of experts learns by contrastive divergence."""

    part: CapsuleExperts
    stage: EncoderStage

    def __init__(self, layer: int, stage: EncoderStage, material: Material) -> None:
        super().__init__(f"encoder {layer + 1}", stage, material.network.encoders[layer], material)
        self.layer, self.later = layer, self.part.winners

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Make the capsules below; scale them, where they are the first."""
        self.material.make_inputs(self.layer)
        if fresh:
            if self.layer == 0:
                self.material.fit_scaling()
            self._reset(self.stage.init_std, generator)
        self.material.keep_inputs()
        if self.stage.winners is not None:
            self.part.winners = self.stage.winners

    def finish(self) -> None:
        """End a competition that was for learning only, and set how much experts fire.

        Who would have won is now who fires most. One factor for all weights then changes no coefficient and no winner,
        only how far experts are squashed: where all are near 1, codes lose who is the strongest.
        """
        if self.stage.winners is not None:
            self.part.winners = self.later
            self.part.fold_balance()
        if self.stage.target_firing is not None:
            with torch.no_grad():
                z = self.part.route(
                    self.material.inputs(self.layer, self.material.probe())
                ).preactivation
                self.part.weight.mul_(
                    factor_for_firing(z.norm(dim=-1).amax(1), self.stage.target_firing)
                )

    def is_resident(self) -> bool:
        """Tell whether all that the steps learn from lies in the memory of the device."""
        return self.material.has_inputs(self.layer)

    def loss(self, indices: Tensor, draw: Draw) -> Tensor:
        """Compute the loss of contrastive divergence."""
        x = self.material.inputs(self.layer, indices)
        uniform = None
        if self.stage.mixing == "bernoulli":
            like = x.new_empty(len(x), self.part.out_capsules)
            uniform = torch.stack([draw(like) for _ in range(self.stage.k)])
        return self.part.contrastive_divergence(
            x, self.stage.k, mixing=self.stage.mixing, uniform=uniform
        )

    def measure(self) -> dict[str, float]:
        """Measure the share of the capsules that is lost and the mean firing probability, as the layer learns.

        And the effective rank of the code, as the layer will be used.
        """
        x = self.material.inputs(self.layer, self.material.probe())
        error = (self.part.reconstruct(x) - x).square().sum() / x.square().sum()
        firing = self.part.firing_probability(x).mean()
        winners, self.part.winners = self.part.winners, self.later
        rank = effective_rank(self.part(x).flatten(1))
        self.part.winners = winners
        return {
            "reconstruction_error": error.item(),
            "firing": firing.item(),
            "effective_rank": rank,
        }


class DecoderTask(Task):
    """Stage 3: a layer of capsules learns to draw what is below from the experts above."""

    part: CapsuleDecoder
    stage: DecoderStage

    def __init__(self, layer: int, stage: DecoderStage, material: Material) -> None:
        super().__init__(f"decoder {layer + 1}", stage, material.network.decoders[layer], material)
        self.layer = layer

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:
        """Make the capsules below and the experts above."""
        self.material.make_codes(self.layer + 1)
        if fresh:
            self._reset(self.stage.init_std, generator)

    def is_resident(self) -> bool:
        """Tell whether all that the steps learn from lies in the memory of the device."""
        return self.material.has_inputs(self.layer) and self.material.has_inputs(self.layer + 1)

    def loss(self, indices: Tensor, draw: Draw) -> Tensor:
        """Compute the loss of the decoder's rule, for some images from their strongest expert alone."""
        y = _some_alone(
            self.material.codes(self.layer + 1, indices), self.stage.single_expert_share, draw
        )
        return self.part.contrastive_divergence(y, self.material.inputs(self.layer, indices))

    def measure(self) -> dict[str, float]:
        """Measure the share of the variance below that is lost."""
        probe = self.material.probe()
        z = F.unsquash(self.material.inputs(self.layer, probe))
        error = F.unsquash(self.part(self.material.codes(self.layer + 1, probe))) - z
        return {"reconstruction_error": (error.square().sum() / _variance(z)).item()}


class PixelDecoderTask(Task):
    """Stage 4: the pixel_decoder, and the capsule decoder it draws from, learn to reconstruct images from codes."""

    stage: PixelDecoderStage

    def __init__(
        self, stage: PixelDecoderStage, pixel_decoder: PixelDecoder, material: Material
    ) -> None:
        self.pixel_decoder = pixel_decoder
        self.lowest, *self.higher = cast("list[CapsuleDecoder]", list(material.network.decoders))
        super().__init__(
            "pixel decoder", stage, nn.ModuleList([pixel_decoder, self.lowest]), material
        )

    def prepare(self, fresh: bool, generator: torch.Generator) -> None:  # noqa: ARG002 (nothing is drawn)
        """Make the experts; the pixel_decoder begins with the filters of the autoencoder."""
        self.material.make_codes(len(self.material.network.encoders))
        if fresh:
            self.pixel_decoder.follow(self.material.network.autoencoder)

    def is_resident(self) -> bool:
        """Tell whether all that the steps learn from lies in the memory of the device."""
        return self.material.has_images() and self.material.has_inputs(
            len(self.material.network.encoders)
        )

    def loss(self, indices: Tensor, draw: Draw) -> Tensor:
        """Compute how far images are from what is drawn, for some of them from their strongest expert alone.

        Where a pixel is uncertain, the smallest absolute difference is that of its median, which is sharp, and the
        smallest cross-entropy that of its mean, which is blurred. But a pixel that is far off has no gradient left in
        the absolute difference alone, and stays off for ever; a little cross-entropy wakes it.
        """
        y = self.material.codes(len(self.material.network.encoders), indices)
        logits, images = (
            self._paint(_some_alone(y, self.stage.single_expert_share, draw)),
            self.material.images(indices),
        )
        sharp = (torch.sigmoid(logits) - images).abs().mean()
        return sharp + self.stage.cross_entropy * nn.functional.binary_cross_entropy_with_logits(
            logits, images
        )

    def measure(self) -> dict[str, float]:
        """Measure the share of the images' variance that is lost on the way to the experts and back."""
        probe = self.material.probe()
        images = self.material.images(probe)
        error = (
            torch.sigmoid(
                self._paint(self.material.codes(len(self.material.network.encoders), probe))
            )
            - images
        )
        return {"reconstruction_error": (error.square().sum() / _variance(images)).item()}

    def _paint(self, y: Tensor) -> Tensor:
        """Logits of images from codes; routing counts as constant, as in the decoder's own rule."""
        with torch.no_grad():
            for decoder in reversed(self.higher):
                y = decoder(y)
        activations = self.material.network.preprocessing.undo(self.lowest.held_preactivation(y))
        with self.material.autocast():
            return self.material.network.logits(activations).float()


def _some_alone(y: Tensor, share: float, draw: Draw) -> Tensor:
    """Silence all but the strongest expert in a share of the codes (B, J, D)."""
    if share == 0:
        return y
    norm: Tensor = y.norm(dim=-1, keepdim=True)  # (B, J, 1)
    together = draw(norm[:, :1]) >= share
    return y * (together | (norm == norm.amax(1, keepdim=True)))


def _variance(points: Tensor) -> Tensor:
    """Sum of the squared distances from the mean; above 0 even where all points are the same."""
    return (points - points.mean(0)).square().sum().clamp(min=1e-12)


def plan(config: Config, material: Material) -> list[Task]:
    """List the tasks of a run, in order."""
    layers = range(len(material.network.encoders))
    first = AutoencoderTask(
        "autoencoder", config.autoencoder, material.network.autoencoder, material
    )
    encoders = [EncoderTask(layer, config.encoder, material) for layer in layers]
    decoders = [DecoderTask(layer, config.decoder, material) for layer in layers]
    pixel_decoder = material.network.pixel_decoder
    last = (
        []
        if pixel_decoder is None
        else [PixelDecoderTask(config.pixel_decoder, pixel_decoder, material)]
    )
    return [first, *encoders, *decoders, *last]


def factor_for_firing(norm: Tensor, target: float) -> float:
    """Find s such that the mean of (s‖z‖)²/(1+(s‖z‖)²) is the target, for norms ‖z‖ (N,); 1 where all are 0."""
    if not norm.any():
        return 1.0
    low, high = -40.0, 40.0  # log s; the mean grows with s, so halving finds it
    for _ in range(60):
        middle = (low + high) / 2
        square = (norm.double() * math.exp(middle)).square()
        low, high = (
            (middle, high) if (square / (1 + square)).mean().item() < target else (low, middle)
        )
    return math.exp(low)


def effective_rank(code: Tensor) -> float:
    """Participation ratio (Σλ)²/Σλ² of the covariance of codes (N, S): how many directions carry their variance."""
    centred = (code - code.mean(0)).double()
    covariance = centred.T @ centred
    total = covariance.trace()  # Σλ; Σλ² is the sum of its squared entries
    return (total.square() / covariance.square().sum()).item() if total > 0 else 0.0
