"""The client's errors: the service's classes, parsed from problem documents, and a few more.

All of them are :class:`counter_client.errors.CounterError`. ``applied`` says whether the token's
add is counted (None: not known), ``retry`` what to do next; see docs/http.md. Errors of the client
alone have the code of their base class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isnan
from typing import Any, Final, get_args

from counter_client.errors import (
    CounterError,
    InvalidParameterError,
    OverloadedError,
    Retry,
    UnavailableError,
)
from counter_client.tokens import (
    NO_BOUNDS,
    Add,
    Bounds,
    Credential,
    Token,
    parse_rfc3339,
    to_rfc3339,
)

_RETRIES: Final = get_args(Retry)
#: Operations of an Unfinished, on one counter and on several.
_OF_ONE: Final = frozenset({"add", "add-and-get", "clear", "delete"})
_OF_SEVERAL: Final = "atomic/add"
#: A hold, and its ends; their token is that of the hold.
_OF_HOLDS: Final = frozenset({"hold", "settle", "release"})
_TRY_LATER: Final = frozenset({408, 425, 429})
_TEXT_CHARS_MAX: Final = 200
#: Longer than any deadline.
_WAIT_MAX_S: Final = 366 * 86_400.0
#: A longer TTL means the same.
_TTL_S_MAX: Final = 100 * 366 * 86_400
_KNOWN: Final = frozenset(
    {"type", "title", "status", "detail", "code", "applied", "retry", "retry_after"}
)


class UnreachableError(UnavailableError):
    """No server answered in time; the outcome of the request is not known.

    ``sent`` is False if there was no connection; then the request cannot have arrived.
    """

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.sent = sent


class UnexpectedAnswerError(UnavailableError):
    """The answer is not from a counter service, but from a proxy or another service."""


class BufferFullError(OverloadedError):
    """The buffer holds ``max_items`` counters; this add was not accepted."""


class ClosedError(CounterError, retry="never"):
    """The client or the buffer was closed, or belongs to this process's parent."""


class SpoolBusyError(ClosedError):
    """No slot of the spool is free: other buffers or processes hold all of them."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An add, a clear, a delete, a hold or its end with an unknown outcome: all to resolve it, in
    any process.

    ``str()`` returns JSON to store; :meth:`parse` reads it.
    """

    operation: str
    namespace: str
    #: (counter, delta) of each item, or the amount of a hold or a settle; else 0.
    items: tuple[tuple[str, int], ...]
    #: ``str()`` of the token or key.
    token_text: str
    #: Until when the service surely honours it, in microseconds of Unix time; None if no answer
    #: said so. Later a token's outcome is unknown for ever, and a key is a new one.
    until_us: int | None = None
    #: Those of each item; empty if no item has any.
    bounds: tuple[Bounds, ...] = ()
    #: Of a hold.
    expires_in: str | None = None

    @classmethod
    def of(
        cls,
        operation: str,
        namespace: str,
        adds: Sequence[Add],
        token_text: str,
        expires_in: str | None = None,
    ) -> Unfinished:
        """Return *adds* as an Unfinished."""
        items = tuple((each.counter, each.delta) for each in adds)
        bounds = tuple(each.bounds for each in adds)
        has_any = any(each != NO_BOUNDS for each in bounds)
        kept = bounds if has_any else ()
        return cls(operation, namespace, items, token_text, bounds=kept, expires_in=expires_in)

    @property
    def adds(self) -> list[Add]:
        """The items with their bounds."""
        bounds = self.bounds or (NO_BOUNDS,) * len(self.items)
        return [Add(*item, each) for item, each in zip(self.items, bounds, strict=True)]

    @property
    def token(self) -> Credential:
        """The token or key that was sent."""
        return Token.parse(self.token_text)

    def __str__(self) -> str:
        found = asdict(self)
        found["items"] = [
            [counter, delta, *([bounds.members()] if bounds != NO_BOUNDS else [])]
            for counter, delta, bounds in self.adds
        ]
        del found["bounds"]
        if self.expires_in is None:
            del found["expires_in"]
        until_us = found.pop("until_us")
        if until_us is not None:
            found["until"] = to_rfc3339(until_us)
        return json.dumps(found, ensure_ascii=False)

    def with_ttl(self, ttl_s: int, first_us: int) -> Unfinished:
        """Return it with ``until_us`` by the header ``Idempotency-TTL``, if that is earlier.

        It counts from a token's own time; for a key from *first_us*, its first attempt."""
        token = self.token
        from_us = token.generation_time_us if isinstance(token, Token) else first_us
        until_us = from_us + min(ttl_s, _TTL_S_MAX) * 1_000_000
        if self.until_us is not None and self.until_us <= until_us:
            return self
        return replace(self, until_us=until_us)

    def check_honoured(self, end_us: int, *, sent: bool = True) -> None:
        """Raise UnknownOutcomeError if an attempt that may last until *end_us* could come too
        late."""
        if self.until_us is not None and self.until_us < end_us:
            raise UnknownOutcomeError(
                f"it is not known whether the token's {self.operation} is counted, and it is too"
                f" late to send it again: the service surely honours {self.token_text} until"
                f" {to_rfc3339(self.until_us)}; then a key counts again, and a token gets no"
                " answer. Compare the count with your own records",
                self,
                sent=sent,
            )

    @classmethod
    def parse(cls, text: str) -> Unfinished:
        """Parse the output of ``str()``. Raises InvalidParameterError."""
        try:
            found = json.loads(text)
            adds = [_add_of(*each) for each in found.pop("items")]
            until = found.pop("until", None)
            until_us = None if until is None else parse_rfc3339(until)
            read = replace(cls.of(adds=adds, **found), until_us=until_us)
            Token.parse(read.token_text)
            read._check()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidParameterError(
                f"{text[:80]!r} is not an Unfinished in the form that str() writes"
            ) from error
        return read

    def _check(self) -> None:
        """Raise an error for what no client makes."""
        if self.operation not in _OF_ONE | _OF_HOLDS | {_OF_SEVERAL}:
            raise ValueError(self.operation)
        if not self.items or (self.operation != _OF_SEVERAL and len(self.items) != 1):
            raise ValueError(f"{len(self.items)} items")
        lasts = self.expires_in
        if (isinstance(lasts, str) and lasts != "") != (self.operation == "hold"):
            raise ValueError("expires_in")
        if self.operation in _OF_HOLDS - {"hold"} and not isinstance(self.token, Token):
            raise TypeError("token")


def _add_of(counter: Any, delta: Any, bounds: Mapping[str, int] = {}) -> Add:
    return Add(str(counter), int(delta), Bounds(**bounds))


class UnknownOutcomeError(UnavailableError):
    """The deadline passed and it is not known whether the add is counted, or is cancelled.

    Store ``str(error.unfinished)`` and pass it to ``client.resolve`` while the service keeps events
    (for a key: within the namespace's ``key_ttl``), or add again with ``token=error.token``. The
    cause is the last attempt's error. ``sent`` is False if no attempt of this call had a
    connection, or those that had one were refused; then the add is not counted unless another call
    sent the token.
    """

    def __init__(self, detail: str, unfinished: Unfinished, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.unfinished = unfinished
        self.sent = sent

    @property
    def token(self) -> Credential:
        """The token or key to send again."""
        return self.unfinished.token


def unfinished_of(what: Unfinished | UnknownOutcomeError | str) -> Unfinished:
    """Return *what* as an Unfinished. Raises InvalidParameterError."""
    if isinstance(what, UnknownOutcomeError):
        return what.unfinished
    if isinstance(what, str):
        return Unfinished.parse(what)
    if not isinstance(what, Unfinished):
        raise InvalidParameterError(
            f"{what!r} does not name the operation and the counter: give the"
            " UnknownOutcomeError, its `unfinished`, or str() of that; or send the same add again"
            " with token="
        )
    return what


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item of a buffer that the service rejected permanently, or cannot decide."""

    counter: str
    delta: int
    error: CounterError


class RejectedError(CounterError, retry="never"):
    """The service rejected some of a buffer's items permanently; ``items`` has all of them."""

    def __init__(self, items: tuple[Rejected, ...]) -> None:
        first = items[0]
        super().__init__(
            f"{len(items)} items of the buffer were refused, the first one of counter"
            f" {first.counter!r}: {first.error.detail}"
        )
        self.items = items


class UnsentError(UnavailableError):
    """A buffer was not empty in time.

    ``unfinished`` were sent with an unknown outcome; ``unsent`` has the other pending totals by
    counter: those never sent, and those that the service refused for now. They are not counted.
    With a spool both are on disk and are sent at the next start; if the disk failed, only adds
    before the last successful ``sync`` are. ``rejected`` was rejected permanently meanwhile.
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
    """Map each code to its error class."""
    found: dict[str, type[CounterError]] = {}
    waiting: list[type[CounterError]] = [CounterError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting += kind.__subclasses__()
    return found


_KINDS: Final[Mapping[str, type[CounterError]]] = _kinds()


def error_of_problem(problem: Any, retry_after: str | None = None) -> CounterError:
    """Return the error for a problem document; an unknown code becomes a CounterError.

    *retry_after* counts if the problem does not say how long to wait. Raises ValueError for
    another document: only a counter service names a code and how to retry.
    """
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        raise ValueError("a problem has a code")
    if problem.get("retry") not in _RETRIES:
        raise ValueError("a problem says how to retry")
    code: str = problem["code"]
    kind = _KINDS.get(code, CounterError)
    # Skip the class's __init__, whose arguments differ.
    error = kind.__new__(kind)
    detail = str(problem.get("detail") or problem.get("title") or f"the service reports {code}")
    fields = {name: value for name, value in problem.items() if name not in _KNOWN}
    if code not in _KINDS:
        fields["code"] = code
    wait_us = _wait_us(problem.get("retry_after", retry_after))
    CounterError.__init__(error, detail, retry_after_us=wait_us, **fields)
    applied = problem.get("applied")
    error.applied = applied if isinstance(applied, bool) else None
    error.retry = problem["retry"]
    return error


def error_of_answer(
    status: int, body: bytes, retry_after: str | None, location: str | None = None
) -> CounterError:
    """Return the error for an unsuccessful answer; the last two arguments are its headers."""
    try:
        return error_of_problem(json.loads(body), retry_after)
    except (ValueError, TypeError, RecursionError):
        return unexpected(status, body, retry_after, location)


def is_fault(status: int) -> bool:
    """Return whether *status* means that a server failed; 501 is what it does not support."""
    return status >= 500 and status != 501


def unexpected(
    status: int, body: bytes, retry_after: str | None = None, location: str | None = None
) -> UnexpectedAnswerError:
    """Return the error for an answer that is not from a counter service."""
    if location is not None:
        what = f"redirects to {location[:_TEXT_CHARS_MAX]!r}: give the base URL of the service"
    else:
        text = body[:_TEXT_CHARS_MAX].decode("utf-8", "replace")
        what = f"with {text!r} is not from a counter service; check the base URL"
    error = UnexpectedAnswerError(f"status {status} {what}", retry_after_us=_wait_us(retry_after))
    if not is_fault(status) and status not in _TRY_LATER and not 200 <= status < 300:
        error.retry = "never"
    return error


def too_large(bytes_max: int, what: str) -> UnexpectedAnswerError:
    """Return the error for an answer of more than *bytes_max* bytes to *what*."""
    return UnexpectedAnswerError(
        f"more than {bytes_max:,} bytes, the most that a client reads of {what}, is not from a"
        " counter service; check the base URL"
    )


def _wait_us(value: object) -> int | None:
    """Return a Retry-After in microseconds, from seconds or from the date of a proxy."""
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
