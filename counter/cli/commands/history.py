"""Run ``counter history`` and ``counter events``, which show a counter's past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from counter.cli.client import DEFAULT_SERVICE, ServiceFlags, exit_codes, open_client
from counter.cli.commands.counters import Name
from counter.cli.terminal import (
    JsonLines,
    flag,
    instant,
    json_line,
    moment_of,
    print_out,
    remark,
    second,
    signed,
    table,
)
from counter.errors import StartupError
from counter_client import Event, Point
from counter_client.tokens import checked_name

_From = Annotated[
    str | None,
    flag("The start: an instant, or how long ago, like 24h", "TIME", name="--from"),
]
_To = Annotated[str | None, flag("The end, exclusive [now]", "TIME", name="--to")]


def history(
    name: Name,
    /,
    service: ServiceFlags = DEFAULT_SERVICE,
    *,
    start: _From = None,
    end: _To = None,
    step: Annotated[
        str | None, flag("The length of a step: 1m [for about 60 steps]", "DURATION")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Print the count at the end of each step."""
    with exit_codes(service), open_client(service) as client:
        since, until = _span(start, end)
        points = list(client.history(name, since, until, step))
        if json:
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
    start: _From = None,
    end: _To = None,
    limit: Annotated[int, flag("The maximum number; 0 for all", "NUMBER")] = 100,
    json: JsonLines = False,
) -> None:
    """Print the adds and clears themselves, latest first."""
    with exit_codes(service), open_client(service) as client:
        if limit < 0:
            raise StartupError(f"--limit: it is {limit}; it must be 0, for all, or more")
        checked_name(name)
        since, until = _span(start, end)
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


def _span(start: str | None, end: str | None) -> tuple[datetime | None, datetime | None]:
    now = datetime.now(UTC)
    return moment_of("from", start, now), moment_of("to", end, now)


def _table(points: Sequence[Point]) -> str:
    """Return a table of *points*: the first and the last one, and those with a change."""
    ends = (points[0], points[-1])
    rows = [
        (second(each.time), each.count, signed(each.delta))
        for each in points
        if each.delta or each in ends
    ]
    return table(("UP TO", "COUNT", "CHANGE"), rows)


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
    return {**body, **what, "token": token_of(event)}


def _events_table(shown: Sequence[Event]) -> str:
    changes = ["clear" if each.clear else signed(each.delta) for each in shown]
    rows = [
        (second(e.event_time), change, token_of(e))
        for e, change in zip(shown, changes, strict=True)
    ]
    return table(("TIME", "CHANGE", "TOKEN"), rows)
