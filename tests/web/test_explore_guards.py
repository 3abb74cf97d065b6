"""Access rules of the explorer's server, on the wire: hosts, origins, sizes, slow clients, headers."""

from __future__ import annotations

import time

import pytest

from support.explorer_server import ask, connect, raw_request, read_all, served, tiny_run
from torchcaps.explore import server
from torchcaps.explore.middleware import HEADERS, MAX_BODY, MAX_DISCARDED, allowed_hosts, is_loopback
from torchcaps.explore.run_registry import find_runs

DRAW = "/api/runs/0/draw"
TIMEOUT = 1


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(find_runs([tiny_run(tmp_path_factory.mktemp("run") / "a")]), timeout=TIMEOUT) as found:
        yield found


def test_every_response_has_the_headers(address):
    bad_host = {"Host": "evil.example"}
    for path, headers in (("/", {}), ("/api/runs", {}), ("/none", {}), (DRAW, {}), ("/", bad_host)):
        response = ask(address, "GET", path, headers=headers)[1]
        assert all(response[name] == value for name, value in HEADERS.items()), path
        assert "server" not in response


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "localhost:80@evil", "", "::1:80", "0.0.0.0", "[::1", "x, y"]
)
def test_a_foreign_host_is_refused(address, host):
    assert ask(address, "GET", "/", headers={"Host": host})[0] == 400
    assert ask(address, "POST", DRAW, {}, {"Host": host})[0] == 400


def test_own_hosts_are_served(address):
    for host in ("localhost", "LocalHost", "127.0.0.1", "[::1]"):
        assert ask(address, "GET", "/api/runs", headers={"Host": f"{host}:{address.port}"})[0] == 200


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: evil.example\r\n", "Host: a\r\nHost: a\r\n"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_there_is_one_host(address, hosts, version):
    with connect(address, f"GET /api/runs HTTP/{version}\r\n{hosts}\r\n".encode()) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_the_hosts_of_an_address():
    assert is_loopback("127.0.0.1") and is_loopback("LOCALHOST") and not is_loopback("0.0.0.0")
    assert allowed_hosts("192.0.2.7") == ["127.0.0.1", "192.0.2.7", "[::1]", "localhost"]
    assert len(allowed_hosts("0.0.0.0")) > 3 and "0.0.0.0" not in allowed_hosts("0.0.0.0")


def test_a_foreign_origin_may_not_post(address):
    own = f"http://{address.host}:{address.port}"
    for origin in ("http://evil.example", "null", f"https://{own[7:]}", f"http://{address.host}:1", own + ".evil", ""):
        assert ask(address, "POST", DRAW, {}, {"Origin": origin})[0] == 400, origin
        assert "origin" in ask(address, "POST", DRAW, {}, {"Origin": origin})[2]["error"]
    assert "missing key" in ask(address, "POST", DRAW, {}, {"Origin": own})[2]["error"]
    assert ask(address, "GET", "/api/runs", headers={"Origin": "http://evil.example"})[0] == 200


def test_only_json_may_be_posted(address):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        assert ask(address, "POST", DRAW, b"{}", {"Content-Type": media_type})[0] == 415
    assert ask(address, "POST", DRAW, b"{}", {"Content-Type": "Application/JSON; charset=utf-8"})[0] == 400


@pytest.mark.parametrize(("size", "status"), [(MAX_BODY, 400), (MAX_BODY + 1, 413), (4 * MAX_BODY, 413)])
def test_the_cap_is_exact(address, size, status):
    """Spaces within the cap are refused only because they are not JSON."""
    assert ask(address, "POST", DRAW, b" " * size)[0] == status


@pytest.mark.parametrize(("rest", "status"), [(b"0\r\n\r\n", b"400"), (b"1\r\nx\r\n0\r\n\r\n", b"413")])
def test_the_cap_holds_for_chunked_bodies(address, rest, status):
    chunks = [b"1000\r\n" + bytes(4096) + b"\r\n"] * (MAX_BODY // 4096)
    request = raw_request(address, DRAW, "Transfer-Encoding: chunked", "Connection: close")
    with connect(address, request, *chunks, rest) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("size", [MAX_DISCARDED + 1, 99999999999, "x", "-1"])
def test_a_huge_or_senseless_length_is_refused_unread(address, size):
    status = b"413" if isinstance(size, int) else b"400"
    with connect(address, raw_request(address, DRAW, f"Content-Length: {size}")) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 " + status)


def test_a_chunked_body_without_end_is_refused(address):
    chunks = [b"10000\r\n" + bytes(1 << 16) + b"\r\n"] * (MAX_DISCARDED // (1 << 16) + 1)
    with connect(address, raw_request(address, DRAW, "Transfer-Encoding: chunked"), *chunks) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_slow_clients_are_cut_in_time_and_block_nobody(address):
    """One that stops within its body, one that says nothing, one that stops within its first line."""
    body = connect(address, raw_request(address, DRAW, "Content-Length: 100"), b"{")
    with body, connect(address) as silent, connect(address, b"GET / HT") as half:
        start = time.monotonic()
        assert ask(address, "GET", "/api/runs/0")[0] == 200
        assert read_all(body).startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b"" and read_all(half) == b""
        assert time.monotonic() - start < 20 * TIMEOUT  # a busy machine has time, but not for ever


def test_a_client_that_never_reads_is_cut_and_blocks_nobody(address):
    """More responses wait for it than the system buffers; what it then sends is refused."""
    request = raw_request(address, "/static/style.css", method="GET")
    with pytest.raises(ConnectionError), connect(address, *[request] * 1500) as deaf:
        assert ask(address, "GET", "/api/runs/0")[0] == 200
        for _ in range(600):
            deaf.sendall(b"\r\n")
            time.sleep(0.05)


def test_nonsense_on_the_wire(address):
    with connect(address, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    with connect(address, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert ask(address, "GET", "/api/runs")[0] == 200


def test_idle_connections_turn_nobody_away(tmp_path, monkeypatch):
    """Before, as many idle connections as the server takes made everybody else wait until they were cut."""
    monkeypatch.setattr(server, "CONNECTIONS", 30)
    monkeypatch.setattr(server, "IDLE_CONNECTIONS", 20)
    with served(find_runs([tiny_run(tmp_path / "a")]), timeout=600) as address:
        idle = [connect(address, *([b"POST / HTTP/1.1\r\n"] if n % 2 else [])) for n in range(60)]
        assert [ask(address, "GET", "/")[0] for _ in range(3)] == [200] * 3
        # The oldest were cut to make room, the youngest are still there
        assert read_all(idle[0]) == b""
        idle[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)
        for one in idle:
            one.close()
