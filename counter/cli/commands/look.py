"""Run ``counter watch``, ``top``, ``history`` and ``events``, which show how counts change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Final

from counter.cli.client import (
    DEFAULT_SERVICE,
    ServiceFlags,
    duration_us,
    exit_codes,
    fields_of,
    key_of,
    open_client,
    options_of,
    urls_of,
)
from counter.cli.commands.counters import Name
from counter.cli.terminal import (
    From,
    JsonLines,
    TimeZone,
    To,
    flag,
    instant,
    json_line,
    print_out,
    printable,
    remark,
    second,
    signed,
    span_of,
    table,
)
from counter.errors import StartupError
from counter.limits import SECOND
from counter.quantities import format_number
from counter_client import AsyncCounterClient, Count, CounterError, Event, HoldEvent, Point
from counter_client.errors import UnavailableError
from counter_client.tokens import checked_name

_BUSY_MAX: Final = 100


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
                print_out(json_line({**fields_of(each), "change": change}))
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
        remark(f"{printable(error.detail)}; still trying")
    return error.detail


def top(
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    limit: Annotated[int, flag("How many counters: 1 to 100", "NUMBER")] = 10,
    span: Annotated[str, flag("The span of time of the adds: 1s to 1m", "DURATION")] = "10s",
    json: JsonLines = False,
) -> None:
    """Show the counters with the most adds recently."""
    with exit_codes(service), open_client(service) as client:
        if not 1 <= limit <= _BUSY_MAX:
            raise StartupError(f"--limit: it is {limit}; it must be from 1 to {_BUSY_MAX}")
        found = client.busiest(limit, span=span)
        if json:
            print_out(json_line(asdict(found)))
            return
        span_s = format_number((found.as_of - found.since).total_seconds())
        period = f"{span_s} s until {second(found.as_of)}"
        rows = [(each.counter, f"{each.adds_per_s:.1f}", each.count) for each in found.counters]
        if rows:
            print_out(table(("COUNTER", "ADDS/S", "COUNT"), rows))
        print_out(f"adds a second, over {period}" if rows else f"nothing was added in the {period}")
        if not found.complete:
            remark("more counters changed than were examined: busier ones may be missing")


def history(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    start: From = None,
    end: To = None,
    step: Annotated[
        str | None,
        flag("The length of a step: 1m, or day, week or month [for about 60 steps]", "DURATION"),
    ] = None,
    tz: TimeZone = None,
    csv: Annotated[bool, flag("Print CSV")] = False,
    json: JsonLines = False,
) -> None:
    """Print the count at the end of each step."""
    with exit_codes(service), open_client(service) as client:
        if csv and json:
            raise StartupError("--csv and --json exclude each other: give one")
        since, until = span_of(start, end)
        points = list(client.history(name, since, until, step, tz=tz))
        if csv:
            print_out("\n".join(["time,count,delta", *map(_csv_line, points)]))
        elif json:
            for each in points:
                print_out(json_line(asdict(each)))
        elif not points:
            remark(f"nothing of {name} is rolled up in that time; counter get {name} has its count")
        else:
            print_out(_table(points))
            if until is None:
                remark(f"later adds are not rolled up yet; counter get {name} counts them")


def events(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    start: From = None,
    end: To = None,
    limit: Annotated[int, flag("The maximum number; 0 for all", "NUMBER")] = 100,
    json: JsonLines = False,
) -> None:
    """Print the adds and clears themselves, latest first."""
    with exit_codes(service), open_client(service) as client:
        if limit < 0:
            raise StartupError(f"--limit: it is {limit}; it must be 0, for all, or more")
        checked_name(name)
        since, until = span_of(start, end)
        found = client.events(name, since, until, limit=limit + 1 if limit else None)
        shown: list[Event] = []
        is_more = False
        for each in found:
            if limit and len(shown) == limit:
                is_more = True
                break
            shown.append(each)
            if json:
                print_out(json_line(_document(each)))
        if not json and shown:
            print_out(_events_table(shown))
        if is_more:
            last = instant(shown[-1].event_time)
            remark(f"there are earlier ones: --limit 0 for all, or --to {last} for those before")
        if not shown:
            remark(f"there are no events of {name} in that time, or they are no longer kept")


def _table(points: Sequence[Point]) -> str:
    """Return a table of *points*; steps without a change, between the first and the last one, are
    one line."""
    rows = [(second(each.time), each.count, signed(each.delta)) for each in points]
    head, *lines = table(("UP TO", "COUNT", "CHANGE"), rows).splitlines()
    shown = [head]
    inner = range(1, len(points) - 1)
    for is_empty, run in groupby(
        range(len(points)), key=lambda at: at in inner and points[at].delta == 0
    ):
        steps = list(run)
        if is_empty and len(steps) > 1:
            shown.append(f"… {len(steps)} steps without a change")
        else:
            shown += [lines[at] for at in steps]
    return "\n".join(shown)


def _csv_line(point: Point) -> str:
    return f"{instant(point.time)},{point.count},{point.delta}"


def token_of(event: Event) -> str:
    """Return the token of an event, in the form that ``counter token resolve`` reads."""
    return f"{event.event_id}@{instant(event.event_time)}"


def _document(event: Event) -> dict[str, object]:
    body: dict[str, object] = {
        "event_time": event.event_time,
        "event_id": event.event_id,
        "event_item_key": event.event_item_key,
    }
    what: dict[str, object] = {"clear": True} if event.clear else {"delta": event.delta}
    if event.refused is not None:
        what["refused"] = event.refused
    if event.hold is not None:
        what["hold"] = asdict(event.hold)
    return {**body, **what, "token": token_of(event)}


def _events_table(shown: Sequence[Event]) -> str:
    """Return a table of *shown*, with marks after tokens: what a hold reserves and how it ends; an
    item of an atomic add cannot be cancelled by itself, and an add that was refused counts 0."""
    changes = ["clear" if each.clear else signed(each.delta) for each in shown]
    marks = [
        _hold_mark(each.hold)
        + ("  atomic" if each.event_item_key and each.hold is None else "")
        + ("" if each.refused is None else f"  refused {signed(each.refused['delta'])}")
        for each in shown
    ]
    rows = [
        (second(event.event_time), change, token_of(event) + mark)
        for event, change, mark in zip(shown, changes, marks, strict=True)
    ]
    return table(("TIME", "CHANGE", "TOKEN"), rows)


def _hold_mark(hold: HoldEvent | None) -> str:
    if hold is None:
        return ""
    return f"  {'hold' if hold.state == 'begun' else hold.state} {signed(hold.amount)}"
