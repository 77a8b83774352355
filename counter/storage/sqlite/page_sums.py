"""Keep a checksum of each page of the database, and the end of its write-ahead log.

SQLite has no checksums of pages: a flipped bit in an event is another event. And it takes a damaged
frame of the write-ahead log for the log's end, so damage there undoes acknowledged commits without
an error. The file ``counter.db-sums`` beside the database makes both visible at the next start.

After each commit the writer reads the new frames of the log and stores their checksums, in memory
that the kernel writes back. So the file is exact after a crash of the process. After a loss of
power it may lack the commits of the last seconds, but nothing that is not in the log any more: it
is synced before the log can be reset. The pages in the log are then read again, because the log has
checksums of its own.
"""

from __future__ import annotations

import logging
import mmap
import os
import sqlite3
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from counter.errors import DamagedError

#: The suffix of the file's name.
SUMS: Final = "-sums"
#: The pages of a larger database are checked by ``counter audit`` and ``counter backup`` only. So
#: many take about a second, and 1 GiB.
PAGES_CHECKED_AT_START: Final = 262_144
ALL_PAGES: Final = 1 << 32

_log = logging.getLogger("counter.sqlite")
_MAGIC: Final = b"pagesum1"
#: Magic, page size, pages, the log's salts, its frames; then the CRC-32 of these.
_HEADER: Final = struct.Struct("<8sII8sI")
_CRC: Final = struct.Struct("<I")
_ENTRIES_AT: Final = 64
#: The file grows by so many pages' checksums.
_GROWTH_PAGES: Final = 16_384
#: SQLite locks bytes at this offset, and never uses their page.
_LOCKED_BYTE: Final = 0x40000000
#: The beginning of -shm as https://sqlite.org/walformat.html defines it: the page size, the number
#: of committed frames, the number of pages; and the log's salts.
_SHM: Final = struct.Struct("=14xHII")
_SHM_SALTS: Final = slice(32, 40)
_WAL_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_FRAMES_PER_READ: Final = 16
_PAGES_PER_READ: Final = 256
#: A service may be writing meanwhile: its pages are in the log before they are in the database.
_LOOKS_MAX: Final = 20
_PAUSE_S: Final = 0.05
_NAMED_MAX: Final = 5


class _End(NamedTuple):
    """The end of the last commit."""

    page_size: int
    pages: int
    salts: bytes
    frames: int


_NO_SALTS: Final = bytes(8)


def _extend(path: Path, size: int) -> None:
    """Fill the file *path* with zeros up to *size*. Raises OSError if the disk has no room: a write
    to mapped memory would kill the process."""
    with path.open("ab") as file:
        file.write(bytes(size - file.tell()))


def sum_of(page: bytes | memoryview) -> int:
    """Return the checksum of a page; never 0, which is that of a page that was never written."""
    return zlib.crc32(page) or 1


class PageSums:
    """The checksums of the pages of one database, for its only writer."""

    def __init__(self, database: Path, *, pages_checked: int = PAGES_CHECKED_AT_START) -> None:
        """Check the database, which no connection of this process may have open: SQLite's locks
        end when the process closes any handle of the file. At most *pages_checked* pages are read.

        Raises DamagedError if it is damaged, sqlite3.Error and OSError if it cannot be read.
        """
        self._database = database
        self._path = database.with_name(database.name + SUMS)
        self._wal = database.with_name(database.name + "-wal")
        self._shm_path = database.with_name(database.name + "-shm")
        #: -shm and -wal, while they are followed.
        self._handles: list[int] = []
        self._shm: mmap.mmap
        #: Whether no more checksums are kept.
        self._is_abandoned = False
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(handle).st_size
            known = self._known(handle, size)
            if size < _ENTRIES_AT + 4 * _GROWTH_PAGES:
                size = _ENTRIES_AT + 4 * _GROWTH_PAGES
                _extend(self._path, size)
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        try:
            self._end = self._checked(known, pages_checked)
            self._write_end()
            self.flush()
        except BaseException:
            self._map.close()
            raise

    def _known(self, handle: int, size: int) -> _End | None:
        """Return what the file knows; None if it is new."""
        return _parsed(os.pread(handle, _ENTRIES_AT, 0), size, self._path)

    def _checked(self, known: _End | None, pages_checked: int) -> _End:
        """Compare the database with what is known of it, and learn the rest."""
        size = self._database.stat().st_size if self._database.exists() else 0
        if known is not None and not size:
            raise self._damaged(f"it is missing or empty, and had {known.pages:,} pages")
        if not size:
            return _End(0, 0, _NO_SALTS, 0)
        _roll_back(self._database)
        logged = _recovered(self._database)
        if known is not None and not _goes_on(known, logged):
            raise self._damaged(_end_missing(known, logged))
        fresh = dict(self._frames(logged)) if logged.frames else {}
        with self._database.open("rb") as file:
            head = file.read(100)
        page_size = logged.page_size or int.from_bytes(head[16:18], "big") or 1
        page_size = 65_536 if page_size == 1 else page_size
        # A copy that was restored is not in WAL mode yet: SQLite changes its first page.
        is_new = known is None or (head[18:19] == b"\1" and not logged.frames)
        if known is not None and not is_new and page_size != known.page_size:
            raise self._damaged(f"its pages have {page_size} bytes, and had {known.page_size}")
        pages = logged.pages or size // page_size
        if known is None or is_new:
            if known is None:
                _log.info("the pages of %s are taken as they are: it has no checksums", self._path)
            for first, sums in _file_sums(self._database, page_size, _parts(pages)):
                self._store(dict(enumerate(sums, first)))
        else:
            most = pages if logged.frames else max(pages, known.pages)
            if most <= pages_checked:
                wrong = _wrong_pages(self._database, self._map, page_size, _parts(most), fresh)
                if wrong:
                    raise self._damaged(_pages_named(wrong))
        self._store(fresh)
        return _End(page_size, pages, logged.salts, logged.frames)

    def _frames(self, end: _End) -> Iterator[tuple[int, int]]:
        handle = os.open(self._wal, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield from _frame_sums(handle, end.page_size, 0, end.frames)
        finally:
            os.close(handle)

    def _damaged(self, why: str) -> DamagedError:
        return damaged(self._database, why)

    def follow(self) -> None:
        """Begin to follow the log, after the writer's connection was opened."""
        # Kept open until close: closing them earlier would end SQLite's locks.
        for path in (self._shm_path, self._wal):
            self._handles.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._shm = mmap.mmap(self._handles[0], _SHM_SALTS.stop, prot=mmap.PROT_READ)

    def learn(self) -> tuple[int, int]:
        """Store the checksums of what was committed since the last call.

        Returns the number of frames in the log, and the size of its file in bytes. Raises OSError.
        """
        _, wal = self._handles
        end, before = _shm_end(self._shm[: _SHM_SALTS.stop]), self._end
        if end != before and not self._is_abandoned:
            after = before.frames if end.salts == before.salts else 0
            self._store(dict(_frame_sums(wal, end.page_size, after, end.frames)))
            self._end = end
            self._write_end()
        return end.frames, os.fstat(wal).st_size

    def flush(self) -> None:
        """Sync the file. Raises OSError."""
        self._map.flush()

    def close(self) -> None:
        """Close the file, after the last connection was closed."""
        if not self._wal.exists() and not self._is_abandoned:
            # Its pages are all in the database, and the next log has other salts.
            self._end = self._end._replace(salts=_NO_SALTS, frames=0)
            self._write_end()
        self._map.flush()
        self._map.close()
        if self._handles:
            self._shm.close()
        for each in self._handles:
            os.close(each)

    def abandon(self) -> None:
        """Keep no more checksums: the next start takes the pages as they are."""
        self._is_abandoned = True
        self._map[:_ENTRIES_AT] = bytes(_ENTRIES_AT)
        # Otherwise a loss of power may bring back checksums that are out of date.
        with suppress(OSError):
            self._map.flush()

    def _write_end(self) -> None:
        packed = _HEADER.pack(_MAGIC, *self._end)
        self._map[: len(packed) + _CRC.size] = packed + _CRC.pack(zlib.crc32(packed))

    def _store(self, sums: Mapping[int, int]) -> None:
        """Raises OSError if the file must grow and cannot."""
        if (largest := max(sums, default=0)) > (len(self._map) - _ENTRIES_AT) // 4:
            self._grow(largest)
        for page, value in sums.items():
            _CRC.pack_into(self._map, _entry_at(page), value)

    def _grow(self, page: int) -> None:
        size = _ENTRIES_AT + 4 * _GROWTH_PAGES * (page // _GROWTH_PAGES + 1)
        _extend(self._path, size)
        # Not its resize, which macOS does not have.
        self._map.close()
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)


def damaged(database: Path, why: str) -> DamagedError:
    """Return the error about a damaged *database*."""
    return DamagedError(
        f"{database} is damaged: {why}; restore a backup. (If you changed it on purpose with"
        f" another program, delete {database.name}{SUMS}: then its pages are taken as they are)"
    )


def _end_missing(known: _End, logged: _End) -> str:
    return (
        f"the end of its write-ahead log is missing ({logged.frames:,} frames are left of"
        f" {known.frames:,}), and with it acknowledged adds"
    )


def _roll_back(database: Path) -> None:
    """Have SQLite undo its switch to the write-ahead log, if power was lost before the removal of
    the journal of that was durable. The log is durable only after that, so it has no commit yet."""
    if database.with_name(database.name + "-journal").exists():
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _recovered(database: Path) -> _End:
    """Have SQLite find the end of the write-ahead log, without changing any file."""
    wal = database.with_name(database.name + "-wal")
    if not wal.exists() or not wal.stat().st_size:
        return _End(0, 0, _NO_SALTS, 0)
    # A connection that may write would copy the log into the database when it is closed.
    uri = f"file:{quote(str(database.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with database.with_name(database.name + "-shm").open("rb") as file:
            end = _shm_end(file.read(_SHM_SALTS.stop))
    return end if end.frames else _End(0, 0, _NO_SALTS, 0)


def check_pages(database: Path) -> None:
    """Read all pages of *database*, which another process may be writing. Raises DamagedError.

    Without a file of checksums nothing is checked.
    """
    suspects: list[int] | None = None
    why = ""
    for look in range(_LOOKS_MAX):
        if look:
            time.sleep(_PAUSE_S)
        try:
            suspects = _suspects(database, suspects)
        except DamagedError as error:
            # It may have been read while it was written.
            why = str(error)
            continue
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # SQLite's message may have a damaged name in it.
            why = f"{database} is damaged or busy: {error}; restore a backup, or try again"
            continue
        if not suspects:
            return
        why = ""
    raise DamagedError(why) if why else damaged(database, _pages_named(suspects or []))


def _suspects(database: Path, among: list[int] | None) -> list[int]:
    """Return the pages, *among* some or of all, that seem to be wrong: a service may have written
    them between two reads. Raises DamagedError."""
    path = database.with_name(database.name + SUMS)
    wal = database.with_name(database.name + "-wal")
    sums = path.read_bytes() if path.exists() else b""
    known = _parsed(sums[:_ENTRIES_AT], len(sums), path)
    if known is None or not known.page_size:
        return []
    end = _recovered(database)
    if not _goes_on(known, end):
        raise damaged(database, _end_missing(known, end))
    # What is in the log now is not read from the database.
    logged = _pages_in(wal, known) if end.frames else {}
    wrong = [page for page, value in logged.items() if value and value != _known_sum(sums, page)]
    if wrong:
        return wrong
    if among is not None:
        parts = [range(page, page + 1) for page in among]
    else:
        pages = database.stat().st_size // known.page_size
        parts = _parts(pages if logged else max(pages, known.pages))
    return _wrong_pages(database, sums, known.page_size, parts, logged)


def _parsed(head: bytes, size: int, path: Path) -> _End | None:
    """Return the end that a file's *head* has; None if it was never written. Raises
    DamagedError."""
    if not head.strip(b"\0"):
        return None
    packed = head[: _HEADER.size]
    if (
        len(head) < _HEADER.size + _CRC.size
        or _CRC.unpack_from(head, _HEADER.size)[0] != zlib.crc32(packed)
        or not packed.startswith(_MAGIC)
    ):
        raise DamagedError(
            f"{path} is damaged: restore a backup; or check the counters without it: delete it,"
            " and run `counter audit --all`"
        )
    end = _End(*_HEADER.unpack(packed)[1:])
    if not end.pages:
        return None
    if size < _entry_at(end.pages) + 4:
        raise DamagedError(f"{path} is damaged: it has {size:,} bytes: restore a backup")
    return end


def _goes_on(known: _End, logged: _End) -> bool:
    """Return whether no committed frame is missing from the log."""
    if not known.frames or not logged.frames:
        # Without a log each page must be in the database, which is checked.
        return True
    if logged.salts == known.salts:
        return logged.frames >= known.frames
    # SQLite counts up the first salt when it begins the log again.
    ahead = int.from_bytes(logged.salts[:4], "big") - int.from_bytes(known.salts[:4], "big")
    return 0 < ahead % 2**32 < 2**16


def _shm_end(head: bytes) -> _End:
    size, frames, pages = _SHM.unpack_from(head)
    return _End(65_536 if size == 1 else size, pages, head[_SHM_SALTS], frames)


def _frame_sums(wal: int, page_size: int, after: int, frames: int) -> Iterator[tuple[int, int]]:
    """Yield page and checksum of the frames of the log after the first *after*, in order."""
    step = _FRAME_HEADER_BYTES + page_size
    for first in range(after, frames, _FRAMES_PER_READ):
        count = min(_FRAMES_PER_READ, frames - first)
        found = memoryview(os.pread(wal, count * step, _WAL_HEADER_BYTES + first * step))
        for at in range(0, count * step, step):
            page = int.from_bytes(found[at : at + 4], "big")
            yield page, sum_of(found[at + _FRAME_HEADER_BYTES : at + step])


def _known_sum(sums: bytes, page: int) -> int:
    at = _entry_at(page)
    return int(_CRC.unpack_from(sums, at)[0]) if at + 4 <= len(sums) else 0


def _pages_in(wal: Path, known: _End) -> dict[int, int]:
    """Return the pages with frames of the current log, by its salts. The value is the checksum of
    the last frame of a page; 0 if that was written after what is *known*."""
    found: dict[int, int] = {}
    with wal.open("rb") as file:
        salts = file.read(_WAL_HEADER_BYTES)[16:24]
        frames = known.frames if salts == known.salts else 0
        while len(head := file.read(_FRAME_HEADER_BYTES)) == _FRAME_HEADER_BYTES:
            if head[8:16] != salts:
                break
            body = file.read(known.page_size)
            found[int.from_bytes(head[:4], "big")] = sum_of(body) if frames > 0 else 0
            frames -= 1
    return found


def _parts(pages: int) -> list[range]:
    """Return all *pages* in parts that are read at once."""
    return [
        range(first, min(first + _PAGES_PER_READ, pages + 1))
        for first in range(1, pages + 1, _PAGES_PER_READ)
    ]


def _file_sums(
    database: Path, page_size: int, parts: Iterable[range]
) -> Iterator[tuple[int, list[int]]]:
    """Yield the first page and the checksums of each part of the file; 0 for a missing page."""
    with database.open("rb") as file:
        for pages in parts:
            file.seek((pages.start - 1) * page_size)
            part = memoryview(file.read(len(pages) * page_size))
            each = (part[at : at + page_size] for at in range(0, len(pages) * page_size, page_size))
            yield pages.start, [sum_of(page) if len(page) == page_size else 0 for page in each]


def _wrong_pages(
    database: Path,
    sums: bytes | mmap.mmap,
    page_size: int,
    parts: Iterable[range],
    logged: Mapping[int, int],
) -> list[int]:
    """Return the pages of the file that differ from their checksums and are not in the log."""
    unused = _LOCKED_BYTE // page_size + 1
    zeros = sum_of(bytes(page_size))
    wrong = []
    for first, found in _file_sums(database, page_size, parts):
        part = array("I", sums[_entry_at(first) : _entry_at(first + len(found))])
        part.extend([0] * (len(found) - len(part)))
        if part.tolist() == found:
            continue
        for page, (value, known) in enumerate(zip(found, part, strict=True), first):
            # SQLite may use a page beyond the end of the file, free it, and never write it.
            is_unwritten = not known and value == zeros
            if not (value == known or is_unwritten or page == unused or page in logged):
                wrong.append(page)
    return wrong


def _pages_named(wrong: list[int]) -> str:
    named = ", ".join(map(str, wrong[:_NAMED_MAX]))
    more = f" and {len(wrong) - _NAMED_MAX:,} more" if len(wrong) > _NAMED_MAX else ""
    return f"what is in page {named}{more} is not what was written"


def _entry_at(page: int) -> int:
    return _ENTRIES_AT + 4 * (page - 1)
