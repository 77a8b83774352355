"""Render /metrics for one API process, or for all processes on the port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from api.telemetry.multiprocess_metrics import Kept, MetricsDirectory
from counter.telemetry import exposition
from counter.telemetry.exposition import Collects, text_of


class Exposition(exposition.Exposition):
    """Metrics of this process and of the others on its port, for Prometheus."""

    def __init__(self, parts: Sequence[Collects]) -> None:
        super().__init__(parts)
        #: Metrics of the other processes, if several share the port.
        self.directory: MetricsDirectory | None = None
        #: The port that only this process has, if any; it serves only this process's metrics.
        self.own_port: int | None = None

    async def text_at(self, port: int | None) -> bytes:
        """Return the text for a scrape on *port*."""
        if self.directory is None or (port is not None and port == self.own_port):
            return self.text()
        # In a thread: it takes some milliseconds per process.
        return await asyncio.to_thread(_merged, self.directory, self.directory.lay(self.collect()))

    def adds(self, own: Mapping[str, int]) -> Mapping[str, int]:
        """Return adds by outcome: *own*, or the sum over all processes on the port."""
        if self.directory is None:
            return own
        families = self.directory.gathered(self.collect())
        samples = [s for each in families if each.name == "counter_adds" for s in each.samples]
        return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}


def _merged(directory: MetricsDirectory, laid: Sequence[Kept]) -> bytes:
    return text_of(directory.merged(laid))
