"""Pages of other origins: only those that are listed may read answers, and by default none."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from counter.config.report import load
from counter.errors import StartupError
from tests.support.bytes_on_wire import CLOSE, add, get, request
from tests.support.wire import Wire, statuses, wired

pytestmark = pytest.mark.asyncio(loop_scope="module")

LISTED = "https://app.example"
ASKS = ("access-control-request-method: POST", "access-control-request-headers: idempotency-key")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One that lets pages of one origin in."""
    path: Path = tmp_path_factory.mktemp("cors")
    async with wired(path, cors_origins=(LISTED,)) as each:
        yield each


async def headers(wire: Wire, sent: bytes) -> dict[str, str]:
    """Of the one answer to *sent*; those that tell browsers something."""
    received = await wire.tell(sent)
    assert len(statuses(received)) == 1
    lines = received.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    pairs = [line.partition(": ") for line in lines]
    return {n: v for n, _, v in pairs if n.startswith("access-control-") or n == "vary"}


@pytest.mark.parametrize(
    "sent",
    [
        add(1, 1, f"origin: {LISTED}", CLOSE),
        get("c", f"origin: {LISTED}", CLOSE),
        get("c?wrong=1", f"origin: {LISTED}", CLOSE),
        request("GET", "/nowhere", f"origin: {LISTED}", CLOSE),
    ],
    ids=["add", "get", "refusal", "nothing-there"],
)
async def test_a_listed_origin_can_read_every_response(wire: Wire, sent: bytes) -> None:
    found = await headers(wire, sent)
    assert found["access-control-allow-origin"] == LISTED
    assert found["vary"].lower() == "origin"
    shown = found["access-control-expose-headers"].split(", ")
    assert {"idempotency-replayed", "idempotency-ttl"} <= set(shown)
    assert "access-control-allow-credentials" not in found


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "http://app.example", "null"]
)
async def test_any_other_origin_gets_no_permission(wire: Wire, origin: str) -> None:
    for sent in (add(2, 1, f"origin: {origin}", CLOSE), get("c", f"origin: {origin}", CLOSE)):
        found = await headers(wire, sent)
        assert "access-control-allow-origin" not in found
        assert found["vary"].lower() == "origin"
    asked = request("OPTIONS", "/v1/namespaces", f"origin: {origin}", *ASKS, CLOSE)
    found = await headers(wire, asked)
    assert "access-control-allow-origin" not in found
    assert "origin" in found["vary"].lower()


async def test_a_browser_may_ask_first(wire: Wire) -> None:
    path = "/v1/namespaces/default/counters/c/add"
    found = await headers(wire, request("OPTIONS", path, f"origin: {LISTED}", *ASKS, CLOSE))
    assert found["access-control-allow-origin"] == LISTED
    assert "POST" in found["access-control-allow-methods"]
    allowed = found["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type", "idempotency-key"} <= set(allowed)
    # Of OpenTelemetry, and of CloudEvents in binary mode.
    assert {"traceparent", "tracestate", "baggage"} <= set(allowed)
    names = ("specversion", "id", "source", "type", "subject", "time", "dataschema")
    assert {f"ce-{each}" for each in names} <= set(allowed)
    assert {"prefer"} <= set(allowed)


async def test_options_that_ask_for_nothing_are_a_method_like_others(wire: Wire) -> None:
    received = await wire.tell(request("OPTIONS", "/v1/namespaces", CLOSE))
    assert statuses(received) == [405]


async def test_no_sender_of_webhooks_is_permitted_to_deliver(wire: Wire) -> None:
    """The request has no key, so it would be permitted to anyone."""
    asks = ("webhook-request-origin: events.example", "webhook-request-rate: 120")
    path = "/v1/namespaces/default/events"
    received = await wire.tell(request("OPTIONS", path, *asks, CLOSE))
    assert statuses(received) == [405]
    assert b"webhook-allowed" not in received.lower()


async def test_by_default_no_page_may_read_anything(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        for sent in (
            get("c", f"origin: {LISTED}", CLOSE),
            request("OPTIONS", "/v1/namespaces", f"origin: {LISTED}", *ASKS, CLOSE),
        ):
            found = await headers(wire, sent)
            assert not [each for each in found if each.startswith("access-control-")]


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example", f"{LISTED}/", "https://App.example", f"{LISTED}:443"]
)
async def test_an_invalid_origin_is_refused_as_a_setting(origin: str) -> None:
    given: dict[str, Any] = {"cors_origins": f"{LISTED},{origin}"}
    with pytest.raises(StartupError, match="is no origin as browsers send it"):
        load(given)
