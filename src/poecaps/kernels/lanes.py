"""Learning and routing in compiled C that keeps votes in registers and caches: images are the lanes of SIMD.

`lanes.c` has the equations. It is compiled for the D and K of a layer by the machine's own C compiler when they are
first met, and kept in the user's cache. Where that cannot be done (`obstacle` says why) or does not pay (`covers`), the
plain versions stand in.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from poecaps import functional as F
from poecaps.kernels import votefree
from poecaps.kernels.common import Options, with_slope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
# All is said here and nothing left to the machine at hand, so that a cache may be shared between machines.
FLAGS = (
    *("-std=gnu11", "-O3", "-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
    *("-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"),
)
PATIENCE = 60  # seconds that a compiler may take; about 1 is usual

LANES = 16  # images in one vector
BLOCK = votefree.BLOCK  # images at a time, a multiple of the lanes: who may fire is asked of the same ones
TILE = 8  # inputs taken together, so that what they add to is read and written once for all of them
WIDEST = 64  # D and K, at most: a vote and what is made of it lie on the stack
SMALLEST = 2**20  # multiplications of one way up, B·I·J·D·K: less is not worth a compilation
PIECE, PIECES = 48, 16  # inputs that are mixed by one thread at once, at least, and how many such pieces, at most
ROOM = 64 * 2**20  # bytes that the coefficients of a block of images may take
KEPT, ALL_KEPT = 2**23, 2**27  # bytes that the votes for one expert may take to be kept, of one thread and of all
SPARE = 2**27  # bytes that may be kept from one call to the next
FLAT = 30.0  # logits up to this need no maximum taken out: no vote whose square is finite can overflow what is mixed


@torch.no_grad()
def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute what `functional.routing_by_agreement` does, without a gradient."""
    options = Options(iterations, float(sharpness), normalize, agreement)
    step = _Step(x, weight, options)
    inputs, experts, out_dim, _ = weight.shape
    # In the order in which `votefree` and `fanout` go on with them.
    if experts > inputs:
        c = x.new_empty(inputs, len(x), experts).transpose(0, 1)
    else:
        c = x.new_empty(experts, inputs, -(-len(x) // LANES) * LANES).permute(2, 1, 0)
    z = x.new_empty(len(x), experts, out_dim)
    for part in step.blocks():
        step.begin(part, z[part])
        step.tell(c[part])
        step.run("route")
    step.end()
    return F.Routing(c[: len(x)], z)


def contrastive_divergence(
    x: Tensor, weight: Tensor, k: int, options: Options, may_fire: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kernels.contrastive_divergence` does, a block of images all the way before the next begins."""
    asked = torch.is_grad_enabled() and weight.requires_grad
    gaps: list[Tensor] = []
    allowed: list[Tensor] = []
    with torch.no_grad():
        slope = torch.empty_like(weight, memory_format=torch.contiguous_format) if asked else None
        step = _Step(x, weight, options, slope)
        _, experts, out_dim, _ = weight.shape
        for part in step.blocks():
            z = x.new_empty(len(x[part]), experts, out_dim)
            step.begin(part, z)
            step.run("route")
            on = may_fire(z)
            gaps.append(step.learn(k, on))
            allowed += [] if on is None else [on]
        step.end()
        gap = torch.cat(gaps).mean().to(weight.dtype)
    return with_slope(weight, gap, slope), torch.cat(allowed) if allowed else None


# ---------------------------------------------------------------------------------------------------------
# Whether


def covers(x: Tensor, weight: Tensor) -> bool:
    """Tell whether a call on x (B, I, K) and weight (I, J, D, K) can be made here, and is worth it."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.shape[1:] == (weight.shape[0], weight.shape[3])
        and _is_memory(x)
        and _is_memory(weight)
        and len(x) * weight.numel() >= SMALLEST
        and max(weight.shape[2:]) <= WIDEST
        and obstacle(*weight.shape[2:]) is None
    )


def _is_memory(tensor: Tensor) -> bool:
    """Tell whether what is read at a tensor's address is what it means, and is read now."""
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg() and not watched


def obstacle(out_dim: int = 16, dim: int = 8) -> str | None:
    """Say why nothing can be compiled for D and K, None if it can be: it is, if it was not yet."""
    if sys.platform == "win32":
        return "C is compiled on Unix only"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "the CPU has no AVX-512, or PyTorch was told not to use it"
    found = _library(out_dim, dim)
    return found if isinstance(found, str) else None


def compiler() -> str | None:
    """Name the compiler that is used, with its version; None where nothing can be compiled."""
    return _version(_compiler()) if obstacle() is None else None


# ---------------------------------------------------------------------------------------------------------
# Compiling


@cache
def _library(out_dim: int, dim: int) -> ctypes.CDLL | str:
    """Load what was compiled for D and K, now if need be, or say why it cannot be."""
    if _stuck:
        return _stuck[0]
    try:
        compiler = _compiler()
        command = [*compiler, *FLAGS, f"-DD={out_dim}", f"-DK={dim}", f"-DTILE={TILE}"]
        told = chr(0).join([*command, _version(compiler), SOURCE.read_text(encoding="utf-8")])
        name = f"lanes-{out_dim}-{dim}-{hashlib.sha256(told.encode()).hexdigest()[:20]}"
        folder = _folder()
        if folder is not None:
            for each in folder.glob(f"{name}-*.so"):
                with suppress(OSError):
                    if _is_whole(each):
                        return _opened(each)
            with suppress(OSError):
                return _opened(_compile(command, folder, name))
        with tempfile.TemporaryDirectory(prefix="poecaps-") as passing:  # once loaded, the file is not needed
            return _opened(_compile(command, Path(passing), name))
    except LookupError as error:
        return str(error.args[0])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or [f"it ended with status {error.returncode}"]
        return f"the C compiler failed: {next((line for line in said if 'error' in line), said[0])}"
    except subprocess.TimeoutExpired as error:
        _stuck.append(f"the C compiler took longer than {error.timeout:.0f} s")
        return _stuck[0]
    except OSError as error:
        return f"nothing could be compiled: {error}"


_stuck: list[str] = []  # why no compiler is called again, if so


def _compiler() -> list[str]:
    """Return the command that compiles C: $CC, or the first of the usual names that is there."""
    told = os.environ.get("CC", "").strip()
    if told:
        try:
            command = shlex.split(told)
        except ValueError as error:
            raise LookupError(f"$CC is {told!r}, which is no command") from error
        if shutil.which(command[0]) is None:
            raise LookupError(f"$CC is {told!r}, which is not there")
        return command
    found = next((each for each in COMPILERS if shutil.which(each)), None)
    if found is None:
        raise LookupError("there is no C compiler")
    return [found]


def _version(compiler: list[str]) -> str:
    return _said([*compiler, "--version"]).partition("\n")[0]


def _folder() -> Path | None:
    """Return a folder of ours that nobody else may write to, for what is compiled; None where there can be none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = base if base.is_absolute() else Path("~/.cache").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("poecaps", "lanes"):
            folder /= name
            folder.mkdir(exist_ok=True, mode=0o700)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _compile(command: list[str], folder: Path, name: str) -> Path:
    """Compile into a file of its own first, for others may be at the same; its name ends with what it holds."""
    handle, passing = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _said([*command, str(SOURCE), "-o", passing, "-lm"])
        return Path(passing).replace(folder / f"{name}-{_digest(Path(passing))}.so")
    finally:
        Path(passing).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _is_whole(path: Path) -> bool:
    """Tell whether a file holds what its name says: one that was cut off would end the process that opens it."""
    return path.is_file() and path.stem.endswith(_digest(path))


def _said(command: list[str]) -> str:
    done = subprocess.run(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    try:
        library.job_size.restype = ctypes.c_long
        for name in ("route", "learn"):
            function = getattr(library, name)
            function.restype, function.argtypes = None, [ctypes.POINTER(_Job)]
    except AttributeError as error:
        raise OSError("what was made is not compiled C") from error
    if library.job_size() != ctypes.sizeof(_Job):
        raise OSError(f"{path} means something else by a job")
    return library


# ---------------------------------------------------------------------------------------------------------
# Running


class _Job(ctypes.Structure):
    """`struct job` of the C source, which says what each is."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("inputs", "experts", "images", "groups", "pieces")),
        *((name, ctypes.c_long) for name in ("iterations", "mixings", "experts_share", "cosine", "flat", "keeps")),
        *((name, ctypes.c_long) for name in ("first", "last")),
        *((name, ctypes.c_float) for name in ("sharpness", "share")),
        *((name, ctypes.c_void_p) for name in ("x", "w", "c")),
        *((name, ctypes.c_long) for name in ("c_image", "c_input", "c_expert")),
        *((name, ctypes.c_void_p) for name in ("standing", "slope", "on", "gap")),
        *((name, ctypes.c_void_p) for name in ("capsules", "model", "e", "total", "z", "y", "parts", "p", "q")),
        *((name, ctypes.c_void_p) for name in ("grown", "own")),
        *((name, ctypes.c_long) for name in ("own_size", "joined", "taken", "done")),
    )


class _Step:
    """One call: its sizes, its room, and the block of images that is being worked on."""

    def __init__(self, x: Tensor, weight: Tensor, options: Options, slope: Tensor | None = None) -> None:
        inputs, experts, out_dim, dim = weight.shape
        library = _library(out_dim, dim)
        assert isinstance(library, ctypes.CDLL), library  # noqa: S101 - `covers` was asked before
        self.library = library
        self.x, self.weight, self.slope = x.detach().contiguous(), weight.detach().contiguous(), slope
        self.block = min(BLOCK, max(1, ROOM // (4 * LANES * inputs * experts)) * LANES, max(1, len(x)))
        groups = -(-self.block // LANES)
        pieces = min(PIECES, max(1, inputs // PIECE))
        self.threads = min(torch.get_num_threads(), groups * max(pieces, experts))
        votes = 4 * LANES * inputs * out_dim
        keeps = options.inputs and options.iterations > 1 and votes <= min(KEPT, ALL_KEPT // self.threads)
        wide = -(-out_dim // LANES)
        own = inputs * (1 + (out_dim if keeps else 0)) + TILE * (out_dim + 1) * (1 if options.inputs else experts)
        sizes = {
            "capsules": groups * inputs * dim,
            "model": groups * inputs * dim,
            "e": groups * experts * inputs,
            "total": groups * experts,
            "z": groups * experts * out_dim,
            "y": groups * experts * out_dim,
            "parts": pieces * groups * experts * out_dim,
            "p": experts * groups * LANES * wide,
            "q": experts * groups * LANES * wide,
            "grown": inputs * experts * dim * wide if slope is not None and len(x) > self.block else 0,
            "own": self.threads * own,
        }
        self.room = _take(LANES * sum(sizes.values()))
        self.job = job = _Job(
            inputs=inputs,
            experts=experts,
            pieces=pieces,
            iterations=options.iterations,
            experts_share=not options.inputs,
            cosine=options.cosine,
            flat=options.cosine and options.sharpness * (options.iterations - 1) <= FLAT,
            keeps=keeps,
            sharpness=options.sharpness,
            share=1 / max(1, len(x)),
            w=self.weight.data_ptr(),
            slope=None if slope is None else slope.data_ptr(),
            own_size=own,
        )
        place = self.room.data_ptr()
        for name, size in sizes.items():
            setattr(job, name, place)
            place += 4 * LANES * size

    def blocks(self) -> Iterator[slice]:
        """Cut the images into blocks."""
        for start in range(0, len(self.x), self.block):
            yield slice(start, min(start + self.block, len(self.x)))

    def begin(self, part: slice, standing: Tensor) -> None:
        """Say which images come next, and where their preactivations (b, J, D) shall be written."""
        job = self.job
        job.images = part.stop - part.start
        job.groups = -(-job.images // LANES)
        job.x, job.standing = self.x[part].data_ptr(), standing.data_ptr()
        self.held = [standing]
        job.first, job.last = part.start == 0, part.stop == len(self.x)

    def tell(self, c: Tensor) -> None:
        """Say where coefficients (b, I, J) shall be written."""
        self.held.append(c)
        self.job.c = c.data_ptr()
        self.job.c_image, self.job.c_input, self.job.c_expert = c.stride()

    def learn(self, mixings: int, on: Tensor | None) -> Tensor:
        """Mix, add to the gradient, and return F(x) − F(x̃) of each image (b,), in float64."""
        job = self.job
        job.mixings = mixings
        lying = None if on is None else self._lying(on)
        job.on = None if lying is None else lying.data_ptr()
        gap = self.room.new_empty(job.groups, job.experts, LANES)
        job.gap = gap.data_ptr()
        self.held += [gap] if lying is None else [gap, lying]
        self.run("learn")
        return gap.sum(1, dtype=torch.float64).flatten()[: job.images]

    def _lying(self, on: Tensor) -> Tensor:
        """(b, J) → (groups, J, L)."""
        full = pad(on.to(torch.float32), (0, 0, 0, self.job.groups * LANES - self.job.images))
        return full.view(self.job.groups, LANES, -1).transpose(1, 2).contiguous()

    def run(self, name: str) -> None:
        """Do all tasks, on as many threads as PyTorch has, this one being one; none is waited for that did not come.

        An interrupt may come at any point, and then others are still at work. So each run has a job of its own, and
        whoever has taken it holds all memory that it points to.
        """
        job, function, held = _Job.from_buffer_copy(self.job), getattr(self.library, name), (self, *self.held)

        def work(_: object = held) -> None:
            function(job)

        others: list[Future[None]] = []
        try:
            for _ in range(1, self.threads):
                others.append(_pool().submit(work))  # noqa: PERF401 - none of those before may be lost
        except RuntimeError:  # there can be no more threads, or the interpreter is about to end
            pass
        work()
        for each in others:
            if not each.cancel():
                each.result()

    def end(self) -> None:
        """Leave the room to the next call."""
        _give_back(self.room)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), "poecaps-lanes")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)

_spare: list[Tensor] = []  # the room of the last call, if it is over: new memory is slow


def forget() -> None:
    """Give back the memory that is kept from one call to the next."""
    _spare.clear()


def _take(size: int) -> Tensor:
    with suppress(IndexError):
        room = _spare.pop()
        if size <= room.numel() <= 2 * size + 2**20:
            return room
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _give_back(room: Tensor) -> None:
    if not _spare and 4 * room.numel() <= SPARE:
        _spare.append(room)
