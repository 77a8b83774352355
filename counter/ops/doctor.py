"""Check the settings and the environment of a process, and a running service, without changing
anything.

Each check returns findings and raises no error for what it checks, so that all problems are shown.
What `counter serve` checks itself at startup (open files, exposure) is not repeated here.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from typing import Final

from counter.config.findings import Finding, ok, warning, wrong
from counter.config.report import Loaded
from counter.config.settings import Settings
from counter.config.values import without_password
from counter.errors import CounterError, StartupError
from counter.limits import SECOND
from counter.ports import Clock
from counter.storage import open_cache

_TIMEOUT_S: Final = 5.0


async def examine(loaded: Loaded, clock: Clock) -> list[Finding]:
    """Check everything that a process with these settings depends on."""
    # Not longer, because the doctor reports the state now.
    patience_us = min(loaded.settings.start_timeout, int(_TIMEOUT_S * SECOND))
    settings = loaded.settings.model_copy(update={"start_timeout": patience_us})
    do = "counter config check shows all of them"
    found = [ok("settings", f"{len(loaded.origins)} given")]
    found += [warning("settings", each, do) for each in loaded.warnings]
    found += [each async for each in settings.kind.check(settings, clock)]
    return [*found, await _cache(settings, clock)]


async def _cache(settings: Settings, clock: Clock) -> Finding:
    servers = without_password(settings.cache)
    if servers == "memory":
        return ok("cache", "kept in the process itself")
    try:
        cache = open_cache(settings, clock)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await cache.open()
                await cache.ping()
        finally:
            await cache.close()
    except (CounterError, StartupError, TimeoutError) as error:
        why = str(error) or f"{servers} did not answer within {_TIMEOUT_S:g} s"
        do = "start it, or set --cache right; without it counts stay right, but reads are slower"
        return wrong("cache", why, do)
    return ok("cache", f"it answers: {servers}")


def check_service(url: str) -> Finding:
    """Ask the service at *url* whether it can do its work."""
    # Only this needs the client.
    import httpx

    from counter_client import CounterError as ClientError
    from counter_client import Options
    from counter_client.transport import Common, read_body

    try:
        # By the same proxies and certificates as a client's.
        settings = Common([url], None, Options()).settings(httpx.HTTPTransport)
        with (
            httpx.Client(base_url=url, timeout=_TIMEOUT_S, **settings) as http,
            http.stream("GET", "/readyz") as response,
        ):
            body = read_body(response, "readyz", time.perf_counter() + _TIMEOUT_S)
        found = json.loads(body)
        state, troubles = found.get("status"), found.get("troubles", [])
        if state == "ready":
            return ok("service", f"{url} is ready")
        lines = [f"{each['part']}: {each['detail']} (since {each['since']})" for each in troubles]
        detail = f"{url}: {'; '.join(lines) or found['detail']}"
    except (ClientError, httpx.HTTPError, httpx.InvalidURL, OSError, zlib.error) as error:
        do = "start it with counter serve, or set --url right: without a path"
        return wrong("service", f"{url} cannot be asked: {type(error).__name__} {error}", do)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return wrong("service", f"{url} is no counter service", "set --url right: without a path")
    do = "docs/operations.md says what to do about each"
    return (warning if state == "degraded" else wrong)("service", detail, do)
