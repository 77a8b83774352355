"""An event as a row: where it lies, how it is written, what is read of it.

A row is written with the event's own time as write timestamp, so that every attempt at it writes
the same. One with neither delta nor clear is void: it keeps its place, and nobody sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from counter.partitions import event_bucket_of
from counter.storage.cassandra.packing import BIGINT, BLOB, INT, TEXT, TINYINT, Packer, bound
from counter.types import Event, Slice
from counter.windows import window_of

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
