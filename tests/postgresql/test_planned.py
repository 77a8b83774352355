"""The sizes that docs/how-to/size-it.md computes with are those of a real server."""

import re
import uuid

from counter.storage.postgresql.database import PostgresqlOptions
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SETTINGS,
    SLICE,
    SLICES_END,
    add,
    slice_at,
)
from counter.testing.clock import FakeClock
from scripts.postgresql_server import PostgresqlServer
from tests.support.documents import page
from tests.support.postgresql import FreshStore

[(_EVENT_BYTES, _ROW_BYTES)] = [
    (int(event), int(row))
    for event, row in re.findall(
        r"event takes (\d+) bytes with its index entries, a window's row (\d+)",
        page("how-to/size-it.md"),
    )
]
_ROWS = 20_000
_AT_ONCE = 1_000


async def test_an_event_and_a_window_take_what_is_planned(postgresql: PostgresqlServer) -> None:
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await store.open()
    (dataset,) = await store.control.datasets()
    for start_us in range(FIRST_SLICE, SLICES_END, SLICE):
        await store.control.make_slices(dataset, slice_at(start_us))
    namespace = await store.control.create_namespace("tests", SETTINGS, NOW)
    assert namespace is not None
    one = add()
    for first in range(0, _ROWS, _AT_ONCE):
        events = [
            one._replace(
                counter=f"video-{number % 100:09d}",
                event_id=uuid.uuid4().bytes,
                event_time_us=one.event_time_us + number,
            )
            for number in range(first, first + _AT_ONCE)
        ]
        await store.events.append(namespace, events)
    assert await store._database.value("SELECT count(*) FROM {s}.events") == _ROWS
    event_bytes = await store._database.value(
        "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c"
        " WHERE relnamespace = '{s}'::regnamespace AND relkind = 'r' AND relname LIKE 'events%'"
    )
    assert 0.8 < event_bytes / _ROWS / _EVENT_BYTES < 1.2
    await store._database.rows(
        "INSERT INTO {s}.windows (namespace, counter, start, cleared, total)"
        " SELECT $1, 'video-' || lpad((n % 100)::text, 9, '0'), n * 1000000::bigint, false, 12345"
        " FROM generate_series(1, $2::integer) n",
        *(namespace.id, _ROWS),
    )
    row_bytes = await store._database.value("SELECT pg_total_relation_size('{s}.windows')")
    assert 0.8 < row_bytes / _ROWS / _ROW_BYTES < 1.2
    await store.close()
