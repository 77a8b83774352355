"""The buffer of an event loop at its bounds and under faults."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from counter_client import (
    AsyncCounterClient,
    BufferFullError,
    ClosedError,
    Flush,
    Options,
    UnsentError,
)
from counter_client.spool import Spool
from tests.support.in_thread import Service
from tests.support.relay import Relay
from tests.support.waiting import eventually

QUICK = Options(trust_env=False, attempt_timeout_s=0.3, backoff_first_s=0.01, backoff_max_s=0.1)


async def test_an_add_to_a_full_buffer_waits_for_room(service: Service) -> None:
    relay = Relay.before(service.url)
    async with relay.listening():
        relay.is_away = True
        async with (
            AsyncCounterClient(relay.url, options=QUICK) as client,
            client.buffer(max_items=2) as buffer,
        ):
            buffer.add_nowait("full-a")
            buffer.add_nowait("full-b")
            with pytest.raises(BufferFullError):
                buffer.add_nowait("full-c")
            waiting = asyncio.create_task(buffer.add("full-c"))
            await eventually(relay.has_refused, "the buffer tried to send")
            assert not waiting.done()
            relay.is_away = False
            await waiting
    async with AsyncCounterClient(service.url, options=QUICK) as client:
        counts = await client.get_many(["full-a", "full-b", "full-c"])
        assert [each.count for each in counts] == [1, 1, 1]


async def test_a_flush_ends_with_the_buffer() -> None:
    """Regression: it waited for ever if another task closed the buffer before all was sent."""
    async with AsyncCounterClient("http://127.0.0.1:9", options=QUICK) as client:
        buffer = client.buffer()
        await buffer.__aenter__()
        await buffer.add("a")
        flushing = asyncio.create_task(buffer.flush())
        await asyncio.sleep(0)
        with pytest.raises(UnsentError):
            await buffer.close(timeout=0.01)
        with pytest.raises(UnsentError):
            async with asyncio.timeout(30):
                await flushing


async def test_an_add_that_waits_for_room_fails_when_the_buffer_closes() -> None:
    async with AsyncCounterClient("http://127.0.0.1:9", options=QUICK) as client:
        buffer = client.buffer(max_items=1)
        await buffer.__aenter__()
        await buffer.add("a")
        waiting = asyncio.create_task(buffer.add("b"))
        await asyncio.sleep(0)
        with pytest.raises(UnsentError) as caught:
            await buffer.close(timeout=0.01)
        found = Counter(caught.value.unsent)
        for each in caught.value.unfinished:
            found.update(dict(each.items))
        assert found == {"a": 1}
        with pytest.raises(ClosedError):
            await waiting
        await buffer.close()


async def test_a_flush_reports_rejected_adds_although_it_fails(
    service: Service, tmp_path: Path
) -> None:
    """A flush that ends in vain must not swallow it."""
    spool = Spool(tmp_path / "spool", "default")
    spool.put({"reported": 3})
    token = spool.seal()[0].token
    spool.put({"reported later": 1})
    spool.close()
    flushed: list[Flush] = []
    relay = Relay.before(service.url)

    def away_after_the_first(flush: Flush) -> None:
        flushed.append(flush)
        relay.go_away()

    options = Options(trust_env=False, on_flush=away_after_the_first)
    async with AsyncCounterClient(service.url, options=QUICK) as client:
        await client.add("reported", 5, token=token)
    async with relay.listening(), AsyncCounterClient(relay.url, options=options) as client:
        buffer = await client.buffer(spool=tmp_path / "spool").__aenter__()

        await eventually(
            lambda: any(each.rejected for each in flushed), "the first piece is refused"
        )
        with pytest.raises(UnsentError) as caught:
            await buffer.close(timeout=0.01)
    assert [(each.counter, each.delta) for each in caught.value.rejected] == [("reported", 3)]


async def test_a_sync_reaches_the_disk_although_the_service_is_away(tmp_path: Path) -> None:
    """Also adds that come while the service is away."""
    async with AsyncCounterClient("http://127.0.0.1:9", options=QUICK) as client:
        buffer = client.buffer(max_delay=0.001, spool=tmp_path / "spool")
        await buffer.__aenter__()
        await buffer.add("kept", 2)
        await buffer.sync()
        await buffer.add("kept later", 3)

        await eventually(lambda: not buffer._merging.open, "what is open goes to the disk")
        with pytest.raises(UnsentError):
            await buffer.close(timeout=0.01)
        backlog = Spool(tmp_path / "spool", "default")
        found = Counter(backlog.unsent())
        for each in backlog.unfinished():
            found[each.counter] += each.delta
        backlog.close()
        assert found == {"kept": 2, "kept later": 3}


@pytest.mark.parametrize("is_spooled", [False, True])
async def test_a_buffer_whose_task_is_cancelled_returns_its_adds(
    is_spooled: bool, tmp_path: Path
) -> None:
    """Regression: flush and close waited for adds that were never sent."""
    async with AsyncCounterClient("http://127.0.0.1:9", options=QUICK) as client:
        path = tmp_path / "spool" if is_spooled else None
        buffer = await client.buffer(max_delay=3_600, spool=path).__aenter__()
        await buffer.add("left", 2)
        # It begins.
        await asyncio.sleep(0)
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()
            await asyncio.gather(each, return_exceptions=True)
        with pytest.raises(ClosedError, match="cancelled"):
            await buffer.add("later")
        with pytest.raises(UnsentError, match="cancelled"):
            await buffer.flush()
        with pytest.raises(UnsentError) as caught:
            await buffer.close()
    assert caught.value.unsent == {"left": 2}
    if path is not None:
        spool = Spool(path, "default")
        assert dict(spool.unsent()) == {"left": 2}
        spool.close()


async def test_no_adds_move_while_a_batch_is_written(tmp_path: Path) -> None:
    """The disk may be busy with it in a thread."""
    client = AsyncCounterClient("http://127.0.0.1:9", options=QUICK)
    buffer = client.buffer(spool=tmp_path / "spool", max_delay=3_600.0)
    await buffer.__aenter__()
    async with buffer._taking:
        buffer.add_nowait("c")
        moving = asyncio.create_task(buffer.sync())
        for _ in range(5):
            await asyncio.sleep(0)
        assert buffer._merging.open == {"c": 1}
    await moving
    assert buffer._merging.open == {}
    with pytest.raises(UnsentError):
        await buffer.close(0.0)
    await client.close()
