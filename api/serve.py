"""``counter serve``: run one API process, or several that share a port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from api.app import Application, create_app
from api.http.connections import PROXY_KEEP_ALIVE_S
from api.http.cors import with_cors
from api.server.protocol import HttpProtocol
from api.server.server import Server
from api.server.sockets import check_exposure, connections_max, listen, say_where
from api.server.tls import Certificates
from api.telemetry.exposition import MetricsDirectory
from api.workers import SupervisorLink, Work, supervise
from counter.background import loop_factory, tune_interpreter
from counter.config.settings import Settings
from counter.config.values import PORT_MAX
from counter.errors import StartupError


def serve(settings: Settings, work: Work) -> None:
    """Serve until SIGTERM or SIGINT, then finish the accepted requests. Raises StartupError.

    If several processes share the port, each runs *work*, which calls :func:`serve_as_worker`.
    """
    own = settings.metrics_port
    if own is not None and own <= settings.port < own + settings.workers:
        raise StartupError(
            f"metrics_port {own} and port {settings.port} meet: {settings.workers} processes use"
            " one port each from metrics_port on; choose another one"
        )
    if own is not None and own + settings.workers - 1 > PORT_MAX:
        raise StartupError(
            f"metrics_port is {own}, and {settings.workers} processes would use ports"
            f" up to {own + settings.workers - 1}; choose {PORT_MAX + 1 - settings.workers} or a"
            " lower one"
        )
    with listen(settings.host, settings.port) as listener:
        if settings.workers == 1:
            _run(
                settings,
                [listener, *_metrics_listener(settings, 0)],
                lambda: say_where(listener, settings),
            )
            return
        code = supervise(settings, listener, lambda: say_where(listener, settings), work)
    if code:
        raise SystemExit(code)


def serve_as_worker(settings: Settings, listener: socket.socket, parent: SupervisorLink) -> None:
    """Serve as one of the processes that share *listener*; end when *parent* ends."""
    with listener:
        _run(
            settings,
            [listener, *_metrics_listener(settings, parent.number)],
            parent.say_ready,
            parent,
        )


def _run(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    parent: SupervisorLink | None = None,
) -> None:
    """Serve on *listeners* in this process; call *ready* when it accepts requests."""
    tune_interpreter()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(settings, listeners, ready, parent))


async def _serve(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    parent: SupervisorLink | None,
) -> None:
    application = create_app(settings)
    server = make_server(application, settings)
    async with AsyncExitStack() as stack:
        if parent is not None:
            parent.when_gone(server.stop)
        await stack.enter_async_context(application.running(rollup=settings.rollup))
        if parent is not None:
            await stack.enter_async_context(_shared_metrics(application, parent))
        # The store must be open to know whether keys exist.
        check_exposure(settings, listeners, keys=application.keys.required)
        stack.enter_context(server.stopped_by_signals())
        ready()
        await server.serve(listeners)


@asynccontextmanager
async def _shared_metrics(application: Application, parent: SupervisorLink) -> AsyncIterator[None]:
    """Make a scrape of any process on the port return the metrics of all of them."""
    settings, exposition = application.settings, application.exposition
    if settings.metrics_port is not None:
        exposition.own_port = settings.metrics_port + parent.number
    directory = MetricsDirectory(parent.folder, parent.number, settings.workers, application.clock)
    exposition.directory = directory
    shown = directory.past_labels("counter_namespace_adds", "namespace")
    application.service.tally.namespaces.show(shown)
    stop = asyncio.Event()
    # Every process must check its health itself: a scrape reaches only one of them.
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(application.health.keep_checking(stop))
        tasks.create_task(directory.run(exposition.collect, stop))
        try:
            yield
        finally:
            stop.set()


def make_server(application: Application, settings: Settings) -> Server:
    """Return the server of *application*, with its limits. Raises StartupError."""
    pipeline, shared = application.pipeline, application.connections
    shared.most = connections_max(settings)
    shared.peers.most = settings.connections_per_address
    shared.request_timeout_us = settings.request_timeout
    if settings.tls_in_front:
        shared.keep_alive_s = PROXY_KEEP_ALIVE_S
    app = with_cors(pipeline, settings.cors_origins) if settings.cors_origins else pipeline
    protocol: Callable[[], HttpProtocol] = partial(HttpProtocol, app, pipeline.ids, shared)
    if settings.fast_lane:
        # Imported late: the service also runs without that folder.
        from api.fastlane.lane import FastLane

        protocol = partial(FastLane, app, pipeline, application.service, shared)
    certificates = Certificates(settings) if settings.https_cert is not None else None
    if certificates is not None:
        shared.certificate_ends_at_s = lambda: certificates.ends_at_s
    return Server(
        *(app, protocol, shared, settings, certificates),
        leaving=application.announce_shutdown,
        draining=application.drain,
    )


def _metrics_listener(settings: Settings, number: int) -> list[socket.socket]:
    """Return the metrics listener of process *number*, if configured."""
    if settings.metrics_port is None:
        return []
    return [listen(settings.host, settings.metrics_port + number)]
