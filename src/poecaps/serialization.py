"""Saved models: safetensors files with a checksum, half precision and format versions.

A folder with a model has two files: `model.safetensors` with the weights and the architecture, and
`config.json` with the architecture for people and other programs. Checkpoints and classifiers are
safetensors files of the same form. One checksum covers every byte of such a file. Every file states
its format version, and no file is a pickle.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from poecaps._files import (
    DamagedError,
    ModelError,
    atomic_write,
    format_json,
    make_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_errors,
    read_json,
    write_json,
)
from poecaps._json import dataclass_from_json
from poecaps.options import Architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

FORMAT = "poecaps"
# Of models and checkpoints. In version 2, which is read as well, only tensors had a checksum, and
# only config.json had the architecture. Version 1 had other names of options and tensors; models
# of it are read, checkpoints are not.
VERSION, OLDEST_VERSION, OLDEST_MODEL_VERSION = 3, 2, 1
CLASSIFIER_VERSION = 1  # of the classifiers of `poecaps.evaluation`
MAX_HEADER = 100_000_000  # bytes of the header of a safetensors file, as in safetensors itself
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
    make_folder(folder)
    about = {"architecture": asdict(architecture)}
    write_tensors(folder / WEIGHTS, tensors, about | ({"half": True} if half else {}))
    write_json(folder / CONFIG, {"format": FORMAT, "version": VERSION} | about)


def read_model(folder: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Read a folder that `write_model` wrote; tensors in half precision are converted to float32.

    Raises
    ------
    FileNotFoundError
        If a file is missing; `config.json` is needed for format versions 1 and 2 only.
    ModelError
        If a file is damaged, not written by poecaps, or of another format version, or if the files
        do not belong together.
    """
    path, config = folder / WEIGHTS, folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} does not contain a trained model: {WEIGHTS} is missing")
    tensors, about = read_tensors(path, oldest=OLDEST_MODEL_VERSION)
    is_old = about["version"] < VERSION
    values, source = about.get("architecture"), path
    if is_old and not config.is_file():
        raise FileNotFoundError(f"{folder} does not contain a trained model: {CONFIG} is missing")
    if config.is_file():
        stated = read_json(config)
        check_version(stated, config, oldest=OLDEST_MODEL_VERSION)
        if stated["version"] != about["version"]:
            raise ModelError(f"{config} and {WEIGHTS} have different format versions")
        if is_old:
            values, source = stated.get("architecture"), config
        elif stated.get("architecture") != values:
            raise ModelError(
                f"{config} differs from the architecture in {WEIGHTS}; delete {CONFIG}, or use "
                "another copy of the model"
            )
    if about["version"] == 1:
        values, tensors = _renamed_options(values), _renamed_tensors(tensors)
    architecture = _architecture_from_json(values, source)
    if about.get("half") is True:
        tensors = {
            name: tensor.float() if tensor.dtype == torch.float16 else tensor
            for name, tensor in tensors.items()
        }
    return architecture, tensors


def has_half_precision(folder: Path) -> bool:
    """Return whether a model was saved in half precision, from the header of its file.

    Raises
    ------
    ModelError
        See `read_metadata`.
    """
    about = read_metadata(folder / WEIGHTS, oldest=OLDEST_MODEL_VERSION)
    return about.get("half") is True


def _architecture_from_json(values: Any, source: Path) -> Architecture:
    if not isinstance(values, dict) or not {"image_shape", "experts"} <= values.keys():
        raise ModelError(f"{source} is damaged: it does not describe an architecture")
    try:
        # A file that does not mention an option is older than the option, and has its default.
        architecture = dataclass_from_json(Architecture, values, defaults=True)
        architecture.validate()
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source} describes an invalid architecture ({error})") from error
    return architecture


# Names of options and of tensors in format version 1, and those of today.
OPTIONS_OF_VERSION_1 = {
    "kernel": "kernel_size",
    "level": "equalized_components",
    "painter": "pixel_decoder",
    "components": "joint_components",
    "parts": "expert_components",
}
TENSORS_OF_VERSION_1 = {
    r"^painter\.canvas$": "pixel_decoder.pixel_bias",
    r"^painter\.": "pixel_decoder.",
    r"\.first$": ".conv1_weight",
    r"\.second$": ".conv2_weight",
    r"\.up_([12])$": r".conv\1_bias",
    r"\.down_([12])$": r".deconv\1_bias",
    r"^scaling\.directions$": "preprocessing.components",
    r"^scaling\.": "preprocessing.",
    r"^density\.": "code_density.",
    r"\.deviation$": ".std",
    r"\.together\.centre$": ".joint.mean",
    r"\.together\.basis$": ".joint.components",
    r"\.together\.": ".joint.",
    r"\.alone\.": ".per_expert.",
    r"\.(mixture|per_expert)\.share$": r".\1.weights",
    r"\.(mixture|per_expert)\.mean$": r".\1.means",
    r"\.(mixture|per_expert)\.factor$": r".\1.factors",
}


def _renamed_options(values: Any) -> Any:
    """Return the architecture of a file of format version 1, with the names of today."""
    if not isinstance(values, dict):
        return values
    return {OPTIONS_OF_VERSION_1.get(name, name): value for name, value in values.items()}


def _renamed_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file of format version 1, with the names of today."""
    renamed = {}
    for old, tensor in tensors.items():
        name = old
        for pattern, replacement in TENSORS_OF_VERSION_1.items():
            name = re.sub(pattern, replacement, name)
        if not re.fullmatch(r"decoders\.\d+\.balance", name):  # which decoders do not use
            renamed[name] = tensor
    return renamed


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


def check_version(
    about: Mapping[str, Any],
    source: Path,
    version: int = VERSION,
    oldest: int = OLDEST_VERSION,
) -> None:
    """Raise ModelError if a file was not written by poecaps, or has another format version."""
    found, oldest = about.get("version"), min(oldest, version)
    if about.get("format") != FORMAT or type(found) is not int:
        raise ModelError(f"{source} was not written by poecaps")
    if found > version:
        raise ModelError(
            f"{source} was written by a later version of poecaps (format version {found}), but "
            f"this version reads format version {version}; upgrade poecaps"
        )
    if found < oldest:
        raise ModelError(
            f"{source} was written by an earlier version of poecaps (format version {found}), "
            "which this version cannot read; train it again"
        )


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    *,
    version: int = VERSION,
    previous: Path | None = None,
) -> None:
    """Write tensors with their format version, a JSON object and a checksum of all, atomically.

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
    previous
        File that keeps the old content of `path`.
    """
    import safetensors.torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    values = {"format": FORMAT, "version": version, **about}
    metadata = {"about": format_json(values), "digest": NO_DIGEST}
    header, data = _split(safetensors.torch.save(whole, metadata), path)
    digest = _file_digest(header, data, NO_DIGEST)
    with atomic_write(path, previous=previous) as file:
        file.write(header.replace(_entry(NO_DIGEST), _entry(digest)))
        file.write(data)


def read_tensors(
    path: Path, *, version: int = VERSION, oldest: int = OLDEST_VERSION
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and the JSON object about them from a file of `write_tensors`.

    Format versions from `oldest` to `version` are read.

    Raises
    ------
    ModelError
        If the file is damaged, not written by poecaps, or of another format version.
    """
    import safetensors.torch

    content = read_bytes(path)
    header, data = _split(content, path)
    about, metadata = _parse_header(header[8:], path)
    digest = metadata.get("digest")
    if digest is not None and _file_digest(header, data, digest) != digest:
        raise DamagedError(CHECKSUM_ERROR.format(path))
    check_version(about, path, version, oldest)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise DamagedError(DAMAGED.format(path, error)) from error
    if digest is None and metadata.get("sha256") != _tensor_digest(tensors):
        raise DamagedError(CHECKSUM_ERROR.format(path))
    return tensors, about


def read_metadata(path: Path, *, oldest: int = OLDEST_VERSION) -> dict[str, Any]:
    """Read the JSON object of a file of `write_tensors`, without its tensors and its checksum.

    Format versions from `oldest` on are read.

    Raises
    ------
    ModelError
        If the header is damaged, not written by poecaps, or of another format version.
    """
    with read_errors(path), open_regular(path) as file:
        length = _header_length(file.read(8), path.stat().st_size, path)
        about, _ = _parse_header(file.read(length - 8), path)
    check_version(about, path, oldest=oldest)
    return about


# Checksums. The digest of a file is the SHA-256 of all its bytes, except that the digest in them is
# replaced by zeros.
NO_DIGEST = "0" * 64


def _entry(digest: str) -> bytes:
    """Return the digest as it is in a header; in the texts of a header, quotes are escaped."""
    return f'"digest":"{digest}"'.encode()


def _file_digest(header: bytes, data: memoryview, digest: str) -> str:
    """Return the digest of a file whose header has the entry `digest`."""
    if not isinstance(digest, str) or header.count(_entry(digest)) != 1:
        return ""
    found = hashlib.sha256(header.replace(_entry(digest), _entry(NO_DIGEST)))
    found.update(data)
    return found.hexdigest()


def _tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of format version 2: names, dtypes, shapes and numbers of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Headers of safetensors files

DAMAGED = "{} is damaged, or not a safetensors file ({})"
CHECKSUM_ERROR = "{} is damaged: it does not match its checksum; use another copy"


def _header_length(start: bytes, size: int, path: Path) -> int:
    """Return the bytes before the tensors of a file, from its first 8 bytes and its size."""
    length = 8 + int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size, MAX_HEADER):
        raise DamagedError(DAMAGED.format(path, "its header is incomplete"))
    return length


def _split(content: bytes, path: Path) -> tuple[bytes, memoryview]:
    """Return what is before the tensors of a file, and the tensors."""
    length = _header_length(content[:8], len(content), path)
    return content[:length], memoryview(content)[length:]


def _parse_header(header: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON object in the header of a safetensors file, and all metadata."""
    try:
        metadata = parse_json(header)["__metadata__"]
        about = parse_json(metadata["about"])
    except (KeyError, TypeError):
        metadata, about = None, None
    except ValueError as error:
        raise DamagedError(DAMAGED.format(path, error)) from error
    if not isinstance(about, dict) or not isinstance(metadata, dict):
        raise DamagedError(f"{path} is a safetensors file that was not written by poecaps")
    return about, metadata
