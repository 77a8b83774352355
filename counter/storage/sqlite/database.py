"""Own the connections, threads and shared state of the SQLite store's parts."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from counter import limits
from counter.bounds import Bounds
from counter.errors import StartupError, StoreUnavailableError, UnavailableError
from counter.limits import MILLISECOND, SECOND
from counter.metrics import Calls, StoreTally
from counter.ports import Clock
from counter.quantities import format_bytes
from counter.storage.shared.batching import LINGER_S, Batch, Batcher
from counter.storage.shared.bridge import Worker
from counter.storage.sqlite.live import Ids, LiveTail
from counter.storage.sqlite.page_sums import PAGES_CHECKED_AT_START, PageSums, damaged
from counter.storage.sqlite.schema import (
    SCHEMA_VERSION,
    DirectoryLock,
    check_whole,
    connect,
    create_schema,
    unavailable,
    unusable,
)
from counter.types import Dataset, Slice

#: Runs the jobs of one batch that have this function; returns a result, or an exception, for each.
JobFunction = Callable[[sqlite3.Connection, Sequence[Any]], Sequence[Any]]

#: Runs one batch of jobs on a queue's thread; returns a result, or an exception, for each of them.
Execute = Callable[[Sequence[Any]], Sequence[Any]]

_log = logging.getLogger("counter.sqlite")
_Row = TypeVar("_Row")
_T = TypeVar("_T")
_ROWS_PER_STATEMENT_MAX: Final = 512
#: Pages of 4 KiB in the log before a checkpoint: a page that many commits change is then written to
#: the database once.
_WAL_PAGES: Final = 4_000
#: Up to this number of rows there is a prepared statement for each number.
ROWS_OF_ANY_NUMBER_MAX: Final = 64

#: A read that took this long had to wait, for the disk or for the processor.
_SLOW_US: Final = 5 * MILLISECOND
#: Then the reader's thread reads for this many times as long, which bounds the share of time that
#: the event loop waits.
_PAUSE_FACTOR: Final = 20


@lru_cache(maxsize=1_024)
def _insert_sql(into: str, width: int, rows: int) -> str:
    one = "(" + ",".join("?" * width) + ")"
    return f"{into} VALUES " + ",".join([one] * rows)


def chunks(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    """Split *rows* so that few different statements are prepared: many rows into powers of two."""
    start = 0
    while start < len(rows):
        size = len(rows) - start
        if size > ROWS_OF_ANY_NUMBER_MAX:
            size = min(1 << (size.bit_length() - 1), _ROWS_PER_STATEMENT_MAX)
        yield rows[start : start + size]
        start += size


def begin(connection: sqlite3.Connection) -> None:
    """Begin the batch's transaction, if it has not begun.

    A batch of appends begins it only if necessary: a single insert is a transaction by itself, and
    saves two hand-overs of the interpreter lock. No other write happens in between: there is one
    writer, and the directory is locked.
    """
    if not connection.in_transaction:
        connection.execute("BEGIN IMMEDIATE")


def insert(connection: sqlite3.Connection, into: str, chunk: Sequence[Sequence[Any]]) -> None:
    """Insert one chunk in one step: all of it or, if a row conflicts, nothing.

    With one step per row the interpreter lock would be handed back and forth at every row.
    """
    flat = list(chain.from_iterable(chunk))
    connection.execute(_insert_sql(into, len(chunk[0]), len(chunk)), flat)


def bulk(connection: sqlite3.Connection, into: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert *rows*, a chunk per step."""
    for chunk in chunks(rows):
        insert(connection, into, chunk)


class ThreadQueue:
    """Runs jobs on a thread that owns one connection. While one batch runs, the next one gathers:
    a burst of calls costs one thread crossing, one transaction and one wake-up.

    A cancelled caller gets its CancelledError only when its batch has ended, so that the outcome of
    its write is known.
    """

    def __init__(
        self,
        name: str,
        execute: Execute,
        *,
        jobs_max: int,
        calls: Calls | None = None,
        linger_s: float = 0.0,
    ) -> None:
        """*calls* counts the batches, and the jobs of them that the store failed. *linger_s* is
        that of :class:`Batcher`."""
        self._execute = execute
        self._calls = calls or Calls()
        self._batcher: Batcher[None, Any, Any] = Batcher(
            self._send,
            name="the store",
            items_max=jobs_max,
            waiting_max=jobs_max,
            linger_s=linger_s,
            interrupts=False,
        )
        self._worker = Worker(name, self._run, self._ended)
        self._worker.start()

    async def call(self, job: Any, weight: int = 1) -> Any:
        """Return the result of *job*, for which *weight* callers wait, when its batch is done.

        Raises what the job raised, and OverloadedError, before any work, if too many jobs wait.
        """
        (result,) = await self._batcher.put(None, (job,), weight)
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for the running batch to end."""
        return self._batcher.waiting

    @property
    def is_busy(self) -> bool:
        """Whether a batch is running or about to."""
        return self._batcher.is_under_way(None) or self._batcher.waiting > 0

    async def close(self) -> None:
        """Run the accepted jobs, then stop the thread."""
        await self._batcher.close()
        self._worker.stop()
        await self._worker.join()

    def _send(self, batches: Sequence[Batch[None, Any, Any]]) -> None:
        for batch in batches:
            self._worker.send(batch)

    def _run(self, batch: Batch[None, Any, Any]) -> Sequence[Any]:
        """Run a batch, on the thread."""
        began_s = time.perf_counter()
        results = self._execute(batch.items)
        failed = sum(isinstance(each, UnavailableError) for each in results)
        self._calls.ended(time.perf_counter() - began_s, failed)
        return results

    def _ended(self, batch: Batch[None, Any, Any], results: Sequence[Any] | BaseException) -> None:
        if isinstance(results, BaseException):
            batch.end_all(results)
        else:
            batch.end(results)
        # Before the callers of this batch continue, so that the thread does not wait for them.
        self._batcher.commit_ready()


class InlineReader:
    """The event loop's own connection, which fails instead of waiting.

    A row whose pages are in memory is read in less time than it takes to wake a thread. While the
    disk is slow, or a lock is held, a thread reads instead.
    """

    def __init__(
        self, connection: sqlite3.Connection, clock: Clock, calls: Calls | None = None
    ) -> None:
        connection.execute("PRAGMA busy_timeout = 0")
        self._connection = connection
        self._cursor = connection.cursor()
        self._clock = clock
        self._calls = calls or Calls()
        self._paused_until_us = 0

    def row(self, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]] | None:
        """Return the rows that *sql* selects, at most one; None if a thread must read them."""
        began_us = self._clock.boottime_us()
        if began_us < self._paused_until_us:
            return None
        try:
            rows = self._cursor.execute(sql, parameters).fetchall()
        except sqlite3.Error:
            # The thread meets the same error, and reports it in the service's terms.
            self._paused_until_us = began_us + _PAUSE_FACTOR * _SLOW_US
            return None
        ended_us = self._clock.boottime_us()
        self._calls.ended((ended_us - began_us) / SECOND)
        if ended_us - began_us > _SLOW_US:
            self._paused_until_us = ended_us + _PAUSE_FACTOR * (ended_us - began_us)
        return rows

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class SqliteDatabase:
    """A thread that writes, one for short reads and one for long ones, each with its queue.

    Readers see the last commit and never wait for a write.
    """

    def __init__(
        self, directory: Path, clock: Clock, datasets: Sequence[Dataset], wal_bytes_max: int
    ) -> None:
        self._directory = directory
        self.clock = clock
        self.defaults = datasets
        self.ids = Ids()
        self.live = LiveTail()
        # Copies of stored values, by dataset or namespace. SqliteControl loads them at startup; the
        # part of the store that changes a value changes its copy.
        self.datasets: dict[int, Dataset] = {}
        self.slices: dict[int, list[Slice]] = {}
        self.dropped_before: dict[int, int] = {}
        #: The watermark of each shard.
        self.watermarks: dict[int, list[int]] = {}
        #: See :meth:`bounds`; None if they must be read.
        self._bounds: Mapping[int, Bounds] | None = None
        #: Namespaces that had holds since the start, or have open ones.
        self.holding: set[int] = set()
        #: The latest time of a token that was resolved.
        self.resolved_through_us = 0
        #: The latest clock reading by which a worker may have closed windows.
        self.fenced_us = 0
        #: The times of later tokens that were cancelled: few, so that other adds are not slower.
        self.cancelled_us: set[int] = set()
        #: Whether the writer's connection must be replaced.
        self._broken = False
        #: When the last commit ended.
        self._committed_us = 0
        self.tally = StoreTally(("write", "read", "scan", "inline"))
        self.tally.wal_bytes_max = wal_bytes_max
        #: Events of the batch that is being written.
        self.appended = 0
        #: How many pages are compared with their checksums before the database is opened.
        self.pages_checked = PAGES_CHECKED_AT_START
        self._wal_pages = _WAL_PAGES
        # One object for all calls, because the queues group jobs by their function.
        self._changing = self._run_changes

    async def open(self, load: Callable[[sqlite3.Connection], None]) -> None:
        """Lock the directory, create the schema, have *load* read what is kept in memory, and start
        the threads. Raises StartupError."""
        self._lock = DirectoryLock(self._directory)
        path = self._path = self._directory / "counter.db"
        try:
            check_whole(self._directory)
            # Before SQLite opens the file.
            self._checksums = PageSums(path, pages_checked=self.pages_checked)
            self._writing = connect(path, writer=True)
            create_schema(self._writing)
            self._checksums.follow()
            load(self._writing)
            self._record_checksums(self._writing)
            self._reading = connect(path, writer=False)
            self._scanning = connect(path, writer=False)
            self.inline = InlineReader(
                connect(path, writer=False), self.clock, self.tally.calls["inline"]
            )
        except sqlite3.Error as error:
            self._lock.release()
            raise StartupError(f"cannot open {path}: {unavailable(error).detail}") from error
        except OSError as error:
            self._lock.release()
            raise unusable(self._directory, error) from error
        except (ValueError, TypeError, KeyError) as error:
            # A row does not have what its columns hold.
            self._lock.release()
            raise damaged(path, repr(error)) from error
        except StartupError:
            self._lock.release()
            raise
        jobs_max = limits.PENDING_WRITES_MAX
        calls = self.tally.calls
        self.writer = ThreadQueue(
            "counter-writer",
            self._write_batch,
            jobs_max=jobs_max,
            calls=calls["write"],
            linger_s=LINGER_S,
        )
        reading, scanning = (partial(_read_batch, c) for c in (self._reading, self._scanning))
        self.reader = ThreadQueue("counter-reader", reading, jobs_max=jobs_max, calls=calls["read"])
        self.scanner = ThreadQueue(
            "counter-scanner", scanning, jobs_max=jobs_max, calls=calls["scan"]
        )

    async def close(self) -> None:
        """Commit what was accepted, close the connections, release the directory."""
        for queue in (self.writer, self.reader, self.scanner):
            await queue.close()
        self.inline.close()
        self._reading.close()
        self._scanning.close()
        # The last connection to be closed copies the log into the database, and deletes it.
        self._flush_checksums()
        self._writing.close()
        self._checksums.close()
        self._lock.release()

    def queues(self) -> Mapping[str, int]:
        """Return the number of jobs that wait for the batch before theirs."""
        return {
            "store_write": self.writer.waiting,
            "store_read": self.reader.waiting + self.scanner.waiting,
        }

    async def ping(self) -> None:
        """Acquire and release the write lock, and write the schema version: a real write.

        If adds were committed just now, that proves the same, and sooner.
        """
        since_us = self.clock.boottime_us() - self._committed_us
        if self.writer.is_busy and since_us < limits.SECOND:
            return
        sql = f"PRAGMA user_version = {SCHEMA_VERSION}"
        await self.write(lambda connection: connection.execute(sql))

    async def write(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run *change* in the next write transaction; if it raises, only its effects are rolled
        back."""
        return cast("_T", await self.writer.call((self._changing, change)))

    async def read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a short *query*."""
        return cast("_T", await self.reader.call((_run_queries, query)))

    async def scan(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a long *query*."""
        return cast("_T", await self.scanner.call((_run_queries, query)))

    def _write_batch(self, jobs: Sequence[tuple[JobFunction, Any]]) -> Sequence[Any]:
        self.appended, began_s = 0, time.perf_counter()
        try:
            connection = self._connection()
            if (full := self._wal_full(connection)) is not None:
                return [full] * len(jobs)
            # Appends begin one if they need it.
            if any(function is self._changing for function, _ in jobs):
                begin(connection)
            results = _run_grouped(connection, jobs)
            if connection.in_transaction:
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            # A commit that reports an error may be on disk.
            self._record_checksums(self._writing)
            return [unavailable(error)] * len(jobs)
        except BaseException:
            self._undo()
            raise
        self.ids.commit()
        self.live.commit()
        self._committed_us = self.clock.boottime_us()
        self._record_checksums(connection)
        if self.appended:
            self.tally.commit_rows.observe(self.appended)
            self.tally.commit_seconds.observe(time.perf_counter() - began_s)
        return results

    def _run_changes(
        self, connection: sqlite3.Connection, changes: Sequence[Callable[[sqlite3.Connection], Any]]
    ) -> list[Any]:
        results: list[Any] = []
        for change in changes:
            connection.execute("SAVEPOINT change")
            noted = len(self.live.written)
            try:
                results.append(change(connection))
            except sqlite3.Error:
                raise
            except Exception as error:
                connection.execute("ROLLBACK TO change")
                self.ids.rollback()
                self.live.rollback_to(noted)
                results.append(error)
            connection.execute("RELEASE change")
        return results

    def _record_checksums(self, connection: sqlite3.Connection) -> None:
        """Store the checksums of what was committed, and copy a long log into the database.

        The commit is on disk, and is acknowledged: no failure here changes that.
        """
        try:
            frames, self.tally.wal_bytes = self._checksums.learn()
        except OSError as error:
            self._give_up_checksums(error)
            return
        if frames >= self._wal_pages:
            try:
                self._checkpoint(connection)
            except sqlite3.Error as error:
                _log.warning("the write-ahead log could not be copied: %s", error)

    def _checkpoint(self, connection: sqlite3.Connection) -> bool:
        """Copy the log into the database; return whether all of it is there."""
        _, logged, copied = connection.execute("PRAGMA wal_checkpoint").fetchone()
        if logged != copied:
            return False
        # The next commit begins the log again, and what it had is in the database only.
        self._flush_checksums()
        return True

    def _flush_checksums(self) -> None:
        try:
            self._checksums.flush()
        except OSError as error:
            self._give_up_checksums(error)

    def _give_up_checksums(self, error: OSError) -> None:
        _log.error("no checksums of pages are kept until the next start: %s", error)
        self._checksums.abandon()

    def _wal_full(self, connection: sqlite3.Connection) -> StoreUnavailableError | None:
        """Return why nothing may be written now; None if the log has room, or can be reset."""
        tally = self.tally
        if tally.wal_bytes < tally.wal_bytes_max:
            return None
        if self._checkpoint(connection):
            return None
        return StoreUnavailableError(
            f"SQLite: the write-ahead log has {format_bytes(tally.wal_bytes)}, and wal_bytes_max is"
            f" {format_bytes(tally.wal_bytes_max)}: a process still reads the database as it was"
            f" before; end it (`fuser {self._path}` lists them); nothing that was acknowledged is"
            " lost",
            retry_after_us=limits.SECOND,
        )

    def _connection(self) -> sqlite3.Connection:
        """Return the writer's connection; a new one if the last one could not be rolled back."""
        if self._broken:
            self._writing.close()
            self._writing = connect(self._path, writer=True)
            self._broken = False
        return self._writing

    def bounds(self, connection: sqlite3.Connection) -> Mapping[int, Bounds]:
        """Return the bounds of namespaces that have any, as the writer's transaction sees them."""
        if self._bounds is None:
            least, most = (f"json_extract(settings, '$.bounds.{name}')" for name in Bounds._fields)
            rows = connection.execute(
                f"SELECT id, {least}, {most} FROM namespaces"
                " WHERE name IS NOT NULL AND json_extract(settings, '$.bounds') IS NOT NULL"
            )
            self._bounds = {namespace_id: Bounds(*each) for namespace_id, *each in rows}
        return self._bounds

    def forget_bounds(self) -> None:
        """Have the bounds be read again: the current transaction changes them."""
        self._bounds = None

    def _undo(self) -> None:
        self.forget_bounds()
        self.ids.rollback()
        self.live.rollback()
        try:
            if not self._broken and self._writing.in_transaction:
                self._writing.execute("ROLLBACK")
        except sqlite3.Error as error:
            _log.error("a transaction could not be rolled back: %s", error)
            self._broken = True


def _run_grouped(
    connection: sqlite3.Connection, jobs: Sequence[tuple[JobFunction, Any]]
) -> list[Any]:
    """Run *jobs*, grouped by function, in the order of each function's first job."""
    first = jobs[0][0]
    if all(function is first for function, _ in jobs):
        return list(first(connection, [job[1] for job in jobs]))
    groups: dict[JobFunction, list[int]] = {}
    for index, (function, _) in enumerate(jobs):
        groups.setdefault(function, []).append(index)
    results: list[Any] = [None] * len(jobs)
    for function, indices in groups.items():
        answers = function(connection, [jobs[index][1] for index in indices])
        for index, answer in zip(indices, answers, strict=True):
            results[index] = answer
    return results


def _read_batch(
    connection: sqlite3.Connection, jobs: Sequence[tuple[JobFunction, Any]]
) -> Sequence[Any]:
    try:
        return _run_grouped(connection, jobs)
    except sqlite3.Error as error:
        return [unavailable(error)] * len(jobs)


def _run_queries(
    connection: sqlite3.Connection, queries: Sequence[Callable[[sqlite3.Connection], Any]]
) -> list[Any]:
    results: list[Any] = []
    for query in queries:
        try:
            results.append(query(connection))
        except sqlite3.Error as error:
            results.append(unavailable(error))
        except Exception as error:
            results.append(error)
    return results
