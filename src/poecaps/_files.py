"""Files that hold weights: safetensors with a checksum, put in place at once or not at all, never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class ModelError(ValueError):
    """A file is no model or checkpoint of ours, or a damaged one, or of a version we do not know."""

    __module__ = "poecaps"


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces `path` when the block ends without an error.

    The content goes to a temporary file with an unpredictable name in the same folder, which is
    flushed to disk and then renamed. After a crash or on a full disk, the old file is intact.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write bytes to a file with `atomic_write`."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, where an object is due")
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON object about them, atomically."""
    import safetensors.torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"about": json.dumps(about, ensure_ascii=False), "sha256": _digest(whole)}
    write_atomically(path, safetensors.torch.save(whole, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote.

    Raises
    ------
    ModelError
        If the file is damaged, cut short or was not written by us.
    """
    import safetensors.torch

    content = path.read_bytes()  # at once, for the file may be replaced by a newer one meanwhile
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ModelError(f"{path} is a damaged file, or no safetensors file ({error})") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.get("__metadata__", {})
    if "about" not in metadata or "sha256" not in metadata:
        raise ModelError(f"{path} is a safetensors file, but none that poecaps wrote")
    if _digest(tensors) != metadata["sha256"]:
        raise ModelError(
            f"{path} is damaged: its weights do not match their checksum; use another copy"
        )
    try:
        about = json.loads(metadata["about"])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ModelError(f"{path} is a safetensors file, but none that poecaps wrote")
    return tensors, about


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
