"""Checkpoints: everything that a run needs to continue, in one safetensors file; two are kept."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from poecaps._files import DamagedError, LockedError, ModelError
from poecaps._json import dataclass_from_json
from poecaps.serialization import read_metadata, read_tensors, write_tensors
from poecaps.training.config import Config, changed_options
from poecaps.training.distributed import launch_id
from poecaps.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"  # the one before, in case the newest is damaged


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two steps."""

    config: Config
    """Options of the run."""
    stage: int = 0
    """Index of the current stage; the number of stages if all are finished."""
    step: int = 0
    """Steps of the stage that are done."""
    model: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the network; empty before the first step."""
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the optimizer, by the names of `poecaps.training.optim.optimizer_state`; empty at
    the start of a stage."""
    stage_state: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the stage beside its weights, such as its chains; empty at the start of a stage."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, is_ours: bool = False) -> None:
    """Write the checkpoint of a run into its folder, atomically, and keep the one before.

    If the newest one is damaged, it is replaced, and the one before it stays.

    Parameters
    ----------
    folder
        Folder of the run.
    checkpoint
        The state of the run.
    is_ours
        Whether this process has written the newest checkpoint, which is then not read again.
    """
    keeps_newest = is_ours or not _is_damaged(folder / CHECKPOINT)
    tensors = {f"model.{name}": value for name, value in checkpoint.model.items()}
    tensors |= {f"stage.{name}": value for name, value in checkpoint.stage_state.items()}
    about = {
        "config": asdict(checkpoint.config),
        "stage": checkpoint.stage,
        "step": checkpoint.step,
        "launch": launch_id(),
    }
    write_tensors(
        folder / CHECKPOINT,
        {**tensors, **checkpoint.optimizer},
        about,
        previous=folder / PREVIOUS if keeps_newest else None,
    )


def _is_damaged(file: Path) -> bool:
    """Return whether a file of tensors is not what was written, or the disk cannot read it."""
    try:
        read_tensors(file)
    except DamagedError:
        return True
    except FileNotFoundError:
        pass
    return False


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the file of the newest checkpoint in a folder, or None."""
    files = (folder / CHECKPOINT, folder / PREVIOUS)
    return next((file for file in files if file.is_file()), None)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint of the run in a folder; if the disk cannot, or it is damaged, the other.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ModelError
        If both are damaged, or it is not a checkpoint of a run, or of another format version.
    """
    newest, previous = newest_checkpoint(folder), folder / PREVIOUS
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot resume a run: there is no folder {folder}")
    if newest is None:
        raise FileNotFoundError(f"cannot resume the run in {folder}: it contains no {CHECKPOINT}")
    try:
        return _read(newest)
    except DamagedError as error:
        if newest == previous or not previous.is_file():
            raise
        checkpoint = _read(previous)
        cause, problem = error.__cause__, "is damaged"
        if isinstance(cause, OSError):
            problem = f"cannot be read ({cause.strerror})"
        warnings.warn(
            f"{newest} {problem}; resuming from the checkpoint before it, {previous.name}",
            CheckpointWarning,
            stacklevel=2,
        )
        return checkpoint


class CheckpointWarning(UserWarning):
    """The newest checkpoint of a run is damaged, so that the one before it is used."""


def _read(source: Path) -> Checkpoint:
    tensors, about = read_tensors(source)
    config = _config_from(about, source)
    try:
        stage, step = int(about["stage"]), int(about["step"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(NO_CHECKPOINT.format(source, error)) from error
    return Checkpoint(
        config,
        stage,
        step,
        model=_with_prefix(tensors, "model."),
        optimizer={name: value for name, value in tensors.items() if name.startswith("optimizer.")},
        stage_state=_with_prefix(tensors, "stage."),
    )


NO_CHECKPOINT = "{} is not the checkpoint of a run ({})"


def _config_from(about: Mapping[str, Any], source: Path) -> Config:
    """Return the options in the metadata of a checkpoint."""
    try:
        # A checkpoint that does not mention an option is older than the option.
        config = dataclass_from_json(Config, about["config"], defaults=True)
        config.validate()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(NO_CHECKPOINT.format(source, error)) from error
    return config


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


# Options that a new run replaces by values that fit its images, if they have their defaults.
CHOSEN = frozenset({"batch_size", "model.kernel_size", "model.margin", "model.even_overlap"})


def is_continued_by_restart(folder: Path, config: Config) -> bool:
    """Return whether processes that `torchrun` has restarted continue the run in a folder.

    They do if its checkpoint is from the same call of `torchrun`. Calls without an identifier
    cannot be told apart; then the run must have the options with which they were started.
    """
    for source in (folder / CHECKPOINT, folder / PREVIOUS):
        with suppress(FileNotFoundError, DamagedError):
            about = read_metadata(source)
            if launch_id():
                return bool(about.get("launch") == launch_id())
            return not about.get("launch") and _starts_as(config, _config_from(about, source))
    return False


def _starts_as(given: Config, found: Config) -> bool:
    """Return whether a run with the given options has those that were found in a checkpoint."""
    ours, theirs = (changed_options(each, "default") for each in (given, found))
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    return differing <= CHOSEN - ours.keys()


class CheckpointTimer:
    """Decides when the next checkpoint of a run is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Start the interval to the next checkpoint."""
        self.started = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the interval is over."""
        return time.monotonic() - self.started >= self.seconds


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Raise TrainingError, with a remedy, if a file of the run in a folder cannot be written."""
    try:
        yield
    except LockedError as error:
        raise TrainingError(f"{error}; wait for its end, or choose another folder") from error
    except OSError as error:
        remedy = "choose another folder"
        if newest_checkpoint(folder) is not None:
            remedy = "free some space and resume from the last checkpoint"
        raise TrainingError(f"cannot write to {folder} ({error}); {remedy}") from error
