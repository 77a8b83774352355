"""Metrics, logs, traces and incidents of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counter import how_to_install
from counter.errors import StartupError
from counter.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from counter.config.settings import Settings


def open_tracing(settings: Settings) -> Tracing:
    """Return the tracing for *settings*. Raises StartupError if OpenTelemetry is not installed."""
    if settings.traces == "none":
        return Tracing()
    try:
        from counter.telemetry.otel import to_collector
    except ImportError as error:
        raise StartupError(
            f"traces is {settings.traces}, and {error.name or 'OpenTelemetry'} is not installed:"
            f" {how_to_install('otel')}, or set traces to none"
        ) from error
    return to_collector(settings.store)
