"""Run ``counter watch`` and ``counter top``, which show how counts change now."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from itertools import islice, pairwise
from typing import Annotated, Final

from rich.live import Live
from rich.text import Text

from counter.cli.client import (
    DEFAULT_SERVICE,
    ServiceFlags,
    duration_us,
    ended,
    in_words,
    key_of,
    opened,
    options_of,
    urls_of,
)
from counter.cli.commands.counters import Name
from counter.cli.drawing import Screen, progress, sparkline
from counter.cli.terminal import (
    JsonLines,
    flag,
    instant,
    json_line,
    print_out,
    remark,
    second,
    signed,
    table,
)
from counter.errors import StartupError
from counter.limits import SECOND
from counter.quantities import format_number, plural
from counter_client import AsyncCounterClient, Busiest, Count, CounterClient, CounterError
from counter_client.errors import UnavailableError

#: Seconds over which the rate is averaged, and seconds that are drawn.
_RATE_S: Final = 10
_DRAWN_S: Final = 40
_REFRESH_S: Final = 0.5
_ADDS: Final = "adds"
_COUNT: Final = "count"
_BUSY_MAX: Final = 100
#: Counters that are read to find the highest; reading more must be requested.
_COUNTERS_MAX: Final = 100_000


class CountHistory:
    """The recent values of a count. Times are in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, now_s: float, count: int) -> None:
        """Record that the count is *count* now."""
        self._seen.append((now_s, count))
        # Keep one value from before the drawn span: it has the count at the start.
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - _DRAWN_S - 1:
            self._seen.popleft()

    def rate(self, now_s: float) -> float:
        """Return the recent change per second."""
        if not self._seen:
            return 0.0
        begin_s = max(self._seen[0][0], now_s - _RATE_S)
        passed_s = now_s - begin_s
        return (self._seen[-1][1] - self._at(begin_s)) / passed_s if passed_s > 0 else 0.0

    def changes(self, now_s: float) -> list[int]:
        """Return the change of each of the last seconds, the latest last; 0 for a decrease."""
        counts = [self._at(now_s - back) for back in range(_DRAWN_S, -1, -1)]
        return [max(0, after - before) for before, after in pairwise(counts)]

    def _at(self, when_s: float) -> int:
        """Return the count at *when_s*."""
        known = self._seen[0][1]
        for seen_s, count in self._seen:
            if seen_s > when_s:
                break
            known = count
        return known


def watch(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    lasting: Annotated[
        str | None, flag("The duration: 30s [until Ctrl-C]", "DURATION", name="--for")
    ] = None,
    count: Annotated[
        int | None, flag("The number of counts, including the first one [any]", "NUMBER")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Show a count as it changes."""
    with ended(service):
        lasting_s = None if lasting is None else duration_us("for", lasting) / SECOND
        if count is not None and count < 1:
            raise StartupError(f"--count: it is {count}; it must be 1 or more")
        console = Screen()
        if json or not console.is_terminal:
            asyncio.run(_followed(service, name, _LinePrinter(json=json), count, lasting_s))
            return
        with Live(console=console, auto_refresh=False) as live:
            asyncio.run(_followed(service, name, _Screen(name, live), count, lasting_s))


class _LinePrinter:
    """Prints a line for each change."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._latest: int | None = None

    def show(self, count: Count) -> bool:
        """Show *count*; return whether it differs from the one before."""
        before, self._latest = self._latest, count.count
        change = 0 if before is None else count.count - before
        if before is not None and not change:
            return False
        if self._json:
            print_out(json_line({**asdict(count), "change": change}))
        else:
            print_out(f"{instant(count.as_of)}  {count.count}  {signed(change)}")
        return True

    def refresh(self) -> None:
        """Do nothing: lines do not change between two counts."""


class _Screen:
    """Updates one line on a terminal."""

    def __init__(self, name: str, live: Live) -> None:
        self._name = name
        self._live = live
        self._history = CountHistory()
        self._latest: Count | None = None

    def show(self, count: Count) -> bool:
        is_new = self._latest is None or count.count != self._latest.count
        self._latest = count
        self._history.see(time.monotonic(), count.count)
        self.refresh()
        return is_new

    def refresh(self) -> None:
        if self._latest is None:
            return
        now_s = time.monotonic()
        rate, line = self._history.rate(now_s), sparkline(self._history.changes(now_s))
        text = (
            f"{self._name}  {self._latest.count:,}  {rate:+,.1f}/s  {line}"
            f"  {self._latest.accuracy} as of {second(self._latest.as_of)}"
        )
        # As Text: a name in brackets is not markup.
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


async def _followed(
    service: ServiceFlags,
    name: str,
    shown: _LinePrinter | _Screen,
    count: int | None,
    lasting_s: float | None,
) -> None:
    """Show counts until there are enough. Raises the CounterError of a permanent failure, and at
    the beginning that of a service that cannot be reached."""
    moving = asyncio.create_task(_moved(shown.refresh))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(lasting_s):
                await _taken(service, name, shown, count)
    finally:
        moving.cancel()


async def _moved(refresh: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_REFRESH_S)
        refresh()


async def _taken(
    service: ServiceFlags, name: str, shown: _LinePrinter | _Screen, count: int | None
) -> None:
    """Show counts; an outage after the first one is waited for."""
    left = count
    trouble = ""
    options, key = options_of(service), key_of(service)
    async with AsyncCounterClient(
        urls_of(service), service.namespace, api_key=key, options=options
    ) as client:
        is_begun = False
        while True:
            try:
                async with aclosing(client.live(name)) as stream:
                    async for update in stream:
                        if isinstance(update, CounterError):
                            trouble = _remarked(update, trouble)
                            continue
                        is_begun, trouble = True, ""
                        if shown.show(update) and left is not None:
                            left -= 1
                            if left == 0:
                                return
            except UnavailableError as error:
                # A permanent failure would be requested again at once.
                if not is_begun or error.retry == "never":
                    raise
                trouble = _remarked(error, trouble)


def _remarked(error: CounterError, known: str) -> str:
    """Report once why the count is unknown; return the current trouble."""
    if error.detail != known:
        remark(f"{in_words(error.detail)}; still trying")
    return error.detail


def top(
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    limit: Annotated[int, flag("How many counters: 1 to 100", "NUMBER")] = 10,
    by: Annotated[
        str,
        flag("adds (per second, recently), or count (reads every counter)", "adds|count"),
    ] = _ADDS,
    span: Annotated[str, flag("The span of time of the adds: 1s to 1m", "DURATION")] = "10s",
    read: Annotated[
        int, flag("With --by count: the maximum of counters to read; 0 for all", "NUMBER")
    ] = _COUNTERS_MAX,
    live: Annotated[bool, flag("Refresh until Ctrl-C")] = False,
    every: Annotated[str, flag("With --live: the refresh interval", "DURATION")] = "2s",
    json: JsonLines = False,
) -> None:
    """Show the busiest counters."""
    with ended(service), opened(service) as client:
        _check_top(limit, by, read)
        pause_s = duration_us("every", every) / SECOND
        if by == _COUNT:
            if live:
                raise StartupError("--live: every counter would be read at each refresh; omit it")
            _tell_highest(client, limit, read, json=json)
        elif not live:
            _tell_busiest(client.busiest(limit, span=span), json=json)
        elif json or not (console := Screen()).is_terminal:
            while True:
                _tell_busiest(client.busiest(limit, span=span), json=json)
                time.sleep(pause_s)
        else:
            with Live(console=console, auto_refresh=False, screen=True) as screen:
                while True:
                    shown = _shown(client.busiest(limit, span=span))
                    screen.update(Text(shown, no_wrap=True), refresh=True)
                    time.sleep(pause_s)


def _check_top(limit: int, by: str, read: int) -> None:
    """Raises StartupError for a value that is out of bounds."""
    if not 1 <= limit <= _BUSY_MAX:
        raise StartupError(f"--limit: it is {limit}; it must be from 1 to {_BUSY_MAX}")
    if by not in (_ADDS, _COUNT):
        raise StartupError(f"--by: {by[:40]!r} is neither {_ADDS} nor {_COUNT}")
    if read < 0:
        raise StartupError(f"--read: it is {read}; it must be 0, for all, or more")


def _tell_busiest(found: Busiest, *, json: bool) -> None:
    if json:
        print_out(json_line(asdict(found)))
        return
    print_out(_shown(found))
    if not found.complete:
        remark("more counters changed than were examined: busier ones may be missing")


def _shown(found: Busiest) -> str:
    span_s = format_number((found.as_of - found.since).total_seconds())
    period = f"adds a second, over {span_s} s until {second(found.as_of)}"
    if not found.counters:
        return f"nothing was added in the {span_s} s until {second(found.as_of)}"
    rows = [(each.counter, f"{each.adds_per_s:.1f}", each.count) for each in found.counters]
    return f"{table(('COUNTER', 'ADDS/S', 'COUNT'), rows)}\n{period}"


def _tell_highest(client: CounterClient, limit: int, read: int, *, json: bool) -> None:
    """Print the counters with the highest counts of those that are read."""
    done = 0
    with progress("counters", read or None) as bar:

        def seen() -> Iterator[Count]:
            nonlocal done
            for each in islice(counts, read or None):
                done += 1
                bar.go_on(1)
                yield each

        counts = client.counts(max_staleness="0s", limit=read + 1 if read else None)
        highest = heapq.nlargest(limit, seen(), key=lambda each: (each.count, each.counter))
        is_whole = next(counts, None) is None
    if json:
        counters = [{"counter": each.counter, "count": each.count} for each in highest]
        print_out(json_line({"complete": is_whole, "read": done, "counters": counters}))
    else:
        print_out(table(("COUNTER", "COUNT"), [(each.counter, each.count) for each in highest]))
    if not is_whole:
        remark(
            f"only the first {plural(done, 'counter')} by name were read: --read 0 for all of them"
        )
