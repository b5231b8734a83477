"""The process that trains a model for the explorer: ``python -m poecaps.explorer.learner FOLDER``.

It reads its options from standard input, trains on the images in FOLDER, and writes what there is
to see to standard output, one JSON object per line. It ends when its standard input is closed, so
that it does not outlive the explorer. The trained network is saved in FOLDER.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import functional as F
from poecaps.code_density import CodeDensity
from poecaps.data import ImageSet, hold_out
from poecaps.training import TrainingError
from poecaps.training.checkpoint import Checkpoint
from poecaps.training.config import fast
from poecaps.training.distributed import Distributed
from poecaps.training.interrupts import Interrupts
from poecaps.training.run import options_for
from poecaps.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from poecaps.training import Config, Progress

    Emit = Callable[[Mapping[str, Any]], None]

IMAGES = "images.npy"  # in the folder
MODEL = "model"  # folder of the trained network, in the folder
SHOWN = 10  # images that are shown with their reconstructions
WATCHED = 500  # training images whose codes are looked at
PICTURES_INTERVAL, PROGRESS_INTERVAL = 1.0, 0.2  # seconds
MAX_MEMORY = 4 * 2**30  # bytes of data, where the system can limit them
NICENESS = 5  # so that the explorer stays quick


def config(experts: int, seed: int) -> Config:
    """Return the options of a small model with so many experts."""
    small = fast()
    return replace(
        small,
        model=replace(small.model, experts=((experts, 16),), joint_components=100),
        seed=seed,
        device="cpu",
        checkpoint_every=3600.0,
    )


class Watcher:
    """Looks at a network while it learns.

    Parameters
    ----------
    emit
        Called with what there is to see.
    train, held_out
        Images that the network learns from, and others.
    """

    def __init__(self, emit: Emit, train: ImageSet, held_out: ImageSet) -> None:
        self.emit = emit
        self.watched = train.batch(
            np.linspace(0, len(train) - 1, min(WATCHED, len(train))).astype(int)
        )
        self.shown = held_out.batch(range(min(SHOWN, len(held_out))))
        self.trainer: Trainer | None = None
        self.density: CodeDensity | None = None
        self.last_pictures = self.last_progress = -1e9
        self.pictures = {"images": _encoded(self.shown)}

    def report(self, progress: Progress) -> None:
        """Emit the progress, new metrics and, from time to time, new pictures."""
        now, is_end = time.monotonic(), progress.step == progress.steps
        share = progress.step / max(progress.steps, 1)
        seen: dict[str, Any] = {}
        if progress.measured:
            seen["point"] = {
                "stage": progress.stage,
                "share": share,
                "error": progress.metrics.get("reconstruction_error"),
                "held_out": progress.metrics.get("held_out_error"),
            }
        if progress.step and (is_end or now - self.last_pictures >= PICTURES_INTERVAL):
            self._look(progress)
            seen["pictures"] = self.pictures
            self.last_pictures = time.monotonic()
        if seen or now - self.last_progress >= PROGRESS_INTERVAL:
            left = progress.run_seconds_left if progress.images_per_second else None
            self.emit({"stage": progress.stage, "done": share, "seconds_left": left, **seen})
            self.last_progress = now

    @torch.no_grad()
    def _look(self, progress: Progress) -> None:
        """Compute what the network of a stage has learned so far."""
        assert self.trainer is not None  # noqa: S101 (set before the training starts)
        network, module = self.trainer.network, self.trainer.stages[progress.number - 1].module
        module.eval()
        if progress.stage == "autoencoder":
            size = (self.shown.shape[2], self.shown.shape[3])
            features = network.autoencoder.encode(self.shown)
            self._add("reconstructions", network.autoencoder.decode(features, size))
        elif progress.stage.startswith("encoder"):
            self._add("experts", self._won())
        else:
            self._add("reconstructions", self._decode(progress, network.encode(self.shown)))
            self._add("draws", self._decode(progress, self._draws()))
        module.train()

    def _decode(self, progress: Progress, code: Tensor) -> Tensor:
        """Decode codes, by the pixel decoder once it learns: (B, J, D) → (B, C, H, W)."""
        assert self.trainer is not None  # noqa: S101 (set before the training starts)
        network, x = self.trainer.network, code
        for decoder in reversed(network.decoders):
            x = decoder(x)
        activations = network.preprocessing.from_capsules(x)
        return torch.sigmoid(network.logits(activations, tied=progress.stage != "pixel decoder"))

    def _won(self) -> Tensor:
        """Return the mean of the images that each expert wins: (J, C, H, W)."""
        assert self.trainer is not None  # noqa: S101 (set before the training starts)
        winner = self.trainer.network.encode(self.watched).norm(dim=-1).argmax(1)
        experts = self.trainer.network.architecture.experts[-1][0]
        total = torch.zeros(experts, *self.watched.shape[1:]).index_add_(0, winner, self.watched)
        count = torch.bincount(winner, minlength=experts).clamp(min=1)
        mean: Tensor = total / count.view(-1, 1, 1, 1)
        return mean

    def _draws(self) -> Tensor:
        """Draw a code of each expert, always with the same random numbers: (J, J, D)."""
        assert self.trainer is not None  # noqa: S101 (set before the training starts)
        network = self.trainer.network
        experts, dim = network.architecture.experts[-1]
        if self.density is None:  # the encoder does not change any more
            self.density = CodeDensity(experts, dim, joint_components=1, expert_components=5)
            codes = network.encode(self.watched)
            self.density.fit(codes, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1)
        each = [self.density.sample(1, "learned", j, generator) for j in range(experts)]
        return F.squash(torch.cat(each))

    def _add(self, name: str, images: Tensor) -> None:
        self.pictures[name] = _encoded(images)


def _encoded(images: Tensor) -> dict[str, Any]:
    """Encode images (B, C, H, W) from 0 to 1 for JSON."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    text = base64.b64encode(pixels.numpy().tobytes()).decode()
    return {"shape": list(images.shape[1:]), "count": len(images), "pixels": text}


def learn(folder: Path, experts: int, seed: int, emit: Emit) -> None:
    """Train on the images in a folder, and save the network there."""
    images = ImageSet(np.load(folder / IMAGES), source="the explorer")
    train, held_out = hold_out(images)
    assert held_out is not None  # noqa: S101 (there are at least 100 images)
    watcher = Watcher(emit, train, held_out)
    options = options_for(config(experts, seed), train)
    watcher.trainer = trainer = Trainer(
        options,
        train,
        folder / MODEL,
        device=torch.device("cpu"),
        distributed=Distributed(),
        interrupts=Interrupts(),
        report=watcher.report,
        held_out=held_out,
    )
    (folder / MODEL).mkdir()
    emit({"stages": [stage.name for stage in trainer.stages]})
    trainer.fit(Checkpoint(options))
    emit({"finished": True})


def main() -> None:
    """Train as standard input says."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _limit()

    def emit(seen: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(seen) + "\n")

    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    torch.set_num_threads(1)
    try:
        learn(Path(sys.argv[1]), options["experts"], options["seed"], emit)
    except (TrainingError, ValueError, MemoryError) as error:
        emit({"error": str(error) or type(error).__name__})
    except Exception:
        emit({"error": "internal error of the training; the terminal of the explorer has details"})
        emit({"log": traceback.format_exc()})
    sys.stdout.flush()
    os._exit(0)  # the thread that reads the standard input cannot be joined


def _limit() -> None:
    """Limit the memory, and leave the processor to others."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MAX_MEMORY if most == resource.RLIM_INFINITY else min(MAX_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _end_with_input() -> None:
    """End this process when the explorer has ended."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
