"""What can be told of a running service from outside: whether it works, its clock, its version."""

from __future__ import annotations

import json
import ssl
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from counter.client import CounterClient, Options, UnexpectedAnswerError
from counter.client.addresses import direct
from counter.client.transport import read_body
from counter.doctor import Finding
from counter.errors import CounterError

_TIMEOUT_S: Final = 5.0
#: Farther apart than this, tokens that are made here come late or early to some namespaces.
_APART_S: Final = 1.0
#: Nobody adds to it here, so it comes to be by no look.
_ANY: Final = "counter-doctor"
_DAYS_LEFT: Final = 14
_DAY_S: Final = 86_400


def look(url: str, api_key: str | None, version: str) -> Iterator[Finding]:
    """Look at the service at *url*."""
    try:
        # As a client of the SDK goes: what is on this machine is asked without a proxy.
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, mounts=direct([url])) as http:
            with http.stream("GET", "/readyz") as answer:
                yield from _certificate(answer)
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
    told = "; ".join(
        f"{each.get('part')}: {each.get('detail')} (since {each.get('since')})"
        for each in (troubles if isinstance(troubles, list) else [])
        if isinstance(each, dict)
    )
    do = "docs/operations.md says what to do about each"
    status = body.get("status")
    if answer.status_code == 200 and status == "ready":
        return Finding("service", "ok", "it answers, and is ready")
    if answer.status_code == 200 and status == "degraded":
        return Finding("service", "warning", f"it works, and not all of it: {told}", do)
    if "code" in body:
        why = told or str(body.get("detail"))
        return Finding("service", "wrong", f"it answers, and is not ready: {why}", do)
    return Finding(
        "service",
        "wrong",
        f"what answers is no counter service: status {answer.status_code}",
        "set --url right: without a path, and to the service itself",
    )


def _version(http: httpx.Client, version: str) -> Iterator[Finding]:
    with http.stream("GET", "/openapi.json") as answer:
        info = _body(answer, "openapi").get("info")
    found = info.get("version") if isinstance(info, dict) else None
    if found == version:
        yield Finding("version", "ok", f"it is {version}, as this program")
    elif found is not None:
        told = f"it is {found}, and this program {version}"
        yield Finding("version", "warning", told, "upgrade the older one")


def _certificate(answer: httpx.Response) -> Iterator[Finding]:
    """How long the service's certificate holds, where there is one."""
    stream = answer.extensions.get("network_stream")
    tls = None if stream is None else stream.get_extra_info("ssl_object")
    if tls is None:
        return
    ends = tls.getpeercert().get("notAfter")
    days = (ssl.cert_time_to_seconds(ends) - time.time()) / _DAY_S
    told = f"the certificate holds until {ends}"
    if days > _DAYS_LEFT:
        yield Finding("certificate", "ok", told)
    else:
        yield Finding(
            "certificate", "warning", told, "renew it; the service reads it anew by itself"
        )


def _clock(url: str, api_key: str | None) -> Finding:
    """How far the service's clock is from this one: an accurate read tells when it was made."""
    try:
        options = Options(deadline_s=_TIMEOUT_S)
        with CounterClient(url, api_key=api_key, options=options) as client:
            names = [each["namespace"] for each in client.namespaces()]
        with CounterClient(url, *names[:1], api_key=api_key, options=options) as client:
            before = datetime.now(UTC)
            as_of = client.get(_ANY, max_staleness="0s").as_of
            after = datetime.now(UTC)
    except CounterError as error:
        do = "for a look at its clock, give a key: --api-key-file or COUNTER_API_KEY"
        return Finding("service clock", "warning", f"it cannot be told: {error.detail}", do)
    apart_s = (as_of - before - (after - before) / 2).total_seconds()
    surely_s = max(0.0, abs(apart_s) - (after - before).total_seconds() / 2)
    ahead = "ahead of" if apart_s > 0 else "behind"
    told = f"{abs(apart_s):.3f} s {ahead} this machine's, give or take {(after - before) / 2}"
    if surely_s < _APART_S:
        return Finding("service clock", "ok", told)
    do = "set both clocks right (NTP): tokens that are made here are late or early there"
    return Finding("service clock", "wrong", told, do)


def _body(answer: httpx.Response, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(read_body(answer, what, time.perf_counter() + _TIMEOUT_S))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
