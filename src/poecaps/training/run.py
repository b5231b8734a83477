"""Starting and resuming training runs."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps._devices import find_device
from poecaps._files import lock, make_folder, sweep, temporary_files
from poecaps.autoencoder import minimum_image_size
from poecaps.data import DataError, ImageSet, MissingSplitError, from_dataset, hold_out, load
from poecaps.data.buffers import require_uncut
from poecaps.data.datasets import NAMES
from poecaps.data.folder import suppress_skipped_warnings
from poecaps.data.mapped import is_on_hub, require_asked_for
from poecaps.network import CapsuleNetwork
from poecaps.options import ModelOptions
from poecaps.training import origin
from poecaps.training import record as run_record
from poecaps.training.checkpoint import (
    Checkpoint,
    is_continued_by_restart,
    newest_checkpoint,
    read_checkpoint,
    write_errors,
)
from poecaps.training.config import default
from poecaps.training.distributed import (
    Distributed,
    is_main_process,
    process_group,
    restart_count,
)
from poecaps.training.interrupts import Interrupts
from poecaps.training.metrics import METRICS, last_values
from poecaps.training.seeds import Stream, make_generator
from poecaps.training.trainer import Trainer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.utils.data import Dataset

    from poecaps._progress import Report as Counted
    from poecaps.data.idx import Split
    from poecaps.training.config import Config
    from poecaps.training.progress import Progress

    Report = Callable[[Progress], None]
    Found = Callable[[ImageSet], None]

# Pixels at the border vary if their variance over the images is at least this share of that of all
# pixels: 0 for MNIST, 0.2 for Fashion-MNIST, 1.1 for the photographs of CIFAR-10.
BORDER_SHARE, BORDER_IMAGES = 0.5, 1000
SMALL_BORDER_SHARE = 0.1  # of images with smaller filters, of which one row is a large part

LOCK = ".lock"  # in the folder of a run, owned by the process that trains


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run."""

    network: CapsuleNetwork
    """The trained network, frozen."""
    folder: Path
    """Folder of the run."""
    config: Config
    """Options of the run."""
    data: ImageSet | None
    """Training images; None if the run was finished already, so that they were not loaded."""
    held_out: ImageSet | None
    """Test images, or held-out images of a folder; None if there are none, or like `data`."""
    metrics: dict[str, dict[str, float]]
    """Last value of each metric of each stage; empty in all but the main process."""
    record: dict[str, Any]
    """Contents of `run.json`; empty in all but the main process."""
    seconds: float
    """Wall-clock time of this call, including the loading of the images."""
    resumed_finished: bool = False
    """Whether the run was finished already, so that its network was only loaded."""


def train(
    config: Config | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    data: ImageSet | Dataset[Any] | None = None,
    report: Report | None = None,
    found: Found | None = None,
) -> CapsuleNetwork:
    """Train a network and save it in a folder.

    The folder receives the network (`config.json`, `model.safetensors`), a record of the run
    (`run.json`: options, versions, fingerprint of the data, command), its running metrics
    (`metrics.jsonl`) and its last checkpoint. An interrupt (Ctrl-C) takes effect after the current
    step, once a checkpoint is saved.

    The returned network is frozen, like one from `poecaps.load`; `network.requires_grad_()`
    unfreezes it.

    Started by `torchrun`, all processes train one network together, each on its share of every
    batch.

    Parameters
    ----------
    config
        Options of the run; by default those of the preset ``default``.
    folder
        Folder for the results. It must be new or empty; to continue a run, use `resume`. By default
        the first of ``runs/DATA``, ``runs/DATA-2``, … that does not exist.
    data
        Training images, instead of those that `config.data` names: an `ImageSet`, or any map-style
        dataset, such as one of torchvision, which `poecaps.data.from_dataset` reads.
    report
        Called with a `poecaps.training.Progress` after every step.
    found
        Called once with the images, before the training starts. Without it, a warning lists the
        files of a folder that were skipped.

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.
    FileExistsError
        If the folder is not empty.
    TrainingError
        If training diverges, a file cannot be written, or another process trains in the folder;
        the last checkpoint stays intact.
    """
    config = default() if config is None else config
    images = _as_images(data, config)
    if folder is None:
        folder = unused_folder(config.data if images is None else images.source)
    return run_training(config, folder, data=images, report=report, found=found).network


def unused_folder(source: str) -> Path:
    """Return the first of runs/DATA, runs/DATA-2, … that does not exist.

    Raises
    ------
    ValueError
        If several processes train together, for each of them might find another one.
    """
    if Distributed.from_environment().size > 1:
        raise ValueError("several processes need a common folder; give it as folder, or with --out")
    name = Path(source.replace(":", "-")).stem or "images"
    names = (
        Path("runs") / (name if count == 1 else f"{name}-{count}") for count in range(1, 10**6)
    )
    return next(folder for folder in names if not folder.exists())


def _as_images(data: ImageSet | Dataset[Any] | None, config: Config) -> ImageSet | None:
    """Return images; those of a dataset are read, in the size that the options ask for."""
    if data is None or isinstance(data, ImageSet):
        return data
    return from_dataset(data, size=config.size, channels=config.channels)


def resume(
    folder: str | os.PathLike[str],
    *,
    device: str | None = None,
    process_timeout: float | None = None,
    data: ImageSet | str | None = None,
    report: Report | None = None,
    found: Found | None = None,
) -> CapsuleNetwork:
    """Continue a run from its last checkpoint.

    On a CPU, with the same number of threads and the same versions of the software, the result is
    bit-identical to that of an uninterrupted run. The network of a finished run is only loaded.

    The last two checkpoints are kept. If the newest is damaged, a warning says so, and the run
    continues from the one before.

    Parameters
    ----------
    folder
        Folder of the run.
    device
        Device to continue on; by default the one in the options of the run.
    process_timeout
        Seconds for which several processes wait for one of them; by default as in the options of
        the run.
    data
        The training images, if the run was started with images in memory; or the name of its
        dataset of the Hugging Face Hub, which is not downloaded unless you name it.
    report
        Called with a `poecaps.training.Progress` after every step.
    found
        Called once with the images, before the training continues. Without it, a warning lists the
        files of a folder that were skipped.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint in the folder.
    ValueError
        If `data` is not the name of the data of the run, or must be, and is missing.
    ModelError
        If both checkpoints are damaged, or the checkpoint was not written by poecaps, is of
        another format version, or is not from the run in `run.json`.
    TrainingError
        As `train`.
    poecaps.data.DataError
        If the images differ from those with which the run was started.
    """
    return resume_training(
        folder,
        device=device,
        process_timeout=process_timeout,
        data=data,
        report=report,
        found=found,
    ).network


def run_training(
    config: Config,
    folder: str | os.PathLike[str],
    *,
    data: ImageSet | None = None,
    report: Report | None = None,
    found: Found | None = None,
    reading: Counted | None = None,
    encoding: Counted | None = None,
) -> TrainingResult:
    """Train a network as `train` does, and return more than the network.

    `reading` is called with the number of files of a folder that were read, and of all files;
    `encoding` with the number of images whose features or codes a stage has computed before it
    learns, and of all images.
    """
    config.validate()
    if data is None:
        path = None if config.data_path is None else absolute_path(config.data_path)
        config = replace(config, data=absolute_path(config.data), data_path=path)
    else:
        config = replace(config, data=data.source, data_path=None, size=None, channels=None)
    folder = Path(folder)
    if restart_count() > 0 and is_continued_by_restart(folder, config):
        asked = config.data if data is None else data
        return resume_training(
            folder, data=asked, report=report, found=found, reading=reading, encoding=encoding
        )
    with _owned(folder, create=True):
        start = Checkpoint(config)
        counters = (reading, encoding)
        return _run(start, folder, data, report, found, *counters, is_new=True, is_asked_for=True)


def resume_training(
    folder: str | os.PathLike[str],
    *,
    device: str | None = None,
    process_timeout: float | None = None,
    data: ImageSet | str | None = None,
    report: Report | None = None,
    found: Found | None = None,
    reading: Counted | None = None,
    encoding: Counted | None = None,
) -> TrainingResult:
    """Continue a run as `resume` does, and return more than the network."""
    started, folder = time.perf_counter(), Path(folder)
    given = {"device": device, "process_timeout": process_timeout}
    changes: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    images, asked = (None, data) if isinstance(data, str) else (data, None)
    if not is_finished(folder):
        with _owned(folder):
            checkpoint = read_checkpoint(folder)
            config = replace(checkpoint.config, **changes)
            config.validate()
            _require_name(folder, config, asked)
            if images is None:
                require_asked_for(folder, config.data, asked)
            checkpoint = replace(checkpoint, config=config)
            named = asked is not None
            counters = (reading, encoding)
            return _run(checkpoint, folder, images, report, found, *counters, is_asked_for=named)
    _sweep_finished(folder)
    record = run_record.read(folder)
    config = replace(run_record.options_of(folder, record), **changes)
    config.validate()
    _require_name(folder, config, asked)
    if asked is not None:
        _mark_as_asked_for(folder, record, config)
    return TrainingResult(
        CapsuleNetwork.load(folder, find_device(config.device)),
        folder,
        config,
        images,
        held_out=None,
        metrics=last_values(folder / METRICS),
        record=record,
        seconds=time.perf_counter() - started,
        resumed_finished=True,
    )


def _mark_as_asked_for(folder: Path, record: Mapping[str, Any], config: Config) -> None:
    """Mark a finished run of which the user names the images, so that other commands read them."""
    mark = origin.mark(config)
    if mark is not None and record.get(origin.MARK) != mark:
        with suppress(OSError), _owned(folder):  # OSError: a folder that cannot be written
            run_record.write(folder, {**record, origin.MARK: mark})


def _require_name(folder: Path, config: Config, asked: str | None) -> None:
    """Raise ValueError if the user asks for other data than those of a run."""
    if asked is not None and absolute_path(asked) != absolute_path(config.data):
        raise ValueError(
            f"the run in {folder} was started with the data {config.data}, and cannot continue "
            f"with {asked}"
        )


@contextmanager
def _owned(folder: Path, *, create: bool = False) -> Iterator[None]:
    """Own the folder of a run, so that no other process writes there.

    The main process owns it for all that train together. Temporary files of killed processes are
    deleted; so are folders that were created in vain.

    Raises
    ------
    TrainingError
        If another process owns it, or if it cannot be written.
    """
    if not is_main_process() or not (create or folder.is_dir()):
        yield
        return
    with ExitStack() as stack:
        with write_errors(folder):
            if create:
                missing = [each for each in (folder, *folder.parents) if not each.exists()]
                stack.callback(_remove_empty, missing)
                make_folder(folder)
            stack.enter_context(lock(folder / LOCK))
            sweep(folder)
        yield


def _sweep_finished(folder: Path) -> None:
    """Delete what killed processes left in the folder of a finished run, if it can be written."""
    if is_main_process() and temporary_files(folder):
        with suppress(OSError), lock(folder / LOCK):
            sweep(folder)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            with suppress(FileNotFoundError):
                folder.rmdir()


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder is finished and its network is complete."""
    names = (run_record.RECORD, "config.json", "model.safetensors")
    complete = all((folder / name).is_file() for name in names)
    return complete and bool(run_record.read(folder).get("finished"))


def _run(
    checkpoint: Checkpoint,
    folder: Path,
    data: ImageSet | None,
    report: Report | None,
    found: Found | None,
    reading: Counted | None,
    encoding: Counted | None,
    *,
    is_new: bool = False,
    is_asked_for: bool,
) -> TrainingResult:
    """Train from a checkpoint on."""
    started, config, interrupts = time.perf_counter(), checkpoint.config, Interrupts()
    device = find_device(config.device)
    with interrupts.installed(), process_group(device, config.process_timeout) as distributed:
        if is_new and distributed.any(distributed.is_main and not _is_empty(folder), device):
            remedy = "choose a new folder"
            if newest_checkpoint(folder) is not None:
                remedy = f"resume the run in it, or {remedy}"
            raise FileExistsError(f"{folder} is not empty; {remedy}")
        held_out = None
        if data is None:
            warns = found is None and distributed.is_main
            with nullcontext() if warns else suppress_skipped_warnings():
                data = _load_images(config, "train", reading)
            data, held_out = _divide(data, config, reading)
        data = _some_images(data, config)
        if found is not None:
            found(data)
        _require_different_images(data)
        if is_new:
            config = options_for(config, data)
            checkpoint = replace(checkpoint, config=config)
        trainer = Trainer(
            config,
            data,
            folder,
            device=device,
            distributed=distributed,
            interrupts=interrupts,
            report=report,
            encoding=encoding,
            held_out=held_out,
            is_asked_for=is_asked_for,
        )
        trainer.fit(checkpoint)
        return TrainingResult(
            trainer.network,
            folder,
            config,
            data,
            held_out,
            metrics=last_values(folder / METRICS) if distributed.is_main else {},
            record=run_record.read(folder) if distributed.is_main else {},
            seconds=time.perf_counter() - started,
        )


def _load_images(config: Config, split: Split, reading: Counted | None) -> ImageSet:
    return load(
        config.data,
        split=split,
        path=config.data_path,
        size=config.size,
        channels=config.channels,
        # Without the margin, which a new run chooses after it has loaded the images.
        smallest=minimum_image_size(config.model.kernel_size, halvings=config.model.halvings),
        report=reading,
    )


def _divide(
    data: ImageSet, config: Config, reading: Counted | None
) -> tuple[ImageSet, ImageSet | None]:
    """Return the images to learn from, and images on which nothing is learned, if there are any.

    These are the test images of the data. A folder without them is divided at random, and so is a
    dataset of the Hub.
    """
    try:
        with suppress_skipped_warnings():
            test = _load_images(config, "test", reading)
    except MissingSplitError:
        is_divided = bool(data.files) or is_on_hub(config.data)
        return hold_out(data, config.held_out) if is_divided else (data, None)
    return data, test if test.shape == data.shape else None


def _some_images(data: ImageSet, config: Config) -> ImageSet:
    """Return the number of images that the options ask for, at random, in their order."""
    if config.images is None or config.images >= len(data):
        return data
    order = torch.randperm(len(data), generator=make_generator(config.seed, Stream.IMAGES))
    return data.subset(order[: config.images].sort().values)


def options_for(config: Config, data: ImageSet) -> Config:
    """Return options of which those that depend on the training images are chosen."""
    config = replace(config, batch_size=config.batch_size_for(len(data)))
    config = _with_margin_that_fits(_with_filters_that_fit(config, data), data)
    return _with_even_overlap(config)


def _with_filters_that_fit(config: Config, data: ImageSet) -> Config:
    """Return options with smaller filters if images are too small for those of the preset."""
    default, side = ModelOptions().kernel_size, min(data.shape[1:])
    if config.model.kernel_size != default or side >= minimum_image_size(default):
        return config
    return replace(config, model=replace(config.model, kernel_size=max(1, side // 3)))


def _with_margin_that_fits(config: Config, data: ImageSet) -> Config:
    """Return options with a margin of half a filter if the pixels at the border of images vary.

    That much is left after the halvings. The border of a decoded image is the sum of few filters,
    and the last row of none if the side is even. That is enough for a background that is always the
    same, but shows as a frame otherwise.
    """
    if config.model.margin is not None:
        return config
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    variance = data.batch(order[:BORDER_IMAGES]).var(0, correction=0).mean(0)  # (H, W)
    border = torch.cat([variance[0], variance[-1], variance[1:-1, 0], variance[1:-1, -1]])
    is_small = config.model.kernel_size < ModelOptions().kernel_size
    share = SMALL_BORDER_SHARE if is_small else BORDER_SHARE
    varies = bool(border.mean() >= share * variance.mean())
    margin = (config.model.kernel_size // 2) << config.model.halvings if varies else 0
    return replace(config, model=replace(config.model, margin=margin))


def _with_even_overlap(config: Config) -> Config:
    """Return options that even out the overlap of filters if the margin is wide enough for it."""
    model = config.model
    if model.even_overlap is not None:
        return config
    margin = (model.margin or 0) >> model.halvings  # of what the two convolutions read
    fits = margin >= max(1, model.kernel_size // 2)
    return replace(config, model=replace(model, even_overlap=fits))


def _require_different_images(data: ImageSet) -> None:
    """Raise DataError if all images are equal, so that there is nothing to learn."""
    size = 1024  # compared in parts, for the images may be a mapped file
    require_uncut(data.images, data.source)
    first = np.array(data.images[:1])

    def are_equal(start: int) -> bool:
        require_uncut(data.images, data.source)
        return bool((data.images[start : start + size] == first).all())

    if all(map(are_equal, range(0, len(data), size))):
        found = "only one image" if len(data) == 1 else f"{len(data)} equal images"
        raise DataError(
            f"cannot train on {data.source}: it contains {found}; use images that differ"
        )


def absolute_path(source: str) -> str:
    """Make an existing path absolute, so that a run can be resumed from another working directory.

    The name of a dataset is returned unchanged.
    """
    if not source or source in NAMES or not Path(source).expanduser().exists():
        return source
    return str(Path(source).expanduser().resolve())


def _is_empty(folder: Path) -> bool:
    """Return whether the folder of a run is empty but for its lock."""
    return not folder.exists() or all(file.name == LOCK for file in folder.iterdir())
