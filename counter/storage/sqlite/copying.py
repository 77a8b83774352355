"""Copy SQLite files that other processes use, each as of one moment, and give a restored copy a new
identity.

A read transaction is held while pages are copied, so the copy is of the moment at which it began,
however many commits come after it, and the writer does not wait. The cost is that the write-ahead
log cannot be reset meanwhile: it grows by all writes until the copy ends. A copy is cancelled when
the log has half of the size at which the service rejects writes.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from counter.errors import StartupError
from counter.quantities import format_bytes
from counter.storage.sqlite.keys import KEYS_DDL, KEYS_FILE, KEYS_VERSION
from counter.storage.sqlite.schema import (
    DDL,
    DROPPED,
    EVENTS_DDL,
    SCHEMA_VERSION,
    UPGRADES,
    connect,
    create_schema,
    unavailable,
)

DATABASE: Final = "counter.db"
#: The files of a backup. The keys come last: a key that was revoked while the database was copied
#: is revoked in the copy, too.
FILES: Final = (DATABASE, KEYS_FILE)

_CREATE_TABLE: Final = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)")
_EVENTS_TABLE: Final = re.compile(rf"({DROPPED})?events_\d+_\d+", re.ASCII)
_PAGES_PER_STEP: Final = 64
#: How far ids advance at a restore, so that ids assigned after the copy are not assigned again:
#: more than the namespaces that are created or changed between a copy and its restore.
_JUMP: Final = 1_000_000
_BUSY_TIMEOUT_S: Final = 10.0


def copy_file(
    source: Path,
    target: Path,
    bytes_per_s: float,
    progress: Callable[[int, int], None],
    wal_bytes_max: int,
) -> None:
    """Copy the SQLite file *source* to *target*, checked and on disk when this returns.

    *bytes_per_s* limits the rate (0: no limit). *progress* is called with the bytes done and the
    total. Raises StartupError.
    """
    wal = source.with_name(f"{source.name}-wal")
    try:
        with closing(_reader(source)) as reader, closing(sqlite3.connect(target)) as writer:
            (size,) = reader.execute("PRAGMA page_size").fetchone()
            # From here on it sees one moment.
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
            writer.execute("PRAGMA synchronous = OFF")
            began_s = time.monotonic()

            def go_on(_status: int, remaining: int, total: int) -> None:
                done = (total - remaining) * size
                progress(done, total * size)
                if wal.exists() and (grown := wal.stat().st_size) >= wal_bytes_max // 2:
                    raise StartupError(
                        f"the write-ahead log of {source} has grown to {format_bytes(grown)} while"
                        " it was copied, half of what wal_bytes_max lets it have: copy faster"
                        " (--rate 0/s), while less is written, or raise wal_bytes_max"
                    )
                if bytes_per_s:
                    ahead_s = done / bytes_per_s - (time.monotonic() - began_s)
                    time.sleep(max(0.0, ahead_s))

            reader.backup(writer, pages=_PAGES_PER_STEP, progress=go_on)
            reader.execute("ROLLBACK")
            # A single file, which can be read on a read-only medium.
            writer.execute("PRAGMA journal_mode = DELETE")
            writer.commit()
        _on_disk(target)
        check_file(target)
    except sqlite3.Error as error:
        raise StartupError(f"cannot copy {source}: {unavailable(error).detail}") from error


def check_file(path: Path) -> None:
    """Read the whole of a SQLite file. Raises StartupError if it is damaged."""
    with closing(_reader(path)) as reader:
        try:
            found = [text for (text,) in reader.execute("PRAGMA quick_check(10)")]
        except sqlite3.Error as error:
            found = [str(error)]
    if found != ["ok"]:
        raise StartupError(f"{path} is damaged: {'; '.join(found)}")


def check_schema(path: Path) -> None:
    """Raise StartupError if *path*, one of FILES of a backup, cannot be read, was made by a newer
    program, or has other tables and indexes than this program creates.

    A trigger, for example, would run in the restored service.
    """
    is_keys = path.name == KEYS_FILE
    newest, ddl = (KEYS_VERSION, KEYS_DDL) if is_keys else (SCHEMA_VERSION, DDL)
    try:
        # Read the file alone, without any journal beside it.
        with closing(_reader(path, "mode=ro&immutable=1")) as reader:
            (version,) = reader.execute("PRAGMA user_version").fetchone()
            found = _objects(reader)
    except sqlite3.Error as error:
        raise StartupError(f"{path} cannot be read: {unavailable(error).detail}") from error
    if version > newest:
        raise StartupError(
            f"{path} has schema version {version}; this program knows {newest}: restore it"
            " with the program that made it, or a newer one"
        )
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(ddl)
        if not is_keys:
            for name in found:
                if match := _EVENTS_TABLE.fullmatch(name):
                    # SQLite quotes the name of a table that was renamed.
                    made.execute(EVENTS_DDL.format(table=f'"{name}"' if match[1] else name))
        expected = _objects(made)
    # The file lacks what a later version adds: a table, or the last column of one.
    added = [] if is_keys else [UPGRADES[each] for each in range(version, newest) if version]
    for each in added:
        if created := _CREATE_TABLE.match(each):
            del expected[created[1]]
        elif each.startswith("ALTER TABLE "):
            altered = each.removeprefix("ALTER TABLE ").rstrip(";")
            table, _, column = altered.partition(" ADD COLUMN ")
            kind, sql = expected[table]
            expected[table] = (kind, sql.replace(f",{''.join(column.split())}", ""))
    differing = sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    if differing:
        raise StartupError(
            f"{path} is not as this program makes it: see {differing[:5]!r} in its sqlite_master;"
            " remove from the database what does not belong there, and back it up again"
        )


def _objects(connection: sqlite3.Connection) -> dict[str, tuple[str, str]]:
    """Return kind and SQL without spaces of each table, index, view and trigger, by name."""
    rows = connection.execute("SELECT name, type, coalesce(sql, '') FROM sqlite_master")
    return {
        name: (kind, "".join(sql.split()))
        for name, kind, sql in rows
        # SQLite's own, such as the statistics of ANALYZE.
        if not (name.startswith("sqlite_") and kind in ("table", "index"))
    }


def begin_new_life(path: Path, now_us: int) -> None:
    """Make sure that the copied database *path* issues nothing that was issued before its restore.

    Tokens get another issuer and a time not before now: none is issued twice, and the order holds.
    Ids of namespaces and counters, and the versions for If-Match, continue far beyond those that
    can have been assigned since the copy was made.
    """
    with closing(connect(path, writer=True)) as connection:
        create_schema(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "UPDATE tokens SET store = randomblob(8), next = 0, time = max(time, ?)", (now_us,)
        )
        for table in ("namespaces", "counters"):
            connection.execute(
                "INSERT INTO sqlite_sequence (name, seq) SELECT ?, 0 WHERE NOT EXISTS"
                " (SELECT 1 FROM sqlite_sequence WHERE name = ?)",
                (table, table),
            )
        connection.execute("UPDATE sqlite_sequence SET seq = seq + ?", (_JUMP,))
        connection.execute("UPDATE namespaces SET version = version + ?", (_JUMP,))
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = DELETE")


def _reader(path: Path, how: str = "mode=rw") -> sqlite3.Connection:
    """Open a connection for reading; the file must exist."""
    # Not mode=ro by default: that cannot read a write-ahead log that no process has open.
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{how}",
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
    )
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _on_disk(path: Path) -> None:
    path.chmod(0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())
