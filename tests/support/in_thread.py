"""The service in a thread of this process: its own clock and rollup, requests over a real socket.

For tests of what asks a service, such as the clients and the commands. A test that kills the
service, or reads what it prints, starts a process (``tests.support.server``).
"""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.app import create_app
from api.serve import make_server
from api.server.server import Server
from counter.storage.sqlite.settings import SqliteSettings
from tests.support.server import SMALL_WINDOWS


@dataclass(frozen=True, slots=True)
class Service:
    """The address of the service, and its data directory."""

    url: str
    data: Path

    @property
    def pid(self) -> int:
        """The process that serves it."""
        return os.getpid()


@contextmanager
def in_thread(data: Path, **flags: str) -> Iterator[Service]:
    """Serve *data*, with small windows unless *flags* say otherwise; stop at the end."""
    settings = SqliteSettings(data=data, **{**SMALL_WINDOWS, **flags})  # type: ignore[arg-type]
    started: Future[tuple[asyncio.AbstractEventLoop, Server, int]] = Future()

    async def serve() -> None:
        application = create_app(settings)
        server = make_server(application, settings)
        async with application.running(rollup=True):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                loop, port = asyncio.get_running_loop(), listener.getsockname()[1]
                started.set_result((loop, server, port))
                await server.serve([listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="service")
    thread.start()
    loop, server, port = started.result()
    try:
        yield Service(f"http://127.0.0.1:{port}", data)
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join()
