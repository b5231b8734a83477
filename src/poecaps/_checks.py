"""Argument checks: each error names the argument, the given value and a valid one."""

from __future__ import annotations

import difflib
import math
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# torch has no public function for whether a tensor is inside torch.func. If this private one is
# removed, such tensors are checked as well.
is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)

PIXEL_TOLERANCE = 1e-3  # distance of a pixel from 0…1 that rounding or resizing may cause
# Of an option, so that simple arithmetic with it does not exceed float32, which ends at 3e38.
MAX_NUMBER = 1e30
MAX_HALVINGS = 10  # of an image by the autoencoder, which is far above what is useful
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_transformed(tensor: Tensor) -> bool:
    """Return whether torch.func or forward-mode differentiation follows a tensor."""
    return is_wrapped(tensor) or forward_ad.unpack_dual(tensor).tangent is not None


def is_forward_mode(tensor: Tensor) -> bool:
    """Return whether forward-mode differentiation follows a tensor, or may follow it."""
    if not is_wrapped(tensor):
        return forward_ad.unpack_dual(tensor).tangent is not None
    # A transform may hide a dual tensor, and the levels inside.
    return forward_ad._current_level >= 0 or not set(transforms()) <= {"Vmap", "Grad"}


def transforms() -> tuple[str, ...]:
    """Return the names of the transforms of torch.func that are applied, such as "Vmap"."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return tuple(each.key().name for each in levels)


def mapped_elements() -> int:
    """Return the number of elements over which `torch.func.vmap` maps; 1 without it."""
    functorch = torch._C._functorch
    return math.prod(
        int(functorch.CVmapInterpreterPtr(each).batchSize())
        for each in functorch.get_interpreter_stack() or ()
        if each.key() == functorch.TransformType.Vmap
    )


def require_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, but is {type(value).__name__}; "
            "convert it with torch.as_tensor"
        )


def require_floating(name: str, value: Any, *, pixels: bool = False) -> None:
    """Raise TypeError unless `value` is a real floating-point tensor.

    With `pixels`, the remedy in the message is that for images of bytes.
    """
    require_tensor(name, value)
    if value.dtype not in FLOATING:
        remedy = f"convert it with {name}.float() (and scale its values to the intended range)"
        if pixels:
            remedy = (
                "pixels must be from 0 to 1, so divide bytes from 0 to 255 by 255: "
                f"{name}.float() / 255"
            )
        raise TypeError(
            f"{name} must be a floating-point tensor, but its dtype is {value.dtype}; {remedy}"
        )


def require_shape(
    name: str, value: Tensor, axes: str, sizes: Sequence[int | None], remedy: str
) -> None:
    """Raise ValueError unless a tensor has the shape `sizes`.

    Parameters
    ----------
    name, value
        The argument.
    axes
        One letter for each axis, for the message.
    sizes
        None for an axis of any size.
    remedy
        The end of the message.
    """
    if _fits(value.shape, sizes):
        return
    if axes[0] == "B" and _fits(value.shape, sizes[1:]):
        remedy = f"add the batch axis with {name}.unsqueeze(0)"
    wanted = [
        letter if size is None else f"{letter}={size}"
        for letter, size in zip(axes, sizes, strict=True)
    ]
    raise ValueError(
        f"{name} must have shape ({', '.join(wanted)}), but has shape {tuple(value.shape)}; "
        f"{remedy}"
    )


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    if len(shape) != len(sizes):
        return False
    return all(size is None or size == shape[axis] for axis, size in enumerate(sizes))


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of `choices`; the message suggests the nearest."""
    if value in choices:
        return
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}{hint}"
    )


def require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise TypeError or ValueError unless `value` is a whole number from `low` to `high`."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    # The exact type is compared first: it is the usual case, and torch.compile can trace it.
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
        raise TypeError(
            f"{name} must be a whole number {bounds}, but is {value!r} ({type(value).__name__})"
        )
    if int(value) < low or (high is not None and int(value) > high):
        raise ValueError(f"{name} must be a whole number {bounds}, but is {value}")


def require_nonnegative(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a number from 0 to `MAX_NUMBER`."""
    if type(value) not in (int, float) and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise TypeError(
            f"{name} must be a number of at least 0, but is {value!r} ({type(value).__name__})"
        )
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, but is {value}")
    if value > MAX_NUMBER:
        raise ValueError(f"{name} must be at most {MAX_NUMBER:g}, but is {value}")


def require_positive(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number above 0."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and value <= 0:
        raise ValueError(f"{name} must be above 0, but is {value}")
    require_nonnegative(name, value)


def require_share(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a number from 0 to 1."""
    require_nonnegative(name, value)
    if value > 1:
        raise ValueError(f"{name} must be at most 1, but is {value}")


def require_dtype(name: str, value: torch.dtype | None) -> None:
    """Raise TypeError unless capsules can have this dtype."""
    if value is not None and value not in FLOATING:
        raise TypeError(f"{name} must be one of {', '.join(map(str, FLOATING))}, but is {value}")


def require_images(name: str, value: Tensor) -> None:
    """Raise ValueError if a batch is empty."""
    if value.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one image, but its batch axis is empty")


def require_same_dtype(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError if two tensors differ in dtype.

    Under autocast they may differ, except that it does not convert float64.
    """
    if value.dtype == other.dtype:
        return
    if torch.float64 in (value.dtype, other.dtype) or not torch.is_autocast_enabled(
        value.device.type
    ):
        raise TypeError(
            f"{name} is {value.dtype} but {other_name} is {other.dtype}; "
            f"convert one of them, for example with {name}.to({other.dtype})"
        )


def require_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two tensors are on different devices."""
    if value.device != other.device:
        raise ValueError(
            f"{name} is on {str(value.device)!r} but {other_name} is on {str(other.device)!r}; "
            f"move one of them, for example with {name}.to({str(other.device)!r})"
        )


def check_capsules(x: Tensor, name: str = "x") -> None:
    """Check that `x` holds squashed capsules: finite, and every one inside the open unit ball.

    This reads the values of the tensor, and therefore waits for the device on an accelerator. Call
    it once for new data, not in every training step.

    Parameters
    ----------
    x : (..., K)
        Capsules along the last axis.
    name
        Name of `x` in the error message.

    Raises
    ------
    ValueError
        If a capsule is NaN, infinite or of norm 1 or more; the message names it and the remedy.
    """
    require_floating(name, x)
    _check_values(x.detach(), name, ball=True)


def check_values_on_cpu(x: Tensor, name: str, *, ball: bool) -> None:
    """Check the values of capsules on the CPU, outside compilation and `torch.func`.

    On an accelerator, reading a value would wait for the device; there, users call
    `check_capsules` for new data.
    """
    if _is_readable(x):
        _check_values(x.detach(), name, ball=ball)


def check_pixels_on_cpu(images: Tensor, name: str) -> None:
    """Raise ValueError if pixels are outside 0…1; on the CPU only, where reading them is cheap."""
    if not _is_readable(images) or not images.numel():
        return
    low, high = (each.item() for each in images.detach().aminmax())
    if low >= -PIXEL_TOLERANCE and high <= 1 + PIXEL_TOLERANCE:  # false for NaN
        return
    remedy = f"divide them by 255: {name} / 255" if low >= 0 and high > 2 else "rescale them"
    raise ValueError(f"{name} must be from 0 to 1, but are from {low:.4g} to {high:.4g}; {remedy}")


def check_states_on_cpu(on: Tensor, name: str) -> None:
    """Raise ValueError if states of experts are not 0 or 1; on the CPU only."""
    if _is_readable(on) and not bool(((on == 0) | (on == 1)).all()):
        bad = on[(on != 0) & (on != 1)][0].item()
        raise ValueError(f"{name} must be 0 (off) or 1 (on) for every expert, but holds {bad}")


def check_positive_on_cpu(value: Tensor, name: str) -> None:
    """Raise ValueError if numbers are not finite and above 0; on the CPU only."""
    if _is_readable(value) and not bool(((value > 0) & value.isfinite()).all()):
        bad = value[~((value > 0) & value.isfinite())][0].item()
        raise ValueError(f"{name} must hold finite numbers above 0, but holds {bad}")


def check_nonnegative_on_cpu(value: Tensor, name: str) -> None:
    """Raise ValueError if numbers are not finite and at least 0; on the CPU only."""
    if _is_readable(value) and not bool(((value >= 0) & value.isfinite()).all()):
        bad = value[~((value >= 0) & value.isfinite())][0].item()
        raise ValueError(f"{name} must hold finite numbers of at least 0, but holds {bad}")


def check_finite_on_cpu(value: Tensor, name: str) -> None:
    """Raise ValueError if numbers are infinite or NaN; on the CPU only."""
    if _is_readable(value) and not bool(value.isfinite().all()):
        bad = value[~value.isfinite()][0].item()
        raise ValueError(f"{name} must hold finite numbers, but holds {bad}")


def check_falling_on_cpu(value: Tensor, name: str) -> None:
    """Raise ValueError unless each number is below the one before it; on the CPU only."""
    if _is_readable(value) and not bool((value[1:] < value[:-1]).all()):
        raise ValueError(f"{name} must fall from number to number, but is {value.tolist()}")


def require_apart(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if an overwritten tensor shares its memory with another."""
    if torch.compiler.is_compiling() or not _is_plain(value) or not _is_plain(other):
        return
    if value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
        raise ValueError(
            f"{name} is overwritten, but shares its memory with {other_name}; "
            f"give it {name}.clone()"
        )


def _is_readable(x: Tensor) -> bool:
    """Return whether values can be read at no cost: on the CPU, not compiled, no `torch.func`."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and _is_plain(x)


def _is_plain(x: Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not is_wrapped(x)


def _check_values(x: Tensor, name: str, *, ball: bool) -> None:
    norms = torch.linalg.vector_norm(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    # One comparison suffices for valid data: it is false for NaN, infinity and too large a norm.
    suspects = (~(norms < (1.0 if ball else math.inf))).nonzero()
    for where in map(tuple, suspects.tolist()):
        capsule = x[where].double()
        if not bool(capsule.isfinite().all()):
            raise ValueError(
                f"{name} must be finite, but {name}{list(where)} = {x[where].tolist()}; "
                "look for a division by zero or a diverged training step before this call"
            )
        if ball and capsule.norm() >= 1:
            raise ValueError(
                f"{name} must hold squashed capsules, of norm below 1, but {name}{list(where)} "
                f"has norm {capsule.norm().item():.9g}; apply poecaps.squash to it first"
            )
