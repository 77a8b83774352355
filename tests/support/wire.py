"""Services behind real sockets in this process, their clock in the test's hand.

Each is served by the settings that a real process is served by, with a protocol of the test's
choice. All run in one event loop, of the kind that a real process runs.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from api.direct import direct_protocol
from api.protocol import cut_slow_clients, timed_protocol
from api.serve import _config
from tests.support.app import App

#: Turns of the loop after which what was sent here has been read there.
_TURNS = 4
_REQUEST_TIMEOUT_US = 10_000_000
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class _Server(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Wire:
    """One service, and the port that it listens on."""

    def __init__(self, app: App, server: _Server, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port

    @property
    def service(self) -> Any:
        return self.app.application.service

    @property
    def connections(self) -> set[Any]:
        """The protocols of the connections that are open."""
        return self.server.server_state.connections

    async def tell(self, *parts: bytes) -> bytes:
        """All that comes back, until the service closes, on a connection that *parts* are sent on,
        each part for itself."""
        reader, writer = await self.connect()
        try:
            for part in parts:
                if not writer.is_closing():
                    writer.write(part)
                    await turns()
            return await rest_of(reader)
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


async def turns(count: int = _TURNS) -> None:
    """Let the loop turn: what is ready happens."""
    for _ in range(count):
        await asyncio.sleep(0)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes, kindly or not."""
    received = bytearray()
    async with asyncio.timeout(30):
        try:
            while data := await reader.read(65_536):
                received += data
        except ConnectionError:
            pass
    return bytes(received)


def statuses(received: bytes) -> list[int]:
    """The status of each answer in *received*."""
    return [int(each) for each in _STATUS.findall(received)]


@asynccontextmanager
async def wired(
    directory: Path,
    *,
    direct: bool = True,
    request_timeout_us: int = _REQUEST_TIMEOUT_US,
    keep_alive_s: float | None = None,
    socket_bytes: int | None = None,
    storage: str = "sqlite",
) -> AsyncIterator[Wire]:
    """A service that listens; without *direct*, every request goes through ASGI.

    The machine keeps about *socket_bytes* for each connection and way, if they are given.
    """
    app = App(storage, directory)
    await app.start()
    application = app.application
    config = _config(application, application.settings)
    config.http = (
        direct_protocol(application.front, application.service, request_timeout_us)
        if direct
        else timed_protocol(request_timeout_us)
    )
    if keep_alive_s is not None:
        config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
    server = _Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if socket_bytes is not None:
                # What is accepted has what its listener has.
                listener.setsockopt(socket.SOL_SOCKET, option, socket_bytes)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        sweeper = asyncio.create_task(
            cut_slow_clients(server.server_state.connections, request_timeout_us)
        )
        try:
            yield Wire(app, server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            # A connection that a test left open must not hold up the end.
            for each in list(server.server_state.connections):
                each.transport.abort()
            await serving
            sweeper.cancel()
            await app.stop()


def runner() -> asyncio.Runner:
    """Runs a loop of the kind that a process of the service runs."""
    factory = uvicorn.Config(lambda *_: None, loop="auto").get_loop_factory()
    return asyncio.Runner(loop_factory=factory)
