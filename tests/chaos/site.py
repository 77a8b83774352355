"""A real deployment to be broken: three Cassandra nodes, memcached, two API processes, two rollup
workers, and a relay before each server that anybody talks to.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary
from scripts.demo_process import HOST, CounterProcess, ServiceError, free_ports
from tests.chaos.clocks import ShiftedClock
from tests.simulation.plan import Config
from tests.support.relay import Relay

NODES: Final = 3
#: Nodes tell clients of addresses so much above their own, where the relays listen.
TOLD_ABOVE: Final = 100
NAMESPACES: Final = (("one", "ACCURATE"), ("two", "EVENTUAL"))
CLOCK_OFF_MAX_US: Final = 15 * SECOND
_REQUEST_TIMEOUT_S: Final = 10.0
_REQUESTS_AT_ONCE: Final = 64
#: What no answer looks like where a proxy may have cut it short.
_NO_ANSWER: Final = {"code": "no_answer"}


def config_of(seed: int, apis: int, workers: int) -> Config:
    """What is told to the service, for whoever judges it. Times are short, so that tokens become
    late, windows close and leases run out all the time."""
    return Config(
        seed=seed,
        window_us=SECOND,
        accept_us=2 * SECOND,
        write_timeout_us=SECOND,
        skew_us=250 * MILLISECOND,
        retention_us=HOUR,
        slice_us=10 * MINUTE,
        time_bucket_us=5 * MINUTE,
        event_buckets=2,
        shards=4,
        # Each slot is taken anew several times in it, by a compare-and-set of three nodes: on a
        # machine that is too slow for that nobody keeps any. Faults last in proportion.
        lease_us=6 * SECOND,
        payload_check="guard",
        cache_ttl_us=SECOND,
        namespaces=NAMESPACES,
        # The clock of the first is set at times: it refuses to write then, and reads by that clock.
        offsets_us=(CLOCK_OFF_MAX_US, *(0,) * (apis + workers - 1)),
        apis=apis,
        workers=workers,
        end_us=8 * SECOND,
    )


class Site:
    """The servers, the relays before them, and where clients stand."""

    def __init__(self, folder: Path, seed: int) -> None:
        shape = Shape(nodes=NODES, memcached=1, quick=True, client_offset=TOLD_ABOVE)
        self.cluster = make_temporary(folder / "cluster", shape)
        self.folder = folder
        self.clock = ShiftedClock(folder / "clock")
        self.node_relays = [
            Relay(address, shape.cassandra_port) for address in self.cluster.contact_points
        ]
        host, _, port = self.cluster.memcached_addresses[0].rpartition(":")
        self.cache_relay = Relay(host, int(port))
        ports = free_ports(2)
        self.api_relays = [Relay(HOST, port) for port in ports]
        self.config = config_of(seed, len(ports), 2)
        self.keyspace = f"chaos_{uuid.uuid4().hex[:12]}"
        store = _flags(self.config, self.cluster, self.keyspace)
        self._schema = self._process("schema", ["schema", "apply", *store], "")
        self._store = store
        self._ports = ports
        self.api_processes: list[CounterProcess] = []
        self.workers: list[CounterProcess] = []
        self._clients: list[httpx.AsyncClient] = []
        self._room = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    def _process(self, name: str, arguments: list[str], sign: str) -> CounterProcess:
        # Only the first API process has a clock of its own.
        own = name == "api-0"
        return CounterProcess(
            name,
            arguments,
            self.folder / f"{name}.log",
            sign,
            module="tests.chaos.clocks" if own else "counter",
            environment=self.clock.environment if own else {},
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything started; all of it gone at the end."""
        async with AsyncExitStack() as stack:
            stack.enter_context(dies_with_us(self.cluster.directory))
            await asyncio.to_thread(self.cluster.start)
            shape = self.cluster.shape
            for number, relay in enumerate(self.node_relays, 1):
                told = shape.told_address_of(number)
                await stack.enter_async_context(
                    relay.listening(host=told, port=shape.cassandra_port)
                )
            for relay in (self.cache_relay, *self.api_relays):
                await stack.enter_async_context(relay.listening())
            stack.push_async_callback(self._destroy)
            await self._start()
            for relay in self.api_relays:
                base = "http://{}:{}".format(*relay.address)
                client = httpx.AsyncClient(
                    base_url=base, timeout=_REQUEST_TIMEOUT_S, trust_env=False
                )
                self._clients.append(await stack.enter_async_context(client))
            await self._make_namespaces()
            yield

    async def _start(self) -> None:
        await self._schema.run()
        cache = "memcached://{}:{}".format(*self.cache_relay.address)
        lease = f"--lease-time={self.config.lease_us // SECOND}s"
        common = [*self._store, "--cache", cache, lease]
        self.api_processes = [
            self._process(f"api-{n}", ["serve", *common, "--port", str(port)], "Serving on ")
            for n, port in enumerate(self._ports)
        ]
        self.workers = [
            self._process(f"rollup-{n}", ["rollup", *common], "Rolling up")
            for n in range(self.config.workers)
        ]
        await self.start()

    async def start(self) -> None:
        """Start the API processes and the workers. Raises ServiceError."""
        for each in (*self.api_processes, *self.workers):
            await each.start()

    async def _make_namespaces(self) -> None:
        config = self.config
        for name, counter_type in config.namespaces:
            settings = {
                "counter_type": counter_type,
                "rollup_window": f"{config.window_us // SECOND}s",
                "accept_limit": f"{config.accept_us // SECOND}s",
                "shards": config.shards,
                "payload_check": config.payload_check,
                "cache_ttl": f"{config.cache_ttl_us // SECOND}s",
            }
            status, body = await self.request(0, "PUT", f"/v1/namespaces/{name}", settings)
            if status != httpx.codes.CREATED:
                raise ServiceError(f"the namespace {name} cannot be made: {status} {body}")

    async def stop(self) -> None:
        """Ask all processes to end. Raises ServiceError unless each does, and well."""
        for each in (*self.api_processes, *self.workers):
            await each.stop()

    async def _destroy(self) -> None:
        for each in (self._schema, *self.api_processes, *self.workers):
            await each.destroy()

    def logs(self) -> dict[str, str]:
        """What every process wrote, by its name."""
        return {
            path.stem: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(self.folder.glob("*.log"))
        }

    # What clients see.

    @property
    def apis(self) -> int:
        """How many API processes there are."""
        return self.config.apis

    @property
    def true_us(self) -> int:
        """Now; the nodes and this process have the machine's clock."""
        return time.time_ns() // 1_000

    async def request(
        self,
        api: int,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Ask one API process through its relay, when there is room for one more request."""
        try:
            async with self._room:
                answer = await self._clients[api].request(method, path, json=body, headers=headers)
        except httpx.TransportError:
            return 0, _NO_ANSWER
        found: dict[str, Any] = answer.json()
        return answer.status_code, found


def _flags(config: Config, cluster: Cluster, keyspace: str) -> list[str]:
    shape = cluster.shape
    told = [shape.told_address_of(number) for number in range(1, shape.nodes + 1)]
    flags = {
        "store": "cassandra",
        "contact-points": ",".join(f"{host}:{shape.cassandra_port}" for host in told),
        "keyspace": keyspace,
        "replication": str(NODES),
        "retention": f"{config.retention_us // HOUR}h",
        "slice": f"{config.slice_us // MINUTE}m",
        "time-bucket": f"{config.time_bucket_us // MINUTE}m",
        "event-buckets": str(config.event_buckets),
        "write-timeout": f"{config.write_timeout_us // SECOND}s",
        "clock-skew-max": f"{config.skew_us // MILLISECOND}ms",
    }
    return [f"--{name}={value}" for name, value in flags.items()]
