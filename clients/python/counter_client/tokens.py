"""Idempotency tokens and keys, and validation of arguments."""

from __future__ import annotations

import base64
import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeVar, cast

from counter_client.errors import InvalidParameterError

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
NONCE_BYTES: Final = 16
#: Bytes of a time, and of a token, in the id of a hold.
_TIME_BYTES: Final = 8
_TOKEN_BYTES: Final = _TIME_BYTES + NONCE_BYTES
COUNTER_NAME_CHARS_MAX: Final = 256
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
DERIVE_LABEL_CHARS_MAX: Final = 256
_KEY_PREFIX: Final = "key:"
_PERSON_TOKEN: Final = b"counter.derive"
_PERSON_KEY: Final = b"counter.keystep"
_NAMESPACE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
#: First and last code points that no counter's name holds, as the service says; unlike
#: str.isprintable() it is the same with every version of Python.
REFUSED: Final = (
    *((0x00, 0x1F), (0x7F, 0xA0), (0xAD, 0xAD), (0x61C, 0x61C), (0x1680, 0x1680)),
    *((0x180E, 0x180E), (0x2000, 0x200B), (0x200E, 0x200F), (0x2028, 0x202F), (0x205F, 0x206F)),
    *((0x3000, 0x3000), (0xD800, 0xF8FF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB)),
    *((0xE0001, 0xE0001), (0xF0000, 0x10FFFF)),
)
_REFUSED: Final = re.compile(f"[{''.join(f'{chr(one)}-{chr(two)}' for one, two in REFUSED)}]")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
_RFC3339: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)


def parse_rfc3339(text: str) -> int:
    """Return the exact microseconds since the epoch of an RFC 3339 time with an offset.

    Raises ValueError for anything else: no offset, more digits than microseconds, an invalid date.
    """
    return (datetime.fromisoformat(checked_rfc3339(text)) - EPOCH) // MICROSECOND


def checked_rfc3339(text: str) -> str:
    """Return *text* for ``fromisoformat()``. Raises ValueError as :func:`parse_rfc3339` does."""
    if _RFC3339.fullmatch(text) is None:
        raise ValueError("it is not RFC 3339 with an offset and at most microseconds")
    # fromisoformat() accepts the letters in upper case only; RFC 3339 allows both.
    return text.upper()


def to_rfc3339(time_us: int) -> str:
    """Format *time_us* as RFC 3339 in UTC with microseconds, ``2026-01-31T08:15:30.000250Z``."""
    seconds, microseconds = divmod(time_us, 1_000_000)
    return f"{_second_text(seconds)}.{microseconds:06d}Z"


@lru_cache(maxsize=4_096)
def _second_text(seconds: int) -> str:
    return (EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()


class Token(NamedTuple):
    """An idempotency token: a nonce of 16 bytes and its creation time (µs since 1970, UTC).

    Make one for each intended add, and send it with every attempt.
    """

    nonce: bytes
    generation_time_us: int

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

        It is the same on every machine, because it is BLAKE2b of this nonce and the label, with
        this token's time. Raises InvalidParameterError.
        """
        digest = hashlib.blake2b(
            self.nonce + _checked_label(label).encode(),
            digest_size=NONCE_BYTES,
            person=_PERSON_TOKEN,
        )
        return Token(digest.digest(), self.generation_time_us)

    def __str__(self) -> str:
        return f"{uuid.UUID(bytes=self.nonce)}@{to_rfc3339(self.generation_time_us)}"


class Key(NamedTuple):
    """An idempotency key; :meth:`Token.from_key` makes it."""

    text: str

    @classmethod
    def of(cls, text: str) -> Key:
        """Return *text* as a key. Raises InvalidParameterError."""
        if not 1 <= len(text) <= IDEMPOTENCY_KEY_CHARS_MAX:
            raise InvalidParameterError(
                f"the key has {len(text)} characters; 1 to {IDEMPOTENCY_KEY_CHARS_MAX} are allowed"
            )
        if not text.isascii() or not text.isprintable() or text != text.strip():
            raise InvalidParameterError(
                f"the key {text!r} must be visible ASCII, with spaces only inside: hash other ids"
            )
        return cls(text)

    def derive(self, label: str) -> Key:
        """Return the key of the step *label* (1 to 256 characters), the same on every machine."""
        step = _checked_label(label).encode()
        digest = hashlib.blake2b(digest_size=24, person=_PERSON_KEY)
        digest.update(len(self.text).to_bytes(4, "big") + self.text.encode() + step)
        return Key(f"derived:{digest.hexdigest()}")

    def __str__(self) -> str:
        return _KEY_PREFIX + self.text


Credential = Token | Key
#: An instant with a time zone, or the beginning of the day.
Moment = datetime | Literal["today"]
T = TypeVar("T")


class Bounds(NamedTuple):
    """The least and the greatest count that an add may lead to; None for no bound."""

    at_least: int | None = None
    at_most: int | None = None

    def members(self) -> dict[str, int]:
        """Return the bounds that there are, by name."""
        return {name: bound for name, bound in self._asdict().items() if bound is not None}


NO_BOUNDS: Final = Bounds()


class Add(NamedTuple):
    """A counter, its delta, which is 0 for a clear or a delete, and the bounds of the add."""

    counter: str
    delta: int
    bounds: Bounds = NO_BOUNDS


#: Counters and their deltas: pairs, triples with the bounds of the add, or a mapping.
Items = Iterable[tuple[str, int] | tuple[str, int, Bounds]] | Mapping[str, int]
_SHOWN_CHARS_MAX: Final = 80


def check_delta(delta: int, name: str = "delta") -> int:
    """Return *delta*, which is called *name*, if it is a signed 64-bit integer."""
    if type(delta) is not int or not INT64_MIN <= delta <= INT64_MAX:
        raise InvalidParameterError(
            f"the {name} is {_shown(delta)}; it must be an integer from {INT64_MIN} to {INT64_MAX}"
        )
    return delta


def checked_bounds(bounds: Bounds) -> Bounds:
    """Return *bounds* if some count is within them."""
    for name, bound in bounds.members().items():
        check_delta(bound, name)
    least, most = bounds
    if least is not None and most is not None and least > most:
        raise InvalidParameterError(f"at_least is {least}, and at_most is {most}: no count is both")
    return bounds


def checked_name(counter: str) -> str:
    """Return *counter* if it is a valid counter name."""
    if not isinstance(counter, str):
        raise InvalidParameterError(f"a counter's name is text, and this is {_shown(counter)}")
    if not 1 <= len(counter) <= COUNTER_NAME_CHARS_MAX:
        raise InvalidParameterError(
            f"{_shown(counter)}: a counter's name has 1 to {COUNTER_NAME_CHARS_MAX}"
            f" characters, this one has {len(counter)}"
        )
    # Most names are ASCII, for which this is faster.
    if (counter.isascii() and counter.isprintable()) or not (bad := _REFUSED.search(counter)):
        return counter
    raise InvalidParameterError(
        f"{_shown(counter)}: a counter's name has no controls, invisible marks, characters for"
        f" private use, or spaces but U+0020; this one holds U+{ord(bad[0]):04X}"
    )


def checked_names(counters: Iterable[str]) -> list[str]:
    """Return *counters* as a list of valid names."""
    if isinstance(counters, str):
        raise InvalidParameterError(
            f"the counters are the text {_shown(counters)}; give a list of names"
        )
    return [checked_name(each) for each in _each(counters, "counters")]


def checked_items(items: Items, most: int) -> list[Add]:
    """Return *items* as a list of 1 to *most* valid items."""
    found = items.items() if isinstance(items, Mapping) else items
    checked = []
    for each in _each(found, "items"):
        try:
            counter, delta, bounds = Add(*each)
            if not isinstance(bounds, Bounds):
                raise TypeError("bounds")
        except TypeError as error:
            raise InvalidParameterError(
                f"an item is {_shown(each)}; it must be a counter's name and a delta, and Bounds if"
                " it has any"
            ) from error
        checked.append(Add(checked_name(counter), check_delta(delta), checked_bounds(bounds)))
    if not 1 <= len(checked) <= most:
        raise InvalidParameterError(f"there are {len(checked)} items; 1 to {most} are allowed")
    return checked


def checked_token(token: Credential) -> Credential:
    """Return *token* if it is a token or a key."""
    if not isinstance(token, Token | Key):
        raise InvalidParameterError(
            f"the token is {_shown(token)}; make one with Token.from_key(your id), or with"
            " Token.parse(str of a token)"
        )
    return token


class HoldId(NamedTuple):
    """The token and the counter of a hold. :meth:`__str__` is its id as text."""

    token: Token
    counter: str

    @classmethod
    def parse(cls, text: str) -> HoldId:
        """Parse the id of a hold. Raises InvalidParameterError."""
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            nonce, counter = data[_TIME_BYTES:_TOKEN_BYTES], data[_TOKEN_BYTES:].decode()
            found = cls(Token(nonce, int.from_bytes(data[:_TIME_BYTES])), checked_name(counter))
            # A time past the year 9999 has no text.
            if str(found) == text and str(found.token):
                return found
        except (ValueError, TypeError, OverflowError, InvalidParameterError):
            # The error below names the text.
            pass
        raise InvalidParameterError(
            f"{_shown(text)} is not the id of a hold; give the id that the hold has"
        )

    def __str__(self) -> str:
        data = self.token.generation_time_us.to_bytes(_TIME_BYTES) + self.token.nonce
        return base64.urlsafe_b64encode(data + self.counter.encode()).decode().rstrip("=")


def checked_duration(text: str) -> str:
    """Return *text* if it is text: what durations there are is the service's to say."""
    if not isinstance(text, str) or not text:
        raise InvalidParameterError(f"expires_in is {_shown(text)}; give text, such as 15m")
    return text


def checked_namespace(namespace: str) -> str:
    """Return *namespace* if it is a valid namespace name."""
    if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
        raise InvalidParameterError(
            f"the namespace is {_shown(namespace)}; its name begins with a lower-case letter, and"
            " has up to 63 lower-case letters, digits, - and _"
        )
    return namespace


def moment_text(moment: Moment | None) -> str | None:
    """Return *moment* as text for a query."""
    if moment is None or moment == "today":
        return cast("str | None", moment)
    if not isinstance(moment, datetime):
        raise InvalidParameterError(f"{_shown(moment)} is not a datetime; give one in UTC")
    if moment.tzinfo is None:
        raise InvalidParameterError(f"{moment} has no time zone; give one, such as UTC")
    return moment.isoformat()


def _checked_label(label: str) -> str:
    if not 1 <= len(label) <= DERIVE_LABEL_CHARS_MAX:
        raise InvalidParameterError(
            f"label has {len(label)} characters; 1 to {DERIVE_LABEL_CHARS_MAX} are allowed"
        )
    return label


def _each(values: Iterable[T], what: str) -> Iterator[T]:
    try:
        return iter(values)
    except TypeError as error:
        raise InvalidParameterError(f"the {what} are {_shown(values)}; give a list") from error


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
