"""Clients that close their sending side after their requests, as netcat does, and then read."""

import json

import pytest

from counter import limits
from tests.support.add_stream import line, open_stream
from tests.support.bytes_on_wire import JSON, add, get, post, request
from tests.support.waiting import eventually
from tests.support.wire import Wire, rest_of, statuses

NAMESPACE = "/v1/namespaces/default"
NDJSON = "content-type: application/x-ndjson"


async def exchange(wire: Wire, *parts: bytes) -> bytes:
    """All bytes until the service closes, for *parts* and the end after them."""
    reader, writer = await wire.connect()
    try:
        for part in parts:
            writer.write(part)
        writer.write_eof()
        return await rest_of(reader)
    finally:
        writer.close()


BATCH = b"".join(line(number) for number in range(limits.BATCH_ITEMS_MAX))
WHOLE = {
    "add": ([add(1)], [200], 1),
    "add and get": (
        [add(1), post(f"{NAMESPACE}/counters/c/add-and-get", b"{}", JSON)],
        [200, 400],
        1,
    ),
    "get": ([get()], [200], 0),
    "application": ([request("GET", "/v1/namespaces")], [200], 0),
    "large": ([post(f"{NAMESPACE}/batch/add", BATCH, NDJSON)], [200], limits.BATCH_ITEMS_MAX),
    "pipelined": ([add(number) for number in range(40)] + [get()], [200] * 41, 40),
    "health": ([request("GET", "/healthz")], [200], 0),
    "keyed": (
        [post(f"{NAMESPACE}/counters/c/add", b'{"delta":1}', JSON, "idempotency-key: k")],
        [200],
        1,
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
async def test_a_half_closed_client_gets_responses_to_whole_requests(wire: Wire, kind: str) -> None:
    """Regression: the connection was closed at the end, whatever was being counted."""
    parts, expected, count = WHOLE[kind]
    assert statuses(await exchange(wire, *parts)) == expected
    assert await wire.app.rest.count("c") == count
    await nothing_is_open(wire)


UNFINISHED = {
    "head": add(1)[:20],
    "body": add(1)[:-3],
    "chunks": request("POST", f"{NAMESPACE}/batch/add", JSON, "transfer-encoding: chunked")
    + b"5\r\n",
}


@pytest.mark.parametrize("kind", UNFINISHED)
async def test_an_unfinished_request_ends_without_a_response(wire: Wire, kind: str) -> None:
    assert await exchange(wire, UNFINISHED[kind]) == b""
    assert statuses(await exchange(wire, get(), UNFINISHED[kind])) in ([], [200])
    assert await wire.app.rest.count("c") == 0
    await nothing_is_open(wire)


async def test_a_whole_stream_of_adds_is_answered(wire: Wire) -> None:
    async with open_stream(wire.port) as client:
        client.send(*(line(number) for number in range(3_000)))
        client.end()
        client.writer.write_eof()
        assert [each["delta"] for each in await client.answers()] == [1] * 3_000
    assert await wire.app.rest.count("c") == 3_000
    await nothing_is_open(wire)


async def test_an_unfinished_stream_of_adds_ends(wire: Wire) -> None:
    async with open_stream(wire.port) as client:
        client.send(line(1))
        await client.answer()
        client.writer.write_eof()
        await nothing_is_open(wire)
    assert wire.app.application.streams.streams.open == 0


async def test_a_live_stream_ends(wire: Wire) -> None:
    """Its reader may be gone, which only the next event would show."""
    reader, writer = await wire.connect()
    writer.write(get("c/live"))
    received = await reader.readuntil(b"event: count")
    assert statuses(received) == [200]
    writer.write_eof()
    assert json.loads((await rest_of(reader)).partition(b"data: ")[2].splitlines()[0])
    writer.close()
    await nothing_is_open(wire)
    assert not wire.app.application.live.streams.open


async def nothing_is_open(wire: Wire) -> None:
    await eventually(
        lambda: not wire.connections and not wire.server.shared.tasks, "the end of the connection"
    )
