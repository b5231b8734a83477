"""Routing by agreement and the functions that route once: the part of the backend without learning.

Tensors are float16, bfloat16 or float32. Sums, softmaxes and products are about as exact as
float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F
from poecaps.kernels.torch_routing import mixed
from poecaps.kernels.triton.reconstruction import reconstruction, squash
from poecaps.kernels.triton.routing_backward import backward_through_iterations
from poecaps.kernels.triton.routing_forward import ForwardPass, recorded_pass, route
from poecaps.kernels.triton.weight_gradient import gradient_term, weight_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.kernels.triton.coefficients import Coefficients


class FlashRouting(F.Routing):
    """A `functional.Routing` that computes its coefficients only when they are read.

    Attributes
    ----------
    implicit_coefficients
        The coefficients, stored implicitly: the inputs and the log-sum-exp from which they are
        recomputed.
    """

    implicit_coefficients: Coefficients

    def __init__(self, x: Tensor, weight: Tensor, forward: ForwardPass, z: Tensor) -> None:
        self._x, self._weight, self._forward = x, weight, forward
        self.implicit_coefficients, self.preactivation = forward.coefficients, z
        self._computed: Tensor | None = None

    @property
    def coefficients(self) -> Tensor:
        """Routing coefficients c_ij: (B, I, J), float32.

        If the preactivation has a gradient, they have one as well.
        """
        if self._computed is None:
            if self.preactivation.requires_grad:
                self._computed = _Coefficients.apply(self._x, self._weight, self._forward)  # type: ignore[no-untyped-call]
            else:
                self._computed = self.implicit_coefficients.tensor(self._weight)
        return self._computed


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int = 3,
    sharpness: float = 1.0,
    normalize: F.Axis = "inputs",
    agreement: F.Agreement = "cosine",
) -> FlashRouting:
    """Compute `functional.routing_by_agreement`, differentiable in `x` and `weight`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    iterations, sharpness, normalize, agreement : see `functional.routing_by_agreement`
    """
    return _route(x, weight, F.RoutingOptions(iterations, sharpness, normalize, agreement))


def _route(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> FlashRouting:
    needs_grad = _needs_grad(x, weight)
    forward = route(x, weight, routing, record=needs_grad)
    if not needs_grad:
        return FlashRouting(x, weight, forward, forward.preactivation)
    z: Tensor = _RoutingByAgreement.apply(x, weight, forward)  # type: ignore[no-untyped-call]
    return FlashRouting(x, weight, forward, z)


class _RoutingByAgreement(torch.autograd.Function):
    """z of a recorded forward pass, with the gradient through its iterations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: ForwardPass) -> Tensor:
        _save(ctx, x, weight, forward)
        return forward.preactivation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return _gradients(ctx, grad_z, None)


class _Coefficients(torch.autograd.Function):
    """c of a recorded forward pass, with the gradient through its iterations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: ForwardPass) -> Tensor:
        _save(ctx, x, weight, forward)
        return forward.coefficients.tensor(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_c: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return _gradients(ctx, None, grad_c)


def _save(ctx: Any, x: Tensor, weight: Tensor, forward: ForwardPass) -> None:
    ctx.routing = forward.routing
    ctx.save_for_backward(x, weight, forward.z, forward.h, forward.lse)


def _gradients(
    ctx: Any, grad_z: Tensor | None, grad_c: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    """Compute the gradients in x (B, I, K) and in the weight (I, J, D, K)."""
    x, weight, z, h, lse = ctx.saved_tensors
    weight = weight.contiguous()
    forward = recorded_pass(x.contiguous(), ctx.routing, z, h, lse)
    backward = backward_through_iterations(forward, weight, grad_z, grad_c)
    return (
        backward.grad_x(weight) if ctx.needs_input_grad[0] else None,
        backward.grad_weight(weight) if ctx.needs_input_grad[1] else None,
        None,
    )


def held_preactivation(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> Tensor:
    """Compute `functional.held_preactivation`: z with a gradient in the weight alone.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.

    Returns
    -------
    (B, J, D)
    """
    forward = route(x, weight, routing)
    if not _needs_grad(weight):
        return forward.preactivation
    held = x.detach()
    z: Tensor = _HeldPreactivation.apply(held, weight, forward)  # type: ignore[no-untyped-call]
    return z


class _HeldPreactivation(torch.autograd.Function):
    """z of a forward pass, with a gradient in the weight for held coefficients and capsules."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: ForwardPass) -> Tensor:
        ctx.coefficients = forward.coefficients
        # The coefficients hold x as well. It is saved so that autograd raises an error if x is
        # overwritten before the backward pass.
        ctx.save_for_backward(x, weight)
        return forward.preactivation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        x, weight = ctx.saved_tensors
        c, weight = ctx.coefficients, weight.contiguous()
        grad_weight = torch.empty_like(weight)
        weight_gradient(weight, c, gradient_term(gradient, x, weight, c), out=grad_weight)
        return None, grad_weight, None


def encode(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None = None,
    balance: Tensor | None = None,
) -> Tensor:
    """Compute `functional.encode`; without a gradient, one kernel squashes and selects.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    winners, balance : see `functional.winning_experts`

    Returns
    -------
    (B, J, D)
    """
    z = _route(x, weight, routing).preactivation
    on = F.winning_experts(z, winners, balance)
    return F.expert_states(z, on) if z.requires_grad else squash(z, on)


def reconstruct(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None = None,
    balance: Tensor | None = None,
) -> Tensor:
    """Compute `functional.reconstruct`: up and down once, with the coefficients of x.

    With a gradient, only the routing upwards is done by kernels, and its gradient. The way down is
    plain PyTorch, in float32 without votes in memory.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    winners, balance : see `functional.winning_experts`

    Returns
    -------
    (B, I, K)
    """
    routed = _route(x, weight, routing)
    z = routed.preactivation
    on = F.winning_experts(z, winners, balance)
    if z.requires_grad:
        y, c = F.expert_states(z, on), routed.coefficients
        has_one_dtype = y.dtype == weight.dtype == c.dtype
        return (
            mixed.reconstruction(y, weight, c) if has_one_dtype else F.reconstruction(y, weight, c)
        )
    return reconstruction(squash(z, on), weight, routed.implicit_coefficients)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
