"""Check a process's settings and environment, without changing anything.

Each check returns findings and raises no error for what it checks, so that all problems are shown.
What `counter serve` checks itself at startup (open files, exposure) is not repeated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from counter.config.findings import Finding, ok, wrong
from counter.config.report import Loaded
from counter.config.settings import Settings
from counter.config.values import without_password
from counter.errors import CounterError, StartupError
from counter.limits import SECOND
from counter.ports import Clock
from counter.storage import open_cache

_CACHE_S: Final = 5.0
#: Shorter than at startup, because the doctor reports the state now.
_PATIENCE_US: Final = 5 * SECOND


async def examine(loaded: Loaded, clock: Clock) -> list[Finding]:
    """Check everything that a process with these settings depends on."""
    patience_us = min(loaded.settings.start_timeout, _PATIENCE_US)
    settings = loaded.settings.model_copy(update={"start_timeout": patience_us})
    found = [ok("settings", f"{len(loaded.origins)} given")]
    do = "counter config check shows all of them"
    found += [Finding("settings", "warning", each, do) for each in loaded.warnings]
    found += [each async for each in settings.kind.check(settings, clock)]
    found.append(await _cache(settings, clock))
    found += [each async for each in _keys(settings, clock)]
    return found


async def _cache(settings: Settings, clock: Clock) -> Finding:
    servers = without_password(settings.cache)
    if servers == "memory":
        if settings.kind.serves_alone:
            return ok("cache", "kept in the process itself")
        detail = "each process has its own: fewer reads hit it"
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
        async with settings.kind.opened_keys(settings, clock) as (store, _):
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
