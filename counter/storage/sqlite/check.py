"""Check a data directory and the clock for ``counter doctor``, while a process may serve it.

No lock is taken, and nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from counter.config.findings import Finding, ok, wrong
from counter.errors import StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND
from counter.storage.sqlite.control import latest_time
from counter.storage.sqlite.copying import DATABASE
from counter.storage.sqlite.schema import SCHEMA_VERSION, unavailable

if TYPE_CHECKING:
    from counter.ports import Clock


def check_directory(data: Path, clock: Clock) -> Iterator[Finding]:
    """Check the data directory, and whether its times are consistent with the clock."""
    if not data.exists():
        yield ok("store", f"{data} does not exist yet: counter serve creates it")
        return
    try:
        version, latest_us = inspect(data)
    except StartupError as error:
        do = "run it as the user that serves, or restore a backup: counter restore --help"
        yield wrong("store", str(error), do)
        return
    detail = f"{data} has schema version {version}; this program knows {SCHEMA_VERSION}"
    if version > SCHEMA_VERSION:
        do = "start the newer program that made it, or restore a backup of before"
        yield wrong("store", detail, do)
    else:
        yield ok("store", detail if version else f"{data} holds no counters yet")
    ahead_us = latest_us - clock.now_us()
    if ahead_us <= CLOCK_STEP_MAX_US:
        yield ok("clock", "not behind what was written last")
        return
    yield wrong(
        "clock",
        f"{data} holds times that are {ahead_us // SECOND} s ahead of this machine's clock",
        "set the clock right (NTP) if it is wrong; if it was ahead once, writes are refused until"
        ' time has caught up: see "When the clock was wrong" in docs/how-to/read-an-outage.md',
    )


def inspect(directory: Path) -> tuple[int, int]:
    """Return the schema's version, and the latest time of a clock that the database holds (µs since
    1970); both 0 if there is no database yet.

    Raises StartupError if it is not a data directory, or cannot be read."""
    path = directory / DATABASE
    try:
        names = {each.name for each in directory.iterdir()}
        has_log = f"{DATABASE}-wal" in names
        if DATABASE not in names or not (has_log or path.stat().st_size):
            return 0, 0
    except OSError as error:
        raise StartupError(f"{directory} cannot be read: {error.strerror}") from error
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
