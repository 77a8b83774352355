"""Read single rows on the event loop itself.

A row whose pages are in memory is read in less time than it takes to wake a thread. While the disk
is slow, or a lock is held, a lane reads instead.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from counter.limits import MILLISECOND, SECOND
from counter.ports import Clock
from counter.telemetry.metrics import Calls

#: A read that took this long had to wait, for the disk or for the processor.
_SLOW_US: Final = 5 * MILLISECOND
#: Then a lane reads for this many times as long, which bounds the share of time that the loop
#: waits.
_PAUSE_FACTOR: Final = 20


class InlineReader:
    """The event loop's own connection, which fails instead of waiting."""

    def __init__(
        self, connection: sqlite3.Connection, clock: Clock, calls: Calls | None = None
    ) -> None:
        connection.execute("PRAGMA busy_timeout = 0")
        self._connection = connection
        self._cursor = connection.cursor()
        self._clock = clock
        self._calls = calls or Calls()
        self._paused_until_us = 0

    def row(self, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]] | None:
        """Return the rows that *sql* selects, at most one; None if a lane must read them."""
        began_us = self._clock.boottime_us()
        if began_us < self._paused_until_us:
            return None
        try:
            rows = self._cursor.execute(sql, parameters).fetchall()
        except sqlite3.Error:
            # The lane meets the same error, and reports it in the service's terms.
            self._paused_until_us = began_us + _PAUSE_FACTOR * _SLOW_US
            return None
        ended_us = self._clock.boottime_us()
        self._calls.ended((ended_us - began_us) / SECOND)
        if ended_us - began_us > _SLOW_US:
            self._paused_until_us = ended_us + _PAUSE_FACTOR * (ended_us - began_us)
        return rows

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
