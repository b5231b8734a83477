"""Saved models: safetensors files with a checksum, half precision and format versions.

A folder with a model has two files: `config.json` with the architecture, and `model.safetensors`
with the weights. Checkpoints and classifiers are safetensors files of the same form. Every file
states its format version, and no file is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from poecaps._files import ModelError, atomic_write, read_json, write_json
from poecaps._json import dataclass_from_json
from poecaps.options import Architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

FORMAT = "poecaps"
VERSION = 2  # of models and checkpoints; in version 1 options and tensors had other names
CLASSIFIER_VERSION = 1  # of the classifiers of `poecaps.evaluation`
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# A tensor is rounded to float16 if that changes it by at most this share of its norm; 2e-4 is
# usual. The share is exceeded if its numbers are so small that float16 has few digits for them.
HALF_TOLERANCE = 1e-3


# Models


def write_model(
    folder: Path, architecture: Architecture, tensors: Mapping[str, Tensor], *, half: bool
) -> None:
    """Write the architecture and the weights of a network into a folder.

    Parameters
    ----------
    folder
        Created if it does not exist.
    architecture
        Of the network.
    tensors
        Its state_dict.
    half
        Whether `tensors` come from `half_precision`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors, {"half": True} if half else {})
    header = {"format": FORMAT, "version": VERSION}
    write_json(folder / CONFIG, header | {"architecture": asdict(architecture)})


def read_model(folder: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Read a folder that `write_model` wrote; tensors in half precision are converted to float32.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ModelError
        If a file is damaged, not written by poecaps, or of another format version.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} does not contain a trained model: {name} is missing")
    config = read_json(folder / CONFIG)
    check_version(config, folder)
    architecture = _architecture_from_json(config.get("architecture"), folder / CONFIG)
    tensors, about = read_tensors(folder / WEIGHTS)
    if about.get("half") is True:
        tensors = {
            name: tensor.float() if tensor.dtype == torch.float16 else tensor
            for name, tensor in tensors.items()
        }
    return architecture, tensors


def _architecture_from_json(values: Any, source: Path) -> Architecture:
    if not isinstance(values, dict) or not {"image_shape", "experts"} <= values.keys():
        raise ModelError(f"{source} is damaged: it does not describe an architecture")
    try:
        # A file that does not mention an option is older than the option, and has its default.
        return dataclass_from_json(Architecture, values, defaults=True)
    except ValueError as error:
        raise ModelError(f"{source} is damaged: {error}") from error


def half_precision(module: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of a module with its large tensors rounded to float16.

    These are the parameters of two or more axes and the factors of the code densities. Tensors
    that lose too much by rounding are kept in float32.

    Raises
    ------
    ValueError
        If numbers are too large for float16.
    """
    tensors: dict[str, Tensor] = module.state_dict()
    weights = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    factors = [name for name in tensors if re.fullmatch(r"code_density\..*\.factors", name)]
    for name in (*weights, *factors):
        exact, rounded = tensors[name], tensors[name].half()
        if not rounded.isfinite().all():
            largest = torch.finfo(torch.float16).max
            raise ValueError(
                f"{name} reaches {exact.abs().max():.3g}, but the largest number of float16 is "
                f"{largest:.0f}; save without half"
            )
        if (rounded.float() - exact).norm() <= HALF_TOLERANCE * exact.norm():
            tensors[name] = rounded
    return tensors


def load_state(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load a state_dict that was read from `source` into a module of the same architecture.

    Raises
    ------
    ModelError
        If names, shapes or dtypes do not match, or if a number is not finite.
    """
    expected = {name: _describe(tensor) for name, tensor in module.state_dict().items()}
    found = {name: _describe(tensor) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ModelError(
                f"{source} does not match its architecture: {name} is "
                f"{found.get(name, 'missing')}, but must be {expected.get(name, 'absent')}"
            )
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise ModelError(f"{source} has invalid weights: {broken[0]} is not finite")
    module.load_state_dict(dict(tensors), assign=True)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


# Files


def check_version(about: Mapping[str, Any], source: Path, version: int = VERSION) -> None:
    """Raise ModelError if a file was not written by poecaps, or has another format version."""
    found = about.get("version")
    if about.get("format") != FORMAT or not isinstance(found, int):
        raise ModelError(f"{source} was not written by poecaps")
    if found > version:
        raise ModelError(
            f"{source} was written by a later version of poecaps (format version {found}), but "
            f"this version reads format version {version}; upgrade poecaps"
        )
    if found < version:
        raise ModelError(
            f"{source} was written by an earlier version of poecaps (format version {found}), "
            "which this version cannot read; train it again"
        )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, version: int = VERSION
) -> None:
    """Write tensors with their format version, a checksum and a JSON object, atomically.

    Parameters
    ----------
    path
        A safetensors file.
    tensors
        By name.
    about
        Added to the format and the version of the file.
    version
        Format version of this kind of file.
    """
    import safetensors.torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": FORMAT, "version": version, **about}
    metadata = {"about": json.dumps(header, ensure_ascii=False), "sha256": _digest(whole)}
    with atomic_write(path) as file:
        file.write(safetensors.torch.save(whole, metadata))


def read_tensors(path: Path, *, version: int = VERSION) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and the JSON object about them from a file of `write_tensors`.

    Raises
    ------
    ModelError
        If the file is damaged, not written by poecaps, or of another format version.
    """
    import safetensors.torch

    content = path.read_bytes()  # in one call: the file may be replaced by a newer one meanwhile
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ModelError(f"{path} is damaged, or not a safetensors file ({error})") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about, checksum = _parse_header(header, path)
    check_version(about, path, version)
    if _digest(tensors) != checksum:
        raise ModelError(
            f"{path} is damaged: its weights do not match their checksum; use another copy"
        )
    return tensors, about


def read_metadata(path: Path, *, version: int = VERSION) -> dict[str, Any]:
    """Read the JSON object of a file of `write_tensors`, without its tensors and their checksum.

    Raises
    ------
    ModelError
        If the header is damaged, not written by poecaps, or of another format version.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > path.stat().st_size:
                raise ValueError("the file is too short")
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is damaged, or not a safetensors file ({error})") from error
    about, _ = _parse_header(header, path)
    check_version(about, path, version)
    return about


def _parse_header(header: Any, path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object and the checksum in the header of a safetensors file."""
    try:
        metadata = header["__metadata__"]
        about, checksum = json.loads(metadata["about"]), metadata["sha256"]
    except (KeyError, TypeError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ModelError(f"{path} is a safetensors file that was not written by poecaps")
    return about, checksum


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and numbers."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
