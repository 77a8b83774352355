"""Traces, where they are asked for: nothing of OpenTelemetry is imported otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from counter.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from counter.config.settings import Settings
    from counter.ports import Store


class Tracing(Protocol):
    """Tells how long the parts of the work take."""

    #: Makes spans; None where nothing is traced.
    tracer: Tracer | None

    def watched(self, store: Store) -> Store:
        """*store*, with a span for each call that is part of something traced."""
        ...

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Around a part of the work that no request asked for."""
        ...

    async def close(self) -> None:
        """Send what is not sent yet, within a few seconds."""
        ...


class NoTracing:
    """Traces nothing, and costs nothing."""

    tracer: Tracer | None = None

    def watched(self, store: Store) -> Store:
        """*store* itself."""
        return store

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing."""


def open_tracing(settings: Settings) -> Tracing:
    """What *settings* ask for. Raises StartupError where OpenTelemetry is not installed."""
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
