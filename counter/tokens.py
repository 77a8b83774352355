"""Read idempotency tokens from requests and keys."""

from __future__ import annotations

import hashlib
import uuid
from typing import Final

from counter import limits
from counter.clock import parse_rfc3339, to_rfc3339
from counter.types import Token

_UUID_CHARS: Final = 36
_HASH_PERSON_KEY: Final = b"counter.key"


def nonce_of_key(namespace_id: int, operation: str, target: str, key: str) -> bytes:
    """Return the nonce of an arbitrary key in its scope (namespace, operation, target)."""
    digest = hashlib.blake2b(digest_size=limits.NONCE_BYTES, person=_HASH_PERSON_KEY)
    for part in (str(namespace_id), operation, target, key):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "big"))
        digest.update(data)
    return digest.digest()


def token_of_uuid7(key: str) -> Token | None:
    """Return the token that a UUIDv7 *key* contains, or None if *key* does not have that form.

    The time is the 48-bit Unix millisecond of RFC 9562 section 5.7, and the 12 bits of ``rand_a``
    read as a fraction of it (method 3 of section 6.2). The fraction is exact if the generator put
    it there, and in any case the same for every retry.
    """
    if len(key) != _UUID_CHARS or key[14] != "7":
        return None
    try:
        value = uuid.UUID(key)
    except ValueError:
        return None
    if str(value) != key.lower() or value.variant != uuid.RFC_4122:
        return None
    milliseconds = value.int >> 80
    fraction = (value.int >> 64) & 0xFFF
    return Token(value.bytes, milliseconds * 1_000 + (fraction * 1_000 >> 12))


def parse_nonce(text: str) -> bytes:
    """Return the nonce that 32 hexadecimal digits, or a UUID, represent. Raises ValueError."""
    if len(text) == _UUID_CHARS and text[8] == text[13] == text[18] == text[23] == "-":
        text = text.replace("-", "")
    nonce = bytes.fromhex(text)
    # bytes.fromhex() skips spaces between digits; they are not allowed here.
    if len(nonce) != limits.NONCE_BYTES or len(text) != 2 * limits.NONCE_BYTES:
        raise ValueError("it is neither a UUID nor 32 digits")
    return nonce


def parse_generation_time(text: str) -> int:
    """Return the microseconds since the epoch of a token's time in RFC 3339 with an offset.

    Raises ValueError.
    """
    time_us = parse_rfc3339(text)
    if not limits.TIME_MIN_US <= time_us <= limits.TIME_MAX_US:
        first, last = to_rfc3339(limits.TIME_MIN_US), to_rfc3339(limits.TIME_MAX_US)
        raise ValueError(f"it must be from {first} to {last}")
    return time_us


def format_nonce(nonce: bytes) -> str:
    """Format a nonce as a UUID string, the form of every answer."""
    text = nonce.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
