"""What the parts of the Cassandra store share: the connection, datasets, slices, statements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BatchType

from counter.errors import SliceMissingError, StoreUnavailableError, UnavailableError
from counter.limits import MILLISECOND, PENDING_WRITES_MAX, TIME_MAX_US
from counter.ports import Clock
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.control_keyspace import ControlKeyspace, dataset_of, slice_from
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.schema import check_version
from counter.storage.cassandra.tables import events_table, keyspace_of
from counter.storage.shared.batching import Batch, Batcher
from counter.storage.shared.directory import Coalesced, DatasetState, Directory
from counter.types import ClockReading, Dataset

#: The write timestamp of permanent deletions, which hide every later write: ids of namespaces are
#: never reused.
FOR_EVER: Final = TIME_MAX_US

_SLICES: Final = "SELECT start, document, dropped_before FROM {control}.slices WHERE dataset = ?"
#: DISTINCT reads the static column alone, without the tombstones of dropped slices.
_DROPPED: Final = "SELECT DISTINCT dataset, dropped_before FROM {control}.slices WHERE dataset = ?"
_CLOCKS_AT_ONCE: Final = 3
_DATASETS: Final = "SELECT name, id, document FROM {control}.datasets"


@dataclass(slots=True, kw_only=True)
class KeyspaceState(DatasetState):
    """A dataset with its keyspace."""

    placement: Placement
    keyspace: str
    write_consistency: int
    read_consistency: int
    #: Whether replicas are in several data centers; known once the store is open.
    is_spread: bool = False


#: The time-out of a write in microseconds, and its table; the rest identifies a partition.
Lane = tuple[Any, ...]
_Rows = Batch[Lane, Any, BaseException | None]
#: Rows of one batch; bounds what one slow statement delays.
_BATCH_ROWS_MAX: Final = 100

#: Small batches of one turn share a statement, because a statement costs this process and the node
#: far more than a row. Servers warn of more than ten partitions and of 5 KiB.
_PARTITIONS_MAX: Final = 10
_ROWS_MAX: Final = 40
#: Failures that one partition may have caused for all that shared its statement.
_OF_ONE: Final = (StoreUnavailableError, SliceMissingError)


class CassandraSession(Directory[KeyspaceState]):
    """The state of one process, a copy of what it read from the cluster."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(clock)
        self.options = options
        self.connection = CassandraConnection(options)
        self.tally = self.connection.tally
        self.control = ControlKeyspace(self.connection, options.keyspace)
        self.statements: dict[tuple[int, str, int, int], Any] = {}
        self._clocks_read = 0
        #: Rows that are written, those of one partition together.
        # Of one partition up to four batches: a stream of rows to it does not wait for each answer.
        self.rows: Batcher[Lane, Any, BaseException | None] = Batcher(
            self._write_batches,
            name="Cassandra",
            items_max=_BATCH_ROWS_MAX,
            waiting_max=PENDING_WRITES_MAX,
            at_once=4,
        )
        self._stamped_us = 0

    async def open(self) -> None:
        """Connect, and check the schema's version. Raises as :meth:`counter.ports.Store.open`."""
        await self.connection.open()
        try:
            await check_version(self.connection, self.control)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of connections, and of what was prepared on them."""
        await self.connection.close()
        self.statements.clear()
        self.control.forget_statements()

    def queues(self) -> Mapping[str, int]:
        """Return how many statements wait because too many are in flight, and how many rows wait
        for others of their partition."""
        return {"store_statements": self.connection.waiting, "store_rows": self.rows.waiting}

    async def datasets(self) -> Sequence[Dataset]:
        await self.load_datasets()
        return [state.dataset for _, state in sorted(self.states.items())]

    async def read_clock(self) -> ClockReading:
        """Return the largest offset of some nodes' clocks; the next call asks others."""
        nodes = self.connection.near_nodes()
        if not nodes:
            raise StoreUnavailableError("no Cassandra node can be asked for the time")
        first = self._clocks_read % len(nodes)
        self._clocks_read += _CLOCKS_AT_ONCE
        asked = (nodes[first:] + nodes[:first])[:_CLOCKS_AT_ONCE]
        answers = await asyncio.gather(
            *(self.connection.clock_of(node, self.clock.now_us) for node in asked),
            return_exceptions=True,
        )
        readings = [_reading(*each) for each in answers if not isinstance(each, BaseException)]
        for each in answers:
            if isinstance(each, BaseException) and not readings:
                raise each
        return max(readings, key=_surely_off)

    # Statements. A template's {keyspace} is the dataset's, and {table} the events of the slice
    # that starts at *start_us*. They are cached.

    def to_write(self, dataset: Dataset, cql: str, start_us: int = 0) -> Awaitable[Any]:
        """Bind an idempotent write at the dataset's write consistency: it sets USING TIMESTAMP."""
        state = self.state_of(dataset)
        return self._prepared(state, cql, start_us, state.write_consistency)

    def to_read(self, dataset: Dataset, cql: str, start_us: int = 0) -> Awaitable[Any]:
        """Bind a read at the dataset's read consistency."""
        state = self.state_of(dataset)
        return self._prepared(state, cql, start_us, state.read_consistency)

    def to_find(self, dataset: Dataset, cql: str, start_us: int = 0) -> Awaitable[Any]:
        """Bind a read whose read repair makes what it finds as durable as an acknowledged write.

        So it is at the write consistency, or at the read consistency if that is ALL.
        """
        state = self.state_of(dataset)
        reads_all = state.read_consistency == ConsistencyLevel.ALL
        level = state.read_consistency if reads_all else state.write_consistency
        return self._prepared(state, cql, start_us, level)

    def to_compare(self, dataset: Dataset, cql: str, start_us: int = 0) -> Awaitable[Any]:
        """Bind a compare-and-set, SERIAL and then at write consistency. It is not idempotent."""
        state = self.state_of(dataset)
        level = state.write_consistency
        return self._prepared(state, cql, start_us, level, idempotent=False)

    def to_settle(self, dataset: Dataset, cql: str, start_us: int = 0) -> Awaitable[Any]:
        """Bind a SERIAL read: it sees every compare-and-set that returned before."""
        return self._prepared(self.state_of(dataset), cql, start_us, ConsistencyLevel.SERIAL)

    async def _prepared(
        self,
        state: KeyspaceState,
        cql: str,
        start_us: int,
        consistency: int,
        *,
        idempotent: bool = True,
    ) -> Any:
        key = (state.dataset.id, cql, start_us, consistency)
        known = self.statements.get(key)
        if known is None:
            text = cql.format(keyspace=state.keyspace, table=events_table(start_us))
            known = await self.connection.prepare(text, consistency, idempotent=idempotent)
            self.statements[key] = known
        return known

    # Datasets and their slices.

    async def load_datasets(self) -> None:
        """Read all datasets and their slices."""
        for name, dataset_id, text in await self.control.read(_DATASETS):
            if dataset_id not in self.states:
                dataset, placement = dataset_of(name, dataset_id, text)
                state = KeyspaceState(
                    dataset,
                    placement=placement,
                    keyspace=keyspace_of(self.options.keyspace, name),
                    write_consistency=ConsistencyLevel.name_to_value[placement.write_consistency],
                    read_consistency=ConsistencyLevel.name_to_value[placement.read_consistency],
                )
                state.reload = Coalesced(partial(self._load_slices, state))
                await state.reload()
                self.states[dataset_id] = state

    async def _load_slices(self, state: KeyspaceState) -> None:
        rows = await self.control.read(_SLICES, state.dataset.id)
        # A partition without slices still gives a row, for its static column.
        slices = [slice_from(start_us, text) for start_us, text, _ in rows if start_us is not None]
        state.read(slices, (rows[0][2] or 0) if rows else 0)
        starts = {each.start_us for each in state.slices}
        for key in [key for key in self.statements if key[0] == state.dataset.id and key[2]]:
            if key[2] not in starts:
                del self.statements[key]

    async def dropped_before(self, dataset: Dataset) -> int:
        """Read it again, because the copy may be stale. See :class:`counter.ports.ControlPlane`."""
        rows = await self.control.read(_DROPPED, dataset.id)
        return (rows[0][1] or 0) if rows else 0

    # Writes of rows.

    async def write(self, rows: Sequence[tuple[Lane, Any]]) -> None:
        """Write bound statements, each in its lane. Raises the first error."""
        for result in await self.rows.put_all(rows):
            if result is not None:
                raise result

    def _write_batches(self, batches: Sequence[_Rows]) -> None:
        tables: dict[Lane, list[_Rows]] = {}
        for batch in batches:
            timeout_us, table = batch.key[:2]
            # The caller waits for its mark and its name. A slice's table may be dropped.
            of_slice = table if isinstance(table, int) else None
            tables.setdefault((timeout_us, of_slice), []).append(batch)
        for sharing in chain.from_iterable(map(_shared, tables.values())):
            self._send_rows(sharing)

    def _send_rows(self, sharing: Sequence[_Rows]) -> None:
        """Write *sharing* by one statement, which is atomic per partition only."""
        statements = [statement for batch in sharing for statement in batch.items]
        statement = statements[0] if len(statements) == 1 else batch_of(statements)
        timeout_us, table = sharing[0].key[:2]
        if isinstance(table, int):
            # Events, of a slice.
            self.tally.commit_rows.observe(len(statements))
        done = partial(self._rows_sent, sharing, time.perf_counter())
        self.connection.stream.send(statement, timeout_us, done)

    def _rows_sent(
        self, sharing: Sequence[_Rows], began_s: float, error: BaseException | None
    ) -> None:
        if isinstance(sharing[0].key[1], int):
            self.tally.commit_seconds.observe(time.perf_counter() - began_s)
        if isinstance(error, _OF_ONE) and len(sharing) > 1:
            # One partition may have too few replicas, or no table: try each by itself.
            for batch in sharing:
                self._send_rows([batch])
            return
        for batch in sharing:
            batch.end_all(error)

    def stamp(self) -> int:
        """Return a write timestamp that is later than all returned before.

        With the same timestamp a deletion would win over a write, even over a later one.
        """
        self._stamped_us = max(self.clock.now_us(), self._stamped_us + 1)
        return self._stamped_us


def unavailable(result: BaseException | None) -> UnavailableError | None:
    """Return the store's error of one row, if any. Raises any other error."""
    if result is None or isinstance(result, UnavailableError):
        return result
    raise result


def _reading(before_us: int, node_us: int, after_us: int) -> ClockReading:
    """Convert a node's time in whole milliseconds: add half of one, with half of one as error."""
    offset_us = node_us + MILLISECOND // 2 - (before_us + after_us) // 2
    return ClockReading(offset_us, (after_us - before_us + MILLISECOND) // 2 + 1)


def _surely_off(reading: ClockReading) -> tuple[int, int]:
    """Return the least possible offset; among those of 0, the most precise is the largest."""
    return max(0, abs(reading.offset_us) - reading.error_us), -reading.error_us


def batch_of(statements: Sequence[Any]) -> BatchStatement:
    """Return bound *statements* as one that is idempotent, at the consistency of the first.

    Those of one partition are done all or none; those of several are not.
    """
    batch = BatchStatement(BatchType.UNLOGGED, consistency_level=statements[0].consistency_level)
    batch.is_idempotent = True
    for statement in statements:
        batch.add(statement)
    return batch


def _shared(batches: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    """Group *batches* by the statements that they share."""
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
