"""Long reads take turns: those of one namespace delay no other namespace."""

import asyncio
from contextlib import AsyncExitStack

from counter.core.admission import Turns


async def test_reads_of_a_namespace_are_done_one_at_a_time_and_in_order() -> None:
    turns, done, busy = Turns(), list[int](), 0

    async def read(number: int) -> None:
        nonlocal busy
        async with turns.turn(1):
            busy += 1
            assert busy == 1
            await asyncio.sleep(0)
            done.append(number)
            busy -= 1

    await asyncio.gather(*map(read, range(20)))
    assert done == list(range(20))


async def test_many_reads_of_one_namespace_do_not_delay_another() -> None:
    turns = Turns()
    async with turns.turn(1):
        waiting = [asyncio.create_task(_once(turns, 1)) for _ in range(60)]
        await asyncio.sleep(0)
        async with asyncio.timeout(1), turns.turn(2):
            assert not any(each.done() for each in waiting)
    await asyncio.gather(*waiting)


async def test_a_process_does_a_few_at_once_and_the_others_come_later() -> None:
    turns = Turns(at_once=2)
    async with AsyncExitStack() as stack:
        for namespace in (1, 2):
            await stack.enter_async_context(turns.turn(namespace))
        third = asyncio.create_task(_once(turns, 3))
        await asyncio.sleep(0)
        assert not third.done()
    await third


async def test_namespaces_without_reads_are_forgotten() -> None:
    turns = Turns()
    for namespace in range(1_000):
        await _once(turns, namespace)
    assert not turns._of_namespaces


async def test_a_read_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    turns = Turns(at_once=1)
    async with turns.turn(1):
        waiting = [asyncio.create_task(_once(turns, each)) for each in (1, 2)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(1):
        await _once(turns, 1)
        await _once(turns, 2)


async def _once(turns: Turns, namespace: int) -> None:
    async with turns.turn(namespace):
        pass
