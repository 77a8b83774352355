"""Store everything in PostgreSQL, for any number of processes.

An append is one statement: it shares its dataset's lock, reads the server's clock, checks age and
decision, and inserts. docs/architecture.md explains the lock and the fence.
"""

from __future__ import annotations

from counter.errors import StartupError

try:
    import asyncpg  # noqa: F401
except ImportError as error:
    raise StartupError(
        f"the PostgreSQL driver is missing ({error}):"
        " install it with pip install '.[postgresql]' in its checkout"
    ) from error

from counter.storage.postgresql.database import Database, PostgresqlOptions, postgresql_options
from counter.storage.postgresql.schema import apply_schema
from counter.storage.postgresql.server import ask
from counter.storage.postgresql.store import PostgresqlStore

__all__ = [
    "Database",
    "PostgresqlOptions",
    "PostgresqlStore",
    "apply_schema",
    "ask",
    "postgresql_options",
]
