"""Reserve the times of arbitrary keys, cancel keys, and issue tokens."""

from __future__ import annotations

from typing import NamedTuple

from counter import limits
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.ports import Clock, Store
from counter.types import CANCELLED_KEY, Namespace, Reservation, Token


class Key(NamedTuple):
    """An arbitrary key: the nonce that identifies it, and how long it is remembered."""

    nonce: bytes
    lasts_us: int


class KeyTimes:
    """The generation times that are reserved for arbitrary keys."""

    def __init__(self, store: Store, clock: Clock, guard: ClockGuard | None) -> None:
        self._store = store
        self._clock = clock
        self._guard = guard

    async def reserve(
        self, namespace: Namespace, key: Key, void_us: int | None = None
    ) -> tuple[int, bool]:
        """Return the time of the key's token, and whether the key is cancelled. A new time is
        reserved if it has none, or *void_us*, with which its token is void
        permanently.

        Raises ClockSkewError.
        """
        now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
        if void_us is not None:
            # Only this time is replaced. If another request has replaced it, the new one stays: the
            # clock may have been set ahead meanwhile, so it only seems expired.
            kept_us = limits.TIME_MAX_US
        else:
            # After a clock step ahead a key must not expire early, or its add would be counted
            # again.
            kept_us = 0 if self._guard is None else self._guard.followed_us
        wanted = Reservation(now_us, now_us + key.lasts_us, kept_us, replaces_us=void_us)
        stored_us = await self._store.decisions.reserve(namespace, key.nonce, wanted)
        return stored_us % CANCELLED_KEY, stored_us >= CANCELLED_KEY

    async def cancel(
        self, namespace: Namespace, key: Key, time_us: int, *, is_cancelled: bool
    ) -> bool:
        """Cancel the key, for as long as it is remembered from now on; return False if what is
        reserved is not as :meth:`reserve` has returned it. Raises ClockSkewError."""
        now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
        cancelled_us = time_us + CANCELLED_KEY
        wanted = Reservation(
            cancelled_us,
            now_us + key.lasts_us,
            # What is stored does not expire meanwhile.
            kept_us=cancelled_us,
            replaces_us=cancelled_us if is_cancelled else time_us,
        )
        return await self._store.decisions.reserve(namespace, key.nonce, wanted) == cancelled_us

    async def issue_tokens(self, count: int) -> list[Token]:
        """Return *count* tokens in strictly increasing order of ``(generation_time, nonce)``.

        The order holds over restarts, too, as long as the clock does not step back. The nonce is
        the store's own 8 bytes and a sequence number.
        """
        # All later tokens would keep a time from the future.
        now_us = checked_now_us(self._clock, self._guard)
        block = await self._store.control.lease_tokens(count, now_us)
        return [
            Token(block.issuer + number.to_bytes(8, "big"), block.time_us)
            for number in range(block.first, block.first + count)
        ]
