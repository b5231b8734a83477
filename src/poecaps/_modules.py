"""Small helpers for PyTorch modules that several parts of the package share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn

# Images that go through a network together. On two CPU cores larger batches are not faster, and
# they take more memory.
BATCH_SIZE = 250


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next(module.parameters()).device


class MappedBatches:
    """A function of each batch, computed anew whenever the batches are iterated over.

    Parameters
    ----------
    function
        Maps a batch (B, ...) to (B, ...).
    batches
        Each iteration must give the same batches.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> None:
        self.function, self.batches = function, batches

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.function, self.batches)


def in_batches(
    function: Callable[[Tensor], Tensor], inputs: Tensor | Iterable[Tensor], size: int = BATCH_SIZE
) -> Tensor:
    """Apply a function to inputs in batches and join the results along the first axis.

    Parameters
    ----------
    function
        Maps (B, ...) to (B, ...).
    inputs : (N, ...), or an iterable of batches (B, ...)
        A tensor is split into batches of `size` rows; an iterable is taken as it comes.
    """
    batches = inputs.split(size) if isinstance(inputs, torch.Tensor) else inputs
    return torch.cat([function(batch) for batch in batches])
