"""Make the schema of PostgreSQL; any number of processes may do it at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import asyncpg

from counter.errors import RefusedError, StartupError, StoreUnavailableError
from counter.storage.postgresql.database import PostgresqlDatabase, postgresql_options
from counter.storage.postgresql.server import check_server
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.storage.postgresql.settings import PostgresqlSettings

#: Raise it when tables or functions change; a change of tables needs a step in apply_schema.
SCHEMA_VERSION: Final = 8
#: The version that has the table of holds.
_HOLDS_SINCE: Final = 8
#: Ids of namespaces and datasets, and versions for If-Match, that may have been issued since.
_JUMP: Final = 1_000_000


async def apply_for(settings: PostgresqlSettings) -> Sequence[str]:
    """Apply the schema of *settings*; return what was done. Raises StartupError and
    StoreUnavailableError."""
    async with _opened(settings) as database:
        return await apply_schema(database, settings.datasets())


async def begin_new_life(settings: PostgresqlSettings) -> None:
    """Make sure that the restored schema of *settings* issues nothing that was issued before.

    Tokens get another issuer, and a time not before now. Raises StartupError and
    StoreUnavailableError.
    """

    async def begin(connection: asyncpg.Connection) -> None:
        await connection.execute(
            "WITH tokens AS (UPDATE tokens SET next = 0, time = greatest(time, clock_us()),"
            " issuer = substring(uuid_send(gen_random_uuid()) FROM 1 FOR 8)),"
            " versions AS (UPDATE namespaces SET version = version + $1)"
            " SELECT setval(name, nextval(name) + $1) FROM (VALUES"
            " (pg_get_serial_sequence('namespaces', 'id')::regclass),"
            " (pg_get_serial_sequence('datasets', 'id')::regclass)) s (name)",
            _JUMP,
        )

    async with _opened(settings) as database:
        await database.transaction(begin)


@asynccontextmanager
async def _opened(settings: PostgresqlSettings) -> AsyncIterator[PostgresqlDatabase]:
    """Connect as *settings* say, which must name the owner, to a server that keeps the promise.

    Each change is one transaction, so what the server, or the caller, refuses changed nothing.
    """
    database = PostgresqlDatabase(postgresql_options(settings))
    try:
        await StartupRetry(settings.start_timeout).run(database.open)
        await check_server(database)
        yield database
    except StartupError as error:
        raise RefusedError(str(error)) from error
    except StoreUnavailableError as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise RefusedError(
                f"PostgreSQL: {error.__cause__}: connect as the role that owns the database and its"
                " tables, not as the service's"
            ) from error
        raise
    finally:
        await database.close()


async def apply_schema(database: PostgresqlDatabase, datasets: Sequence[Dataset]) -> Sequence[str]:
    """Make the schema, or bring it up to this version; add the *datasets* that it lacks; return
    what was done.

    Raises StartupError if a newer version of this program made it.
    """
    schema = database.options.schema

    async def make(connection: asyncpg.Connection) -> list[str]:
        did: list[str] = []
        # Held to the end of the transaction: one process at a time.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", schema)
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        if await connection.fetchval("SELECT to_regclass('meta')") is None:
            await connection.execute(_sql("tables.sql"))
            await connection.execute("INSERT INTO meta VALUES (0)")
        version: int = await connection.fetchval("SELECT version FROM meta")
        if version < _HOLDS_SINCE:
            await _add_holds(connection)
        if version < SCHEMA_VERSION:
            await _replace_functions(connection, schema)
            await connection.execute("UPDATE meta SET version = $1", SCHEMA_VERSION)
            before = f", before {version}" if version else ""
            did.append(f"made schema {schema}, version {SCHEMA_VERSION}{before}")
        check_version(max(version, SCHEMA_VERSION))
        for each in datasets:
            body = {k: v for k, v in asdict(each).items() if k not in ("id", "name")}
            if await connection.fetchval(
                "SELECT make_dataset($1, $2)", each.name, json.dumps(body)
            ):
                did.append(f"made dataset {each.name}")
        await connection.execute("SELECT wait_as_a_write()")
        return did or [f"schema {schema} is up to date"]

    return await database.transaction(make)


def check_version(version: int) -> None:
    """Raise StartupError unless this program can use the schema of *version*."""
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"the schema has version {version}, and this program knows {SCHEMA_VERSION}: start it"
            " with the newer program that made it"
        )
    if version < SCHEMA_VERSION:
        raise StartupError(
            f"the schema has version {version}, and this program needs {SCHEMA_VERSION}:"
            " run `counter schema apply`"
        )


async def _add_holds(connection: asyncpg.Connection) -> None:
    """Make the table of holds; the roles that write reservations can write it."""
    await connection.execute(_sql("holds_table.sql"))
    writers = await connection.fetch(
        "SELECT DISTINCT a.grantee::regrole::text FROM pg_class, aclexplode(relacl) a"
        " WHERE oid = 'reservations'::regclass AND a.privilege_type = 'DELETE'"
        " AND a.grantee NOT IN (0, relowner)"
    )
    for (role,) in writers:
        await connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON holds TO {role}")


async def _replace_functions(connection: asyncpg.Connection, schema: str) -> None:
    """Make the functions again; the roles that could call them can call the new ones.

    Each finds its own tables, and nothing else, whatever the caller's search_path. PostgreSQL's own
    functions and operators come first in a path that does not name pg_catalog.
    """
    callers = await connection.fetch(
        "SELECT DISTINCT a.grantee::regrole::text FROM pg_proc, aclexplode(proacl) a"
        " WHERE pronamespace = $1::regnamespace AND a.grantee NOT IN (0, proowner)",
        schema,
    )
    names = "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = $1::regnamespace"
    if old := await connection.fetch(names, schema):
        # Together, because some depend on others.
        await connection.execute(f"DROP FUNCTION {', '.join(name for (name,) in old)}")
    for name in ("functions.sql", "holds.sql"):
        await connection.execute(_sql(name))
    # A body that is no text has its names resolved already, and a setting keeps it from inlining.
    for (name,) in await connection.fetch(f"{names} AND prosqlbody IS NULL", schema):
        await connection.execute(f"ALTER FUNCTION {name} SET search_path = {schema}, pg_temp")
    await connection.execute(f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC")
    for (role,) in callers:
        await connection.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}")


def _sql(name: str) -> str:
    return files("counter.storage.postgresql").joinpath(name).read_text("utf-8")
