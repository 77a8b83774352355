"""What a worker tells of itself over HTTP: /healthz, /readyz and /metrics, and nothing else.

A listener of its own in a few lines, because a worker serves no API: one request a connection,
everything about it bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from counter.errors import CounterError, StartupError
from counter.limits import SECOND
from counter.ports import Clock, Store
from counter.skew import ClockGuard
from rollup.leases import Leases
from rollup.worker import RollupWorker

_HEAD_BYTES_MAX: Final = 8 * 1024
_CONNECTIONS_MAX: Final = 64
_PATIENCE_S: Final = 5.0
_JSON: Final = "application/json"
_PROBLEM: Final = "application/problem+json"

#: Status, content type, body.
_Answer = tuple[int, str, bytes]


@dataclass(slots=True)
class Health:
    """The parts of a worker's process that can be in trouble."""

    store: Store
    clock: Clock
    guard: ClockGuard
    leases: Leases
    worker: RollupWorker
    is_draining: bool = False

    async def trouble(self) -> str | None:
        """Why this worker is of no use now; None where it is."""
        if self.is_draining:
            return "the worker was told to end, and finishes what is under way"
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.store.ping()
        except CounterError as error:
            return error.detail
        except TimeoutError:
            return f"the store did not answer within {_PATIENCE_S:g} s"
        return self.guard.trouble or self.worker.trouble

    def lag_us(self) -> int:
        """How far the oldest watermark of this worker's shards is behind its clock."""
        passed = self.worker.passed_through().values()
        return self.clock.now_us() - min(passed) if passed else 0


class Metrics(Collector):
    """Reads the worker's own tallies when asked."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """The families of this scrape."""
        health, worker = self._health, self._health.worker
        told = {
            "counters": "Counters whose rollup was written.",
            "passes": "Passes over a shard that were done.",
            "failures": "Passes that failed, and are done again.",
        }
        for name, text in told.items():
            yield CounterMetricFamily(f"counter_rollup_{name}", text, value=worker.tally[name])
        gauges: Mapping[str, tuple[str, float]] = {
            "rollup_up": ("Whether the rollup of this process works.", worker.trouble is None),
            "rollup_slots": ("Lease slots that this worker holds.", len(health.leases.held())),
            "rollup_workers": ("Workers that live, this one too.", len(health.leases.live)),
            "rollup_limit": ("Groups of counters let in at once.", worker.limiter.limit),
            "rollup_lag_seconds": (
                "How far the oldest watermark of this worker's shards is behind.",
                health.lag_us() / SECOND,
            ),
            "clock_offset_seconds": (
                "How far the store's clock is ahead of this process's.",
                health.guard.offset_us / SECOND,
            ),
            "clock_out_of_bounds": (
                "Whether this process rolls nothing up because of its clock.",
                health.guard.trouble is not None,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"counter_{name}", text, value=value)


@asynccontextmanager
async def listening(health: Health, host: str, port: int) -> AsyncIterator[int]:
    """Answer on *host* and *port* (0 for a free one), which is given back. Raises StartupError."""
    registry = CollectorRegistry()
    registry.register(Metrics(health))

    async def alive() -> _Answer:
        return 200, _JSON, b'{"status":"alive"}'

    async def ready() -> _Answer:
        trouble = await health.trouble()
        if trouble is None:
            return 200, _JSON, b'{"status":"ready"}'
        return _problem(503, "unavailable", trouble)

    async def metrics() -> _Answer:
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

    pages = {"/healthz": alive, "/readyz": ready, "/metrics": metrics}
    desk = _Desk(pages)
    try:
        server = await asyncio.start_server(desk.serve, host, port, limit=_HEAD_BYTES_MAX)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error};"
            " choose another port with --metrics-port, or another address with --host"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class _Desk:
    """Answers one request a connection."""

    def __init__(self, pages: Mapping[str, Callable[[], Awaitable[_Answer]]]) -> None:
        self._pages = pages
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a head, answer, close. Whatever goes wrong is the client's to notice."""
        self._open += 1
        try:
            with suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
                if self._open <= _CONNECTIONS_MAX:
                    async with asyncio.timeout(2 * _PATIENCE_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(_on_wire(head, await self._answer(head)))
                        await writer.drain()
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> _Answer:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        page = self._pages.get(path)
        if page is None:
            return _problem(404, "not_found", f"there is nothing at {path[:200]!r}")
        if method not in (b"GET", b"HEAD"):
            return _problem(405, "method_not_allowed", "use GET")
        return await page()


def _on_wire(head: bytes, answer: _Answer) -> bytes:
    status, content_type, body = answer
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        + ("allow: GET\r\n" if status == HTTPStatus.METHOD_NOT_ALLOWED else "")
    )
    return f"{lines}\r\n".encode() + (b"" if head.startswith(b"HEAD ") else body)


def _problem(status: int, code: str, detail: str) -> _Answer:
    body = {"title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    return status, _PROBLEM, json.dumps(body).encode()
