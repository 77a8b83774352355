"""Disks that are small, full or read-only: real ones, which takes root to mount."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)


class Disk:
    """A file system of its own, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: str) -> None:
        """Give it another size, such as ``64m``."""
        _mount("-o", f"remount,size={size}", str(self.path))

    def fill(self) -> None:
        """Leave no room for anything else."""
        with (self.path / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4_096))
            except OSError:
                return

    def make_room(self) -> None:
        """Take :meth:`fill` back."""
        (self.path / "ballast").unlink()

    def make_read_only(self) -> None:
        _mount("-o", "remount,ro", str(self.path))

    def make_writable(self) -> None:
        _mount("-o", "remount,rw", str(self.path))


@contextmanager
def mounted(path: Path, size: str) -> Iterator[Disk]:
    """A disk at *path*, gone at the end. Skips if the system does not allow mounts."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a disk takes root and the mount command")
    path.mkdir(parents=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk can be mounted here: {error.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
