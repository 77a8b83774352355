"""The errors of a client: the service's own tree, read back from its problems, and a few more.

All of them are :class:`counter.errors.CounterError`. ``applied`` says whether the token's add is
counted (None: not known), ``retry`` what to do next, as docs/http.md has it. Those that only a
client can meet have the code of what they are a kind of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isnan
from typing import Any, Final

from counter.client.tokens import Credential, Token
from counter.errors import (
    CounterError,
    InvalidParameterError,
    OverloadedError,
    Retry,
    UnavailableError,
)

_RETRIES: Final[Mapping[str, Retry]] = {
    "same_token": "same_token",
    "new_token": "new_token",
    "never": "never",
}
#: What an Unfinished may be of: of one counter each, and of several.
_OF_ONE: Final = frozenset({"add", "add-and-get", "clear"})
_OF_SEVERAL: Final = "atomic/add"
_TRY_LATER: Final = frozenset({408, 425, 429})
_TEXT_CHARS_MAX: Final = 200
#: Past any deadline.
_WAIT_MAX_S: Final = 366 * 86_400.0
_KNOWN: Final = frozenset(
    {"type", "title", "status", "detail", "code", "applied", "retry", "retry_after"}
)


class UnreachableError(UnavailableError):
    """Nobody answered, or not in time: what became of the request is not known.

    ``sent`` is False where there was no connection: then nothing of it can have arrived.
    """

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.sent = sent


class UnexpectedAnswerError(UnavailableError):
    """What answered does not speak as the service does: a proxy, or another service."""


class BufferFullError(OverloadedError):
    """The buffer holds ``max_items`` already; this add was not taken."""


class ClosedError(CounterError):
    """The client or the buffer was closed, or belongs to the process this one was forked from."""

    retry: Retry = "never"


class SpoolBusyError(ClosedError):
    """No part of the spool is free: other buffers or processes have all of it."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An add or a clear whose end is not known: all it takes to ask again, also in another process.

    ``str()`` of it is JSON to store; :meth:`parse` reads it back.
    """

    operation: str
    namespace: str
    #: (counter, delta) of each item; the delta of a clear is 0.
    items: tuple[tuple[str, int], ...]
    #: ``str()`` of its token or key.
    token_text: str

    @property
    def token(self) -> Credential:
        """The token, or the key, it was sent with."""
        return Token.parse(self.token_text)

    def __str__(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Unfinished:
        """What ``str()`` wrote. Raises InvalidParameterError."""
        try:
            found = json.loads(text)
            items = tuple((str(counter), int(delta)) for counter, delta in found.pop("items"))
            read = cls(items=items, **found)
            Token.parse(read.token_text)
            if read.operation not in _OF_ONE and read.operation != _OF_SEVERAL:
                raise ValueError(read.operation)
            if read.operation in _OF_ONE and len(items) != 1:
                raise ValueError(f"{len(items)} items")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidParameterError(
                f"{text[:80]!r} is not what str() made of an Unfinished"
            ) from error
        return read


class UnknownOutcomeError(UnavailableError):
    """The deadline has passed, and nobody knows whether the add is counted.

    ``token`` is the one it was sent with: store ``str(error.unfinished)`` and give it to
    ``client.resolve`` at any time while the service keeps events (a key: within the namespace's
    ``key_ttl``), or add again with ``token=``. The
    last attempt's error is its cause. ``sent`` is False where no attempt of this call found a
    connection: unless the token was sent by another call, it is not counted.
    """

    def __init__(self, detail: str, unfinished: Unfinished, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.unfinished = unfinished
        self.sent = sent

    @property
    def token(self) -> Credential:
        """The token, or the key, that finishes it."""
        return self.unfinished.token


def unfinished_of(what: Unfinished | UnknownOutcomeError | str) -> Unfinished:
    """What *what* tells of. Raises InvalidParameterError."""
    if isinstance(what, UnknownOutcomeError):
        return what.unfinished
    if isinstance(what, str):
        return Unfinished.parse(what)
    if not isinstance(what, Unfinished):
        raise InvalidParameterError(
            f"{what!r} does not say what was to be done to which counter: give the"
            " UnknownOutcomeError, its `unfinished`, or str() of that; or send the same add again"
            " with token="
        )
    return what


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item of a buffer that the service will never count, or can say nothing of."""

    counter: str
    delta: int
    error: CounterError


class RejectedError(CounterError):
    """Some of a buffer's items were refused for good; ``items`` are all of them."""

    retry: Retry = "never"

    def __init__(self, items: tuple[Rejected, ...]) -> None:
        first = items[0]
        super().__init__(
            f"{len(items)} items of the buffer were refused, the first one of counter"
            f" {first.counter!r}: {first.error.detail}"
        )
        self.items = items


class UnsentError(UnavailableError):
    """A buffer was not empty in time.

    ``unfinished`` were sent, and their end is not known; ``unsent`` is what waits, by counter. With
    a spool all of it is on disk and is sent at the next start, unless the disk is the trouble: then
    only what an earlier ``sync`` returned for is. ``rejected`` is what was refused for good
    meanwhile.
    """

    def __init__(
        self,
        detail: str,
        unfinished: tuple[Unfinished, ...],
        unsent: Mapping[str, int],
        rejected: tuple[Rejected, ...] = (),
    ) -> None:
        super().__init__(detail)
        self.unfinished = unfinished
        self.unsent = unsent
        self.rejected = rejected


def _kinds() -> dict[str, type[CounterError]]:
    """The kind of error of each code."""
    found: dict[str, type[CounterError]] = {}
    waiting: list[type[CounterError]] = [CounterError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting += kind.__subclasses__()
    return found


_KINDS: Final[Mapping[str, type[CounterError]]] = _kinds()


def error_of_problem(problem: Mapping[str, Any]) -> CounterError:
    """The error that a problem document stands for; one of an unknown code by its members."""
    code = str(problem.get("code"))
    kind = _KINDS.get(code, CounterError)
    # Not by the class's own __init__: those have arguments of their own.
    error = kind.__new__(kind)
    detail = str(problem.get("detail") or problem.get("title") or f"the service says {code}")
    fields = {name: value for name, value in problem.items() if name not in _KNOWN}
    if code not in _KINDS:
        fields["code"] = code
    wait_us = _wait_us(problem.get("retry_after"))
    CounterError.__init__(error, detail, retry_after_us=wait_us, **fields)
    applied = problem.get("applied")
    error.applied = applied if isinstance(applied, bool) else None
    error.retry = _RETRIES.get(str(problem.get("retry")), "never")
    return error


def error_of_answer(
    status: int, body: bytes, retry_after: str | None, location: str | None = None
) -> CounterError:
    """The error of an answer that is no success; the last two are headers of it."""
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        problem = None
    if isinstance(problem, dict) and "code" in problem and "retry" in problem:
        problem.setdefault("retry_after", retry_after)
        return error_of_problem(problem)
    return unexpected(status, body, retry_after, location)


def unexpected(
    status: int, body: bytes, retry_after: str | None = None, location: str | None = None
) -> UnexpectedAnswerError:
    """The error of an answer that no counter service gives."""
    if location is not None:
        what = f"leads to {location[:_TEXT_CHARS_MAX]!r}: give the base URL of the service itself"
    else:
        text = body[:_TEXT_CHARS_MAX].decode("utf-8", "replace")
        what = f"with {text!r} is no answer of a counter service; look what is at the base URL"
    error = UnexpectedAnswerError(f"status {status} {what}", retry_after_us=_wait_us(retry_after))
    if status < 500 and status not in _TRY_LATER and not 200 <= status < 300:
        error.retry = "never"
    return error


def too_large(bytes_max: int, what: str) -> UnexpectedAnswerError:
    """The error of an answer of more than *bytes_max* bytes; *what* it answers."""
    return UnexpectedAnswerError(
        f"what sends more than {bytes_max:,} bytes, the most that a client reads of {what}, is no"
        " answer of a counter service; look what is at the base URL"
    )


def _wait_us(value: object) -> int | None:
    """Microseconds of a Retry-After: seconds, or the date that a proxy may write."""
    if isinstance(value, str) and not value.isdecimal():
        try:
            value = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return None
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    except OverflowError:
        seconds = _WAIT_MAX_S
    return None if isnan(seconds) else int(min(max(0.0, seconds), _WAIT_MAX_S) * 1e6)
