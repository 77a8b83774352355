"""Real worker processes over a real store, and the store as the test itself sees it."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.service import CounterService
from counter.errors import TokenPendingError, TokenTooOldError, UnavailableError
from counter.limits import LEASE_SLOTS
from counter.ports import Store
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Namespace, Token
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
#: Long enough for a busy machine, short enough to wait for.
LEASE_TIME = "6s"
#: Dataset and namespaces.
TIMES: Final[Mapping[str, Any]] = {
    "retention": "1h",
    "slice": "10m",
    "write_timeout": "1s",
    "rollup_window": "500ms",
    "accept_limit": "1s",
}


class Worker:
    """One process ``python -m rollup``."""

    def __init__(
        self, flags: list[str], log: Path, port: int | None, environment: Mapping[str, str]
    ) -> None:
        self._log = log
        self._url = f"http://127.0.0.1:{port}"
        given = flags if port is None else [*flags, f"--metrics-port={port}"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollup", *given],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("COUNTER_")},
                    **environment,
                },
                start_new_session=True,
            )

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    async def runs(self) -> None:
        """Wait until it says so."""

        async def said() -> bool:
            assert self.process.poll() is None, self.output()
            return "Rolling up" in self.output()

        await eventually(said, "the worker runs")

    async def ended(self) -> int:
        """Wait for its end; the exit code."""

        await eventually(lambda: self.process.poll() is not None, "the worker ends")
        assert self.process.returncode is not None
        return self.process.returncode

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            base_url=self._url, timeout=100, trust_env=False, verify=False
        ) as http:
            return await http.get(path)

    async def metric(self, name: str) -> float:
        families = text_string_to_metric_families((await self.get("/metrics")).text)
        return next(s.value for family in families for s in family.samples if s.name == name)

    def kill(self) -> None:
        """``kill -9``, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def worker(
    flags: list[str], log: Path, port: int | None = None, **environment: str
) -> Iterator[Worker]:
    """A process that does not outlive the test."""
    started = Worker(flags, log, port, environment)
    try:
        yield started
    finally:
        started.kill()


async def have_their_shares(*workers: Worker) -> None:
    """Wait until each holds its share of the slots: one that has registered is given them later."""

    async def shared() -> bool:
        held = [await each.metric("counter_rollup_slots") for each in workers]
        return min(held) >= LEASE_SLOTS // len(workers)

    await eventually(shared, "each worker holds its share of the slots")


@dataclass(slots=True)
class Desk:
    """The test's own way into the store."""

    store: Store
    service: CounterService
    namespace: Namespace

    async def add_many(self, number: int) -> None:
        """Add 1 to each of so many counters, however often it takes."""
        await asyncio.gather(*(self._add(f"c{each}") for each in range(number)))

    async def _add(self, counter: str) -> None:
        token: Token | None = None

        async def acknowledged() -> bool:
            nonlocal token
            token = token or Token(uuid.uuid4().bytes, SystemClock().now_us())
            try:
                await self.service.add(self.namespace, counter, 1, token)
            except TokenTooOldError as error:
                if error.applied is None:
                    raise
                token = None
                return False
            except (UnavailableError, TokenPendingError):
                return False
            return True

        await eventually(acknowledged, f"an add to {counter} is acknowledged")

    async def rolled_up(self, number: int, count: int) -> None:
        """Wait until each of so many counters is rolled up to *count*."""
        names = [f"c{each}" for each in range(number)]

        async def done() -> bool:
            try:
                heads = await self.store.rollups.heads(self.namespace, names)
            except UnavailableError:
                return False
            counts = [0 if head is None else head.checkpoint.count for head in heads]
            assert max(counts) <= count, "counted twice"
            return min(counts) == count

        await eventually(done, f"all counters are rolled up to {count}")

    async def shared_by(self, workers: int) -> None:
        """Wait until so many live."""

        async def live() -> bool:
            return len(await self.store.leases.workers()) == workers

        await eventually(live, f"{workers} workers share the slots")


@asynccontextmanager
async def desk_over(settings: Settings) -> AsyncIterator[Desk]:
    """A namespace of its own in the keyspace; workers make its slices."""
    clock = SystemClock()
    store = settings.kind.open(settings, clock)
    await store.open()
    try:
        service = CounterService(store, MemoryCache(clock), clock)
        name = f"n{uuid.uuid4().hex[:12]}"
        wanted = replace(settings.default_namespace(), payload_check=settings.payload_check)
        yield Desk(store, service, await service.namespaces.create(name, wanted))
    finally:
        await store.close()
