"""What is broken: the servers of a store, two API processes, two rollup workers, and a relay before
each server that others connect to.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from scripts.service_process import HOST, CounterProcess, ServiceError, free_ports
from tests.chaos.clocks import ShiftedClock
from tests.chaos.deployments import Deployment
from tests.simulation.plan import Config
from tests.support.relay import Relay

NAMESPACES: Final = (("one", "ACCURATE"), ("two", "EVENTUAL"))
CLOCK_OFF_MAX_US: Final = 15 * SECOND
_REQUEST_TIMEOUT_S: Final = 10.0
_REQUESTS_AT_ONCE: Final = 64
#: A response that a proxy may have cut short.
_NO_ANSWER: Final = {"code": "no_answer"}


def config_of(seed: int, apis: int, workers: int) -> Config:
    """The settings of the service, for the checker. Times are short, so all limits are reached."""
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
        # Each slot is renewed several times in it, by a compare-and-set of three nodes: on a
        # machine that is too slow for that no worker keeps one. Faults last in proportion.
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
    """The servers, the relays before them, and the clients."""

    def __init__(self, folder: Path, seed: int, deployment: Deployment) -> None:
        self.deployment = deployment
        self.folder = folder
        self.clock = ShiftedClock(folder / "clock")
        self._ports = free_ports(2)
        self.api_relays = [Relay(HOST, port) for port in self._ports]
        self.config = deployment.adapted(config_of(seed, len(self._ports), 2))
        self.created_us = 0
        self.has_transactions = deployment.has_transactions
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
            environment={**self.deployment.environment, **(self.clock.environment if own else {})},
        )

    def _flags(self) -> list[str]:
        config = self.config
        flags = {
            "retention": f"{config.retention_us // HOUR}h",
            "slice": f"{config.slice_us // MINUTE}m",
            "write-timeout": f"{config.write_timeout_us // SECOND}s",
            **self.deployment.flags(config),
        }
        return [f"--{name}={value}" for name, value in flags.items()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything started; all of it gone at the end."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.deployment.running())
            for relay in self.api_relays:
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
            self.created_us = self.true_us
            yield

    async def _start(self) -> None:
        store = self._flags()
        schema = self._process("schema", ["schema", "apply", *store], "")
        try:
            await schema.run()
        finally:
            await schema.destroy()
        common = [*store, f"--lease-time={self.config.lease_us // SECOND}s"]
        for _, relay in self.deployment.caches:
            common.append("--cache=memcached://{}:{}".format(*relay.address))
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
        for each in (*self.api_processes, *self.workers):
            await each.destroy()

    def logs(self) -> dict[str, str]:
        """The output of every process, by its name."""
        return {
            path.stem: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(self.folder.glob("*.log"))
        }

    # Observations of clients.

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
