"""Vote-free routing in PyTorch: the backend ``"torch"``, for float32 and float64 on any device.

The functions compute the equations of `poecaps.functional` in less time and memory. There are two
algorithms: `many_to_few` if there are at least as many inputs as experts, which stores no votes,
and `few_to_many` otherwise. `backward` differentiates both, and stores no votes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F
from poecaps.kernels.torch_routing import closed_form, few_to_many, many_to_few, mixed
from poecaps.kernels.torch_routing.backward import routing_backward
from poecaps.kernels.torch_routing.gradient import GradientTerm
from poecaps.kernels.torch_routing.recorded import RecordedRouting, differentiable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RecordedRouting",
    "contrastive_divergence",
    "contrastive_divergence_from",
    "decoder_contrastive_divergence",
    "decoder_contrastive_divergence_from",
    "differentiable",
    "encode",
    "held_preactivation",
    "preactivation",
    "reconstruct",
    "reconstruct_from",
    "reconstruction",
    "routing_by_agreement",
    "why_not",
]


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Return why this backend cannot serve a call, None if it can.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    if x.device.type not in ("cpu", "cuda") or x.device != weight.device:
        devices = f"x is on {str(x.device)!r} and weight on {str(weight.device)!r}"
        return f"it needs both tensors on one CPU or GPU, but {devices}; use backend='reference'"
    if x.device.type == "cuda" and x.dtype not in (torch.float32, torch.float64):
        return f"on a GPU it needs float32 or float64, but x is {x.dtype}; use backend='reference'"
    return None


# ------------------------------------------------------------------------------------------------
# The functions of a backend


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int,
    sharpness: float,
    normalize: F.Axis,
    agreement: F.Agreement,
) -> F.Routing:
    """Compute `functional.routing_by_agreement`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    routing = F.RoutingOptions(iterations, sharpness, normalize, agreement)
    return differentiable(_route, routing_backward, x, weight, routing)


def held_preactivation(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> Tensor:
    """Compute `functional.held_preactivation`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    return held_preactivation_from(x, weight, _route(x, weight, routing))


def encode(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Compute `functional.encode`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    z = routing_by_agreement(x, weight, **asdict(routing)).preactivation
    return F.expert_states(z, F.winning_experts(z, winners, balance))


def reconstruct(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Compute `functional.reconstruct`: (B, I, K), (I, J, D, K) → (B, I, K)."""
    routed = routing_by_agreement(x, weight, **asdict(routing))
    return reconstruct_from(routed, weight, winners=winners, balance=balance)


def contrastive_divergence(
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
    """Compute `functional.contrastive_divergence`, with a gradient if the weight requires one.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    uniform : (k, N, J), optional
    chain : (N, I, K), optional
    balance : (J,), optional
    """
    if chain is None and mixing == "deterministic" and not _is_few_to_many(weight):
        return many_to_few.contrastive_divergence(
            x, weight, routing, k=k, winners=winners, balance=balance, views=views
        )
    return contrastive_divergence_from(
        x,
        _route(x, weight, routing),
        chain,
        None if chain is None else _route(chain, weight, routing),
        weight,
        k=k,
        mixing=mixing,
        uniform=uniform,
        winners=winners,
        balance=balance,
        views=views,
    )


def decoder_contrastive_divergence(
    y: Tensor, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.LearningStep:
    """Compute `functional.decoder_contrastive_divergence`, with a gradient if one is required.

    Parameters
    ----------
    y : (B, J, D)
    x : (B, I, K)
    weight : (J, I, K, D)
    """
    return decoder_contrastive_divergence_from(y, _route(y, weight, routing), x, weight)


# ------------------------------------------------------------------------------------------------
# The same with a routing that is given, for other backends that route faster


def held_preactivation_from(x: Tensor, weight: Tensor, routed: F.Routing) -> Tensor:
    """Return z of a routing of x, with a gradient in the weight alone: (B, J, D).

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routed
        Routing of `x`, without a gradient.
    """
    z: Tensor = _HeldPreactivation.apply(x, weight, routed)  # type: ignore[no-untyped-call]
    return z


@torch.no_grad()
def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i, without a gradient.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, J, D)
    """
    if _is_few_to_many(weight):
        return few_to_many.preactivation(x, weight, coefficients)
    return many_to_few.preactivation(x, weight, coefficients)


@torch.no_grad()
def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), without a gradient.

    Parameters
    ----------
    y : (B, J, D)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, I, K)
    """
    if _is_few_to_many(weight):
        return few_to_many.reconstruction(y, weight, coefficients)
    return many_to_few.reconstruction(y, weight, coefficients)


def reconstruct_from(
    routed: F.Routing, weight: Tensor, *, winners: int | None, balance: Tensor | None
) -> Tensor:
    """Compute `reconstruct` of capsules whose routing is given: (I, J, D, K) → (B, I, K)."""
    z = routed.preactivation
    y = F.expert_states(z, F.winning_experts(z, winners, balance))
    if closed_form.is_needed(z, weight):
        return mixed.reconstruction(y, weight, routed.coefficients)
    return reconstruction(y, weight, routed.coefficients)


def contrastive_divergence_from(
    x: Tensor,
    routed: F.Routing,
    chain: Tensor | None,
    routed_chain: F.Routing | None,
    weight: Tensor,
    *,
    k: int,
    mixing: F.Mixing,
    uniform: Tensor | None,
    winners: int | None,
    balance: Tensor | None,
    views: int,
) -> F.LearningStep:
    """Compute `contrastive_divergence` of capsules whose routing is given.

    Parameters
    ----------
    x : (B, I, K)
    routed
        Routing of `x`.
    chain : (N, I, K), optional
    routed_chain
        Routing of `chain`.
    weight : (I, J, D, K)
    """
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    with torch.no_grad():
        c, z = routed.coefficients, routed.preactivation
        on = F.winning_experts(z, winners, balance, views=views)
        x_model, c_model, z_model, on_model = x, c, z, on
        if chain is not None and routed_chain is not None:
            x_model, c_model = chain, routed_chain.coefficients
            z_model = routed_chain.preactivation
            on_model = F.winning_experts(z_model, winners, balance)
        for step in range(k):
            y = F.expert_states(
                z_model, on_model, mixing, None if uniform is None else uniform[step]
            )
            x_model = reconstruction(y, weight, c_model)
            z_model = preactivation(x_model, weight, c_model)
        if _is_few_to_many(weight):
            # As z̃ is computed, so that both free energies have the same rounding errors.
            z = preactivation(x, weight, c)
        loss = F.free_energy(z, on).mean() - F.free_energy(z_model, on_model).mean()
        gradient: Tensor | None = None
        if needs_gradient:
            grad_z = _free_energy_gradient(z, on, -1 / len(x), weight)
            grad_z_model = _free_energy_gradient(z_model, on_model, 1 / len(x_model), weight)
            gradient = _weight_gradient(
                GradientTerm(grad_z, c, x), GradientTerm(grad_z_model, c_model, x_model)
            )
    return F.LearningStep(loss, gradient, on, None if chain is None else x_model)


def decoder_contrastive_divergence_from(
    y: Tensor, routed: F.Routing, x: Tensor, weight: Tensor
) -> F.LearningStep:
    """Compute `decoder_contrastive_divergence` of experts whose routing is given.

    Parameters
    ----------
    y : (B, J, D)
    routed
        Routing of `y`.
    x : (B, I, K)
    weight : (J, I, K, D)
    """
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    with torch.no_grad():
        e, z_model = routed.coefficients, routed.preactivation
        y_model = reconstruction(F.squash(z_model), weight, e)
        scale = 2 / len(y)
        g, g_model = -scale * F.g_of_squashed(x), scale * F.g(z_model)
        gradient: Tensor | None = None
        if needs_gradient:
            gradient = _weight_gradient(GradientTerm(g, e, y), GradientTerm(g_model, e, y_model))
            loss = (weight * gradient).sum()
        else:  # ⟨U, −ΔU⟩ = 2 mean(−⟨g(z), Σ_j e_ji U_ji y_j⟩ + ⟨g(z̃), Σ_j e_ji U_ji ỹ_j⟩)
            loss = (g * preactivation(y, weight, e)).sum()
            loss += (g_model * preactivation(y_model, weight, e)).sum()
    return F.LearningStep(loss, gradient)


@torch.no_grad()
def _route(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> RecordedRouting:
    """Route without a gradient: (B, I, K), (I, J, D, K) → c and z of all iterations."""
    if _is_few_to_many(weight):
        return few_to_many.routing_by_agreement(x, weight, routing)
    return many_to_few.routing_by_agreement(x, weight, routing)


class _HeldPreactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, routed: F.Routing) -> Tensor:  # noqa: ARG004 (for its gradient)
        ctx.save_for_backward(x, routed.coefficients)
        return routed.preactivation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> tuple[None, Tensor, None]:
        x, coefficients = ctx.saved_tensors
        return None, _weight_gradient(GradientTerm(grad_z, coefficients, x)), None


def _is_few_to_many(weight: Tensor) -> bool:
    """Return whether there are fewer inputs than experts."""
    inputs, experts, _, _ = weight.shape
    return inputs < experts


def _free_energy_gradient(z: Tensor, on: Tensor | None, scale: float, weight: Tensor) -> Tensor:
    """Gradient of −scale · F(z): (B, J, D), (B, J) → (B, J, D)."""
    if _is_few_to_many(weight):
        return few_to_many.free_energy_gradient(z, on, scale)
    return many_to_few.free_energy_gradient(z, on, scale)


def _weight_gradient(*terms: GradientTerm) -> Tensor:
    """Σ_b c_ij ∂L/∂z_j x_iᵀ, added over the terms: → (I, J, D, K)."""
    _, inputs, experts = terms[0].coefficients.shape
    if inputs < experts:
        return few_to_many.weight_gradient(terms)
    return many_to_few.weight_gradient(terms)
