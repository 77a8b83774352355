"""Wait for appends that were admitted before an instant: the fence of the rollup and of decisions.

Every append shares its dataset's advisory lock until it commits, and reads the clock after it has
the lock; its clock is never earlier than the dataset's fence row. So once the fence row is T and
all who held the lock then are gone, no append that decides by an earlier clock can commit any more.
A stalled append delays only the one who waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from counter.errors import StoreUnavailableError
from counter.limits import SECOND, TIME_MAX_US
from counter.storage.postgresql.database import PostgresqlDatabase

_HOLDERS: Final = (
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND classid = '{s}.datasets'::regclass::oid AND mode = 'ShareLock'"
    " AND ($1::integer IS NULL OR objid = $1::integer::oid)"
)
STILL: Final = _HOLDERS + " AND virtualtransaction = ANY($2::text[])"
_PAUSE_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


async def pass_fence(database: PostgresqlDatabase, at_most_us: int = TIME_MAX_US) -> int:
    """Return a clock T: every append that commits later decides by a clock of at least T.

    T is the server's clock, or *at_most_us* if that is earlier and the fence is not later already.
    """
    time_us: int = await database.value(
        "WITH clock AS MATERIALIZED (SELECT least({s}.clock_us(), $1::bigint) AS now),"
        " moved AS (UPDATE {s}.datasets d"
        " SET fence = greatest(d.fence, clock.now) FROM clock RETURNING d.fence)"
        " SELECT coalesce(min(fence), (SELECT now FROM clock)) FROM moved",
        at_most_us,
    )
    await wait_for_appends(database)
    return time_us


async def wait_for_appends(database: PostgresqlDatabase, dataset_id: int | None = None) -> None:
    """Wait until all appends that are under way now, to one dataset or to any, have ended.

    Raises StoreUnavailableError if one takes longer than any statement may.
    """
    rows = await database.rows(_HOLDERS, dataset_id)
    deadline_s = asyncio.get_running_loop().time() + 2 * database.options.timeout_us / SECOND
    pause_s = _PAUSE_S
    while rows:
        if asyncio.get_running_loop().time() > deadline_s:
            raise StoreUnavailableError(
                "PostgreSQL: an append has been under way for too long; what waits for it is tried"
                " again",
                retry_after_us=SECOND,
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        rows = await database.rows(STILL, dataset_id, [row[0] for row in rows])
