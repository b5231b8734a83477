"""Every equation of a product of expert capsules, one short function each.

This module is the reference implementation. It favours readability over speed; the faster versions
in `poecaps.kernels` are tested against it. Each axis has one letter, the same in every module:
B images in a batch, I input capsules of dimension K, J output capsules ("experts") of dimension D.
A weight has shape (I, J, D, K): one D×K map W_ij from each input capsule to each expert.

Norms, softmaxes and energies of half-precision tensors are computed in float32.

References
----------
M. Hauser, "Training products of expert capsules with mixing by dynamic routing", 2019.
S. Sabour, N. Frosst, G. Hinton, "Dynamic routing between capsules", 2017.
G. Hinton, "Training products of experts by minimizing contrastive divergence", 2002.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from poecaps import _checks as checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Axis = Literal["inputs", "outputs"]
Agreement = Literal["cosine", "inner"]
Mixing = Literal["deterministic", "bernoulli"]
__all__ = [
    "AGREEMENTS",
    "AXES",
    "MIXINGS",
    "Agreement",
    "Axis",
    "LearningStep",
    "Mixing",
    "Routing",
    "RoutingOptions",
    "contrastive_divergence",
    "decoder_contrastive_divergence",
    "direction",
    "encode",
    "energy",
    "expert_states",
    "firing_probability",
    "forward_side",
    "free_energy",
    "g",
    "g_of_squashed",
    "held_preactivation",
    "log_odds",
    "preactivation",
    "reconstruct",
    "reconstruction",
    "routing_by_agreement",
    "squash",
    "unsquash",
    "votes",
    "winning_experts",
]

AXES: tuple[Axis, ...] = get_args(Axis)
AGREEMENTS: tuple[Agreement, ...] = get_args(Agreement)
MIXINGS: tuple[Mixing, ...] = get_args(Mixing)


# --------------------------------------------------------------------------------------------------
# Squashing


def squash(z: Tensor, dim: int = -1) -> Tensor:
    """Shrink vectors into the open unit ball: squash(z) = ‖z‖²/(1+‖z‖²) · z/‖z‖.

    The direction is kept, and the norm becomes the probability that the capsule is on.
    squash(0) = 0, gradients are finite everywhere, and the norm stays below 1 even where
    ‖z‖²/(1+‖z‖²) would round to 1.

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
    # Rounded down, not clamped: the value stays in the ball, with the derivative of the equation.
    p = p - (p - _largest_norm(z.dtype)).clamp(min=0).detach()
    return (p * unit).to(z.dtype)


def unsquash(x: Tensor, dim: int = -1) -> Tensor:
    """Invert `squash`: unsquash(x) = √(‖x‖/(1−‖x‖)) · x/‖x‖.

    Norms are clamped just below 1 (at 1 − 5ε for float32 and float64, at about 1 − ε for half
    precision, with ε the spacing of the dtype at 1), so the result is finite for any finite input.
    Values are not checked. The derivative grows as ‖x‖^(−1/2) towards 0; at 0 it is defined as 0.

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
    p = torch.where(
        p > 0, p, 0.5
    )  # any constant: it only keeps the square root's gradient finite at 0
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


# --------------------------------------------------------------------------------------------------
# Routing


def check_routing_options(
    iterations: int, sharpness: float, normalize: str, agreement: str
) -> None:
    """Raise an error if an option of `routing_by_agreement` is invalid."""
    checks.require_int("iterations", iterations, 1)
    checks.require_nonnegative("sharpness", sharpness)
    checks.require_choice("normalize", normalize, AXES)
    checks.require_choice("agreement", agreement, AGREEMENTS)


@dataclass(frozen=True)
class RoutingOptions:
    """Options of `routing_by_agreement`, for functions that route as one of several steps.

    Attributes
    ----------
    iterations
        Number of routing iterations R, at least 1.
    sharpness
        Factor β of the agreement.
    normalize
        Axis of the softmax: ``"inputs"`` or ``"outputs"``.
    agreement
        ``"cosine"`` or ``"inner"``.
    """

    iterations: int = 3
    sharpness: float = 1.0
    normalize: Axis = "inputs"
    agreement: Agreement = "cosine"

    def __post_init__(self) -> None:
        check_routing_options(self.iterations, self.sharpness, self.normalize, self.agreement)


class Routing:
    """Result of routing by agreement.

    Attributes
    ----------
    coefficients : (B, I, J)
        c_ij, the weight of input capsule i in the mixture of expert j; at least float32.
    preactivation : (B, J, D)
        z_j = Σ_i c_ij W_ij x_i.
    """

    preactivation: Tensor

    def __init__(self, coefficients: Tensor, preactivation: Tensor) -> None:
        self._coefficients, self.preactivation = coefficients, preactivation

    @property
    def coefficients(self) -> Tensor:
        """Routing coefficients c_ij: (B, I, J), at least float32."""
        return self._coefficients

    def __repr__(self) -> str:
        inputs, (batch, experts, dim) = self.coefficients.shape[1], self.preactivation.shape
        coefficients, preactivation = (batch, inputs, experts), (batch, experts, dim)
        return f"Routing(coefficients={coefficients}, preactivation={preactivation})"


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

        c = softmax(b),   z_j = Σ_i c_ij u_ij

    and between the iterations::

        b_ij += sharpness · agreement(u_ij, z_j)

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
    b = torch.zeros(u.shape[:3], dtype=_at_least_float32(u.dtype), device=u.device)
    axis = 1 if normalize == "inputs" else 2
    c = torch.softmax(b, dim=axis)
    z = _mix_votes(c, u)
    compared = direction(u) if agreement == "cosine" else u  # the same in all iterations
    for _ in range(iterations - 1):
        target = direction(z) if agreement == "cosine" else squash(z)
        b = b + sharpness * torch.einsum("bijd,bjd->bij", compared, target).to(b.dtype)
        c = torch.softmax(b, dim=axis)
        z = _mix_votes(c, u)
    return Routing(coefficients=c, preactivation=z)


def votes(x: Tensor, weight: Tensor) -> Tensor:
    """Compute u_ij = W_ij x_i: (B, I, K), (I, J, D, K) → (B, I, J, D)."""
    check_weight(weight)
    inputs, _, _, dim = weight.shape
    check_capsules("x", x, "BIK", (None, inputs, dim), weight)
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
    check_weight(weight)
    inputs, experts, out_dim, _ = weight.shape
    check_capsules("y", y, "BJD", (None, experts, out_dim), weight)
    _check_coefficients(coefficients, (len(y), inputs, experts))
    back = torch.einsum("bjd,ijdk->bijk", y, weight)
    return squash(torch.einsum("bij,bijk->bik", coefficients.to(back.dtype), back))


# --------------------------------------------------------------------------------------------------
# Energies and probabilities, as functions of the preactivations z_j


def energy(z: Tensor, on: Tensor, strength: Tensor | None = None) -> Tensor:
    """Compute E(x, a) = −Σ_j a_j log‖z_j‖².

    With strengths α_j, an expert is on if at least one of α_j experts that share its weights is,
    and E(x, a) = −Σ_j a_j log((1 + ‖z_j‖²)^α_j − 1).

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J)
        a_j, 1 or True where expert j is on.
    strength : (J,), optional
        α_j, above 0; 1 without it.

    Returns
    -------
    (B,)
        At least float32. An expert that is on with z_j = 0 makes it +∞.
    """
    _check_preactivation(z)
    checks.require_tensor("on", on)
    checks.require_shape("on", on, "BJ", z.shape[:2], "say for each image which experts are on")
    _check_strength(strength, z)
    return _energy(z, on, strength)


def _energy(z: Tensor, on: Tensor, strength: Tensor | None) -> Tensor:
    """Compute E(x, a) without checks, also of strengths (B, J), which are 0 at t = 0."""
    active = on != 0
    if strength is None:
        norm = _polar(z, -1)[0].squeeze(-1)
        log_odds = 2 * torch.log(torch.where(active, norm, 1))
    else:
        log_odds = _log_expm1(torch.where(active, strength * _log_partition(z), 1))
    return -(on * log_odds).sum(-1)


def free_energy(z: Tensor, on: Tensor | None = None, strength: Tensor | None = None) -> Tensor:
    """Compute F(x) = −log Σ_a e^(−E(x, a)) = −Σ_j α_j log(1 + ‖z_j‖²).

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional
        Where False, expert j may not fire and leaves the sum.
    strength : (J,), optional
        α_j, above 0; 1 without it (the paper).

    Returns
    -------
    (B,)
        At least float32.
    """
    _check_preactivation(z)
    _check_strength(strength, z)
    if on is not None:
        checks.require_tensor("on", on)
        checks.require_shape(
            "on", on, "BJ", z.shape[:2], "say for each image which experts may fire"
        )
    return _free_energy(z, on, strength)


def _free_energy(z: Tensor, on: Tensor | None = None, strength: Tensor | None = None) -> Tensor:
    """Compute F(x) without checks.

    The strengths of a density are above 0 by construction, unless a training diverged, which is for
    the training to report.
    """
    log_partition = _log_partition(z)
    if strength is not None:
        log_partition = strength * log_partition
    if on is not None:
        log_partition = log_partition * on
    return -log_partition.sum(-1)


def firing_probability(z: Tensor, strength: Tensor | None = None) -> Tensor:
    """Compute P(a_j = 1 | x) = ‖z_j‖²/(1+‖z_j‖²) = ‖squash(z_j)‖: (B, J, D) → (B, J).

    With strengths α_j (J,), the probability that at least one of α_j experts with the weights of
    expert j fires, 1 − (1 + ‖z_j‖²)^(−α_j).
    """
    _check_preactivation(z)
    _check_strength(strength, z)
    return _firing_probability(z, strength)


def _firing_probability(z: Tensor, strength: Tensor | None) -> Tensor:
    """Compute P(a_j = 1 | x) without checks, also of strengths (B, J), which are 0 at t = 0."""
    if strength is not None:
        return -torch.expm1(-strength * _log_partition(z)).to(z.dtype)
    return _firing(_polar(z, -1)[0]).squeeze(-1).to(z.dtype)


def log_odds(z: Tensor) -> Tensor:
    """Compute log P(a_j = 1) / P(a_j = 0) = log‖z_j‖², the logit of the firing probability.

    Parameters
    ----------
    z : (..., D)

    Returns
    -------
    (...)
        At least float32.
    """
    return z.to(_at_least_float32(z.dtype)).square().sum(-1).log()


def forward_side(z: Tensor, linear_dims: int, origin: Tensor | None = None) -> Tensor:
    """Rectify the linear coordinates of capsules on S^m × R^n × (0,1).

    The last n numbers of z_j are linear coordinates t_j and the others a spherical part s_j. Only
    the forward side of a linear coordinate counts::

        z_j = (s_j, t_j)  →  (s_j, max(t_j + o_j, 0))

    Energies of the result have ‖s_j‖² + ‖max(t_j + o_j, 0)‖² in place of ‖z_j‖². A sphere has no
    direction, so F(x) = F(−x) without linear coordinates.

    Parameters
    ----------
    z : (B, J, D)
    linear_dims
        n, from 0 (the paper) to D.
    origin : (J,), optional
        o_j; 0 without it.

    Returns
    -------
    (B, J, D)
    """
    checks.require_int("linear_dims", linear_dims, 0, z.shape[-1])
    if origin is not None:
        checks.require_tensor("origin", origin)
        checks.require_shape("origin", origin, "J", z.shape[-2:-1], "give a number for each expert")
    if linear_dims == 0:
        return z
    sphere, line = z.split((z.shape[-1] - linear_dims, linear_dims), dim=-1)
    if origin is not None:
        line = line + origin.unsqueeze(-1)
    line = line.clamp(min=0)
    return torch.cat((sphere, line), dim=-1) if sphere.shape[-1] else line


def winning_experts(
    z: Tensor, winners: int | None, balance: Tensor | None = None, *, views: int = 1
) -> Tensor | None:
    """Select the `winners` experts with the largest log‖z_j‖² + balance_j of each image.

    With several views of every image, the mean of log‖z_j‖² over its views decides, and all of them
    have the same winners: which expert fires is then what the views have in common.

    Parameters
    ----------
    z : (B, J, D)
    winners
        Number of experts that may fire for an image. None: there is no competition.
    balance : (J,), optional
        Head start of each expert.
    views
        Number of consecutive rows that are views of the same image; a divisor of B.

    Returns
    -------
    (B, J) of bool, or None without competition
        True where expert j may fire.
    """
    if winners is None:
        return None
    with torch.no_grad():
        score = log_odds(z)
        if views > 1:
            mean = score.view(-1, views, score.shape[-1]).mean(1)
            score = mean.repeat_interleave(views, dim=0)
        if balance is not None:
            score = score + balance
        best = score.topk(winners, dim=-1).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)


# --------------------------------------------------------------------------------------------------
# Learning. The coefficients c, the winners and the mixed capsules x̃ are held fixed in both rules.


@dataclass(frozen=True)
class LearningStep:
    """Result of a learning rule for one batch.

    Attributes
    ----------
    loss : ()
        Loss whose gradient with respect to the weight is −ΔW.
    grad_weight : (I, J, D, K), optional
        −ΔW of the learning rule, in closed form. The reference leaves it out (None) if the loss is
        differentiable, so that autograd is a second route to the same gradient; a faster backend,
        if no gradient is required.
    on : (B, J) of bool, optional
        Experts that may fire for each image; None without competition.
    x_model : (N, I, K), optional
        The capsules x̃ that mixing ended with; None if no chain was given.
    """

    loss: Tensor
    grad_weight: Tensor | None
    on: Tensor | None = None
    x_model: Tensor | None = None


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008 (frozen)
    *,
    k: int = 1,
    mixing: Mixing = "deterministic",
    uniform: Tensor | None = None,
    chain: Tensor | None = None,
    winners: int | None = None,
    balance: Tensor | None = None,
    views: int = 1,
) -> LearningStep:
    """Compute one step of Algorithm 1: contrastive divergence, mixed by dynamic routing.

    Route the data, hold the coefficients c, and mix `k` times::

        z_j = Σ_i c_ij W_ij x_i
        y_j = squash(z_j),   x̃_i = squash(Σ_j c_ij W_ijᵀ y_j),   z̃_j = Σ_i c_ij W_ij x̃_i

    With g(z) = z/(1+‖z‖²), the weights move by::

        ΔW_ij = 2 · mean c_ij ( g(z_j) x_iᵀ − g(z̃_j) x̃_iᵀ )

    This is −∇_W (mean F(x) − mean F(x̃)) with c and x̃ held fixed.

    Parameters
    ----------
    x : (B, I, K)
        Squashed input capsules of the data.
    weight : (I, J, D, K)
    routing
        Options of the routing.
    k
        Number of mixing steps (CD-k).
    mixing, uniform : see `expert_states`
        `uniform` has shape (k, N, J), with N the number of capsules that are mixed.
    chain : (N, I, K), optional
        Persistent chain: mixing starts here, with the chain's own coefficients, instead of at `x`.
    winners, balance, views : see `winning_experts`
        Competition between the experts. Experts that do not win are off in both phases. A chain
        has no views.

    Returns
    -------
    LearningStep
        With loss mean F(x) − mean F(x̃) and gradient −ΔW.
    """
    with torch.no_grad():
        routed = routing_by_agreement(x, weight, **asdict(routing))
        c = routed.coefficients
        on = winning_experts(routed.preactivation, winners, balance, views=views)
        x_model, z_model, c_model, on_model = x, routed.preactivation, c, on
        if chain is not None:
            routed = routing_by_agreement(chain, weight, **asdict(routing))
            x_model, z_model, c_model = chain, routed.preactivation, routed.coefficients
            on_model = winning_experts(z_model, winners, balance)
        for step in range(k):
            if step > 0:
                z_model = preactivation(x_model, weight, c_model)
            y = expert_states(z_model, on_model, mixing, None if uniform is None else uniform[step])
            x_model = reconstruction(y, weight, c_model)
    z, z_model = preactivation(x.detach(), weight, c), preactivation(x_model, weight, c_model)
    loss = free_energy(z, on).mean() - free_energy(z_model, on_model).mean()
    delta = None
    if not (loss.requires_grad or checks.is_wrapped(loss)):  # then autograd gives the gradient
        data, model = g(z, on), g(z_model, on_model)
        delta = 2 * (_mean_product(c, data, x) - _mean_product(c_model, model, x_model))
    grad_weight = None if delta is None else -delta
    return LearningStep(loss, grad_weight, on, None if chain is None else x_model)


def decoder_contrastive_divergence(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008 (frozen)
) -> LearningStep:
    """Compute one step of the decoder's learning rule, for experts y that encode the capsules x.

    The decoder routes from the J experts to the I capsules with coefficients e_ji, which are held.
    With z_i = unsquash(x_i)::

        z̃_i = Σ_j e_ji U_ji y_j,   x̃_i = squash(z̃_i),   ỹ_j = squash(Σ_i e_ji U_jiᵀ x̃_i)

        ΔU_ji = 2 · mean e_ji ( g(z_i) y_jᵀ − g(z̃_i) ỹ_jᵀ )

    Parameters
    ----------
    y : (B, J, D)
        Experts above, the inputs of the decoder.
    x : (B, I, K)
        Squashed capsules below, the targets.
    weight : (J, I, K, D)
        The maps U_ji.
    routing
        Options of the routing.

    Returns
    -------
    LearningStep
        With gradient −ΔU and the loss ⟨U, −ΔU⟩, which has this gradient because it is linear in U.
    """
    with torch.no_grad():
        routed = routing_by_agreement(y, weight, **asdict(routing))
        e, z_model = routed.coefficients, routed.preactivation
        y_model = reconstruction(squash(z_model), weight, e)
        delta = 2 * (_mean_product(e, g(unsquash(x)), y) - _mean_product(e, g(z_model), y_model))
    loss = -(weight * delta).sum(dtype=_at_least_float32(weight.dtype))
    return LearningStep(loss, -delta)


def g(z: Tensor, on: Tensor | None = None) -> Tensor:
    """Compute g(z) = z/(1+‖z‖²), half the gradient of log(1 + ‖z‖²); 0 where an expert is not on.

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional

    Returns
    -------
    (B, J, D)
        At least float32.
    """
    z = z.to(_at_least_float32(z.dtype))
    return _only(on, z / (1 + z.square().sum(-1, keepdim=True)))


def g_of_squashed(x: Tensor) -> Tensor:
    """Compute g(unsquash(x)) = √(1/‖x‖ − 1) x, because ‖x‖ = ‖z‖²/(1+‖z‖²): (..., K) → (..., K)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (1 / norm.clamp(min=torch.finfo(x.dtype).tiny, max=1) - 1).sqrt() * x


def expert_states(
    z: Tensor,
    on: Tensor | None = None,
    mixing: Mixing = "deterministic",
    uniform: Tensor | None = None,
) -> Tensor:
    """Compute the states that the experts send down when they mix; 0 where an expert is not on.

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional
        Experts that may fire.
    mixing
        ``"deterministic"``: squash(z_j), the paper's choice.
        ``"bernoulli"``: expert j fires with probability ‖squash(z_j)‖ and then sends the unit
        vector z_j/‖z_j‖; on average this is squash(z_j).
    uniform : (B, J), optional
        Uniform random numbers from 0 to 1 that decide which experts fire; drawn by torch if None.

    Returns
    -------
    (B, J, D)
    """
    if mixing == "deterministic":
        return _only(on, squash(z))
    probability = firing_probability(z).float()
    fires = (torch.rand_like(probability) if uniform is None else uniform) < probability
    return _only(on, fires.to(z.dtype).unsqueeze(-1) * direction(z))


def held_preactivation(x: Tensor, weight: Tensor, routing: RoutingOptions) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i with c and x held fixed: a gradient reaches the weight alone.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing that gives c.

    Returns
    -------
    (B, J, D)
    """
    with torch.no_grad():
        c = routing_by_agreement(x, weight, **asdict(routing)).coefficients
    return preactivation(x.detach(), weight, c)


def encode(
    x: Tensor,
    weight: Tensor,
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008 (frozen)
    *,
    winners: int | None = None,
    balance: Tensor | None = None,
) -> Tensor:
    """Encode capsules: the squashed experts squash(z_j), 0 for experts that lose the competition.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    winners, balance : see `winning_experts`

    Returns
    -------
    (B, J, D)
    """
    z = routing_by_agreement(x, weight, **asdict(routing)).preactivation
    return expert_states(z, winning_experts(z, winners, balance))


def reconstruct(
    x: Tensor,
    weight: Tensor,
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008 (frozen)
    *,
    winners: int | None = None,
    balance: Tensor | None = None,
) -> Tensor:
    """Go up and down once: x̃_i = squash(Σ_j c_ij W_ijᵀ squash(z_j)), with the coefficients of x.

    Parameters
    ----------
    x : (B, I, K)
        Squashed input capsules.
    weight : (I, J, D, K)
    routing
        Options of the routing.
    winners, balance : see `winning_experts`

    Returns
    -------
    (B, I, K)
    """
    routed = routing_by_agreement(x, weight, **asdict(routing))
    on = winning_experts(routed.preactivation, winners, balance)
    return reconstruction(expert_states(routed.preactivation, on), weight, routed.coefficients)


def _mean_product(c: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """Mean over the batch of c_ij p_j x_iᵀ: (B, I, J), (B, J, D), (B, I, K) → (I, J, D, K)."""
    return torch.einsum("bij,bjd,bik->ijdk", c.to(p.dtype), p, x.to(p.dtype)).to(x.dtype) / len(x)


def _log_partition(z: Tensor) -> Tensor:
    """Compute log(1 + ‖z_j‖²), in float32 or wider: (B, J, D) → (B, J)."""
    return torch.log1p(z.to(_at_least_float32(z.dtype)).square().sum(-1))


def _log_expm1(y: Tensor) -> Tensor:
    """Compute log(e^y − 1) for y ≥ 0, without overflow: −∞ at 0."""
    return y + torch.log(-torch.expm1(-y))


def _only(on: Tensor | None, y: Tensor) -> Tensor:
    """Set the experts (B, J, D) that are not on (B, J) to 0."""
    return y if on is None else y * on.unsqueeze(-1)


# --------------------------------------------------------------------------------------------------
# Arguments and floating point


def check_weight(weight: Tensor) -> None:
    """Raise an error unless a weight is a floating-point tensor of shape (I, J, D, K)."""
    checks.require_floating("weight", weight)
    checks.require_shape(
        "weight", weight, "IJDK", (None,) * 4, "give one D×K map for every pair (i, j)"
    )


def check_capsules(
    name: str, x: Tensor, axes: str, sizes: tuple[int | None, ...], weight: Tensor
) -> None:
    """Raise an error unless capsules have these sizes, and the dtype and device of the weight."""
    checks.require_floating(name, x)
    checks.require_shape(
        name, x, axes, sizes, f"{axes[1]} and {axes[2]} must be those of the weight"
    )
    checks.require_same_dtype(name, x, "weight", weight)
    checks.require_same_device(name, x, "weight", weight)


def _check_coefficients(coefficients: Tensor, sizes: Sequence[int]) -> None:
    checks.require_floating("coefficients", coefficients)
    remedy = "take those of routing_by_agreement for the same batch and weight"
    checks.require_shape("coefficients", coefficients, "BIJ", sizes, remedy)


def _check_preactivation(z: Tensor) -> None:
    checks.require_floating("z", z)
    checks.require_shape(
        "z", z, "BJD", (None,) * 3, "give the preactivation of routing_by_agreement"
    )


def _check_strength(strength: Tensor | None, z: Tensor) -> None:
    """Raise an error unless strengths are (J,) and, where reading them costs nothing, above 0."""
    if strength is not None:
        checks.require_tensor("strength", strength)
        checks.require_shape(
            "strength", strength, "J", z.shape[1:2], "give a number above 0 for each expert"
        )
        checks.check_positive_on_cpu(strength, "strength")


def _mix_votes(coefficients: Tensor, u: Tensor) -> Tensor:
    """z_j = Σ_i c_ij u_ij: (B, I, J), (B, I, J, D) → (B, J, D)."""
    return torch.einsum("bij,bijd->bjd", coefficients.to(u.dtype), u)


def _polar(v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Norm (..., 1) and direction of v, at least float32; the direction of 0 is 0.

    Dividing by the largest component first prevents underflow and overflow of the sum of squares,
    so that 1e-30 and 1e30 keep their norm in float32. The scale cancels, so it needs no gradient.
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
    """Largest norm of a squashed vector: rounding a vector of this norm cannot reach 1."""
    eps = torch.finfo(dtype).eps
    return 1 - eps - 4 * torch.finfo(_at_least_float32(dtype)).eps


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def laplacian_distance(first: Tensor, second: Tensor, levels: int = 3) -> Tensor:
    """Compute the mean absolute difference of two sets of images at several scales.

    The sum of the mean absolute differences in each level of a Laplacian pyramid: what the mean of
    2×2 pixels does not say, for each of `levels` scales as far as the sides allow, and the coarsest
    mean. A blurred edge is far from a sharp one in the fine levels, and a wrong colour of a large
    area counts in the coarsest level, too (Bojanowski et al. 2018, without their smoothing).

    Parameters
    ----------
    first, second : (B, C, H, W)
    levels
        Number of scales, at least 1.

    Returns
    -------
    ()
    """
    difference, total = first - second, first.new_zeros(())
    for _ in range(levels):
        height, width = difference.shape[2] // 2 * 2, difference.shape[3] // 2 * 2
        if min(height, width) < 2:
            break
        coarse = torch.nn.functional.avg_pool2d(difference, 2)
        fine = difference[..., :height, :width] - coarse.repeat_interleave(2, 2).repeat_interleave(
            2, 3
        )
        total, difference = total + fine.abs().mean(), coarse
    return total + difference.abs().mean()
