# mypy: disable-error-code="no-untyped-def"
"""The decorator of kernels that the host launches."""

import inspect
from typing import Any

import triton


def kernel(function) -> Any:
    """Compile a function that the host launches with `launch`.

    A parameter whose name ends in ``_ptr`` is a tensor, one annotated as ``tl.constexpr`` is a
    constant, and any other is a number, such as the size of a batch. `triton.jit` alone would
    compile a kernel again for a number that is 1 or a multiple of 16. Here one compiled kernel
    takes any number: the last batch of an epoch does not cause a compilation, and `launch` may
    reuse a compiled kernel without looking at the numbers.

    Device functions, which only kernels call, are decorated with `triton.jit`.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [
        each.name
        for each in parameters
        if each.annotation is inspect.Parameter.empty and not each.name.endswith("_ptr")
    ]
    return triton.jit(function, do_not_specialize=numbers)
