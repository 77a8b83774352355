"""The demo's service on a cluster: Cassandra on three nodes, memcached, two API processes, two
rollup workers, each a process of its own on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.demo_deployment import Load, Outage
from scripts.demo_process import HOST, LOG_TAIL_CHARS, CounterProcess, ServiceError, free_ports

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


class ManyProcesses:
    """Three copies of everything, a quorum of them for each write and read, and one server of each
    kind that is killed while the demo counts."""

    load: Load = Load(
        occurrences=OCCURRENCES,
        batch_items=100,
        read_items=100,
        clients=8,
        hedge_all=True,
        rollup_timeout_s=180.0,
    )

    def __init__(self, folder: Path, seed: int, *, keep: bool) -> None:
        self._folder = folder
        shape = Shape(nodes=NODES, memcached=1, quick=True)
        self._cluster = make_temporary(folder / "cluster", shape)
        self._keep = keep
        self._exits = ExitStack()
        self._servers = [ClusterServer(each) for each in self._cluster.servers]
        self._shared = self._store_flags()
        self._cached = [*self._shared, "--cache", self._cluster.memcached_url]
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
        self.outages: Sequence[Outage] = self._draw_outages(random.Random(seed))

    def _store_flags(self) -> list[str]:
        port = self._cluster.shape.cassandra_port
        points = ",".join(f"{address}:{port}" for address in self._cluster.contact_points)
        flags = ["--store", "cassandra", "--contact-points", points, "--replication", str(NODES)]
        return [*flags, "--write-consistency", CONSISTENCY, "--read-consistency", CONSISTENCY]

    def _counter(self, name: str, command: str, *own: str, sign: str) -> CounterProcess:
        arguments = [command, *self._cached, "--host", HOST, *own]
        return CounterProcess(name, arguments, self._folder / f"{name}.log", sign)

    def _draw_outages(self, rng: random.Random) -> list[Outage]:
        """Kill one of each kind, at different times, some of them while the node is down as well.

        The API process is away for longer than the accept limit, the worker for longer than its
        leases last.
        """
        *nodes, memcached = self._servers
        return [
            Outage(rng.choice(nodes), 0.2, 15.0),
            Outage(memcached, 0.3, 5.0),
            Outage(rng.choice(self._api), 0.4, 8.0),
            Outage(rng.choice(self._workers), 0.6, 15.0),
        ]

    async def start(self, say: Callable[[str], None]) -> None:
        if not self._keep:
            self._exits.enter_context(dies_with_us(self._cluster.directory))
        say(f"starting {NODES} Cassandra nodes and memcached: most of a minute")
        for server in self._servers:
            await server.start()
        await self._wait_for_ring()
        apply = ["schema", "apply", *self._shared]
        await CounterProcess("schema apply", apply, self._folder / "schema.log", "").run()
        for each in (*self._api, *self._workers):
            await each.start()
        say(
            f"Cassandra on {', '.join(self._cluster.contact_points)}, {CONSISTENCY} of {NODES}"
            f" copies; {API_PROCESSES} API processes on {', '.join(self.urls)};"
            f" {ROLLUP_WORKERS} rollup workers"
        )

    async def _wait_for_ring(self) -> None:
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
