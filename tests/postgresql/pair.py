"""A primary and its synchronous standby with a clock that is behind."""

import asyncio
from typing import Any

import asyncpg

from counter.limits import SECOND
from scripts.postgresql_server import PostgresqlServer
from scripts.service_process import HOST
from tests.postgresql.test_faults import fresh_schema
from tests.support.waiting import eventually

BEHIND_US = 3 * SECOND
#: A clock that a setting of each server moves.
_CLOCK = (
    "CREATE OR REPLACE FUNCTION counter.clock_us() RETURNS bigint LANGUAGE sql VOLATILE AS"
    " $$SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    " - coalesce(current_setting('counter.behind_us', true)::bigint, 0)$$"
)


class Pair:
    """A primary with the schema, and its synchronous standby."""

    def __init__(self, primary: PostgresqlServer, standby: PostgresqlServer) -> None:
        self.primary, self.standby = primary, standby

    @property
    def dsn(self) -> str:
        """Both hosts; the one that writes is taken."""
        hosts = f"{HOST}:{self.primary.port},{HOST}:{self.standby.port}"
        return (
            self.primary.dsn().replace(f"{HOST}:{self.primary.port}", hosts)
            + "?target_session_attrs=read-write"
        )

    async def begin(self, **more: Any) -> None:
        await fresh_schema(self.primary.dsn(), **more)
        connection = await asyncpg.connect(self.primary.dsn())
        await connection.execute(_CLOCK)
        self.standby.make_folder()
        await asyncio.to_thread(
            self.primary.run,
            *("pg_basebackup", "-h", HOST, "-p", str(self.primary.port), "-U", "counter"),
            *("-D", str(self.standby.data), "-R", "--checkpoint=fast", "--no-sync"),
        )
        await asyncio.to_thread(self.standby.start, **{"counter.behind_us": str(BEHIND_US)})
        await connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await connection.execute("SELECT pg_reload_conf()")

        async def is_synchronous() -> bool:
            return bool(
                await connection.fetchval(
                    "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
                )
            )

        await eventually(is_synchronous, "the standby is synchronous")
        await connection.close()

    def fail_over(self) -> None:
        self.primary.kill()
        self.promote()

    def promote(self) -> None:
        self.standby.run("pg_ctl", "promote", "-D", str(self.standby.data))
