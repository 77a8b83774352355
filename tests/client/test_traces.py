"""One trace from a program's span through the client and the service to the store, sent for real to
a collector that speaks OTLP over HTTP."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from counter_client import AsyncCounterClient, CounterClient, Options, UnreachableError
from counter_client.otel import traced_by
from tests.support.collector import Collector, collecting
from tests.support.server import Server
from tests.support.waiting import eventually

ADD = "POST /v1/namespaces/{namespace}/counters/{counter}/add"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, child_processes: None
) -> Iterator[Server]:
    """A service that sends its traces, soon."""
    place = tmp_path_factory.mktemp("service")
    server = Server(place / "data", place / "logs", {"traces": "otlp", "accept_limit": "5s"})
    with pytest.MonkeyPatch.context() as patch:
        collector.send_here(patch)
        asyncio.run(server.start())
    try:
        yield server
        assert asyncio.run(server.stop()) == 0
        assert "Traceback" not in server.output("err")
    finally:
        server.clean_up()


@dataclass
class Program:
    """A program that traces."""

    exporter: InMemorySpanExporter
    provider: TracerProvider

    @property
    def options(self) -> Options:
        return Options(trust_env=False, before_attempt=traced_by(self.provider))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.exporter.get_finished_spans() if each.name == name]


@pytest.fixture
def program() -> Program:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Program(exporter, provider)


@pytest.mark.parametrize("kind", ["threads", "event-loop"])
async def test_one_trace_leads_from_the_program_to_the_store(
    kind: str, service: Server, collector: Collector, program: Program
) -> None:
    tracer = program.provider.get_tracer("program")
    with tracer.start_as_current_span("buys") as buys:
        if kind == "threads":
            with CounterClient(service.url, options=program.options) as client:
                client.add(kind)
        else:
            async with AsyncCounterClient(service.url, options=program.options) as there:
                await there.add(kind)
    [attempt] = program.spans("POST add")
    assert attempt.kind is SpanKind.CLIENT
    assert attempt.parent == buys.get_span_context()
    assert attempt.attributes is not None
    assert attempt.attributes["http.response.status_code"] == 200
    assert attempt.context is not None
    trace_id, span_id = attempt.context.trace_id, attempt.context.span_id

    def ours(name: str) -> list[Span]:
        return [
            each
            for each in collector.named(name)
            if int.from_bytes(each.trace_id, "big") == trace_id
        ]

    await eventually(
        lambda: bool(ours(ADD) and ours("store.append")),
        "the service's spans arrive at the collector",
    )
    [request], [append] = ours(ADD), ours("store.append")
    assert int.from_bytes(request.parent_span_id, "big") == span_id
    assert append.parent_span_id == request.span_id
    assert collector.resource["service.name"] == "counter-of-tests"


async def test_the_rollup_sends_its_batches(service: Server, collector: Collector) -> None:
    with CounterClient(service.url, options=Options(trust_env=False)) as client:
        client.add("rolled")

    await eventually(
        lambda: bool(collector.named("rollup.batch") and collector.named("store.apply")),
        "the rollup's spans arrive at the collector",
    )


def test_an_attempt_without_a_response_is_an_error(program: Program) -> None:
    hasty = replace(program.options, deadline_s=1.0)
    client = CounterClient("http://127.0.0.1:9", options=hasty)
    with client, pytest.raises(UnreachableError):
        client.get("c")
    first, *more = program.spans("GET get")
    assert first.attributes is not None
    assert first.attributes["error.type"] == "unreachable"
    numbers = [(each.attributes or {})["http.request.resend_count"] for each in more]
    assert numbers == list(range(1, len(more) + 1))


async def test_an_attempt_that_is_given_up_ends_its_span(service: Server, program: Program) -> None:
    async with AsyncCounterClient(service.url, options=program.options) as client:
        call = asyncio.create_task(client.get("c"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    ends = [(each.attributes or {})["error.type"] for each in program.spans("GET get")]
    assert ends == ["cancelled"]
