"""``counter serve``: a process that listens and counts, or several that share a port."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn

from api.app import Application, create_app
from api.direct import direct_protocol
from api.protocol import cut_slow_clients
from api.workers import Parent, supervise
from counter.config import Settings
from counter.errors import StartupError
from counter.limits import SECOND

#: How long a thread may hold the interpreter while another waits for it. The default of 5 ms would
#: make the writer thread wait that long for a busy event loop, several times a commit.
_SWITCH_INTERVAL_S: Final = 0.0005
#: New objects between two looks for garbage cycles; a request makes hardly any.
_GC_THRESHOLD: Final = 50_000
_BACKLOG: Final = 2_048
_PRIVILEGED_PORTS: Final = 1_024


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was accepted. Raises StartupError."""
    own = settings.metrics_port
    if own is not None and own <= settings.port < own + settings.workers:
        raise StartupError(
            f"metrics_port {own} and port {settings.port} meet: each of {settings.workers}"
            " processes has a port of its own from metrics_port on; choose another one"
        )
    with listen(settings.host, settings.port) as listener:
        if settings.workers == 1:
            _run(settings, [listener, *_own(settings, 0)], lambda: _say_where(listener))
            return
        code = supervise(settings, listener, lambda: _say_where(listener))
    if code:
        raise SystemExit(code)


def serve_as_worker(
    settings: Settings, listener: socket.socket, number: int, parent: Parent
) -> None:
    """The same as one of several processes that share *listener*: it ends with *parent* too."""
    with listener:
        _run(settings, [listener, *_own(settings, number)], parent.say_ready, parent)


def _run(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    parent: Parent | None = None,
) -> None:
    """Serve on *listeners* in this process; *ready* is called when requests are taken."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What was imported lives as long as the process: the collector need not look at it again.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    loop_factory = uvicorn.Config(lambda *_: None, loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(settings, listeners, ready, parent))


class _Server(uvicorn.Server):
    """A server that ends in order: uvicorn would raise the signal again after its shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def _serve(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    parent: Parent | None,
) -> None:
    application = create_app(settings)
    server = _Server(_config(application, settings))
    if parent is not None:
        parent.when_gone(lambda: server.handle_exit(signal.SIGTERM, None))
    async with application.running(rollup=settings.rollup):
        sweeper = asyncio.create_task(
            cut_slow_clients(server.server_state.connections, settings.request_timeout)
        )
        ready()
        try:
            await server.serve(sockets=listeners)
        finally:
            sweeper.cancel()


def _config(application: Application, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        application.front,
        http=direct_protocol(application.front, application.service, settings.request_timeout),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, settings.drain_timeout // SECOND),
    )


def _own(settings: Settings, number: int) -> list[socket.socket]:
    """The listener that only process *number* has, if it is to have one."""
    if settings.metrics_port is None:
        return []
    return [listen(settings.host, settings.metrics_port + number)]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises StartupError, saying which of the two is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or error
        hint = _hint(error, host, port)
        raise StartupError(f"cannot listen on {host}:{port}: {said}; {hint}") from error
    return listener


def _hint(error: Exception, host: str, port: int) -> str:
    """What to do about it."""
    code = getattr(error, "errno", None)
    if not isinstance(error, socket.gaierror):
        if code == errno.EADDRINUSE:
            return f"port {port} is taken: choose another one with --port, or 0 for a free one"
        if code == errno.EACCES and 0 < port < _PRIVILEGED_PORTS:
            return f"ports below {_PRIVILEGED_PORTS} are for root: choose another one with --port"
        if code == errno.EADDRNOTAVAIL:
            return (
                f"this machine has no address {host}: choose one of its own with --host, or"
                " 0.0.0.0 for all"
            )
    return (
        f"{host!r} is no address or name of this machine: choose one with --host, such as"
        " 127.0.0.1, or 0.0.0.0 for all"
    )


def _say_where(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    one = f"{url}/v1/namespaces/default/counters/hello"
    sys.stdout.write(
        f"Serving on {url}\n\nTry:\n"
        f"  curl --json '{{\"delta\": 1}}' -H 'Idempotency-Key: my-first-add' {one}/add\n"
        f"  curl {one}\n"
    )
    sys.stdout.flush()
