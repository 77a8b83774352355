"""The demo's reading back: every counter exactly as of now, and as the rollup left it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, cycle
from typing import Any, Final

import httpx

from counter.clock import to_us
from scripts.demo_clients import REQUEST_TIMEOUT_S, DemoError, read_problem, retry_after

GET_PATH: Final = "/v1/namespaces/default/batch/get"
ATTEMPTS: Final = 20
PAUSE_S: Final = 0.2
#: Counters that were never written: so many that every shard has one of them, nearly always.
PROBES: Final = 200
EXACT: Final = "0s"
ROLLED_UP: Final = "1h"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the service says of one counter."""

    count: int
    as_of_us: int


class Reader:
    """Reads counters in batches, each from the next of several processes."""

    def __init__(self, urls: Sequence[str], read_items: int, rollup_timeout_s: float) -> None:
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._urls = cycle(url + GET_PATH for url in urls)
        self._read_items = read_items
        self._rollup_timeout_s = rollup_timeout_s
        self._probe = count()

    async def close(self) -> None:
        await self._http.aclose()

    async def read(
        self, counters: Sequence[str], max_staleness: str, progress: Callable[[int], None]
    ) -> dict[str, Reading]:
        """A reading of every counter."""
        readings: dict[str, Reading] = {}
        for start in range(0, len(counters), self._read_items):
            part = counters[start : start + self._read_items]
            readings.update(await self._read_batch(part, max_staleness))
            progress(len(part))
        return readings

    async def watermark_us(self) -> int:
        """Up to when everything is rolled up: counters that were never written show it, each for
        its shard.

        New names each time, so that no cache answers.
        """
        names = [f"the demo's probe {next(self._probe)}" for _ in range(PROBES)]
        readings = await self.read(names, ROLLED_UP, lambda _: None)
        return min(reading.as_of_us for reading in readings.values())

    async def rolled_up(
        self, truth: Mapping[str, int], latest_us: int, progress: Callable[[int], None]
    ) -> tuple[dict[str, Reading], float]:
        """Wait until the rollup has passed *latest_us*, read all, and say how long it took.

        A cached count from before that instant is given the time to expire; one that is exact as
        of *latest_us* and wrong is not.
        """
        begin_s = time.monotonic()
        timeout_s = self._rollup_timeout_s
        while await self.watermark_us() < latest_us:
            if time.monotonic() - begin_s > timeout_s:
                raise DemoError(f"no rollup passed the last add within {timeout_s:.0f} s")
            await asyncio.sleep(0.25)
        waited_s = time.monotonic() - begin_s
        readings = await self.read(list(truth), ROLLED_UP, progress)
        while stale := _stale(readings, truth, latest_us):
            if time.monotonic() - begin_s > timeout_s:
                break
            await asyncio.sleep(1)
            readings.update(await self.read(stale, ROLLED_UP, lambda _: None))
        return readings, waited_s

    async def _read_batch(self, counters: Sequence[str], max_staleness: str) -> dict[str, Reading]:
        body = {"counters": counters, "max_staleness": max_staleness}
        for _ in range(ATTEMPTS):
            try:
                response = await self._http.post(next(self._urls), json=body)
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
                continue
            if response.status_code == httpx.codes.OK:
                results = response.json()["results"]
                return {
                    name: _reading(name, answer)
                    for name, answer in zip(counters, results, strict=True)
                }
            await asyncio.sleep(retry_after(read_problem(response)))
        raise DemoError(f"{len(counters)} counters could not be read in {ATTEMPTS} attempts")


def _reading(name: str, answer: dict[str, Any]) -> Reading:
    if answer.get("counter") != name:
        raise DemoError(f"the read of {name!r} was answered with {answer}")
    return Reading(answer["count"], to_us(datetime.fromisoformat(answer["as_of"])))


def _stale(
    readings: Mapping[str, Reading], truth: Mapping[str, int], latest_us: int
) -> Sequence[str]:
    return [
        name
        for name, reading in readings.items()
        if reading.count != truth[name] and reading.as_of_us < latest_us
    ]
