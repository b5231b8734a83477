"""What a run says about itself: `run.json`, with its options, its data, and where and when it was started."""

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

from poecaps._files import ModelError, read_json, write_json
from poecaps.data.datasets import NAMES
from poecaps.training.config import OF_THE_MACHINE, Config, from_json
from poecaps.training.config import command as training_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poecaps.data import ImageSet

RECORD = "run.json"
SHARED = (
    "time",
    "stage",
    "step",
    "device",
    "precision",
    "processes",
)  # of each start, what anybody may know
HASHED = 2**30  # bytes; of a larger set, images at equal distances stand for all


def describe_data(data: ImageSet) -> dict[str, Any]:
    """Describe a set of images so that another can be told from it."""
    size = data.images[:1].nbytes
    step = max(1, -(-len(data) * size // HASHED))
    digest = hashlib.sha256(f"{data.images.dtype} {data.images.shape}".encode())
    for start in range(0, len(data), 1024 * step):
        digest.update(data.images[start : start + 1024 * step : step].tobytes())
    return {
        "source": data.source,
        "images": len(data),
        "shape": list(data.shape),
        "sha256": digest.hexdigest(),
        "sha256_of": "all images" if step == 1 else f"every {step}th image",
    }


def describe_machine() -> dict[str, str]:
    """Name the versions that results may depend on."""
    from poecaps import __version__

    return {
        "poecaps": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def describe_device(device: torch.device) -> str:
    """Name a device as people do."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return (
        f"{device} ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device)
    )


def command() -> str:
    """Return the command line of this program, as a shell would take it."""
    words = (
        sys.orig_argv if Path(sys.argv[0]).name == "__main__.py" else sys.argv
    )  # python -m …, or a script
    return shlex.join([Path(words[0]).name, *words[1:]])


def begin(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """Make the record of a new run."""
    return {
        "config": asdict(config),
        "seed": config.seed,
        "data": data,
        "starts": [],
        "finished": None,
    }


def start(record: dict[str, Any], **about: Any) -> None:
    """Note that a run is started, or started again."""
    record["starts"].append(
        {"time": now(), "command": command(), "versions": describe_machine(), **about}
    )


def now() -> str:
    """Return the time of day, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read(folder: Path) -> dict[str, Any]:
    """Read the record of a run.

    Raises
    ------
    ModelError
        If the file is none that `write` wrote.
    """
    record = read_json(folder / RECORD)
    for name, kind in {"config": dict, "data": dict, "starts": list}.items():
        if not isinstance(record.get(name), kind):
            raise ModelError(f"{folder / RECORD} is no record of a run: it has no {name}")
    starts, images = record["starts"], record["data"].get("images")
    if not all(isinstance(start, dict) for start in starts) or not isinstance(images, int):
        raise ModelError(
            f"{folder / RECORD} is no record of a run: its starts or its data are not told"
        )
    return record


def write(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a run."""
    write_json(folder / RECORD, record)


def without_machine(record: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of the record of a run what does not depend on whose machine it was.

    Paths go: images of one's own are called by the name of their file or folder. Commands are made anew from the
    options.
    """
    config, usual = from_json(Config, record["config"]), Config()
    data = dict(record["data"])
    if config.data not in NAMES:
        config = replace(config, data=Path(config.data).name)
        data["source"] = Path(str(data.get("source"))).name
    shared = replace(config, **{name: getattr(usual, name) for name in OF_THE_MACHINE})
    starts = [
        {
            "command": training_command(shared),
            **{name: start[name] for name in SHARED if name in start},
            "versions": {
                name: value
                for name, value in start.get("versions", {}).items()
                if name != "platform"
            },
        }
        for start in record["starts"]
    ]
    return begin(shared, data) | {"starts": starts, "finished": record.get("finished")}
