"""The functions that a backend has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.functional import Agreement, Axis, LearningStep, Mixing, Routing, RoutingOptions


class RoutingBackend(Protocol):
    """The operations of a backend. `poecaps.functional` implements and documents each of them.

    A learning rule may leave out the gradient (None) if the weight does not require one.
    """

    def routing_by_agreement(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        iterations: int,
        sharpness: float,
        normalize: Axis,
        agreement: Agreement,
    ) -> Routing:
        """See `poecaps.functional.routing_by_agreement`."""

    def held_preactivation(self, x: Tensor, weight: Tensor, routing: RoutingOptions) -> Tensor:
        """See `poecaps.functional.held_preactivation`."""

    def encode(
        self,
        x: Tensor,
        weight: Tensor,
        routing: RoutingOptions,
        *,
        winners: int | None,
        balance: Tensor | None,
    ) -> Tensor:
        """See `poecaps.functional.encode`."""

    def reconstruct(
        self,
        x: Tensor,
        weight: Tensor,
        routing: RoutingOptions,
        *,
        winners: int | None,
        balance: Tensor | None,
    ) -> Tensor:
        """See `poecaps.functional.reconstruct`."""

    def contrastive_divergence(
        self,
        x: Tensor,
        weight: Tensor,
        routing: RoutingOptions,
        *,
        k: int,
        mixing: Mixing,
        uniform: Tensor | None,
        chain: Tensor | None,
        winners: int | None,
        balance: Tensor | None,
        views: int,
    ) -> LearningStep:
        """See `poecaps.functional.contrastive_divergence`."""

    def decoder_contrastive_divergence(
        self, y: Tensor, x: Tensor, weight: Tensor, routing: RoutingOptions
    ) -> LearningStep:
        """See `poecaps.functional.decoder_contrastive_divergence`."""
