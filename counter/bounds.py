"""Define the bounds of a count, and what events keep of them.

The ``atom`` of an event has up to three parts: the fingerprint of its item list, if it is part of
an atomic add; the *terms* of a bounded add, which are its delta and its bounds, or those of a hold
or its end (:mod:`counter.holds`), which has the token of its hold after them; and, of an add that
was refused, what decided. A refused one has terms always, because its event counts 0; an accepted
one without bounds has none. The number of bytes says which parts there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

#: Which bounds there are, and the kind; the delta, ``at_least`` and ``at_most``.
_TERMS: Final = Struct(">Bqqq")
#: Which bound was reached, the item that reached it, the bound, and the count and what is held,
#: which may need more than 64 bits.
_REFUSAL: Final = Struct(">BHq16s16s")
_HAS_LEAST, _HAS_MOST, _KINDS = 1, 2, 4
_IS_MOST, _IS_OF_NAMESPACE = 1, 2
_FINGERPRINT_BYTES: Final = 16
_SINGLE: Final = (_TERMS.size, _TERMS.size + _REFUSAL.size)
_REFUSED: Final = (_SINGLE[1], _FINGERPRINT_BYTES + _SINGLE[1])


class Bounds(NamedTuple):
    """The least and the greatest value of a count; None if it has no such bound."""

    at_least: int | None = None
    at_most: int | None = None

    def tightest(self, other: Bounds) -> Bounds:
        """Return the bounds that keep both."""
        return Bounds(
            _chosen(max, self.at_least, other.at_least), _chosen(min, self.at_most, other.at_most)
        )


NO_BOUNDS: Final = Bounds()


class Refusal(NamedTuple):
    """Why an add was refused: *count* and its delta, with what is *held*, are past *bound*."""

    count: int  # type: ignore[assignment]  # no caller uses tuple.count()
    bound: int
    is_most: bool
    is_of_namespace: bool
    #: The place of the item among those of its atomic add, by counter and item key.
    item: int = 0
    #: The sum of the open holds that go the same way.
    held: int = 0

    @property
    def name(self) -> str:
        """The field that sets the bound."""
        return "at_most" if self.is_most else "at_least"

    @property
    def room(self) -> int:
        """The largest amount that could have been added, or taken away, instead."""
        room = self.bound - self.count - self.held
        return max(0, room if self.is_most else -room)


def refusal(count: int, delta: int, own: Bounds, default: Bounds, held: int = 0) -> Refusal | None:
    """Return why an add of *delta* to *count* is refused, by its *own* bounds or by those of its
    namespace; None if it is accepted. An add towards a bound always is. *held* is the sum of the
    open holds that go the way of *delta*."""
    if delta > 0:
        most = _chosen(min, own.at_most, default.at_most)
        if most is not None and count + held + delta > most:
            return Refusal(count, most, True, most != own.at_most, held=held)
    elif delta < 0:
        least = _chosen(max, own.at_least, default.at_least)
        if least is not None and count + held + delta < least:
            return Refusal(count, least, False, least != own.at_least, held=held)
    return None


def terms_of(delta: int, bounds: Bounds, kind: int = 0) -> bytes:
    """Return the terms of an add of *delta* with *bounds*; *kind* is not 0 for those of a hold."""
    least, most = bounds
    has = (least is not None) * _HAS_LEAST + (most is not None) * _HAS_MOST
    return _TERMS.pack(has + kind * _KINDS, delta, least or 0, most or 0)


def kind_in(atom: bytes | None) -> int:
    """Return the kind that *atom* was made with; 0 if it has no terms."""
    terms = terms_in(atom or b"")
    return terms[0] // _KINDS if terms else 0


def delta_of_terms(atom: bytes | None) -> int:
    """Return the delta in the terms of *atom*, which has terms."""
    return int(_TERMS.unpack(terms_in(atom or b""))[1])


def terms_if_bounded(delta: int, at_least: int | None, at_most: int | None) -> bytes | None:
    """Return the terms of an add; None if it has no bounds. Raises ValueError if no count is within
    them."""
    if at_least is None and at_most is None:
        return None
    if at_least is not None and at_most is not None and at_least > at_most:
        raise ValueError(f"at_least is {at_least}, and at_most is {at_most}: no count is both")
    return terms_of(delta, Bounds(at_least, at_most))


def terms_in(atom: bytes) -> bytes:
    """Return the terms in *atom*; nothing if it has none."""
    start = 0 if len(atom) in _SINGLE else _FINGERPRINT_BYTES
    return atom[start : start + _TERMS.size]


@lru_cache(maxsize=1_024)
def bounds_of(atom: bytes | None) -> Bounds:
    """Return the bounds in *atom*; cached, because many adds have the same terms."""
    if not atom or not (terms := terms_in(atom)):
        return NO_BOUNDS
    has, _, least, most = _TERMS.unpack(terms)
    return Bounds(least if has & _HAS_LEAST else None, most if has & _HAS_MOST else None)


def payload_of(delta: int, atom: bytes | None) -> bytes:
    """Return what is equal for all adds of one payload, whether they were accepted or refused."""
    if atom is None:
        return terms_of(delta, NO_BOUNDS)
    return atom[: _TERMS.size if len(atom) in _SINGLE else _FINGERPRINT_BYTES]


def refused_atom(delta: int, atom: bytes | None, why: Refusal) -> bytes:
    """Return the atom of an add of *delta* with *atom* that is refused."""
    atom = atom or b""
    if not terms_in(atom):
        atom += terms_of(delta, NO_BOUNDS)
    which = why.is_most * _IS_MOST + why.is_of_namespace * _IS_OF_NAMESPACE
    count, held = (each.to_bytes(16, "big", signed=True) for each in (why.count, why.held))
    return atom + _REFUSAL.pack(which, why.item, why.bound, count, held)


def is_refusal(atom: bytes | None) -> bool:
    """Return whether the event with *atom* was refused."""
    return atom is not None and len(atom) in _REFUSED


def refusal_in(atom: bytes | None) -> Refusal | None:
    """Return why the event with *atom* was refused; None if it was not."""
    if atom is None or not is_refusal(atom):
        return None
    which, item, bound, *sums = _REFUSAL.unpack(atom[-_REFUSAL.size :])
    count, held = (int.from_bytes(each, "big", signed=True) for each in sums)
    is_most, is_of_namespace = which & _IS_MOST > 0, which & _IS_OF_NAMESPACE > 0
    return Refusal(count, bound, is_most, is_of_namespace, item, held)


def delta_in(delta: int, atom: bytes | None) -> int:
    """Return the delta of the request whose event has *delta* and *atom*."""
    return delta_of_terms(atom) if is_refusal(atom) else delta


def _chosen(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
