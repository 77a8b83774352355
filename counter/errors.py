"""One tree of errors. Each says what it means for the token, so that a client never has to guess.

``applied`` speaks of the *token*, not of the request: ``False`` only where it was decided, once
and for ever, that the token never counts; ``None`` where this answer knows nothing of it. ``retry``
says what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Retry = Literal["same_token", "new_token", "never"]


class InvariantError(Exception):
    """Something happened that must never happen: a bug, never a client's fault."""


def invariant(condition: bool, message: str) -> None:
    """Raise :class:`InvariantError` with *message* unless *condition* holds."""
    if not condition:
        raise InvariantError(message)


class CounterError(Exception):
    """The root of every error a caller can meet.

    ``detail`` names the value, the bound and the fix; ``fields`` are extra members of the problem
    document; ``retry_after_us`` is how long to wait before ``retry`` makes sense.
    """

    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"
    status: ClassVar[int] = 500
    applied: bool | None = None
    retry: Retry = "same_token"

    def __init__(self, detail: str, *, retry_after_us: int | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_us = retry_after_us
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is: a kind's own ``__init__`` takes other arguments."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(kind: type[CounterError], args: tuple[Any, ...]) -> CounterError:
    return kind.__new__(kind, *args)


class BadRequestError(CounterError):
    """The request is malformed, and wrote nothing. What became of a token that it names is another
    matter: it may have been sent well-formed before, so ``applied`` is null."""

    code = "bad_request"
    title = "Bad request"
    status = 400
    retry: Retry = "never"


class InvalidBodyError(BadRequestError):
    """A field of the body is missing, unknown, of another kind, or past its bound."""

    code = "invalid_body"
    title = "The body does not fit the schema"


class InvalidParameterError(BadRequestError):
    """A part of the path, the query or a header is not of its form or past its bound."""

    code = "invalid_parameter"
    title = "A parameter of the path, the query or a header is not valid"


class TokenMissingError(BadRequestError):
    """Without a token a retry could not be told from a second add."""

    code = "token_missing"
    title = "An event-sourced add needs an idempotency token"


class TokenAmbiguousError(BadRequestError):
    """Two tokens name two adds: which one is meant cannot be known."""

    code = "token_ambiguous"
    title = "A token in the body and an Idempotency-Key were both given"


class NotSupportedError(BadRequestError):
    """BEST_EFFORT namespaces keep no events."""

    code = "not_supported"
    title = "This counter type does not support the operation"


class BodyTooLargeError(BadRequestError):
    """Send less at once: several batches instead of one."""

    code = "body_too_large"
    title = "The body is too large"
    status = 413


class HeadTooLargeError(BadRequestError):
    """The request line and headers together are past their bound."""

    code = "head_too_large"
    title = "The head of the request is too large"
    status = 431


class UriTooLongError(BadRequestError):
    """The path and query together are past their bound."""

    code = "uri_too_long"
    title = "The URL is too long"
    status = 414


class TransferCodingError(BadRequestError):
    """A transfer coding other than chunked (RFC 9112, 6.1)."""

    code = "transfer_coding_unsupported"
    title = "The transfer coding is not supported"
    status = 501


class UnsupportedMediaTypeError(BadRequestError):
    """The body's media type is not one that the route reads."""

    code = "unsupported_media_type"
    title = "The content type is not supported"
    status = 415


class RequestTimeoutError(CounterError):
    """The body did not arrive in time. Another send of the token may have been applied."""

    code = "request_timeout"
    title = "The request did not arrive in time"
    status = 408


class KeyMissingError(CounterError):
    """Send an API key: ``Authorization: Bearer ck_...``. Nothing was done."""

    code = "key_missing"
    title = "An API key is needed"
    status = 401
    retry: Retry = "never"


class KeyInvalidError(CounterError):
    """No key that is in force: mistyped, expired or revoked. Nothing was done."""

    code = "key_invalid"
    title = "The API key is not valid"
    status = 401
    retry: Retry = "never"


class ScopeInsufficientError(CounterError):
    """Use a key of a wider scope. Nothing was done."""

    code = "scope_insufficient"
    title = "The API key's scope does not allow this"
    status = 403
    retry: Retry = "never"


class OriginRefusedError(CounterError):
    """Without API keys, a page of another origin may not use a visitor's browser to act here."""

    code = "origin_refused"
    title = "The request may come from a foreign web page"
    status = 403
    retry: Retry = "never"


class QuotaExceededError(CounterError):
    """Delete a namespace, or have the operator raise the quota. Nothing was done."""

    code = "quota_exceeded"
    title = "The quota does not allow another namespace"
    status = 403
    retry: Retry = "never"


class NotFoundError(CounterError):
    """The path leads nowhere."""

    code = "not_found"
    title = "No such resource"
    status = 404
    retry: Retry = "never"


class NamespaceUnknownError(NotFoundError):
    """Create the namespace first, or mind its spelling."""

    code = "namespace_unknown"
    title = "No such namespace"


class MethodNotAllowedError(BadRequestError):
    """The Allow header lists the methods that are supported."""

    code = "method_not_allowed"
    title = "The resource does not support this method"
    status = 405


class NamespaceConflictError(CounterError):
    """A setting that is fixed for the namespace's life was asked to change."""

    code = "namespace_immutable"
    title = "The setting is fixed when the namespace is created"
    status = 409
    retry: Retry = "never"


class PreconditionFailedError(CounterError):
    """If-Match or If-None-Match did not hold: read the resource again."""

    code = "precondition_failed"
    title = "The resource is not in the state the request named"
    status = 412
    retry: Retry = "never"


class TokenInFutureError(CounterError):
    """The token's time is past the bound: stored, it would win over every later write."""

    code = "token_in_future"
    title = "The token's generation_time is too far in the future"
    status = 400


class TokenConflictError(CounterError):
    """The token was used with another payload. What it was first used for stands."""

    code = "token_conflict"
    title = "The token was already used with another payload"
    status = 409
    retry: Retry = "never"


class TokenPendingError(CounterError):
    """A late token whose window is still open: a write admitted earlier may be in flight."""

    code = "token_pending"
    title = "Too early to say whether the token was applied"
    status = 503


class TokenTooOldError(CounterError):
    """A late token that was voided (``applied: false``) or is past knowing (``applied: null``)."""

    code = "token_too_old"
    title = "The token is too old to be applied"
    status = 410

    def __init__(self, detail: str, *, applied: bool | None, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.applied = applied
        self.retry = "new_token" if applied is False else "never"


class UnavailableError(CounterError):
    """The service cannot do it now; the token may or may not have been applied."""

    code = "unavailable"
    title = "The service is not available"
    status = 503


class OverloadedError(UnavailableError):
    """Too much waits already. Nothing was done; wait, and send the same again."""

    code = "overloaded"
    title = "The service is overloaded"


class RateLimitedError(UnavailableError):
    """More came than is allowed in the time. Nothing was done; wait, and send the same again."""

    code = "rate_limited"
    title = "Too much is asked for in the time"
    status = 429


class StoreUnavailableError(UnavailableError):
    """The store failed, or cannot be reached: the detail says why and what to do."""

    code = "store_unavailable"
    title = "The store cannot be read or written"


class CacheUnavailableError(UnavailableError):
    """The cache failed, or cannot be reached: best-effort counters live in it alone."""

    code = "cache_unavailable"
    title = "The cache cannot be read or written"


class ClockSkewError(UnavailableError):
    """This process's clock is too far from the store's: what it wrote could be lost to a rollup."""

    code = "clock_skew"
    title = "The server's clock is wrong"


class WriteTimeoutError(UnavailableError):
    """The write may have landed, or may yet: send the same token again to learn it."""

    code = "write_timeout"
    title = "The write was not acknowledged in time"


class SliceMissingError(UnavailableError):
    """The table of the token's time is not made yet, or is gone."""

    code = "slice_missing"
    title = "The time slice is not there"


class StartupError(Exception):
    """The service cannot start; the message says why and what to do. Exit code 2."""
