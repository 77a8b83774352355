"""Unfinished requests: their memory in a process, and its release."""

import asyncio
import gc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from api.http.connections import Connections, ReadQueue, Steps
from api.routes.live import LiveRoutes
from api.server.protocol import HttpProtocol
from counter.core.admission import Bounded
from counter.limits import HEAD_BYTES_MAX, HEADERS_MAX
from tests.support.bytes_on_wire import CLOSE, JSON, LAST, add, get, one, post, request
from tests.support.certificates import Authority, Signed
from tests.support.waiting import eventually
from tests.support.wire import Wire, problem_in, statuses, turns, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Of one route that is answered directly, and of one that is not.
PATHS = [one(), "/v1/namespaces"]
UNFINISHED = get()[:-2]
CHUNKED = request("POST", f"{one()}/add", JSON, "transfer-encoding: chunked")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    async with wired(tmp_path_factory.mktemp("unfinished")) as each:
        yield each


@pytest.mark.parametrize("path", PATHS)
async def test_the_number_of_headers_is_bounded(wire: Wire, path: str) -> None:
    def headers(count: int) -> list[str]:
        # Besides these there are a host and a connection.
        return ["a:"] * (count - 2)

    assert statuses(await wire.tell(request("GET", path, CLOSE, *headers(HEADERS_MAX)))) == [200]
    for sent in (
        request("GET", path, CLOSE, *headers(HEADERS_MAX + 1)),
        # Refused as soon as they have come.
        request("GET", path, *["a:"] * (HEADERS_MAX + 1))[:-2],
        CHUNKED + b"1\r\n \r\n0\r\n" + b"a:\r\n" * (HEADERS_MAX + 1),
    ):
        assert problem_in(await wire.tell(sent), "head_too_large")["status"] == 431


@pytest.mark.parametrize("path", PATHS)
async def test_a_head_has_exactly_its_largest_size(wire: Wire, path: str) -> None:
    """However it comes: at once, or in many pieces."""

    def of(size: int) -> bytes:
        empty = request("GET", path, CLOSE, "x: ")
        return request("GET", path, CLOSE, "x: " + "y" * (size - len(empty)))

    for parts in (1, 7):
        for size, expected in ((HEAD_BYTES_MAX, 200), (HEAD_BYTES_MAX + 1, 431), (70_000, 431)):
            sent = of(size)
            assert len(sent) == size
            step = size // parts + 1
            pieces = [sent[start : start + step] for start in range(0, size, step)]
            assert statuses(await wire.tell(*pieces)) == [expected], (size, parts)


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"1;"], ids=["trailer", "extension"])
async def test_junk_after_a_body_is_bounded(wire: Wire, endless: bytes) -> None:
    """A trailer, or the extension of a chunk."""
    pieces = [CHUNKED + b"1\r\n \r\n" + endless, *[b"y" * 10_000] * 8]
    assert statuses(await wire.tell(*pieces)) == [431]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 5_000,
        UNFINISHED + b"x: " + b"y" * 5_000,
        UNFINISHED + b"a:\r\n" * 50,
        get() + UNFINISHED + b"x: " + b"y" * 5_000,
        post(f"{one()}/add", b" " * 5_000, JSON)[:-1],
    ],
    ids=["line", "header", "headers", "second", "body"],
)
async def test_all_unfinished_requests_together_are_bounded(wire: Wire, sent: bytes) -> None:
    """One too many is refused, those that are held go on, and all of it is given back."""
    held: Bounded = wire.app.application.connections.unfinished
    most = held.most
    assert held.held == 0

    def is_held(least: int) -> bool:
        return held.held >= least

    ends = []
    for number in range(1, 4):
        ends.append(await wire.connect())
        ends[-1][1].write(sent)
        await eventually(partial(is_held, 4_000 * number), f"{number} requests are held")
    held.most = held.held + 2_000
    problem_in(await wire.tell(sent.removeprefix(get())), "overloaded")
    assert statuses(await wire.tell(add(1) + LAST)) == [200, 200]
    held.most = most
    for _, writer in ends:
        writer.close()
    await eventually(lambda: held.held == 0, "nothing is held")


async def test_requests_that_wait_behind_another_are_held_too(wire: Wire) -> None:
    shared: Connections = wire.app.application.connections
    live: LiveRoutes = wire.app.application.live
    # A stream finds that its client is gone when it sends something: have it do so at each look.
    with patch("api.routes.live._AGAIN_S", 0.0), patch.object(live, "look_s", 0.01):
        reader, writer = await wire.connect()
        writer.write(get("c/live") + get() * 1_000)
        await reader.readuntil(b"event: count")
        await eventually(lambda: shared.unfinished.held > 1_000 * len(get()), "what waits is held")
        writer.close()
        await eventually(
            lambda: not (shared.unfinished.held or live.streams.open or wire.server.shared.tasks),
            "nothing is held, and the stream has ended",
        )


class Segment:
    """A segment that takes a second a slice to read."""

    def __init__(self, name: str, slices: int, clock: Any, read: list[str]) -> None:
        self._name, self._slices, self._clock, self._read = name, slices, clock, read

    def read_until(self, end_s: float) -> bool:
        while self._slices:
            self._read.append(self._name)
            self._slices -= 1
            self._clock.now_s += 1.0
            if self._clock.now_s >= end_s:
                break
        return self._slices > 0


async def test_one_turn_of_the_loop_reads_for_a_bounded_time() -> None:
    """Those that are left are read in the next turns, one after the other."""
    clock, read = SimpleNamespace(now_s=0.0), list[str]()
    queue = ReadQueue(lambda: clock.now_s)
    for name in "abc":
        queue.read(Segment(name, 2, clock, read))
    assert read == ["a"]
    for count in range(2, 7):
        await asyncio.sleep(0)
        assert len(read) == count
    # The first one went to the end of the queue before the rest came.
    assert "".join(read) == "aabcbc"
    await turns()
    queue.read(Segment("d", 1, clock, read))
    assert read[-1] == "d"


async def test_work_takes_turns_step_by_step_and_returns_its_result() -> None:
    clock, done = SimpleNamespace(now_s=0.0), list[str]()

    def work(name: str, steps: int) -> Steps[str]:
        for _ in range(steps):
            done.append(name)
            clock.now_s += 1.0
            yield
        if name == "bad":
            raise ValueError(name)
        return name.upper()

    queue = ReadQueue(lambda: clock.now_s)
    # At once, while this turn has time.
    assert await queue.run(work("z", 0)) == "Z"
    running = [asyncio.create_task(queue.run(work(name, 3))) for name in ("a", "bad", "c", "gone")]
    await asyncio.sleep(0)
    running[3].cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert results[0] == "A"
    assert results[2] == "C"
    assert [type(each) for each in results[1::2]] == [ValueError, asyncio.CancelledError]
    assert "".join(each for each in done if each != "gone") == "aabadcabadcbadc"


async def test_answers_come_before_segments_and_those_leave_half_of_the_time() -> None:
    """Regression: an answer waited behind all that was still to be read, one step after each."""
    clock, done = SimpleNamespace(now_us=0), list[str]()

    def work(name: str, steps: int, takes_us: int = 2_500) -> Steps[str]:
        for _ in range(steps):
            done.append(name)
            clock.now_us += takes_us
            yield
        return name

    class Piece:
        def read_until(self, _: float) -> bool:
            done.append("segment")
            clock.now_us += 2_500
            return True

    queue = ReadQueue(lambda: clock.now_us / 1e6)
    tasks = [queue.run(work("all", 1, 10_000)), queue.run(work("w", 2)), queue.run(work("x", 2))]
    running = [asyncio.create_task(each) for each in (*tasks, queue.answer(work("answer", 1)))]
    await asyncio.sleep(0)
    queue.read(Piece())
    assert done == ["all"]
    for turn in (["answer", "segment", "w", "x"], ["segment", "segment", "w", "x"]):
        done.clear()
        await asyncio.sleep(0)
        assert done == turn
    assert await asyncio.gather(*running) == ["all", "w", "x", "answer"]


REQUESTS = {
    "direct": [get(), add(900)],
    "framework": [request("GET", "/v1/namespaces"), LAST],
    "unfinished": [UNFINISHED],
    "half-a-body": [add(901)[:-3], request("PUT", "/v1/namespaces/x", "content-length: 9")],
    "pipelined": [get() * 20 + LAST],
    "malformed": [b"junk\r\n\r\n", get() + b"junk\r\n\r\n", UNFINISHED + b"a:\r\n" * 200],
    "too-large": [post(f"{one()}/add", b" " * 2_000_000, JSON)],
    "live": [get("c/live")],
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_closed_connection_leaves_nothing_to_the_collector(
    tmp_path: Path, authority: Authority, own: Signed, kind: str, tls: bool
) -> None:
    """Which hardly runs: memory in reference cycles would stay."""
    gc.collect()
    gc.disable()
    try:
        async with wired(tmp_path, **(own.settings if tls else {})) as wire:
            for sent in REQUESTS[kind]:
                reader, writer = await wire.connect(authority.client() if tls else None)
                writer.write(sent)
                await asyncio.wait((asyncio.ensure_future(reader.read(100)),), timeout=0.2)
                writer.transport.abort()
                await eventually(
                    lambda: not wire.connections and not wire.server.shared.tasks,
                    "the connection is closed",
                )
                await turns(20)
            # By its type: asking a proxy for its class may find a dead object.
            assert not [each for each in gc.get_objects() if issubclass(type(each), HttpProtocol)]
    finally:
        gc.enable()
