"""The equations of a product of expert capsules, one short function each.

This is the readable reference: nothing here is clever except where floating point demands it. One letter per
axis, the same everywhere: B images in a batch, I input capsules of dimension K, J output capsules ("experts") of
dimension D. A weight has shape (I, J, D, K): one D×K map W_ij from every input capsule to every expert.

Half-precision tensors are widened to float32 wherever a norm, a softmax or an energy is computed.

References
----------
M. Hauser, "Training products of expert capsules with mixing by dynamic routing".
S. Sabour, N. Frosst, G. Hinton, "Dynamic routing between capsules", 2017.
G. Hinton, "Training products of experts by minimizing contrastive divergence", 2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from poecaps import _checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Axis = Literal["inputs", "outputs"]
Agreement = Literal["cosine", "inner"]
__all__ = [
    "AGREEMENTS",
    "AXES",
    "Agreement",
    "Axis",
    "Routing",
    "direction",
    "energy",
    "firing_probability",
    "free_energy",
    "preactivation",
    "reconstruction",
    "routing_by_agreement",
    "squash",
    "unsquash",
    "votes",
]

AXES: tuple[Axis, ...] = get_args(Axis)
AGREEMENTS: tuple[Agreement, ...] = get_args(Agreement)


# ---------------------------------------------------------------------------------------------------------
# Squashing


def squash(z: Tensor, dim: int = -1) -> Tensor:
    """Shrink vectors into the open unit ball: squash(z) = ‖z‖²/(1+‖z‖²) · z/‖z‖.

    The direction is kept; the norm becomes the probability that the capsule is on. squash(0) = 0, gradients are
    finite everywhere, and the norm stays below 1 even where ‖z‖²/(1+‖z‖²) would round to 1.

    Parameters
    ----------
    z : (..., D) where D is axis `dim`
        Preactivations, float16 to float64.

    Returns
    -------
    (..., D)
        Capsules of norm below 1, of the dtype of `z`.
    """
    checks.require_floating("z", z)
    norm, unit = _polar(z, dim)
    p = _firing(norm)
    # Rounded down, not clamped: the value stays in the ball, the derivative is that of the equation.
    p = p - (p - _largest_norm(z.dtype)).clamp(min=0).detach()
    return (p * unit).to(z.dtype)


def unsquash(x: Tensor, dim: int = -1) -> Tensor:
    """Invert `squash`: unsquash(x) = √(‖x‖/(1−‖x‖)) · x/‖x‖.

    Norms are clamped just below 1 (at 1 − 5ε for float32 and float64, at about 1 − ε for half precision, with ε the
    spacing of the dtype at 1), so the result is finite for any finite input; no value is looked at, no error raised.
    The derivative grows as ‖x‖^(−1/2) towards 0; at 0 itself it is taken to be 0.

    Parameters
    ----------
    x : (..., D) where D is axis `dim`
        Squashed capsules, float16 to float64.

    Returns
    -------
    (..., D)
        Preactivations, of the dtype of `x`.
    """
    checks.require_floating("x", x)
    norm, unit = _polar(x, dim)
    p = norm.clamp(max=_largest_norm(x.dtype))
    p = torch.where(p > 0, p, 0.5)  # any constant: it only keeps the square root's gradient finite at 0
    z = torch.sqrt(p / (1 - p)) * unit
    return torch.where(norm == 0, 0, z).to(x.dtype)


def direction(v: Tensor, dim: int = -1) -> Tensor:
    """Return v/‖v‖, and 0 for the zero vector.

    Parameters
    ----------
    v : (..., D) where D is axis `dim`

    Returns
    -------
    (..., D)
        Unit vectors, of the dtype of `v`.
    """
    checks.require_floating("v", v)
    return _polar(v, dim)[1].to(v.dtype)


# ---------------------------------------------------------------------------------------------------------
# Routing


@dataclass(frozen=True)
class Routing:
    """What routing by agreement found.

    Attributes
    ----------
    coefficients : (B, I, J)
        c_ij, how much expert j listens to input capsule i; at least float32.
    preactivation : (B, J, D)
        z_j = Σ_i c_ij W_ij x_i.
    """

    coefficients: Tensor
    preactivation: Tensor


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int = 3,
    sharpness: float = 1.0,
    normalize: Axis = "inputs",
    agreement: Agreement = "cosine",
) -> Routing:
    """Mix the votes u_ij = W_ij x_i by how well they agree with their mixture.

    Starting from b = 0, repeat `iterations` times::

        c = softmax(b),   z_j = Σ_i c_ij u_ij,   and between repeats   b_ij += sharpness · agreement(u_ij, z_j)

    One iteration is a plain average with uniform coefficients.

    Parameters
    ----------
    x : (B, I, K)
        Input capsules.
    weight : (I, J, D, K)
        The maps W_ij.
    iterations
        Number of repeats R, at least 1.
    sharpness
        The factor β; 0 keeps the coefficients uniform.
    normalize
        ``"inputs"``: every expert shares its attention among the inputs, Σ_i c_ij = 1 (the paper).
        ``"outputs"``: every input shares its vote among the experts, Σ_j c_ij = 1 (Sabour et al.).
    agreement
        ``"cosine"``: cos(u_ij, z_j), 0 if either is 0 (the paper).
        ``"inner"``: u_ij · squash(z_j) (Sabour et al.).

    Returns
    -------
    Routing
        Coefficients (B, I, J) and preactivations (B, J, D), differentiable in `x` and `weight`.
    """
    check_routing_options(iterations, sharpness, normalize, agreement)
    u = votes(x, weight)
    listener: Callable[[Tensor], Tensor] = direction if agreement == "cosine" else squash
    voter = direction(u) if agreement == "cosine" else u

    b = torch.zeros(u.shape[:3], dtype=_at_least_float32(u.dtype), device=u.device)
    axis = 1 if normalize == "inputs" else 2
    c = torch.softmax(b, dim=axis)
    z = _mix_votes(c, u)
    for _ in range(iterations - 1):
        b = b + sharpness * torch.einsum("bijd,bjd->bij", voter, listener(z)).to(b.dtype)
        c = torch.softmax(b, dim=axis)
        z = _mix_votes(c, u)
    return Routing(coefficients=c, preactivation=z)


def votes(x: Tensor, weight: Tensor) -> Tensor:
    """Compute u_ij = W_ij x_i: (B, I, K), (I, J, D, K) → (B, I, J, D)."""
    _check_weight(weight)
    inputs, _, _, dim = weight.shape
    _check_capsules("x", x, "BIK", (None, inputs, dim), weight)
    return torch.einsum("bik,ijdk->bijd", x, weight)


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Route forward with held coefficients, z_j = Σ_i c_ij W_ij x_i.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, J, D)
    """
    u = votes(x, weight)
    _check_coefficients(coefficients, u.shape[:3])
    return _mix_votes(coefficients, u)


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Route backward with held coefficients, x̃_i = squash(Σ_j c_ij W_ijᵀ y_j).

    Parameters
    ----------
    y : (B, J, D)
        Squashed experts.
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, I, K)
        Squashed input capsules.
    """
    _check_weight(weight)
    inputs, experts, out_dim, _ = weight.shape
    _check_capsules("y", y, "BJD", (None, experts, out_dim), weight)
    _check_coefficients(coefficients, (len(y), inputs, experts))
    back = torch.einsum("bjd,ijdk->bijk", y, weight)
    return squash(torch.einsum("bij,bijk->bik", coefficients.to(back.dtype), back))


# ---------------------------------------------------------------------------------------------------------
# Energies and probabilities, as functions of the preactivations z_j


def energy(z: Tensor, on: Tensor) -> Tensor:
    """Compute E(x, a) = −Σ_j a_j log‖z_j‖².

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J)
        a_j, 1 or True where expert j is on.

    Returns
    -------
    (B,)
        At least float32. An expert that is on with z_j = 0 makes it +∞.
    """
    _check_preactivation(z)
    checks.require_tensor("on", on)
    checks.require_shape("on", on, "BJ", z.shape[:2], "say for each image which experts are on")
    norm = _polar(z, -1)[0].squeeze(-1)
    active = on != 0
    log_square = 2 * torch.log(torch.where(active, norm, 1))
    return -(on * log_square).sum(-1)


def free_energy(z: Tensor, on: Tensor | None = None) -> Tensor:
    """Compute F(x) = −log Σ_a e^(−E(x, a)) = −Σ_j log(1 + ‖z_j‖²).

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional
        Where False, expert j may not fire and leaves the sum.

    Returns
    -------
    (B,)
        At least float32.
    """
    _check_preactivation(z)
    z = z.to(_at_least_float32(z.dtype))
    log_partition = torch.log1p(z.square().sum(-1))
    if on is not None:
        checks.require_tensor("on", on)
        checks.require_shape("on", on, "BJ", z.shape[:2], "say for each image which experts may fire")
        log_partition = log_partition * on
    return -log_partition.sum(-1)


def firing_probability(z: Tensor) -> Tensor:
    """Compute P(a_j = 1 | x) = ‖z_j‖²/(1+‖z_j‖²) = ‖squash(z_j)‖: (B, J, D) → (B, J)."""
    _check_preactivation(z)
    return _firing(_polar(z, -1)[0]).squeeze(-1).to(z.dtype)


# ---------------------------------------------------------------------------------------------------------
# What a caller may hand in, and floating point


def check_routing_options(iterations: int, sharpness: float, normalize: str, agreement: str) -> None:
    """Refuse options that `routing_by_agreement` does not know."""
    checks.require_int("iterations", iterations, 1)
    checks.require_nonnegative("sharpness", sharpness)
    checks.require_choice("normalize", normalize, AXES)
    checks.require_choice("agreement", agreement, AGREEMENTS)


def _check_weight(weight: Tensor) -> None:
    checks.require_floating("weight", weight)
    checks.require_shape("weight", weight, "IJDK", (None,) * 4, "give one D×K map for every pair (i, j)")


def _check_capsules(name: str, x: Tensor, axes: str, sizes: tuple[int | None, ...], weight: Tensor) -> None:
    checks.require_floating(name, x)
    checks.require_shape(name, x, axes, sizes, f"{axes[1]} and {axes[2]} must be those of the weight")
    checks.require_same_dtype(name, x, "weight", weight)


def _check_coefficients(coefficients: Tensor, sizes: Sequence[int]) -> None:
    checks.require_floating("coefficients", coefficients)
    remedy = "take those of routing_by_agreement for the same batch and weight"
    checks.require_shape("coefficients", coefficients, "BIJ", sizes, remedy)


def _check_preactivation(z: Tensor) -> None:
    checks.require_floating("z", z)
    checks.require_shape("z", z, "BJD", (None,) * 3, "give the preactivation of routing_by_agreement")


def _mix_votes(coefficients: Tensor, u: Tensor) -> Tensor:
    """z_j = Σ_i c_ij u_ij: (B, I, J), (B, I, J, D) → (B, J, D)."""
    return torch.einsum("bij,bijd->bjd", coefficients.to(u.dtype), u)


def _polar(v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Norm (..., 1) and direction of v, at least float32; the direction of 0 is 0.

    Dividing by the largest component first keeps the sum of squares from under- or overflowing, so that 1e-30 and
    1e30 keep their norm in float32. The scale cancels, so it needs no gradient.
    """
    v = v.to(_at_least_float32(v.dtype))
    scale = v.detach().abs().amax(dim, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    v = v / scale
    norm = torch.linalg.vector_norm(v, dim=dim, keepdim=True)
    return scale * norm, v / torch.where(norm > 0, norm, 1)


def _firing(norm: Tensor) -> Tensor:
    """n²/(1+n²), written as 1/(1+n⁻²) above 1 so that n² cannot overflow."""
    small, inverse = norm.clamp(max=1), 1 / norm.clamp(min=1)
    return torch.where(norm > 1, 1 / (1 + inverse.square()), small.square() / (1 + small.square()))


def _largest_norm(dtype: torch.dtype) -> float:
    """Largest norm that squash gives and unsquash takes: rounding a vector of this norm cannot reach 1."""
    eps = torch.finfo(dtype).eps
    return 1 - eps - 4 * torch.finfo(_at_least_float32(dtype)).eps


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
