"""SQLite's adapter with a failing disk: at a commit, at a rollback, at startup."""

import asyncio
import errno
import mmap
import os
import shutil
import sqlite3
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.core.namespaces import Namespaces
from counter.errors import (
    DamagedError,
    NamespaceUnknownError,
    OverloadedError,
    StoreUnavailableError,
)
from counter.limits import MINUTE, SECOND
from counter.storage.shared.bridge import Worker
from counter.storage.sqlite import SqliteStore, page_sums
from counter.storage.sqlite.database import ThreadQueue
from counter.storage.sqlite.schema import DROPPED, DirectoryLock, events_table
from counter.testing.clock import FakeClock
from counter.types import Event, Namespace, Span, Written
from rollup.maintenance import Maintenance
from tests.rollup.world import DATASET, SETTINGS
from tests.support.app import running
from tests.support.rest import fresh
from tests.support.times import START_US


class Failing:
    """A connection that fails at chosen statements: before they are done, or after."""

    def __init__(self, connection: sqlite3.Connection, *fails: str, after: bool = False) -> None:
        self._connection = connection
        self._fails = list(fails)
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *arguments: Any) -> Any:
        if self._fails and sql.startswith(self._fails[0]):
            del self._fails[0]
            if self._after:
                self._connection.execute(sql, *arguments)
            raise sqlite3.OperationalError("disk I/O error")
        return self._connection.execute(sql, *arguments)


class Desk:
    """A store, its slices and the namespace ``n``."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.clock = FakeClock(START_US)
        self.store = SqliteStore(directory, self.clock, [DATASET], **settings)

    async def open(self) -> None:
        await self.store.open()
        namespaces = Namespaces(self.store, self.clock)
        await Maintenance(self.store, self.clock).run_once()
        self.namespace: Namespace = await namespaces.create("n", SETTINGS)

    async def add(self, number: int) -> Any:
        event = Event("c", self.clock.now_us(), number.to_bytes(16, "big"), 0, 1)
        (outcome,) = await self.store.events.append(self.namespace, [event])
        return outcome

    def fail(self, *statements: str, after: bool = False) -> None:
        found = Failing(self.store.database._writing, *statements, after=after)
        self.store.database._writing = found  # type: ignore[assignment]


@pytest.fixture
async def desk(fast_dir: Path) -> AsyncIterator[Desk]:
    desk = Desk(fast_dir)
    await desk.open()
    yield desk
    await desk.store.close()


@pytest.mark.parametrize("lands", [False, True])
async def test_a_deletion_with_a_failed_commit_has_a_known_outcome(desk: Desk, lands: bool) -> None:
    """A commit that reports an error may be on disk: the database is read."""
    desk.fail("COMMIT", after=lands)
    with pytest.raises(StoreUnavailableError):
        await desk.store.control.delete_namespace(desk.namespace)
    there = bool(await desk.store.control.namespaces())
    assert there is not lands
    if there:
        assert await desk.add(1) is Written.NEW
        assert await desk.store.rollups.watermarks(desk.namespace)
    else:
        with pytest.raises(NamespaceUnknownError):
            await desk.store.rollups.watermarks(desk.namespace)


async def test_a_commit_that_failed_and_landed_is_no_damage(fast_dir: Path) -> None:
    """Regression: its pages had no checksums if it was the last one before the end."""
    desk = Desk(fast_dir)
    await desk.open()
    desk.fail("COMMIT", after=True)
    with pytest.raises(StoreUnavailableError):
        await desk.store.control.delete_namespace(desk.namespace)
    await desk.store.close()
    again = Desk(fast_dir)
    await again.store.open()
    assert not await again.store.control.namespaces()
    await again.store.close()


async def test_all_of_a_namespace_that_could_not_be_deleted_is_dirty(desk: Desk) -> None:
    """Its tail was dropped for the deletion: later notes are incomplete."""
    store, namespace = desk.store, desk.namespace
    await desk.add(1)
    desk.fail("COMMIT")
    with pytest.raises(StoreUnavailableError):
        await store.control.delete_namespace(namespace)
    now_us = desk.clock.now_us()
    await store.events.append(namespace, [Event("later", now_us, bytes(16), 0, 1)])
    await store.rollups.advance(namespace, [0], min(await store.rollups.watermarks(namespace)))
    found = [
        mark.counter
        for shard in range(namespace.settings.shards)
        for mark in (await store.rollups.dirty(namespace, shard, Span.after(0, now_us), 10)).marks
    ]
    assert sorted(found) == ["c", "later"]


async def test_a_slice_that_could_not_be_dropped_is_still_there(desk: Desk) -> None:
    dataset = desk.namespace.dataset
    [first, *_] = before = list(await desk.store.control.slices(dataset))
    desk.fail("COMMIT")
    with pytest.raises(StoreUnavailableError):
        await desk.store.control.drop_slice(dataset, first.start_us)
    assert list(await desk.store.control.slices(dataset)) == before
    assert await desk.store.control.dropped_before(dataset) == 0
    await desk.store.control.drop_slice(dataset, first.start_us)
    assert list(await desk.store.control.slices(dataset)) == before[1:]


async def test_a_dropped_slice_is_deleted_in_short_transactions(desk: Desk) -> None:
    """Regression: one transaction dropped all of it, and adds waited for as long."""
    namespace, store = desk.namespace, desk.store
    [first, *_] = await store.control.slices(namespace.dataset)
    at_us = desk.clock.now_us()
    table = events_table(namespace.dataset.id, first.start_us)
    rows = [(1, at_us, number.to_bytes(16, "big"), 0, 1, None, None) for number in range(25)]
    await store.database.write(
        lambda connection: connection.executemany(
            f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)", rows
        )
    )
    await store.control.drop_slice(namespace.dataset, first.start_us)

    async def left() -> int | None:
        def query(connection: sqlite3.Connection) -> int | None:
            dropped = f"{DROPPED}{table}"
            sql = f"SELECT count(*) FROM {dropped}"
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
            return connection.execute(sql).fetchone()[0] if (dropped,) in tables else None

        return await store.database.read(query)

    seen: list[int | None] = []
    with (
        patch("counter.storage.sqlite.control._PURGE_EVENTS", 10),
        patch("counter.storage.sqlite.control._PURGE_TRANSACTIONS", 1),
    ):
        while await store.control.purge(at_us):
            seen.append(await left())
    assert seen == [15, 5, None]


async def test_a_read_that_a_drop_overtakes_takes_no_part_of_the_slice_for_all(desk: Desk) -> None:
    """Its table is gone for readers before its first event is."""
    await desk.add(1)
    dataset = desk.namespace.dataset
    slices = list(await desk.store.control.slices(dataset))
    windows = [("c", desk.clock.now_us())]
    for each in slices:
        await desk.store.control.drop_slice(dataset, each.start_us)
    desk.store.database.slices[dataset.id] = slices
    desk.store.database.dropped_before[dataset.id] = 0
    with pytest.raises(StoreUnavailableError, match="no such table"):
        await desk.store.events.sums(desk.namespace, windows)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Another process's transaction, which sees the database as it is now until it ends."""
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield


async def test_the_write_ahead_log_shrinks_once_a_long_reader_is_gone(fast_dir: Path) -> None:
    """Regression: it kept the largest size that it ever had until the process ended."""
    wal, kept = fast_dir / "counter.db-wal", 256 * 1_024
    with (
        patch("counter.storage.sqlite.database._WAL_PAGES", 16),
        patch("counter.storage.sqlite.schema.WAL_BYTES_KEPT", kept),
    ):
        desk = Desk(fast_dir)
        await desk.open()
    with reading(fast_dir / "counter.db"):
        number = 0
        while wal.stat().st_size < 4 * kept:
            number += 1
            await desk.add(number)
    for each in range(3):
        await desk.add(number + 1 + each)
    assert wal.stat().st_size <= kept
    assert desk.store.tally.wal_bytes == wal.stat().st_size
    await desk.store.close()


async def test_a_write_ahead_log_at_its_limit_refuses_writes_until_the_reader_is_gone(
    fast_dir: Path,
) -> None:
    """Regression: a reader that never ended filled the disk."""
    most, wal = 1_024 * 1_024, fast_dir / "counter.db-wal"
    with patch("counter.storage.sqlite.schema.WAL_BYTES_KEPT", most // 4):
        desk = Desk(fast_dir, wal_bytes_max=most)
        await desk.open()
    number = 0
    with reading(fast_dir / "counter.db"):
        while wal.stat().st_size < most:
            number += 1
            await desk.add(number)
        with pytest.raises(StoreUnavailableError, match=r"write-ahead log has .* reads"):
            await desk.add(number + 1)
        assert most <= wal.stat().st_size < most + most // 8
        with pytest.raises(StoreUnavailableError, match="write-ahead log"):
            await desk.store.ping()
    assert await desk.add(number + 1) is Written.NEW
    assert await desk.add(number) is Written.REPLAYED
    assert wal.stat().st_size <= most // 4
    await desk.store.close()


async def test_slices_are_created_together_or_not_at_all(desk: Desk) -> None:
    """A start after a long gap makes many: a commit for each would take minutes."""
    dataset = desk.namespace.dataset
    before = list(await desk.store.control.slices(dataset))
    end_us, size_us = before[-1].end_us, dataset.slice_us
    more = [
        replace(before[-1], start_us=at, end_us=at + size_us) for at in (end_us, end_us + size_us)
    ]
    desk.fail("COMMIT")
    with pytest.raises(StoreUnavailableError):
        await desk.store.control.make_slices(dataset, *more)
    assert list(await desk.store.control.slices(dataset)) == before
    await desk.store.control.make_slices(dataset, *more)
    assert list(await desk.store.control.slices(dataset)) == [*before, *more]


async def test_a_transaction_that_cannot_be_rolled_back_costs_its_connection_alone(
    desk: Desk,
) -> None:
    assert await desk.add(1) is Written.NEW
    desk.fail("COMMIT", "ROLLBACK")
    with pytest.raises(StoreUnavailableError):
        await desk.store.ping()
    assert await desk.add(1) is Written.REPLAYED
    assert await desk.add(2) is Written.NEW


async def test_a_batch_over_two_slices_is_written_whole_or_not_at_all(desk: Desk) -> None:
    """Otherwise some of its events would be stored, and in no live count."""
    store, namespace = desk.store, desk.namespace
    *_, first, last = await store.control.slices(namespace.dataset)
    events = [Event("c", each.start_us, bytes(16), 0, 1) for each in (first, last)]
    await store.events.append(namespace, [events[0]._replace(event_id=b"1" * 16)])
    desk.fail(f"INSERT INTO {events_table(namespace.dataset.id, last.start_us)}")
    with pytest.raises(StoreUnavailableError):
        await store.events.append(namespace, events)
    assert list(await store.events.find(namespace, events)) == [None, None]


async def test_closing_waits_for_the_writes_under_way(fast_dir: Path) -> None:
    # Services of other tests may run in this process.
    before = set(threading.enumerate())
    desk = Desk(fast_dir)
    await desk.open()
    adding = asyncio.create_task(desk.add(1))
    await asyncio.sleep(0)
    await desk.store.close()
    assert await adding is Written.NEW
    began = set(threading.enumerate()) - before
    assert not [each for each in began if each.name.startswith("counter-")]


async def test_closing_waits_for_the_thread() -> None:
    held, began = threading.Event(), threading.Event()

    def work(_: int) -> None:
        began.set()
        held.wait()

    worker = Worker("held", work, lambda _, __: None)
    worker.start()
    worker.send(1)
    worker.stop()
    joining = asyncio.create_task(worker.join())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not joining.done()
    held.set()
    await joining
    assert began.is_set()


async def test_new_directories_are_durable(fast_dir: Path) -> None:
    directory = fast_dir / "a" / "b"
    with patch("counter.storage.sqlite.schema.sync_directory") as synced:
        DirectoryLock(directory).release()
    assert [call.args for call in synced.call_args_list] == [(fast_dir / "a",), (fast_dir,)]


class _SyncedMap(mmap.mmap):
    """Counts its syncs."""

    syncs = 0

    def flush(self, *given: int) -> None:
        _SyncedMap.syncs += 1
        super().flush(*given)


async def test_checksums_are_synced_before_the_log_begins_again(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else knows the pages that only the database has from then on."""
    monkeypatch.setattr(mmap, "mmap", _SyncedMap)
    monkeypatch.setattr(_SyncedMap, "syncs", 0)
    desk = Desk(fast_dir)
    await desk.open()
    assert _SyncedMap.syncs == 1
    await desk.add(1)
    assert desk.store.database._checkpoint(desk.store.database._writing)
    assert _SyncedMap.syncs == 2
    await desk.store.close()
    # Before the last connection copies the log, and after.
    assert _SyncedMap.syncs == 4


class _FixedMap(mmap.mmap):
    """A mapping as macOS has it."""

    def resize(self, newsize: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


async def test_checksums_grow_without_linux_calls(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: no data directory could be opened on macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(mmap, "mmap", _FixedMap)
    monkeypatch.setattr(page_sums, "_GROWTH_PAGES", 8)
    desk, sums = Desk(fast_dir), fast_dir / "counter.db-sums"
    await desk.open()
    size = sums.stat().st_size
    for number in range(800):
        await desk.add(number)
    assert sums.stat().st_size > size
    await desk.store.close()
    again = Desk(fast_dir)
    await again.store.open()
    await again.store.close()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_without_room_for_checksums_adds_and_the_next_start_go_on(
    fast_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_killed: bool,
) -> None:
    """Regression: after a kill the directory was taken for damaged, and each commit tried again."""
    monkeypatch.setattr(page_sums, "_GROWTH_PAGES", 8)
    served = Desk(fast_dir / "data")
    await served.open()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(page_sums, "_extend", side_effect=full) as grow:
        for number in range(800):
            await served.add(number)
    assert grow.call_count == 1
    assert ["no checksums of pages are kept" in each.message for each in caplog.records] == [True]
    if is_killed:
        shutil.copytree(fast_dir / "data", fast_dir / "killed")
    await served.store.close()
    again = Desk(fast_dir / ("killed" if is_killed else "data"))
    await again.store.open()
    await again.store.close()


async def test_a_first_start_that_lost_power_is_undone_by_the_next(fast_dir: Path) -> None:
    """Regression: the journal of the switch to WAL mode was left beside a log without commits."""
    page_bytes, database = 4_096, fast_dir / "counter.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (a)")
        log = (fast_dir / "counter.db-wal").read_bytes()
    (fast_dir / "counter.db-wal").write_bytes(log[:32])
    # https://sqlite.org/fileformat.html#the_rollback_journal: it says that there were no pages.
    head = struct.pack(">QIIIII", 0xD9D505F920A163D7, 0, 0, 0, 512, page_bytes)
    (fast_dir / "counter.db-journal").write_bytes(head.ljust(512, b"\0"))
    desk = Desk(fast_dir)
    await desk.open()
    await desk.add(1)
    await desk.store.close()


async def test_a_commit_that_is_missing_from_the_log_is_noticed(fast_dir: Path) -> None:
    desk = Desk(fast_dir / "served")
    await desk.open()
    await desk.add(1)
    shutil.copytree(fast_dir / "served", fast_dir / "copied")
    await desk.store.close()
    log = fast_dir / "copied" / "counter.db-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 1)
    with pytest.raises(DamagedError):
        await Desk(fast_dir / "copied").store.open()


async def test_health_is_not_checked_while_adds_succeed(desk: Desk) -> None:
    """A health check that waited for a flood of adds would come too late to be of use."""
    await desk.add(1)
    adding = asyncio.create_task(desk.add(2))
    await asyncio.sleep(0)
    await desk.store.ping()
    assert not adding.done()
    await adding
    desk.clock.advance(2 * SECOND)
    adding = asyncio.create_task(desk.add(3))
    await asyncio.sleep(0)
    await desk.store.ping()
    assert adding.done()


async def test_a_long_tail_is_summed_by_its_readers_after_a_start(fast_dir: Path) -> None:
    """More events than a start reads into memory: counts are right at once, and later."""
    async with running("sqlite", fast_dir) as app:
        for _ in range(6):
            await app.rest.add("c", 1, fresh(app.clock.now_us()))
        with patch("counter.storage.sqlite.control._TAIL_EVENTS_MAX", 3):
            await app.restart()
        assert await app.rest.count("c") == 6
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        assert await app.rest.count("c") == 7
        await app.roll_up_after(MINUTE)
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        assert await app.rest.count("c") == 8


async def test_a_lane_that_is_full_or_closed_refuses_before_any_work() -> None:
    done: list[Any] = []

    def run(jobs: Any) -> Any:
        done.extend(jobs)
        return jobs

    lane = ThreadQueue("lane", run, jobs_max=1)
    results = await asyncio.gather(*(lane.call(n) for n in range(3)), return_exceptions=True)
    assert results[0] == 0
    assert all(isinstance(each, OverloadedError) for each in results[1:])
    await lane.close()
    with pytest.raises(OverloadedError, match="closing"):
        await lane.call(9)
    assert done == [0]


async def test_a_lane_is_closed_when_its_thread_has_ended() -> None:
    join, ended = Worker.join, []

    async def noted(worker: Worker[Any, Any]) -> None:
        await join(worker)
        ended.append(worker)

    lane = ThreadQueue("lane", lambda jobs: jobs, jobs_max=1)
    with patch.object(Worker, "join", noted):
        await lane.close()
    assert len(ended) == 1
