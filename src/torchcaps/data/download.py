"""Download one pinned file over HTTPS: beside the target, resumed if it can be, checked, and only then renamed.

The target is the whole right file or not there. What a failure leaves behind is at most `target.part` after a network
error, from where the next attempt goes on; bytes that are wrong are never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import ipaddress
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from torchcaps.errors import DataError

__all__ = ["bar", "digest", "download"]

_CHUNK = 1 << 18
_SLOWEST = 1024  # bytes in each `timeout`; less is a stall, however regularly it drips
_REDIRECTS = 5


class _RefusedError(Exception):
    """The answer is no use, and none of it was written: what came before stays as it is."""


class _CutError(_RefusedError):
    """The network failed: what has come so far is worth keeping."""


@dataclass(frozen=True)
class _Job:
    """What is to be had from where; `limit` bytes at most, exactly `size` where that is known."""

    url: str
    size: int | None
    limit: int
    opener: urllib.request.OpenerDirector
    timeout: float
    progress: Callable[[int], None] | None


def download(
    url: str,
    target: Path,
    *,
    size: int | None,
    sha256: str | None = None,
    md5: str | None = None,
    opener: urllib.request.OpenerDirector | None = None,
    timeout: float = 20,
    most: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Bring `url` to `target`: `size` bytes (or up to `most`) whose SHA-256 (or, without one, MD5) is as given.

    `progress` is told how many bytes are there. Anything that goes wrong is a DataError.
    """
    limit = size if size is not None else most
    if limit is None or not (sha256 or md5):
        raise DataError(f"{target.name}: no hash or size is known; only pinned files are downloaded: get it by hand")
    part = target.with_name(target.name + ".part")
    with _one_line(f"{target.name} from {url[:200]}"):
        _check_url(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(part) as file:
            job = _Job(url, size, limit, opener or _opener(), timeout, progress)
            _fill_and_check(file, job, sha256, md5)
            os.fsync(file.fileno())
        part.replace(target)


def digest(stream: io.BufferedIOBase, *, md5: bool = False) -> str:
    """SHA-256, or MD5, of all that a stream still holds, in hexadecimal digits."""
    hashed = hashlib.md5(usedforsecurity=False) if md5 else hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        hashed.update(chunk)
    return hashed.hexdigest()


@contextlib.contextmanager
def bar(name: str, size: int | None, shown: bool = True) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error, fed with the bytes so far; nothing where that is not a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown_bar:
        task = shown_bar.add_task(name, total=size)
        yield lambda count: shown_bar.update(task, completed=count)


def _fill_and_check(file: io.BufferedRandom, job: _Job, sha256: str | None, md5: str | None) -> None:
    """Fill the file; if what was resumed turns out wrong, once more from the start; wrong again is an error."""
    wanted = sha256 or md5
    resumed = _fill(file, job)
    if (found := _digest_of(file, sha256 is None)) != wanted and resumed:
        file.truncate(0)
        _fill(file, job)
        found = _digest_of(file, sha256 is None)
    if found != wanted:
        kind = "SHA-256" if sha256 else "MD5"
        raise DataError(f"other bytes came than are wanted: {kind} {found[:12]}, not {(wanted or '')[:12]}")


def _digest_of(file: io.BufferedRandom, md5: bool) -> str:
    file.flush()
    file.seek(0)
    return digest(file, md5=md5)


def _fill(file: io.BufferedRandom, job: _Job) -> bool:
    """Get what the file lacks; True if any of it was there before."""
    start = file.seek(0, os.SEEK_END)
    if start == job.size:
        return True
    response, start = _answer(job, start if start < (job.size or 0) else 0)
    with response:
        end = None if response.length is None else start + response.length
        if end is not None and (end > job.limit or end != (job.size or end)):
            raise _RefusedError(f"{end:,} bytes are offered, {job.limit:,} are wanted")
        file.seek(start)
        file.truncate()
        _copy(response, file, job, start, end)
    return start > 0


def _answer(job: _Job, start: int) -> tuple[http.client.HTTPResponse, int]:
    """The server's answer, and the byte it begins with: `start` if it can resume, else 0."""
    if start and job.size is not None and (response := _open(job, start)) is not None:
        if response.status == 200:
            return response, 0  # it knows no ranges and sends everything
        ranges = [f"bytes {start}-{job.size - 1}/{total}" for total in (job.size, "*")]
        if response.status == 206 and response.headers.get("Content-Range") in ranges:
            return response, start
        response.close()
    response = _open(job, 0)
    if response is None or response.status != 200:
        raise _RefusedError(f"a whole file was asked for, the answer was {response.status if response else 416}")
    return response, 0


def _open(job: _Job, start: int) -> http.client.HTTPResponse | None:
    """Ask for the file from byte `start` on; None if the server refuses that range."""
    headers = {"User-Agent": "torchcaps", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        answer = job.opener.open(urllib.request.Request(job.url, headers=headers), timeout=job.timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            return None
        raise _RefusedError(f"the answer was {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(_reason(error)) from error
    except ValueError as error:
        raise _RefusedError(f"redirected to no address ({error})") from error
    if not isinstance(answer, http.client.HTTPResponse):
        raise _RefusedError("the answer was not HTTP")
    return answer


def _copy(response: http.client.HTTPResponse, file: io.BufferedRandom, job: _Job, count: int, end: int | None) -> None:
    """Append the body up to its `end`, `limit` bytes and no more; a stalled, slow or short body is a _CutError."""
    since = time.monotonic()
    before = count
    last = job.limit + 1 if end is None else end
    while count < last and (chunk := _read(response, min(_CHUNK, last - count))):
        count += len(chunk)
        if count > job.limit:
            raise DataError(f"more than the {job.limit:,} bytes that are wanted came")
        file.write(chunk)
        if job.progress:
            job.progress(count)
        if time.monotonic() - since > job.timeout:
            if count - before < _SLOWEST:
                raise _CutError(f"stalled at {count:,} bytes")
            since = time.monotonic()
            before = count
    if count < (end or job.size or 0):
        raise _CutError(f"ended after {count:,} of {job.limit:,} bytes")


def _read(response: http.client.HTTPResponse, most: int) -> bytes:
    """What has come, up to `most` bytes, without waiting for all of them."""
    try:
        return response.read1(most)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _CutError(_reason(error)) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow a few redirects, from HTTPS to nothing else."""

    max_redirections = _REDIRECTS

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(req.full_url).scheme == "https" and urlsplit(newurl).scheme != "https":
            raise _RefusedError(f"redirected from https: to {newurl[:80]}; only https: is followed")
        _check_url(newurl)
        fp.close()  # else urllib would read all of a body that nobody wants
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS and nothing else: no file:, no ftp:, no data:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _check_url(url: str) -> None:
    """HTTPS, or HTTP to this very machine."""
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return
    raise _RefusedError(f"address {url[:80]} is not followed; only https: is")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[io.BufferedRandom]:
    """The .part file, for this process alone; afterwards it is kept only if whole or worth resuming."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    keep = True
    try:
        with os.fdopen(os.open(part, flags, 0o666), "r+b") as file:
            _lock(file, part)
            keep = False
            try:
                yield file
                keep = True
            except (_RefusedError, KeyboardInterrupt):
                keep = file.seek(0, os.SEEK_END) > 0
                raise
    finally:
        if not keep:
            part.unlink(missing_ok=True)


def _lock(file: io.BufferedRandom, part: Path) -> None:
    """Hold the file until it is closed, where the system can; two downloads into one would mix their bytes."""
    if sys.platform != "win32":
        import fcntl

        busy = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:
            return  # a file system without locks
        if busy or not (part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat())):
            raise DataError("another process is downloading it; wait for that one")


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever goes wrong into one line that begins with `what`."""
    try:
        yield
    except _CutError as error:
        raise DataError(f"{what}: {_reason(error)}; try again") from error
    except (_RefusedError, DataError, OSError, ValueError) as error:
        raise DataError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The text of an error as one printable line."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "stalled, no answer in time"
    text = str(getattr(error, "reason", None) or error) or type(error).__name__
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]
