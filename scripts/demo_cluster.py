"""The demo's service of many processes: two API processes and two rollup workers over PostgreSQL,
or over three nodes of Cassandra and memcached, each a process of its own on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.demo_deployment import Load, Outage
from scripts.demo_process import HOST, LOG_TAIL_CHARS, CounterProcess, ServiceError, free_ports
from scripts.postgresql_server import PostgresqlServer

NODES: Final = 3
API_PROCESSES: Final = 2
ROLLUP_WORKERS: Final = 2
CONSISTENCY: Final = "LOCAL_QUORUM"
#: Three nodes on a small machine write some thousand rows a second, so only a part is counted.
OCCURRENCES: Final = 150_000
_WATCH_S: Final = 0.2


class ClusterServer:
    """A Cassandra node or a memcached, whose calls block: each runs in a thread."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._is_up = False
        self._calls: set[asyncio.Future[bool]] = set()

    @property
    def name(self) -> str:
        return self._process.name

    async def start(self) -> None:
        await self._call(self._process.start)
        self._is_up = True

    async def kill(self) -> None:
        self._is_up = False
        if not await self._call(self._process.kill):
            raise self._ended()

    def check(self) -> None:
        """Raise ServiceError if it ended unexpectedly."""
        if self._is_up and self._process.pid() is None:
            raise self._ended()

    async def destroy(self) -> None:
        """Stop it, even during a start that was cancelled."""
        self._is_up = False
        while True:
            await asyncio.to_thread(self._process.kill)
            if not self._calls:
                return
            await asyncio.wait(self._calls, timeout=_WATCH_S)

    async def _call(self, work: Callable[[], bool]) -> bool:
        call = asyncio.get_running_loop().run_in_executor(None, work)
        self._calls.add(call)
        call.add_done_callback(self._done)
        try:
            # A thread cannot be cancelled: its waiter leaves, and destroy() stops it.
            return await asyncio.shield(call)
        except ClusterError as error:
            raise ServiceError(str(error)) from error

    def _done(self, call: asyncio.Future[bool]) -> None:
        self._calls.discard(call)
        # After a cancellation, the failure of a killed start is ignored.
        call.exception()

    def _ended(self) -> ServiceError:
        log = self._process.log.read_text(encoding="utf-8", errors="replace")
        return ServiceError(f"{self.name} ended by itself:\n{log[-LOG_TAIL_CHARS:]}")


class Stores(Protocol):
    """The servers that the processes share, and how the demo uses them."""

    load: Load
    #: It holds the servers' folders, and nothing else.
    directory: Path
    servers: Sequence[ServerProcess]
    store_flags: Sequence[str]
    cache_flags: Sequence[str]
    environment: Mapping[str, str]

    def outages(self, rng: random.Random, servers: Sequence[ClusterServer]) -> list[Outage]:
        """Return when which of *servers* is killed."""
        ...

    async def prepare(self) -> None:
        """Wait until the servers, which run, can take a schema. Raises ServiceError."""
        ...

    def __str__(self) -> str: ...


class PostgresqlAlone:
    """One PostgreSQL server, which is killed and recovers."""

    load: Load = Load(
        occurrences=None,
        batch_items=500,
        read_items=1_000,
        clients=8,
        hedge_all=False,
        rollup_timeout_s=60.0,
    )
    store_flags: Sequence[str] = ("--store", "postgresql")
    cache_flags: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        # The server's user, which is not root, needs a way to its files.
        folder.chmod(0o711)
        self.directory = folder / "servers"
        self._server = PostgresqlServer(self.directory / "postgresql")
        self.servers: Sequence[ServerProcess] = (self._server,)
        self.environment: Mapping[str, str] = {"COUNTER_DSN": self._server.dsn()}

    def outages(self, rng: random.Random, servers: Sequence[ClusterServer]) -> list[Outage]:
        """Once it is back at once, and once after longer than the accept limit."""
        (server,) = servers
        return [Outage(server, 0.2, 0.0), Outage(server, 0.7, 8.0)]

    async def prepare(self) -> None:
        pass

    def __str__(self) -> str:
        return f"PostgreSQL on {HOST}:{self._server.port}"


class CassandraNodes:
    """Three nodes, a quorum of them for each write and read, and memcached."""

    load: Load = Load(
        occurrences=OCCURRENCES,
        batch_items=100,
        read_items=100,
        clients=8,
        hedge_all=True,
        rollup_timeout_s=180.0,
    )
    environment: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        shape = Shape(nodes=NODES, memcached=1, quick=True)
        cluster = self._cluster = make_temporary(folder / "cluster", shape)
        self.directory = cluster.directory
        self.servers: Sequence[ServerProcess] = cluster.servers
        points = ",".join(f"{each}:{shape.cassandra_port}" for each in cluster.contact_points)
        self.store_flags: Sequence[str] = (
            *("--store", "cassandra", "--contact-points", points, "--replication", str(NODES)),
            *("--write-consistency", CONSISTENCY, "--read-consistency", CONSISTENCY),
        )
        self.cache_flags: Sequence[str] = ("--cache", cluster.memcached_url)

    def outages(self, rng: random.Random, servers: Sequence[ClusterServer]) -> list[Outage]:
        """Kill a node and memcached, some of the time both."""
        *nodes, memcached = servers
        return [Outage(rng.choice(nodes), 0.2, 15.0), Outage(memcached, 0.3, 5.0)]

    async def prepare(self) -> None:
        """Wait until the nodes know each other, because a schema needs a quorum."""
        # Imported here, because the demo on SQLite runs without the driver.
        from scripts.cluster_ring import wait_until_all_know_all

        cluster = self._cluster
        port = cluster.shape.cassandra_port
        try:
            await asyncio.to_thread(
                wait_until_all_know_all, cluster.contact_points, port, auth=False
            )
        except ClusterError as error:
            raise ServiceError(str(error)) from error

    def __str__(self) -> str:
        points = ", ".join(self._cluster.contact_points)
        return f"Cassandra on {points}, {CONSISTENCY} of {NODES} copies, and memcached"


class ManyProcesses:
    """Two of each process over the same *stores*; one of each kind is killed while it counts."""

    def __init__(self, folder: Path, seed: int, stores: Stores, *, keep: bool) -> None:
        self._folder = folder
        self._stores = stores
        self.load: Load = stores.load
        self._keep = keep
        self._exits = ExitStack()
        self._servers = [ClusterServer(each) for each in stores.servers]
        ports = free_ports(API_PROCESSES)
        self._api = [
            self._counter(f"api-{n}", "serve", "--port", str(port), sign="Serving on ")
            for n, port in enumerate(ports, 1)
        ]
        self._workers = [
            self._counter(f"rollup-{n}", "rollup", sign="Rolling up")
            for n in range(1, ROLLUP_WORKERS + 1)
        ]
        self.urls: Sequence[str] = [f"http://{HOST}:{port}" for port in ports]
        rng = random.Random(seed)
        #: The API process is away for longer than the accept limit, the worker for longer than its
        #: leases last, some of the time while a server is down as well.
        self.outages: Sequence[Outage] = [
            *stores.outages(rng, self._servers),
            Outage(rng.choice(self._api), 0.4, 8.0),
            Outage(rng.choice(self._workers), 0.6, 15.0),
        ]

    def _counter(self, name: str, command: str, *own: str, sign: str) -> CounterProcess:
        arguments = [command, *own, *self._stores.store_flags]
        if command != "schema":
            arguments += [*self._stores.cache_flags, "--host", HOST]
        log = self._folder / f"{name}.log"
        return CounterProcess(name, arguments, log, sign, environment=self._stores.environment)

    async def start(self, say: Callable[[str], None]) -> None:
        servers = [each.name for each in self._servers]
        if not self._keep:
            self._exits.enter_context(dies_with_us(self._stores.directory))
        say(f"starting {', '.join(servers)}")
        for server in self._servers:
            await server.start()
        await self._stores.prepare()
        await self._counter("schema", "schema", "apply", sign="").run()
        for each in (*self._api, *self._workers):
            await each.start()
        say(
            f"{self._stores}; {API_PROCESSES} API processes on {', '.join(self.urls)};"
            f" {ROLLUP_WORKERS} rollup workers"
        )

    async def watch(self) -> None:
        watches = [each.watch() for each in (*self._api, *self._workers)]
        await asyncio.gather(*watches, self._watch_servers())

    async def _watch_servers(self) -> None:
        while True:
            for server in self._servers:
                server.check()
            await asyncio.sleep(_WATCH_S)

    async def stop(self) -> None:
        for each in (*self._api, *self._workers):
            await each.stop()

    async def destroy(self) -> None:
        for each in (*self._api, *self._workers):
            await each.destroy()
        for server in self._servers:
            await server.destroy()
        await asyncio.to_thread(self._exits.close)
