"""Choice of the backend that computes a call.

This is the only place that chooses, and it can say why a backend does not support a call. A
backend is a module with the functions of `RoutingBackend`. All backends give the same numbers up to
rounding. On a CPU, half precision is converted to float32 (`float32`). In `torch.compile`,
``"triton"`` and ``"simd"`` are operators (`operators`).

``"triton"``
    GPU kernels that keep neither votes nor coefficients in memory; differentiable.
``"simd"``
    C for the vector instructions of the CPU (AVX-512, AVX2, SSE2, NEON), compiled on first use by
    the system's compiler; float32 on the CPU; differentiable.
``"torch"``
    Vote-free PyTorch for float32 and float64 on any device; differentiable.
``"reference"``
    `poecaps.functional` itself; supports every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from poecaps import _checks as checks
from poecaps import functional
from poecaps.kernels import cpu, float32, torch_routing
from poecaps.kernels.triton import support as triton_support

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from poecaps.functional import Agreement, Axis, RoutingOptions
    from poecaps.kernels.protocol import RoutingBackend

Backend = Literal["reference", "torch", "simd", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# The fastest backends of each kind of device, in the order in which they are tried.
PREFERRED: dict[str, tuple[Backend, ...]] = {"cuda": ("triton", "torch"), "cpu": ("simd", "torch")}

# Routing options that the backends other than the reference implement. A new one runs by the
# reference until they implement it, too.
IMPLEMENTED_AGREEMENTS: tuple[Agreement, ...] = ("cosine", "inner")
IMPLEMENTED_AXES: tuple[Axis, ...] = ("inputs", "outputs")

# Backends whose routing torch.func can transform, by reverse-mode gradients and vmap.
TRANSFORMABLE: tuple[Backend, ...] = ("simd", "torch")


def _may_be_exported() -> bool:
    """Return whether a program is exported.

    `torch.compiler.is_exporting` would be True in all that `torch.compile` traces up to PyTorch
    2.11, so its flag is read instead. PyTorch 2.6 has none, and cannot tell the two apart.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", torch.compiler.is_compiling()))


def select(
    x: Tensor,
    weight: Tensor,
    backend: Backend | None = None,
    *,
    routing: RoutingOptions | None = None,
    chain: Tensor | None = None,
    needs_grad: bool = False,
    is_learning: bool = True,
) -> RoutingBackend:
    """Return the backend that computes a call; see `choose`."""
    name = choose(
        x,
        weight,
        backend,
        routing=routing,
        chain=chain,
        needs_grad=needs_grad,
        is_learning=is_learning,
    )
    found = implementation(name)
    if name != "reference" and float32.is_needed(x, weight):
        return float32.InFloat32(found)
    return found


def choose(
    x: Tensor,
    weight: Tensor,
    backend: Backend | None = None,
    *,
    routing: RoutingOptions | None = None,
    chain: Tensor | None = None,
    needs_grad: bool = False,
    is_learning: bool = True,
) -> Backend:
    """Return the name of the backend that computes a call.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    backend
        The backend to force. None: the fastest one that supports the call.
    routing
        Options of the routing. None: options that every backend implements.
    chain : (N, I, K), optional
        Further capsules that the call routes.
    needs_grad
        Whether a gradient through the routing is required. The learning rules compute their own
        gradient and do not need it.
    is_learning
        Whether the call is a learning rule or holds the coefficients fixed. Other calls can be
        transformed by torch.func.

    Raises
    ------
    ValueError
        If the forced backend does not support the call; the message says why.
    """
    asked: dict[str, Any] = {
        "routing": routing,
        "chain": chain,
        "needs_grad": needs_grad,
        "is_learning": is_learning,
    }
    if backend is not None:
        checks.require_choice("backend", backend, BACKENDS)
    elif _may_be_exported():
        _warn_if_exported(x, weight, asked)
        return "reference"  # so that an exported program does not need poecaps
    else:
        for name in PREFERRED.get(x.device.type, ()):
            reason = why_not(name, x, weight, **asked)
            if reason is None and _pays(name, x, weight):
                return name
        if x.device.type in PREFERRED and _pays("simd", x, weight):
            _warn_if_transformed(x, weight)
        return "reference"
    reason = why_not(backend, x, weight, **asked)
    if reason is not None:
        remedy = "or leave backend=None, which chooses the fastest backend that supports the call"
        raise ValueError(f"backend={backend!r} does not support this call: {reason}; {remedy}")
    return backend


def why_not(
    name: Backend,
    x: Tensor,
    weight: Tensor,
    *,
    routing: RoutingOptions | None = None,
    chain: Tensor | None = None,
    needs_grad: bool = False,
    is_learning: bool = True,
) -> str | None:
    """Return why a backend does not support a call, with a remedy; None if it does."""
    if name == "reference":
        return None
    if chain is not None and (reason := why_not(name, chain, weight, needs_grad=needs_grad)):
        return reason
    if routing is not None and (
        routing.agreement not in IMPLEMENTED_AGREEMENTS or routing.normalize not in IMPLEMENTED_AXES
    ):
        return (
            f"it does not implement agreement={routing.agreement!r} with "
            f"normalize={routing.normalize!r}; use backend='reference'"
        )
    if x.device.type not in PREFERRED:
        return (
            f"it runs on CPUs and CUDA devices, not on {x.device.type!r}; use backend='reference'"
        )
    if torch.compiler.is_compiling():
        if name == "torch":
            return "it runs outside torch.compile only; use backend=None"
        # Imported on first use: it imports parts of torch.compile, which takes a second.
        from poecaps.kernels import operators

        return operators.why_not(name, x, weight, is_learning=is_learning)
    if checks.is_transformed(x) or checks.is_transformed(weight):
        if checks.is_forward_mode(x) or checks.is_forward_mode(weight):
            return "it does not support forward-mode gradients; use backend='reference'"
        if is_learning or name not in TRANSFORMABLE:
            return "it does not support torch.func in this call; use backend='reference'"
    if x.device != weight.device or (x.dtype != weight.dtype and not float32.is_needed(x, weight)):
        return (
            f"the capsules are {x.dtype} on {x.device} and the weight is {weight.dtype} on "
            f"{weight.device}; bring both to the same dtype and device"
        )
    if name == "triton":
        return triton_support.why_not(x, weight, needs_grad=needs_grad)
    if name == "simd":
        return cpu.why_not(x, weight)
    return torch_routing.why_not(x, weight)


def needs_grad(x: Tensor, weight: Tensor) -> bool:
    """Return whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


def implementation(name: Backend) -> RoutingBackend:
    """Return the module of a backend."""
    if name in ("triton", "simd") and torch.compiler.is_compiling():
        from poecaps.kernels import operators

        return operators
    if name == "triton":
        # Imported on first use: it imports Triton, which takes a second and exists on Linux only.
        from poecaps.kernels.triton import backend as triton_backend

        return triton_backend
    if name == "simd":
        return cpu
    if name == "torch":
        return torch_routing
    return functional


def describe(device: torch.device | str) -> str:
    """Describe in one line the backend of float32 layers on a device, and why not a faster one."""
    if torch.device(device).type == "cuda":
        if triton_support.installed():
            return "triton: GPU kernels that keep neither votes nor coefficients in memory"
        return "torch: vote-free PyTorch, because Triton is not installed"
    reason = cpu.why_not_compiled()
    if reason is None:
        return f"simd: vote-free C for {cpu.target().name}, compiled by {cpu.compiler_version()}"
    return f"torch: vote-free PyTorch, because {reason}"


def _pays(name: Backend, x: Tensor, weight: Tensor) -> bool:
    """Return whether an automatic choice should take this backend."""
    if name != "simd":
        return True
    if not torch.compiler.is_compiling():
        return cpu.pays(x, weight, checks.mapped_elements())
    from poecaps.kernels import operators

    return cpu.pays(x, weight, operators.mapped_elements())


def _warn_if_exported(x: Tensor, weight: Tensor, asked: Mapping[str, Any]) -> None:
    """Warn if an exported program is slower than one with operators would be."""
    if any(
        why_not(name, x, weight, **asked) is None and (name != "simd" or cpu.may_pay(weight))
        for name in PREFERRED.get(x.device.type, ())
    ):
        from poecaps.kernels import operators

        operators.warn_of_export()


def _warn_if_transformed(x: Tensor, weight: Tensor) -> None:
    """Warn if torch.func or forward-mode gradients make a call slow, compiled or not."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or checks.is_transformed(x) or checks.is_transformed(weight):
        from poecaps.kernels import operators

        if is_compiling:
            operators.warn_if_transforming()
        else:
            operators.warn_of_transforms()
