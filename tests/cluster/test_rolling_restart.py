"""Two API processes and two rollup workers over a real Cassandra, restarted one after the other
while a client adds: nothing is lost, nothing counts twice, and no response is of the restarts."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from counter_client import AsyncCounterClient, Options
from scripts.cluster_nodes import Cluster
from tests.cluster.test_commands import apply_schema, flags_of
from tests.rollup.processes import Worker, worker
from tests.support.server import Server, ports_in_a_row
from tests.support.waiting import eventually

PROCESSES = 2
COUNTERS = [f"c{number}" for number in range(4)]
#: Short enough to see adds rolled up.
WINDOWS = {"write_timeout": "2s", "accept_limit": "4s"}
#: Errors of a slow store, as on a busy machine, and of an add that is late because of it.
SLOW = {"write_timeout", "token_pending", "token_too_old"}


@dataclass(slots=True)
class Load:
    """The results of a program through the SDK, and the responses that the SDK sees."""

    urls: Sequence[str]
    added: int = 0
    failures: list[Exception] = field(default_factory=list)
    #: The codes of the problems among the responses.
    codes: set[str] = field(default_factory=set)
    enough: bool = False

    async def run(self) -> None:
        """Add to every counter, one after the other, until it is enough."""
        options = Options(trust_env=False)
        async with AsyncCounterClient(self.urls, options=options) as client:
            client._transport._http.event_hooks = {"response": [self._saw]}
            await asyncio.gather(*(self._adds(client, each) for each in COUNTERS))

    async def _saw(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            await response.aread()
            self.codes.add(response.json()["code"])

    async def _adds(self, client: AsyncCounterClient, counter: str) -> None:
        while not self.enough:
            try:
                await client.add(counter)
                self.added += 1
            except Exception as error:
                self.failures.append(error)
            await asyncio.sleep(0.02)

    async def goes_on(self) -> None:
        """Wait until more is added."""
        before = self.added

        await eventually(lambda: self.added >= before + 20, "adds go on")


async def restarted_workers(stack: AsyncExitStack, flags: list[str], logs: Path) -> None:
    """Two workers, and then two in their place."""

    def start(name: str) -> Worker:
        return stack.enter_context(worker(flags, logs / name))

    first = [start(f"old-{number}") for number in range(PROCESSES)]
    for each in first:
        await each.runs()
    for number, each in enumerate(first):
        each.process.terminate()
        await start(f"new-{number}").runs()
        assert await each.ended() == 0, each.output()


@pytest.mark.slow
async def test_a_rolling_restart_is_no_event(cassandra: Cluster, tmp_path: Path) -> None:
    flags = flags_of(cassandra, "rolling") | WINDOWS
    applied = await asyncio.to_thread(apply_schema, flags)
    assert applied.returncode == 0, applied.stderr
    first = ports_in_a_row(PROCESSES)
    ports = range(first, first + PROCESSES)
    async with AsyncExitStack() as stack:
        servers = []
        for port in ports:
            each = Server(tmp_path, tmp_path / str(port), {**flags, "port": str(port)})
            stack.callback(each.clean_up)
            servers.append(each)
        await asyncio.gather(*(each.start() for each in servers))
        load = Load([each.url for each in servers])
        running = asyncio.create_task(load.run())
        stack.callback(running.cancel)
        await load.goes_on()

        names = ("store", "contact_points", "keyspace")
        given = [f"--{name.replace('_', '-')}={flags[name]}" for name in names]
        workers = asyncio.create_task(restarted_workers(stack, given, tmp_path))
        for each in servers:
            assert await each.stop() == 0, each.all_errors()
            await load.goes_on()
            await each.start()
            await load.goes_on()
        await workers
        await load.goes_on()
        load.enough = True
        await running

        assert load.failures == []
        assert load.codes <= SLOW
        async with AsyncCounterClient(load.urls, options=Options(trust_env=False)) as client:

            async def total(max_staleness: str) -> int:
                counts = [await client.get(c, max_staleness=max_staleness) for c in COUNTERS]
                return sum(each.count for each in counts)

            assert await total("0s") == load.added

            async def rolled_up() -> bool:
                found = await total("1h")
                assert found <= load.added
                return found == load.added

            await eventually(rolled_up, "the new workers have counted all of it")
        assert [await each.stop() for each in servers] == [0] * PROCESSES
        assert "Traceback" not in "".join(each.all_errors() for each in servers)
