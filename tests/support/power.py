"""What a disk holds after a loss of power, from a record of a process's writes and syncs.

Only what was synced is sure to be there. Any other write may be there too, whole or in sectors. A
file's name is sure to be there once its directory was synced; its removal, too.
"""

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.needs import miss

SOURCE = Path(__file__).with_name("recorder.c")
_HEAD = struct.Struct("<cIQQ")
SECTOR = 512


class Change(NamedTuple):
    """One record; see recorder.c for the kinds. *ends* is the record's length so far."""

    kind: str
    path: Path
    at: int
    data: bytes
    ends: int


@dataclass
class _File:
    """A file's content: the synced part, and the changes since."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def change(self, each: Change) -> None:
        self.pending.append(each)

    def sync(self) -> None:
        self._put(self.synced, None)
        self.pending = []

    def content(self, draw: random.Random | None) -> bytes:
        """All of it; with *draw* only some of the unsynced changes."""
        body = bytearray(self.synced)
        self._put(body, draw)
        return bytes(body)

    def _put(self, body: bytearray, draw: random.Random | None) -> None:
        """Put the changes since the sync into *body*; with *draw* some of them."""
        for each in self.pending:
            if each.kind == "T":
                if draw is None or draw.random() < 0.5:
                    body[each.at :] = bytes(max(0, each.at - len(body)))
                continue
            for start in range(0, len(each.data), SECTOR):
                if draw is not None and draw.random() < 0.5:
                    continue
                part = each.data[start : start + SECTOR]
                at = each.at + start
                body.extend(bytes(max(0, at - len(body))))
                body[at : at + len(part)] = part


class Recorder:
    """Records the writes and syncs of a process below *under*."""

    def __init__(self, place: Path, under: Path, mapped: Path | None = None) -> None:
        """*mapped* is a file that the process writes through memory."""
        compiler = shutil.which("cc")
        if compiler is None:
            miss("recording a process's writes takes a C compiler, cc")
        place.mkdir(exist_ok=True)
        library, self.log = place / "recorder.so", place / "record"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "RECORD_TO": str(self.log),
            "RECORD_UNDER": str(under),
            **({} if mapped is None else {"RECORD_MAPPED": str(mapped)}),
        }

    def length(self) -> int:
        """The record's length: it covers all responses by now."""
        return self.log.stat().st_size

    def changes(self) -> Iterator[Change]:
        body, at = self.log.read_bytes(), 0
        while at < len(body):
            kind, path, offset, size = _HEAD.unpack_from(body, at)
            at += _HEAD.size
            name, at = Path(os.fsdecode(body[at : at + path])), at + path
            data, at = body[at : at + size], at + size
            yield Change(kind.decode(), name, offset, data, at)


class Disk:
    """The files and directories below *under*, and which of them a loss of power leaves."""

    def __init__(
        self, under: Path, mapped_size: int = 0, *, syncs_names_with_files: bool = False
    ) -> None:
        """*syncs_names_with_files*: the sync of a new file syncs its name, as on ext4 and XFS."""
        self._under = under
        self._syncs_names_with_files = syncs_names_with_files
        self._mapped_size = mapped_size
        self._cached: dict[Path, _File | None] = {}
        #: The names that were synced; None is a directory.
        self._named: dict[Path, _File | None] = {under: None}
        self._mapped: dict[Path, list[bytes]] = {}

    def hold(self, content: Path) -> None:
        """Take the tree *content* as the disk's first state."""
        for each in sorted(content.rglob("*")):
            path = self._under / each.relative_to(content)
            file = None if each.is_dir() else _File(bytearray(each.read_bytes()))
            self._cached[path] = self._named[path] = file

    def change(self, each: Change) -> None:
        """Take one change of the record."""
        if each.kind in "CD":
            # The kernel may have written a mapped page at any time since its last sync.
            self._mapped[each.path] = [*self._mapped.get(each.path, []), each.data]
            if each.kind == "D":
                self._mapped[each.path] = [each.data]
        elif each.kind == "N":
            self._cached[each.path] = None
        elif each.kind == "U":
            self._cached.pop(each.path, None)
        elif each.kind == "R":
            # Output of stdio is not recorded.
            if each.path in self._cached:
                self._cached[Path(os.fsdecode(each.data))] = self._cached.pop(each.path)
        elif each.kind == "S" and (each.path == self._under or self._is_directory(each.path)):
            for name in [*self._named]:
                if name.parent == each.path and name not in self._cached:
                    del self._named[name]
            for name, file in self._cached.items():
                if name.parent == each.path:
                    self._named[name] = file
        elif each.kind == "S":
            if each.path in self._cached:
                self._file(each.path).sync()
                if self._syncs_names_with_files:
                    self._named[each.path] = self._file(each.path)
        else:
            self._file(each.path).change(each)

    def _is_directory(self, path: Path) -> bool:
        return path in self._cached and self._cached[path] is None

    def _file(self, path: Path) -> _File:
        found = self._cached.setdefault(path, _File())
        assert found is not None, f"{path} is a directory"
        return found

    def leave(self, at: Path, draw: random.Random, how: str) -> None:
        """Write the remains to *at*: all synced data, and none, all or some of the rest."""
        names = dict(self._named if how == "synced" else self._cached)
        if how == "some":
            names = {k: v for k, v in names.items() if k in self._named or draw.random() < 0.5}
            for name, file in self._named.items():
                if name not in self._cached and draw.random() < 0.5:
                    names[name] = file
        at.mkdir()
        for name in sorted(names):
            if any(
                each != self._under and each not in names and self._under in each.parents
                for each in name.parents
                if each not in self._named
            ):
                continue
            target = at / name.relative_to(self._under)
            file = names[name]
            if file is None:
                target.mkdir(exist_ok=True)
            elif target.parent.is_dir():
                content = (
                    bytes(file.synced)
                    if how == "synced"
                    else file.content(None if how == "all" else draw)
                )
                target.write_bytes(content)
        for name, versions in self._mapped.items():
            target = at / name.relative_to(self._under)
            if target.parent.is_dir():
                version = {"synced": versions[0], "all": versions[-1]}.get(how)
                target.write_bytes(version or draw.choice(versions))
                os.truncate(target, max(self._mapped_size, target.stat().st_size))
