"""``counter serve``: one process that listens, counts and rolls up."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from api.app import Application, create_app
from api.protocol import cut_slow_clients, timed_protocol
from counter.config import Settings
from counter.errors import StartupError

#: How long a thread may hold the interpreter while another waits for it. The default of 5 ms would
#: make the writer thread wait that long for a busy event loop, several times a commit.
_SWITCH_INTERVAL_S = 0.0005
#: New objects between two looks for garbage cycles; a request makes hardly any.
_GC_THRESHOLD = 50_000
_DRAIN_S = 10
_BACKLOG = 2_048


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was accepted. Raises StartupError."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What was imported lives as long as the process: the collector need not look at it again.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    listener = _listen(settings)
    with listener:
        config_loop = uvicorn.Config(lambda *_: None, loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=config_loop) as runner:
            runner.run(_serve(settings, listener))


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


async def _serve(settings: Settings, listener: socket.socket) -> None:
    application = create_app(settings)
    async with application.running(rollup=True):
        server = _Server(_config(application, settings))
        sweeper = asyncio.create_task(
            cut_slow_clients(server.server_state.connections, settings.request_timeout)
        )
        _say_where(listener)
        try:
            await server.serve(sockets=[listener])
        finally:
            sweeper.cancel()


def _config(application: Application, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        application.front,
        http=timed_protocol(settings.request_timeout),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror};"
            " choose another port with --port"
        ) from error
    return listener


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
