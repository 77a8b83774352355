"""The load of ``scripts/capacity``: it runs in a process of its own, apart from the measured one.

``python -m benchmarks.capacity.load`` reads a :class:`Job` in JSON, keeps its connections busy for
as long as the job says, each with one request at a time, waits for the requests in flight, and
writes the results (:class:`Done`) in JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

import uvloop

from counter.clock import to_rfc3339
from counter.limits import MILLISECOND

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length: "
#: What is under way when the time is up may take so long to be answered.
_DRAIN_S: Final = 20.0
#: The interpreter's settings, as the service has them.
_GC_THRESHOLD: Final = 50_000
_CACHE_VALUE_BYTES: Final = 40
_CACHE_TTL_S: Final = 120
#: Keys a call, about what a busy process asks for at once; and calls under way.
_CACHE_KEYS: Final = 32
_CACHE_CALLS: Final = 8
_CACHE_TIMEOUT_S: Final = 5.0
#: Exit code of a load that was interrupted.
_EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Job:
    """What to load and how. ``kind`` is ``adds``, ``gets``, ``batches`` or ``cache``.

    ``base`` is the path of the namespace; counters are skewed, a few hot and most rare, but in
    batches, which take them in turn. With ``once``, a batch for each counter once, then the end.
    """

    kind: str
    host: str
    port: int
    base: str = ""
    counters: int = 1
    connections: int = 1
    seconds: float = 1.0
    items: int = 1
    once: bool = False
    api_key: str | None = None


@dataclass(slots=True)
class Done:
    """What became of a load: requests answered with success, the adds of each counter that were
    acknowledged, and those sent whose outcome is unknown."""

    requests: int = 0
    failed: int = 0
    first_failure: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    acknowledged: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


#: Makes the next request: its bytes, and the counters that it adds 1 to.
Request = tuple[bytes, list[int]]


class Load:
    """The state that all connections share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = Done(acknowledged=[0] * job.counters, unknown=[0] * job.counters)
        self.latencies: list[float] = []
        self._make = {"adds": self._add, "gets": self._get, "batches": self._batch}[job.kind]
        self._fixed = self._headers()
        self._run = secrets.token_hex(8)
        self._made = 0
        self._time_ms, self._time = 0, ""
        self._next = 0
        self.ends_s = 0.0

    def _headers(self) -> str:
        key = self.job.api_key
        return "host: localhost\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")

    def next(self) -> Request | None:
        """The next request; None if there is none."""
        if time.perf_counter() >= self.ends_s:
            return None
        return self._make()

    def _token(self) -> str:
        now_us = time.time_ns() // 1_000
        if now_us // MILLISECOND != self._time_ms:
            self._time_ms, self._time = now_us // MILLISECOND, to_rfc3339(now_us)
        self._made += 1
        return f'{{"token":"{self._run}{self._made:016x}","generation_time":"{self._time}"}}'

    def _skewed(self) -> int:
        return int(self.job.counters ** random.random()) - 1

    def _add(self) -> Request:
        place = self._skewed()
        body = f'{{"delta":1,"idempotency_token":{self._token()}}}'
        return self._post(f"counters/c{place:07}/add", body), [place]

    def _get(self) -> Request:
        path = f"{self.job.base}/counters/c{self._skewed():07}"
        return f"GET {path} HTTP/1.1\r\n{self._fixed}\r\n".encode(), []

    def _batch(self) -> Request | None:
        job = self.job
        if job.once and self._next >= job.counters:
            return None
        first, self._next = self._next, self._next + job.items
        last = min(self._next, job.counters) if job.once else self._next
        places = [place % job.counters for place in range(first, last)]
        items = ",".join(
            f'{{"counter":"c{place:07}","delta":1,"idempotency_token":{self._token()}}}'
            for place in places
        )
        return self._post("batch/add", f'{{"items":[{items}]}}'), places

    def _post(self, path: str, body: str) -> bytes:
        return (
            f"POST {self.job.base}/{path} HTTP/1.1\r\n{self._fixed}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def answered(self, answer: bytes, places: list[int], seconds: float) -> None:
        """Note the outcome of one request."""
        done = self.done
        # Each item of a batch has an outcome of its own, in a response of 200.
        if answer.startswith(b"HTTP/1.1 200") and (
            self.job.kind != "batches" or answer.count(b'"event_time":') == len(places)
        ):
            done.requests += 1
            self.latencies.append(seconds)
            for place in places:
                done.acknowledged[place] += 1
            return
        problem = max(0, answer.find(b'{"type"'))
        self.lost(places, answer[problem:].decode(errors="replace"))

    def lost(self, places: list[int], why: str) -> None:
        """Record a request with an unknown outcome."""
        self.done.failed += 1
        self.done.first_failure = self.done.first_failure or why[:300]
        for place in places:
            self.done.unknown[place] += 1


class _Connection(asyncio.Protocol):
    """One connection: a request, its response, the next request."""

    def __init__(self, load: Load, ended: Callable[[], None]) -> None:
        self._load = load
        self._ended = ended
        self._got = b""
        self._places: list[int] | None = None
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._got = self._got + data if self._got else data
        head, end, body = self._got.partition(_HEAD_END)
        if not end:
            return
        at = head.lower().find(_LENGTH)
        length = int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else 0
        if len(body) < length or self._places is None:
            return
        answer, self._got = self._got, b""
        places, self._places = self._places, None
        self._load.answered(answer, places, time.perf_counter() - self._sent_s)
        self._send()

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._places is not None:
            self._load.lost(self._places, "the connection broke")
        self._ended()

    def give_up(self) -> None:
        """Wait no longer."""
        self._transport.abort()

    def _send(self) -> None:
        request = self._load.next()
        if request is None:
            self._transport.close()
            return
        content, self._places = request
        self._sent_s = time.perf_counter()
        self._transport.write(content)


async def _run(job: Job) -> Done:
    """Load by HTTP."""
    load = Load(job)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    left = job.connections

    def ended() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            over.set()

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    load.ends_s = began_s + job.seconds
    made = [
        (await loop.create_connection(lambda: _Connection(load, ended), job.host, job.port))[1]
        for _ in range(job.connections)
    ]
    try:
        async with asyncio.timeout(job.seconds + _DRAIN_S):
            await over.wait()
    except TimeoutError:
        for each in made:
            each.give_up()
        await over.wait()
    return _finished(load.done, load.latencies, began_s, began_cpu_s)


def _finished(done: Done, latencies: list[float], began_s: float, began_cpu_s: float) -> Done:
    done.seconds = time.perf_counter() - began_s
    done.cpu_s = time.process_time() - began_cpu_s
    latencies.sort()
    if latencies:
        done.p50_ms = latencies[len(latencies) // 2] * 1e3
        done.p99_ms = latencies[len(latencies) * 99 // 100] * 1e3
    return done


def _load_cache(job: Job) -> Done:
    """Note keys in one memcached and look them up, many a call; ``requests`` are keys.

    The same few keys all the time: what others keep there must not have to leave.
    """
    done, latencies = Done(), []
    names = [f"bench:{secrets.token_hex(6)}:{place}" for place in range(_CACHE_KEYS)]
    value = b"x" * _CACHE_VALUE_BYTES
    heads = (f"set {name} 0 {_CACHE_TTL_S} {len(value)}\r\n".encode() for name in names)
    notes = b"".join(head + value + b"\r\n" for head in heads)
    call = (notes + f"get {' '.join(names)}\r\n".encode()) * _CACHE_CALLS
    with socket.create_connection((job.host, job.port), timeout=_CACHE_TIMEOUT_S) as wire:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while (sent_s := time.perf_counter()) < began_s + job.seconds:
            wire.sendall(call)
            got = b""
            while got.count(b"END\r\n") < _CACHE_CALLS:
                if not (more := wire.recv(1 << 20)):
                    raise ConnectionError("memcached closed the connection")
                got += more
            latencies.append(time.perf_counter() - sent_s)
            found = got.count(b"STORED\r\n") + got.count(b"VALUE ")
            done.requests += found
            done.failed += 2 * _CACHE_KEYS * _CACHE_CALLS - found
        _finished(done, latencies, began_s, began_cpu_s)
        wire.sendall("".join(f"delete {name} noreply\r\n" for name in names).encode())
    return done


def main() -> None:
    """Do the job on standard input."""
    job = Job(**json.loads(sys.stdin.read()))
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        done = _load_cache(job) if job.kind == "cache" else uvloop.run(_run(job))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except OSError as error:
        done = Done(failed=1, first_failure=str(error))
    sys.stdout.write(json.dumps(asdict(done)))


if __name__ == "__main__":
    main()
