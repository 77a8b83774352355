"""Trace with OpenTelemetry: a span for each call of the store, and for each part of the rollup.

OpenTelemetry's own variables configure the exporter, the sampling and the service name, such as
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER`` and ``OTEL_SERVICE_NAME``.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from threading import Thread
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, get_current_span

from counter import __version__
from counter.background import pause
from counter.ports import Store
from counter.telemetry.store_calls import wrapped
from counter.telemetry.tracing import Tracing
from counter.types import Namespace

_NAME: Final = "distributed-counter"
#: The longest wait for an unreachable collector on shutdown.
_FLUSH_S_MAX: Final = 2.0


def to_collector(system: str) -> SpanTracing:
    """Return traces of a process whose store is a *system* such as ``cassandra``, sent over
    OTLP."""
    return SpanTracing(BatchSpanProcessor(OTLPSpanExporter()), system)


class SpanTracing(Tracing):
    """Creates spans and passes them to *processor*."""

    def __init__(self, processor: SpanProcessor, system: str) -> None:
        own = Resource(
            {
                "service.name": _NAME,
                "service.version": __version__,
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
            }
        )
        # Attributes of the environment override these.
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._system = system
        self._tracer = self.tracer = self._provider.get_tracer(_NAME, __version__)

    def watched(self, store: Store) -> Store:
        kind = SpanKind.INTERNAL if store.capabilities.embedded else SpanKind.CLIENT

        def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return _watched(name, call, self._tracer, self._system, kind)

        return wrapped(store, watched)

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[Span]:
        own = {f"counter.{key}": value for key, value in attributes.items()}
        return self._tracer.start_as_current_span(name, attributes=own)

    async def close(self) -> None:
        # A daemon thread, because the exporter may retry an unreachable collector for longer than
        # shutdown may take.
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):
                # The loop may be closed by then.
                loop.call_soon_threadsafe(ended.set)

        Thread(target=end, name="counter-traces", daemon=True).start()
        await pause(ended, _FLUSH_S_MAX)


def _watched(
    name: str, call: Callable[..., Any], tracer: trace.Tracer, system: str, kind: SpanKind
) -> Callable[..., Any]:
    """Return *call* with a span around it, if it happens within a span.

    Calls outside of any span are not traced: otherwise each poll of an idle worker would be a
    trace.
    """

    async def watched(*arguments: Any, **named: Any) -> Any:
        if not get_current_span().is_recording():
            return await call(*arguments, **named)
        about = {"db.system.name": system, "db.operation.name": name, **_what(arguments)}
        with tracer.start_as_current_span(f"store.{name}", kind=kind, attributes=about):
            return await call(*arguments, **named)

    return watched


def _what(arguments: Sequence[Any]) -> dict[str, str | int]:
    """Return the span attributes of a call: its namespace, and the number of its items."""
    about: dict[str, str | int] = {}
    match arguments:
        case [Namespace(name=name), *rest]:
            about["counter.namespace"] = name
            if rest and isinstance(rest[0], list | tuple) and not hasattr(rest[0], "_fields"):
                about["db.operation.batch.size"] = len(rest[0])
    return about
