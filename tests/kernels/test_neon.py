"""The C code gives the reference's results on an ARM CPU, which QEMU emulates.

`make test-neon` installs the cross compiler and the emulator; without them, the test is skipped.
Only the functions of `routing.c` run emulated. The Python code around them is the usual one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from poecaps.kernels import cpu
from poecaps.kernels.cpu import build, routing
from poecaps.kernels.cpu.job import Job, Library
from tests.kernels.problems import (
    OPTIONS,
    assert_gradients,
    assert_learned,
    assert_routed,
    options,
    problem,
)

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps import functional as F

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
required = os.environ.get("POECAPS_NEON") == "required"
pytestmark = pytest.mark.skipif(
    bool(missing) and not required, reason=f"not installed: {', '.join(missing)}"
)

# B, I, K, J, D: fewer experts than inputs, and more.
SIZES = [(9, 21, 8, 3, 16), (5, 4, 3, 9, 5)]


def emulate(name: str, program: Path, job: Job, tensors: list[Tensor]) -> int:
    """Run a function of `routing.c` on copies of the tensors, and copy the results back."""
    message = bytes(job)
    for each in tensors:
        count = each.untyped_storage().nbytes()
        address = each.untyped_storage().data_ptr()
        message += struct.pack("<QQ", address, count) + ctypes.string_at(address, count)
    command = [EMULATOR, str(program), name]
    output = subprocess.run(command, input=message, capture_output=True, check=True).stdout
    for each in tensors:
        count = each.untyped_storage().nbytes()
        ctypes.memmove(each.untyped_storage().data_ptr(), output[:count], count)
        output = output[count:]
    assert output == b""
    return 0


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiled programs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    """Let the backend run its functions on an emulated CPU."""

    def library(out_dim: int, dim: int) -> Library:
        program = programs / f"routing-{out_dim}-{dim}"
        if not program.exists():
            flags = [
                each
                for each in build.options(out_dim, dim, build.NEON)
                if each not in ("-shared", "-fPIC")
            ]
            source = str(Path(__file__).with_name("emulator.c"))
            include = f"-I{build.SOURCE.parent}"
            command = [COMPILER, *flags, "-Wall", "-Wextra", "-Werror", "-static", include, source]
            subprocess.run([*command, "-o", str(program), "-lm"], check=True)
        names = ("route", "learn", "backward")
        functions = (partial(emulate, name, program) for name in names)
        return Library(build.NEON.lanes, *functions)

    def run(batch: routing._Batch, function: partial[int]) -> None:
        given = [batch.x, batch.weight, batch.workspace, *batch.tensors]
        tensors = given if batch.grad_weight is None else [*given, batch.grad_weight]
        different = {each.untyped_storage().data_ptr(): each for each in tensors}
        different.pop(0, None)
        function(Job.from_buffer_copy(batch.job), list(different.values()))

    monkeypatch.setattr(build, "library", library)
    monkeypatch.setattr(routing._Batch, "_run", run)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing_learning_and_gradients(
    sizes: tuple[int, ...],
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    x[0, 0] = 0
    for iterations in (1, 3):
        given = options(iterations, normalize, agreement)
        assert_routed(cpu, x, weight, given)
        assert_learned(cpu, x, weight, given, winners=2, balance=torch.zeros(sizes[3]))
        assert_gradients(cpu, x, weight, given, generator)
