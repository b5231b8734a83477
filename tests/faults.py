"""Faults in the file layer: every call of `poecaps._files` to the system can be the one that fails.

`python -m tests.faults` lets a small training fail at every call, resumes it, and compares the end.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import ModelError, _files
from poecaps.data import DataError
from poecaps.options import ModelOptions
from poecaps.training import (
    Config,
    DecoderStage,
    EncoderStage,
    Progress,
    Stage,
    TrainingError,
    resume,
    train,
)
from poecaps.training.checkpoint import newest_checkpoint
from poecaps.training.run import LOCK
from tests.training.runs import Stop, metrics, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = ("open", "write", "ftruncate", "fsync", "replace", "link", "unlink", "mkdir")
READ = "read"  # any call that reads from an open file


class Faults:
    """Counts the calls of the file layer to the system, and replaces one of them by a fault.

    Parameters
    ----------
    at
        Index of the call that fails; None: no call does.
    fault
        Called instead of the call, with its name, a function that makes the call, and its
        arguments.
    """

    def __init__(self, at: int | None, fault: Callable[..., Any]) -> None:
        self.at, self.fault, self.names = at, fault, list[str]()
        # Files and folders with contents and names that are not on disk.
        self.dirty: set[tuple[int, int]] = set()

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call, or the fault."""
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            return self.fault(name, function, *arguments)
        return function(*arguments)

    def __getattr__(self, name: str) -> Any:
        """Return a function of `os`."""
        function = getattr(os, name)
        if name not in CALLS:
            return function
        return lambda *arguments: self._checked(name, function, *arguments)

    def _checked(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "replace":
            assert _identity(Path(arguments[0]).stat()) not in self.dirty, "renamed before fsync"
        if name == "fsync":
            self.dirty.discard(_identity(os.fstat(arguments[0])))
        result = self.call(name, function, *arguments)
        if name == "replace":
            self.dirty.add(_identity(Path(arguments[1]).parent.stat()))
        if name == "mkdir":
            self.dirty.add(_identity(Path(arguments[0]).parent.stat()))
        return result

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """Let the file layer call this object instead of the system."""
        faults = self

        class File(FileIO):
            def write(self, content: Any) -> int:
                faults.dirty.add(_identity(os.fstat(self.fileno())))
                return int(faults.call("write", super().write, content))

            def read(self, size: int | None = -1, /) -> Any:
                return faults.call(READ, super().read, size)

            def readall(self) -> Any:
                return faults.call(READ, super().readall)

            def readinto(self, buffer: Any, /) -> Any:
                return faults.call(READ, super().readinto, buffer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_files, "os", self)
            patch.setattr(_files, "FileIO", File)
            yield self


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def raises(error: BaseException) -> Callable[..., Any]:
    """Return a fault that raises an error."""

    def fault(*_: Any) -> None:
        raise error

    return fault


def killed(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Kill this process at a call; of a write, half is done."""
    if name == "write" and not isinstance(arguments[0], int):
        function(bytes(arguments[0][: len(arguments[0]) // 2]))
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[..., Any]] = {
    "killed": killed,
    "full disk": raises(OSError(errno.ENOSPC, "No space left on device")),
    "broken disk": raises(OSError(errno.EIO, "Input/output error")),
    "no memory": raises(MemoryError("no memory")),
}
READ_FAULTS = ("broken disk", "no memory")
# What a command reports on one line.
EXPECTED = (TrainingError, ModelError, DataError, OSError, MemoryError)


# A training of three stages


def images() -> np.ndarray[Any, Any]:
    """24 images of bars."""
    random, bars = np.random.default_rng(0), np.zeros((24, 12, 12), np.uint8)
    for bar in bars:
        row, column = random.integers(1, 8, 2)
        bar[row : row + 4, column : column + 2] = 255
    return bars


def config(data: Path, steps: int = 1) -> Config:
    """Two steps of the first stage, `steps` of each other, and a checkpoint after every step."""
    return Config(
        data=str(data),
        model=ModelOptions(
            features=4,
            kernel_size=3,
            capsule_dim=2,
            experts=((2, 2),),
            joint_components=2,
            expert_components=2,
        ),
        autoencoder=Stage(epochs=2),
        encoder=EncoderStage(epochs=steps, learning_rate=0.05, mixing="bernoulli"),
        decoder=DecoderStage(epochs=steps, learning_rate=0.03),
        batch_size=24,
        device="cpu",
        checkpoint_every=0,
    )


def assert_same_end(folder: Path, whole: Path) -> None:
    """Compare all that a run leaves with what an undisturbed one has left."""
    ours, theirs = weights(folder), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(folder) == metrics(whole)
    # The lock of a process that was killed is not locked.
    names = {file.name for file in folder.iterdir()} - {LOCK}
    assert names == {file.name for file in whole.iterdir()}, names


def status_of(function: Callable[[], object]) -> int:
    """Call a function, and return 0 if it ends without an error."""
    try:
        function()
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def status_of_child(function: Callable[[], object]) -> int:
    """Call a function in a forked process, and return its exit status."""
    child = os.fork()
    if child == 0:
        os._exit(status_of(function))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Let a training fail at every n-th call of the file layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--calls", choices=CALLS, nargs="+", default=CALLS)
    parser.add_argument("--every", type=int, default=1, help="fail at every n-th call only")
    parser.add_argument("--steps", type=int, default=1, help="steps of each stage but the first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory, is_lost = Path("/dev/shm"), False
    for fault in options.fault:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
            failed, lost = fail_everywhere(Path(root), fault, options)
        kinds = ", ".join(f"{failed.count(name)} {name}" for name in CALLS if name in failed)
        print(f"{fault} at {len(failed)} calls ({kinds}); lost: {len(lost)}")  # noqa: T201
        if fault in READ_FAULTS:
            with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
                reads, lost_by_reading = fail_every_read(Path(root), fault, options)
            print(f"{fault} at {reads} reads of a resumed run; lost: {len(lost_by_reading)}")  # noqa: T201
            lost += lost_by_reading
        for each in lost:
            print(f"  {each}")  # noqa: T201
        is_lost = is_lost or bool(lost)
    sys.exit(is_lost)


def fail_everywhere(
    root: Path, fault: str, options: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """Return the names of the calls that failed, and those after which a run was lost."""
    data, lost = root / "bars.npy", list[str]()
    folder, whole = root / "runs" / "run", root / "whole" / "run"  # and their parents are created
    np.save(data, images())
    with Faults(None, killed).installed() as faults:
        train(config(data, options.steps), whole)
    assert not faults.dirty, "the end is not flushed"
    assert faults.names.count("mkdir") == 2

    def start() -> None:
        with Faults(at, FAULTS[fault]).installed(), suppress(*EXPECTED):
            train(config(data, options.steps), folder)

    def finish() -> None:
        if newest_checkpoint(folder) is None:  # it has not got as far as a checkpoint
            train(config(data, options.steps), folder)
        else:
            resume(folder)
        assert_same_end(folder, whole)

    is_killed = fault == "killed"
    status, expected = (status_of_child, -signal.SIGKILL) if is_killed else (status_of, 0)
    chosen = [at for at, name in enumerate(faults.names) if name in options.calls]
    for at in chosen[:: options.every]:
        if status(start) != expected or status_of(finish) != 0:
            lost.append(f"call {at}, {faults.names[at]}")
        shutil.rmtree(folder.parent, ignore_errors=True)
    return [faults.names[at] for at in chosen[:: options.every]], lost


def fail_every_read(root: Path, fault: str, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Return how many reads of a resumed run failed, and those after which a run was lost.

    The run goes on, or ends with one of the expected errors, and then goes on without the fault.
    """
    data, folder, whole, begun = (root / name for name in ("bars.npy", "run", "whole", "begun"))
    np.save(data, images())
    train(config(data, options.steps), whole)
    with suppress(Stop):
        train(config(data, options.steps), begun, report=stop_in_the_last_stage)

    def go_on(at: int) -> None:
        with suppress(*EXPECTED), Faults(at, FAULTS[fault]).installed():
            resume(folder)
        resume(folder)
        assert_same_end(folder, whole)

    shutil.copytree(begun, folder)
    with Faults(None, killed).installed() as faults:
        resume(folder)
    chosen = [at for at, name in enumerate(faults.names) if name == READ][:: options.every]
    lost = list[str]()
    for number, at in enumerate(chosen):
        shutil.rmtree(folder)
        shutil.copytree(begun, folder)
        if status_of(partial(go_on, at)) != 0:
            lost.append(f"read {number * options.every}")
    return len(chosen), lost


def stop_in_the_last_stage(progress: Progress) -> None:
    """Stop a training, with checkpoints of earlier steps."""
    if progress.stage == "decoder 1":
        raise Stop


if __name__ == "__main__":
    main()
