"""What makes an add the same add when it is sent again: tokens, and keys that a program has."""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Final, NamedTuple

from counter import limits, tokens, types
from counter.clock import parse_rfc3339, to_rfc3339
from counter.errors import InvalidParameterError

_KEY_PREFIX: Final = "key:"
_PERSON: Final = b"counter.keystep"


class Token(types.Token):
    """An idempotency token: a nonce of 16 bytes, and the instant it was made (µs since 1970, UTC).

    Make one for each add that a program means, and send it with every attempt at it.
    """

    __slots__ = ()

    @classmethod
    def new(cls) -> Token:
        """A token that no other call returns, with this machine's time."""
        return cls(uuid.uuid4().bytes, time.time_ns() // 1_000)

    @staticmethod
    def from_key(key: str) -> Key:
        """What stands for an id that a program has already, such as ``order-123``.

        1 to 255 visible ASCII characters and spaces. There is no time in it: the service reserves
        one when it first sees the key, and remembers it for the namespace's ``key_ttl``. Raises
        InvalidParameterError.
        """
        return Key.of(key)

    @classmethod
    def parse(cls, text: str) -> Token | Key:
        """What ``str()`` made of a token or a key. Raises InvalidParameterError."""
        if text.startswith(_KEY_PREFIX):
            return Key.of(text.removeprefix(_KEY_PREFIX))
        nonce, _, moment = text.partition("@")
        try:
            return cls(uuid.UUID(nonce).bytes, parse_rfc3339(moment))
        except ValueError as error:
            raise InvalidParameterError(
                f"{text[:80]!r} is not a token; it is written <UUID>@<RFC 3339 time> or"
                f" {_KEY_PREFIX}<key>"
            ) from error

    def derive(self, label: str) -> Token:
        """The token of the step *label* (1 to 256 characters) of the work that this one stands
        for: the same on every machine. Raises InvalidParameterError."""
        return Token(*tokens.derive(self, label))

    def __str__(self) -> str:
        return f"{tokens.format_nonce(self.nonce)}@{to_rfc3339(self.generation_time_us)}"


class Key(NamedTuple):
    """An id in place of a token; :meth:`Token.from_key` makes it."""

    text: str

    @classmethod
    def of(cls, text: str) -> Key:
        """Raises InvalidParameterError unless *text* can be a key."""
        if not 1 <= len(text) <= limits.IDEMPOTENCY_KEY_CHARS_MAX:
            raise InvalidParameterError(
                f"the key has {len(text)} characters; 1 to {limits.IDEMPOTENCY_KEY_CHARS_MAX} are"
                " allowed"
            )
        if not text.isascii() or not text.isprintable() or text != text.strip():
            raise InvalidParameterError(
                f"the key {text!r} must be visible ASCII, with spaces only inside: hash other ids"
            )
        return cls(text)

    def derive(self, label: str) -> Key:
        """The key of the step *label* (1 to 256 characters): the same on every machine."""
        if not 1 <= len(label) <= limits.DERIVE_LABEL_CHARS_MAX:
            raise InvalidParameterError(
                f"label has {len(label)} characters; 1 to {limits.DERIVE_LABEL_CHARS_MAX} are"
                " allowed"
            )
        digest = hashlib.blake2b(digest_size=24, person=_PERSON)
        digest.update(len(self.text).to_bytes(4, "big") + self.text.encode() + label.encode())
        return Key(f"derived:{digest.hexdigest()}")

    def __str__(self) -> str:
        return _KEY_PREFIX + self.text


Credential = types.Token | Key


def text_of(credential: Credential) -> str:
    """A token or a key as text that :meth:`Token.parse` reads back."""
    return str(credential if isinstance(credential, Key) else Token(*credential))
