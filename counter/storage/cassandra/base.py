"""What the parts of the Cassandra store share: the connection, datasets, slices, statements.

Whatever is kept here of slices can be old, and is right nevertheless. A slice's partitioning never
changes; a slice that is not known yet is looked for once before it is missed; the table of one that
is dropped is missing, and to miss a table is an error, never "not found".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from cassandra import ConsistencyLevel

from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import MILLISECOND, TIME_MAX_US
from counter.partitions import slice_of
from counter.ports import Clock
from counter.storage.cassandra.connection import Connection
from counter.storage.cassandra.control_keyspace import ControlKeyspace, dataset_of, slice_from
from counter.storage.cassandra.gathering import Batch, Gatherer, batch_of
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.tables import events_table, keyspace_of
from counter.types import ClockReading, Dataset, Namespace, Placement, Slice
from counter.windows import settling_time

_T = TypeVar("_T")


class Coalesced(Generic[_T]):
    """Calls *work* once for all who ask while it has not begun.

    Whoever asks gets what a call that began after they asked came to: joining one that is under
    way would give them what may have been read before.
    """

    def __init__(self, work: Callable[[], Awaitable[_T]]) -> None:
        self._work = work
        self._running: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(_look_at)
        # Shielded: one who gives up does not take the work from the others.
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[_T] | None) -> _T:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await self._work()


def _look_at(task: asyncio.Task[_T]) -> None:
    """All who asked may have given up: then nobody else looks at what it raised."""
    if not task.cancelled():
        task.exception()


#: The write timestamp of what is deleted for ever, whatever is written after it: ids of namespaces
#: are never used again.
FOR_EVER: Final = TIME_MAX_US

_SLICES: Final = "SELECT start, document, dropped_before FROM {control}.slices WHERE dataset = ?"
#: DISTINCT: the static column alone, not past the tombstones of all the slices that were dropped.
_DROPPED: Final = "SELECT DISTINCT dataset, dropped_before FROM {control}.slices WHERE dataset = ?"
_CLOCKS_AT_ONCE: Final = 3
_DATASETS: Final = "SELECT name, id, document FROM {control}.datasets"


@dataclass(slots=True)
class DatasetState:
    """A dataset, where its data lie, and its slices as this process last saw them.

    *slices* and *dropped_before_us* were read together: what the one does not hold and the other
    does not say is gone was never there.
    """

    dataset: Dataset
    placement: Placement
    keyspace: str
    write_consistency: int
    read_consistency: int
    #: Whether replicas lie in several data centers; known once the store is open.
    is_spread: bool = False
    slices: list[Slice] = field(default_factory=list)
    dropped_before_us: int = 0
    reload: Coalesced[None] = field(init=False)


class CassandraBase:
    """State of one process, never more than what it saw; the truth is in the cluster."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._connection = Connection(options)
        self.tally = self._connection.tally
        self._control = ControlKeyspace(self._connection, options.keyspace)
        self._shelves: dict[int, DatasetState] = {}
        self._statements: dict[tuple[int, str, int, int], Any] = {}
        #: Ids of namespaces that this process saw standing, and then saw gone.
        self._standing: set[int] = set()
        self._gone: set[int] = set()
        #: When this process first saw that a namespace is deleted, by id and its boot clock.
        self._seen_gone_us: dict[int, int] = {}
        self._clocks_read = 0

    def queues(self) -> Mapping[str, int]:
        """Statements that wait because too many are under way."""
        return {"store_statements": self._connection.waiting}

    async def datasets(self) -> Sequence[Dataset]:
        await self._load_datasets()
        return [shelf.dataset for _, shelf in sorted(self._shelves.items())]

    async def read_clock(self) -> ClockReading:
        """The clock that is farthest off, of some of the nodes; of others the next time."""
        nodes = self._connection.near_nodes()
        if not nodes:
            raise StoreUnavailableError("no Cassandra node can be asked for the time")
        first = self._clocks_read % len(nodes)
        self._clocks_read += _CLOCKS_AT_ONCE
        asked = (nodes[first:] + nodes[:first])[:_CLOCKS_AT_ONCE]
        answers = await asyncio.gather(
            *(self._connection.clock_of(node, self._clock.now_us) for node in asked),
            return_exceptions=True,
        )
        readings = [_reading(*each) for each in answers if not isinstance(each, BaseException)]
        for each in answers:
            if isinstance(each, BaseException) and not readings:
                raise each
        return max(readings, key=_surely_off)

    # Statements. A template's {keyspace} is the dataset's, and {table} the events of the slice
    # that starts at *start_us*. They are remembered: the second time costs a look-up.

    async def _to_write(self, dataset: Dataset, cql: str, start_us: int = 0) -> Any:
        """An idempotent write at the dataset's write consistency: it sets USING TIMESTAMP."""
        shelf = self._shelf(dataset)
        return await self._prepared(shelf, cql, start_us, shelf.write_consistency)

    async def _to_read(self, dataset: Dataset, cql: str, start_us: int = 0) -> Any:
        """A read at the dataset's read consistency."""
        shelf = self._shelf(dataset)
        return await self._prepared(shelf, cql, start_us, shelf.read_consistency)

    async def _to_compare(self, dataset: Dataset, cql: str, start_us: int = 0) -> Any:
        """A compare-and-set, SERIAL and then at write consistency. It is not idempotent."""
        shelf = self._shelf(dataset)
        level = shelf.write_consistency
        return await self._prepared(shelf, cql, start_us, level, idempotent=False)

    async def _to_settle(self, dataset: Dataset, cql: str, start_us: int = 0) -> Any:
        """A SERIAL read: it sees what any compare-and-set that returned before has set."""
        return await self._prepared(self._shelf(dataset), cql, start_us, ConsistencyLevel.SERIAL)

    async def _prepared(
        self,
        shelf: DatasetState,
        cql: str,
        start_us: int,
        consistency: int,
        *,
        idempotent: bool = True,
    ) -> Any:
        key = (shelf.dataset.id, cql, start_us, consistency)
        known = self._statements.get(key)
        if known is None:
            text = cql.format(keyspace=shelf.keyspace, table=events_table(start_us))
            known = await self._connection.prepare(text, consistency, idempotent=idempotent)
            self._statements[key] = known
        return known

    # Datasets and their slices.

    def _shelf(self, dataset: Dataset) -> DatasetState:
        shelf = self._shelves.get(dataset.id)
        if shelf is None:
            raise StoreUnavailableError(
                f"dataset {dataset.name!r} (id {dataset.id}) was made after this process started;"
                " restart it"
            )
        return shelf

    async def _load_datasets(self) -> None:
        """Learn all datasets, and their slices."""
        for name, dataset_id, text in await self._control.read(_DATASETS):
            if dataset_id not in self._shelves:
                dataset, placement = dataset_of(name, dataset_id, text)
                shelf = DatasetState(
                    dataset,
                    placement,
                    keyspace_of(self._options.keyspace, name),
                    ConsistencyLevel.name_to_value[placement.write_consistency],
                    ConsistencyLevel.name_to_value[placement.read_consistency],
                )
                shelf.reload = Coalesced(partial(self._load_slices, shelf))
                await shelf.reload()
                self._shelves[dataset_id] = shelf

    async def _load_slices(self, shelf: DatasetState) -> None:
        rows = await self._control.read(_SLICES, shelf.dataset.id)
        # A partition without slices still gives a row, for its static column.
        slices = [slice_from(start_us, text) for start_us, text, _ in rows if start_us is not None]
        dropped_us = (rows[0][2] or 0) if rows else 0
        shelf.slices = [each for each in slices if each.end_us > dropped_us]
        shelf.dropped_before_us = dropped_us
        starts = {each.start_us for each in shelf.slices}
        for key in [key for key in self._statements if key[0] == shelf.dataset.id and key[2]]:
            if key[2] not in starts:
                del self._statements[key]

    async def _slice_of(self, dataset: Dataset, time_us: int) -> Slice:
        """The slice that holds *time_us*, read anew where it is not known. Raises
        SliceMissingError."""
        shelf = self._shelf(dataset)
        try:
            return slice_of(shelf.slices, time_us)
        except SliceMissingError:
            await shelf.reload()
            return slice_of(shelf.slices, time_us)

    async def _reload_slices(self, dataset: Dataset) -> DatasetState:
        """Read the dataset's slices anew: a table turned out to be missing."""
        shelf = self._shelf(dataset)
        await shelf.reload()
        return shelf

    async def _shelf_until(self, dataset: Dataset, until_us: int | None) -> DatasetState:
        """The dataset with all slices that an event before *until_us* can lie in; all that there
        are by now where that is None.

        The writer of an event may know a slice that another process made and this one has not seen.
        """
        shelf = self._shelf(dataset)
        if until_us is None or not shelf.slices or shelf.slices[-1].end_us < until_us:
            await shelf.reload()
        return shelf

    async def dropped_before(self, dataset: Dataset) -> int:
        """Read anew: what it is in memory may be old. See :class:`counter.ports.ControlPlane`."""
        rows = await self._control.read(_DROPPED, dataset.id)
        return (rows[0][1] or 0) if rows else 0

    # Namespaces.

    def _see_namespaces(self, before: set[int], ids: Sequence[int]) -> None:
        """Ids of all namespaces that stood when they were listed: those that were known *before*
        the listing began, and are not among them, are gone."""
        self._gone |= before.difference(ids)
        self._standing = (self._standing | set(ids)) - self._gone

    def _settles_in(self, namespace_id: int, dataset: Dataset) -> int:
        """For how many microseconds adds to a namespace that is seen to be deleted may still be
        acknowledged by some process; 0 or less when no more are.

        It was deleted before this process first saw so. No clock but this process's own is asked.
        """
        now_us = self._clock.boottime_us()
        return self._seen_gone_us.setdefault(namespace_id, now_us) + settling_time(dataset) - now_us

    def _must_stand(self, namespace: Namespace) -> None:
        """Raise NamespaceUnknownError where this process knows that *namespace* is deleted.

        Another process may have deleted it and this one not heard of it yet: then what is written
        is never read, and goes with the rest.
        """
        if namespace.id in self._gone:
            raise unknown(namespace)


def unavailable(result: BaseException | None) -> UnavailableError | None:
    """The error that one row was not written with, if any. Raises what is no fault of the store."""
    if result is None or isinstance(result, UnavailableError):
        return result
    raise result


def unknown(namespace: Namespace) -> NamespaceUnknownError:
    """The error for a namespace that was deleted."""
    return NamespaceUnknownError(f"namespace {namespace.name!r} (id {namespace.id}) was deleted")


def _reading(before_us: int, node_us: int, after_us: int) -> ClockReading:
    """A node counts milliseconds: it is half of one ahead of what it says, give or take as much."""
    offset_us = node_us + MILLISECOND // 2 - (before_us + after_us) // 2
    return ClockReading(offset_us, (after_us - before_us + MILLISECOND) // 2 + 1)


def _surely_off(reading: ClockReading) -> tuple[int, int]:
    """How far it is off at least; where that is nothing, the surest is the most."""
    return max(0, abs(reading.offset_us) - reading.error_us), -reading.error_us


#: How long a write may take, in microseconds, and its table; the rest names a partition.
Lane = tuple[Any, ...]
_Rows = Batch[Lane, Any, None]

#: Small batches of one turn share a statement: it costs this process, and the node that takes it,
#: far more than a row does. Servers complain of more than ten partitions and of 5 KiB.
_PARTITIONS_MAX: Final = 10
_ROWS_MAX: Final = 40
#: Failures that one partition may have brought upon all that shared its statement.
_OF_ONE: Final = (StoreUnavailableError, SliceMissingError)


class CassandraWrites(CassandraBase):
    """Writes of rows, those of one partition together."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._rows: Gatherer[Lane, Any, None] = Gatherer(self._write_batches)
        self._stamped_us = 0

    def queues(self) -> Mapping[str, int]:
        """Statements that wait because too many are under way, and rows behind others of their
        partition."""
        return {**super().queues(), "store_rows": self._rows.waiting}

    async def _write(self, rows: Sequence[tuple[Lane, Any]]) -> None:
        """Write bound statements, each in its lane. Raises the first error."""
        for result in await self._rows.put(rows):
            if result is not None:
                raise result

    def _write_batches(self, batches: Sequence[_Rows]) -> None:
        tables: dict[Lane, list[_Rows]] = {}
        for batch in batches:
            timeout_us, table = batch.key[:2]
            # Whoever leaves a mark and a name waits for both. A slice's table may be gone.
            of_slice = table if isinstance(table, int) else None
            tables.setdefault((timeout_us, of_slice), []).append(batch)
        for sharing in chain.from_iterable(map(_shared, tables.values())):
            self._send_rows(sharing)

    def _send_rows(self, sharing: Sequence[_Rows]) -> None:
        """Write *sharing* by one statement. They are not one write: each partition is."""
        statements = [statement for batch in sharing for statement in batch.items]
        statement = statements[0] if len(statements) == 1 else batch_of(statements)
        timeout_us, table = sharing[0].key[:2]
        if isinstance(table, int):
            # Events, of a slice.
            self.tally.commit_rows.observe(len(statements))
        done = partial(self._rows_sent, sharing, time.perf_counter())
        self._connection.stream.send(statement, timeout_us, done)

    def _rows_sent(
        self, sharing: Sequence[_Rows], began_s: float, error: BaseException | None
    ) -> None:
        if isinstance(sharing[0].key[1], int):
            self.tally.commit_seconds.observe(time.perf_counter() - began_s)
        if isinstance(error, _OF_ONE) and len(sharing) > 1:
            # One partition's replicas may be too few, or its table gone: each has its own try.
            for batch in sharing:
                self._send_rows([batch])
            return
        for batch in sharing:
            batch.end(error)

    def _stamp(self) -> int:
        """A write timestamp for what is true from now on: later than any that was given before.

        Of a deletion and a write of one instant the deletion would win, whichever came first.
        """
        self._stamped_us = max(self._clock.now_us(), self._stamped_us + 1)
        return self._stamped_us


def _shared(batches: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    """*batches* by the statements that they share."""
    sharing: list[_Rows] = []
    rows = 0
    for batch in batches:
        if sharing and (len(sharing) == _PARTITIONS_MAX or rows + len(batch.items) > _ROWS_MAX):
            yield sharing
            sharing, rows = [], 0
        sharing.append(batch)
        rows += len(batch.items)
    if sharing:
        yield sharing
