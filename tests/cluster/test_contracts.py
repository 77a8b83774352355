"""The Cassandra adapter keeps the contracts.

One keyspace serves all cases, for to create one takes seconds. What a case could see of the one
before it is forgotten when its store opens.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from counter.ports import Store
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.rollups import WINDOW as WINDOW_KIND
from counter.storage.cassandra.store import CassandraStore
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    T0,
    WINDOW,
    StoreCases,
    add,
    nonce,
    slice_at,
    write,
)
from counter.testing.clock import FakeClock
from counter.testing.control_cases import PurgeCases, purge
from counter.testing.fold_cases import FoldCases
from counter.testing.suites import add_suites
from counter.types import (
    CANCELLED_KEY,
    Decision,
    Fold,
    Namespace,
    Outcome,
    Reservation,
    Span,
    Written,
)
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import forget, have_schema, options_for


class FreshStore(CassandraStore):
    """A store that opens as if it were new."""

    async def open(self) -> None:
        await super().open()
        usual = [slice_at(start_us) for start_us in range(FIRST_SLICE, SLICES_END, SLICE)]
        await forget(self, keep=usual)


@pytest.fixture(scope="session")
def options(cassandra: Cluster) -> CassandraOptions:
    """A keyspace with the schema and the dataset of the cases."""
    options = replace(options_for(cassandra), datasets=[(DATASET, Placement())])
    asyncio.run(have_schema(options))
    return options


class OnCassandra(StoreCases):
    """How the suites get a Cassandra store."""

    transactional = False
    one_moment = False
    partition_sizes = True
    new_life = True

    new_atomic = Written.UNVERIFIED

    @pytest.fixture(autouse=True)
    def keyspace(self, options: CassandraOptions) -> None:
        self.options = options

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return FreshStore(self.options, clock)

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        """Hide it under a deletion that is later than its batch, and earlier than the next."""
        assert isinstance(store, CassandraStore)
        (head,) = await store.rollups.heads(namespace, [row[0]])
        assert head is not None
        keyspace = store.session.state_of(namespace.dataset).keyspace
        await store.session.connection.simple(
            f"DELETE FROM {keyspace}.counts USING TIMESTAMP {head.checkpoint.time_us + MILLISECOND}"
            f" WHERE namespace = {namespace.id} AND counter = '{row[0]}' AND kind = {WINDOW_KIND}"
            f" AND t = {row[1]} AND u = 0"
        )


add_suites(globals(), OnCassandra)


class TestPurge(OnCassandra, PurgeCases):
    """Purging. Keys and decisions are not looked for: Cassandra deletes them by its own clock."""

    async def test_expired_keys_go_and_others_stay(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Each goes within two hours of its expiry, not before; a replaced one as the new one."""
        for n in range(5):
            await store.decisions.reserve(namespace, nonce(n), Reservation(NOW, NOW + n * HOUR))
        await store.decisions.reserve(
            namespace, nonce(0), Reservation(NOW + 1, NOW + 1 + 9 * HOUR, replaces_us=NOW)
        )
        await purge(store, NOW + 3 * HOUR)
        for n, hours in enumerate((9, 1, 2, 3, 4)):
            for cell in ("time", "expires", "op"):
                left_s = await self.left_s(store, f"{cell}) FROM {{}}.keys", namespace, nonce(n))
                assert 0 <= left_s * SECOND - hours * HOUR <= 2 * HOUR

    async def test_a_decision_lives_as_long_as_its_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        """It is made while the event is kept, and outlives the slice that the event is in. When it
        is cancelled, each cell of it begins another such life."""
        event = add(at=FIRST_SLICE + 5 * MINUTE)
        decision = Decision(Outcome.APPLIED, b"")
        cancelled = Decision(Outcome.CANCELLED, b"")
        await write(store, namespace, event)
        await store.decisions.decide(namespace, [event], decision)
        await purge(store, NOW)
        assert await store.decisions.decided(namespace, [event]) == decision
        for _ in range(2):
            for cell in ("outcome", "fingerprint", "op"):
                left_s = await self.left_s(store, f"{cell}) FROM {{}}.resolutions", namespace)
                assert left_s * SECOND > DATASET.retention_us + DATASET.slice_us
                assert left_s * SECOND <= 2 * DATASET.retention_us + DATASET.slice_us
            assert await store.decisions.cancel(namespace, [event], cancelled) == cancelled

    async def test_a_cancelled_key_goes_when_it_is_forgotten(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Its time is stored as another one, which is far ahead."""
        time_us, later_us = NOW + CANCELLED_KEY, NOW + 3 * HOUR
        await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, NOW + HOUR))
        await store.decisions.reserve(
            namespace, nonce(1), Reservation(time_us, later_us, time_us, replaces_us=NOW)
        )
        for cell in ("time", "expires", "op"):
            left_s = await self.left_s(store, f"{cell}) FROM {{}}.keys", namespace, nonce(1))
            assert 3 * HOUR <= left_s * SECOND <= 5 * HOUR

    async def left_s(
        self, store: Store, what: str, namespace: Namespace, key: bytes | None = None
    ) -> int:
        """How many seconds *what* is left to live."""
        assert isinstance(store, CassandraStore)
        which = f"namespace = {namespace.id}" + (f" AND nonce = 0x{key.hex()}" if key else "")
        keyspace = store.session.state_of(namespace.dataset).keyspace
        cql = f"SELECT TTL({what.format(keyspace)} WHERE {which} ALLOW FILTERING"
        ((left_s,),) = await store.session.connection.simple(cql)
        return int(left_s)


class TestFolds(OnCassandra, FoldCases):
    """Sums and tails, those of crowded partitions too."""

    @pytest.mark.parametrize("rows", [2, 5])
    async def test_windows_of_crowded_partitions_are_counted_by_halves(
        self,
        store: Store,
        namespace: Namespace,
        rows: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Down to one window, which the nodes sum where it alone is too much to read at once."""
        monkeypatch.setattr("counter.storage.cassandra.event_reads.WINDOW_ROWS_MAX", rows)
        windows = [NOW + n * WINDOW for n in (0, 1, 3, 7)]
        events = [
            add(at=at + n, number=100 * k + n, delta=10**k)
            for k, at in enumerate(windows)
            for n in range(4 * k + 1)
        ]
        await write(store, namespace, *events, add("d", NOW, 999))
        found = await store.events.window_folds(namespace, ["c", "d"], Span(T0, T0 + SLICE))
        sums = await store.events.sums(namespace, [("c", at) for at in windows])
        assert list(found) == [dict(zip(windows, sums, strict=True)), {NOW: Fold(False, 1)}]
