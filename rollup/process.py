"""Run a rollup worker as its own process, for ``counter rollup``; any number share the work.

Exit codes: 0 after SIGTERM or SIGINT, once it has finished its work in flight and released its
lease; 1 if that took longer than ``drain_timeout``, at a second signal, or after a bug; 2 if it
cannot start. It may be killed at any time: other workers continue when its lease has expired.

With ``metrics_port`` it serves /healthz, /readyz and /metrics over HTTP: a minimal server, because
a worker serves no API: one request per connection, with bounds on everything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST

from counter.background import loop_factory, tune_interpreter
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.errors import OriginRefusedError, StartupError, UnavailableError
from counter.limits import SECOND
from counter.ports import Cache, Clock, Store
from counter.quantities import format_duration
from counter.security.host_rule import HostRule
from counter.telemetry.families import Exposition
from counter.telemetry.incidents import Incident, Incidents, ping_error
from counter.telemetry.store_metrics import ClockMetrics, StoreMetrics
from rollup.leases import Leases
from rollup.metrics import RollupMetrics
from rollup.parts import parts_of
from rollup.worker import RollupWorker

_HEAD_BYTES_MAX: Final = 8 * 1024
_CONNECTIONS_MAX: Final = 64
_PATIENCE_S: Final = 10.0
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
    _incidents: Incidents | None = field(default=None, init=False)

    async def incidents(self) -> Sequence[Incident]:
        """Return why this worker cannot work now, and since when; empty if it can."""
        store = await ping_error(self.store.ping, "the store")
        draining = "the worker is shutting down, and finishes its work in flight"
        self._incidents = self._incidents or Incidents(self.clock)
        return self._incidents.record(
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
    connections = asyncio.Semaphore(_CONNECTIONS_MAX)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request head, answer, close. Errors only affect the client."""
        with closing(writer), suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            if not connections.locked():
                async with connections, asyncio.timeout(_PATIENCE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_on_wire(head, await _answer(head, health, exposition, hosts)))
                    await writer.drain()

    try:
        server = await asyncio.start_server(serve, host, port, limit=_HEAD_BYTES_MAX)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error};"
            " choose another port with --metrics-port, or another address with --host"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _answer(head: bytes, health: Health, exposition: Exposition, hosts: HostRule) -> _Answer:
    request, *headers = head.split(b"\r\n")
    for line in headers:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"host" and not hosts.answers(value):
            return _problem(
                OriginRefusedError.status,
                OriginRefusedError.code,
                f"Host is {value.strip()[:80].decode('latin-1')!r}: a worker answers only"
                " localhost, IP addresses and the names in hosts; set hosts, or give --insecure",
            )
    method, _, rest = request.decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    match path if method in ("GET", "HEAD") else "":
        case "/healthz":
            return 200, _JSON, b'{"status":"alive"}'
        case "/metrics":
            return 200, CONTENT_TYPE_LATEST, exposition.text()
        case "/readyz":
            if not (incidents := await health.incidents()):
                return 200, _JSON, b'{"status":"ready"}'
            found = [each.as_fields() for each in incidents]
            return _problem(503, "unavailable", incidents[0].detail, troubles=found)
    return _problem(404, "not_found", f"there is nothing to {method[:20]} at {path[:200]!r}")


def _on_wire(head: bytes, answer: _Answer) -> bytes:
    status, content_type, body = answer
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return lines.encode() + (b"" if head.startswith(b"HEAD ") else body)


def _problem(status: int, code: str, detail: str, **more: Any) -> _Answer:
    title = HTTPStatus(status).phrase
    body = {"title": title, "status": status, "code": code, "detail": detail, **more}
    return status, _PROBLEM, json.dumps(body).encode()


EXIT_DRAINED: Final = 0
EXIT_FAILED: Final = 1

_log = logging.getLogger("counter.rollup")


def run(settings: Settings) -> int:
    """Roll up until a signal comes; return the exit code. Raises StartupError."""
    if "log_level" not in settings.model_fields_set:
        # A healthy worker logs only joins, leaves and takeovers, so these must be visible.
        logging.getLogger("counter").setLevel(logging.INFO)
    tune_interpreter()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(settings))


async def _run(settings: Settings) -> int:
    parts = parts_of(settings)
    leases, namespaces = parts.leases, Namespaces(parts.store, parts.clock)
    if leases is None:
        raise StartupError(
            f"store is {settings.store}, whose data directory one process holds: `counter serve`"
            " rolls up in its own; give another --store, which processes share"
        )
    async with AsyncExitStack() as stack:
        retry = await stack.enter_async_context(parts.opened())
        worker = parts.worker(namespaces)
        health = Health(parts.store, parts.clock, parts.guard, leases, worker, parts.cache)
        if settings.metrics_port is not None:
            hosts = HostRule(settings.hosts, any_address=True, any_host=settings.insecure)
            port = await stack.enter_async_context(
                listening(health, settings.host, settings.metrics_port, hosts)
            )
            _log.info("health and metrics on %s:%d", settings.host, port)
        await retry.run(parts.guard.measure)
        with suppress(UnavailableError):
            # It is read again every second, so it may appear later.
            await namespaces.refresh()
        stop = asyncio.Event()
        drain = Drain(health, stop, settings.drain_timeout)
        drain.listen()
        sys.stdout.write(f"Rolling up as {leases.worker}\n")
        sys.stdout.flush()
        # Runs until the worker has ended, which needs it while it finishes.
        enough = asyncio.Event()
        beside = parts.upkeep(namespaces, enough)
        code = await _work(worker.run(stop, settings.drain_timeout), stop, beside)
        enough.set()
        await asyncio.gather(*beside, return_exceptions=True)
    _log.info("worker %s ends", leases.worker)
    return code


async def _work(
    work: Coroutine[Any, Any, None], stop: asyncio.Event, beside: list[asyncio.Task[None]]
) -> int:
    """Run *work*, which ends at *stop*, or until a task ends unexpectedly."""
    working = asyncio.create_task(work)
    await asyncio.wait((working, *beside), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await asyncio.wait((working,))
    failed = [task for task in (working, *beside) if task.done() and task.exception()]
    for task in failed:
        _log.error("the worker failed unexpectedly", exc_info=task.exception())
    if not working.done():
        # Other workers continue at once with the released slots.
        stop.set()
        await asyncio.wait((working,))
    return EXIT_FAILED if failed else EXIT_DRAINED


class Drain:
    """Signal handling: the first signal requests a graceful shutdown, the second one exits."""

    def __init__(self, health: Health, stop: asyncio.Event, timeout_us: int) -> None:
        self._health = health
        self._stop = stop
        self._timeout_us = timeout_us

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            self._end_now(f"{name} came a second time")
        _log.info("%s: finishing what is under way", name)
        self._health.is_draining = True
        self._stop.set()
        took = f"draining took longer than {format_duration(self._timeout_us)}"
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeout_us / SECOND, self._end_now, took)

    def _end_now(self, why: str) -> None:
        """Exit at once: a driver's thread may hang without end."""
        _log.error("ending at once, leaving the leases to run out: %s", why)
        logging.shutdown()
        os._exit(EXIT_FAILED)
