"""Back up a data directory to a directory with a manifest, and restore it.

A backup directory appears whole or not at all. The manifest has the start time of the copy, the
program's version, and each file's size and SHA-256. A restore verifies all of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from counter import __version__
from counter.clock import to_rfc3339
from counter.config.store_kinds import BackedUpFile, Backup, Progress
from counter.errors import StartupError
from counter.limits import WAL_BYTES_MAX
from counter.regular_file import open_regular, sync_directory
from counter.storage.sqlite.copying import (
    DATABASE,
    FILES,
    begin_new_life,
    check_file,
    check_schema,
    copy_file,
)
from counter.storage.sqlite.keys import KEYS_FILE
from counter.storage.sqlite.page_sums import check_pages
from counter.storage.sqlite.schema import UNFINISHED, DirectoryLock

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_MANIFEST_BYTES_MAX: Final = 64 * 1024
_PIECE: Final = 1 << 20
#: Entries of an empty directory that are allowed: an unheld lock, and the file system's own.
_NOTHING: Final = frozenset({"lock", "lost+found"})


def back_up(
    data: Path,
    target: Path,
    *,
    now_us: int,
    bytes_per_s: float,
    progress: Progress,
    wal_bytes_max: int = WAL_BYTES_MAX,
) -> Backup:
    """Copy the data directory *data* to the new directory *target*.

    Another process may use *data* meanwhile; its write-ahead log may grow up to its limit. Raises
    StartupError and then leaves nothing behind.
    """
    if not (data / DATABASE).exists():
        raise StartupError(f"{data} holds no counters: give the data directory with --data")
    if target.exists() or target.is_symlink():
        raise StartupError(f"{target} is there already: give a directory that is not")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _must_fit(sum(_size(data / name) for name in FILES), target.parent)
        check_pages(data / DATABASE)
        partial.mkdir(mode=0o700)
        try:
            for name in FILES:
                if (data / name).exists():
                    copy_file(data / name, partial / name, bytes_per_s, progress, wal_bytes_max)
            manifest = _manifest_of(partial, now_us)
            _write_manifest(partial, manifest)
            sync_directory(partial)
            partial.rename(target)
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise StartupError(f"cannot write {target}: {error.strerror or error}") from error
    return manifest


def restore(
    source: Path, data: Path, *, now_us: int, progress: Progress, without_keys: bool = False
) -> Backup:
    """Restore the backup *source* into *data*, which must be empty or not exist. A backup without
    API keys is restored only *without_keys*.

    The database is written last, and ids and sequence numbers that were assigned since the backup
    are not assigned again. Raises StartupError before anything is written if the backup is
    incomplete.
    """
    manifest = read_manifest(source)
    _check(source, manifest)
    if KEYS_FILE not in manifest.files and not without_keys:
        raise StartupError(
            f"{source} holds no API keys ({KEYS_FILE}), so the restored service would ask for none:"
            " if the service that was backed up had none, give --without-keys; otherwise restore"
            " another backup"
        )
    _must_be_empty(data)
    lock = DirectoryLock(data)
    try:
        _must_be_empty(data)
        _must_fit(manifest.size, data)
        names = [name for name in reversed(FILES) if name in manifest.files]
        for name in names:
            _copy(source / name, data / (name + UNFINISHED), progress)
        begin_new_life(data / (DATABASE + UNFINISHED), now_us)
        check_file(data / (DATABASE + UNFINISHED))
        for name in names:
            _sync_file(data / (name + UNFINISHED))
        _give_to_owner(data, (*(name + UNFINISHED for name in names), "lock"))
        for name in names:
            (data / (name + UNFINISHED)).rename(data / name)
        sync_directory(data)
    except OSError as error:
        raise StartupError(f"cannot write {data}: {error.strerror or error}") from error
    finally:
        lock.release()
    return manifest


def read_manifest(source: Path) -> Backup:
    """Read the manifest of the backup *source*. Raises StartupError."""
    path = source / MANIFEST
    try:
        with open_regular(path) as file:
            text = file.read(_MANIFEST_BYTES_MAX + 1)
        if len(text) > _MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {_MANIFEST_BYTES_MAX} bytes")
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise StartupError(
                f"{path} is of format {found['format']!r}, and this program knows {_FORMAT}:"
                " restore it with the program that made it, or a newer one"
            )
        files = {name: BackedUpFile(**each) for name, each in found["files"].items()}
        meta = (found["begun_at"], found["version"])
        if not all(isinstance(each, str) and each.isprintable() for each in meta):
            raise ValueError(f"begun_at and version are {meta!r}")
        return Backup(*meta, files)
    except OSError as error:
        raise StartupError(
            f"{source} is no whole backup: {MANIFEST} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError(f"{path} is damaged: {error!r}") from error


def _check(source: Path, manifest: Backup) -> None:
    """Raise StartupError if a file differs from the one that was backed up."""
    if DATABASE not in manifest.files or not set(manifest.files) <= set(FILES):
        raise StartupError(f"{source / MANIFEST} names {sorted(manifest.files)}, not {FILES}")
    for name, said in manifest.files.items():
        path = source / name
        try:
            found = _copied(path)
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from error
        if found != said:
            raise StartupError(
                f"{path} is not what was backed up: it has {found.bytes} bytes with SHA-256"
                f" {found.sha256}, and {MANIFEST} says {said.bytes} and {said.sha256}"
            )
    for name in manifest.files:
        check_schema(source / name)


def _must_be_empty(data: Path) -> None:
    try:
        held = sorted({each.name for each in data.iterdir()} - _NOTHING) if data.exists() else []
    except OSError as error:
        raise StartupError(f"{data} cannot be restored to: {error.strerror}") from error
    if held:
        raise StartupError(
            f"{data} is not empty: it holds {', '.join(held[:5])}; give a directory that is, or"
            " move what it holds away"
        )


def _must_fit(size: int, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if size > free:
        raise StartupError(f"{directory} has {free:,} bytes left, and {size:,} are needed")


def _manifest_of(directory: Path, now_us: int) -> Backup:
    files = {name: _copied(directory / name) for name in FILES if (directory / name).exists()}
    return Backup(to_rfc3339(now_us), __version__, files)


def _write_manifest(directory: Path, manifest: Backup) -> None:
    document: dict[str, Any] = {"format": _FORMAT, **asdict(manifest)}
    path = directory / MANIFEST
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _sync_file(path)


def _copied(path: Path) -> BackedUpFile:
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return BackedUpFile(size, digest.hexdigest())


def _copy(source: Path, target: Path, progress: Progress) -> None:
    size, done = _size(source), 0
    target.touch(mode=0o600)
    with open_regular(source) as reader, target.open("wb") as writer:
        while piece := reader.read(_PIECE):
            writer.write(piece)
            done += len(piece)
            progress(done, size)


def _give_to_owner(data: Path, names: Iterable[str]) -> None:
    """Set the owner of files to that of *data*: root may restore a backup for another user's
    service."""
    if os.geteuid() == 0:
        owner = data.stat()
        for name in names:
            os.chown(data / name, owner.st_uid, owner.st_gid)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
