"""Files that are whole or not there: written beside, synced, renamed; and folders that one process at a time has."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchcaps.errors import TrainingError

__all__ = ["cache_dir", "folder_lock", "make_folder", "parse_json", "read_regular", "write_atomically"]


def cache_dir() -> Path:
    """Return the folder of what can be made or downloaded again: $XDG_CACHE_HOME/torchcaps, or ~/.cache/torchcaps."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "torchcaps"


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; a pipe, a device or a folder is refused instead of waited for.

    Args:
        path: The file.
        limit: The most bytes that it may hold.

    Raises:
        OSError: There is no such file, it is no regular file or larger, or it cannot be read.
    """
    # Not blocking, since opening a pipe waits for a writer; a pipe's size is 0, so its kind is asked, not its size.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return data


def parse_json(text: str | bytes) -> object:
    """Parse JSON, whatever it is.

    Raises:
        ValueError: It is not JSON, holds a number of thousands of digits, or nests too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file; at any moment, kill -9 included, `path` is the whole old file or the whole new one.

    Whatever the disk refuses becomes a TrainingError and leaves nothing behind.
    """
    # Beside the target, since a rename is atomic only within one file system
    temporary = path.parent / f".torchcaps-{_owner()}.tmp"
    try:
        # Clear what killed processes left, write and sync the new file, then rename it over the old one
        _sweep(path.parent)
        _write(temporary, chunks)
        temporary.replace(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TrainingError(
            f"cannot write {str(path)!r}: {reason}; an earlier file there is untouched: "
            "free space, or give the path of a file in a folder that can be written"
        ) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()  # after success it has become `path` and is no longer there
    _sync_folder(path.parent)


def make_folder(folder: Path, option: str = "--out") -> Path:
    """Make a folder and those above it, unless they are there.

    Args:
        folder: Its path.
        option: The option of a command that named it, for errors.

    Returns:
        The folder.

    Raises:
        TrainingError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = next((f"'{path}' is a file" for path in (folder, *folder.parents) if path.is_file()), reason)
        raise TrainingError(f"cannot make the folder '{folder}': {reason}; choose another {option}") from None
    return folder


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes that ask, too, out of a folder; TrainingError if one has it.

    The lock is on the folder itself: it leaves no file behind and ends with its process, however that ends. Where the
    file system knows no locks nobody is kept out.
    """
    if sys.platform == "win32":  # folders have no locks there
        yield
        return
    import fcntl

    try:
        # Opening a folder for reading is enough to lock it
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"cannot open the folder '{folder}': {error.strerror}; choose another --out") from None
    try:
        # File systems without locks raise OSError; only a lock that another process holds is an error
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(
                    f"another process is training into '{folder}'; wait for it, stop it, or choose another --out"
                ) from None
        yield
    finally:
        os.close(handle)


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    with path.open("xb") as file:
        file.writelines(chunks)
        # Synced before the rename, or a power cut could leave the new name with an empty file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Let the new name outlast a power cut where the file system can; else old or new is there, and whole."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _owner() -> str:
    return f"{os.getpid()}-{threading.get_native_id()}"


def _sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left behind; those of living ones stay."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            # Names are checked closely, since whatever matches may be deleted
            match = re.fullmatch(r"\.torchcaps-((\d{1,9})-\d{1,9})\.tmp", path.name, re.ASCII)
            if match and (match[1] == _owner() or not _is_alive(int(match[2]))):
                path.unlink()


def _is_alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # there, os.kill would end the process it asks about
    # Signal 0 only asks; a process of another user is alive, but may not be asked
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
