"""Counts every name in Python's own standard library, for real, and compares each count.

Over a million adds go through the batch endpoint of a real service, while clients time out, hedge,
repeat and overtake each other, and the service is killed with `kill -9` three times. Whatever goes
wrong on the way, every counter must in the end hold exactly what `collections.Counter` holds.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from scripts.demo_batches import Feed, Outbox
from scripts.demo_clients import Client, DemoError, Tally
from scripts.demo_names import read_names
from scripts.demo_reading import EXACT, Reader
from scripts.demo_report import Show, counts_table, differing, make_console, totals_table
from scripts.demo_service import Service, ServiceError

CLIENTS: Final = 8
#: How long the service stays down after each kill. The second time is longer than the accept limit:
#: whatever was in flight then comes late and has to be resolved.
DOWN_S: Final = (0.0, 6.0, 0.0)
REPEATED_SHARE_MIN: Final = 0.2
COUNTING_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line sets."""

    seed: int
    limit: int | None
    keep: bool


class Demo:
    """One run: read the names, count them under fire, read back, compare."""

    def __init__(self, options: Options, service: Service, show: Show) -> None:
        self._options = options
        self._service = service
        self._show = show
        self._tally = Tally()
        self._kill_requests: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> bool:
        """Whether every count is right and every fault was really injected."""
        begin_s = time.monotonic()
        names = await read_names(
            self._options.limit, lambda total: self._show.bar("tokenizing", total)
        )
        truth = Counter(names.occurrences)
        self._show.say(
            f"{truth.total():,} occurrences of {len(truth):,} names in {names.files:,} files; "
            f"{names.skipped} files skipped: not valid Python, or not readable"
        )
        if not truth:
            raise DemoError("the standard library holds no Python files to count")
        feed = Feed(names.occurrences, self._options.seed)
        # Millions of long-lived strings: the collector need not look at them again and again.
        gc.freeze()
        await self._service.start()
        self._show.say(f"serving on {self._service.url}")
        counting_s = await self._count(feed)
        return await self._compare(truth, feed, counting_s, begin_s)

    async def _count(self, feed: Feed) -> float:
        """Send everything while the service is killed and restarted; the seconds it took."""
        parts = len(DOWN_S) + 1
        kill_at = [part * feed.adds // parts for part in range(1, parts)]
        advance = self._show.bar("counting", feed.adds, lines=10)

        def progress(adds: int) -> None:
            advance(adds)
            while kill_at and self._tally.adds_done >= kill_at[0]:
                self._kill_requests.put_nowait(kill_at.pop(0))

        outbox = Outbox(feed)
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(COUNTING_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                work = [tasks.create_task(self._kill_and_restart())]
                for _ in range(CLIENTS):
                    client = Client(self._service.url, feed, outbox, self._tally, progress)
                    work.append(tasks.create_task(client.run()))
                watch = tasks.create_task(self._service.watch())
                await asyncio.wait(work)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise DemoError(f"not done after {COUNTING_TIMEOUT_S:.0f} s: {self._tally}") from None
        return time.monotonic() - begin_s

    async def _kill_and_restart(self) -> None:
        for down_s in DOWN_S:
            await self._kill_requests.get()
            # In the midst of a batch, not between two.
            await asyncio.sleep(random.uniform(0.0, 0.2))
            await self._service.kill()
            pause = f", and down for {down_s:.0f} s" if down_s else ""
            self._show.say(f"kill -9, number {self._service.kills}{pause}")
            await asyncio.sleep(down_s)
            begin_s = time.monotonic()
            await self._service.restart()
            self._show.say(f"started again in {time.monotonic() - begin_s:.1f} s")

    async def _compare(
        self, truth: Counter[str], feed: Feed, counting_s: float, begin_s: float
    ) -> bool:
        reader = Reader(self._service.url)
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
        """What went wrong other than counts; stops the service, as that may go wrong too."""
        tally, faults = self._tally, []
        if tally.adds_done != feed.adds:
            faults.append(f"{tally.adds_done:,} of {feed.adds:,} adds were acknowledged")
        if tally.contradictions:
            first = tally.first_contradiction
            faults.append(f"{tally.contradictions} answers go against earlier ones; first: {first}")
        if (share := self._repeated_share(feed)) < REPEATED_SHARE_MIN:
            faults.append(f"{share:.1%} of the batches were duplicated or hedged: too few")
        if self._service.kills != len(DOWN_S) or self._service.restarts != len(DOWN_S):
            kills, restarts = self._service.kills, self._service.restarts
            faults.append(f"{kills} kills and {restarts} restarts, not {len(DOWN_S)} of each")
        try:
            await self._service.stop()
        except ServiceError as error:
            faults.append(str(error))
        return faults

    def _repeated_share(self, feed: Feed) -> float:
        """The share of the batches that were sent again although nothing was wrong."""
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
            "adds told to wait (token_pending)": f"{tally.adds_pending:,}",
            "late adds resolved": f"{tally.adds_late:,}",
            "new tokens after a void": f"{tally.adds_voided:,}",
            "kill -9": f"{self._service.kills}",
            "restarts": f"{self._service.restarts}",
            "counting": f"{counting_s:.1f} s, {feed.adds / counting_s:,.0f} adds/s",
        }


async def run_demo(options: Options, console: Console) -> bool:
    """Run it, and leave neither a process nor a file behind, whatever happens."""
    task = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="counter-demo-"))
    service = Service(folder)
    try:
        with Show(console) as show:
            return await Demo(options, service, show).run()
    finally:
        await service.destroy()
        if options.keep:
            console.print(f"The data and the service's log are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main(
    *,
    seed: int | None = None,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    store: Literal["sqlite"] = "sqlite",
    keep: bool = False,
) -> int:
    """Count every name in Python's standard library under fire, and compare each count.

    Parameters
    ----------
    seed
        Decides order and faults; drawn, and printed, if not given.
    limit
        Count only the first so many occurrences.
    store
        What the service keeps its data in.
    keep
        Keep the data directory and the service's log.
    """
    console = make_console()
    options = Options(random.randrange(2**32) if seed is None else seed, limit, keep)
    console.print(f"seed {options.seed}, store {store}, {CLIENTS} clients", highlight=False)
    try:
        return 0 if asyncio.run(run_demo(options, console)) else 1
    except (DemoError, ServiceError) as error:
        console.print(f"FAILED: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    App(default_command=main, help_format="plaintext", version_flags=())()
