"""Open regular files to read, and write files and their names durably."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it; raise OSError for anything else, and never wait.

    Opening a FIFO waits for a writer, and a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that only its owner can read; after the block it is on disk, and replaces
    *path*, atomically. If the block fails, *path* stays as it was. Raises OSError."""
    # In a folder of its own, because in a shared one another user could have put a link there.
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        unfinished.touch(mode=0o600)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the directory *path* durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
