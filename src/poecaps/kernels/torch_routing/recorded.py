"""Routing that is recorded for its backward pass, as autograd sees it.

The backends for CPUs share this. Each has a function that routes, and one that computes the
gradients from what was recorded.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch

from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Gradients = tuple[Tensor | None, Tensor | None]
    Route = Callable[[Tensor, Tensor, F.RoutingOptions], "RecordedRouting"]


class RecordedRouting(F.Routing):
    """A `functional.Routing` with the preactivations of all iterations.

    Attributes
    ----------
    preactivations : (R, B, J, D)
        z_j of each iteration.
    """

    preactivations: Tensor

    def __init__(self, coefficients: Tensor, preactivations: Tensor) -> None:
        super().__init__(coefficients, preactivations[-1])
        self.preactivations = preactivations


class Backward(Protocol):
    """The function that computes the gradients; see `backward.routing_backward`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        z: Tensor,
        grad_z: Tensor | None,
        grad_c: Tensor | None,
        routing: F.RoutingOptions,
        *,
        needs_grad_x: bool,
        needs_grad_weight: bool,
    ) -> Gradients:
        """(B, I, K), (I, J, D, K), (R, B, J, D), (B, J, D), (B, I, J) → (B, I, K), (I, J, D, K)."""


def differentiable(
    route: Route, backward: Backward, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.Routing:
    """Route, so that autograd differentiates the result in `x` and `weight`.

    It may be differentiated again, but then the reference computes the gradients.

    Parameters
    ----------
    route
        Function that routes: (B, I, K), (I, J, D, K) → `RecordedRouting`.
    backward
        Function that computes the gradients.
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    """
    if not _needs_grad(x, weight):
        with torch.no_grad():
            return route(x, weight, routing)
    c, z = _Routing.apply(x, weight, routing, route, backward)  # type: ignore[no-untyped-call]
    return F.Routing(c, z)


class _Routing(torch.autograd.Function):
    """Coefficients and preactivations of the last iteration."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        routing: F.RoutingOptions,
        route: Route,
        backward: Backward,
    ) -> tuple[Tensor, Tensor]:
        recorded = route(x, weight, routing)
        ctx.save_for_backward(x, weight, recorded.preactivations)
        ctx.set_materialize_grads(False)
        ctx.routing, ctx.backward = routing, backward
        # A copy, so that the caller may overwrite it.
        return recorded.coefficients, recorded.preactivation.clone()

    @staticmethod
    def backward(
        ctx: Any, grad_c: Tensor | None, grad_z: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, z = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled():  # the gradients are to be differentiated in turn
                gradients = _reference_gradients(ctx, x, weight, grad_c, grad_z)
            else:
                gradients = ctx.backward(
                    x,
                    weight,
                    z,
                    grad_z,
                    grad_c,
                    ctx.routing,
                    needs_grad_x=ctx.needs_input_grad[0],
                    needs_grad_weight=ctx.needs_input_grad[1],
                )
        return *gradients, None, None, None


def _reference_gradients(
    ctx: Any, x: Tensor, weight: Tensor, grad_c: Tensor | None, grad_z: Tensor | None
) -> Gradients:
    """Compute gradients that are differentiable themselves."""
    x, weight = x.view_as(x), weight.view_as(weight)  # so that no path leads from one to the other
    routed = F.routing_by_agreement(x, weight, **asdict(ctx.routing))
    pairs = ((routed.coefficients, grad_c), (routed.preactivation, grad_z))
    outputs = [(value, gradient) for value, gradient in pairs if gradient is not None]
    needed = [each for each, needs in zip((x, weight), ctx.needs_input_grad, strict=False) if needs]
    found = iter(
        torch.autograd.grad(
            [value for value, _ in outputs],
            needed,
            [gradient for _, gradient in outputs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(next(found) if needs else None for needs in ctx.needs_input_grad[:2])  # type: ignore[return-value]


def _needs_grad(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
