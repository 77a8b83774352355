"""Import a file of counts into a service exactly once, however often that is tried.

A file is an export, other NDJSON, or CSV. It is read whole before anything is counted. Its id, and
how it is split into atomic adds, depend on its content alone: every run, on every machine, does the
same.

The lines are counted in order, about a hundred in one atomic add. The time of its token is reserved
by the service under an Idempotency-Key that is made of the file's id and the first line's number,
so all runs send the same token while the service remembers the key. No token is used whose time is
more than half of ``key_ttl`` after the first key: until then no key can be forgotten.
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
from counter.errors import StartupError
from counter.ops.export_file import FORMAT, VERSION
from counter.quantities import check_counter_name, format_duration, plural
from counter.regular_file import open_regular
from counter_client import CounterClient, Token
from counter_client.errors import TokenCancelledError, TokenTooOldError

ITEMS_MAX: Final = limits.ATOMIC_ITEMS_MAX
#: The largest sum of the items of one atomic add.
COUNT_MAX: Final = ITEMS_MAX * limits.INT64_MAX
#: Longer lines are invalid: the longest name, escaped, is a tenth of it.
_LINE_BYTES_MAX: Final = 64 * 1024
_ID: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
#: Digits of a file's SHA-256 that identify it.
_DIGITS: Final = 32
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
_PERSON: Final = b"counter.import"
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that one atomic add counts: all of them, or none."""

    #: The number of lines before it, and of all lines up to its end.
    start: int
    end: int
    items: tuple[tuple[str, int], ...]

    def token(self, import_id: str, time_us: int) -> Token:
        """Return its token for the instant *time_us*: the same wherever the same file is
        imported."""
        content = json.dumps([import_id, self.start, self.items], ensure_ascii=False)
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

    def counts(self) -> Iterator[tuple[str, int]]:
        """Yield the lines. Raises StartupError if the file has changed."""
        with open_regular(self.path) as file:
            for line in _Reader(self.path, file).counts(self.kind):
                self._check_same(file)
                yield line
            # A truncated file has too few lines.
            self._check_same(file)

    def _check_same(self, file: BinaryIO) -> None:
        if _stamp(file) != self.stamp:
            raise StartupError(f"{self.path} was changed while it was imported")


def examine(path: Path) -> CountsFile:
    """Read and check all of *path*.

    Raises StartupError, naming file and line, if it is invalid.
    """
    try:
        with open_regular(path) as file:
            stamp = _stamp(file)
            kind, header = _kind_of(path, file)
            reader = _Reader(path, file)
            total = sum(count for _, count in reader.counts(kind))
            if _stamp(file) != stamp:
                raise StartupError(f"{path} was changed while it was read")
    except OSError as error:
        raise StartupError(
            f"{path} cannot be read: {error.strerror}; a file is read twice, whole, before anything"
            " is counted"
        ) from error
    import_id = str(header["export_id"]) if header else reader.digest.hexdigest()[:_DIGITS]
    return CountsFile(path, import_id, kind, reader.lines, total, stamp, header)


def cut(counts: Iterable[tuple[str, int]]) -> Iterator[Chunk]:
    """Yield chunks of at most ITEMS_MAX items; a count past 64 bits is several items of one
    chunk."""
    items: list[tuple[str, int]] = []
    start = end = 0
    for counter, count in counts:
        parts = _parts(count)
        if len(items) + len(parts) > ITEMS_MAX:
            yield Chunk(start, end, tuple(items))
            start, items = end, []
        items += [(counter, part) for part in parts]
        end += 1
    if items:
        yield Chunk(start, end, tuple(items))


def _parts(count: int) -> list[int]:
    parts: list[int] = []
    while count or not parts:
        part = max(limits.INT64_MIN, min(limits.INT64_MAX, count))
        parts.append(part)
        count -= part
    return parts


@dataclass(slots=True)
class _Reader:
    """Reads a file once from its beginning, and checks each line."""

    path: Path
    file: BinaryIO
    #: The number of the last line.
    number: int = 0
    #: How many counts were yielded.
    lines: int = 0
    #: Of all lines before the one that is read.
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def counts(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield the counts."""
        for counter, count in self._csv() if kind == "csv" else self._objects(kind == "export"):
            try:
                check_counter_name(counter)
            except ValueError as error:
                raise self._wrong(str(error)) from error
            if abs(count) > COUNT_MAX:
                raise self._wrong(f"the count is {count}; at most {COUNT_MAX} either way")
            self.lines += 1
            yield counter, count

    def _wrong(self, why: str) -> StartupError:
        return StartupError(f"{self.path}:{self.number}: {why}")

    def _lines(self) -> Iterator[bytes]:
        while line := self.file.readline(_LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > _LINE_BYTES_MAX:
                raise self._wrong(f"the line has more than {_LINE_BYTES_MAX} bytes")
            yield line.removeprefix(BOM_UTF8) if self.number == 1 else line
            self.digest.update(line)

    def _objects(self, is_export: bool) -> Iterator[tuple[str, int]]:
        """Yield the counts of JSON objects; of an export between its header and its trailer, which
        is checked."""
        total = 0
        is_whole = False
        for line in self._lines():
            if not line.strip() or (is_export and self.number == 1):
                continue
            found = _object(line)
            counter, count = found.get("counter"), found.get("count")
            if is_export and not is_whole and "sha256" in found:
                self._check_trailer(found, total)
                is_whole = True
            elif isinstance(counter, str) and type(count) is int and not is_whole:
                total += count
                yield counter, count
            else:
                shown = repr(line[:60].decode("utf-8", "replace").rstrip("\n"))
                raise self._wrong(
                    'it must be {"counter": "name", "count": 5}, the count an integer, and not'
                    f" after a trailer; it is {shown}"
                )
        if is_export and not is_whole:
            raise StartupError(f"{self.path} has no trailer: it is a part of an export")

    def _check_trailer(self, trailer: Mapping[str, Any], total: int) -> None:
        expected = {"lines": self.lines, "sum": total, "sha256": self.digest.hexdigest()}
        for name, found in expected.items():
            if trailer.get(name) != found:
                raise StartupError(
                    f"{self.path} was changed after it was exported: {name} is {found}, and its"
                    f" trailer says {trailer.get(name)!s:.80}"
                )

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
                    raise self._wrong(
                        "it must be name,count with an integer, or the first line must name the"
                        f" columns counter and count; it is {','.join(row)!r:.80}"
                    )
                yield row[columns[0]], int(row[columns[1]])
        except UnicodeDecodeError as error:
            raise self._wrong("it is not UTF-8") from error
        except csv.Error as error:
            raise self._wrong(f"it is no CSV: {error}") from error


def _kind_of(path: Path, file: BinaryIO) -> tuple[str, Mapping[str, Any]]:
    """Return the kind of *file* and the header of an export, from its first line; seek back to the
    beginning."""
    first = file.readline(_LINE_BYTES_MAX).removeprefix(BOM_UTF8)
    file.seek(0)
    if not first.lstrip().startswith(b"{"):
        return "csv", {}
    found = _object(first)
    if "format" not in found:
        return "ndjson", {}
    if found["format"] != FORMAT or found.get("version") != VERSION:
        raise StartupError(
            f"{path} is a {found['format']!s:.40} of version {found.get('version')!s:.40}; this"
            f" program reads {FORMAT} of version {VERSION}"
        )
    if not _ID.fullmatch(str(found.get("export_id"))):
        raise StartupError(f"{path}:1: export_id is {found.get('export_id')!s:.80}, which is none")
    return "export", found


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of *line*; an empty one if it has none."""
    try:
        found = json.loads(line.decode())
    # A line may be nested too deeply for the parser.
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class ImportRefusedError(Exception):
    """The import must not go on: a line could be counted twice."""


@dataclass(slots=True)
class Importer:
    """Counts the chunks of one file through a client of the target's namespace.

    Raises the client's CounterErrors, and ImportRefusedError.
    """

    client: CounterClient
    id: str
    key_ttl_us: int
    #: Whether this or an earlier run has its first key.
    has_begun: bool = False
    #: Lines, from the first one on, that are known to be counted or cancelled.
    counted: int = 0
    #: Of these, the first and the last of lines that are cancelled, numbered from 1.
    cancelled: list[tuple[int, int]] = field(default_factory=list)

    @property
    def _mark(self) -> str:
        """The counter that counts the adds of the first key: one, until the key is forgotten."""
        return f"imported:{self.id}"

    def find_begun(self) -> bool:
        """Return whether an earlier run of this import began."""
        self.has_begun = self.client.get(self._mark, max_staleness="0s").count != 0
        return self.has_begun

    def run(self, chunks: Iterable[Chunk], on_progress: Callable[[int], None]) -> None:
        """Count all *chunks* but the cancelled ones; *on_progress* is called with the number of
        counted lines. Raises ImportRefusedError at the end if lines are cancelled."""
        try:
            self._run(chunks, on_progress)
        except TokenCancelledError as error:
            raise ImportRefusedError(
                f"an add to {self._mark!r} was cancelled, so this import cannot continue:"
                f" {self._known()} Compare the target with the file (counter export), or import the"
                " file into another namespace"
            ) from error
        if self.cancelled:
            raise ImportRefusedError(
                f"{self._known()} Every run skips them: to count them after all, import them as"
                " another file, with --add"
            )

    def _run(self, chunks: Iterable[Chunk], on_progress: Callable[[int], None]) -> None:
        key = Token.from_key(f"import:{self.id}")
        begun = self.client.add_and_get(self._mark, 1, token=key)
        self.has_begun = True
        # Once the key is forgotten, the same add counts again: the count is more than 1 from then
        # on. Earlier versions counted lines here, and had other keys.
        if begun.count != 1:
            raise self._refused()
        until = begun.event_time + timedelta(microseconds=self.key_ttl_us // 2)
        for chunk in chunks:
            # The next chunk is sent only after this one was acknowledged, or is cancelled, which
            # stays so: another run may have counted later chunks before the cancel.
            self._count(chunk, until)
            self.counted = chunk.end
            on_progress(chunk.end)

    def _count(self, chunk: Chunk, until: datetime) -> None:
        """Count *chunk*. Its token must not be later than *until*."""
        key = f"import:{self.id}:{chunk.start}"
        while True:
            time = self.client.add(self._mark, 0, token=Token.from_key(key)).event_time
            if time > until:
                raise self._refused()
            token = chunk.token(self.id, (time - _EPOCH) // timedelta(microseconds=1))
            try:
                self.client.atomic(chunk.items, token=token)
                return
            except TokenTooOldError as error:
                if error.applied is None:
                    raise
            except TokenCancelledError:
                self._skip(chunk)
                return
            # The token is void permanently, for all runs, so the next time is safe. All runs go
            # through the same times, because each key names the time before.
            key = f"import:{self.id}:{chunk.start}:{token.generation_time_us}"

    def _skip(self, chunk: Chunk) -> None:
        first = chunk.start + 1
        if self.cancelled and self.cancelled[-1][1] == chunk.start:
            first, _ = self.cancelled.pop()
        self.cancelled.append((first, chunk.end))

    def _known(self) -> str:
        """Return a sentence about which lines are counted."""
        if not self.cancelled:
            lines = plural(self.counted, "line is known to be", "lines are known to be")
            return f"{lines} counted, from the first one on."
        ranges = ", ".join(f"{first:,} to {last:,}" for first, last in self.cancelled)
        return (
            f"of the first {self.counted:,} lines all are counted but {ranges}, whose atomic adds"
            " were cancelled."
        )

    def _refused(self) -> ImportRefusedError:
        return ImportRefusedError(
            "this import was finished by an earlier version, or began longer ago than half of"
            f" key_ttl ({format_duration(self.key_ttl_us)}): its keys may be forgotten, and a line"
            f" could be counted twice; {self._known()} Compare the target"
            " with the file (counter export), or import the file into another namespace"
        )
