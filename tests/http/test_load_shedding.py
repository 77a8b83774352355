"""Writes that could not be answered in time are turned away before any work; nothing else is."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.rest import Rest, fresh, item, on_wire
from tests.support.wire import Wire


@pytest.fixture
async def http(wire: Wire) -> AsyncIterator[httpx.AsyncClient]:
    async with wire.client() as client:
        yield client


def flooded(wire: Wire) -> None:
    """Have the service know of more adds ahead than it could end in time."""
    load = wire.service.load
    load.admit(load.room)


async def add(wire: Wire, http: httpx.AsyncClient, **header: str) -> httpx.Response:
    body = {"delta": 1, "idempotency_token": on_wire(fresh(wire.app.clock.now_us()))}
    headers = {name.replace("_", "-"): value for name, value in header.items()}
    return await http.post("/v1/namespaces/default/counters/c/add", json=body, headers=headers)


async def test_a_write_that_would_wait_too_long_is_refused(
    wire: Wire, http: httpx.AsyncClient
) -> None:
    flooded(wire)
    refused = await add(wire, http)
    assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
    assert (refused.json()["applied"], refused.json()["retry"]) == (None, "same_token")
    assert int(refused.headers["retry-after"]) >= 1
    items = [item("c", 1, fresh(wire.app.clock.now_us()))]
    batch = await http.post("/v1/namespaces/default/batch/add", json={"items": items})
    assert batch.status_code == 503
    wire.service.load.finish(wire.service.load.ahead)
    assert (await Rest(http).get("c")).json()["count"] == 0


async def test_reads_and_health_checks_come_through(wire: Wire, http: httpx.AsyncClient) -> None:
    flooded(wire)
    path = "/v1/namespaces/default/counters/c"
    for each in (path, f"{path}?max_staleness=0s", "/v1/namespaces", "/healthz", "/metrics"):
        assert (await http.get(each)).status_code == 200


async def test_a_client_may_say_how_long_it_waits(wire: Wire, http: httpx.AsyncClient) -> None:
    assert (await add(wire, http, Request_Timeout="1s")).status_code == 200
    load = wire.service.load
    load.admit(load.room // 2)
    assert (await add(wire, http, Request_Timeout="30s")).status_code == 200
    refused = await add(wire, http, Request_Timeout="1ms")
    assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")


async def test_an_invalid_request_timeout_is_refused(wire: Wire, http: httpx.AsyncClient) -> None:
    refused = await add(wire, http, Request_Timeout="soon")
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_parameter")
    assert "Request-Timeout" in refused.json()["detail"]


async def test_bodies_beyond_the_memory_bound_are_not_read(
    wire: Wire, http: httpx.AsyncClient
) -> None:
    bodies = wire.app.application.pipeline.shedder.bodies
    bodies.take(bodies.most - 100)
    items = [item("c", 1, fresh(wire.app.clock.now_us())) for _ in range(5)]
    batch = await http.post("/v1/namespaces/default/batch/add", json={"items": items})
    assert (batch.status_code, batch.json()["code"]) == (503, "overloaded")
    bodies.give_back(bodies.most - 100)
    batch = await http.post("/v1/namespaces/default/batch/add", json={"items": items})
    assert batch.status_code == 200
    assert bodies.held == 0
