"""Counts every name in Python's own standard library, for real, and compares each count.

Over a million adds go through the batch endpoint of a real service. Clients time out, hedge, repeat
and overtake each other, and the servers are killed with ``kill -9``. In the end every counter must
equal that of ``collections.Counter``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, cycle, groupby
from pathlib import Path
from typing import Annotated, Final

import httpx
from cyclopts import App, Parameter
from cyclopts.validators import Number

from counter.clock import to_us
from scripts.cluster_process import ClusterError
from scripts.demo_clients import (
    REQUEST_TIMEOUT_S,
    Client,
    DemoError,
    Outbox,
    Tally,
    read_problem,
    retry_after,
)
from scripts.demo_names import read_names
from scripts.demo_process import ServiceError
from scripts.demo_servers import Deployment, Outage, StoreName, deployment_over

CLIENTS: Final = 8
REPEATED_SHARE_MIN: Final = 0.2
COUNTING_TIMEOUT_S: Final = 900.0
ROLLUP_TIMEOUT_S: Final = 180.0
GET_PATH: Final = "/v1/namespaces/default/batch/get"
READ_ATTEMPTS: Final = 20
_READ_PAUSE_S: Final = 0.2
#: Counters that were never written: so many that every shard has one of them, nearly always.
PROBES: Final = 200
EXACT: Final = "0s"
ROLLED_UP: Final = "1h"
#: Rows of the table of counts.
TOP: Final = 15


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class Reading:
    """The service's report of one counter."""

    count: int
    as_of_us: int


class Reader:
    """Reads counters in batches, each from the next of several processes."""

    def __init__(self, urls: Sequence[str], read_items: int) -> None:
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._urls = cycle(url + GET_PATH for url in urls)
        self._read_items = read_items
        self._probe = count()

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self, counters: Sequence[str], max_staleness: str) -> dict[str, Reading]:
        """Return a reading of every counter."""
        readings: dict[str, Reading] = {}
        for start in range(0, len(counters), self._read_items):
            part = counters[start : start + self._read_items]
            readings.update(await self._read_batch(part, max_staleness))
        return readings

    async def rolled_up(self, truth: Mapping[str, int], latest_us: int) -> dict[str, Reading]:
        """Wait until the rollup has passed *latest_us*, and read all counters.

        A cached count from before that instant is given the time to expire; one that is exact as
        of *latest_us* and wrong is not.
        """
        deadline_s = time.monotonic() + ROLLUP_TIMEOUT_S
        while await self._watermark_us() < latest_us:
            if time.monotonic() > deadline_s:
                raise DemoError(f"no rollup passed the last add within {ROLLUP_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.25)
        readings = await self.read(list(truth), ROLLED_UP)
        while time.monotonic() < deadline_s:
            stale = [
                name for name in differing(truth, readings) if readings[name].as_of_us < latest_us
            ]
            if not stale:
                break
            await asyncio.sleep(1)
            readings.update(await self.read(stale, ROLLED_UP))
        return readings

    async def _watermark_us(self) -> int:
        """Return the time up to which everything is rolled up: counters that were never written
        show it, each for its shard. Their names are new each time, so that no cache answers."""
        names = [f"the demo's probe {next(self._probe)}" for _ in range(PROBES)]
        readings = await self.read(names, ROLLED_UP)
        return min(reading.as_of_us for reading in readings.values())

    async def _read_batch(self, counters: Sequence[str], max_staleness: str) -> dict[str, Reading]:
        body = {"counters": counters, "max_staleness": max_staleness}
        for _ in range(READ_ATTEMPTS):
            try:
                response = await self._http.post(next(self._urls), json=body)
            except httpx.TransportError:
                await asyncio.sleep(_READ_PAUSE_S)
                continue
            if response.status_code != httpx.codes.OK:
                await asyncio.sleep(retry_after(read_problem(response)))
                continue
            results = response.json()["results"]
            if [result.get("counter") for result in results] != list(counters):
                raise DemoError(f"the read of {counters} was answered with {results}")
            return {
                result["counter"]: Reading(
                    result["count"], to_us(datetime.fromisoformat(result["as_of"]))
                )
                for result in results
            }
        raise DemoError(f"{len(counters)} counters could not be read in {READ_ATTEMPTS} attempts")


def differing(truth: Mapping[str, int], readings: Mapping[str, Reading]) -> list[str]:
    """Return the counters that were counted wrong."""
    return [name for name, number in truth.items() if readings[name].count != number]


class Demo:
    """One run: count the names with injected faults, read the counters back, compare."""

    def __init__(self, names: Sequence[str], deployment: Deployment) -> None:
        self._truth = Counter(names)
        self._deployment = deployment
        self._outbox = Outbox(names, deployment.batch_items, hedge_all=deployment.hedge_all)
        self._tally = Tally()
        self._due = {outage.at: asyncio.Event() for outage in deployment.outages}
        self._tenths = 0
        self._restarted: Counter[str] = Counter()

    async def run(self) -> bool:
        """Whether every count is right and every fault was really injected."""
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if task is not None:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        async with self._deployment.running():
            say(f"serving on {' and '.join(self._deployment.urls)}")
            begin_s = time.monotonic()
            await self._count()
            counting_s = time.monotonic() - begin_s
            reader = Reader(self._deployment.urls, self._deployment.batch_items)
            try:
                exact = await reader.read(list(self._truth), EXACT)
                say("waiting for the rollup to pass the last add")
                rolled_up = await reader.rolled_up(self._truth, self._outbox.latest_us)
            finally:
                await reader.close()
            self._show_counts(exact, rolled_up)
            self._show_events(counting_s)
            problems = [*self._problems(exact, rolled_up)]
            try:
                await self._deployment.stop()
            except ServiceError as error:
                problems.append(str(error))
        for problem in problems:
            say(f"FAILED: {problem}")
        if not problems:
            say(f"Every one of {len(self._truth):,} counters is exact.")
        return not problems

    async def _count(self) -> None:
        """Send everything while servers are killed and restarted."""
        try:
            async with asyncio.timeout(COUNTING_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                outages = sorted(self._deployment.outages, key=_name)
                work = [
                    tasks.create_task(self._break(list(group)))
                    for _, group in groupby(outages, key=_name)
                ]
                for _ in range(CLIENTS):
                    client = Client(
                        self._deployment.urls, self._outbox, self._tally, self._progress
                    )
                    work.append(tasks.create_task(client.run()))
                watch = tasks.create_task(self._deployment.watch())
                await asyncio.wait(work)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise DemoError(
                f"not done after {COUNTING_TIMEOUT_S:.0f} s: {self._tally.events}"
            ) from None

    def _progress(self) -> None:
        """Show each tenth of the adds, and begin the outages that are due."""
        done, adds = self._tally.adds_done, self._outbox.adds
        if (tenths := 10 * done // adds) > self._tenths:
            self._tenths = tenths
            say(f"counted {done:,} of {adds:,}")
        for share, due in self._due.items():
            if done >= share * adds:
                due.set()

    async def _break(self, outages: Iterable[Outage]) -> None:
        """Kill one server at its times, and restart it each time."""
        for outage in outages:
            server = outage.server
            await self._due[outage.at].wait()
            # During a batch, not between two.
            await asyncio.sleep(random.uniform(0.0, 0.2))
            await server.kill()
            pause = f", and down for {outage.down_s:.0f} s" if outage.down_s else ""
            say(f"kill -9 of {server.name}{pause}")
            await asyncio.sleep(outage.down_s)
            await server.start()
            say(f"{server.name} runs again")
            self._restarted[server.name] += 1

    def _problems(
        self, exact: Mapping[str, Reading], rolled_up: Mapping[str, Reading]
    ) -> Iterable[str]:
        """Yield the problems of counting, and the number of wrong counts."""
        tally, adds = self._tally, self._outbox.adds
        if tally.adds_done != adds:
            yield f"{tally.adds_done:,} of {adds:,} adds were acknowledged"
        if found := tally.contradictions:
            yield f"{len(found)} results contradict earlier ones; the first: {found[0]}"
        if (share := self._repeated_share()) < REPEATED_SHARE_MIN:
            yield f"{share:.1%} of the batches were duplicated or hedged: too few"
        planned = Counter(outage.server.name for outage in self._deployment.outages)
        if self._restarted != planned:
            yield f"killed and started again: {self._restarted}; planned: {planned}"
        for what, readings in (("exact as of now", exact), ("rolled up", rolled_up)):
            if wrong := differing(self._truth, readings):
                yield f"{len(wrong):,} counters differ when read {what}"

    def _repeated_share(self) -> float:
        """Return the share of batches that were sent again without need."""
        events = self._tally.events
        return (events["duplicates sent"] + events["hedges sent"]) / self._outbox.batches

    def _show_counts(self, exact: Mapping[str, Reading], rolled_up: Mapping[str, Reading]) -> None:
        """Show the most frequent names, as many that were counted wrong, and the sums of all."""
        truth, tally = self._truth, self._tally
        rows = {
            name: (
                *(number, tally.sent[name], tally.collapsed[name]),
                *(exact[name].count, rolled_up[name].count),
            )
            for name, number in truth.items()
        }
        top = [name for name, _ in truth.most_common(TOP)]
        wrong = (differing(truth, exact) + differing(truth, rolled_up))[:TOP]
        columns = ("truth", "sent", "collapsed", "counted", "rolled up", "difference")
        say(f"\n{'name':<20}" + "".join(f"{column:>12}" for column in columns))
        for name in dict.fromkeys(top + wrong):
            _show_row(name, rows[name])
        sums = [sum(column) for column in zip(*rows.values(), strict=True)]
        _show_row(f"all {len(truth):,}", sums)

    def _show_events(self, counting_s: float) -> None:
        """Show the events on the way."""
        adds = self._outbox.adds
        numbers = {
            "adds": adds,
            "batches": self._outbox.batches,
            **dict(sorted(self._tally.events.items())),
            "adds collapsed into an earlier one": self._tally.collapsed.total(),
            **{f"kill -9 and restart: {name}": n for name, n in self._restarted.items()},
            "adds per second": round(adds / counting_s),
        }
        say("")
        for what, number in numbers.items():
            say(f"{what:<40}{number:>12,}")
        say("")


def _name(outage: Outage) -> str:
    return outage.server.name


def _show_row(name: str, row: Sequence[int]) -> None:
    """Show one row: it begins with the truth, and ends with the two counts to compare with it."""
    off = max((number - row[0] for number in row[-2:]), key=abs)
    difference = f"{off:+,}" if off else "0"
    say(f"{name:<20}" + "".join(f"{number:>12,}" for number in row) + f"{difference:>12}")


def main(
    *,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    store: StoreName = "sqlite",
) -> int:
    """Count every name in Python's standard library with injected faults, and compare each count.

    Parameters
    ----------
    limit
        Count only the first so many occurrences. [all; 150,000 with cassandra]
    store
        The service's store. With postgresql the demo runs a server, two API processes and two
        rollup workers, with cassandra three nodes at QUORUM and memcached instead of the server;
        it kills one of each kind.
    """
    folder = Path(tempfile.mkdtemp(prefix="counter-demo-"))
    failed = False
    try:
        deployment = deployment_over(store, folder)
        names = read_names(limit or deployment.limit)
        if not names:
            raise DemoError("the standard library holds no Python files to count")
        say(f"{len(names):,} occurrences of {len(set(names)):,} names; the store is {store}")
        # Millions of long-lived strings: exclude them from garbage collection.
        gc.freeze()
        with deployment.guarded():
            failed = not asyncio.run(Demo(names, deployment).run())
    except (DemoError, ServiceError, ClusterError) as error:
        say(f"FAILED: {error}")
        failed = True
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    finally:
        if failed:
            say(f"The data and the logs of the service are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
