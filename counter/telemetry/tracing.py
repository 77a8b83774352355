"""Define tracing, of which :mod:`counter.telemetry.otel` is the kind that records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from counter.ports import Store


class Tracing:
    """Records the durations of parts of the work; this one, which is for tracing off, does
    nothing."""

    #: Creates spans; None if tracing is off.
    tracer: Tracer | None = None

    def watched(self, store: Store) -> Store:
        """Return *store* wrapped so that each call within a trace gets a span."""
        return store

    def part(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Return a context manager that traces a part of the work that no request caused."""
        return nullcontext()

    async def close(self) -> None:
        """Send the remaining spans, within a few seconds."""
