"""The servers that a run breaks: Cassandra and memcached, or PostgreSQL."""

import asyncio
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

from counter.limits import MILLISECOND, MINUTE
from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_nodetool import nodetool
from scripts.cluster_process import ServerProcess
from scripts.postgresql_server import PostgresqlServer
from scripts.service_process import HOST
from tests.simulation.plan import Config
from tests.support.relay import Relay

NODES: Final = 3
#: Nodes tell clients of addresses so much above their own, where the relays listen.
ADVERTISED_ABOVE: Final = 100

Server = tuple[ServerProcess, Relay]


class Deployment(ABC):
    """The servers of a store and of a cache, and a relay before each."""

    what: str
    has_transactions = False
    stores: Sequence[Server]
    caches: Sequence[Server] = ()
    environment: Mapping[str, str] = {}

    def adapted(self, config: Config) -> Config:
        """Return *config* as it is over this store."""
        return config

    def mend(self) -> None:
        """Undo every fault of the servers."""
        for server, _ in (*self.stores, *self.caches):
            server.resume()
            server.start()

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Start everything; end all of it at the end."""

    @abstractmethod
    def flags(self, config: Config) -> Mapping[str, str]:
        """Return the settings that are the store's own."""

    @abstractmethod
    async def lose(self, random: Random, say: Callable[[str], None]) -> None:
        """Break the data of a stopped service, and repair them."""


class CassandraNodes(Deployment):
    """Three nodes and a memcached."""

    what = "three Cassandra nodes, memcached"

    def __init__(self, folder: Path) -> None:
        shape = Shape(nodes=NODES, memcached=1, quick=True, client_offset=ADVERTISED_ABOVE)
        self._cluster = make_temporary(folder / "cluster", shape)
        relays = [Relay(each, shape.cassandra_port) for each in self._cluster.contact_points]
        self.stores = list(zip(self._cluster.cassandra, relays, strict=True))
        host, _, port = self._cluster.memcached_addresses[0].rpartition(":")
        self.caches = [(self._cluster.memcached[0], Relay(host, int(port)))]
        self._keyspace = f"chaos_{uuid.uuid4().hex[:12]}"

    def mend(self) -> None:
        self._cluster.mend()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.enter_context(dies_with_us(self._cluster.directory))
            await asyncio.to_thread(self._cluster.start)
            shape = self._cluster.shape
            for number, (_, relay) in enumerate(self.stores, 1):
                host = shape.advertised_address_of(number)
                await stack.enter_async_context(
                    relay.listening(host=host, port=shape.cassandra_port)
                )
            for _, relay in self.caches:
                await stack.enter_async_context(relay.listening())
            yield

    def flags(self, config: Config) -> Mapping[str, str]:
        return {
            "store": "cassandra",
            "contact-points": ",".join("{}:{}".format(*relay.address) for _, relay in self.stores),
            "keyspace": self._keyspace,
            "replication": str(NODES),
            "time-bucket": f"{config.time_bucket_us // MINUTE}m",
            "event-buckets": str(config.event_buckets),
            "clock-skew-max": f"{config.skew_us // MILLISECOND}ms",
        }

    async def lose(self, random: Random, say: Callable[[str], None]) -> None:
        """Empty a node, repair it, and kill another one, so that the first must do for it.

        Until it is repaired, the node would be asked as if it knew everything, and two of three
        would be no quorum any more.
        """
        emptied, killed = random.sample(self._cluster.cassandra, 2)
        say(f"empty {emptied.name}, repair it, kill {killed.name}")
        await asyncio.to_thread(self._empty, emptied)
        for keyspace in (self._keyspace, f"{self._keyspace}_default"):
            await asyncio.to_thread(nodetool, emptied, "repair", "--full", keyspace)
        await asyncio.to_thread(killed.kill)

    def _empty(self, node: ServerProcess) -> None:
        node.stop()
        folder = node.log.parent
        tables = [
            path for path in (folder / "data").iterdir() if path.name.startswith(self._keyspace)
        ]
        if not tables:
            raise FileNotFoundError(f"{node.name} keeps nothing of {self._keyspace}")
        for path in (*tables, folder / "commitlog", folder / "hints"):
            shutil.rmtree(path)
        node.start()


class PostgresqlAlone(Deployment):
    """One server, and no cache."""

    what = "PostgreSQL"
    has_transactions = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "servers"
        server = PostgresqlServer(self._folder / "postgresql")
        relay = Relay(HOST, server.port)
        self._server = server
        self.stores = [(server, relay)]

    def adapted(self, config: Config) -> Config:
        """No process decides by its own clock, and each conflict is found."""
        return replace(config, offsets_us=(0,) * len(config.offsets_us), payload_check="strict")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        [(_, relay)] = self.stores
        async with AsyncExitStack() as stack:
            stack.enter_context(dies_with_us(self._folder))
            await asyncio.to_thread(self._server.start)
            await stack.enter_async_context(relay.listening())
            port = str(relay.address[1])
            dsn = self._server.dsn().replace(str(self._server.port), port)
            self.environment = {"COUNTER_DSN": dsn}
            yield

    def flags(self, config: Config) -> Mapping[str, str]:
        return {"store": "postgresql"}

    async def lose(self, random: Random, say: Callable[[str], None]) -> None:
        say("kill PostgreSQL, and have it recover from its log")
        await asyncio.to_thread(self._server.kill)
        await asyncio.to_thread(self._server.start)
