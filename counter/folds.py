"""Fold events or window rows into a count, with pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from counter.types import Event, Fold, WindowRow


def fold_events(events: Iterable[Event]) -> Fold:
    """Return the fold of *events* in any order: a clear erases every event that is not later."""
    known = list(events)
    clears = [event.event_time_us for event in known if event.clear]
    if not clears:
        return Fold(False, sum(event.delta for event in known))
    last_us = max(clears)
    return Fold(True, sum(event.delta for event in known if event.event_time_us > last_us))


def apply_fold(count: int, fold: Fold) -> int:
    """Return the count after *fold*."""
    return fold.total if fold.cleared else count + fold.total


def fold_rows(count: int, rows: Iterable[WindowRow]) -> int:
    """Return the count after *rows*, earliest first."""
    for row in rows:
        count = row.total if row.cleared else count + row.total
    return count


def fingerprint(events: Sequence[Event]) -> bytes:
    """Return the fingerprint of a token's payload: 16 bytes over each item's counter, key, delta
    and kind."""
    digest = hashlib.blake2b(digest_size=16, person=b"counter.payload")
    if len(events) > 1:
        events = sorted(events, key=lambda each: (each.counter, each.item_key))
    for event in events:
        name = event.counter.encode()
        digest.update(len(name).to_bytes(4, "big"))
        digest.update(name)
        digest.update(event.item_key.to_bytes(4, "big"))
        digest.update(b"clear" if event.clear else event.delta.to_bytes(9, "big", signed=True))
    return digest.digest()
