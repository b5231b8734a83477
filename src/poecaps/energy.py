"""The product of expert capsules as a density that can be sampled.

Every expert multiplies a base measure by a factor that grows where the expert fires::

    P(x) = base(x) · Π_j (1 + ‖z_j(x)‖²)^α_j / Z = base(x) e^(−F(x)) / Z

With α_j = 1 and the uniform measure on a product of unit balls as the base, this is the model of
the paper. The samplers of `poecaps.sampling` and the likelihoods of `poecaps.likelihood` work in
coordinates u in which the base measure is simple, see `GaussianBase` and `BallBase`.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._modules import MappedBatches
from poecaps.kernels import dispatch
from poecaps.layer import CapsuleRouting
from poecaps.options import BASES, Base
from poecaps.preprocessing import leading_directions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["BallBase", "CapsuleDensity", "GaussianBase"]

# The least variance of the base measure in a direction, relative to the mean over all directions,
# so that the coordinates u exist if the data do not vary in a direction.
SMALLEST_VARIANCE = 1e-6
ROUNDING = 1e-5  # share of the norm of a matrix that may be due to rounding


class GaussianBase(nn.Module):
    """A Gaussian over all capsules together, N(0, Σ), whose coordinates u are independent N(0, 1).

    With V the r leading principal directions of the data, λ their variances and σ² the mean
    variance of all other directions::

        Σ = V diag(λ) Vᵀ + σ² (1 − V Vᵀ),       x = Σ^½ u

    With r = 0 and before `fit`, Σ = 1: independent capsules.

    Parameters
    ----------
    capsules, dim
        I and K.
    components
        r, from 0 to I·K.
    max_variance
        Upper bound of the variances λ. Whatever the data have more is left to the experts.
    device, dtype
        As for any `torch.nn` layer.

    Attributes
    ----------
    directions : (I·K, r)
        V.
    std : (r,)
        √λ.
    rest_std : ()
        σ; or (I·K,), if r = 0 and every number has a standard deviation of its own.
    """

    directions: Tensor
    std: Tensor
    rest_std: Tensor

    def __init__(
        self,
        capsules: int,
        dim: int,
        components: int = 0,
        *,
        max_variance: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.require_int("components", components, 0, capsules * dim)
        if max_variance is not None:
            checks.require_positive("max_variance", max_variance)
        self.capsules, self.dim, self.max_variance = capsules, dim, max_variance
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_buffer("directions", torch.eye(capsules * dim, components, **where))
        self.register_buffer("std", torch.ones(components, **where))
        self.register_buffer("rest_std", torch.ones((), **where))

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Fit Σ to centred capsules; without components it stays 1.

        Parameters
        ----------
        batches : iterable of (B, I, K)
            Iterated over several times; each time it must give the same capsules.
        """
        size, components = self.directions.shape
        if components == 0:
            return
        flat = MappedBatches(self._flat, batches)
        count = sum(len(batch) for batch in flat)
        if count == 0:
            raise ValueError("batches must hold at least one vector of capsules, but are empty")
        total = sum(batch.double().square().sum().item() for batch in flat) / count
        if not math.isfinite(total):
            raise ValueError(
                f"batches must hold finite capsules, but their mean square norm is {total}; look "
                "for a division by zero or a diverged training step before this call"
            )
        variance, directions = leading_directions(flat, size, components)
        rest = (total - variance.sum().item()) / max(1, size - components)
        least = SMALLEST_VARIANCE * total / size
        self.directions.copy_(directions)
        self.std.copy_(variance.clamp(min=least, max=self.max_variance).sqrt())
        self.rest_std.fill_(math.sqrt(max(rest, least)))

    def from_white(self, u: Tensor) -> Tensor:
        """Compute x = Σ^½ u: (B, I·K) → (B, I, K)."""
        return self.times_root(u).view(-1, self.capsules, self.dim)

    def to_white(self, x: Tensor) -> Tensor:
        """Compute u = Σ^(−½) x: (B, I, K) → (B, I·K)."""
        return self._multiply(x.flatten(1), 1 / self.std, 1 / self.rest_std)

    def pull_back(self, u: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG002 (the map is linear)
        """Turn a gradient in x into the gradient in u, Σ^½ ∇_x: (B, I, K) → (B, I·K)."""
        return self.times_root(gradient.flatten(1))

    def times_root(self, points: Tensor) -> Tensor:
        """Multiply rows by Σ^½: (B, I·K) → (B, I·K)."""
        return self._multiply(points, self.std, self.rest_std)

    def potential(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute −log N(u; 0, 1), up to a constant, and its gradient: ½‖u‖² (B,), u (B, I·K)."""
        return u.square().sum(-1) / 2, u

    def from_noise(self, noise: Tensor) -> Tensor:
        """Turn standard normal numbers (B, I·K) into draws of u: here they are the same."""
        return noise

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute log N(x; 0, Σ): (B, I, K) → (B,)."""
        flat = x.flatten(1)
        independent = flat.square().sum(-1) / 2 + flat.shape[1] / 2 * math.log(2 * math.pi)
        return self.log_ratio(x) - independent

    def log_ratio(self, x: Tensor) -> Tensor:
        """Compute log N(x; 0, Σ) − log N(x; 0, 1), relative to independent capsules: → (B,)."""
        size, components = self.directions.shape
        rest = self.rest_std.log().expand(size - components)
        log_det = self.std.log().sum() + rest.sum()
        return x.flatten(1).square().sum(-1) / 2 - self.potential(self.to_white(x))[0] - log_det

    def _flat(self, batch: Tensor) -> Tensor:
        """Return a batch as rows: (B, I, K) → (B, I·K)."""
        checks.require_floating("batches", batch)
        remedy = "I and K must be those of the base measure"
        checks.require_shape("batches", batch, "BIK", (None, self.capsules, self.dim), remedy)
        return batch.flatten(1)

    def _multiply(self, points: Tensor, leading: Tensor, rest: Tensor) -> Tensor:
        """Multiply by V diag(leading) Vᵀ + rest (1 − V Vᵀ): (B, I·K) → (B, I·K)."""
        if not len(leading):
            return points * rest
        return (points @ self.directions * (leading - rest)) @ self.directions.T + points * rest


class BallBase(nn.Module):
    """The uniform measure on the product of I open unit balls (the paper's base measure).

    Coordinates u without a boundary: x_i = u_i/√(1+‖u_i‖²). Their density is that of x times the
    determinant of the map, Π_i (1+‖u_i‖²)^(−(K+2)/2).

    Parameters
    ----------
    capsules, dim
        I and K.
    """

    def __init__(self, capsules: int, dim: int) -> None:
        super().__init__()
        self.capsules, self.dim = capsules, dim

    def fit(self, batches: Iterable[Tensor]) -> None:
        """Do nothing: the measure does not depend on data."""

    def from_white(self, u: Tensor) -> Tensor:
        """Compute x_i = u_i/√(1+‖u_i‖²): (B, I·K) → (B, I, K).

        The norm stays below 1 even where it would round to 1.
        """
        u = u.view(-1, self.capsules, self.dim)
        square = u.square().sum(-1, keepdim=True)
        # At least 1/2, where the limit is not reached: it only keeps the limit finite at 0.
        limit = (1 - 5 * torch.finfo(u.dtype).eps) * square.clamp(min=0.5).rsqrt()
        return u * torch.minimum((1 + square).rsqrt(), limit)

    def to_white(self, x: Tensor) -> Tensor:
        """Compute u_i = x_i/√(1−‖x_i‖²): (B, I, K) → (B, I·K)."""
        rest = 1 - x.square().sum(-1, keepdim=True)
        return (x * rest.clamp(min=torch.finfo(x.dtype).eps).rsqrt()).flatten(1)

    def pull_back(self, u: Tensor, gradient: Tensor) -> Tensor:
        """Turn a gradient in x into the gradient in u: (B, I, K) → (B, I·K).

        The Jacobian of one capsule is (1 − x_i x_iᵀ)/√(1+‖u_i‖²).
        """
        u = u.view(-1, self.capsules, self.dim)
        scale = (1 + u.square().sum(-1, keepdim=True)).rsqrt()
        x = u * scale
        return (scale * (gradient - x * (x * gradient).sum(-1, keepdim=True))).flatten(1)

    def potential(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute minus the log-density of u, up to a constant, and its gradient.

        Returns
        -------
        (B,), (B, I·K)
            (K+2)/2 Σ_i log(1+‖u_i‖²), and (K+2) u_i/(1+‖u_i‖²).
        """
        u = u.view(-1, self.capsules, self.dim)
        square = u.square().sum(-1)
        gradient = (self.dim + 2) * u / (1 + square).unsqueeze(-1)
        return (self.dim + 2) / 2 * torch.log1p(square).sum(-1), gradient.flatten(1)

    def from_noise(self, noise: Tensor) -> Tensor:
        """Turn standard normal numbers (B, I·K) into draws of u (B, I·K).

        The direction of x_i is that of its numbers n_i. Their square norm has a χ² distribution
        with K degrees of freedom, whose distribution function C is uniform, so that ‖x_i‖ = C^(1/K)
        is the radius of a uniform point of the ball.
        """
        n = noise.view(-1, self.capsules, self.dim)
        half_square = n.square().sum(-1, keepdim=True) / 2
        share = torch.special.gammainc(torch.full_like(half_square, self.dim / 2), half_square)
        return self.to_white(F.direction(n) * share ** (1 / self.dim))

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log-density of x, −I log vol(ball): (B, I, K) → (B,)."""
        volume = self.dim / 2 * math.log(math.pi) - math.lgamma(self.dim / 2 + 1)
        return x.new_full((len(x),), -self.capsules * volume)

    def log_ratio(self, x: Tensor) -> Tensor:
        """Return 0: the base measure relative to independent uniform capsules, (B, I, K) → (B,)."""
        return x.new_zeros(len(x))


class CapsuleDensity(CapsuleRouting):
    """A density over I capsules of dimension K, as a product of J experts of dimension D.

    ::

        P(x) = base(x) e^(−F(x)) / Z,       F(x) = −Σ_j α_j log(1 + ‖z_j‖²)

    with z_j = Σ_i (c_ij/c₀) W_ij x_i from routing by agreement. The coefficients are counted in
    units of the uniform coefficient c₀, so that W has the same scale for any number of capsules.
    Z is the mean of e^(−F) over the base measure, so log P(x) − log base(x) is what the experts add
    to the base measure, in nats.

    An expert has a strength α_j > 0, which is learned: strength n is that of n experts that share
    their weights. The last `linear_dims` numbers of an expert are coordinates on a line, of which
    only the forward side counts; see `poecaps.functional.forward_side`. Without them, F(x) = F(−x).

    All gradients in x are those of F itself, through the routing coefficients. Algorithm 1
    (`poecaps.CapsuleExperts.contrastive_divergence`) holds the coefficients fixed instead.

    Parameters
    ----------
    in_capsules, in_dim, out_capsules, out_dim
        I, K, J and D.
    linear_dims
        n, from 0 (the paper) to D; the other D − n numbers are spherical: S^m × R^n of the paper,
        with m = D − n − 1.
    strength
        Initial α_j.
    base
        ``"gaussian"`` (see `GaussianBase`) or ``"ball"`` (the paper, see `BallBase`).
    base_components, base_max_variance
        Options of `GaussianBase`.
    iterations, sharpness, normalize, agreement, backend, generator, device, dtype
        See `poecaps.layer.CapsuleRouting`. One iteration mixes evenly, and is a matrix product.

    Attributes
    ----------
    weight : (I, J, D, K)
        The maps W_ij, initially N(0, 0.01²).
    log_strength : (J,)
        log α_j.
    origin : (J,)
        o_j, the origin of the linear coordinates of an expert; without them a buffer of zeros.
    base
        The base measure.
    partition : (3,)
        Lower and upper estimate of log Z, and whether they are known (1) or not yet (0); see
        `poecaps.likelihood`.
    """

    partition: Tensor
    origin: Tensor
    base: GaussianBase | BallBase

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        out_capsules: int,
        out_dim: int,
        *,
        linear_dims: int = 0,
        strength: float = 1.0,
        base: Base = "gaussian",
        base_components: int = 0,
        base_max_variance: float | None = None,
        iterations: int = 1,
        sharpness: float = 1.0,
        normalize: F.Axis = "outputs",
        agreement: F.Agreement = "cosine",
        backend: dispatch.Backend | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_capsules,
            in_dim,
            out_capsules,
            out_dim,
            iterations=iterations,
            sharpness=sharpness,
            normalize=normalize,
            agreement=agreement,
            backend=backend,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        checks.require_int("linear_dims", linear_dims, 0, out_dim)
        checks.require_positive("strength", strength)
        checks.require_choice("base", base, BASES)
        checks.require_int("base_components", base_components, 0, in_capsules * in_dim)
        if base_max_variance is not None:
            checks.require_positive("base_max_variance", base_max_variance)
        if base == "ball" and base_components:
            raise ValueError(
                f"base_components must be 0 with base='ball', but is {base_components}; "
                "only the Gaussian base measure has a covariance"
            )
        self.linear_dims, self.initial_strength = linear_dims, float(strength)
        self.base_components = base_components
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        if base == "ball":
            self.base = BallBase(in_capsules, in_dim)
        else:
            self.base = GaussianBase(
                in_capsules, in_dim, base_components, max_variance=base_max_variance, **like
            )
        self.log_strength = nn.Parameter(torch.empty(out_capsules, **like))
        origin = torch.empty(out_capsules, **like)
        if linear_dims:
            self.origin = nn.Parameter(origin)
        else:  # it has no effect, so there is nothing to learn
            self.register_buffer("origin", origin)
        self.register_buffer("partition", torch.empty(3, **like))
        self._reset_strength()

    @property
    def strength(self) -> Tensor:
        """α_j: (J,)."""
        return self.log_strength.exp()

    def strongest_experts(self, count: int) -> Tensor:
        """Return the indices of the experts with the largest strengths, the largest first.

        Parameters
        ----------
        count
            Number of experts; all of them if there are fewer.

        Returns
        -------
        (min(count, J),)
        """
        checks.require_int("count", count, 1)
        return self.log_strength.detach().argsort(descending=True, stable=True)[:count]

    @property
    def log_partition(self) -> float:
        """Log Z, the mean of its two estimates.

        Raises
        ------
        ValueError
            If it was not estimated yet.
        """
        lower, upper, known = self.partition.tolist()
        if not known:
            raise ValueError(
                "log Z is not known yet; estimate it with "
                "poecaps.likelihood.estimate_log_partition, and store it with fit_log_partition"
            )
        return float(lower + upper) / 2

    def forget_log_partition(self) -> None:
        """Forget log Z, which belongs to other weights or another base measure, if it was known."""
        nn.init.zeros_(self.partition)

    @property
    def is_even(self) -> bool:
        """Whether the votes are mixed evenly, so that z is a matrix product."""
        return self.iterations == 1 or self.sharpness == 0

    @property
    def is_capturable(self) -> bool:
        """Whether the energy and its gradient can be captured in a CUDA graph."""
        if self.is_even:
            return self.weight.is_cuda
        options: dict[str, Any] = {"routing": self.routing, "needs_grad": True}
        return dispatch.choose(self.weight, self.weight, self.backend, **options) == "triton"

    def reset_parameters(self, std: float = 0.01, generator: torch.Generator | None = None) -> None:
        """Draw W from N(0, std²), and set strengths and origins to their initial values."""
        super().reset_parameters(std, generator)
        if hasattr(self, "partition"):  # the base class calls this before they exist
            self._reset_strength()

    def _reset_strength(self) -> None:
        nn.init.constant_(self.log_strength, math.log(self.initial_strength))
        nn.init.zeros_(self.origin)
        self.forget_log_partition()

    def preactivation(self, x: Tensor) -> Tensor:
        """Compute the experts (s_j, max(t_j + o_j, 0)): (B, I, K) → (B, J, D)."""
        self._check(x, ball=isinstance(self.base, BallBase))
        return self._preactivation(x, self.weight)

    def free_energy(self, x: Tensor) -> Tensor:
        """Compute F(x) = −Σ_j α_j log(1 + ‖z_j‖²): (B, I, K) → (B,)."""
        return F._free_energy(self.preactivation(x), strength=self.strength)

    def energy(self, x: Tensor, on: Tensor) -> Tensor:
        """Compute E(x, a) = −Σ_j a_j log((1 + ‖z_j‖²)^α_j − 1), with Σ_a e^(−E) = e^(−F).

        Parameters
        ----------
        x : (B, I, K)
        on : (B, J)
            a_j, 1 or True where expert j is on.

        Returns
        -------
        (B,)
        """
        z = self.preactivation(x)
        self._check_states(on, len(x))
        return F._energy(z, on, self.strength)

    def firing_probability(self, x: Tensor) -> Tensor:
        """Compute ‖z_j‖²/(1+‖z_j‖²), for each of the α_j experts: (B, I, K) → (B, J)."""
        return F.firing_probability(self.preactivation(x))

    def on_probability(self, x: Tensor) -> Tensor:
        """Compute P(a_j = 1 | x) = 1 − (1 + ‖z_j‖²)^(−α_j): (B, I, K) → (B, J)."""
        return F._firing_probability(self.preactivation(x), self.strength)

    def forward(self, x: Tensor) -> Tensor:
        """Encode: the squashed experts squash(z_j), (B, I, K) → (B, J, D)."""
        return F.squash(self.preactivation(x))

    def score(self, x: Tensor) -> Tensor:
        """Compute ∇ log P(x), through the routing: (B, I, K) → (B, I, K)."""
        self._check(x, ball=isinstance(self.base, BallBase))
        gradient = self._free_energy_and_gradient(x)[1]
        if isinstance(self.base, BallBase):  # a uniform density, which has no gradient
            return -gradient
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            (base,) = torch.autograd.grad(self.base.log_prob(points).sum(), points)
        return base - gradient

    def log_ratio(self, x: Tensor) -> Tensor:
        """Compute log P(x) − log base(x) = −F(x) − log Z: (B, I, K) → (B,).

        Raises
        ------
        ValueError
            If log Z was not estimated yet.
        """
        return -self.free_energy(x) - self.log_partition

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute log P(x), with respect to Lebesgue measure: (B, I, K) → (B,)."""
        return self.log_ratio(x) + self.base.log_prob(x)

    def free_energy_and_gradient(
        self, x: Tensor, on: Tensor | None = None, strength: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute F(x) and ∇_x F(x), through the routing.

        Parameters
        ----------
        x : (B, I, K)
            Values are not checked.
        on : (B, J), optional
            Which experts are on; the results are then E(x, a) and its gradient.
        strength : (J,) or (B, J), optional
            In place of α_j, above 0.

        Returns
        -------
        (B,), (B, I, K)
        """
        if on is not None:
            self._check_states(on, len(x))
        if strength is not None:
            checks.require_tensor("strength", strength)
            sizes = (len(x), self.out_capsules)[-max(1, strength.ndim) :]
            remedy = "give a number above 0 for each expert"
            checks.require_shape("strength", strength, "BJ"[-len(sizes) :], sizes, remedy)
            checks.check_positive_on_cpu(strength, "strength")
        return self._free_energy_and_gradient(x, on, strength)

    @torch.no_grad()
    def _free_energy_and_gradient(
        self, x: Tensor, on: Tensor | None = None, strength: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the same without checks, for the steps of chains: a strength is 0 at t = 0."""
        weight, strength = self.weight.detach(), self.strength if strength is None else strength
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            z = self._preactivation(points, weight, self.origin.detach())
        value, gradient = energy_and_gradient(z.detach(), strength, on)
        (back,) = torch.autograd.grad(z, points, gradient)
        return value, back

    def even_matrix(self) -> Tensor:
        """Return W as a matrix from all inputs to all experts, for even mixing: (I·K, J·D)."""
        return self.weight.permute(0, 3, 1, 2).reshape(self.in_capsules * self.in_dim, -1)

    @property
    def has_components(self) -> bool:
        """Whether the votes are mixed evenly, and the base measure has principal components."""
        return self.is_even and self.base_components > 0

    @torch.no_grad()
    def reads_components_alone(self) -> bool:
        """Return whether the experts depend on x by its principal components Vᵀx alone.

        Training leaves them so, where there are components; new experts are random.
        """
        if not self.has_components:
            return False
        directions, weight = self._base_with_components().directions, self.even_matrix()
        outside = weight - directions @ (directions.T @ weight)
        return bool(outside.norm() <= ROUNDING * weight.norm())

    @torch.no_grad()
    def restrict(self) -> CapsuleDensity:
        """Return the density of the principal components y = Vᵀx of the base measure.

        If the experts depend on x by its r principal components only, all other directions are
        independent Gaussian noise, and P(x) is the density of y times that of the noise. The
        density of y has the same experts and the same Z, but r numbers in place of I·K. With other
        experts, whatever they read in other directions is left out.

        Returns
        -------
        CapsuleDensity
            Over one capsule of dimension r. Its parameters are copies; see `extend`.
        """
        base = self._base_with_components()
        count = self.base_components
        restricted = CapsuleDensity(
            1,
            count,
            self.out_capsules,
            self.out_dim,
            linear_dims=self.linear_dims,
            strength=self.initial_strength,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        matrix = base.directions.T @ self.even_matrix()
        restricted.weight.copy_(
            matrix.view(1, count, self.out_capsules, self.out_dim).permute(0, 2, 3, 1)
        )
        assert isinstance(restricted.base, GaussianBase)  # noqa: S101
        restricted.base.rest_std = base.std.clone()
        for name in ("log_strength", "origin", "partition"):
            getattr(restricted, name).copy_(getattr(self, name))
        return restricted

    def components(self, x: Tensor) -> Tensor:
        """Compute the principal components Vᵀx as one capsule: (B, I, K) → (B, 1, r)."""
        directions = self._base_with_components().directions
        self._check(x, ball=False)
        return (x.flatten(1) @ directions).unsqueeze(1)

    def from_components(self, y: Tensor) -> Tensor:
        """Compute V y, the capsules with these principal components: (B, 1, r) → (B, I, K).

        All other directions are 0, their mean; the inverse of `components` on such capsules.
        """
        directions = self._base_with_components().directions
        checks.require_floating("y", y)
        sizes = (None, 1, self.base_components)
        checks.require_shape("y", y, "BIK", sizes, "give the result of components")
        checks.require_same_dtype("y", y, "weight", self.weight)
        x = y.flatten(1) @ directions.T
        return x.view(-1, self.in_capsules, self.in_dim)

    @torch.no_grad()
    def extend(self, restricted: CapsuleDensity) -> None:
        """Take the experts of a density of the principal components, the inverse of `restrict`.

        With them, log Z is that of `restricted`, or not known if that one does not know it.
        """
        matrix = self._base_with_components().directions @ restricted.even_matrix()
        shape = (self.in_capsules, self.in_dim, self.out_capsules, self.out_dim)
        self.weight.copy_(matrix.view(shape).permute(0, 2, 3, 1))
        for name in ("log_strength", "origin", "partition"):
            getattr(self, name).copy_(getattr(restricted, name))

    def _check_states(self, on: Tensor, count: int) -> None:
        """Raise an error unless states of experts are (count, J) and, on the CPU, 0 or 1."""
        checks.require_tensor("on", on)
        sizes = (count, self.out_capsules)
        checks.require_shape("on", on, "BJ", sizes, "say for each image which experts are on")
        checks.check_states_on_cpu(on, "on")

    def _base_with_components(self) -> GaussianBase:
        if not self.has_components or not isinstance(self.base, GaussianBase):
            raise ValueError(
                "only a density with even mixing (iterations=1) and base_components above 0 can be "
                "restricted to its principal components"
            )
        return self.base

    def _preactivation(self, x: Tensor, weight: Tensor, origin: Tensor | None = None) -> Tensor:
        if self.is_even:
            z = torch.einsum("bik,ijdk->bjd", x, weight)
        else:
            routing = self.routing
            needs_grad = dispatch.needs_grad(x, weight)
            backend = dispatch.select(
                x,
                weight,
                self.backend,
                routing=routing,
                needs_grad=needs_grad,
                is_learning=False,
            )
            routed = backend.routing_by_agreement(x, weight, **asdict(routing))
            count = self.in_capsules if self.normalize == "inputs" else self.out_capsules
            z = routed.preactivation * count
        return F.forward_side(z, self.linear_dims, self.origin if origin is None else origin)


def energy_and_gradient(
    z: Tensor, strength: Tensor, on: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute F and ∂F/∂z = −2 α_j g(z_j) of rectified experts z.

    With states a_j, the energy E and ∂E/∂z_j = a_j/(1 − (1+‖z_j‖²)^(−α_j)) ∂F/∂z_j.

    Parameters
    ----------
    z : (B, J, D)
        The result of `poecaps.functional.forward_side`. Its linear coordinates are 0 where they do
        not count, and so is the gradient.
    strength : (J,) or (B, J)
    on : (B, J), optional

    Returns
    -------
    (B,), (B, J, D)
    """
    square = z.square().sum(-1)
    log_factor = strength * torch.log1p(square)  # log of each expert's factor in P
    slope = -2 * strength / (1 + square)
    if on is None:
        return -log_factor.sum(-1), slope.unsqueeze(-1) * z
    # The root keeps the gradient finite, and 0 at z = 0, where an expert that is on is silent.
    share = on / -torch.expm1(-log_factor).clamp(max=-(torch.finfo(z.dtype).tiny ** 0.5))
    return F._energy(z, on, strength), (share * slope).unsqueeze(-1) * z
