"""Make a span for each request, in the trace of its ``traceparent``."""

from __future__ import annotations

from typing import Any, Final

from opentelemetry import context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from api.http.call import Call
from api.http.pipeline import Ended
from api.http.responses import Response
from api.telemetry.request_log import end_of
from counter.errors import is_fault
from counter.limits import NAMESPACE_NAME_CHARS_MAX

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")


class RequestSpans:
    """Make spans of requests; see :class:`api.http.pipeline.Observer`.

    Attributes have the names of OpenTelemetry's HTTP conventions, or ``counter.…``. None contains a
    key's secret, a query or a body."""

    wants_all = True

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, call: Call) -> Ended:
        """Start a span; calls to the store become its children."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name in _TRACE_HEADERS
            if (value := call.header(name)) is not None
        }
        parent = self._propagator.extract(carrier, context.Context())
        span = self._tracer.start_span(
            _name(call), parent, SpanKind.SERVER, attributes=_attributes(call)
        )
        token = context.attach(set_span_in_context(span, parent))

        def end(response: Response | None) -> None:
            if call.caller is not None and call.caller.key is not None:
                span.set_attribute("counter.key", call.caller.key.id)
            writes = call.route is not None and call.route.writes
            for name, value in end_of(response, writes, call.logged).items():
                if name == "status" and value is not None:
                    span.set_attribute("http.response.status_code", value)
                elif isinstance(value, str):
                    span.set_attribute(f"counter.{name}", value)
            if response is None:
                span.set_attribute("error.type", "client_gone")
            elif is_fault(response.status):
                span.set_attribute("error.type", str(response.status))
                span.set_status(StatusCode.ERROR)
            context.detach(token)
            span.end()

        return end


def _name(call: Call) -> str:
    return str(call.method) if call.route is None else call.route.name


def _attributes(call: Call) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": call.method,
        "url.scheme": call.scheme,
        "counter.request_id": call.request_id,
    }
    if call.route is not None:
        attributes["http.route"] = call.route.path
    if call.namespace:
        attributes["counter.namespace"] = call.namespace[:NAMESPACE_NAME_CHARS_MAX]
    if call.counter:
        attributes["counter.name"] = call.counter
    return attributes
