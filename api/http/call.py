"""A request as the handlers see it.

The routes work on these and not on a framework's request, because at tens of thousands of requests
a second the framework's objects cost more than the count itself.
"""

from __future__ import annotations

import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes

from api.http.connections import ReadQueue, Steps
from api.http.models import Body, QueryModel, read_body, read_query
from counter.core.admission import Bounded
from counter.core.rate_limits import UNLIMITED, Allowance
from counter.core.results import Credential
from counter.errors import (
    BodyTooLargeError,
    CounterError,
    InvalidParameterError,
    OverloadedError,
    TokenAmbiguousError,
    UnsupportedMediaTypeError,
)
from counter.limits import COUNTER_NAME_CHARS_MAX, IDEMPOTENCY_KEY_CHARS_MAX, REQUEST_ID_CHARS_MAX
from counter.quantities import check_counter_name
from counter.security.audit_log import Who
from counter.tokens import token_of_uuid7
from counter.types import Namespace, Token

if TYPE_CHECKING:
    from api.http.auth import Caller, KeyMemory


AsgiScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: How long the client waits for its response: a duration, such as ``250ms``.
TIMEOUT_HEADER: Final = b"request-timeout"
App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_T = TypeVar("_T")
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


class Admission(Protocol):
    """Limits the memory of bodies, and rejects writes that would wait for too long."""

    bodies: Bounded

    async def admit_write(self, timeout: bytes | None) -> None:
        """Wait until a write may begin: *timeout* is its header Request-Timeout. Raises
        OverloadedError."""
        ...

    def check_write(self, timeout: bytes | None, waited_s: float = 0.0) -> None:
        """Raise OverloadedError, at once, if a write that has *waited* so long must not begin."""
        ...

    async def delay(self) -> None:
        """Wait until one more rejection may be sent."""
        ...


class RouteInfo(Protocol):
    """A route as requests, logs and traces know it; see :class:`api.http.routing.Route`."""

    name: str
    path: str
    writes: bool


class Target(NamedTuple):
    """What a request is for: its route, None without one, and the names in its path."""

    method: str
    route: RouteInfo | None
    namespace: str = ""
    counter: str = ""
    #: The id of a key or of a hold.
    item: str = ""
    #: Makes the error for a path that has no route, or that has an invalid name.
    refusal: Callable[[], CounterError] | None = None


class Ttls(NamedTuple):
    """How long a namespace honours a token, and an arbitrary key: headers of responses."""

    namespace: Namespace
    of_token: Headers
    of_key: Headers


class Call:
    """A request to ``/v1``: what was sent, and what the pipeline found out about it."""

    body_bytes_max: int = 0
    query_string: bytes = b""
    scheme: str = "http"
    client: tuple[str, int] | None = None
    #: The key that the connection had last, if it remembers it.
    memory: KeyMemory | None = None
    #: The caller; None before authentication.
    caller: Caller | None = None
    #: The namespace of the path; None if there is none, or before it is looked up.
    known_namespace: Namespace | None = None
    #: How long its token is honoured; None if it has none, or was not admitted.
    ttls: Ttls | None = None
    #: The namespace whose rate limits the request is charged to.
    rated: Namespace | None = None
    #: Whether the request has passed the pipeline's checks.
    is_admitted: bool = False
    #: Limits the memory of bodies, and rejects writes that would wait for too long.
    shedder: Admission | None = None
    #: Bytes of its body, which count towards the limit on all bodies.
    held: int = 0
    #: Whether the Idempotency-Key is a UUIDv7, so that its time is the token's.
    key_is_token: bool = False

    def __init__(
        self,
        target: Target,
        headers: list[tuple[bytes, bytes]],
        first: Mapping[bytes, bytes],
        request_id: bytes,
    ) -> None:
        """*first* has the first value of each header, by its name in lower case."""
        self.target = target
        self.route = target.route
        self.namespace = target.namespace
        self.counter = target.counter
        self.item = target.item
        self.headers = headers
        self.first = first
        self.id = request_id
        #: Further fields for the request log.
        self.logged: dict[str, Any] = {}

    @property
    def method(self) -> str:
        """The method; GET for a HEAD."""
        return self.target.method

    @property
    def request_id(self) -> str:
        """The request id as text."""
        return self.id.decode()

    async def receive(self) -> Message:
        """Return the next part of the request, as over ASGI."""
        raise NotImplementedError

    @property
    def allowance(self) -> Allowance:
        """The work that the caller's rates allow besides the adds."""
        return self.caller or UNLIMITED

    @property
    def who(self) -> Who:
        """The caller, for the audit log: the key's id, never its secret, and the address."""
        key = None if self.caller is None else self.caller.key
        client = self.client
        return Who(
            # Without keys it may be anyone.
            "anyone" if key is None else f"key:{key.id}",
            remote=None if client is None else f"{client[0]}:{client[1]}",
            request_id=self.request_id,
        )

    def charge(self, adds: int) -> None:
        """Take *adds* adds from the rates. Raises RateLimitedError."""
        if self.caller is not None:
            self.caller.charge(self.rated, adds)

    def charge_requests(self, requests: int) -> None:
        """Take *requests* more for this one; later requests wait for them."""
        if self.caller is not None:
            self.caller.charge_requests(self.rated, requests)

    async def admit_write(self) -> None:
        """Wait until the write may begin. Raises OverloadedError if it would wait for too long."""
        if self.shedder is not None and self.route is not None and self.route.writes:
            await self.shedder.admit_write(self.first.get(TIMEOUT_HEADER))

    async def read_in_turn(self, queue: ReadQueue, steps: Steps[_T]) -> _T:
        """Read a large write by *steps* in turn with others, and return what was read.

        Admission is checked again when its turn comes, because the requests ahead of it are in
        flight by then and were not when its body was complete. Raises OverloadedError."""
        shedder, timeout = self.shedder, self.first.get(TIMEOUT_HEADER)
        since_s = queue.now_s()

        def admitted() -> Steps[_T]:
            if shedder is not None:
                shedder.check_write(timeout, queue.now_s() - since_s)
            return (yield from steps)

        try:
            return await queue.run(admitted())
        except OverloadedError:
            if shedder is not None:
                await shedder.delay()
            raise

    def sees(self, namespace: str) -> bool:
        """Return whether the caller's key covers *namespace*."""
        return self.caller is None or self.caller.sees(namespace)

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of the header *name* (in lower case)."""
        return self.first.get(name)

    def tags(self, name: bytes) -> frozenset[bytes]:
        """Return the entity tags of the header *name*: ``*`` alone for any, none without the
        header. Raises InvalidParameterError."""
        values = [value for key, value in self.headers if key == name]
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
        return read_query(model, self.query_string)

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
        for name, value in self.headers:
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
            if self.shedder is not None:
                self.shedder.bodies.take(len(parts[-1]))
                self.held += len(parts[-1])
            if size > self.body_bytes_max:
                raise self._too_large(size)
            is_whole = not message.get("more_body", False)
        await self.admit_write()
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
        keys = [value for name, value in self.headers if name == b"idempotency-key"]
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


class RequestIds:
    """Generate ids that are unique across processes. They are in the response and in log lines."""

    __slots__ = ("new",)

    def __init__(self) -> None:
        name = secrets.token_hex(6).encode() + b"%08x"
        #: Returns the next id.
        self.new: Callable[[], bytes] = map(name.__mod__, count()).__next__

    def of(self, first: Mapping[bytes, bytes]) -> bytes:
        """Return the client's X-Request-Id if it has 1 to REQUEST_ID_CHARS_MAX visible ASCII
        characters; otherwise a new id. *first* has the first value of each header."""
        given = first.get(b"x-request-id")
        if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii():
            text = given.decode("ascii")
            if text.isprintable() and " " not in text:
                return given
        return self.new()


class AsgiCall(Call):
    """A request that came over ASGI."""

    def __init__(
        self,
        target: Target,
        scope: AsgiScope,
        receive: Receive,
        ids: RequestIds,
        body_bytes_max: int,
    ) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        first = first_values(headers)
        super().__init__(target, headers, first, ids.of(first))
        self._receive = receive
        self.query_string = scope["query_string"]
        self.scheme = scope.get("scheme", self.scheme)
        self.client = scope.get("client")
        self.body_bytes_max = body_bytes_max

    async def receive(self) -> Message:
        return await self._receive()


def first_values(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the first value of each header, by its name."""
    return dict(reversed(headers))


def preferred(headers: Iterable[tuple[bytes, bytes]], offers: Sequence[bytes]) -> bytes:
    """Return the media type of *offers* that Accept prefers (RFC 9110, 12.5.1): by its quality,
    then the one that is named the most exactly, then the first one."""
    qualities: dict[bytes, float] = {}
    accept = b",".join(value for name, value in headers if name == b"accept")
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
