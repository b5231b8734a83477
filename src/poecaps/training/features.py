"""The inputs of each training stage, computed once by the frozen stages before it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from poecaps._devices import statistics_device
from poecaps._modules import BATCH_SIZE, MappedBatches, in_batches
from poecaps.data.buffers import allocate, require_uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from poecaps._progress import Report
    from poecaps.data import ImageSet
    from poecaps.layer import CapsuleExperts
    from poecaps.network import CapsuleNetwork
    from poecaps.training.distributed import Distributed

GPU_BATCH_SIZE = 1000  # images that go through a frozen part together on a GPU
PROBE_SIZE = 512  # most training images on which the running metrics are computed


class FeatureCache:
    """Images, and the outputs of the frozen parts of the network for all of them.

    Each output is computed when a stage asks for it and kept. A tensor that needs less than a
    quarter of a GPU's free memory is kept there. Others are kept in the host's memory, large ones
    in a memory-mapped temporary file.

    Parameters
    ----------
    data
        Training images.
    network
        The network that is trained.
    device
        Device of the network.
    distributed
        Processes that train together; each computes its shard of the outputs.
    bfloat16
        Whether convolutions run in bfloat16.
    held_out
        Other images, on which metrics are computed.
    report
        Called with the number of images of which an output was computed, and that of all images.
    """

    def __init__(
        self,
        data: ImageSet,
        network: CapsuleNetwork,
        device: torch.device,
        distributed: Distributed,
        *,
        bfloat16: bool,
        held_out: ImageSet | None = None,
        report: Report | None = None,
    ) -> None:
        self.data, self.network, self.device, self.report = data, network, device, report
        self.statistics_device = statistics_device(device)
        self.distributed, self.bfloat16 = distributed, bfloat16
        usual = BATCH_SIZE if device.type == "cpu" else GPU_BATCH_SIZE
        self.batch_size = network.images_at_once(usual)
        self.held_out: Tensor | None = None  # (M, C, H, W)
        if held_out is not None:
            self.held_out = held_out.batch(_spread(len(held_out), PROBE_SIZE)).to(device)
        self._held_out_inputs: dict[int, Tensor] = {}  # (M, I, K) of each layer
        self._pixels: Tensor | None = None  # (N, C, H, W)
        self._activations: Tensor | None = None  # (N, I, K), before preprocessing
        self._capsules: Tensor | None = None  # (N, I, K)
        self._components: Tensor | None = None  # (N, 1, r), of the density
        self._codes: dict[int, Tensor] = {}  # (N, J, D) of each encoder layer, counted from 1
        if data.images.dtype == np.uint8 and self._fits_on_device(data.images.nbytes):
            self._pixels = torch.empty(len(data), *data.shape, dtype=torch.uint8, device=device)
            for start in range(0, len(data), GPU_BATCH_SIZE):  # the images may be a mapped file
                require_uncut(data.images, data.source)
                part = np.array(data.images[start : start + GPU_BATCH_SIZE])
                pixels = torch.from_numpy(part).permute(0, 3, 1, 2)
                self._pixels[start : start + GPU_BATCH_SIZE] = pixels

    def __len__(self) -> int:
        return len(self.data)

    def images(self, indices: Tensor) -> Tensor:
        """Return images from 0 to 1: (B,) → (B, C, H, W)."""
        if self._pixels is not None:
            return self._pixels[indices.to(self.device)] / 255
        return self.data.batch(indices.cpu()).to(self.device)

    def inputs(self, layer: int, indices: Tensor) -> Tensor:
        """Return the squashed input capsules of a layer, counted from 0: (B,) → (B, I, K)."""
        if layer > 0:
            return self.codes(layer, indices)
        if self._capsules is not None:
            return _take(self._capsules, indices, self.device)
        assert self._activations is not None  # noqa: S101 (compute_inputs(0) comes first)
        with torch.no_grad():
            return self.network.preprocessing.to_capsules(
                _take(self._activations, indices, self.device).float()
            )

    @torch.no_grad()
    def inputs_of(self, layer: int, images: Tensor) -> Tensor:
        """Compute the `inputs` of a layer for other images: (B, C, H, W) → (B, I, K)."""
        with self.autocast():
            activations = self.network.activations(images)
        x = self.network.preprocessing.to_capsules(activations.float())
        for encoder in self.network.encoders[:layer]:
            x = encoder(x)
        return x

    def whitened(self, indices: Tensor) -> Tensor:
        """Return the capsules of the density, after `compute_inputs(0)`: (B,) → (B, I, K)."""
        assert self._activations is not None  # noqa: S101 (compute_inputs(0) comes first)
        activations = _take(self._activations, indices, self.device).float()
        with torch.no_grad():
            return self.network.whiten(activations)

    def components(self, indices: Tensor) -> Tensor:
        """Return the principal components of the density, after `cache_components`: → (B, 1, r)."""
        assert self._components is not None  # noqa: S101 (cache_components comes first)
        return _take(self._components, indices, self.device)

    def codes(self, layer: int, indices: Tensor) -> Tensor:
        """Return the experts of a trained layer, counted from 1: (B,) → (B, J, D)."""
        return _take(self._codes[layer], indices, self.device)

    def probe_indices(self, most: int = PROBE_SIZE) -> Tensor:
        """Return the indices of at most so many images, spread over the dataset: (B,)."""
        return _spread(len(self), most)

    def held_out_inputs(self, layer: int) -> Tensor:
        """Return the `inputs` of a layer for the held-out images; the layers below are trained."""
        assert self.held_out is not None  # noqa: S101 (the callers have checked it)
        if layer not in self._held_out_inputs:
            self._held_out_inputs[layer] = self.inputs_of(layer, self.held_out)
        return self._held_out_inputs[layer]

    def has_images_on_device(self) -> bool:
        """Return whether the images are in the memory of the device."""
        return self._pixels is not None

    def has_inputs_on_device(self, layer: int) -> bool:
        """Return whether the `inputs` of a layer are in the memory of the device.

        The codes of the last layer are the inputs of the layer above it, which does not exist.
        """
        kept = self._codes[layer] if layer > 0 else self._activations
        return kept is not None and kept.device == self.device

    def compute_inputs(self, layer: int) -> None:
        """Compute the `inputs` of a layer; all processes must call it.

        Those of layer 0 are complete after `fit_preprocessing`.
        """
        if layer > 0:
            self.compute_codes(layer)
        elif self._activations is None:
            self.network.autoencoder.eval()

            def activations(indices: Tensor) -> Tensor:
                with self.autocast():
                    return self.network.activations(self.images(indices))

            shape = self.network.preprocessing.mean.shape
            dtype = torch.float16 if self.bfloat16 else torch.float32
            self._activations = self._compute_for_all(activations, shape, dtype)

    def fit_preprocessing(self) -> None:
        """Fit the preprocessing of the input capsules; `compute_inputs(0)` comes first."""
        assert self._activations is not None  # noqa: S101
        rows = self._activations.split(self.batch_size)
        preprocessing = self.network.preprocessing.to(self.statistics_device)
        preprocessing.fit(MappedBatches(lambda batch: batch.to(self.statistics_device), rows))
        preprocessing.to(self.device)
        self.distributed.broadcast_from_main(list(self.network.preprocessing.buffers()))

    def fit_density_base(self, indices: Tensor) -> None:
        """Fit whitening and base measure of the density; `compute_inputs(0)` comes first.

        Parameters
        ----------
        indices : (M,)
            Images to which they are fitted.
        """
        activations = self._activations
        assert activations is not None  # noqa: S101
        whitening, density = self.network.whitening, self.network.density
        assert whitening is not None and density is not None  # noqa: S101, PT018
        batches = indices.split(self.batch_size)
        whitening.fit(MappedBatches(lambda batch: _take(activations, batch, self.device), batches))
        density.forget_log_partition()
        density.base.fit(MappedBatches(self.whitened, batches))
        buffers = [*whitening.buffers(), *density.base.buffers()]
        self.distributed.broadcast_from_main(buffers)

    def cache_components(self) -> None:
        """Compute the `components` after `fit_density_base`; all processes must call it."""
        density = self.network.require_density()
        if self._components is None:
            self._components = self._compute_for_all(
                lambda indices: density.components(self.whitened(indices)),
                (1, density.base_components),
                torch.float32,
            )

    def has_components_on_device(self) -> bool:
        """Return whether the `components` are in the memory of the device."""
        return self._components is not None and self._components.device == self.device

    def cache_capsules(self) -> None:
        """Keep the `inputs` of layer 0 on the device if they fit, after `fit_preprocessing`."""
        size = len(self) * self.network.preprocessing.mean.numel() * torch.float32.itemsize
        if self._capsules is None and self._fits_on_device(size):
            indices = torch.arange(len(self))
            self._capsules = in_batches(
                lambda batch: self.inputs(0, batch), indices, self.batch_size
            )

    def compute_codes(self, layer: int) -> None:
        """Compute the `codes` of a layer, counted from 1; all processes must call it."""
        if layer not in self._codes:
            self.compute_inputs(layer - 1)
            self.cache_capsules()
            encoder = cast("CapsuleExperts", self.network.encoders[layer - 1].eval())
            shape = (encoder.out_capsules, encoder.out_dim)
            self._codes[layer] = self._compute_for_all(
                lambda indices: encoder(self.inputs(layer - 1, indices)), shape, torch.float32
            )

    def autocast(self) -> Any:
        """Return a context in which convolutions run in the precision of the run."""
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def _compute_for_all(
        self, function: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Apply a function to the indices of all images, (B,) → (B, *shape): → (N, *shape)."""
        count, processes = len(self), self.distributed.size
        result = self._allocate(count, *shape, dtype=dtype)
        for start in range(0, count, self.batch_size * processes):
            self._report(start)
            stop = min(start + self.batch_size * processes, count)
            # Shards must have equal length, so the last image may occur several times.
            length = processes * math.ceil((stop - start) / processes)
            indices = torch.arange(start, start + length).clamp(max=count - 1)
            computed = function(self.distributed.shard(indices)).to(dtype)
            result[start:stop] = self.distributed.all_gather(computed)[: stop - start]
        self._report(count)
        return result

    def _report(self, done: int) -> None:
        if self.report is not None:
            self.report(done, len(self))

    def _allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if self._fits_on_device(math.prod(shape) * dtype.itemsize):
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.from_numpy(allocate(shape, np.dtype(str(dtype).removeprefix("torch."))))

    def _fits_on_device(self, size: int) -> bool:
        """Return whether `size` bytes are less than a quarter of a GPU's free memory."""
        return self.device.type == "cuda" and size < torch.cuda.mem_get_info(self.device)[0] // 4


def _spread(count: int, most: int) -> Tensor:
    """Return at most so many of `count` indices, at equal distances: (B,)."""
    return torch.arange(0, count, math.ceil(count / most))


def _take(rows: Tensor, indices: Tensor, device: torch.device) -> Tensor:
    return rows[indices.to(rows.device)].to(device)
