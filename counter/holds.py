"""Define holds: amounts that are reserved until they are settled, released, or expire.

A hold is an atomic add: 0 to its counter, and its amount to a counter of its own, the *held* one,
whose sum is what open holds reserve. Its end is an atomic add, too: what is settled to the counter,
and the amount back. docs/architecture.md explains the protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from struct import Struct
from typing import Final, NamedTuple

from counter.bounds import (
    NO_BOUNDS,
    Bounds,
    bounds_of,
    delta_of_terms,
    is_refusal,
    kind_in,
    terms_of,
)
from counter.limits import NONCE_BYTES
from counter.types import Event, Token
from counter.windows import fingerprint

#: No counter of a client has a name that begins like this.
HELD: Final = "\x01"
#: The names of clients come after this in order, and those of held counters before it.
AFTER_HELD: Final = "\x02"
#: Expired holds that one transaction ends to make room.
ENDED_AT_ONCE_MAX: Final = 100
#: The place of an open hold among those of its counter: its expiry, its token's time and nonce.
Place = tuple[int, int, bytes]
#: The place before all.
FIRST: Final[Place] = (-1, 0, b"")
#: The item key of the events of an end. No atomic add has so many items, so no client can take
#: their place, although it can compute their nonce.
_END_ITEM: Final = 2**31 - 1
_TOKEN: Final = Struct(f">Q{NONCE_BYTES}s")


class Ending(StrEnum):
    """How a hold has ended."""

    SETTLED = "settled"
    RELEASED = "released"
    EXPIRED = "expired"


#: The kinds of terms, by number.
KINDS: Final = ("", "hold", *Ending)


class HoldId(NamedTuple):
    """The counter and the token of a hold."""

    counter: str
    token: Token

    def to_bytes(self) -> bytes:
        """Return the id as bytes."""
        return _bytes_of(self.token) + self.counter.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> HoldId:
        """Return the id that *data* is. Raises ValueError."""
        if len(data) <= _TOKEN.size:
            raise ValueError(f"the id of a hold has more than {_TOKEN.size} bytes")
        time_us, nonce = _TOKEN.unpack_from(data)
        return cls(data[_TOKEN.size :].decode(), Token(nonce, time_us))


class End(NamedTuple):
    """How and when a hold has ended, and what was settled: 0 unless it was settled."""

    how: Ending
    amount: int
    time_us: int


class Hold(NamedTuple):
    """A hold as it is stored: open, ended, or refused."""

    id: HoldId
    amount: int
    #: None unless it is open.
    expires_us: int | None
    end: End | None = None
    #: Why it was refused, as an event of its counter.
    refused: Event | None = None

    def takes(self, amount: int) -> bool:
        """Return whether it can be settled with *amount*: one that goes its way, or 0."""
        return not amount or (amount < 0) == (self.amount < 0)


def is_held(counter: str) -> bool:
    """Return whether *counter* has the sum of what is held of another one."""
    return counter[:1] == HELD


def held_name(counter: str, amount: int) -> str:
    """Return the counter of what is held of *counter* by amounts that go the way of *amount*."""
    return f"{HELD}{'-' if amount < 0 else '+'}{counter}"


def is_hold(events: Sequence[Event]) -> bool:
    """Return whether *events*, of one token, are those of a hold."""
    return any(is_held(each.counter) for each in events)


def events_of_hold(
    hold: HoldId, amount: int, lasts_us: int, bounds: Bounds = NO_BOUNDS
) -> list[Event]:
    """Return the events of a hold of *amount* that expires after *lasts_us*: the counter's, then
    the held one's."""
    return _atomic(
        hold.token,
        (hold.counter, 0, terms_of(amount, bounds, KINDS.index("hold"))),
        (held_name(hold.counter, amount), amount, terms_of(lasts_us, NO_BOUNDS)),
    )


def first_event(hold: HoldId) -> Event:
    """Return an event with the identity of the one that a hold leaves in its counter."""
    nonce, time_us = hold.token
    return Event(hold.counter, time_us, nonce, 1, 0)


def hold_in(event: Event) -> HoldId:
    """Return the hold that *event*, of its counter, begins or ends."""
    if event.item_key != _END_ITEM:
        return HoldId(event.counter, Token(event.event_id, event.event_time_us))
    return HoldId.from_bytes((event.atom or b"")[-_TOKEN.size :] + event.counter.encode())


def end_event(hold: HoldId, ended_us: int) -> Event:
    """Return an event with the identity of the one that the end of a hold leaves in its counter."""
    return Event(hold.counter, ended_us, nonce_of_end(hold), _END_ITEM, 0)


def request_of(events: Sequence[Event]) -> tuple[HoldId, int, int, Bounds]:
    """Return what :func:`events_of_hold` was called with to make *events*."""
    first, held = events
    hold = HoldId(first.counter, Token(first.event_id, first.event_time_us))
    lasts_us = delta_of_terms(held.atom)
    return hold, delta_of_terms(first.atom), lasts_us, bounds_of(first.atom)


def hold_of(stored: Event, expires_us: int | None, ended: Event | None) -> Hold | None:
    """Return the hold of whose events *stored* is the first, as stored, and *ended* the first of
    its end; None if *stored* is no hold's."""
    if kind_in(stored.atom) != KINDS.index("hold"):
        return None
    hold = HoldId(stored.counter, Token(stored.event_id, stored.event_time_us))
    refused = stored if is_refusal(stored.atom) else None
    amount = delta_of_terms(stored.atom)
    if ended is None:
        return Hold(hold, amount, expires_us, None, refused)
    how = Ending(KINDS[kind_in(ended.atom)])
    return Hold(hold, amount, None, End(how, ended.delta, ended.event_time_us))


def nonce_of_end(hold: HoldId) -> bytes:
    """Return the nonce of the end of a hold: one, however it ends."""
    person, size = b"counter.end", NONCE_BYTES
    return hashlib.blake2b(hold.to_bytes(), digest_size=size, person=person).digest()


def events_of_end(hold: HoldId, amount: int, end: End) -> list[Event]:
    """Return the events of the *end* of an open hold of *amount*; that of its counter names it."""
    first, held = _atomic(
        Token(nonce_of_end(hold), end.time_us),
        (hold.counter, end.amount, terms_of(amount, NO_BOUNDS, KINDS.index(end.how))),
        (held_name(hold.counter, amount), -amount, b""),
        item=_END_ITEM,
    )
    return [first._replace(atom=(first.atom or b"") + _bytes_of(hold.token)), held]


def _bytes_of(token: Token) -> bytes:
    return _TOKEN.pack(token.generation_time_us, token.nonce)


def _atomic(token: Token, *items: tuple[str, int, bytes], item: int = 1) -> list[Event]:
    nonce, time_us = token
    events = [
        Event(name, time_us, nonce, item, delta, False, terms) for name, delta, terms in items
    ]
    atom = fingerprint(events)
    return [each._replace(atom=atom + (each.atom or b"")) for each in events]
