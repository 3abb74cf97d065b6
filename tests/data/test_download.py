"""A server that does everything wrong: the target is the right file or absent, and what is left is worth keeping."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchcaps.data import download as module
from torchcaps.data.download import bar, digest, download
from torchcaps.errors import DataError

BODY = hashlib.shake_256(b"body").digest(300_000)
OTHER = bytes([BODY[0] ^ 1]) + BODY[1:]
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()
HALF = len(BODY) // 2


class Server:
    """One thread on 127.0.0.1; `answer` is what it does, `asked` the path and range of each request."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = whole
        self.asked: list[tuple[str, str | None]] = []
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers["Range"]))
                try:
                    server.answer(self)
                except OSError:  # the client has had enough
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"

    @property
    def ranges(self) -> list[str | None]:
        return [wanted for _, wanted in self.asked]


def head(handler: BaseHTTPRequestHandler, code: int, **headers: object) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def whole(handler: BaseHTTPRequestHandler) -> None:
    head(handler, 200, Content_Length=len(BODY))
    handler.wfile.write(BODY)


def ranged(handler: BaseHTTPRequestHandler) -> None:
    """A good server: a range where one is asked for."""
    wanted = handler.headers["Range"]
    if wanted is None:
        return whole(handler)
    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
    head(handler, 206, Content_Length=len(BODY) - start, Content_Range=f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
    handler.wfile.write(BODY[start:])
    return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.httpd.shutdown()
    server.httpd.server_close()
    thread.join()


def get(server: Server, target: Path, path: str = "/file.gz", **options: object) -> None:
    settings: dict[str, object] = {"size": len(BODY), "sha256": SHA256, "timeout": 10, **options}
    download(server.url + path, target, **settings)


def refused(server: Server, target: Path, match: str, left: bytes | None = None, **options: object) -> None:
    """The download fails with one line, no target, and exactly `left` in the .part."""
    with pytest.raises(DataError, match=match) as caught:
        get(server, target, **options)
    assert "\n" not in str(caught.value) and target.name in str(caught.value)
    files = {path.name: path.read_bytes() for path in target.parent.iterdir()} if target.parent.exists() else {}
    assert files == ({} if left is None else {target.name + ".part": left})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "set" / "file.gz"


def with_part(target: Path, content: bytes) -> Path:
    target.parent.mkdir(exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    return part


@pytest.mark.parametrize("pin", [{"sha256": SHA256}, {"sha256": None, "md5": MD5}, {"md5": "0" * 32}])
def test_a_good_file_arrives_whole_and_alone(server, target, pin):
    seen: list[int] = []
    get(server, target, progress=seen.append, **pin)
    assert target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["file.gz"]
    assert seen == sorted(seen) and seen[-1] == len(BODY)


def test_without_a_size_the_limit_is_most(server, target):
    get(server, target, size=None, most=len(BODY))
    assert target.read_bytes() == BODY
    target.unlink()
    refused(server, target, "are offered", size=None, most=len(BODY) - 1)


@pytest.mark.parametrize("options", [{"sha256": None}, {"size": None}])
def test_an_unpinned_file_is_not_even_asked_for(server, target, options):
    refused(server, target, "only pinned files", **options)
    assert server.asked == []


@pytest.mark.parametrize("start", [1, HALF, len(BODY) - 1])
@pytest.mark.parametrize("total", [str(len(BODY)), "*"])
def test_a_part_is_resumed(server, target, start, total):
    def answer(handler):
        head(handler, 206, Content_Length=len(BODY) - start, Content_Range=f"bytes {start}-{len(BODY) - 1}/{total}")
        handler.wfile.write(BODY[start:])

    server.answer = answer
    with_part(target, BODY[:start])
    get(server, target)
    assert target.read_bytes() == BODY
    assert server.ranges == [f"bytes={start}-"]


def test_a_whole_part_is_only_checked(server, target):
    with_part(target, BODY)
    get(server, target)
    assert target.read_bytes() == BODY and server.asked == []


def test_a_server_that_ignores_the_range_starts_anew(server, target):
    with_part(target, OTHER[:HALF])
    get(server, target)
    assert target.read_bytes() == BODY and server.ranges == [f"bytes={HALF}-"]


@pytest.mark.parametrize(
    "content_range",
    ["bytes 0-10/11", f"bytes {HALF}-{len(BODY) - 1}/{len(BODY) + 1}", f"bytes {HALF}-{HALF}/{len(BODY)}", "what", ""],
)
def test_a_wrong_content_range_starts_anew(server, target, content_range):
    def answer(handler):
        if handler.headers["Range"] is None:
            return whole(handler)
        head(handler, 206, Content_Length=HALF, Content_Range=content_range)
        handler.wfile.write(b"x" * HALF)
        return None

    server.answer = answer
    with_part(target, BODY[:HALF])
    get(server, target)
    assert target.read_bytes() == BODY and server.ranges == [f"bytes={HALF}-", None]


def test_a_refused_range_starts_anew(server, target):
    server.answer = lambda handler: whole(handler) if handler.headers["Range"] is None else head(handler, 416)
    with_part(target, BODY[:HALF])
    get(server, target)
    assert target.read_bytes() == BODY and server.ranges == [f"bytes={HALF}-", None]


@pytest.mark.parametrize("content", [OTHER[:HALF], OTHER, BODY + b"more"], ids=["half", "whole", "long"])
def test_a_part_with_other_bytes_is_thrown_away_and_the_file_still_comes(server, target, content):
    server.answer = ranged
    with_part(target, content)
    get(server, target)
    assert target.read_bytes() == BODY and server.ranges[-1] is None


def test_altered_bytes_are_refused_and_not_kept(server, target):
    def altered(handler):
        head(handler, 200, Content_Length=len(OTHER))
        handler.wfile.write(OTHER)

    server.answer = altered
    refused(server, target, "SHA-256 [0-9a-f]{12}, not " + SHA256[:12])
    refused(server, target, "MD5 [0-9a-f]{12}, not " + MD5[:12], sha256=None, md5=MD5)
    with_part(target, BODY[:HALF])  # a good part, and then an answer that replaces it by wrong bytes
    refused(server, target, "other bytes came")


def test_a_cut_leaves_a_part_that_the_next_attempt_goes_on_from(server, target):
    def cut(handler):
        head(handler, 200, Content_Length=len(BODY))
        handler.wfile.write(BODY[:HALF])

    server.answer = cut
    refused(server, target, "ended after 150,000 of 300,000 bytes; try again", left=BODY[:HALF])
    server.answer = ranged
    get(server, target)
    assert target.read_bytes() == BODY and server.ranges == [None, f"bytes={HALF}-"]


def test_a_cut_without_a_length_is_noticed(server, target):
    def cut(handler):
        head(handler, 200)
        handler.wfile.write(BODY[:HALF])

    server.answer = cut
    refused(server, target, "ended after", left=BODY[:HALF])


def test_a_cut_in_a_chunked_body_is_noticed(server, target):
    def cut(handler):
        handler.protocol_version = "HTTP/1.1"
        head(handler, 200, Transfer_Encoding="chunked")
        handler.wfile.write(b"%x\r\n" % len(BODY) + BODY[:HALF])

    server.answer = cut
    refused(server, target, "try again", left=BODY[:HALF])


def test_a_chunked_body_arrives(server, target):
    def chunked(handler):
        handler.protocol_version = "HTTP/1.1"
        head(handler, 200, Transfer_Encoding="chunked")
        for piece in (BODY[:HALF], BODY[HALF:]):
            handler.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    server.answer = chunked
    get(server, target)
    assert target.read_bytes() == BODY


def test_a_connection_left_open_after_the_last_byte_is_not_waited_for(server, target):
    def lingering(handler):
        whole(handler)
        handler.wfile.flush()
        server.over.wait(30)

    server.answer = lingering
    get(server, target, timeout=5)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("sent", [0, HALF], ids=["at once", "half way"])
def test_a_stall_ends(server, target, sent):
    def stall(handler):
        head(handler, 200, Content_Length=len(BODY))
        handler.wfile.write(BODY[:sent])
        handler.wfile.flush()
        server.over.wait(30)

    server.answer = stall
    refused(server, target, "stalled", left=BODY[:sent] or None, timeout=0.3)


def test_a_server_that_never_answers_ends(server, target):
    server.answer = lambda handler: server.over.wait(30) and None
    refused(server, target, "stalled, no answer in time", timeout=0.3)


def test_a_drip_is_a_stall(server, target):
    def drip(handler):
        head(handler, 200, Content_Length=len(BODY))
        for byte in BODY:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            if server.over.wait(0.02):
                return

    server.answer = drip
    with pytest.raises(DataError, match="stalled at"):
        get(server, target, timeout=0.3)
    part = target.with_name("file.gz.part").read_bytes()
    assert 0 < len(part) < 1024 and BODY.startswith(part) and not target.exists()


@pytest.mark.parametrize("length", [0, 5, len(BODY) - 1, len(BODY) + 1, 10**15])
def test_another_length_is_refused_before_a_byte_is_written(server, target, length):
    server.answer = lambda handler: head(handler, 200, Content_Length=length)
    refused(server, target, f"{length:,} bytes are offered, 300,000 are wanted")


def test_no_more_than_the_size_is_ever_written(server, target):
    def endless(handler):
        head(handler, 200)
        while not server.over.is_set():
            handler.wfile.write(BODY)

    server.answer = endless
    seen: list[int] = []
    refused(server, target, "more than the 300,000 bytes", progress=seen.append)
    assert max(seen, default=0) <= len(BODY)


@pytest.mark.parametrize("code", [204, 206, 301, 304, 403, 404, 416, 500, 503])
def test_another_status_is_refused_and_an_earlier_part_stays(server, target, code):
    server.answer = lambda handler: head(handler, code, Content_Length=0)
    refused(server, target, f"the answer was {code}")
    with_part(target, BODY[:HALF])
    refused(server, target, f"the answer was {code}", left=BODY[:HALF])


@pytest.mark.parametrize(
    "location",
    [
        "http://example.com/file.gz",
        "ftp://127.0.0.1/file.gz",
        "file:///etc/hostname",
        "data:,x",
        "gopher://x",
        "http://[",
    ],
)
def test_a_redirect_elsewhere_is_not_followed(server, target, location):
    server.answer = lambda handler: head(handler, 302, Location=location, Content_Length=0)
    refused(server, target, "not followed|not allowed|no address|answer was 302")
    assert len(server.asked) == 1


def redirects(server: Server, count: int) -> Callable[[BaseHTTPRequestHandler], None]:
    """/5 leads to /4 and so on to /0, which is the file; each with a body that must not be read to its end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        left = count if handler.path == "/file.gz" else int(handler.path[1:])
        if left == 0:
            return ranged(handler)
        head(handler, 302, Location=f"{server.url}/{left - 1}")
        while not server.over.is_set():
            handler.wfile.write(BODY)
        return None

    return answer


def test_five_redirects_are_followed_and_keep_the_range(server, target):
    server.answer = redirects(server, 5)
    with_part(target, BODY[:HALF])
    get(server, target)
    assert target.read_bytes() == BODY
    assert [path for path, _ in server.asked] == ["/file.gz", "/4", "/3", "/2", "/1", "/0"]
    assert set(server.ranges) == {f"bytes={HALF}-"}


def test_six_redirects_are_too_many(server, target):
    server.answer = redirects(server, 6)
    refused(server, target, "302")
    assert len(server.asked) == 6


def test_https_is_never_left(target):
    handler = module._Redirects()
    request = module.urllib.request.Request("https://example.com/file.gz")
    with pytest.raises(module._RefusedError, match="redirected from https"):
        handler.redirect_request(request, io.BytesIO(), 302, "Found", {}, "http://127.0.0.1/file.gz")
    assert handler.redirect_request(request, io.BytesIO(), 302, "Found", {}, "https://example.org/x") is not None


@pytest.mark.parametrize(
    "url",
    ["http://example.com/file.gz", "ftp://example.com/x", "file:///etc/hostname", "file.gz", "", "http://[", "//x"],
)
def test_only_https_is_asked(target, url):
    with pytest.raises(DataError, match=r"file\.gz from"):
        download(url, target, size=1, sha256=SHA256)
    assert not target.parent.exists()


def test_loopback_is_this_machine_only():
    assert [module._is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1")] == [True] * 4
    assert not any(module._is_loopback(host) for host in ("", "0.0.0.0", "10.0.0.1", "127.0.0.1.example.com"))


def test_nobody_there_is_one_line(server, target):
    server.httpd.server_close()
    refused(server, target, "try again")


def test_a_server_that_speaks_something_else_is_one_line(server, target):
    server.answer = lambda handler: handler.wfile.write(b"\x1b[31mhello\r\nworld\r\n\r\n")
    with pytest.raises(DataError) as caught:
        get(server, target)
    assert str(caught.value).isprintable() and not target.exists()


def test_two_downloads_do_not_mix(server, target):
    fcntl = pytest.importorskip("fcntl")
    part = with_part(target, BODY[:HALF])
    with part.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(server, target, "another process", left=BODY[:HALF])
    get(server, target)
    assert target.read_bytes() == BODY


def test_a_part_that_is_a_link_is_not_written_through(server, target, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    target.parent.mkdir()
    target.with_name("file.gz.part").symlink_to(precious)
    with pytest.raises(DataError):
        get(server, target)
    assert precious.read_bytes() == b"precious" and not target.exists()


def test_a_folder_that_cannot_be_made_is_one_line(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file\.gz from"):
        get(server, tmp_path / "file" / "file.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing(server, target, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    refused(server, target, "No space left")


def test_an_interrupt_keeps_what_came(server, target):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(server, target, progress=interrupt)
    part = target.with_name("file.gz.part").read_bytes()
    assert part and BODY.startswith(part) and not target.exists()


def test_digest_is_that_of_hashlib():
    assert digest(io.BytesIO(BODY)) == SHA256
    assert digest(io.BytesIO(BODY), md5=True) == MD5


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_the_bar_is_for_terminals(monkeypatch, terminal, shown):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(module.sys, "stderr", stream)
    with bar("file.gz", 100, shown) as progress:
        if progress:
            progress(50)
    assert (progress is not None) == (terminal and shown) == ("file.gz" in stream.getvalue())
