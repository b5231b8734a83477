"""Capsule layers: experts that model P(x), and the decoder that draws from them.

Each method checks its arguments, chooses a backend and calls one function of it. The equations are
in `poecaps.functional`, under the same names.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps.kernels import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.kernels.protocol import RoutingBackend


class CapsuleRouting(nn.Module):
    """Base of the capsule layers: routing by agreement between two sets of capsules.

    Parameters
    ----------
    in_capsules, in_dim
        I, the number of input capsules, and K, their dimension.
    out_capsules, out_dim
        J, the number of output capsules, and D, their dimension.
    iterations, sharpness, normalize, agreement
        Options of `poecaps.routing_by_agreement`.
    backend
        Implementation to run: ``"triton"`` (GPU kernels), ``"simd"`` (compiled C for the CPU),
        ``"torch"`` (vote-free PyTorch, any device) or ``"reference"`` (`poecaps.functional`). All
        of them are differentiable, and all but ``"triton"`` can be differentiated again; second
        derivatives are always those of the reference. None chooses the fastest one that supports
        the call. If a backend is named here and does not support a call, the call raises
        `ValueError`. The attribute can be changed at any time.
    generator
        Source of the initial weights.
    device, dtype
        As for any `torch.nn` layer.

    Attributes
    ----------
    weight : (I, J, D, K)
        The maps W_ij, initially N(0, 0.01²).
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        out_capsules: int,
        out_dim: int,
        *,
        iterations: int = 3,
        sharpness: float = 1.0,
        normalize: F.Axis = "inputs",
        agreement: F.Agreement = "cosine",
        backend: dispatch.Backend | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "in_capsules": in_capsules,
            "in_dim": in_dim,
            "out_capsules": out_capsules,
            "out_dim": out_dim,
        }
        for name, size in sizes.items():
            checks.require_int(name, size, 1)
        F.check_routing_options(iterations, sharpness, normalize, agreement)
        checks.require_dtype("dtype", dtype)
        self.in_capsules, self.in_dim = in_capsules, in_dim
        self.out_capsules, self.out_dim = out_capsules, out_dim
        self.iterations, self.sharpness = iterations, sharpness
        self.normalize, self.agreement = normalize, agreement
        self.backend = backend
        shape = (in_capsules, out_capsules, out_dim, in_dim)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters(generator=generator)

    @property
    def backend(self) -> dispatch.Backend | None:
        """Implementation to run; None: the fastest one that supports the call."""
        return self._backend

    @backend.setter
    def backend(self, value: dispatch.Backend | None) -> None:
        if value is not None:
            checks.require_choice("backend", value, dispatch.BACKENDS)
        self._backend = value

    @property
    def routing(self) -> F.RoutingOptions:
        """Options of the routing."""
        return F.RoutingOptions(
            self.iterations, float(self.sharpness), self.normalize, self.agreement
        )

    @property
    def is_capturable(self) -> bool:
        """Whether a learning step can be captured in a CUDA graph.

        Backends other than Triton read values on the host.
        """
        weight = self.weight
        return dispatch.choose(weight, weight, self.backend, routing=self.routing) == "triton"

    def reset_parameters(self, std: float = 0.01, generator: torch.Generator | None = None) -> None:
        """Draw W from N(0, std²)."""
        checks.require_nonnegative("std", std)
        nn.init.normal_(self.weight, std=std, generator=generator)

    def route(self, x: Tensor) -> F.Routing:
        """Route `x` through the layer: coefficients (B, I, J) and preactivations (B, J, D).

        Parameters
        ----------
        x : (B, I, K)
            Input capsules, normally squashed; any finite values are accepted.
        """
        self._check(x, ball=False)
        return self._route(x)

    def extra_repr(self) -> str:
        """Return the sizes and options that `print(layer)` shows."""
        return (
            f"{self.in_capsules}×{self.in_dim} → {self.out_capsules}×{self.out_dim}, "
            f"iterations={self.iterations}, sharpness={self.sharpness}, "
            f"normalize={self.normalize!r}, agreement={self.agreement!r}"
        )

    def _route(self, x: Tensor) -> F.Routing:
        routing = self.routing
        backend = self._backend_for(x, routing)
        return backend.routing_by_agreement(x, self.weight, **asdict(routing))

    def _backend_for(self, x: Tensor, routing: F.RoutingOptions) -> RoutingBackend:
        """Return the backend for a call that autograd may have to differentiate."""
        return dispatch.select(
            x,
            self.weight,
            self.backend,
            routing=routing,
            needs_grad=dispatch.needs_grad(x, self.weight),
            is_learning=False,
        )

    def _check(self, x: Tensor, *, ball: bool, name: str = "x") -> None:
        checks.require_floating(name, x)
        remedy = (
            "reshape it, or build the layer with the in_capsules (I) and in_dim (K) of your data"
        )
        checks.require_shape(name, x, "BIK", (None, self.in_capsules, self.in_dim), remedy)
        checks.require_same_dtype(name, x, "the layer's weight", self.weight)
        checks.require_same_device(name, x, "the layer's weight", self.weight)
        checks.check_values_on_cpu(x, name, ball=ball)


class CapsuleExperts(CapsuleRouting):
    """J expert capsules of dimension D over I input capsules of dimension K.

    The layer is the product of experts P(x) = e^(−F(x))/Z with F(x) = −Σ_j log(1 + ‖z_j‖²), where
    routing by agreement gives z_j. The base measure is Lebesgue on the product of I open unit
    balls. `forward` is an ordinary differentiable module. `contrastive_divergence` is the loss that
    learns without labels.

    Parameters
    ----------
    in_capsules, in_dim, out_capsules, out_dim, iterations, sharpness, normalize, agreement
        See `CapsuleRouting`.
    winners
        Competition: only this many experts, those with the largest log‖z_j‖² + balance_j, may fire
        for an image. The others are off, in the code, in the energy and in both phases of learning.
        None: all experts may fire. The attribute can be changed at any time.
    balance_rate
        Step size with which a learning step moves `balance` towards equal shares of wins.
    backend, generator, device, dtype
        See `CapsuleRouting`.

    Attributes
    ----------
    weight : (I, J, D, K)
        The maps W_ij, initially N(0, 0.01²).
    balance : (J,)
        Head start of each expert in the competition: a buffer that `contrastive_divergence` updates
        in training mode.

    Notes
    -----
    Shapes, dtypes and options are checked on every call. Values (NaN, or norms of 1 and more where
    the model needs squashed capsules) are checked on every call on the CPU. On an accelerator this
    would stall the queue; call `poecaps.check_capsules` there when the data are loaded.
    """

    balance: Tensor

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        out_capsules: int,
        out_dim: int,
        *,
        iterations: int = 3,
        sharpness: float = 1.0,
        normalize: F.Axis = "inputs",
        agreement: F.Agreement = "cosine",
        winners: int | None = None,
        balance_rate: float = 1.0,
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
        checks.require_nonnegative("balance_rate", balance_rate)
        self.winners = winners
        self.balance_rate = balance_rate
        self.register_buffer("balance", torch.zeros(out_capsules, device=device))

    @property
    def winners(self) -> int | None:
        """Number of experts that may fire for an image; None: all."""
        return self._winners

    @winners.setter
    def winners(self, value: int | None) -> None:
        if value is not None:
            checks.require_int("winners", value, 1, self.out_capsules)
        self._winners = value

    def reset_parameters(self, std: float = 0.01, generator: torch.Generator | None = None) -> None:
        """Draw W from N(0, std²) and set the balance to 0."""
        super().reset_parameters(std, generator)
        if "balance" in self._buffers:  # the base class calls this before the buffer exists
            nn.init.zeros_(self.balance)

    @torch.no_grad()
    def fold_balance(self) -> None:
        """Move the head starts into the weights: W_j ← e^(balance_j/2) W_j, balance ← 0.

        This adds balance_j to log‖z_j‖², so every competition ends as before, and the winner is now
        the expert with the highest firing probability. The coefficients do not change, because the
        cosine does not depend on the scale of a weight.

        Raises
        ------
        ValueError
            If the layer has ``agreement="inner"``.
        """
        if self.agreement != "cosine":
            raise ValueError(
                'fold_balance needs agreement="cosine", whose coefficients do not depend on the '
                "scale of W"
            )
        self.weight.mul_((self.balance / 2).exp().view(1, -1, 1, 1))
        self.balance.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapsuleExperts:
        """Convert the layer, but keep the balance in float32 or wider: its steps are small."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.balance = self.balance.to(torch.promote_types(self.balance.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Encode: the squashed experts squash(z_j), 0 for experts that lose the competition.

        Parameters
        ----------
        x : (B, I, K)
            Input capsules, normally squashed; any finite values are accepted.

        Returns
        -------
        (B, J, D)
        """
        self._check(x, ball=False)
        routing = self.routing
        backend = self._backend_for(x, routing)
        return backend.encode(x, self.weight, routing, winners=self.winners, balance=self.balance)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Go up and down once with the coefficients of x: x̃_i = squash(Σ_j c_ij W_ijᵀ squash(z_j)).

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules.

        Returns
        -------
        (B, I, K)
        """
        self._check(x, ball=True)
        routing = self.routing
        backend = self._backend_for(x, routing)
        return backend.reconstruct(
            x, self.weight, routing, winners=self.winners, balance=self.balance
        )

    def energy(self, x: Tensor, on: Tensor) -> Tensor:
        """Compute E(x, a) = −Σ_j a_j log‖z_j‖²; +∞ if an expert is on that lost the competition.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules.
        on : (B, J)
            a_j, 1 or True where expert j is on.

        Returns
        -------
        (B,)
        """
        self._check(x, ball=True)
        z = self._route(x).preactivation
        energy = F.energy(z, on)
        checks.check_states_on_cpu(on, "on")
        allowed = self._winning(z)
        if allowed is None:
            return energy
        return torch.where((on.bool() & ~allowed).any(-1), torch.inf, energy)

    def free_energy(self, x: Tensor) -> Tensor:
        """Compute F(x) = −Σ_j log(1 + ‖z_j‖²), so that P(x) = e^(−F(x))/Z.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules.

        Returns
        -------
        (B,)
            At least float32.
        """
        self._check(x, ball=True)
        z = self._route(x).preactivation
        return F.free_energy(z, self._winning(z))

    def firing_probability(self, x: Tensor) -> Tensor:
        """Compute P(a_j = 1 | x) = ‖z_j‖²/(1+‖z_j‖²), 0 for experts that lose the competition.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules.

        Returns
        -------
        (B, J)
        """
        self._check(x, ball=True)
        z = self._route(x).preactivation
        probability, allowed = F.firing_probability(z), self._winning(z)
        return probability if allowed is None else probability * allowed

    def contrastive_divergence(
        self,
        x: Tensor,
        k: int = 1,
        *,
        mixing: F.Mixing = "deterministic",
        chain: Tensor | None = None,
        generator: torch.Generator | None = None,
        uniform: Tensor | None = None,
        views: int = 1,
    ) -> Tensor:
        r"""Compute the loss mean F(x) − mean F(x̃), whose gradient in W is −ΔW of Algorithm 1.

        The routing coefficients c, the winners and the mixed capsules x̃ are held fixed, so with
        g(z) = z/(1+‖z‖²)::

            ΔW_ij = 2 · mean c_ij ( g(z_j) x_iᵀ − g(z̃_j) x̃_iᵀ )

        `poecaps.functional.contrastive_divergence` is the algorithm in full. In training mode with
        `winners` set, the call also updates `balance`.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules. They are data: no gradient flows into them.
        k
            Number of mixing steps, at least 1.
        mixing
            ``"deterministic"`` (the paper) or ``"bernoulli"``; see
            `poecaps.functional.expert_states`.
        chain : (N, I, K), optional
            Persistent chain: mixing starts from it, with its own routing, instead of from `x`, and
            the result overwrites it. N may differ from B. Start it with a copy of some data after
            the experts have learned a little: 0 is a fixed point of the mixing, so a chain that is
            started at small weights dies there, and without a negative phase the weights diverge.
            Replace part of it with data from time to time.
        generator
            Source of the Bernoulli draws.
        uniform : (k, N, J), optional
            Uniform random numbers from 0 to 1 that decide which experts fire, in place of draws
            from `generator`.
        views
            Number of consecutive rows of `x` that are views of the same image, such as
            transformed copies. They compete together, see `poecaps.functional.winning_experts`.

        Returns
        -------
        ()
            The loss, at least float32. Its value is not a likelihood and may rise while learning
            succeeds; only its gradient is meaningful.

        Notes
        -----
        `DistributedDataParallel` averages gradients only of modules that are called through its
        `forward`: wrap a module whose forward calls this method. `torch.compile` breaks its graph
        at a `generator`.

        With Σ_i c_ij = 1 the coefficients are near 1/I and enter the gradient twice, so it is
        small: Adam needs a learning rate of 0.01 to 0.1, SGD with momentum one of 10 to 100.
        """
        checks.require_int("k", k, 1)
        checks.require_choice("mixing", mixing, F.MIXINGS)
        self._check(x, ball=True)
        checks.require_images("x", x)
        checks.require_int("views", views, 1)
        if len(x) % views:
            raise ValueError(
                f"x must hold {views} views of every image, but {len(x)} rows are not a multiple"
            )
        if chain is not None:
            self._check(chain, ball=True, name="chain")
            checks.require_images("chain", chain)
            checks.require_apart("chain", chain, "x", x)
        shape = (k, len(x if chain is None else chain), self.out_capsules)
        if uniform is not None:
            checks.require_floating("uniform", uniform)
            checks.require_shape("uniform", uniform, "kNJ", shape, "draw it with torch.rand")
        elif mixing == "bernoulli":
            uniform = torch.rand(shape, generator=generator, device=self.weight.device)
        routing = self.routing
        backend = dispatch.select(x, self.weight, self.backend, routing=routing, chain=chain)
        step = backend.contrastive_divergence(
            x.detach(),
            self.weight,
            routing,
            k=k,
            mixing=mixing,
            uniform=uniform,
            chain=chain,
            winners=self.winners,
            balance=self.balance,
            views=views,
        )
        if chain is not None and step.x_model is not None:
            with torch.no_grad():
                chain.copy_(step.x_model)
        if self.training and step.on is not None:
            self._update_balance(step.on)
        return _attach_gradient(step, self.weight)

    def extra_repr(self) -> str:
        """Return the sizes and options that `print(layer)` shows."""
        return f"{super().extra_repr()}, winners={self.winners}"

    def _winning(self, z: Tensor) -> Tensor | None:
        return F.winning_experts(z, self.winners, self.balance)

    def _update_balance(self, on: Tensor) -> None:
        """Raise the balance of experts that won less than their share, lower that of the others."""
        assert self.winners is not None  # noqa: S101 (there are no winners without competition)
        share = self.winners / self.out_capsules
        self.balance += self.balance_rate * (share - on.mean(0, dtype=self.balance.dtype))


class CapsuleDecoder(CapsuleRouting):
    """Capsules below, decoded from experts above.

    The decoder routes from the J experts to the I capsules with coefficients e_ji, normalised over
    its own inputs: Σ_j e_ji = 1. Its inputs are the experts, its weight U has shape (J, I, K, D).
    """

    def forward(self, y: Tensor) -> Tensor:
        """Decode: x̃_i = squash(Σ_j e_ji U_ji y_j).

        Parameters
        ----------
        y : (B, J, D)
            Squashed experts.

        Returns
        -------
        (B, I, K)
        """
        self._check(y, ball=False)
        routing = self.routing
        backend = self._backend_for(y, routing)
        return backend.encode(y, self.weight, routing, winners=None, balance=None)

    def held_preactivation(self, y: Tensor) -> Tensor:
        """Compute z̃_i = Σ_j e_ji U_ji y_j with e and y held fixed: a gradient reaches U alone.

        Parameters
        ----------
        y : (B, J, D)

        Returns
        -------
        (B, I, K)
        """
        self._check(y, ball=False)
        routing = self.routing
        backend = dispatch.select(y, self.weight, self.backend, routing=routing)
        return backend.held_preactivation(y, self.weight, routing)

    def contrastive_divergence(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute the loss whose gradient in U is −ΔU of the decoder's learning rule.

        With z_i = unsquash(x_i), z̃_i = Σ_j e_ji U_ji y_j, x̃_i = squash(z̃_i) and
        ỹ_j = squash(Σ_i e_ji U_jiᵀ x̃_i), all held fixed::

            ΔU_ji = 2 · mean e_ji ( g(z_i) y_jᵀ − g(z̃_i) ỹ_jᵀ )

        Parameters
        ----------
        y : (B, J, D)
            Experts that encode `x`.
        x : (B, I, K)
            Squashed capsules.
        """
        self._check(y, ball=False, name="y")
        checks.require_images("y", y)
        checks.require_floating("x", x)
        shape = (len(y), self.out_capsules, self.out_dim)
        checks.require_shape("x", x, "BIK", shape, "give the capsules that the experts y encode")
        checks.require_same_dtype("x", x, "the layer's weight", self.weight)
        checks.require_same_device("x", x, "the layer's weight", self.weight)
        checks.check_values_on_cpu(x, "x", ball=True)
        routing = self.routing
        backend = dispatch.select(y, self.weight, self.backend, routing=routing)
        step = backend.decoder_contrastive_divergence(y, x, self.weight, routing)
        return _attach_gradient(step, self.weight)


def _attach_gradient(step: F.LearningStep, weight: Tensor) -> Tensor:
    """Return the loss of a learning step, with its gradient in W known to autograd.

    The loss of the reference is differentiable already, as often as needed and by torch.func.
    """
    if step.grad_weight is None or step.loss.requires_grad or checks.is_wrapped(step.loss):
        return step.loss
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return step.loss
    loss: Tensor = _LossWithGradient.apply(step.loss, weight, step.grad_weight)  # type: ignore[no-untyped-call]
    return loss


class _LossWithGradient(torch.autograd.Function):
    """A loss whose gradient in the weight is known in advance."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, grad_weight: Tensor) -> Tensor:
        ctx.save_for_backward(grad_weight)
        ctx.dtype = weight.dtype
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (grad_weight,) = ctx.saved_tensors
        # With the layout of grad_weight, which need not be the weight's: no copy besides this one.
        scaled = torch.mul(grad_weight, grad_output, out=grad_weight.new_empty(grad_weight.shape))
        return None, scaled.to(ctx.dtype), None
