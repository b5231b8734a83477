"""The binary interface of `routing.c`: the structure that its functions take, and the functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_long, _float, _pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Job(ctypes.Structure):
    """`struct job` of `routing.c`, which documents each field."""

    _fields_ = (
        ("inputs", _long),
        ("experts", _long),
        ("images", _long),
        ("groups", _long),
        ("chunks", _long),
        ("iterations", _long),
        ("mixing_steps", _long),
        ("normalize_outputs", _long),
        ("cosine", _long),
        ("skip_max", _long),
        ("cache_votes", _long),
        ("first_block", _long),
        ("last_block", _long),
        ("sharpness", _float),
        ("inverse_batch", _float),
        ("x_batch_first", _pointer),
        ("weight", _pointer),
        ("c", _pointer),
        ("c_image", _long),
        ("c_input", _long),
        ("c_expert", _long),
        ("z_batch_first", _pointer),
        ("z_iteration", _long),
        ("grad_z_batch_first", _pointer),
        ("grad_c", _pointer),
        ("grad_x_batch_first", _pointer),
        ("grad_weight", _pointer),
        ("on", _pointer),
        ("free_energy_gap", _pointer),
        ("x", _pointer),
        ("x_model", _pointer),
        ("e", _pointer),
        ("denominator", _pointer),
        ("z", _pointer),
        ("y", _pointer),
        ("partial_z", _pointer),
        ("grad_z", _pointer),
        ("grad_z_model", _pointer),
        ("grad_sum", _pointer),
        ("h", _pointer),
        ("grad_z_record", _pointer),
        ("maximum", _pointer),
        ("sum", _pointer),
        ("mean_g", _pointer),
        ("tile", _long),
        ("scratch", _pointer),
        ("scratch_size", _long),
        ("joined", _long),
        ("taken", _long),
        ("done", _long),
    )


Function = Callable[[Job], None]


@dataclass(frozen=True)
class Library:
    """The functions of `routing.c`, compiled for one D and K.

    Attributes
    ----------
    route
        Routes a block of images.
    learn
        Mixes a block of images after `route`, and adds its part of the gradient.
    backward
        Computes the gradients of a block of images, and adds its part of that of the weight.
    """

    route: Function
    learn: Function
    backward: Function


def load(path: Path) -> Library:
    """Load a compiled `routing.c`.

    Raises
    ------
    OSError
        If the file is not a library compiled from a `routing.c` with this `Job`.
    """
    library = ctypes.CDLL(str(path))
    try:
        functions = library.route, library.learn, library.backward
        job_size = library.job_size
    except AttributeError as error:
        raise OSError("the compiler's output lacks the functions of routing.c") from error
    job_size.restype = ctypes.c_long
    if job_size() != ctypes.sizeof(Job):
        raise OSError(f"struct job in {path} has another size than its Python counterpart")
    for function in functions:
        function.restype, function.argtypes = None, [ctypes.POINTER(Job)]
    return Library(*functions)
