"""The service in this process: the same wiring as in production, over ASGI, with a fake clock.

Nothing runs in the background: the test moves the clock and drives the rollup.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from counter.config.store_kinds import store_names
from counter.errors import StoreUnavailableError
from counter.testing.clock import FakeClock
from tests.support.lifespan import Lifespan
from tests.support.needs import need
from tests.support.parts import part_of
from tests.support.problems import check_end
from tests.support.rest import Rest
from tests.support.times import SECOND, START_US

# Each request over httpx's ASGITransport tries to import it, and searches the whole path in vain.
sys.modules.setdefault("sniffio", None)  # type: ignore[arg-type]

#: The default dataset and namespace: the defaults of the program, and ones that soon see an end.
WIDE: dict[str, Any] = {}
#: Over an engine that takes a millisecond for an event, one after the other, or where a machine
#: that is slow for a while must not fail an add.
SLOW: dict[str, Any] = {"write_timeout": "10s"}
SMALL: dict[str, Any] = {
    "retention": "10m",
    "slice": "5m",
    "write_timeout": "500ms",
    "rollup_window": "1s",
}

#: For tests of what a store alone decides or keeps: late tokens, conflicts, deletions, pages,
#: restarts. All other tests over HTTP run over SQLite and memory, one store with transactions and
#: one without; each store is tested by the contract suites.
every_store = pytest.mark.parametrize(
    "storage", ["sqlite", "memory", "postgresql", "dynamodb"], indirect=True
)


def forget_applications() -> None:
    """Clear FastAPI's cache of handlers, which keeps thousands of applications in memory."""
    for cached in vars(sys.modules.get("fastapi.dependencies.models", object)).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


class App:
    """One service after another over the same data."""

    def __init__(
        self,
        storage: str,
        directory: Path,
        *,
        small: bool = False,
        over_socket: bool = False,
        tracing: Any = None,
        beside: "App | None" = None,
        **settings: Any,
    ) -> None:
        """*over_socket* allows the fast lane; *beside* another one, both share a store."""
        self._api = need("api.app")
        self._settings = need("counter.storage.sqlite.settings").SqliteSettings(
            data=directory,
            **{
                "hosts": ("test",),
                **(SMALL if small else WIDE),
                **(SLOW if storage == "dynamodb" else {}),
                **settings,
            },
        )
        self._tracing = tracing
        self._over_socket = over_socket
        self.clock: FakeClock = FakeClock(START_US) if beside is None else beside.clock
        self._new_store: Callable[[], Any] = lambda: None
        dataset = replace(self._settings.dataset(), id=1)
        if beside is not None:
            self._new_store = beside._new_store
        elif storage == "memory":
            memory = need("counter.storage.memory").MemoryStore(self.clock, (dataset,))
            self._new_store = lambda: memory
        elif storage == "simulated":
            module = "calm" if "cassandra" in store_names() else "dynamodb_store"
            self._new_store = need(f"tests.simulation.{module}").stores_of(dataset, self.clock)
        elif storage != "sqlite":
            self._new_store = need(f"tests.support.{storage}").stores_of(dataset, self.clock)

    async def start(self) -> None:
        """Wire a service and run its start."""
        self._app = self._api.create_app(
            self._settings,
            store=self._new_store(),
            clock=self.clock,
            rollup=False,
            tracing=self._tracing,
        )
        self._lifespan = Lifespan(self._app)
        await self._lifespan.start()
        if self._over_socket:
            server = self._server = need("api.serve").make_server(self._app, self._settings)
            # Without the server's shutdown, which waits for connections.
            self._listener = await asyncio.get_running_loop().create_server(
                server.protocol, "127.0.0.1", 0
            )
            port = self._listener.sockets[0].getsockname()[1]
            # Certificates of authorities take 40 ms to load.
            transport: Any = httpx.AsyncHTTPTransport(verify=False)
            url = f"http://127.0.0.1:{port}"
        else:
            transport, url = httpx.ASGITransport(self._app), "http://test"
        hooks = {"response": [check_end]}
        self.http = httpx.AsyncClient(transport=transport, base_url=url, event_hooks=hooks)

    async def stop(self) -> None:
        """Run its end."""
        await self.http.aclose()
        if self._over_socket:
            self._listener.close()
            # Those of others: a browser keeps its own, and the loop may end before it closes them.
            for connection in list(self._server.shared.open):
                connection.transport.abort()
            await asyncio.sleep(0)
        await self._lifespan.stop()
        forget_applications()

    async def restart(self) -> None:
        """Another service over the same data, without the memory of the first."""
        await self.stop()
        await self.start()

    @property
    def rest(self) -> Rest:
        """The namespace ``default``."""
        return Rest(self.http)

    @property
    def application(self) -> Any:
        """The wired parts."""
        return self._app

    @property
    def store(self) -> Any:
        return self._app.store

    async def roll_up(self) -> None:
        """One pass of the worker: slices made and dropped, closed windows rolled up."""
        await self._app.worker.tick()

    async def roll_up_after(self, us: int) -> None:
        """The same after so much time."""
        self.clock.advance(us)
        await self.roll_up()

    async def pass_retention(self) -> None:
        """Let time pass until every event of now is dropped."""
        dataset = self._settings.dataset()
        for _ in range(dataset.retention_us // dataset.slice_us + 3):
            self.clock.advance(dataset.slice_us)
            for _ in range(2):
                await self.roll_up()


@asynccontextmanager
async def running(
    storage: str, directory: Path, *, small: bool = False, **more: Any
) -> AsyncIterator[App]:
    """A started service, stopped at the end; *more* is as for :class:`App`."""
    app = App(storage, directory, small=small, **more)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


@contextmanager
def bounds_of_a_few() -> Iterator[None]:
    """Shrink every bound of memory and of reads, so that tests reach it with few counters."""
    with (
        patch("counter.storage.sqlite.live._IDS_MAX", 2),
        patch("counter.storage.sqlite.live._TAIL_BYTES_MAX", 400),
        patch("counter.core.write._REMEMBERED_MAX", 2),
        patch("rollup.worker._MARKS_PER_READ", 2),
    ):
        yield


@contextmanager
def store_that_fails(app: App, method: str, *, after: bool = False) -> Iterator[None]:
    """Have calls of the store's *method* fail: before they do anything, or *after* they did it."""
    part = part_of(app.store, method)
    works = getattr(part, method)

    async def fails(*arguments: Any, **named: Any) -> None:
        if after:
            await works(*arguments, **named)
        raise StoreUnavailableError("a fault that a test planted", retry_after_us=SECOND)

    with patch.object(part, method, fails):
        yield


@contextmanager
def store_that_stalls(
    app: App, method: str, meanwhile: Callable[[], Awaitable[Any]]
) -> Iterator[None]:
    """Let the next call of *method* land only after *meanwhile* has run."""
    part = part_of(app.store, method)
    works = getattr(part, method)
    calls = iter([True])

    async def stalls(*arguments: Any, **named: Any) -> Any:
        if next(calls, False):
            await meanwhile()
        return await works(*arguments, **named)

    with patch.object(part, method, stalls):
        yield
