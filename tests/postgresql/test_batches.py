"""Appends that share a transaction: each gets its own outcome, and an unknown one is all theirs."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import asyncpg

from counter.background import TURN_ITEMS
from counter.core.namespaces import Namespaces
from counter.errors import SliceMissingError, StoreUnavailableError, UnavailableError
from counter.storage.postgresql import rollups
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import NOW, SLICES_END, WINDOW, add, atomic
from counter.types import Checkpoint, CounterUpdate, Event, Namespace, Written
from rollup import batches
from rollup.worker import RollupWorker
from scripts.postgresql_server import PostgresqlServer
from tests.postgresql.conftest import LIMIT, World
from tests.support.postgresql import ClockedStore
from tests.support.relay import Relay
from tests.support.waiting import eventually


async def together(
    store: PostgresqlStore, namespace: Namespace, *puts: list[Event], commits: int = 1
) -> list[list[Written | UnavailableError] | BaseException]:
    """Append *puts* in one batch, with this many *commits*; return the outcomes or errors."""
    before = sum(store.tally.commit_rows.counts)
    appends = (store.events.append(namespace, events) for events in puts)
    outcomes = await asyncio.gather(*appends, return_exceptions=True)
    assert sum(store.tally.commit_rows.counts) == before + commits
    return [each if isinstance(each, BaseException) else list(each) for each in outcomes]


async def counted(world: World, *names: str) -> list[int]:
    folds = await world.store.events.tails(world.namespace, [(name, 0) for name in names])
    return [fold.total for fold in folds]


async def test_a_missing_slice_fails_its_own_put(world: World) -> None:
    outcomes = await together(
        world.store,
        world.namespace,
        [add("a")],
        [add("b"), add("b", at=SLICES_END, number=2)],
        [add("c"), add("d")],
        [add("e", at=SLICES_END)],
        [add("f")],
    )
    assert [outcomes[0], outcomes[2], outcomes[4]] == [
        [Written.NEW],
        [Written.NEW, Written.NEW],
        [Written.NEW],
    ]
    assert isinstance(outcomes[1], SliceMissingError)
    assert isinstance(outcomes[3], SliceMissingError)
    assert await counted(world, *"abcdef") == [1, 0, 1, 1, 0, 1]


async def test_each_event_has_its_own_outcome(world: World) -> None:
    old, again = add("old"), add("again")
    await world.store.rollups.advance(world.namespace, [0], NOW + WINDOW - 1)
    later = NOW + WINDOW
    again, other = add("again", at=later), add("other", at=later)
    assert await together(world.store, world.namespace, [again, other]) == [[Written.NEW] * 2]
    outcomes = await together(
        world.store,
        world.namespace,
        [add("new", at=later)],
        [old],
        [again],
        [other._replace(delta=7)],
        [other, add("new", at=later)],
        [add("new", at=later)._replace(delta=7)],
    )
    assert outcomes == [
        [Written.NEW],
        [Written.LATE],
        [Written.REPLAYED],
        [Written.CONFLICT],
        [Written.REPLAYED, Written.REPLAYED],
        [Written.CONFLICT],
    ]
    assert await counted(world, "new", "old", "again", "other") == [1, 0, 1, 1]


async def test_a_stalled_batch_delays_no_other_and_fails_alone(world: World) -> None:
    connection, transaction = await world.stalled(add("a"))
    puts = [add("a")], [add("b")], [add("c"), add("d")]
    stalled = asyncio.create_task(together(world.store, world.namespace, *puts, commits=2))
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'transactionid'"
    await world.until(f"SELECT count(*) FROM ({waits}) w")
    assert list(await world.store.events.append(world.namespace, [add("e")])) == [Written.NEW]
    await world.database.rows(f"SELECT pg_terminate_backend(pid) FROM ({waits}) w")
    await transaction.commit()
    await connection.close()
    _all_unknown(await stalled)
    await _resend(world, Written.REPLAYED, Written.NEW)


async def test_after_a_lost_response_resending_is_exact(
    world: World, postgresql: PostgresqlServer
) -> None:
    relay = Relay("127.0.0.1", postgresql.port)
    async with relay.listening():
        dsn = postgresql.dsn().replace(str(postgresql.port), str(relay.address[1]))
        store = ClockedStore(PostgresqlOptions(dsn), world.clock)
        await store.open()
        # The statement knows the server by then.
        await store.events.append(world.namespace, [add("warm")])
        relay.mute = True
        lost = asyncio.create_task(
            together(store, world.namespace, [add("a")], [add("b")], [add("c"), add("d")])
        )
        await eventually(_are_there(world, 5), "the events are committed")
        relay.cut()
        relay.mute = False
        _all_unknown(await lost)
        await store.close()
    await _resend(world, Written.REPLAYED, Written.REPLAYED)


def _are_there(world: World, events: int) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return bool(await world.database.value("SELECT count(*) FROM {s}.events") == events)

    return there


def _all_unknown(outcomes: Sequence[list[Any] | BaseException]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, UnavailableError)
        assert (outcome.applied, outcome.retry) == (None, "same_token")
        assert isinstance(outcome, StoreUnavailableError)


async def _resend(world: World, first: Written, others: Written) -> None:
    outcomes = await together(
        world.store, world.namespace, [add("a")], [add("b")], [add("c"), add("d")]
    )
    assert outcomes == [[first], [others], [others, others]]
    assert await counted(world, *"abcd") == [1, 1, 1, 1]


async def test_the_first_adds_of_a_counter_may_be_concurrent(world: World) -> None:
    connection, transaction = await world.stalled(add("c"))
    second = asyncio.create_task(world.store.events.append(world.namespace, [add("c", number=2)]))
    await world.until("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'")
    await transaction.commit()
    await connection.close()
    assert list(await second) == [Written.NEW]
    assert await counted(world, "c") == [2]


async def test_an_add_waits_for_no_rollup(world: World) -> None:
    """A new process lists the names of counters while a rollup holds their rows."""
    await world.store.events.append(world.namespace, [add("c")])
    rollup = await asyncpg.connect(world.dsn)
    transaction = rollup.transaction()
    await transaction.start()

    async def held(sql: str, *arguments: object) -> Sequence[object]:
        rows: Sequence[object] = await rollup.fetch(sql.replace("{s}", "counter"), *arguments)
        return rows

    update = CounterUpdate("c", (), Checkpoint(NOW - 1, 0))
    with patch.object(world.database, "rows", held):
        await world.store.rollups.apply(world.namespace, [update], through_us=NOW - 1)
    started = ClockedStore(PostgresqlOptions(world.dsn), world.clock)
    await started.open()
    events = started.events
    assert await events.append(world.namespace, [add("c", number=2)]) == [Written.NEW]
    assert await events.append_atomic(world.namespace, atomic(("c", 1), number=3)) is Written.NEW
    await started.close()
    await transaction.commit()
    await rollup.close()
    assert await counted(world, "c") == [3]


async def test_a_rollup_yields_to_requests(world: World) -> None:
    """A process that serves requests works on few counters before its event loop has a turn."""
    names = [f"c{number}" for number in range(3 * TURN_ITEMS)]
    await world.store.events.append(world.namespace, [add(name) for name in names])
    world.clock.advance(LIMIT + 2 * WINDOW)
    namespaces = Namespaces(world.store, world.clock)
    worker = RollupWorker(world.store, MemoryCache(world.clock), world.clock, namespaces)
    turn = 0
    worked: Counter[tuple[str, int]] = Counter()

    def noted(module: ModuleType, name: str) -> AbstractContextManager[object]:
        real = getattr(module, name)

        def call(*arguments: object) -> object:
            worked[name, turn] += 1
            return real(*arguments)

        return patch.object(module, name, call)

    async with asyncio.TaskGroup() as tasks:
        with noted(rollups, "Fold"), noted(batches, "plan"), noted(batches, "update"):
            rolling = tasks.create_task(worker.tick())
            while not rolling.done():
                turn += 1
                await asyncio.sleep(0)
    assert rolling.result() == len(names)
    assert {name for name, _ in worked} == {"Fold", "plan", "update"}
    assert max(worked.values()) <= TURN_ITEMS
