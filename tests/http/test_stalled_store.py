"""A stalled store: few requests wait for it, the rest is refused, and all are answered."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from counter.limits import MILLISECOND, WRITE_WAIT_MAX_US
from tests.support.app import running
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh, item, on_wire
from tests.support.waiting import eventually
from tests.support.wire import Wire, wired

_ADD = "/v1/namespaces/default/counters/c/add"

#: A smaller bound than the service's own: it is soon reached.
TRICKLE_WRITES = 64


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always let in no more than that."""
    monkeypatch.setattr("counter.limits.TRICKLE_WRITES", TRICKLE_WRITES)


class Stall:
    """The store's appends, which wait until they may go on."""

    def __init__(self, wire: Wire) -> None:
        self._works = wire.app.store.events.append
        self.goes_on = asyncio.Event()
        self.events = 0

    async def append(self, namespace: Any, events: Sequence[Any]) -> Any:
        self.events += len(events)
        await self.goes_on.wait()
        return await self._works(namespace, events)


async def test_during_a_stall_few_requests_wait_and_all_are_answered(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire, wire.client() as http:
        load, stall = wire.service.load, Stall(wire)

        async def add() -> httpx.Response:
            body = {"delta": 1, "idempotency_token": on_wire(fresh(wire.app.clock.now_us()))}
            return await http.post(_ADD, json=body)

        async def waits(adds: int) -> None:
            await eventually(lambda: stall.events == adds, f"{adds} adds wait for the store")

        with patch.object(wire.app.store.events, "append", stall.append):
            adding = [asyncio.create_task(add()) for _ in range(TRICKLE_WRITES)]
            await waits(TRICKLE_WRITES)
            # Nothing has ended for longer than an add may wait: the next one shows it.
            wire.app.clock.advance(WRITE_WAIT_MAX_US + MILLISECOND)
            adding.append(asyncio.create_task(add()))
            await waits(TRICKLE_WRITES + 1)

            refused = await asyncio.gather(*(add() for _ in range(20)))
            items = [item("c", 1, fresh(wire.app.clock.now_us())) for _ in range(3)]
            refused.append(
                await http.post("/v1/namespaces/default/batch/add", json={"items": items})
            )
            assert {each.status_code for each in refused} == {503}
            assert {each.json()["code"] for each in refused} == {"overloaded"}
            assert {each.json()["applied"] for each in refused} == {None}
            # None of them came as far as the store, or waits.
            assert stall.events == load.ahead == TRICKLE_WRITES + 1
            assert load.refused == 21

            assert (await Rest(http).get("c")).json()["count"] == 0
            assert (await http.get("/healthz")).status_code == 200

            stall.goes_on.set()
            assert {each.status_code for each in await asyncio.gather(*adding)} == {200}
        assert load.ahead == 0
        assert (await add()).status_code == 200
        assert (await Rest(http).get("c")).json()["count"] == TRICKLE_WRITES + 2


async def test_a_lock_of_another_program_is_reported_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: /readyz was silent for as long as health checks wait."""
    monkeypatch.setattr("counter.telemetry.incidents.PING_S", 0.01)
    async with running("sqlite", tmp_path) as app:
        with closing(sqlite3.connect(tmp_path / "counter.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            answer = await app.http.get("/readyz")
            body = assert_problem(answer, "store_unavailable")
            assert "the store did not answer within 0.01 s" in body["detail"]
            assert (await app.http.get("/healthz")).status_code == 200
            other.execute("ROLLBACK")

        async def is_ready() -> bool:
            return (await app.http.get("/readyz")).status_code == 200

        await eventually(is_ready, "the lock is gone")
