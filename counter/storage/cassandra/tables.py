"""The tables, and how an event is written to and read from a row.

A row's write timestamp is the event's own time, so that every attempt writes the same row. A row
with neither delta nor clear is void: it exists, and readers ignore it.
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
from counter.types import Dataset, Event, Slice
from counter.windows import event_bucket_of, window_of

Packer = Callable[[Any], bytes]

BIGINT: Final = struct.Struct(">q").pack
INT: Final = struct.Struct(">i").pack
TINYINT: Final = struct.Struct(">b").pack
TEXT: Final = str.encode
#: Bytes are packed as they are, without a copy.
BLOB: Final = bytes


def bound(prepared: Any, packers: Sequence[Packer], values: Sequence[Any]) -> Any:
    """Bind *prepared* to *values*, each packed by its packer."""
    if type(prepared) is not PreparedStatement:
        # A test's stand-in for the driver binds in its own way.
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
#: By (clear, part of an atomic add): an omitted column leaves no tombstone.
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
#: All items of one token on some counters, whose partitions differ only in the counter.
SELECT_ITEMS: Final = (
    "SELECT counter, item, delta, clear, atom FROM {keyspace}.{table}"
    " WHERE namespace = ? AND counter IN ? AND time_bucket = ? AND event_bucket = ?"
    " AND event_time = ? AND event_id = ?"
)
DELETE: Final = f"DELETE FROM {{keyspace}}.{{table}} USING TIMESTAMP ? WHERE {ROW_IS}"

#: Columns of the rows that a compare-and-set returns if it is not applied: keys in their order,
#: then the others by name.
_SHOWN_KEY: Final = slice(5, 8)
_SHOWN_CELLS: Final = slice(8, 11)


class Place(NamedTuple):
    """The partition of an event, and the slice with its table."""

    start_us: int
    namespace: int
    counter: str
    time_bucket: int
    event_bucket: int


def place_of(each: Slice, namespace_id: int, event: Event) -> Place:
    """Return the partition of *event* in slice *each*."""
    return Place(
        each.start_us,
        namespace_id,
        event.counter,
        window_of(event.event_time_us, each.time_bucket_us),
        event_bucket_of(event.event_id, each.event_buckets),
    )


def form_of(event: Event) -> tuple[bool, bool]:
    """Return the form of insert for *event*."""
    return (event.clear, event.atom is not None)


def key_of(place: Place, event: Event) -> tuple[Any, ...]:
    """Return the primary key of *event*."""
    return (*place[1:], event.event_time_us, event.event_id, event.item_key)


def cells_of(event: Event) -> tuple[Any, ...]:
    """Return the values of the columns after the key in its form of insert."""
    value = 1 if event.clear else event.delta
    return (value,) if event.atom is None else (value, event.atom)


def insert_of(prepared: Any, place: Place, event: Event) -> Any:
    """Return the form of :data:`INSERT` that writes *event*, at its own time."""
    values = (*key_of(place, event), *cells_of(event), event.event_time_us)
    return bound(prepared, _PACKERS[form_of(event)], values)


def event_of(
    counter: str,
    identity: Sequence[Any],
    delta: int | None,
    clear: int | None,
    atom: bytes | None,
) -> Event | None:
    """Return the event of a row; None if it is void. A clear's delta is ignored."""
    time_us, event_id, item_key = identity
    if clear is not None:
        return Event(counter, time_us, event_id, item_key, 0, True, atom)
    if delta is None:
        return None
    return Event(counter, time_us, event_id, item_key, delta, False, atom)


def shown(row: Sequence[Any]) -> tuple[tuple[Any, ...], Event | None]:
    """Return the identity and event of a row because of which a compare-and-set was not applied."""
    identity = tuple(row[_SHOWN_KEY])
    atom, clear, delta = row[_SHOWN_CELLS]
    return identity, event_of(row[2], identity, delta, clear, atom)


#: A program of version 2 does not know cancelled tokens, and must not be started beside them.
SCHEMA_VERSION: Final = 3
_NAMESPACE: Final = uuid.UUID("9b0b6d6e-53c5-4f0a-8a53-6c2f1d1f6f6e")

#: Cassandra's own default.
_GRACE_US: Final = 10 * DAY
#: How long hints are kept for a node that was down. A tombstone must live at least as long;
#: otherwise it could be purged before the write that it hides arrives.
_HINTS_US: Final = 3 * HOUR

_COMPACTION: Final = "{{'class': 'UnifiedCompactionStrategy', 'scaling_parameters': '{}'}}"
#: For rows that are rarely rewritten: compact late.
_WRITTEN_ONCE: Final = _COMPACTION.format("T4")
#: For rows that are often rewritten: compact early, so that a read needs few files.
_OVERWRITTEN: Final = _COMPACTION.format("L4")


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, primary key and options of a table."""

    columns: str
    compaction: str = _OVERWRITTEN
    grace_us: int = _GRACE_US
    order: str = ""


#: Tables of the control keyspace. ``op`` identifies the compare-and-set that last changed a row.
CONTROL_TABLES: Mapping[str, Table] = {
    "meta": Table("name text PRIMARY KEY, value text, op blob"),
    "sequences": Table("name text PRIMARY KEY, next bigint, time bigint, issuer blob, op blob"),
    "datasets": Table("name text PRIMARY KEY, id int, document text, op blob"),
    "namespaces": Table("name text PRIMARY KEY, id bigint, version bigint, document text, op blob"),
    # Deleted namespaces, until their data is purged.
    "departed": Table("id bigint PRIMARY KEY, document text"),
    "slices": Table(
        "dataset int, start bigint, document text, op blob, dropped_before bigint static,"
        " PRIMARY KEY (dataset, start)"
    ),
    # Partition sizes: of each slice the largest counted and the largest observed one, written with
    # the size as timestamp. (Releases called them crowds, and the table keeps its name.)
    "crowds": Table(
        "dataset int, start bigint, observed tinyint, document text,"
        " PRIMARY KEY (dataset, start, observed)",
        grace_us=_HINTS_US,
    ),
    # Rows expire on all nodes at the same time, so none comes back after its tombstone is purged.
    "workers": Table(
        "everyone tinyint, worker text, PRIMARY KEY (everyone, worker)", grace_us=_HINTS_US
    ),
    # In one partition, because each process reads all of them repeatedly.
    "api_keys": Table(
        "everyone tinyint, id text, document text, op blob, used bigint, PRIMARY KEY (everyone, id)"
    ),
}

#: Tables of a dataset's keyspace.
DATASET_TABLES: Mapping[str, Table] = {
    # A partition is written in one window, read once and deleted. If it came back, it would be
    # before the watermark and never read: so its tombstone need only outlive hints.
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
    # The watermark is its own write timestamp, so it only moves forward.
    "watermarks": Table(
        "namespace bigint, shard int, through bigint, PRIMARY KEY (namespace, shard)"
    ),
    # What one read or one batch must see together; kinds are in counts.py.
    "counts": Table(
        "namespace bigint, counter text, kind tinyint, t bigint, u bigint, cell blob,"
        " PRIMARY KEY ((namespace, counter), kind, t, u)"
    ),
    # The counter is empty for the token of an atomic add.
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

#: A slice's table. A row has either delta or clear; a row with neither is void.
_EVENTS_COLUMNS: Final = (
    "namespace bigint, counter text, time_bucket bigint, event_bucket int,"
    " event_time bigint, event_id blob, item int, delta bigint, clear tinyint, atom blob,"
    " PRIMARY KEY ((namespace, counter, time_bucket, event_bucket), event_time, event_id, item)"
)
_EVENTS_ORDER: Final = "event_time DESC, event_id ASC, item ASC"

_KEYSPACE: Final = re.compile(r"[a-z][a-z0-9_]{0,47}", re.ASCII)
_COLUMN: Final = re.compile(r"(\w+) (bigint|int|tinyint|text|blob)( static)?(?: PRIMARY KEY)?")


def keyspace_of(control: str, dataset: str) -> str:
    """Return the keyspace of a dataset."""
    return f"{control}_{dataset}".replace("-", "_")


def is_keyspace(name: str) -> bool:
    """Return whether *name* can name a keyspace without quotes."""
    return _KEYSPACE.fullmatch(name) is not None


def events_table(start_us: int) -> str:
    """Return the table of the slice that starts at *start_us*."""
    return f"events_{start_us}"


def events_of(dataset: Dataset) -> Table:
    """Return the options of a table of events.

    Its tombstones hide voided writes that may land as long as the table exists, so they are kept as
    long. It is dropped whole, so TimeWindowCompactionStrategy would have no benefit.
    """
    grace_us = max(_GRACE_US, dataset.retention_us + 2 * dataset.slice_us)
    return Table(_EVENTS_COLUMNS, _WRITTEN_ONCE, grace_us, _EVENTS_ORDER)


def create_table(keyspace: str, name: str, table: Table) -> str:
    """Return the statement that creates *table* if it does not exist."""
    options = [
        f"ID = {table_id(keyspace, name)}",
        f"gc_grace_seconds = {table.grace_us // SECOND}",
        f"compaction = {table.compaction}",
        # Reads at a quorum are monotonic.
        "read_repair = 'BLOCKING'",
        # A coordinator asks one more replica after this time. The default is the percentile alone:
        # 2.5 s in a table that was not read yet, and as long as reads took while a node was silent.
        "speculative_retry = 'MIN(99p,50ms)'",
        # Reads compare the checksums of compressed tables only.
        "compression = {'class': 'LZ4Compressor'}",
        "crc_check_chance = 1.0",
    ]
    if table.order:
        options.append(f"CLUSTERING ORDER BY ({table.order})")
    stated = " AND ".join(options)
    return f"CREATE TABLE IF NOT EXISTS {keyspace}.{name} ({table.columns}) WITH {stated}"


def columns_of(table: Table) -> Mapping[str, str]:
    """Return the type of each column."""
    return {name: kind + static for name, kind, static in _COLUMN.findall(table.columns)}


def table_id(keyspace: str, table: str) -> uuid.UUID:
    """Return the id of a table, the same in every process that creates it."""
    return uuid.uuid5(_NAMESPACE, f"{keyspace}.{table}")
