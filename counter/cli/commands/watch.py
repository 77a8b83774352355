"""Run ``counter watch`` and ``counter top``, which show how counts change now."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Final

from rich.live import Live
from rich.text import Text

from counter.cli.client import (
    DEFAULT_SERVICE,
    ServiceFlags,
    duration_us,
    exit_codes,
    in_words,
    key_of,
    open_client,
    options_of,
    urls_of,
)
from counter.cli.commands.counters import Name
from counter.cli.progress import Screen, progress
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

_ADDS: Final = "adds"
_COUNT: Final = "count"
_BUSY_MAX: Final = 100
#: Counters that are read to find the highest; reading more must be requested.
_COUNTERS_MAX: Final = 100_000


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
    """Print a line for each change of a count."""
    with exit_codes(service):
        lasting_s = None if lasting is None else duration_us("for", lasting) / SECOND
        if count is not None and count < 1:
            raise StartupError(f"--count: it is {count}; it must be 1 or more")
        with suppress(TimeoutError):
            asyncio.run(_print_changes(service, name, count, lasting_s, json=json))


async def _print_changes(
    service: ServiceFlags, name: str, left: int | None, lasting_s: float | None, *, json: bool
) -> None:
    """Print the first count, and each that differs from the one before, until *left* are printed.

    Raises TimeoutError after *lasting_s*, and the errors of :func:`_counts`.
    """
    before: int | None = None
    async with asyncio.timeout(lasting_s), aclosing(_counts(service, name)) as counts:
        async for each in counts:
            change = 0 if before is None else each.count - before
            if before is not None and not change:
                continue
            before = each.count
            if json:
                print_out(json_line({**asdict(each), "change": change}))
            else:
                print_out(f"{instant(each.as_of)}  {each.count}  {signed(change)}")
            if left is not None:
                left -= 1
                if left == 0:
                    return


async def _counts(service: ServiceFlags, name: str) -> AsyncGenerator[Count]:
    """Yield the counts of *name* as the service sends them; wait for the end of an outage after
    the first one.

    Raises the CounterError of a permanent failure, or if the service cannot be reached at first.
    """
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
                        yield update
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
    with exit_codes(service), open_client(service) as client:
        _check_top(limit, by, read)
        pause_s = duration_us("every", every) / SECOND
        if by == _COUNT:
            if live:
                raise StartupError("--live: every counter would be read at each refresh; omit it")
            _print_highest(client, limit, read, json=json)
        elif not live:
            _print_busiest(client.busiest(limit, span=span), json=json)
        elif json or not (console := Screen()).is_terminal:
            while True:
                _print_busiest(client.busiest(limit, span=span), json=json)
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


def _print_busiest(found: Busiest, *, json: bool) -> None:
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


def _print_highest(client: CounterClient, limit: int, read: int, *, json: bool) -> None:
    """Print the counters with the highest counts of those that are read."""
    done = 0
    with progress("counters", read or None) as bar:

        def seen() -> Iterator[Count]:
            nonlocal done
            for each in islice(counts, read or None):
                done += 1
                bar.advance(1)
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
