"""Define tracing, which imports OpenTelemetry only if it is enabled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from counter.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from counter.config.settings import Settings
    from counter.ports import Store


class Tracing(Protocol):
    """Records the durations of parts of the work."""

    #: Creates spans; None if tracing is off.
    tracer: Tracer | None

    def watched(self, store: Store) -> Store:
        """Return *store* wrapped so that each call within a trace gets a span."""
        ...

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Return a context manager that traces a part of the work that no request caused."""
        ...

    async def close(self) -> None:
        """Send the remaining spans, within a few seconds."""
        ...


class NoTracing:
    """Tracing that does nothing."""

    tracer: Tracer | None = None

    def watched(self, store: Store) -> Store:
        """Return *store* unchanged."""
        return store

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Return a context manager that does nothing."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing."""


def open_tracing(settings: Settings) -> Tracing:
    """Return the tracing for *settings*. Raises StartupError if OpenTelemetry is not installed."""
    if settings.traces == "none":
        return NoTracing()
    try:
        from counter.telemetry.otel import to_collector
    except ImportError as error:
        raise StartupError(
            f"traces is {settings.traces}, and {error.name or 'OpenTelemetry'} is not installed:"
            " pip install '.[otel]' in its checkout, or set traces to none"
        ) from error
    return to_collector(settings.store)
