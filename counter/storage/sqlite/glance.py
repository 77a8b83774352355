"""A look at a data directory from outside: no lock, no connection, nothing that anybody notices."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from counter.errors import StartupError
from counter.storage.sqlite.copying import DATABASE
from counter.storage.sqlite.schema import SCHEMA_VERSION

#: https://sqlite.org/fileformat.html#the_database_header
_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_PAGE_BYTES_AT: Final = 16
_CHANGES_AT: Final = 24
_PAGES_AT: Final = 28
_VERSION_AT: Final = 60
#: The number of changes when the pages were counted.
_COUNTED_AT: Final = 92
#: https://sqlite.org/fileformat.html#the_write_ahead_log
_LOG_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_FIRST_PAGE: Final = (1).to_bytes(4, "big")
_HOLDER: Final = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True, slots=True)
class Glance:
    """What can be seen of a data directory."""

    #: The schema's version; None where there is no database yet.
    version: int | None
    #: What is on disk, and when any of it was last written (µs since 1970).
    size: int
    written_at_us: int
    #: What of the size is the write-ahead log.
    wal_bytes: int
    #: The process that serves it now, where that can be told.
    holder: int | None

    @property
    def newest_version(self) -> int:
        """The version that this program makes of it."""
        return SCHEMA_VERSION


def glance(directory: Path) -> Glance:
    """Look at *directory*. Raises StartupError where it is no data directory, or cannot be read."""
    try:
        files = {each.name: each.stat() for each in directory.iterdir() if each.is_file()}
        log = directory / f"{DATABASE}-wal"
        header = _newest(log) or _header(directory / DATABASE)
        holder = _holder(directory / "lock")
    except OSError as error:
        raise StartupError(
            f"{error.filename or directory} cannot be read: {error.strerror}"
        ) from error
    written_at_us = max((each.st_mtime_ns // 1_000 for each in files.values()), default=0)
    size = sum(each.st_size for each in files.values())
    wal_bytes = files[log.name].st_size if log.name in files else 0
    if header is None:
        return Glance(None, size, written_at_us, wal_bytes, holder)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise StartupError(f"{directory / DATABASE} is no SQLite database, or a damaged one")
    # With a log, what is missing may be in it.
    missing = _bytes_told(header) - files[DATABASE].st_size if DATABASE in files else 0
    if missing > 0 and not wal_bytes:
        raise StartupError(f"{directory / DATABASE} is cut: its last {missing} bytes are missing")
    version = int.from_bytes(header[_VERSION_AT : _VERSION_AT + 4], "big")
    return Glance(version, size, written_at_us, wal_bytes, holder)


def _header(path: Path) -> bytes | None:
    """The first bytes of the database; None where there is none, or nothing in it yet."""
    try:
        with path.open("rb") as file:
            return file.read(_HEADER_BYTES) or None
    except FileNotFoundError:
        return None


def _bytes_told(header: bytes) -> int:
    """How long the database is by its *header*; 0 where that does not say."""
    if header[_CHANGES_AT : _CHANGES_AT + 4] != header[_COUNTED_AT : _COUNTED_AT + 4]:
        return 0
    pages = int.from_bytes(header[_PAGES_AT : _PAGES_AT + 4], "big")
    page_bytes = int.from_bytes(header[_PAGE_BYTES_AT : _PAGE_BYTES_AT + 2], "big")
    # 65,536 does not fit, and is written as 1.
    return pages * (65_536 if page_bytes == 1 else page_bytes)


def _newest(log: Path) -> bytes | None:
    """The first bytes of the database as its log last wrote them; None where it did not. A service
    that began a short while ago has most of the database there."""
    try:
        with log.open("rb") as file:
            header = file.read(_LOG_HEADER_BYTES)
            page_bytes, salt = int.from_bytes(header[8:12], "big"), header[16:24]
            found = None
            # What has another salt was written before the log began anew.
            while len(frame := file.read(_FRAME_HEADER_BYTES)) > 0 and frame[8:16] == salt:
                page = file.read(_HEADER_BYTES)
                if frame.startswith(_FIRST_PAGE) and page.startswith(_MAGIC):
                    found = page
                file.seek(page_bytes - len(page), os.SEEK_CUR)
            return found
    except FileNotFoundError:
        return None


def _holder(path: Path) -> int | None:
    """Whom the lock file names, if that process lives on this machine."""
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
