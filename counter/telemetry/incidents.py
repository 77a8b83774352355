"""Record the incidents of a process, and since when they last, for /readyz."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from counter.clock import to_rfc3339
from counter.errors import CounterError, StoreUnavailableError
from counter.limits import SECOND
from counter.ports import Clock

#: How long a check of a part may take. Shorter than the time-outs of health checks, which would
#: otherwise learn nothing: a lock that another program holds on SQLite's file lasts 5 s and longer.
PING_S: Final = 2.0


async def ping_error(ping: Callable[[], Awaitable[None]], what: str) -> CounterError | None:
    """Return why *ping* of *what* fails or takes too long; None if it succeeds."""
    try:
        async with asyncio.timeout(PING_S):
            await ping()
    except CounterError as error:
        return error
    except TimeoutError:
        why = f"{what} did not answer within {PING_S:g} s"
        return StoreUnavailableError(why, retry_after_us=SECOND)
    return None


class Incident(NamedTuple):
    """A part that does not work: first seen failing at *since_us*, last seen working at
    *worked_us*, which is None if it never worked."""

    part: str
    detail: str
    since_us: int
    worked_us: int | None

    def as_fields(self) -> dict[str, str | None]:
        """Return it as a member of a response, with times in RFC 3339."""
        worked = None if self.worked_us is None else to_rfc3339(self.worked_us)
        return {
            "part": self.part,
            "detail": self.detail,
            "since": to_rfc3339(self.since_us),
            "last_worked": worked,
        }


class Incidents:
    """Records when each part was last seen working and failing.

    Only the states passed to :meth:`record` are known: a failure between two calls is not recorded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._current: dict[str, Incident] = {}
        self._worked_us: dict[str, int] = {}

    def record(self, found: Mapping[str, str | None]) -> tuple[Incident, ...]:
        """Record the state *found* of each part, None if it works; return the failing parts in
        the order of *found*."""
        now_us = self._clock.now_us()
        for part, detail in found.items():
            if detail is None:
                self._worked_us[part] = now_us
                self._current.pop(part, None)
            else:
                since = self._current.get(part)
                since_us = now_us if since is None else since.since_us
                worked_us = self._worked_us.get(part)
                self._current[part] = Incident(part, detail, since_us, worked_us)
        return tuple(self._current[part] for part in found if part in self._current)
