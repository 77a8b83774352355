"""uvicorn's server with TLS and graceful shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import uvicorn

from api.server.protocol import TimedProtocol, cut_slow_clients
from api.server.tls import Certificates, TlsListener
from counter.background import pause
from counter.config.settings import Settings
from counter.limits import SECOND

_CHECK_EVERY_S: Final = 0.02
#: How many checks to wait for open connections after the port is closed. Most send another request
#: meanwhile, whose response closes them in order. Closing at once would fail requests in flight.
_LAST_ANSWER_CHECKS: Final = 15


class Server(uvicorn.Server):
    """Serve until a signal, then shut down gracefully.

    Shutdown calls *leaving* and keeps serving for ``shutdown_delay``, so that a load balancer
    notices. Then it closes the port, calls *draining*, and answers admitted requests for at most
    ``drain_timeout``; each response is its connection's last.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        protocol: type[TimedProtocol],
        settings: Settings,
        certificates: Certificates | None = None,
        *,
        leaving: Callable[[], None] = lambda: None,
        draining: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._protocol = protocol
        self._settings = settings
        self._certificates = certificates
        self._leaving = leaving
        self._draining = draining
        self._at_once = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT; uvicorn would raise the signal again after shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; a second signal skips the delay, a second SIGINT also the drain."""
        if self.should_exit:
            self._at_once.set()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from *sockets*."""
        if self._certificates is None or sockets is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        timeout_us, shared = self._settings.request_timeout, self._protocol.shared
        servers: list[Any] = [
            TlsListener(each, self.new_connection, self._certificates, timeout_us, shared)
            for each in sockets
        ]
        self.servers = servers
        self.started = True

    def new_connection(self) -> asyncio.Protocol:
        """Return the protocol of one connection."""
        return self._protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on *sockets*, with tasks for slow clients and certificates."""
        connections: set[Any] = self.server_state.connections
        timeout_us, stop = self._settings.request_timeout, asyncio.Event()
        keepers = [asyncio.create_task(cut_slow_clients(connections, timeout_us, stop))]
        if self._certificates is not None:
            keepers.append(asyncio.create_task(self._certificates.watch(stop)))
        try:
            await super().serve(sockets)
        finally:
            stop.set()
            await asyncio.gather(*keepers)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully."""
        self._leaving()
        if delay_us := self._settings.shutdown_delay:
            await pause(self._at_once, delay_us / SECOND)
        for server in self.servers:
            server.close()
        self._draining()
        self._protocol.drain()
        for _ in range(_LAST_ANSWER_CHECKS):
            if self.force_exit or not self.server_state.connections:
                break
            await asyncio.sleep(_CHECK_EVERY_S)
        await super().shutdown(sockets)
