"""Checks of what a caller hands in: each error names the argument, what was given and what would be right."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_floating(name: str, value: Any) -> None:
    """Refuse anything but a real floating-point tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, but is {type(value).__name__}; convert it with torch.as_tensor"
        )
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{name} must be a floating-point tensor, but its dtype is {value.dtype}; "
            f"convert it with {name}.float() (and bring its values to the range you mean)"
        )


def require_shape(name: str, value: Tensor, axes: str, sizes: Sequence[int | None], remedy: str) -> None:
    """Refuse a tensor whose shape is not `sizes`; a size of None is free, `axes` are the letters to show."""
    wanted = [letter if size is None else str(size) for letter, size in zip(axes, sizes, strict=True)]
    if value.dim() == len(sizes) and all(
        size is None or size == have for size, have in zip(sizes, value.shape, strict=True)
    ):
        return
    if value.dim() == len(sizes) - 1 and axes[0] == "B":
        remedy = f"add the batch axis with {name}.unsqueeze(0)"
    raise ValueError(
        f"{name} must have shape ({', '.join(wanted)}), axes ({', '.join(axes)}), "
        f"but has shape {tuple(value.shape)}; {remedy}"
    )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an option that is not one of `choices`, naming the nearest."""
    if value in choices:
        return
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}{hint}")


def require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse anything but a whole number from `low` to `high`."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number {bounds}, but is {value!r} ({type(value).__name__})")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a whole number {bounds}, but is {value}")


def require_nonnegative(name: str, value: Any) -> None:
    """Refuse anything but a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of at least 0, but is {value!r} ({type(value).__name__})")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, but is {value}")


def require_same_dtype(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse tensors of two precisions, unless autocast is there to reconcile them."""
    if value.dtype != other.dtype and not torch.is_autocast_enabled(value.device.type):
        raise TypeError(
            f"{name} is {value.dtype} but {other_name} is {other.dtype}; "
            f"convert one of them, for example with {name}.to({other.dtype})"
        )


def check_capsules(x: Tensor, name: str = "x") -> None:
    """Check that `x` holds squashed capsules: finite, and every one inside the open unit ball.

    This reads the tensor's values, so on an accelerator it waits for the device. Call it where data enter,
    not in a training step.

    Parameters
    ----------
    x : (..., K)
        Capsules along the last axis.
    name
        What to call `x` in the error.

    Raises
    ------
    ValueError
        If a capsule is NaN, infinite or of norm 1 or more; the message says which and what to do.
    """
    require_floating(name, x)
    _check_values(x.detach(), name, ball=True)


def check_values_on_cpu(x: Tensor, name: str, *, ball: bool) -> None:
    """Run the value checks where they cost nothing: on the CPU, outside compilation and `torch.func`.

    On an accelerator reading a value would stall the queue, so there data are checked with
    `check_capsules` as they enter.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return
    if type(x) in (torch.Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(x):
        _check_values(x.detach(), name, ball=ball)


def _check_values(x: Tensor, name: str, *, ball: bool) -> None:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norms = torch.linalg.vector_norm(wide, dim=-1)
    # One comparison finds every fault: it is false for NaN, for infinity and for a norm that is too large.
    limit = 1.0 if ball else math.inf
    inside = norms < limit
    if bool(inside.all()):
        return
    where = tuple(int(index) for index in (~inside).nonzero()[0])
    if not bool(wide[where].isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but {name}{list(where)} = {x[where].tolist()}; "
            "look for a division by zero or a diverged training step before this call"
        )
    if ball:
        raise ValueError(
            f"{name} must hold squashed capsules, of norm below 1, but {name}{list(where)} has norm "
            f"{norms[where].item():.6g}; apply poecaps.squash to it first"
        )
