"""The binary interface of `routing.c`: the structure that its functions take, and the functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_size, _float, _pointer = ctypes.c_ssize_t, ctypes.c_float, ctypes.c_void_p


class Job(ctypes.Structure):
    """`struct job` of `routing.c`, which documents each field."""

    _fields_ = (
        ("inputs", _size),
        ("experts", _size),
        ("images", _size),
        ("groups", _size),
        ("chunks", _size),
        ("iterations", _size),
        ("mixing_steps", _size),
        ("normalize_outputs", _size),
        ("cosine", _size),
        ("skip_max", _size),
        ("cache_votes", _size),
        ("first_block", _size),
        ("last_block", _size),
        ("sharpness", _float),
        ("inverse_batch", _float),
        ("x_batch_first", _pointer),
        ("weight", _pointer),
        ("c", _pointer),
        ("c_image", _size),
        ("c_input", _size),
        ("c_expert", _size),
        ("z_batch_first", _pointer),
        ("z_iteration", _size),
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
        ("tile", _size),
        ("scratch", _pointer),
        ("scratch_size", _size),
        ("taken", _size),
        ("done", _size),
    )


# Takes a job and the number of the calling thread; returns whether it must be called again.
Function = Callable[[Job, int], int]


@dataclass(frozen=True)
class Library:
    """The functions of `routing.c`, compiled for one D and K.

    Attributes
    ----------
    lanes
        Images in a vector.
    route
        Routes a block of images.
    learn
        Mixes a block of images after `route`, and adds its part of the gradient.
    backward
        Computes the gradients of a block of images, and adds its part of that of the weight.
    """

    lanes: int
    route: Function
    learn: Function
    backward: Function


def load(path: Path, lanes: int) -> Library:
    """Load a `routing.c` that was compiled for this number of lanes.

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
    job_size.restype = ctypes.c_ssize_t
    if job_size() != ctypes.sizeof(Job):
        raise OSError(f"struct job in {path} has another size than its Python counterpart")
    for function in functions:
        function.restype, function.argtypes = ctypes.c_int, [ctypes.POINTER(Job), _size]
    return Library(lanes, *functions)
