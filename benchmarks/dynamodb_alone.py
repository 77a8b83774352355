"""The driver alone: a conditional put an add from one process, without the service.

    python -m benchmarks.dynamodb_alone --endpoint http://127.0.0.1:8000 --table bench_adds ...

So many puts are under way at a time, each of an event's item into a table of its own, refused if
the item exists.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from dataclasses import dataclass
from random import random
from typing import Annotated, Any, Final

import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from cyclopts import App, Parameter

from counter.background import tune_interpreter

_CONDITION: Final = "attribute_not_exists(pk)"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the items go, how many counters there are, and how many puts are under way."""

    endpoint: str
    table: str
    counters: int
    concurrency: int


class DriverAlone:
    """A closed loop over one client."""

    def __init__(self, client: Any, plan: Plan) -> None:
        self._put = client.put_item
        self._plan = plan
        self._table = plan.table
        self._run_id = secrets.token_bytes(8)
        self.begun = 0
        self.acknowledged = 0
        self.latencies_s: list[float] = []

    async def run(self, seconds: float) -> None:
        """Keep the loop full for *seconds*, then wait for what is under way."""
        end_s = time.perf_counter() + seconds
        await asyncio.gather(*(self._work(end_s) for _ in range(self._plan.concurrency)))

    async def _work(self, end_s: float) -> None:
        while (began_s := time.perf_counter()) < end_s:
            item = self._next_item()
            await self._put(TableName=self._table, Item=item, ConditionExpression=_CONDITION)
            self.acknowledged += 1
            self.latencies_s.append(time.perf_counter() - began_s)

    def _next_item(self) -> dict[str, dict[str, bytes | str]]:
        counter = f"c{int(self._plan.counters ** random()) - 1:07}"
        self.begun += 1
        nonce = self._run_id + self.begun.to_bytes(8, "big")
        place = time.time_ns().to_bytes(8, "big") + nonce + bytes(4)
        return {"pk": {"B": counter.encode()}, "sk": {"B": place}, "d": {"N": "1"}}


def client_of(endpoint: str, connections: int) -> Any:
    """Return a context with a client of the options that the service's has."""
    config = AioConfig(
        max_pool_connections=connections,
        parameter_validation=False,
        retries={"total_max_attempts": 1, "mode": "standard"},
    )
    return get_session().create_client(
        "dynamodb", region_name="local", endpoint_url=endpoint, config=config
    )


async def _measured(plan: Plan, warm: float, seconds: float) -> dict[str, float]:
    keys = {"pk": "HASH", "sk": "RANGE"}
    async with client_of(plan.endpoint, plan.concurrency) as client:
        await client.create_table(
            TableName=plan.table,
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "B"} for key in keys],
            KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind in keys.items()],
            BillingMode="PAY_PER_REQUEST",
        )
        await client.get_waiter("table_exists").wait(TableName=plan.table)
        loop = DriverAlone(client, plan)
        await loop.run(warm)
        loop.latencies_s.clear()
        before, begin_s, begin_cpu_s = loop.acknowledged, time.perf_counter(), time.process_time()
        await loop.run(seconds)
        taken = sorted(loop.latencies_s)
        return {
            "requests": loop.acknowledged - before,
            "seconds": time.perf_counter() - begin_s,
            "cpu_s": time.process_time() - begin_cpu_s,
            "p50_ms": taken[len(taken) // 2] * 1_000,
            "p99_ms": taken[len(taken) * 99 // 100] * 1_000,
            "sent": loop.begun,
            "acknowledged": loop.acknowledged,
        }


def main(*, warm: float, seconds: float, plan: Annotated[Plan, Parameter(name="*")]) -> None:
    """Run for *warm* seconds unmeasured, then for *seconds*; one line of results."""
    tune_interpreter()
    result = uvloop.run(_measured(plan, warm, seconds))
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext")()
