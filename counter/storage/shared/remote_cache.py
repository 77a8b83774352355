"""The cache in servers: what all processes share, and may lose at any moment."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from counter import limits
from counter.errors import CacheUnavailableError, CounterError, invariant
from counter.metrics import CacheTally
from counter.ports import Clock
from counter.storage.shared.cache_entries import (
    Change,
    Entry,
    Note,
    count_key,
    ping_key,
    token_key,
    unpack_count,
    value_key,
)
from counter.storage.shared.cache_lane import (
    RETRY_AFTER_US,
    CacheConnection,
    CacheServer,
    RequestQueue,
    Unreachable,
)
from counter.types import Checkpoint, Event, Guarded, Namespace
from counter.windows import fingerprint

_PREFIX: Final = re.compile(r"[!-~]{1,100}")
#: memcached takes a longer one for an instant of the calendar.
_TTL_MAX_S: Final = 30 * 24 * 60 * 60
#: A token is sent again while it is within its accept limit: so much longer it is remembered.
_GUARD_MARGIN: Final = 2

_Connection = TypeVar("_Connection", bound=CacheConnection)
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Operations(Generic[_Connection]):
    """What a kind of server does with a batch over a connection; an answer for each item, in order.

    Each blocks, and raises any exception if the server fails."""

    #: Return the value of each key.
    read: Callable[[_Connection, Sequence[bytes]], Sequence[bytes | None]]
    #: Store each count unless a newer one is stored.
    put: Callable[[_Connection, Sequence[Entry]], Sequence[None]]
    #: Store each fingerprint if there is none, and return what was stored before.
    note: Callable[[_Connection, Sequence[Note]], Sequence[Guarded]]
    #: Make each change, and return the value after it, or why it can never be made.
    change: Callable[[_Connection, Sequence[Change]], Sequence[int | CounterError]]
    #: Return something if the server works. It may write the key.
    ping: Callable[[_Connection, Sequence[bytes]], Sequence[object]]
    #: Return the best-effort value of what ``read`` returned.
    unpack_value: Callable[[bytes], int]


class RemoteCache(Generic[_Connection]):
    """:class:`counter.ports.Cache` over servers. *place* returns the index of the server that a key
    lives on, if there are several.

    A server that fails is left alone for a second. *prefix* keeps apart the deployments that share
    a server.
    """

    def __init__(
        self,
        servers: Mapping[str, Callable[[], _Connection]],
        operations: Operations[_Connection],
        clock: Clock,
        *,
        timeout_us: int,
        prefix: str,
        place: Callable[[bytes], int] | None = None,
    ) -> None:
        """*servers* are functions that make a connection, by the name of the server."""
        invariant(bool(servers), "a cache needs a server")
        invariant(_PREFIX.fullmatch(prefix) is not None, f"no prefix of a key: {prefix!r}")
        self.trouble: str | None = None
        self._prefix = prefix
        self._place = place or (lambda _: 0)
        self._unpack_value = operations.unpack_value
        timeout_s = timeout_us / limits.SECOND
        self._servers = [
            CacheServer(name, connection, timeout_s, clock, self._update_trouble)
            for name, connection in servers.items()
        ]
        self.tally = CacheTally(("read", "put", "guard", "change", "ping"))
        self._reads = self._lanes(operations.read, "read")
        self._puts = self._lanes(operations.put, "put")
        self._notes = self._lanes(operations.note, "guard")
        self._changes = self._lanes(operations.change, "change")
        # A second lane: with few clients, all would wait for one batch in flight.
        self._more_changes = self._lanes(operations.change, "change")
        self._pings = self._lanes(operations.ping, "ping")

    async def open(self) -> None:
        """Ping the servers; it is no error if they are down."""
        with suppress(CacheUnavailableError):
            await self.ping()

    async def close(self) -> None:
        changes = (self._changes, self._more_changes)
        for lanes in (self._reads, self._puts, self._notes, *changes, self._pings):
            for lane in lanes:
                await lane.close()

    def queues(self) -> Mapping[str, int]:
        """Return the number of items that wait for the batch before theirs."""
        changes = (*self._changes, *self._more_changes)
        lanes: tuple[RequestQueue[Any, Any], ...] = (
            *self._reads,
            *self._puts,
            *self._notes,
            *changes,
        )
        return {"cache": sum(each.waiting for each in lanes)}

    async def ping(self) -> None:
        """Ask every server, those too that are left alone."""
        key = ping_key(self._prefix)
        answers = await asyncio.gather(*(lane.ask([key], insist=True) for lane in self._pings))
        reasons = [each.reason for [each] in answers if isinstance(each, Unreachable)]
        if reasons:
            raise _unavailable("; ".join(reasons))

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        ttl_s = _guard_ttl_s(namespace)
        notes = [self._note(namespace, event, ttl_s) for event in events]
        answers = await self._ask(self._notes, notes, [each.key for each in notes])
        return [Guarded.UNVERIFIED if isinstance(each, Unreachable) else each for each in answers]

    async def get_many(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> Sequence[Checkpoint | None]:
        if not namespace.settings.cache_ttl_us:
            return [None] * len(counters)
        keys = [count_key(self._prefix, namespace.id, counter) for counter in counters]
        found = await self._ask(self._reads, keys, keys)
        return [unpack_count(each) if isinstance(each, bytes) else None for each in found]

    def peek(self, namespace: Namespace, counter: str) -> Checkpoint | None:
        """Nothing is kept within the process."""
        return None

    async def put_many(
        self, namespace: Namespace, entries: Sequence[tuple[str, Checkpoint]]
    ) -> None:
        if not namespace.settings.cache_ttl_us:
            return
        ttl_s = _whole_seconds(namespace.settings.cache_ttl_us)
        items = [
            Entry(count_key(self._prefix, namespace.id, counter), ttl_s, checkpoint)
            for counter, checkpoint in entries
        ]
        await self._ask(self._puts, items, [each.key for each in items])

    async def increment_many(
        self, namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> Sequence[int | CounterError]:
        return await self._change(namespace, changes)

    async def best_effort(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[int]:
        keys = [value_key(self._prefix, namespace.id, counter) for counter in counters]
        values: list[int] = []
        answers = await self._ask(self._reads, keys, keys)
        for counter, found in zip(counters, answers, strict=True):
            if isinstance(found, Unreachable):
                raise _unavailable(found.reason)
            try:
                values.append(0 if found is None else self._unpack_value(found))
            except ValueError as error:
                raise _unavailable(
                    f"counter {counter!r} has a value that is no number: clear the counter"
                ) from error
        return values

    async def clear(self, namespace: Namespace, counter: str) -> None:
        [answer] = await self._change(namespace, [(counter, None)])
        if isinstance(answer, CounterError):
            raise answer

    def _note(self, namespace: Namespace, event: Event, ttl_s: int) -> Note:
        key = token_key(self._prefix, namespace.id, event)
        return Note(key, ttl_s, event.atom or fingerprint((event,)))

    async def _change(
        self, namespace: Namespace, changes: Sequence[tuple[str, int | None]]
    ) -> Sequence[int | CounterError]:
        items = [
            Change(value_key(self._prefix, namespace.id, counter), delta)
            for counter, delta in changes
        ]
        lanes = [
            spare if lane.is_out and not spare.is_out else lane
            for lane, spare in zip(self._changes, self._more_changes, strict=True)
        ]
        answers = await self._ask(lanes, items, [each.key for each in items])
        return [_unchanged(each) if isinstance(each, Unreachable) else each for each in answers]

    async def _ask(
        self,
        lanes: Sequence[RequestQueue[_Item, _Answer]],
        items: Sequence[_Item],
        keys: Sequence[bytes],
    ) -> Sequence[_Answer | Unreachable]:
        """Ask each item of the server that has its key; the answers in the items' order."""
        if not items:
            return []
        if len(lanes) == 1:
            return await lanes[0].ask(items)
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._place(key), []).append(place)
        if len(places) == 1:
            return await lanes[next(iter(places))].ask(items)
        parts = await asyncio.gather(
            *(lanes[index].ask([items[place] for place in mine]) for index, mine in places.items())
        )
        answers: dict[int, _Answer | Unreachable] = {}
        for mine, part in zip(places.values(), parts, strict=True):
            answers |= zip(mine, part, strict=True)
        return [answers[place] for place in range(len(items))]

    def _lanes(
        self, work: Callable[[_Connection, Sequence[_Item]], Sequence[_Answer]], operation: str
    ) -> list[RequestQueue[_Item, _Answer]]:
        calls = self.tally.calls[operation]
        return [RequestQueue(server, work, calls) for server in self._servers]

    def _update_trouble(self) -> None:
        troubles = [server.trouble for server in self._servers if server.trouble is not None]
        self.trouble = "; ".join(troubles) or None


def _guard_ttl_s(namespace: Namespace) -> int:
    """Return how long a token is noted: until it is late on every server, and then some."""
    accept_limit_us = max(era.accept_limit_us for era in namespace.eras)
    dataset = namespace.dataset
    closing_us = dataset.write_timeout_us + 2 * dataset.clock_skew_max_us
    live_us = namespace.settings.future_limit_us + accept_limit_us + closing_us
    return _whole_seconds(_GUARD_MARGIN * live_us)


def _whole_seconds(ttl_us: int) -> int:
    """Round up, because a TTL of 0 never ends."""
    return min(max(-(-ttl_us // limits.SECOND), 1), _TTL_MAX_S)


def _unchanged(why: Unreachable) -> CacheUnavailableError:
    """A change of a best-effort counter that was not acknowledged."""
    what = "may have been made, and a retry may make it twice" if why.sent else "was not made"
    return _unavailable(f"{why.reason}; the change {what}")


def _unavailable(reason: str) -> CacheUnavailableError:
    return CacheUnavailableError(reason, retry_after_us=RETRY_AFTER_US)
