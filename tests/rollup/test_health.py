"""The health of a worker over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import patch

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from counter.core.clock_guard import ClockGuard
from counter.errors import StartupError, StoreUnavailableError
from counter.limits import SECOND
from counter.security.host_rule import HostRule
from counter.storage.shared.memory_cache import MemoryCache
from rollup.leases import SLOTS
from rollup.process import Health, listening
from tests.rollup.world import CLOSING, Process, World, begun


class Watched:
    """A worker with its listener, and a client of it."""

    def __init__(self, world: World, process: Process, health: Health, url: str) -> None:
        self.world = world
        self.process = process
        self.health = health
        self.url = url

    async def get(self, path: str, method: str = "GET", host: str = "localhost") -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False) as http:
            return await http.request(method, path, headers={"host": host})

    async def metrics(self) -> dict[str, float]:
        answer = await self.get("/metrics")
        families = text_string_to_metric_families(answer.text)
        return {each.name: each.value for family in families for each in family.samples}


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    world, _ = await begun()
    guard = ClockGuard(world.store.control, world.clock)
    await guard.measure()
    process = world.process("a", guard=guard)
    assert process.leases is not None
    await process.leases.update()
    health = Health(
        world.store, world.clock, guard, process.leases, process.worker, MemoryCache(world.clock)
    )
    hosts = HostRule(("rollup-1",), any_address=True)
    async with listening(health, "127.0.0.1", 0, hosts) as port:
        yield Watched(world, process, health, f"http://127.0.0.1:{port}")


async def test_a_worker_that_works_is_alive_and_ready(watched: Watched) -> None:
    """With or without a body."""
    for path, status in (("/healthz", "alive"), ("/readyz", "ready")):
        answer = await watched.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": status})
        head = await watched.get(path, "HEAD")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]


async def test_a_worker_reports_its_error(watched: Watched) -> None:
    """It is alive all the same: a restart would not help."""
    broken = StoreUnavailableError("a planted fault")
    with patch.object(watched.world.store, "ping", side_effect=broken):
        answer = await watched.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "a planted fault"
    watched.health.is_draining = True
    assert (await watched.get("/readyz")).status_code == 503
    assert (await watched.get("/healthz")).status_code == 200


async def test_metrics_report_progress_and_lag(watched: Watched) -> None:
    """In the words of Prometheus."""
    world, process = watched.world, watched.process
    await world.add_many(30)
    world.clock.advance(CLOSING)
    assert process.leases is not None
    await process.leases.update()
    await process.worker.tick()
    found = await watched.metrics()
    assert found["counter_rollup_counters_total"] == 30
    assert found["counter_rollup_passes_total"] == 16
    assert found["counter_rollup_failures_total"] == 0
    assert found["counter_rollup_up"] == 1
    assert found["counter_rollup_slots"] == len(SLOTS)
    assert found["counter_rollup_workers"] == 1
    assert 0 < found["counter_rollup_lag_seconds"] <= CLOSING / SECOND


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /readyz HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"nonsense\r\n\r\n", b"404"),
        (b"\xff\xfe \xff\r\n\r\n", b"404"),
        (b"GET /" + b"x" * 20_000, b""),
        (b"", b""),
    ],
    ids=["nothing there", "another method", "a query", "nonsense", "no text", "endless", "silent"],
)
async def test_junk_is_answered_or_closed(watched: Watched, sent: bytes, status: bytes) -> None:
    """And the next one is served."""
    host, _, port = watched.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    writer.write_eof()
    try:
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    writer.close()
    assert answer.partition(b" ")[2][:3] == status
    assert (await watched.get("/healthz")).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
async def test_a_foreign_name_is_not_answered(watched: Watched, path: str, host: str) -> None:
    """The name of a page that resolves to this machine: its browser lets it read the response."""
    answer = await watched.get(path, host=host)
    assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused")
    assert f"Host is {host!r}" in answer.json()["detail"]


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "127.0.0.1", "[::1]:9100", "10.1.2.3:9100", "[fd00::7]", "Rollup-1:9100"],
)
async def test_addresses_and_configured_names_are_answered(watched: Watched, host: str) -> None:
    """A probe of a container asks for its address, which is not known before."""
    assert (await watched.get("/healthz", host=host)).status_code == 200


async def test_a_port_that_is_taken_is_reported(watched: Watched) -> None:
    """With the fix."""
    port = int(watched.url.rpartition(":")[2])
    with pytest.raises(StartupError, match="--metrics-port"):
        async with listening(watched.health, "127.0.0.1", port, HostRule()):
            pass
