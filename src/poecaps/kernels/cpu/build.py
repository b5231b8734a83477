"""Compile `routing.c` for the D and K of a layer, and load it.

The compiler of the machine is called the first time that a D and K occur. The libraries are kept in
the user's cache folder. They are compiled for the best instruction set of the CPU, or for the one
that the environment variable ``POECAPS_SIMD`` names.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from poecaps.kernels.cpu.job import Library, load

SOURCE = Path(__file__).with_name("routing.c")
SOURCES = (SOURCE, SOURCE.with_name("backward.h"), SOURCE.with_name("lanes.h"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")


@dataclass(frozen=True)
class Target:
    """An instruction set.

    Attributes
    ----------
    name
        Its usual name.
    lanes
        Floats in a vector register.
    flags
        Options of the compiler that select it. Every part is named, none is taken from the machine
        at hand (as -march=native would do), so that machines can share a cache folder.
    """

    name: str
    lanes: int
    flags: tuple[str, ...] = ()


AVX512 = Target(
    "AVX-512",
    16,
    (
        "-mavx512f",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512bw",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
)
AVX2 = Target("AVX2", 8, ("-mavx2", "-mfma"))
SSE2 = Target("SSE2", 4)
NEON = Target("NEON", 4)

# The targets of each kind of CPU and, of x86-64, of what PyTorch finds there; the best one first.
X86_TARGETS = {"AVX512": (AVX512, AVX2, SSE2), "AVX2": (AVX2, SSE2), "DEFAULT": (SSE2,)}
ARM_TARGETS = (NEON,)
VARIABLE = "POECAPS_SIMD"  # name of a target to use instead of the best one
TILE = 8  # inputs processed together, so that their sum is read and written once for all of them
TIMEOUT = 60  # seconds that a compiler may take; about 1 is usual


def targets() -> tuple[Target, ...]:
    """Return the targets that this CPU supports, the best one first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ARM_TARGETS
    if machine in ("x86_64", "amd64"):
        # What PyTorch is configured to use: ATEN_CPU_CAPABILITY restricts both.
        return X86_TARGETS.get(torch.backends.cpu.get_cpu_capability(), ())
    return ()


def target() -> Target:
    """Return the target to compile for.

    Raises
    ------
    LookupError
        If the CPU supports none, or not the one that the environment variable names.
    """
    supported = targets()
    given = os.environ.get(VARIABLE, "").strip()
    found = [each for each in supported if _plain(given) in ("", _plain(each.name))]
    if not supported:
        raise LookupError(f"it is not written for CPUs of the kind {platform.machine()!r}")
    if not found:
        names = ", ".join(each.name for each in supported)
        raise LookupError(f"${VARIABLE} is {given!r}, but this CPU supports {names}")
    return found[0]


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


def library(out_dim: int, dim: int) -> Library:
    """Return the library for experts of dimension D and input capsules of dimension K.

    Raises
    ------
    RuntimeError
        If there is none; `why_not` gives the reason beforehand.
    """
    try:
        found = _library(out_dim, dim, target())
    except LookupError as error:
        found = str(error.args[0])
    if isinstance(found, str):
        raise RuntimeError(f"cannot compile the routing for a CPU: {found}")
    return found


def why_not(out_dim: int = 16, dim: int = 8) -> str | None:
    """Return why there is no library for D and K, None if there is one.

    The library is compiled if it was not compiled before.
    """
    if sys.platform == "win32":
        return "C is compiled on Unix only"
    try:
        found = _library(out_dim, dim, target())
    except LookupError as error:
        return str(error.args[0])
    return found if isinstance(found, str) else None


def compiler_version() -> str | None:
    """Return name and version of the compiler, None if nothing can be compiled."""
    return _version(_compiler()) if why_not() is None else None


@cache
def _library(out_dim: int, dim: int, target: Target) -> Library | str:
    """Load the library for D, K and a target, compile it first if necessary, or return why not."""
    if _timeouts:
        return _timeouts[0]
    try:
        compiler = _compiler()
        command = [*compiler, *options(out_dim, dim, target)]
        # Everything that the library depends on, so that a change of it makes another file name.
        sources = [path.read_text(encoding="utf-8") for path in SOURCES]
        origin = chr(0).join([*command, _version(compiler), *sources])
        name = f"simd-{out_dim}-{dim}-{hashlib.sha256(origin.encode()).hexdigest()[:20]}"
        folder = _cache_folder()
        if folder is not None:
            for path in folder.glob(f"{name}-*.so"):
                with suppress(OSError):
                    if _is_intact(path):
                        return load(path, target.lanes)
            # A compiler fails if the disk of the cache is full.
            with suppress(OSError, subprocess.CalledProcessError):
                return load(_compile(command, folder, name), target.lanes)
        with tempfile.TemporaryDirectory(prefix="poecaps-") as temporary:  # not needed once loaded
            return load(_compile(command, Path(temporary), name), target.lanes)
    except LookupError as error:
        return str(error.args[0])
    except subprocess.CalledProcessError as error:
        output = (error.stderr or "").strip().splitlines() or [f"exit status {error.returncode}"]
        first_error = next((line for line in output if "error" in line), output[0])
        return f"the C compiler failed: {first_error}"
    except subprocess.TimeoutExpired as error:
        _timeouts.append(f"the C compiler took longer than {error.timeout:.0f} s")
        return _timeouts[0]
    except OSError as error:
        return f"the C source cannot be compiled: {error}"


def options(out_dim: int, dim: int, target: Target) -> list[str]:
    """Return the options of the compiler for D, K and a target."""
    constants = {"LANES": target.lanes, "D": out_dim, "K": dim, "TILE": TILE}
    return [*FLAGS, *target.flags, *(f"-D{name}={value}" for name, value in constants.items())]


# The reason why the compiler is not called again, if it exceeded the timeout once.
_timeouts: list[str] = []


def _compiler() -> list[str]:
    """Return the command of the C compiler: $CC, or the first of the usual names that exists."""
    given = os.environ.get("CC", "").strip()
    if given:
        try:
            command = shlex.split(given)
        except ValueError as error:
            raise LookupError(f"$CC is {given!r}, which is not a valid command") from error
        if shutil.which(command[0]) is None:
            raise LookupError(f"$CC is {given!r}, which is not found")
        return command
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        raise LookupError("no C compiler is found")
    return [found]


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"]).partition("\n")[0]


def _cache_folder() -> Path | None:
    """Return the cache folder, None unless it is writable by this user and by nobody else."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = base if base.is_absolute() else Path("~/.cache").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("poecaps", "simd"):
            folder /= name
            folder.mkdir(exist_ok=True, mode=0o700)
            if not _is_private(folder.stat()):
                return None
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _compile(command: list[str], folder: Path, name: str) -> Path:
    """Compile to a temporary file and rename it, because other processes may do the same.

    The final name ends with the digest of the content.
    """
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run([*command, str(SOURCE), "-o", temporary, "-lm"])
        return Path(temporary).replace(folder / f"{name}-{_digest(Path(temporary))}.so")
    finally:
        Path(temporary).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _is_intact(path: Path) -> bool:
    """Return whether this user wrote a file, and it has the content that its name promises.

    Loading a truncated library would end the process, and anybody can name a file by its digest.
    """
    status = path.lstat()
    return (
        stat.S_ISREG(status.st_mode) and _is_private(status) and path.stem.endswith(_digest(path))
    )


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _run(command: list[str]) -> str:
    """Run a command and return its standard output; after the timeout, it ends with its children.

    A compiler is a driver that starts other programs.
    """
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output
