"""Check a running service, as a client of it does."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx

from counter.config.findings import Finding, ok, wrong
from counter_client import CounterClient, CounterError, Options, UnexpectedAnswerError
from counter_client.transport import Common, read_body

_TIMEOUT_S: Final = 5.0
#: With a larger difference, tokens made here are late or early for some namespaces.
_APART: Final = timedelta(seconds=1)
#: It is only read, which creates no counter.
_ANY: Final = "counter-doctor"


def check_service(url: str, api_key: str | None, version: str) -> Iterator[Finding]:
    """Check the service at *url*."""
    try:
        # As a client of the SDK connects: by the same proxies and certificates.
        settings = Common([url], None, Options()).settings(httpx.HTTPTransport)
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, **settings) as http:
            yield _ready(*_get(http, "/readyz", "readyz"))
            info = _get(http, "/openapi.json", "openapi")[1].get("info")
    except UnexpectedAnswerError as error:
        yield wrong("service", error.detail, "set --url right: to the service itself")
        return
    except CounterError as error:
        yield wrong("service", error.detail, "correct the variable, or unset it")
        return
    except (httpx.HTTPError, httpx.InvalidURL, OSError, zlib.error) as error:
        why = f"{url} does not answer: {type(error).__name__} {error}".rstrip()
        yield wrong("service", why, "start it with counter serve, or set --url right")
        return
    found = info.get("version") if isinstance(info, dict) else None
    if found == version:
        yield ok("version", f"it is {version}, as this program")
    elif found is not None:
        detail = f"it is {found}, and this program {version}"
        yield Finding("version", "warning", detail, "upgrade the older one")
    yield _clock(url, api_key)


def _get(http: httpx.Client, path: str, what: str) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the JSON object at *path*; an empty one if there is none."""
    with http.stream("GET", path) as answer:
        body = read_body(answer, what, time.perf_counter() + _TIMEOUT_S)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = {}
    return answer.status_code, found if isinstance(found, dict) else {}


def _ready(status: int, body: Mapping[str, Any]) -> Finding:
    troubles = body.get("troubles")
    detail = "; ".join(
        f"{each.get('part')}: {each.get('detail')} (since {each.get('since')})"
        for each in (troubles if isinstance(troubles, list) else [])
        if isinstance(each, dict)
    )
    do = "docs/operations.md says what to do about each"
    match status, body.get("status"):
        case 200, "ready":
            return ok("service", "it answers, and is ready")
        case 200, "degraded":
            return Finding("service", "warning", f"it works in part: {detail}", do)
    if "code" in body:
        why = detail or str(body.get("detail"))
        return wrong("service", f"it answers, and is not ready: {why}", do)
    detail = f"the server there is not a counter service: status {status}"
    return wrong("service", detail, "set --url right: without a path, and to the service itself")


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
    half = (after - before) / 2
    apart = as_of - before - half
    ahead = "ahead of" if apart > timedelta() else "behind"
    seconds, unsure = abs(apart).total_seconds(), half.total_seconds()
    detail = f"{seconds:.3f} s {ahead} this machine's, give or take {unsure:.3f} s"
    if abs(apart) - half < _APART:
        return ok("service clock", detail)
    do = "set both clocks right (NTP): tokens that are made here are late or early there"
    return wrong("service clock", detail, do)
