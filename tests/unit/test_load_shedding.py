"""Rejections: all of them are sent, in order, and not all at once."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from api.http.call import AsgiCall, Call, Message, RequestIds, Target
from api.http.connections import ReadQueue, Steps
from api.http.load_shedding import LoadShedder, timeout_us
from api.http.responses import Response
from api.http.routing import Route
from counter.api_keys import Scope
from counter.core.admission import Load
from counter.errors import InvalidParameterError, OverloadedError
from counter.testing.clock import FakeClock
from tests.support.times import SECOND, START_US
from tests.support.virtual import virtually


def flooded() -> LoadShedder:
    """A shedder with more adds in the queue than could end in time."""
    load = Load(FakeClock(START_US))
    load.admit(load.room)
    return LoadShedder(load)


def test_rejections_are_answered_soon_in_bounded_groups() -> None:
    rejected: list[tuple[int, float]] = []

    async def refuse() -> None:
        shedder, loop = flooded(), asyncio.get_running_loop()

        def answer(number: int, response: Response) -> None:
            assert response.status == 503
            rejected.append((number, loop.time()))

        for number in range(250):
            assert shedder.refuses(None, partial(answer, number))
        assert rejected == []
        await asyncio.sleep(1)
        assert shedder.refuses(None, partial(answer, 250))
        await asyncio.sleep(1)

    virtually(refuse())
    assert [number for number, _ in rejected] == list(range(251))
    at = Counter(round(when_s, 3) for _, when_s in rejected)
    assert at == {0.02: 100, 0.04: 100, 0.06: 50, 1.02: 1}


def test_a_rejection_that_fails_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    rejected: list[Response] = []

    async def refuse() -> None:
        def fails(_: Response) -> None:
            raise RuntimeError("the connection is gone")

        shedder = flooded()
        assert shedder.refuses(None, fails)
        assert shedder.refuses(None, rejected.append)
        await asyncio.sleep(1)

    virtually(refuse())
    assert len(rejected) == 1
    assert "the connection is gone" in caplog.text


def test_a_refused_body_is_read_whole_and_its_handler_called_in_its_turn() -> None:
    """A client that still sends would take an early response for a broken connection."""
    parts: list[Message] = [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"b", "more_body": False},
    ]

    async def receive() -> Message:
        return parts.pop(0)

    async def never() -> Response:
        raise AssertionError

    async def handle() -> float:
        target = Target("POST", Route("POST", "/v1/adds", never, Scope.WRITE, writes=True))
        scope = {"query_string": b"", "headers": []}
        call = AsgiCall(target, scope, receive, RequestIds(), 100)
        call.shedder = flooded()
        with pytest.raises(OverloadedError):
            await call.body()
        return asyncio.get_running_loop().time()

    assert virtually(handle()) == 0.02
    assert parts == []


def test_rejections_leave_turns_of_the_event_loop_to_requests() -> None:
    """Clients that come again as soon as they are answered would make it last for ever."""

    async def ask() -> list[int]:
        shedder, at_once = flooded(), []
        for _ in range(2):
            at_once.append(sum(not shedder.must_wait() for _ in range(2_000)))
            await asyncio.sleep(0)
        return at_once

    assert virtually(ask()) == [500, 500]


def test_a_long_request_timeout_is_not_parsed() -> None:
    """Regression: of each of many that were as long as a head may be, all was kept."""
    assert timeout_us(b"1m30s") == 90 * SECOND
    held = timeout_us.cache_info().currsize
    with pytest.raises(InvalidParameterError, match="it has 60000 characters; at most 64 are read"):
        timeout_us(b"1s" * 30_000)
    assert timeout_us.cache_info().currsize == held


def test_a_batch_is_admitted_again_when_its_turn_to_be_read_comes() -> None:
    """Regression: those that waited to be read counted for nothing, and all were let in."""
    load, clock, read = Load(FakeClock(START_US)), SimpleNamespace(now_s=0.0), list[str]()
    shedder, queue = LoadShedder(load), ReadQueue(lambda: clock.now_s)

    def steps(name: str) -> Steps[str]:
        read.append(name)
        load.admit(load.room // 2)
        yield
        return name

    async def batch(name: str) -> float:
        call, loop = Call(Target("POST", None), [], {}, b"1"), asyncio.get_running_loop()
        call.shedder = shedder
        with suppress(OverloadedError):
            await call.read_in_turn(queue, steps(name))
        return loop.time()

    async def batches() -> list[float]:
        return await asyncio.gather(*map(batch, "abcd"))

    # Two are refused, after the delay of all rejections.
    assert sorted(virtually(batches())) == [0.0, 0.0, 0.02, 0.02]
    assert len(read) == 2


async def test_the_wait_for_the_turn_is_a_part_of_what_a_write_may_wait() -> None:
    load = Load(FakeClock(START_US))
    load.admit(load.room // 2)
    shedder, half_s = LoadShedder(load), load.wait_max_us / SECOND / 2
    shedder.check_write(None, half_s * 0.9)
    for timeout, waited_s in ((None, half_s * 1.1), (b"300ms", half_s * 0.9)):
        with pytest.raises(OverloadedError):
            shedder.check_write(timeout, waited_s)
