"""Functions whose gradient has a closed form, as autograd and torch.func see them.

`apply` computes a function by a backend and differentiates it by the closed form of the backend,
also in `torch.func.grad`, `vjp`, `jacrev` and `vmap`. The gradients may be differentiated in turn:
second derivatives are those of the reference.

Backends read the memory of plain tensors. Here PyTorch gives them such tensors: an
`autograd.Function` with a `setup_context` is called below all transforms, and its `vmap` makes one
axis of the mapped axis and the axis of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from poecaps import _checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Tensors = tuple[Tensor, ...]
    Axes = tuple[int | None, ...]
    Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class ClosedForm:
    """A function of capsules and weights, its gradient, and the reference for both."""

    compute: Callable[..., Tensors]
    """Arguments → results, and after them the records that `gradients` needs."""
    gradients: Callable[
        [Sequence[Tensor], Sequence[Tensor], Gradients, tuple[bool, ...]], Gradients
    ]
    """Arguments, records, gradients in the results, and which arguments need one → gradients."""
    reference: Callable[..., Tensors]
    """Arguments → results, differentiable."""
    argument_axes: Axes
    """Axis of the images in each argument; None: a weight, which all images share."""
    result_axes: Axes
    """Axis of the images in each result."""
    record_axes: Axes = ()
    """Axis of the images in each record."""


def apply(form: ClosedForm, *arguments: Tensor) -> Tensors:
    """Compute the results of a function, so that autograd differentiates them."""
    results: Tensors = _Function.apply(form, *arguments)  # type: ignore[no-untyped-call]
    return results[: len(form.result_axes)]


def is_needed(*tensors: Tensor) -> bool:
    """Return whether autograd records operations on these tensors, or torch.func follows them."""
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return needs_grad or any(map(checks.is_wrapped, tensors))


class _Function(torch.autograd.Function):
    """The results of a function, and its records."""

    @staticmethod
    def forward(form: ClosedForm, *arguments: Tensor) -> Tensors:
        return form.compute(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.form, *arguments = inputs
        records = output[len(ctx.form.result_axes) :]
        ctx.mark_non_differentiable(*records)
        ctx.save_for_backward(*arguments, *records)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        form: ClosedForm = ctx.form
        needs = tuple(ctx.needs_input_grad[1:])
        into_results = grads[: len(form.result_axes)]
        if all(each is None for each in into_results):
            return None, *(None for _ in needs)
        given = (*ctx.saved_tensors, *into_results)
        return None, *_Gradients.apply(form, needs, *given)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], form: ClosedForm, *arguments: Tensor
    ) -> tuple[Gradients, Axes]:
        return map_over(
            lambda *each: _Function.apply(form, *each),  # type: ignore[no-untyped-call]
            info.batch_size,
            in_dims[1:],
            arguments,
            form.argument_axes,
            (*form.result_axes, *form.record_axes),
        )


class _Gradients(torch.autograd.Function):
    """The gradients of a function in its arguments; None where one is not needed."""

    @staticmethod
    def forward(form: ClosedForm, needs: tuple[bool, ...], *given: Tensor) -> Gradients:
        arguments, records, grads = _split(form, given)
        with torch.autocast(arguments[0].device.type, enabled=False):
            return form.gradients(arguments, records, grads, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:  # noqa: ARG004
        ctx.form, ctx.needs, *given = inputs
        arguments, records, grads = _split(ctx.form, given)
        ctx.records = len(records)
        ctx.save_for_backward(*arguments, *grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Differentiate the gradients of the reference."""
        form: ClosedForm = ctx.form
        count = len(form.argument_axes)
        given = ctx.saved_tensors
        places = [place for place, each in enumerate(given) if each is not None]

        def gradients(*present: Tensor) -> Tensors:
            tensors = dict(zip(places, present, strict=True))
            arguments = [tensors[place] for place in range(count)]
            results, pull, *_ = torch.func.vjp(form.reference, *arguments)
            into = (
                tensors.get(count + place, torch.zeros_like(each))
                for place, each in enumerate(results)
            )
            found = zip(pull(tuple(into)), ctx.needs, strict=True)
            return tuple(each for each, is_needed in found if is_needed)

        needed = tuple(each for each, needs in zip(grads, ctx.needs, strict=True) if needs)
        with torch.autocast(given[0].device.type, enabled=False):
            _, pull, *_ = torch.func.vjp(gradients, *(given[place] for place in places))
            found = dict(zip(places, pull(needed), strict=True))
        second = [found.get(place) for place in range(len(given))]
        return (None, None, *second[:count], *(None,) * ctx.records, *second[count:])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        form: ClosedForm,
        needs: tuple[bool, ...],
        *given: Tensor,
    ) -> tuple[Gradients, Axes]:
        return map_over(
            lambda *each: _Gradients.apply(form, needs, *each),  # type: ignore[no-untyped-call]
            info.batch_size,
            in_dims[2:],
            given,
            (*form.argument_axes, *form.record_axes, *form.result_axes),
            form.argument_axes,
            is_shared=any(
                each and axis is None for each, axis in zip(needs, form.argument_axes, strict=True)
            ),
        )


def _split(form: ClosedForm, given: Sequence[Tensor]) -> tuple[Any, Any, Any]:
    """Return arguments, records, and gradients in the results."""
    first = len(form.argument_axes)
    second = first + len(form.record_axes)
    return given[:first], given[first:second], tuple(given[second:])


def map_over(
    function: Callable[..., Gradients],
    size: int,
    mapped: Sequence[int | None],
    given: Sequence[Tensor | None],
    axes: Axes,
    result_axes: Axes,
    *,
    is_shared: bool = False,
) -> tuple[Gradients, Axes]:
    """Map a function over an axis of its arguments.

    All images of all elements are computed together. Where elements have weights of their own, or
    gradients in the weight (`is_shared`), there is one call for each element.

    Parameters
    ----------
    function
        Its results may be None, or empty instead: then they have fewer axes.
    size
        Number of elements N.
    mapped
        The mapped axis of each argument; None: the same for all elements.
    given
        The arguments.
    axes, result_axes
        Axis of the images in arguments and results, see `ClosedForm`.

    Returns
    -------
    tuple
        The results, and the mapped axis of each.
    """
    has_own_weights = any(
        axis is None and dim is not None for axis, dim in zip(axes, mapped, strict=True)
    )
    if is_shared or has_own_weights:
        calls = [
            function(
                *(
                    each if each is None or dim is None else each.select(dim, element)
                    for each, dim in zip(given, mapped, strict=True)
                )
            )
            for element in range(size)
        ]
        stacked = tuple(
            None if each[0] is None else torch.stack(each) for each in zip(*calls, strict=True)
        )
        return stacked, tuple(None if each is None else 0 for each in stacked)
    flat: list[Tensor | None] = []
    for each, dim, axis in zip(given, mapped, axes, strict=True):
        if each is None or axis is None:
            flat.append(each)
            continue
        joined = each.unsqueeze(axis) if dim is None else each.movedim(dim, axis)
        sizes = [*joined.shape]
        sizes[axis] = size
        flat.append(joined.expand(sizes).flatten(axis, axis + 1))
    found: list[tuple[Tensor | None, int | None]] = []
    for result, axis in zip(function(*flat), result_axes, strict=True):
        if result is None or axis is None or axis >= result.dim():
            found.append((result, None))
        else:
            found.append((result.unflatten(axis, (size, result.shape[axis] // size)), axis))
    results, dims = zip(*found, strict=True)
    return results, dims
