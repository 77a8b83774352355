"""Connections with a fast lane: hostile clients, and their ends."""

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from tests.support.bytes_on_wire import CLOSE, JSON, LAST, add, get, post
from tests.support.waiting import eventually
from tests.support.wire import Wire, rest_of, statuses, turns, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: The kernel's buffers of a connection in each direction: small, so that they are soon full.
SOCKET_BYTES = 16_384
#: No request is asked for so often that its responses would fit anywhere.
FLOOD_BYTES = 16 * 1024 * 1024
HELD_BYTES_MAX = 4 * 1024 * 1024
HELD_REQUESTS_MAX = 300
#: Turns of the loop without a byte taken, after which none will be.
STALLS = 500


@asynccontextmanager
async def with_eventual(directory: Path, **settings: Any) -> AsyncIterator[Wire]:
    async with wired(directory, **settings) as wire:
        await wire.app.rest.within("eventual").create("EVENTUAL")
        yield wire


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    path = tmp_path_factory.mktemp("patient")
    async with with_eventual(path, socket_bytes=SOCKET_BYTES) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that waits 1 s for the rest of a request."""
    path = tmp_path_factory.mktemp("hasty")
    async with with_eventual(path, request_timeout_us=1_000_000) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def curt(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that waits 10 ms for the next request."""
    async with with_eventual(tmp_path_factory.mktemp("curt"), keep_alive_s=0.01) as each:
        yield each


class Held:
    """A store that lets no add through before the test says so."""

    def __init__(self, append: Any) -> None:
        self._append = append
        self.gate = asyncio.Event()
        #: How many events each call brought.
        self.calls: list[int] = []

    async def append(self, namespace: Any, events: Sequence[Any]) -> Any:
        self.calls.append(len(events))
        await self.gate.wait()
        return await self._append(namespace, events)

    async def reached(self, events: int = 1) -> None:
        """Wait until so many events are held."""

        await eventually(lambda: sum(self.calls) >= events, f"{events} adds reach the store")


@contextmanager
def held(wire: Wire) -> Iterator[Held]:
    store = Held(wire.app.store.events.append)
    with patch.object(wire.app.store.events, "append", store.append):
        yield store


def bodies(received: bytes) -> list[Any]:
    found = received.split(b"\r\n\r\n")[1:]
    return [json.loads(each.partition(b"HTTP/1.1 ")[0]) for each in found]


async def test_adds_of_many_connections_in_one_turn_are_one_write(wire: Wire) -> None:
    with held(wire) as store:
        ends = [await wire.connect() for _ in range(20)]
        await turns()
        for number, (_, writer) in enumerate(ends):
            writer.write(add(number, number, counter=f"c{number % 3}") + LAST)
        await store.reached(20)
        assert len(store.calls) < 20
        store.gate.set()
        for number, (reader, writer) in enumerate(ends):
            added, _ = bodies(await rest_of(reader))
            writer.close()
            assert (added["delta"], added["counter"]) == (number, f"c{number % 3}")


async def test_nothing_overtakes_an_add_that_is_under_way(wire: Wire) -> None:
    run_of = get("o", namespace="eventual") * 3 + get("o") + add(101, counter="o") + LAST
    with held(wire) as store:
        reader, writer = await wire.connect()
        writer.write(add(100, 7, counter="o") + run_of)
        await store.reached()
        await turns(20)
        store.gate.set()
        answers = bodies(await rest_of(reader))
        writer.close()
    assert [each.get("delta") or each.get("count") for each in answers][:1] == [7]
    assert [each.get("accuracy") for each in answers[1:5]] == ["eventual"] * 3 + ["accurate"]
    assert (answers[4]["count"], answers[5]["replayed"]) == (7, False)


async def test_one_that_is_cut_off_for_junk_delays_no_other(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Its response finds the connection closed; other clients wait for theirs in the same turn."""

    with held(wire) as store:
        bad, good = await wire.connect(), await wire.connect()
        await turns()
        bad[1].write(add(200) + add(201) + b"junk\r\n\r\n")
        good[1].write(add(202) + LAST)
        await store.reached(2)
        store.gate.set()
        assert statuses(await rest_of(good[0])) == [200, 200]
        await rest_of(bad[0])
        for _, writer in (bad, good):
            writer.close()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("behind", [b"", add(301, counter="gone"), get("gone"), b"GET /"])
async def test_a_client_that_disconnects_early_delays_no_other(
    wire: Wire, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with held(wire) as store:
        bad, good = await wire.connect(), await wire.connect()
        await turns()
        bad[1].write(add(300, counter="gone") + behind)
        good[1].write(add(302) + LAST)
        await store.reached(2)
        bad[1].transport.abort()
        await turns(20)
        store.gate.set()
        assert statuses(await rest_of(good[0])) == [200, 200]
        good[1].close()
    await all_closed(wire)
    # It was whole, so it counts.
    assert await wire.app.rest.count("gone") >= 1
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def all_closed(wire: Wire) -> None:
    await eventually(lambda: not wire.connections, "every connection is closed")


class Flood:
    """A client that sends the same request again and again, and reads nothing."""

    def __init__(self, wire: Wire, request: bytes) -> None:
        self.socket = socket.socket()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self.socket.connect(("127.0.0.1", wire.port))
        self.socket.setblocking(False)
        self._wire = wire
        self._request = request
        self._sent = 0

    async def until_it_stalls(self) -> None:
        """Send until the connection takes no more."""
        many = self._request * (65_536 // len(self._request) + 1)
        stalls = 0
        while stalls < STALLS:
            try:
                start = self._sent % len(self._request)
                self._sent += self.socket.send(many[start:])
                stalls = 0
            except BlockingIOError:
                stalls += 1
            assert self._sent < FLOOD_BYTES, "it takes all that is sent"
            await turns(1)

    def check_what_is_held(self) -> None:
        """The service keeps little for this client."""
        mine = self.socket.getsockname()
        (protocol,) = (each for each in self._wire.connections if each.client == mine)
        assert protocol.transport.get_write_buffer_size() < HELD_BYTES_MAX
        assert len(protocol.pending) < HELD_REQUESTS_MAX

    async def read_all(self) -> bytes:
        """Read at last: all that comes back."""
        left = -self._sent % len(self._request)
        reader, writer = await asyncio.open_connection(sock=self.socket)
        writer.write(self._request[len(self._request) - left :] + LAST)
        received = await rest_of(reader)
        writer.close()
        return received

    @property
    def requests(self) -> int:
        """How many were begun."""
        return -(-self._sent // len(self._request))


@pytest.mark.parametrize(
    "request_",
    [get("f", namespace="eventual"), get("f"), add(400, counter="f"), get("f?max_staleness=1h")],
    ids=["get-at-hand", "get", "add", "get-over-asgi"],
)
async def test_a_client_that_reads_nothing_is_not_kept_for(wire: Wire, request_: bytes) -> None:
    """It is not read any more, other clients are served, and later it gets all responses."""

    await wire.tell(request_ + LAST)
    flood = Flood(wire, request_)
    await flood.until_it_stalls()
    flood.check_what_is_held()
    assert statuses(await wire.tell(request_ + LAST)) == [200, 200]
    received = await flood.read_all()
    assert statuses(received) == [200] * (flood.requests + 1)


async def test_a_kept_connection_that_idles_is_closed(curt: Wire) -> None:
    at_hand = get("i", namespace="eventual")
    await curt.tell(at_hand + LAST)
    for received in await asyncio.gather(
        *(curt.tell(sent) for sent in (at_hand, get("i"), add(500), add(501) * 2))
    ):
        assert set(statuses(received)) == {200}
        assert b"connection: close" not in received


@pytest.mark.parametrize("before", [b"", get("w", namespace="eventual"), add(600)])
async def test_a_connection_with_an_add_under_way_is_not_idle(curt: Wire, before: bytes) -> None:
    """However long the add takes, and whatever was answered before it."""

    at_hand = get("w", namespace="eventual")
    await curt.tell(at_hand + LAST)
    with held(curt) as store:
        reader, writer = await curt.connect()
        writer.write(before + add(601))
        await store.reached()
        # Another connection idles, and is closed for it.
        assert statuses(await curt.tell(at_hand)) == [200]
        store.gate.set()
        received = await rest_of(reader)
        writer.close()
    assert statuses(received) == [200] * (2 if before else 1)


@pytest.mark.parametrize("header", [(), ("expect: a miracle",)], ids=["fast lane", "application"])
async def test_a_connection_half_way_through_its_next_request_is_not_idle(
    curt: Wire, header: tuple[str, ...]
) -> None:
    with held(curt) as store:
        reader, writer = await curt.connect()
        writer.write(add(610 + len(header), 1, *header) + LAST[:-1])
        await store.reached()
        store.gate.set()
        await reader.readuntil(b"}")
        for connection in curt.connections:
            connection.check(time.monotonic() + 5)
        # Another connection idles, and is closed for it.
        await curt.tell(get())
        writer.write(LAST[-1:])
        assert statuses(await rest_of(reader)) == [200]
        writer.close()


async def test_a_request_that_never_ends_times_out_whatever_came_before(hasty: Wire) -> None:
    at_hand = get("s", namespace="eventual")
    await hasty.tell(at_hand + LAST)
    parts = (add(700)[:-1], add(700)[:-100], add(700)[:60], get()[:-1])
    cases = [(before, part) for before in (b"", at_hand, get("s"), add(701)) for part in parts]
    answers = await asyncio.gather(*(hasty.tell(*case) for case in cases))
    for (before, _), received in zip(cases, answers, strict=True):
        # Whole requests were answered; a time-out does not wait for them.
        assert statuses(received) in ([408], [200, 408][0 if before else 1 :])
        assert b'"code": "request_timeout"' in received
    at_once = answers[len(parts) : 2 * len(parts)]
    assert all(statuses(each) == [200, 408] for each in at_once)


@pytest.mark.parametrize("part", [add(711)[:60], add(711)[:-9], get()[:-1]])
async def test_a_time_out_is_not_the_response_to_an_earlier_add(hasty: Wire, part: bytes) -> None:
    """Which counts, however long it takes."""

    with held(hasty) as store:
        received = await hasty.tell(add(710, counter="before") + part)
        store.gate.set()
        await turns()
    assert statuses(received) == []

    async def counted() -> bool:
        return await hasty.app.rest.count("before") == 1

    await eventually(counted, "the add counts")


@pytest.mark.parametrize(
    "much",
    [
        get("h", namespace="eventual") * 1_500,
        get("h?max_staleness=1h", namespace="eventual") * 1_500,
        post("/v1/namespaces/default/batch/add", b" " * 100_000, JSON),
    ],
    ids=["gets", "gets-over-asgi", "body"],
)
async def test_bytes_before_a_head_are_not_part_of_it(curt: Wire, much: bytes) -> None:
    """A head has a largest size. It may begin at the end of much else."""

    last = get("h", CLOSE)
    received = await curt.tell(much + last[:-20], last[-20:])
    assert set(statuses(received)) <= {200, 400}
    assert statuses(received)[-1] == 200
    received = await curt.tell(much + last[:-4] + b"\r\nx: ", b"x" * 70_000)
    assert statuses(received)[-1] == 431


async def test_a_shutdown_waits_for_an_add_in_flight(tmp_path: Path) -> None:
    """Then its connection is closed, as idle ones are at once."""

    async with wired(tmp_path) as wire:
        with held(wire) as store:
            idle, busy, two = [await wire.connect() for _ in range(3)]
            idle[1].write(get())
            busy[1].write(add(800))
            two[1].write(add(801) + add(802))
            await store.reached(3 - 1)
            await idle[0].readuntil(b"\r\n\r\n")
            wire.server.stop()
            await rest_of(idle[0])
            assert len(wire.connections) == 2
            store.gate.set()
            once, twice = await rest_of(busy[0]), await rest_of(two[0])
        assert statuses(once) == [200]
        assert statuses(twice) == [200, 200]
        for received in (once, twice):
            assert len(re.findall(rb"\r\nconnection: close\r\n", received)) == 1
        await all_closed(wire)
        for _, writer in (idle, busy, two):
            writer.close()
