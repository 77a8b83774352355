"""Define the SQLite schema, open connections, and lock the data directory.

Integers are 64 bits in SQLite. A larger count is stored as decimal text in the same column, and the
high and low 32 bits of deltas are summed separately, so nothing overflows.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from counter.errors import StartupError, StoreUnavailableError
from counter.limits import INT64_MAX, INT64_MIN, WAL_BYTES_KEPT
from counter.regular_file import sync_directory
from counter.types import Fold

SCHEMA_VERSION: Final = 8
_SQLITE_VERSION_MIN: Final = (3, 38, 0)
#: For a reader, and for the writer. Further pages are in the kernel's cache.
_PAGE_CACHE_KIB: Final = (4_096, 8_192)
_BUSY_TIMEOUT_S: Final = 5.0

#: The suffix of a file's name while it is restored.
UNFINISHED: Final = ".restoring"

_RECENT_WINDOWS: Final = """
CREATE TABLE IF NOT EXISTS recent_windows (
    namespace INTEGER NOT NULL, start INTEGER NOT NULL, counter INTEGER NOT NULL,
    cleared INTEGER NOT NULL, total,
    PRIMARY KEY (namespace, start, counter)
) WITHOUT ROWID;
"""
#: Open holds.
_HOLDS: Final = """
CREATE TABLE IF NOT EXISTS holds (
    counter INTEGER NOT NULL, time INTEGER NOT NULL, nonce BLOB NOT NULL, amount INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    PRIMARY KEY (counter, time, nonce)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS holds_by_counter ON holds (counter, expires);
CREATE INDEX IF NOT EXISTS holds_by_expiry ON holds (expires);
"""
DDL: Final = (
    """
CREATE TABLE IF NOT EXISTS datasets (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL,
    dropped_before INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS slices (
    dataset INTEGER NOT NULL, start INTEGER NOT NULL, until INTEGER NOT NULL,
    time_bucket INTEGER NOT NULL, event_buckets INTEGER NOT NULL, retired_at INTEGER,
    PRIMARY KEY (dataset, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS namespaces (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, dataset INTEGER NOT NULL,
    settings TEXT NOT NULL, eras TEXT NOT NULL, created_at INTEGER NOT NULL,
    version INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS watermarks (
    namespace INTEGER NOT NULL, shard INTEGER NOT NULL, through INTEGER NOT NULL,
    PRIMARY KEY (namespace, shard)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, name TEXT NOT NULL,
    checkpoint_at INTEGER, checkpoint, settled_at INTEGER, settled,
    UNIQUE (namespace, name)
);
CREATE TABLE IF NOT EXISTS windows (
    counter INTEGER NOT NULL, start INTEGER NOT NULL, cleared INTEGER NOT NULL, total,
    PRIMARY KEY (counter, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pending (
    counter INTEGER NOT NULL, recount INTEGER NOT NULL, start INTEGER NOT NULL,
    PRIMARY KEY (counter, recount, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (
    namespace INTEGER NOT NULL, shard INTEGER NOT NULL, start INTEGER NOT NULL,
    counter INTEGER NOT NULL, recount INTEGER NOT NULL,
    PRIMARY KEY (namespace, shard, start, counter, recount)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS resolutions (
    namespace INTEGER NOT NULL, event_time INTEGER NOT NULL, event_id BLOB NOT NULL,
    scope TEXT NOT NULL, outcome TEXT NOT NULL, fingerprint BLOB NOT NULL,
    PRIMARY KEY (namespace, event_time, event_id, scope)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reservations (
    namespace INTEGER NOT NULL, nonce BLOB NOT NULL, time INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    PRIMARY KEY (namespace, nonce)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
    one INTEGER PRIMARY KEY CHECK (one = 1), store BLOB NOT NULL, next INTEGER NOT NULL,
    time INTEGER NOT NULL DEFAULT 0
);
INSERT OR IGNORE INTO tokens (one, store, next) VALUES (1, randomblob(8), 0);
CREATE INDEX IF NOT EXISTS resolutions_by_time ON resolutions (event_time);
CREATE INDEX IF NOT EXISTS reservations_by_expiry ON reservations (expires);
"""
    + _RECENT_WINDOWS
    + _HOLDS
)

#: The statement, if any, that upgrades a database from each version to the next.
UPGRADES: Mapping[int, str] = {
    1: "ALTER TABLE tokens ADD COLUMN time INTEGER NOT NULL DEFAULT 0;",
    # Dirty windows are found in the log. A program that looks for their marks must not open it.
    2: "DELETE FROM marks WHERE recount = 0;",
    # A program that keeps no checksums of pages must not write to it.
    3: "",
    # A program that does not read this table must not open the database.
    4: _RECENT_WINDOWS.strip(),
    # A program that does not know cancelled tokens must not open it.
    5: "",
    # Nor one that does not know bounds.
    6: "",
    # Nor one that does not know holds.
    7: _HOLDS.strip(),
}

EVENTS_DDL: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    counter INTEGER NOT NULL, event_time INTEGER NOT NULL, event_id BLOB NOT NULL,
    item INTEGER NOT NULL, delta INTEGER NOT NULL, clear INTEGER, atom BLOB,
    PRIMARY KEY (event_time, counter, event_id, item)
) WITHOUT ROWID
"""

#: The prefix that the name of a dropped slice's table gets, until its events are deleted.
DROPPED: Final = "dropped_"


def events_table(dataset_id: int, start_us: int) -> str:
    """Return the name of the table of one slice's events. Both parts are integers of our own."""
    return f"events_{dataset_id}_{start_us}"


def connect(path: Path, *, writer: bool) -> sqlite3.Connection:
    """Open a connection in WAL mode; a writer's commits are on disk when they return."""
    if writer:
        # SQLite's other files inherit this mode.
        path.touch(mode=0o600)
    # Autocommit: transactions are begun and ended explicitly, in one place.
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    # Views and triggers in a foreign file must not call functions with side effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute(f"PRAGMA cache_size = -{_PAGE_CACHE_KIB[writer]}")
    if writer:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # Some systems' SQLite overwrites what is deleted with zeros: twice the writes of a drop.
        connection.execute("PRAGMA secure_delete = OFF")
        # The writer copies the log itself, after the checksums of its pages are stored.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        # Otherwise the file keeps the largest size that it ever had.
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    else:
        connection.execute("PRAGMA query_only = ON")
    return connection


def create_schema(connection: sqlite3.Connection) -> None:
    """Create the tables. Raises StartupError if a newer version of this program made them."""
    if sqlite3.sqlite_version_info < _SQLITE_VERSION_MIN:
        needed = ".".join(map(str, _SQLITE_VERSION_MIN))
        raise StartupError(f"SQLite {sqlite3.sqlite_version} is too old; {needed} is needed")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"the database has schema version {version}; this program knows {SCHEMA_VERSION}:"
            " start it with the newer program that made it"
        )
    upgrades = "".join(UPGRADES[each] for each in range(version, SCHEMA_VERSION) if version)
    connection.executescript(f"BEGIN;{upgrades}{DDL}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")


def to_cell(value: int) -> int | str:
    """Return a count as SQLite stores it: an integer, or its decimal text beyond 64 bits."""
    return value if INT64_MIN <= value <= INT64_MAX else str(value)


def to_fold(clears: int, high: int | None, low: int | None) -> Fold:
    """Return the fold of rows whose deltas' high and low 32 bits were summed separately."""
    return Fold(bool(clears), ((high or 0) << 32) + (low or 0))


def to_json(values: Iterable[Any]) -> str:
    """Return arguments of a set-based statement, for ``json_each``."""
    return msgspec.json.encode(list(values)).decode()


#: Return the value that JSON text contains.
from_json: Final = msgspec.json.decode


def one_json(
    connection: sqlite3.Connection, sql: str, parameters: Sequence[Any] | dict[str, Any]
) -> Any:
    """Return the one JSON value that *sql* selects.

    Results are one row of JSON because sqlite3 releases and reacquires the interpreter lock at
    every row: with a busy event loop each of them would wait for a whole switch interval.
    """
    row = connection.execute(sql, parameters).fetchone()
    return from_json(row[0])


def unavailable(error: sqlite3.Error) -> StoreUnavailableError:
    """Convert *error* to the service's own, with the fix if that is known."""
    text = str(error)
    advice = {
        "full": "free some disk space; nothing that was acknowledged is lost",
        "readonly": "make the data directory writable",
        "read-only": "make the data directory writable",
        "malformed": "the database file is damaged; restore it from a backup",
        "not a database": "the database file is damaged; restore it from a backup",
    }
    hint = next((hint for word, hint in advice.items() if word in text), None)
    detail = f"SQLite: {text}" + (f": {hint}" if hint else "")
    return StoreUnavailableError(detail, retry_after_us=1_000_000)


def check_whole(directory: Path) -> None:
    """Raise StartupError if a restore into *directory* was interrupted: otherwise a new, empty
    database would be created there unnoticed."""
    if any(directory.glob(f"*{UNFINISHED}")):
        raise StartupError(
            f"a restore into {directory} was broken off: empty it, and restore the backup again"
        )


class DirectoryLock:
    """Keeps a data directory to one process, for as long as that process lives.

    The directory itself is locked, and so is a file in it that names the holder. The file alone is
    not enough: when it is deleted, the next process creates and locks another one.
    """

    def __init__(self, directory: Path) -> None:
        """Raises StartupError."""
        try:
            missing = [each for each in (directory, *directory.parents) if not each.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for each in missing:
                # Otherwise a loss of power may remove the directory with all that is in it.
                sync_directory(each.parent)
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise unusable(directory, error) from error
        try:
            self._file = self._locked(directory)
        except BaseException:
            os.close(self._directory)
            raise
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()

    def _locked(self, directory: Path) -> TextIO:
        """Lock the directory and its lock file, and return the file."""
        try:
            file = (directory / "lock").open("a+")
        except OSError as error:
            raise unusable(directory, error) from error
        try:
            for each in (self._directory, file):
                fcntl.flock(each, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if not isinstance(error, BlockingIOError):
                raise StartupError(
                    f"the data directory {directory} cannot be locked: {error.strerror};"
                    " choose a directory of a local file system with --data"
                ) from error
            raise StartupError(
                f"the data directory {directory} is held by {holder};"
                " stop that process or choose another directory with --data"
            ) from error
        return file

    def release(self) -> None:
        """Release the directory for another process."""
        self._file.close()
        os.close(self._directory)


def unusable(directory: Path, error: OSError) -> StartupError:
    """Return the error about a data directory that cannot be used."""
    return StartupError(f"the data directory {directory} cannot be used: {error.strerror}")
