"""Check a process's settings and environment, without changing anything.

Each check returns findings and raises no error for what it checks, so that all problems are shown.
What `counter serve` checks itself at startup (open files, exposure) is not repeated here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from counter.client import CounterClient, Options, UnexpectedAnswerError
from counter.client.addresses import direct
from counter.client.transport import read_body
from counter.config.report import Loaded
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.durations import format_duration
from counter.errors import CounterError, StartupError
from counter.limits import CLOCK_STEP_MAX_US, SECOND
from counter.ports import Clock
from counter.quantities import format_bytes
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


async def examine(loaded: Loaded, clock: Clock) -> list[Finding]:
    """Check everything that a process with these settings depends on."""
    patience_us = min(loaded.settings.start_timeout, _PATIENCE_US)
    settings = loaded.settings.model_copy(update={"start_timeout": patience_us})
    found = [*_settings(loaded)]
    looks: Sequence[Callable[[], Awaitable[list[Finding]]]] = (
        lambda: _store(settings, clock),
        lambda: _cache(settings, clock),
        lambda: _keys(settings, clock),
    )
    for look in looks:
        found += await look()
    return found


def _settings(loaded: Loaded) -> Iterator[Finding]:
    yield Finding("settings", "ok", f"{len(loaded.origins)} given")
    for each in loaded.warnings:
        yield Finding("settings", "warning", each, "counter config check shows all of them")


async def _store(settings: Settings, clock: Clock) -> list[Finding]:
    if settings.store == "sqlite":
        return [*_directory(settings, clock), *_disk(settings.data)]
    try:
        store = open_store(settings, clock)
        await StartupRetry(settings.start_timeout).run(store.open)
    except (CounterError, StartupError) as error:
        do = "set --contact-points right, start Cassandra, or run counter schema apply as it says"
        return [Finding("store", "wrong", _text(error), do)]
    try:
        datasets = [each.name for each in await store.datasets()]
        namespaces = await store.namespaces()
        found = [
            Finding(
                "store",
                "ok",
                f"Cassandra answers; keyspace {settings.keyspace} has the schema of this version,"
                f" {len(datasets)} datasets ({', '.join(datasets)}), {len(namespaces)} namespaces",
            )
        ]
        guard = ClockGuard(store, clock)
        await guard.measure()
        if guard.trouble is not None:
            do = "synchronize the clocks of this machine and of Cassandra's nodes with NTP"
            return [*found, Finding("clock", "wrong", guard.trouble, do)]
        apart = f"{abs(guard.offset_us) / 1_000:.1f} ms from Cassandra's"
        bound = format_duration(guard.bound_us)
        return [*found, Finding("clock", "ok", f"{apart}; clock_skew_max is {bound}")]
    except CounterError as error:
        return [
            Finding("store", "wrong", error.detail, "look at Cassandra's nodes: nodetool status")
        ]
    finally:
        await store.close()


def _directory(settings: Settings, clock: Clock) -> Iterator[Finding]:
    """Check the data directory, and whether its times are consistent with the clock."""
    from counter.storage.sqlite.glance import glance

    data = settings.data
    if not data.exists():
        yield Finding("store", "ok", f"{data} does not exist yet: counter serve creates it")
        return
    try:
        seen = glance(data)
    except StartupError as error:
        do = "run it as the user that serves, or restore a backup: counter restore --help"
        yield Finding("store", "wrong", str(error), do)
        return
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        do = "run it as the user that serves, or have that user own the directory"
        yield Finding("store", "wrong", f"{data} cannot be written by this user", do)
    by = "no process serves it now" if seen.holder is None else f"process {seen.holder} serves it"
    if seen.version is None:
        yield Finding("store", "ok", f"{data} holds no counters yet; {by}")
    elif seen.version > seen.newest_version:
        yield Finding(
            "schema",
            "wrong",
            f"{data} has schema version {seen.version}; this program knows {seen.newest_version}",
            "start the newer program that made it, or restore a backup of before",
        )
    else:
        later = "" if seen.version == seen.newest_version else ", which the next start brings up"
        yield Finding("store", "ok", f"{data} holds {format_bytes(seen.size)}; {by}")
        yield Finding("schema", "ok", f"version {seen.version} of {seen.newest_version}{later}")
    yield _wal(seen.wal_bytes, settings.wal_bytes_max)
    ahead_us = max(seen.stored_us, seen.written_us) - clock.now_us()
    if ahead_us <= CLOCK_STEP_MAX_US:
        yield Finding("clock", "ok", "not behind what was written last")
        return
    yield Finding(
        "clock",
        "wrong",
        f"{data} holds times that are {ahead_us // SECOND} s ahead of this machine's clock",
        "set the clock right (NTP) if it is wrong; if it was ahead once, writes are refused until"
        ' time has caught up: see "When the clock was wrong" in docs/how-to/read-an-outage.md',
    )


def _wal(size: int, most: int) -> Finding:
    detail = (
        f"the write-ahead log has {format_bytes(size)}; at {format_bytes(most)} writes are refused"
    )
    do = "end the process with a long read of the database: fuser counter.db in the data directory"
    if size >= most:
        return Finding("log", "wrong", detail, do)
    if size >= most * _WAL_SHARE_MAX:
        return Finding("log", "warning", detail, do)
    return Finding("log", "ok", detail)


def _disk(data: Path) -> Iterator[Finding]:
    place = data.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free at {place}"
    do = "make room: adds are refused while the disk is full, and none is lost"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        yield Finding("disk", "wrong", f"{place} is mounted read-only", "mount it writable")
    elif usage.free < _DISK_FULL:
        yield Finding("disk", "wrong", detail, do)
    elif usage.free < min(_DISK_LOW, usage.total * _DISK_SHARE_MIN):
        yield Finding("disk", "warning", detail, do)
    else:
        yield Finding("disk", "ok", detail)


async def _cache(settings: Settings, clock: Clock) -> list[Finding]:
    servers = ", ".join(f"{host}:{port}" for host, port in settings.cache_servers())
    if not servers:
        if settings.store == "sqlite":
            return [Finding("cache", "ok", "kept in the process itself")]
        detail = (
            "each process has its own: fewer reads hit it, and guards miss what others recorded"
        )
        return [Finding("cache", "warning", detail, "give --cache memcached://host to all of them")]
    try:
        cache = open_cache(settings, clock)
        await cache.open()
    except (CounterError, StartupError) as error:
        return [Finding("cache", "wrong", _text(error), "set --cache right")]
    try:
        async with asyncio.timeout(_CACHE_S):
            await cache.ping()
    except (CounterError, TimeoutError) as error:
        why = _text(error) or f"{servers} did not answer within {_CACHE_S:g} s"
        do = "start memcached, or set --cache right; counts stay right meanwhile, only slower"
        return [Finding("cache", "wrong", why, do)]
    finally:
        await cache.close()
    return [Finding("cache", "ok", f"memcached answers: {servers}")]


async def _keys(settings: Settings, clock: Clock) -> list[Finding]:
    try:
        async with opened_keys(settings, clock) as (store, _):
            keys = await store.api_keys()
    except (CounterError, StartupError) as error:
        return [
            Finding(
                "keys",
                "wrong",
                _text(error),
                "check the store: without keys all requests are rejected",
            )
        ]
    valid = [each for each in keys if each.is_valid_at(clock.now_us())]
    detail = "there are none: no request needs one"
    if keys:
        detail = f"{len(valid)} of {len(keys)} are valid; every request needs one"
    found = [Finding("keys", "ok", detail)]
    if keys and not valid:
        do = "create one: counter key create --help"
        found = [
            Finding("keys", "warning", "all are revoked or expired: all requests are rejected", do)
        ]
    return found


def _text(error: BaseException) -> str:
    return error.detail if isinstance(error, CounterError) else str(error)


_TIMEOUT_S: Final = 5.0
#: With a larger difference, tokens made here are late or early for some namespaces.
_APART_S: Final = 1.0
#: It is only read, which creates no counter.
_ANY: Final = "counter-doctor"


def check_service(url: str, api_key: str | None, version: str) -> Iterator[Finding]:
    """Check the service at *url*."""
    try:
        # Like a client of the SDK: hosts on this machine are reached without a proxy.
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, mounts=direct([url])) as http:
            with http.stream("GET", "/readyz") as answer:
                yield _ready(answer, _body(answer, "readyz"))
            yield from _version(http, version)
    except UnexpectedAnswerError as error:
        yield Finding("service", "wrong", error.detail, "set --url right: to the service itself")
        return
    except (httpx.HTTPError, httpx.InvalidURL, OSError, zlib.error) as error:
        why = f"{url} does not answer: {type(error).__name__} {error}".rstrip()
        yield Finding("service", "wrong", why, "start it with counter serve, or set --url right")
        return
    yield _clock(url, api_key)


def _ready(answer: httpx.Response, body: Mapping[str, Any]) -> Finding:
    troubles = body.get("troubles")
    detail = "; ".join(
        f"{each.get('part')}: {each.get('detail')} (since {each.get('since')})"
        for each in (troubles if isinstance(troubles, list) else [])
        if isinstance(each, dict)
    )
    do = "docs/operations.md says what to do about each"
    status = body.get("status")
    if answer.status_code == 200 and status == "ready":
        return Finding("service", "ok", "it answers, and is ready")
    if answer.status_code == 200 and status == "degraded":
        return Finding("service", "warning", f"it works in part: {detail}", do)
    if "code" in body:
        why = detail or str(body.get("detail"))
        return Finding("service", "wrong", f"it answers, and is not ready: {why}", do)
    return Finding(
        "service",
        "wrong",
        f"the server there is not a counter service: status {answer.status_code}",
        "set --url right: without a path, and to the service itself",
    )


def _version(http: httpx.Client, version: str) -> Iterator[Finding]:
    with http.stream("GET", "/openapi.json") as answer:
        info = _body(answer, "openapi").get("info")
    found = info.get("version") if isinstance(info, dict) else None
    if found == version:
        yield Finding("version", "ok", f"it is {version}, as this program")
    elif found is not None:
        detail = f"it is {found}, and this program {version}"
        yield Finding("version", "warning", detail, "upgrade the older one")


def _clock(url: str, api_key: str | None) -> Finding:
    """Compare the service's clock with this one: an accurate read returns the time when it was
    made."""
    try:
        options = Options(deadline_s=_TIMEOUT_S)
        with CounterClient(url, api_key=api_key, options=options) as client:
            names = [each["namespace"] for each in client.namespaces()]
        with CounterClient(url, *names[:1], api_key=api_key, options=options) as client:
            before = datetime.now(UTC)
            as_of = client.get(_ANY, max_staleness="0s").as_of
            after = datetime.now(UTC)
    except CounterError as error:
        do = "give a key that may read: --api-key-file or COUNTER_API_KEY"
        return Finding("service clock", "warning", f"it cannot be read: {error.detail}", do)
    apart_s = (as_of - before - (after - before) / 2).total_seconds()
    surely_s = max(0.0, abs(apart_s) - (after - before).total_seconds() / 2)
    ahead = "ahead of" if apart_s > 0 else "behind"
    detail = f"{abs(apart_s):.3f} s {ahead} this machine's, give or take {(after - before) / 2}"
    if surely_s < _APART_S:
        return Finding("service clock", "ok", detail)
    do = "set both clocks right (NTP): tokens that are made here are late or early there"
    return Finding("service clock", "wrong", detail, do)


def _body(answer: httpx.Response, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(read_body(answer, what, time.perf_counter() + _TIMEOUT_S))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
