"""Check a data directory, its disk and the clock for ``counter doctor``; it may be served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from counter.config.findings import Finding, graded, ok, wrong
from counter.errors import StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND
from counter.quantities import format_bytes
from counter.storage.sqlite.glance import glance

if TYPE_CHECKING:
    from counter.config.settings import Settings
    from counter.ports import Clock

_GIB: Final = 1024**3
#: Below the first size a warning is given; below the second one adds are about to be rejected.
_DISK_SHARE_MIN: Final = 0.05
_WAL_SHARE_MAX: Final = 0.25
_DISK_LOW: Final = _GIB
_DISK_FULL: Final = 64 * 1024**2


def check_directory(settings: Settings, clock: Clock) -> Iterator[Finding]:
    """Check the data directory, and whether its times are consistent with the clock."""
    data = settings.data
    if not data.exists():
        yield ok("store", f"{data} does not exist yet: counter serve creates it")
        return
    try:
        seen = glance(data)
    except StartupError as error:
        do = "run it as the user that serves, or restore a backup: counter restore --help"
        yield wrong("store", str(error), do)
        return
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        do = "run it as the user that serves, or have that user own the directory"
        yield wrong("store", f"{data} cannot be written by this user", do)
    by = "no process serves it now" if seen.holder is None else f"process {seen.holder} serves it"
    known = seen.newest_version
    if seen.version is None:
        yield ok("store", f"{data} holds no counters yet; {by}")
    elif seen.version > known:
        detail = f"{data} has schema version {seen.version}; this program knows {known}"
        do = "start the newer program that made it, or restore a backup of before"
        yield wrong("schema", detail, do)
    else:
        later = "" if seen.version == known else ", which the next start brings up"
        yield ok("store", f"{data} holds {format_bytes(seen.size)}; {by}")
        yield ok("schema", f"version {seen.version} of {known}{later}")
    size, most = seen.wal_bytes, settings.wal_bytes_max
    detail = (
        f"the write-ahead log has {format_bytes(size)}; at {format_bytes(most)} writes are refused"
    )
    do = "stop the process that has kept the database open: fuser counter.db in the data directory"
    nears = size >= most * _WAL_SHARE_MAX
    yield graded("log", detail, do, wrong=size >= most, warning=nears)
    ahead_us = max(seen.stored_us, seen.written_us) - clock.now_us()
    if ahead_us <= CLOCK_STEP_MAX_US:
        yield ok("clock", "not behind what was written last")
        return
    yield wrong(
        "clock",
        f"{data} holds times that are {ahead_us // SECOND} s ahead of this machine's clock",
        "set the clock right (NTP) if it is wrong; if it was ahead once, writes are refused until"
        ' time has caught up: see "When the clock was wrong" in docs/how-to/read-an-outage.md',
    )


def check_disk(data: Path) -> Iterator[Finding]:
    """Check the space for the data directory *data*."""
    place = data.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free at {place}"
    do = "make room: adds are refused while the disk is full, and none is lost"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        yield wrong("disk", f"{place} is mounted read-only", "mount it writable")
        return
    low = min(_DISK_LOW, usage.total * _DISK_SHARE_MIN)
    yield graded("disk", detail, do, wrong=usage.free < _DISK_FULL, warning=usage.free < low)
