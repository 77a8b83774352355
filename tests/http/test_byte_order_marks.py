"""A byte order mark at the beginning of an input is ignored; anywhere else it is a part of it."""

import json
from codecs import BOM_UTF8

import httpx
import pytest

from tests.support.add_stream import line, open_stream
from tests.support.bytes_on_wire import add_body
from tests.support.problems import check_problem
from tests.support.wire import Wire

NAMESPACE = "/v1/namespaces/default"
LINES = line(1) + line(2)
ITEMS = b'{"items": [%b, %b]}' % (line(1), line(2))
EVENT = b'{"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}'
#: Bodies that add to the counter c, and to how much they bring it.
BODIES = {
    "add": (f"{NAMESPACE}/counters/c/add", "application/json", add_body(1), 1),
    "batch": (f"{NAMESPACE}/batch/add", "application/json", ITEMS, 2),
    "lines": (f"{NAMESPACE}/batch/add", "application/x-ndjson", LINES, 2),
    "event": (f"{NAMESPACE}/events", "application/cloudevents+json", EVENT, 1),
    "events": (f"{NAMESPACE}/events", "application/cloudevents-batch+json", b"[%b]" % EVENT, 1),
}


@pytest.fixture
async def wire(wire: Wire) -> Wire:
    rules = {"event_rules": [{"type": "t", "counter": "c"}]}
    assert (await wire.app.http.put(NAMESPACE, json=rules)).status_code == 200
    return wire


async def send(wire: Wire, kind: str, marks: int) -> tuple[httpx.Response, int]:
    """The response to a body behind *marks*, and the count that the body would lead to."""
    path, content_type, body, count = BODIES[kind]
    headers, content = {"content-type": content_type}, marks * BOM_UTF8 + body
    return await wire.app.http.post(path, content=content, headers=headers), count


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_may_begin_with_one(wire: Wire, kind: str) -> None:
    answer, count = await send(wire, kind, 1)
    assert answer.status_code < 300, answer.text
    assert b"invalid_body" not in answer.content
    assert await wire.app.rest.count("c") == count


@pytest.mark.parametrize("kind", BODIES)
async def test_a_second_one_is_a_part_of_the_body(wire: Wire, kind: str) -> None:
    answer, _ = await send(wire, kind, 2)
    problem = json.loads(answer.text.splitlines()[0])
    check_problem(problem)
    assert problem["code"] == "invalid_body"


async def test_a_stream_may_begin_with_one(wire: Wire) -> None:
    """It may come in parts. Before another line it is a part of that line."""
    async with open_stream(wire.port) as client:
        for at in range(len(BOM_UTF8)):
            client.send(BOM_UTF8[at : at + 1])
            await client.writer.drain()
        client.send(line(1), BOM_UTF8 + line(2), line(3))
        client.end()
        await client.status()
        answers = await client.answers()
    assert [each.get("code") for each in answers] == [None, "invalid_body", None]
    assert await wire.app.rest.count("c") == 2
