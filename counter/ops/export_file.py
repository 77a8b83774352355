"""Write the file of ``counter export``: NDJSON, with a header before and a trailer after the
counts.

The header has the format, the namespace and the id; each line is one counter with the instant that
its count is exact as of; the trailer has the number of lines, their sum, and the SHA-256 of all
bytes before it. Counters are in code point order, each once. A file without a trailer is
incomplete.
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
#: Only the owner may read it, as for the data that it comes from.
_MODE: Final = 0o600
#: Header fields that must match for an export to continue an interrupted one.
_SAME: Final = ("format", "version", "namespace", "created_at", "prefix")


@dataclass(frozen=True, slots=True)
class CountLine:
    """One line between header and trailer."""

    counter: str
    count: int
    as_of: str

    def text(self) -> bytes:
        return json_line({"counter": self.counter, "count": self.count, "as_of": self.as_of})


@dataclass(eq=False)
class ExportWriter:
    """Writes an export to *file*, which is empty or has the beginning of an export."""

    file: BinaryIO
    header: Mapping[str, Any]
    lines: int = 0
    sum: int = 0
    #: The last counter in the file; the next ones come after it.
    last: str | None = None
    first_as_of: str | None = None
    last_as_of: str | None = None

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        """Write the header."""
        self._write(json_line(self.header))

    def put(self, line: CountLine) -> None:
        """Write one count."""
        self._write(line.text())
        self._include(line)

    def end(self, ended_at: str) -> Mapping[str, Any]:
        """Write the trailer and return it."""
        trailer = {
            "lines": self.lines,
            "sum": self.sum,
            "first_as_of": self.first_as_of,
            "last_as_of": self.last_as_of,
            "ended_at": ended_at,
            "sha256": self._digest.hexdigest(),
        }
        self._write(json_line(trailer))
        self.file.flush()
        return trailer

    def resume(self) -> int:
        """Read the lines of an earlier run, up to an incomplete one; return their end in bytes.

        Raises StartupError if the header is missing or different.
        """
        end = 0
        for line in self.file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                self._check_header(line)
            else:
                found = count_line(line)
                if found is None or (self.last is not None and found.counter <= self.last):
                    break
                self._include(found)
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
                " deleted and created again since; remove it to start over"
            )
        self.header = found

    def _include(self, line: CountLine) -> None:
        self.lines += 1
        self.sum += line.count
        self.last = line.counter
        self.first_as_of = min(self.first_as_of or line.as_of, line.as_of)
        self.last_as_of = max(self.last_as_of or line.as_of, line.as_of)

    def _write(self, line: bytes) -> None:
        self._digest.update(line)
        self.file.write(line)


class PartFile:
    """``FILE.part``, which is renamed to ``FILE`` when it is complete. Only one process may hold
    it."""

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise StartupError(f"{path} is no name of a file; give one, such as counts.ndjson")
        self.path = path
        self.part = path.with_name(path.name + ".part")

    def __enter__(self) -> Self:
        """Open and lock the part.

        Raises StartupError if the file exists, another process writes it, or the part is a link or
        another user's file.
        """
        if self.path.exists():
            raise StartupError(f"{self.path} is there already; remove it, or give another name")
        descriptor = self._opened()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StartupError(f"another export writes {self.part} now") from None
        if self.path.exists():
            # Another process completed it just now: this may be the same file under its new name.
            os.close(descriptor)
            raise StartupError(f"{self.path} was created meanwhile")
        self.file = os.fdopen(descriptor, "r+b")
        return self

    def _opened(self) -> int:
        """Open the part with access for its owner only. In a shared directory another user may
        have put a link there that leads to another file."""
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
        # A part of an earlier version may be readable by others.
        os.fchmod(descriptor, _MODE)
        return descriptor

    def __exit__(self, *_: object) -> None:
        # Also when interrupted: complete lines stay.
        self.file.close()

    def begin(self, writer: ExportWriter) -> bool:
        """Have *writer* begin, or continue an interrupted run; return whether it continues."""
        try:
            end = writer.resume()
        except StartupError as error:
            raise StartupError(f"{self.part}: {error}") from None
        self.file.seek(end)
        self.file.truncate()
        if end == 0:
            writer.begin()
        return end > 0

    def whole(self) -> None:
        """Rename the completed part to the file, durably."""
        self.file.flush()
        os.fsync(self.file.fileno())
        _move(self.part, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _move(part: Path, path: Path) -> None:
    """Rename *part* to *path*. Raises StartupError if *path* exists by now."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise StartupError(
            f"{path} was created meanwhile; the export is complete: rename {part} yourself"
        ) from None
    except OSError:
        # Some file systems have no hard links.
        os.rename(part, path)
    else:
        os.unlink(part)


def header_of(
    namespace: Mapping[str, Any], export_id: str, prefix: str, begun_at: str
) -> dict[str, Any]:
    """Return the header for a *namespace* as the service describes it."""
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
    """Parse *line*; return None if it is incomplete or has no count."""
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
