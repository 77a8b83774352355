"""Buffered adds against a real service: each is counted once, whatever breaks on the way."""

import asyncio
import random
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter_client import (
    AsyncBuffer,
    AsyncCounterClient,
    Buffer,
    BufferFullError,
    ClosedError,
    CounterClient,
    Flush,
    Options,
    RejectedError,
    UnsentError,
)
from counter_client.errors import InvalidParameterError, NamespaceUnknownError
from counter_client.spool import Spool
from tests.client.callers import Caller
from tests.support.in_thread import Service, in_thread
from tests.support.relay import Relay
from tests.support.server import Server, serving
from tests.support.waiting import eventually

QUICK = Options(
    trust_env=False, deadline_s=30.0, attempt_timeout_s=0.3, backoff_first_s=0.01, backoff_max_s=0.1
)
NOWHERE = "http://127.0.0.1:9"
NAMES = [f"c{number}" for number in range(20)]


def test_adds_of_one_counter_are_merged(service: Service) -> None:
    flushed: list[Flush] = []
    options = Options(trust_env=False, on_flush=flushed.append)
    with CounterClient(service.url, options=options) as client:
        with client.buffer(max_delay=3_600) as buffer:
            for number in range(1_000):
                buffer.add("merged", number)
            buffer.add("merged too")
        assert [each.items for each in flushed] == [2]
        assert client.get("merged").count == sum(range(1_000))
        assert len(list(client.events("merged"))) == 1


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@asynccontextmanager
async def open_buffer(
    kind: str, url: str, namespace: str = "default", *, options: Options = QUICK, **bounds: Any
) -> AsyncIterator[Any]:
    """A buffer of either client; it is the test's to close."""
    made = AsyncCounterClient if kind == "async" else CounterClient
    client: Any = made(url, namespace, options=options)
    buffer = client.buffer(**bounds)
    if kind == "async":
        await buffer.__aenter__()
    yield Caller(buffer)
    await Caller(client).close()


@KINDS
async def test_adds_are_sent_within_the_delay_without_a_flush(kind: str, service: Service) -> None:
    flushed: list[Flush] = []
    options = Options(trust_env=False, on_flush=flushed.append)
    async with open_buffer(kind, service.url, options=options) as buffer:
        await buffer.add(f"delayed-{kind}", 2)
        await eventually(lambda: bool(flushed), "the buffer sends by itself")
        await buffer.close()
    await check(service, Counter({f"delayed-{kind}": 2}))


def test_a_flush_ends_with_the_buffer() -> None:
    """Regression: it waited for ever if another thread closed the buffer before all was sent."""
    with CounterClient(NOWHERE, options=QUICK) as client:
        buffer = client.buffer()
        buffer.add("a")
        ended: list[Exception] = []

        def flush() -> None:
            try:
                buffer.flush()
            except UnsentError as error:
                ended.append(error)

        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        with pytest.raises(UnsentError):
            buffer.close(timeout=0.01)
        flushing.join(30)
        assert len(ended) == 1


def test_a_sum_past_64_bits_is_exact(service: Service) -> None:
    with CounterClient(service.url, options=QUICK) as client:
        with client.buffer(max_delay=3_600) as buffer:
            for _ in range(3):
                buffer.add("large", 2**63 - 1)
        assert client.get("large").count == 3 * (2**63 - 1)


def test_threads_share_a_buffer(service: Service) -> None:
    with CounterClient(service.url, options=QUICK) as client:
        with client.buffer(max_delay=0.001, max_items=8) as buffer:

            def work(seed: int) -> None:
                for name in random.Random(seed).choices(NAMES, k=500):
                    buffer.add(f"shared-{name}")

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        expected: Counter[str] = Counter()
        for seed in range(4):
            expected.update(random.Random(seed).choices(NAMES, k=500))
        found = client.get_many([f"shared-{name}" for name in NAMES])
        assert {x.counter.removeprefix("shared-"): x.count for x in found} == expected


@KINDS
@pytest.mark.parametrize(
    ("counter", "delta"), [("", 1), ("a\n", 1), ("a", 2**63), ("a", 1.5), ("a", True), (3, 1)]
)
async def test_an_invalid_add_is_refused_at_once(kind: str, counter: Any, delta: Any) -> None:
    async with open_buffer(kind, NOWHERE) as buffer:
        with pytest.raises(InvalidParameterError):
            await buffer.add(counter, delta)
        await buffer.close()


def test_a_full_buffer_pushes_back() -> None:
    """Merging goes on; one more counter waits, and nothing is lost or taken twice."""
    with CounterClient(NOWHERE, options=QUICK) as client:
        buffer = client.buffer(max_items=2)
        buffer.add("a")
        buffer.add("b")
        with pytest.raises(BufferFullError):
            buffer.add("c", timeout=0.01)
        with pytest.raises(UnsentError) as caught:
            buffer.close(timeout=0.01)
        found = Counter(caught.value.unsent)
        for each in caught.value.unfinished:
            found.update(dict(each.items))
        assert found == {"a": 1, "b": 1}
        with pytest.raises(ClosedError):
            buffer.add("a")


@KINDS
async def test_a_namespace_that_is_not_there_is_reported_at_the_flush(
    kind: str, service: Service
) -> None:
    """And nothing is given up: it may be created yet."""
    async with open_buffer(kind, service.url, "not-yet", max_delay=3_600) as buffer:
        await buffer.add("a", 3)
        with pytest.raises(UnsentError, match="not-yet") as caught:
            await buffer.flush()
        assert isinstance(caught.value.__cause__, NamespaceUnknownError)
        with pytest.raises(UnsentError):
            await buffer.close()


@asynccontextmanager
async def buffered(kind: str, url: str, spool: Path | None) -> AsyncIterator[Any]:
    """An open buffer of either client; its end sends the rest."""
    if kind == "async":
        async with (
            AsyncCounterClient(url, options=QUICK) as client,
            client.buffer(max_delay=0.01, spool=spool) as buffer,
        ):
            yield buffer
    else:
        threaded = CounterClient(url, options=QUICK)
        waiting = threaded.buffer(max_delay=0.01, spool=spool)
        try:
            yield waiting
        finally:
            await asyncio.to_thread(waiting.close)
            threaded.close()


async def add(buffer: Buffer | AsyncBuffer, name: str, delta: int) -> None:
    if isinstance(buffer, AsyncBuffer):
        await buffer.add(name, delta)
    else:
        buffer.add(name, delta)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("spooled", [False, True], ids=["memory", "spool"])
@pytest.mark.usefixtures("child_processes")
async def test_a_server_that_is_killed_again_and_again_counts_exactly(
    kind: str, spooled: bool, tmp_path: Path
) -> None:
    expected: Counter[str] = Counter()
    draw = random.Random(kind)
    spool = tmp_path / "spool" if spooled else None
    async with serving(tmp_path / "data", tmp_path / "logs") as server:
        relay = Relay.before(server.url)
        async with relay.listening(), buffered(kind, relay.url, spool) as buffer:
            for _ in range(2):
                for _ in range(300):
                    name, delta = draw.choice(NAMES), draw.randrange(-5, 6)
                    expected[name] += delta
                    await add(buffer, name, delta)
                    await asyncio.sleep(0)
                server.kill()
                await server.start()
                relay.server = Relay.before(server.url).server
        await check(server, expected)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_lost_responses_and_cut_connections_count_exactly(
    kind: str, service: Service
) -> None:
    expected: Counter[str] = Counter()
    draw = random.Random(kind)
    relay = Relay.before(service.url)
    async with relay.listening(), buffered(kind, relay.url, None) as buffer:
        for number in range(300):
            relay.mute = draw.random() < 0.3
            relay.deaf = draw.random() < 0.1
            if number % 10 == 0:
                relay.cut()
            name = f"{kind}-{draw.choice(NAMES)}"
            expected[name] += number
            await add(buffer, name, number)
            await asyncio.sleep(0.002)
        relay.mute = relay.deaf = False
    await check(service, expected)


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Service]:
    """A service that writes no token older than half a second."""
    with in_thread(tmp_path / "data", accept_limit="500ms") as service:
        yield service


async def test_an_outage_longer_than_the_accept_limit_counts_exactly(
    strict: Service, tmp_path: Path
) -> None:
    """The pending batch has become too old by then: it is sent again under a new token."""
    relay = Relay.before(strict.url)
    seen: list[Flush] = []
    options = Options(
        trust_env=False, attempt_timeout_s=0.2, backoff_first_s=0.01, backoff_max_s=0.1,
        on_flush=seen.append,
    )  # fmt: skip
    async with relay.listening():
        relay.deaf = True
        async with (
            AsyncCounterClient(relay.url, options=options) as client,
            client.buffer(max_delay=0.01, spool=tmp_path / "spool") as buffer,
        ):
            await buffer.add("outage", 3)

            await eventually(
                lambda: sum(each.error is not None for each in seen) >= 8,
                "the piece was tried for longer than the accept limit",
            )
            relay.deaf = False
            await buffer.flush(timeout=60)
    await check(strict, Counter({"outage": 3}))
    async with AsyncCounterClient(strict.url, options=options) as client:
        assert len([each async for each in client.events("outage")]) == 1


async def check(server: Server | Service, expected: Counter[str]) -> None:
    async with AsyncCounterClient(server.url, options=QUICK) as client:
        found = await client.get_many(list(expected), max_staleness="0s")
    assert {each.counter: each.count for each in found} == expected


async def test_an_add_that_is_cancelled_while_it_waits_is_not_taken(service: Service) -> None:
    async with AsyncCounterClient(service.url, options=QUICK) as client:
        async with client.buffer(max_delay=0.001) as buffer:
            for number in range(50):
                await buffer.add("cancelled")
                flushing = asyncio.create_task(buffer.flush())
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)
        assert (await client.get("cancelled")).count == 50


def test_an_interrupt_from_the_keyboard_loses_nothing(service: Service) -> None:
    """It strikes while the taken adds are moved into the backlog."""
    with CounterClient(service.url, options=QUICK) as client:
        with client.buffer(max_delay=3_600) as buffer:
            backlog: Any = buffer._merging.backlog
            put = backlog.put

            def interrupted(adds: dict[str, int]) -> None:
                signal.raise_signal(signal.SIGINT)
                put(adds)

            backlog.put = interrupted
            buffer.add("interrupted", 3)
            with pytest.raises(KeyboardInterrupt):
                buffer.flush()
            backlog.put = put
        assert client.get("interrupted").count == 3


@pytest.mark.parametrize("code", ["token_conflict", "token_cancelled"])
def test_an_add_that_is_refused_for_good_is_returned_and_kept(
    code: str, service: Service, tmp_path: Path
) -> None:
    """Its token was used for something else, or cancelled; the other item is counted."""
    refused, other = f"refused {code}", f"not refused {code}"
    spool = Spool(tmp_path / "spool", "default")
    spool.put({refused: 3, other: 1})
    token = spool.seal()[0].token
    spool.close()
    with CounterClient(service.url, options=QUICK) as client:
        if code == "token_cancelled":
            client.cancel(refused, 3, token=token)
        else:
            client.add(refused, 5, token=token)
        before = client.get(refused).count
        with pytest.raises(RejectedError) as caught:
            client.buffer(spool=tmp_path / "spool").close()
        [item] = caught.value.items
        assert (item.counter, item.delta, item.error.code) == (refused, 3, code)
        assert [x.count for x in client.get_many([refused, other])] == [before, 1]
    with closing(sqlite3.connect(tmp_path / "spool" / "default.0")) as file:
        kept = file.execute("SELECT counter, delta, token, code FROM rejected").fetchall()
    assert kept == [(refused, 3, str(token), code)]


@KINDS
@pytest.mark.parametrize("while_it_sends", [False, True])
async def test_a_buffer_whose_disk_fails_reports_every_add_so(
    kind: str, while_it_sends: bool, service: Service, tmp_path: Path
) -> None:
    """It returns its adds, instead of merging for ever, and takes no more."""
    bounds: dict[str, Any] = {
        "max_delay": 0.001 if while_it_sends else 3_600.0,
        "spool": tmp_path / "spool",
    }
    async with open_buffer(kind, service.url, **bounds) as buffer:
        merging = buffer.of._merging
        if not while_it_sends:
            await buffer.add("failing", 2)
        merging.backlog._own._db.execute("PRAGMA query_only = 1")
        if while_it_sends:
            await buffer.add("failing", 2)
            await eventually(lambda: merging.failure is not None, "the disk is asked")
            with pytest.raises(ClosedError, match="spool"):
                await buffer.add("failing")
        with pytest.raises(UnsentError) as caught:
            await buffer.close()
        assert caught.value.unsent == {"failing": 2}
        with pytest.raises(ClosedError):
            await buffer.add("failing")


def test_a_forked_process_starts_an_empty_buffer_whatever_it_does_first() -> None:
    with CounterClient(NOWHERE, options=QUICK) as client:
        for does in (Buffer.sync, Buffer.flush):
            buffer = client.buffer()
            pid, buffer._pid = buffer._pid, -1
            with patch.object(buffer, "_begin_in_child") as begins:
                does(buffer)
            begins.assert_called_once_with()
            buffer._pid = pid
            buffer.close()
