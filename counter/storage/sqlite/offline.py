"""Work on a data directory from outside, while a process may serve it: back up, restore, check.

A backup directory appears whole or not at all. The manifest has the start time of the copy, the
program's version, and each file's size and SHA-256. A restore verifies all of these, and gives the
restored copy a new identity.

A read transaction is held while pages are copied, so the copy is of the moment at which it began,
however many commits come after it, and the writer does not wait. The cost is that the write-ahead
log cannot be reset meanwhile: it grows by all writes until the copy ends. A copy is cancelled when
the log has half of the size at which the service rejects writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from counter import __version__
from counter.clock import to_rfc3339
from counter.config.findings import Finding, ok, wrong
from counter.config.store_kinds import BackedUpFile, Backup, Progress
from counter.errors import StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND, WAL_BYTES_MAX
from counter.quantities import format_bytes
from counter.regular_file import open_regular, sync_directory
from counter.storage.sqlite.control import latest_time
from counter.storage.sqlite.keys import KEYS_DDL, KEYS_FILE, KEYS_VERSION
from counter.storage.sqlite.page_sums import check_pages
from counter.storage.sqlite.schema import (
    DDL,
    DROPPED,
    EVENTS_DDL,
    SCHEMA_VERSION,
    UNFINISHED,
    UPGRADES,
    DirectoryLock,
    connect,
    create_schema,
    unavailable,
)

if TYPE_CHECKING:
    from counter.ports import Clock

DATABASE: Final = "counter.db"
#: The files of a backup. The keys come last: a key that was revoked while the database was copied
#: is revoked in the copy, too.
FILES: Final = (DATABASE, KEYS_FILE)

_CREATE: Final = re.compile(r"CREATE (?:TABLE|INDEX) IF NOT EXISTS (\w+)")
_EVENTS_TABLE: Final = re.compile(rf"({DROPPED})?events_\d+_\d+", re.ASCII)
_PAGES_PER_STEP: Final = 64
#: How far ids advance at a restore, so that ids assigned after the copy are not assigned again:
#: more than the namespaces that are created or changed between a copy and its restore.
_JUMP: Final = 1_000_000
_BUSY_TIMEOUT_S: Final = 10.0
MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_MANIFEST_BYTES_MAX: Final = 64 * 1024
_PIECE: Final = 1 << 20
#: Entries of an empty directory that are allowed: an unheld lock, and the file system's own.
_NOTHING: Final = frozenset({"lock", "lost+found"})


def back_up(
    data: Path,
    target: Path,
    *,
    now_us: int,
    bytes_per_s: float,
    progress: Progress,
    wal_bytes_max: int = WAL_BYTES_MAX,
) -> Backup:
    """Copy the data directory *data* to the new directory *target*.

    Another process may use *data* meanwhile; its write-ahead log may grow up to its limit. Raises
    StartupError and then leaves nothing behind.
    """
    if not (data / DATABASE).exists():
        raise StartupError(f"{data} holds no counters: give the data directory with --data")
    if target.exists() or target.is_symlink():
        raise StartupError(f"{target} is there already: give a directory that is not")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _must_fit(sum(_size(data / name) for name in FILES), target.parent)
        check_pages(data / DATABASE)
        partial.mkdir(mode=0o700)
        try:
            for name in FILES:
                if (data / name).exists():
                    copy_file(data / name, partial / name, bytes_per_s, progress, wal_bytes_max)
            manifest = _manifest_of(partial, now_us)
            _write_manifest(partial, manifest)
            sync_directory(partial)
            partial.rename(target)
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise StartupError(f"cannot write {target}: {error.strerror or error}") from error
    return manifest


def restore(
    source: Path, data: Path, *, now_us: int, progress: Progress, without_keys: bool = False
) -> Backup:
    """Restore the backup *source* into *data*, which must be empty or not exist. A backup without
    API keys is restored only *without_keys*.

    The database is written last, and ids and sequence numbers that were assigned since the backup
    are not assigned again. Raises StartupError before anything is written if the backup is
    incomplete.
    """
    manifest = read_manifest(source)
    _check(source, manifest)
    if KEYS_FILE not in manifest.files and not without_keys:
        raise StartupError(
            f"{source} holds no API keys ({KEYS_FILE}), so the restored service would ask for none:"
            " if the service that was backed up had none, give --without-keys; otherwise restore"
            " another backup"
        )
    _must_be_empty(data)
    lock = DirectoryLock(data)
    try:
        _must_be_empty(data)
        _must_fit(manifest.size, data)
        names = [name for name in reversed(FILES) if name in manifest.files]
        for name in names:
            _copy(source / name, data / (name + UNFINISHED), progress)
        begin_new_life(data / (DATABASE + UNFINISHED), now_us)
        check_file(data / (DATABASE + UNFINISHED))
        for name in names:
            _sync_file(data / (name + UNFINISHED))
        _give_to_owner(data, (*(name + UNFINISHED for name in names), "lock"))
        for name in names:
            (data / (name + UNFINISHED)).rename(data / name)
        sync_directory(data)
    except OSError as error:
        raise StartupError(f"cannot write {data}: {error.strerror or error}") from error
    finally:
        lock.release()
    return manifest


def read_manifest(source: Path) -> Backup:
    """Read the manifest of the backup *source*. Raises StartupError."""
    path = source / MANIFEST
    try:
        with open_regular(path) as file:
            text = file.read(_MANIFEST_BYTES_MAX + 1)
        if len(text) > _MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {_MANIFEST_BYTES_MAX} bytes")
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise StartupError(
                f"{path} is of format {found['format']!r}, and this program knows {_FORMAT}:"
                " restore it with the program that made it, or a newer one"
            )
        files = {name: BackedUpFile(**each) for name, each in found["files"].items()}
        meta = (found["begun_at"], found["version"])
        if not all(isinstance(each, str) and each.isprintable() for each in meta):
            raise ValueError(f"begun_at and version are {meta!r}")
        return Backup(*meta, files)
    except OSError as error:
        raise StartupError(
            f"{source} is no whole backup: {MANIFEST} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError(f"{path} is damaged: {error!r}") from error


def _check(source: Path, manifest: Backup) -> None:
    """Raise StartupError if a file differs from the one that was backed up."""
    if DATABASE not in manifest.files or not set(manifest.files) <= set(FILES):
        raise StartupError(f"{source / MANIFEST} names {sorted(manifest.files)}, not {FILES}")
    for name, said in manifest.files.items():
        path = source / name
        try:
            found = _copied(path)
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from error
        if found != said:
            raise StartupError(
                f"{path} is not what was backed up: it has {found.bytes} bytes with SHA-256"
                f" {found.sha256}, and {MANIFEST} says {said.bytes} and {said.sha256}"
            )
    for name in manifest.files:
        check_schema(source / name)


def _must_be_empty(data: Path) -> None:
    try:
        held = sorted({each.name for each in data.iterdir()} - _NOTHING) if data.exists() else []
    except OSError as error:
        raise StartupError(f"{data} cannot be restored to: {error.strerror}") from error
    if held:
        raise StartupError(
            f"{data} is not empty: it holds {', '.join(held[:5])}; give a directory that is, or"
            " move what it holds away"
        )


def _must_fit(size: int, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if size > free:
        raise StartupError(f"{directory} has {free:,} bytes left, and {size:,} are needed")


def _manifest_of(directory: Path, now_us: int) -> Backup:
    files = {name: _copied(directory / name) for name in FILES if (directory / name).exists()}
    return Backup(to_rfc3339(now_us), __version__, files)


def _write_manifest(directory: Path, manifest: Backup) -> None:
    document: dict[str, Any] = {"format": _FORMAT, **asdict(manifest)}
    path = directory / MANIFEST
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _sync_file(path)


def _copied(path: Path) -> BackedUpFile:
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return BackedUpFile(size, digest.hexdigest())


def _copy(source: Path, target: Path, progress: Progress) -> None:
    size, done = _size(source), 0
    target.touch(mode=0o600)
    with open_regular(source) as reader, target.open("wb") as writer:
        while piece := reader.read(_PIECE):
            writer.write(piece)
            done += len(piece)
            progress(done, size)


def _give_to_owner(data: Path, names: Iterable[str]) -> None:
    """Set the owner of files to that of *data*: root may restore a backup for another user's
    service."""
    if os.geteuid() == 0:
        owner = data.stat()
        for name in names:
            os.chown(data / name, owner.st_uid, owner.st_gid)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
    # The file lacks what a later version adds: tables and indexes, or the last column of one.
    added = [] if is_keys else [UPGRADES[each] for each in range(version, newest) if version]
    for each in added:
        for name in _CREATE.findall(each):
            del expected[name]
        if each.startswith("ALTER TABLE "):
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
