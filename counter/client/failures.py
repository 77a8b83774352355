"""The errors of a client: the service's own tree, read back from its problems, and a few more.

All of them are :class:`counter.errors.CounterError`. ``applied`` says whether the token's add is
counted (None: not known), ``retry`` what to do next, as docs/http.md has it. Those that only a
client can meet have the code of what they are a kind of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
_TRY_LATER: Final = frozenset({408, 425, 429})
_TEXT_CHARS_MAX: Final = 200
_KNOWN: Final = frozenset(
    {"type", "title", "status", "detail", "code", "applied", "retry", "retry_after"}
)


class UnreachableError(UnavailableError):
    """Nobody answered, or not in time: what became of the request is not known."""


class UnexpectedAnswerError(UnavailableError):
    """What answered does not speak as the service does: a proxy, or another service."""


class BufferFullError(OverloadedError):
    """The buffer holds ``max_items`` already; this add was not taken."""


class ClosedError(CounterError):
    """The client or the buffer was closed, or belongs to the process this one was forked from."""

    retry: Retry = "never"


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
            return cls(items=items, **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidParameterError(
                f"{text[:80]!r} is not what str() made of an Unfinished"
            ) from error


class UnknownOutcomeError(UnavailableError):
    """The deadline has passed, and nobody knows whether the add is counted.

    ``token`` is the one it was sent with: store ``str(error.unfinished)`` and give it to
    ``client.resolve`` at any time while the service keeps events, or add again with ``token=``. The
    last attempt's error is its cause.
    """

    def __init__(self, detail: str, unfinished: Unfinished) -> None:
        super().__init__(detail)
        self.unfinished = unfinished

    @property
    def token(self) -> Credential:
        """The token, or the key, that finishes it."""
        return self.unfinished.token


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
    a spool all of it is on disk, and goes on at the next start. ``rejected`` is what was refused
    for good meanwhile.
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
    detail = str(problem.get("detail", ""))
    fields = {name: value for name, value in problem.items() if name not in _KNOWN}
    if code not in _KINDS:
        fields["code"] = code
    wait_s = problem.get("retry_after")
    wait_us = int(wait_s * 1_000_000) if isinstance(wait_s, int | float) else None
    CounterError.__init__(error, detail, retry_after_us=wait_us, **fields)
    applied = problem.get("applied")
    error.applied = applied if isinstance(applied, bool) else None
    error.retry = _RETRIES.get(str(problem.get("retry")), "never")
    return error


def error_of_answer(status: int, body: bytes, retry_after: str | None) -> CounterError:
    """The error of an answer that is no success."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem and "retry" in problem:
        if "retry_after" not in problem and retry_after is not None and retry_after.isdecimal():
            problem["retry_after"] = int(retry_after)
        return error_of_problem(problem)
    return unexpected(status, body, retry_after)


def unexpected(status: int, body: bytes, retry_after: str | None = None) -> UnexpectedAnswerError:
    """The error of an answer that no counter service gives."""
    text = body[:_TEXT_CHARS_MAX].decode("utf-8", "replace")
    wait_us = None
    if retry_after is not None and retry_after.isdecimal():
        wait_us = int(retry_after) * 1_000_000
    error = UnexpectedAnswerError(
        f"status {status} with {text!r} is no answer of a counter service; look what is at the"
        " base URL",
        retry_after_us=wait_us,
    )
    if status < 500 and status not in _TRY_LATER and not 200 <= status < 300:
        error.retry = "never"
    return error
