"""Long reads take turns: those of one namespace delay no other namespace."""

import asyncio
from contextlib import AsyncExitStack

from api.routes.reports import LongReads


async def test_reads_of_a_namespace_are_done_one_at_a_time_and_in_order() -> None:
    reads, done, busy = LongReads(), list[int](), 0

    async def read(number: int) -> None:
        nonlocal busy
        async with reads.reading(1):
            busy += 1
            assert busy == 1
            await asyncio.sleep(0)
            done.append(number)
            busy -= 1

    await asyncio.gather(*map(read, range(20)))
    assert done == list(range(20))


async def test_many_reads_of_one_namespace_do_not_delay_another() -> None:
    reads = LongReads()
    async with reads.reading(1):
        waiting = [asyncio.create_task(_once(reads, 1)) for _ in range(60)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60), reads.reading(2):
            assert not any(each.done() for each in waiting)
    await asyncio.gather(*waiting)


async def test_the_number_of_concurrent_long_reads_is_bounded() -> None:
    reads = LongReads(at_once=2)
    async with AsyncExitStack() as stack:
        for namespace in (1, 2):
            await stack.enter_async_context(reads.reading(namespace))
        third = asyncio.create_task(_once(reads, 3))
        await asyncio.sleep(0)
        assert not third.done()
    await third


async def test_namespaces_without_reads_are_forgotten() -> None:
    reads = LongReads()
    for namespace in range(1_000):
        await _once(reads, namespace)
    assert not reads._of_namespaces


async def test_a_read_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    reads = LongReads(at_once=1)
    async with reads.reading(1):
        waiting = [asyncio.create_task(_once(reads, each)) for each in (1, 2)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        await _once(reads, 1)
        await _once(reads, 2)


async def _once(reads: LongReads, namespace: int) -> None:
    async with reads.reading(namespace):
        pass
