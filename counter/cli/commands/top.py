"""Run ``counter top``, which shows the busiest counters, or the highest."""

from __future__ import annotations

import heapq
import time
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Final

from rich.live import Live
from rich.text import Text

from counter.cli.client import DEFAULT_SERVICE, ServiceFlags, duration_us, ended, opened
from counter.cli.drawing import Screen, progress
from counter.cli.terminal import JsonLines, flag, json_line, print_out, remark, second, table
from counter.errors import StartupError
from counter.limits import BATCH_ITEMS_MAX, SECOND
from counter_client import Busiest, CounterClient

_ADDS: Final = "adds"
_COUNT: Final = "count"
_BUSY_MAX: Final = 100
#: Counters that are read to find the highest; reading more must be requested.
_COUNTERS_MAX: Final = 100_000


def top(
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    limit: Annotated[int, flag("How many counters: 1 to 100")] = 10,
    by: Annotated[
        str,
        flag("adds (per second, recently), or count (reads every counter)"),
    ] = _ADDS,
    span: Annotated[str, flag("The span of time of the adds: 1s to 1m")] = "10s",
    read: Annotated[
        int, flag("With --by count: the maximum of counters to read; 0 for all")
    ] = _COUNTERS_MAX,
    live: Annotated[bool, flag("Refresh until Ctrl-C")] = False,
    every: Annotated[str, flag("With --live: the refresh interval")] = "2s",
    json: JsonLines = False,
) -> None:
    """Show the busiest counters."""
    with ended(service), opened(service) as client:
        _check(limit, by, read)
        pause_s = duration_us("every", every) / SECOND
        if by == _COUNT:
            if live:
                raise StartupError("--live: every counter would be read at each refresh; omit it")
            _highest(client, limit, read, json=json)
        elif not live:
            _tell(client.busiest(limit, span=span), json=json)
        elif json or not (console := Screen()).is_terminal:
            while True:
                _tell(client.busiest(limit, span=span), json=json)
                time.sleep(pause_s)
        else:
            with Live(console=console, auto_refresh=False, screen=True) as screen:
                while True:
                    shown = _shown(client.busiest(limit, span=span))
                    screen.update(Text(shown, no_wrap=True), refresh=True)
                    time.sleep(pause_s)


def _check(limit: int, by: str, read: int) -> None:
    """Raises StartupError for a value that is out of bounds."""
    if not 1 <= limit <= _BUSY_MAX:
        raise StartupError(f"--limit: it is {limit}; it must be from 1 to {_BUSY_MAX}")
    if by not in (_ADDS, _COUNT):
        raise StartupError(f"--by: {by[:40]!r} is neither {_ADDS} nor {_COUNT}")
    if read < 0:
        raise StartupError(f"--read: it is {read}; it must be 0, for all, or more")


def _tell(found: Busiest, *, json: bool) -> None:
    if json:
        print_out(json_line(asdict(found)))
        return
    print_out(_shown(found))
    if not found.complete:
        remark("more counters changed than were examined: busier ones may be missing")


def _shown(found: Busiest) -> str:
    span_s = (found.as_of - found.since).total_seconds()
    period = f"adds a second, over {span_s:.3g} s until {second(found.as_of)}"
    if not found.counters:
        return f"nothing was added in the {span_s:.3g} s until {second(found.as_of)}"
    rows = [(each.counter, f"{each.adds_per_s:.1f}", each.count) for each in found.counters]
    return f"{table(('COUNTER', 'ADDS/S', 'COUNT'), rows)}\n{period}"


def _highest(client: CounterClient, limit: int, read: int, *, json: bool) -> None:
    """Return the counters with the highest counts of those that are read."""
    names = client.counters()
    highest: list[tuple[int, str]] = []
    done = 0
    with progress("counters", read or None) as bar:
        while some := list(
            islice(names, min(BATCH_ITEMS_MAX, read - done) if read else BATCH_ITEMS_MAX)
        ):
            counts = client.get_many(some)
            found = [(each.count, each.counter) for each in counts]
            highest = heapq.nlargest(limit, [*highest, *found])
            done += len(some)
            bar.go_on(len(some))
    is_whole = not read or done < read or next(names, None) is None
    if json:
        counters = [{"counter": name, "count": count} for count, name in highest]
        print_out(json_line({"complete": is_whole, "read": done, "counters": counters}))
    else:
        print_out(table(("COUNTER", "COUNT"), [(name, count) for count, name in highest]))
    if not is_whole:
        remark(f"only the first {done} counters by name were read: --read 0 for all of them")
