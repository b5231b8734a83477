"""Files: written completely or not at all, read if they are regular, owned by one process.

Every file of a model or a run goes through this module. `atomic_write` is the only function that
replaces a file, `open_regular` the only one that opens a file for reading.
"""

# ruff: noqa: PTH102, PTH105, PTH108, PTH110, PTH112, PTH116
# The functions of `os` by name: the tests replace `os` and `FileIO` in this module by ones that
# fail at any call.

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import unicodedata
import warnings
from contextlib import contextmanager
from datetime import datetime, timezone
from io import BufferedReader, BufferedWriter, FileIO
from time import sleep
from typing import IO, TYPE_CHECKING, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Flags that only some systems have.
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # no symbolic link
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO does not wait for a writer
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
BINARY = getattr(os, "O_BINARY", 0)

TEMPORARY = re.compile(r"\..*-[0-9a-f]{16}\.part")  # names of `_temporary`
MAX_JSON = 64 * 2**20  # bytes of a JSON file; those of a run have a few thousand
MAX_DEPTH = 50  # of lists and objects in each other; those of a run have about 5
OWNER_READS, OWNER_PAUSE = 20, 0.05  # attempts to read who owns a lock, and seconds between them
CHECKSUM = "checksum"  # of a JSON object, in the object itself
# Errors of a file system that has no locks, or whose folders cannot be flushed.
UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Errors of a disk that cannot read a file, or of a file system that finds it damaged.
UNREADABLE = tuple(
    getattr(errno, name)
    for name in ("EIO", "EBADMSG", "EUCLEAN", "ENODATA", "EREMOTEIO", "ESTALE")
    if hasattr(errno, name)
)


# Categories of characters: control, format (such as the direction of text), surrogates, separators.
CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")


class ModelError(ValueError):
    """A file is not a valid model or checkpoint, or has an unsupported format version."""

    __module__ = "poecaps"


class DamagedError(ModelError):
    """A file is not what was written: truncated, altered, unreadable, or another kind of file."""


class LockedError(OSError):
    """Another process owns a file."""


# Writing


@contextmanager
def atomic_write(path: Path, *, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces `path` when the block ends without an error.

    The content goes to a new file with an unpredictable name in the same folder, which is flushed
    to disk and then renamed; at last the folder is flushed. A crash at any moment leaves the old
    file or the new one.

    Parameters
    ----------
    path
        File to write. If it is a symbolic link, the link is replaced.
    previous
        File that keeps the old content of `path`, in the same folder. After a crash at any moment,
        one of both files is complete.
    """
    with contextlib.ExitStack() as stack:
        temporary, handle = _create_temporary(path)
        stack.callback(_unlink, temporary)
        with BufferedWriter(FileIO(handle, "wb")) as file:
            if fcntl is not None:  # the file stays locked until it has its final name
                stack.callback(os.close, os.dup(handle))
            yield file
            file.flush()
            os.fsync(file.fileno())
        old = None
        if previous is not None and path.exists():
            try:
                # Not to `previous` at once: `path` may be damaged, and the new file is not there.
                stack.callback(_unlink, old := _temporary(path))
                os.link(path, old)
            except OSError:  # a file system without hard links
                old = None
                os.replace(path, previous)
        os.replace(temporary, path)
        if old is not None and previous is not None:
            os.replace(old, previous)
        _flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder, unless there is one, and those above it; their names are flushed to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process may be faster
            os.mkdir(each)
        with contextlib.suppress(PermissionError):  # a folder that may be written, but not listed
            _flush_folder(each.parent)
    if not os.path.isdir(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(folder))


def append_line(path: Path, line: str) -> None:
    """Append a line to a regular file, which is created if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW | NONBLOCK | CLOEXEC | BINARY
    with BufferedWriter(FileIO(os.open(path, flags, 0o666), "ab")) as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder and its subfolders.

    A file that a living process writes is locked, and stays.
    """
    for file in temporary_files(folder):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if fcntl is not None:  # Windows does not delete an open file anyway
                handle = os.open(file, os.O_RDWR | NOFOLLOW | NONBLOCK | CLOEXEC)
                stack.callback(os.close, handle)
                _lock_temporary(handle)
            os.unlink(file)


def temporary_files(folder: Path) -> list[Path]:
    """Return the temporary files in a folder and its subfolders, of living and killed processes."""
    return [
        file
        for file in (*folder.glob(".*.part"), *folder.glob("*/.*.part"))
        if TEMPORARY.fullmatch(file.name)
        and (file.parent == folder or not file.parent.is_symlink())
    ]


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create a file in the folder of another one, and lock it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC | BINARY
    while True:
        temporary = _temporary(path)
        handle = os.open(temporary, flags, 0o666)
        try:
            if fcntl is None:
                return temporary, handle
            _lock_temporary(handle)
            if temporary.exists():  # another process may have deleted it before it was locked
                return temporary, handle
        except BlockingIOError:  # another process has locked it, perhaps for ever
            _unlink(temporary)
        except BaseException:
            os.close(handle)
            _unlink(temporary)
            raise
        os.close(handle)


def _lock_temporary(handle: int) -> None:
    """Lock an open file until it is closed, where the file system has locks.

    Raises
    ------
    BlockingIOError
        If another process has locked it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def own_folder(folder: Path) -> Path:
    """Return a folder within that of a run or a model, to write into.

    Raises
    ------
    OSError
        If it is a symbolic link: in a folder from elsewhere, it may lead anywhere.
    """
    if folder.is_symlink():
        raise OSError(
            f"{folder} is a symbolic link, so nothing is written there; replace it by a folder"
        )
    return folder


def _unlink(path: Path) -> None:
    """Delete a file if there is one and the system permits it; Windows does not if it is open."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _temporary(path: Path) -> Path:
    """Return a new name in the folder of a file; the file's name is shortened to fit."""
    return path.with_name(f".{path.name[:50]}-{secrets.token_hex(8)}.part")


def _flush_folder(folder: Path) -> None:
    """Flush the names of a folder to disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


# Reading


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading.

    Raises
    ------
    OSError
        If it is no regular file: reading a FIFO may never end, and neither may a device.
    """
    handle = os.open(path, os.O_RDONLY | NONBLOCK | CLOEXEC | BINARY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return BufferedReader(FileIO(handle, "rb"))


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise DamagedError, which names the file, if the disk cannot read it."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise DamagedError(f"{path} cannot be read ({error.strerror}); use another copy") from error


def read_bytes(path: Path) -> bytes:
    """Read a regular file in one call, so that it may be replaced meanwhile."""
    with read_errors(path), open_regular(path) as file:
        return file.read()


# JSON


def write_json(path: Path, value: Any, *, checksum: bool = False) -> None:
    """Write indented JSON, atomically; an object may hold a checksum of its other entries."""
    if checksum:
        value = value | {CHECKSUM: _json_digest(value)}
    with atomic_write(path) as file:
        file.write(f"{format_json(value, indent=2)}\n".encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without its checksum; if it has one, it must be right.

    Raises
    ------
    DamagedError
        If the file cannot be read, is not valid JSON, holds another JSON value than an object, or
        does not match its checksum.
    """
    with read_errors(path), open_regular(path) as file:
        content = file.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        raise DamagedError(f"{path} is too large: a JSON file may have {MAX_JSON:,} bytes")
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DamagedError(f"{path} is not a valid JSON file ({error})") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{path} must hold a JSON object, but holds a {type(value).__name__}")
    found = value.pop(CHECKSUM, None)
    if found is not None and found != _json_digest(value):
        raise DamagedError(f"{path} is damaged: it does not match its checksum; use another copy")
    return value


def format_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON with readable names; names of files that are not valid Unicode are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def parse_json(content: str | bytes) -> Any:
    """Parse JSON of moderate depth, so that no function that descends into it can fail for depth.

    Raises
    ------
    ValueError
        If it is not valid JSON, or lists and objects are nested too deeply.
    """
    too_deep = f"lists and objects are nested more than {MAX_DEPTH} times"
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(too_deep)


def _json_digest(value: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, whatever its spacing and the order of its entries."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Locks


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Own a file that other processes must own for the same purpose.

    The system releases the lock when the process ends, however it ends. The file is deleted at the
    end of the block; one that a killed process left behind is not locked.

    Raises
    ------
    LockedError
        If another process owns it. The message tells which one, and since when.
    """
    owner = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with contextlib.ExitStack() as stack:
        handle = _acquire(path)
        stack.callback(os.close, handle)
        stack.callback(_unlink, path)
        os.write(handle, json.dumps(owner).encode())
        yield


def _acquire(path: Path) -> int:
    """Open, lock and empty a file."""
    while True:
        # Nobody else may read it: whoever can open a file can also lock it, for ever.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW | NONBLOCK | CLOEXEC, 0o600)
        try:
            _lock_handle(handle)
            os.ftruncate(handle, 0)  # the text of a killed owner
            # The owner before us may have deleted the file after we opened it.
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            owner = _read_owner(handle)
            os.close(handle)
            raise LockedError(f"{path.parent} is in use by {owner}") from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock_handle(handle: int) -> None:
    """Lock an open file; raise BlockingIOError if another process has locked it."""
    if fcntl is None:
        import msvcrt

        try:
            os.lseek(handle, MAX_JSON, os.SEEK_SET)  # behind the text, which others may read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warnings.warn(
            f"the file system has no locks ({error}); let only one process at a time use a folder",
            RuntimeWarning,
            stacklevel=2,
        )


def _read_owner(handle: int) -> str:
    """Describe the process that has locked a file, and may be about to write its text."""
    for _ in range(OWNER_READS):
        os.lseek(handle, 0, os.SEEK_SET)
        try:
            owner = parse_json(os.read(handle, 4096))
            return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
        except (ValueError, TypeError, KeyError):
            sleep(OWNER_PAUSE)
    return "another process"


# Names on a terminal


def printable(text: str) -> str:
    """Escape control characters, such as those of file names, except the ends of lines."""
    return "".join(
        each.encode("unicode_escape").decode() if _is_control(each) else each for each in text
    )


def _is_control(character: str) -> bool:
    """Return whether a terminal may obey a character instead of showing it."""
    return character != "\n" and unicodedata.category(character) in CONTROLS
