"""Train in two processes that fail at random, and compare the end with an undisturbed run.

``python tools/soak.py --minutes 10`` trains a small model with `torchrun` again and again. Some
seconds after every start of the processes, a fault is injected:

- kill: one of the processes is killed (SIGKILL);
- stop: one of the processes is stopped (SIGSTOP) and stays so until torchrun kills it;
- pause: one of the processes is stopped for a moment, shorter than ``--process-timeout``;
- crash: torchrun and all processes are killed at once, as by a power cut;
- cut: the network of the processes is switched off for some seconds. It is a network namespace of
  its own, so that nothing else on the machine is affected; without the privilege to create one
  (``unshare --user --net``), this fault is left out.

torchrun restarts the processes (``--max-restarts``). If it gives up or was killed, the run is
continued by ``poecaps train --resume``. A finished run must have the weights and the metrics of the
undisturbed run, bit for bit. The exit status is 1 after any difference, hang or traceback, and if
nothing was tested: no run was finished, or no fault was injected. The time begins after the
undisturbed run; a run that is not finished half an hour after its end is given up as a failure.
The seed is printed. It determines the order of the faults, but what they hit depends on the speed
of the machine. SIGTERM and Ctrl-C end torchrun and its processes, too.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import tyro

from poecaps import CapsuleNetwork
from poecaps.training.checkpoint import newest_checkpoint
from poecaps.training.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESS_TIMEOUT = 5  # seconds for which a process waits for the other one
GRACE = 3  # seconds after which torchrun kills a stopped process; 30 without this program
CUT_SECONDS = 8.0  # longer than PROCESS_TIMEOUT
MAX_SECONDS = 300.0  # without progress, over all calls of torchrun: a hang
MAX_FAULTS = 3  # without progress; then the next fault waits, for a start may take longer than they
EXTRA_SECONDS = 1800.0  # for the last run, after the given time

# torchrun, with a shorter grace period.
TORCHRUN = f"""
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext
PContext.close.__defaults__ = (None, {GRACE})
run.main()
"""
OPTIONS = shlex.split("""
    --model.features 8 --model.capsule-dim 4 --model.experts 4 5 3 4 --model.joint-components 4
    --model.equalized-components 2 --model.normalize inputs --model.sharpness 5 --model.scale 0.4
    --autoencoder.epochs 200 --encoder.epochs 100 --encoder.learning-rate 0.05
    --encoder.mixing bernoulli --encoder.winners 2 --decoder.epochs 100 --decoder.learning-rate 0.03
    --decoder.single-expert-share 0.5 --pixel-decoder.epochs 100 --pixel-decoder.learning-rate 1e-3
    --batch-size 16 --device cpu --precision float32 --checkpoint-every 0.5 --no-figures --quiet
""")


class Soak:
    """A run that is disturbed until it is finished.

    Parameters
    ----------
    data
        The training images.
    choose
        Source of the random faults.
    isolated
        Whether to run in a network namespace, so that the network can be cut.
    """

    def __init__(self, data: Path, choose: random.Random, *, isolated: bool) -> None:
        self.data, self.choose, self.isolated = data, choose, isolated
        self.kinds = ("kill", "stop", "pause", "crash", *(("cut",) if isolated else ()))
        self.faults: Counter[str] = Counter()
        self.starts = self.tracebacks = 0
        self.deadline = math.inf  # when a run is given up

    def start(self, folder: Path, log: Path, *, restarts: int) -> subprocess.Popen[bytes]:
        """Start a run, or continue it."""
        begun = newest_checkpoint(folder) is not None
        start = ["--data", str(self.data), "--out", str(folder), *OPTIONS]
        resume = ["--resume", str(folder), "--no-figures", "--quiet"]
        command = [
            *(sys.executable, "-c", TORCHRUN, "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", str(restarts), "--local-addr", "127.0.0.1"),
            *("-m", "poecaps", "train", *(resume if begun else start)),
            *("--process-timeout", str(PROCESS_TIMEOUT)),
        ]
        if self.isolated:
            up = 'ip link set lo up && exec "$@"'
            command = ["unshare", "--map-root-user", "--net", "sh", "-c", up, "sh", *command]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.starts += 1
        with log.open("ab") as file:
            return subprocess.Popen(  # noqa: S603 (a fixed program)
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def train(self, folder: Path, *, disturbed: bool) -> None:
        """Train to the end; raise RuntimeError if nothing happens for a long time."""
        log, clock = folder.with_suffix(".log"), _Clock(folder, self.deadline)
        while not _is_finished(folder):
            clock.check()
            process = self.start(folder, log, restarts=3 if disturbed else 0)
            try:
                self._disturb_until_end(process, clock, disturbed=disturbed)
            finally:
                _kill_group(process)
            if not disturbed and process.returncode:
                raise RuntimeError(f"the undisturbed run failed:\n{log.read_text()[-2000:]}")
        # torchrun shows tracebacks of its own when it gives up.
        self.tracebacks += len(re.findall(r'File ".*/poecaps/', log.read_text(errors="replace")))

    def _disturb_until_end(
        self, process: subprocess.Popen[bytes], clock: _Clock, *, disturbed: bool
    ) -> None:
        next_fault = time.monotonic() + self.choose.uniform(3, 10)
        while process.poll() is None:
            time.sleep(0.05)
            clock.check()
            is_due = disturbed and time.monotonic() > next_fault and clock.faults < MAX_FAULTS
            if is_due and (workers := _workers(process)):
                self._inject(process, workers)
                clock.faults += 1
                next_fault = time.monotonic() + self.choose.uniform(3, 10)

    def _inject(self, process: subprocess.Popen[bytes], workers: list[int]) -> None:
        kind, worker = self.choose.choice(self.kinds), self.choose.choice(workers)
        try:
            if kind == "kill":
                os.kill(worker, signal.SIGKILL)
            elif kind == "stop":
                os.kill(worker, signal.SIGSTOP)
            elif kind == "pause":
                os.kill(worker, signal.SIGSTOP)
                time.sleep(self.choose.uniform(0.1, 0.5) * PROCESS_TIMEOUT)
                os.kill(worker, signal.SIGCONT)
            elif kind == "crash":
                _kill_group(process)
            else:
                _switch_network(process, "down")
                time.sleep(CUT_SECONDS)
                _switch_network(process, "up")
        except (ProcessLookupError, subprocess.CalledProcessError):
            return  # the run had just ended
        self.faults[kind] += 1


class _Clock:
    """The time for which a run makes no progress, however often it is started.

    Parameters
    ----------
    folder
        Folder of the run.
    deadline
        When the run is given up, whether it makes progress or not.
    """

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline
        self.seen, self.since = _progress(folder), time.monotonic()
        self.faults = 0  # since there was progress

    def check(self) -> None:
        """Raise RuntimeError if there was no progress for a long time, or at the deadline."""
        now = time.monotonic()
        if (progress := _progress(self.folder)) != self.seen:
            self.seen, self.since, self.faults = progress, now, 0
        if now - self.since > MAX_SECONDS:
            raise RuntimeError(f"no progress for {MAX_SECONDS:.0f} s: hung after {self.seen}")
        if now > self.deadline:
            raise RuntimeError(f"{self.folder.name} is not finished in time")


def _workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that train: the children of torchrun."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        return [int(each) for each in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its processes, which have a session of their own, also stopped ones."""
    workers = _workers(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in workers:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that what was started is ended."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _switch_network(process: subprocess.Popen[bytes], state: str) -> None:
    """Switch the only network device of the run on or off."""
    command = ["nsenter", "--target", str(process.pid), "--user", "--net", "--preserve-credentials"]
    subprocess.run(  # noqa: S603 (a fixed program)
        [*command, "ip", "link", "set", "lo", state], check=True, capture_output=True
    )


def _can_isolate() -> bool:
    """Return whether this user may create a network namespace."""
    command = ["unshare", "--map-root-user", "--net", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0  # noqa: S603
    except FileNotFoundError:
        return False


def _is_finished(folder: Path) -> bool:
    try:
        return bool(_record(folder).get("finished"))
    except FileNotFoundError:
        return False


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def _progress(folder: Path) -> int:
    """Return a number that changes while a run makes progress."""
    newest = newest_checkpoint(folder)
    try:
        return 0 if newest is None else newest.stat().st_mtime_ns
    except FileNotFoundError:  # replaced meanwhile
        return 0


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: each[name] for name in each if name != "images_per_second"} for each in lines]


def _is_same(first: Path, second: Path) -> bool:
    ours, theirs = (CapsuleNetwork.load(each).state_dict() for each in (first, second))
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return same and _metrics(first) == _metrics(second)


def _make_images(path: Path) -> None:
    """Write 96 pictures of bars, (96, 20, 19)."""
    numbers, images = np.random.default_rng(0), np.zeros((96, 20, 19), np.uint8)
    for image in images:
        row, column = numbers.integers(2, 12, 2)
        image[row : row + 6, column : column + 2 + 3 * numbers.integers(2)] = 255
    np.save(path, images)


def main(*, minutes: float = 10.0, seed: int | None = None) -> int:
    """Disturb runs for some minutes; return 1 if anything was lost, or nothing was tested.

    Parameters
    ----------
    minutes
        After this time, which begins after the undisturbed run, no further run is started.
    seed
        Seed of the faults; by default a random one.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    isolated = _can_isolate()
    print(f"seed {seed}; network cuts: {'yes' if isolated else 'no, not permitted'}", flush=True)
    same, runs, attempts = 0, 0, 0
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="poecaps-soak-") as name:
        folder = Path(name)
        _make_images(folder / "bars.npy")
        soak = Soak(folder / "bars.npy", random.Random(seed), isolated=isolated)  # noqa: S311
        soak.train(folder / "undisturbed", disturbed=False)
        soak.starts = 0
        end = time.monotonic() + 60 * minutes
        soak.deadline = end + EXTRA_SECONDS
        while time.monotonic() < end:
            runs += 1
            soak.train(folder / f"run-{runs}", disturbed=True)
            same += _is_same(folder / f"run-{runs}", folder / "undisturbed")
            attempts += len(_record(folder / f"run-{runs}")["starts"])
            faults = ", ".join(f"{count} {kind}" for kind, count in sorted(soak.faults.items()))
            print(
                f"{runs} runs, {same} identical to the undisturbed one; faults: {faults}; "
                f"{soak.starts} calls of torchrun, {attempts} starts of the training; "
                f"{soak.tracebacks} tracebacks",
                flush=True,
            )
    if not (runs and soak.faults):
        print("no fault was injected: nothing was tested", file=sys.stderr)
        return 1
    return int(same < runs or soak.tracebacks > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
