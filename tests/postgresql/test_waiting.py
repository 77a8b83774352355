"""Waits: calls for a connection, deletions and decisions for appends, commits for a standby."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest

from counter.errors import WriteTimeoutError
from counter.limits import SECOND
from counter.storage.postgresql import database
from counter.testing.cases import NOW, add
from counter.types import DELETED, Decision, Outcome, Pending
from tests.postgresql.conftest import World


async def test_a_deletion_waits_for_appends_that_may_still_be_acknowledged(world: World) -> None:
    connection, transaction = await world.stalled(add())
    deleting = asyncio.create_task(world.store.control.delete_namespace(world.namespace))
    assert await world.waits(deleting)
    await transaction.commit()
    await connection.close()
    assert await deleting


async def test_a_decision_waits_no_longer_than_a_write_may_take(world: World) -> None:
    """An append that stalls ends it before the bound on any statement does."""
    connection, transaction = await world.stalled(add("other"))
    world.database.options = replace(world.database.options, timeout_us=SECOND // 4)
    dataset = replace(world.namespace.dataset, write_timeout_us=SECOND // 20)
    namespace = replace(world.namespace, dataset=dataset)
    with pytest.raises(WriteTimeoutError):
        await world.store.decisions.decide(namespace, [add()], Decision(Outcome.VOID, b""))
    await transaction.rollback()
    await connection.close()


async def test_a_replayed_append_waits_for_the_standby(world: World) -> None:
    """A commit without WAL would not wait for the standby, which may lack the event."""
    await world.store.events.append(world.namespace, [add()])
    connection, transaction = await world.stalled(add())
    before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
    await world.append_over(connection, add())
    assert await connection.fetchval("SELECT pg_current_wal_insert_lsn()") > before
    await transaction.rollback()
    await connection.close()


@pytest.mark.parametrize("call", ["find", "decided"])
async def test_a_found_event_waits_for_the_standby(world: World, call: str) -> None:
    """The commit of a transaction without an id would not wait for the synchronous standby."""
    store = world.store
    await store.events.append(world.namespace, [add()])
    await store.decisions.decide(world.namespace, [add("d")], Decision(Outcome.VOID, b""))
    connection = await asyncpg.connect(world.dsn)

    async def rows(sql: str, *arguments: Any) -> Any:
        return await connection.fetch(sql.replace("{s}", "counter"), *arguments)

    async with connection.transaction():
        with patch.object(world.database, "rows", rows):
            if call == "find":
                assert await store.events.find(world.namespace, [add()]) == [add()]
            else:
                assert await store.decisions.decided(world.namespace, [add("d")])
        assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is not None
    await connection.close()


async def test_another_warning_of_the_server_leaves_the_outcome_known(world: World) -> None:
    """Such as that transaction ids will run out, which each statement may report."""
    sql = "DO $$ BEGIN RAISE WARNING 'not of a standby'; END $$"
    assert await world.database.rows(sql) == []


async def test_one_of_two_concurrent_creations_makes_the_dataset(world: World) -> None:
    make = "SELECT counter.make_dataset('second', '{}')"
    connection = await asyncpg.connect(world.dsn)
    transaction = connection.transaction()
    await transaction.start()
    assert await connection.fetchval(make)
    other = asyncio.create_task(world.database.value(make))
    await world.until("SELECT count(*) FROM pg_locks WHERE NOT granted")
    await transaction.commit()
    await connection.close()
    assert await other is False


async def test_consecutive_calls_share_a_connection(world: World) -> None:
    assert len({await world.database.value("SELECT pg_backend_pid()") for _ in range(5)}) == 1


async def test_a_call_that_is_cancelled_while_its_connection_is_released_leaves_nothing(
    world: World,
) -> None:
    release, releases, goes_on = database._release, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> None:
        releases.set()
        await goes_on.wait()
        await release(*arguments)

    with patch.object(database, "_release", slow):
        call = asyncio.create_task(world.database.value("SELECT 1"))
        await releases.wait()
        call.cancel()
        await asyncio.wait((call,))
    assert call.cancelled()
    goes_on.set()
    await asyncio.wait(set(world.database._releasing))
    await asyncio.sleep(0)
    assert world.database._releasing == set()


async def test_an_append_that_has_ended_is_forgotten(world: World) -> None:
    await world.store.events.append(world.namespace, [add()])
    await asyncio.sleep(0)
    assert world.store.events._appending == set()


async def test_the_counters_that_are_known_are_bounded_over_all_namespaces(world: World) -> None:
    """Those that were forgotten are learned again."""
    known = world.store.events._known
    with patch("counter.storage.postgresql.events._KNOWN_MAX", 3):
        for number, name in enumerate(("a", "b", "c", "d", "d", "a")):
            await world.store.events.append(world.namespace, [add(name, number=number)])
            if name == "c":
                assert {*known[world.namespace.id]} == {"a", "b", "c"}
    assert {*known[world.namespace.id]} == {"d", "a"}


async def test_a_deleted_counter_is_listed_again_by_the_next_append(world: World) -> None:
    known = world.store.events._known
    await world.store.events.append(world.namespace, [add("c"), add("d")])
    assert {*known[world.namespace.id]} == {"c", "d"}
    deletion = Pending(DELETED, NOW)
    await world.store.recounts.write_pending(world.namespace, [("c", deletion)])
    assert {*known[world.namespace.id]} == {"d"}
