"""Routing that is recorded for its backward pass, as autograd sees it.

The backends for CPUs share this. Each has a function that routes, and one that computes the
gradients from what was recorded.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import torch

from poecaps import functional as F
from poecaps.kernels.torch_routing import closed_form
from poecaps.kernels.torch_routing.closed_form import ClosedForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Route, so that autograd and torch.func differentiate the result in `x` and `weight`.

    It may be differentiated again; the reference computes second derivatives.

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
    if not closed_form.is_needed(x, weight):
        with torch.no_grad():
            return route(x, weight, routing)

    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        recorded = route(x, weight, routing)
        # A copy, so that the caller may overwrite it.
        z = recorded.preactivation.clone()
        return recorded.coefficients, z, recorded.preactivations

    def gradients(
        arguments: Sequence[Tensor],
        records: Sequence[Tensor],
        grads: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> Gradients:
        x, weight = arguments
        (z,), (grad_c, grad_z) = records, grads
        return backward(
            x,
            weight,
            z,
            grad_z,
            grad_c,
            routing,
            needs_grad_x=needs[0],
            needs_grad_weight=needs[1],
        )

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        routed = F.routing_by_agreement(x, weight, **asdict(routing))
        return routed.coefficients, routed.preactivation

    form = ClosedForm(
        compute,
        gradients,
        reference,
        argument_axes=(0, None),
        result_axes=(0, 0),
        record_axes=(1,),
    )
    c, z = closed_form.apply(form, x, weight)
    return F.Routing(c, z)
