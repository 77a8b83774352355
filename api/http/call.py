"""A request as the handlers see it, and their answer: bytes in, bytes out.

The routes work on these and not on a framework's request, because at tens of thousands of requests
a second the framework's objects cost more than the count itself.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel

from api.http.models import Body, QueryModel, read_body, read_query
from counter.core.admission import Bounded
from counter.core.rate_limits import UNLIMITED, Allowance
from counter.core.results import Credential
from counter.errors import (
    BodyTooLargeError,
    InvalidParameterError,
    TokenAmbiguousError,
    UnsupportedMediaTypeError,
)
from counter.limits import COUNTER_NAME_CHARS_MAX, IDEMPOTENCY_KEY_CHARS_MAX
from counter.names import check_counter_name
from counter.security.audit_log import Who
from counter.tokens import token_of_uuid7
from counter.types import Namespace, Token

if TYPE_CHECKING:
    from api.http.auth import Caller


AsgiScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_Body = TypeVar("_Body", bound=Body)
_Query = TypeVar("_Query", bound=QueryModel)

JSON: Final = b"application/json"
NDJSON: Final = b"application/x-ndjson"
NO_CONTENT: Final = 204
NOT_MODIFIED: Final = 304
CSV: Final = b"text/csv; charset=utf-8"
_TAG: Final = rb'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
#: A list of entity tags (RFC 9110, 8.8.3).
_TAGS: Final = re.compile(rb"[\t ,]*%s(?:[\t ]*,[\t ,]*%s)*[\t ,]*" % (_TAG, _TAG))
#: A string and its parameters (RFC 8941, 3.3.3 and 3.1.2).
_STRING: Final = r'"((?:[^"\\]|\\["\\])*)"'
_QUOTED: Final = re.compile(rf'{_STRING}(?:; *[a-z*][a-z0-9_.*-]*(?:={_STRING}|=[^\s";,]+)?)*')
_QUALITY: Final = re.compile(rb"0(?:\.\d{0,3})?|1(?:\.0{0,3})?")
OPENMETRICS: Final = b"application/openmetrics-text; version=1.0.0; charset=utf-8"


class ClientGoneError(Exception):
    """The client disconnected before its request was complete: no response can be sent."""


class Response(NamedTuple):
    """A response: its status, body and headers."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def json(
        cls, answer: BaseModel, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> Response:
        """Return *answer* in JSON, with the members that are set."""
        return Response(status, answer.model_dump_json(exclude_unset=True).encode(), JSON, headers)

    @property
    def head(self) -> tuple[tuple[bytes, bytes], ...]:
        """All headers, with those that describe the body."""
        if self.status in (NO_CONTENT, NOT_MODIFIED):
            return self.headers
        length = b"%d" % len(self.body)
        return ((b"content-type", self.content_type), (b"content-length", length), *self.headers)

    def with_headers(self, *more: tuple[bytes, bytes]) -> Response:
        """Return this answer with *more* headers."""
        return self._replace(headers=(*self.headers, *more))

    async def send(self, send: Send) -> None:
        """Send the response over ASGI."""
        head = {"type": "http.response.start", "status": self.status, "headers": [*self.head]}
        await send(head)
        await send({"type": "http.response.body", "body": self.body})


class Found(Protocol):
    """The route of a request, as logs and traces know it."""

    name: str
    path: str
    writes: bool


def _free(_adds: int) -> None:
    """Take nothing: no rate limits the caller."""


async def _open() -> None:
    """Let every request in."""


@dataclass(slots=True, eq=False)
class Call:
    """A request: its scope, and the parts of its path that name a namespace, a counter or a key."""

    scope: AsgiScope
    receive: Receive
    body_bytes_max: int
    request_id: str
    namespace: str = ""
    counter: str = ""
    #: The id of a key in the path.
    key_id: str = ""
    #: The namespace of that name; None if there is none.
    found: Namespace | None = None
    #: The caller; None before authentication.
    caller: Caller | None = None
    route: Found | None = None
    #: Whether the request was counted against the caller's rates already.
    admitted: bool = False
    #: Takes a number of adds from the caller's rates. Raises RateLimitedError.
    charge: Callable[[int], None] = _free
    #: Takes a number of requests more from the caller's rates, which later requests wait for.
    charge_requests: Callable[[int], None] = _free
    #: Called when the body is complete. Raises OverloadedError if the write would wait for too
    #: long.
    let_in: Callable[[], Awaitable[None]] = _open
    #: The memory that all bodies share, and how many bytes of it this one holds.
    room: Bounded | None = None
    held: int = 0
    #: Further fields for the request log.
    logged: dict[str, Any] = field(default_factory=dict)
    #: Whether the Idempotency-Key is a UUIDv7, so that its time is the token's.
    key_is_token: bool = False

    @property
    def allowance(self) -> Allowance:
        """The work that the caller's rates allow besides the adds."""
        return self.caller or UNLIMITED

    @property
    def who(self) -> Who:
        """The caller, for the audit log: the key's id, never its secret, and the address."""
        key = None if self.caller is None else self.caller.key
        client = self.scope.get("client")
        return Who(
            # Without keys it may be anyone.
            "anyone" if key is None else f"key:{key.id}",
            remote=None if client is None else f"{client[0]}:{client[1]}",
            request_id=self.request_id,
        )

    def sees(self, namespace: str) -> bool:
        """Return whether the caller's key covers *namespace*."""
        return self.caller is None or self.caller.sees(namespace)

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the header *name* (in lower case)."""
        return header_of(self.scope, name)

    def tags(self, name: bytes) -> frozenset[bytes]:
        """Return the entity tags of the header *name*: ``*`` alone for any, none without the
        header. Raises InvalidParameterError."""
        values = [value for key, value in self.scope["headers"] if key == name]
        given = b",".join(values).strip()
        if not values or given == b"*":
            return frozenset(values[:1] and (b"*",))
        if _TAGS.fullmatch(given) is None:
            title = name.decode().title()
            raise InvalidParameterError(
                f"{title} is {given[:80].decode('latin-1')!r}; send * or entity tags in quotes,"
                ' such as "v1"',
                field=title,
            )
        return frozenset(re.findall(_TAG, given))

    def query(self, model: type[_Query]) -> _Query:
        """Return the query as *model*. Raises InvalidParameterError."""
        return read_query(model, self.scope["query_string"])

    def content_type(self, *allowed: bytes) -> bytes:
        """Return the body's media type, one of *allowed*. Raises UnsupportedMediaTypeError."""
        given = self.header(b"content-type") or b""
        media = given.partition(b";")[0].strip().lower()
        if media not in allowed:
            wanted = " or ".join(each.decode() for each in allowed)
            shown = given[:80].decode("latin-1") or "missing"
            raise UnsupportedMediaTypeError(f"Content-Type is {shown}; send {wanted}")
        return media

    def require_plain(self) -> None:
        """Raise UnsupportedMediaTypeError if the body is compressed: a small one could be large
        when it is decoded, and adds are small."""
        for name, value in self.scope["headers"]:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedMediaTypeError(
                    f"Content-Encoding is {value[:80].decode('latin-1')}; send the body without one"
                )

    async def body(self) -> bytes:
        """Return the whole body, without a byte order mark at its beginning.

        Raises UnsupportedMediaTypeError, BodyTooLargeError, as soon as the size is known, and
        OverloadedError."""
        self.require_plain()
        announced = int(self.header(b"content-length") or 0)
        if announced > self.body_bytes_max:
            # Before 100 Continue is sent.
            raise self._too_large(announced)
        parts, size, is_whole = [], 0, False
        while not is_whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if self.room is not None:
                self.room.take(len(parts[-1]))
                self.held += len(parts[-1])
            if size > self.body_bytes_max:
                raise self._too_large(size)
            is_whole = not message.get("more_body", False)
        await self.let_in()
        return b"".join(parts).removeprefix(BOM_UTF8)

    async def json(self, model: type[_Body], *, may_be_empty: bool = False) -> _Body:
        """Return the body as *model*. Raises UnsupportedMediaTypeError and InvalidBodyError."""
        if may_be_empty:
            body = await self.body()
            if not body:
                return model()
            self.content_type(JSON)
        else:
            self.content_type(JSON)
            body = await self.body()
        return read_body(model, body)

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body has at least {size} bytes; at most {self.body_bytes_max} are allowed"
        )

    def credential(self, token: Token | None) -> Credential:
        """Return the token of the body or of the Idempotency-Key header; never both."""
        keys = [value for name, value in self.scope["headers"] if name == b"idempotency-key"]
        if not keys:
            return token
        if len(keys) > 1:
            raise InvalidParameterError(
                f"there are {len(keys)} Idempotency-Key headers; give one", field="Idempotency-Key"
            )
        if token is not None:
            raise TokenAmbiguousError(
                "the body has an idempotency_token and there is an Idempotency-Key header, which a"
                " browser or an SDK may have added; give one of them"
            )
        key = _key_of(keys[0].decode("latin-1"))
        read = token_of_uuid7(key)
        self.key_is_token = read is not None
        return read or key


def _key_of(text: str) -> str:
    """Return the key of a header: a quoted string, whose parameters are ignored (RFC 8941, 3.1.2),
    or a bare text."""
    key = text.strip()
    if key[:1] == '"':
        quoted = _QUOTED.fullmatch(key)
        if quoted is None:
            raise InvalidParameterError(
                f"Idempotency-Key is {key[:80]!r}; a key that begins with a quote is one quoted"
                ' string, such as "order-1"',
                field="Idempotency-Key",
            )
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    else:
        members = [each.strip() for each in key.split(",")]
        if members == members[:1] * len(members) and len(members) > 1:
            # The lines of two headers are joined so.
            raise InvalidParameterError(
                f"Idempotency-Key is {len(members)} times {members[0][:80]!r}; give the key once,"
                " or quote it",
                field="Idempotency-Key",
            )
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
        raise InvalidParameterError(
            f"Idempotency-Key has {len(key)} characters: {key[:80]!r}; 1 to"
            f" {IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters are allowed",
            field="Idempotency-Key",
        )
    return key


def header_of(scope: AsgiScope, name: bytes) -> bytes | None:
    """Return the value of the header *name* (in lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def preferred(scope: AsgiScope, offers: Sequence[bytes]) -> bytes:
    """Return the media type of *offers* that Accept prefers (RFC 9110, 12.5.1): by its quality,
    then the one that is named the most exactly, then the first one."""
    qualities: dict[bytes, float] = {}
    accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
    for part in accept.lower().split(b","):
        media, *parameters = (each.strip() for each in part.split(b";"))
        texts = [each[2:] for each in parameters if each[:2] == b"q="] or [b"1"]
        if _QUALITY.fullmatch(texts[0]):
            qualities[media] = float(texts[0])

    def rank(offer: bytes) -> tuple[float, int]:
        for place, each in enumerate((offer, offer.partition(b"/")[0] + b"/*", b"*/*")):
            if quality := qualities.get(each):
                return quality, -place
            if quality is not None:
                break
        return 0, 0

    return max(offers, key=rank)


def counter_of_segment(segment: bytes) -> str:
    """Return the counter that a percent-encoded path segment names. Raises
    InvalidParameterError."""
    if segment.isalnum() and len(segment) <= COUNTER_NAME_CHARS_MAX:
        # The usual case: nothing to decode, and valid.
        return segment.decode("ascii")
    try:
        return check_counter_name(unquote_to_bytes(segment).decode())
    except ValueError as error:
        shown = segment[:80].decode("latin-1")
        raise InvalidParameterError(f"counter {shown!r}: {error}", field="counter") from error
