"""A cluster of a benchmark's own: Cassandra and a memcached, and processes over them."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from subprocess import run
from typing import Any, Final

import httpx

from benchmarks.harness import (
    ROOT,
    Bench,
    BenchError,
    MissingToolError,
    Server,
    check,
    cpu_s_of,
    python_module,
    serving,
)
from counter.limits import LEASE_LOOK_US, SECOND
from counter.storage.cassandra.tables import events_table
from scripts import cluster_jars, cluster_servers
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary

KEYSPACE: Final = "bench"
_POLL_S: Final = 0.05
_CREATE_TIMEOUT_S: Final = 30.0
_PAGE_ROWS: Final = 5_000
#: Most of the node's own speed is compiled while it runs.
HEAP_MB: Final = 768
#: Below the range that systems take outgoing ports from.
_PORTS: Final = range(20_000, 30_000)


def missing() -> str | None:
    """What to install before a cluster can run here; None where all of it is there."""
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

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._port = _free_port()
        super().__init__([*arguments, "--metrics-port", str(self._port)], log)

    def _ready_at(self) -> str | None:
        url = f"http://127.0.0.1:{self._port}"
        try:
            answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=5.0)
        except httpx.TransportError:
            return None
        return url if answer.status_code == 200 else None

    def counters(self) -> int:
        """How many counters it wrote so far."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("counter_rollup_counters_total "):
                return int(float(line.split()[1]))
        raise BenchError("the worker does not tell how many counters it wrote")


class Site:
    """A running cluster with the schema in it, what is started over it, and its rows."""

    def __init__(self, bench: Bench, cluster: Cluster, dataset: Sequence[str]) -> None:
        self._bench = bench
        self.cluster = cluster
        self.contact_point = f"{cluster.contact_points[0]}:{cluster.shape.cassandra_port}"
        self.flags = (
            *("--store", "cassandra", "--contact-points", self.contact_point),
            *("--keyspace", KEYSPACE, "--replication", str(cluster.shape.nodes), *dataset),
        )
        self._made = 0
        schema = python_module("counter", "schema", "apply", *self.flags)
        done = run(schema, cwd=ROOT, capture_output=True, text=True, check=False)
        check(done.returncode == 0, f"the schema cannot be applied: {done.stdout}{done.stderr}")
        self._session = self._connect()

    def _connect(self) -> Any:
        from counter.storage.cassandra.driver import new_cluster
        from counter.storage.cassandra.options import CassandraOptions

        host, _, port = self.contact_point.rpartition(":")
        self._driver = new_cluster(CassandraOptions([(host, int(port))]))
        return self._driver.connect()

    def close(self) -> None:
        """Let go of the connection."""
        self._driver.shutdown()

    @contextmanager
    def api(self, *flags: str) -> Iterator[Server]:
        """``counter serve`` over the cluster at a free port."""
        arguments = ["counter", "serve", "--port", "0", *self.flags, *self.cache, *flags]
        with serving(arguments, self._bench.fresh_folder("serve.log")) as server:
            yield server

    @contextmanager
    def variant(self, name: str) -> Iterator[Server]:
        """One of the servers of benchmarks/variants.py over the cluster."""
        arguments = ["benchmarks.variants", name, "--port", "0", *self.flags, *self.cache]
        with serving(arguments, self._bench.fresh_folder(f"{name}.log")) as server:
            yield server

    def worker(self, *flags: str) -> Worker:
        """Start ``counter rollup``; the caller stops or kills it."""
        arguments = ["counter", "rollup", *self.flags, *self.cache, *flags]
        return Worker(arguments, self._bench.fresh_folder("rollup.log"))

    @property
    def cache(self) -> tuple[str, str]:
        return ("--cache", self.cluster.memcached_url)

    def create(self, server: Server, **settings: Any) -> Place:
        """A namespace that nothing is in yet, EVENTUAL unless *settings* say otherwise."""
        self._made += 1
        name = f"n{self._made}"
        body = {"counter_type": "EVENTUAL", **settings}
        end_s = time.monotonic() + _CREATE_TIMEOUT_S
        while True:
            answer = server.client.put(f"/v1/namespaces/{name}", json=body)
            # A busy machine, and LWTs that were just loaded, may keep the store from answering.
            if answer.status_code != 503 or time.monotonic() > end_s:
                break
            time.sleep(_POLL_S)
        check(answer.is_success, f"no namespace: {answer.status_code} {answer.text[:300]}")
        rows = self.rows("SELECT id FROM bench.namespaces WHERE name = %s", name)
        return Place(name, rows[0][0], answer.json()["shards"])

    def rows(self, cql: str, *values: Any) -> list[Any]:
        """What Cassandra answers to *cql*."""
        from cassandra import ConsistencyLevel
        from cassandra.query import SimpleStatement

        statement = SimpleStatement(
            cql, fetch_size=_PAGE_ROWS, consistency_level=ConsistencyLevel.QUORUM
        )
        return list(self._session.execute(statement, values or None, timeout=60))

    def events(self, dataset: str = "default") -> Iterator[tuple[int, str, int]]:
        """Namespace, counter and delta of every event there is in *dataset*."""
        [(number,)] = self.rows("SELECT id FROM bench.datasets WHERE name = %s", dataset)
        for (start_us,) in self.rows("SELECT start FROM bench.slices WHERE dataset = %s", number):
            table = f"bench_{dataset}.{events_table(start_us)}"
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
        time.sleep(2 * LEASE_LOOK_US / SECOND)

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

    def cpu_s(self) -> float:
        """The CPU seconds of Cassandra and memcached so far."""
        return _cpu_s_of(self.cluster)

    def forget(self) -> None:
        """Delete everything, for the next user of the cluster."""
        for (keyspace,) in self.rows("SELECT keyspace_name FROM system_schema.keyspaces"):
            if keyspace.startswith(KEYSPACE):
                self._session.execute(f"DROP KEYSPACE {keyspace}", timeout=60)
        for each in self.cluster.memcached:
            each.kill()
            each.start()


@contextmanager
def site(bench: Bench, *dataset: str, nodes: int = 1) -> Iterator[Site]:
    """A cluster that is gone afterwards, all data on each of its *nodes*; *dataset* are flags of
    the schema. Raises MissingToolError."""
    if problem := missing():
        raise MissingToolError(problem)
    with _running(bench, nodes) as cluster:
        before_s = _cpu_s_of(cluster) if bench.quick else 0.0
        with bench.console.status("applying the schema"):
            made = Site(bench, cluster, dataset)
        try:
            yield made
            if bench.quick:
                made.forget()
        finally:
            bench.cluster_cpu_s += _cpu_s_of(cluster) - before_s
            made.close()


@contextmanager
def _running(bench: Bench, nodes: int) -> Iterator[Cluster]:
    """Yield a started cluster: a new one, but in a quick run, whose figures mean nothing, the same
    one for all."""
    if not bench.quick:
        with ExitStack() as stack:
            yield _started(bench, nodes, stack)
        return
    if nodes not in bench.clusters:
        bench.clusters[nodes] = _started(bench, nodes, bench.kept)
    yield bench.clusters[nodes]


def _started(bench: Bench, nodes: int, stack: ExitStack) -> Cluster:
    """A cluster of its own, gone when *stack* is closed."""
    directory = bench.fresh_folder("cluster")
    shape = Shape(nodes=nodes, memcached=1, heap_mb=HEAP_MB, quick=bench.quick)
    cluster = make_temporary(directory, shape)
    stack.enter_context(dies_with_us(directory))
    with bench.console.status("starting Cassandra and memcached"):
        cluster.start()
    return cluster


def _cpu_s_of(cluster: Cluster) -> float:
    return sum(cpu_s_of(pid) for each in cluster.servers if (pid := each.pid()))


def conditions(nodes: int = 1) -> tuple[tuple[str, str], ...]:
    """What the figures of a cluster depend on."""
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
        (
            "a retry is known",
            "by the service, and as an LWT, as long as events are retained; as an update of a"
            " native counter, never",
        ),
        ("cores shared", f"Cassandra, memcached and the load run on the same {os.cpu_count()}"),
    )


def _java() -> str:
    output = run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    return output.splitlines()[0].replace('"', "") if output else "an unknown Java"


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BenchError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


def wait_until(problem: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Poll until *holds*. Raises BenchError with *problem* after *timeout_s*."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        check(time.monotonic() < end_s, f"after {timeout_s:.0f} s: {problem}")
        time.sleep(_POLL_S)
