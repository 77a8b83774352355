"""Keys and entries as a cache of several processes holds them.

A key is ``PREFIX:KIND:NAMESPACE:HASH``. Names are hashed because a key of memcached has at most 250
bytes and no space, and a name may have any.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from counter.errors import CacheUnavailableError, InvalidBodyError
from counter.limits import SECOND, TIME_MAX_US
from counter.types import Checkpoint, Event, Guarded

_HASH_BYTES: Final = 16


class Entry(NamedTuple):
    """A count to store for *ttl_s*."""

    key: bytes
    ttl_s: int
    checkpoint: Checkpoint


class Note(NamedTuple):
    """The fingerprint of a token's payload, stored for *ttl_s*."""

    key: bytes
    ttl_s: int
    payload: bytes

    def compared(self, noted: bytes | None) -> Guarded:
        """Return how the payload compares with what was *noted* before; None is nothing."""
        if noted is None:
            return Guarded.NEW
        return Guarded.SAME if noted == self.payload else Guarded.OTHER


class Change(NamedTuple):
    """An addition to a best-effort counter; None sets it back to 0."""

    key: bytes
    delta: int | None

    def refusal(self, server: str) -> InvalidBodyError:
        """Return the error if the value after it would not fit 64 bits in *server*."""
        return InvalidBodyError(
            f"a best-effort counter in {server} has 64 bits, and adding {self.delta} would exceed"
            " them: the counter was not changed; clear it, or use an event-sourced counter type"
        )

    def unreadable(self, server: str, why: str) -> CacheUnavailableError:
        """Return the error if the counter's value in *server* is not one; *why* are its words."""
        return CacheUnavailableError(
            f"{server}: {why}; the change was not made: clear the counter", retry_after_us=SECOND
        )


def count_key(prefix: str, namespace_id: int, counter: str) -> bytes:
    """Return the key of a count and its time."""
    return _key(prefix, "count", namespace_id, counter.encode())


def value_key(prefix: str, namespace_id: int, counter: str) -> bytes:
    """Return the key of a best-effort counter."""
    return _key(prefix, "value", namespace_id, counter.encode())


def token_key(prefix: str, namespace_id: int, event: Event) -> bytes:
    """Return the key of the payload that an event's identity was used for."""
    # All parts but the last are of a fixed length, or digits.
    identity = b"%b%d.%d:%b" % (
        event.event_id,
        event.event_time_us,
        event.item_key,
        event.counter.encode(),
    )
    return _key(prefix, "token", namespace_id, identity)


def ping_key(prefix: str) -> bytes:
    """Return the key that a ping may write."""
    return f"{prefix}:ping".encode()


def _key(prefix: str, kind: str, namespace_id: int, name: bytes) -> bytes:
    hashed = blake2b(name, digest_size=_HASH_BYTES).hexdigest()
    return f"{prefix}:{kind}:{namespace_id}:{hashed}".encode()


def pack_count(checkpoint: Checkpoint) -> bytes:
    """Return *checkpoint* as it is stored."""
    return b"%d %d" % (checkpoint.time_us, checkpoint.count)


def unpack_count(value: bytes) -> Checkpoint | None:
    """Return the checkpoint of *value*; None if it is not one of ours."""
    time, _, count = value.partition(b" ")
    try:
        found = Checkpoint(int(time), int(count))
    except ValueError:
        return None
    return found if 0 <= found.time_us <= TIME_MAX_US else None
