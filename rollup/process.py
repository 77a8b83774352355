"""Run a rollup worker as its own process, for ``counter rollup``; any number share the work.

Exit codes: 0 after SIGTERM or SIGINT, once it has finished its work in flight and released its
lease; 1 if that took longer than ``drain_timeout``, at a second signal, or after a bug; 2 if it
cannot start. It may be killed at any time: other workers continue when its lease has expired.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.durations import format_duration
from counter.errors import StartupError, UnavailableError
from counter.limits import SECOND
from counter.security.host_rule import HostRule
from counter.storage import open_cache, open_store
from counter.storage.shared.startup_retry import StartupRetry
from counter.telemetry import open_tracing
from rollup.audits import audits_of
from rollup.health import Health, listening
from rollup.leases import Leases, worker_id
from rollup.worker import RollupWorker

EXIT_DRAINED: Final = 0
EXIT_FAILED: Final = 1

_log = logging.getLogger("counter.rollup")
#: How long a thread may hold the interpreter while another one waits: the driver's thread and the
#: event loop exchange results all the time.
_SWITCH_INTERVAL_S: Final = 0.0005
_GC_THRESHOLD: Final = 50_000


def run(settings: Settings) -> int:
    """Roll up until a signal comes; return the exit code. Raises StartupError."""
    if settings.store == "sqlite":
        raise StartupError(
            "store is sqlite, whose data directory one process holds: `counter serve` rolls up in"
            " its own; give --store cassandra"
        )
    if "log_level" not in settings.model_fields_set:
        # A healthy worker logs only joins, leaves and takeovers, so these must be visible.
        logging.getLogger("counter").setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(settings))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(settings: Settings) -> int:
    clock = SystemClock()
    tracing = open_tracing(settings)
    store, cache = tracing.watched(open_store(settings, clock)), open_cache(settings, clock)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(tracing.close)
        await StartupRetry(settings.start_timeout).run(store.open)
        stack.push_async_callback(store.close)
        await cache.open()
        stack.push_async_callback(cache.close)
        guard, namespaces = ClockGuard(store, clock), Namespaces(store, clock)
        leases = Leases(store, clock, worker_id(), lease_time_us=settings.lease_time, guard=guard)
        worker = RollupWorker(
            store,
            cache,
            clock,
            namespaces,
            concurrency=settings.rollup_concurrency,
            leases=leases,
            guard=guard,
        )
        worker.batches.tracing = tracing
        worker.audits = audits_of(settings, store, clock, namespaces)
        health = Health(store, clock, guard, leases, worker, cache)
        if settings.metrics_port is not None:
            hosts = HostRule(settings.hosts, any_address=True, any_host=settings.insecure)
            port = await stack.enter_async_context(
                listening(health, settings.host, settings.metrics_port, hosts)
            )
            _log.info("health and metrics on %s:%d", settings.host, port)
        await guard.measure()
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
        beside = [
            asyncio.create_task(guard.run(enough)),
            asyncio.create_task(namespaces.run(enough)),
        ]
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
