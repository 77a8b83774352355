"""What the service makes of every store: deletes, and CloudEvents that are delivered again."""

import pytest

from counter.core.results import Added, Keyed
from counter.core.service import CounterService
from counter.errors import TokenConflictError
from counter.limits import MINUTE, SECOND
from counter.ports import Store
from counter.storage.memory import MemoryCache
from counter.testing.cases import StoreCases, make_namespace, nonce
from counter.testing.clock import FakeClock
from counter.types import Namespace, Token
from rollup.worker import RollupWorker


class Process:
    """An API process and a worker, which remember what they saw, over a store."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        cache = MemoryCache(clock)
        self.store = store
        self.api = CounterService(store, cache, clock)
        self.worker = RollupWorker(store, cache, clock, self.api.namespaces)

    async def events(self, namespace: Namespace, *events: Keyed) -> list[bool | None]:
        """Deliver *events*; return which of them counted before."""
        await self.api.namespaces.refresh()
        replayed: list[bool | None] = []
        for outcome in await self.api.add_keyed(namespace, events):
            assert isinstance(outcome, list), outcome
            assert len({each.replayed for each in outcome}) == 1
            replayed.append(outcome[0].replayed)
        return replayed

    async def add(self, namespace: Namespace, counter: str, token: Token) -> Added:
        await self.api.namespaces.refresh()
        return await self.api.add(namespace, counter, 1, token)

    async def delete(self, namespace: Namespace, counter: str, token: Token) -> Added:
        await self.api.namespaces.refresh()
        return await self.api.delete(namespace, counter, token)

    async def roll_up(self) -> None:
        await self.worker._namespaces.refresh()
        await self.worker.tick()

    async def counts(self, namespace: Namespace, *counters: str) -> list[int]:
        await self.api.namespaces.refresh()
        return [each.count for each in await self.api.reader.read(namespace, counters, 0)]

    async def names(self, namespace: Namespace) -> list[str]:
        return list(await self.store.control.counters(namespace, prefix="", after=None, limit=100))


class ServiceCases(StoreCases):
    """Two processes, each with what it remembers, over one store."""

    @pytest.fixture
    async def namespace(self, store: Store) -> Namespace:
        """One whose tokens are late soon."""
        return await make_namespace(store, accept_limit_us=5 * SECOND)

    @pytest.fixture
    def processes(self, store: Store, clock: FakeClock) -> tuple[Process, Process]:
        return Process(store, clock), Process(store, clock)

    async def test_an_event_that_is_delivered_again_after_a_delete_does_not_count_again(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """By whichever process; at once, after a rollup, and when its token is late."""
        one, other = processes
        event = Keyed("/till/3", "1", [("c", 2), ("all", 1), ("c", 4)])
        second = Keyed("/till/3", "2", [("c", 8), ("all", 1)])
        assert await one.events(namespace, event) in ([False], [None])
        assert await other.events(namespace, event, event) == [True, True]
        clock.advance(SECOND)
        await other.delete(namespace, "c", Token(nonce(1), clock.now_us()))
        for pause_us in (0, SECOND, MINUTE, 5 * MINUTE):
            clock.advance(pause_us)
            await other.roll_up()
            for each in processes:
                assert await each.events(namespace, event) == [True]
                assert await each.counts(namespace, "c", "all") == [0, 1]
            assert await one.names(namespace) == ["all"]
        # One of two copies in a batch is new.
        first, again, copy = await one.events(namespace, second, event, second)
        assert again is True
        assert True in (first, copy) or None in (first, copy)
        assert await other.counts(namespace, "c", "all") == [8, 2]

    async def test_an_event_with_other_content_is_a_conflict_after_a_delete(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        one, other = processes
        await one.events(namespace, Keyed("/till/3", "1", [("c", 2)]))
        await other.delete(namespace, "c", Token(nonce(1), clock.now_us() + 1))
        for pause_us in (0, 5 * MINUTE):
            clock.advance(pause_us)
            await other.roll_up()
            await one.api.namespaces.refresh()
            [outcome] = await one.api.add_keyed(namespace, [Keyed("/till/3", "1", [("c", 3)])])
            assert isinstance(outcome, TokenConflictError)
            assert await one.counts(namespace, "c") == [0]
            assert await one.names(namespace) == []

    async def test_a_process_that_remembers_a_deleted_counter_counts_from_0(
        self, processes: tuple[Process, Process], namespace: Namespace, clock: FakeClock
    ) -> None:
        """It has the name, the mark and the count in memory; the rollup lists the name again."""
        one, other = processes
        for turn in range(1, 4):
            for _ in range(turn):
                clock.advance(1)
                await one.add(namespace, "c", Token(nonce(9), clock.now_us()))
            assert await one.counts(namespace, "c") == [turn]
            delete = Token(nonce(turn), clock.now_us())
            assert (await other.delete(namespace, "c", delete)).replayed in (False, None)
            assert await one.counts(namespace, "c") == [0]
            clock.advance(1)
            await one.add(namespace, "c", Token(nonce(8), clock.now_us()))
            assert (await other.delete(namespace, "c", delete)).replayed is not False
            assert await one.counts(namespace, "c") == await other.counts(namespace, "c") == [1]
            clock.advance(MINUTE)
            await other.roll_up()
            await one.roll_up()
            assert await one.names(namespace) == ["c"]
            assert (await one.api.reader.read_one(namespace, "c", MINUTE)).count == 1
            await one.delete(namespace, "c", Token(nonce(7), clock.now_us()))
            assert await other.names(namespace) == []
