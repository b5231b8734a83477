"""One layer of expert capsules: the model P(x) and its learning rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps import kernels
from poecaps.kernels import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class CapsuleRouting(nn.Module):
    """Base of the capsule layers: routing by agreement from I capsules of dimension K to J of dimension D.

    Parameters
    ----------
    in_capsules, in_dim
        Number and dimension of the input capsules.
    out_capsules, out_dim
        Number and dimension of the output capsules.
    iterations, sharpness, normalize, agreement
        Options of `poecaps.routing_by_agreement`.
    backend
        Implementation to run; see `CapsuleExperts`.
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
        backend: kernels.Backend | None = None,
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
    def backend(self) -> kernels.Backend | None:
        """Implementation to run; None: the fastest that supports the call."""
        return self._backend

    @backend.setter
    def backend(self, value: kernels.Backend | None) -> None:
        kernels.check_backend(value)
        self._backend = value

    @property
    def routing(self) -> F.RoutingOptions:
        """Options of the routing."""
        return F.RoutingOptions(
            self.iterations, float(self.sharpness), self.normalize, self.agreement
        )

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

    def _options(self) -> kernels.Options:
        return kernels.Options(
            self.iterations, float(self.sharpness), self.normalize, self.agreement
        )

    def _route(self, x: Tensor, *, keep: bool = False) -> F.Routing:
        return kernels.routing_by_agreement(
            x,
            self.weight,
            iterations=self.iterations,
            sharpness=self.sharpness,
            normalize=self.normalize,
            agreement=self.agreement,
            backend=self.backend,
            keep=keep,
        )

    def _check(self, x: Tensor, *, ball: bool, name: str = "x") -> None:
        checks.require_floating(name, x)
        remedy = (
            "reshape it, or build the layer with the in_capsules (I) and in_dim (K) of your data"
        )
        checks.require_shape(name, x, "BIK", (None, self.in_capsules, self.in_dim), remedy)
        checks.require_same_dtype(name, x, "the layer's weight", self.weight)
        checks.check_values_on_cpu(x, name, ball=ball)


class CapsuleExperts(CapsuleRouting):
    """J expert capsules of dimension D over I input capsules of dimension K.

    The layer is the product of experts P(x) = e^(−F(x))/Z with F(x) = −Σ_j log(1 + ‖z_j‖²) and z_j found by routing
    by agreement; the base measure is Lebesgue on the product of I open unit balls. `forward` is an ordinary
    differentiable module. `contrastive_divergence` is the loss that learns without labels.

    Parameters
    ----------
    in_capsules, in_dim
        I, the number of input capsules, and K, their dimension.
    out_capsules, out_dim
        J, the number of experts, and D, their dimension.
    iterations, sharpness, normalize, agreement
        Options of `poecaps.routing_by_agreement`.
    winners
        Competition: only this many experts, those with the largest log‖z_j‖² + balance_j, may fire for an image; the
        others are off, in the code, in the energy and in both phases of learning. None lets all fire. It may be set at
        any time.
    balance_rate
        How far one learning step moves `balance` towards equal shares of wins.
    backend
        Which version of the equations to run: ``"triton"``, GPU kernels; ``"cpu"``, PyTorch without votes;
        ``"reference"``, the equations as they stand, which alone can be differentiated twice. None takes the fastest
        that fits device, dtype and sizes; a forced one that does not fit is an error. It may be set at any time.
    generator
        Source of the initial weights.
    device, dtype
        As for any `torch.nn` layer.

    Attributes
    ----------
    weight : (I, J, D, K)
        The maps W_ij, initially N(0, 0.01²).
    balance : (J,)
        Head start of each expert in the competition; a buffer that `contrastive_divergence` adapts in training mode.

    Notes
    -----
    Shapes, dtypes and options are checked on every call. Values (NaN, norms of 1 or more where the model needs
    squashed capsules) are checked on every call on the CPU; on an accelerator that would stall the queue, so there
    call `poecaps.check_capsules` where data enter.
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
        backend: kernels.Backend | None = None,
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
        """How many experts may fire for an image; None: all."""
        return self._winners

    @winners.setter
    def winners(self, value: int | None) -> None:
        if value is not None:
            checks.require_int("winners", value, 1, self.out_capsules)
        self._winners = value

    def reset_parameters(self, std: float = 0.01, generator: torch.Generator | None = None) -> None:
        """Draw W from N(0, std²) and set the balance to 0."""
        super().reset_parameters(std, generator)
        if "balance" in self._buffers:  # it is registered after the first call
            nn.init.zeros_(self.balance)

    @torch.no_grad()
    def fold_balance(self) -> None:
        """Put the head starts into the weights: W_j ← e^(balance_j/2) W_j, and the balance to 0.

        log‖z_j‖² grows by balance_j, so every competition ends as before, and the winner is the expert with the largest
        firing probability. Coefficients do not change, for the cosine does not see the scale of a weight; a layer
        with ``agreement="inner"`` is refused.
        """
        if self.agreement != "cosine":
            raise ValueError(
                'fold_balance needs agreement="cosine", whose coefficients do not depend on the scale of W'
            )
        self.weight.mul_((self.balance / 2).exp().view(1, -1, 1, 1))
        self.balance.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapsuleExperts:
        """Convert the layer, but for the balance in half precision, where its small steps would be lost."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.balance = self.balance.to(torch.promote_types(self.balance.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Encode: the squashed experts squash(z_j), 0 for those that lose the competition.

        Parameters
        ----------
        x : (B, I, K)
            Input capsules, normally squashed; any finite values are routed.

        Returns
        -------
        (B, J, D)
        """
        self._check(x, ball=False)
        z = self._route(x).preactivation
        return kernels.squash(z, self._may_fire(z), weight=self.weight, backend=self.backend)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Go up and down once: x̃_i = squash(Σ_j c_ij W_ijᵀ squash(z_j)) with the coefficients of `x`.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules.

        Returns
        -------
        (B, I, K)
        """
        self._check(x, ball=True)
        routing = self._route(x)
        z = routing.preactivation
        y = kernels.squash(z, self._may_fire(z), weight=self.weight, backend=self.backend)
        c = routing.coefficients if torch.is_grad_enabled() else kernels.held(routing)
        return kernels.reconstruction(y, self.weight, c, backend=self.backend)

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
        allowed = self._may_fire(z)
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
        return F.free_energy(z, self._may_fire(z))

    def firing_probability(self, x: Tensor) -> Tensor:
        """Compute P(a_j = 1 | x) = ‖z_j‖²/(1+‖z_j‖²), 0 for those that lose the competition.

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
        probability = F.firing_probability(z)
        allowed = self._may_fire(z)
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
    ) -> Tensor:
        r"""Compute the loss mean F(x) − mean F(x̃), whose gradient in W is −ΔW of Algorithm 1.

        The routing coefficients c, the winners and the mixed capsules x̃ are held fixed, so with g(z) = z/(1+‖z‖²)::

            ΔW_ij = 2 · mean c_ij ( g(z_j) x_iᵀ − g(z̃_j) x̃_iᵀ )

        x̃ is reached from x by `k` times up (z_j, then which experts speak) and down (x̃_i). In training mode with
        `winners` set, the call also nudges `balance`.

        Parameters
        ----------
        x : (B, I, K)
            Squashed input capsules: data, no gradient flows into them.
        k
            How often to mix, at least 1.
        mixing
            ``"deterministic"``: expert j sends squash(z_j) down (the paper).
            ``"bernoulli"``: expert j is on with probability ‖squash(z_j)‖, and then sends the unit vector z_j/‖z_j‖;
            on average that is squash(z_j).
        chain : (N, I, K), optional
            A persistent chain: mixing starts from it, with its own routing, instead of from `x`, and it is
            overwritten with the result. N need not be B. Start it with a copy of some data once the experts have
            learned a little: 0 is a fixed point of the mixing, so a chain started at small weights dies there, and
            the weights run away without a negative phase. Replace part of it with data now and then.
        generator
            Source of the Bernoulli draws.
        uniform : (k, N, J), optional
            Uniform random numbers from 0 to 1 that decide which experts fire, instead of draws from `generator`.

        Returns
        -------
        ()
            The loss, at least float32. Its value is no likelihood and may rise while learning goes well; only its
            gradient means anything.

        Notes
        -----
        `DistributedDataParallel` averages gradients of what goes through its `forward` alone: wrap a module whose
        forward calls this method. `torch.compile` breaks its graph at a `generator`.

        With Σ_i c_ij = 1 the coefficients are near 1/I and enter the gradient twice, so it is small: Adam wants a
        learning rate of 0.01 to 0.1, SGD with momentum one of 10 to 100.
        """
        checks.require_int("k", k, 1)
        checks.require_choice("mixing", mixing, F.MIXINGS)
        self._check(x, ball=True)
        checks.require_images("x", x)
        if chain is not None:
            self._check(chain, ball=True, name="chain")
            checks.require_images("chain", chain)
            checks.require_apart("chain", chain, "x", x)
        at_once = None
        if chain is None and mixing == "deterministic":
            at_once = kernels.contrastive_divergence(
                x.detach(), self.weight, k, self._options(), self._may_fire, backend=self.backend
            )
        if mixing == "bernoulli" and uniform is None:
            count = len(x if chain is None else chain)
            uniform = torch.rand(
                k, count, self.out_capsules, generator=generator, device=self.weight.device
            )
        loss, on = at_once or self._step_by_step(x.detach(), k, mixing, chain, uniform)
        if self.training:
            self._nudge_balance(on)
        return loss

    def extra_repr(self) -> str:
        """Return the sizes and options that `print(layer)` shows."""
        return f"{super().extra_repr()}, winners={self.winners}"

    def _may_fire(self, z: Tensor) -> Tensor | None:
        """Mask (B, J) of the winners of the competition, or None where there is none."""
        if self.winners is None:
            return None
        with torch.no_grad():
            wide = z.to(torch.promote_types(z.dtype, torch.float32))
            score = wide.square().sum(-1).log() + self.balance
            best = score.topk(self.winners, dim=-1).indices
            return torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)

    def _hold(self, x: Tensor) -> Held:
        routing = self._route(x, keep=True)
        return Held(
            x, routing.preactivation, kernels.held(routing), self._may_fire(routing.preactivation)
        )

    def _step_by_step(
        self,
        x: Tensor,
        k: int,
        mixing: F.Mixing,
        chain: Tensor | None,
        uniform: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the loss, and who may fire for `x`."""
        with torch.no_grad():
            data = self._hold(x)
            # A copy: the coefficients may be made again from the capsules after the chain is overwritten.
            model = data if chain is None else self._hold(chain.clone())
            for step in range(k):
                model = self._mix(model, mixing, None if uniform is None else uniform[step])
            if chain is not None:
                chain.copy_(model.x)
        return kernels.free_energy_gap(self.weight, data, model, backend=self.backend), data.on

    def _mix(
        self,
        held: Held,
        mixing: F.Mixing,
        uniform: Tensor | None,
    ) -> Held:
        """Go down and up once: z_j → what the experts send → x̃ → z̃_j."""
        if mixing == "deterministic":
            y = kernels.squash(held.z, held.on, weight=self.weight, backend=self.backend)
        else:
            y = F.expert_states(held.z, held.on, mixing, uniform)
        x = kernels.reconstruction(y, self.weight, held.coefficients, backend=self.backend).to(
            held.x.dtype
        )
        z = kernels.preactivation(x, self.weight, held.coefficients, backend=self.backend)
        return Held(x, z, held.coefficients, held.on)

    def _nudge_balance(self, on: Tensor | None) -> None:
        """Help the experts that won less than their share of this batch, hinder those that won more."""
        if on is None or self.winners is None:
            return
        fair = self.winners / self.out_capsules
        self.balance += self.balance_rate * (fair - on.mean(0, dtype=self.balance.dtype))


class CapsuleDecoder(CapsuleRouting):
    """Capsules below, decoded from experts above.

    The decoder routes from the J experts to the I capsules with coefficients e_ji, normalised over
    its own inputs: Σ_j e_ji = 1. Its inputs are the experts, and its weight U has shape (J, I, K, D).
    """

    def forward(self, y: Tensor) -> Tensor:
        """Decode: x̃_i = squash(Σ_j e_ji U_ji y_j).

        Parameters
        ----------
        y : (B, J, D)

        Returns
        -------
        (B, I, K)
        """
        self._check(y, ball=False)
        z = self._route(y).preactivation
        return kernels.squash(z, weight=self.weight, backend=self.backend)

    def contrastive_divergence(self, y: Tensor, x: Tensor) -> Tensor:
        """Compute the loss whose gradient in U is −ΔU of the decoder's learning rule.

        See `poecaps.functional.decoder_contrastive_divergence`.

        Parameters
        ----------
        y : (B, J, D)
            Experts that encode `x`.
        x : (B, I, K)
            Squashed capsules.
        """
        checks.require_images("y", y)
        with torch.no_grad():
            routing = self.route(y)
            e = kernels.held(routing)
            x_model = kernels.squash(
                routing.preactivation, weight=self.weight, backend=self.backend
            )
            y_model = kernels.reconstruction(x_model, self.weight, e, backend=self.backend)
            data, model = _pull_of_squashed(x), _pull(routing.preactivation)
        return kernels.pulled(
            self.weight, e, [(-data, y), (model, y_model)], backend=self.backend
        ) * (2 / len(y))

    def held_preactivation(self, y: Tensor) -> Tensor:
        """Compute z̃_i = Σ_j e_ji U_ji y_j with e and y held fixed: a gradient reaches U alone.

        Parameters
        ----------
        y : (B, J, D)

        Returns
        -------
        (B, I, K)
        """
        with torch.no_grad():
            e = kernels.held(self.route(y))
        return kernels.preactivation(y, self.weight, e, backend=self.backend)


def _pull(z: Tensor) -> Tensor:
    """g(z) = z/(1+‖z‖²)."""
    pull: Tensor = z / (1 + z.square().sum(-1, keepdim=True))
    return pull


def _pull_of_squashed(x: Tensor) -> Tensor:
    """g(unsquash(x)) = √(1/‖x‖ − 1) x, because ‖x‖ = ‖z‖²/(1+‖z‖²)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (1 / norm.clamp(min=torch.finfo(x.dtype).tiny, max=1) - 1).sqrt() * x


def _only(on: Tensor | None, y: Tensor) -> Tensor:
    """Silence the experts (B, J, D) that may not fire."""
    return y if on is None else y * on.unsqueeze(-1)
