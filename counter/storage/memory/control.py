"""Store namespaces, datasets and slices in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from counter.errors import InvalidParameterError, invariant
from counter.storage.memory.tables import Shard, Space, Tables
from counter.types import (
    ClockReading,
    Dataset,
    Era,
    Namespace,
    NamespaceSettings,
    Slice,
    TokenBlock,
)
from counter.windows import first_watermark

#: One call of ``purge`` deletes at most this many rows, or one namespace's events.
PURGE_ROWS_MAX: Final = 1_000
#: The same for every in-memory store, so that one seed gives one run.
STORE_ID: Final = b"inmemory"


class MemoryControl:
    """:class:`counter.ports.ControlPlane`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._latest_id = 0
        self._next_sequence = 1
        self._issued_us = 0

    async def datasets(self) -> Sequence[Dataset]:
        return [state.dataset for state in self._tables.states.values()]

    async def read_clock(self) -> ClockReading:
        """Return no offset: the store's clock is the process's own."""
        return ClockReading(0, 0)

    async def namespaces(self) -> Sequence[Namespace]:
        return [self._tables.namespaces[name] for name in sorted(self._tables.namespaces)]

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        if name in self._tables.namespaces:
            return None
        dataset = self._dataset_named(settings.dataset)
        self._latest_id += 1
        eras = (Era(0, settings.accept_limit_us),)
        namespace = Namespace(self._latest_id, name, settings, eras, dataset, now_us, version=1)
        watermark_us = first_watermark(dataset, settings, now_us)
        shards = [Shard(watermark_us) for _ in range(settings.shards)]
        self._tables.spaces[namespace.id] = Space(dataset.id, shards)
        self._tables.namespaces[name] = namespace
        return namespace

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        if not self._is_current(namespace):
            return False
        self._tables.namespaces[namespace.name] = updated
        return True

    async def delete_namespace(self, namespace: Namespace) -> bool:
        if not self._is_current(namespace):
            return False
        del self._tables.namespaces[namespace.name]
        del self._tables.spaces[namespace.id]
        self._tables.deleted.append((namespace.id, namespace.dataset))
        return True

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        names = self._tables.space(namespace).names
        first = bisect_left(names, prefix)
        if after is not None:
            first = max(first, bisect_right(names, after))
        page = islice(names, first, first + limit)
        return [name for name in page if name.startswith(prefix)]

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return list(self._tables.state_of(dataset).slices)

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        state = self._tables.state_of(dataset)
        for each in slices:
            if each.start_us not in state.tables and each.end_us > state.dropped_before_us:
                state.tables[each.start_us] = {}
                insort(state.slices, each, key=lambda stored: stored.start_us)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        state = self._tables.state_of(dataset)
        for position, each in enumerate(state.slices):
            if each.start_us == start_us and each.retired_at_us is None:
                state.slices[position] = replace(each, retired_at_us=now_us)

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        state = self._tables.state_of(dataset)
        if start_us < state.dropped_before_us:
            # Another worker has dropped it.
            return True
        earliest = bool(state.slices) and state.slices[0].start_us == start_us
        invariant(earliest, f"slices drop in order; {start_us} is not the earliest")
        each = state.slices.pop(0)
        state.dropped_before_us = each.end_us
        del state.tables[start_us]
        return True

    async def dropped_before(self, dataset: Dataset) -> int:
        return self._tables.state_of(dataset).dropped_before_us

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        first = self._next_sequence
        self._next_sequence += count
        self._issued_us = max(self._issued_us, now_us)
        return TokenBlock(STORE_ID, first, self._issued_us)

    async def purge(self, now_us: int) -> bool:
        if self._tables.deleted:
            namespace_id, dataset = self._tables.deleted.pop(0)
            for table in self._tables.state_of(dataset).tables.values():
                table.pop(namespace_id, None)
            return True
        useless = list(islice(self._useless(now_us), PURGE_ROWS_MAX))
        for forget in useless:
            forget()
        return len(useless) == PURGE_ROWS_MAX

    def _useless(self, now_us: int) -> Iterator[Callable[[], object]]:
        """Return a deletion for each expired key and each decision whose event is dropped."""
        for space in self._tables.spaces.values():
            for nonce, (_, expires_us) in space.keys.items():
                if expires_us <= now_us:
                    yield partial(space.keys.pop, nonce)
            dropped_before_us = self._tables.states[space.dataset_id].dropped_before_us
            for token in space.decisions:
                if token[1] < dropped_before_us:
                    yield partial(space.decisions.pop, token)

    def _is_current(self, namespace: Namespace) -> bool:
        stored = self._tables.namespaces.get(namespace.name)
        return stored is not None and (stored.id, stored.version) == (
            namespace.id,
            namespace.version,
        )

    def _dataset_named(self, name: str) -> Dataset:
        for state in self._tables.states.values():
            if state.dataset.name == name:
                return state.dataset
        known = ", ".join(state.dataset.name for state in self._tables.states.values())
        raise InvalidParameterError(f"no dataset is named {name!r}; there are: {known}")
