"""Half precision on a CPU, and autocast: a backend that computes in float32, between conversions.

Tensors are converted once per call, and the results back. On a CPU this is faster than arithmetic
in half precision, which most CPUs lack. On a GPU, half precision without autocast needs no
conversion. On both it is more exact than the reference, which rounds the votes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.kernels.protocol import RoutingBackend

HALF = (torch.float16, torch.bfloat16)


def is_needed(x: Tensor, weight: Tensor) -> bool:
    """Return whether a call of a fast backend has to run in float32 by conversions."""
    is_half = x.dtype in HALF or weight.dtype in HALF
    return (x.device.type == "cpu" and is_half) or _is_autocast(x, weight)


class InFloat32:
    """A backend whose arguments are converted to float32, and whose results are converted back.

    Results have the dtype of the capsules, and that of autocast where it is enabled.

    Parameters
    ----------
    backend
        The backend that computes in float32.
    """

    def __init__(self, backend: RoutingBackend) -> None:
        self.backend = backend

    def routing_by_agreement(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        iterations: int,
        sharpness: float,
        normalize: F.Axis,
        agreement: F.Agreement,
    ) -> F.Routing:
        """See `poecaps.functional.routing_by_agreement`."""
        with _no_autocast(x):
            routed = self.backend.routing_by_agreement(
                x.float(),
                weight.float(),
                iterations=iterations,
                sharpness=sharpness,
                normalize=normalize,
                agreement=agreement,
            )
        z = routed.preactivation.to(_result_dtype(x))
        return F.Routing(routed.coefficients, z)

    def held_preactivation(self, x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> Tensor:
        """See `poecaps.functional.held_preactivation`."""
        with _no_autocast(x):
            z = self.backend.held_preactivation(x.float(), weight.float(), routing)
        return z.to(_result_dtype(x))

    def encode(
        self,
        x: Tensor,
        weight: Tensor,
        routing: F.RoutingOptions,
        *,
        winners: int | None,
        balance: Tensor | None,
    ) -> Tensor:
        """See `poecaps.functional.encode`."""
        with _no_autocast(x):
            y = self.backend.encode(
                x.float(), weight.float(), routing, winners=winners, balance=balance
            )
        return _round(y, _result_dtype(x))

    def reconstruct(
        self,
        x: Tensor,
        weight: Tensor,
        routing: F.RoutingOptions,
        *,
        winners: int | None,
        balance: Tensor | None,
    ) -> Tensor:
        """See `poecaps.functional.reconstruct`."""
        with _no_autocast(x):
            x_model = self.backend.reconstruct(
                x.float(), weight.float(), routing, winners=winners, balance=balance
            )
        return _round(x_model, _result_dtype(x))

    def contrastive_divergence(
        self,
        x: Tensor,
        weight: Tensor,
        routing: F.RoutingOptions,
        *,
        k: int,
        mixing: F.Mixing,
        uniform: Tensor | None,
        chain: Tensor | None,
        winners: int | None,
        balance: Tensor | None,
        views: int,
    ) -> F.LearningStep:
        """See `poecaps.functional.contrastive_divergence`; the gradient is in float32."""
        with _no_autocast(x):
            step = self.backend.contrastive_divergence(
                x.float(),
                weight.float(),
                routing,
                k=k,
                mixing=mixing,
                uniform=uniform,
                chain=None if chain is None else chain.float(),
                winners=winners,
                balance=balance,
                views=views,
            )
        if step.x_model is None:
            return step
        x_model = _round(step.x_model, _result_dtype(x))
        return F.LearningStep(step.loss, step.grad_weight, step.on, x_model)

    def decoder_contrastive_divergence(
        self, y: Tensor, x: Tensor, weight: Tensor, routing: F.RoutingOptions
    ) -> F.LearningStep:
        """See `poecaps.functional.decoder_contrastive_divergence`; the gradient is in float32."""
        with _no_autocast(x):
            return self.backend.decoder_contrastive_divergence(
                y.float(), x.float(), weight.float(), routing
            )


def _is_autocast(x: Tensor, weight: Tensor) -> bool:
    """Return whether autocast is enabled, for tensors that it converts: not for float64."""
    return torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _result_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _round(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert squashed capsules (B, N, D) to a dtype, with norms that stay below 1."""
    limit = 1 - 2 * torch.finfo(dtype).eps
    norm: Tensor = torch.linalg.vector_norm(y.detach(), dim=-1, keepdim=True)
    return (y * (limit / norm.clamp(min=limit))).to(dtype)
