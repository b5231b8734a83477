"""A static build of the explorer: a folder of files that need no server but a web server.

The page is the same. In place of the HTTP interface, a worker of the browser computes with the
weights of the models (`local/network.js`), which is a few matrix products: the routing of the
capsules, and two convolutions and their transposes. A general runtime such as that of ONNX would be
megabytes of compiled code.

For each model there are NAME.json (sizes, options, effects, and where to find each array) and
NAME.bin (the arrays: weights, densities of codes, maps and some images), little-endian. Weights are
stored in half precision if that loses nothing, as for the models of the package.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import functional as F
from poecaps._files import atomic_write
from poecaps.autoencoder import PIXEL_BIAS_SCALE
from poecaps.explorer import effects, maps, pictures
from poecaps.explorer.render import DECIMALS, MAX_MAGNITUDE, MAX_OFFSET, STEPS, as_pixels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps._progress import Report
    from poecaps.explorer.render import ExplorerModel

    Array = np.ndarray[Any, Any]

HERE = Path(__file__).parent
STATIC, LOCAL = HERE / "static", HERE / "local"
IMAGES = 200  # of the data, that the page can encode
ALIGNMENT = 8  # bytes


def write_static(
    models: Sequence[ExplorerModel], folder: Path, *, report: Report | None = None
) -> None:
    """Write a static build.

    Parameters
    ----------
    models
        The models, to switch between.
    folder
        A new or empty folder.
    report
        Called with the number of finished experts, and that of all experts of all models.

    Raises
    ------
    FileExistsError
        If the folder is not empty.
    ValueError
        If a model has parts that the page cannot compute.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose a new folder")
    for model in models:
        _require_known(model)
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for file in [*STATIC.iterdir(), *LOCAL.iterdir()]:  # api.js of the second replaces the first
        _write(folder / file.name, file.read_bytes())
    total, done, files = sum(model.experts for model in models), 0, {}
    for number, model in enumerate(models):
        files[model.name] = f"{number}-{re.sub(r'[^A-Za-z0-9_-]+', '-', model.name)}"
        path = folder / "models" / files[model.name]
        arrays = Arrays()
        info = _describe(model, arrays)
        for expert in range(model.experts):
            _add_expert(model, expert, info, arrays)
            done += 1
            if report is not None:
                report(done, total)
        _write(path.with_name(f"{path.name}.bin"), arrays.data())
        text = json.dumps(info | {"arrays": arrays.entries}, separators=(",", ":"))
        _write(path.with_name(f"{path.name}.json"), text.encode())
    _write(folder / "models.json", json.dumps(files).encode())


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


class Arrays:
    """Arrays in one file, each at a multiple of 8 bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.entries: dict[str, dict[str, Any]] = {}

    def add(self, name: str, values: Tensor | Array | None) -> None:
        """Add an array under a name; None adds nothing."""
        if values is None:
            return
        array = values.detach().numpy() if isinstance(values, torch.Tensor) else values
        if array.dtype != np.uint8:
            array = array.astype("<f4")
            half = array.astype("<f2")
            if np.array_equal(half.astype("<f4"), array):
                array = half
        data = array.tobytes()
        self.entries[name] = {
            "type": array.dtype.name,
            "shape": list(array.shape),
            "offset": self.size,
        }
        padding = -len(data) % ALIGNMENT
        self.parts.append(data + bytes(padding))
        self.size += len(data) + padding

    def data(self) -> bytes:
        """Return the content of the file."""
        return b"".join(self.parts)


def _require_known(model: ExplorerModel) -> None:
    """Raise ValueError if a model has parameters that the page does not compute with."""
    known = re.compile(
        r"autoencoder\.(conv[12]_weight|conv[12]_bias|deconv[12]_bias)"
        r"|pixel_decoder\.(conv[12]_weight|deconv[12]_bias|pixel_bias)"
        r"|preprocessing\.(mean|matrix|inverse|components|factors)"
        r"|(encoders|decoders)\.\d+\.(weight|balance)"
        r"|(code_density|density|whitening)\..*"
    )
    unknown = [name for name in model.network.state_dict() if not known.fullmatch(name)]
    if unknown:
        raise ValueError(
            f"{model.name} has parts that a static build cannot compute: {', '.join(unknown)}; use "
            "poecaps explore without --static"
        )


def _describe(model: ExplorerModel, arrays: Arrays) -> dict[str, Any]:
    """Describe a model, and add the arrays that do not belong to one of its experts."""
    network = model.network
    auto, pixel, prep = network.autoencoder, network.pixel_decoder, network.preprocessing
    for name, tensor in auto.named_parameters():
        arrays.add(f"autoencoder.{name}", tensor)
    for name, tensor in () if pixel is None else pixel.named_parameters():
        scale = PIXEL_BIAS_SCALE if name == "pixel_bias" else 1
        arrays.add(f"pixel_decoder.{name}", scale * tensor)
    for name, buffer in prep.named_buffers():
        arrays.add(f"preprocessing.{name}", buffer)
    layers: dict[str, list[dict[str, Any]]] = {"encoders": [], "decoders": []}
    for kind, described in layers.items():
        for number, layer in enumerate(getattr(network, kind)):
            arrays.add(f"{kind}.{number}.weight", layer.weight)
            winners = getattr(layer, "winners", None)
            if winners is not None:
                arrays.add(f"{kind}.{number}.balance", layer.balance)
            described.append(asdict(layer.routing) | {"winners": winners})
    density = network.code_density
    arrays.add("mean_direction", density.mean_direction)
    for name, mixture in (("per_expert", density.per_expert), ("joint", density.joint.mixture)):
        for part in ("weights", "means", "factors"):
            arrays.add(f"{name}.{part}", getattr(mixture, part))
    arrays.add("joint.mean", density.joint.mean)
    arrays.add("joint.components", density.joint.components)
    images = 0 if model.images is None else min(IMAGES, len(model.images))
    if model.images is not None:
        arrays.add("images", as_pixels(model.images.batch(range(images))))
    everything = maps.make_map(model, None)
    codes, places = everything.codes()
    arrays.add("map.codes", codes)
    arrays.add("map.places", places)
    arrays.add("map.images", everything.images)
    typical = [base64.b64encode(pictures.write(each)).decode() for each in model.typical_images]
    return {
        "name": model.name,
        "source": Path(model.source).resolve().name,  # the path is nobody's business
        "image_shape": list(network.architecture.image_shape),
        "experts": model.experts,
        "parameters": model.parameters,
        "grid": list(model.grid),
        "field": model.receptive_field,
        "stride": model.stride,
        "first_pixel": model.first_pixel,
        "margin": auto.stem.margin,
        "even_overlap": auto.even_overlap,
        "images": images,
        "part": model.part,
        "note": model.note,
        "chains": 0,
        "mean": model.mean.tolist(),
        "deviation": model.deviation.tolist(),
        "background": model.background,
        "kernel_size": network.architecture.kernel_size,
        "features": network.architecture.features,
        "negative_slope": auto.negative_slope,
        "largest_norm": F.squash(torch.tensor([1e30])).item(),
        "limits": {"decimals": DECIMALS, "offset": MAX_OFFSET, "magnitude": MAX_MAGNITUDE},
        "steps": STEPS,
        "map": {"columns": everything.columns, "filled": everything.filled.tolist()},
        "maps": [],
        "effects": [],
        "typical": [f"data:image/png;base64,{each}" for each in typical],
        **layers,
    }


def _add_expert(model: ExplorerModel, expert: int, info: dict[str, Any], arrays: Arrays) -> None:
    """Add the effects of the parameters of an expert, and its map."""
    info["effects"].append([asdict(each) for each in effects.effects(model, expert)])
    plane = maps.make_map(model, expert)
    origin, axes = plane.plane(expert)
    assert plane.explained is not None  # noqa: S101 (the map of an expert is a plane)
    info["maps"].append({"columns": plane.columns, "explained": list(plane.explained)})
    arrays.add(f"maps.{expert}.origin", origin)
    arrays.add(f"maps.{expert}.axes", axes)
    arrays.add(f"maps.{expert}.images", plane.images)
