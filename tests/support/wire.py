"""Services behind real sockets in this process, their clock in the test's hand.

Each is served by the settings that a real process is served by, with a protocol of the test's
choice. All run in one event loop, of the kind that a real process runs.
"""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from api.serve import make_server
from api.server.server import Server
from counter.background import loop_factory
from tests.support.app import App
from tests.support.problems import check_problem

#: Turns of the loop after which bytes that were sent here have been read there.
_TURNS = 4
_REQUEST_TIMEOUT_US = 10_000_000
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Wire:
    """One service, and the port that it listens on."""

    def __init__(self, app: App, server: Server, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port

    @property
    def service(self) -> Any:
        return self.app.application.service

    @property
    def connections(self) -> set[Any]:
        """The protocols of the connections that are open."""
        return self.server.shared.open

    async def tell(self, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """All bytes received until the service closes, after sending *parts* one by one."""
        reader, writer = await self.connect(tls)
        try:
            for part in parts:
                if not writer.is_closing():
                    writer.write(part)
                    await turns()
            return await rest_of(reader)
        finally:
            writer.close()

    async def connect(
        self, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)

    def client(self) -> httpx.AsyncClient:
        """A client that speaks to it over a socket."""
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", verify=False)


async def turns(count: int = _TURNS) -> None:
    """Let the loop turn: ready callbacks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the other side closes, kindly or not."""
    received = bytearray()
    async with asyncio.timeout(100):
        try:
            while data := await reader.read(65_536):
                received += data
        except ConnectionError:
            pass
    return bytes(received)


def statuses(received: bytes) -> list[int]:
    """The status of each response in *received*."""
    return [int(each) for each in _STATUS.findall(received)]


def problem_in(received: bytes, code: str) -> dict[str, Any]:
    """The problem that is the only response in *received*: it is this refusal."""
    head, _, body = received.partition(b"\r\n\r\n")
    problem: dict[str, Any] = json.loads(body)
    check_problem(problem)
    assert (statuses(head), problem["code"]) == ([problem["status"]], code)
    return problem


@asynccontextmanager
async def wired(
    directory: Path,
    *,
    request_timeout_us: int = _REQUEST_TIMEOUT_US,
    keep_alive_s: float | None = None,
    socket_bytes: int | None = None,
    storage: str = "sqlite",
    **settings: Any,
) -> AsyncIterator[Wire]:
    """A listening service, with about *socket_bytes* of kernel buffer a connection if given."""
    app = App(storage, directory, **settings)
    await app.start()
    application = app.application
    given = {"request_timeout": request_timeout_us, **settings}
    server = make_server(application, application.settings.model_copy(update=given))
    if keep_alive_s is not None:
        server.shared.keep_alive_s = keep_alive_s
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if socket_bytes is not None:
                # An accepted socket has the options of its listener.
                listener.setsockopt(socket.SOL_SOCKET, option, socket_bytes)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield Wire(app, server, listener.getsockname()[1])
        finally:
            server.stop()
            # A connection that a test left open must not hold up the end.
            for each in list(server.shared.open):
                each.transport.abort()
            await serving
            await app.stop()


def runner() -> asyncio.Runner:
    """Runs a loop of the kind that a process of the service runs."""
    return asyncio.Runner(loop_factory=loop_factory())
