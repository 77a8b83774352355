"""Check a process's settings and environment, without changing anything.

Each check returns findings and raises no error for what it checks, so that all problems are shown.
What `counter serve` checks itself at startup (open files, exposure) is not repeated here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from counter.config.report import Loaded
from counter.config.settings import Settings
from counter.config.values import without_password
from counter.core.clock_guard import guard_of
from counter.durations import format_duration
from counter.errors import CounterError, StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND
from counter.ports import Clock
from counter.quantities import format_bytes, plural
from counter.storage import open_cache, open_store, opened_keys
from counter.storage.shared.startup_retry import StartupRetry

State = Literal["ok", "warning", "wrong"]

_GIB: Final = 1024**3
#: Below the first size a warning is given; below the second one adds are about to be rejected.
_DISK_SHARE_MIN: Final = 0.05
_WAL_SHARE_MAX: Final = 0.25
_DISK_LOW: Final = _GIB
_DISK_FULL: Final = 64 * 1024**2
_CACHE_S: Final = 5.0
#: Shorter than at startup, because the doctor reports the state now.
_PATIENCE_US: Final = 5 * SECOND


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    part: str
    state: State
    detail: str
    #: What to do about it, if it is not ok.
    do: str = ""


#: The name of each server, what to do if it cannot be opened, and where to look if it fails.
_SERVERS: Mapping[str, tuple[str, str, str]] = {
    "postgresql": ("PostgreSQL", "set dsn right, start PostgreSQL", "look at PostgreSQL's log"),
    "dynamodb": (
        *("DynamoDB", "set the region and the credentials right"),
        "look at DynamoDB's metrics of throttled requests and of errors",
    ),
    "cassandra": (
        *("Cassandra", "set --contact-points right, start Cassandra"),
        "look at Cassandra's nodes: nodetool status",
    ),
}


def ok(part: str, detail: str) -> Finding:
    """Return that *part* is right."""
    return Finding(part, "ok", detail)


def wrong(part: str, detail: str, do: str) -> Finding:
    """Return that *part* is wrong, and what to *do* about it."""
    return Finding(part, "wrong", detail, do)


async def examine(loaded: Loaded, clock: Clock) -> list[Finding]:
    """Check everything that a process with these settings depends on."""
    patience_us = min(loaded.settings.start_timeout, _PATIENCE_US)
    settings = loaded.settings.model_copy(update={"start_timeout": patience_us})
    found = [ok("settings", f"{len(loaded.origins)} given")]
    do = "counter config check shows all of them"
    found += [Finding("settings", "warning", each, do) for each in loaded.warnings]
    if settings.store == "sqlite":
        found += [*_directory(settings, clock), *_disk(settings.data)]
    else:
        found += [each async for each in _server(settings, clock)]
    found.append(await _cache(settings, clock))
    found += [each async for each in _keys(settings, clock)]
    return found


async def _server(settings: Settings, clock: Clock) -> AsyncIterator[Finding]:
    """Check a store that is a server."""
    name, start, look = _SERVERS[settings.store]
    try:
        store = open_store(settings, clock)
        await StartupRetry(settings.start_timeout).run(store.open)
    except (CounterError, StartupError) as error:
        yield wrong("store", _text(error), f"{start}, or run counter schema apply as it says")
        return
    try:
        datasets = [each.name for each in await store.control.datasets()]
        namespaces = await store.control.namespaces()
        yield ok(
            "store",
            f"{name} answers; {settings.keyspace} has the schema of this version,"
            f" {plural(len(datasets), 'dataset')} ({', '.join(datasets)}),"
            f" {plural(len(namespaces), 'namespace')}",
        )
        if (server_warnings := store.capabilities.server_warnings) is not None:
            do = "docs/guarantees.md says what each setting of the store loses and when"
            for each in await server_warnings():
                yield Finding("server", "warning", each, do)
        guard = guard_of(store, clock)
        await guard.measure()
        if guard.trouble is not None:
            do = f"synchronize the clocks of this machine and of {name}'s with NTP"
            yield wrong("clock", guard.trouble, do)
            return
        if settings.store == "postgresql":
            yield ok("clock", "PostgreSQL's is followed; it is not behind what is stored")
            return
        apart = f"{abs(guard.offset_us) / 1_000:.1f} ms from {name}'s"
        yield ok("clock", f"{apart}; clock_skew_max is {format_duration(guard.bound_us)}")
    except CounterError as error:
        yield wrong("store", error.detail, look)
    finally:
        await store.close()


def _directory(settings: Settings, clock: Clock) -> Iterator[Finding]:
    """Check the data directory, and whether its times are consistent with the clock."""
    from counter.storage.sqlite.glance import glance

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
    do = "end the process with a long read of the database: fuser counter.db in the data directory"
    state = _state(wrong=size >= most, warning=size >= most * _WAL_SHARE_MAX)
    yield Finding("log", state, detail, "" if state == "ok" else do)
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


def _state(*, wrong: bool, warning: bool) -> State:
    return "wrong" if wrong else "warning" if warning else "ok"


def _disk(data: Path) -> Iterator[Finding]:
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
    state = _state(wrong=usage.free < _DISK_FULL, warning=usage.free < low)
    yield Finding("disk", state, detail, "" if state == "ok" else do)


async def _cache(settings: Settings, clock: Clock) -> Finding:
    servers = without_password(settings.cache)
    if servers == "memory":
        if settings.store == "sqlite":
            return ok("cache", "kept in the process itself")
        detail = "each process has its own: fewer reads hit it"
        if settings.store == "cassandra":
            detail += ", and guards miss what others recorded"
        return Finding("cache", "warning", detail, "give all of them one cache: memcached or Redis")
    try:
        cache = open_cache(settings, clock)
        await cache.open()
    except (CounterError, StartupError) as error:
        return wrong("cache", _text(error), "set --cache right")
    try:
        async with asyncio.timeout(_CACHE_S):
            await cache.ping()
    except (CounterError, TimeoutError) as error:
        why = _text(error) or f"{servers} did not answer within {_CACHE_S:g} s"
        do = "start it, or set --cache right; counts stay right meanwhile, only slower"
        return wrong("cache", why, do)
    finally:
        await cache.close()
    return ok("cache", f"it answers: {servers}")


async def _keys(settings: Settings, clock: Clock) -> AsyncIterator[Finding]:
    try:
        async with opened_keys(settings, clock) as (store, _):
            keys = await store.api_keys()
    except (CounterError, StartupError) as error:
        do = "check the store: without keys all requests are rejected"
        yield wrong("keys", _text(error), do)
        return
    valid = [each for each in keys if each.is_valid_at(clock.now_us())]
    if not keys:
        yield ok("keys", "there are none: no request needs one")
        return
    yield ok("keys", f"{len(valid)} of {len(keys)} are valid; every request needs one")
    if not valid:
        detail = "all are revoked or expired: all requests are rejected"
        yield Finding("keys", "warning", detail, "create one: counter key create --help")


def _text(error: BaseException) -> str:
    return error.detail if isinstance(error, CounterError) else str(error)
