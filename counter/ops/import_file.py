"""Read files of counts for ``counter import``: an export, other NDJSON, or CSV.

A file is read whole before anything is counted. Its id at the target, and how it is split into
atomic adds, depend on its content alone: every run, on every machine, does the same.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from counter import limits
from counter.client import Token
from counter.errors import StartupError
from counter.names import check_counter_name
from counter.ops.export_file import FORMAT, VERSION, count_line

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
        with self.path.open("rb") as file:
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
        with path.open("rb") as file:
            return _examined(path, file, on_progress, import_id)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error


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
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise StartupError(
            f"{path} is no file: it is read twice, whole, before anything is counted; save it first"
        )
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


class _Watched:
    """State of the first read: the digest, the line number, the progress."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        update: Callable[[bytes], None],
        on_progress: Callable[[int, int], None],
        size: int,
    ) -> None:
        self.path = path
        self.number = 0
        #: The trailer of an export, with the digest of everything before it.
        self.trailer: tuple[Mapping[str, Any], str] | None = None
        self._file = file
        self._update = update
        self._on_progress = on_progress
        self._size = size
        self._export = hashlib.sha256()
        self._read = 0

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"

    def lines(self) -> Iterator[bytes]:
        while line := self._file.readline(_LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > _LINE_BYTES_MAX:
                raise StartupError(f"{self.where}: the line has more than {_LINE_BYTES_MAX} bytes")
            self._update(line)
            self._read += len(line)
            if self.number % 1_000 == 0 or self._read == self._size:
                self._on_progress(self._read, self._size)
            yield line

    def of_export(self) -> Iterator[bytes]:
        """Yield lines between header and trailer; store the trailer."""
        for line in self.lines():
            if self.trailer is not None:
                raise StartupError(f"{self.where}: there is something after the trailer")
            if self.number > 1:
                found = _object(line)
                if found is not None and "counter" not in found and "sha256" in found:
                    self.trailer = (found, self._export.hexdigest())
                    continue
                yield line
            self._export.update(line)


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
    first = file.readline(_LINE_BYTES_MAX)
    file.seek(0)
    if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
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
    watched = watched or _Watched(Path(), file, lambda _: None, lambda *_: None, 0)
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
                yield line.decode("utf-8-sig" if watched.number == 1 else "utf-8")
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
        found = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    # A line may be nested too deeply for the parser.
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _stamp(file: io.BufferedReader | BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip("\n"))
