"""The functions of `poecaps.functional` that learning spends its time in, in the fastest version that fits the call.

Three versions ("backends") give the same numbers:

``"triton"``
    GPU kernels that write neither votes nor coefficients (`flash`); differentiable.
``"cpu"``
    Without votes in memory: compiled C (`lanes`) for float32 where the CPU has AVX-512 and there is a C compiler, and
    otherwise plain PyTorch (`votefree`, `fanout`), which is at home on any device; where a gradient through the routing
    is asked for, the reference.
``"reference"``
    `poecaps.functional` itself; any call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps.kernels import fanout, flash, lanes, votefree
from poecaps.kernels.common import Held, Options
from poecaps.kernels.flash import Coefficients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

Backend = Literal["reference", "cpu", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

__all__ = [
    "BACKENDS",
    "Backend",
    "Coefficients",
    "Held",
    "Options",
    "check_backend",
    "choose",
    "contrastive_divergence",
    "describe",
    "free_energy_gap",
    "held",
    "preactivation",
    "pulled",
    "reconstruction",
    "routing_by_agreement",
    "squash",
]


# ---------------------------------------------------------------------------------------------------------
# Which version


def check_backend(backend: str | None) -> None:
    """Refuse a backend that is not known."""
    if backend is not None:
        checks.require_choice("backend", backend, BACKENDS)


def choose(x: Tensor, weight: Tensor, backend: Backend | None = None) -> Backend:
    """Name the version that a call on x (B, I, K) and weight (I, J, D, K) would run.

    Parameters
    ----------
    backend
        The version to force, None for the fastest that fits. A ValueError says why a forced one cannot run.
    """
    if backend == "reference":
        return backend
    # What a compiler, an autocast context or torch.func would make of the fast versions is theirs to know.
    plain = not torch.compiler.is_compiling() and not checks.is_wrapped(x) and not checks.is_wrapped(weight)
    known = x.device.type in ("cpu", "cuda") and x.device == weight.device and x.dtype == weight.dtype
    fits = plain and known and not torch.is_autocast_enabled(x.device.type)
    if backend != "cpu":
        why_not = flash.obstacle(x, weight) if fits else "it runs outside torch.compile, autocast and torch.func only"
        if why_not is None and (backend == "triton" or x.device.type == "cuda"):
            return "triton"
        if backend == "triton":
            remedy = "or leave backend=None, which takes the fastest version that fits"
            raise ValueError(f"backend='triton' cannot run this call: {why_not}; {remedy}")
    if fits and x.dtype in (torch.float32, torch.float64):
        return "cpu"
    if backend == "cpu":
        raise ValueError(
            "backend='cpu' cannot run this call: it is for float32 and float64 on a CPU or GPU, outside "
            f"torch.compile, autocast and torch.func, and this is {x.dtype} on {x.device.type!r}; "
            "use backend='reference'"
        )
    return "reference"


def describe(device: torch.device | str) -> str:
    """Say in one line which version float32 layers use on a device, and why not a faster one."""
    device = torch.device(device)
    if device.type == "cuda":
        if flash.installed():
            return "triton: GPU kernels that write neither votes nor coefficients"
        return "cpu: plain PyTorch without votes, because Triton is not installed"
    why_not = lanes.obstacle()
    if why_not is None:
        return f"cpu: C for AVX-512 without votes, by {lanes.compiler()}"
    return f"cpu: plain PyTorch without votes, because {why_not}"


# ---------------------------------------------------------------------------------------------------------
# The functions


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int,
    sharpness: float,
    normalize: F.Axis,
    agreement: F.Agreement,
    backend: Backend | None = None,
    keep: bool = False,
) -> F.Routing:
    """Compute `functional.routing_by_agreement`; `keep`: calls with the same coefficients follow."""
    chosen = choose(x, weight, backend)
    if chosen == "triton":
        return flash.routing_by_agreement(
            x, weight, Options(iterations, float(sharpness), normalize, agreement), keep=keep
        )
    route = F.routing_by_agreement
    if chosen == "cpu" and not torch.is_grad_enabled():
        route = _quickest(x, weight).routing_by_agreement
    return route(x, weight, iterations=iterations, sharpness=sharpness, normalize=normalize, agreement=agreement)


def held(routing: F.Routing) -> Tensor | Coefficients:
    """Return the coefficients of a routing for the functions below, not written down where they need not be."""
    return routing.held if isinstance(routing, flash.FlashRouting) else routing.coefficients


def preactivation(
    x: Tensor, weight: Tensor, coefficients: Tensor | Coefficients, *, backend: Backend | None = None
) -> Tensor:
    """Compute `functional.preactivation`, of data and held coefficients that need no gradient."""
    chosen = choose(x, weight, backend)
    if chosen == "triton":
        return flash.preactivation(x, weight, coefficients)
    up = F.preactivation if chosen == "reference" else _plain(weight).preactivation
    return up(x, weight, _written(coefficients, weight))


def pulled(
    weight: Tensor,
    coefficients: Tensor | Coefficients,
    terms: Sequence[tuple[Tensor, Tensor]],
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Compute Σ ⟨p, `preactivation`(v)⟩ over terms (p, v), all held, as a function of the weight: → ().

    The first of two terms has the capsules v that were routed.
    """
    if choose(terms[0][1], weight, backend) == "triton":
        return flash.pulled(weight, coefficients, terms)
    return torch.stack([(p * preactivation(v, weight, coefficients, backend=backend)).sum() for p, v in terms]).sum()


def reconstruction(
    y: Tensor, weight: Tensor, coefficients: Tensor | Coefficients, *, backend: Backend | None = None
) -> Tensor:
    """Compute `functional.reconstruction`, by a faster version where no gradient is asked for."""
    chosen = choose(y, weight, backend)
    graded = torch.is_grad_enabled()
    if chosen == "triton" and not graded:
        return flash.reconstruction(y, weight, coefficients)
    down = F.reconstruction if graded or chosen == "reference" else _plain(weight).reconstruction
    return down(y, weight, _written(coefficients, weight))


def squash(z: Tensor, on: Tensor | None = None, *, weight: Tensor, backend: Backend | None = None) -> Tensor:
    """Squash the experts of a layer, to 0 where they are not `on`: (B, J, D), (B, J) → (B, J, D)."""
    if choose(z, weight, backend) == "triton" and not torch.is_grad_enabled():
        return flash.squash(z, on)
    y = F.squash(z)
    return y if on is None else y * on.unsqueeze(-1)


def free_energy_gap(weight: Tensor, data: Held, model: Held, *, backend: Backend | None = None) -> Tensor:
    """Compute mean F(x) − mean F(x̃) with x, x̃ and their coefficients held, as a function of the weight: → ()."""
    chosen = choose(data.x, weight, backend)
    if chosen == "triton":
        return flash.free_energy_gap(weight, data, model)
    if chosen == "cpu" and _plain(weight) is votefree:
        return votefree.free_energy_gap(weight, data, model)
    here, there = (
        F.free_energy(preactivation(at.x, weight, at.coefficients, backend=backend), at.on).mean()
        for at in (data, model)
    )
    return here - there


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    k: int,
    options: Options,
    may_fire: Callable[[Tensor], Tensor | None],
    *,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute the loss of k deterministic mixings, and who may fire; None where that is better done step by step.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
        The loss has a gradient in it alone.
    may_fire
        Says of preactivations (B, J, D) which experts may fire, (B, J); None: all.

    Returns
    -------
    (), (B, J)
        Mean F(x) − mean F(x̃), and what `may_fire` said of `x`.
    """
    chosen = choose(x, weight, backend)
    block = flash.block(len(x), weight) if chosen == "triton" else None
    if block is not None:
        return flash.contrastive_divergence(x, weight, k, options, may_fire, block)
    version = _quickest(x, weight) if chosen == "cpu" else None
    if version is lanes:
        return lanes.contrastive_divergence(x, weight, k, options, may_fire)
    if version is votefree:
        return votefree.contrastive_divergence(x, weight, k, options, may_fire)
    return None


def _quickest(x: Tensor, weight: Tensor) -> ModuleType:
    return lanes if lanes.covers(x, weight) else _plain(weight)


def _plain(weight: Tensor) -> ModuleType:
    """Choose between one expert at a time and, where experts are more, one input at a time."""
    return fanout if weight.shape[1] > weight.shape[0] else votefree


def _written(coefficients: Tensor | Coefficients, weight: Tensor) -> Tensor:
    return coefficients.tensor(weight) if isinstance(coefficients, Coefficients) else coefficients
