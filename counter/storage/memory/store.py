"""Compose the in-memory store from its parts; the small ones are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from counter import limits
from counter.api_keys import ApiKey
from counter.capabilities import Capabilities, PartitionSize
from counter.limits import SIZES_KEPT_SLICES
from counter.metrics import StoreTally
from counter.ports import Clock
from counter.storage.memory.control import MemoryControl
from counter.storage.memory.events import MemoryEvents
from counter.storage.memory.rollups import MemoryRecounts, MemoryRollups
from counter.storage.memory.separate_writes import MemorySeparateWrites
from counter.storage.memory.tables import Tables, token_of
from counter.types import Dataset, Decision, Event, Namespace, Reservation

DEFAULT_DATASET: Final = Dataset(
    id=1,
    name="default",
    retention_us=7 * limits.DAY,
    slice_us=limits.DAY,
    time_bucket_us=6 * limits.HOUR,
    event_buckets=4,
    write_timeout_us=limits.SECOND,
    clock_skew_max_us=0,
)


class MemoryDecisions:
    """:class:`counter.ports.DecisionStore`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        return self._tables.space(namespace).decisions.setdefault(token_of(events), decision)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        return self._tables.space(namespace).decisions.get(token_of(events))

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        decisions, token = self._tables.space(namespace).decisions, token_of(events)
        decisions[token] = decision.over(decisions.get(token))
        return decisions[token]

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        keys = self._tables.space(namespace).keys
        if nonce not in keys or wanted.replaces(*keys[nonce]):
            keys[nonce] = (wanted.time_us, wanted.expires_us)
        return keys[nonce][0]


class MemoryPartitionSizes:
    """:class:`counter.capabilities.PartitionSizeStore`, without nodes that report sizes."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def record(self, dataset: Dataset, size: PartitionSize) -> None:
        state = self._tables.state_of(dataset)
        until_us = self._tables.clock.now_us() + SIZES_KEPT_SLICES * dataset.slice_us
        key = (size.start_us, size.is_observed)
        stored = state.sizes.get(key)
        if stored is None or stored[0].size_bytes < size.size_bytes:
            state.sizes[key] = (size, until_us)

    async def recorded(self, dataset: Dataset) -> Sequence[PartitionSize]:
        now_us, state = self._tables.clock.now_us(), self._tables.state_of(dataset)
        kept = {key: each for key, each in sorted(state.sizes.items()) if now_us < each[1]}
        state.sizes = kept
        return [size for size, _ in kept.values()]

    async def observe(self, dataset: Dataset) -> Sequence[PartitionSize]:
        return []


class MemoryLeases:
    """:class:`counter.capabilities.LeaseStore`; leases expire by the boot clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, int] = {}

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        self._workers[worker] = self._clock.boottime_us() + ttl_us

    async def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    async def workers(self) -> Sequence[str]:
        now_us = self._clock.boottime_us()
        return sorted(name for name, until_us in self._workers.items() if until_us > now_us)


class MemoryKeys:
    """:class:`counter.api_keys.KeyStore`."""

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}

    async def api_keys(self) -> Sequence[ApiKey]:
        return sorted(self._keys.values(), key=lambda each: (each.created_at_us, each.id))

    async def create_api_key(self, key: ApiKey) -> bool:
        if key.id in self._keys:
            return False
        self._keys[key.id] = replace(key, last_used_us=None)
        return True

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        stored = self._keys.get(old.id)
        if stored is None or stored != old:
            return False
        self._keys[old.id] = replace(new, last_used_us=stored.last_used_us)
        return True

    async def forget_api_key(self, key: ApiKey) -> bool:
        if self._keys.get(key.id) != key:
            return False
        del self._keys[key.id]
        return True

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        for key_id, used_us in uses:
            stored = self._keys.get(key_id)
            if stored is not None:
                last_us = max(used_us, stored.last_used_us or 0)
                self._keys[key_id] = replace(stored, last_used_us=last_us)


class MemoryStore:
    """:class:`counter.ports.Store` in memory, without transactions.

    Each call takes effect at once and whole. As with a real store, anything may happen between two
    calls.
    """

    def __init__(self, clock: Clock, datasets: Sequence[Dataset] = (DEFAULT_DATASET,)) -> None:
        #: The data of all parts but leases and keys.
        self.tables = tables = Tables(clock, datasets)
        self.events = MemoryEvents(tables)
        self.separate_writes = MemorySeparateWrites(tables)
        self.rollups = MemoryRollups(tables)
        self.recounts = MemoryRecounts(tables)
        self.decisions = MemoryDecisions(tables)
        self.control = MemoryControl(tables)
        self.leases = MemoryLeases(clock)
        self.keys = MemoryKeys()
        self.partition_sizes = MemoryPartitionSizes(tables)
        self.capabilities = Capabilities(partition_sizes=self.partition_sizes)
        self.tally = StoreTally(())

    def queues(self) -> Mapping[str, int]:
        """Return no queues: no call waits."""
        return {}

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: data can still be read."""

    async def ping(self) -> None:
        """Do nothing: a write always succeeds."""
