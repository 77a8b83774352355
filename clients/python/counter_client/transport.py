"""Requests over httpx: pooled connections, deadlines, TLS, hedges, and live streams."""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import ssl
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import httpcore
import httpx

from counter_client import answers
from counter_client.addresses import Endpoints, authorization, by_proxy, proxies
from counter_client.calls import Call, Request, Response
from counter_client.errors import CounterError, InvalidParameterError
from counter_client.failures import (
    ClosedError,
    UnexpectedAnswerError,
    UnreachableError,
    error_of_answer,
    is_fault,
    too_large,
    unexpected,
)
from counter_client.options import ADAPTIVE, Attempt, Options, Sending, Watch, call_hook
from counter_client.retrying import Answer, Budget, Policy, ProcessLock, Send

#: How much of an answer is read: of one with many items; of any other, a problem included; and of
#: one event of a stream.
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
ANSWER_ONE_BYTES_MAX: Final = 64 * 1024
#: Bytes per write; the deadline is checked between writes.
_PIECE_BYTES: Final = 65_536


class Deadline(threading.local):
    """The end of the current thread's attempt, by ``time.perf_counter``."""

    end_s: float | None = None

    @contextmanager
    def at(self, end_s: float) -> Iterator[None]:
        """Bound all waiting of this thread in the block by *end_s*."""
        before, self.end_s = self.end_s, end_s
        try:
            yield
        finally:
            self.end_s = before

    def left_s(self, timeout: float | None, late: type[Exception]) -> float | None:
        """Return *timeout* cut to the time left. Raises *late* if there is none."""
        if self.end_s is None:
            return timeout
        left_s = self.end_s - time.perf_counter()
        if left_s <= 0:
            raise late("the time of the attempt is over")
        return left_s if timeout is None else min(left_s, timeout)

    def keep(self, http: httpx.Client) -> None:
        """Apply the deadline to all connections of *http*, which has none yet."""
        # httpcore has a parameter for this, but httpx does not pass it on. If another version
        # renames these attributes, httpx's own timeouts still bound each wait.
        for each in (http._transport, *http._mounts.values()):
            pool = getattr(each, "_pool", None)
            backend = getattr(pool, "_network_backend", None)
            if isinstance(backend, httpcore.NetworkBackend):
                pool._network_backend = _Backend(backend, self)  # type: ignore[union-attr]


class _Backend(httpcore.NetworkBackend):
    """A network backend whose connections keep a deadline."""

    def __init__(self, inner: httpcore.NetworkBackend, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left_s(timeout, httpcore.ConnectTimeout)
        stream = self._inner.connect_tcp(host, port, left_s, local_address, socket_options)
        return _Stream(stream, self._deadline)


class _Stream(httpcore.NetworkStream):
    """A connection that keeps a deadline."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _PIECE_BYTES):
            left_s = self._deadline.left_s(timeout, httpcore.WriteTimeout)
            self._inner.write(buffer[at : at + _PIECE_BYTES], left_s)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = self._deadline.left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left_s), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def context_of(options: Options, urls: Sequence[str]) -> ssl.SSLContext:
    """Return an SSL context for the files in *options*, or httpx's own.

    Without files and ``https://`` it trusts no certificate: httpx's own takes 40 ms to make.
    Raises InvalidParameterError if the files cannot be used.
    """
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if ca is None and cert is None:
        if all(httpx.URL(each).scheme != "https" for each in urls):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            return httpx.create_ssl_context(trust_env=options.trust_env)
        except OSError as error:
            raise InvalidParameterError(
                f"SSL_CERT_FILE {os.environ.get('SSL_CERT_FILE')} cannot be used:"
                f" {getattr(error, 'reason', None) or error.strerror}; give a PEM file"
            ) from error
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            # Without a password callback OpenSSL would ask the terminal for one.
            context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        raise InvalidParameterError(
            f"tls_ca {ca}, tls_cert {cert} and tls_key {key} cannot be used:"
            f" {getattr(error, 'reason', None) or error.strerror}; give PEM files, and the key of"
            " the certificate without a password"
        ) from error
    return context


#: Adaptive hedges use the latest answers, at most and at least so many.
_SEEN_MAX: Final = 200
_SEEN_MIN: Final = 20
_PERCENTILE: Final = 0.95
_TRY_LATER: Final = frozenset({408, 425, 429})
#: Token conflicts, and tokens that are too old.
_ABOUT_TOKENS: Final = frozenset({409, 410})
#: How much one answer of two says about the request; a higher one wins.
_NOT_SENT: Final = 0
_REFUSES: Final = 1
_NO_ANSWER: Final = 2
_UNKNOWN: Final = 3
_DECIDES: Final = 4
_TTL_DIGITS_MAX: Final = 15
_UNWATCHED: Final = Watch()
_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100)
#: Operations that the service may reject before it starts them, and the share of the attempt's
#: time that such a request may queue there.
_WRITES: Final = frozenset(
    {"add", "add-and-get", "clear", "delete", "atomic/add", "batch/add", "cancel"}
    | {"hold", "settle", "release", "extend"},
)
_QUEUE_SHARE: Final = 0.5
#: Operations whose answers have many items; all other answers are small.
_MANY: Final = frozenset(
    {"atomic/add", "batch/add", "batch/get", "busiest", "counters", "events", "history", "holds"}
    | {"namespaces", "openapi", "tokens"}
)
_PART_BYTES: Final = 64 * 1024
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_LOG: Final = logging.getLogger(__name__)
#: There was no connection, so nothing was sent.
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL)
_ENDED: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, zlib.error)


class Common:
    """What both transports share: base URLs, headers, and hooks."""

    def __init__(self, urls: Sequence[str], api_key: str | None, options: Options) -> None:
        # Python imports the codec at the first look-up of a host's name. A process that forks while
        # a thread of it does so never has it.
        codecs.lookup("idna")
        self.endpoints = Endpoints(urls)
        self.options = options
        self._proxies = proxies(urls) if options.trust_env else {}
        self._tls = context_of(options, urls)
        self.closed = False
        self._has_answered = False
        # Most answers are too small to be worth compressing.
        compact = {"Accept": "application/json", "Accept-Encoding": "identity"}
        self.headers = compact | authorization(api_key)

    def settings(
        self, make: type[httpx.HTTPTransport] | type[httpx.AsyncHTTPTransport]
    ) -> dict[str, Any]:
        """Return the arguments for every httpx client, whose proxied transports *make* makes."""
        return {
            "headers": self.headers,
            # Proxies and certificates of the environment are below.
            "trust_env": False,
            "mounts": {
                name: make(proxy=proxy, verify=self._tls, limits=_LIMITS)
                for name, proxy in self._proxies.items()
            },
            "verify": self._tls,
            "limits": _LIMITS,
        }

    def watch(self, send: Send, url: str, hedged: bool) -> Watch:
        """Call the program's hook before an attempt and return its Watch."""
        hook = self.options.before_attempt
        if hook is None:
            return _UNWATCHED
        method, _, operation = send.request[:3]
        try:
            return hook(Sending(method, operation, url, send.number, hedged))
        except Exception:
            _LOG.exception("a hook of the counter client failed before an attempt")
            return _UNWATCHED

    def record_attempt(
        self,
        send: Send,
        url: str,
        begin_s: float,
        answer: Answer,
        watch: Watch,
        *,
        hedged: bool = False,
    ) -> float:
        """Record whether *url* answered, call the hooks, and return the attempt's seconds."""
        took_s = time.perf_counter() - begin_s
        if isinstance(answer, Response):
            self.mark_reachable(url)
        else:
            self.endpoints.failed(url)
        if self.options.on_attempt is not None or watch is not _UNWATCHED:
            status = answer.status if isinstance(answer, Response) else None
            method, _, operation = send.request[:3]
            sent = not isinstance(answer, UnreachableError) or answer.sent
            attempt = Attempt(method, operation, url, send.number, hedged, status, took_s, sent)
            call_hook(self.options.on_attempt, attempt)
            call_hook(watch.ended, attempt)
        return took_s

    def mark_reachable(self, url: str) -> None:
        """Record that a server answered at *url*."""
        self._has_answered = True
        self.endpoints.mark_reachable(url)

    def streamed(self, request: Request) -> dict[str, Any]:
        """Return the httpx arguments for a stream, which may be silent between lines."""
        silence = httpx.Timeout(self.options.attempt_timeout_s, read=SILENCE_S)
        return {"headers": dict(HEADERS), "timeout": silence}

    def unreachable(self, url: str, error: BaseException, request: Request) -> UnreachableError:
        """Return the error for a *request* without an answer; permanent if a retry cannot help."""
        name = type(error).__name__
        sent = not isinstance(error, _UNSENT)
        way = by_proxy(url) if self.options.trust_env else ""
        detail = f"{url} does not answer{way}: {name} {error}".rstrip()
        found = UnreachableError(detail, sent=sent)
        if len(self.endpoints) == 1 and (_is_distrusted(error) or self._is_down(error, request)):
            found.retry = "never"
        found.__cause__ = error
        return found

    def _is_down(self, error: BaseException, request: Request) -> bool:
        """Whether a read need not be retried, because its connection was refused from the first."""
        is_awaited = self.options.wait_for_ready or self._has_answered
        is_read = request.operation not in _WRITES
        return is_read and not is_awaited and isinstance(error, httpx.ConnectError)

    def check_open(self) -> None:
        """Raise ClosedError if the client is closed."""
        if self.closed:
            raise ClosedError("the client is closed; make another one")


def _response_of(response: httpx.Response, body: bytes) -> Response:
    headers = response.headers
    location = headers.get("location") if response.is_redirect else None
    ttl = headers.get("idempotency-ttl", "")
    # Anything else is a proxy's; what is longer means the same.
    ttl_s = int(ttl[:_TTL_DIGITS_MAX]) if ttl.isascii() and ttl.isdecimal() else None
    etag = headers.get("etag")
    return Response(response.status_code, body, headers.get("retry-after"), location, ttl_s, etag)


def _is_distrusted(error: BaseException | None) -> bool:
    """Whether the server's certificate is not trusted, so that a retry would fail too."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _asked(send: Send, url: str, watch: Watch) -> dict[str, Any]:
    """Return the httpx arguments for an attempt."""
    method, path, operation, body, headers = send.request
    if operation in _WRITES:
        # The service rejects a request that queues longer than this, while there is still time to
        # receive the rejection.
        queue_limit = f"{max(1, int(send.timeout_s * _QUEUE_SHARE * 1_000))}ms"
        headers = (*headers, ("Request-Timeout", queue_limit))
    return {
        "method": method,
        "url": url + path,
        "content": body,
        "headers": dict((*headers, *watch.headers)),
        "timeout": send.timeout_s,
    }


class Body:
    """Read the body of *response*, compressed or not, up to a bound; *what* is the operation."""

    def __init__(self, response: httpx.Response, what: str) -> None:
        self._what = what
        many = what in _MANY and response.is_success
        self._bytes_max = ANSWER_BYTES_MAX if many else ANSWER_ONE_BYTES_MAX
        #: The start of an error is enough: a proxy may send a long page.
        self._may_cut = not response.is_success
        self._parts: list[bytes] = []
        self._bytes = 0
        # Not requested, but a proxy may compress anyway.
        packing = response.headers.get("content-encoding", "identity").strip().lower()
        self._unpack = None
        if packing in ("gzip", "x-gzip", "deflate"):
            self._unpack = zlib.decompressobj(_GZIP_OR_ZLIB)
        elif packing not in ("", "identity"):
            raise UnexpectedAnswerError(
                f"the answer has the content encoding {packing[:40]!r}, which was not requested"
            )

    def append(self, part: bytes) -> bool:
        """Add *part*; return whether to read on. Raises UnexpectedAnswerError past the bound."""
        for each in self.unpacked(part):
            self._parts.append(each)
            self._bytes += len(each)
            if self._bytes > self._bytes_max:
                if self._may_cut:
                    return False
                raise too_large(self._bytes_max, f"an answer to {self._what!r}")
        return True

    def unpacked(self, part: bytes) -> Iterator[bytes]:
        """Yield *part* uncompressed, in bounded parts: it may expand a thousandfold."""
        if self._unpack is None:
            yield part
            return
        while found := self._unpack.decompress(part, _PART_BYTES):
            yield found
            part = self._unpack.unconsumed_tail

    def whole(self) -> bytes:
        """Return the bytes read, up to the bound."""
        return b"".join(self._parts)[: self._bytes_max]


class _Lines:
    """Split a stream into lines of bounded length."""

    def __init__(self, response: httpx.Response) -> None:
        self._body = Body(response, "live")
        self._rest = b""

    def feed(self, part: bytes) -> Iterator[str]:
        """Yield the lines that end in *part*. Raises UnexpectedAnswerError past the bound."""
        for each in self._body.unpacked(part):
            *ended, self._rest = (self._rest + each).split(b"\n")
            for line in (*ended, self._rest):
                if len(line) > ANSWER_ONE_BYTES_MAX:
                    raise too_large(ANSWER_ONE_BYTES_MAX, "a line of a stream")
            for line in ended:
                yield line.removesuffix(b"\r").decode("utf-8", "replace")


def read_body(response: httpx.Response, what: str, end_s: float) -> bytes:
    """Read the whole body until *end_s* of time.perf_counter.

    Raises UnexpectedAnswerError if it is too large, and ReadTimeout if it is too slow."""
    body = Body(response, what)
    for part in response.iter_raw():
        if not body.append(part):
            break
        if time.perf_counter() > end_s:
            raise httpx.ReadTimeout("the answer comes too slowly")
    return body.whole()


async def _read_body(response: httpx.Response, what: str) -> bytes:
    """Read the whole body in an event loop; the caller bounds the time."""
    body = Body(response, what)
    async for part in response.aiter_raw():
        if not body.append(part):
            break
    return body.whole()


class SyncTransport(Common):
    """Send attempts in the calling thread. Thread-safe, and usable after a fork."""

    def __init__(self, urls: Sequence[str], api_key: str | None, options: Options) -> None:
        super().__init__(urls, api_key, options)
        self._deadline = Deadline()
        self._pool = os.getpid(), self._make_client()
        self._beginning = ProcessLock()
        #: Pools inherited by a fork: neither used nor closed here.
        self._inherited: list[httpx.Client] = []

    def _client(self) -> httpx.Client:
        """Return this process's pool: processes that share a connection would mix answers."""
        pid, http = self._pool
        if pid != os.getpid():
            with self._beginning.here():
                pid, http = self._pool
                if pid != os.getpid():
                    self._inherited.append(http)
                    http = self._make_client()
                    self._pool = os.getpid(), http
        return http

    def _make_client(self) -> httpx.Client:
        http = httpx.Client(**self.settings(httpx.HTTPTransport))
        self._deadline.keep(http)
        return http

    def send(self, send: Send) -> Answer:
        """Send one attempt and return its answer; connect, write and read share its time."""
        self.check_open()
        url = self.endpoints.pick(send.number)
        watch = self.watch(send, url, hedged=False)
        begin_s = time.perf_counter()
        answer: Answer
        try:
            with (
                self._deadline.at(begin_s + send.timeout_s),
                self._client().stream(**_asked(send, url, watch)) as response,
            ):
                end_s = begin_s + send.timeout_s
                answer = _response_of(response, read_body(response, send.request.operation, end_s))
        except _ENDED as error:
            answer = self.unreachable(url, error, send.request)
        except UnexpectedAnswerError as error:
            answer = error
        except BaseException:
            call_hook(watch.ended, None)
            raise
        self.record_attempt(send, url, begin_s, answer, watch)
        return answer

    def lines(self, request: Request, number: int) -> Iterator[str]:
        """Yield the lines of a stream over connection *number* until it ends.

        Raises the CounterError of another answer, and UnreachableError if the stream breaks."""
        self.check_open()
        url = self.endpoints.pick(number)
        asked = self.streamed(request)
        try:
            with self._client().stream("GET", url + request.path, **asked) as response:
                if response.status_code != httpx.codes.OK:
                    end_s = time.perf_counter() + self.options.attempt_timeout_s
                    body = read_body(response, request.operation, end_s)
                    raise error_of_answer(*_response_of(response, body)[:4])
                self.mark_reachable(url)
                lines = _Lines(response)
                for part in response.iter_raw():
                    yield from lines.feed(part)
        except _ENDED as error:
            self.endpoints.failed(url)
            raise self.unreachable(url, error, request) from error

    def close(self) -> None:
        """Close the connections."""
        self.closed = True
        pid, http = self._pool
        if os.getpid() == pid:
            http.close()


class AsyncTransport(Common):
    """Send attempts in an event loop, hedged if the options say so."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None, options: Options, budget: Budget
    ) -> None:
        super().__init__(urls, api_key, options)
        self._budget = budget
        self._seen_s: deque[float] = deque(maxlen=_SEEN_MAX)
        self._http = httpx.AsyncClient(**self.settings(httpx.AsyncHTTPTransport))
        self._loop: asyncio.AbstractEventLoop | None = None

    def _client(self) -> httpx.AsyncClient:
        """Return the pool, bound to the loop that used it first. Raises ClosedError in others."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise ClosedError(
                "the client belongs to another event loop: make one in each asyncio.run, and in"
                " each thread with its own loop"
            )
        return self._http

    async def send(self, send: Send) -> Answer:
        """Send an attempt and return its answer; if hedged, the first of two that decides it."""
        self.check_open()
        delay_s = self._hedge_after_s()
        if delay_s is None or delay_s >= send.timeout_s:
            return await self._once(send)
        first = asyncio.ensure_future(self._once(send))
        waiting: set[asyncio.Future[Answer]] = {first}
        try:
            done, _ = await asyncio.wait(waiting, timeout=delay_s)
            if done or self._budget.reserve(time.monotonic(), 0.0) is None:
                return await first
            waiting.add(asyncio.ensure_future(self._once(_next(send, delay_s), hedged=True)))
            found: list[Answer] = []
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found += [each.result() for each in done]
                best = max(found, key=lambda answer: _weight(send.request, answer))
                if not waiting or _weight(send.request, best) == _DECIDES:
                    return best
        finally:
            first.cancel()
            for each in waiting:
                each.cancel()
            await asyncio.gather(first, *waiting, return_exceptions=True)

    def _hedge_after_s(self) -> float | None:
        after = self.options.hedge_after_s
        if after != ADAPTIVE:
            return None if after is None else float(after)
        if len(self._seen_s) < _SEEN_MIN:
            return None
        return sorted(self._seen_s)[int(len(self._seen_s) * _PERCENTILE)]

    async def _once(self, send: Send, hedged: bool = False) -> Answer:
        url = self.endpoints.pick(send.number)
        watch = self.watch(send, url, hedged)
        begin_s = time.perf_counter()
        answer: Answer
        try:
            async with asyncio.timeout(send.timeout_s):
                async with self._client().stream(**_asked(send, url, watch)) as response:
                    body = await _read_body(response, send.request.operation)
                    answer = _response_of(response, body)
        except (*_ENDED, TimeoutError) as error:
            answer = self.unreachable(url, error, send.request)
        except UnexpectedAnswerError as error:
            answer = error
        except BaseException:
            # Usually a cancellation because the other hedge was faster.
            call_hook(watch.ended, None)
            raise
        took_s = self.record_attempt(send, url, begin_s, answer, watch, hedged=hedged)
        if isinstance(answer, Response):
            self._seen_s.append(took_s)
        return answer

    async def lines(self, request: Request, number: int) -> AsyncGenerator[str]:
        """As in :class:`SyncTransport`."""
        self.check_open()
        url = self.endpoints.pick(number)
        asked = self.streamed(request)
        try:
            async with self._client().stream("GET", url + request.path, **asked) as response:
                if response.status_code != httpx.codes.OK:
                    async with asyncio.timeout(self.options.attempt_timeout_s):
                        body = await _read_body(response, request.operation)
                    raise error_of_answer(*_response_of(response, body)[:4])
                self.mark_reachable(url)
                lines = _Lines(response)
                async for part in response.aiter_raw():
                    for line in lines.feed(part):
                        yield line
        except _ENDED as error:
            self.endpoints.failed(url)
            raise self.unreachable(url, error, request) from error

    async def close(self) -> None:
        """Close the connections."""
        self.closed = True
        if self._loop in (None, asyncio.get_running_loop()):
            await self._http.aclose()


def _next(send: Send, later_s: float) -> Send:
    """Return *send* for the next base URL, with the same end."""
    return send._replace(number=send.number + 1, timeout_s=send.timeout_s - later_s)


def _weight(request: Request, answer: Answer) -> int:
    """Rank *answer*, one of two to *request*, by how much it says about the outcome."""
    if isinstance(answer, UnreachableError):
        return _NO_ANSWER if answer.sent else _NOT_SENT
    if isinstance(answer, UnexpectedAnswerError):
        return _NO_ANSWER
    if is_fault(answer.status) or answer.status in _TRY_LATER:
        return _UNKNOWN
    if answer.status in _ABOUT_TOKENS or 200 <= answer.status < 300:
        return _DECIDES
    if request.operation not in _WRITES:
        return _DECIDES
    if isinstance(error_of_answer(*answer[:4]), UnexpectedAnswerError):
        # A proxy answered: the service may have counted it.
        return _UNKNOWN
    # If one server refused a write, the other may still have counted it.
    return _REFUSES


#: The service sends something every 15 s; after so long the connection is dead.
SILENCE_S: Final = 40.0
#: Request headers of a stream.
HEADERS: Final = (("Accept", "text/event-stream"),)
LiveUpdate = answers.Count | CounterError


class LiveStream:
    """The state of one counter's stream across connections."""

    def __init__(self, call: Call[answers.Count], policy: Policy) -> None:
        self.request = call.request
        self.number = 0
        self._call = call
        self._policy = policy
        self._failures = 0
        #: When the latest sign of a counter service came, an update or a comment, and whether this
        #: connection had one.
        self._heard_s = policy.now_s()
        self._is_empty = True
        self._event = self._data = ""

    def line(self, text: str) -> LiveUpdate | None:
        """Parse *text*, the next line; return an update if one is complete.

        Raises a permanent CounterError."""
        name, _, value = text.partition(":")
        if name == "event":
            self._event = value.strip()
        elif name == "data":
            self._data += value.strip()
            if len(self._data) > ANSWER_ONE_BYTES_MAX:
                raise too_large(ANSWER_ONE_BYTES_MAX, "an event of a stream")
        elif not text:
            event, data = self._event, self._data
            self._event = self._data = ""
            update = _update_of(self._call, event, data)
            if update is not None:
                self._hear()
            return update
        elif not name:
            self._hear()
        return None

    def _hear(self) -> None:
        self._heard_s, self._failures, self._is_empty = self._policy.now_s(), 0, False

    def pause_s(self, error: CounterError | None) -> float:
        """Return the seconds before the next connection, after *error* or a regular end.

        A connection without a sign of a counter service is an error too: a page of something else
        would be read again and again. Raises the error if it is permanent, or if no sign came for
        ``deadline_s``."""
        self.number += 1
        if error is None and self._is_empty:
            error = unexpected(200, self._data.encode())
        self._event, self._data, self._is_empty = "", "", True
        if error is None:
            return self._policy.draw(self._policy.options.backoff_first_s)
        silent_s = self._policy.now_s() - self._heard_s
        # The wait that the service asks for counts as silence.
        silent_s += (error.retry_after_us or 0) / 1e6
        is_over = silent_s >= self._policy.options.deadline_s
        if error.retry == "never" or is_over:
            raise error
        self._failures += 1
        return self._policy.pause_s(self._failures, error)


def _update_of(call: Call[answers.Count], event: str, data: str) -> LiveUpdate | None:
    if event == "count":
        count: answers.Count = call.result(Response(200, data.encode()))
        return count
    if event != "problem":
        return None
    error = error_of_answer(503, data.encode(), None)
    if error.retry == "never" or isinstance(error, UnexpectedAnswerError):
        raise error
    return error
