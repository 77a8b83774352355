"""The tables: a control keyspace, and a keyspace for each dataset.

Every table has an id made from its name, so that two processes that create it at once, or one that
tries again after a time-out, create the same table.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from counter.limits import DAY, HOUR, SECOND
from counter.types import Dataset

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
