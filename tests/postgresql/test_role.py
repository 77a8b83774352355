"""The service's role does all that the service does with the rights that the document lists."""

import re
from pathlib import Path

import asyncpg
import pytest

from counter.bounds import Bounds
from counter.errors import StartupError, StoreUnavailableError
from counter.holds import FIRST, Ending, HoldId, events_of_hold
from counter.limits import MINUTE, SECOND
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.fence import pass_fence
from counter.storage.postgresql.schema import SCHEMA_VERSION, apply_schema
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    T0,
    WINDOW,
    add,
    atomic,
    make_namespace,
    make_slices,
    nonce,
)
from counter.testing.clock import FakeClock
from counter.types import (
    Checkpoint,
    CounterUpdate,
    Decision,
    Mark,
    Namespace,
    Outcome,
    Pending,
    Reservation,
    Span,
    Token,
    WindowRow,
    Written,
)
from counter.windows import fingerprint
from scripts.postgresql_server import PostgresqlServer
from tests.support.postgresql import FreshStore

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/use-postgresql.md"


@pytest.fixture
async def granted(postgresql: PostgresqlServer) -> str:
    """The DSN of a role that has the rights of the document."""
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    [grants] = re.findall(r"```sql\n(GRANT.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    connection = await asyncpg.connect(postgresql.dsn())
    await connection.execute(
        "DO $$ BEGIN CREATE ROLE counter_service LOGIN;"
        " EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    await connection.execute(grants)
    await connection.close()
    await store.close()
    return postgresql.dsn().replace("counter@", "counter_service@")


async def _use_holds(store: PostgresqlStore, namespace: Namespace) -> None:
    holds = store.capabilities.holds
    assert holds is not None
    refused, settled, expired, released, extended = (
        HoldId("h", Token(nonce(number), NOW)) for number in range(10, 15)
    )
    for hold, lasts_us in (
        (settled, MINUTE),
        (expired, -1),
        (released, MINUTE),
        (extended, MINUTE),
    ):
        outcome = await store.events.append_atomic(namespace, events_of_hold(hold, 1, lasts_us))
        assert outcome is Written.NEW
    await holds.end(namespace, settled, Ending.SETTLED, 2)
    items = events_of_hold(refused, 1, MINUTE, Bounds(at_most=0))
    assert await store.events.append_atomic(namespace, items) is Written.BOUND_REACHED
    for events in (items, events_of_hold(released, 1, MINUTE)):
        decision = Decision(Outcome.CANCELLED_VOID, fingerprint(events))
        assert (await store.decisions.cancel(namespace, events, decision)).outcome.is_cancelled
    await holds.extend(namespace, extended, 2 * MINUTE, NOW + MINUTE)
    assert [each.id for each in await holds.open(namespace, "h", FIRST, 9)] == [extended]
    assert await holds.expire(namespace, "h") == 0
    assert await holds.expired(9) == []


async def use_all(store: PostgresqlStore) -> None:
    """Call all functions that write, and some that read."""
    await make_slices(store)
    namespace = await make_namespace(store)
    dataset = namespace.dataset
    await store.events.append(namespace, [add()])
    await store.events.append_atomic(namespace, atomic(("a", 1), ("b", 1)))
    await store.recounts.write_marks(namespace, [Mark(T0, "c", T0)])
    await store.recounts.write_pending(namespace, [("c", Pending(T0, T0))])
    await store.decisions.decide(namespace, [add("d")], Decision(Outcome.VOID, b""))
    for items in ([add()], atomic(("a", 1), ("b", 1))):
        cancelled = Decision(Outcome.CANCELLED, fingerprint(items))
        assert await store.decisions.cancel(namespace, items, cancelled) == cancelled
    await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, NOW + SECOND))
    await _use_holds(store, namespace)
    update = CounterUpdate("c", (WindowRow(NOW, False, 1),), Checkpoint(NOW + WINDOW - 1, 1))
    await store.rollups.apply(namespace, [update], through_us=NOW + WINDOW - 1)
    await store.rollups.advance(namespace, [0], NOW + WINDOW - 1)
    await store.rollups.drop_marks(namespace, 0, NOW)
    await store.rollups.heads(namespace, ["c"])
    await store.rollups.marked(namespace, [0], Span.after(T0, NOW))
    await store.events.find(namespace, [add()])
    await store.events.tails(namespace, [("c", T0)])
    await store.events.sums(namespace, [("c", T0)])
    await pass_fence(store._database)
    await store.control.lease_tokens(1, NOW)
    await store.leases.heartbeat("w", SECOND)
    await store.control.retire_slice(dataset, FIRST_SLICE, NOW)
    await store.control.drop_slice(dataset, FIRST_SLICE)
    assert await store.control.delete_namespace(namespace)
    while await store.control.purge(NOW):
        pass
    await store.ping()


async def test_the_role_suffices(granted: str) -> None:
    store = PostgresqlStore(PostgresqlOptions(granted), FakeClock(NOW))
    await store.open()
    await use_all(store)
    for beyond in ("DELETE FROM {s}.events", "SELECT {s}.make_dataset('mine', '{}')"):
        with pytest.raises(StoreUnavailableError, match="docs/how-to/use-postgresql"):
            await store._database.rows(beyond)
    await store.close()


async def test_the_role_suffices_after_an_upgrade(
    postgresql: PostgresqlServer, granted: str
) -> None:
    """The functions are other ones then: some new, some with other arguments, some gone."""
    owner = PostgresqlDatabase(PostgresqlOptions(postgresql.dsn()))
    await owner.open()
    for older in (
        "DROP FUNCTION {s}.wait_as_a_write",
        "DROP TABLE {s}.holds CASCADE",
        "CREATE FUNCTION {s}.gone() RETURNS void LANGUAGE sql RETURN NULL",
        "UPDATE {s}.meta SET version = 1",
    ):
        await owner.rows(older)
    store = PostgresqlStore(PostgresqlOptions(granted), FakeClock(NOW))
    with pytest.raises(
        StartupError, match=f"has version 1, and this program needs {SCHEMA_VERSION}"
    ):
        await store.open()
    assert await apply_schema(owner, [DATASET]) == [
        f"made schema counter, version {SCHEMA_VERSION}, before 1"
    ]
    assert await apply_schema(owner, [DATASET]) == ["schema counter is up to date"]
    assert await owner.value("SELECT to_regprocedure('{s}.gone()')") is None
    await owner.close()
    await store.open()
    await make_slices(store)
    namespace = await make_namespace(store)
    for _ in range(2):
        await store.events.append(namespace, [add()])
    await _use_holds(store, namespace)
    await store.close()
