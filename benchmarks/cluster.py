"""A cluster of a benchmark's own: Cassandra and a memcached, and processes over them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from subprocess import run
from typing import Any, Final

import httpx

from benchmarks.harness import (
    Bench,
    MissingToolError,
    Server,
    check,
    cpu_s_of,
    free_port,
    run_module,
    serving,
    wait_until,
)
from counter.limits import LEASE_READ_EVERY_US, SECOND
from scripts import cluster_jars, cluster_servers
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary

DATASET: Final = ("--retention=1d", "--slice=12h", "--time-bucket=1h", "--event-buckets=1")
_CREATE_TIMEOUT_S: Final = 30.0
_PAGE_ROWS: Final = 5_000
#: Most of the node's own speed is compiled while it runs.
HEAP_MB: Final = 768


def missing() -> str | None:
    """The packages to install before a cluster can run here; None if all are there."""
    for module in ("cassandra", "pymemcache"):
        if find_spec(module) is None:
            return (
                f"the Python package {module} is needed:"
                " pip install '.[cassandra,memcached]' in its checkout"
            )
    return cluster_jars.missing() or cluster_servers.memcached_missing()


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace: its path, and its id in the tables."""

    name: str
    id: int
    shards: int

    @property
    def base(self) -> str:
        return f"/v1/namespaces/{self.name}"


class Worker(Server):
    """A rollup worker: ``counter rollup`` in a process of its own."""

    def __init__(self, flags: Sequence[str], log: Path, **how: Any) -> None:
        self._port = free_port()
        port = ("--host=127.0.0.1", f"--metrics-port={self._port}")
        super().__init__(["counter", "rollup", *flags, *port], log, **how)

    def _ready_at(self) -> str | None:
        url = f"http://127.0.0.1:{self._port}"
        try:
            answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=5.0)
        except httpx.TransportError:
            return None
        return url if answer.status_code == 200 else None

    def counters(self) -> int:
        """How many counters it wrote so far."""
        return int(self.metrics("counter_rollup_counters_total")["counter_rollup_counters_total"])


class Site:
    """A running cluster with the schema, its processes, and its rows."""

    def __init__(self, bench: Bench, cluster: Cluster, dataset: Sequence[str]) -> None:
        self._bench = bench
        self.cluster = cluster
        self._host, self._port = cluster.contact_points[0], cluster.shape.cassandra_port
        flags = (
            *("--store=cassandra", f"--contact-points={self._host}:{self._port}"),
            *("--keyspace=bench", f"--replication={cluster.shape.nodes}", *dataset),
        )
        self._flags = (*flags, "--cache", cluster.memcached_url)
        self._made = 0
        run_module("counter", "schema", "apply", *flags)
        self._session = self._connect()

    def _connect(self) -> Any:
        from counter.storage.cassandra.driver import new_cluster
        from counter.storage.cassandra.options import CassandraOptions

        self._driver = new_cluster(CassandraOptions([(self._host, self._port)]))
        return self._driver.connect()

    def close(self) -> None:
        """Let go of the connection."""
        self._driver.shutdown()

    @contextmanager
    def api(self) -> Iterator[Server]:
        """``counter serve`` over the cluster at a free port."""
        arguments = ["counter", "serve", "--port", "0", *self._flags]
        with serving(arguments, self._bench.fresh_folder("serve.log")) as server:
            yield server

    def worker(self) -> Worker:
        """Start ``counter rollup``; the caller stops or kills it."""
        return Worker(self._flags, self._bench.fresh_folder("rollup.log"))

    def create(self, server: Server, **settings: Any) -> Place:
        """A namespace that nothing is in yet, EVENTUAL unless *settings* say otherwise."""
        self._made += 1
        name = f"n{self._made}"
        body = {"counter_type": "EVENTUAL", **settings}
        path = f"/v1/namespaces/{name}"
        # A busy machine may keep the store from answering at first.
        wait_until(
            f"{path} is not created",
            lambda: server.client.put(path, json=body).is_success,
            _CREATE_TIMEOUT_S,
        )
        [(number,)] = self.rows("SELECT id FROM bench.namespaces WHERE name = %s", name)
        return Place(name, number, server.get(path)["shards"])

    def rows(self, cql: str, *values: Any) -> list[Any]:
        """The response of Cassandra to *cql*."""
        from cassandra import ConsistencyLevel
        from cassandra.query import SimpleStatement

        statement = SimpleStatement(
            cql, fetch_size=_PAGE_ROWS, consistency_level=ConsistencyLevel.QUORUM
        )
        return list(self._session.execute(statement, values or None, timeout=60))

    def events(self) -> Iterator[tuple[int, str, int]]:
        """Namespace, counter and delta of every event there is."""
        [(number,)] = self.rows("SELECT id FROM bench.datasets WHERE name = %s", "default")
        for (start_us,) in self.rows("SELECT start FROM bench.slices WHERE dataset = %s", number):
            from counter.storage.cassandra.tables import events_table

            table = f"bench_default.{events_table(start_us)}"
            yield from self.rows(f"SELECT namespace, counter, delta FROM {table}")  # noqa: S608

    def watermarks(self, place: Place) -> list[int]:
        """How far each shard of *place* is rolled up."""
        cql = "SELECT through FROM bench_default.watermarks WHERE namespace = %s"
        found = [through_us for (through_us,) in self.rows(cql, place.id)]
        check(len(found) == place.shards, f"{len(found)} watermarks of {place.shards} shards")
        return found

    def wait_for_rollup(self, place: Place, through_us: int, timeout_s: float) -> None:
        """Until every shard of *place* is rolled up to *through_us*."""
        wait_until(
            "the rollup does not come so far",
            lambda: min(self.watermarks(place)) >= through_us,
            timeout_s,
        )

    def wait_for_shares(self, workers: int) -> None:
        """Until so many workers live: they share the slots two looks later."""

        def shared() -> bool:
            return len(list(self.rows("SELECT worker FROM bench.workers"))) == workers

        wait_until(f"{workers} workers do not share the slots", shared, 60.0)
        time.sleep(2 * LEASE_READ_EVERY_US / SECOND)

    def memcached_stats(self) -> dict[str, int]:
        """Return the statistics of memcached."""
        host, _, port = self.cluster.memcached_addresses[0].rpartition(":")
        answer = b""
        with socket.create_connection((host, int(port)), timeout=10) as asked:
            asked.sendall(b"stats\r\n")
            while not answer.endswith(b"END\r\n"):
                answer += asked.recv(65_536)
        lines = [line.split() for line in answer.decode().splitlines()]
        return {each[1]: int(each[2]) for each in lines if len(each) == 3 and each[2].isdigit()}


@contextmanager
def site(bench: Bench, *dataset: str, nodes: int = 1) -> Iterator[Site]:
    """A cluster that is gone afterwards, all data on each of its *nodes*; *dataset* are flags of
    the schema. Raises MissingToolError."""
    if problem := missing():
        raise MissingToolError(problem)
    directory = bench.fresh_folder("cluster")
    shape = Shape(nodes=nodes, memcached=1, heap_mb=HEAP_MB, quick=bench.quick)
    cluster = make_temporary(directory, shape)
    with dies_with_us(directory):
        with bench.console.status("starting Cassandra and memcached"):
            cluster.start()
            made = Site(bench, cluster, dataset)
        try:
            yield made
        finally:
            bench.cluster_cpu_s += _cpu_s_of(cluster)
            made.close()


def _cpu_s_of(cluster: Cluster) -> float:
    return sum(cpu_s_of(pid) for each in cluster.servers if (pid := each.pid()))


def conditions(nodes: int = 1) -> tuple[tuple[str, str], ...]:
    """The conditions of the figures of a cluster."""
    how_many = "one node" if nodes == 1 else f"{nodes} nodes, QUORUM"
    memcached = run(["memcached", "-V"], capture_output=True, text=True, check=False).stdout
    return (
        ("Cassandra", f"{cluster_jars.CASSANDRA}, {how_many}, {HEAP_MB} MB heap, {_java()}"),
        ("memcached", memcached.split()[-1]),
        ("cassandra-driver", version("cassandra-driver")),
        ("pymemcache", version("pymemcache")),
        (
            "durability",
            "an add is answered once it is in the commit log of a node, or of most of its nodes;"
            " the log goes to disk every 10 s",
        ),
        ("a retry is known", "as long as events are retained"),
        ("cores shared", f"Cassandra, memcached and the load run on the same {os.cpu_count()}"),
    )


def _java() -> str:
    output = run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    return output.splitlines()[0].replace('"', "") if output else "an unknown Java"
