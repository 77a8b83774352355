"""Functions and operators that another role put in ``public`` are never called."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import asyncpg
import pytest

from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.schema import apply_schema, begin_new_life
from counter.storage.postgresql.server import check_server
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import DATASET, NOW
from counter.testing.clock import FakeClock
from scripts.postgresql_server import PostgresqlServer
from tests.postgresql.test_pooler import pooler
from tests.postgresql.test_role import use_all

_ARRAYS: Final = ("text[]", "integer[]", "bigint[]", "bytea[]")
_PLANTED: Final = (
    ("hashtextextended", "text, integer", "bigint"),
    ("setval", "regclass, integer", "bigint"),
    *(("unnest", each, f"SETOF {each.removesuffix('[]')}") for each in _ARRAYS),
    ("is_equal", "oid, regclass", "boolean"),
)
_BODY: Final = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted %', '{}'; END $$"


@pytest.fixture(autouse=True)
async def planted(postgresql: PostgresqlServer) -> AsyncIterator[None]:
    """The rights of PostgreSQL 14, which a role uses; no schema of the service."""
    owner = await asyncpg.connect(postgresql.dsn())
    await owner.execute("DROP SCHEMA IF EXISTS counter CASCADE; CREATE ROLE planter LOGIN")
    await owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    planter = await asyncpg.connect(postgresql.dsn(user="planter"))
    for name, arguments, returned in _PLANTED:
        await planter.execute(
            f"CREATE FUNCTION public.{name}({arguments}) RETURNS {returned} {_BODY.format(name)}"
        )
    await planter.execute(
        "CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.is_equal)"
    )
    await planter.close()
    # A wait for appends then looks at a lock.
    await owner.execute("SELECT pg_advisory_lock_shared(1, 1)")
    yield
    await owner.execute("DROP OWNED BY planter; DROP ROLE planter")
    await owner.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    await owner.close()


@asynccontextmanager
async def _dsn_of(server: PostgresqlServer, is_pooled: bool) -> AsyncIterator[str]:
    if not is_pooled:
        yield server.dsn()
        return
    async with pooler(server) as port:
        yield server.dsn().replace(str(server.port), str(port))


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_no_call_uses_planted_objects(postgresql: PostgresqlServer, is_pooled: bool) -> None:
    async with _dsn_of(postgresql, is_pooled) as dsn:
        database = PostgresqlDatabase(PostgresqlOptions(dsn))
        await database.open()
        await apply_schema(database, [DATASET])
        warnings = await check_server(database)
        await database.close()
        settings = PostgresqlSettings.model_validate({"store": "postgresql", "dsn": dsn})
        await begin_new_life(settings)
        store = PostgresqlStore(PostgresqlOptions(dsn), FakeClock(NOW))
        await store.open()
        # The real clock is past all of the test's times.
        await store._database.rows(
            "CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE sql VOLATILE"
            f" AS 'SELECT {NOW}::bigint'"
        )
        await use_all(store)
        await store.close()
    warned = [each for each in warnings if "can create functions in public, " in each]
    assert bool(warned) == is_pooled
