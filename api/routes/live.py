"""Stream a counter's count as it changes, by server-sent events.

All streams of one counter in this process share one read of it, twice a second. A stream ends after
a fixed time, on shutdown, and when its key is no longer valid for the namespace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import Query

from api.http.auth import Authorizer
from api.http.call import Call
from api.http.models import NoQuery
from api.http.problems import problem_bytes
from api.http.responses import Response, count_text
from api.http.routing import COUNTER, CallOf, EventStream, InNamespace, route
from api.http.streaming import EVENT_STREAM, StreamResponse, Streams, stream_of
from counter import limits
from counter.api_keys import Scope
from counter.core.read import Count
from counter.core.service import CounterService
from counter.errors import CounterError, NamespaceUnknownError, is_fault
from counter.limits import SECOND
from counter.types import Namespace

_log = logging.getLogger("counter.api")
_HEARTBEAT_S: Final = 15.0
#: An unchanged count is sent again after this time, for its instant.
_AGAIN_S: Final = 5.0
_BEAT: Final = b": still here\n\n"
_EVENT: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "event": {"enum": ["count", "problem", "end"]},
        "data": {"type": "string", "description": "JSON; of a `count` it is what a GET answers."},
    },
    "required": ["event", "data"],
}
_BYE: Final = b"event: end\ndata: {}\n\n"


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _Watch:
    """One counter that is polled for all its streams."""

    namespace: Namespace
    counter: str
    latest: Count | CounterError
    watchers: int = 0
    #: Set at each read, and then replaced, so that each waiting stream sees each read.
    looked: asyncio.Future[None] = field(default_factory=_future)
    task: asyncio.Task[None] | None = None


class LiveRoutes:
    """The handler of ``live``, and its open streams."""

    def __init__(
        self,
        service: CounterService,
        authorizer: Authorizer,
        *,
        shares_by_address: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._authorizer = authorizer
        self._now_s = now_s
        self.streams = Streams(
            "live streams",
            "read the count by GET",
            limits.LIVE_STREAMS_MAX,
            limits.LIVE_STREAMS_PER_KEY_MAX,
            limits.LIVE_STREAMS_PER_ADDRESS_MAX if shares_by_address else 0,
        )
        #: How long each may last, and the time between two reads.
        self.stream_s = limits.LIVE_STREAM_US / SECOND
        self.look_s = limits.LIVE_LOOK_US / SECOND
        self._watches: dict[tuple[int, str], _Watch] = {}

    @route(
        "GET",
        f"{COUNTER}/live",
        Scope.READ,
        tag="counters",
        response_class=EventStream,
        responses={200: {"content": {"text/event-stream": {"schema": _EVENT}}}},
    )
    async def watch_counter(
        self, call: CallOf, namespace: InNamespace, query: Annotated[NoQuery, Query()]
    ) -> Response:
        """A counter's count as it changes, by server-sent events."""
        first = await self._service.reader.read_one(namespace, call.counter, None)
        end = self.streams.count(call)
        watch = self._join(namespace, call.counter, first)
        return StreamResponse.of(
            EVENT_STREAM,
            stream_of(lambda: self._pieces(call, watch)),
            lambda: self._end(watch, end),
        )

    def close(self) -> None:
        """End all streams and accept no more, on shutdown."""
        self.streams.is_closed = True
        for watch in self._watches.values():
            _wake(watch)

    def _join(self, namespace: Namespace, counter: str, first: Count) -> _Watch:
        key = (namespace.id, counter)
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(namespace, counter, first)
            watch.task = asyncio.create_task(self._poll(watch))
        watch.watchers += 1
        return watch

    def _end(self, watch: _Watch, end: Callable[[], None]) -> None:
        end()
        watch.watchers -= 1
        if not watch.watchers:
            del self._watches[watch.namespace.id, watch.counter]
            if watch.task is not None:
                watch.task.cancel()

    async def _poll(self, watch: _Watch) -> None:
        """Poll the counter until it has no streams."""
        while True:
            await asyncio.sleep(self.look_s)
            try:
                namespace = self._service.namespaces.get(watch.namespace.name)
                if namespace.id != watch.namespace.id:
                    raise NamespaceUnknownError(
                        f"namespace {namespace.name!r} was deleted, and is another one now"
                    )
                watch.latest = await self._service.reader.read_one(namespace, watch.counter, None)
            except CounterError as error:
                watch.latest = error
            except Exception:
                _log.exception("a read for a live count failed unexpectedly")
                watch.latest = CounterError("internal error; see the server log")
            _wake(watch)

    async def _pieces(self, call: Call, watch: _Watch) -> AsyncGenerator[bytes, None]:
        """Yield the events of one stream."""
        sent: tuple[object, ...] = ()
        sent_s = beat_s = began_s = self._now_s()
        while not self.streams.is_closed:
            found, looked, now_s = self._seen(call, watch), watch.looked, self._now_s()
            what = _what(found)
            again = now_s - sent_s >= _AGAIN_S and not isinstance(found, CounterError)
            if what != sent or again:
                sent, sent_s, beat_s = what, now_s, now_s
                yield _event(watch.namespace.name, found)
            elif now_s - beat_s >= _HEARTBEAT_S:
                beat_s = now_s
                yield _BEAT
            if isinstance(found, CounterError) and not is_fault(found.status):
                # A client error: waiting does not change it.
                return
            if now_s - began_s >= self.stream_s:
                break
            # If a read takes long, a heartbeat shows the client that the stream is alive.
            await asyncio.wait((looked,), timeout=_HEARTBEAT_S)
        yield _BYE

    def _seen(self, call: Call, watch: _Watch) -> Count | CounterError:
        """Return what the stream of *call* may send now: its key may have been revoked."""
        try:
            caller = self._authorizer.caller(call.header(b"authorization"))
            caller.require(Scope.READ, watch.namespace.name)
        except CounterError as error:
            return error
        return watch.latest


def _wake(watch: _Watch) -> None:
    looked, watch.looked = watch.looked, _future()
    if not looked.done():
        looked.set_result(None)


def _what(found: Count | CounterError) -> tuple[object, ...]:
    """Return the part of a count that is sent at once when it changes."""
    if isinstance(found, CounterError):
        return (found.code,)
    return found.count, found.accuracy


def _event(name: str, found: Count | CounterError) -> bytes:
    if isinstance(found, CounterError):
        return b"event: problem\ndata: %s\n\n" % problem_bytes(found)
    return b"event: count\ndata: %s\n\n" % count_text(name, found).encode()
