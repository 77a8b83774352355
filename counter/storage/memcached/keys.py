"""Keys and values as memcached holds them.

A key is ``PREFIX:KIND:NAMESPACE:HASH``: names are hashed because a key is at most 250 bytes without
a space, and a name is whatever its owner likes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from counter.types import Checkpoint, Event

_HASH_BYTES: Final = 16
_MODULUS: Final = 2**64
#: memcached counts without a sign. This far up, there is room below 0, and all values that are not
#: enormous have the same number of digits: they are changed in place. And they stay below 2**63,
#: from where on memcached 1.6.18, Debian 12's, may find a number's memory to hold no number: it
#: looks for a minus sign, and goes on past the number into what its memory held before.
_ZERO: Final = 2**62
_SIGN: Final = 2**63


def count_key(prefix: str, namespace_id: int, counter: str) -> bytes:
    """Of a count and its time."""
    return _key(prefix, "count", namespace_id, counter.encode())


def value_key(prefix: str, namespace_id: int, counter: str) -> bytes:
    """Of a best-effort counter."""
    return _key(prefix, "value", namespace_id, counter.encode())


def token_key(prefix: str, namespace_id: int, event: Event) -> bytes:
    """Of the payload that an event's identity was used for."""
    # All parts but the last are of a fixed length, or digits.
    identity = b"%b%d.%d:%b" % (
        event.event_id,
        event.event_time_us,
        event.item_key,
        event.counter.encode(),
    )
    return _key(prefix, "token", namespace_id, identity)


def _key(prefix: str, kind: str, namespace_id: int, name: bytes) -> bytes:
    hashed = blake2b(name, digest_size=_HASH_BYTES).hexdigest()
    return f"{prefix}:{kind}:{namespace_id}:{hashed}".encode()


def pack_count(checkpoint: Checkpoint) -> bytes:
    return b"%d %d" % (checkpoint.time_us, checkpoint.count)


def unpack_count(value: bytes) -> Checkpoint | None:
    """None where the value is not one of ours: as good as no value."""
    time_us, _, count = value.partition(b" ")
    try:
        return Checkpoint(int(time_us), int(count))
    except ValueError:
        return None


def pack_value(number: int) -> bytes:
    return b"%d" % ((number + _ZERO) % _MODULUS)


def unpack_value(value: bytes) -> int:
    return (int(value) - _ZERO + _SIGN) % _MODULUS - _SIGN


def increment_of(delta: int) -> int:
    """What to ``incr`` by for *delta*: a negative one goes the long way round, because ``decr``
    stops at 0. So a counter has 64 bits, and past 2**63 - 1 it goes on at -2**63."""
    return delta % _MODULUS
