"""Check a data directory, its disk and the clock for ``counter doctor``, while a process may serve
it: no lock is taken, and nothing is written."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from counter.config.findings import Finding, State, ok, wrong
from counter.errors import StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND
from counter.quantities import format_bytes
from counter.storage.sqlite.control import latest_time
from counter.storage.sqlite.copying import DATABASE
from counter.storage.sqlite.schema import SCHEMA_VERSION, unavailable

if TYPE_CHECKING:
    from counter.ports import Clock
    from counter.storage.sqlite.settings import SqliteSettings

#: Below the first size, or share of the disk, a warning is given; below the second size adds are
#: about to be rejected.
_DISK_LOW: Final = 1024**3
_DISK_SHARE_MIN: Final = 0.05
_DISK_FULL: Final = 64 * 1024**2


def check_directory(settings: SqliteSettings, clock: Clock) -> Iterator[Finding]:
    """Check the data directory, and whether its times are consistent with the clock."""
    data = settings.data
    if not data.exists():
        yield ok("store", f"{data} does not exist yet: counter serve creates it")
        return
    own = "run it as the user that serves"
    try:
        version, stored_us, written_us = inspect(data)
    except StartupError as error:
        yield wrong("store", str(error), f"{own}, or restore a backup: counter restore --help")
        return
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        do = f"{own}, or have that user own the directory"
        yield wrong("store", f"{data} cannot be written by this user", do)
    if version > SCHEMA_VERSION:
        detail = f"{data} has schema version {version}; this program knows {SCHEMA_VERSION}"
        do = "start the newer program that made it, or restore a backup of before"
        yield wrong("schema", detail, do)
    elif version == 0:
        yield ok("store", f"{data} holds no counters yet")
    else:
        yield ok("store", f"{data} can be read")
        later = ", which the next start updates" if version < SCHEMA_VERSION else ""
        yield ok("schema", f"version {version} of {SCHEMA_VERSION}{later}")
    ahead_us = max(stored_us, written_us) - clock.now_us()
    if ahead_us <= CLOCK_STEP_MAX_US:
        yield ok("clock", "not behind what was written last")
        return
    yield wrong(
        "clock",
        f"{data} holds times that are {ahead_us // SECOND} s ahead of this machine's clock",
        "set the clock right (NTP) if it is wrong; if it was ahead once, writes are refused until"
        ' time has caught up: see "When the clock was wrong" in docs/how-to/read-an-outage.md',
    )


def inspect(directory: Path) -> tuple[int, int, int]:
    """Return the schema's version, the latest time of a clock that the database holds, and when a
    file was last written (µs since 1970); 0 and 0 if there is no database yet.

    Raises StartupError if it is not a data directory, or cannot be read."""
    try:
        files = {each.name: each.stat() for each in directory.iterdir() if each.is_file()}
    except OSError as error:
        raise StartupError(
            f"{error.filename or directory} cannot be read: {error.strerror}"
        ) from error
    written_us = max((each.st_mtime_ns // 1_000 for each in files.values()), default=0)
    has_log = f"{DATABASE}-wal" in files
    if DATABASE not in files or not (has_log or files[DATABASE].st_size):
        return 0, 0, written_us
    path = directory / DATABASE
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
            return version, latest_time(connection) if is_known else 0, written_us
    except sqlite3.Error as error:
        raise StartupError(f"{path} cannot be read: {unavailable(error).detail}") from error


def check_disk(data: Path) -> Finding:
    """Check the space for the data directory *data*."""
    place = data.absolute()
    while not place.exists():
        place = place.parent
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return wrong("disk", f"{place} is mounted read-only", "mount it writable")
    usage = shutil.disk_usage(place)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free at {place}"
    if usage.free >= min(_DISK_LOW, usage.total * _DISK_SHARE_MIN):
        return ok("disk", detail)
    state: State = "wrong" if usage.free < _DISK_FULL else "warning"
    do = "make room: adds are refused while the disk is full, and none is lost"
    return Finding("disk", state, detail, do)
