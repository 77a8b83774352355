"""The shared state of a process's connections: bounds and metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from prometheus_client.core import Metric

from counter.core.admission import Bounded
from counter.limits import CONNECTIONS_MAX, SECOND, UNFINISHED_BYTES_MAX
from counter.telemetry.families import counters, gauge

#: Why the server closed a connection.
FULL: Final = "full"
#: Closed for a new one, because it had sent nothing.
UNUSED: Final = "unused"
LATE: Final = "late"
MALFORMED: Final = "malformed"
UNTAKEN: Final = "untaken"
HANDSHAKE: Final = "handshake"
#: How long one turn of the event loop reads large segments and does the work of their requests.
_READ_FOR_S: Final = 0.01
#: How long one request may work before the next one's turn. Most finish in this time.
_STEPS_FOR_S: Final = 0.002
#: How long a connection stays open between two requests.
_KEEP_ALIVE_S: Final = 5.0
#: The same behind a proxy: longer than load balancers keep idle connections (Google's for 600 s).
#: If the service closed one first, a request that is on its way would get no response.
PROXY_KEEP_ALIVE_S: Final = 650.0
_T = TypeVar("_T")
#: Work that yields after each part, which takes a millisecond at most, and returns its result.
Steps: TypeAlias = Generator[None, None, _T]


class Reader(Protocol):
    """A connection with a segment that is not read yet."""

    def read_until(self, end_s: float) -> bool:
        """Read until this instant of the queue's clock; return whether more can be read."""
        ...


class ReadQueue:
    """Reads large segments of all connections, and does the work that large requests cause, in
    turn: for a bounded time in each turn of the event loop. Small segments do not wait for it.

    Answers come first, because they complete requests and are short. Segments come next, for half
    of the time, so that an overloaded process can reject new requests early."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        #: The clock of instants, in seconds: it never steps back.
        self.now_s = now_s
        self._answers: deque[Reader] = deque()
        self._segments: deque[Reader] = deque()
        self._work: deque[Reader] = deque()
        #: Until when this turn reads; None if none has begun.
        self._end_s: float | None = None

    def read(self, reader: Reader) -> None:
        """Read from *reader*, at once if this turn has time left."""
        self._add(self._segments, reader)

    async def run(self, steps: Steps[_T]) -> _T:
        """Do the work of *steps*, in turn with all others; return its result."""
        return await self._run(self._work, steps)

    async def answer(self, steps: Steps[_T]) -> _T:
        """Make an answer by *steps*, in turn with all others; return it."""
        return await self._run(self._answers, steps)

    async def _run(self, queue: deque[Reader], steps: Steps[_T]) -> _T:
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._add(queue, _Work(steps, result, self.now_s))
        try:
            return await result
        finally:
            # The traceback of an error refers to this frame.
            del result

    def _add(self, queue: deque[Reader], reader: Reader) -> None:
        queue.append(reader)
        if self._end_s is None:
            self._begin()
        elif len(queue) == 1:
            self._read()

    def _begin(self) -> None:
        """Begin a turn that has something to do."""
        if not (self._answers or self._segments or self._work):
            self._end_s = None
            return
        self._end_s = self.now_s() + _READ_FOR_S
        asyncio.get_running_loop().call_soon(self._begin)
        self._read()

    def _read(self) -> None:
        end_s = self._end_s or 0.0
        self._read_from(self._answers, end_s)
        self._read_from(self._segments, end_s - _READ_FOR_S / 2)
        self._read_from(self._work, end_s)
        self._read_from(self._segments, end_s)

    def _read_from(self, queue: deque[Reader], end_s: float) -> None:
        while queue and self.now_s() < end_s:
            reader = queue.popleft()
            if reader.read_until(end_s):
                queue.append(reader)


class _Work(Generic[_T]):
    """The steps of one request, as a :class:`Reader`."""

    def __init__(
        self, steps: Steps[_T], result: asyncio.Future[_T], now_s: Callable[[], float]
    ) -> None:
        self._steps = steps
        self._result: asyncio.Future[_T] | None = result
        self._now_s = now_s

    def read_until(self, end_s: float) -> bool:
        """Do steps for a short time, so that short requests do not wait for long ones."""
        end_s = min(end_s, self._now_s() + _STEPS_FOR_S)
        while self._result is not None and not self._result.cancelled():
            try:
                next(self._steps)
            except StopIteration as end:
                self._result.set_result(end.value)
                return False
            except Exception as error:
                self._fail(error)
                return False
            if self._now_s() >= end_s:
                return True
        self._steps.close()
        return False

    def _fail(self, error: Exception) -> None:
        """End with *error*, and forget it: its traceback refers to this object and to the request's
        body, and only the garbage collector would free such a cycle."""
        if self._result is not None:
            self._result.set_exception(error)
        self._result = None


class Shares:
    """Limits how much each of many holders may have of something at once."""

    def __init__(self, most: int) -> None:
        """Allow each holder *most*; 0 means no limit."""
        self.most = most
        self._held: dict[str, int] = {}

    def acquire(self, holder: str) -> bool:
        """Count one more for *holder*; return False, counting nothing, if it has its share."""
        held = self._held.get(holder, 0)
        if self.most and held >= self.most:
            return False
        self._held[holder] = held + 1
        return True

    def release(self, holder: str) -> None:
        """Count one less for *holder*."""
        held = self._held.get(holder, 0)
        if held > 1:
            self._held[holder] = held - 1
        else:
            self._held.pop(holder, None)


class Connections:
    """The connections of one process: their limits, and how many were closed by reason."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.open: set[Any] = set()
        #: Tasks that answer their requests.
        self.tasks: set[asyncio.Task[None]] = set()
        self.most = CONNECTIONS_MAX
        self.request_timeout_us = 10 * SECOND
        self.keep_alive_s = _KEEP_ALIVE_S
        #: Whether the process is shutting down; then each response is its connection's last.
        self.is_draining = False
        self.unfinished = Bounded("bytes of unfinished requests are held", UNFINISHED_BYTES_MAX)
        self.queue = ReadQueue(now_s)
        #: Connections that have sent nothing yet, the oldest first.
        self.silent: dict[asyncio.Protocol, asyncio.Transport] = {}
        #: Limits the connections per address.
        self.peers = Shares(0)
        #: When the server's certificate expires, in Unix time; 0 if there is none.
        self.certificate_ends_at_s: Callable[[], float] = lambda: 0.0
        self.ended = dict.fromkeys((FULL, UNUSED, LATE, MALFORMED, UNTAKEN, HANDSHAKE), 0)

    @property
    def is_nearly_full(self) -> bool:
        """Return whether most of the allowed connections are in use."""
        return 4 * len(self.open) >= 3 * self.most

    def make_room(self) -> bool:
        """Close the oldest connection that has sent nothing, for a new one; return False if there
        is none."""
        if not self.silent:
            return False
        self.silent.pop(next(iter(self.silent))).abort()
        self.count_end(UNUSED)
        return True

    def count_end(self, why: str) -> None:
        """Count a closed or rejected connection."""
        self.ended[why] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        yield gauge("connections", "Connections that are open.", len(self.open))
        yield gauge("connections_limit", "How many there may be at once.", self.most)
        text = "Connections that were ended, or not let in, by why."
        yield counters("connections_ended", text, "reason", self.ended)
        text = "When the server's certificate ends; 0 where there is none."
        yield gauge("certificate_end_timestamp_seconds", text, self.certificate_ends_at_s())


def peer_of(address: object) -> str:
    """Return the client of a socket's *address*: for IPv6 the /64, which one client usually has."""
    if not isinstance(address, tuple) or not address:
        return ""
    host = str(address[0])
    if ":" not in host:
        return host
    found = ipaddress.IPv6Address(host.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
