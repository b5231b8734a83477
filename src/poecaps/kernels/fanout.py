"""Routing from few capsules to many, as the capsule decoder does: the functions of `poecaps.functional`, in less time.

Here the votes of one input are one product, u_i = x_i W_i with W_i of shape (K, D·J), and are made once. Outputs lie as
(B, D, J), so that every inner loop runs along the many. No gradient flows through the routing; `preactivation` has the
gradient in the weight that learning needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poecaps import functional as F

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute what `functional.routing_by_agreement` does, without a gradient."""
    u = _votes(x, weight)  # (I, B, D, J)
    b = x.new_zeros(u.shape[0], u.shape[1], u.shape[3])  # (I, B, J)
    axis = 0 if normalize == "inputs" else 2
    c = torch.softmax(b, dim=axis)
    z = _mix(c, u)
    if iterations > 1:
        square = u.square().sum(2)
        size = torch.where(square > 0, square.rsqrt(), 0) if agreement == "cosine" else None
        speak = F.direction if agreement == "cosine" else F.squash
        for _ in range(iterations - 1):
            listened = speak(z, 1)
            inner = torch.stack([(votes * listened).sum(1) for votes in u])
            b += sharpness * (inner if size is None else inner.mul_(size))
            c = torch.softmax(b, dim=axis)
            z = _mix(c, u)
    return F.Routing(c.transpose(0, 1), z.transpose(1, 2))


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i, with a gradient in the weight alone: → (B, J, D)."""
    z: Tensor = _Preactivation.apply(x, weight, coefficients)  # type: ignore[no-untyped-call]
    return z


@torch.no_grad()
def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), without a gradient: → (B, I, K)."""
    outputs = y.transpose(1, 2).contiguous()  # (B, D, J)
    c = coefficients.transpose(0, 1)
    back = [(outputs * c[i].unsqueeze(1)).flatten(1) @ w.T for i, w in enumerate(_by_input(weight))]
    return F.squash(torch.stack(back, dim=1))


class _Preactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(x, coefficients)
        return _mix(coefficients.transpose(0, 1), _votes(x, weight)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        x, coefficients = ctx.saved_tensors
        _, inputs, dim = x.shape
        pull = gradient.transpose(1, 2).contiguous()  # (B, D, J)
        result = x.new_empty(inputs, dim, *pull.shape[1:])
        for i in range(inputs):
            routed = (pull * coefficients[:, i].unsqueeze(1)).flatten(1)
            torch.mm(x[:, i].T, routed, out=result[i].view(dim, -1))
        return None, result.permute(0, 3, 2, 1).contiguous(), None


def _by_input(weight: Tensor) -> Tensor:
    """W_i as one matrix each: (I, J, D, K) → (I, K, D·J)."""
    return weight.permute(0, 3, 2, 1).flatten(2).contiguous()


def _votes(x: Tensor, weight: Tensor) -> Tensor:
    """u_ij = W_ij x_i: (B, I, K), (I, J, D, K) → (I, B, D, J)."""
    _, outputs, out_dim, _ = weight.shape
    u = torch.bmm(x.transpose(0, 1).contiguous(), _by_input(weight))
    return u.view(*u.shape[:2], out_dim, outputs)


def _mix(c: Tensor, u: Tensor) -> Tensor:
    """z_j = Σ_i c_ij u_ij: (I, B, J), (I, B, D, J) → (B, D, J)."""
    z = torch.zeros_like(u[0])
    for i in range(len(u)):
        z.addcmul_(c[i].unsqueeze(1), u[i])
    return z
