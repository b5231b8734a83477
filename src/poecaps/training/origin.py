"""Whether a run was started by this user: a mark of its data in `run.json`, made with a secret key.

A record names the path of its images, and one from elsewhere can name any path of this machine.
The mark shows that this user has named the path: it is a keyed hash, and the key is in a file of
the user that nobody else can read.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poecaps.training.config import Config

MARK = "origin"  # of a record
KEY, KEY_BYTES = "key", 32
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # no symbolic link
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO does not wait for a writer


def mark(config: Config) -> str | None:
    """Return a mark of the data that the options name, or None if there can be no key."""
    try:
        return _mark(_read_key(_key_file()), config)
    except FileNotFoundError:
        key = _make_key(_key_file())
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return None if key is None else _mark(key, config)


def is_ours(record: Mapping[str, Any], config: Config) -> bool:
    """Return whether this user has marked the data that the options in a record name."""
    found = record.get(MARK)
    if not isinstance(found, str):
        return False
    try:
        key = _read_key(_key_file())
    except (OSError, RuntimeError):
        return False
    return hmac.compare_digest(found.encode(errors="replace"), _mark(key, config).encode())


def _mark(key: bytes, config: Config) -> str:
    named = json.dumps([config.data, config.data_path])
    return hmac.new(key, named.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    """Return the file of the key, following the conventions of the system."""
    state = os.environ.get("XDG_STATE_HOME")
    if state:
        return Path(state) / "poecaps" / KEY
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path.home() / ".local" / "state"
    return base / "poecaps" / KEY


def _read_key(file: Path) -> bytes:
    """Read the key; raise OSError if others can read it, or if it is not one."""
    handle = os.open(file, os.O_RDONLY | NOFOLLOW | NONBLOCK | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(handle)
        is_private = os.name == "nt" or (
            status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        )
        if not (is_private and stat.S_ISREG(status.st_mode) and status.st_size == KEY_BYTES):
            raise OSError(errno.EPERM, "not a private key", os.fspath(file))
        return os.read(handle, KEY_BYTES)
    finally:
        os.close(handle)


def _make_key(file: Path) -> bytes | None:
    """Write a new key, unless another process is faster; return None if it cannot be written."""
    temporary = file.with_name(f".{KEY}-{secrets.token_hex(8)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as opened:  # noqa: PTH123 (an open file)
            opened.write(secrets.token_bytes(KEY_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            temporary.replace(file)
        return _read_key(file)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            temporary.unlink()
