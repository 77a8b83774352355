"""Trace a client's attempts with OpenTelemetry:

    client = CounterClient(url, options=Options(before_attempt=traced_by()))

It needs OpenTelemetry's API (the extra ``otel``). Spans are recorded if the program has set up
OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from counter_client.options import Attempt, Sending, Watch

_NAME: Final = "counter_client"
#: From this status on, an answer is an error for a client span.
_ERRORS: Final = 400
_PORTS: Final = (("http", 80), ("https", 443))


def traced_by(provider: TracerProvider | None = None) -> Callable[[Sending], Watch]:
    """Return a hook for ``Options.before_attempt`` that makes a span for each attempt.

    The span is a child of the caller's current span, and is sent as ``traceparent``. *provider*
    makes the spans; None means the global one.
    """
    tracer = trace.get_tracer(_NAME, tracer_provider=provider)
    propagator = TraceContextTextMapPropagator()

    def before(sending: Sending) -> Watch:
        where = urlsplit(sending.url)
        span = tracer.start_span(
            f"{sending.method} {sending.operation}",
            kind=SpanKind.CLIENT,
            attributes={
                "http.request.method": sending.method,
                "server.address": where.hostname or "",
                "server.port": where.port or dict(_PORTS).get(where.scheme, 0),
                "counter.operation": sending.operation,
                "http.request.resend_count": sending.number,
                "counter.hedged": sending.hedged,
            },
        )
        headers: dict[str, str] = {}
        propagator.inject(headers, trace.set_span_in_context(span))

        def ended(attempt: Attempt | None) -> None:
            if attempt is None:
                span.set_attribute("error.type", "cancelled")
            elif attempt.status is None:
                span.set_attribute("error.type", "unreachable")
                span.set_status(StatusCode.ERROR)
            else:
                span.set_attribute("http.response.status_code", attempt.status)
                if attempt.status >= _ERRORS:
                    span.set_attribute("error.type", str(attempt.status))
                    span.set_status(StatusCode.ERROR)
            span.end()

        return Watch(tuple(headers.items()), ended)

    return before
