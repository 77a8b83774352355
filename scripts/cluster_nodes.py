"""A real cluster on loopback: Cassandra nodes, memcached and Redis, with faults for each.

    cluster = Cluster.create(Path(".cluster/dev"), Shape(nodes=3))
    cluster.start()
    cluster.cassandra[1].kill()
    cluster.mend()
    cluster.wipe()

Several clusters can run at once, each in its own folder and at its own addresses: all of
127.0.0.0/8 is loopback on Linux.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from scripts.cluster_jars import ROOT
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.cluster_servers import (
    STORAGE_PORT,
    CassandraShape,
    cassandra_node,
    memcached_server,
    redis_server,
)

_FREE_BLOCK_TRIES: Final = 100

_CacheServer = Callable[[str, Path, str, int], ServerProcess]


@dataclass(frozen=True, slots=True)
class Shape(CassandraShape):
    """The parts of a cluster; server *n* of each kind is at *address* + n - 1."""

    memcached: int = 1
    redis: int = 0
    memcached_port: int = 11211
    redis_port: int = 6379


class Cluster:
    """The servers of one folder, whichever process started them."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.directory = directory
        self.shape = shape
        self.cassandra = tuple(
            cassandra_node(f"cassandra-{n}", directory / f"cassandra-{n}", n, shape)
            for n in range(1, shape.nodes + 1)
        )
        self.memcached = self._caches(
            memcached_server, "memcached", shape.memcached, shape.memcached_port
        )
        self.redis = self._caches(redis_server, "redis", shape.redis, shape.redis_port)

    def _caches(
        self, server: _CacheServer, kind: str, number: int, port: int
    ) -> tuple[ServerProcess, ...]:
        return tuple(
            server(f"{kind}-{n}", self.directory / f"{kind}-{n}", self.shape.address_of(n), port)
            for n in range(1, number + 1)
        )

    @classmethod
    def create(cls, directory: Path, shape: Shape) -> Cluster:
        """The cluster of *directory*, made with *shape* if there is none.

        Raises ClusterError if one of another shape exists.
        """
        directory = directory.resolve()
        if (standing := cls.find(directory)) is None:
            directory.mkdir(parents=True, exist_ok=True)
            _shape_file(directory).write_text(json.dumps(asdict(shape)), encoding="utf-8")
            return cls(directory, shape)
        if standing.shape != shape:
            raise ClusterError(
                f"{directory} holds another cluster: {standing.shape};"
                " wipe it first, or give another directory"
            )
        return standing

    @classmethod
    def find(cls, directory: Path) -> Cluster | None:
        """Return the cluster of *directory*; None if there is none."""
        try:
            text = _shape_file(directory).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return cls(directory.resolve(), Shape(**json.loads(text)))

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        return self.cassandra + self.memcached + self.redis

    @property
    def contact_points(self) -> list[str]:
        """The nodes' addresses; their port is ``shape.cassandra_port``."""
        return [self.shape.address_of(number) for number in range(1, self.shape.nodes + 1)]

    @property
    def memcached_addresses(self) -> list[str]:
        """``host:port`` of each memcached."""
        return [
            f"{self.shape.address_of(number)}:{self.shape.memcached_port}"
            for number in range(1, self.shape.memcached + 1)
        ]

    @property
    def memcached_url(self) -> str:
        return f"memcached://{','.join(self.memcached_addresses)}"

    @property
    def redis_url(self) -> str:
        """The URL of the first Redis."""
        return f"redis://{self.shape.address_of(1)}:{self.shape.redis_port}"

    def server(self, name: str) -> ServerProcess:
        """``2`` or ``cassandra-2``, ``memcached-1``. Raises ClusterError."""
        for each in self.servers:
            if each.name in (name, f"cassandra-{name}"):
                return each
        names = ", ".join(each.name for each in self.servers)
        raise ClusterError(f"there is no server {name!r}; there are: {names}")

    def start(self) -> list[str]:
        """Start the servers that do not run, wait until all answer, and return the started names.

        Nodes start one after the other, because two that join a ring at once disturb each other. A
        node answers some time before it knows the others.
        """
        caches = self.memcached + self.redis
        started = [each.name for each in caches if each.launch()]
        started += [each.name for each in self.cassandra if each.start()]
        for each in caches:
            each.wait_ready()
        if len(self.cassandra) > 1:
            # Imported here, because memcached alone is started without the driver.
            from scripts.cluster_ring import wait_until_all_know_all

            shape = self.shape
            wait_until_all_know_all(self.contact_points, shape.cassandra_port, auth=shape.auth)
        return started

    def mend(self) -> None:
        """Undo every fault: resume paused servers and restart dead ones.

        All nodes have joined the ring before, so that they can restart at once, after the seed.
        """
        for each in self.servers:
            each.resume()
        for seed in self.cassandra[:1]:
            seed.start()
        for node in self.cassandra[1:]:
            node.launch()
        self.start()

    def stop(self) -> list[str]:
        """Stop all servers and keep their data; the names of those that ran."""
        return [each.name for each in self.servers if each.stop()]

    def wipe(self) -> None:
        """Kill all servers and delete their data."""
        for each in self.servers:
            each.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def dies_with_us(directory: Path) -> Iterator[None]:
    """Kill the servers of *directory* and delete it when the block ends, or when this process ends
    in any way, ``kill -9`` included.

    A helper process reads a pipe whose other end only this process holds, so it sees the end of
    file however this process ends. It has its own session, so that a signal to this process group
    does not reach it.
    """
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "scripts.cluster_nodes", str(directory)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watchdog.communicate()


def free_address(count: int, *ports: int) -> str:
    """Return the first of *count* consecutive loopback addresses with *ports* free.

    The address is random, so that concurrent test runs do not collide.
    """
    for _ in range(_FREE_BLOCK_TRIES):
        first = IPv4Address(f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.1")
        if all(_is_free(str(first + n), port) for n in range(count) for port in ports):
            return str(first)
    raise ClusterError(
        f"no free loopback addresses for {ports}: this machine has 127.0.0.1 alone, as all but"
        " Linux do; add aliases for more of 127.0.0.0/8 to its loopback interface"
    )


def make_temporary(directory: Path, shape: Shape) -> Cluster:
    """A cluster like *shape* in *directory*, at addresses that are free."""
    count = max(shape.nodes, shape.memcached, shape.redis)
    ports = (shape.cassandra_port, STORAGE_PORT, shape.memcached_port, shape.redis_port)
    return Cluster.create(directory, replace(shape, address=free_address(count, *ports)))


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _shape_file(directory: Path) -> Path:
    return directory / "cluster.json"


def _watch(directory: Path) -> None:
    """Wait for the end of standard input, then kill all servers of *directory*, and delete it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    for file in directory.glob("*/pid"):
        # To kill a server of any kind, its pid file suffices.
        ServerProcess(file.parent.name, file.parent, list, bool, 0.0).kill()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
