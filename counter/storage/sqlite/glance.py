"""A look at a data directory that another process may serve: no lock is taken, nothing written."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from counter.errors import StartupError
from counter.storage.sqlite.control import latest_time
from counter.storage.sqlite.copying import DATABASE
from counter.storage.sqlite.schema import SCHEMA_VERSION, unavailable

_HOLDER: Final = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True, slots=True)
class Glance:
    """The visible state of a data directory."""

    #: The schema's version; None if there is no database yet.
    version: int | None
    #: The latest time of a clock that the database holds, 0 if none, and when a file was last
    #: written (µs since 1970).
    stored_us: int
    written_us: int
    #: Bytes on disk, and those of the write-ahead log among them.
    size: int
    wal_bytes: int
    #: The process that serves it now, if known.
    holder: int | None

    @property
    def newest_version(self) -> int:
        """The schema version that this program creates."""
        return SCHEMA_VERSION


def glance(directory: Path) -> Glance:
    """Inspect *directory*. Raises StartupError if it is not a data directory, or cannot be read."""
    try:
        files = {each.name: each.stat() for each in directory.iterdir() if each.is_file()}
        holder = _holder(directory / "lock")
    except OSError as error:
        raise StartupError(
            f"{error.filename or directory} cannot be read: {error.strerror}"
        ) from error
    log = files.get(f"{DATABASE}-wal")
    version, stored_us = None, 0
    if DATABASE in files and (log or files[DATABASE].st_size):
        version, stored_us = _read(directory / DATABASE, has_log=log is not None)
    return Glance(
        version,
        stored_us,
        max((each.st_mtime_ns // 1_000 for each in files.values()), default=0),
        sum(each.st_size for each in files.values()),
        0 if log is None else log.st_size,
        holder,
    )


def _read(path: Path, *, has_log: bool) -> tuple[int, int]:
    """The version of the schema and the latest time in the database, 0 if it has none."""
    # Without a log no process has it open, and SQLite would leave a new log behind.
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    uri = f"file:{quote(str(path.absolute()))}?{how}"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute(
                "SELECT count(*) FROM sqlite_schema WHERE name IN ('tokens', 'slices')"
            ).fetchone()
            is_known = tables == 2 and version <= SCHEMA_VERSION
            return version, latest_time(connection) if is_known else 0
    except sqlite3.Error as error:
        raise StartupError(f"{path} cannot be read: {unavailable(error).detail}") from error


def _holder(path: Path) -> int | None:
    """Return the process in the lock file, if it is alive on this machine."""
    try:
        found = _HOLDER.match(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None
    if found is None or found[2] != os.uname().nodename:
        return None
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return int(found[1])
