"""The tables: a control keyspace, and a keyspace for each dataset.

Every table has an id made from its name, so that two processes that create it at once, or one that
tries again after a time-out, create the same table.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Final

SCHEMA_VERSION: Final = 1
_NAMESPACE: Final = uuid.UUID("9b0b6d6e-53c5-4f0a-8a53-6c2f1d1f6f6e")

#: Tables of the control keyspace. ``op`` tells whose compare-and-set made a row what it is.
CONTROL_TABLES: Mapping[str, str] = {
    "meta": "name text PRIMARY KEY, value text, op blob",
    "sequences": "name text PRIMARY KEY, next bigint, time bigint, issuer blob, op blob",
    "datasets": "name text PRIMARY KEY, id int, document text, op blob",
    "namespaces": "name text PRIMARY KEY, id bigint, version bigint, document text, op blob",
    # Deleted ones, until their data are gone.
    "departed": "id bigint PRIMARY KEY, document text",
    "slices": (
        "dataset int, start bigint, document text, op blob, dropped_before bigint static,"
        " PRIMARY KEY (dataset, start)"
    ),
    "leases": "slot text PRIMARY KEY, worker text, op blob",
    "workers": "everyone tinyint, worker text, PRIMARY KEY (everyone, worker)",
}

#: Tables of a dataset's keyspace.
DATASET_TABLES: Mapping[str, str] = {
    "dirty": (
        "namespace bigint, shard int, window_start bigint, counter text, recount bigint,"
        " PRIMARY KEY ((namespace, shard, window_start), counter, recount)"
    ),
    # The items of an atomic add are one cell; two lists under one token are two rows.
    "atomic_marks": (
        "namespace bigint, shard int, window_start bigint,"
        " event_time bigint, event_id blob, atom blob, items blob,"
        " PRIMARY KEY ((namespace, shard, window_start), event_time, event_id, atom)"
    ),
    # Written with the watermark itself as write timestamp: it only moves forward.
    "watermarks": ("namespace bigint, shard int, through bigint, PRIMARY KEY (namespace, shard)"),
    # What one read or one batch must see together; kinds are in counts.py.
    "counts": (
        "namespace bigint, counter text, kind tinyint, t bigint, u bigint, cell blob,"
        " PRIMARY KEY ((namespace, counter), kind, t, u)"
    ),
    # The counter is empty where the token is an atomic add's.
    "resolutions": (
        "namespace bigint, counter text, event_time bigint, event_id blob,"
        " outcome text, fingerprint blob, op blob,"
        " PRIMARY KEY ((namespace, counter, event_time, event_id))"
    ),
    "keys": (
        "namespace bigint, nonce blob, time bigint, expires bigint, op blob,"
        " PRIMARY KEY ((namespace, nonce))"
    ),
    "names": (
        "namespace bigint, bucket int, counter text, PRIMARY KEY ((namespace, bucket), counter)"
    ),
}

#: A slice's table. delta and clear are told apart by which is there; a row with neither is void.
EVENTS_TABLE: Final = (
    "namespace bigint, counter text, time_bucket bigint, event_bucket int,"
    " event_time bigint, event_id blob, item int, delta bigint, clear tinyint, atom blob,"
    " PRIMARY KEY ((namespace, counter, time_bucket, event_bucket), event_time, event_id, item)"
)
EVENTS_OPTIONS: Final = "CLUSTERING ORDER BY (event_time DESC, event_id ASC, item ASC)"

_KEYSPACE: Final = re.compile(r"[a-z][a-z0-9_]{0,47}", re.ASCII)


def keyspace_of(control: str, dataset: str) -> str:
    """The keyspace of a dataset's data."""
    return f"{control}_{dataset}".replace("-", "_")


def events_table(start_us: int) -> str:
    """The table of the slice that starts at *start_us*."""
    return f"events_{start_us}"


def table_id(keyspace: str, table: str) -> uuid.UUID:
    """The id of a table, the same wherever it is created."""
    return uuid.uuid5(_NAMESPACE, f"{keyspace}.{table}")
