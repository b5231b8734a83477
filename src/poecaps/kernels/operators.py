"""Routing and learning as operators of PyTorch: `torch.ops.poecaps`.

`torch.compile` cannot look into compiled C or into the launch of a kernel. It only needs the shapes
of the results, and calls the operators when the compiled code runs. The operators are

``route``, ``route_backward``
    Routing by agreement, and its gradient.
``reconstruct``, ``reconstruct_backward``
    Up and down once, and its gradient.
``contrastive_divergence``, ``decoder_contrastive_divergence``
    Both learning rules, each with the gradient in the weight.

One operator serves every device: `KERNELS` has the compiled C for CPUs and Triton for GPUs. The
functions of a backend, at the end, are written in these operators.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps.kernels import cpu
from poecaps.kernels.torch_routing import mixed
from poecaps.kernels.torch_routing.backward import back_through_squash
from poecaps.kernels.torch_routing.closed_form import map_over
from poecaps.kernels.triton import support
from poecaps.kernels.triton.tiling import padded_batch_size

if TYPE_CHECKING:
    from poecaps.functional import Agreement, Axis, Mixing
    from poecaps.kernels.protocol import RoutingBackend
    from poecaps.kernels.torch_routing.closed_form import Axes

__all__ = [
    "contrastive_divergence",
    "decoder_contrastive_divergence",
    "encode",
    "held_preactivation",
    "reconstruct",
    "routing_by_agreement",
    "why_not",
]

DEVICES = ("cpu", "cuda")


# --------------------------------------------------------------------------------------------------
# The implementation on each kind of device


class Record(NamedTuple):
    """What routing leaves for its backward pass; tensors that a device does not need are empty.

    Attributes
    ----------
    z : (R, B, J, D)
        Preactivations of all iterations, float32.
    c : (B, I, J)
        Coefficients of the last iteration, if they are asked for.
    h, lse : (R, B, J, D), and (R, J, P) or (R, I, P)
        See `poecaps.kernels.triton.coefficients.Coefficients`; empty on a CPU.
    """

    z: Tensor
    c: Tensor
    h: Tensor
    lse: Tensor


class Kernels(Protocol):
    """The functions behind the operators on one kind of device."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the arguments; calls in other ones have to be converted by `float32`."""

    @property
    def backend(self) -> RoutingBackend:
        """The backend outside of `torch.compile`."""

    def why_not(self, x: Tensor, weight: Tensor) -> str | None:
        """Return why a call cannot be served, None if it can; real and fake tensors alike."""

    def route(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        """Route: (B, I, K), (I, J, D, K) → `Record`."""

    def new_record(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        """Return tensors of the shapes and strides that `route` returns."""

    def route_backward(
        self,
        x: Tensor,
        weight: Tensor,
        record: Record,
        grad_z: Tensor | None,
        grad_c: Tensor | None,
        routing: F.RoutingOptions,
        *,
        needs_grad_x: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute `torch_routing.backward.routing_backward`."""


class SimdKernels:
    """Compiled C, for float32 on a CPU."""

    name = "simd"
    dtypes = (torch.float32,)
    backend = cast("RoutingBackend", cpu)

    def why_not(self, x: Tensor, weight: Tensor) -> str | None:
        if x.device.type != "cpu" or torch.float64 in (x.dtype, weight.dtype):
            return f"it needs float32 on a CPU, but x is {x.dtype} on {x.device.type!r}"
        reason: str | None = _why_not_compiled_c(weight.shape[2], weight.shape[3])
        return reason

    def route(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        z, c = cpu.routing.record(x, weight, routing, needs_c=needs_c)
        return Record(z, x.new_empty(0) if c is None else c, x.new_empty(0), x.new_empty(0))

    def new_record(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        z = x.new_empty(routing.iterations, x.shape[0], *weight.shape[1:3])
        c = x.new_empty(0)
        if needs_c:
            c = cpu.routing.new_coefficients(x, weight, cpu.target().lanes)
        return Record(z, c, x.new_empty(0), x.new_empty(0))

    def route_backward(
        self,
        x: Tensor,
        weight: Tensor,
        record: Record,
        grad_z: Tensor | None,
        grad_c: Tensor | None,
        routing: F.RoutingOptions,
        *,
        needs_grad_x: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        return cpu.routing.routing_backward(
            x,
            weight,
            record.z,
            grad_z,
            grad_c,
            routing,
            needs_grad_x=needs_grad_x,
            needs_grad_weight=needs_grad_weight,
        )


class TritonKernels:
    """Triton, for float32 and half precision on a GPU."""

    name = "triton"
    dtypes = support.DTYPES

    @property
    def backend(self) -> RoutingBackend:
        # Imported on first use: it imports Triton, which takes a second and exists on Linux only.
        from poecaps.kernels.triton import backend

        return backend

    def why_not(self, x: Tensor, weight: Tensor) -> str | None:
        _, experts, out_dim, in_dim = weight.shape
        reason: str | None = _why_not_triton(x.device.type, x.dtype, experts, out_dim, in_dim)
        return reason

    def route(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        from poecaps.kernels.triton import routing_forward

        forward = routing_forward.route(x, weight, routing, record=True)
        # Not used; an operator should return the same numbers in every call.
        forward.h[0].zero_()
        forward.lse[0].zero_()
        c = forward.coefficients.tensor(weight) if needs_c else forward.z.new_empty(0)
        return Record(forward.z, c, forward.h, forward.lse)

    def new_record(
        self, x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
    ) -> Record:
        inputs, experts, out_dim, _ = weight.shape
        batch = x.shape[0]
        z = x.new_empty(routing.iterations, batch, experts, out_dim, dtype=torch.float32)
        c = z.new_empty((batch, inputs, experts) if needs_c else 0)
        rows = experts if routing.normalize == "inputs" else inputs
        lse = z.new_empty(routing.iterations, rows, padded_batch_size(batch))
        return Record(z, c, torch.empty_like(z), lse)

    def route_backward(
        self,
        x: Tensor,
        weight: Tensor,
        record: Record,
        grad_z: Tensor | None,
        grad_c: Tensor | None,
        routing: F.RoutingOptions,
        *,
        needs_grad_x: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        from poecaps.kernels.triton import routing_backward, routing_forward

        x, weight = x.contiguous(), weight.contiguous()
        forward = routing_forward.recorded_pass(x, routing, record.z, record.h, record.lse)
        backward = routing_backward.backward_through_iterations(forward, weight, grad_z, grad_c)
        return (
            backward.grad_x(weight) if needs_grad_x else None,
            backward.grad_weight(weight) if needs_grad_weight else None,
        )


# The kernels of each kind of device.
KERNELS: dict[str, Kernels] = {"cpu": SimdKernels(), "cuda": TritonKernels()}


# `torch.compile` does not trace these functions: it calls them, and keeps what they return.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_not_compiled_c(out_dim: int, dim: int) -> str | None:
    if max(out_dim, dim) > cpu.routing.MAX_DIM:
        return f"it is limited to capsules of dimension {cpu.routing.MAX_DIM}"
    return cpu.why_not_compiled(out_dim, dim)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_not_triton(
    device: str, dtype: torch.dtype, experts: int, out_dim: int, in_dim: int
) -> str | None:
    return support.why_not_sizes(device, dtype, experts, out_dim, in_dim)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def mapped_elements() -> int:
    """Return the number of elements over which a traced `torch.func.vmap` maps."""
    return checks.mapped_elements()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transforms() -> tuple[str, ...]:
    return checks.transforms()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_if_transforming() -> None:
    """Warn if a transform of torch.func is being traced."""
    if checks.transforms():
        warn_of_transforms()


_has_warned: list[bool] = []


def warn_of_transforms() -> None:
    """Warn once that a large call is slow.

    PyTorch has no gradients by torch.func for operators with a gradient of their own, learning
    rules have one that is known in advance, and no backend has forward-mode gradients.
    """
    if not _has_warned:
        _has_warned.append(True)
        warnings.warn(
            "this transform of torch.func is computed by poecaps.functional, which is slower than "
            "a backend and stores the votes; the fast backends have grad, vjp, jacrev and vmap of "
            "layers outside of torch.compile, but no forward-mode gradients and none of learning "
            "rules; backend='reference' silences this warning",
            stacklevel=2,
        )


_has_warned_of_export: list[bool] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_of_export() -> None:
    """Warn once that an exported program does not have the operators."""
    if not _has_warned_of_export:
        _has_warned_of_export.append(True)
        warnings.warn(
            "the exported program (in PyTorch 2.6 also that of torch.compile) has the equations of "
            "poecaps.functional, so that it does not need poecaps, and is slower than the layer; "
            "set layer.backend = 'simd' on a CPU or 'triton' on a GPU before the export for a "
            "program with the operators of poecaps, or 'reference' to silence this warning",
            stacklevel=2,
        )


def why_not(name: str, x: Tensor, weight: Tensor, *, is_learning: bool) -> str | None:
    """Return why the operators cannot serve a call that `torch.compile` traces, None if they can.

    Parameters
    ----------
    name
        The backend that the operators are to run, ``"simd"`` or ``"triton"``.
    x : (B, I, K)
    weight : (I, J, D, K)
    is_learning
        Whether the call is a learning rule, or holds the coefficients fixed.
    """
    if not set(_transforms()) <= (set() if is_learning else {"Vmap"}):
        return (
            "in torch.compile it supports of torch.func only vmap of layers; "
            "use backend='reference'"
        )
    kernels = KERNELS.get(x.device.type)
    if kernels is None or kernels.name != name:
        return f"in torch.compile it does not run on {x.device.type!r}; use backend='reference'"
    return kernels.why_not(x, weight)


def _checked(x: Tensor, weight: Tensor, name: str = "x", axes: str = "BIK") -> Kernels:
    """Check the sizes, dtypes and devices of the arguments of an operator: → its kernels."""
    F.check_weight(weight)
    F.check_capsules(name, x, axes, (None, weight.shape[0], weight.shape[3]), weight)
    if x.device.type not in KERNELS:
        raise ValueError(
            f"operators of poecaps run on {' and '.join(KERNELS)}, but {name} is on {x.device}"
        )
    return KERNELS[x.device.type]


def _supported(x: Tensor, weight: Tensor, name: str = "x", axes: str = "BIK") -> Kernels:
    """Return `_checked`, if the kernels support the arguments."""
    kernels = _checked(x, weight, name, axes)
    reason = kernels.why_not(x, weight)
    if x.dtype not in kernels.dtypes or weight.dtype != x.dtype:
        dtypes = " or ".join(map(str, kernels.dtypes))
        given = f"{name} is {x.dtype} and weight {weight.dtype}"
        reason = f"on {x.device.type!r} they compute in {dtypes}, but {given}"
    if reason is not None:
        raise ValueError(f"operators of poecaps do not support this call: {reason}")
    return kernels


# --------------------------------------------------------------------------------------------------
# Routing


@torch.library.custom_op("poecaps::route", mutates_args=(), device_types=DEVICES)
def route(
    x: Tensor,
    weight: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    needs_c: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route: (B, I, K), (I, J, D, K) → z, c, h and lse of `Record`."""
    routing = _options(iterations, sharpness, normalize, agreement)
    z, c, h, lse = _supported(x, weight).route(x, weight, routing, needs_c=needs_c)
    return z, c, h, lse


@route.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    needs_c: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routing = _options(iterations, sharpness, normalize, agreement)
    z, c, h, lse = _checked(x, weight).new_record(x, weight, routing, needs_c=needs_c)
    return z, c, h, lse


@torch.library.custom_op("poecaps::route_backward", mutates_args=(), device_types=DEVICES)
def route_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    h: Tensor,
    lse: Tensor,
    grad_z: Tensor | None,
    grad_c: Tensor | None,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `route` in x and in the weight; it is empty if it is not needed.

    `grad_z` (B, J, D) is the gradient in the preactivation of the last iteration.
    """
    kernels = _supported(x, weight)
    inputs, experts, out_dim, _ = weight.shape
    remedy = "give the results and gradients of poecaps::route"
    checks.require_shape("z", z, "RBJD", (iterations, len(x), experts, out_dim), remedy)
    if h.numel():
        rows = experts if normalize == "inputs" else inputs
        checks.require_shape("h", h, "RBJD", z.shape, remedy)
        checks.require_shape("lse", lse, "RNP", (iterations, rows, None), remedy)
    if grad_z is not None:
        checks.require_shape("grad_z", grad_z, "BJD", z.shape[1:], remedy)
    if grad_c is not None:
        checks.require_shape("grad_c", grad_c, "BIJ", (len(x), inputs, experts), remedy)
    gradients = kernels.route_backward(
        x,
        weight,
        Record(z.float().contiguous(), x.new_empty(0), h, lse),
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


def _setup_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *ctx.options, ctx.needs_c = inputs
    z, _, h, lse = output
    ctx.save_for_backward(x, weight, z, h, lse)
    ctx.mark_non_differentiable(h, lse)
    ctx.set_materialize_grads(False)


def _route_backward(
    ctx: Any, grad_z: Tensor | None, grad_c: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    last = None if grad_z is None else grad_z[-1]
    needs = ctx.needs_input_grad[:2]
    grad_c = grad_c if ctx.needs_c else None
    gradients = route_backward(*ctx.saved_tensors, last, grad_c, *ctx.options, *needs)
    return (
        *(each if is_needed else None for each, is_needed in zip(gradients, needs, strict=True)),
        *(None for _ in ctx.options),
        None,
    )


route.register_autograd(_route_backward, setup_context=_setup_route)


@torch.library.custom_op("poecaps::reconstruct", mutates_args=(), device_types=DEVICES)
def _reconstruct(
    x: Tensor,
    weight: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Go up and down once: (B, I, K), (I, J, D, K), (J,) → (B, I, K)."""
    routing = _options(iterations, sharpness, normalize, agreement)
    backend = _supported(x, weight).backend
    with torch.no_grad():
        return backend.reconstruct(
            x.detach(), weight.detach(), routing, winners=winners, balance=balance
        ).contiguous()


@_reconstruct.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _checked(x, weight)
    return x.new_empty(x.shape)


@torch.library.custom_op("poecaps::reconstruct_backward", mutates_args=(), device_types=DEVICES)
def _reconstruct_backward(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    winners: int | None,
    balance: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `reconstruct` in x and in the weight; it is empty if not needed.

    It routes anew, so that no coefficients have to be kept in memory.
    """
    routing = _options(iterations, sharpness, normalize, agreement)
    kernels = _supported(x, weight)
    checks.require_shape("grad", grad, "BIK", x.shape, "give the gradient of poecaps::reconstruct")
    record = kernels.route(x, weight, routing, needs_c=True)
    z, maps = record.z[-1], weight.to(record.z.dtype)
    on = F.winning_experts(z, winners, balance)
    down = (F.expert_states(z, on), maps, record.c)
    grad = back_through_squash(mixed.mixed_back(*down), grad.to(z.dtype))
    grad_y, grad_down, grad_c = mixed.gradients(down, grad, (True, needs_grad_weight, True))
    assert grad_y is not None  # noqa: S101 (it was asked for)
    grad_z = back_through_squash(z, grad_y if on is None else grad_y * on.unsqueeze(-1))
    grad_x, grad_up = kernels.route_backward(
        x,
        weight,
        record,
        grad_z,
        grad_c,
        routing,
        needs_grad_x=needs_grad_x,
        needs_grad_weight=needs_grad_weight,
    )
    if grad_up is not None and grad_down is not None:
        grad_up = (grad_up + grad_down).to(weight.dtype)
    return _or_empty(grad_x, x, x.dtype), _or_empty(grad_up, weight, weight.dtype)


@_reconstruct_backward.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, needs_grad_x, needs_grad_weight = others
    return (
        x.new_empty(x.shape if needs_grad_x else 0),
        weight.new_empty(weight.shape if needs_grad_weight else 0),
    )


def _setup_reconstruct(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, *ctx.options, balance = inputs
    ctx.save_for_backward(x, weight, balance)


def _backward_of_reconstruct(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, balance = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    gradients = _reconstruct_backward(x, weight, grad, *ctx.options, balance, *needs)
    return (
        *(each if is_needed else None for each, is_needed in zip(gradients, needs, strict=True)),
        *(None for _ in ctx.options),
        None,
    )


_reconstruct.register_autograd(_backward_of_reconstruct, setup_context=_setup_reconstruct)


# --------------------------------------------------------------------------------------------------
# torch.func.vmap, of operators that compute each image by itself


def _register_vmap(operator: Any, axes: Axes, result_axes: Axes) -> None:
    """Let an operator be mapped.

    Parameters
    ----------
    operator
        An operator of which the first arguments are tensors.
    axes, result_axes
        Axis of the images in its first arguments and in its results; see `closed_form.map_over`.
    """

    def rule(info: Any, mapped: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        def results(*given: Tensor | None) -> tuple[Tensor | None, ...]:
            found = operator(*given)
            return found if isinstance(found, tuple) else (found,)

        rest = (None,) * (len(arguments) - len(axes))
        found, places = map_over(
            results, info.batch_size, mapped, arguments, (*axes, *rest), result_axes
        )
        return (found, places) if len(found) > 1 else (found[0], places[0])

    torch.library.register_vmap(operator, rule)


# The recorded lse has room for more images than there are, and is left as it is.
_register_vmap(route, (0, None), (1, 0, 1, None))
_register_vmap(_reconstruct, (0, None), (0,))


# --------------------------------------------------------------------------------------------------
# Learning


@torch.library.custom_op("poecaps::contrastive_divergence", mutates_args=(), device_types=DEVICES)
def _contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    k: int,
    mixing: str,
    uniform: Tensor | None,
    chain: Tensor | None,
    winners: int | None,
    balance: Tensor | None,
    views: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `functional.contrastive_divergence`: → loss, grad_weight, on and x_model.

    (B, I, K), (I, J, D, K) → (), (I, J, D, K), (B, J), (N, I, K); a result that is not asked for is
    empty. The random numbers of Bernoulli mixing are an argument, `uniform` (k, N, J).
    """
    kernels = _supported(x, weight)
    if chain is not None:
        _supported(chain, weight, "chain", "NIK")
    if mixing == "bernoulli" and uniform is None:
        raise ValueError("mixing='bernoulli' needs uniform (k, N, J); draw it with torch.rand")
    with torch.set_grad_enabled(needs_grad):
        step = kernels.backend.contrastive_divergence(
            x.detach(),
            weight.detach().requires_grad_(needs_grad),
            _options(iterations, sharpness, normalize, agreement),
            k=k,
            mixing=cast("Mixing", mixing),
            uniform=uniform,
            chain=chain,
            winners=winners,
            balance=balance,
            views=views,
        )
    return (
        step.loss,
        _or_empty(step.grad_weight, weight, torch.float32),
        _or_empty(step.on, x, torch.bool),
        _or_empty(step.x_model, x, x.dtype),
    )


@_contrastive_divergence.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, chain, winners, _, _, needs_grad = others
    _checked(x, weight)
    return (
        x.new_empty((), dtype=torch.float32),
        weight.new_empty(weight.shape if needs_grad else 0, dtype=torch.float32),
        x.new_empty(0 if winners is None else (x.shape[0], weight.shape[1]), dtype=torch.bool),
        x.new_empty(0 if chain is None else chain.shape),
    )


@torch.library.custom_op(
    "poecaps::decoder_contrastive_divergence", mutates_args=(), device_types=DEVICES
)
def _decoder_contrastive_divergence(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    iterations: int,
    sharpness: float,
    normalize: str,
    agreement: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `functional.decoder_contrastive_divergence`: → loss and grad_weight.

    (B, J, D), (B, I, K), (J, I, K, D) → (), (J, I, K, D); a gradient that is not needed is empty.
    """
    backend = _supported(y, weight, "y", "BJD").backend
    F.check_capsules("x", x, "BIK", (y.shape[0], *weight.shape[1:3]), weight)
    with torch.set_grad_enabled(needs_grad):
        step = backend.decoder_contrastive_divergence(
            y.detach(),
            x.detach(),
            weight.detach().requires_grad_(needs_grad),
            _options(iterations, sharpness, normalize, agreement),
        )
    return step.loss, _or_empty(step.grad_weight, weight, torch.float32)


@_decoder_contrastive_divergence.register_fake
def _(y: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _checked(y, weight, "y", "BJD")
    F.check_capsules("x", x, "BIK", (y.shape[0], *weight.shape[1:3]), weight)
    needs_grad = others[-1]
    return (
        x.new_empty((), dtype=torch.float32),
        weight.new_empty(weight.shape if needs_grad else 0, dtype=torch.float32),
    )


def _setup_learning(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the gradient in the weight, which the learning rule has already computed."""
    grad_weight, *others = output[1:]
    ctx.save_for_backward(grad_weight)
    ctx.mark_non_differentiable(grad_weight, *others)
    ctx.needs_grad, ctx.arguments = inputs[-1], len(inputs)
    ctx.place = next(place for place, each in enumerate(inputs) if _is_weight(each))
    ctx.dtype = inputs[ctx.place].dtype


def _learning_backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.needs_grad:
        raise RuntimeError("the learning rule was called with needs_grad=False")
    (grad_weight,) = ctx.saved_tensors
    gradients: list[Tensor | None] = [None] * ctx.arguments
    gradients[ctx.place] = (grad_weight * grad_loss).to(ctx.dtype)
    return tuple(gradients)


def _is_weight(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dim() == 4


_contrastive_divergence.register_autograd(_learning_backward, setup_context=_setup_learning)
_decoder_contrastive_divergence.register_autograd(_learning_backward, setup_context=_setup_learning)


# Under autocast, the operators compute in float32. Where PyTorch is too old for such rules, tensors
# must be converted before the call, as layers do.
if hasattr(torch.library, "register_autocast"):
    for _operator in (
        route,
        route_backward,
        _reconstruct,
        _reconstruct_backward,
        _contrastive_divergence,
        _decoder_contrastive_divergence,
    ):
        for _device in DEVICES:
            torch.library.register_autocast(_operator, _device, torch.float32)


def _or_empty(result: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype) if result is None else result.contiguous()


def _options(iterations: int, sharpness: float, normalize: str, agreement: str) -> F.RoutingOptions:
    return F.RoutingOptions(
        iterations, sharpness, cast("Axis", normalize), cast("Agreement", agreement)
    )


# --------------------------------------------------------------------------------------------------
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
    z, c, _, _ = route(x, weight, iterations, sharpness, normalize, agreement, True)
    return F.Routing(c, z[-1].to(x.dtype))


def held_preactivation(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> Tensor:
    """Compute `functional.held_preactivation`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    with torch.no_grad():
        c = routing_by_agreement(x, weight, **asdict(routing)).coefficients
    return F.preactivation(x.detach(), weight, c)


def encode(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Compute `functional.encode`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    z = route(x, weight, *_values(routing), False)[0][-1].to(x.dtype)
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
    x_model: Tensor = _reconstruct(x, weight, *_values(routing), winners, balance)
    return x_model


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    k: int,
    mixing: Mixing,
    uniform: Tensor | None,
    chain: Tensor | None,
    winners: int | None,
    balance: Tensor | None,
    views: int,
) -> F.LearningStep:
    """Compute `functional.contrastive_divergence`, with a loss that is differentiable.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    uniform : (k, N, J), optional
    chain : (N, I, K), optional
    balance : (J,), optional
    """
    if mixing == "bernoulli" and uniform is None:
        images = (x if chain is None else chain).shape[0]
        uniform = torch.rand(k, images, weight.shape[1], device=x.device)
    loss, _, on, x_model = _contrastive_divergence(
        x,
        weight,
        *_values(routing),
        k,
        mixing,
        uniform,
        chain,
        winners,
        balance,
        views,
        torch.is_grad_enabled() and weight.requires_grad,
    )
    return F.LearningStep(
        loss, None, None if winners is None else on, None if chain is None else x_model
    )


def decoder_contrastive_divergence(
    y: Tensor, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.LearningStep:
    """Compute `functional.decoder_contrastive_divergence`, with a loss that is differentiable.

    Parameters
    ----------
    y : (B, J, D)
    x : (B, I, K)
    weight : (J, I, K, D)
    """
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    loss, _ = _decoder_contrastive_divergence(y, x, weight, *_values(routing), needs_grad)
    return F.LearningStep(loss, None)


def _values(routing: F.RoutingOptions) -> tuple[int, float, str, str]:
    return routing.iterations, float(routing.sharpness), routing.normalize, routing.agreement
