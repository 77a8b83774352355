"""Adds as lines over real sockets: answered as they come, within bounds, and ended cleanly."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from api.http.auth import Caller
from api.http.fast_json import read_lines
from api.http.responses import added_texts
from api.routes import add_stream, items
from api.routes.add_stream import AddStreams
from api.routes.items import Items
from counter import background, limits
from counter.api_keys import Scope
from counter.background import TURN_ITEMS
from counter.core.service import CounterService
from counter.errors import CounterError, OverloadedError, RateLimitedError, StreamEndedError
from counter.limits import SECOND
from tests.support.add_stream import AddStream, answers_to, line, open_stream
from tests.support.keys import hand_out
from tests.support.times import HOUR, START_US
from tests.support.waiting import eventually
from tests.support.wire import Wire, wired

PATH = "/v1/namespaces/default/batch/add"


@pytest.fixture
async def wire(fast_dir: Path) -> AsyncIterator[Wire]:
    async with wired(fast_dir) as each:
        yield each


@pytest.fixture
def streams(wire: Wire) -> AddStreams:
    found: AddStreams = wire.app.application.streams
    return found


async def test_each_line_is_answered_when_it_comes(wire: Wire) -> None:
    async with open_stream(wire.port) as client:
        # Before the first line: some clients wait for it.
        assert await client.status() == 200
        for number in range(5):
            client.send(line(number, delta=number))
            answer = await client.answer()
            assert answer is not None
            assert (answer["delta"], answer["replayed"]) == (number, False)
            assert await wire.app.rest.count("c") == sum(range(number + 1))
        client.end()
        assert await client.answer() is None
    assert wire.app.application.streams.streams.open == 0


async def test_the_connection_is_of_use_afterwards(wire: Wire) -> None:
    async with open_stream(wire.port) as client:
        client.send(line(1))
        client.end()
        assert await client.status() == 200
        assert len(await client.answers()) == 1
        client.http.start_next_cycle()
        await client.begin()
        client.send(line(1))
        client.end()
        assert await client.status() == 200
        assert [each["replayed"] for each in await client.answers()] == [True]


async def test_lines_come_in_any_pieces(wire: Wire) -> None:
    """Many at once, bytes one by one, empty ones between, the last without an end."""
    data = b"\n \r\n".join([line(number) for number in range(3 * limits.BATCH_ITEMS_MAX)])
    async with open_stream(wire.port) as client:
        client.send(data[: len(data) // 2])
        for at in range(len(data) // 2, len(data) // 2 + 500):
            client.send(data[at : at + 1])
        client.send(data[len(data) // 2 + 500 :].rstrip())
        client.end()
        assert await client.status() == 200
        answers = await client.answers()
    assert len(answers) == 3 * limits.BATCH_ITEMS_MAX
    assert await wire.app.rest.count("c") == len(answers)


async def test_a_bad_line_spoils_only_itself(wire: Wire) -> None:
    long = (
        b'{"counter": "c", "delta": 1, "x": "' + b"x" * limits.ADD_STREAM_LINE_BYTES_MAX + b'"}\n'
    )
    async with open_stream(wire.port) as client:
        client.send(line(1), b"nonsense\n", line(2), b'{"counter": "c", "delta": 1}\n')
        client.send(line(1), line(3, delta=2**63), b"{} {}\n", line(1, counter="d"))
        # Whether a long line comes at once or in parts makes no difference.
        client.send(long, line(4))
        for at in range(0, len(long), 5_000):
            client.send(long[at : at + 5_000])
        client.send(line(5))
        client.end()
        await client.status()
        answers = await client.answers()
    codes = [each.get("code") or each["replayed"] for each in answers]
    assert codes == [
        *(False, "invalid_body", False, "token_missing", True, "invalid_body", "invalid_body"),
        *(False, "invalid_body", False, "invalid_body", False),
    ]
    assert "items.1:" in answers[1]["detail"]
    for index in (8, 10):
        assert f"items.{index} has more than 16384 bytes" in answers[index]["detail"]
    assert await wire.app.rest.count("c") == 4


async def test_a_line_of_nothing_but_space_is_too_long_too(wire: Wire) -> None:
    """Of a long line only the beginning is kept: no part of it may count."""
    answers = await answers_to(wire.port, b" " * 25_000, line(1), line(2))
    assert [each.get("code") for each in answers] == ["invalid_body", None]
    assert await wire.app.rest.count("c") == 1


async def test_sent_again_they_count_once(wire: Wire) -> None:
    for replayed in (False, True):
        lines = (line(number, counter=f"c{number % 3}") for number in range(100))
        answers = await answers_to(wire.port, *lines)
        assert [each["replayed"] for each in answers] == [replayed] * 100
        assert [each["counter"] for each in answers] == [f"c{n % 3}" for n in range(100)]
    assert await wire.app.rest.count("c0") == 34


async def test_a_client_that_expects_100_continue_gets_it(wire: Wire) -> None:
    async with open_stream(wire.port, ("expect", "100-continue")) as client:
        first = await client.event()
        assert first.status_code == 100
        client.send(line(1))
        client.end()
        assert await client.status() == 200
        assert len(await client.answers()) == 1


async def test_a_body_with_a_length_is_one_batch(wire: Wire) -> None:
    body = b"".join(line(number) for number in range(limits.BATCH_ITEMS_MAX + 1))
    headers = {"content-type": "application/x-ndjson"}
    answer = await wire.app.http.post(PATH, content=body, headers=headers)
    assert answer.status_code == 400
    assert "1001 items; 1 to 1000 are allowed" in answer.json()["detail"]


async def test_a_stream_needs_a_body(wire: Wire) -> None:
    """Regression: it was answered with 200, as if all of its lines had been added."""
    async with open_stream(wire.port, framing=()) as client:
        client.end()
        assert await client.status() == 400


async def test_a_client_that_reads_no_responses_is_not_read(fast_dir: Path) -> None:
    """TCP slows a client down: buffers are bounded, and nothing is lost."""
    count = 20_000
    async with wired(fast_dir, socket_bytes=64 * 1024) as wire, open_stream(wire.port) as client:
        streams = wire.app.application.streams
        held = 0

        async def is_full() -> bool:
            nonlocal held
            held = max(held, *(len(each._data) for each in streams._bodies), 0)
            (protocol,) = wire.connections
            held = max(held, len(protocol.latest.unread))
            return bool(protocol.is_reading_paused and not protocol.writable.is_set())

        async def send() -> None:
            for at in range(0, count, 500):
                client.send(*(line(number) for number in range(at, at + 500)))
                await client.writer.drain()
            client.end()

        assert await client.status() == 200
        sending = asyncio.create_task(send())
        await eventually(is_full, "a full stream")
        assert 0 < await wire.app.rest.count("c") < count
        answers = await client.answers()
        await sending
        assert len(answers) == count
        assert held <= limits.ADD_STREAM_BYTES_MAX + 512 * 1024
        assert await wire.app.rest.count("c") == count


@pytest.fixture
def waits(wire: Wire) -> Iterator[list[float]]:
    """How long a stream waited for each limit, in seconds; the clock advances by it at once."""
    waited: list[float] = []

    async def pause(event: asyncio.Event, seconds: float) -> bool:
        if seconds < limits.ADD_STREAM_SILENCE_US / SECOND:
            waited.append(seconds)
            wire.app.clock.advance(int(seconds * SECOND))
            return event.is_set()
        await event.wait()
        return True

    with patch.object(add_stream, "pause", pause):
        yield waited


async def test_a_stream_waits_for_its_rate_limit(wire: Wire, waits: list[float]) -> None:
    """A request would be rejected; a stream comes later."""
    assert (await wire.app.rest.within("slow").create(adds_per_s=100)).status_code == 201
    async with open_stream(wire.port, namespace="slow") as client:
        await client.status()
        for at in range(0, 500, 100):
            client.send(*(line(number) for number in range(at, at + 100)))
            for _ in range(100):
                await client.is_added()
        client.end()
        assert await client.answer() is None
    assert 3 <= sum(waits) <= 6


async def test_a_stream_waits_for_a_rate_limit_without_retry_after(
    wire: Wire, waits: list[float]
) -> None:
    refusals = chain([RateLimitedError("wait")], repeat(None))
    async with open_stream(wire.port) as client:
        await client.status()
        with patch.object(Caller, "charge", side_effect=refusals):
            client.send(line(1))
            await client.is_added()
    assert waits == [1.0]


async def test_a_stream_waits_until_the_load_admits_it(wire: Wire, waits: list[float]) -> None:
    refusals = chain([OverloadedError("full")] * 2, repeat(None))
    async with open_stream(wire.port) as client:
        await client.status()
        with patch.object(wire.service.load, "refusal", lambda: next(refusals)):
            client.send(line(1))
            await client.is_added()
    assert waits == [0.05, 0.05]


async def test_rejected_lines_are_added_later(wire: Wire, waits: list[float]) -> None:
    """As the resolutions of late tokens are, past their rate."""
    add_events = CounterService.add_events
    rejected = [RateLimitedError("wait", retry_after_us=1), OverloadedError("wait")]

    async def add_some(*given: Any) -> list[Any]:
        service, namespace, events, allowance = given
        if rejected:
            some = events[:-1]
            done = await add_events(service, namespace, some, allowance) if some else []
            return [*done, rejected.pop()]
        found: list[Any] = await add_events(*given)
        return found

    with patch.object(CounterService, "add_events", add_some):
        answers = await answers_to(wire.port, line(1), line(2), line(3))
    assert [each["replayed"] for each in answers] == [False] * 3
    assert waits == [0.05, 0.05]
    assert await wire.app.rest.count("c") == 3


async def test_late_lines_are_read_again_only_when_their_rate_lets_them_in(fast_dir: Path) -> None:
    """Regression: each stream read all of them again every 50 ms, for as long as it had to wait."""
    streams, lines, rate = 5, 100, 10
    waited: list[float] = []
    async with wired(fast_dir, resolutions_per_s=rate) as wire:
        late_us = START_US - HOUR

        async def pause(event: asyncio.Event, seconds: float) -> bool:
            if seconds >= limits.ADD_STREAM_SILENCE_US / SECOND:
                return await background.pause(event, seconds)
            waited.append(seconds)
            wire.app.clock.advance(int(seconds * SECOND))
            await asyncio.sleep(0)
            return event.is_set()

        async def send(first: int) -> list[Any]:
            names = range(first, first + lines)
            return await answers_to(
                wire.port, *(line(n, counter=f"c{n}", time_us=late_us) for n in names)
            )

        with (
            patch.object(add_stream, "pause", pause),
            patch.object(items, "read_lines", wraps=read_lines) as reads,
        ):
            answers = await asyncio.gather(*(send(at * lines) for at in range(streams)))
    for each in answers:
        assert [answer["code"] for answer in each] == ["token_too_old"] * lines
    # Each stream once to see that they are late, and once when they can be resolved.
    assert reads.call_count <= 2 * streams
    assert sum(waited) > (streams - 2) * lines / rate
    assert len(waited) <= streams**2


async def test_rejected_lines_are_answered_in_order(wire: Wire, waits: list[float]) -> None:
    """Whichever of them are rejected, and in whatever order they are added at last."""
    add = Items.add
    rejected = [{"c1", "c3", "c4"}, {"c3"}, {"c3"}, set()]

    async def add_some(self: Items, *where: Any) -> list[Any]:
        """Add those that are not rejected this time."""
        names, every = rejected.pop(0), self.events or self.adds
        is_rejected = [not isinstance(e, CounterError) and e[0] in names for e in every]
        some: Any = [e for e, no in zip(every, is_rejected, strict=True) if not no]
        done = iter(await add(Items(some) if self.events else Items((), some), *where))
        return [OverloadedError("wait") if no else next(done) for no in is_rejected]

    with patch.object(Items, "add", add_some):
        lines = [line(n, delta=n, counter=f"c{n}") for n in range(7)]
        answers = await answers_to(wire.port, *lines[:6], b"nonsense\n", lines[6])
    counted = [each for each in answers if "code" not in each]
    assert [(each["counter"], each["delta"]) for each in counted] == [
        (f"c{n}", n) for n in range(7)
    ]
    assert answers[6]["code"] == "invalid_body"
    assert len(waits) == 3


async def test_a_slow_stream_is_not_a_stalled_request(wire: Wire) -> None:
    async with open_stream(wire.port) as client:
        await client.status()
        (protocol,) = wire.connections
        protocol.check(asyncio.get_running_loop().time() + 3_600)
        client.send(line(1))
        await client.is_added()


async def test_a_silent_one_ends(wire: Wire, streams: AddStreams) -> None:
    streams.silence_us = 1
    async with open_stream(wire.port) as client:
        await client.status()
        answers = await asyncio.gather(client.answer(), ended(client))
    assert answers[0] is not None
    assert answers[0]["code"] == "stream_ended"
    assert "no line came for 1us; an empty one keeps a stream open" in answers[0]["detail"]


async def ended(client: AddStream) -> None:
    """End the request as a client that got to know of the end."""
    await asyncio.sleep(0)
    client.end()


async def test_a_shutdown_reports_lines_that_were_not_added(
    wire: Wire, streams: AddStreams
) -> None:
    async with open_stream(wire.port) as client:
        client.send(line(1))
        await client.status()
        await client.is_added()
        wire.app.application.drain()
        last = await client.answer() or {}
        assert (last["code"], last["applied"], last["retry"]) == (
            *("stream_ended", None, "same_token"),
        )
        assert "shutting down; the 1 lines before this are answered" in last["detail"]
        client.send(line(2))
        client.end()
        assert await client.answer() is None
    async with open_stream(wire.port) as client:
        client.end()
        assert await client.status() == 503
    assert await wire.app.rest.count("c") == 1
    assert streams.streams.open == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: None, "holds no key that is valid now"),
        (lambda key: replace(key, scope=Scope.READ), "has the scope read"),
        (lambda key: replace(key, namespaces=("other",)), "there is no namespace 'default'"),
    ],
    ids=["revoked", "another scope", "other namespaces"],
)
@pytest.mark.parametrize("is_waiting", [False, True], ids=["between lines", "while lines wait"])
async def test_a_key_that_loses_its_right_ends_it(
    fast_dir: Path, change: Any, why: str, is_waiting: bool
) -> None:
    """The next line is not added, nor are lines that wait to be added again."""
    async with wired(fast_dir) as wire:
        header = await hand_out(wire.app, Scope.WRITE, "default")
        path = "/v1/namespaces/default/counters/c"
        keys = wire.app.application.keys
        changed = change(keys.find(header["Authorization"].removeprefix("Bearer ").encode()))
        losing = patch.object(keys, "find", return_value=changed)
        add_events = CounterService.add_events

        async def reject(*given: Any) -> list[Any]:
            _, _, events, _ = given
            if not is_waiting or events[0].delta == 1:
                return await add_events(*given)
            losing.start()
            return [OverloadedError("wait")] * len(events)

        async with open_stream(wire.port, *header.items()) as client:
            client.send(line(1))
            assert await client.status() == 200
            await client.is_added()
            with patch.object(CounterService, "add_events", reject):
                if not is_waiting:
                    losing.start()
                try:
                    client.send(line(2, delta=2))
                    if is_waiting:
                        assert (await client.answer() or {})["code"] == "overloaded"
                        client.send(line(3, delta=4))
                    last = await client.answer()
                finally:
                    losing.stop()
            client.end()
            assert await client.answer() is None
        assert last is not None
        assert last["code"] == "stream_ended"
        assert why in last["detail"]
        assert f"the {1 + is_waiting} lines before this are answered" in last["detail"]
        assert (await wire.app.http.get(path, headers=header)).json()["count"] == 1


async def test_the_right_is_checked_after_a_wait(streams: AddStreams) -> None:
    """Of the right that it had before, nothing may be added."""
    did: list[str] = []

    async def check(_: Any) -> tuple[Any, Any]:
        did.append("check")
        return None, None

    class Lines:
        async def pause(self, _: int) -> None:
            did.append("pause")

    with patch.object(streams, "_check", check):
        await streams._wait(None, Lines(), [OverloadedError("wait")])  # type: ignore[arg-type]
    assert did == ["pause", "check"]


async def test_the_last_line_is_sent_before_input_is_discarded(streams: AddStreams) -> None:
    did: list[bytes] = []

    async def send(piece: Any) -> None:
        await asyncio.sleep(0)
        did.append(piece["body"])

    class Lines:
        async def next(self, *_: int) -> None:
            raise StreamEndedError("because")

        async def discard(self) -> None:
            did.append(b"dropped")

    await streams._respond(None, Lines(), send)  # type: ignore[arg-type]
    head, last, dropped = did
    assert (head, dropped) == (b"", b"dropped")
    assert b"because" in last


async def test_further_input_is_discarded_until_the_request_ends() -> None:
    asked, may_end = 0, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked > 1:
            await may_end.wait()
        return {"type": "http.request", "body": line(asked), "more_body": asked == 1}

    lines = add_stream._Lines(receive)
    await lines.start()
    # A client may wait for this before it sends anything.
    assert asked
    dropping = asyncio.create_task(lines.discard())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not dropping.done()
    may_end.set()
    await dropping
    assert lines._data == b""


async def test_a_stream_that_is_over_is_read_no_more() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    lines = add_stream._Lines(receive)
    await lines.start()
    lines.close()
    await asyncio.sleep(0)
    assert lines._filling is not None
    assert lines._filling.cancelled()


async def test_no_stream_begins_under_overload(wire: Wire) -> None:
    refusing = patch.object(wire.service.load, "check", side_effect=OverloadedError("full"))
    async with open_stream(wire.port) as client:
        with refusing:
            assert await client.status() == 503


async def test_late_lines_are_charged_to_the_key_as_it_is_now(streams: AddStreams) -> None:
    charged: list[tuple[int, bool]] = []

    class Caller:
        def resolve(self, count: int, *, overdraws: bool) -> None:
            charged.append((count, overdraws))

    class Lines:
        async def pause(self, _: int) -> None: ...

    async def check(_: Any) -> tuple[Any, Any]:
        return Caller(), None

    refusals = [RateLimitedError("wait"), OverloadedError("wait")]
    with patch.object(streams, "_check", check):
        allowance, _ = await streams._wait(None, Lines(), refusals)  # type: ignore[arg-type]
    assert charged == [(1, False)]
    # One was charged before; later late tokens are charged to the same key.
    allowance.resolve(1)
    allowance.resolve(1)
    assert charged == [(1, False), (1, True)]


NO_ADDS = [b"x\n", b'{"counter": "c", "delta": 1}\n', b'{"counter": "", "delta": 1}\n']


@pytest.mark.parametrize("bad", NO_ADDS)
async def test_one_of_nothing_but_lines_that_are_no_adds_ends(wire: Wire, bad: bytes) -> None:
    most = limits.ADD_STREAM_REFUSED_MAX
    sent = (line(1), bad * (most - 1), line(2), bad * (3 * most))
    *answers, last = await answers_to(wire.port, *sent)
    assert last["code"] == "stream_ended"
    refused = [each.get("code", "added") for each in answers]
    assert refused.index("added", 1) == most
    assert set(refused) == {"added", refused[1]}
    assert most <= len(answers) - most - 1 < 2 * most
    assert f"the {len(answers)} lines before this are answered" in last["detail"]
    assert await wire.app.rest.count("c") == 2


@pytest.mark.parametrize(
    "number", [limits.ADD_STREAM_REFUSED_MAX - 1, limits.ADD_STREAM_REFUSED_MAX]
)
async def test_invalid_lines_in_a_row_are_bounded(wire: Wire, number: int) -> None:
    answers = await answers_to(wire.port, b"x\n" * number)
    ends = number == limits.ADD_STREAM_REFUSED_MAX
    assert [each["code"] for each in answers] == ["invalid_body"] * number + ["stream_ended"] * ends


@pytest.mark.parametrize("more", [0, 1])
async def test_a_line_has_as_many_bytes_as_it_may_have(more: int) -> None:
    """However it arrives: the rest of an overlong line is not taken for a line."""
    size = limits.ADD_STREAM_LINE_BYTES_MAX
    text = line(1).strip().ljust(size) + b"x" * more
    has_more = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if lines._data:
            await has_more.wait()
            return {"type": "http.request", "body": b"\n", "more_body": False}
        return {"type": "http.request", "body": text, "more_body": True}

    lines = add_stream._Lines(receive)
    await lines.start()
    taking = asyncio.create_task(lines.next(limits.BATCH_ITEMS_MAX, SECOND))
    await asyncio.sleep(0)
    has_more.set()
    assert await taking == [None if more else line(1).strip()]


@pytest.mark.parametrize("bad", NO_ADDS)
async def test_all_streams_together_read_some_lines_in_a_turn_of_the_loop(
    wire: Wire, streams: AddStreams, bad: bytes
) -> None:
    """Regression: a stream of malformed lines held the event loop for seconds."""
    turn, clock = 0, 0.0
    read, made = Counter[int](), Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def step(counted: Counter[int], count: int) -> None:
        """Take all the time that a turn has."""
        nonlocal clock
        clock += 1.0
        counted[turn] += count

    def counted_read(lines: Any) -> Any:
        step(read, len(lines))
        return read_lines(lines)

    def counted_texts(namespace: Any, outcomes: Any) -> list[str]:
        step(made, len(outcomes))
        return added_texts(namespace, outcomes)

    async def send() -> int:
        return len(await answers_to(wire.port, bad * 990))

    with (
        patch.object(streams.queue, "now_s", lambda: clock),
        patch.object(items, "read_lines", counted_read),
        patch.object(items, "added_texts", counted_texts),
    ):
        turning = asyncio.create_task(count_turns())
        assert await asyncio.gather(*(send() for _ in range(5))) == [990] * 5
        turning.cancel()
    assert read.total() == made.total() == 5 * 990
    assert max((read + made).values()) <= TURN_ITEMS


async def test_more_lines_are_added_together_only_while_all_are_adds(wire: Wire) -> None:
    """All streams do some work in one turn of the loop: this bounds it."""
    taken: list[int] = []
    of_lines = Items.of_lines

    def counted(lines: Any, first: int) -> Any:
        taken.append(len(lines))
        return of_lines(lines, first)

    with patch.object(Items, "of_lines", counted):
        lines = (line(number) for number in range(1_000))
        assert len(await answers_to(wire.port, b"x\n" * 200, *lines)) == 1_200
    few = TURN_ITEMS
    assert taken == [few, few, few, 2 * few, 4 * few, 3 * few]


async def test_empty_lines_yield_to_other_requests(wire: Wire) -> None:
    """Regression: those that had come were dropped at once, however many they were."""
    count, turn = 100_000, 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" \n" * count + line(1), "more_body": False}

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    lines = add_stream._Lines(receive)
    await lines.start()
    turning = asyncio.create_task(count_turns())
    assert await lines.next(limits.BATCH_ITEMS_MAX, SECOND) == [line(1).strip()]
    turning.cancel()
    assert turn >= count // limits.BATCH_ITEMS_MAX


async def test_a_disconnected_client_leaves_nothing(wire: Wire, streams: AddStreams) -> None:
    async with open_stream(wire.port) as client:
        client.send(line(1), line(2)[:-2])
        await client.status()
        await client.answer()

    await eventually(
        lambda: not streams.streams.open and not wire.connections, "the end of the stream"
    )
    assert not streams._bodies
    assert await wire.app.rest.count("c") == 1


async def test_the_number_of_streams_is_bounded(wire: Wire, streams: AddStreams) -> None:
    streams.streams.most = 1
    async with open_stream(wire.port) as first:
        assert await first.status() == 200
        async with open_stream(wire.port) as second:
            second.end()
            assert await second.status() == 503


async def test_many_empty_lines_before_one_do_not_hide_it(wire: Wire) -> None:
    """Regression: after as many empty lines as a commit may have, a stream waited for more."""
    async with open_stream(wire.port) as client:
        client.send(b"\n" * limits.BATCH_ITEMS_MAX, line(1))
        await client.status()
        await client.is_added()


async def test_a_malformed_chunk_ends_a_stream_without_a_second_head(wire: Wire) -> None:
    """Regression: the 400 was written into the chunked body of the stream's own response."""
    async with open_stream(wire.port) as client:
        client.send(line(1))
        await client.status()
        await client.answer()
        client.writer.write(b"nonsense\r\n")
        assert await client.reader.read() == b""
