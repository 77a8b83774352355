"""A count as it changes: the events of a stream, its reconnection, and its end."""

from contextlib import aclosing
from itertools import islice
from uuid import uuid4

import pytest

from counter_client import AsyncCounterClient, Count, CounterClient, CounterError, Options
from counter_client.calls import Calls
from counter_client.errors import (
    InvalidParameterError,
    NamespaceUnknownError,
    StoreUnavailableError,
    UnavailableError,
)
from counter_client.failures import UnexpectedAnswerError, UnreachableError
from counter_client.transport import LiveStream
from tests.client.script import Script, problem
from tests.support.in_thread import Service

COUNT = (
    '{"namespace":"default","counter":"c","count":7,"as_of":"2026-01-31T08:15:30.000250Z",'
    '"accuracy":"accurate"}'
)


def stream_of(script: Script, **options: float) -> LiveStream:
    return LiveStream(Calls("default").live("c"), script.policy(**options))


def received(stream: LiveStream, event: str, data: str) -> Count | CounterError | None:
    """The result of an event that arrives line by line."""
    lines = [stream.line(f"event: {event}"), stream.line(f"data: {data}")]
    assert lines == [None, None]
    return stream.line("")


def test_counts_and_transient_errors_are_reported() -> None:
    stream = stream_of(Script([]))
    count = received(stream, "count", COUNT)
    assert isinstance(count, Count)
    assert (count.counter, count.count) == ("c", 7)
    assert (stream.line(": still here"), stream.line("")) == (None, None)
    trouble = problem("store_unavailable", 503, "same_token").body.decode()
    assert isinstance(received(stream, "problem", trouble), StoreUnavailableError)
    assert received(stream, "end", "{}") is None


def test_a_permanent_error_is_raised() -> None:
    gone = problem("namespace_unknown", 404, "never").body.decode()
    with pytest.raises(NamespaceUnknownError):
        received(stream_of(Script([])), "problem", gone)
    for name, data in (
        ("count", "{}"),
        ("count", COUNT.replace('"c"', '"d"')),
        ("count", COUNT.replace("7", '"7"')),
        ("problem", "{}"),
    ):
        with pytest.raises(UnexpectedAnswerError):
            received(stream_of(Script([])), name, data)


def test_a_stream_that_ended_in_order_is_taken_up_at_once() -> None:
    stream = stream_of(Script([]), backoff_first_s=0.1)
    received(stream, "count", COUNT)
    assert stream.pause_s(None) == 0.1
    assert stream.number == 1


def test_a_stream_of_something_else_is_paced_and_ends() -> None:
    """Regression: a page that is not an event stream was read again every few milliseconds."""
    script = Script([])
    stream = stream_of(script, backoff_first_s=0.1, deadline_s=3.0)
    received(stream, "count", COUNT)
    stream.pause_s(None)
    pauses = []
    for _ in range(2):
        for line in ("<html>", "", "<p>data: 1", "event: other", "data: 1", ""):
            assert stream.line(line) is None
        pauses.append(stream.pause_s(None))
    assert pauses == [0.2, 0.4]
    script.now_s += 3.0
    with pytest.raises(UnexpectedAnswerError):
        stream.pause_s(None)


def test_silence_ends_the_stream_at_the_deadline_of_a_call() -> None:
    """Each comment restarts the silence; the pauses grow until then."""
    script = Script([])
    stream = stream_of(script, backoff_first_s=0.1, deadline_s=3.0)
    lost = UnreachableError("no response")
    script.now_s += 2.9
    assert [stream.pause_s(lost), stream.pause_s(lost)] == [0.2, 0.4]
    stream.line(": still here")
    script.now_s += 2.9
    assert stream.pause_s(lost) == 0.2
    script.now_s += 0.2
    with pytest.raises(UnreachableError):
        stream.pause_s(lost)


def test_no_pause_reaches_past_that_deadline() -> None:
    """Regression: a Retry-After of a year was a year of silence."""
    stream = stream_of(Script([]), backoff_first_s=0.1, deadline_s=3.0)
    assert stream.pause_s(UnavailableError("busy", retry_after_us=2_000_000)) == 2.2
    with pytest.raises(UnavailableError):
        stream.pause_s(UnavailableError("busy", retry_after_us=3_000_000))


def test_half_an_event_is_forgotten_with_its_connection() -> None:
    stream = stream_of(Script([]))
    stream.line("event: count")
    stream.line("data: {")
    stream.pause_s(UnreachableError("broken off"))
    assert isinstance(received(stream, "count", COUNT), Count)


@pytest.mark.parametrize("hedge_after_s", [None, 5.0])
def test_a_thread_sees_each_change(service: Service, hedge_after_s: float | None) -> None:
    name = str(uuid4())
    options = Options(trust_env=False, hedge_after_s=hedge_after_s)
    with CounterClient(service.url, options=options) as client:
        seen = []
        for each in islice(client.live(name), 3):
            assert isinstance(each, Count)
            seen.append(each.count)
            client.add(name, 5)
        assert seen == [0, 5, 10]
        with pytest.raises(InvalidParameterError):
            next(client.live(""))
    with (
        CounterClient(service.url, "nowhere", options=options) as elsewhere,
        pytest.raises(NamespaceUnknownError),
    ):
        next(elsewhere.live(name))


async def test_an_event_loop_sees_each_change(service: Service) -> None:
    name = str(uuid4())
    seen: list[int] = []
    async with AsyncCounterClient(service.url, options=Options(trust_env=False)) as client:
        async with aclosing(client.live(name)) as stream:
            async for each in stream:
                assert isinstance(each, Count)
                seen.append(each.count)
                if len(seen) == 2:
                    break
                await client.add(name, 5)
        assert seen == [0, 5]
    away = AsyncCounterClient("http://127.0.0.1:9", options=Options(deadline_s=0.05))
    async with away, aclosing(away.live(name)) as stream:
        with pytest.raises(UnreachableError):
            await anext(stream)
