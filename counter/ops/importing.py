"""Import a file of counts into a service exactly once, however often that is tried.

A file is an export, other NDJSON, or CSV. It is read whole before anything is counted. Its id at
the target, and how it is split into atomic adds, depend on its content alone: every run, on every
machine, does the same.

The lines are counted in order, about a hundred in one atomic add, and each of these adds also adds
their number to a counter of the target, the *ledger*. Its count is the number of lines imported,
and the next run begins there. Concurrent runs, or a run after a crash, agree on the token of the
next add: its nonce is derived from the file, and its instant is reserved by the service under a key
that is derived from the file, too. docs/how-to/move-counts.md has the argument.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from counter import limits
from counter.errors import StartupError
from counter.limits import MINUTE, PAGE_ITEMS_MAX, SECOND
from counter.names import check_counter_name
from counter.ops.export_file import FORMAT, VERSION, count_line
from counter.ops.regular_file import open_regular
from counter_client import CounterClient, Token
from counter_client.answers import Event
from counter_client.errors import TokenConflictError, TokenTooOldError

#: One item of each atomic add is the ledger's.
ITEMS_MAX: Final = limits.ATOMIC_ITEMS_MAX - 1
#: The largest sum of the items of one atomic add.
COUNT_MAX: Final = ITEMS_MAX * limits.INT64_MAX
#: Longer lines are invalid: the longest name, escaped, is a tenth of it.
_LINE_BYTES_MAX: Final = 64 * 1024
_ID: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
#: Digits of a file's SHA-256 that identify it.
_DIGITS: Final = 32
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
_PERSON: Final = b"counter.import"
_LEDGER: Final = "imported:"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that one atomic add counts: all of them, or none."""

    number: int
    #: The number of lines before it, and the number of its lines.
    first: int
    lines: int
    items: tuple[tuple[str, int], ...]

    @property
    def end(self) -> int:
        return self.first + self.lines

    def token(self, import_id: str, time_us: int) -> Token:
        """Return its token for the instant *time_us*: the same wherever the same file is
        imported."""
        content = json.dumps([import_id, self.number, self.items], ensure_ascii=False)
        digest = hashlib.blake2b(
            content.encode(), digest_size=limits.NONCE_BYTES, person=_PERSON
        ).digest()
        return Token(digest, time_us)


@dataclass(frozen=True, slots=True)
class CountsFile:
    """A file that was read whole and is valid."""

    path: Path
    #: Its id at the target.
    id: str
    #: ``export``, ``ndjson`` or ``csv``.
    kind: str
    lines: int
    sum: int
    #: Size and modification time of the file when it was read.
    stamp: tuple[int, int]
    header: Mapping[str, Any]

    @property
    def ledger(self) -> str:
        """The counter of the target whose count is the number of imported lines."""
        return _LEDGER + self.id

    def counts(self) -> Iterator[tuple[str, int]]:
        """Yield the lines. Raises StartupError if the file has changed."""
        with open_regular(self.path) as file:
            for number, line in enumerate(_lines_of(self.kind, file, None)):
                if number % ITEMS_MAX == 0:
                    self._check_same(file)
                yield line
            # Checked before the last lines are yielded, because a truncated file would have too
            # few.
            self._check_same(file)

    def _check_same(self, file: BinaryIO) -> None:
        if _stamp(file) != self.stamp:
            raise StartupError(f"{self.path} was changed while it was imported")

    def chunks(self) -> Iterator[Chunk]:
        """Yield the lines, in chunks that are one atomic add each."""
        return cut(self.counts())


def examine(
    path: Path, on_progress: Callable[[int, int], None], import_id: str | None = None
) -> CountsFile:
    """Read and check all of *path*; *on_progress* is called with the bytes read and the total.

    *import_id* is the id of a file without its own. Raises StartupError, naming file and line, if
    the file is invalid.
    """
    try:
        with open_regular(path) as file:
            return _examined(path, file, on_progress, import_id)
    except OSError as error:
        raise StartupError(
            f"{path} cannot be read: {error.strerror}; a file is read twice, whole, before anything"
            " is counted"
        ) from error


def cut(counts: Iterable[tuple[str, int]]) -> Iterator[Chunk]:
    """Yield chunks of at most ITEMS_MAX items; a count past 64 bits is several items of one
    chunk."""
    items: list[tuple[str, int]] = []
    number = first = lines = 0
    for counter, count in counts:
        parts = _parts(count)
        if len(items) + len(parts) > ITEMS_MAX:
            yield Chunk(number, first, lines, tuple(items))
            number, first, lines, items = number + 1, first + lines, 0, []
        items += [(counter, part) for part in parts]
        lines += 1
    if items:
        yield Chunk(number, first, lines, tuple(items))


def _parts(count: int) -> list[int]:
    parts: list[int] = []
    while count or not parts:
        part = max(limits.INT64_MIN, min(limits.INT64_MAX, count))
        parts.append(part)
        count -= part
    return parts


def _examined(
    path: Path, file: BinaryIO, on_progress: Callable[[int, int], None], import_id: str | None
) -> CountsFile:
    stamp = _stamp(file)
    kind, header = _kind_of(path, file)
    digest = hashlib.sha256()
    reader = _Watched(path, file, digest.update, on_progress, stamp[0])
    lines = total = 0
    names = _Ascending(path) if kind == "export" else None
    for counter, count in _lines_of(kind, file, reader):
        lines += 1
        total += count
        _check(reader.where, counter, count)
        if names is not None:
            names.check(counter, lines)
    if kind == "export":
        _check_trailer(path, reader, lines, total)
    if _stamp(file) != stamp:
        raise StartupError(f"{path} was changed while it was read")
    chosen = _id_of(path, kind, header, digest.hexdigest(), import_id)
    return CountsFile(path, chosen, kind, lines, total, stamp, header)


def _id_of(path: Path, kind: str, header: Mapping[str, Any], digest: str, given: str | None) -> str:
    if kind == "export":
        if given is not None:
            raise StartupError(f"--id: {path} has an id of its own: {header['export_id']}")
        return str(header["export_id"])
    if given is None:
        return digest[:_DIGITS]
    if not _ID.fullmatch(given):
        raise StartupError(
            f"--id: {given[:80]!r} must have 1 to 64 letters, digits, dots, dashes or underscores"
        )
    # Another file with the same given id is another import.
    return f"{given}-{digest[:_DIGITS]}"


@dataclass(slots=True)
class _Watched:
    """State of the first read: the digest, the line number, the progress."""

    path: Path
    file: BinaryIO
    update: Callable[[bytes], None] = lambda _: None
    on_progress: Callable[[int, int], None] = lambda *_: None
    size: int = 0
    number: int = 0
    #: The trailer of an export, with the digest of everything before it.
    trailer: tuple[Mapping[str, Any], str] | None = None
    _read: int = 0

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"

    def lines(self) -> Iterator[bytes]:
        while line := self.file.readline(_LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > _LINE_BYTES_MAX:
                raise StartupError(f"{self.where}: the line has more than {_LINE_BYTES_MAX} bytes")
            self.update(line)
            self._read += len(line)
            if self.number % 1_000 == 0 or self._read == self.size:
                self.on_progress(self._read, self.size)
            yield line.removeprefix(BOM_UTF8) if self.number == 1 else line

    def of_export(self) -> Iterator[bytes]:
        """Yield lines between header and trailer; store the trailer."""
        digest = hashlib.sha256()
        for line in self.lines():
            if self.trailer is not None:
                raise StartupError(f"{self.where}: there is something after the trailer")
            if self.number > 1:
                found = _object(line)
                if found is not None and "counter" not in found and "sha256" in found:
                    self.trailer = (found, digest.hexdigest())
                    continue
                yield line
            digest.update(line)


class _Ascending:
    """Checks that an export has each counter once, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: str | None = None

    def check(self, counter: str, line: int) -> None:
        if self._last is not None and counter <= self._last:
            raise StartupError(
                f"{self._path}:{line + 1}: {counter!r} comes after {self._last!r}; an export has"
                " each counter once, in order: this one was changed"
            )
        self._last = counter


def _kind_of(path: Path, file: BinaryIO) -> tuple[str, Mapping[str, Any]]:
    """Return the kind of *file*, from its first line, and seek back to the beginning."""
    first = file.readline(_LINE_BYTES_MAX).removeprefix(BOM_UTF8)
    file.seek(0)
    if not first.lstrip().startswith(b"{"):
        return "csv", {}
    found = _object(first)
    if found is None or "format" not in found:
        return "ndjson", {}
    if found["format"] != FORMAT or found.get("version") != VERSION:
        raise StartupError(
            f"{path} is a {found['format']!s:.40} of version {found.get('version')!s:.40}; this"
            f" program reads {FORMAT} of version {VERSION}"
        )
    if not _ID.fullmatch(str(found.get("export_id"))):
        raise StartupError(f"{path}:1: export_id is {found.get('export_id')!s:.80}, which is none")
    return "export", found


def _lines_of(kind: str, file: BinaryIO, watched: _Watched | None) -> Iterator[tuple[str, int]]:
    """Yield the counts in *file*, from its beginning.

    With *watched* everything is checked; without it the file was checked before.
    """
    watched = watched or _Watched(Path(), file)
    if kind == "csv":
        return _csv(watched)
    return _export(watched) if kind == "export" else _ndjson(watched)


def _export(watched: _Watched) -> Iterator[tuple[str, int]]:
    for line in watched.of_export():
        found = count_line(line)
        if found is None:
            raise StartupError(
                f"{watched.where}: it is no line of an export, or a half one: {_shown(line)}"
            )
        yield found.counter, found.count


def _ndjson(watched: _Watched) -> Iterator[tuple[str, int]]:
    for line in watched.lines():
        if not line.strip():
            continue
        found = _object(line)
        counter = None if found is None else found.get("counter")
        count = None if found is None else found.get("count")
        if not isinstance(counter, str) or type(count) is not int:
            raise StartupError(
                f'{watched.where}: it must be {{"counter": "name", "count": 5}}, the count an'
                f" integer; it is {_shown(line)}"
            )
        yield counter, count


def _csv(watched: _Watched) -> Iterator[tuple[str, int]]:
    def text() -> Iterator[str]:
        for line in watched.lines():
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise StartupError(f"{watched.where}: it is not UTF-8") from error

    columns: tuple[int, int] | None = None
    try:
        for row in csv.reader(text(), strict=True):
            if not row:
                continue
            if columns is None:
                columns = (0, 1)
                if "counter" in row and "count" in row:
                    columns = (row.index("counter"), row.index("count"))
                    continue
            if len(row) <= max(columns) or not _INTEGER.fullmatch(row[columns[1]]):
                raise StartupError(
                    f"{watched.where}: it must be name,count with an integer, or the first line"
                    f" must name the columns counter and count; it is {','.join(row)!r:.80}"
                )
            yield row[columns[0]], int(row[columns[1]])
    except csv.Error as error:
        raise StartupError(f"{watched.where}: it is no CSV: {error}") from error


def _check(where: str, counter: str, count: int) -> None:
    try:
        check_counter_name(counter)
    except ValueError as error:
        raise StartupError(f"{where}: {error}") from error
    if abs(count) > COUNT_MAX:
        raise StartupError(f"{where}: the count is {count}; at most {COUNT_MAX} either way")


def _check_trailer(path: Path, watched: _Watched, lines: int, total: int) -> None:
    if watched.trailer is None:
        raise StartupError(
            f"{path} has no trailer: it is a part of an export. Run the export again to finish it"
        )
    trailer, digest = watched.trailer
    for name, found in (("lines", lines), ("sum", total), ("sha256", digest)):
        if trailer.get(name) != found:
            raise StartupError(
                f"{path} was changed after it was exported: {name} is {found}, and its trailer"
                f" says {trailer.get(name)!s:.80}"
            )


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.decode())
    # A line may be nested too deeply for the parser.
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _stamp(file: io.BufferedReader | BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip("\n"))


#: After this time, plus the accept limit, no write of an abandoned add can be applied any more: the
#: write time-out and the difference of clocks.
_SETTLED_US: Final = 5 * MINUTE


#: More than the difference of the clocks of two server processes.
_APART: Final = timedelta(seconds=5)


class LedgerError(Exception):
    """The ledger has a value that imports of this file alone cannot have produced."""


class LaterError(Exception):
    """An import was interrupted so long ago that its key is about to expire."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Times of the target's namespace, in microseconds."""

    accept_limit_us: int
    key_ttl_us: int

    @property
    def margin_us(self) -> int:
        """Return the time after which an add can no longer be applied; shorter if keys expire
        early."""
        return self.accept_limit_us + min(_SETTLED_US, self.key_ttl_us // 4)

    @property
    def chain_us(self) -> int:
        """Return how long after the first instant of a chunk another one may follow.

        The key of the first must not expire while an add under a later one can be applied.
        """
        return self.key_ttl_us - self.margin_us


@dataclass(slots=True)
class Importer:
    """Counts the chunks of one file through a client of the target's namespace.

    Raises the client's CounterErrors, LedgerError, and LaterError.
    """

    client: CounterClient
    id: str
    ledger: str
    horizon: Horizon
    #: The instant of the previous chunk's add.
    _latest: datetime | None = None

    def counted(self) -> int:
        """Return how many lines are counted now."""
        return self.client.get(self.ledger, max_staleness="0s").count

    def run(self, chunks: Iterable[Chunk], done: int, on_progress: Callable[[int], None]) -> None:
        """Count all *chunks*, of which the first *done* lines were counted before; *on_progress* is
        called with the number of counted lines."""
        for chunk in chunks:
            if chunk.end < done:
                # The chunk after it was sent only after this one was known to be counted.
                continue
            self._count(chunk)
            on_progress(chunk.end)

    def _count(self, chunk: Chunk) -> None:
        """Count *chunk*, after all chunks before it."""
        first: datetime | None = None
        after = ""
        while True:
            # Reserve the instant first and read the count afterwards. If another run has another
            # instant because the key expired, it had it so long ago that its result is in this
            # count.
            reserved = self.client.add_and_get(
                self.ledger, 0, token=Token.from_key(f"import:{self.id}:{chunk.number}{after}")
            )
            first = first or reserved.event_time
            if reserved.count > chunk.end:
                return
            if reserved.count == chunk.end:
                if self._is_confirmed(chunk):
                    return
                continue
            if reserved.count != chunk.first:
                raise self._wrong(reserved.count, chunk)
            if _us(reserved.event_time - first) > self.horizon.chain_us:
                raise LaterError(
                    f"lines {chunk.first + 1} to {chunk.end} were begun at {first.isoformat()}, and"
                    f" the key of that is forgotten after {self.horizon.key_ttl_us // SECOND} s;"
                    f" begin again after that: in {self.horizon.margin_us // SECOND} s",
                )
            if not after and self._was_away(reserved.event_time):
                instants = self._forgotten(reserved.event_time)
                if self.counted() != chunk.first:
                    # Other runs continued meanwhile: the listed events may be of a later chunk.
                    continue
                if self._counts_under_one_of(instants, chunk):
                    return
            if self._is_sent(chunk, reserved.event_time):
                self._latest = reserved.event_time
                return
            # The token is void permanently, so the next instant is safe. Its key contains this
            # instant, because the successor of a new first instant must differ from the successor
            # of an expired one.
            after = f":{_time_us(reserved.event_time)}"

    def _is_sent(self, chunk: Chunk, instant: datetime) -> bool:
        """Return whether *chunk* counts under its token of *instant*: if not, it never will."""
        items = [*chunk.items, (self.ledger, chunk.lines)]
        try:
            self.client.atomic(items, token=chunk.token(self.id, _time_us(instant)))
        except TokenTooOldError as error:
            if error.applied is None:
                raise
            return False
        except TokenConflictError as error:
            raise LedgerError(
                f"another file was imported under the same id ({self.ledger!r}): {error.detail}"
            ) from error
        return True

    def _was_away(self, instant: datetime) -> bool:
        """Return whether keys may have expired since this run last counted something."""
        chain = timedelta(microseconds=self.horizon.chain_us)
        return self._latest is None or instant - self._latest >= chain

    def _forgotten(self, instant: datetime) -> list[datetime]:
        """Yield instants before *instant* that other runs may have reserved for the next chunk,
        under keys that are expired: those of adds of 0 after the last counted lines."""
        # Asking with a younger token would count it; and keys of younger ones are not expired.
        late = instant - timedelta(microseconds=self.horizon.margin_us)
        instants: list[datetime] = []
        oldest: datetime | None = None
        for event in self.client.events(self.ledger):
            if oldest is not None and event.event_time < oldest:
                break
            if event.delta and oldest is None:
                # Later ones may come from a process whose clock is behind.
                oldest = event.event_time - _APART
            if not event.delta and event.event_time <= late:
                instants.append(event.event_time)
        return instants[::-1]

    def _counts_under_one_of(self, instants: Iterable[datetime], chunk: Chunk) -> bool:
        """Return whether *chunk* counts under one of some instants whose keys are expired.

        Over Cassandra a crash may leave an add half written, and a rollup worker completes it at an
        unknown time: if no worker has run, that is still to come. Asking about such a token decides
        it permanently.
        """
        try:
            return any(self._is_sent(chunk, each) for each in instants)
        except TokenTooOldError as error:
            # Its events are not dropped yet, so half of the add may exist: do not guess.
            raise LaterError(
                f"lines {chunk.first + 1} to {chunk.end} were begun so long ago that it is unknown"
                " whether they are counted; begin again when those events are dropped, a slice of"
                " time after their retention, by a rollup worker that runs"
            ) from error

    def _is_confirmed(self, chunk: Chunk) -> bool:
        """Return whether *chunk*, the last one in the ledger's count, is permanently counted.

        Possibly no run got the acknowledgement. Then the add is sent again with the same token. If
        it is older than retention, it is permanent.
        """
        event = self._event_of(chunk)
        if event is not None:
            with suppress(TokenTooOldError):
                return self._is_sent(chunk, event.event_time)
        # Unless the count lost it as well, as can happen with a write that was applied too late.
        return self.counted() >= chunk.end

    def _event_of(self, chunk: Chunk) -> Event | None:
        """Return the ledger's event of *chunk*."""
        nonce = chunk.token(self.id, 0).nonce.hex()
        for event in islice(self.client.events(self.ledger), PAGE_ITEMS_MAX):
            if event.event_id.replace("-", "") == nonce:
                return event
        return None

    def _wrong(self, count: int, chunk: Chunk) -> LedgerError:
        return LedgerError(
            f"counter {self.ledger!r} is {count}, which no import of this file leaves after its"
            f" first {chunk.first} lines: somebody else wrote to it, or imports another file under"
            " the same id; nothing more is counted"
        )


def _time_us(instant: datetime) -> int:
    return _us(instant - datetime.fromtimestamp(0, instant.tzinfo))


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)
