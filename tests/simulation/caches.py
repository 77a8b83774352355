"""memcached and Redis as servers of their own, which processes ask over a network.

The adapters are production's, down to the commands that they send. A thread of theirs is a
greenlet: where it would block in a socket, the loop goes on, and comes back with the response or
the time-out.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from greenlet import getcurrent, greenlet
from hiredis import ReplyError

from counter.limits import INT64_MAX, INT64_MIN, MILLISECOND, SECOND
from counter.ports import Cache, Clock
from counter.storage.memcached.cache import MemcachedCache
from counter.storage.memcached.connection import NO_NUMBER
from counter.storage.redis.cache import _PUT, RedisCache
from counter.storage.shared.cache_entries import unpack_count
from counter.storage.shared.cache_lane import NotConnectedError
from tests.simulation.loop import run_in

#: Shorter than in production, as all times of a run are.
TIMEOUT_US: Final = 50 * MILLISECOND
_DELAY_US: Final = MILLISECOND
#: In the key of a count.
_COUNT: Final = b":count:"
_END: Final = b"\r\n"


class _Held(NamedTuple):
    """A value, when it expires, and the number of the change that made it."""

    value: bytes
    until_us: int | None
    version: int


class CacheServer:
    """The values of a server: at most *items_max*, by least recent use; 0 is no bound."""

    def __init__(
        self, at: Callable[..., None], now_us: Callable[[], int], random: Random, items_max: int = 0
    ) -> None:
        self.at = at
        self._now_us = now_us
        self._random = random
        self.items_max = items_max
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._version = 0
        #: Another one after each restart, and None while it is down.
        self.life: int | None = 1
        self._lives = 1
        #: The chance of a request that takes up to *slow_us*, and of a response that is lost.
        self.slow = self.lost = 0.0
        self.slow_us = 0
        #: Called with each of the situations that seeds must reach.
        self.reach: Callable[[str], object] = lambda _: None

    def restart(self, for_us: int) -> None:
        """Lose everything, and be down for so long."""
        if self._held:
            self.reach("cache-restarts")
        self._held.clear()
        self._lives += 1
        self.life = None
        self.at(for_us, self.start)

    def start(self) -> None:
        """Be there, and empty if it was down."""
        self.life = self._lives

    def calm(self) -> None:
        """Answer everything in time from now on."""
        self.slow = self.lost = 0.0

    def delay_us(self) -> int:
        """How long a message takes."""
        if self.slow and self._random.random() < self.slow:
            return int(self._random.random() * self.slow_us)
        return 1 + int(self._random.random() * _DELAY_US)

    def loses(self) -> bool:
        """Whether a response is lost."""
        return self.lost > 0 and self._random.random() < self.lost

    # The effects of commands.

    def get(self, key: bytes) -> _Held | None:
        """The value of *key*, if there is one."""
        held = self._held.get(key)
        if held is not None and held.until_us is not None and held.until_us <= self._now_us():
            del self._held[key]
            return None
        if held is not None:
            self._held.move_to_end(key)
        return held

    def set(self, key: bytes, value: bytes, ttl_us: int | None) -> None:
        """Hold *value* for *ttl_us*; None is without end."""
        self._version += 1
        until_us = None if ttl_us is None else self._now_us() + ttl_us
        self._held[key] = _Held(value, until_us, self._version)
        self._held.move_to_end(key)
        if self.items_max and len(self._held) > self.items_max:
            self._held.popitem(last=False)
            self.reach("cache-evicts")

    def delete(self, key: bytes) -> bool:
        """Forget *key*; whether it was there."""
        was_there = self.get(key) is not None
        self._held.pop(key, None)
        return was_there


class _Thread:
    """Replaces :class:`counter.storage.shared.bridge.Worker`: yields to the loop when it waits."""

    def __init__(
        self, name: str, work: Callable[[Any], Any], done: Callable[[Any, Any], None]
    ) -> None:
        self._work = work
        self._done = done
        self._sent: deque[Any] = deque()
        self._running: greenlet | None = None

    def start(self) -> None:
        """Belong to the process that calls."""
        self._loop, self._context = asyncio.get_running_loop(), copy_context()

    def send(self, item: Any) -> None:
        """Work on *item* after all that was sent before."""
        self._sent.append(item)
        if self._running is None:
            self._running = greenlet(self._run)
            self._go_on(None)

    def stop(self) -> None:
        """Do nothing: the rest of it is collected."""

    def _run(self, _: None) -> Any:
        try:
            return self._work(self._sent[0])
        except Exception as error:
            return error

    def _go_on(self, answer: Any) -> None:
        """Run up to its next wait, or to the end."""
        running, context = self._running, self._context
        if running is None:
            raise RuntimeError("nothing runs")
        result = running.switch(answer)
        if running.dead:
            self._loop.call_soon(self._end, result, context=context)
        else:
            result(partial(run_in, context, self._go_on))

    def _end(self, result: Any) -> None:
        self._running = None
        # Then the next batch may be sent.
        self._done(self._sent.popleft(), result)


class _Connection:
    """A connection to a server. The next caller discards a response that was given up."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server
        self._life: int | None = None
        self._answers: deque[Any] = deque()
        self._wake: Callable[[Any], None] | None = None

    def close(self) -> None:
        """Read none of the responses that are on their way."""
        self._life = None
        self._answers = deque()

    def ask(self, serve: Callable[[], Any]) -> Any:
        """Have the server do *serve*, and return its response. Raises NotConnectedError,
        OSError."""
        server = self._server
        if self._life != server.life or self._answers:
            self.close()
        if server.life is None:
            raise NotConnectedError("refused")
        self._life = server.life
        loop = getcurrent().parent
        if loop is None:
            raise RuntimeError("it would block the event loop")
        answer = loop.switch(partial(self._send, serve))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, serve: Callable[[], Any], wake: Callable[[Any], None]) -> None:
        server, answers = self._server, self._answers
        self._wake = wake
        server.at(TIMEOUT_US, self._give_up, wake)
        server.at(server.delay_us(), self._arrive, self._life, serve, answers, wake)

    def _arrive(
        self,
        life: int | None,
        serve: Callable[[], Any],
        answers: deque[Any],
        wake: Callable[[Any], None],
    ) -> None:
        """Serve a request, whether its client waits or not."""
        server = self._server
        answer: Any = ConnectionResetError("the server was restarted")
        if server.life == life:
            answer = serve()
            if self._wake is not wake:
                server.reach("cache-late")
            if server.loses():
                return
        server.at(server.delay_us(), self._land, answers, answer)

    def _land(self, answers: deque[Any], answer: Any) -> None:
        answers.append(answer)
        if answers is self._answers and self._wake is not None:
            wake, self._wake = self._wake, None
            wake(answers.popleft())

    def _give_up(self, wake: Callable[[Any], None]) -> None:
        if self._wake is wake:
            self._wake = None
            self._server.reach("cache-times-out")
            wake(TimeoutError())


class _ToMemcached(_Connection):
    """As :class:`counter.storage.memcached.connection.MemcachedConnection`."""

    def get_many(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """The values of those keys that are there."""
        found = {key: held.value for key, held in self._found(list(keys)).items()}
        if any(_COUNT in key for key in found):
            self._server.reach("memcached")
        return found

    def gets_many(self, keys: Iterable[bytes]) -> Mapping[bytes, tuple[bytes, bytes]]:
        """The same with each value's version."""
        found = self._found(list(keys))
        return {key: (held.value, b"%d" % held.version) for key, held in found.items()}

    def pipeline(self, commands: Sequence[bytes]) -> Sequence[bytes]:
        """The line that answers each command."""
        if not commands:
            return []
        answers: Sequence[bytes] = self.ask(lambda: [self._answer(each) for each in commands])
        return answers

    def _found(self, keys: Sequence[bytes]) -> Mapping[bytes, _Held]:
        get = self._server.get
        if not keys:
            return {}
        found: Mapping[bytes, _Held] = self.ask(
            lambda: {key: held for key in keys if (held := get(key)) is not None}
        )
        return found

    def _answer(self, command: bytes) -> bytes:
        line, _, rest = command.partition(_END)
        verb, *words = line.split()
        if verb == b"version":
            return b"VERSION 1.6"
        key = words[0]
        held = self._server.get(key)
        if verb == b"delete":
            return b"DELETED" if self._server.delete(key) else b"NOT_FOUND"
        if verb == b"incr":
            return self._incremented(key, held, int(words[1]))
        if verb == b"add" and held is not None:
            return b"NOT_STORED"
        if verb == b"cas" and held is None:
            return b"NOT_FOUND"
        if verb == b"cas" and held is not None and words[4] != b"%d" % held.version:
            return b"EXISTS"
        self._server.set(key, rest.removesuffix(_END), int(words[2]) * SECOND or None)
        return b"STORED"

    def _incremented(self, key: bytes, held: _Held | None, by: int) -> bytes:
        if held is None:
            return b"NOT_FOUND"
        if not held.value.isdigit():
            return NO_NUMBER
        value = b"%d" % ((int(held.value) + by) % 2**64)
        self._server.set(key, value, None)
        return value


class _ToRedis(_Connection):
    """As :class:`counter.storage.redis.connection.RedisConnection`."""

    def exchange(self, commands: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """The reply to each command."""
        replies: Sequence[Any] = self.ask(lambda: [self._reply(*each) for each in commands])
        return replies

    def _reply(self, verb: str, *words: Any) -> Any:
        server = self._server
        if verb == "MGET":
            found = [server.get(key) for key in words]
            if any(held and _COUNT in key for key, held in zip(words, found, strict=True)):
                server.reach("redis")
            return [held and held.value for held in found]
        if verb == "DEL":
            return int(server.delete(words[0]))
        if verb == "EVAL":
            return self._put(*words)
        held = server.get(words[0])
        if verb == "SET":
            key, value, *how, ttl = words
            units = {("NX", "GET", "EX"): SECOND, ("NX", "GET", "PX"): MILLISECOND}
            if held is None:
                server.set(key, value, ttl * units[tuple(how)])
            return held and held.value
        if verb == "INCRBY":
            value = int(held.value if held is not None else 0) + words[1]
            if not INT64_MIN <= value <= INT64_MAX:
                return ReplyError("ERR increment or decrement would overflow")
            server.set(words[0], b"%d" % value, None)
            return value
        raise NotImplementedError(f"{verb} of Redis")

    def _put(self, script: str, count: int, *words: Any) -> int:
        """The effect of the adapter's script."""
        if script != _PUT:
            raise NotImplementedError(script)
        keys, rest = words[:count], words[count:]
        for place, key in enumerate(keys):
            time_us, value, ttl_s = rest[3 * place : 3 * place + 3]
            held = self._server.get(key)
            found = unpack_count(held.value) if held is not None else None
            if found is None or found.time_us <= time_us:
                self._server.set(key, value, ttl_s * SECOND)
        return 0


def cache_over(kind: str, servers: Sequence[CacheServer], clock: Clock) -> Cache:
    """Production's cache of a process, over *servers* of that kind."""
    with patch("counter.storage.shared.cache_lane.Worker", _Thread):
        if kind == "redis":
            with patch(
                "counter.storage.redis.cache.RedisConnection", lambda _: _ToRedis(servers[0])
            ):
                return RedisCache("redis://simulated", "simulated", clock, timeout_us=TIMEOUT_US)

        def connection(_: str, port: int, __: float) -> _ToMemcached:
            return _ToMemcached(servers[port])

        addresses = [("simulated", port) for port in range(len(servers))]
        with patch("counter.storage.memcached.cache.MemcachedConnection", connection):
            return MemcachedCache(addresses, clock, timeout_us=TIMEOUT_US)
