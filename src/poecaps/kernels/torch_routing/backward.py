"""The gradient of a loss L through all iterations of routing by agreement, without stored votes.

Iteration r = 0, …, R−1 of `functional.routing_by_agreement` is

    h_j = β Σ_{s<r} a(z_j of iteration s)    a(z) = z/‖z‖ (cosine) or squash(z) (inner)
    b_ij = ⟨û_ij, h_j⟩                       û = u/‖u‖ (cosine) or u (inner),  u_ij = W_ij x_i
    c = softmax(b),   z_j = Σ_i c_ij u_ij

because a sum of agreements is the agreement with the sum h_j of the agreement vectors. The loss
depends on z, and perhaps on c, of the last iteration. From the last iteration to the first, with
⟨·⟩_c for the sum over the axis of the softmax, weighted by c:

    g_ij     = ⟨∂L/∂z_j, u_ij⟩               plus ∂L/∂c_ij in the last iteration
    ∂L/∂b_ij = c_ij (g_ij − ⟨g⟩_c)
    ∂L/∂h_j  = Σ_i ∂L/∂b_ij û_ij
    ∂L/∂z_j  = a'(z_j)ᵀ β Σ ∂L/∂h_j          of the iteration before; the sum is over all later ones

A direction has the derivative a'(z) v = (v − ⟨a, v⟩ a)/‖z‖ and a squashed vector, with n = ‖z‖,
a'(z) v = n/(1+n²) (v − ⟨z, v⟩ z/n²) + 2n/(1+n²)² ⟨z, v⟩ z/n². The votes enter in every iteration:

    ∂L/∂u_ij = Σ_r c_ij ∂L/∂z_j + ∂L/∂b_ij (h_j − b_ij û_ij)/‖u_ij‖      (cosine)
    ∂L/∂u_ij = Σ_r c_ij ∂L/∂z_j + ∂L/∂b_ij h_j                           (inner)
    ∂L/∂x_i  = Σ_j W_ijᵀ ∂L/∂u_ij,   ∂L/∂W_ij = Σ_images ∂L/∂u_ij x_iᵀ

So the z of all iterations, B×J×D numbers each, are all that the forward pass has to record. Votes
are recomputed, for a block of images and of inputs at a time. At zero vectors, which have no
direction, the gradients are those that autograd finds for `functional.direction`: a'(0) v = v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from poecaps import functional as F
from poecaps.kernels.torch_routing import many_to_few

if TYPE_CHECKING:
    from torch import Tensor

MAX_NUMBERS = 2**19  # numbers of the votes recomputed at a time: 2 MiB stay in the cache


def routing_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    grad_z: Tensor | None,
    grad_c: Tensor | None,
    routing: F.RoutingOptions,
    *,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a loss in the capsules and in the weight.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    z : (R, B, J, D)
        The preactivations of all iterations.
    grad_z : (B, J, D), optional
        Gradient in the preactivations of the last iteration; 0 if None.
    grad_c : (B, I, J), optional
        Gradient in the coefficients of the last iteration; 0 if None.
    routing
        Options of the routing.
    needs_grad_x, needs_grad_weight
        Gradients to compute.

    Returns
    -------
    (B, I, K), (I, J, D, K)
        Each of them None if it is not needed.
    """
    w = many_to_few.layouts(weight, routing, len(x))
    grad_x = x.new_empty(x.shape) if needs_grad_x else None
    grad_weight = weight.new_zeros(weight.shape) if needs_grad_weight else None
    grad_z = torch.zeros_like(z[-1]) if grad_z is None else grad_z
    for block in many_to_few.blocks(x):
        capsules = many_to_few.batch_last(x[block])
        experts = z[:, block].permute(0, 2, 3, 1)  # (R, J, D, B)
        grad_experts = grad_z[block].permute(1, 2, 0).contiguous()
        grad_coefficients = None if grad_c is None else grad_c[block].permute(2, 1, 0)
        iterations, grad_first = _back_through_iterations(
            capsules, w, experts, grad_experts, grad_coefficients, routing
        )
        _back_through_votes(
            capsules,
            weight,
            iterations,
            grad_first,
            routing,
            None if grad_x is None else grad_x[block],
            grad_weight,
        )
    return grad_x, grad_weight


class _Iteration(NamedTuple):
    """What the gradient of the votes needs of one iteration, for a block of images."""

    c: Tensor  # (J, I, B)
    grad_b: Tensor  # (J, I, B)
    h: Tensor  # (J, D, B)
    grad_z: Tensor  # (J, D, B)


def _back_through_iterations(
    capsules: Tensor,
    w: many_to_few.Layouts,
    z: Tensor,
    grad_z: Tensor,
    grad_c: Tensor | None,
    routing: F.RoutingOptions,
) -> tuple[list[_Iteration], Tensor]:
    """Go back through all iterations: from the last one to the second one, and ∂L/∂z of the first.

    Parameters
    ----------
    capsules : (K, I, B)
    z : (R, J, D, B)
    grad_z : (J, D, B)
    grad_c : (J, I, B), optional
    """
    cosine = routing.agreement == "cosine"
    axis = 1 if routing.normalize == "inputs" else 0
    agreement_vectors = [F.direction(each, 1) if cosine else F.squash(each, 1) for each in z[:-1]]
    buffer, b, g, inverse_norms = many_to_few.new_workspace(capsules, z.shape[1])
    if cosine and len(z) > 1:
        many_to_few.inverse_vote_norms(capsules, w, b, out=inverse_norms)
    grad_agreement_vector = torch.zeros_like(grad_z)
    iterations: list[_Iteration] = []
    for r in range(len(z) - 1, 0, -1):
        h = routing.sharpness * torch.stack(agreement_vectors[:r]).sum(0)
        many_to_few.vote_products(capsules, w.inputs_last, h, buffer, out=b)
        c = torch.softmax(b.mul_(inverse_norms) if cosine else b, dim=axis)
        many_to_few.vote_products(capsules, w.inputs_last, grad_z, buffer, out=g)
        if grad_c is not None and r == len(z) - 1:
            g += grad_c
        mean = torch.mul(c, g, out=buffer).sum(axis, keepdim=True)
        grad_b = g.sub_(mean) * c
        iterations.append(_Iteration(c, grad_b, h, grad_z))
        grad_h = torch.empty_like(grad_z)
        factor = torch.mul(grad_b, inverse_norms, out=g) if cosine else grad_b
        many_to_few.mix_forward(factor, capsules, w.inputs_last, buffer, out=grad_h)
        grad_agreement_vector = grad_agreement_vector + routing.sharpness * grad_h
        grad_z = _back_through_agreement_vector(z[r - 1], grad_agreement_vector, cosine=cosine)
    return iterations, grad_z


def _back_through_agreement_vector(z: Tensor, grad: Tensor, *, cosine: bool) -> Tensor:
    """Compute a'(z)ᵀ grad of a direction (cosine) or a squashed vector: (J, D, B) → (J, D, B)."""
    if not cosine:
        return back_through_squash(z, grad, 1)
    n = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    unit = F.direction(z, 1)
    along = (unit * grad).sum(1, keepdim=True) * unit
    return (grad - along) / torch.where(n > 0, n, 1)


def back_through_squash(z: Tensor, grad: Tensor, dim: int = -1) -> Tensor:
    """Compute the gradient in vectors z (…, D, …) from that in squash(z)."""
    n = torch.linalg.vector_norm(z, dim=dim, keepdim=True)
    unit = F.direction(z, dim)
    along = (unit * grad).sum(dim, keepdim=True) * unit
    # Written in 1/n where n² could overflow.
    small, inverse = n.clamp(max=1), 1 / n.clamp(min=1)
    low, high = 1 / (1 + small.square()), 1 / (1 + inverse.square())
    across_scale = torch.where(n > 1, inverse * high, small * low)
    along_scale = 2 * torch.where(n > 1, inverse**3 * high.square(), small * low.square())
    return across_scale * (grad - along) + along_scale * along


def _back_through_votes(
    capsules: Tensor,
    weight: Tensor,
    iterations: list[_Iteration],
    grad_z: Tensor,
    routing: F.RoutingOptions,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Write ∂L/∂x_i = Σ_j W_ijᵀ ∂L/∂u_ij, and add ∂L/∂W_ij = Σ_images ∂L/∂u_ij x_iᵀ.

    Parameters
    ----------
    capsules : (K, I, B)
    weight : (I, J, D, K)
    grad_z : (J, D, B)
        Of the first iteration, whose coefficients are uniform.
    grad_x : (B, I, K)
    grad_weight : (I, J, D, K)
    """
    inputs, experts, _, _ = weight.shape
    uniform = 1 / (inputs if routing.normalize == "inputs" else experts)
    step = max(1, MAX_NUMBERS // max(1, grad_z.numel()))
    for some in (slice(first, first + step) for first in range(0, inputs, step)):
        x = capsules[:, some].transpose(0, 1)  # (I', K, B) of the inputs I' of this step
        maps = weight[some].flatten(1, 2)  # (I', J·D, K)
        grad_u = (uniform * grad_z).repeat(len(x), 1, 1, 1)  # (I', J, D, B)
        for each in iterations:
            grad_u.addcmul_(_of_inputs(each.c, some), each.grad_z)
        if iterations:
            v = torch.zeros_like(grad_u)  # Σ_r ∂L/∂b_ij h_j
            for each in iterations:
                v.addcmul_(_of_inputs(each.grad_b, some), each.h)
            if routing.agreement == "cosine":
                u = torch.bmm(maps, x).view_as(v)
                norm = u.square().sum(2, keepdim=True).sqrt_()
                u /= norm.masked_fill_(norm == 0, 1)
                grad_u.addcdiv_(v.addcmul_((u * v).sum(2, keepdim=True), u, value=-1), norm)
            else:
                grad_u += v
        rows = grad_u.flatten(1, 2)  # (I', J·D, B)
        if grad_x is not None:
            grad_x[:, some] = torch.bmm(maps.mT, rows).permute(2, 0, 1)
        if grad_weight is not None:
            grad_weight[some].flatten(1, 2).baddbmm_(rows, x.mT)


def _of_inputs(numbers: Tensor, some: slice) -> Tensor:
    """(J, I, B) → (I', J, 1, B) of some inputs."""
    return numbers[:, some].transpose(0, 1).unsqueeze(2)
