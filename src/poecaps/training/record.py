"""The record of a run, `run.json`: its options, a fingerprint of its data, and every start."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps._files import DamagedError, ModelError, read_json, write_json
from poecaps._json import dataclass_from_json
from poecaps._version import __version__
from poecaps.data.buffers import require_uncut
from poecaps.data.datasets import NAMES
from poecaps.training.checkpoint import newest_checkpoint
from poecaps.training.config import MACHINE_OPTIONS, Config, changed_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poecaps.data import ImageSet
    from poecaps.training.stages import Selection

RECORD = "run.json"

# Entries of a start that identify neither the machine nor its user.
PUBLIC_ENTRIES = ("time", "stage", "step", "device", "precision", "processes")

# Bytes of images that are hashed; a larger dataset is represented by every n-th image.
HASHED_BYTES = 2**30
HASHED_IMAGES = (
    1024  # images that are hashed together, so that a memory-mapped file is read in parts
)


def describe_data(data: ImageSet) -> dict[str, Any]:
    """Return source, size and SHA-256 of a dataset, to recognize it later."""
    size = data.images[:1].nbytes
    step = max(1, -(-len(data) * size // HASHED_BYTES))
    digest = hashlib.sha256(f"{data.images.dtype} {data.images.shape}".encode())
    for start in range(0, len(data), HASHED_IMAGES * step):
        require_uncut(data.images, data.source)
        digest.update(data.images[start : start + HASHED_IMAGES * step : step].tobytes())
    return {
        "source": data.source,
        "images": len(data),
        "held_out": data.held_out,
        "shape": list(data.shape),
        "sha256": digest.hexdigest(),
        "sha256_of": "all images" if step == 1 else f"every {step}th image",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of the software on which results may depend."""
    return {
        "poecaps": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def describe_device(device: torch.device) -> str:
    """Return the name of a device, with the model of a GPU or the threads of a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' * (threads > 1)})"


def command_line() -> str:
    """Return the command line of this program, quoted for a shell."""
    is_module = Path(sys.argv[0]).name == "__main__.py"  # python -m ..., rather than a script
    words = sys.orig_argv if is_module else sys.argv
    return shlex.join([Path(words[0]).name, *words[1:]])


def timestamp() -> str:
    """Return the current time in UTC, in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def new_record(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run that has not been started yet; `data` is from `describe_data`."""
    return {
        "config": asdict(config),
        "seed": config.seed,
        "data": data,
        "starts": [],
        "finished": None,
    }


def add_start(record: dict[str, Any], **entries: Any) -> None:
    """Add a start of the run, or a restart, to its record."""
    start = {"time": timestamp(), "command": command_line(), "versions": describe_versions()}
    record["starts"].append(start | entries)


def add_selection(record: dict[str, Any], stage: str, selection: Selection) -> None:
    """Add to the record which of several trained parts of a stage was kept."""
    record.setdefault("selection", {})[stage] = asdict(selection)


def read(folder: Path) -> dict[str, Any]:
    """Read the record of the run in a folder.

    Raises
    ------
    ModelError
        If the file is damaged, or was not written by `write`.
    """
    source = folder / RECORD
    try:
        record = read_json(source)
    except DamagedError as error:
        if newest_checkpoint(folder) is None:
            raise
        raise DamagedError(
            f"{error}; or delete it, and the run is resumed without its history, and without "
            "comparing the images with those of its start"
        ) from error
    for name, cls in {"config": dict, "data": dict, "starts": list}.items():
        if not isinstance(record.get(name), cls):
            raise ModelError(f"{source} is not the record of a run: {name} is missing or invalid")
    if not all(_is_start(start) for start in record["starts"]):
        raise ModelError(f"{source} is not the record of a run: starts must be objects")
    images = record["data"].get("images")
    if type(images) is not int or images < 1:
        raise ModelError(
            f"{source} is not the record of a run: data.images must be a whole number of at least 1"
        )
    if not isinstance(record["config"].get("data"), str):
        raise ModelError(f"{source} is not the record of a run: config.data must be a name")
    selection = record.get("selection", {})
    if not isinstance(selection, dict) or not all(map(_is_selection, selection.values())):
        raise ModelError(f"{source} is not the record of a run: selection is invalid")
    return record


def _is_start(value: Any) -> bool:
    """Return whether a JSON value has the types of a start that `add_start` added."""
    return isinstance(value, dict) and isinstance(value.get("versions", {}), dict)


def _is_selection(value: Any) -> bool:
    """Return whether a JSON value has the types of a selection that `add_selection` added."""
    try:
        kept, starts, scores = value["kept"], value["starts"], value["scores"][value["criterion"]]
        before = [comparison["starts"] for comparison in value["halvings"]]
    except (TypeError, KeyError):
        return False
    lists = (starts, scores, *before)
    return (
        all(isinstance(each, list) for each in lists)
        and all(type(each) in (int, float) for numbers in lists for each in numbers)
        and len(set(starts)) == len(starts) == len(scores)
        and type(kept) is int
        and kept in starts
    )


def write(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a run into its folder, atomically and with a checksum."""
    write_json(folder / RECORD, record, checksum=True)


def options_of(folder: Path, record: Mapping[str, Any]) -> Config:
    """Return the options in a record that was read from a folder.

    Raises
    ------
    ModelError
        If they are not valid.
    """
    try:
        # A record that does not mention an option is older than the option.
        config = dataclass_from_json(Config, record["config"], defaults=True)
        config.validate()
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / RECORD} has no valid configuration ({error})") from error
    return config


def require_same_options(folder: Path, record: Mapping[str, Any], config: Config) -> None:
    """Raise ModelError if the options of a checkpoint differ from those in the record of its run.

    Options that depend on the machine may differ.
    """
    stated = changed_options(options_of(folder, record), "default")
    found = changed_options(config, "default")
    for name in sorted(stated.keys() | found.keys()):
        if stated.get(name) != found.get(name):
            raise ModelError(
                f"the checkpoint in {folder} is not from the run in its {RECORD}: they differ in "
                f"the option {name}; use other copies of these files"
            )


def without_machine(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the entries that depend on the machine, for publication.

    Paths and commands are removed; a dataset that is not known by name is called by the name of its
    file or folder.
    """
    config, usual = dataclass_from_json(Config, record["config"], defaults=True), Config()
    data = dict(record["data"])
    if config.data not in NAMES:
        config = replace(config, data=Path(config.data).name)
        data["source"] = Path(str(data.get("source"))).name
    config = replace(config, **{name: getattr(usual, name) for name in MACHINE_OPTIONS})
    starts = [
        {
            **{name: start[name] for name in PUBLIC_ENTRIES if name in start},
            "versions": {
                name: version
                for name, version in start.get("versions", {}).items()
                if name != "platform"
            },
        }
        for start in record["starts"]
    ]
    selection = {"selection": record["selection"]} if "selection" in record else {}
    kept = {"starts": starts, "finished": record.get("finished")}
    return new_record(config, data) | kept | selection
