"""A collector of traces, as far as a test needs one: OTLP over HTTP, kept in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """The received spans, by service name."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {a.key: a.value.string_value for a in each.resource.attributes}
            self.spans += [span for scope in each.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        return [each for each in self.spans if each.name == name]

    def send_here(self, patch: pytest.MonkeyPatch) -> None:
        """Have processes that are started from here on send their traces, soon."""
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", self.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_SERVICE_NAME", "counter-of-tests")


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
