"""Define the tree of errors. Each one states what it means for the token.

``applied`` describes the *token*, not this request. ``False`` means that the token never counts:
that was decided permanently. ``None`` means that this answer does not know. ``retry`` names the
next step.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Retry = Literal["same_token", "new_token", "never"]


class CounterError(Exception):
    """The base class of all errors that a caller can receive.

    ``detail`` names the value, the bound and the fix; ``fields`` are extra members of the problem
    document; ``retry_after_us`` is how long to wait before ``retry`` makes sense.
    """

    code: ClassVar[str] = "internal_error"
    applied: bool | None = None
    retry: Retry = "same_token"

    def __init_subclass__(cls, *, code: str = "", retry: Retry | None = None) -> None:
        """What is not given is as in the base class."""
        super().__init_subclass__()
        cls.code, cls.retry = code or cls.code, retry or cls.retry

    def __init__(self, detail: str, *, retry_after_us: int | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_us = retry_after_us
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, because the constructors of subclasses take other arguments."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(kind: type[CounterError], args: tuple[Any, ...]) -> CounterError:
    return kind.__new__(kind, *args)


class BadRequestError(CounterError, code="bad_request", retry="never"):
    """The request is malformed, and wrote nothing.

    ``applied`` is null because an earlier, well-formed request may have used the same token.
    """


class InvalidBodyError(BadRequestError, code="invalid_body"):
    """A field of the body is missing, unknown, of the wrong type, or out of bounds."""


class InvalidParameterError(BadRequestError, code="invalid_parameter"):
    """A part of the path, the query or a header is malformed or out of bounds."""


class TokenMissingError(BadRequestError, code="token_missing"):
    """A token is missing; without one a retry looks like a second add."""


class TokenAmbiguousError(BadRequestError, code="token_ambiguous"):
    """The request has two tokens, and it is unclear which one is meant."""


class NotSupportedError(BadRequestError, code="not_supported"):
    """BEST_EFFORT namespaces keep no events, and only some stores can keep bounds."""


class BodyTooLargeError(BadRequestError, code="body_too_large"):
    """The body is too large: send several smaller batches."""


class HeadTooLargeError(BadRequestError, code="head_too_large"):
    """The request line and headers together are too large."""


class UriTooLongError(BadRequestError, code="uri_too_long"):
    """The path and query together are too long."""


class TransferCodingError(BadRequestError, code="transfer_coding_unsupported"):
    """The transfer coding is not chunked (RFC 9112, 6.1)."""


class UnsupportedMediaTypeError(BadRequestError, code="unsupported_media_type"):
    """The route does not accept the media type of the body."""


class RequestTimeoutError(CounterError, code="request_timeout"):
    """The body did not arrive in time. Another request with the token may have been applied."""


class KeyMissingError(CounterError, code="key_missing", retry="never"):
    """The API key is missing: send ``Authorization: Bearer ck_...``. Nothing was done."""


class KeyInvalidError(CounterError, code="key_invalid", retry="never"):
    """The API key is mistyped, expired or revoked. Nothing was done."""


class ScopeInsufficientError(CounterError, code="scope_insufficient", retry="never"):
    """The key's scope is too narrow: use a key of a wider scope. Nothing was done."""


class OriginRefusedError(CounterError, code="origin_refused", retry="never"):
    """A page of another origin may not use a visitor's browser when there are no API keys."""


class QuotaExceededError(CounterError, code="quota_exceeded", retry="never"):
    """The quota is reached: delete a namespace, or have the operator raise it. Nothing was done."""


class NotFoundError(CounterError, code="not_found", retry="never"):
    """No route has this path."""


class NamespaceUnknownError(NotFoundError, code="namespace_unknown"):
    """The namespace does not exist: create it first, or check its spelling."""


class MethodNotAllowedError(BadRequestError, code="method_not_allowed"):
    """The method is not supported; the Allow header lists the methods that are."""


class NamespaceConflictError(CounterError, code="namespace_immutable", retry="never"):
    """The request changes a setting that is fixed for the namespace's lifetime."""


class PreconditionFailedError(CounterError, code="precondition_failed", retry="never"):
    """If-Match or If-None-Match did not match: read the resource again."""


class TokenInFutureError(CounterError, code="token_in_future"):
    """The token's time is too far in the future: its event would win over every later write."""


class TokenConflictError(CounterError, code="token_conflict", retry="never"):
    """The token was used with another payload. The first payload remains in effect."""


class TokenPendingError(CounterError, code="token_pending"):
    """The token is late and its window still open: an earlier write may be in flight."""


class TokenTooOldError(CounterError, code="token_too_old"):
    """The token is late. It was voided (``applied: false``), or it is too old to look up
    (``applied: null``)."""

    def __init__(self, detail: str, *, applied: bool | None, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.applied = applied
        self.retry = "new_token" if applied is False else "never"


class TokenCancelledError(CounterError, code="token_cancelled", retry="never"):
    """The token was cancelled: its add does not count and never will."""

    applied = False


class BoundReachedError(CounterError, code="bound_reached", retry="never"):
    """The add was refused because of a bound: it does not count and never will, though there may
    be room later.

    The attributes are None if the answer does not say.
    """

    applied = False

    @property
    def counter(self) -> str | None:
        """The counter whose bound was reached."""
        counter = self.fields.get("counter")
        return counter if isinstance(counter, str) else None

    @property
    def count(self) -> int | None:
        """The count that decided, without the add."""
        return self._integer("count")

    @property
    def at_least(self) -> int | None:
        """The bound that was reached, if it is the least count."""
        return self._integer("at_least")

    @property
    def at_most(self) -> int | None:
        """The bound that was reached, if it is the greatest count."""
        return self._integer("at_most")

    @property
    def held(self) -> int | None:
        """What open holds that go the same way reserved, if anything."""
        return self._integer("held")

    @property
    def room(self) -> int | None:
        """The largest amount that could have been added, or taken away, instead."""
        return self._integer("room")

    def _integer(self, name: str) -> int | None:
        value = self.fields.get(name)
        return value if type(value) is int else None


class HoldUnknownError(NotFoundError, code="hold_unknown"):
    """There is no hold with this id; the request that makes it may still be under way."""


class HoldSettledError(CounterError, code="hold_settled", retry="never"):
    """The hold was settled with the amount in ``settled``, which counts; nothing else will."""

    applied = True

    @property
    def settled(self) -> int | None:
        """What was settled; None if the answer does not say."""
        value = self.fields.get("settled")
        return value if type(value) is int else None


class HoldEndedError(CounterError, retry="never"):
    """The hold has ended: it counts nothing, and never will."""

    applied = False


class HoldReleasedError(HoldEndedError, code="hold_released"):
    """The hold was released: if the work was done, count its cost with an add."""


class HoldExpiredError(HoldEndedError, code="hold_expired"):
    """The hold has expired: if the work was done, count its cost with an add."""


class UnavailableError(CounterError, code="unavailable"):
    """The service cannot do it now; the token may or may not have been applied."""


class OverloadedError(UnavailableError, code="overloaded"):
    """Too many requests wait already. Nothing was done; wait, and send the same request again."""


class StreamEndedError(UnavailableError, code="stream_ended"):
    """A stream of adds ends before its client ended it. Lines without an answer were not added."""


class RateLimitedError(UnavailableError, code="rate_limited"):
    """The rate limit is exceeded. Nothing was done; wait, and send the same request again."""


class StoreUnavailableError(UnavailableError, code="store_unavailable"):
    """The store failed or cannot be reached: the detail names the cause and the fix."""


class CacheUnavailableError(UnavailableError, code="cache_unavailable"):
    """The cache failed or cannot be reached: best-effort counters exist only in it."""


class ClockSkewError(UnavailableError, code="clock_skew"):
    """This process's clock is too far from the store's: a rollup could miss its writes."""


class WriteTimeoutError(UnavailableError, code="write_timeout"):
    """The write may have been applied, or may still be: send the same token again to find out."""


class SliceMissingError(UnavailableError, code="slice_missing"):
    """The table for the token's time does not exist yet, or was dropped."""
