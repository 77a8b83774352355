"""Idempotency tokens and keys, and validation of arguments."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from counter import limits, tokens, types
from counter.clock import parse_rfc3339, to_rfc3339
from counter.errors import InvalidParameterError
from counter.names import check_counter_name, is_namespace_name

_KEY_PREFIX: Final = "key:"
_PERSON: Final = b"counter.keystep"


class Token(types.Token):
    """An idempotency token: a nonce of 16 bytes and its creation time (µs since 1970, UTC).

    Make one for each intended add, and send it with every attempt.
    """

    __slots__ = ()

    @classmethod
    def new(cls) -> Token:
        """Return a unique token with this machine's time."""
        return cls(uuid.uuid4().bytes, time.time_ns() // 1_000)

    @staticmethod
    def from_key(key: str) -> Key:
        """Return a key made of the program's own id, such as ``order-123``.

        It has 1 to 255 visible ASCII characters and spaces. It has no time: the service reserves
        one when it first sees the key, and remembers it for the namespace's ``key_ttl``. Raises
        InvalidParameterError.
        """
        return Key.of(key)

    @classmethod
    def parse(cls, text: str) -> Token | Key:
        """Parse the ``str()`` of a token or a key. Raises InvalidParameterError."""
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
        """Return the token of the step *label* (1 to 256 characters) of this token's work.

        It is the same on every machine. Raises InvalidParameterError."""
        return Token(*tokens.derive(self, label))

    def __str__(self) -> str:
        return f"{tokens.format_nonce(self.nonce)}@{to_rfc3339(self.generation_time_us)}"


class Key(NamedTuple):
    """An idempotency key; :meth:`Token.from_key` makes it."""

    text: str

    @classmethod
    def of(cls, text: str) -> Key:
        """Return *text* as a key. Raises InvalidParameterError."""
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
        """Return the key of the step *label* (1 to 256 characters), the same on every machine."""
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
    """Return a token or a key as text for :meth:`Token.parse`."""
    return str(credential if isinstance(credential, Key) else Token(*credential))


T = TypeVar("T")
#: Counters and their deltas: pairs, or a mapping.
Items = Iterable[tuple[str, int]] | Mapping[str, int]
_SHOWN_CHARS_MAX: Final = 80


def check_delta(delta: int) -> int:
    """Return *delta* if it is a signed 64-bit integer."""
    if type(delta) is not int or not limits.INT64_MIN <= delta <= limits.INT64_MAX:
        raise InvalidParameterError(
            f"the delta is {_shown(delta)}; it must be an integer from {limits.INT64_MIN} to"
            f" {limits.INT64_MAX}"
        )
    return delta


def checked_name(counter: str) -> str:
    """Return *counter* if it is a valid counter name."""
    if not isinstance(counter, str):
        raise InvalidParameterError(f"a counter's name is text, and this is {_shown(counter)}")
    try:
        return check_counter_name(counter)
    except ValueError as error:
        raise InvalidParameterError(f"{_shown(counter)}: {error}") from error


def checked_names(counters: Iterable[str]) -> list[str]:
    """Return *counters* as a list of valid names."""
    if isinstance(counters, str):
        raise InvalidParameterError(
            f"the counters are the text {_shown(counters)}; give a list of names"
        )
    return [checked_name(each) for each in _each(counters, "counters")]


def checked_items(items: Items, most: int) -> list[tuple[str, int]]:
    """Return *items* as a list of 1 to *most* valid items."""
    found: Iterable[tuple[str, int]] = items.items() if isinstance(items, Mapping) else items
    checked = []
    for each in _each(found, "items"):
        try:
            counter, delta = each
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(
                f"an item is {_shown(each)}; it must be a counter's name and a delta"
            ) from error
        checked.append((checked_name(counter), check_delta(delta)))
    if not 1 <= len(checked) <= most:
        raise InvalidParameterError(f"there are {len(checked)} items; 1 to {most} are allowed")
    return checked


def checked_token(token: Credential) -> Credential:
    """Return *token* if it is a token or a key."""
    if not isinstance(token, types.Token | Key):
        raise InvalidParameterError(
            f"the token is {_shown(token)}; make one with Token.from_key(your id), or with"
            " Token.parse(str of a token)"
        )
    return token


def checked_namespace(namespace: str) -> str:
    """Return *namespace* if it is a valid namespace name."""
    if not isinstance(namespace, str) or not is_namespace_name(namespace):
        raise InvalidParameterError(
            f"the namespace is {_shown(namespace)}; its name begins with a lower-case letter, and"
            " has up to 63 lower-case letters, digits, - and _"
        )
    return namespace


def moment_text(moment: datetime | None) -> str | None:
    """Return *moment* as text for a query."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise InvalidParameterError(f"{_shown(moment)} is not a datetime; give one in UTC")
    if moment.tzinfo is None:
        raise InvalidParameterError(f"{moment} has no time zone; give one, such as UTC")
    return moment.isoformat()


def _each(values: Iterable[T], what: str) -> Iterator[T]:
    try:
        return iter(values)
    except TypeError as error:
        raise InvalidParameterError(f"the {what} are {_shown(values)}; give a list") from error


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
