"""A backlog on disk (SQLite): what a client did not send yet, or has no answer to, survives it.

What ``put`` and ``seal`` returned from is on disk. A token is made, and made durable, right before
its first use: what was never sent has none, so it cannot grow old in the file. After a crash the
piece that was on its way is sent again under the same tokens, so it counts once.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, Final

from counter.client.backlog import Backlog
from counter.client.delivery import Item, Renewed
from counter.client.failures import ClosedError
from counter.client.tokens import Token
from counter.errors import CounterError, InvalidParameterError, StoreUnavailableError

_VERSION: Final = 1
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


class _OfOneProcess(sqlite3.Connection):
    """A connection that a forked child never closes, not even where nothing refers to it any more:
    SQLite would take away the log that the parent goes on writing to."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._pid = os.getpid()
        super().__init__(*given, **named)

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            # One reference that nobody gives back. A list of them would be emptied at the end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class Spool(Backlog):
    """The backlog of one buffer of one namespace. Its methods may be called in any thread, one at a
    time.

    Raises InvalidParameterError where the file cannot be made; ClosedError where another process
    has it, it is no spool, or it belongs to another namespace; StoreUnavailableError where the disk
    is full.
    """

    def __init__(self, path: str | Path, namespace: str) -> None:
        super().__init__()
        self._lock = Lock()
        #: Counters whose totals are not on disk as they are here.
        self._dirty: set[str] = set()
        # Autocommit: each transaction below is begun by name. The lock is held for good.
        try:
            # Absolute: by some names SQLite means no file at all, and nothing would be kept.
            where = Path(path).absolute()
            self._db = sqlite3.connect(
                where,
                timeout=0.0,
                isolation_level=None,
                check_same_thread=False,
                factory=_OfOneProcess,
            )
        except (TypeError, sqlite3.OperationalError) as error:
            raise InvalidParameterError(
                f"the spool {path!r} cannot be opened: {error}; give the path of a file, in a"
                " directory that is there"
            ) from error
        try:
            self._open(where, namespace)
        except BaseException:
            self._db.close()
            raise
        self._piece_totals = len(self._piece)
        self.begun = len(self._totals) + self._piece_totals

    def _open(self, path: str | Path, namespace: str) -> None:
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO owner VALUES (?)", (namespace,))
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute("COMMIT")
            if version > _VERSION:
                raise ClosedError(
                    f"the spool {path} is of a newer client: its version is {version}"
                )
            self._load(path, namespace)
        except sqlite3.DatabaseError as error:
            raise ClosedError(
                f"the spool {path} cannot be opened: {error}; each buffer of each process needs a"
                " file of its own"
            ) from error

    def _load(self, path: str | Path, namespace: str) -> None:
        [owner] = self._db.execute("SELECT namespace FROM owner").fetchone()
        if owner != namespace:
            raise ClosedError(f"the spool {path} belongs to namespace {owner!r}, not {namespace!r}")
        for counter, total in self._db.execute("SELECT counter, total FROM totals"):
            self._totals[counter] = int(total)
        for row, counter, delta, nonce, time_us in self._db.execute("SELECT * FROM piece"):
            # Whether it was sent is not known: it may have been.
            self._piece.append(Item(counter, delta, Token(nonce, time_us), row, sent=True))

    def put(self, adds: dict[str, int]) -> None:
        """Merge *adds*, durably."""
        self._dirty.update(adds)
        super().put(adds)
        if self._dirty:
            totals = ((name, str(self._totals[name])) for name in self._dirty)
            self._write([("INSERT OR REPLACE INTO totals VALUES (?, ?)", totals)])
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
        """Make new tokens durable, before they are used."""
        super().renew(renewed)
        rows = ((token.nonce, token.generation_time_us, each.row) for each, token in renewed)
        update = "UPDATE piece SET nonce = ?, generation_time_us = ? WHERE row = ?"
        self._write([(update, rows)])

    def _save_finished(self) -> None:
        """What was rejected stays in the table of that name, for a person."""
        rejected = (
            (x.counter, x.delta, str(x.token), x.result.code, str(x.result))
            for x in self._piece
            if isinstance(x.result, CounterError)
        )
        insert = "INSERT INTO rejected (counter, delta, token, code, detail) VALUES (?, ?, ?, ?, ?)"
        self._write([(insert, rejected), ("DELETE FROM piece", [()])])

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def _write(self, statements: list[tuple[str, Iterable[tuple[object, ...]]]]) -> None:
        """One durable transaction. Raises StoreUnavailableError, and nothing is written."""
        with self._lock:
            try:
                if self._db.in_transaction:
                    # The one before failed, or was interrupted from the keyboard.
                    self._db.execute("ROLLBACK")
                self._db.execute("BEGIN")
                for statement, rows in statements:
                    self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreUnavailableError(f"the spool cannot be written: {error}") from error
