"""What a process tells of its clients' connections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from prometheus_client.core import Metric

from counter.limits import CONNECTIONS_MAX
from rollup.families import counters, gauge

#: Why a connection was ended from this side, though nobody asked for that.
FULL: Final = "full"
LATE: Final = "late"
MALFORMED: Final = "malformed"
UNTAKEN: Final = "untaken"
HANDSHAKE: Final = "handshake"


class Connections:
    """The connections of one process: how many there are, and which were ended for what."""

    def __init__(self) -> None:
        self.open: Collection[object] = ()
        self.most = CONNECTIONS_MAX
        #: When the server's certificate ends, in Unix time; 0 where there is none.
        self.certificate_ends_at_s: Callable[[], float] = lambda: 0.0
        self.ended = dict.fromkeys((FULL, LATE, MALFORMED, UNTAKEN, HANDSHAKE), 0)

    def end(self, why: str) -> None:
        """One was ended, or not let in."""
        self.ended[why] += 1

    def collect(self) -> Iterable[Metric]:
        """The families of a scrape."""
        yield gauge("connections", "Connections that are open.", len(self.open))
        yield gauge("connections_limit", "How many there may be at once.", self.most)
        text = "Connections that were ended, or not let in, by why."
        yield counters("connections_ended", text, "reason", self.ended)
        text = "When the server's certificate ends; 0 where there is none."
        yield gauge("certificate_end_timestamp_seconds", text, self.certificate_ends_at_s())
