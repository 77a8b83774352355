"""Make the schema of PostgreSQL; any number of processes may do it at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import asyncpg

from counter.errors import StartupError, StoreUnavailableError
from counter.storage.postgresql.database import Database, postgresql_options
from counter.storage.postgresql.server import check_server
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.config.settings import Settings

SCHEMA_VERSION: Final = 1


#: Ids of namespaces and datasets, and versions for If-Match, that may have been issued since.
_JUMP: Final = 1_000_000


async def apply_for(settings: Settings) -> Sequence[str]:
    """Apply the schema of *settings*; return what was done. Raises StartupError and
    StoreUnavailableError."""
    async with _opened(settings) as database:
        return await apply_schema(database, settings.datasets())


async def begin_new_life(settings: Settings) -> None:
    """Make sure that the restored schema of *settings* issues nothing that was issued before.

    Tokens get another issuer, and a time not before now. Raises StartupError and
    StoreUnavailableError.
    """
    async with _opened(settings) as database:
        await database.rows(
            "WITH tokens AS (UPDATE {s}.tokens SET next = 0, time = greatest(time, {s}.clock_us()),"
            " issuer = substring(uuid_send(gen_random_uuid()) FROM 1 FOR 8)),"
            " versions AS (UPDATE {s}.namespaces SET version = version + $1)"
            " SELECT setval(name, nextval(name) + $1) FROM (VALUES"
            " (pg_get_serial_sequence('{s}.namespaces', 'id')::regclass),"
            " (pg_get_serial_sequence('{s}.datasets', 'id')::regclass)) s (name)",
            _JUMP,
        )


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Database]:
    """Connect as *settings* say, which must name the owner, to a server that keeps the promise."""
    database = Database(postgresql_options(settings))
    await StartupRetry(settings.start_timeout).run(database.open)
    try:
        await check_server(database)
        yield database
    except StoreUnavailableError as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise StartupError(
                f"PostgreSQL: {error.__cause__}: connect as the role that owns the database and its"
                " tables, not as the service's"
            ) from error
        raise
    finally:
        await database.close()


async def apply_schema(database: Database, datasets: Sequence[Dataset]) -> Sequence[str]:
    """Make the schema, or bring it up to this version; add the *datasets* that it lacks; return
    what was done.

    Raises StartupError if a newer version of this program made it.
    """
    schema = database.options.schema
    ddl = files("counter.storage.postgresql").joinpath("schema.sql").read_text("utf-8")

    async def make(connection: asyncpg.Connection) -> list[str]:
        did: list[str] = []
        # Held to the end of the transaction: one process at a time.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", schema)
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        await connection.execute(f"SET LOCAL search_path = {schema}, pg_temp")
        found = await connection.fetchval("SELECT to_regclass('meta')")
        if found is None:
            await connection.execute(ddl)
            await connection.execute("INSERT INTO meta VALUES ($1)", SCHEMA_VERSION)
            await _restrict_functions(connection, schema)
            did.append(f"made schema {schema}, version {SCHEMA_VERSION}")
        check_version(await connection.fetchval("SELECT version FROM meta"))
        for each in datasets:
            body = {k: v for k, v in asdict(each).items() if k not in ("id", "name")}
            if await connection.fetchval(
                "SELECT make_dataset($1, $2)", each.name, json.dumps(body)
            ):
                did.append(f"made dataset {each.name}")
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


async def _restrict_functions(connection: asyncpg.Connection, schema: str) -> None:
    """Let every function find its tables, and nothing else, whatever the caller's search_path; let
    no role call it that was not given the right."""
    await connection.execute(f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC")
    names = await connection.fetch(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = $1::regnamespace", schema
    )
    for (name,) in names:
        await connection.execute(f"ALTER FUNCTION {name} SET search_path = {schema}, pg_temp")
