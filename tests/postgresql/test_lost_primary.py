"""A server that is the primary no longer answers no read, whatever the DSN names first."""

import asyncio
from contextlib import ExitStack
from typing import Final
from unittest.mock import patch

import asyncpg
import pytest

from counter.clock import SystemClock
from counter.errors import StoreUnavailableError
from counter.storage.postgresql import session
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from tests.postgresql.pair import Pair
from tests.postgresql.test_faults import added, service
from tests.support.rest import Rest
from tests.support.waiting import eventually

#: No connection proves again that its server is the primary.
_NEVER_S: Final = 1e9


async def _reads(rest: Rest, *, old: int, new: int) -> None:
    """Read until the promoted server is asked; no response may be the old one's."""

    async def is_read() -> bool:
        answer = await rest.get("c")
        assert answer.status_code == 503 or answer.json()["count"] != old, answer.text
        return answer.status_code == 200 and answer.json()["count"] == new

    await eventually(is_read, "the promoted server is read")


async def test_an_old_primary_that_boots_again_is_not_read(pair: Pair) -> None:
    await pair.begin()
    async with service(pair.dsn) as rest:
        await added(rest, "before")
        await asyncio.to_thread(pair.fail_over)
        for number in range(5):
            await added(rest, f"k{number}")
    await asyncio.to_thread(pair.primary.start)
    async with service(pair.dsn) as rest:
        await _reads(rest, old=1, new=6)
    alone = PostgresqlStore(PostgresqlOptions(pair.primary.dsn()), SystemClock())
    with pytest.raises(StoreUnavailableError, match=r"confirms no commit.*synchronous_standby"):
        await alone.open()


async def test_a_primary_whose_standby_was_promoted_is_not_read(pair: Pair) -> None:
    """It still runs, and the process is connected to it."""
    await pair.begin()
    with ExitStack() as stack:
        async with service(pair.dsn) as rest:
            await added(rest, "before")
            assert await rest.count("c") == 1
            await asyncio.to_thread(pair.promote)
            async with service(pair.standby.dsn()) as other:
                await added(other, "after")
            stack.enter_context(patch.object(session, "_PROVEN_S", 0))
            await _reads(rest, old=1, new=2)
            await added(rest, "here")


@pytest.mark.parametrize("proven_s", [0, _NEVER_S], ids=["by a read", "by a write"])
async def test_a_primary_that_becomes_read_only_is_left(pair: Pair, proven_s: float) -> None:
    await pair.begin()
    async with service(pair.dsn) as rest:
        await added(rest, "before")
        operator = await asyncpg.connect(pair.primary.dsn())
        await operator.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await operator.execute("SELECT pg_reload_conf()")

        async def is_read_only() -> bool:
            return bool(await operator.fetchval("SHOW transaction_read_only") == "on")

        await eventually(is_read_only, "the settings are read")
        await asyncio.to_thread(pair.promote)
        with patch.object(session, "_PROVEN_S", proven_s):
            if proven_s:
                await added(rest, "after")
            else:
                async with service(pair.standby.dsn()) as other:
                    await added(other, "after")
            await _reads(rest, old=1, new=2)
        await operator.close()
