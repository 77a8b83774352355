"""Which counters are dirty is read off the log: adds write no marks, and nothing is forgotten."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.core.namespaces import Namespaces
from counter.errors import InvariantError, NamespaceUnknownError, StoreUnavailableError
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.storage.sqlite.live import LiveTail
from counter.storage.sqlite.schema import SCHEMA_VERSION
from counter.testing.cases import (
    DATASET,
    NOW,
    SETTINGS,
    SLICE,
    SLICES_END,
    T0,
    WINDOW,
    add,
    atomic,
    dirty_counters,
    make_namespace,
    make_slices,
    marks,
    total,
    write,
)
from counter.testing.clock import FakeClock
from counter.types import CounterType, DirtyPage, Fold, Mark, Span
from rollup.worker import RollupWorker


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[SqliteStore]:
    """A store in *directory*, with the slices of the tests."""
    store = SqliteStore(directory, FakeClock(NOW), [DATASET])
    await store.open()
    await make_slices(store)
    yield store
    await store.close()


def rows_of(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    """The rows of the database in *directory* for another program."""
    with closing(sqlite3.connect(directory / "counter.db")) as connection:
        return connection.execute(sql).fetchall()


async def test_an_add_writes_no_mark(tmp_path: Path) -> None:
    """The log shows the dirty counters; only recounts are marked."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        await write(store, namespace, *(add(name, number=1) for name in "abc"))
        await store.events.append_atomic(namespace, atomic(("a", 1), ("d", 1)))
        await store.recounts.write_marks(namespace, [Mark(NOW, "a", T0)])
        assert await dirty_counters(store, namespace) == set("abcd")
        assert rows_of(tmp_path, "SELECT start, recount FROM marks") == [(NOW, T0)]


async def test_dirty_counters_are_known_after_a_restart(tmp_path: Path) -> None:
    """From the log past the watermark, however long it is; nothing at or before it."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        idle = await make_namespace(store, "idle", shards=2)
        await write(store, namespace, add("old", T0), *(add(name) for name in "ba"))
        await store.rollups.advance(namespace, [0], T0 + WINDOW - 1)
        recount = Mark(T0, "old", T0 - WINDOW)
        await store.recounts.write_marks(namespace, [recount])
    for events_max in (500_000, 2):
        with patch("counter.storage.sqlite.control._TAIL_EVENTS_MAX", events_max):
            async with opened(tmp_path) as store:
                found = await marks(store, namespace)
                assert found[0] == recount
                assert set(found[1:]) == {Mark(NOW, "a"), Mark(NOW, "b")}
                assert len(found) == 3
                for each, expected in ((namespace, {0}), (idle, set())):
                    shards = range(each.settings.shards)
                    dirty = await store.rollups.marked(each, shards, Span.after(0, SLICES_END))
                    assert set(dirty) == expected


async def test_sums_come_in_passes_and_parts(tmp_path: Path) -> None:
    """Each counter once, from the live tail's names and from the log alone."""
    sizes = {
        "event_rows._SUMS_AT_ONCE": 4,
        "event_rows._SUMS_IN_PART": 2,
        "rollups._FOLDED_AT_ONCE": 5,
        "event_rows._LOOKED_UP_AT_ONCE": 3,
    }
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch(f"counter.storage.sqlite.{name}", size))
        async with opened(tmp_path) as store:
            namespace = await make_namespace(store, shards=2)
            other = await make_namespace(store, "other")
            for each in (namespace, other):
                await write(store, each, *(add(f"c{n}", NOW, n, n) for n in range(1, 14)))
        for events_max in (500_000, 2):
            with patch("counter.storage.sqlite.control._TAIL_EVENTS_MAX", events_max):
                async with opened(tmp_path) as store:
                    pages = [
                        await store.rollups.dirty(namespace, shard, Span.after(0, NOW), limit=99)
                        for shard in range(2)
                    ]
            found = [mark[:4] for page in pages for mark in page.marks]
            assert sorted(found) == sorted((NOW, f"c{n}", 0, Fold(False, n)) for n in range(1, 14))


class LearnsAfterEachMiss(dict[str, int]):
    """A cache of ids to which the writer adds a name right after a reader missed it."""

    def __init__(self, ids: dict[str, int]) -> None:
        super().__init__()
        self._ids = ids

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        self[name] = self._ids[name]
        return found


async def test_counters_whose_ids_become_known_during_a_scan_are_dirty(tmp_path: Path) -> None:
    """Regression: the scan read twice, and missed ids that the writer learned between."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        await write(store, namespace, *(add(name, number=1) for name in "abc"))
        ids = dict(rows_of(tmp_path, "SELECT name, id FROM counters"))
        with patch("counter.storage.sqlite.live.Ids.of", lambda *_: LearnsAfterEachMiss(ids)):
            assert await dirty_counters(store, namespace) == set("abc")


async def test_a_pass_rolls_up_all_counters_in_batches(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        namespace, clock = await make_namespace(store), store.database.clock
        names = [f"c{number}" for number in range(8)]
        await write(store, namespace, *(add(name) for name in names))
        assert isinstance(clock, FakeClock)
        clock.advance(SETTINGS.accept_limit_us + DATASET.write_timeout_us + 2 * WINDOW)
        namespaces = Namespaces(store, clock)
        await namespaces.refresh()
        worker = RollupWorker(store, MemoryCache(clock), clock, namespaces, batch_counters=3)
        assert await worker.tick() == len(names)
        heads = await store.rollups.heads(namespace, names)
        assert [each and each.checkpoint.count for each in heads] == [1] * len(names)


async def test_a_best_effort_namespace_does_not_make_the_tail_long(tmp_path: Path) -> None:
    """Its watermark never moves: each start would read all events since it was created."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        loose = replace(SETTINGS, counter_type=CounterType.BEST_EFFORT)
        assert await store.control.create_namespace("loose", loose, T0 - SLICE)
        await write(store, namespace, *(add("old", T0, number) for number in range(5)))
        await write(store, namespace, add("new"))
        await store.rollups.advance(namespace, [0], T0 + WINDOW - 1)
    with patch("counter.storage.sqlite.control._TAIL_EVENTS_MAX", 5):
        async with opened(tmp_path) as store:
            after_us = T0 + WINDOW - 1
            assert store.database.live.tails(namespace.id, WINDOW, [("new", after_us)]) == [
                Fold(False, 1)
            ]


async def test_a_page_that_fails_is_read_again(tmp_path: Path) -> None:
    """A walk that an error ended is not taken for one that is at its end."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        await write(store, namespace, *(add("c", T0 + n * WINDOW) for n in range(3)))

        async def page(rest: object = None) -> DirtyPage:
            return await store.rollups.dirty(
                namespace, 0, Span.after(T0 - 1, SLICES_END), limit=1, rest=rest
            )

        _, rest = await page()
        broken = patch(
            "counter.storage.sqlite.event_rows.counter_ids", side_effect=sqlite3.OperationalError
        )
        unknown = patch.object(store.database.ids, "of", return_value={})
        with broken, unknown, pytest.raises(StoreUnavailableError):
            await page(rest)
        with pytest.raises(InvariantError):
            await page(rest)
        _, rest = await page()
        ((mark,), _) = await page(rest)
        assert mark[:4] == (T0 + WINDOW, "c", 0, Fold(False, 1))


async def test_a_data_directory_with_marks_goes_on(tmp_path: Path) -> None:
    """Its marks are found in its log; requests for recounts stay."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        await write(store, namespace, add("a"), add("b", NOW + WINDOW))
        await store.recounts.write_marks(namespace, [Mark(NOW + WINDOW, "a", T0)])
        before = await marks(store, namespace)
    # An older version keeps no checksums of pages.
    (tmp_path / "counter.db-sums").unlink()
    with closing(sqlite3.connect(tmp_path / "counter.db")) as connection:
        connection.execute(
            "INSERT INTO marks SELECT ?, 0, ? + ? * (name = 'b'), id, 0 FROM counters",
            (namespace.id, NOW, WINDOW),
        )
        connection.execute("PRAGMA user_version = 2")
        connection.commit()
    assert len(rows_of(tmp_path, "SELECT * FROM marks")) == 3
    async with opened(tmp_path) as store:
        assert await marks(store, namespace) == before
        assert len(before) == 3
    assert rows_of(tmp_path, "SELECT start, recount FROM marks") == [(NOW + WINDOW, T0)]
    assert rows_of(tmp_path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]


async def test_adds_missing_from_the_tail_are_found_in_the_log(tmp_path: Path) -> None:
    """The events are committed: a tail without them would have their counters never rolled up."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        works = LiveTail._add

        def fails_after_it(*arguments: Any) -> None:
            works(*arguments)
            raise MemoryError

        with patch.object(LiveTail, "_add", fails_after_it), pytest.raises(MemoryError):
            await store.events.append(namespace, [add("a")])
        await write(store, namespace, add("b"))
        assert await dirty_counters(store, namespace) == {"a", "b"}
        assert [await total(store, namespace, name) for name in "ab"] == [1, 1]


async def test_nothing_is_clean_while_its_namespace_is_deleted(tmp_path: Path) -> None:
    """The deletion may still fail, and a watermark that moved would stay."""
    async with opened(tmp_path) as store:
        namespace = await make_namespace(store)
        await write(store, namespace, add("a"))
        await store.control.delete_namespace(namespace)
        with pytest.raises(NamespaceUnknownError):
            await marks(store, namespace)
        with pytest.raises(NamespaceUnknownError):
            await store.rollups.marked(namespace, [0], Span.after(0, SLICES_END))
