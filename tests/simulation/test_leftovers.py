"""Steps that fail or are left half done are finished by later ones."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import SliceMissingError, StoreUnavailableError
from counter.limits import HOUR, MINUTE
from counter.storage.cassandra.session import KeyspaceState
from counter.storage.cassandra.slices import _NAMES, _NO_NAMES, _STARTS
from counter.testing.cases import (
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    WINDOW,
    dirty_counters,
    make_namespace,
    nonce,
    slice_at,
)
from counter.testing.control_cases import purge
from counter.testing.rollup_cases import apply, row, update
from counter.types import Dataset, Mark, Reservation, Span
from tests.simulation.processes import Processes


class CrashError(Exception):
    """Ends a process."""


@pytest.fixture
def processes() -> Processes:
    return Processes()


async def test_a_key_is_reserved_again_over_one_that_was_left_half_done(
    processes: Processes,
) -> None:
    """The look at the old reservation completes it, so it is seen and replaced."""
    dead, store = await processes.another(), await processes.another()
    namespace = await make_namespace(store)
    cluster = processes.cluster
    cluster.weather.unreported = 1.0
    with (
        patch.object(dead.decisions, "_as_compared", AsyncMock(side_effect=CrashError)),
        patch.object(cluster._random, "random", lambda: 0.9),
        pytest.raises(CrashError),
    ):
        await dead.decisions.reserve(namespace, nonce(1), Reservation(NOW, NOW + HOUR))
    cluster.weather.unreported = 0.0
    [(key, proposal)] = cluster._proposed.items()
    cluster._proposed[key] = proposal._replace(is_chosen=True)
    later_us = NOW + WINDOW
    reserved_us = await store.decisions.reserve(
        namespace, nonce(1), Reservation(later_us, later_us + HOUR, replaces_us=NOW)
    )
    assert reserved_us == later_us


async def test_marks_that_failed_to_be_dropped_are_dropped_later(processes: Processes) -> None:
    store = await processes.another()
    namespace = await make_namespace(store)
    await store.separate_writes.mark(namespace, [Mark(NOW, "c")])
    assert await dirty_counters(store, namespace) == {"c"}
    # Once more, so that it does not look for marks of other processes.
    await store.rollups.drop_marks(namespace, 0, NOW - WINDOW)
    failing = AsyncMock(side_effect=StoreUnavailableError("the cluster is away"))
    with (
        patch.object(store.session.connection, "rows", failing),
        pytest.raises(StoreUnavailableError),
    ):
        await store.rollups.drop_marks(namespace, 0, NOW)
    await store.rollups.drop_marks(namespace, 0, NOW)
    assert await dirty_counters(store, namespace) == set()


async def test_a_missing_table_makes_the_slices_be_read_again(processes: Processes) -> None:
    """The error comes when they are read: the retry knows the dropped slices."""
    one, other = await processes.another(), await processes.another()
    namespace = await make_namespace(one)
    await other.control.drop_slice(namespace.dataset, FIRST_SLICE)
    with pytest.raises(SliceMissingError):
        await one.events.window_folds(namespace, ["c"], Span(FIRST_SLICE, SLICES_END))
    state = one.session.state_of(namespace.dataset)
    assert state.dropped_before_us == FIRST_SLICE + SLICE


async def test_a_window_of_a_dropped_slice_is_not_0_beside_one_of_a_new_slice(
    processes: Processes,
) -> None:
    """The new one has the slices read again, and the dropped one is not among them any more."""
    one, other = await processes.another(), await processes.another()
    namespace = await make_namespace(one)
    await other.control.drop_slice(namespace.dataset, FIRST_SLICE)
    state = one.session.state_of(namespace.dataset)
    state.slices, state.dropped_before_us = [slice_at(FIRST_SLICE)], 0
    with pytest.raises(SliceMissingError):
        await one.events.sums(namespace, [("c", FIRST_SLICE), ("c", FIRST_SLICE + SLICE)])


async def test_a_slice_that_was_dropped_leaves_no_row(processes: Processes) -> None:
    store = await processes.another()
    namespace = await make_namespace(store)
    await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
    rows = await store.session.control.read(_STARTS, namespace.dataset.id)
    assert sorted(start_us for start_us, _ in rows) == [
        *range(FIRST_SLICE + SLICE, SLICES_END, SLICE)
    ]


async def test_names_that_failed_to_be_purged_are_purged_later(processes: Processes) -> None:
    store = await processes.another()
    namespace = await make_namespace(store)
    await apply(store, namespace, update(row(1, 7), through=1, count=7))
    await store.control.delete_namespace(namespace)
    processes.clock.advance(HOUR)
    delete, failures = store.control._purge._delete, [StoreUnavailableError("away")]

    async def fail_once(dataset: Dataset, cql: str, keys: Sequence[tuple[Any, ...]]) -> None:
        if failures and cql == _NO_NAMES:
            raise failures.pop()
        await delete(dataset, cql, keys)

    with patch.object(store.control._purge, "_delete", fail_once):
        with pytest.raises(StoreUnavailableError):
            await purge(store, NOW + HOUR)
        await purge(store, NOW + HOUR)
    names = await store.session.to_read(namespace.dataset, _NAMES)
    for shard in range(namespace.settings.shards):
        assert not await store.simulated.one(names.bind((namespace.id, shard, 1)))


async def test_a_process_that_slept_since_it_read_the_slices_makes_no_table(
    processes: Processes,
) -> None:
    """Another one may have made the slice and dropped it: its table would be there again, empty."""
    store = await processes.another()
    (dataset,) = await store.control.datasets()
    reload_slices = store.session.reload_slices

    async def slept(*arguments: Dataset) -> KeyspaceState:
        state = await reload_slices(*arguments)
        processes.clock.advance(MINUTE + 1)
        return state

    with (
        patch.object(store.session, "reload_slices", slept),
        patch.object(store.session.connection, "ddl", side_effect=AssertionError),
        pytest.raises(StoreUnavailableError, match="too long"),
    ):
        await store.control.make_slices(dataset, slice_at(SLICES_END))
    await store.control.make_slices(dataset, slice_at(SLICES_END))
    assert (await store.control.slices(dataset))[-1].start_us == SLICES_END
