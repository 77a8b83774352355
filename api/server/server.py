"""uvicorn's server as this service needs it: in front of it TLS, behind it an end in order."""

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

_LOOK_EVERY_S: Final = 0.02
#: For how many looks connections may go on once nobody new is let in: most send another request
#: meanwhile, and learn from its answer that it is the last. What is closed at once fails a request
#: that is on its way.
_LAST_CALL_LOOKS: Final = 15


class Server(uvicorn.Server):
    """Serves until it is told to end; then it ends in order.

    First it goes on for the settings' ``shutdown_delay``, having called *leaving*: a load balancer
    needs a while to notice. Then the port is closed and *draining* called; what was admitted is
    answered, each answer being its connection's last, for at most ``drain_timeout``.
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
        """Take SIGTERM and SIGINT: uvicorn would raise the signal again after its shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; at a second signal without the delay, at a second SIGINT without anything."""
        if self.should_exit:
            self._at_once.set()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections from *sockets*."""
        if self._certificates is None or sockets is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        timeout_us, shared = self._settings.request_timeout, self._protocol.shared
        servers: list[Any] = [
            TlsListener(each, self._make, self._certificates, timeout_us, shared)
            for each in sockets
        ]
        self.servers = servers
        self.started = True

    def _make(self) -> asyncio.Protocol:
        return self._protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on *sockets*, and look after what nobody else does."""
        connections: set[Any] = self.server_state.connections
        keepers = [
            asyncio.create_task(cut_slow_clients(connections, self._settings.request_timeout))
        ]
        if self._certificates is not None:
            keepers.append(asyncio.create_task(self._certificates.watch()))
        try:
            await super().serve(sockets)
        finally:
            for each in keepers:
                each.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order."""
        self._leaving()
        if delay_us := self._settings.shutdown_delay:
            await pause(self._at_once, delay_us / SECOND)
        for server in self.servers:
            server.close()
        self._draining()
        self._protocol.drain()
        for _ in range(_LAST_CALL_LOOKS):
            if self.force_exit or not self.server_state.connections:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        await super().shutdown(sockets)
