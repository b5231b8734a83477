"""The routing in compiled C as operators of PyTorch, for code that `torch.compile` traces.

`torch.compile` cannot look into compiled C. It only needs the shapes of the results, and calls the
operators when the compiled code runs. Learning rules are traced as the reference has them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from poecaps import functional as F
from poecaps.functional import (
    contrastive_divergence,
    decoder_contrastive_divergence,
    held_preactivation,
)
from poecaps.kernels.cpu import build, routing

if TYPE_CHECKING:
    from poecaps.functional import Agreement, Axis

__all__ = [
    "contrastive_divergence",
    "decoder_contrastive_divergence",
    "encode",
    "held_preactivation",
    "reconstruct",
    "routing_by_agreement",
    "why_not",
]


# PyTorch 2.6 cannot tell whether a program is compiled or exported.
_may_be_exported = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_not_traced(out_dim: int, dim: int) -> str | None:
    """Return a reason that is found while the call is traced, None if there is none."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "it does not support torch.func; use backend='reference'"
    return build.why_not(out_dim, dim)


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Return why the operators cannot serve a call that `torch.compile` traces, None if they can.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    if _may_be_exported():
        return "an exported program must not depend on it; use backend='reference'"
    if x.device.type != "cpu" or torch.float64 in (x.dtype, weight.dtype):
        return f"it needs float32 on a CPU, but x is {x.dtype} on {x.device.type!r}"
    if max(weight.shape[2], weight.shape[3]) > routing.MAX_DIM:
        return f"it is limited to capsules of dimension {routing.MAX_DIM}"
    reason: str | None = _why_not_traced(weight.shape[2], weight.shape[3])
    return reason


# ------------------------------------------------------------------------------------------------
# The functions of a backend


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int,
    sharpness: float,
    normalize: Axis,
    agreement: Agreement,
) -> F.Routing:
    """Compute `functional.routing_by_agreement`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    c, z = route(x, weight, iterations, sharpness, normalize, agreement)
    return F.Routing(c, z[-1])


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
    z = routed.preactivation
    y = F.expert_states(z, F.winning_experts(z, winners, balance))
    return F.reconstruction(y, weight, routed.coefficients)


# ------------------------------------------------------------------------------------------------
# Operators


@torch.library.custom_op("poecaps::route", mutates_args=(), device_types="cpu")
def route(
    x: Tensor, weight: Tensor, iterations: int, sharpness: float, normalize: str, agreement: str
) -> tuple[Tensor, Tensor]:
    """Route: (B, I, K), (I, J, D, K) → c (B, I, J) and z of all iterations (R, B, J, D)."""
    routed = routing.route(x, weight, _options(iterations, sharpness, normalize, agreement))
    return routed.coefficients, routed.preactivations


@route.register_fake
def _(x: Tensor, weight: Tensor, iterations: int, *_: Any) -> tuple[Tensor, Tensor]:
    c = routing.new_coefficients(x, weight, build.target().lanes)
    return c, x.new_empty(iterations, len(x), *weight.shape[1:3])


@torch.library.custom_op("poecaps::route_backward", mutates_args=(), device_types="cpu")
def route_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    grad_z: Tensor | None,
    grad_c: Tensor | None,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `routing.routing_backward`; a gradient is empty if it is not needed."""
    gradients = routing.routing_backward(
        x,
        weight,
        z,
        grad_z,
        grad_c,
        _options(iterations, sharpness, normalize, agreement),
        needs_grad_x=needs_grad_x,
        needs_grad_weight=needs_grad_weight,
    )
    grad_x, grad_weight = (x.new_empty(0) if each is None else each for each in gradients)
    return grad_x, grad_weight


@route_backward.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, needs_grad_x, needs_grad_weight = others
    return (
        x.new_empty(x.shape if needs_grad_x else 0),
        weight.new_empty(weight.shape if needs_grad_weight else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.options = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_c: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, z = ctx.saved_tensors
    last = None if grad_z is None else grad_z[-1]
    needs = ctx.needs_input_grad[:2]
    gradients = route_backward(x, weight, z, last, grad_c, *ctx.options, *needs)
    return (
        *(each if is_needed else None for each, is_needed in zip(gradients, needs, strict=True)),
        *(None for _ in ctx.options),
    )


route.register_autograd(_backward, setup_context=_setup_context)


def _options(iterations: int, sharpness: float, normalize: str, agreement: str) -> F.RoutingOptions:
    return F.RoutingOptions(
        iterations, sharpness, cast("F.Axis", normalize), cast("F.Agreement", agreement)
    )
