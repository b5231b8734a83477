"""A pytest plugin that makes Triton's interpreter faster, without a change of its results.

The interpreter replaces the functions of `triton.language` at every call of a function of a
kernel: here they are replaced once, for good. It computes every sum and product of integers a
second time with 64 bits, to find an overflow: the tensors of the tests are too small for one. And
it describes the shape of every intermediate value anew: here every shape is described once.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    modules: Any = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(modules)
    unchanged = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _: unchanged
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    _describe_shapes_once(tl.core)
    # By name, because types of pointers and of blocks have no hash.
    interpreter._get_np_dtype = _cached(interpreter._get_np_dtype, lambda kind: kind.name)


def _cached(function: Any, key: Any) -> Any:
    """Keep the results of a function of one argument."""
    known: dict[Any, Any] = {}

    def found(argument: Any) -> Any:
        name = key(argument)
        if name not in known:
            known[name] = function(argument)
        return known[name]

    return found


def _describe_shapes_once(core: Any) -> None:
    """Replace the constructors of types of blocks and of tensors."""
    of_block = core.block_type.__init__

    @functools.cache
    def described(*shape: int) -> tuple[Any, str, Any, Any]:
        kind = core.block_type.__new__(core.block_type)
        of_block(kind, core.int32, list(shape))  # raises an error if there is no such block
        sizes = core.tuple([core.constexpr(size) for size in shape])
        return kind.shape, kind.name.removesuffix("int32>"), kind.numel, sizes

    def init_block(kind: Any, element_ty: Any, shape: Any) -> None:
        sizes = [each.value if type(each) is core.constexpr else each for each in shape]
        kind.element_ty = element_ty
        kind.shape, name, kind.numel, kind.sizes = described(*sizes)
        kind.name = f"{name}{element_ty.name}>"

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        if kind.is_block():
            tensor.shape, tensor.numel = kind.sizes, core.constexpr(kind.numel)
        else:
            tensor.shape, tensor.numel = no_sizes, one

    no_sizes, one = core.tuple([]), core.constexpr(1)
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
