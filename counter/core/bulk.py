"""Convert lists of adds, as clients send them, to events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from counter import limits
from counter.core.admission import Bounded
from counter.core.results import Add, Added, Credential, count_failure
from counter.errors import CounterError, OverloadedError
from counter.folds import fingerprint
from counter.types import Event, Namespace, Token


def adds_of(events: Sequence[Event]) -> list[Add]:
    """Return the adds that *events* came from, each with its token."""
    return [Add(e.counter, e.delta, Token(e.event_id, e.event_time_us)) for e in events]


def events_of_atomic(items: Sequence[tuple[str, int]], token: Token) -> list[Event]:
    """Return the events of an atomic add.

    An item's key is the number of earlier items of the same counter, so its position among other
    counters does not matter.
    """
    earlier: dict[str, int] = {}
    events: list[Event] = []
    for counter, delta in items:
        earlier[counter] = earlier.get(counter, 0) + 1
        events.append(
            Event(counter, token.generation_time_us, token.nonce, earlier[counter], delta)
        )
    atom = fingerprint(events)
    return [event._replace(atom=atom) for event in events]


class OneByOne:
    """Executes adds that a single batched write cannot do: one task for each, with a common
    bound."""

    def __init__(
        self,
        add: Callable[[Namespace, str, int, Credential], Awaitable[Added]],
        tally: dict[str, int],
    ) -> None:
        self._add = add
        self._tally = tally
        self.tasks = Bounded("adds of batches are under way", limits.PENDING_WRITES_MAX)

    async def __call__(
        self, namespace: Namespace, adds: Sequence[Add]
    ) -> list[Added | CounterError]:
        """Execute all *adds* at once and return an outcome for each: one failure does not affect
        others."""
        try:
            self.tasks.take(len(adds))
        except OverloadedError as error:
            count_failure(self._tally, error, len(adds))
            return [error] * len(adds)
        try:
            return await asyncio.gather(*(self._outcome(namespace, each) for each in adds))
        finally:
            self.tasks.give_back(len(adds))

    async def _outcome(self, namespace: Namespace, each: Add) -> Added | CounterError:
        try:
            return await self._add(namespace, *each)
        except CounterError as error:
            return error
