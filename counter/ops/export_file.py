"""The file of ``counter export``: NDJSON, with a header before the counts and a trailer after them.

The header says what it is, of what, and under which id; each line is one counter with the instant
its count is exact as of; the trailer has the number of lines, their sum, and the SHA-256 of all
bytes before it. Counters come in code point order, each once. A file without a trailer is a part.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from counter.errors import StartupError

FORMAT: Final = "counter-export"
VERSION: Final = 1
#: The owner's alone, as the data that it comes from.
_MODE: Final = 0o600
#: What must be the same for an export to go on where another one broke off.
_SAME: Final = ("format", "version", "namespace", "created_at", "prefix")


@dataclass(frozen=True, slots=True)
class CountLine:
    """One line between header and trailer."""

    counter: str
    count: int
    as_of: str

    def text(self) -> bytes:
        return json_line({"counter": self.counter, "count": self.count, "as_of": self.as_of})


class ExportWriter:
    """Writes an export to *file*, of which nothing, or the beginning, is there."""

    def __init__(self, file: BinaryIO, header: Mapping[str, Any]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.header = header
        self.lines = 0
        self.sum = 0
        #: The last counter that is in it; the next ones come after it.
        self.last: str | None = None
        self.first_as_of: str | None = None
        self.last_as_of: str | None = None

    def begin(self) -> None:
        """Write the header."""
        self._write(json_line(self.header))

    def put(self, line: CountLine) -> None:
        """Write one count."""
        self._write(line.text())
        self._take(line)

    def end(self, ended_at: str) -> Mapping[str, Any]:
        """Write the trailer, which it gives back."""
        trailer = {
            "lines": self.lines,
            "sum": self.sum,
            "first_as_of": self.first_as_of,
            "last_as_of": self.last_as_of,
            "ended_at": ended_at,
            "sha256": self._digest.hexdigest(),
        }
        self._write(json_line(trailer))
        self._file.flush()
        return trailer

    def go_on(self) -> int:
        """Take what an earlier run wrote, up to the first line that is not whole; its end in bytes.

        Raises StartupError where the header is none, or another one.
        """
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                self._check_header(line)
            else:
                found = count_line(line)
                if found is None or (self.last is not None and found.counter <= self.last):
                    break
                self._take(found)
            self._digest.update(line)
            end += len(line)
        return end

    def _check_header(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = {}
        if not isinstance(found, dict) or any(
            found.get(name) != self.header[name] for name in _SAME
        ):
            raise StartupError(
                "it is no part of an export of this namespace and prefix, or of one that was"
                " deleted and created anew since; remove it to begin anew"
            )
        self.header = found

    def _take(self, line: CountLine) -> None:
        self.lines += 1
        self.sum += line.count
        self.last = line.counter
        self.first_as_of = min(self.first_as_of or line.as_of, line.as_of)
        self.last_as_of = max(self.last_as_of or line.as_of, line.as_of)

    def _write(self, line: bytes) -> None:
        self._digest.update(line)
        self._file.write(line)


class PartFile:
    """``FILE.part``, which becomes ``FILE`` when it is whole. Only one process has it."""

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise StartupError(f"{path} is no name of a file; give one, such as counts.ndjson")
        self.path = path
        self.part = path.with_name(path.name + ".part")

    def __enter__(self) -> Self:
        """Raises StartupError where the file is there, another process writes it, or the part is a
        link or another user's."""
        if self.path.exists():
            raise StartupError(f"{self.path} is there already; remove it, or give another name")
        descriptor = self._opened()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StartupError(f"another export writes {self.part} now") from None
        if self.path.exists():
            # Another one made it whole just now: this may be the very file, under another name.
            os.close(descriptor)
            raise StartupError(f"{self.path} came to be there meanwhile")
        self.file = os.fdopen(descriptor, "r+b")
        return self

    def _opened(self) -> int:
        """Open the part, which only its owner may read. In a directory that others write to, one of
        them may have put a link there that leads to another file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.part, flags, _MODE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StartupError(f"{self.part} is a link; remove it") from None
            raise
        found = os.fstat(descriptor)
        is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not is_file or found.st_uid != os.geteuid():
            os.close(descriptor)
            raise StartupError(
                f"{self.part} is no file of this user's alone; remove it, or give another name"
            )
        # One that an earlier version began others may read.
        os.fchmod(descriptor, _MODE)
        return descriptor

    def __exit__(self, *_: object) -> None:
        # Also at the end of an interrupt: what is whole of it stays.
        self.file.close()

    def begin(self, writer: ExportWriter) -> bool:
        """Have *writer* begin, or go on where an earlier run broke off; whether it goes on."""
        try:
            end = writer.go_on()
        except StartupError as error:
            raise StartupError(f"{self.part}: {error}") from None
        self.file.seek(end)
        self.file.truncate()
        if end == 0:
            writer.begin()
        return end > 0

    def whole(self) -> None:
        """Make what is written the file itself, durably."""
        self.file.flush()
        os.fsync(self.file.fileno())
        _move(self.part, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _move(part: Path, path: Path) -> None:
    """Give *part* the name *path*. Raises StartupError where a file came to be there meanwhile."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise StartupError(
            f"{path} came to be there meanwhile; the export is whole: rename {part} yourself"
        ) from None
    except OSError:
        # There are file systems on which a file has one name only.
        os.rename(part, path)
    else:
        os.unlink(part)


def header_of(
    namespace: Mapping[str, Any], export_id: str, prefix: str, begun_at: str
) -> dict[str, Any]:
    """The header for a *namespace* as the service describes it."""
    settings = {
        name: value
        for name, value in namespace.items()
        if name not in ("namespace", "created_at", "warnings")
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "export_id": export_id,
        "namespace": namespace["namespace"],
        "created_at": namespace["created_at"],
        "prefix": prefix,
        "begun_at": begun_at,
        "settings": settings,
    }


def count_line(line: bytes) -> CountLine | None:
    """What *line* says, where it is whole and has a count."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
        counter, count, as_of = found["counter"], found["count"], found["as_of"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_right = isinstance(counter, str) and type(count) is int and isinstance(as_of, str)
    return CountLine(counter, count, as_of) if is_right else None


def json_line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
