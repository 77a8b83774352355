"""What is observed of each add in the tables of PostgreSQL: letters of the model of its fence.

After each transaction the tables are read. So the letters are in the order of commits, because one
session goes on at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import Any, Final

import asyncpg

from counter.limits import TIME_MAX_US
from counter.windows import window_of
from tests.postgresql.orders import Orders
from tests.simulation.plan import Config
from tests.simulation.reported import LAST, Identity, Letters
from tests.simulation.requests import START_US

_EVENTS: Final = """
SELECT 'stored', n.name, e.counter, e.event_time, e.event_id, e.item
FROM {s}.events e JOIN {s}.namespaces n ON n.id = e.namespace
"""
_REST: Final = """
SELECT coalesce(r.outcome, 'open'), n.name, r.scope, r.event_time, r.event_id, 0
    FROM {s}.resolutions r JOIN {s}.namespaces n ON n.id = r.namespace
UNION ALL SELECT 'passed', name, '', passed, '', 0 FROM {s}.namespaces WHERE name IS NOT NULL
UNION ALL SELECT 'fenced', '', '', fence, '', 0 FROM {s}.datasets
"""
#: Whether a slice is being dropped.
_DROPS: Final = """
SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.mode = 'AccessExclusiveLock' AND l.granted AND a.backend_type = 'client backend')
"""
_OF_TOKENS: Final = ("open", "applied", "void")


class Observed:
    """Observes the tables of a run."""

    def __init__(self, config: Config, orders: Orders, limit_at: Callable[[int], int]) -> None:
        """*limit_at* is the accept limit of an event's time."""
        self._config = config
        self._limit_at = limit_at
        self._orders = orders
        self._order = count()
        #: When each row was seen first, and in which order then.
        self._seen: dict[Any, tuple[int, int]] = {}
        orders.look_at_tables = self._look

    def letters(self, namespace: str, identity: Identity) -> Letters:
        """The observations of an item, and the times of the server's clock."""
        config, seen = self._config, self._seen
        counter, time_us, nonce, number = identity
        end_us = window_of(time_us, config.window_us) + config.window_us
        limit_us = self._limit_at(time_us)
        closes_us = end_us + limit_us
        token = (namespace, "" if number else counter, time_us, nonce, 0)
        rows = {
            "stored": [("stored", namespace, *identity)],
            **{each: [(each, *token)] for each in _OF_TOKENS},
            "fenced": [row for row in seen if row[0] == "fenced" and row[3] >= closes_us],
            "passed": [
                row for row in seen if row[:2] == ("passed", namespace) and row[3] >= end_us - 1
            ],
        }
        found = {
            letter: min(seen[row] for row in some if row in seen)
            for letter, some in rows.items()
            if any(row in seen for row in some)
        }
        late_us, closed_us = self._last_us(time_us + limit_us), self._first_us(closes_us)
        return {**found, "late": (late_us, LAST), "closed": (closed_us, -1)}

    def _look(self) -> None:
        now_us = START_US + self._orders.loop.now_us
        for row in self._orders.server.do(self._rows()):
            if row not in self._seen:
                self._seen[row] = (now_us, next(self._order))

    async def _rows(self) -> Sequence[Any]:
        """Return the present rows; of one commit, events come first."""
        server = self._orders.server
        rest = await server.control.fetch(_REST.replace("{s}", server.name))
        while True:
            try:
                events = await server.reader.fetch(_EVENTS.replace("{s}", server.name))
                break
            except asyncpg.LockNotAvailableError:
                # Or a vacuum, which ends by itself, cuts the end of a table off.
                if await server.control.fetchval(_DROPS):
                    # No event can be stored before the next look.
                    events = []
                    break
        return [tuple(row) for row in (*events, *rest)]

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """From when until when the server's clock was off by how much; the last one never ends."""
        steps = [*self._orders.clock_steps, (TIME_MAX_US - START_US, 0)]
        for (from_us, off_us), (until_us, _) in pairwise(steps):
            yield START_US + from_us, START_US + until_us, off_us

    def _first_us(self, clock_us: int) -> int:
        """When a clock first showed *clock_us*: the server's, or a follower's."""
        spans = list(self._spans())
        most_us = accumulate((off_us for *_, off_us in spans), max)
        return min(
            max(from_us, clock_us - off_us)
            for (from_us, until_us, _), off_us in zip(spans, most_us, strict=True)
            if clock_us - off_us < until_us
        )

    def _last_us(self, clock_us: int) -> int:
        """When the server's clock last showed *clock_us* or earlier."""
        return max(
            min(until_us, clock_us - off_us)
            for from_us, until_us, off_us in self._spans()
            if clock_us - off_us >= from_us
        )
