"""The cache in memcached: what all processes share, and may lose at any moment.

A key lives on one server, chosen by rendezvous hashing, so that adding a server moves only the keys
that it gets. The keys of a server that is down are unknown until it is back: a second home for them
would serve old counts when the first one returns.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from pymemcache.client.rendezvous import RendezvousHash
from xxhash import xxh64_intdigest

from counter import limits
from counter.errors import CacheUnavailableError, invariant
from counter.folds import fingerprint
from counter.metrics import CacheTally
from counter.ports import Clock
from counter.storage.memcached import commands
from counter.storage.memcached.connection import Connection
from counter.storage.memcached.keys import (
    count_key,
    token_key,
    unpack_count,
    unpack_value,
    value_key,
)
from counter.storage.memcached.lane import RETRY_AFTER_US, Lane, Server, Unreachable
from counter.types import Checkpoint, Event, Guarded, Namespace

_PREFIX: Final = re.compile(r"[!-~]{1,100}")
#: memcached takes a longer one for an instant of the calendar.
_TTL_MAX_S: Final = 30 * 24 * 60 * 60
#: A token is sent again while it is within its accept limit: so much longer it is remembered.
_GUARD_MARGIN: Final = 2

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class MemcachedCache:
    """:class:`counter.ports.Cache` over one or more memcached servers.

    *timeout_us* bounds a connect and each wait for an answer; a server that fails is left alone for
    a second. *prefix* keeps apart the deployments that share a server. A best-effort counter has 64
    bits: past 2**63 - 1 it goes on at -2**63.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        clock: Clock,
        *,
        timeout_us: int = 100 * limits.MILLISECOND,
        prefix: str = "counter",
    ) -> None:
        invariant(bool(servers), "a cache needs a server")
        invariant(_PREFIX.fullmatch(prefix) is not None, f"no prefix of a key: {prefix!r}")
        self.trouble: str | None = None
        self._prefix = prefix
        timeout_s = timeout_us / limits.SECOND
        self._servers = [Server(host, port, timeout_s, clock, self._look) for host, port in servers]
        self._hashing = RendezvousHash(
            [server.name for server in self._servers], hash_function=_hash
        )
        self._index = {server.name: index for index, server in enumerate(self._servers)}
        self.tally = CacheTally(("read", "put", "guard", "change", "ping"))
        self._reads = self._lanes(commands.read, "read")
        self._puts = self._lanes(commands.put, "put")
        self._notes = self._lanes(commands.note, "guard")
        self._changes = self._lanes(commands.change, "change")
        # All of a few clients would wait for one batch, and the event loop with them: those that
        # come meanwhile leave by these.
        self._more_changes = self._lanes(commands.change, "change")
        self._versions = self._lanes(commands.ask_version, "ping")

    async def open(self) -> None:
        """Look whether the servers are there: it is no error if they are not."""
        with suppress(CacheUnavailableError):
            await self.ping()

    async def close(self) -> None:
        changes = (self._changes, self._more_changes)
        for lanes in (self._reads, self._puts, self._notes, *changes, self._versions):
            for lane in lanes:
                await lane.close()

    def queues(self) -> Mapping[str, int]:
        """Items that wait for the batch before theirs."""
        changes = (*self._changes, *self._more_changes)
        lanes: tuple[Lane[Any, Any], ...] = (*self._reads, *self._puts, *self._notes, *changes)
        return {"cache": sum(each.waiting for each in lanes)}

    async def ping(self) -> None:
        """Ask every server, those too that are left alone."""
        answers = await asyncio.gather(*(lane.ask([None], insist=True) for lane in self._versions))
        reasons = [each.reason for [each] in answers if isinstance(each, Unreachable)]
        if reasons:
            raise _unavailable("; ".join(reasons))

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        ttl_s = _guard_ttl_s(namespace)
        notes = [self._note(namespace, event, ttl_s) for event in events]
        answers = await self._ask(self._notes, notes, [each.key for each in notes])
        return [Guarded.UNTOLD if isinstance(each, Unreachable) else each for each in answers]

    async def get_many(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> Sequence[Checkpoint | None]:
        keys = [count_key(self._prefix, namespace.id, counter) for counter in counters]
        found = await self._ask(self._reads, keys, keys)
        return [unpack_count(each) if isinstance(each, bytes) else None for each in found]

    def peek(self, namespace: Namespace, counter: str) -> Checkpoint | None:
        """Nothing is kept within the process."""
        return None

    async def put_many(
        self, namespace: Namespace, entries: Sequence[tuple[str, Checkpoint]]
    ) -> None:
        ttl_s = _whole_seconds(namespace.settings.cache_ttl_us)
        items = [
            commands.Entry(count_key(self._prefix, namespace.id, counter), ttl_s, checkpoint)
            for counter, checkpoint in entries
        ]
        await self._ask(self._puts, items, [each.key for each in items])

    async def increment(self, namespace: Namespace, counter: str, delta: int) -> int:
        return await self._change(namespace, counter, delta)

    async def best_effort(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[int]:
        keys = [value_key(self._prefix, namespace.id, counter) for counter in counters]
        values: list[int] = []
        for found in await self._ask(self._reads, keys, keys):
            if isinstance(found, Unreachable):
                raise _unavailable(found.reason)
            values.append(0 if found is None else unpack_value(found))
        return values

    async def clear(self, namespace: Namespace, counter: str) -> None:
        await self._change(namespace, counter, None)

    def _note(self, namespace: Namespace, event: Event, ttl_s: int) -> commands.Note:
        key = token_key(self._prefix, namespace.id, event)
        return commands.Note(key, ttl_s, event.atom or fingerprint((event,)))

    async def _change(self, namespace: Namespace, counter: str, delta: int | None) -> int:
        key = value_key(self._prefix, namespace.id, counter)
        index = self._server_of(key) if len(self._servers) > 1 else 0
        lane, spare = self._changes[index], self._more_changes[index]
        if lane.is_out and not spare.is_out:
            lane = spare
        [answer] = await lane.ask([commands.Change(key, delta)])
        if isinstance(answer, Unreachable):
            raise _unchanged(answer)
        return answer

    async def _ask(
        self, lanes: Sequence[Lane[_Item, _Answer]], items: Sequence[_Item], keys: Sequence[bytes]
    ) -> Sequence[_Answer | Unreachable]:
        """Ask each item of the server that has its key; the answers in the items' order."""
        if not items:
            return []
        if len(lanes) == 1:
            return await lanes[0].ask(items)
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._server_of(key), []).append(place)
        if len(places) == 1:
            return await lanes[next(iter(places))].ask(items)
        parts = await asyncio.gather(
            *(lanes[index].ask([items[place] for place in mine]) for index, mine in places.items())
        )
        answers: dict[int, _Answer | Unreachable] = {}
        for mine, part in zip(places.values(), parts, strict=True):
            answers |= zip(mine, part, strict=True)
        return [answers[place] for place in range(len(items))]

    def _server_of(self, key: bytes) -> int:
        """The place of the server that *key* lives on."""
        return self._index[self._hashing.get_node(key.decode("ascii"))]

    def _lanes(
        self, work: Callable[[Connection, Sequence[_Item]], Sequence[_Answer]], operation: str
    ) -> list[Lane[_Item, _Answer]]:
        calls = self.tally.calls[operation]
        return [Lane(server, work, calls) for server in self._servers]

    def _look(self) -> None:
        troubles = [server.trouble for server in self._servers if server.trouble is not None]
        self.trouble = "; ".join(troubles) or None


def _hash(text: str, seed: int) -> int:
    """In place of pymemcache's own, which is written in Python: 0.5 us instead of 15."""
    return xxh64_intdigest(text.encode(), seed)


def _guard_ttl_s(namespace: Namespace) -> int:
    """Until the token is late on every server, and then some: from then on it is resolved."""
    accept_limit_us = max(era.accept_limit_us for era in namespace.eras)
    dataset = namespace.dataset
    closing_us = dataset.write_timeout_us + 2 * dataset.clock_skew_max_us
    live_us = namespace.settings.future_limit_us + accept_limit_us + closing_us
    return _whole_seconds(_GUARD_MARGIN * live_us)


def _whole_seconds(ttl_us: int) -> int:
    """Rounded up: 0 would stand for ever."""
    return min(max(-(-ttl_us // limits.SECOND), 1), _TTL_MAX_S)


def _unchanged(why: Unreachable) -> CacheUnavailableError:
    """A change of a best-effort counter that was not acknowledged."""
    what = "may have been made, and a retry may make it twice" if why.sent else "was not made"
    return _unavailable(f"{why.reason}; the change {what}")


def _unavailable(reason: str) -> CacheUnavailableError:
    return CacheUnavailableError(reason, retry_after_us=RETRY_AFTER_US)
