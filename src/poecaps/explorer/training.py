"""A training that is watched in the explorer: one at a time, in a process of its own.

The process (`learner.py`) can be killed at any time, its time and memory are limited, and it writes
to a new temporary folder only. The folder is deleted when the next training starts or the explorer
ends; until then the trained model can be explored. The folder of an explorer that was killed is
deleted when another one starts (`sweep`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poecaps import data
from poecaps._files import lock
from poecaps.autoencoder import feature_grid
from poecaps.data import datasets
from poecaps.explorer import learner
from poecaps.explorer.render import as_pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poecaps.data import ImageSet
    from poecaps.explorer.render import ExplorerModel

Status = Literal["idle", "starting", "running", "finished", "stopped", "failed"]
RUNNING = ("starting", "running")

MIN_IMAGES, MAX_IMAGES = 100, 5000
MIN_EXPERTS, MAX_EXPERTS = 2, 20
MAX_SECONDS = 300.0
MAX_FEATURE_BYTES = 600_000_000  # of all images; there are fewer of them if they are large
MAX_POINTS = 2000  # of the curves
PREFIX = "poecaps-explorer-"  # of the names of the folders
LOCK = ".lock"  # in the folder, owned by the explorer
LOGGER = logging.getLogger(__name__)


class TrainingError(ValueError):
    """A training cannot be started."""


class UnknownSourceError(TrainingError):
    """There are no such images."""


@dataclass
class State:
    """What there is to see of a training."""

    run: int = 0
    """Number of the training; 0 before the first one."""
    status: Status = "idle"
    stages: list[str] = field(default_factory=list)
    stage: str | None = None
    done: float = 0.0
    """Share of the stage that is done."""
    seconds_left: float | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    """Points of the curves: stage, share of it, error, and error on held-out images."""
    pictures: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    """Name of the trained model, once it can be explored."""
    error: str | None = None


class LiveTraining:
    """Starts, watches and stops trainings.

    Parameters
    ----------
    models
        The models of the explorer, whose images can be learned from.
    on_finish
        Called with the folder of a trained model; returns the name under which it can be explored.
    max_seconds
        Time after which a training is stopped.
    """

    def __init__(
        self,
        models: Sequence[ExplorerModel],
        on_finish: Callable[[Path], str],
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.models = {each.name: each for each in models if _is_large_enough(each.images)}
        self.on_finish, self.max_seconds = on_finish, max_seconds
        self.lock = threading.Lock()
        self.state = State()
        self.process: subprocess.Popen[str] | None = None
        self.folder: Path | None = None
        self.resources = ExitStack()  # the folder, and the lock in it

    def sources(self) -> dict[str, str]:
        """Return the names of images to learn from, each with a label."""
        samples = [name for name in datasets.NAMES if name.endswith("-sample")]
        own = {f"model:{name}": f"{name}, as in Encode" for name in self.models}
        return {**{name: f"{name} of the package" for name in samples}, **own}

    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """Return the state, with the points from this one on."""
        with self.lock:
            first = min(since, len(self.state.points))
            return {**vars(self.state), "first": first, "points": self.state.points[first:]}

    def start(self, source: str, images: int, experts: int, seed: int) -> None:
        """Start a training.

        Parameters
        ----------
        source
            Name of the images, one of `sources`.
        images
            Number of images; fewer if there are fewer, or if they are large.
        experts
            Number of experts.
        seed
            Seed of all random numbers.

        Raises
        ------
        UnknownSourceError
            If there is no such source.
        TrainingError
            If another training is running, or if this one cannot start.
        """
        pixels = self._pixels(source, images)
        with self.lock:
            if self.state.status in RUNNING:
                raise TrainingError("a model is being trained already; stop it first")
            self._remove_folder()
            try:
                self.folder = folder = self._make_folder()
                np.save(folder / learner.IMAGES, pixels)
                self.process = process = self._launch(folder)
            except OSError as error:
                self._remove_folder()
                raise TrainingError(f"the training cannot start: {error}") from error
            self.state = State(self.state.run + 1, "starting")
            run = self.state.run
        assert process.stdin is not None  # noqa: S101 (a pipe)
        with suppress(BrokenPipeError):  # `_watch` sees that the process has ended
            process.stdin.write(json.dumps({"experts": experts, "seed": seed}) + "\n")
            process.stdin.flush()
        timer = threading.Timer(self.max_seconds, self._time_out, (run,))
        timer.daemon = True
        timer.start()
        watched = (run, folder, process, timer)
        threading.Thread(target=self._watch, args=watched, daemon=True).start()

    def stop(self) -> None:
        """Stop the training, if one is running."""
        self._end(self.state.run, "stopped", None)

    def close(self) -> None:
        """Stop the training, and delete its folder."""
        self.stop()
        with self.lock:
            self._remove_folder()

    # ----------------------------------------------------------------------------------------------

    def _pixels(self, source: str, count: int) -> Any:
        """Return some images of a source, spread over it: (N, H, W, C), uint8."""
        if source not in self.sources():
            raise UnknownSourceError(
                f"there are no images with this name; there are {', '.join(self.sources())}"
            )
        images: ImageSet | None
        if source.startswith("model:"):
            images = self.models[source.removeprefix("model:")].images
        else:
            images = data.load(source, split="train")
        assert images is not None  # noqa: S101 (sources have images)
        options = learner.config(MIN_EXPERTS, 0).model
        kernel = min(options.kernel_size, max(1, min(images.shape[1:]) // 3))
        rows, columns = feature_grid(kernel, (images.shape[1], images.shape[2]))
        most = MAX_FEATURE_BYTES // (8 * rows * columns * options.features)
        count = max(MIN_IMAGES, min(count, len(images), most))
        chosen = np.linspace(0, len(images) - 1, count).astype(int)
        return as_pixels(images.batch(chosen))

    def _make_folder(self) -> Path:
        temporary = tempfile.TemporaryDirectory(prefix=PREFIX)
        folder = Path(self.resources.enter_context(temporary))
        self.resources.enter_context(lock(folder / LOCK))
        return folder

    def _launch(self, folder: Path) -> subprocess.Popen[str]:
        hidden = ("POECAPS_TOKEN",)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["OMP_NUM_THREADS"] = "1"
        return subprocess.Popen(  # noqa: S603 (no part of it comes from a request)
            [sys.executable, "-m", "poecaps.explorer.learner", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def _watch(
        self, run: int, folder: Path, process: subprocess.Popen[str], timer: threading.Timer
    ) -> None:
        """Follow a process until it ends."""
        assert process.stdout is not None  # noqa: S101 (a pipe)
        finished = False
        for line in process.stdout:
            try:
                seen = json.loads(line, parse_constant=lambda _: None)  # a response has no NaN
            except ValueError:  # a part of a line: the process was killed
                continue
            if "log" in seen:
                LOGGER.error("the training failed: %s", seen["log"])
            finished = finished or "finished" in seen
            with self.lock:
                if self._is_running(run):
                    self._update(seen)
        process.wait()
        timer.cancel()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # of what was not sent
                    pipe.close()
        name = self._finish(folder) if finished and self._is_running(run) else None
        with self.lock:
            if not self._is_running(run):
                return
            self.state.model = name
            self.state.status = "failed" if name is None else "finished"
            if name is None:
                self.state.error = "the training ended early, perhaps for want of memory"

    def _is_running(self, run: int) -> bool:
        state = self.state
        return state.run == run and state.status in RUNNING

    def _finish(self, folder: Path) -> str | None:
        """Return the name under which the trained model can be explored, or None if it cannot."""
        try:
            return self.on_finish(folder / learner.MODEL)
        except Exception:
            LOGGER.exception("the trained model cannot be loaded")
            return None

    def _update(self, seen: Mapping[str, Any]) -> None:
        """Add what there is to see; the lock is held."""
        state = self.state
        if "error" in seen:
            state.status, state.error = "failed", seen["error"]
            return
        state.status = "running"
        state.stages = seen.get("stages", state.stages)
        state.stage, state.done = seen.get("stage", state.stage), seen.get("done", state.done)
        state.seconds_left = seen.get("seconds_left", state.seconds_left)
        state.pictures = seen.get("pictures", state.pictures)
        if "point" in seen and len(state.points) < MAX_POINTS:
            state.points.append(seen["point"])

    def _time_out(self, run: int) -> None:
        self._end(run, "stopped", f"stopped after {self.max_seconds:.0f} seconds, the limit")

    def _end(self, run: int, status: Status, error: str | None) -> None:
        with self.lock:
            if not self._is_running(run):
                return
            self.state.status, self.state.error = status, error
            if self.process is not None:
                self.process.kill()

    def _remove_folder(self) -> None:
        """Delete the folder, once the process that writes to it has ended; the lock is held."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.resources.close()
        self.folder = None


def sweep() -> None:
    """Delete the folders that killed explorers left; that of a living one is locked, and stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            is_own = not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()
            if is_own and not folder.is_symlink() and (folder / LOCK).is_file():
                with lock(folder / LOCK):
                    pass
                shutil.rmtree(folder)


def _is_large_enough(images: ImageSet | None) -> bool:
    return images is not None and len(images) >= MIN_IMAGES
