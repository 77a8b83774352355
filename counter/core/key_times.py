"""Reserve the times of arbitrary keys, and cancel keys."""

from __future__ import annotations

from counter import limits
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.ports import Clock, Store
from counter.types import CANCELLED_KEY, Namespace, Reservation


class KeyTimes:
    """The generation times that are reserved for arbitrary keys; a nonce identifies a key."""

    def __init__(self, store: Store, clock: Clock, guard: ClockGuard | None) -> None:
        self._store = store
        self._clock = clock
        self._guard = guard

    async def reserve(
        self, namespace: Namespace, nonce: bytes, void_us: int | None = None
    ) -> tuple[int, bool]:
        """Return the time of the key's token, and whether the key is cancelled. A new time is
        reserved if it has none, or *void_us*, with which its token is void permanently.

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
        expires_us = now_us + namespace.settings.key_ttl_us
        wanted = Reservation(now_us, expires_us, kept_us, replaces_us=void_us)
        stored_us = await self._store.decisions.reserve(namespace, nonce, wanted)
        return stored_us % CANCELLED_KEY, stored_us >= CANCELLED_KEY

    async def cancel(
        self, namespace: Namespace, nonce: bytes, time_us: int, *, is_cancelled: bool
    ) -> bool:
        """Cancel the key, for as long as keys are remembered from now on; return False if what is
        reserved is not as :meth:`reserve` has returned it. Raises ClockSkewError."""
        now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
        cancelled_us = time_us + CANCELLED_KEY
        wanted = Reservation(
            cancelled_us,
            now_us + namespace.settings.key_ttl_us,
            # What is stored does not expire meanwhile.
            kept_us=cancelled_us,
            replaces_us=cancelled_us if is_cancelled else time_us,
        )
        return await self._store.decisions.reserve(namespace, nonce, wanted) == cancelled_us
