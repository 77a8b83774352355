"""Cache counts in the memory of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from counter.metrics import CacheTally
from counter.ports import Clock
from counter.types import Checkpoint, Event, Guarded, Namespace
from counter.windows import fingerprint

ENTRIES_MAX: Final = 100_000
BEST_EFFORT_MAX: Final = 100_000
GUARDED_MAX: Final = 100_000

_Key = tuple[int, str]


class MemoryCache:
    """:class:`counter.ports.Cache` in two bounded maps, which evict the least recently used
    entry."""

    def __init__(
        self,
        clock: Clock,
        *,
        entries_max: int = ENTRIES_MAX,
        best_effort_max: int = BEST_EFFORT_MAX,
    ) -> None:
        self._clock = clock
        self._entries_max = entries_max
        self._best_effort_max = best_effort_max
        self._entries: OrderedDict[_Key, tuple[int, Checkpoint]] = OrderedDict()
        self._values: OrderedDict[_Key, int] = OrderedDict()
        self._guarded: OrderedDict[tuple[int, str, int, bytes, int], bytes] = OrderedDict()
        self.trouble: str | None = None
        self.tally = CacheTally(())

    def queues(self) -> Mapping[str, int]:
        """Return no queues: no call waits."""
        return {}

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def ping(self) -> None:
        """Do nothing: the memory is always reachable."""

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        answers = []
        for event in events:
            payload = event.atom or fingerprint((event,))
            identity = (event.counter, event.event_time_us, event.event_id, event.item_key)
            noted = self._guarded.setdefault((namespace.id, *identity), payload)
            if noted is payload:
                answers.append(Guarded.NEW)
            else:
                answers.append(Guarded.SAME if noted == payload else Guarded.OTHER)
        while len(self._guarded) > GUARDED_MAX:
            self._guarded.popitem(last=False)
        return answers

    async def get_many(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> Sequence[Checkpoint | None]:
        now_us = self._clock.boottime_us()
        return [self._get(namespace, counter, now_us) for counter in counters]

    def peek(self, namespace: Namespace, counter: str) -> Checkpoint | None:
        return self._get(namespace, counter, self._clock.boottime_us())

    async def put_many(
        self, namespace: Namespace, entries: Sequence[tuple[str, Checkpoint]]
    ) -> None:
        now_us = self._clock.boottime_us()
        for counter, checkpoint in entries:
            stored = self._get(namespace, counter, now_us)
            if stored is None or stored.time_us <= checkpoint.time_us:
                # It is the last one: a new entry, or one that was just looked up.
                self._entries[namespace.id, counter] = (now_us, checkpoint)
        while len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)

    async def increment_many(
        self, namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> Sequence[int]:
        return [self._increment((namespace.id, counter), delta) for counter, delta in changes]

    def _increment(self, key: tuple[int, str], delta: int) -> int:
        value = self._values[key] = self._values.get(key, 0) + delta
        self._values.move_to_end(key)
        while len(self._values) > self._best_effort_max:
            self._values.popitem(last=False)
        return value

    async def best_effort(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[int]:
        keys = [(namespace.id, counter) for counter in counters]
        for key in keys:
            if key in self._values:
                self._values.move_to_end(key)
        return [self._values.get(key, 0) for key in keys]

    async def clear(self, namespace: Namespace, counter: str) -> None:
        self._values.pop((namespace.id, counter), None)

    def _get(self, namespace: Namespace, counter: str, now_us: int) -> Checkpoint | None:
        """Return the entry while it is within its namespace's TTL, counted from when it was put."""
        key = (namespace.id, counter)
        entry = self._entries.get(key)
        if entry is None:
            return None
        put_us, checkpoint = entry
        if now_us - put_us >= namespace.settings.cache_ttl_us:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return checkpoint
