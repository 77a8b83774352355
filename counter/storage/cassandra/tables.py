"""The tables, and an event as a row of one: its partition, how it is written, what is read of it.

A row is written with the event's own time as write timestamp, so that every attempt at it writes
the same. One with neither delta nor clear is void: it keeps its place, and nobody sees it.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cassandra.query import BoundStatement, PreparedStatement

from counter.limits import DAY, HOUR, SECOND
from counter.partitions import event_bucket_of
from counter.types import Dataset, Event, Slice
from counter.windows import window_of

Packer = Callable[[Any], bytes]

BIGINT: Final = struct.Struct(">q").pack
INT: Final = struct.Struct(">i").pack
TINYINT: Final = struct.Struct(">b").pack
TEXT: Final = str.encode
#: Bytes are their own packing: this makes no copy.
BLOB: Final = bytes


def bound(prepared: Any, packers: Sequence[Packer], values: Sequence[Any]) -> Any:
    """*prepared* bound to *values*, each packed by its packer."""
    if type(prepared) is not PreparedStatement:
        # What stands in for the driver's own binds as it likes.
        return prepared.bind(values)
    statement = BoundStatement(prepared)
    statement.values = [pack(value) for pack, value in zip(packers, values, strict=True)]
    return statement


_PARTITION: Final = "namespace, counter, time_bucket, event_bucket"
_KEY: Final = f"{_PARTITION}, event_time, event_id, item"
PARTITION_IS: Final = "namespace = ? AND counter = ? AND time_bucket = ? AND event_bucket = ?"
ROW_IS: Final = f"{PARTITION_IS} AND event_time = ? AND event_id = ? AND item = ?"


def _insert(columns: str, condition: str) -> str:
    marks = ", ".join("?" * (7 + columns.count(",")))
    return f"INSERT INTO {{keyspace}}.{{table}} ({_KEY}{columns}) VALUES ({marks}) {condition}"


_STAMPED: Final = "USING TIMESTAMP ?"
_CONDITIONAL: Final = "IF NOT EXISTS"
#: By (clear, part of an atomic add): a column that is not named leaves no tombstone.
_COLUMNS: Mapping[tuple[bool, bool], str] = {
    (False, False): ", delta",
    (False, True): ", delta, atom",
    (True, False): ", clear",
    (True, True): ", clear, atom",
}
INSERT: Mapping[tuple[bool, bool], str] = {
    form: _insert(columns, _STAMPED) for form, columns in _COLUMNS.items()
}
INSERT_NEW: Mapping[tuple[bool, bool], str] = {
    form: _insert(columns, _CONDITIONAL) for form, columns in _COLUMNS.items()
}

_KEY_PACKERS: Final = (BIGINT, TEXT, BIGINT, INT, BIGINT, BLOB, INT)
_PACKERS: Mapping[tuple[bool, bool], Sequence[Packer]] = {
    (False, False): (*_KEY_PACKERS, BIGINT, BIGINT),
    (False, True): (*_KEY_PACKERS, BIGINT, BLOB, BIGINT),
    (True, False): (*_KEY_PACKERS, TINYINT, BIGINT),
    (True, True): (*_KEY_PACKERS, TINYINT, BLOB, BIGINT),
}

SELECT: Final = f"SELECT delta, clear, atom FROM {{keyspace}}.{{table}} WHERE {ROW_IS}"
#: All items of one token on some counters: their partitions differ in the counter alone.
SELECT_ITEMS: Final = (
    "SELECT counter, item, delta, clear, atom FROM {keyspace}.{table}"
    " WHERE namespace = ? AND counter IN ? AND time_bucket = ? AND event_bucket = ?"
    " AND event_time = ? AND event_id = ?"
)
DELETE: Final = f"DELETE FROM {{keyspace}}.{{table}} USING TIMESTAMP ? WHERE {ROW_IS}"

#: Columns of the rows that a compare-and-set which was not applied shows: keys as they are
#: declared, then the others by name.
_SHOWN_KEY: Final = slice(5, 8)
_SHOWN_CELLS: Final = slice(8, 11)


class Place(NamedTuple):
    """The partition of an event, and the slice whose table it is in."""

    start_us: int
    namespace: int
    counter: str
    time_bucket: int
    event_bucket: int


def place_of(each: Slice, namespace_id: int, event: Event) -> Place:
    """Where *event* lies in slice *each*."""
    return Place(
        each.start_us,
        namespace_id,
        event.counter,
        window_of(event.event_time_us, each.time_bucket_us),
        event_bucket_of(event.event_id, each.event_buckets),
    )


def form_of(event: Event) -> tuple[bool, bool]:
    """Which of the inserts writes *event*."""
    return (event.clear, event.atom is not None)


def key_of(place: Place, event: Event) -> tuple[Any, ...]:
    """The primary key of *event*."""
    return (*place[1:], event.event_time_us, event.event_id, event.item_key)


def cells_of(event: Event) -> tuple[Any, ...]:
    """The values of the columns that its form of insert names after the key."""
    value = 1 if event.clear else event.delta
    return (value,) if event.atom is None else (value, event.atom)


def insert_of(prepared: Any, place: Place, event: Event) -> Any:
    """The form of :data:`INSERT` that writes *event*, at its own time."""
    values = (*key_of(place, event), *cells_of(event), event.event_time_us)
    return bound(prepared, _PACKERS[form_of(event)], values)


def event_of(
    counter: str,
    identity: Sequence[Any],
    delta: int | None,
    clear: int | None,
    atom: bytes | None,
) -> Event | None:
    """The event of a row; None where it is void. A clear's delta is nobody's business."""
    time_us, event_id, item_key = identity
    if clear is not None:
        return Event(counter, time_us, event_id, item_key, 0, True, atom)
    if delta is None:
        return None
    return Event(counter, time_us, event_id, item_key, delta, False, atom)


def shown(row: Sequence[Any]) -> tuple[tuple[Any, ...], Event | None]:
    """The identity and event of a row that stood in the way of a compare-and-set."""
    identity = tuple(row[_SHOWN_KEY])
    atom, clear, delta = row[_SHOWN_CELLS]
    return identity, event_of(row[2], identity, delta, clear, atom)


SCHEMA_VERSION: Final = 2
_NAMESPACE: Final = uuid.UUID("9b0b6d6e-53c5-4f0a-8a53-6c2f1d1f6f6e")

#: Cassandra's own default.
_GRACE_US: Final = 10 * DAY
#: For how long a node that was down is told what it missed. Tombstones that go sooner than that
#: could be gone when the write that they hide arrives; hints are kept no longer than tombstones.
_HINTS_US: Final = 3 * HOUR

_COMPACTION: Final = "{{'class': 'UnifiedCompactionStrategy', 'scaling_parameters': '{}'}}"
#: Few writes of the same row: merge late, so that each row is rewritten seldom.
_WRITTEN_ONCE: Final = _COMPACTION.format("T4")
#: The same rows again and again: merge soon, so that a read finds them in few files.
_OVERWRITTEN: Final = _COMPACTION.format("L4")


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and primary key, and how the table is kept."""

    columns: str
    compaction: str = _OVERWRITTEN
    grace_us: int = _GRACE_US
    order: str = ""


#: Tables of the control keyspace. ``op`` tells whose compare-and-set made a row what it is.
CONTROL_TABLES: Mapping[str, Table] = {
    "meta": Table("name text PRIMARY KEY, value text, op blob"),
    "sequences": Table("name text PRIMARY KEY, next bigint, time bigint, issuer blob, op blob"),
    "datasets": Table("name text PRIMARY KEY, id int, document text, op blob"),
    "namespaces": Table("name text PRIMARY KEY, id bigint, version bigint, document text, op blob"),
    # Deleted ones, until their data are gone.
    "departed": Table("id bigint PRIMARY KEY, document text"),
    "slices": Table(
        "dataset int, start bigint, document text, op blob, dropped_before bigint static,"
        " PRIMARY KEY (dataset, start)"
    ),
    # Of each slice the largest crowd that was counted and the largest that was observed: each is
    # written with its size as timestamp.
    "crowds": Table(
        "dataset int, start bigint, observed tinyint, document text,"
        " PRIMARY KEY (dataset, start, observed)",
        grace_us=_HINTS_US,
    ),
    # What expires does so on every node at once: nothing comes back when its tombstone is gone.
    "workers": Table(
        "everyone tinyint, worker text, PRIMARY KEY (everyone, worker)", grace_us=_HINTS_US
    ),
    # All in one partition: each process reads them all, again and again.
    "api_keys": Table(
        "everyone tinyint, id text, document text, op blob, used bigint, PRIMARY KEY (everyone, id)"
    ),
}

#: Tables of a dataset's keyspace.
DATASET_TABLES: Mapping[str, Table] = {
    # A partition is written in one window, read once and deleted. One that came back would lie
    # before the watermark, where nobody reads: so its tombstone may go as soon as hints have.
    "dirty": Table(
        "namespace bigint, shard int, window_start bigint, counter text, recount bigint,"
        " PRIMARY KEY ((namespace, shard, window_start), counter, recount)",
        _WRITTEN_ONCE,
        _HINTS_US,
    ),
    # The items of an atomic add are one cell; two lists under one token are two rows.
    "atomic_marks": Table(
        "namespace bigint, shard int, window_start bigint,"
        " event_time bigint, event_id blob, atom blob, items blob,"
        " PRIMARY KEY ((namespace, shard, window_start), event_time, event_id, atom)",
        _WRITTEN_ONCE,
        _HINTS_US,
    ),
    # Written with the watermark itself as write timestamp: it only moves forward.
    "watermarks": Table(
        "namespace bigint, shard int, through bigint, PRIMARY KEY (namespace, shard)"
    ),
    # What one read or one batch must see together; kinds are in counts.py.
    "counts": Table(
        "namespace bigint, counter text, kind tinyint, t bigint, u bigint, cell blob,"
        " PRIMARY KEY ((namespace, counter), kind, t, u)"
    ),
    # The counter is empty where the token is an atomic add's.
    "resolutions": Table(
        "namespace bigint, counter text, event_time bigint, event_id blob,"
        " outcome text, fingerprint blob, op blob,"
        " PRIMARY KEY ((namespace, counter, event_time, event_id))",
        _WRITTEN_ONCE,
    ),
    "keys": Table(
        "namespace bigint, nonce blob, time bigint, expires bigint, op blob,"
        " PRIMARY KEY ((namespace, nonce))",
        _WRITTEN_ONCE,
    ),
    "names": Table(
        "namespace bigint, bucket int, counter text, PRIMARY KEY ((namespace, bucket), counter)",
        _WRITTEN_ONCE,
    ),
}

#: A slice's table. delta and clear are told apart by which is there; a row with neither is void.
_EVENTS_COLUMNS: Final = (
    "namespace bigint, counter text, time_bucket bigint, event_bucket int,"
    " event_time bigint, event_id blob, item int, delta bigint, clear tinyint, atom blob,"
    " PRIMARY KEY ((namespace, counter, time_bucket, event_bucket), event_time, event_id, item)"
)
_EVENTS_ORDER: Final = "event_time DESC, event_id ASC, item ASC"

_KEYSPACE: Final = re.compile(r"[a-z][a-z0-9_]{0,47}", re.ASCII)
_COLUMN: Final = re.compile(r"(\w+) (bigint|int|tinyint|text|blob)( static)?(?: PRIMARY KEY)?")


def keyspace_of(control: str, dataset: str) -> str:
    """The keyspace of a dataset's data."""
    return f"{control}_{dataset}".replace("-", "_")


def is_keyspace(name: str) -> bool:
    """Whether *name* can be the name of a keyspace without quotes."""
    return _KEYSPACE.fullmatch(name) is not None


def events_table(start_us: int) -> str:
    """The table of the slice that starts at *start_us*."""
    return f"events_{start_us}"


def events_of(dataset: Dataset) -> Table:
    """How a table of events is kept.

    Its tombstones hide voided writes that may land as long as the table is there, so they stay as
    long. It goes whole, so files of one time (TimeWindowCompactionStrategy) would gain nothing.
    """
    grace_us = max(_GRACE_US, dataset.retention_us + 2 * dataset.slice_us)
    return Table(_EVENTS_COLUMNS, _WRITTEN_ONCE, grace_us, _EVENTS_ORDER)


def create_table(keyspace: str, name: str, table: Table) -> str:
    """The statement that creates *table*, or does nothing where it is."""
    options = [
        f"ID = {table_id(keyspace, name)}",
        f"gc_grace_seconds = {table.grace_us // SECOND}",
        f"compaction = {table.compaction}",
        # What one read saw at a quorum, the next one sees.
        "read_repair = 'BLOCKING'",
    ]
    if table.order:
        options.append(f"CLUSTERING ORDER BY ({table.order})")
    stated = " AND ".join(options)
    return f"CREATE TABLE IF NOT EXISTS {keyspace}.{name} ({table.columns}) WITH {stated}"


def columns_of(table: Table) -> Mapping[str, str]:
    """Each column and its type."""
    return {name: kind + static for name, kind, static in _COLUMN.findall(table.columns)}


def table_id(keyspace: str, table: str) -> uuid.UUID:
    """The id of a table, the same wherever it is created."""
    return uuid.uuid5(_NAMESPACE, f"{keyspace}.{table}")
