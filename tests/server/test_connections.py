"""Connections that ask nothing, ask slowly or do not read, on real frontend processes that may open
few files."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from pdx.request.request import FinishReason
from pdx.request.stream import StepFrame, Submit
from pdx.server.connections import Connection, ConnectionLimits, Connections

if TYPE_CHECKING:
    from conftest import Frontend

Start = Callable[..., "Frontend"]
COMPLETIONS = "/v1/completions"
NUM_FILES = 64
#: Half of the files are for connections.
NUM_PLACES = 32
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt":"Hi"}'


def connect(frontend: Frontend) -> socket.socket:
    return socket.create_connection((frontend.first.host, frontend.first.port), timeout=20)


def num_files(frontend: Frontend) -> int:
    return len(list(Path(f"/proc/{frontend.process.pid}/fd").iterdir()))


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def hasty(make_frontend: Start, folder: Path) -> Iterator[Frontend]:
    """A frontend that waits little."""
    frontend = make_frontend(folder, header_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=1.0)
    yield frontend
    assert frontend.stop() == 0


def test_a_hundred_idle_connections_keep_nobody_out_and_fill_no_log(
    start: Start, make_update: Callable[..., StepFrame], capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start(num_files=NUM_FILES)
    frontend.script = lambda s: [make_update(s.stream_id, [70], FinishReason.LENGTH)]
    with ExitStack() as stack:
        for idx in range(100):
            client = stack.enter_context(connect(frontend))
            if idx % 2:
                client.sendall(HEAD[:20])
        for _ in range(3):
            assert httpx.get(frontend.url + "/health", timeout=20).status_code == 200
            answer = httpx.post(frontend.url + COMPLETIONS, json={"prompt": "Hi"}, timeout=20)
            assert answer.status_code == 200
    assert frontend.stop() == 0
    line, more = capfd.readouterr().err.splitlines()
    assert "more like this in 60 s" in more
    assert f"all {NUM_PLACES} HTTP connections are taken" in line
    assert "idle ones are closed" in line


def test_connections_with_requests_keep_their_places(
    start: Start, make_update: Callable[..., StepFrame], capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start(num_files=NUM_FILES, max_streams=100)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(frontend)) for _ in range(NUM_PLACES)]
        ids = []
        for client in clients:
            client.sendall(HEAD + BODY)
            ids.append(frontend.next(Submit).stream_id)
        refused = stack.enter_context(connect(frontend))
        head, _, body = read_all(refused).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in head
        assert json.loads(body)["error"]["type"] == "overloaded_error"
        for stream_id, client in zip(ids, clients, strict=True):
            frontend.send(make_update(stream_id, [70], FinishReason.LENGTH))
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        assert httpx.get(frontend.url + "/health").status_code == 200
    err = capfd.readouterr().err
    assert "new ones get a 503" in err
    assert "Traceback" not in err


def test_accepting_goes_on_when_there_are_descriptors_again(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start()
    pid = frontend.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_files(frontend), before[1]))
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(frontend)) for _ in range(20)]
        err = ""
        deadline = time.monotonic() + 20
        while "no connection can be accepted now" not in err:
            assert time.monotonic() < deadline
            err += capfd.readouterr().err
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    err += capfd.readouterr().err
    assert len(err.splitlines()) == 1, err


def test_more_connections_than_files_are_not_promised(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start(num_files=NUM_FILES, max_connections=1000)
    assert httpx.get(frontend.url + "/health").status_code == 200
    err = capfd.readouterr().err
    assert "--max-connections 1000: only 64 files may be open" in err
    assert "so 32 is the limit" in err


def test_the_configured_limit_holds(start: Start) -> None:
    frontend = start(max_connections=2)
    with connect(frontend) as first, connect(frontend) as second, connect(frontend) as third:
        assert read_all(first) == b""
        for client in (second, third):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_connection_that_says_nothing_is_closed_without_a_word(hasty: Frontend) -> None:
    with connect(hasty) as client:
        assert read_all(client) == b""


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_header_that_comes_byte_by_byte_is_a_408(hasty: Frontend, before: bytes) -> None:
    """Each byte is in time; the header is not. So it is with a second request of a connection."""
    with connect(hasty) as client:
        if before:
            client.sendall(before)
            got = b""
            while not got.endswith(b"}"):
                got += client.recv(4096)
        client.settimeout(0.05)
        got = b""
        for byte in b"GET /health HTTP/1.1\r\nX-Slow: " + b"a" * 1000:
            client.sendall(bytes([byte]))
            try:
                got = client.recv(4096)
            except TimeoutError:
                continue
            break
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive in time" in got
        client.settimeout(20)
        assert read_all(client) == b""


def test_body_that_comes_byte_by_byte_is_a_408(hasty: Frontend) -> None:
    with connect(hasty) as client:
        client.sendall(HEAD.replace(b"15", b"1500"))
        client.settimeout(0.05)
        got = b""
        for _ in range(1000):
            client.sendall(b" ")
            try:
                got = client.recv(4096)
            except TimeoutError:
                continue
            break
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in got


def test_body_that_nobody_reads_is_not_waited_for(hasty: Frontend) -> None:
    """The answer needs no body; its sender goes on all the same, and is closed for it."""
    with connect(hasty) as client:
        client.sendall(b"POST /no-such HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 404 ")
        client.settimeout(0.05)
        for _ in range(1000):
            try:
                client.sendall(b" ")
                if client.recv(4096):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it is still open")


def test_connection_that_is_kept_is_closed_after_its_time(hasty: Frontend) -> None:
    with connect(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_client_that_reads_nothing_is_closed(start: Start) -> None:
    frontend = start(request_timeout_s=0.5)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = num_files(frontend)
        client.connect((frontend.first.host, frontend.first.port))
        client.settimeout(20)
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        client.setblocking(False)
        select.select([client], [], [], 20)  # it is being answered
        deadline = time.monotonic() + 20
        while num_files(frontend) > before:
            assert time.monotonic() < deadline, "it is still open"


def test_what_is_no_http_gets_an_error_and_one_line_for_all(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start()
    for _ in range(50):
        with connect(frontend) as client:
            client.sendall(b"\x16\x03\x01garbage\r\n\r\n")
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert frontend.stop() == 0
    _, more = capfd.readouterr().err.splitlines()
    assert "49 more like this in 60 s" in more


async def test_a_connection_is_read_a_little_at_a_time() -> None:
    """A body in chunks of one byte is slow to parse; between two reads the others are served."""
    data = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"1\r\na\r\n" * 20_000
    sizes: list[int] = []
    all_is_read, is_lost = asyncio.Event(), asyncio.Event()

    class Watched(Connection):
        def data_received(self, data_part: bytes) -> None:
            sizes.append(len(data_part))
            super().data_received(data_part)
            if sum(sizes) == len(data):
                all_is_read.set()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            is_lost.set()

    async def app(scope: object, receive: object, send: object) -> None:
        await is_lost.wait()

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    limits = ConnectionLimits(most=1, header_timeout_s=20, unread_timeout_s=None)
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(
            lambda: Watched(
                config=config, server_state=ServerState(), app_state={}, table=Connections(limits)
            ),
            ours,
        )
        await loop.sock_sendall(theirs, data)
        await all_is_read.wait()
        transport.abort()
        await is_lost.wait()
    assert max(sizes) <= 16 << 10


def test_header_without_an_end_is_refused(hasty: Frontend) -> None:
    with connect(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * (65 << 10))
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_request_that_offers_http_2_is_served_with_its_body(
    start: Start, make_update: Callable[..., StepFrame], capfd: pytest.CaptureFixture[str]
) -> None:
    """Java's own client offers it with each request."""
    frontend = start()
    frontend.script = lambda s: [make_update(s.stream_id, [70], FinishReason.LENGTH)]
    offer = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    }
    url = frontend.url + COMPLETIONS
    assert httpx.post(url, json={"prompt": "Hi"}, headers=offer).status_code == 200
    assert frontend.stop() == 0
    assert capfd.readouterr().err == ""
