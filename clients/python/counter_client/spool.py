"""A backlog on disk (SQLite): adds without a definite answer survive the process.

``put`` and ``seal`` return when their data is on disk. A token is made and saved right before its
first use, so unsent adds have no token that could expire. After a crash the piece in flight is sent
again under the same tokens, so it counts once.

A damaged slot is refused at the next start. The slot has a sum over all of its rows; the number of
its transactions is in a file beside it, because SQLite takes a damaged frame of its log for the end
of the log.

A spool is a directory that any number of processes share. Each owns one file in it, its slot, and
also sends the adds in slots of dead processes. A spool may also be a single file for one process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sqlite3
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any, ClassVar, Final

from counter_client.delivery import Backlog, Item, Renewed
from counter_client.errors import CounterError, InvalidParameterError, StoreUnavailableError
from counter_client.failures import ClosedError, Rejected, SpoolBusyError
from counter_client.tokens import Token

#: Slots of one namespace in one directory.
SLOTS_MAX: Final = 256
#: How often an empty spool searches for slots of dead processes.
ADOPT_EVERY_S: Final = 60.0
#: How long another process may take to choose a slot.
_CHOICE_S: Final = 10.0
_LOG: Final = logging.getLogger(__name__)
_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE totals (counter TEXT PRIMARY KEY, total TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE piece (
    row INTEGER PRIMARY KEY, counter TEXT NOT NULL, delta INTEGER NOT NULL,
    nonce BLOB NOT NULL, generation_time_us INTEGER NOT NULL
);
CREATE TABLE rejected (
    row INTEGER PRIMARY KEY, counter TEXT NOT NULL, delta INTEGER NOT NULL, token TEXT NOT NULL,
    code TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE TABLE owner (namespace TEXT NOT NULL);
"""
#: The triggers keep the sum over the tables, the namespace, and all that is sent.
_SUMS: Final = (
    "CREATE TABLE state (commits INTEGER NOT NULL, sum INTEGER NOT NULL)",
    """CREATE VIEW sums AS SELECT row_sum(name, sql) AS sum FROM sqlite_master
        UNION ALL SELECT row_sum(namespace) FROM owner
        UNION ALL SELECT row_sum(counter, total) FROM totals
        UNION ALL SELECT row_sum(row, counter, delta, nonce, generation_time_us) FROM piece""",
    """CREATE TRIGGER total_insert AFTER INSERT ON totals BEGIN
        UPDATE state SET sum = sum + row_sum(NEW.counter, NEW.total); END""",
    """CREATE TRIGGER total_update AFTER UPDATE ON totals BEGIN
        UPDATE state SET sum = sum - row_sum(OLD.counter, OLD.total)
            + row_sum(NEW.counter, NEW.total); END""",
    """CREATE TRIGGER total_delete AFTER DELETE ON totals BEGIN
        UPDATE state SET sum = sum - row_sum(OLD.counter, OLD.total); END""",
    """CREATE TRIGGER item_insert AFTER INSERT ON piece BEGIN
        UPDATE state SET sum = sum
            + row_sum(NEW.row, NEW.counter, NEW.delta, NEW.nonce, NEW.generation_time_us); END""",
    """CREATE TRIGGER item_update AFTER UPDATE ON piece BEGIN
        UPDATE state SET sum = sum
            - row_sum(OLD.row, OLD.counter, OLD.delta, OLD.nonce, OLD.generation_time_us)
            + row_sum(NEW.row, NEW.counter, NEW.delta, NEW.nonce, NEW.generation_time_us); END""",
    """CREATE TRIGGER item_delete AFTER DELETE ON piece BEGIN
        UPDATE state SET sum = sum
            - row_sum(OLD.row, OLD.counter, OLD.delta, OLD.nonce, OLD.generation_time_us); END""",
    "INSERT INTO state SELECT 0, sum(sum) FROM sums",
)
#: Unlike INSERT OR REPLACE it fires a trigger for the row that it replaces.
_PUT: Final = (
    "INSERT INTO totals VALUES (?, ?) ON CONFLICT (counter) DO UPDATE SET total = excluded.total"
)


def _row_sum(*row: object) -> int:
    return zlib.crc32(ascii(row).encode())


def _commits_text(commits: int) -> bytes:
    text = b"%020d" % commits
    return text + b" %08x\n" % zlib.crc32(text)


class _OfOneProcess(sqlite3.Connection):
    """A connection that a forked child never closes, not even as garbage: SQLite would remove the
    log that the parent still writes to."""

    #: Held while a file is created and closed, because closing it drops the process's locks on it.
    #: No fork can happen meanwhile, because the spool is locked too.
    creation: ClassVar = Lock()

    def __init__(self, *given: Any, **named: Any) -> None:
        self._pid = os.getpid()
        super().__init__(*given, **named)

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            # Leak one reference. A list of them would be cleared at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _keep_private(path: Path) -> None:
    """Create the file *path* with mode 0600, or remove the permissions of others from it.

    SQLite gives -wal and -shm the mode of the database. An existing file is never opened here:
    closing it would drop SQLite's POSIX locks on it. Raises InvalidParameterError, also for a file
    that another user may have planted.
    """
    try:
        # SQLite would follow a link in place of any of them.
        for end in ("", "-wal", "-shm", "-journal"):
            _make_private(path.with_name(path.name + end))
        with suppress(FileExistsError), _OfOneProcess.creation:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _unusable(path, error) from error


def _make_private(path: Path) -> None:
    """Remove the permissions of others from the file *path*, if it exists."""
    # It may be gone by now.
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != _user():
            raise InvalidParameterError(
                f"{path} in the spool is a link, or belongs to another user: somebody may have"
                " planted it; remove it, or chown it to the user of this process"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            path.chmod(mode & 0o700)


def _user() -> int:
    """Return the user of this process; Windows has no numbers, and its stat() returns 0."""
    return 0 if sys.platform == "win32" else os.geteuid()


def _check_directory(path: Path) -> None:
    """Raise InvalidParameterError if another user but root made the directory *path*, or the link
    to it, for others to use: that user could replace what is in it."""
    link, found = path.lstat(), path.stat()
    is_others = found.st_uid not in (_user(), 0) and found.st_mode & 0o022
    if is_others or (stat.S_ISLNK(link.st_mode) and link.st_uid not in (_user(), 0)):
        raise InvalidParameterError(
            f"the spool {path} belongs to user {found.st_uid}, or is a link of user {link.st_uid},"
            f" and this process runs as {_user()}: give a directory of its own"
        )


def _connected(path: Path, wait_s: float = 0.0) -> sqlite3.Connection:
    """Open a connection in autocommit mode. Raises InvalidParameterError."""
    _keep_private(path)
    return sqlite3.connect(
        path,
        timeout=wait_s,
        isolation_level=None,
        check_same_thread=False,
        factory=_OfOneProcess,
    )


def _locked(path: Path, wait_s: float = 0.0) -> sqlite3.Connection:
    """Open and lock the empty database at *path*; closing the connection unlocks it.

    Unlike flock's, SQLite's lock ends with the process and is not inherited by a fork.
    Raises sqlite3.OperationalError and InvalidParameterError.
    """
    db = _connected(path, wait_s)
    try:
        db.execute("BEGIN IMMEDIATE")
    except BaseException:
        db.close()
        raise
    return db


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def spool_path(path: str | Path) -> Path:
    """Return *path* as absolute: the process may change directory. Raises InvalidParameterError."""
    try:
        if not str(path):
            raise TypeError("it is empty")
        return Path(path).absolute()
    except TypeError as error:
        raise InvalidParameterError(
            f"the spool {path!r} cannot be opened: {error}; give the path of a directory"
        ) from error


class Slot(Backlog):
    """The backlog of one buffer of one namespace, in one file.

    Raises SpoolBusyError if a running process owns the file; ClosedError if it is not a slot or
    belongs to another namespace; InvalidParameterError if it cannot be created;
    StoreUnavailableError if the disk is full. *lock* is held around each later use of SQLite.
    """

    def __init__(self, path: Path, namespace: str, lock: RLock) -> None:
        super().__init__()
        self.path = path
        self._lock = lock
        #: Counters whose totals in memory differ from those on disk.
        self._dirty: set[str] = set()
        #: The transactions of the slot; and the file that they are written to, too. It is not
        #: synced: a loss of power may leave an older number, which is harmless.
        self._commits = 0
        self._commits_path = path.with_name(f"{path.name}-commits")
        try:
            self._claim = _locked(path.with_name(f"{path.name}-lock"))
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise SpoolBusyError(f"another buffer uses {path}") from error
            raise _unusable(path, error) from error
        try:
            self._db = _connected(path)
            try:
                self._open(path, namespace)
            except BaseException:
                self._db.close()
                raise
        except BaseException as error:
            self._claim.close()
            if isinstance(error, sqlite3.OperationalError):
                raise _unusable(path, error) from error
            raise
        self._piece_totals = len(self._piece)
        self.begun = len(self._totals) + self._piece_totals

    def _open(self, path: Path, namespace: str) -> None:
        try:
            # Keep the lock until the connection closes.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.create_function("row_sum", -1, _row_sum, deterministic=True)
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO owner VALUES (?)", (namespace,))
            if version < _VERSION:
                for statement in _SUMS:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute("COMMIT")
            if version > _VERSION:
                raise ClosedError(
                    f"a newer client wrote the spool {path}: its version is {version}"
                )
            self._check(path)
            self._load(path, namespace)
        except OSError as error:
            raise _unusable(path, error) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # SQLite's message may have a damaged name in it.
            is_busy = isinstance(error, sqlite3.Error) and _is_busy(error)
            kind = SpoolBusyError if is_busy else ClosedError
            raise kind(f"the spool {path} cannot be opened: {error}") from error

    def _check(self, path: Path) -> None:
        """Raise ClosedError if the disk changed what was written, or lost it."""
        found = [text for (text,) in self._db.execute("PRAGMA integrity_check(1)")]
        states = self._db.execute(
            "SELECT commits, sum = (SELECT sum(sum) FROM sums) FROM state"
        ).fetchall()
        if found != ["ok"] or [is_right for _, is_right in states] != [1]:
            raise ClosedError(
                f"the spool {path} is damaged: what it holds is not what was written. Move its"
                " files away, and compare the counts with your own records"
            )
        [(self._commits, _)] = states
        _keep_private(self._commits_path)
        known = self._commits_path.read_bytes()
        # After a loss of power it may be empty, or zeros.
        if known.strip(b"\0"):
            most = int(known[:20]) if known[:20].isdigit() else -1
            if known != _commits_text(most) or most > self._commits:
                raise ClosedError(
                    f"the spool {path} is damaged: it ends with transaction {self._commits}, and"
                    f" {self._commits_path.name} says {known[:40]!r}; so adds are lost, or would be"
                    f" sent again. To have it sent as it is, delete {self._commits_path.name}"
                )
        self._save_commits()

    def _save_commits(self) -> None:
        try:
            with self._commits_path.open("r+b", buffering=0) as file:
                file.write(_commits_text(self._commits))
        except OSError as error:
            # What it counts is on disk: only the next check is weaker.
            _LOG.warning("%s cannot be written: %s", self._commits_path, error)

    def _load(self, path: Path, namespace: str) -> None:
        [owner] = self._db.execute("SELECT namespace FROM owner").fetchone()
        if owner != namespace:
            raise ClosedError(f"the spool {path} belongs to namespace {owner!r}, not {namespace!r}")
        for counter, total in self._db.execute("SELECT counter, total FROM totals"):
            self._totals[counter] = int(total)
        for row, counter, delta, nonce, time_us in self._db.execute("SELECT * FROM piece"):
            token = Token(nonce, time_us)
            # It may have been counted.
            item = Item(counter, delta, token, row, sent=True, maybe_counted=True)
            self._piece.append(item)

    def put(self, adds: dict[str, int]) -> None:
        """Merge *adds*, durably."""
        self._dirty.update(adds)
        super().put(adds)
        if self._dirty:
            totals = ((name, str(self._totals[name])) for name in self._dirty)
            self._write([(_PUT, totals)])
            self._dirty.clear()

    def _save_sealed(self, names: list[str], piece: list[Item]) -> None:
        rows = ((x.row, x.counter, x.delta, x.token[0], x.token[1]) for x in piece)
        self._write(
            [
                ("DELETE FROM totals WHERE counter = ?", ((name,) for name in names)),
                ("INSERT INTO piece VALUES (?, ?, ?, ?, ?)", rows),
            ]
        )
        self._dirty.difference_update(names)

    def renew(self, renewed: Renewed) -> None:
        """Make new tokens durable before they are used."""
        super().renew(renewed)
        rows = ((token.nonce, token.generation_time_us, each.row) for each, token in renewed)
        update = "UPDATE piece SET nonce = ?, generation_time_us = ? WHERE row = ?"
        self._write([(update, rows)])

    def _save_finished(self) -> None:
        """Keep rejected items in the table ``rejected``, for the operator."""
        rejected = (
            (x.counter, x.delta, str(x.token), x.result.code, str(x.result))
            for x in self._piece
            if isinstance(x.result, CounterError)
        )
        insert = "INSERT INTO rejected (counter, delta, token, code, detail) VALUES (?, ?, ?, ?, ?)"
        self._write([(insert, rejected), ("DELETE FROM piece", [()])])

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()
            self._claim.close()

    def _write(self, statements: list[tuple[str, Iterable[tuple[object, ...]]]]) -> None:
        """Execute one durable transaction. If it fails, raises StoreUnavailableError."""
        with self._lock:
            try:
                if self._db.in_transaction:
                    # The previous one failed or was interrupted.
                    self._db.execute("ROLLBACK")
                self._db.execute("BEGIN")
                for statement, rows in statements:
                    self._db.executemany(statement, rows)
                self._db.execute("UPDATE state SET commits = ?", (self._commits + 1,))
                self._db.execute("COMMIT")
                self._commits += 1
                self._save_commits()
            except sqlite3.Error as error:
                raise StoreUnavailableError(f"the spool cannot be written: {error}") from error


class Spool:
    """The backlog of one buffer: its own slot and, when that is empty, slots of dead processes.

    Methods may be called in any thread, one at a time. Raises SpoolBusyError if no slot is free;
    otherwise as :class:`Slot`.
    """

    def __init__(
        self, path: str | Path, namespace: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = spool_path(path)
        self._namespace = namespace
        self._now_s = now_s
        self._searched_s = now_s()
        self._adopted: Slot | None = None
        #: Totals of adopted slots that are now empty.
        self._emptied = 0
        self._lock = RLock()
        if sys.platform != "win32":
            # A child must not inherit a SQLite mutex that another thread holds.
            os.register_at_fork(
                before=self._lock.acquire,
                after_in_parent=self._lock.release,
                after_in_child=self._lock.release,
            )
        with self._lock:
            self._own = self._claimed()

    def _claimed(self) -> Slot:
        """Claim a free slot, preferably one with adds of a dead process."""
        path = self._path
        if path.is_file():
            try:
                return Slot(path, self._namespace, self._lock)
            except SpoolBusyError as error:
                raise SpoolBusyError(
                    f"the spool {path} is a file, and another buffer uses it: to share it between"
                    f" processes, stop them, create a directory, and move the file there as"
                    f" {self._namespace}.0"
                ) from error
        try:
            is_new = not path.exists()
            path.mkdir(mode=0o700, exist_ok=True)
            _check_directory(path)
            if is_new and sys.platform != "win32":
                # Otherwise a loss of power may remove the directory with all that is in it.
                parent = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)
        except OSError as error:
            raise _unusable(path, error) from error
        with self._choosing(_CHOICE_S):
            empty: Slot | None = None
            for slot in self._free():
                if len(slot):
                    if empty is not None:
                        empty.close()
                    return slot
                if empty is None:
                    empty = slot
                else:
                    slot.close()
            # An empty slot is false.
            return self._new() if empty is None else empty

    def _free(self) -> Iterator[Slot]:
        """Yield the slots that no running process owns. The caller closes them."""
        for number in sorted(self._numbers()):
            path = self._path / f"{self._namespace}.{number}"
            try:
                yield Slot(path, self._namespace, self._lock)
            except SpoolBusyError:
                continue
            except CounterError as error:
                _LOG.error("the slot %s of a spool is skipped: %s", path, error)

    def _new(self) -> Slot:
        taken = self._numbers()
        number = next((each for each in range(SLOTS_MAX) if each not in taken), None)
        if number is None:
            raise SpoolBusyError(
                f"all {SLOTS_MAX} slots of the spool {self._path} are taken by other buffers: give"
                " some of them another spool"
            )
        return Slot(self._path / f"{self._namespace}.{number}", self._namespace, self._lock)

    def _numbers(self) -> set[int]:
        """Return the numbers of the existing slots."""
        names = re.compile(re.escape(self._namespace) + r"\.(\d{1,4})(?:-[a-z-]+)?", re.ASCII)
        found = (names.fullmatch(each) for each in os.listdir(self._path))
        return {int(each[1]) for each in found if each}

    @contextmanager
    def _choosing(self, wait_s: float) -> Iterator[None]:
        """Hold the lock for choosing slots, so that no process takes another's check of a slot for
        its use. Raises SpoolBusyError."""
        path = self._path / f"{self._namespace}-lock"
        try:
            db = _locked(path, wait_s)
        except sqlite3.OperationalError as error:
            if not _is_busy(error):
                raise _unusable(self._path, error) from error
            raise SpoolBusyError(
                f"another process has held {path} for {wait_s} s to choose a slot of the spool"
            ) from error
        with closing(db):
            yield

    def _adopt(self) -> None:
        """Take a non-empty slot of a dead process, if there is one."""
        self._searched_s = self._now_s()
        if self._path.is_file():
            return
        try:
            with self._lock, self._choosing(0.0):
                for slot in self._free():
                    if len(slot):
                        self._adopted = slot
                        return
                    slot.close()
        except SpoolBusyError:
            # Another process is searching.
            return
        except (CounterError, OSError) as error:
            # The buffer's own slot still works.
            _LOG.error("the spool %s cannot be searched for slots: %s", self._path, error)

    @property
    def _active(self) -> Slot:
        return self._own if self._adopted is None else self._adopted

    @property
    def begun(self) -> int:
        """As in :class:`Backlog`."""
        adopted = 0 if self._adopted is None else self._adopted.begun
        return self._emptied + adopted + self._own.begun

    @property
    def finished(self) -> int:
        """As in :class:`Backlog`."""
        adopted = 0 if self._adopted is None else self._adopted.finished
        return self._emptied + adopted + self._own.finished

    def __len__(self) -> int:
        return len(self._own) + (0 if self._adopted is None else len(self._adopted))

    def put(self, adds: dict[str, int]) -> None:
        """Merge *adds*, durably."""
        self._own.put(adds)

    def seal(self) -> list[Item]:
        """As in :class:`Backlog`, durably."""
        if not len(self) and self._now_s() - self._searched_s >= ADOPT_EVERY_S:
            self._adopt()
        return self._active.seal()

    def renew(self, renewed: Renewed) -> None:
        """Make new tokens durable before they are used."""
        self._active.renew(renewed)

    def finish(self) -> list[Rejected]:
        """As in :class:`Backlog`, durably."""
        rejected = self._active.finish()
        if self._adopted is not None and not len(self._adopted):
            self._emptied += self._adopted.begun
            self._adopted.close()
            self._adopted = None
        if not len(self):
            self._adopt()
        return rejected

    def refused(self) -> list[Rejected]:
        """As in :class:`Backlog`."""
        return self._active.refused()

    def unfinished(self) -> Sequence[Item]:
        """As in :class:`Backlog`."""
        return [item for slot in self._slots() for item in slot.unfinished()]

    def unsent(self) -> Mapping[str, int]:
        """As in :class:`Backlog`."""
        found: dict[str, int] = {}
        for slot in self._slots():
            for counter, delta in slot.unsent().items():
                found[counter] = found.get(counter, 0) + delta
        return found

    def _slots(self) -> list[Slot]:
        return [self._own] if self._adopted is None else [self._adopted, self._own]

    def close(self) -> None:
        """Release the files."""
        for slot in self._slots():
            slot.close()


def _unusable(path: Path, error: Exception) -> InvalidParameterError:
    return InvalidParameterError(
        f"the spool {path} cannot be opened: {error}; give the path of a directory; its parent"
        " must exist"
    )
