"""The services that the demo runs, and when which of their processes is killed.

Over SQLite the service is one process. Over PostgreSQL, and over three nodes of Cassandra with
memcached, it is two API processes and two rollup workers, and the servers are killed too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_process import ServerProcess
from scripts.demo_process import HOST, CounterProcess, ServiceError, free_ports
from scripts.postgresql_server import PostgresqlServer

StoreName = Literal["sqlite", "postgresql", "cassandra"]

NODES: Final = 3
CONSISTENCY: Final = "LOCAL_QUORUM"
#: Three nodes on a small machine write some thousand rows a second, so only a part is counted.
CASSANDRA_OCCURRENCES: Final = 150_000
_WATCH_S: Final = 0.2


class Server:
    """A server of the store or the cache, with blocking calls: each runs in a thread."""

    def __init__(self, process: ServerProcess) -> None:
        self.name = process.name
        self._process = process
        self._is_up = True

    async def start(self) -> None:
        await asyncio.to_thread(self._process.start)
        self._is_up = True

    async def kill(self) -> None:
        self._is_up = False
        if not await asyncio.to_thread(self._process.kill):
            raise self._ended()

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if it ends unexpectedly."""
        while True:
            if self._is_up and self._process.pid() is None:
                raise self._ended()
            await asyncio.sleep(_WATCH_S)

    async def destroy(self) -> None:
        self._is_up = False
        await asyncio.to_thread(self._process.kill)

    def _ended(self) -> ServiceError:
        return ServiceError(f"{self.name} ended by itself; its log is {self._process.log}")


@dataclass(frozen=True, slots=True)
class Outage:
    """Kill *server* when the share *at* of the adds is done; start it again *down_s* later."""

    server: Server | CounterProcess
    at: float
    down_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """A service of one or more processes, and the servers that they share."""

    #: One address for each API process.
    urls: Sequence[str]
    processes: Sequence[CounterProcess]
    #: In the order of time for each server.
    outages: Sequence[Outage]
    servers: Sequence[Server] = ()
    #: Holds the servers' folders, and nothing else; None without servers.
    directory: Path | None = None
    #: Starts the servers, and waits until they can take a schema.
    start_servers: Callable[[], object] = tuple
    #: Applies the schema before the other processes start.
    schema: CounterProcess | None = None
    #: How many occurrences are counted unless the command line says it; None for all.
    limit: int | None = None
    batch_items: int = 500
    #: Send every batch to two processes at once, not only some.
    hedge_all: bool = False

    @property
    def _everything(self) -> Sequence[Server | CounterProcess]:
        return (*self.servers, *self.processes)

    def guarded(self) -> AbstractContextManager[None]:
        """Kill the servers at the end of the block, or when this process ends in any way.

        It must be around the event loop, which waits at its end for threads that still start a
        server.
        """
        return nullcontext() if self.directory is None else dies_with_us(self.directory)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start everything; end the running servers after the block."""
        async with AsyncExitStack() as stack:
            for each in self._everything:
                stack.push_async_callback(each.destroy)
            await asyncio.to_thread(self.start_servers)
            if self.schema is not None:
                stack.push_async_callback(self.schema.destroy)
                await self.schema.run()
            for process in self.processes:
                await process.start()
            yield

    async def watch(self) -> None:
        """Run until cancelled. Raises ServiceError if anything ends unexpectedly."""
        await asyncio.gather(*(each.watch() for each in self._everything))

    async def stop(self) -> None:
        """Ask the service's processes to end. Raises ServiceError unless they exit cleanly."""
        for each in self.processes:
            await each.stop()


def deployment_over(store: StoreName, folder: Path) -> Deployment:
    """Return the service over *store*, with everything that it keeps in *folder*."""
    if store == "sqlite":
        return _over_sqlite(folder)
    return _over_postgresql(folder) if store == "postgresql" else _over_cassandra(folder)


def _over_sqlite(folder: Path) -> Deployment:
    (port,) = free_ports(1)
    arguments = ["serve", "--host", HOST, "--port", str(port), "--data", str(folder / "data")]
    service = CounterProcess("the service", arguments, folder / "service.log", "Serving on ")
    # The second time it is down for longer than the accept limit: adds that were in flight then
    # come late and have to be resolved.
    outages = [Outage(service, at, down_s) for at, down_s in ((0.25, 0), (0.5, 6), (0.75, 0))]
    return Deployment([f"http://{HOST}:{port}"], [service], outages)


def _over_postgresql(folder: Path) -> Deployment:
    """One server, killed twice: it is back at once, then after longer than the accept limit."""
    # The server's user, which is not root, must reach its files.
    folder.chmod(0o711)
    postgresql = PostgresqlServer(folder / "servers" / "postgresql")
    server = Server(postgresql)
    flags = ["--store", "postgresql"]
    service = _processes(folder, flags, environment={"COUNTER_DSN": postgresql.dsn()})
    return replace(
        service,
        outages=[Outage(server, 0.2, 0), Outage(server, 0.7, 8), *service.outages],
        servers=[server],
        directory=folder / "servers",
        start_servers=postgresql.start,
    )


def _over_cassandra(folder: Path) -> Deployment:
    """Three nodes and memcached: a node and memcached are killed, some of the time both."""
    cluster = make_temporary(folder / "cluster", Shape(nodes=NODES, memcached=1, quick=True))
    port = cluster.shape.cassandra_port
    flags = [
        *("--store", "cassandra", "--replication", str(NODES)),
        *("--contact-points", ",".join(f"{each}:{port}" for each in cluster.contact_points)),
        *("--write-consistency", CONSISTENCY, "--read-consistency", CONSISTENCY),
    ]
    servers = [Server(each) for each in cluster.servers]
    *nodes, memcached = servers
    service = _processes(folder, flags, ["--cache", cluster.memcached_url])
    return replace(
        service,
        outages=[
            Outage(random.choice(nodes), 0.2, 15),
            Outage(memcached, 0.3, 5),
            *service.outages,
        ],
        servers=servers,
        directory=cluster.directory,
        start_servers=cluster.start,
        limit=CASSANDRA_OCCURRENCES,
        batch_items=100,
        hedge_all=True,
    )


def _processes(
    folder: Path,
    store: Sequence[str],
    cache: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Deployment:
    """Two API processes and two rollup workers over one store.

    An API process is away for longer than the accept limit, and a worker for longer than its leases
    last.
    """

    def process(name: str, sign: str, *arguments: str) -> CounterProcess:
        log = folder / f"{name}.log"
        return CounterProcess(name, [*arguments, *store], log, sign, environment=environment)

    ports = free_ports(2)
    common = (*cache, "--host", HOST)
    apis = [
        process(f"api-{n}", "Serving on ", "serve", "--port", str(port), *common)
        for n, port in enumerate(ports, 1)
    ]
    workers = [process(f"rollup-{n}", "Rolling up", "rollup", *common) for n in (1, 2)]
    return Deployment(
        [f"http://{HOST}:{port}" for port in ports],
        [*apis, *workers],
        [Outage(random.choice(apis), 0.4, 8), Outage(random.choice(workers), 0.6, 15)],
        schema=process("schema", "", "schema", "apply"),
    )
