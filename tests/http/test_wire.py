"""Odd bytes on the wire: answered truly or not at all, and no way around a check."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from counter.testing.clock import FakeClock
from tests.support.app import running
from tests.support.needs import miss
from tests.support.rest import fresh
from tests.support.server import Server, serving
from tests.support.times import MINUTE
from tests.support.wire import wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = b"POST /v1/namespaces/default/counters/c/add HTTP/1.1\r\nhost: localhost\r\n"
TYPE = b"content-type: application/json\r\n"
KEY = b"idempotency-key: order-1\r\n"
BODY = b'{"delta": 1}'
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory, child_processes: None
) -> AsyncIterator[Server]:
    path: Path = tmp_path_factory.mktemp("wire")
    async with serving(path / "data", path / "logs", request_timeout="1s") as server:
        yield server


async def exchange(server: Server, *parts: bytes) -> bytes:
    """All that comes back on a connection of its own, until the service closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    for part in parts:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    return received


async def test_junk_behind_an_add_says_nothing_of_the_add(server: Server) -> None:
    """A refusal of the junk would be taken for the response to the add, which counts."""
    received = await exchange(server, ADD + TYPE + KEY + LENGTH + b"\r\n" + BODY + b"junk\r\n\r\n")
    assert b"HTTP/1.1 400" not in received


@pytest.mark.parametrize("junk", [b"junk\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
@pytest.mark.parametrize(
    "before",
    [b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", ADD + TYPE + LENGTH + b"\r\n" + BODY],
    ids=["get", "add"],
)
async def test_junk_in_the_same_segment_loses_no_response(
    server: Server, before: bytes, junk: bytes
) -> None:
    """Whole requests before it are answered, and the connection closed."""
    for count in (1, 3):
        received = await exchange(server, before * count + junk)
        statuses = re.findall(rb"HTTP/1.1 (\d+) ", received)
        # Junk is refused by a response of its own only if none is missing before it.
        assert statuses[:count] == ([b"200"] if b"healthz" in before else [b"400"]) * count


@pytest.mark.parametrize("value", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked"])
async def test_no_transfer_coding_but_chunked(server: Server, value: bytes) -> None:
    sent = ADD + TYPE + KEY + b"transfer-encoding: " + value + b"\r\n\r\n0\r\n\r\n"
    received = await exchange(server, sent)
    assert received.startswith(b"HTTP/1.1 501 ")
    assert b"transfer_coding_unsupported" in received


async def test_a_client_is_not_asked_for_a_body_that_is_too_large(server: Server) -> None:
    """And its next bytes are not taken for that body."""
    expect = b"expect: 100-continue\r\n"
    received = await exchange(
        server, ADD + TYPE + KEY + expect + b"content-length: 9999999\r\n\r\n"
    )
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in received
    received = await exchange(
        server, ADD + TYPE + KEY + expect + LENGTH + b"connection: close\r\n\r\n" + BODY
    )
    assert received.startswith((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ", b"HTTP/1.1 200 "))


@pytest.mark.parametrize("path", [b"/metrics/", b"/docs/", b"/healthz/", b"/openapi.json/"])
async def test_the_host_header_is_never_followed(server: Server, path: bytes) -> None:
    sent = b"GET %s HTTP/1.1\r\nhost: localhost:1\r\nconnection: close\r\n\r\n" % path
    received = await exchange(server, sent)
    assert received.startswith(b"HTTP/1.1 404 ")
    assert b"location:" not in received.lower()


async def test_an_encoded_prefix_leads_past_no_check(server: Server) -> None:
    line = b"POST /%761/namespaces/default/counters/a%0Ab/add HTTP/1.1\r\nhost: localhost\r\n"
    received = await exchange(
        server, line + TYPE + KEY + LENGTH + b"connection: close\r\n\r\n" + BODY
    )
    assert received.startswith(b"HTTP/1.1 400")
    assert b"invalid_parameter" in received


async def test_a_head_without_end_is_refused(server: Server) -> None:
    received = await exchange(server, ADD + b"x: " + b"a" * 100_000)
    assert received.startswith(b"HTTP/1.1 431")
    assert b"head_too_large" in received


@pytest.mark.parametrize("length", [b"content-length", b"transfer-encoding"])
async def test_an_upgrade_hides_no_request_in_its_body(server: Server, length: bytes) -> None:
    """The header is ignored, and the body is the body, wherever the bytes are cut."""
    hidden = ADD.replace(b"/c/", b"/hidden/") + TYPE + KEY + LENGTH + b"\r\n" + BODY
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    if length == b"content-length":
        upgrade += b"content-length: %d\r\n\r\n%s" % (len(hidden), hidden)
    else:
        upgrade += b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
            len(hidden),
            hidden,
        )
    get = b"GET /v1/namespaces/default/counters/hidden HTTP/1.1\r\nhost: localhost\r\n"
    sent = ADD + TYPE + upgrade + get + b"connection: close\r\n\r\n"
    for cut in range(1, len(sent), 7):
        received = await exchange(server, sent[:cut], sent[cut:])
        assert re.findall(rb"HTTP/1.1 (\d+) ", received) == [b"400", b"200"]
        assert b"invalid_body" in received
        assert b'"count":0' in received


async def test_a_client_of_the_jdk_is_served_with_its_defaults(server: Server) -> None:
    """It asks for HTTP/2 in its first request, whatever that is."""
    if shutil.which("java") is None:
        miss("java is missing")
    source = Path(__file__).with_name("JdkClient.java")
    jdk = await asyncio.create_subprocess_exec(
        *("java", str(source), f"{server.url}/v1/namespaces/default/counters/jdk"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await jdk.communicate()
    assert printed.decode().split("\n") == [
        "POST HTTP_1_1 200 replayed=false",
        "POST HTTP_1_1 200 replayed=true",
        "GET HTTP_1_1 200 count=2",
        "DELETE HTTP_1_1 200 replayed=false",
        "",
    ]


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("/v1/namespaces/default/counters/é", "é is %C3%A9"),
        ("/v1/namespaces/default/counters?prefix=é", "percent-encode"),
        ("/v1/namespaces/default/counters/c/add#é", "percent-encode"),
        ("é", "percent-encode"),
        ("http://é/v1/namespaces", "percent-encode"),
        ("/v1/namespaces/default/counters/a b", "a space, percent-encode it as %20"),
    ],
)
async def test_an_invalid_url_is_refused_with_the_right_encoding(
    server: Server, target: str, fix: str
) -> None:
    for method in ("GET", "POST"):
        line = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        received = (await exchange(server, line.encode())).decode()
        assert received.startswith("HTTP/1.1 400 Bad Request\r\n")
        problem = json.loads(received.partition("\r\n\r\n")[2])
        assert problem["code"] == "bad_request"
        assert fix in problem["detail"]


async def test_the_reply_to_a_head_request_comes_at_once(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"HEAD /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 ")
    assert b"connection: close" not in head


class Sleepy:
    """The writer's clock: the process sleeps for a minute after its first reading, once armed."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.armed = False

    def now_us(self) -> int:
        return self._read(self._clock.now_us)

    def wall_us(self) -> int:
        return self._read(self._clock.wall_us)

    def forget_after(self, time_us: int) -> None:
        self._clock.forget_after(time_us)

    def boottime_us(self) -> int:
        return self._read(self._clock.boottime_us)

    def _read(self, read: Callable[[], int]) -> int:
        instant_us = read()
        if self.armed:
            self.armed = False
            self._clock.advance(MINUTE)
        return instant_us


async def test_a_pause_between_the_deadline_and_the_age_check_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    """Paused there for longer than a window takes to close, the event would be in no count."""
    async with running("memory", tmp_path) as app:
        sleepy, mark = Sleepy(app.clock), app.store.separate_writes.mark

        async def marks(*arguments: Any) -> Any:
            left = await mark(*arguments)
            sleepy.armed = True
            return left

        token = fresh(app.clock.now_us())
        with (
            patch.object(app.application.service._writer, "_clock", sleepy),
            patch.object(app.store.separate_writes, "mark", marks),
        ):
            answer = await app.rest.add("c", 1, token)
        # It woke too late to write anything, or to know whether the namespace was deleted.
        assert (answer.status_code, answer.json()["applied"]) == (503, None)
        # The window is closed: the token is void.
        again = await app.rest.add("c", 1, token)
        assert (again.status_code, again.json()["applied"]) == (410, False)
        assert await app.rest.count("c") == 0


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_client_of_http_1_0_gets_no_chunks(
    tmp_path: Path, way: dict[str, Any], method: bytes
) -> None:
    """It would take their lengths for a part of the body, which ends with the connection."""
    async with wired(tmp_path, storage="memory", **way) as wire:
        wire.app.application.live.stream_s = 0
        path = b"/v1/namespaces/default/counters/c/live"
        ask = b"%s %s HTTP/1.%d\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        old, new = [await wire.tell(ask % (method, path, minor)) for minor in (0, 1)]
        head, _, body = old.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body[:12] == (b"event: count" if method == b"GET" else b"")
        assert body.endswith(b"\n\n" if method == b"GET" else b"")
        assert (b"transfer-encoding: chunked" in new) is (method == b"GET")
        # A body with a length keeps it.
        length = await wire.tell(ask % (method, b"/healthz", 0))
        assert b"content-length: 18\r\n" in length
        assert length.endswith(b'{"status":"alive"}' if method == b"GET" else b"\r\n\r\n")
