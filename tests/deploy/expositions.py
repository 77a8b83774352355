"""Everything that the service exposes to Prometheus, from a server and from parts."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from api.telemetry.exposition import MetricsDirectory
from counter.core.clock_guard import ClockGuard
from counter.metrics import StoreTally
from counter.ports import Cache, Store
from counter.storage.memcached import MemcachedCache
from counter.telemetry.families import Exposition, text_of
from counter.telemetry.store_metrics import ClockMetrics, StoreMetrics
from counter.testing.clock import FakeClock
from rollup.metrics import RollupMetrics
from rollup.partitions import Outlook
from tests.rollup.world import CLOSING, begun
from tests.support.server import serving
from tests.support.waiting import eventually


async def of_a_server(folder: Path) -> str:
    """The metrics of ``counter serve`` after some traffic, good and bad."""
    async with serving(folder / "data", folder / "logs") as server, server.client() as rest:
        for number in range(3):
            answer = await rest.http.post(
                "/v1/namespaces/default/counters/c/add",
                json={"delta": number},
                headers={"idempotency-key": f"order:{number}"},
            )
            assert answer.status_code == 200, answer.text
        for path in ("/v1/namespaces/default/counters/c", "/v1/nothing", "/readyz", "/nothing"):
            await rest.http.get(path)
        text = ""

        async def rolled_up() -> bool:
            nonlocal text
            text = (await rest.http.get("/metrics")).text
            return 'counter_rollup_lag_seconds{namespace="default"' in text

        await eventually(rolled_up, "a shard is rolled up")
        await server.stop()
    return text


async def of_a_worker() -> str:
    """The metrics of a worker: leases, clock, remote cache and growing partitions."""
    world, _ = await begun()
    guard = ClockGuard(world.store.control, world.clock)
    await guard.measure()
    process = world.process("a", guard=guard)
    assert process.leases is not None
    await process.leases.update()
    await world.add_many(3)
    world.clock.advance(CLOSING)
    await process.leases.update()
    await process.worker.tick()
    process.worker.partitions.outlooks["default"] = Outlook(1, 2, 3_000_000, 5_000_000, 1)
    store = SimpleNamespace(
        tally=StoreTally(("write", "read", "compare_and_set")),
        queues=lambda: {"store_statements": 0},
    )
    cache = MemcachedCache([("127.0.0.1", 1)], FakeClock(0))
    parts = (
        RollupMetrics(process.worker, world.clock, process.leases),
        StoreMetrics(cast(Store, store), cast(Cache, cache)),
        ClockMetrics(guard),
    )
    text = Exposition(parts).text().decode()
    await cache.close()
    return text


def of_several(folder: Path) -> str:
    """The metrics of a process that shares its port with another."""
    nothing: Iterable[Metric] = ()
    return text_of(MetricsDirectory(folder, 0, 2, FakeClock(0)).gathered(nothing)).decode()


def everything(folder: Path) -> str:
    """All of it, one after the other: families may come twice."""
    text = asyncio.run(of_a_server(folder)) + asyncio.run(of_a_worker())
    return text + of_several(folder)


def families_of(text: str) -> dict[str, Any]:
    """Type, labels and names of samples of each family, by its name as it is documented."""
    found: dict[str, Any] = {}
    for part in text.split("# HELP ")[1:]:
        for family in text_string_to_metric_families(f"# HELP {part}"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            each = found.setdefault(
                name, SimpleNamespace(kind=family.type, labels=set(), samples={name})
            )
            for sample in family.samples:
                each.labels |= sample.labels.keys() - {"le"}
                each.samples.add(sample.name)
            if family.type == "histogram":
                each.samples |= {f"{name}_{end}" for end in ("bucket", "count", "sum")}
    return found
