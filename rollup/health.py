"""Serve a worker's /healthz, /readyz and /metrics over HTTP.

It is a minimal server, because a worker serves no API: one request per connection, with bounds on
everything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST

from counter.core.clock_guard import ClockGuard
from counter.errors import OriginRefusedError, StartupError
from counter.ports import Cache, Clock, Store
from counter.security.host_rule import HostRule
from counter.telemetry.exposition import Exposition
from counter.telemetry.incidents import Trouble, Troubles, ping_error
from counter.telemetry.store_metrics import ClockMetrics, StoreMetrics
from rollup.leases import Leases
from rollup.metrics import RollupMetrics
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
    """The parts of a worker's process that can fail."""

    store: Store
    clock: Clock
    guard: ClockGuard
    leases: Leases
    worker: RollupWorker
    cache: Cache
    is_draining: bool = False
    _troubles: Troubles | None = field(default=None, init=False)

    async def troubles(self) -> Sequence[Trouble]:
        """Return why this worker cannot work now, and since when; empty if it can."""
        store = await ping_error(self.store.ping, "the store")
        draining = "the worker is shutting down, and finishes its work in flight"
        self._troubles = self._troubles or Troubles(self.clock)
        return self._troubles.note(
            {
                "process": draining if self.is_draining else None,
                "store": None if store is None else store.detail,
                "clock": self.guard.trouble,
                "rollup": self.worker.trouble,
            }
        )


@asynccontextmanager
async def listening(health: Health, host: str, port: int, hosts: HostRule) -> AsyncIterator[int]:
    """Serve on *host* and *port* (0 for a free one) requests that *hosts* allows; yield the port.

    Raises StartupError.
    """
    exposition = Exposition(
        (
            RollupMetrics(health.worker, health.clock, health.leases),
            StoreMetrics(health.store, health.cache),
            ClockMetrics(health.guard),
        )
    )

    async def alive() -> _Answer:
        return 200, _JSON, b'{"status":"alive"}'

    async def ready() -> _Answer:
        troubles = await health.troubles()
        if not troubles:
            return 200, _JSON, b'{"status":"ready"}'
        found = [each.as_fields() for each in troubles]
        return _problem(503, "unavailable", troubles[0].detail, troubles=found)

    async def metrics() -> _Answer:
        return 200, CONTENT_TYPE_LATEST, exposition.text()

    pages = {"/healthz": alive, "/readyz": ready, "/metrics": metrics}
    health_server = HealthServer(pages, hosts)
    try:
        server = await asyncio.start_server(health_server.serve, host, port, limit=_HEAD_BYTES_MAX)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error};"
            " choose another port with --metrics-port, or another address with --host"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class HealthServer:
    """Answers one request per connection."""

    def __init__(
        self, pages: Mapping[str, Callable[[], Awaitable[_Answer]]], hosts: HostRule
    ) -> None:
        self._pages = pages
        self._hosts = hosts
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request head, answer, close. Errors only affect the client."""
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
        for line in head.split(b"\r\n")[1:]:
            name, _, host = line.partition(b":")
            if name.strip().lower() == b"host" and not self._hosts.answers(host):
                shown = host.strip()[:80].decode("latin-1")
                return _problem(
                    OriginRefusedError.status,
                    OriginRefusedError.code,
                    f"Host is {shown!r}: a worker answers only localhost, IP addresses and the"
                    " names in hosts; set hosts, or give --insecure",
                )
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


def _problem(status: int, code: str, detail: str, **more: Any) -> _Answer:
    title = HTTPStatus(status).phrase
    body = {"title": title, "status": status, "code": code, "detail": detail, **more}
    return status, _PROBLEM, json.dumps(body).encode()
