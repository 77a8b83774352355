"""The adapter keeps the contracts over the simulated cluster too: so the cluster is like a real one
as far as the contracts see."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from counter.limits import HOUR, MINUTE, SECOND
from counter.ports import Store
from counter.storage.cassandra.rollups import WINDOW as WINDOW_KIND
from counter.testing.cases import DATASET, FIRST_SLICE, NOW, StoreCases, add, nonce, write
from counter.testing.clock import FakeClock
from counter.testing.control_cases import PurgeCases, purge
from counter.testing.suites import add_suites
from counter.types import Decision, Namespace, Outcome, Reservation, Written
from tests.simulation.cells import Cell
from tests.simulation.cluster import Cluster
from tests.simulation.store import SimulatedStore, have_schema, options_for
from tests.simulation.weather import Weather


class _Opening(SimulatedStore):
    """A store that finds its schema applied."""

    def __init__(self, clock: FakeClock, cluster: Cluster) -> None:
        super().__init__(options_for(DATASET), clock, cluster)
        self.cluster = cluster

    async def open(self) -> None:
        await have_schema(self.cluster, options_for(DATASET))
        await super().open()


class OnSimulation(StoreCases):
    """How the suites get a store."""

    transactional = False
    one_moment = False
    partition_sizes = True
    new_life = True
    new_atomic = Written.UNVERIFIED

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        def at(_: int, call: Any, *args: Any) -> None:
            asyncio.get_running_loop().call_soon(call, *args)

        weather = Weather(Random(1), delay_us=0)
        return _Opening(clock, Cluster(at, clock.now_us, weather))

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        """On every node."""
        assert isinstance(store, _Opening)
        counter, window_us = row
        for node in store.cluster.nodes:
            partition = node.tables["counter_default.counts"][namespace.id, counter]
            del partition.rows[WINDOW_KIND, window_us, 0]


add_suites(globals(), OnSimulation)


class TestPurge(OnSimulation, PurgeCases):
    """Purging. Keys and decisions are not looked for: Cassandra deletes them by its own clock."""

    async def test_expired_keys_go_and_others_stay(
        self, store: Store, namespace: Namespace
    ) -> None:
        for n in range(3):
            await store.decisions.reserve(namespace, nonce(n), Reservation(NOW, NOW + n * HOUR))
        await purge(store, NOW + HOUR)
        assert all(0 <= left - n * HOUR <= 2 * HOUR for n, left in enumerate(_left(store, "keys")))

    async def test_a_decision_lives_as_long_as_its_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        event = add(at=FIRST_SLICE + 5 * MINUTE)
        await write(store, namespace, event)
        await store.decisions.decide(namespace, [event], Decision(Outcome.APPLIED, b""))
        (left_us,) = _left(store, "resolutions")
        assert left_us > DATASET.retention_us + DATASET.slice_us


def _left(store: Store, table: str) -> list[int]:
    """How long the rows of *table* have to live, in microseconds."""
    assert isinstance(store, _Opening)
    found: dict[Any, int] = {}
    for node in store.cluster.nodes:
        for key, partition in node.tables[f"counter_default.{table}"].items():
            for row in partition.rows.values():
                until = next(iter(row.cells.values())).until_us
                found[key] = (until or 0) - store.cluster.now_us()
    return sorted(found.values())


@pytest.mark.parametrize("gone_us", [0, 5 * SECOND])
def test_a_value_expires_on_every_replica_at_once(gone_us: int) -> None:
    cell = Cell(1, False, "x", until_us=NOW + gone_us)
    assert cell.live(NOW + gone_us - 1)
    assert not cell.live(NOW + gone_us)
