"""What stands before the explorer: hosts, origins, sizes, slow clients, headers; on the wire and by ASGI alone."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from support.explorer_server import all_of, ask, say, served, tiny_run
from torchcaps.explore.middleware import DISCARDED, HEADERS, LARGEST, Guards, is_loopback, origins_of
from torchcaps.explore.run_registry import find_runs

JSON = (b"content-type", b"application/json")
HOST = (b"host", b"localhost:80")


async def echo(scope, receive, send):
    """Answers with the body, and a header that the guards own."""
    body = (await receive())["body"]
    headers = [(b"Cache-Control", b"public"), (b"x-own", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def call(*messages, method="POST", headers=(HOST, JSON), patience=10.0):
    """Status, headers and body that a guarded echo answers a request of these messages with; silence after them."""
    left, sent = list(messages), []

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/", "headers": list(headers)}
    asyncio.run(Guards(echo, origins_of("localhost", 80), patience)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def part(body: bytes, more: bool = False):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_comes_whole_and_headers_are_ours():
    status, headers, body = call(part(b"ab", True), part(b"", True), part(b"cd"))
    assert (status, body) == (200, b"abcd")
    assert headers[b"cache-control"] == b"no-store" and b"Cache-Control" not in headers and headers[b"x-own"] == b"1"
    assert all(headers[name.encode()] == value.encode() for name, value in HEADERS.items())


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost:81", "localhost.evil.example:80", "localhost:80@evil", "", "::1:80", "0.0.0.0"]
)
def test_a_foreign_host_is_refused(host):
    status, headers, body = call(part(b""), method="GET", headers=[(b"host", host.encode())])
    assert status == 400 and set(json.loads(body)) == {"error"} and headers[b"x-content-type-options"] == b"nosniff"


def test_there_is_one_host():
    assert call(part(b""), method="GET", headers=[])[0] == 400
    assert call(part(b""), method="GET", headers=[HOST, HOST])[0] == 400
    assert call(part(b""), method="GET", headers=[(b"host", b"LocalHost:80")])[0] == 200


def test_a_foreign_origin_may_not_post():
    for origin in (b"http://evil.example", b"null", b"https://localhost:80", b"http://localhost:81"):
        assert call(part(b""), headers=[HOST, JSON, (b"origin", origin)])[0] == 400
    assert call(part(b""), headers=[HOST, JSON, (b"origin", b"http://localhost:80")])[0] == 200
    assert call(part(b""), headers=[HOST, JSON, (b"origin", b"http://127.0.0.1")])[0] == 200
    assert call(part(b""), method="GET", headers=[HOST, (b"origin", b"http://evil.example")])[0] == 200


def test_only_json_may_be_posted():
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonx", b""):
        assert call(part(b""), headers=[HOST, (b"content-type", kind)])[0] == 415
    assert call(part(b""), headers=[HOST])[0] == 415
    assert call(part(b""), headers=[HOST, (b"content-type", b"Application/JSON; charset=utf-8")])[0] == 200


def test_the_cap_is_kept_to_the_byte():
    assert call(part(bytes(LARGEST)))[0] == 200
    assert call(part(bytes(LARGEST + 1)))[0] == 413
    pieces = [part(bytes(4096), True) for _ in range(16)]
    assert call(*pieces, part(b""))[0] == 200
    assert call(*pieces, part(b"x"))[0] == 413


def test_what_is_declared_too_large_is_not_awaited():
    for size in (DISCARDED + 1, 10**4000):
        assert call(headers=[HOST, JSON, (b"content-length", str(size).encode())])[0] == 413
    for size in (b"-1", b"x", b"1_0", "²".encode("latin-1")):
        assert call(headers=[HOST, JSON, (b"content-length", size)])[0] == 400
    assert call(part(b""), headers=[HOST, JSON, (b"content-length", b"000000000000")])[0] == 200


def test_a_body_that_never_ends_is_not_kept():
    assert call(*(part(bytes(1 << 16), True) for _ in range(17)))[0] == 413  # and the rest is not asked for


def test_a_slow_body_is_cut_and_a_broken_one_is_refused():
    status, headers, _ = call(part(b"{", True), patience=0.01)
    assert status == 408 and headers[b"connection"] == b"close"
    assert call(part(b"{", True), {"type": "http.disconnect"})[0] == 400


def test_addresses():
    assert is_loopback("127.0.0.1") and is_loopback("LOCALHOST") and not is_loopback("0.0.0.0")
    assert origins_of("192.0.2.7", 80) >= {"192.0.2.7", "192.0.2.7:80", "[::1]:80"}
    assert {"10.0.0.1:9", "localhost:9"} <= origins_of("10.0.0.1", 9)
    assert all(name.endswith(":9") for name in origins_of("0.0.0.0", 9)) and len(origins_of("0.0.0.0", 9)) > 3
    assert "0.0.0.0:9" not in origins_of("0.0.0.0", 9)


# ---------------------------------------------------------------------------------------------- on the wire


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(find_runs([tiny_run(tmp_path_factory.mktemp("run") / "a")]), patience=0.5) as found:
        yield found


def head(address, *lines: str, path: str = "/api/runs/0/draw", method: str = "POST") -> bytes:
    first = [f"{method} {path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Content-Type: application/json"]
    return ("\r\n".join([*first, *lines]) + "\r\n\r\n").encode()


def test_every_answer_has_the_headers(address):
    for path in ("/", "/api/runs", "/none", "/api/runs/0/draw"):
        headers = ask(address, "GET", path)[1]
        assert all(headers[name] == value for name, value in HEADERS.items()), path
        assert "server" not in headers


def test_a_foreign_host_on_the_wire(address):
    assert ask(address, "GET", "/", headers={"Host": "evil.example"})[0] == 400
    assert ask(address, "GET", "/api/runs", headers={"Host": f"localhost:{address.port}"})[0] == 200


@pytest.mark.parametrize(("size", "status"), [(LARGEST, 400), (LARGEST + 1, 413), (4 * LARGEST, 413)])
def test_sizes_on_the_wire(address, size, status):
    """Within the cap it is only not JSON that spaces are."""
    assert ask(address, "POST", "/api/runs/0/draw", b" " * size)[0] == status


def test_a_chunked_body_over_the_cap(address):
    chunks = [b"1000\r\n" + bytes(4096) + b"\r\n"] * 16
    with say(address, head(address, "Transfer-Encoding: chunked"), *chunks, b"1\r\nx\r\n0\r\n\r\n") as connection:
        assert all_of(connection).startswith(b"HTTP/1.1 413 ")


def test_a_huge_declared_body_is_refused_unread(address):
    with say(address, head(address, "Content-Length: 99999999999")) as connection:
        assert all_of(connection).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_stops_sending_is_cut_and_nobody_waits_for_it(address):
    with say(address, head(address, "Content-Length: 100"), b"{") as slow:
        assert ask(address, "GET", "/api/runs/0")[0] == 200
        assert all_of(slow).startswith(b"HTTP/1.1 408 ")


def test_a_silent_client_is_cut(address, monkeypatch):
    monkeypatch.setattr("torchcaps.explore.server.PATIENCE", 0.2)
    with say(address) as silent, say(address, b"GET / HT") as half:
        assert ask(address, "GET", "/api/runs")[0] == 200
        assert all_of_or_reset(silent) == b"" and all_of_or_reset(half) == b""


def all_of_or_reset(connection) -> bytes:
    try:
        return all_of(connection)
    except ConnectionResetError:
        return b""


def test_a_client_that_does_not_read_holds_nobody_up(address):
    request = head(address, path="/api/runs/0/examples/0", method="GET")
    with say(address, *[request] * 200):
        assert ask(address, "GET", "/api/runs/0")[0] == 200


def test_a_client_that_never_reads_is_cut(address, monkeypatch):
    """More answers wait for it than the system keeps; what it then sends is refused."""
    monkeypatch.setattr("torchcaps.explore.server.PATIENCE", 0.2)
    request = head(address, path="/static/style.css", method="GET")
    with pytest.raises(ConnectionError), say(address, *[request] * 1500) as deaf:
        for _ in range(600):
            deaf.sendall(b"\r\n")
            time.sleep(0.05)


def test_nonsense_on_the_wire(address):
    with say(address, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n") as connection:
        assert all_of(connection).startswith(b"HTTP/1.1 400 ")
    assert ask(address, "GET", "/api/runs")[0] == 200
