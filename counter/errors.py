"""Define the tree of errors. Each one states what it means for the token.

``applied`` describes the *token*, not this request. ``False`` means that the token never counts:
that was decided permanently. ``None`` means that this answer does not know. ``retry`` names the
next step.
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


def is_fault(status: int) -> bool:
    """Return whether *status* means that the service failed; 501 is what it does not support."""
    return status >= 500 and status != 501


class CounterError(Exception):
    """The base class of all errors that a caller can receive.

    ``detail`` names the value, the bound and the fix; ``fields`` are extra members of the problem
    document; ``retry_after_us`` is how long to wait before ``retry`` makes sense.
    """

    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"
    status: ClassVar[int] = 500
    applied: bool | None = None
    retry: Retry = "same_token"

    def __init_subclass__(
        cls, *, code: str = "", title: str = "", status: int = 0, retry: Retry | None = None
    ) -> None:
        """What is not given is as in the base class."""
        super().__init_subclass__()
        cls.code, cls.title = code or cls.code, title or cls.title
        cls.status, cls.retry = status or cls.status, retry or cls.retry

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


class BadRequestError(
    CounterError, code="bad_request", title="Bad request", status=400, retry="never"
):
    """The request is malformed, and wrote nothing.

    ``applied`` is null because an earlier, well-formed request may have used the same token.
    """


class InvalidBodyError(
    BadRequestError, code="invalid_body", title="The body does not fit the schema"
):
    """A field of the body is missing, unknown, of the wrong type, or out of bounds."""


class InvalidParameterError(
    BadRequestError,
    code="invalid_parameter",
    title="A parameter of the path, the query or a header is not valid",
):
    """A part of the path, the query or a header is malformed or out of bounds."""


class TokenMissingError(
    BadRequestError, code="token_missing", title="An idempotency token is needed"
):
    """A token is missing; without one a retry looks like a second add."""


class TokenAmbiguousError(
    BadRequestError,
    code="token_ambiguous",
    title="A token in the body and an Idempotency-Key were both given",
):
    """The request has two tokens, and it is unclear which one is meant."""


class NotSupportedError(
    BadRequestError,
    code="not_supported",
    title="This counter type or store does not support the operation",
    status=501,
):
    """BEST_EFFORT namespaces keep no events, and only some stores can keep bounds."""


class BodyTooLargeError(
    BadRequestError, code="body_too_large", title="The body is too large", status=413
):
    """The body is too large: send several smaller batches."""


class HeadTooLargeError(
    BadRequestError, code="head_too_large", title="The head of the request is too large", status=431
):
    """The request line and headers together are too large."""


class UriTooLongError(
    BadRequestError, code="uri_too_long", title="The URL is too long", status=414
):
    """The path and query together are too long."""


class TransferCodingError(
    BadRequestError,
    code="transfer_coding_unsupported",
    title="The transfer coding is not supported",
    status=501,
):
    """The transfer coding is not chunked (RFC 9112, 6.1)."""


class UnsupportedMediaTypeError(
    BadRequestError,
    code="unsupported_media_type",
    title="The content type is not supported",
    status=415,
):
    """The route does not accept the media type of the body."""


class RequestTimeoutError(
    CounterError, code="request_timeout", title="The request did not arrive in time", status=408
):
    """The body did not arrive in time. Another request with the token may have been applied."""


class KeyMissingError(
    CounterError, code="key_missing", title="An API key is needed", status=401, retry="never"
):
    """The API key is missing: send ``Authorization: Bearer ck_...``. Nothing was done."""


class KeyInvalidError(
    CounterError, code="key_invalid", title="The API key is not valid", status=401, retry="never"
):
    """The API key is mistyped, expired or revoked. Nothing was done."""


class ScopeInsufficientError(
    CounterError,
    code="scope_insufficient",
    title="The API key's scope does not allow this",
    status=403,
    retry="never",
):
    """The key's scope is too narrow: use a key of a wider scope. Nothing was done."""


class OriginRefusedError(
    CounterError,
    code="origin_refused",
    title="The request may come from a foreign web page",
    status=403,
    retry="never",
):
    """A page of another origin may not use a visitor's browser when there are no API keys."""


class QuotaExceededError(
    CounterError,
    code="quota_exceeded",
    title="The quota does not allow another namespace",
    status=403,
    retry="never",
):
    """The quota is reached: delete a namespace, or have the operator raise it. Nothing was done."""


class NotFoundError(
    CounterError, code="not_found", title="No such resource", status=404, retry="never"
):
    """No route has this path."""


class NamespaceUnknownError(NotFoundError, code="namespace_unknown", title="No such namespace"):
    """The namespace does not exist: create it first, or check its spelling."""


class MethodNotAllowedError(
    BadRequestError,
    code="method_not_allowed",
    title="The resource does not support this method",
    status=405,
):
    """The method is not supported; the Allow header lists the methods that are."""


class NamespaceConflictError(
    CounterError,
    code="namespace_immutable",
    title="The setting is fixed when the namespace is created",
    status=409,
    retry="never",
):
    """The request changes a setting that is fixed for the namespace's lifetime."""


class PreconditionFailedError(
    CounterError,
    code="precondition_failed",
    title="The resource is not in the state the request named",
    status=412,
    retry="never",
):
    """If-Match or If-None-Match did not match: read the resource again."""


class TokenInFutureError(
    CounterError,
    code="token_in_future",
    title="The token's generation_time is too far in the future",
    status=400,
):
    """The token's time is too far in the future: its event would win over every later write."""


class TokenConflictError(
    CounterError,
    code="token_conflict",
    title="The token was already used with another payload",
    status=409,
    retry="never",
):
    """The token was used with another payload. The first payload remains in effect."""


class TokenPendingError(
    CounterError,
    code="token_pending",
    title="Too early to say whether the token was applied",
    status=503,
):
    """The token is late and its window still open: an earlier write may be in flight."""


class TokenTooOldError(
    CounterError, code="token_too_old", title="The token is too old to be applied", status=410
):
    """The token is late. It was voided (``applied: false``), or it is too old to look up
    (``applied: null``)."""

    def __init__(self, detail: str, *, applied: bool | None, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.applied = applied
        self.retry = "new_token" if applied is False else "never"


class TokenCancelledError(
    CounterError, code="token_cancelled", title="The token was cancelled", status=410, retry="never"
):
    """The token was cancelled: its add does not count and never will."""

    applied = False


class BoundReachedError(
    CounterError,
    code="bound_reached",
    title="A bound would be passed",
    status=409,
    retry="never",
):
    """The add was refused because of a bound: it does not count and never will, though there may
    be room later."""

    applied = False


class HoldUnknownError(NotFoundError, code="hold_unknown", title="No such hold"):
    """There is no hold with this id; the request that makes it may still be under way."""


class HoldSettledError(
    CounterError, code="hold_settled", title="The hold was settled", status=409, retry="never"
):
    """The hold was settled with the amount in ``settled``, which counts; nothing else will."""

    applied = True


class HoldEndedError(CounterError, status=410, retry="never"):
    """The hold has ended: it counts nothing, and never will."""

    applied = False


class HoldReleasedError(HoldEndedError, code="hold_released", title="The hold was released"):
    """The hold was released: if the work was done, an add counts its cost."""


class HoldExpiredError(HoldEndedError, code="hold_expired", title="The hold has expired"):
    """The hold has expired: if the work was done, an add counts its cost."""


class UnavailableError(
    CounterError, code="unavailable", title="The service is not available", status=503
):
    """The service cannot do it now; the token may or may not have been applied."""


class OverloadedError(UnavailableError, code="overloaded", title="The service is overloaded"):
    """Too many requests wait already. Nothing was done; wait, and send the same request again."""


class StreamEndedError(UnavailableError, code="stream_ended", title="The stream of adds ended"):
    """A stream of adds ends before its client ended it. Lines without an answer were not added."""


class RateLimitedError(
    UnavailableError, code="rate_limited", title="The rate limit is exceeded", status=429
):
    """The rate limit is exceeded. Nothing was done; wait, and send the same request again."""


class StoreUnavailableError(
    UnavailableError, code="store_unavailable", title="The store cannot be read or written"
):
    """The store failed or cannot be reached: the detail names the cause and the fix."""


class CacheUnavailableError(
    UnavailableError, code="cache_unavailable", title="The cache cannot be read or written"
):
    """The cache failed or cannot be reached: best-effort counters exist only in it."""


class ClockSkewError(UnavailableError, code="clock_skew", title="The server's clock is wrong"):
    """This process's clock is too far from the store's: a rollup could miss its writes."""


class WriteTimeoutError(
    UnavailableError, code="write_timeout", title="The write was not acknowledged in time"
):
    """The write may have been applied, or may still be: send the same token again to find out."""


class SliceMissingError(
    UnavailableError, code="slice_missing", title="The time slice does not exist"
):
    """The table for the token's time does not exist yet, or was dropped."""


class StartupError(Exception):
    """The service cannot start; the message names the cause and the fix. Exit code 2."""


class DamagedError(StartupError):
    """What is stored is not what was written."""


class RefusedError(StartupError):
    """A command was refused, and changed nothing."""
