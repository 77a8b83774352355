"""Store API keys in their own small SQLite file, beside the database.

The serving process locks the directory, and keys must be created while it runs: so this file needs
no lock of the directory, and no process keeps it open. It uses a rollback journal: many processes
may use it, each for a moment, and no shared memory is left behind.

A damaged file is refused, because a flipped bit could widen a scope or undo a revocation. The
CRC-32 of all rows is the file's application_id, which is in its first page: so a page that was not
written is noticed, too.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from counter.api_keys import ApiKey
from counter.errors import StoreUnavailableError
from counter.storage.shared.key_documents import KeyReader, key_document, key_from
from counter.storage.sqlite.schema import unavailable

KEYS_FILE: Final = "keys.sqlite3"
#: Only the owner may read it: it contains no secrets, but the rights of each key.
_MODE: Final = 0o600
KEYS_VERSION: Final = 2
#: Files of this version have no checksum until they are changed.
_WITHOUT_SUM: Final = 1
_BUSY_TIMEOUT_S: Final = 5.0
KEYS_DDL: Final = (
    "CREATE TABLE keys (id TEXT PRIMARY KEY, document TEXT NOT NULL, used INTEGER) WITHOUT ROWID"
)

_T = TypeVar("_T")


class SqliteKeys:
    """:class:`counter.api_keys.KeyStore` over a data directory; the first key creates the file and
    the directory."""

    def __init__(self, directory: Path) -> None:
        self._keys_path = directory / KEYS_FILE
        self._key_reader = KeyReader()

    async def api_keys(self) -> Sequence[ApiKey]:
        if not self._keys_path.exists():
            return ()

        def query(connection: sqlite3.Connection) -> Sequence[tuple[str, str, int | None]]:
            return connection.execute("SELECT id, document, used FROM keys").fetchall()

        return self._key_reader.keys(await asyncio.to_thread(self._run, query))

    async def create_api_key(self, key: ApiKey) -> bool:
        def change(connection: sqlite3.Connection) -> bool:
            made = connection.execute(
                "INSERT INTO keys (id, document) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (key.id, key_document(key)),
            )
            return made.rowcount == 1

        return await asyncio.to_thread(self._change, change)

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        def change(connection: sqlite3.Connection) -> bool:
            if _stored(connection, old.id) != old:
                return False
            connection.execute(
                "UPDATE keys SET document = ? WHERE id = ?", (key_document(new), old.id)
            )
            return True

        return await asyncio.to_thread(self._change, change)

    async def forget_api_key(self, key: ApiKey) -> bool:
        def change(connection: sqlite3.Connection) -> bool:
            if _stored(connection, key.id) != key:
                return False
            connection.execute("DELETE FROM keys WHERE id = ?", (key.id,))
            return True

        return await asyncio.to_thread(self._change, change)

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        def change(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "UPDATE keys SET used = max(coalesce(used, 0), ?) WHERE id = ?",
                [(used_us, key_id) for key_id, used_us in uses],
            )

        await asyncio.to_thread(self._change, change)

    def _change(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run *change* in its own transaction, all of it or nothing."""
        try:
            self._have_file()
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailableError(f"{self._keys_path} cannot be made: {error}") from error

        def within(connection: sqlite3.Connection) -> _T:
            result = change(connection)
            connection.execute(f"PRAGMA application_id = {_sum(connection)}")
            connection.execute(f"PRAGMA user_version = {KEYS_VERSION}")
            connection.execute("COMMIT")
            return result

        return self._run(within, "BEGIN IMMEDIATE")

    def _run(self, work: Callable[[sqlite3.Connection], _T], begin: str = "BEGIN") -> _T:
        """Return the result of *work* with a connection that is closed afterwards: what is not
        committed by then is rolled back."""
        try:
            with closing(_connect(self._keys_path)) as connection:
                connection.execute(begin)
                check_keys(connection, self._keys_path)
                return work(connection)
        except UnicodeDecodeError as error:
            # In a message of SQLite's about a damaged name.
            raise StoreUnavailableError(_damaged(self._keys_path)) from error
        except sqlite3.Error as error:
            detail = f"{self._keys_path}: {unavailable(error).detail}"
            if not os.access(self._keys_path, os.R_OK | os.W_OK):
                detail += "; the user that runs this must be able to read and write it"
            raise StoreUnavailableError(detail, retry_after_us=1_000_000) from error

    def _have_file(self) -> None:
        """Create the file and the directory if they do not exist; raises OSError.

        The file is renamed when it is complete, so a file that is incomplete is damaged.
        """
        if self._keys_path.exists():
            return
        directory = self._keys_path.parent
        directory.mkdir(parents=True, exist_ok=True)
        made = directory / f".{KEYS_FILE}.{secrets.token_hex(8)}"
        os.close(os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE))
        try:
            with closing(_connect(made)) as connection:
                connection.executescript(f"{KEYS_DDL};PRAGMA user_version = {_WITHOUT_SUM};")
            if os.geteuid() == 0:
                # Root may manage the keys of a service that runs as another user.
                owner = directory.stat()
                os.chown(made, owner.st_uid, owner.st_gid)
            with suppress(FileExistsError):
                os.link(made, self._keys_path)
        finally:
            made.unlink()


def _connect(path: Path) -> sqlite3.Connection:
    # Reading needs write access, too: the next reader rolls back what a crash left half done.
    uri = f"file:{quote(str(path))}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def check_keys(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreUnavailableError if the file *path* is damaged, or of a later version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > KEYS_VERSION:
        raise StoreUnavailableError(
            f"{path} has version {version}, and this program knows {KEYS_VERSION}:"
            " use the newer program that made it"
        )
    if version < _WITHOUT_SUM:
        # This must not look like a service without keys, which accepts all requests.
        raise StoreUnavailableError(
            f"{path} is empty or cut short; restore it from a backup, or, if no key was ever made,"
            " remove it"
        )
    (known,) = connection.execute("PRAGMA application_id").fetchone()
    if version > _WITHOUT_SUM and known != _sum(connection):
        raise StoreUnavailableError(_damaged(path))


def _damaged(path: Path) -> str:
    return (
        f"{path} is damaged: its keys are not what was written; restore it from a backup, and"
        " revoke again what was revoked since"
    )


def _sum(connection: sqlite3.Connection) -> int:
    """Return the CRC-32 of all rows, as the signed integer that application_id is."""
    rows = connection.execute("SELECT id, document, used FROM keys ORDER BY id").fetchall()
    (shape,) = connection.execute("SELECT group_concat(sql) FROM sqlite_master").fetchone()
    value = zlib.crc32(ascii((rows, shape)).encode())
    return value - 2**32 if value >= 2**31 else value


def _stored(connection: sqlite3.Connection, key_id: str) -> ApiKey | None:
    row = connection.execute(
        "SELECT id, document, used FROM keys WHERE id = ?", (key_id,)
    ).fetchone()
    return None if row is None else key_from(*row)
