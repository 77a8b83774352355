"""A relay before one server: it can lose or hold bytes, like a bad network."""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Passes bytes between clients and a server.

    While it is *deaf*, what clients send is lost; while it is *mute*, what the server answers is
    held, and passed on when it is mute no more. While it is *half_closed*, a connection on which a
    client sends is closed towards the server, and only the server can still speak. Each piece takes
    *delay_s* longer than it should. After *pieces* more, in both directions together, it is *deaf*
    and *mute*.
    """

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.deaf = False
        self.is_away = False
        self.half_closed = False
        self.delay_s = 0.0
        self.pieces = math.inf
        self.lost = 0
        self.refused = 0
        self.address = ("", 0)

    @classmethod
    def before(cls, url: str) -> "Relay":
        """A relay to the server at *url* on this machine."""
        return cls("127.0.0.1", int(url.rpartition(":")[2]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    @property
    def mute(self) -> bool:
        return not self._speaks.is_set()

    @mute.setter
    def mute(self, is_mute: bool) -> None:
        (self._speaks.clear if is_mute else self._speaks.set)()

    def go_away(self) -> None:
        """End all connections, and take no new ones while ``is_away`` is set."""
        self.is_away = True
        self.cut()

    def redirect(self, host: str, port: int) -> None:
        """Pass new connections to another server."""
        self.server = (host, port)

    def cut(self) -> None:
        """End all connections; new ones are welcome."""
        for task in self._tasks:
            task.cancel()

    async def has_lost(self) -> bool:
        """Whether anything was lost while it was deaf."""
        return self.lost > 0

    async def has_refused(self) -> bool:
        """Whether anybody came while it was away."""
        return self.refused > 0

    @asynccontextmanager
    async def listening(
        self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
    ) -> AsyncIterator[None]:
        """Listen at ``address``, a port of loopback; clients speak TLS if *tls* is given."""
        listener = await asyncio.start_server(self._pass, host, port, ssl=tls)
        self.address = listener.sockets[0].getsockname()[:2]
        try:
            yield
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            if self.is_away:
                self.refused += 1
            else:
                answers, requests = await asyncio.open_connection(*self.server)
                writers.append(requests)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._up(reader, requests))
                    both.create_task(self._down(answers, writer))
        except* (OSError, asyncio.CancelledError):
            # A side that went away takes the other one along.
            pass
        finally:
            self._tasks.discard(task)
            for each in writers:
                each.close()
            await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(65_536):
            self._count()
            if self.deaf:
                self.lost += len(sent)
                continue
            if self.half_closed and writer.can_write_eof():
                writer.write_eof()
                return
            await asyncio.sleep(self.delay_s)
            writer.write(sent)
            await writer.drain()
        writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(65_536):
            self._count()
            await self._speaks.wait()
            await asyncio.sleep(self.delay_s)
            writer.write(sent)
            await writer.drain()
        writer.close()

    def _count(self) -> None:
        if self.pieces <= 0:
            self.deaf = self.mute = True
        self.pieces -= 1
