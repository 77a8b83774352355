"""Requests over httpx: pooled connections, one attempt at a time, and hedges."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import httpx

from counter.client.calls import Reply
from counter.client.failures import ClosedError, UnreachableError
from counter.client.options import ADAPTIVE, Attempt, Options, tell
from counter.client.retrying import Answer, Budget, Send
from counter.errors import InvalidParameterError

T = TypeVar("T")
#: Adaptive hedges: how many of the latest answers are looked at, and how many it takes.
_SEEN_MAX: Final = 200
_SEEN_MIN: Final = 20
_PERCENTILE: Final = 0.95
_SERVER_FAULTS: Final = 500
_TRY_LATER: Final = frozenset({408, 425, 429})
_ENDED: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)


class Common:
    """What both transports share: base URLs, headers, and who is told of attempts."""

    def __init__(self, urls: Sequence[str], api_key: str | None, options: Options) -> None:
        if not urls:
            raise InvalidParameterError("no base URL is given; one is needed")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise InvalidParameterError(
                    f"the base URL {url!r} must begin with http:// or https://"
                )
        self.urls = [url.rstrip("/") for url in urls]
        self.options = options
        self.closed = False
        # A byte each way would be spent on compressing what is small.
        self.headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def url(self, send: Send) -> str:
        """Where an attempt goes: each to the next base URL."""
        return self.urls[send.number % len(self.urls)]

    def settings(self) -> dict[str, Any]:
        """What every httpx client is made with."""
        return {
            "headers": self.headers,
            "trust_env": self.options.trust_env,
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=100),
        }

    def note(self, send: Send, begin_s: float, answer: Answer, hedged: bool) -> float:
        """Tell of an attempt that ended; its seconds."""
        took_s = time.perf_counter() - begin_s
        if self.options.on_attempt is not None:
            status = answer.status if isinstance(answer, Reply) else None
            method, _, operation = send.request[:3]
            attempt = Attempt(
                method, operation, self.url(send), send.number, hedged, status, took_s
            )
            tell(self.options.on_attempt, attempt)
        return took_s

    def check_open(self) -> None:
        """Raise ClosedError after the end."""
        if self.closed:
            raise ClosedError("the client is closed; make another one")


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.content, response.headers.get("retry-after"))


def _unreachable(url: str, error: BaseException) -> UnreachableError:
    name = type(error).__name__
    found = UnreachableError(f"{url} does not answer: {name} {error}".rstrip())
    found.__cause__ = error
    return found


class SyncTransport(Common):
    """One attempt at a time, in the thread that asks. Works in threads, and after a fork."""

    def __init__(self, urls: Sequence[str], api_key: str | None, options: Options) -> None:
        super().__init__(urls, api_key, options)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._http = httpx.Client(**self.settings())

    def _client(self) -> httpx.Client:
        """The pool of this process: two processes on one connection would mix their answers."""
        if os.getpid() != self._pid:
            with self._lock:
                if os.getpid() != self._pid:
                    self._http = httpx.Client(**self.settings())
                    self._pid = os.getpid()
        return self._http

    def send(self, send: Send) -> Answer:
        """The answer to one attempt. Each step of it (connect, write, read) is bounded."""
        self.check_open()
        method, path, _, body, headers = send.request
        begin_s = time.perf_counter()
        answer: Answer
        try:
            answer = _reply(
                self._client().request(
                    method,
                    self.url(send) + path,
                    content=body,
                    headers=dict(headers),
                    timeout=send.timeout_s,
                )
            )
        except _ENDED as error:
            answer = _unreachable(self.url(send), error)
        self.note(send, begin_s, answer, hedged=False)
        return answer

    def close(self) -> None:
        """End the connections."""
        self.closed = True
        if os.getpid() == self._pid:
            self._http.close()


class AsyncTransport(Common):
    """Attempts in an event loop, hedged where the options say so."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None, options: Options, budget: Budget
    ) -> None:
        super().__init__(urls, api_key, options)
        self._budget = budget
        self._seen_s: deque[float] = deque(maxlen=_SEEN_MAX)
        self._http = httpx.AsyncClient(**self.settings())

    async def send(self, send: Send) -> Answer:
        """The answer to an attempt: the first definite one of two where it is hedged."""
        self.check_open()
        delay_s = self._hedge_after_s()
        if delay_s is None or delay_s >= send.timeout_s:
            return await self._once(send)
        first = asyncio.ensure_future(self._once(send))
        waiting: set[asyncio.Future[Answer]] = {first}
        try:
            done, _ = await asyncio.wait(waiting, timeout=delay_s)
            if done or self._budget.take(time.monotonic(), 0.0) is None:
                return await first
            waiting.add(asyncio.ensure_future(self._once(_next(send), hedged=True)))
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found = sorted((each.result() for each in done), key=_is_definite)
                if not waiting or _is_definite(found[-1]):
                    return found[-1]
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
        method, path, _, body, headers = send.request
        begin_s = time.perf_counter()
        answer: Answer
        try:
            async with asyncio.timeout(send.timeout_s):
                answer = _reply(
                    await self._http.request(
                        method,
                        self.url(send) + path,
                        content=body,
                        headers=dict(headers),
                        timeout=send.timeout_s,
                    )
                )
        except (*_ENDED, TimeoutError) as error:
            answer = _unreachable(self.url(send), error)
        took_s = self.note(send, begin_s, answer, hedged)
        if isinstance(answer, Reply):
            self._seen_s.append(took_s)
        return answer

    async def close(self) -> None:
        """End the connections."""
        self.closed = True
        await self._http.aclose()


def _next(send: Send) -> Send:
    return send._replace(number=send.number + 1)


def _is_definite(answer: Answer) -> bool:
    return (
        isinstance(answer, Reply)
        and answer.status < _SERVER_FAULTS
        and answer.status not in _TRY_LATER
    )


class HedgingTransport:
    """Hedges for threads: an event loop of its own sends, because only there a loser can be
    cancelled."""

    def __init__(self, make: Callable[[], AsyncTransport]) -> None:
        self._make = make
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="counter-hedges", daemon=True
        )
        self._thread.start()
        self._transport = self._run(self._made())

    async def _made(self) -> AsyncTransport:
        return self._make()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def send(self, send: Send) -> Answer:
        """The answer to an attempt, hedged."""
        self._transport.check_open()
        if os.getpid() != self._pid:
            # The thread of the loop is not in the child.
            self._start()
        return self._run(self._transport.send(send))

    def close(self) -> None:
        """End the connections and the loop."""
        if os.getpid() != self._pid or self._transport.closed:
            return
        self._run(self._transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
