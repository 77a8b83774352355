"""Run ``counter watch``, which shows a count as it changes, its rate, and a line of blocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Final

from rich.live import Live
from rich.text import Text

from counter.cli.client import (
    DEFAULT_SERVICE,
    ServiceFlags,
    duration_us,
    ended,
    key_of,
    options_of,
    urls_of,
)
from counter.cli.commands.counters import Name
from counter.cli.drawing import Screen, sparkline
from counter.cli.terminal import (
    JsonLines,
    flag,
    instant,
    json_line,
    print_out,
    remark,
    second,
    signed,
)
from counter.errors import StartupError
from counter.limits import SECOND
from counter_client import AsyncCounterClient, Count, CounterError
from counter_client.errors import UnavailableError

#: Seconds over which the rate is averaged, and seconds that are drawn.
_RATE_S: Final = 10
_DRAWN_S: Final = 40
_REFRESH_S: Final = 0.5


class Course:
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
    lasting: Annotated[str | None, flag("The duration: 30s [until Ctrl-C]", name="--for")] = None,
    count: Annotated[
        int | None, flag("The number of counts, including the first one [any]")
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
            asyncio.run(_followed(service, name, _Lines(json=json), count, lasting_s))
            return
        with Live(console=console, auto_refresh=False) as live:
            asyncio.run(_followed(service, name, _Screen(name, live), count, lasting_s))


class _Lines:
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
        self._course = Course()
        self._latest: Count | None = None

    def show(self, count: Count) -> bool:
        is_new = self._latest is None or count.count != self._latest.count
        self._latest = count
        self._course.see(time.monotonic(), count.count)
        self.refresh()
        return is_new

    def refresh(self) -> None:
        if self._latest is None:
            return
        now_s = time.monotonic()
        rate, line = self._course.rate(now_s), sparkline(self._course.changes(now_s))
        text = (
            f"{self._name}  {self._latest.count:,}  {rate:+,.1f}/s  {line}"
            f"  {self._latest.accuracy} as of {second(self._latest.as_of)}"
        )
        # As Text: a name in brackets is not markup.
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


async def _followed(
    service: ServiceFlags,
    name: str,
    shown: _Lines | _Screen,
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
    service: ServiceFlags, name: str, shown: _Lines | _Screen, count: int | None
) -> None:
    """Show counts; an outage after the first one is waited for."""
    left = count
    trouble = ""
    options, key = options_of(service), key_of(service.api_key_file)
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
        remark(f"{error.detail}; still trying")
    return error.detail
