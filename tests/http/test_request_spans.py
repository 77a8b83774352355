"""Each request is a span of its caller's trace, with the store's calls as children."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from counter.api_keys import Scope
from counter.telemetry.otel import SpanTracing
from tests.support.app import App, running, store_that_fails
from tests.support.keys import hand_out
from tests.support.rest import fresh, on_wire
from tests.support.times import SECOND, START_US

ADD = "/v1/namespaces/{namespace}/counters/{counter}/add"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class World:
    app: App
    exporter: InMemorySpanExporter

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans that ended since the last look, by name."""
        found = self.exporter.get_finished_spans()
        self.exporter.clear()
        return {each.name: each for each in found}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    exporter = InMemorySpanExporter()
    tracing = SpanTracing(SimpleSpanProcessor(exporter), "sqlite")
    async with running("memory", tmp_path, tracing=tracing) as app:
        exporter.clear()
        yield World(app, exporter)


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_goes_on_with_the_trace_of_its_caller(world: World) -> None:
    rest, token = world.app.rest, fresh(START_US)
    body = {"delta": 1, "idempotency_token": on_wire(token)}
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
    await rest.post(rest.path("likes", "add"), body, headers=header)
    spans = world.spans()
    span, append = spans[f"POST {ADD}"], spans["store.append"]
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert attributes_of(span) == {
        "http.request.method": "POST",
        "http.route": ADD,
        "http.response.status_code": 200,
        "url.scheme": "http",
        "counter.request_id": "mine-1",
        "counter.namespace": "default",
        "counter.name": "likes",
        "counter.token": on_wire(token)["token"],
        "counter.generation_time": on_wire(token)["generation_time"],
        "counter.outcome": "original",
    }
    assert append.parent == span.context
    assert attributes_of(append) == {
        "db.system.name": "sqlite",
        "db.operation.name": "append",
        "db.operation.batch.size": 1,
        "counter.namespace": "default",
    }


async def test_client_errors_are_not_span_errors_and_failures_are(world: World) -> None:
    await world.app.rest.add("c", 1)
    refused = world.spans()[f"POST {ADD}"]
    assert refused.status.status_code is StatusCode.UNSET
    assert attributes_of(refused)["counter.code"] == "token_missing"
    with store_that_fails(world.app, "append"):
        await world.app.rest.add("c", 1, fresh(START_US))
    failed = world.spans()[f"POST {ADD}"]
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes_of(failed)["error.type"] == "503"
    assert attributes_of(failed)["counter.code"] == "store_unavailable"


async def test_an_invalid_traceparent_begins_a_new_trace(world: World) -> None:
    await world.app.http.get("/v1/nothing", headers={b"traceparent": b"00-junk\xff-01"})
    span = world.spans()["GET"]
    assert span.parent is None
    assert attributes_of(span)["http.response.status_code"] == 404


async def test_a_batch_of_the_rollup_is_a_span_and_a_look_that_finds_nothing_is_none(
    world: World,
) -> None:
    await world.app.rest.add("c", 1, fresh(START_US))
    world.app.clock.advance(30 * SECOND)
    world.spans()
    await world.app.roll_up()
    spans = world.spans()
    batch = spans.pop("rollup.batch")
    assert attributes_of(batch) == {"counter.namespace": "default", "counter.counters": 1}
    assert {"store.heads", "store.sums", "store.apply"} <= set(spans)
    assert all(each.parent == batch.context for each in spans.values())
    await world.app.roll_up()
    assert world.spans() == {}


async def test_no_key_and_no_query_is_in_a_span(world: World) -> None:
    header = await hand_out(world.app, Scope.WRITE)
    secret = header["Authorization"].rpartition("_")[2]
    world.app.http.headers.update(header)
    await world.app.rest.add("c", 1, key="card-4929")
    await world.app.http.get("/v1/namespaces", params={"key": secret})
    spans = world.spans()
    assert "counter.key" in attributes_of(spans[f"POST {ADD}"])
    text = json.dumps([each.to_json() for each in spans.values()])
    assert secret not in text
    assert "4929" not in text
