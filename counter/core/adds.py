"""Make the events of adds, and say what events came from, or why they were refused."""

from __future__ import annotations

from collections.abc import Sequence

from counter.bounds import delta_in, refusal_in
from counter.core.results import Add, Item, Items
from counter.errors import BoundReachedError
from counter.types import Event, Token
from counter.windows import fingerprint


def adds_of(events: Sequence[Event]) -> list[Add]:
    """Return the adds that *events* came from, each with its token."""
    return [Add(e.counter, e.delta, Token(e.event_id, e.event_time_us), e.atom) for e in events]


def bound_reached(found: Sequence[Event | None]) -> BoundReachedError | None:
    """Return the error for a token of which *found* is stored; None if that is no refusal."""
    stored = [each for each in found if each is not None]
    why = refusal_in(stored[0].atom) if stored else None
    if why is None:
        return None
    # Of a hold only the counter's own event may have been read.
    in_order = sorted(stored, key=lambda each: (each.counter, each.item_key))
    counter = in_order[why.item if len(stored) > 1 else 0].counter
    delta = sum(delta_in(each.delta, each.atom) for each in stored if each.counter == counter)
    whose = " of the namespace" if why.is_of_namespace else ""
    held = f", with {why.held} held," if why.held else ","
    return BoundReachedError(
        f"counter {counter!r} was {why.count}{held} and {delta:+} would have taken it past"
        f" {why.name} {why.bound}{whose}; there was room for {why.room}",
        counter=counter,
        count=why.count,
        room=why.room,
        **{why.name: why.bound},
        **({"held": why.held} if why.held else {}),
    )


def event_of(counter: str, token: Token, delta: int | None, terms: bytes | None = None) -> Event:
    """Return the event of an add, or of a clear if *delta* is None."""
    time_us, nonce = token.generation_time_us, token.nonce
    return Event(counter, time_us, nonce, 0, delta or 0, clear=delta is None, atom=terms)


def events_of_atomic(items: Items, token: Token) -> list[Event]:
    """Return the events of an atomic add.

    An item's key is its rank among those of the same counter, by their deltas and bounds, so the
    order of the items does not matter.
    """

    def rank(index: int) -> tuple[str, int, bytes]:
        event = events[index]
        return event.counter, event.delta, event.atom or b""

    whole = [Item(*each) for each in items]
    events = [event_of(each.counter, token, each.delta, each.terms) for each in whole]
    earlier: dict[str, int] = {}
    for index in sorted(range(len(events)), key=rank):
        counter = events[index].counter
        earlier[counter] = earlier.get(counter, 0) + 1
        events[index] = events[index]._replace(item_key=earlier[counter])
    atom = fingerprint(events)
    return [event._replace(atom=atom + (event.atom or b"")) for event in events]


def has_terms(items: Items) -> bool:
    """Return whether any of *items* is bounded."""
    return any(Item(*each).terms for each in items)
