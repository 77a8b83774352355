"""uvicorn's server, with connections of our own protocol, TLS and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Final

import uvicorn

from api.http.call import App
from api.http.connections import Connections
from api.server.listener import Listener
from api.server.protocol import cut_slow_clients
from api.server.tls import Certificates, TlsListener
from counter.background import pause
from counter.config.settings import Settings
from counter.limits import SECOND

_CHECK_EVERY_S: Final = 0.02
#: How many checks to wait for open connections after the port is closed. Most send another request
#: meanwhile, whose response closes them in order. Closing at once would fail requests in flight.
_LAST_ANSWER_CHECKS: Final = 15
_DRAIN_S_MIN: Final = 1.0
_log = logging.getLogger("counter.api")


class Server(uvicorn.Server):
    """Serve until :meth:`stop`, then shut down gracefully.

    Shutdown calls *leaving* and keeps serving for ``shutdown_delay``, so that a load balancer
    notices. Then it closes the port, calls *draining*, and answers admitted requests for at most
    ``drain_timeout``; each response is its connection's last.
    """

    def __init__(
        self,
        app: App,
        protocol: Callable[[], asyncio.Protocol],
        shared: Connections,
        settings: Settings,
        certificates: Certificates | None = None,
        *,
        leaving: Callable[[], None] = lambda: None,
        draining: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
            )
        )
        #: Makes the protocol of one connection.
        self.protocol = protocol
        self.shared = shared
        self._settings = settings
        self._certificates = certificates
        self._leaving = leaving
        self._draining = draining
        self._stopping = asyncio.Event()
        #: Set to skip the delay, and to drop the requests that are being answered.
        self._at_once = asyncio.Event()
        self._abandons = asyncio.Event()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Shut down for the signal *number*; a second one skips the delay, a second SIGINT also the
        drain."""
        if self._stopping.is_set():
            self._at_once.set()
            if number == signal.SIGINT:
                self._abandons.set()
        self._stopping.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Do nothing: :meth:`stopped_by_signals` begins earlier."""
        return nullcontext()

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT meanwhile."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on *sockets*, with tasks for slow clients and certificates."""
        stop = asyncio.Event()
        keepers = [asyncio.create_task(cut_slow_clients(self.shared, stop))]
        if self._certificates is not None:
            keepers.append(asyncio.create_task(self._certificates.watch(stop)))
        try:
            await super().serve(sockets)
        finally:
            stop.set()
            await asyncio.gather(*keepers)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from *sockets*."""
        self.listeners = [self._listen(each) for each in sockets or ()]
        self.started = True

    async def main_loop(self) -> None:
        """Wait for :meth:`stop`."""
        await self._stopping.wait()

    def _listen(self, listener: socket.socket) -> Listener:
        if self._certificates is None:
            return Listener(listener, self.protocol, self.shared)
        timeout_us = self._settings.request_timeout
        return TlsListener(listener, self.protocol, self._certificates, timeout_us, self.shared)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully."""
        self._leaving()
        if delay_us := self._settings.shutdown_delay:
            await pause(self._at_once, delay_us / SECOND)
        for listener in self.listeners:
            listener.close()
        self._draining()
        self.shared.is_draining = True
        for _ in range(_LAST_ANSWER_CHECKS):
            if await pause(self._abandons, _CHECK_EVERY_S) or not self.shared.open:
                break
        for each in sockets or ():
            each.close()
        for connection in list(self.shared.open):
            connection.shut_down()
        drain_s = max(_DRAIN_S_MIN, self._settings.drain_timeout / SECOND)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._drained()
        if self.shared.tasks and not self._abandons.is_set():
            _log.error("%d requests were not answered in time: cancelled", len(self.shared.tasks))
            for task in self.shared.tasks:
                task.cancel()

    async def _drained(self) -> None:
        """Wait until all requests are answered and all connections closed."""
        while self.shared.open or self.shared.tasks:
            if await pause(self._abandons, _CHECK_EVERY_S):
                return
        for listener in self.listeners:
            await listener.wait_closed()
