"""The command `info`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps import card, models
from poecaps._devices import find_device
from poecaps.cli.arguments import command_for
from poecaps.cli.loading import find_model, is_on_this_machine
from poecaps.cli.options import OptionalModel  # noqa: TC001 (tyro reads the annotations)
from poecaps.cli.outputs import say
from poecaps.data import datasets
from poecaps.kernels import convolution, dispatch
from poecaps.network import CapsuleNetwork
from poecaps.training import PRESETS, record
from poecaps.training.config import changed_options
from poecaps.training.metrics import METRICS, last_values

if TYPE_CHECKING:
    from collections.abc import Iterator


def info(run: Positional[OptionalModel] = None) -> None:
    """Describe a trained model, or without a model this installation."""
    # All lines before the first is printed: an error must not follow half of them.
    lines = list(_describe_installation() if run is None else _describe_run(run))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        say(f"{name:{width}}  {value}")


def _describe_installation() -> Iterator[tuple[str, str]]:
    yield from record.describe_versions().items()
    device = find_device("auto")
    yield "device", record.describe_device(device)
    yield "routing", dispatch.describe(device)
    yield "convolution", convolution.describe(device)
    absent = {name for name in datasets.PUBLIC_DATASETS if not is_on_this_machine(name)}
    yield (
        "data",
        ", ".join(name + " (not on this machine)" * (name in absent) for name in datasets.NAMES),
    )
    yield "models", ", ".join(models.names()) or "none"
    yield "presets", ", ".join(PRESETS)


def _describe_run(run: str) -> Iterator[tuple[str, str]]:
    folder = find_model(run)
    about = record.read(folder) if (folder / record.RECORD).is_file() else None
    if about is None and not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} does not contain a run: it has neither {record.RECORD} nor model.safetensors"
        )
    yield "run", f"{run}, a model of the package" if models.is_shipped(run) else run
    if (folder / "model.safetensors").is_file():
        network = CapsuleNetwork.load(folder)
        channels, height, width = network.architecture.image_shape
        inputs, dim = network.preprocessing.mean.shape
        layers = (f"{count} of dimension {dim}" for count, dim in network.architecture.experts)
        yield "images", f"{height}×{width}, {'grey' if channels == 1 else 'RGB'}"
        yield "capsules", f"{inputs} of dimension {dim}"
        yield "experts", ", then ".join(layers)
        yield "weights", f"{sum(each.numel() for each in network.parameters()):,}"
    if about is None:
        return
    source = about["data"]
    digest = str(source.get("sha256"))[:12]
    yield (
        "trained on",
        f"{source.get('source')} ({source.get('images'):,} images, sha256 {digest}…)",
    )
    resume = f"not yet; resume with: poecaps train --resume {shlex.quote(str(folder))}"
    yield "finished", about.get("finished") or resume
    for stage, values in last_values(folder / METRICS).items():
        yield (
            stage,
            ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()),
        )
    measured = card.read_measured(folder)
    if measured is not None:
        yield "measured", f"{measured['samples']:,} draws, on {measured['data']}"
        for name, number in card.measures(measured).items():
            yield "", f"{name} {number}"
    config = record.options_of(folder, about)
    for start in about["starts"]:
        # A published record has no command; the options give an equivalent one.
        command = start.get("command") or command_for(config)
        yield "command", f"{command}  ({start.get('time')}, {start.get('device')})"
    for name, value in changed_options(config, "default").items():
        yield "option", f"{name} = {value}"
