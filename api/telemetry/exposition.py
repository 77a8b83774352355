"""What a scrape of the API's /metrics is told: of one process, or of all on the port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from api.telemetry.multiprocess_metrics import Board, Kept
from counter.telemetry import exposition
from counter.telemetry.exposition import Collects, text_of


class Exposition(exposition.Exposition):
    """All that this process tells Prometheus, and what the others on its port told it."""

    def __init__(self, parts: Sequence[Collects]) -> None:
        super().__init__(parts)
        #: Where several processes share the port: what the others told.
        self.board: Board | None = None
        #: The port that is this process's alone, if there is one: there it tells of itself only.
        self.own_port: int | None = None

    async def text_at(self, port: int | None) -> bytes:
        """The answer to who asked at *port*."""
        if self.board is None or (port is not None and port == self.own_port):
            return self.text()
        # Some milliseconds for each of the processes: requests are answered meanwhile.
        return await asyncio.to_thread(_merged, self.board, self.board.lay(self.collect()))

    def adds(self, own: Mapping[str, int]) -> Mapping[str, int]:
        """Adds by outcome: this process's *own*, or those of all processes that share the port."""
        if self.board is None:
            return own
        families = self.board.gathered(self.collect())
        samples = [s for each in families if each.name == "counter_adds" for s in each.samples]
        return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}


def _merged(board: Board, laid: Sequence[Kept]) -> bytes:
    return text_of(board.merged(laid))
