"""The embedded store: SQLite in one process, one file in the data directory.

The write transaction itself checks a token's age and what was decided about it, so most of the
races that a distributed store has cannot happen here; the core and the roller are the same code.
"""

from __future__ import annotations

from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.rollups import SqliteRollups

__all__ = ["SqliteStore"]


class SqliteStore(SqliteDecisions, SqliteRollups, SqliteControl):
    """All the ports of :class:`counter.ports.Store` over one data directory."""
