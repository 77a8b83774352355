"""Import a file of counts into a service exactly once, however often that is tried.

A file is an export, other NDJSON, or CSV. It is read whole before anything is counted. Its id, and
how it is split into atomic adds, depend on its content alone: every run, on every machine, does the
same.

The lines are counted in order, about a hundred in one atomic add. The time of its token is reserved
by the service under an Idempotency-Key that is made of the file's id and the add's number, so all
runs send the same token while the service remembers the key. No token is used whose time is more
than half of ``key_ttl`` after the first key: until then no key can be forgotten. Each add also adds
the number of its lines to a counter of the target, the *ledger*, where a run resumes.
docs/how-to/move-counts.md has the argument.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from counter import limits
from counter.durations import format_duration
from counter.errors import StartupError
from counter.names import check_counter_name
from counter.ops.export_file import FORMAT, VERSION, count_line
from counter.ops.regular_file import open_regular
from counter.quantities import plural
from counter_client import CounterClient, Token
from counter_client.errors import TokenTooOldError

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
#: The counter that counts the first key's adds: one, until the key is forgotten.
_BEGUN: Final = "import-begun:"
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that one atomic add counts: all of them, or none."""

    number: int
    #: The number of its lines, and of all lines up to its end.
    lines: int
    end: int
    items: tuple[tuple[str, int], ...]

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
            for number, line in enumerate(_Reader(self.path, file).counts(self.kind)):
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
    number = lines = end = 0
    for counter, count in counts:
        parts = _parts(count)
        if len(items) + len(parts) > ITEMS_MAX:
            yield Chunk(number, lines, end, tuple(items))
            number, lines, items = number + 1, 0, []
        items += [(counter, part) for part in parts]
        lines, end = lines + 1, end + 1
    if items:
        yield Chunk(number, lines, end, tuple(items))


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
    reader = _Reader(path, file, lambda read: on_progress(read, stamp[0]))
    lines = total = 0
    for counter, count in reader.counts(kind):
        lines += 1
        total += count
        try:
            check_counter_name(counter)
        except ValueError as error:
            raise reader.wrong(str(error)) from error
        if abs(count) > COUNT_MAX:
            raise reader.wrong(f"the count is {count}; at most {COUNT_MAX} either way")
    if kind == "export":
        _check_trailer(path, reader, lines, total)
    on_progress(stamp[0], stamp[0])
    if _stamp(file) != stamp:
        raise StartupError(f"{path} was changed while it was read")
    chosen = _id_of(path, kind, header, reader.digest.hexdigest(), import_id)
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
class _Reader:
    """Reads a file once from its beginning, and checks each line."""

    path: Path
    file: BinaryIO
    #: Called with the bytes read.
    on_progress: Callable[[int], None] = lambda _: None
    #: The number of the last line.
    number: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    #: The trailer of an export, with the digest of everything before it.
    trailer: tuple[Mapping[str, Any], str] | None = None

    def counts(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield the counts."""
        if kind == "csv":
            return self._csv()
        return self._export() if kind == "export" else self._ndjson()

    def wrong(self, why: str) -> StartupError:
        """Return the error that the last line causes."""
        return StartupError(f"{self.path}:{self.number}: {why}")

    def _lines(self) -> Iterator[bytes]:
        read = 0
        while line := self.file.readline(_LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > _LINE_BYTES_MAX:
                raise self.wrong(f"the line has more than {_LINE_BYTES_MAX} bytes")
            self.digest.update(line)
            read += len(line)
            if self.number % 1_000 == 0:
                self.on_progress(read)
            yield line.removeprefix(BOM_UTF8) if self.number == 1 else line

    def _export(self) -> Iterator[tuple[str, int]]:
        """Yield the counts between header and trailer; store the trailer."""
        before = hashlib.sha256()
        for line in self._lines():
            if self.trailer is not None:
                raise self.wrong("there is something after the trailer")
            if self.number > 1:
                content = _object(line)
                if content is not None and "counter" not in content and "sha256" in content:
                    self.trailer = (content, before.hexdigest())
                    continue
                found = count_line(line)
                if found is None:
                    raise self.wrong(f"it is no line of an export, or a half one: {_shown(line)}")
                yield found.counter, found.count
            before.update(line)

    def _ndjson(self) -> Iterator[tuple[str, int]]:
        for line in self._lines():
            if not line.strip():
                continue
            found = _object(line) or {}
            counter, count = found.get("counter"), found.get("count")
            if not isinstance(counter, str) or type(count) is not int:
                raise self.wrong(
                    'it must be {"counter": "name", "count": 5}, the count an integer; it is'
                    f" {_shown(line)}"
                )
            yield counter, count

    def _csv(self) -> Iterator[tuple[str, int]]:
        columns: tuple[int, int] | None = None
        try:
            for row in csv.reader((line.decode() for line in self._lines()), strict=True):
                if not row:
                    continue
                if columns is None:
                    columns = (0, 1)
                    if "counter" in row and "count" in row:
                        columns = (row.index("counter"), row.index("count"))
                        continue
                if len(row) <= max(columns) or not _INTEGER.fullmatch(row[columns[1]]):
                    raise self.wrong(
                        "it must be name,count with an integer, or the first line must name the"
                        f" columns counter and count; it is {','.join(row)!r:.80}"
                    )
                yield row[columns[0]], int(row[columns[1]])
        except UnicodeDecodeError as error:
            raise self.wrong("it is not UTF-8") from error
        except csv.Error as error:
            raise self.wrong(f"it is no CSV: {error}") from error


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


def _check_trailer(path: Path, reader: _Reader, lines: int, total: int) -> None:
    if reader.trailer is None:
        raise StartupError(
            f"{path} has no trailer: it is a part of an export. Run the export again to finish it"
        )
    trailer, digest = reader.trailer
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


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip("\n"))


class ImportRefusedError(Exception):
    """The import must not go on: a line could be counted twice, or another client interfered."""


@dataclass(frozen=True, slots=True)
class Importer:
    """Counts the chunks of one file through a client of the target's namespace.

    Raises the client's CounterErrors, and ImportRefusedError.
    """

    client: CounterClient
    id: str
    ledger: str
    key_ttl_us: int

    def counted(self) -> int:
        """Return how many lines are counted now."""
        return self.client.get(self.ledger, max_staleness="0s").count

    def run(
        self, chunks: Iterable[Chunk], lines: int, done: int, on_progress: Callable[[int], None]
    ) -> None:
        """Count all *chunks*, which have *lines* lines; :meth:`counted` returned *done*.

        *on_progress* is called with the number of counted lines.
        """
        began = self._begin(done)
        if began is None:
            if done < lines:
                raise self._refused()
            return
        until = began + timedelta(microseconds=self.key_ttl_us // 2)
        for chunk in chunks:
            # The chunk after it was sent only after this one was acknowledged. The last one that
            # the ledger has may not be acknowledged: it is sent again.
            if chunk.end >= done:
                self._count(chunk, until)
                on_progress(chunk.end)

    def _begin(self, done: int) -> datetime | None:
        """Return when the first run began; None if the keys of that time may be forgotten."""
        begun = _BEGUN + self.id
        if done and not self.client.get(begun, max_staleness="0s").count:
            # An earlier version of this program imported it, which had other keys.
            return None
        # Once this key is forgotten, the same add counts again: the count is more than 1 from then
        # on.
        added = self.client.add_and_get(begun, 1, token=Token.from_key(f"import:{self.id}"))
        return added.event_time if added.count == 1 else None

    def _count(self, chunk: Chunk, until: datetime) -> None:
        """Count *chunk*, after all chunks before it. Its token must not be later than *until*."""
        key = f"import:{self.id}:{chunk.number}"
        while True:
            time = self.client.add(self.ledger, 0, token=Token.from_key(key)).event_time
            if time > until:
                raise self._refused()
            token = chunk.token(self.id, (time - _EPOCH) // timedelta(microseconds=1))
            try:
                self.client.atomic([*chunk.items, (self.ledger, chunk.lines)], token=token)
                return
            except TokenTooOldError as error:
                if error.applied is None:
                    raise
            # The token is void permanently, for all runs, so the next time is safe. All runs go
            # through the same times, because each key names the time before.
            key = f"import:{self.id}:{chunk.number}:{token.generation_time_us}"

    def _refused(self) -> ImportRefusedError:
        return ImportRefusedError(
            f"the import began longer ago than half of key_ttl"
            f" ({format_duration(self.key_ttl_us)}), or with an earlier version: its keys may be"
            " forgotten, and a line could be counted twice."
            f" {plural(self.counted(), 'line is', 'lines are')} counted, from the first one on, and"
            " no more will be. Import the lines after that as a file of their own, with --add; or"
            " import the file into another namespace"
        )
