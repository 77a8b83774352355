"""A lane to a cache server: batching, and the fate of waiting requests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from counter.metrics import Calls
from counter.storage.shared.bridge import Worker
from counter.storage.shared.cache_lane import (
    RETRY_AFTER_US,
    BatchRefusedError,
    CacheServer,
    NotConnectedError,
    RequestQueue,
    Unreachable,
)
from counter.storage.shared.remote_cache import Operations, RemoteCache
from counter.testing.clock import FakeClock
from tests.support.waiting import eventually

#: No test but one runs into it.
TIMEOUT_S = 10.0


class Idle:
    """A connection that is not made."""

    def close(self) -> None:
        """Do nothing."""


class Work:
    """Doubles each item, or fails, or waits, as planned."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def __call__(self, connection: Idle, items: Sequence[int]) -> Sequence[int]:
        self.batches.append(list(items))
        self.open.wait()
        if self.error is not None:
            raise self.error
        return [2 * item for item in items]


def new_server(clock: FakeClock, timeout_s: float = TIMEOUT_S) -> CacheServer[Idle]:
    return CacheServer("memcached at 127.0.0.1:1", Idle, timeout_s, clock, lambda: None)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.open.set()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0)


@pytest.fixture
def server(clock: FakeClock) -> CacheServer[Idle]:
    return new_server(clock)


@pytest.fixture
async def lane(server: CacheServer[Idle], work: Work) -> AsyncIterator[RequestQueue[int, int]]:
    lane = RequestQueue(server, work)
    yield lane
    work.open.set()
    await lane.close()


async def reason(lane: RequestQueue[int, int]) -> str:
    """Why an item gets no response."""
    [answer] = await lane.ask([1])
    assert isinstance(answer, Unreachable)
    return answer.reason


async def test_requests_of_one_turn_leave_together(
    lane: RequestQueue[int, int], work: Work
) -> None:
    """One batch, and each request gets its own part."""
    answers = await asyncio.gather(*(lane.ask([n, n + 1]) for n in range(50)))
    assert list(answers) == [[2 * n, 2 * n + 2] for n in range(50)]
    assert len(work.batches) == 1


async def test_items_during_a_batch_go_with_the_next(
    lane: RequestQueue[int, int], work: Work
) -> None:
    first = asyncio.create_task(lane.ask([1]))

    work.open.clear()
    await eventually(lambda: len(work.batches) == 1, "the first batch leaves")
    others = [asyncio.create_task(lane.ask([n])) for n in (2, 3)]
    await asyncio.sleep(0)
    work.open.set()
    assert await asyncio.gather(first, *others) == [[2], [4], [6]]
    assert work.batches == [[1], [2, 3]]


async def test_a_batch_has_a_bound(lane: RequestQueue[int, int], work: Work) -> None:
    """A request is not cut in two."""
    requests = [list(range(600)), list(range(600)), list(range(3_000)), [1]]
    answers = await asyncio.gather(*(lane.ask(each) for each in requests))
    assert answers == [[2 * item for item in each] for each in requests]
    assert [len(batch) for batch in work.batches] == [600, 600, 3_000, 1]


async def test_the_number_of_waiters_is_bounded(
    lane: RequestQueue[int, int], server: CacheServer[Idle]
) -> None:
    """That the queue is full is not the server's fault."""
    waiting = asyncio.create_task(lane.ask([0] * 50_000))
    await asyncio.sleep(0)
    assert "50000 calls wait for memcached at 127.0.0.1:1; at most 50000 may" in await reason(lane)
    assert server.trouble is None
    assert await waiting == [0] * 50_000


async def test_waiters_for_a_failed_server_fail(
    lane: RequestQueue[int, int], work: Work, server: CacheServer[Idle]
) -> None:
    """Sent requests may have been done; waiting ones were surely not."""
    work.error = ConnectionResetError("gone")
    work.open.clear()
    first = asyncio.create_task(lane.ask([1]))

    await eventually(lambda: bool(work.batches), "the batch leaves")
    second = asyncio.create_task(lane.ask([2]))
    await asyncio.sleep(0)
    work.open.set()
    answers = [each for [each] in await asyncio.gather(first, second)]
    assert [isinstance(each, Unreachable) and each.sent for each in answers] == [True, False]
    assert work.batches == [[1]]
    assert server.trouble == "memcached at 127.0.0.1:1: ConnectionResetError gone"


async def test_without_a_connection_nothing_was_sent(
    lane: RequestQueue[int, int], work: Work
) -> None:
    work.error = NotConnectedError("refused")
    [answer] = await lane.ask([1])
    assert isinstance(answer, Unreachable)
    assert not answer.sent


async def test_a_refused_change_was_not_made(
    lane: RequestQueue[int, int], work: Work, server: CacheServer[Idle]
) -> None:
    """The rest of its batch has its responses, and the server is left alone."""
    work.error = BatchRefusedError("memory is full", [2, None])
    answers = [each for [each] in await asyncio.gather(lane.ask([1]), lane.ask([2]))]
    assert answers[0] == 2
    assert isinstance(answers[1], Unreachable)
    assert not answers[1].sent
    assert server.trouble == answers[1].reason == "memcached at 127.0.0.1:1: memory is full"


async def test_a_failed_server_is_tried_once_in_a_while(
    lane: RequestQueue[int, int], work: Work, clock: FakeClock
) -> None:
    """By one request, however many there are; when it answers, by all."""
    work.error = TimeoutError()
    assert "no answer within 10 s" in await reason(lane)
    for _ in range(2):
        clock.advance(RETRY_AFTER_US)
        work.batches.clear()
        await asyncio.gather(*(reason(lane) for _ in range(5)))
        assert work.batches == [[1]]
    work.error = None
    assert "no answer within 10 s" in await reason(lane)
    clock.advance(RETRY_AFTER_US)
    assert await lane.ask([1]) == [2]
    answers = await asyncio.gather(*(lane.ask([n]) for n in (2, 3)))
    assert answers == [[4], [6]]


async def test_a_thread_that_does_not_come_back_is_not_waited_for(
    work: Work, clock: FakeClock
) -> None:
    """For example a name look-up without a response: no socket's time-out bounds that."""
    lane = RequestQueue(new_server(clock, 0.001), work)
    work.open.clear()
    assert "does not answer at all" in await reason(lane)
    await eventually(lambda: bool(work.batches), "the thread has begun")
    clock.advance(RETRY_AFTER_US)
    assert "does not answer at all" in await reason(lane)
    assert len(work.batches) == 1
    work.open.set()

    async def answers() -> bool:
        clock.advance(RETRY_AFTER_US)
        return await lane.ask([1]) == [2]

    await eventually(answers, "the lane is open again")
    await lane.close()


async def test_a_closed_lane_calls_no_caller_back(lane: RequestQueue[int, int], work: Work) -> None:
    """Waiting callers get the error; the batch in flight is completed first."""
    first = asyncio.create_task(lane.ask([1]))

    work.open.clear()
    await eventually(lambda: bool(work.batches), "the batch leaves")
    second = asyncio.create_task(lane.ask([2]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close())
    await asyncio.sleep(0)
    work.open.set()
    await closing
    assert await first == [2]
    [answer] = await second
    assert isinstance(answer, Unreachable)
    assert "closed" in await reason(lane)


async def test_batches_and_requests_without_a_response_are_tallied(
    server: CacheServer[Idle], work: Work
) -> None:
    """Those too that were not sent, because the server is left alone."""
    calls = Calls()
    work.open.set()
    lane = RequestQueue(server, work, calls)
    await lane.ask([1])
    assert (sum(calls.seconds.counts), calls.errors) == (1, 0)
    work.error = OSError("planted")
    await asyncio.gather(lane.ask([1]), lane.ask([2]))
    await lane.ask([3])
    assert (sum(calls.seconds.counts), calls.errors) == (2, 3)
    await lane.close()


async def test_a_connection_is_closed_when_the_batch_that_is_out_is_back(
    clock: FakeClock, work: Work
) -> None:
    closed: list[bool] = []

    class Noted(Idle):
        def close(self) -> None:
            closed.append(work.open.is_set())

    lane = RequestQueue(CacheServer("memcached", Noted, TIMEOUT_S, clock, lambda: None), work)
    work.open.clear()
    asked = asyncio.create_task(lane.ask([1]))

    await eventually(lambda: bool(work.batches), "the batch leaves")
    closing = asyncio.create_task(lane.close())
    for _ in range(10):
        await asyncio.sleep(0)
    work.open.set()
    await closing
    assert await asked == [2]
    assert closed == [True]


async def test_a_cache_is_closed_when_all_its_lanes_are(clock: FakeClock) -> None:
    work: Any = len
    operations: Operations[Idle] = Operations(work, work, work, work, work, int)
    cache = RemoteCache({"one": Idle}, operations, clock, timeout_us=1_000, prefix="c")
    closed: list[object] = []

    async def close(lane: object) -> None:
        await asyncio.sleep(0)
        closed.append(lane)

    with patch.object(RequestQueue, "close", close):
        await cache.close()
    assert len(closed) == 6


async def test_a_thread_that_could_not_be_started_is_started_the_next_time() -> None:
    """As when the system has no thread to give just now."""
    worker = Worker("lane", str, lambda *_: None)
    refused = RuntimeError("can't start new thread")
    with patch.object(threading.Thread, "start", side_effect=[refused, None]) as start:
        with pytest.raises(RuntimeError):
            worker.start()
        worker.start()
        worker.start()
    assert start.call_count == 2
