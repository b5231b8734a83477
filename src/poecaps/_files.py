"""Files that are written completely or not at all, and JSON."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class ModelError(ValueError):
    """A file is not a valid model or checkpoint, or has an unsupported format version."""

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


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    ModelError
        If the file is not valid JSON, or holds another JSON value than an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, but holds a {type(value).__name__}")
    return value
