"""The wait of a commit for the synchronous standby is cancelled on the server, which then says that
the statement succeeded, with a warning: it is committed on the primary alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import asyncpg
import pytest

from counter.api_keys import ApiKey, Scope
from counter.clock import SystemClock
from counter.errors import StoreUnavailableError
from counter.limits import DAY, HOUR, MINUTE, SECOND
from counter.storage.postgresql import session
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.fence import pass_fence
from counter.storage.postgresql.schema import apply_schema
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import SETTINGS, add, atomic, nonce
from counter.types import (
    DELETED,
    Checkpoint,
    CounterUpdate,
    Decision,
    Mark,
    Namespace,
    Outcome,
    Pending,
    Reservation,
    Slice,
    WindowRow,
)
from tests.postgresql.pair import Pair
from tests.postgresql.test_faults import added, is_unknown, service
from tests.postgresql.test_pooler import pooler
from tests.support.rest import fresh
from tests.support.waiting import eventually

_CANCEL: Final = (
    "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity"
    " WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
)
_KEY: Final = ApiKey("k1", "a key", b"", ("*",), Scope.WRITE, 0)


@dataclass(frozen=True)
class Site:
    """A store, a namespace of it with an add and a key, and now."""

    store: PostgresqlStore
    namespace: Namespace
    spare: Namespace
    now_us: int


def _calls(site: Site) -> Mapping[str, Callable[[], Awaitable[object]]]:
    """Each call that returns its write, or that it found one."""
    store, namespace, now_us = site.store, site.namespace, site.now_us
    dataset = namespace.dataset
    events, decisions, control = store.events, store.decisions, store.control
    rollups, recounts = store.rollups, store.recounts
    one, void = add(at=now_us), Decision(Outcome.VOID, b"f")
    late = [add("late", now_us)]
    cancelled = Decision(Outcome.CANCELLED, b"f")
    pair_of, other = (atomic(("a", n), ("b", 1), at=now_us, number=2) for n in (1, 2))
    clashing = atomic(("c", 5), ("d", 1), at=now_us, number=4)
    [item, _] = atomic(("c", 7), ("d", 1), at=now_us, number=4)
    update = CounterUpdate("c", (WindowRow(now_us, False, 1),), Checkpoint(now_us, 1))
    recount = Pending(now_us, now_us)
    ahead = Slice(now_us + 9 * DAY, now_us + 10 * DAY, MINUTE, 1)
    changed = replace(_KEY, label="changed")
    return {
        "append": lambda: events.append(namespace, [one]),
        "append again": lambda: events.append(namespace, [one]),
        "append an item": lambda: events.append(namespace, [item]),
        "append_atomic": lambda: events.append_atomic(namespace, pair_of),
        "append_atomic again": lambda: events.append_atomic(namespace, pair_of),
        "append_atomic of another payload": lambda: events.append_atomic(namespace, other),
        "append_atomic that clashes": lambda: events.append_atomic(namespace, clashing),
        "find": lambda: events.find(namespace, [one]),
        "decide that it is void": lambda: decisions.decide(namespace, late, void),
        "decided": lambda: decisions.decided(namespace, [add("settled", now_us)]),
        "cancel": lambda: decisions.cancel(namespace, late, cancelled),
        "cancel again": lambda: decisions.cancel(namespace, late, cancelled),
        "reserve": lambda: decisions.reserve(
            namespace, nonce(1), Reservation(now_us, now_us + HOUR)
        ),
        "reserve again": lambda: decisions.reserve(
            namespace, nonce(1), Reservation(now_us, now_us + HOUR)
        ),
        "reserve another time": lambda: decisions.reserve(
            namespace, nonce(1), Reservation(now_us, now_us, replaces_us=now_us)
        ),
        "lease_tokens": lambda: control.lease_tokens(1, now_us),
        "create_namespace": lambda: control.create_namespace("new", SETTINGS, now_us),
        "create_namespace again": lambda: control.create_namespace("new", SETTINGS, now_us),
        "update_namespace": lambda: control.update_namespace(namespace, namespace),
        "delete_namespace": lambda: control.delete_namespace(site.spare),
        "make_slices": lambda: control.make_slices(dataset, ahead),
        "retire_slice": lambda: control.retire_slice(dataset, ahead.start_us, now_us),
        "create_api_key": lambda: store.keys.create_api_key(_KEY),
        "create_api_key again": lambda: store.keys.create_api_key(_KEY),
        "note_api_key_uses": lambda: store.keys.note_api_key_uses([(_KEY.id, now_us)]),
        "change_api_key": lambda: store.keys.change_api_key(_KEY, changed),
        "forget_api_key": lambda: store.keys.forget_api_key(changed),
        "fence": lambda: pass_fence(store._database),
        "write_marks": lambda: recounts.write_marks(namespace, [Mark(now_us, "c", now_us)]),
        "write_pending": lambda: recounts.write_pending(namespace, [("c", recount)]),
        "delete": lambda: recounts.write_pending(namespace, [("c", Pending(DELETED, now_us))]),
        "apply": lambda: rollups.apply(namespace, [update], through_us=now_us),
        "advance": lambda: rollups.advance(namespace, [0], now_us + HOUR),
        "drop_marks": lambda: rollups.drop_marks(namespace, 0, now_us),
        "heartbeat": lambda: store.leases.heartbeat("w", SECOND),
        "leave": lambda: store.leases.leave("w"),
        "purge": lambda: control.purge(now_us),
        "ping": store.ping,
        "schema apply": lambda: apply_schema(store._database, [replace(dataset, name="more")]),
        "schema apply again": lambda: apply_schema(
            store._database, [replace(dataset, name="more")]
        ),
    }


@asynccontextmanager
async def _site(dsn: str) -> AsyncIterator[Site]:
    clock = SystemClock()
    store = PostgresqlStore(PostgresqlOptions(dsn, connections_max=3), clock)
    await store.open()
    now_us = clock.now_us()
    made = [await store.control.create_namespace(name, SETTINGS, now_us) for name in ("n", "spare")]
    namespace, spare = (each for each in made if each is not None)
    await store.decisions.decide(namespace, [add("settled", now_us)], Decision(Outcome.VOID, b"f"))
    yield Site(store, namespace, spare, now_us)
    await store.close()


@asynccontextmanager
async def _through(pair: Pair, is_pooled: bool) -> AsyncIterator[str]:
    """The DSN of the primary, or of a pooler in front of it."""
    dsn = pair.primary.dsn()
    if not is_pooled:
        yield dsn
        return
    async with pooler(pair.primary) as port:
        yield dsn.replace(str(pair.primary.port), str(port))


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_no_call_acknowledges_a_write_before_the_standby_has_it(
    pair: Pair, is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a loaded machine takes to cancel a wait.
    await pair.begin(write_timeout="5s")
    async with service(pair.primary.dsn()):
        pass  # Makes the slices.
    operator = await asyncpg.connect(pair.primary.dsn())
    acknowledged = []
    # A connection that has no proof to renew.
    monkeypatch.setattr(session, "_PROVEN_S", 1e9)
    async with _through(pair, is_pooled) as dsn, _site(dsn) as site:
        pair.standby.pause()
        for name, call in _calls(site).items():
            task = asyncio.ensure_future(call())

            async def ended(task: asyncio.Future[object] = task) -> bool:
                await operator.fetchval(_CANCEL)
                return task.done()

            await eventually(ended, f"{name} ends")
            error = task.exception()
            if not isinstance(error, StoreUnavailableError) or "standby" not in error.detail:
                acknowledged.append((name, error or task.result()))
        pair.standby.resume()
    await operator.close()
    assert acknowledged == []


async def test_an_add_whose_wait_was_cancelled_gets_one_answer_after_a_failover(pair: Pair) -> None:
    await pair.begin(write_timeout="10s")
    async with service(pair.dsn, write_timeout="10s") as rest:
        await added(rest, "before")
        operator = await asyncpg.connect(pair.primary.dsn())
        token = fresh(time.time_ns() // 1_000)
        pair.standby.pause()
        add = asyncio.create_task(rest.add("c", 1, token))

        async def cancelled() -> bool:
            await operator.fetchval(_CANCEL)
            return add.done()

        await eventually(cancelled, "the add is answered")
        assert is_unknown(add.result())
        pair.primary.pause()
        pair.standby.resume()
        await asyncio.to_thread(pair.fail_over)

        async def acknowledged() -> bool:
            return (await rest.add("c", 1, token)).status_code == 200

        await eventually(acknowledged, "the standby is found")
        assert await rest.count("c") == 2
        operator.terminate()
