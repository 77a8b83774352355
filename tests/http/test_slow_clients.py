"""Clients that never finish a request, over real sockets: they get a problem, and are cut off."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.problems import check_problem
from tests.support.rest import Rest, new_token, on_wire
from tests.support.server import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD = b"POST /v1/namespaces/default/counters/c/add HTTP/1.1\r\nhost: localhost\r\n"
TYPE = b"content-type: application/json\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory, child_processes: None
) -> AsyncIterator[Server]:
    """A service that waits a second for the rest of a request."""
    path: Path = tmp_path_factory.mktemp("slow")
    async with serving(path / "data", path / "logs", request_timeout="1s") as server:
        yield server


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        problem: dict[str, Any] = json.loads(self.body)
        check_problem(problem)
        assert problem["status"] == self.status
        return problem


async def until_closed(server: Server, *parts: bytes) -> Answer | None:
    """Send *parts* and nothing more; the last response before the service closed, if any."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(30):
            received = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    if not received:
        return None
    latest = received[received.rindex(b"HTTP/1.1 ") :]
    head, _, body = latest.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)


async def assert_nothing_was_written(server: Server) -> None:
    async with server.client() as rest:
        assert await rest.names() == []


def whole_body() -> bytes:
    return json.dumps({"delta": 1, "idempotency_token": on_wire(new_token())}).encode()


UNFINISHED = {
    "no body": (HEAD + TYPE + b"content-length: 200\r\n\r\n",),
    "half a body": (HEAD + TYPE + b"content-length: 200\r\n\r\n", b'{"delta": 1,'),
    "half a body after an upgrade": (
        HEAD + TYPE + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 200\r\n\r\n{",
    ),
    "half the chunks": (HEAD + TYPE + b"transfer-encoding: chunked\r\n\r\n", b'5\r\n{"del\r\n'),
    "half a chunk": (HEAD + TYPE + b"transfer-encoding: chunked\r\n\r\n", b'ffff\r\n{"del'),
    "half a head": (HEAD + TYPE,),
    "half a line": (b"POST /v1/names",),
    "half a second head": (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD,),
    "half a second body": (
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        + HEAD
        + TYPE
        + b"content-length: 9\r\n\r\n{",
    ),
}


async def test_requests_that_never_end_time_out(server: Server) -> None:
    """All are sent at once, because each takes a second."""
    answers = await asyncio.gather(*(until_closed(server, *each) for each in UNFINISHED.values()))
    for what, answer in zip(UNFINISHED, answers, strict=True):
        assert answer is not None, what
        assert (answer.status, answer.headers["connection"]) == (408, "close"), what
        problem = answer.problem()
        assert (problem["code"], problem["applied"]) == ("request_timeout", None), what
        assert problem["retry"] == "same_token"
    await assert_nothing_was_written(server)


async def test_a_connection_that_says_nothing_is_closed(server: Server) -> None:
    answer = await until_closed(server)
    assert answer is None or answer.status == 408


async def test_a_dripping_body_times_out_however_steadily_it_drips(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + TYPE + b"content-length: 1000000\r\n\r\n")
    received = asyncio.create_task(reader.read())
    try:
        async with asyncio.timeout(30):
            while not received.done():
                writer.write(b" ")
                await writer.drain()
                await asyncio.wait((received,), timeout=0.02)
    except ConnectionError:
        pass
    finally:
        writer.close()
    (answer,) = await asyncio.gather(received, return_exceptions=True)
    assert isinstance(answer, ConnectionError | bytes)
    assert isinstance(answer, ConnectionError) or b" 408 " in answer
    await assert_nothing_was_written(server)


@pytest.mark.parametrize(
    "request_",
    [
        b"not http at all\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: many\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/namespaces/default/counters/\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/namespaces/default/counters?prefix=\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD + TYPE + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["words", "negative", "no-number", "two-lengths", "nul", "path", "query", "no-chunk"],
)
async def test_non_http_input_gets_a_problem_and_is_closed(server: Server, request_: bytes) -> None:
    answer = await until_closed(server, request_)
    assert answer is not None
    assert answer.status == 400
    problem = answer.problem()
    assert (problem["applied"], problem["retry"]) == (None, "never")
    await assert_nothing_was_written(server)


async def test_a_body_announced_over_the_limit_is_refused_before_it_comes(server: Server) -> None:
    answer = await until_closed(server, HEAD + TYPE + b"content-length: 99999999999999\r\n\r\n{")
    assert answer is not None
    assert answer.status in (408, 413)
    await assert_nothing_was_written(server)


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    gets = [
        b"GET /v1/namespaces/default/counters/%d HTTP/1.1\r\nhost: localhost\r\n" % n
        for n in range(30)
    ]
    last = gets.pop() + b"connection: close\r\n\r\n"
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(get + b"\r\n" for get in gets) + last)
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    await writer.wait_closed()
    found = [json.loads(part.partition(b"HTTP/1.1")[0]) for part in received.split(b"\r\n\r\n")[1:]]
    assert [each["counter"] for each in found] == [str(number) for number in range(30)]


async def test_a_client_that_hangs_up_half_way_writes_nothing(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    for length in (10, 60, 10_000):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + TYPE + b"content-length: %d\r\n\r\n" % (length + 1))
        writer.write(whole_body().ljust(length)[:length])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await assert_nothing_was_written(server)


async def test_a_slow_client_delays_no_other(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in slow:
        writer.write(HEAD + TYPE + b"content-length: 200\r\n\r\n{")
    async with server.client() as rest:
        assert (await rest.get("c")).status_code == 200
    for reader, writer in slow:
        async with asyncio.timeout(30):
            assert b" 408 " in await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_an_idle_connection_can_be_used_again(server: Server) -> None:
    """The limit is on the arrival of a request, not on the life of a connection."""
    async with server.client() as rest:
        other = Rest(rest.http, "default")
        for _ in range(3):
            assert (await other.get("c")).status_code == 200
    assert "Traceback" not in server.all_errors()
