"""Store the compare-and-set tables in memory."""

from __future__ import annotations

from collections.abc import Sequence

from counter.storage.memory.tables import Part, TokenKey
from counter.types import Decision, Event, Namespace


class MemoryDecisions(Part):
    """:class:`counter.ports.DecisionStore`."""

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        return self._space(namespace).decisions.setdefault(_token_of(events), decision)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        return self._space(namespace).decisions.get(_token_of(events))

    async def reserve(
        self, namespace: Namespace, nonce: bytes, now_us: int, expires_us: int, kept_us: int = 0
    ) -> int:
        keys = self._space(namespace).keys
        time_us, until_us = keys.get(nonce, (now_us, now_us - kept_us))
        if until_us <= now_us - kept_us:
            keys[nonce] = (now_us, expires_us)
            return now_us
        return time_us

    async def rereserve(
        self, namespace: Namespace, nonce: bytes, old_us: int, now_us: int, expires_us: int
    ) -> int:
        keys = self._space(namespace).keys
        if nonce in keys and keys[nonce][0] == old_us:
            keys[nonce] = (now_us, expires_us)
            return now_us
        return await self.reserve(namespace, nonce, now_us, expires_us)


def _token_of(events: Sequence[Event]) -> TokenKey:
    """Return a token's scope: its counter, or the whole namespace for an atomic add."""
    first = events[0]
    scope = first.counter if first.atom is None else None
    return (scope, first.event_time_us, first.event_id)
