"""Processes that get no more than a share of a core, each by a control group of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
#: So short that a process that has used up its share does not stop for long.
_PERIOD_US: Final = 10_000


def missing() -> str | None:
    """What keeps this process from capping others; None where nothing does."""
    if not _may_write(_groups()):
        return f"control groups in {_groups()} cannot be made here: it takes Linux, and root"
    return None


@contextmanager
def capped(processes: Sequence[int], cores: float) -> Iterator[None]:
    """Let each of *processes* use *cores* of a core at most, all its threads together. Raises
    OSError where that cannot be."""
    quota_us = round(cores * _PERIOD_US)
    groups = _groups()
    made: list[tuple[Path, int]] = []
    try:
        for process in processes:
            group = groups / f"counter-bench-{process}"
            group.mkdir()
            made.append((group, process))
            if _is_unified(groups):
                (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}", encoding="ascii")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
            (group / "cgroup.procs").write_text(str(process), encoding="ascii")
        yield
    finally:
        for group, process in made:
            with suppress(OSError):
                # It may have ended meanwhile.
                (groups / "cgroup.procs").write_text(str(process), encoding="ascii")
            group.rmdir()


def _groups() -> Path:
    """Where the groups that share out processors are: all kinds in one tree, or a tree a kind."""
    return _ROOT if _is_unified(_ROOT) else _ROOT / "cpu"


def _is_unified(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _may_write(groups: Path) -> bool:
    if not groups.is_dir() or not os.access(groups, os.W_OK):
        return False
    if not _is_unified(groups):
        return True
    shared_out = (groups / "cgroup.subtree_control").read_text(encoding="ascii")
    return "cpu" in shared_out.split()
