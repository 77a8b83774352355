"""Settle, release, extend and read holds. ``CounterService.hold`` begins one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from counter.bounds import Bounds
from counter.capabilities import HoldStore
from counter.clock import to_rfc3339
from counter.core.adds import bound_reached
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.read import Count, CountReader
from counter.core.resolve import is_before
from counter.errors import (
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    HoldUnknownError,
    InvalidBodyError,
    NotSupportedError,
    TokenTooOldError,
)
from counter.holds import Ending, Hold, HoldId, Place
from counter.limits import (
    FUTURE_LIMIT_MAX_US,
    HOLD_LIVES_OF_RETENTION,
    HOLD_MIN_US,
    INT64_MAX,
    SECOND,
)
from counter.ports import Clock, Store
from counter.types import CounterType, Namespace

#: How many expired holds one look-up reads to find their counters.
_FOUND_AT_ONCE: Final = 1_000


class Held(NamedTuple):
    """A hold, and its counter right after."""

    hold: Hold
    count: Count  # type: ignore[assignment]  # no caller uses tuple.count()
    #: Whether its token had begun it before; None if unknown, and in the answer to an end.
    replayed: bool | None = None


class Wanted(NamedTuple):
    """A hold that a request asks for."""

    amount: int
    lasts_us: int
    bounds: Bounds = Bounds()


class Holds:
    """The holds of a store, from their begin to their end.

    Exactly one of settle, release and expiry happens, and every other attempt raises what did:
    HoldSettledError, HoldReleasedError or HoldExpiredError. All methods raise NotSupportedError
    where there are no holds, HoldUnknownError for an id that is not known yet, BoundReachedError
    for a hold that was refused, and TokenTooOldError past retention.
    """

    def __init__(
        self, store: Store, clock: Clock, guard: ClockGuard | None, reader: CountReader
    ) -> None:
        self._store = store
        self._clock = clock
        self._guard = guard
        self._reader = reader
        #: Requests that were answered with success, retries included.
        self.tally = dict.fromkeys(("begun", "extended", "settled", "released"), 0)

    def check(self, namespace: Namespace, wanted: Wanted) -> None:
        """Raise an error if such a hold cannot be."""
        self.store(namespace)
        if wanted.amount == 0:
            raise InvalidBodyError("amount is 0: a hold reserves something", field="amount")
        if wanted.amount < -INT64_MAX:
            raise InvalidBodyError(
                f"amount is {wanted.amount}; it must be at least {-INT64_MAX}, because the end of"
                " the hold adds the opposite",
                field="amount",
            )
        self._check_lasts(namespace, wanted.lasts_us)

    async def begun(self, namespace: Namespace, hold: HoldId, replayed: bool | None) -> Held:
        """Return a hold that was begun, now or before. Raises the error of its end, because who
        asks must not go on with it."""
        found = self._open(hold, await self._find(namespace, hold))
        self.tally["begun"] += 1
        return (await self._shown(namespace, found))._replace(replayed=replayed)

    async def get(self, namespace: Namespace, hold: HoldId) -> Hold:
        """Return a hold: open, or with its end."""
        self._store_of(namespace, hold)
        return self._known(hold, await self._find(namespace, hold))

    async def settle(self, namespace: Namespace, hold: HoldId, amount: int) -> Held:
        """Count *amount*, which goes the way of the hold or is 0, and end the hold."""
        return await self._ended(namespace, hold, Ending.SETTLED, amount)

    async def release(self, namespace: Namespace, hold: HoldId) -> Held:
        """Give the whole amount back."""
        return await self._ended(namespace, hold, Ending.RELEASED)

    async def _ended(
        self, namespace: Namespace, hold: HoldId, how: Ending, amount: int = 0
    ) -> Held:
        store = self._store_of(namespace, hold)
        ended = self._known(hold, await store.end(namespace, hold, how, amount))
        if not ended.takes(amount):
            raise InvalidBodyError(
                f"amount is {amount}, and the hold is of {ended.amount}: it must have the same"
                " sign, or be 0",
                field="amount",
            )
        if ended.end is None or ended.end[:2] != (how, amount):
            raise ended_error(ended)
        self.tally[how] += 1
        return await self._shown(namespace, ended)

    async def extend(self, namespace: Namespace, hold: HoldId, lasts_us: int) -> Hold:
        """Let a hold expire *lasts_us* from now, or when no hold may live longer; never earlier."""
        store = self._store_of(namespace, hold)
        self._check_lasts(namespace, lasts_us)
        latest_us = hold.token.generation_time_us + longest_of_hold(namespace)
        found = self._open(hold, await store.extend(namespace, hold, lasts_us, latest_us))
        self.tally["extended"] += 1
        return found

    async def open(
        self, namespace: Namespace, counter: str, after: Place, limit: int
    ) -> Sequence[Hold]:
        """Return open holds of a counter, those that expire first, *after* a place."""
        return await self.store(namespace).open(namespace, counter, after, limit)

    def store(self, namespace: Namespace) -> HoldStore:
        """Return the store's holds. Raises NotSupportedError."""
        holds = self._store.capabilities.holds
        if holds is None or namespace.settings.counter_type is CounterType.BEST_EFFORT:
            raise NotSupportedError(
                "a hold needs a store that keeps bounds, SQLite or PostgreSQL, and a namespace that"
                f" is EVENTUAL or ACCURATE; {namespace.name!r} is"
                f" {namespace.settings.counter_type}"
            )
        return holds

    async def _find(self, namespace: Namespace, hold: HoldId) -> Hold | None:
        """Return a hold; if it has expired, with the end that says so."""
        store = self.store(namespace)
        found = await store.find(namespace, hold)
        if found is not None and (found.expires_us or INT64_MAX) <= self._now_us(namespace):
            return await store.end(namespace, hold, Ending.EXPIRED)
        return found

    async def _shown(self, namespace: Namespace, hold: Hold) -> Held:
        return Held(hold, await self._reader.read_one(namespace, hold.id.counter, 0))

    def _open(self, hold: HoldId, found: Hold | None) -> Hold:
        known = self._known(hold, found)
        if known.end is not None:
            raise ended_error(known)
        return known

    @staticmethod
    def _known(hold: HoldId, found: Hold | None) -> Hold:
        if found is None:
            raise HoldUnknownError(
                f"this namespace has no such hold of counter {hold.counter!r}: check the id and the"
                " namespace; if the request that makes it may still be under way, cancel its token"
            )
        if found.refused is not None:
            raise bound_reached((found.refused,)) or HoldUnknownError("the hold was refused")
        if found.expires_us is None and found.end is None:
            raise _forgotten()
        return found

    def _store_of(self, namespace: Namespace, hold: HoldId) -> HoldStore:
        """Return what :meth:`store` does. Raises TokenTooOldError if the end of the hold may be
        forgotten, and HoldUnknownError if there cannot be such a hold."""
        store = self.store(namespace)
        age_us = self._now_us(namespace) - hold.token.generation_time_us
        if age_us < -FUTURE_LIMIT_MAX_US or is_before(namespace, hold.token.generation_time_us):
            self._known(hold, None)
        if age_us > namespace.dataset.retention_us - namespace.settings.rollup_window_us:
            raise _forgotten()
        return store

    def _check_lasts(self, namespace: Namespace, lasts_us: int) -> None:
        longest_us = longest_of_hold(namespace)
        if not HOLD_MIN_US <= lasts_us <= longest_us:
            raise InvalidBodyError(
                f"expires_in is {lasts_us / SECOND:.15g} s; it must be from"
                f" {HOLD_MIN_US // SECOND} s to {longest_us / SECOND:.15g} s, which is retention /"
                f" {HOLD_LIVES_OF_RETENTION}",
                field="expires_in",
            )

    def _now_us(self, namespace: Namespace) -> int:
        return checked_now_us(self._clock, self._guard, namespace.dataset)


async def expire(store: Store, clock: Clock) -> tuple[int, Exception | None]:
    """End holds that have expired, for about a second; return how many, and the first failure. For
    workers, whose clock is checked."""
    holds = store.capabilities.holds
    until_us = clock.boottime_us() + SECOND
    number, failure = 0, None
    while holds is not None and (due := await holds.expired(_FOUND_AT_ONCE)):
        by_id = {each.id: each for each in await store.control.namespaces()}
        ends = (holds.expire(by_id[key], counter) for key, counter in due if key in by_id)
        before = number
        for each in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(each, int):
                number += each
            elif isinstance(each, Exception):
                failure = failure or each
            else:
                raise each
        # If none has ended, another clock says that they are open, or they failed.
        if number == before or clock.boottime_us() > until_us:
            break
    return number, failure


def ended_error(hold: Hold) -> CounterError:
    """Return the error of the end of *hold* for those who wanted another one."""
    end = hold.end
    if end is None:
        return _forgotten()
    at = to_rfc3339(end.time_us)
    if end.how is Ending.SETTLED:
        return HoldSettledError(
            f"the hold of {hold.amount} was settled with {end.amount} at {at}; if the work cost"
            " more, count the rest with an add",
            settled=end.amount,
            ended_at=at,
        )
    is_expired = end.how is Ending.EXPIRED
    how = "has expired, and was ended" if is_expired else "was released"
    return (HoldExpiredError if is_expired else HoldReleasedError)(
        f"the hold of {hold.amount} {how} at {at}; if the work was done, count its cost with an"
        " add, under a new token; otherwise do not begin it",
        ended_at=at,
    )


def longest_of_hold(namespace: Namespace) -> int:
    """Return how long a hold of *namespace* may live."""
    return namespace.dataset.retention_us // HOLD_LIVES_OF_RETENTION


def _forgotten() -> TokenTooOldError:
    return TokenTooOldError("the hold is so old that its end may be forgotten", applied=None)
