"""Counts every name in Python's own standard library, for real, and compares each count.

Over a million adds go through the batch endpoint of a real service, while clients time out, hedge,
repeat and overtake each other, and the servers are killed with `kill -9` meanwhile.
In the end every counter must equal that of `collections.Counter`.
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
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from scripts.cluster_process import ClusterError
from scripts.demo_batches import Feed, Outbox
from scripts.demo_clients import Client, DemoError, Tally
from scripts.demo_cluster import CassandraNodes, ManyProcesses, PostgresqlAlone
from scripts.demo_deployment import Deployment, Outage
from scripts.demo_names import read_names
from scripts.demo_process import ServiceError
from scripts.demo_reading import EXACT, Reader
from scripts.demo_report import Show, counts_table, differing, make_console, totals_table
from scripts.demo_service import OneProcess

StoreKind = Literal["sqlite", "postgresql", "cassandra"]
REPEATED_SHARE_MIN: Final = 0.2
COUNTING_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line sets."""

    seed: int
    limit: int | None
    keep: bool


class Demo:
    """One run: read the names, count them with injected faults, read back, compare."""

    def __init__(self, options: Options, deployment: Deployment, show: Show) -> None:
        self._options = options
        self._deployment = deployment
        self._load = deployment.load
        self._show = show
        self._tally = Tally()
        self._due = {outage.at: asyncio.Event() for outage in deployment.outages}
        self._killed: Counter[str] = Counter()
        self._started_again: Counter[str] = Counter()

    async def run(self) -> bool:
        """Whether every count is right and every fault was really injected."""
        begin_s = time.monotonic()
        limit = self._options.limit or self._load.occurrences
        names = await read_names(limit, lambda total: self._show.bar("tokenizing", total))
        truth = Counter(names.occurrences)
        self._show.say(
            f"{truth.total():,} occurrences of {len(truth):,} names in {names.files:,} files; "
            f"{names.skipped} files skipped: not valid Python, or not readable"
        )
        if limit and truth.total() == limit:
            self._show.say(f"that is a part of the library: the first {limit:,} occurrences")
        if not truth:
            raise DemoError("the standard library holds no Python files to count")
        feed = Feed(
            names.occurrences,
            self._options.seed,
            self._load.batch_items,
            hedge_all=self._load.hedge_all,
        )
        # Millions of long-lived strings: exclude them from garbage collection.
        gc.freeze()
        await self._deployment.start(self._show.say)
        counting_s = await self._count(feed)
        return await self._compare(truth, feed, counting_s, begin_s)

    async def _count(self, feed: Feed) -> float:
        """Send everything while servers are killed and restarted; return the seconds it took."""
        advance = self._show.bar("counting", feed.adds, lines=10)

        def progress(adds: int) -> None:
            advance(adds)
            for share, due in self._due.items():
                if self._tally.adds_done >= share * feed.adds:
                    due.set()

        outbox = Outbox(feed)
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(COUNTING_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                outages = sorted(self._deployment.outages, key=_name)
                work = [
                    tasks.create_task(self._break(list(group)))
                    for _, group in groupby(outages, key=_name)
                ]
                for _ in range(self._load.clients):
                    urls = self._deployment.urls
                    client = Client(urls, feed, outbox, self._tally, progress)
                    work.append(tasks.create_task(client.run()))
                watch = tasks.create_task(self._deployment.watch())
                await asyncio.wait(work)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise DemoError(f"not done after {COUNTING_TIMEOUT_S:.0f} s: {self._tally}") from None
        return time.monotonic() - begin_s

    async def _break(self, outages: Iterable[Outage]) -> None:
        """Kill one server at its times, and restart it each time."""
        for outage in outages:
            server = outage.server
            await self._due[outage.at].wait()
            # During a batch, not between two.
            await asyncio.sleep(random.uniform(0.0, 0.2))
            await server.kill()
            self._killed[server.name] += 1
            pause = f", and down for {outage.down_s:.0f} s" if outage.down_s else ""
            self._show.say(f"kill -9 of {server.name}{pause}")
            await asyncio.sleep(outage.down_s)
            begin_s = time.monotonic()
            await server.start()
            self._started_again[server.name] += 1
            self._show.say(
                f"{server.name} runs again, started in {time.monotonic() - begin_s:.1f} s"
            )

    async def _compare(
        self, truth: Counter[str], feed: Feed, counting_s: float, begin_s: float
    ) -> bool:
        load = self._load
        reader = Reader(self._deployment.urls, load.read_items, load.rollup_timeout_s)
        try:
            progress = self._show.bar("reading, exact as of now", len(truth))
            exact = await reader.read(list(truth), EXACT, progress)
            self._show.say("waiting for the rollup to pass the last add")
            progress = self._show.bar("reading, rolled up", len(truth))
            rolled_up, waited_s = await reader.rolled_up(truth, feed.latest_us, progress)
        finally:
            await reader.close()
        self._show.finish()
        self._show.console.print(counts_table(truth, self._tally, exact, rolled_up))
        totals = self._totals(feed, counting_s)
        totals["wait for the rollup"] = f"{waited_s:.1f} s"
        totals["all in all"] = f"{time.monotonic() - begin_s:.1f} s"
        self._show.console.print(totals_table(totals))
        faults = await self._faults(feed)
        for what, readings in (("exact as of now", exact), ("rolled up", rolled_up)):
            if wrong := differing(truth, readings):
                faults.append(f"{len(wrong):,} counters differ when read {what}")
        for fault in faults:
            self._show.say(f"FAILED: {fault}")
        if not faults:
            self._show.say(f"Every one of {len(truth):,} counters is exact.")
        return not faults

    async def _faults(self, feed: Feed) -> list[str]:
        """Stop the service, and return all failures except wrong counts."""
        tally, faults = self._tally, []
        if tally.adds_done != feed.adds:
            faults.append(f"{tally.adds_done:,} of {feed.adds:,} adds were acknowledged")
        if tally.contradictions:
            first = tally.first_contradiction
            faults.append(f"{tally.contradictions} answers go against earlier ones; first: {first}")
        if (share := self._repeated_share(feed)) < REPEATED_SHARE_MIN:
            faults.append(f"{share:.1%} of the batches were duplicated or hedged: too few")
        planned = Counter(outage.server.name for outage in self._deployment.outages)
        if self._killed != planned or self._started_again != planned:
            faults.append(f"killed {self._killed}, started again {self._started_again}")
        try:
            await self._deployment.stop()
        except ServiceError as error:
            faults.append(str(error))
        return faults

    def _repeated_share(self, feed: Feed) -> float:
        """Return the share of batches that were sent again without need."""
        return (self._tally.duplicates + self._tally.hedges) / feed.batches

    def _totals(self, feed: Feed, counting_s: float) -> dict[str, str]:
        tally = self._tally
        return {
            "adds": f"{feed.adds:,}",
            "batches": f"{feed.batches:,}",
            "batch requests sent": f"{tally.requests:,}",
            "duplicates sent": f"{tally.duplicates:,}",
            "hedges sent": f"{tally.hedges:,}",
            "batches duplicated or hedged": f"{self._repeated_share(feed):.1%}",
            "client time-outs injected": f"{tally.timeouts:,}",
            "replies lost to a kill": f"{tally.lost:,}",
            "connections refused": f"{tally.refused:,}",
            "batches refused for a while (503)": f"{tally.unavailable:,}",
            "adds collapsed into an earlier one": f"{tally.collapsed.total():,}",
            "adds with an unknown outcome (time-outs)": f"{tally.adds_untold:,}",
            "adds that had to wait (token_pending)": f"{tally.adds_pending:,}",
            "late adds resolved": f"{tally.adds_late:,}",
            "new tokens after a void": f"{tally.adds_voided:,}",
            **{f"kill -9 and restart: {name}": f"{n}" for name, n in self._killed.items()},
            "counting": f"{counting_s:.1f} s, {feed.adds / counting_s:,.0f} adds/s",
        }


def _name(outage: Outage) -> str:
    return outage.server.name


async def run_demo(options: Options, store: StoreKind, console: Console) -> bool:
    """Run the demo; always stop its processes and delete its files."""
    task = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="counter-demo-"))
    deployment: Deployment | None = None
    try:
        if store == "sqlite":
            deployment = OneProcess(folder)
        else:
            stores = PostgresqlAlone(folder) if store == "postgresql" else CassandraNodes(folder)
            deployment = ManyProcesses(folder, options.seed, stores, keep=options.keep)
        with Show(console) as show:
            return await Demo(options, deployment, show).run()
    finally:
        if deployment is not None:
            await deployment.destroy()
        if options.keep:
            console.print(f"The data and the logs are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main(
    *,
    seed: int | None = None,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    store: StoreKind = "sqlite",
    keep: bool = False,
) -> int:
    """Count every name in Python's standard library with injected faults, and compare each count.

    Parameters
    ----------
    seed
        Determines order and faults; random, and printed, if not given.
    limit
        Count only the first so many occurrences. [all; 150,000 with cassandra]
    store
        The service's store. With postgresql the demo runs a server, two API processes and two
        rollup workers, with cassandra three nodes at QUORUM and memcached instead of the server;
        it kills one of each kind.
    keep
        Keep the data and the logs.
    """
    console = make_console()
    options = Options(random.randrange(2**32) if seed is None else seed, limit, keep)
    console.print(f"seed {options.seed}, store {store}", highlight=False)
    try:
        return 0 if asyncio.run(run_demo(options, store, console)) else 1
    except (DemoError, ServiceError, ClusterError) as error:
        console.print(f"FAILED: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
