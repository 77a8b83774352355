"""Read the settings of a PostgreSQL server that the promise depends on: at startup, and for
``counter doctor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from counter.errors import StartupError
from counter.storage.postgresql.database import PostgresqlDatabase

VERSION_MIN: Final = 14
_DURABLE: Final = ("fsync", "full_page_writes", "synchronous_commit")
_READ: Final = (
    *_DURABLE,
    *("server_version", "server_version_num", "server_encoding"),
    *(
        "client_min_messages",
        "default_transaction_isolation",
        "synchronous_standby_names",
        "data_checksums",
    ),
)
#: Settings; and the schemas that are searched for functions, and in which a role other than their
#: owner can create some. Only behind a pooler: other sessions search PostgreSQL's own schema.
_OPEN: Final = "schemas that are open to others"
_FOUND: Final = (
    "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY($1::text[])"
    f" UNION ALL SELECT '{_OPEN}', pg_catalog.string_agg(n.nspname::text, ', ')"
    " FROM pg_catalog.pg_namespace n WHERE n.nspname = ANY (pg_catalog.current_schemas(false))"
    " AND EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) a"
    " WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner)"
)


async def check_server(database: PostgresqlDatabase) -> Sequence[str]:
    """Read the server's settings; return what the operator should know about them.

    Raises StartupError, with the value and the fix, if the service cannot keep its promise there.
    """
    found: dict[str, str] = dict(await database.rows(_FOUND, _READ))
    _refuse(found)
    warnings = _warnings(found)
    if database.ignored:
        warnings.append(
            f"parameters of the DSN have no effect: {', '.join(database.ignored)}; remove them, and"
            " use sslmode=verify-full with sslrootcert to verify the server"
        )
    return warnings


def _refuse(found: Mapping[str, str]) -> None:
    version = found["server_version"]
    if int(found["server_version_num"]) < VERSION_MIN * 10_000:
        raise StartupError(
            f"PostgreSQL has version {version}: it must be {VERSION_MIN} or newer; upgrade it"
        )
    for name in _DURABLE:
        if found[name] == "off":
            raise StartupError(
                f"PostgreSQL runs with {name} = off, and would lose acknowledged adds in a crash:"
                f" set {name} = on (postgresql.conf, ALTER SYSTEM, ALTER DATABASE or ALTER ROLE)"
            )
    isolation = found["default_transaction_isolation"]
    if isolation != "read committed":
        raise StartupError(
            f"PostgreSQL runs with default_transaction_isolation = {isolation}, and every add would"
            " be refused: set it to 'read committed', for the service's role by ALTER ROLE"
        )
    if found["client_min_messages"] == "error":
        raise StartupError(
            "PostgreSQL runs with client_min_messages = error, and would not report that a commit's"
            " wait for a standby was cancelled: set it to warning, for the service's role by"
            " ALTER ROLE"
        )
    encoding = found["server_encoding"]
    if encoding != "UTF8":
        raise StartupError(
            f"the database has the encoding {encoding}, which cannot hold every counter's name:"
            " create one with ENCODING 'UTF8'"
        )


def _warnings(found: Mapping[str, str]) -> list[str]:
    warnings = []
    if found["data_checksums"] == "off":
        warnings.append(
            "PostgreSQL runs with data_checksums = off: damage of the disk may change counts"
            " unnoticed; stop the server and run `pg_checksums --enable`, or `initdb"
            " --data-checksums` for a new one"
        )
    level, standbys = found["synchronous_commit"], found["synchronous_standby_names"]
    if standbys and level in ("local", "remote_write"):
        kept = "the primary" if level == "local" else "the memory of the standby"
        warnings.append(
            f"PostgreSQL runs with synchronous_commit = {level}: an add is acknowledged when it is"
            f" in {kept}, and a failover may lose it; set synchronous_commit = on"
        )
    if found[_OPEN]:
        warnings.append(
            f"other roles can create functions in {found[_OPEN]}, which the search_path behind the"
            " pooler has, and the service would call them: set search_path = pg_catalog, pg_temp"
            " for its role by ALTER ROLE, or REVOKE CREATE ON SCHEMA ... FROM PUBLIC"
        )
    return warnings
